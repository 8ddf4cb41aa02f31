"""`SuffixIndex`: what followed the same tokens before, in one sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from pyspec.config import MAX_NODES
from pyspec.native.binding import Handle, check, ffi, lib
from pyspec.tree import DraftTree


def _release(handle: Handle) -> None:
    handle.free(lib.pyspec_ngram_close)


class SuffixIndex:
    """Where every run of 2, 3 and 5 tokens of a sequence occurred; constant time per new token.

    What it drafts is defined by `pyspec.reference.ngram`.
    """

    def __init__(self) -> None:
        out = ffi.new("pyspec_ngram **")
        check(lib.pyspec_ngram_open(out))
        self._handle = Handle(out[0], "suffix index")
        self._finalizer = weakref.finalize(self, _release, self._handle)
        self._known = 0
        self._last = -1  # of the tokens that are known
        self._nodes = [ffi.new("int32_t[]", MAX_NODES) for _ in range(3)]
        self._log_probs = ffi.new("float[]", MAX_NODES)

    def draft(self, tokens: Sequence[int], depth: int, max_nodes: int) -> DraftTree:
        """A tree behind the last of `tokens`.

        Args:
            tokens: The sequence, at least one token. One that has grown since the last call is read
                from there; one that was replaced is read anew.
            depth: Deepest node.
            max_nodes: Most nodes, the root included.
        """
        n_new, new = self.unread(tokens)
        count = lib.pyspec_ngram_draft(
            self._handle.pointer,
            n_new,
            new,
            min(depth, MAX_NODES),
            min(max_nodes, MAX_NODES),
            *self._nodes,
            self._log_probs,
        )
        check(count)
        self.has_read(len(tokens), tokens[-1])
        if count == 1:
            return DraftTree.root(tokens[-1])
        nodes, parents, depths = (ffi.unpack(array, count) for array in self._nodes)
        return DraftTree.trusted(nodes, parents, depths, ffi.unpack(self._log_probs, count))

    # ---- for native code that reads on its own ----

    @property
    def pointer(self) -> Any:
        """The native index."""
        return self._handle.pointer

    def unread(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """How many of `tokens` it has not read, and these.

        Until `has_read`, it counts as having read nothing: what fails halfway is read anew.
        """
        known = self._known
        if known > len(tokens) or (known and tokens[known - 1] != self._last):
            known = 0
        if known == 0:
            lib.pyspec_ngram_clear(self._handle.pointer)
        self._known = 0
        new = tokens[known:]
        return len(new), new if isinstance(new, list) else list(new)

    def has_read(self, n: int, last: int) -> None:
        """It holds a text of `n` tokens now, `last` at its end."""
        self._known, self._last = n, last

    def close(self) -> None:
        """Frees it. Safe to call twice."""
        self._finalizer()
