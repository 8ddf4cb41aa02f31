"""`Calibration`: how probable a drafted node is, learned from what the target accepted.

Drafters are over- or underconfident, each in its own way and with every text. For nodes alike (same
drafters asked, same sources, depth, rank and log-probability, in classes) the share that was right
is counted. Counts fade, so that the newest text matters most. A request starts from what all requests have
taught, and those from the drafter's own belief.

Native code counts; `pyspec.reference.calibration` defines what.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspec.errors import ArgumentError
from pyspec.native.binding import Handle, check, ffi, last_failure, lib

if TYPE_CHECKING:
    from pyspec.tree import DraftTree

_CLASSES = 60  # of nodes that the same drafters proposed

NO_CLASS = -1
"""In place of the class of a node that was not valued."""


def _release(handle: Handle) -> None:
    handle.free(lib.pyspec_calibration_close)


class Calibration:
    """Acceptance by class of node, for all requests together and for each slot's own.

    Classes are numbers.
    """

    def __init__(self) -> None:
        out = ffi.new("pyspec_calibration **")
        check(lib.pyspec_calibration_open(out))
        self._handle = Handle(out[0], "calibration")
        self._finalizer = weakref.finalize(self, _release, self._handle)
        self._firsts: dict[tuple[frozenset[str], frozenset[str]], int] = {}

    @property
    def pointer(self) -> Any:
        """The native calibration."""
        return self._handle.pointer

    def first_class(self, asked: frozenset[str], sources: frozenset[str]) -> int:
        """The first class of nodes that `sources` proposed when `asked` were asked.

        That one of those who were asked did not propose a node speaks against it.
        """
        first = self._firsts.get((asked, sources))
        if first is None:
            first = self._firsts[asked, sources] = _CLASSES * len(self._firsts)
        return first

    def values(
        self, slot: int, tree: DraftTree, asked: frozenset[str], floor: float
    ) -> tuple[list[float], list[int]]:
        """The probability of acceptance of every node, and the class of every node.

        Args:
            slot: The sequence.
            tree: What was proposed, with its sources.
            asked: Names of the drafters that were asked.
            floor: Behind a node less probable than this, nodes have no class and are worth 0.
        """
        n = len(tree.token_list)
        values, classes = ffi.new("double[]", n), ffi.new("int32_t[]", n)
        check(
            lib.pyspec_calibration_values(
                self._handle.pointer,
                slot,
                n,
                tree.parent_list,
                tree.depth_list,
                tree.log_prob_list,
                self._first_classes(asked, tree.sources, n),
                floor,
                values,
                classes,
            )
        )
        return ffi.unpack(values, n), ffi.unpack(classes, n)

    def _first_classes(
        self, asked: frozenset[str], sources: tuple[frozenset[str], ...], n: int
    ) -> list[int]:
        firsts, last, first = [0], None, 0
        for mark in (sources or (frozenset(),) * n)[1:]:
            if mark is not last:
                last, first = mark, self.first_class(asked, mark)
            firsts.append(first)
        return firsts

    def probability(self, slot: int, kind: int, log_prob: float) -> float:
        """Probability that a node of class `kind` is right, given that its parent is."""
        found = lib.pyspec_calibration_probability(self._handle.pointer, slot, kind, log_prob)
        if found < 0.0:
            raise last_failure()
        return found

    def observe(self, slot: int, kind: int, hit: bool) -> None:
        """Counts a node whose parent was accepted."""
        check(lib.pyspec_calibration_observe(self._handle.pointer, slot, kind, hit))

    def learn(
        self,
        slot: int,
        tree: DraftTree,
        classes: Sequence[int],
        path: Sequence[int],
        drawn: Sequence[int],
    ) -> None:
        """Counts the children of every node of a path: one of them was right, or none.

        Children that were proposed but not verified count as well: what they had to be is known.

        Args:
            slot: The sequence.
            tree: What was proposed.
            classes: Of its nodes, or of as many of the first ones as are to count.
            path: Nodes of `tree`, from the root.
            drawn: The token that was drawn behind each of them.
        """
        if len(classes) > len(tree) or len(drawn) != len(path):
            raise ArgumentError(
                f"{len(classes)} classes of {len(tree)} nodes, {len(drawn)} tokens drawn at {len(path)}"
            )
        check(
            lib.pyspec_calibration_learn(
                self._handle.pointer,
                slot,
                len(classes),
                tree.token_list,
                tree.parent_list,
                classes,
                len(path),
                path,
                drawn,
            )
        )

    def forget(self, slot: int) -> None:
        """Drops what a slot's request has taught; what all have taught stays."""
        lib.pyspec_calibration_forget(self._handle.pointer, slot)
