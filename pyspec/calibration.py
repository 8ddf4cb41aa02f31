"""`Calibration`: how probable a drafted node is, learned from what the target accepted.

Drafters are over- or underconfident, each in its own way and with every text. For nodes alike (same
drafters asked, same sources, depth, rank and log-probability, in classes) the share that was right
is counted. Counts fade, so that the newest text matters most. A request starts from what all requests have
taught, and those from the drafter's own belief.
"""

from __future__ import annotations

import math
from bisect import bisect_left

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

Key = tuple[frozenset[str], frozenset[str], int, int, int]


def key_of(
    asked: frozenset[str], sources: frozenset[str], depth: int, rank: int, log_prob: float
) -> Key:
    """The class of a node.

    Args:
        asked: Names of the drafters that were asked: that one of them did not propose the node
            speaks against it.
        sources: Names of the drafters that proposed it.
        depth: At least 1.
        rank: 0 for the most probable child of its parent.
        log_prob: Given its parent, as its drafter sees it.
    """
    level = bisect_left(_EDGES, -log_prob)
    return asked, sources, depth if depth < DEPTHS else DEPTHS, 1 if rank else 0, level


class Calibration:
    """Acceptance by class of node, for all requests together and for each slot's own.

    The estimate of a class is (hits + weight * prior) / (trials + weight), with fading counts.
    """

    def __init__(self) -> None:
        self._all: dict[Key, list[float]] = {}
        self._own: dict[int, dict[Key, list[float]]] = {}

    def probability(self, slot: int, key: Key, log_prob: float) -> float:
        """Probability that a node of class `key` is right, given that its parent is."""
        prior = math.exp(min(log_prob, 0.0))  # drafters may claim anything
        cell = self._all.get(key)
        if cell is not None:
            prior = (cell[0] + _PRIOR * prior) / (cell[1] + _PRIOR)
        own = self._own.get(slot)
        if own is not None and (cell := own.get(key)) is not None:
            return (cell[0] + _GLOBAL * prior) / (cell[1] + _GLOBAL)
        return prior

    def observe(self, slot: int, key: Key, hit: bool) -> None:
        """Counts a node whose parent was accepted."""
        own = self._own.get(slot)
        if own is None:
            own = self._own[slot] = {}
        for cells in (self._all, own):
            cell = cells.get(key)
            if cell is None:
                cells[key] = [float(hit), 1.0]
            else:
                cell[0] = _FADE * cell[0] + hit
                cell[1] = _FADE * cell[1] + 1.0

    def forget(self, slot: int) -> None:
        """Drops what a slot's request has taught; what all have taught stays."""
        self._own.pop(slot, None)
