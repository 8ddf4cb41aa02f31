"""`Controller`: decides in every step who drafts, how far, and which nodes are worth verifying.

It is itself a drafter, made of others. A step goes like this:

    plan      which drafters to ask: the set that has been fastest, now and then another one
    propose   their trees, merged into one per sequence; shared prefixes are one node
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

from pyspec.calibration import Calibration, Key, key_of
from pyspec.cost import COLUMNS, CostCurve
from pyspec.drafter import DraftContext, Drafter, Outcome, StepCost
from pyspec.tree import DraftTree, TreeBuilder

Plan = frozenset[str]
"""Names of the drafters that a step asks."""

PLAIN: Plan = frozenset()

_FADE = 0.96  # of a plan's memory, per step that used it
_TRUST = 6.0  # steps that what all requests have taught counts for in a new one
_HOLD = 4  # steps that a decision stands
_TRIAL = 5  # steps of a trial
_COLD = 1  # steps after a change that say nothing of a plan's cost
_FIRST_TRY = 32  # steps until a slower plan is tried again
_LAST_TRY = 1024  # the same, when it was slower every time
_MARGIN = 1.03  # how much faster than plain decoding a plan must be to be used
_RATE_FADE = 0.97  # of the rate, per step
_COST_FADE = 0.92  # of a plan's costs, per step that used it


@dataclass(slots=True)
class Memory:
    """Fading sums of a plan's tokens and steps in one request, or in all."""

    tokens: float = 0.0
    steps: float = 0.0

    def add(self, tokens: float) -> None:
        """One more step."""
        self.tokens = _FADE * self.tokens + tokens
        self.steps = _FADE * self.steps + 1.0


@dataclass(slots=True)
class Trial:
    """When a plan is tried although another one is faster."""

    interval: int = _FIRST_TRY
    due: int = 0
    costs: dict[int, list[float]] = field(default_factory=dict)
    """By number of sequences: milliseconds of drafting, and of the rest for the usual tree."""
    whole: dict[int, list[float]] = field(default_factory=dict)
    """By number of sequences: tokens and milliseconds of a step that asked all of the plan."""


