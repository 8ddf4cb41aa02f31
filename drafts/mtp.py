"""`mtp`: drafts with the model's own multi-token-prediction block.

The block predicts one more token from the target's hidden state, and is chained on its own to look
further ahead. Its runners-up at every depth come at no extra pass and become siblings of the chain;
with a width above 1, the most probable of them are expanded, too, in the same passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspec.config import DraftConfig
from pyspec.cost import follow, quickest
from pyspec.draft_head import DraftHead
from pyspec.drafter import DraftContext, Drafter
from pyspec.model_file import ModelFile
from pyspec.tree import DraftTree, TreeBuilder

if TYPE_CHECKING:
    from pyspec.native import NativeEngine


class MtpDrafter(Drafter):
    """`depth` levels of drafts; where trees are verified, `top_k` candidates of an expanded node."""

    name = "mtp"
    uses_mtp = True
    auto = True
    auto_limits = (6, 2)

    def __init__(self, native: NativeEngine, config: DraftConfig) -> None:
        super().__init__(native, config)
        self._top_k = self.limits.top_k if native.info.tree else 1
        self._width = self.limits.width if native.info.tree else 1
        self._head = DraftHead.open(native, config)

    @classmethod
    def missing(cls, file: ModelFile, config: DraftConfig) -> str | None:
        return None if file.mtp_layers else "the file has no MTP block"

    @classmethod
    def max_nodes(cls, config: DraftConfig) -> int:
        limits = cls.limits_of(config)
        return min(limits.nodes, 1 + limits.depth * limits.width * limits.top_k)

    def warm_up(self) -> None:
        root, depth = max(self.native.info.token_bos, 0), self.limits.depth
        self.pass_ms = (
            quickest(lambda: self.native.mtp_draft([0], [root], depth, self._top_k)) / depth
        )

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        depths = [self.depth_of(context) for context in contexts]
        able = [context for context, depth in zip(contexts, depths, strict=True) if depth]
        if not able:
            return [DraftTree.root(context.root) for context in contexts]
        if self._head is not None:
            for context in able:
                self._head.follow(context.slot, context.tokens)
        began = time.perf_counter()
        drafts = self.native.mtp_draft(
            [context.slot for context in able],
            [context.root for context in able],
            max(depths),
            self._top_k,
            width=self._width,
            min_prob=min(context.min_prob for context in able),
        )
        ms = 1e3 * (time.perf_counter() - began)
        levels, *arrays = (array.tolist() for array in drafts)
        self.pass_ms = follow(self.pass_ms, ms / max(levels))
        rows = iter(zip(levels, *arrays, strict=True))
        return [
            _tree(context, depth, *next(rows)) if depth else DraftTree.root(context.root)
            for context, depth in zip(contexts, depths, strict=True)
        ]

    def forget(self, slot: int) -> None:
        if self._head is not None:
            self._head.forget(slot)


def _tree(
    context: DraftContext,
    depth: int,
    levels: int,
    parents: list[list[int]],
    tokens: list[list[list[int]]],
    log_probs: list[list[list[float]]],
) -> DraftTree:
    """The tree of one sequence's candidates: every level hangs below the expanded of the last."""
    tree = TreeBuilder(context.root)
    add = tree.add
    above: list[int] = []  # node of every candidate of the level before
    for level in range(min(levels, depth)):
        here = []
        for parent, row, scores in zip(
            parents[level], tokens[level], log_probs[level], strict=True
        ):
            if parent < -1:
                here += [-1] * len(row)
                continue
            node = above[parent] if parent >= 0 else 0
            for token, log_prob in zip(row, scores, strict=True):
                here.append(add(node, token, log_prob) if log_prob > -math.inf else -1)
        above = here
    return tree.best(context.max_nodes)
