"""`Controller`: decides in every step who drafts, how far, and which nodes are worth verifying.

It is itself a drafter, made of others. A step goes like this:

    propose   the drafters that cost nothing are asked; their trees are merged, one per sequence,
              in which shared prefixes are one node
    plan      whether another drafter is asked as well, and which
    value     the probability that a node is accepted: calibrated, along its path
    choose    the size of tree for which the nodes' values pay for their columns

A node is worth its value in tokens. A millisecond is worth the tokens that this machine has lately
produced in one (the rate). So a tree of w nodes for each of S sequences is worth

    sum of the values of its nodes - rate * cost(S * w)

and the w with the highest worth is taken: by the renewal-reward theorem that maximises tokens per
second in the long run. cost() is measured, see `pyspec.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspec.calibration import Calibration
from pyspec.cost import COLUMNS, CostCurve
from pyspec.drafter import Coast, DraftContext, Drafter, Outcome, Passed, StepCost, Text
from pyspec.native.pilot import PilotRules
from pyspec.planner import Planner
from pyspec.tree import DraftTree, TreeBuilder

if TYPE_CHECKING:
    from pyspec.native.pilot import Pilot


@dataclass(slots=True)
class Proposal:
    """What was proposed for a sequence in a step.

    Attributes:
        tree: All of it.
        classes: The class of every node.
        free_classes: Those of the first nodes when only the free drafters had been asked.
        kept: The nodes that are verified.
    """

    tree: DraftTree
    classes: list[int] = field(default_factory=list)
    free_classes: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


_BRIEFED = 256  # steps for which a pilot's rules hold, if nothing else happens
_CAUTION = 1.05  # what columns are taken to cost, as a factor


class Controller(Drafter):
    """Drafts with several drafters as far as it pays, and not at all where nothing pays."""

    def __init__(self, sources: Sequence[Drafter], curve: CostCurve, max_nodes: int) -> None:
        """Takes over drafters and what is known of the machine.

        Args:
            sources: The drafters, of different names, on one engine.
            curve: What a step costs.
            max_nodes: Largest tree of the engine.
        """
        self.sources = sorted(sources, key=lambda source: not source.free)
        self.name = "+".join(source.name for source in sources)  # type: ignore[misc]
        self.curve = curve
        for source in self.sources:
            source.warm_up()
        self._free = [source for source in self.sources if source.free]
        costly = [source for source in self.sources if not source.free]
        costly.sort(key=lambda source: source.pass_ms or math.inf)  # the cheapest is tried first
        self._costly = {source.name: source for source in costly}
        self.planner = Planner(list(self._costly), curve)
        self._marks = {source.name: frozenset((source.name,)) for source in self.sources}
        self._free_names = frozenset(source.name for source in self._free)
        self._sizes = [n for n in COLUMNS if n <= max_nodes]
        self._calibration = Calibration()
        self._proposals: dict[int, Proposal] = {}
        self._pilot: Pilot | None = None  # of this coast
        self._briefed: dict[int, int] = {}  # by slot: the step until which its pilot's rules hold
        self._listeners = set(self._costly)
        self._floor = 0.0  # of a node's value, in this step
        self._tokens = 0
        self._levels = 1  # of the deepest tree of the asked drafter, and one more
        self.asked = ""  # the drafter that costs time and was asked in the last step
        self._observers = _overriding(self.sources, "observe")
        self._cost_observers = _overriding(self.sources, "observe_cost")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(source.name for source in self.sources)

    # ---- a step ----

    def coast(self, texts: Sequence[Text], alone: bool) -> Coast | None:
        steps = self.planner.steps_ahead(bool(self._free))
        if steps < 1 or self._observers or self._cost_observers:
            return None
        self._pilot = None
        if self.planner.is_plain or not self._free:
            return Coast(steps)
        if alone and self.planner.grounded:
            return Coast(min(steps, self.planner.grounded))
        self._pilot = pilot = (
            self._free[0].pilot(texts[0].slot) if alone and len(self._free) == 1 else None
        )
        if pilot is None:
            return None
        self._brief(pilot, texts[0].slot)
        return Coast(steps, pilot, self._free_names)

    def coasted(self, passed: Sequence[Passed]) -> None:
        self.planner.coasted(passed, self._pilot.rules.after_ms if self._pilot else None)
        self._change_listeners()

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self._proposals.clear()
        self.asked = ""
        planner = self.planner
        if planner.rests() or not any([one.depth > 0 for one in contexts]):
            planner.idle = True
            return [DraftTree.root(context.root) for context in contexts]
        planner.begin(contexts)
        trees = self._ask(self._free, contexts)
        planner.silent = silent = _are_roots(trees)
        if silent and planner.holds:
            return trees
        self._floor = self._least_value(len(contexts))
        proposals = [] if silent else [Proposal(tree) for tree in trees]
        values = self._values(contexts, proposals, self._free_names)
        size, tokens, worth = self._choose_size(values or [[1.0]] * len(trees))
        self.asked = planner.ask(contexts, worth, tokens)
        if silent and not self.asked:
            return trees
        planner.silent = False
        if self.asked:
            self._listen(self._costly[self.asked], True)
            more = self._ask([self._costly[self.asked]], contexts)
            self._levels = 1 + max(tree.max_depth for tree in more)
            known = [proposal.classes for proposal in proposals] or [[]] * len(trees)
            proposals = [
                Proposal(_merged(pair), free_classes=classes)
                for *pair, classes in zip(trees, more, known, strict=True)
            ]
            values = self._values(contexts, proposals, self._free_names | {self.asked})
            size, _, _ = self._choose_size(values)
        return [
            self._keep(context, proposal, value, size)
            for context, proposal, value in zip(contexts, proposals, values, strict=True)
        ]

    def _keep(
        self, context: DraftContext, proposal: Proposal, value: list[float], size: int
    ) -> DraftTree:
        """The tree of the `size` most valuable nodes."""
        tree = proposal.tree
        if len(value) == 1:
            return tree
        if size == 1:
            proposal.kept = [0]
            self._proposals[context.slot] = proposal
            return DraftTree.root(context.root)
        proposal.kept = _most_valuable(value, min(size, context.max_nodes))
        self._proposals[context.slot] = proposal
        return tree.take(proposal.kept)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._tokens = sum([len(outcome.path.tokens) for outcome in outcomes])
        if self.asked:
            self.planner.observe(outcomes)
        if self._proposals:
            for outcome in outcomes:
                proposal = self._proposals.pop(outcome.slot, None)
                if proposal is not None:
                    self._learn(outcome, proposal)
        for source in self._observers:
            source.observe(outcomes)

    def observe_cost(self, cost: StepCost) -> None:
        self._briefed.clear()
        source = self._costly.get(self.asked)
        warm_ms = self._levels * source.pass_ms if source and source.pass_ms else math.inf
        self.planner.observe_cost(cost, self._tokens, warm_ms)
        for source in self._cost_observers:
            source.observe_cost(cost)
        self._change_listeners()

    def _change_listeners(self) -> None:
        if self.planner.may_change_listeners:
            for name, source in self._costly.items():
                self._listen(source, self.planner.listens(name))

    def _listen(self, source: Drafter, on: bool) -> None:
        if on != (source.name in self._listeners):
            source.listen(on)
            self._listeners ^= {source.name}

    def forget(self, slot: int) -> None:
        self._briefed.pop(slot, None)
        self.planner.forget(slot)
        self._proposals.pop(slot, None)
        self._calibration.forget(slot)
        for source in self.sources:
            source.forget(slot)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def _brief(self, pilot: Pilot, slot: int) -> None:
        """Tells a pilot what drafts are worth, unless it was told a while ago and nothing changed."""
        planner, curve = self.planner, self.curve
        if planner.step < self._briefed.get(slot, 0):
            return
        self._briefed[slot] = planner.step + _BRIEFED
        one, names = curve.ms(1), self._free_names
        pilot.set_rules(
            PilotRules(
                self._calibration,
                slot,
                self._calibration.first_class(names, names),
                max_nodes=self._sizes[-1],
                root_ms=one,
                column_ms=curve.least_column_ms(1, self._sizes),
                costs_ms=[(n, _CAUTION * (curve.ms(n) - one)) for n in self._sizes[1:]],
                **planner.terms_of(slot),
            )
        )

    # ---- propose ----

    def _ask(self, sources: list[Drafter], contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """What drafters propose, as one tree for every sequence."""
        if not sources:
            return [DraftTree.root(context.root) for context in contexts]
        trees = [self._ask_one(source, contexts) for source in sources]
        if len(trees) == 1:
            return trees[0]
        return [_merged(several) for several in zip(*trees, strict=True)]

    def _ask_one(self, source: Drafter, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """What a drafter proposes; the root alone where it may not draft."""
        if source.pass_ms:
            least = self._least_probable(source, len(contexts))
            contexts = [context._replace(min_prob=least) for context in contexts]
        asked = [one for one in contexts if one.only is None or source.name in one.only]
        proposed = source.propose(asked) if asked else []
        mark = self._marks[source.name]
        marked = [one if len(one.token_list) == 1 else one.marked(mark) for one in proposed]
        if len(asked) == len(contexts):
            return marked
        trees = iter(marked)
        return [
            next(trees) if one.only is None or source.name in one.only else DraftTree.root(one.root)
            for one in contexts
        ]

    def _least_probable(self, source: Drafter, n: int) -> float:
        """Below this probability of a path, another pass of the drafter costs more than it gives.

        A pass is worth at most the probability of the path that it extends, and costs its time and
        that of a column.
        """
        column = (self.curve.ms(4 * n) - self.curve.ms(n)) / 3
        return min(self.planner.rate * (source.pass_ms + column) / n, 0.9)

    # ---- value ----

    def _values(
        self, contexts: Sequence[DraftContext], proposals: list[Proposal], asked: frozenset[str]
    ) -> list[list[float]]:
        """Probability of acceptance of every node; 0 behind nodes that are not worth a column.

        Fills the proposals' classes.
        """
        found = []
        for context, proposal in zip(contexts, proposals, strict=bool(proposals)):
            names = asked if context.only is None else asked & context.only
            values, proposal.classes = self._calibration.values(
                context.slot, proposal.tree, names, self._floor
            )
            found.append(values)
        return found

    def _least_value(self, n: int) -> float:
        """Trees whose nodes are all worth less than this do not pay for any number of columns."""
        return self.planner.rate * self.curve.least_column_ms(n, self._sizes) / n

    def _choose_size(self, values: Sequence[Sequence[float]]) -> tuple[int, float, float]:
        """The number of nodes a tree for which the sequences together gain the most.

        What columns beyond the root's cost counts a little more than measured: values are estimates,
        and of several the one that is too high is chosen.

        Returns:
            It, the tokens that are expected with it, and what they are worth less the step's time.
        """
        n, rate = len(values), self.planner.rate
        one = self.curve.ms(n)
        best, best_gained, best_worth = 1, float(n), n - rate * one
        most = max(map(len, values))
        if most == 1:
            return best, best_gained, best_worth
        ranked = [sorted(value, reverse=True) for value in values]  # the root's 1 comes first
        if all([len(value) == 1 or value[1] < self._floor for value in ranked]):
            return best, best_gained, best_worth
        gained, counted = best_gained, 1
        for size in self._sizes[1:]:
            if size > most:
                break
            more = sum([sum(value[counted:size]) for value in ranked])
            if more == 0.0:
                break
            gained, counted = gained + more, size
            worth = gained - rate * (one + _CAUTION * (self.curve.ms(n * size) - one))
            if worth > best_worth:
                best, best_gained, best_worth = size, gained, worth
        return best, best_gained, best_worth

    # ---- learn ----

    def _learn(self, outcome: Outcome, proposal: Proposal) -> None:
        """Counts the children of every node that was walked: one of them was right, or none.

        Children that were proposed but not verified count as well: what they had to be is known.
        """
        path, tree, slot = outcome.path, proposal.tree, outcome.slot
        nodes = [proposal.kept[node] for node in path.nodes]
        for classes in (proposal.classes, proposal.free_classes):
            if classes:
                self._calibration.learn(slot, tree, classes, nodes, path.tokens)


def _are_roots(trees: Sequence[DraftTree]) -> bool:
    """Whether nothing is drafted."""
    return all([len(tree.token_list) == 1 for tree in trees])


def _merged(trees: Sequence[DraftTree]) -> DraftTree:
    """One tree of several with the same root: shared prefixes become one node."""
    several = [tree for tree in trees if len(tree) > 1]
    if len(several) < 2:
        return several[0] if several else trees[0]
    builder = TreeBuilder(trees[0].token_list[0])
    for tree in several:
        builder.add_tree(tree)
    return builder.tree()


def _overriding(sources: Sequence[Drafter], method: str) -> list[Drafter]:
    """Those of `sources` that do something in `method`."""
    nothing = getattr(Drafter, method)
    return [source for source in sources if getattr(type(source), method) is not nothing]


def _most_valuable(value: Sequence[float], size: int) -> list[int]:
    """The `size` nodes of the highest value, in the tree's order; each with its parent.

    A parent comes first among nodes of the same value.
    """
    n = len(value)
    if n <= size:
        return list(range(n))
    return sorted(sorted(range(n), key=value.__getitem__, reverse=True)[:size])
