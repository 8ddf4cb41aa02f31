"""`ngram`: drafts what followed the same tokens before, in the prompt or the output.

Whenever the last few tokens were seen before, what came after them may come again: in code, in
quotations, in summaries of a text. The continuations of several matches are merged into one tree,
weighted by how long the match is, how often they occur, and how recent they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspec.config import DraftConfig
from pyspec.drafter import DraftContext, Drafter
from pyspec.native.ngram import SuffixIndex
from pyspec.tree import DraftTree

if TYPE_CHECKING:
    from pyspec.native import NativeEngine


class NgramDrafter(Drafter):
    """A tree of the continuations of the longest matches of a sequence's suffix."""

    name = "ngram"
    auto = True
    free = True
    auto_limits = (10, 4)

    def __init__(self, native: NativeEngine, config: DraftConfig) -> None:
        super().__init__(native, config)
        self._indices: dict[int, SuffixIndex] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [
            self._index(one.slot).draft(one.tokens, self.depth_of(one), one.max_nodes)
            for one in contexts
        ]

    def _index(self, slot: int) -> SuffixIndex:
        index = self._indices.get(slot)
        if index is None:
            index = self._indices[slot] = SuffixIndex()
        return index

    def forget(self, slot: int) -> None:
        index = self._indices.pop(slot, None)
        if index is not None:
            index.close()

    def close(self) -> None:
        for slot in list(self._indices):
            self.forget(slot)
