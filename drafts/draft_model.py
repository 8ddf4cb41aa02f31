"""`draft-model`: drafts with another, smaller model of the same vocabulary.

It is an engine of its own, verified and committed like the target: the tree that it has read is
moved along the path that the target accepted, so what was read for drafting is not read again. This
works whatever the drafter is, a hybrid too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspec.config import DraftConfig
from pyspec.cost import choose_threads, follow, quickest
from pyspec.drafter import DraftContext, Drafter
from pyspec.errors import PyspecError
from pyspec.model_file import ModelFile, vocabulary_difference
from pyspec.tree import DraftTree, TreeBuilder

if TYPE_CHECKING:
    from pyspec.native import NativeEngine

_NOT_A_MODEL = "dflash"


class DraftModelDrafter(Drafter):
    """`depth` levels, `top_k` candidates of each of the `width` nodes that are expanded a level."""

    name = "draft-model"
    auto = True
    auto_limits = (6, 2)

    def __init__(self, native: NativeEngine, config: DraftConfig) -> None:
        super().__init__(native, config)
        assert config.model is not None
        info = native.info
        n_slots = native.config.n_slots
        own = replace(
            native.config,
            n_ctx=info.n_ctx,
            cache_type_k=config.cache_type_k or native.config.cache_type_k,
            cache_type_v=config.cache_type_v or native.config.cache_type_v,
        )
        self._model = type(native).open(
            config.model,
            own,
            max_nodes=min(1 + self.limits.depth * self.limits.width, 64),
        )
        if native.config.n_threads == 0:
            choose_threads(self._model)
        self._width = self.limits.width if self._model.info.tree else 1
        self._states = [_State() for _ in range(n_slots)]

    @classmethod
    def missing(cls, file: ModelFile, config: DraftConfig) -> str | None:
        if config.model is None:
            return "it needs a smaller model: --draft-model FILE"
        try:
            drafter = ModelFile.read(Path(config.model))
        except PyspecError as error:
            return str(error)
        if drafter.arch == _NOT_A_MODEL:
            return f"{drafter.path} is a DFlash drafter, not a model: use --draft dflash"
        return vocabulary_difference(file, drafter)

    def warm_up(self) -> None:
        root = max(self.native.info.token_bos, 0)
        self.pass_ms = quickest(lambda: self._model.verify([(0, [root], [-1])]))
        self._model.reset(0)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        depths = [
            min(self.depth_of(context), self._model.info.n_ctx - len(context.tokens))
            for context in contexts
        ]
        growths = {}
        for context, depth in zip(contexts, depths, strict=True):
            if depth > 0:
                self._catch_up(context)
                growths[context.slot] = _Growth(context, depth)
        began, passes = time.perf_counter(), 0
        while growing := [growth for growth in growths.values() if growth.growing]:
            self._model.verify(
                [
                    (growth.context.slot, growth.read_tokens, growth.read_parents)
                    for growth in growing
                ]
            )
            for growth in growing:
                growth.expand(self._model, self.limits.top_k, self._width)
            passes += 1
        if passes:
            ms = 1e3 * (time.perf_counter() - began) / passes
            self.pass_ms = follow(self.pass_ms, ms)
        for slot, growth in growths.items():
            self._states[slot].tree = (growth.read_tokens, growth.read_parents)
        return [
            growths[context.slot].tree.best(context.max_nodes)
            if context.slot in growths
            else DraftTree.root(context.root)
            for context in contexts
        ]

    def _catch_up(self, context: DraftContext) -> None:
        """Brings the drafter's sequence to the target's: along its own tree as far as that goes."""
        state, slot = self._states[context.slot], context.slot
        tokens = context.tokens
        length = len(state.tokens)
        if length >= len(tokens) or (length and tokens[length - 1] != state.tokens[-1]):
            self.forget(slot)
            length = 0
        new = list(tokens[length:-1])
        if path := state.path_of(new):
            self._model.commit(slot, path)
            state.tokens.extend(new[: len(path)])
            new = new[len(path) :]
        state.tree = None
        if new:
            self._model.prefill(slot, new)
            state.tokens.extend(new)

    def forget(self, slot: int) -> None:
        self._model.reset(slot)
        self._states[slot] = _State()

    def close(self) -> None:
        self._model.close()


class _State:
    """What the drafter's engine holds of a slot: committed tokens, and a tree read since."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.tree: tuple[list[int], list[int]] | None = None

    def path_of(self, new: Sequence[int]) -> list[int]:
        """The nodes of the tree that carry the next tokens, from the root on."""
        if self.tree is None or not new or self.tree[0][0] != new[0]:
            return []
        tokens, parents = self.tree
        path = [0]
        for token in new[1:]:
            node = next(
                (
                    node
                    for node in range(path[-1] + 1, len(tokens))
                    if parents[node] == path[-1] and tokens[node] == token
                ),
                None,
            )
            if node is None:
                break
            path.append(node)
        return path


class _Growth:
    """A sequence's tree while it grows: what was read, and the candidates of what was read."""

    def __init__(self, context: DraftContext, depth: int) -> None:
        self.context = context
        self.depth = depth
        self.tree = TreeBuilder(context.root)
        self.read_tokens = [context.root]
        self.read_parents = [-1]
        self.growing = True
        self._nodes = [0]  # node of the tree for every node that was read
        self._level = [0]  # of those that were read last
        self._scores = [0.0]  # log-probability of the path of every node of the tree

    def expand(self, model: NativeEngine, top_k: int, width: int) -> None:
        """Takes the candidates of the level that was read, and puts the best into the next one."""
        found: list[tuple[float, int, int]] = []  # log-probability of the path, node, read parent
        for read in self._level:
            node = self._nodes[read]
            tokens, log_probs = model.top(self.context.slot, read, top_k)
            for token, log_prob in zip(tokens, log_probs, strict=True):
                child = self.tree.add(node, token, log_prob)
                self._scores.append(self._scores[node] + log_prob)
                found.append((self._scores[child], child, read))
        deepest = self.tree.depths[-1]
        least = math.log(self.context.min_prob) if self.context.min_prob > 0 else -math.inf
        found.sort(key=lambda one: -one[0])
        chosen = [one for one in found[:width] if one[0] >= least]
        self.growing = deepest < self.depth and bool(chosen)
        if not self.growing:
            return
        self._level = []
        for _, node, parent in chosen:
            self._level.append(len(self.read_tokens))
            self.read_tokens.append(self.tree.tokens[node])
            self.read_parents.append(parent)
            self._nodes.append(node)
