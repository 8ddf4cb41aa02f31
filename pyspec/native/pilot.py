"""`Pilot`: an n-gram index that drafts on its own, in place of a controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspec.native.binding import check, ffi, lib
from pyspec.native.ngram import SuffixIndex

if TYPE_CHECKING:
    from pyspec.calibration import Calibration


class PilotRules(NamedTuple):
    """What drafts are worth.

    Attributes:
        calibration: Values the nodes, and learns.
        slot: The sequence there.
        first_class: Of the nodes of the index there.
        max_nodes: Most nodes of a tree, the root included.
        root_ms: Milliseconds of a plain step.
        column_ms: And of a node more, at least.
        costs_ms: Sizes of tree from 2 on, ascending, and milliseconds of their columns beyond the root's.
        recent: Tokens and milliseconds of the last steps, fading sums: a millisecond is worth their ratio.
        fade: Of these, per step.
        others: Tokens and milliseconds of a step that asks another drafter, for each of them.
        margin: Tokens by which such a step must be worth more for the pilot to give way.
        least: Tokens that a tree must give beyond its cost, or else the pilot gives way in any case.
    """

    calibration: Calibration
    slot: int
    first_class: int
    max_nodes: int
    root_ms: float
    column_ms: float
    costs_ms: Sequence[tuple[int, float]]
    recent: tuple[float, float]
    fade: float
    others: Sequence[tuple[float, float]] = ()
    margin: float = 0.0
    least: float = 0.0


class PilotView(NamedTuple):
    """What a pilot would do.

    Attributes:
        gain: Tokens that its tree is expected to give beyond the root's and what its columns cost.
        nodes: Of that tree.
        gives_way: Whether somebody else should be asked.
    """

    gain: float
    nodes: int
    gives_way: bool


class Pilot:
    """Drafts and learns inside `NativeEngine.coast`, while nobody else need be asked.

    It values nodes with a `Calibration` and chooses the size of tree as `pyspec.controller.Controller`
    does; a test keeps them equal.

    Args:
        index: What drafts.
        depth: Deepest node that it drafts.
    """

    def __init__(self, index: SuffixIndex, depth: int) -> None:
        self.index = index
        self._keep: tuple[Any, ...] = ()
        self.rules = ffi.new("pyspec_pilot *", {"index": index.pointer, "depth": depth})

    def set_rules(self, rules: PilotRules) -> None:
        """What its drafts are worth from here on."""
        to, others = self.rules, rules.others
        self._keep = (
            ffi.new("int32_t[]", [size for size, _ in rules.costs_ms]),
            ffi.new("double[]", [ms for _, ms in rules.costs_ms]),
            ffi.new("double[]", [tokens for tokens, _ in others]),
            ffi.new("double[]", [ms for _, ms in others]),
            rules.calibration,
        )
        to.sizes, to.costs_ms, to.other_tokens, to.other_ms = self._keep[:4]
        to.n_sizes, to.n_others = len(rules.costs_ms), len(others)
        to.calibration = rules.calibration.pointer
        to.slot, to.first_class, to.max_nodes = rules.slot, rules.first_class, rules.max_nodes
        to.root_ms, to.column_ms = rules.root_ms, rules.column_ms
        to.recent_tokens, to.recent_ms = rules.recent
        to.fade, to.margin, to.least = rules.fade, rules.margin, rules.least

    def look(self, tokens: Sequence[int]) -> PilotView:
        """What it would do behind `tokens`; its index reads what it has not read of them.

        In a coast it looks for itself: this is for those who want to see what it sees.
        """
        n_new, new = self.index.unread(tokens)
        gain, nodes, gives_way = ffi.new("double *"), ffi.new("int32_t *"), ffi.new("bool *")
        check(lib.pyspec_pilot_gain(self.rules, n_new, new, gain, nodes, gives_way))
        self.index.has_read(len(tokens), tokens[-1])
        return PilotView(gain[0], nodes[0], gives_way[0])
