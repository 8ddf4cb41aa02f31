"""Naive reference of `pyspec/native/src/calibration.cpp`; `pyspec.calibration` says what it is for.

A class of nodes is told by the drafters asked and those that proposed the node, by its depth, its rank
and its log-probability.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from pyspec.tree import DraftTree

DEPTHS = 4
"""Classes of depth: 1, 2, 3, and deeper."""

RANKS = 2
"""Classes of rank among the children of a node: the first, and the others."""

BINS = 6
"""Classes of the log-probability that the drafter gave."""

_EDGES = (0.03, 0.15, 0.45, 1.0, 2.2)  # of the negative log-probability
_PRIOR = 4.0  # observations that the drafter's own belief counts for
_GLOBAL = 12.0  # observations that all requests count for in one
_FADE = 0.985
_CLASSES = (DEPTHS + 1) * RANKS * BINS  # of nodes of the same drafters
_NOTHING: dict[int, list[float]] = {}


NO_CLASS = -1
"""In place of the class of a node that was not valued."""


class Calibration:
    """Acceptance by class of node, for all requests together and for each slot's own.

    The estimate of a class is (hits + weight * prior) / (trials + weight), with fading counts. Classes
    are numbers.
    """

    def __init__(self) -> None:
        self._all: dict[int, list[float]] = {}
        self._own: dict[int, dict[int, list[float]]] = {}
        self._groups: dict[tuple[frozenset[str], frozenset[str]], int] = {}

    def class_of(
        self,
        asked: frozenset[str],
        sources: frozenset[str],
        depth: int,
        first: bool,
        log_prob: float,
    ) -> int:
        """The class of a node.

        Args:
            asked: Names of the drafters that were asked: that one of them did not propose the node
                speaks against it.
            sources: Names of the drafters that proposed it.
            depth: At least 1.
            first: Whether it is the most probable child of its parent.
            log_prob: Given its parent, as its drafter sees it.
        """
        return _CLASSES * self._group(asked, sources) + place(depth, first, log_prob)

    def _group(self, asked: frozenset[str], sources: frozenset[str]) -> int:
        group = self._groups.get((asked, sources))
        if group is None:
            group = self._groups[asked, sources] = len(self._groups)
        return group

    def values(
        self, slot: int, tree: DraftTree, asked: frozenset[str], floor: float
    ) -> tuple[list[float], list[int]]:
        """The probability of acceptance of every node, and the class of every node but the root.

        Args:
            slot: The sequence.
            tree: What was proposed, with its sources.
            asked: Names of the drafters that were asked.
            floor: Behind a node less probable than this, nodes have no class and are worth 0.
        """
        parents, depths, sources = tree.parent_list, tree.depth_list, tree.sources
        later = _later_children(tree)
        own = self._own.get(slot, _NOTHING)
        values, classes = [1.0], []
        last, base = None, 0
        for node, log_prob in enumerate(tree.log_prob_list):
            if node == 0:
                continue
            before = values[parents[node]]
            if before < floor:
                classes.append(NO_CLASS)
                values.append(0.0)
                continue
            if sources[node] is not last:
                last = sources[node]
                base = _CLASSES * self._group(asked, last)
            kind = base + place(depths[node], node not in later, log_prob)
            classes.append(kind)
            values.append(before * self._estimate(own, kind, log_prob))
        return values, classes

    def probability(self, slot: int, kind: int, log_prob: float) -> float:
        """Probability that a node of class `kind` is right, given that its parent is."""
        return self._estimate(self._own.get(slot, _NOTHING), kind, log_prob)

    def _estimate(self, own: dict[int, list[float]], kind: int, log_prob: float) -> float:
        prior = math.exp(log_prob) if log_prob < 0.0 else 1.0  # drafters may claim anything
        if (cell := self._all.get(kind)) is not None:
            prior = (cell[0] + _PRIOR * prior) / (cell[1] + _PRIOR)
        if (cell := own.get(kind)) is not None:
            return (cell[0] + _GLOBAL * prior) / (cell[1] + _GLOBAL)
        return prior

    def observe(self, slot: int, kind: int, hit: bool) -> None:
        """Counts a node whose parent was accepted."""
        own = self._own.get(slot)
        if own is None:
            own = self._own[slot] = {}
        for cells in (self._all, own):
            cell = cells.get(kind)
            if cell is None:
                cells[kind] = [float(hit), 1.0]
            else:
                cell[0] = _FADE * cell[0] + hit
                cell[1] = _FADE * cell[1] + 1.0

    def forget(self, slot: int) -> None:
        """Drops what a slot's request has taught; what all have taught stays."""
        self._own.pop(slot, None)


def place(depth: int, first: bool, log_prob: float) -> int:
    """The class of a node among those of the same drafters."""
    level = bisect_left(_EDGES, -log_prob)
    return ((depth if depth < DEPTHS else DEPTHS) * RANKS + (not first)) * BINS + level


def _later_children(tree: DraftTree) -> set[int]:
    """The nodes that are not the most probable child of their parent."""
    parents, log_probs = tree.parent_list, tree.log_prob_list
    later: set[int] = set()
    best: dict[int, int] = {}
    for node, parent in enumerate(parents):
        other = best.setdefault(parent, node)
        if other == node:
            continue
        if log_probs[node] > log_probs[other]:
            best[parent] = node
            later.add(other)
        else:
            later.add(node)
    return later
