"""`dflash`: a block-diffusion drafter (DFlash, DSpark, DFlash2) in a file of its own.

One pass predicts a whole block behind the last token, from features of the target's layers. From
its candidates a tree is built best first, by the probability of the path, with the whole chain of
best candidates in it: DDTree. A drafter of marginals (DFlash) scores a position whatever stands
before it. DSpark and DFlash2 score it behind each candidate of the position before, so that their
branches agree with themselves; marginals cannot ("parallel tree drafting", arXiv 2606.18394).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyspec.config import DraftConfig, DraftLimits
from pyspec.draft_head import DraftHead
from pyspec.drafter import DraftContext, Drafter
from pyspec.errors import PyspecError
from pyspec.model_file import ModelFile, vocabulary_difference
from pyspec.tree import DraftTree, TreeBuilder

if TYPE_CHECKING:
    from gguf import ReaderTensor

    from pyspec.native import NativeEngine

ARCH = "dflash"
"""Architecture of a drafter's file."""

SUFFIX = "-dflash.gguf"
"""A drafter named after its target, ``model-dflash.gguf`` beside ``model.gguf``, is found."""

Candidate = tuple[int, float, int]
"""Token, log-probability behind what stands before it, and its number at its position."""

Candidates = Callable[[int, int], Sequence[Candidate]]
"""(position, number of the candidate before) to the candidates of a position, best first.

Before position 0 stands the root, whatever the number.
"""


class DflashDrafter(Drafter):
    """The tree of a DFlash drafter's block, or with ``--draft-top-k 1`` its chain."""

    name = "dflash"
    auto = True
    auto_limits = (15, 4)

    def __init__(self, native: NativeEngine, config: DraftConfig) -> None:
        super().__init__(native, config)
        assert config.model is not None
        self.info = native.dflash_open(config.model)
        self.limits = DraftLimits(
            min(self.limits.depth, self.info.max_depth),
            self.info.selector or self.limits.top_k,
            1,
            self.limits.nodes,
        )
        self._chain = self.limits.top_k == 1 or config.top_k == 1 or not native.info.tree
        self._markov = MarkovHead(config.model) if self.info.markov else None
        self._head = DraftHead.open(native, config)

    # ---- what it needs ----

    @classmethod
    def file_for(cls, file: ModelFile, config: DraftConfig) -> Path | None:
        """The drafter's file: the one that is named, or one beside the target."""
        if config.model is not None:
            return Path(config.model)
        sibling = file.path.with_name(file.path.stem + SUFFIX)
        return sibling if sibling.is_file() else None

    @classmethod
    def missing(cls, file: ModelFile, config: DraftConfig) -> str | None:
        path = cls.file_for(file, config)
        if path is None:
            return f"it needs a drafter: --draft-model FILE, or {file.path.stem}{SUFFIX} beside it"
        try:
            return _mismatch(file, ModelFile.read(path))
        except PyspecError as error:
            return str(error)

    @classmethod
    def configured(cls, file: ModelFile, config: DraftConfig) -> DraftConfig:
        return replace(config, model=str(cls.file_for(file, config)))

    # ---- drafting ----

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        able = [context for context in contexts if self.depth_of(context)]
        if not able:
            return [DraftTree.root(context.root) for context in contexts]
        if self._head is not None:
            for context in able:
                self._head.follow(context.slot, context.tokens)
        drafts = self.native.dflash_draft(
            [context.slot for context in able],
            [context.root for context in able],
            max(map(self.depth_of, able)),
            self.limits.top_k,
            pairs=self.info.selector > 0,
            confidence=self.info.confidence,
        )
        trees = {}
        for row, context in enumerate(able):
            tokens, log_probs = drafts.tokens[row], drafts.log_probs[row]
            sure = None if drafts.confidence is None else drafts.confidence[row]
            if drafts.pairs is not None:
                candidates = lattice_candidates(tokens, drafts.pairs[row])
            elif self._markov is not None:
                candidates = self._markov.candidates(context.root, tokens, log_probs, sure)
            else:
                candidates = marginal_candidates(tokens, log_probs)
            trees[context.slot] = self._tree(context, candidates)
        return [trees.get(one.slot) or DraftTree.root(one.root) for one in contexts]

    def listen(self, on: bool) -> None:
        self.native.dflash_listen(on)

    def forget(self, slot: int) -> None:
        if self._head is not None:
            self._head.forget(slot)

    def _tree(self, context: DraftContext, candidates: Candidates) -> DraftTree:
        depth, nodes = self.depth_of(context), min(context.max_nodes, self.limits.nodes)
        if self._chain:
            nodes = min(nodes, depth + 1)
        return best_first_tree(context.root, candidates, depth, nodes)


class DdtreeDrafter(DflashDrafter):
    """The same under the name of its tree."""

    name = "ddtree"
    auto = False


