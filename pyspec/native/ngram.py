"""`SuffixIndex`: what followed the same tokens before, in one sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

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
        known, n = self._known, len(tokens)
        if known > n or (known and tokens[known - 1] != self._last):
            known = 0
        if known == 0:
            lib.pyspec_ngram_clear(self._handle.pointer)
        self._known = 0  # unless the call succeeds
        new = tokens[known:]
        count = lib.pyspec_ngram_draft(
            self._handle.pointer,
            n - known,
            new if isinstance(new, list) else list(new),
            min(depth, MAX_NODES),
            min(max_nodes, MAX_NODES),
            *self._nodes,
            self._log_probs,
        )
        check(count)
        self._known, self._last = n, tokens[-1]
        if count == 1:
            return DraftTree.root(tokens[-1])
        nodes, parents, depths = (ffi.unpack(array, count) for array in self._nodes)
        return DraftTree.trusted(nodes, parents, depths, ffi.unpack(self._log_probs, count))

    def close(self) -> None:
        """Frees it. Safe to call twice."""
        self._finalizer()
