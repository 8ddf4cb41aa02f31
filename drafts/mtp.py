"""`mtp`: drafts with the model's own multi-token-prediction block.

The block predicts one more token from the target's hidden state, and is chained on its own to look
further ahead. Its runners-up at every depth come at no extra pass and become siblings of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspec.config import DraftConfig
from pyspec.drafter import DraftContext, Drafter
from pyspec.model_file import ModelFile
from pyspec.tree import DraftTree


class MtpDrafter(Drafter):
    """A chain of `depth` drafts; where trees are verified, `top_k` candidates at every depth."""

    name = "mtp"
    uses_mtp = True
    auto_rank = 10

    def __init__(self, native: Any, config: DraftConfig) -> None:
        super().__init__(native, config)
        self._top_k = config.top_k if native.info.tree else 1

    @classmethod
    def missing(cls, file: ModelFile) -> str | None:
        return None if file.mtp_layers else "the file has no MTP block"

    @classmethod
    def max_nodes(cls, config: DraftConfig) -> int:
        return min(config.nodes, 1 + config.depth * config.top_k)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        depths = [self._depth(context) for context in contexts]
        able = [context for context, depth in zip(contexts, depths, strict=True) if depth]
        if not able:
            return [DraftTree.root(context.root) for context in contexts]
        tokens, log_probs = self.native.mtp_draft(
            [context.slot for context in able],
            [context.root for context in able],
            max(depths),
            self._top_k,
        )
        rows = zip(tokens, log_probs, strict=True)
        return [
            self._tree(context, depth, *next(rows)) if depth else DraftTree.root(context.root)
            for context, depth in zip(contexts, depths, strict=True)
        ]

    def _depth(self, context: DraftContext) -> int:
        return min(self.config.depth, context.max_depth, context.max_nodes - 1)

    def _tree(
        self,
        context: DraftContext,
        depth: int,
        tokens: NDArray[np.int32],
        log_probs: NDArray[np.float32],
    ) -> DraftTree:
        """The tree of one sequence's candidates, [at least depth, top_k] each."""
        if self._top_k == 1:
            chain = [context.root, *tokens[:depth, 0].tolist()]
            return DraftTree.chain(chain, [0.0, *log_probs[:depth, 0].tolist()])
        return DraftTree.from_siblings(
            context.root, tokens[:depth], log_probs[:depth], context.max_nodes
        )