@dataclass(slots=True)
class Proposal:
    """What the controller remembers of a tree until its outcome is known."""

    builder: TreeBuilder
    kept: list[int] = field(default_factory=list)  # builder's node of every node of the tree
    keys: list[Key] = field(default_factory=list)  # of every builder's node but the root


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
        self._free = frozenset(source.name for source in self.sources if source.free)
        self.name = "+".join(source.name for source in sources)  # type: ignore[misc]
        self.curve = curve
        self._sizes = [n for n in COLUMNS if n <= max_nodes]
        self._calibration = Calibration()
        self._plans = _plans(self.sources)
        self._trials = {plan: Trial() for plan in self._plans}
        self._all = {plan: Memory() for plan in self._plans}
        self._own: dict[int, dict[Plan, Memory]] = {}
        self._rate = 1.0 / curve.ms(1)  # tokens per millisecond, all sequences together
        for source in self.sources:
            source.warm_up()
        self._proposals: dict[int, Proposal] = {}
        self._plan = PLAIN
        self._age = 0  # steps that it has been used without a break
        self._hold = 0  # steps that it stays for certain
        self._trying = False  # it is not the fastest
        self._rested = False  # the free drafters were enough in this step
        self._sequences = 0
        self._steps = 0
        self._tokens = 0

    @property
    def names(self) -> frozenset[str]:
        return frozenset(source.name for source in self.sources)

    # ---- a step ----

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self._steps += 1
        self._sequences = len(contexts)
        plan = self._choose_plan(contexts)
        self._age = self._age + 1 if plan == self._plan else 0
        self._plan = plan
        self._proposals = {}
        if plan == PLAIN:
            return [DraftTree.root(context.root) for context in contexts]
        proposals = [Proposal(TreeBuilder(context.root)) for context in contexts]
        values, size = self._ask_plan(contexts, proposals)
        trees = []
        for context, proposal, value in zip(contexts, proposals, values, strict=True):
            proposal.kept = _most_valuable(proposal.builder, value, min(size, context.max_nodes))
            self._proposals[context.slot] = proposal
            trees.append(proposal.builder.take(proposal.kept))
        return trees

    def _ask_plan(
        self, contexts: Sequence[DraftContext], proposals: list[Proposal]
    ) -> tuple[list[list[float]], int]:
        """Values of the nodes, and the size of tree, after the plan's drafters were asked.

        The free ones are asked first. Where their trees are worth as much as the plan's usually
        are, the others are not asked: where text repeats itself they are right for nothing, and
        elsewhere they have little to say. In a trial all are, or nothing would be learned.
        """
        free = self._plan & self._free
        self._rested = False
        if free:
            values = self._ask(contexts, proposals, free)
            size, worth = self._choose_size(values)
            if free == self._plan:
                return values, size
            self._rested = not self._trying and worth >= self._usual_worth(len(contexts))
            if self._rested:
                return values, size
        values = self._ask(contexts, proposals, self._plan - free)
        return values, self._choose_size(values)[0]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._tokens = sum(len(outcome.path.tokens) for outcome in outcomes)
        for outcome in outcomes if self._plan != PLAIN else ():
            tokens = len(outcome.path.tokens)
            self._all[self._plan].add(tokens)
            own = self._own.setdefault(outcome.slot, {})
            own.setdefault(self._plan, Memory()).add(tokens)
            proposal = self._proposals.pop(outcome.slot, None)
            if proposal is not None:
                self._learn(outcome, proposal)
        for source in self.sources:
            source.observe(outcomes)

    def observe_cost(self, cost: StepCost) -> None:
        self.curve.observe(cost.columns, cost.rest_ms)
        ms = cost.draft_ms + cost.rest_ms
        trial, n = self._trials[self._plan], self._sequences
        known = trial.costs.get(n)
        if known is None:
            trial.costs[n] = [cost.draft_ms, min(cost.rest_ms, self.curve.ms(cost.columns))]
        elif self._age >= _COLD:  # caches are warm again, and what was left out is made up
            # The mean, of trees of all sizes; but what takes far longer was delayed from outside.
            known[0] = _mix(known[0], min(cost.draft_ms, 2 * known[0] + 0.1), _COST_FADE)
            known[1] = _mix(known[1], min(cost.rest_ms, 2 * known[1]), _COST_FADE)
        if not self._rested:
            whole = trial.whole.setdefault(n, [self._tokens, ms])
            whole[0] = _mix(whole[0], self._tokens, _COST_FADE)
            whole[1] = _mix(whole[1], min(ms, 2 * whole[1]), _COST_FADE)
        if self._tokens:
            rate = self._tokens / ms
            self._rate = rate if self._steps == 1 else _mix(self._rate, rate, _RATE_FADE)
        for source in self.sources:
            source.observe_cost(cost)

    def forget(self, slot: int) -> None:
        self._own.pop(slot, None)
        self._proposals.pop(slot, None)
        self._calibration.forget(slot)
        for source in self.sources:
            source.forget(slot)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    # ---- plan ----

    def _choose_plan(self, contexts: Sequence[DraftContext]) -> Plan:
        """The fastest plan, or one that is due to be tried; either is kept for some steps."""
        allowed = self._allowed(contexts)
        if self._hold > 0 and self._plan in allowed:
            self._hold -= 1
            return self._plan
        self._trying = False
        speeds = {plan: self._speed(plan, contexts) for plan in allowed}
        speeds[PLAIN] *= _MARGIN  # what is hardly faster may as well be slower
        fastest = max(allowed, key=lambda plan: speeds[plan])
        for plan in allowed:
            trial = self._trials[plan]
            if plan == fastest and speeds[plan] < math.inf:
                trial.interval = _FIRST_TRY
                trial.due = self._steps + trial.interval
            elif speeds[plan] == math.inf or self._steps >= trial.due:
                trial.interval = min(2 * trial.interval, _LAST_TRY)
                trial.due = self._steps + trial.interval
                self._hold = _TRIAL - 1
                self._trying = True
                return plan
        self._hold = _HOLD - 1
        return fastest

    def _allowed(self, contexts: Sequence[DraftContext]) -> list[Plan]:
        only = [context.only for context in contexts if context.only is not None]
        if not any(context.depth > 0 for context in contexts):
            return [PLAIN]
        if len(only) < len(contexts):
            return self._plans
        wanted = frozenset[str]().union(*only)
        return [plan for plan in self._plans if plan & wanted or plan == PLAIN]

    def _speed(self, plan: Plan, contexts: Sequence[DraftContext]) -> float:
        """Tokens per millisecond that the sequences can expect; infinite when never tried."""
        n = len(contexts)
        costs = self._trials[plan].costs
        if not costs:
            return math.inf
        if n in costs:
            step = sum(costs[n])
        else:  # known for another number of sequences: scaled as plain decoding is
            other = min(costs, key=lambda known: abs(known - n))
            step = sum(costs[other]) * self.curve.ms(n) / self.curve.ms(other)
        return sum(self._expected(plan, context.slot) for context in contexts) / step

    def _expected(self, plan: Plan, slot: int) -> float:
        """Tokens that a step with `plan` gives the request in `slot`."""
        if plan == PLAIN:
            return 1.0
        every = self._all[plan]
        usual = every.tokens / every.steps if every.steps else 1.0
        own = self._own.get(slot, {}).get(plan)
        if own is None:
            return usual
        return (own.tokens + _TRUST * usual) / (own.steps + _TRUST)

    # ---- propose ----

    def _ask(
        self, contexts: Sequence[DraftContext], proposals: list[Proposal], names: Plan
    ) -> list[list[float]]:
        """Adds what the drafters `names` propose; returns the values of all nodes so far."""
        for source in self.sources:
            if source.name not in names:
                continue
            asked = [
                (proposal, context._replace(min_prob=self._least_probable(source)))
                for proposal, context in zip(proposals, contexts, strict=True)
                if context.only is None or source.name in context.only
            ]
            if not asked:
                continue
            mark = frozenset((source.name,))
            trees = source.propose([context for _, context in asked])
            for (proposal, _), tree in zip(asked, trees, strict=True):
                proposal.builder.add_tree(tree, mark)
        return [
            self._value(context.slot, proposal)
            for context, proposal in zip(contexts, proposals, strict=True)
        ]

    def _usual_worth(self, n: int) -> float:
        """What a step that asks all of the plan is usually worth; infinite where not known."""
        whole = self._trials[self._plan].whole.get(n)
        return math.inf if whole is None else whole[0] - self._rate * whole[1]

    def _least_probable(self, source: Drafter) -> float:
        """Below this probability of a path, another pass of the drafter costs more than it gives.

        A pass is worth at most the probability of the path that it extends, and costs its time and
        that of a column.
        """
        if not source.pass_ms:
            return 0.0
        n = self._sequences
        column = (self.curve.ms(4 * n) - self.curve.ms(n)) / 3
        return min(self._rate * (source.pass_ms + column) / n, 0.9)

    # ---- value ----

    def _value(self, slot: int, proposal: Proposal) -> list[float]:
        """Probability of acceptance of every node of the builder; fills the proposal's keys."""
        builder, keys = proposal.builder, proposal.keys
        keys.clear()
        value = [1.0]
        probability = self._calibration.probability
        rank = _ranks(builder)
        for node in range(1, len(builder)):
            log_prob = builder.log_probs[node]
            key = key_of(builder.sources[node], builder.depths[node], rank[node], log_prob)
            keys.append(key)
            value.append(value[builder.parents[node]] * probability(slot, key, log_prob))
        return value

    def _choose_size(self, values: Sequence[Sequence[float]]) -> tuple[int, float]:
        """The number of nodes a tree for which the sequences together gain the most, and its worth.

        The worth counts all tokens, the one of every root among them.
        """
        ranked = [sorted(value, reverse=True) for value in values]  # the root's 1 comes first
        most = max(map(len, ranked))
        n = len(ranked)
        best, best_worth, gained, counted = 1, -math.inf, 0.0, 0
        for size in self._sizes:
            if size > most:
                break
            for value in ranked:
                gained += sum(value[counted:size])
            counted = size
            worth = gained - self._rate * self.curve.ms(n * size)
            if worth > best_worth:
                best, best_worth = size, worth
        return best, best_worth

    # ---- learn ----

    def _learn(self, outcome: Outcome, proposal: Proposal) -> None:
        """Counts the children of every node that was walked: one of them was right, or none."""
        parents = outcome.tree.parents.tolist()
        tokens = outcome.tree.tokens.tolist()
        drawn = dict(zip(outcome.path.nodes, outcome.path.tokens, strict=True))
        for node in range(1, len(parents)):
            token = drawn.get(parents[node])
            if token is not None:
                key = proposal.keys[proposal.kept[node] - 1]
                self._calibration.observe(outcome.slot, key, tokens[node] == token)