def best_first_tree(root: int, candidates: Candidates, depth: int, nodes: int) -> DraftTree:
    """The tree of the most probable paths, the whole chain of best candidates among them (DDTree).

    Args:
        root: The last emitted token.
        candidates: Scores of a position; see `Candidates`.
        depth: Positions.
        nodes: Most nodes of the tree, the root included.
    """
    tree = TreeBuilder(root)
    # -log-probability of the path, position, node above, number of its candidate, rank
    heap: list[tuple[float, int, int, int, int]] = []

    def push(score: float, at: int, above: int, number: int, rank: int) -> None:
        found = candidates(at, number)
        if rank < len(found) and found[rank][1] > -math.inf:
            heapq.heappush(heap, (-(score + found[rank][1]), at, above, number, rank))

    score, above, number = 0.0, 0, 0
    for at in range(min(depth, nodes - 1)):  # the chain, with the siblings of its nodes waiting
        token, log_prob, following = candidates(at, number)[0]
        push(score, at, above, number, 1)
        above = tree.add(above, token, log_prob)
        score += log_prob
        number = following
    while heap and len(tree) < nodes:
        negative, at, above, number, rank = heapq.heappop(heap)
        token, log_prob, following = candidates(at, number)[rank]
        known = len(tree)
        node = tree.add(above, token, log_prob)
        push(-negative - log_prob, at, above, number, rank + 1)
        if at + 1 < depth and len(tree) > known:
            push(-negative, at + 1, node, following, 0)
    return tree.tree()


def marginal_candidates(tokens: NDArray[np.int32], log_probs: NDArray[np.float32]) -> Candidates:
    """Candidates that do not depend on what stands before them.

    Args:
        tokens: int32 [depth, top_k], best first.
        log_probs: float32 [depth, top_k].
    """
    numbers = range(tokens.shape[1])
    rows = [
        list(zip(*row, numbers, strict=True))
        for row in zip(tokens.tolist(), log_probs.tolist(), strict=True)
    ]
    return lambda at, number: rows[at]


def lattice_candidates(tokens: NDArray[np.int32], pairs: NDArray[np.float32]) -> Candidates:
    """Candidates of a selector's lattice (DFlash2), scored behind each candidate before.

    Args:
        tokens: int32 [depth, k].
        pairs: float32 [depth, k, k]; scores of candidate c behind candidate p at [p, c].
    """
    log_probs = pairs - _log_sum_exp(pairs)

    @cache
    def candidates(at: int, number: int) -> list[Candidate]:
        return _ranked(tokens[at], log_probs[at, number])

    return candidates


class MarkovHead:
    """The Markov head of a DSpark file: what a predecessor adds to the logits of a token.

    ``bias(previous, token) = w2[token] . w1[previous]``; the rows that are needed are read from the
    file.
    """

    def __init__(self, path: str) -> None:
        from gguf import GGUFReader

        tensors = {one.name: one for one in GGUFReader(path).tensors}
        self._w1, self._w2 = (tensors[f"markov_w{i}.weight"] for i in (1, 2))

    def candidates(
        self,
        root: int,
        tokens: NDArray[np.int32],
        log_probs: NDArray[np.float32],
        confidence: NDArray[np.float32] | None = None,
    ) -> Candidates:
        """Candidates behind each candidate before.

        The drafter scores a position behind the best candidate before it. Behind another one p the
        logit of c is ``logit(c) - bias(best, c) + bias(p, c)``; what is no candidate keeps its
        share of the probability.

        Args:
            root: The last emitted token.
            tokens: int32 [depth, top_k], best first.
            log_probs: float32 [depth, top_k], behind the best chain.
            confidence: float32 [depth]; probability that the best chain is right so far and here.
        """

        @cache
        def candidates(at: int, number: int) -> list[Candidate]:
            scores = log_probs[at].astype(np.float64)
            if at > 0 and number > 0:
                best, other = (self._row(self._w1, int(tokens[at - 1, i])) for i in (0, number))
                rest = max(1.0 - float(np.exp(scores).sum()), 1e-9)
                change = np.stack([self._row(self._w2, int(t)) for t in tokens[at]]) @ (
                    other - best
                )
                scores = scores + change
                scores -= np.log(rest + np.exp(scores).sum())
            elif confidence is not None:
                scores = _with_confidence(scores, float(confidence[at]))
            return _ranked(tokens[at], scores)

        return candidates

    def _row(self, matrix: ReaderTensor, row: int) -> NDArray[np.float32]:
        from gguf import dequantize

        values: NDArray[np.float32] = dequantize(matrix.data[row], matrix.tensor_type)
        return values


def _with_confidence(scores: NDArray[np.float64], sure: float) -> NDArray[np.float64]:
    """The best candidate with the probability `sure`; the others share the rest as before."""
    sure = min(max(sure, 1e-4), 1.0 - 1e-4)
    rest = max(1.0 - math.exp(scores[0]), 1e-9)
    out = scores + math.log((1.0 - sure) / rest)
    out[0] = math.log(sure)
    return out


def _ranked(tokens: NDArray[np.int32], scores: NDArray) -> list[Candidate]:
    order = np.argsort(-scores, kind="stable").tolist()
    return [(int(tokens[c]), float(scores[c]), c) for c in order]


def _log_sum_exp(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    most = scores.max(-1, keepdims=True)
    out: NDArray[np.float32] = most + np.log(np.exp(scores - most).sum(-1, keepdims=True))
    return out


def _mismatch(target: ModelFile, drafter: ModelFile) -> str | None:
    """Why `drafter` cannot draft for `target`, or None."""
    if drafter.arch != ARCH:
        return f"{drafter.path} is no DFlash drafter: its architecture is {drafter.arch}"
    width, own = (int(file.get("embedding_length", 0)) for file in (drafter, target))
    if width != own:
        return f"{drafter.path} was made for a hidden size of {width}, the target has {own}"
    layers = drafter.get("target_layers") or []
    n_layers = int(target.get("block_count", 0)) - target.mtp_layers
    if beyond := [layer for layer in layers if not 0 <= int(layer) < n_layers]:
        return f"{drafter.path} reads layer {beyond[0]} of its target, which has {n_layers}"
    return vocabulary_difference(target, drafter)
