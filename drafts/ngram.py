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
from pyspec.native.pilot import Pilot
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
        self._pilots: dict[int, Pilot] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [
            self._pilot(one.slot).index.draft(one.tokens, self.depth_of(one), one.max_nodes)
            for one in contexts
        ]

    def pilot(self, slot: int) -> Pilot | None:
        # One that drafts in a way of its own cannot be stood for.
        return self._pilot(slot) if type(self).propose is NgramDrafter.propose else None

    def _pilot(self, slot: int) -> Pilot:
        found = self._pilots.get(slot)
        if found is None:
            found = Pilot(SuffixIndex(), self.limits.depth)
            self._pilots[slot] = found
        return found

    def forget(self, slot: int) -> None:
        found = self._pilots.pop(slot, None)
        if found is not None:
            found.index.close()

    def close(self) -> None:
        for slot in list(self._pilots):
            self.forget(slot)