def _plans(sources: Sequence[Drafter]) -> list[Plan]:
    """Plain decoding, then the free drafters with each of the others, and with none."""
    free = frozenset(source.name for source in sources if source.free)
    costly = [source.name for source in sources if source.name not in free]
    plans = [free | {name} for name in costly]
    if free:
        plans.append(free)
    return [*plans, PLAIN]


def _ranks(builder: TreeBuilder) -> list[int]:
    """For every node its rank among the children of its parent, 0 the most probable."""
    log_probs, parents = builder.log_probs, builder.parents
    rank = [0] * len(builder)
    seen: dict[int, int] = {}  # children of a node that were met
    for node in sorted(range(1, len(builder)), key=lambda node: -log_probs[node]):
        rank[node] = seen.get(parents[node], 0)
        seen[parents[node]] = rank[node] + 1
    return rank


def _most_valuable(builder: TreeBuilder, value: Sequence[float], size: int) -> list[int]:
    """The `size` nodes of the highest value, in order of the builder; each with its parent."""
    if len(builder) <= size:
        return list(range(len(builder)))
    depths = builder.depths
    order = sorted(range(len(value)), key=lambda node: (-value[node], depths[node], node))
    return sorted(order[:size])


def _mix(old: float, new: float, keep: float) -> float:
    return keep * old + (1 - keep) * new
