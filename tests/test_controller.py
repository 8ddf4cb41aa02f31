"""The controller on an engine that is only played: costs and acceptance are known there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from pyspec import AcceptedPath, DraftConfig, DraftContext, Drafter, DraftTree, Outcome
from pyspec.calibration import NO_CLASS, Calibration
from pyspec.controller import Controller
from pyspec.cost import CostCurve
from pyspec.drafter import Passed, StepCost
from pyspec.planner import Planner
from pyspec.reference import calibration as reference
from pyspec.reference.calibration import place

SOURCE = frozenset(["chain"])


class Chain(Drafter):
    """A chain of the token after the last one; every node's belief is `belief`."""

    name = "chain"

    def __init__(self, depth: int = 7, ms: float = 0.0, belief: float = 0.8) -> None:
        self.config, self.depth, self.ms, self.belief = DraftConfig(), depth, ms, belief
        self.asked = 0
        self.forgotten: list[int] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self.asked += 1
        return [
            DraftTree.chain(
                range(one.root, one.root + 1 + min(self.depth, one.depth)),
                [0.0, *[-0.2231] * min(self.depth, one.depth)],
            )
            for one in contexts
        ]

    def forget(self, slot: int) -> None:
        self.forgotten.append(slot)


def play(
    controller: Controller,
    cost: Callable[[int], float],
    accept: float,
    *,
    draft_ms: float = 0.0,
    steps: int = 400,
    slots: int = 1,
    seed: int = 1,
) -> float:
    """Tokens per millisecond of the last three quarters of the steps."""
    chance = random.Random(seed)
    tokens = {slot: [5] for slot in range(slots)}
    emitted = ms = 0.0
    for step in range(steps):
        contexts = [DraftContext(slot, own, 16, 15) for slot, own in tokens.items()]
        trees = controller.propose(contexts)
        drafted = controller.asked
        outcomes, count = [], 0
        for slot, tree in enumerate(trees):
            nodes, path_tokens = [0], []
            while True:  # the target goes on as the chain does, with this chance at every node
                right = chance.random() < accept
                path_tokens.append(5 + len(nodes) if right else 999)
                if not right or len(nodes) == len(tree):
                    break
                nodes.append(len(nodes))
            path = AcceptedPath(tuple(nodes), tuple(path_tokens))
            tokens[slot] = [*tokens[slot], *path_tokens[:-1], 5]
            outcomes.append(Outcome(slot, tree, path))
            count += len(path_tokens)
        controller.observe(outcomes)
        columns = len(trees) * max(map(len, trees))
        step_cost = StepCost(columns, draft_ms if drafted else 0.0, cost(columns))
        controller.observe_cost(step_cost)
        if step >= steps // 4:
            emitted += count
            ms += step_cost.draft_ms + step_cost.rest_ms
    return emitted / ms


def best_fixed(cost: Callable[[int], float], accept: float, draft_ms: float) -> float:
    """Tokens per millisecond of the best chain of fixed length, plain decoding among them."""
    rates = [1 / cost(1)]
    for n in range(2, 9):
        rates.append(sum(accept**k for k in range(n)) / (cost(n) + draft_ms))
    return max(rates)


CURVES = {
    "flat": lambda n: 1 + 0.02 * n,
    "steps": lambda n: 1.0 if n < 3 else 1.5 if n < 5 else 3.5,
    "linear": lambda n: float(n),
}


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft_ms", [0.0, 0.4])
@pytest.mark.parametrize("name", CURVES)
def test_it_comes_close_to_the_best_fixed_setting(
    name: str, draft_ms: float, accept: float
) -> None:
    cost = CURVES[name]
    curve = CostCurve([(n, cost(n)) for n in (1, 2, 3, 4, 6, 8)])
    controller = Controller([Chain()], curve, 8)
    rate = play(controller, cost, accept, draft_ms=draft_ms, steps=2000)
    assert rate >= 0.95 * best_fixed(cost, accept, draft_ms)


def test_it_goes_plain_where_nothing_is_accepted_and_tries_again_rarely() -> None:
    source = Chain()
    controller = Controller([source], CostCurve([(1, 1.0), (2, 1.5), (8, 4.0)]), 8)
    play(controller, lambda n: 0.5 + 0.5 * n, 0.0, draft_ms=0.5, steps=2000)
    assert 5 <= source.asked <= 120


def test_it_notices_that_drafts_have_become_good() -> None:
    controller = Controller([Chain()], CostCurve([(1, 1.0), (8, 1.7)]), 8)
    play(controller, CURVES["flat"], 0.0, steps=1000)
    rate = play(controller, CURVES["flat"], 0.95, steps=4000)  # the first quarter does not count
    assert rate > 3.0


def test_a_budget_is_shared_by_several_sequences() -> None:
    cost = lambda n: 1.0 if n <= 8 else 1.0 + 0.8 * (n - 8)  # noqa: E731
    curve = CostCurve([(n, cost(n)) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)])
    controller = Controller([Chain()], curve, 8)
    play(controller, cost, 0.9, slots=4, steps=400)
    trees = controller.propose([DraftContext(slot, [5], 16, 15) for slot in range(4)])
    assert max(map(len, trees)) == 2  # four trees of two nodes are what eight columns hold


def test_limits_of_a_request_hold() -> None:
    controller = Controller([Chain()], CostCurve([(1, 1.0), (8, 1.1)]), 8)
    play(controller, CURVES["flat"], 0.9)
    trees = controller.propose(
        [
            DraftContext(0, [5], 3, 15),
            DraftContext(1, [5], 8, 1),
            DraftContext(2, [5], 8, 0),
            DraftContext(3, [5], 8, 9, only=frozenset(["other"])),
        ]
    )
    assert len(trees[0]) <= 3 and trees[1].max_depth <= 1 and len(trees[2]) == len(trees[3]) == 1


class Free(Chain):
    """A chain that costs nothing."""

    name = "free"
    free = True


class Phases(Free):
    """Drafts in every second stretch of ten steps, as where text repeats itself now and then."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        drafts = (self.asked // 10) % 2
        trees = super().propose(contexts)
        return trees if drafts else [DraftTree.root(one.root) for one in contexts]


def test_drafters_that_cost_rest_where_free_ones_are_enough() -> None:
    costly, free = Chain(), Phases()
    controller = Controller([costly, free], CostCurve([(1, 1.0), (8, 1.2)]), 8)
    play(controller, CURVES["flat"], 0.95, draft_ms=0.4, steps=400)
    costly.asked = free.asked = 0
    play(controller, CURVES["flat"], 0.95, draft_ms=0.4, steps=400)
    assert free.asked >= 390  # plain decoding is tried, too
    assert 180 < costly.asked < 260  # the other half of the steps, and trials


def test_of_siblings_the_one_that_is_right_is_learned() -> None:
    class Siblings(Chain):
        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            return [DraftTree.from_parents([5, 6, 7], [-1, 0, 0], [0, -0.3, -1.6])]

    controller = Controller([Siblings()], CostCurve([(1, 1.0), (2, 1.1), (3, 9.0)]), 8)
    context = DraftContext(0, [5], 8, 4)
    trees = []
    for _ in range(100):
        (tree,) = controller.propose([context])
        trees.append(tree.tokens.tolist())
        right = tree.child(0, 7)
        path = ((0, right), (7, 9)) if right else ((0,), (7,))
        controller.observe([Outcome(0, tree, AcceptedPath(*path))])
        controller.observe_cost(StepCost(len(tree), 0.0, 1.0 + 0.1 * (len(tree) - 1)))
    drafted = [tree for tree in trees if len(tree) == 2]
    assert drafted[0] == [5, 6]
    assert drafted[-1] == [5, 7]


def test_drafters_that_cost_are_asked_where_free_ones_are_silent() -> None:
    costly = Chain()
    controller = Controller([costly, Free(depth=0)], CostCurve([(1, 1.0), (8, 1.2)]), 8)
    play(controller, CURVES["flat"], 0.95, steps=400)
    costly.asked = 0
    rate = play(controller, CURVES["flat"], 0.95, steps=400)
    assert costly.asked > 300 and rate > 3.0


def test_plain_steps_ask_nobody() -> None:
    source = Chain()
    controller = Controller([source], CostCurve([(1, 1.0), (8, 8.0)]), 8)
    play(controller, CURVES["linear"], 0.0, draft_ms=1.0, steps=60)
    source.asked = 0
    trees = [controller.propose([DraftContext(0, [5], 16, 15)]) for _ in range(4)]
    assert source.asked == 0 and all(len(tree) == 1 for step in trees for tree in step)


def test_drafters_listen_where_they_may_be_asked() -> None:
    class Listener(Chain):
        listens, steps = True, 0

        def listen(self, on: bool) -> None:
            assert on != self.listens
            self.listens = on

        def observe(self, outcomes: Sequence[Outcome]) -> None:
            self.steps += self.listens

        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            assert self.listens
            return super().propose(contexts)

    source = Listener()
    controller = Controller([source], CostCurve([(1, 1.0), (8, 8.0)]), 8)
    play(controller, CURVES["linear"], 0.0, draft_ms=1.0, steps=1000)
    source.steps = 0
    play(controller, CURVES["linear"], 0.0, draft_ms=1.0, steps=4000)
    assert 0 < source.steps < 2000  # around the trials
    while source.listens:
        play(controller, CURVES["linear"], 0.0, draft_ms=1.0, steps=1)
    controller.planner._best = lambda *_: source.name  # type: ignore[method-assign]
    while not source.listens:  # whoever is asked hears from then on, before it drafts
        play(controller, CURVES["linear"], 0.0, draft_ms=1.0, steps=1)

    source = Listener()
    controller = Controller([source], CostCurve([(1, 1.0), (8, 1.1)]), 8)
    play(controller, CURVES["flat"], 0.9, draft_ms=0.1, steps=1000)
    assert source.steps == 1000


def test_a_first_draft_that_reads_the_prompt_is_no_reason_to_give_a_drafter_up() -> None:
    source, cost = Chain(), CURVES["flat"]
    controller = Controller([source], CostCurve([(1, 1.0), (8, 1.2)]), 8)
    play(controller, cost, 0.9, draft_ms=60.0, steps=1)
    source.asked = 0
    play(controller, cost, 0.9, draft_ms=0.1, steps=400)
    assert source.asked > 350


def test_what_a_trial_has_to_catch_up_with_delays_the_next() -> None:
    def asked(catching_up_ms: float) -> int:
        source = Chain()
        controller = Controller([source], CostCurve([(1, 1.0), (8, 4.0)]), 8)
        before = 0
        for _ in range(6000):
            (tree,) = controller.propose([DraftContext(0, [5], 16, 15)])
            draft_ms = 0.0
            if controller.asked:
                draft_ms = 0.2 if before else catching_up_ms
            before = bool(controller.asked)
            controller.observe([Outcome(0, tree, AcceptedPath((0,), (999,)))])
            controller.observe_cost(StepCost(len(tree), draft_ms, 1.0 + 0.43 * (len(tree) - 1)))
        return source.asked

    assert asked(8.0) < 0.25 * asked(0.2)  # 12 and 95; 42 if it did not count


def test_a_trial_that_is_due_does_not_keep_the_best_drafter_from_being_asked() -> None:
    class Other(Chain):
        name = "other"

    class Weak(Free):
        """Promises a little more than two tokens in every step."""

        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
            return [
                DraftTree.chain([one.root, one.root + 1, one.root + 2], [0.0, -0.1, -0.1])
                for one in contexts
            ]

    good, other = Chain(), Other(depth=1)
    controller = Controller([good, other, Weak()], CostCurve([(1, 1.0), (8, 1.2)]), 8)
    play(controller, CURVES["flat"], 0.95, draft_ms=0.1, steps=400)
    good.asked = 0
    play(controller, CURVES["flat"], 0.95, draft_ms=0.1, steps=400)
    assert good.asked > 300


def test_a_claim_of_more_than_certainty_is_no_more_than_one() -> None:
    calibration = Calibration()
    kind = calibration.first_class(SOURCE, SOURCE) + place(1, True, 2.9)
    assert calibration.probability(0, kind, 2.9) <= 1.0


def test_free_drafters_of_no_use_are_asked_rarely_where_asking_is_felt() -> None:
    free = Free(depth=0)
    controller = Controller([free], CostCurve([(1, 1.0), (8, 1.2)]), 8)

    def decode(steps: int, asking_ms: float) -> int:
        free.asked = 0
        for _ in range(steps):
            (tree,) = controller.propose([DraftContext(0, [5], 16, 15)])
            path = AcceptedPath(tuple(range(len(tree))), (*tree.token_list[1:], 9))
            controller.observe([Outcome(0, tree, path)])
            draft_ms = 0.0 if controller.planner.idle else asking_ms
            controller.observe_cost(StepCost(len(tree), draft_ms, 1.0 + 0.02 * (len(tree) - 1)))
        return free.asked

    assert decode(400, asking_ms=0.001) == 400  # next to nothing
    decode(600, asking_ms=0.08)  # it takes a while to be felt
    assert decode(400, asking_ms=0.08) < 100
    free.depth = 7  # text repeats itself now
    assert decode(200, asking_ms=0.08) > 150


def test_limits_of_other_requests_do_not_count() -> None:
    source = Chain()
    controller = Controller([source], CostCurve([(1, 1.0), (16, 1.3)]), 8)
    contexts = [
        DraftContext(0, [5], 16, 15),
        DraftContext(1, [5], 1, 0),
        DraftContext(2, [5], 16, 15, only=frozenset(["other"])),
    ]
    for _ in range(60):
        trees = controller.propose(contexts)
        assert len(trees[1]) == len(trees[2]) == 1
        paths = [AcceptedPath(tuple(range(len(t))), (*t.token_list[1:], 9)) for t in trees]
        outcomes = [Outcome(i, t, p) for i, (t, p) in enumerate(zip(trees, paths, strict=True))]
        controller.observe(outcomes)
        controller.observe_cost(StepCost(3 * len(trees[0]), 0.1, 1.2))
    assert source.asked > 50 and len(trees[0]) == 8


def test_sources_hear_of_what_ends() -> None:
    source = Chain()
    controller = Controller([source], CostCurve([(1, 1.0)]), 4)
    controller.forget(3)
    assert source.forgotten == [3]


def test_calibration_learns_and_forgets() -> None:
    calibration = Calibration()
    key = calibration.first_class(SOURCE, SOURCE) + place(1, True, -0.1)
    assert calibration.probability(0, key, -0.1) == pytest.approx(0.905, abs=1e-3)
    for _ in range(300):
        calibration.observe(0, key, False)
    assert calibration.probability(0, key, -0.1) < 0.05
    assert calibration.probability(1, key, -0.1) < 0.1  # what all requests have taught
    for _ in range(60):
        calibration.observe(1, key, True)
    assert calibration.probability(1, key, -0.1) > 0.7
    calibration.forget(1)
    assert calibration.probability(1, key, -0.1) < calibration.probability(0, key, -0.1) + 0.6


def test_classes_of_nodes() -> None:
    calibration = reference.Calibration()
    kind = partial(calibration.class_of, SOURCE, SOURCE)
    assert kind(1, True, 0.0) != kind(1, False, 0.0)
    assert kind(4, True, -9.0) == kind(40, True, -50.0)
    assert kind(1, True, 0.0) != calibration.class_of(SOURCE | {"b"}, SOURCE, 1, True, 0.0)
    different = {
        calibration.class_of(SOURCE | asked, SOURCE, depth, first, log_prob)
        for asked in ({"b"}, {"c"})
        for depth in (1, 2, 3, 4)
        for first in (False, True)
        for log_prob in (0.0, -0.1, -0.3, -0.8, -2.0, -5.0)
    }
    assert len(different) == 2 * 4 * 2 * 6


def test_values_of_a_tree_are_products_along_its_paths() -> None:
    calibration = Calibration()
    tree = DraftTree.from_parents(
        [5, 6, 7, 8, 9, 3], [-1, 0, 0, 1, 2, 4], [0, -2.5, -0.3, -0.1, -0.2, -0.1]
    ).marked(SOURCE)
    values, classes = calibration.values(0, tree, SOURCE, 0.2)
    expected = [1.0]
    for node in range(1, 6):
        parent = tree.parent_list[node]
        if expected[parent] < 0.2:
            expected.append(0.0)
            assert classes[node] == NO_CLASS
            continue
        first, log_prob = node != 1, tree.log_prob_list[node]
        first_class = calibration.first_class(SOURCE, SOURCE)
        kind = first_class + place(tree.depth_list[node], first, log_prob)
        assert classes[node] == kind
        expected.append(expected[parent] * calibration.probability(0, kind, log_prob))
    assert values == pytest.approx(expected)
    assert values[3] == 0.0 < values[5]


def fly(planner: Planner, steps: int, every: int, gained: int) -> int:
    """Steps with a pilot of so many; every so often a tree of 1.5 ms, which gives `gained` tokens more."""
    flown = 0
    for step in range(1, steps + 1):
        if planner.grounded:
            planner.coasted([Passed(1, 1, 1, 1, 1.0)])
            continue
        flown += 1
        tree = step % every == 0
        columns, tokens, ms = (4, 1 + gained, 1.5) if tree else (1, 1, 1.0)
        planner.coasted([Passed(1, 1, columns, tokens, ms)], 0.2)
    return flown


def test_a_pilot_that_loses_stays_on_the_ground_most_of_the_time() -> None:
    curve = [(1, 1.0), (4, 1.5)]
    assert fly(Planner([], CostCurve(curve)), 8000, 20, 0) < 1600  # trees that are never right
    assert fly(Planner([], CostCurve(curve)), 8000, 1000, 3) < 4000  # nothing to draft
    assert fly(Planner([], CostCurve(curve)), 8000, 10, 3) == 8000
    planner = Planner([], CostCurve(curve))
    fly(planner, 8000, 20, 0)
    fly(planner, 4000, 2, 3)  # the text repeats itself now
    assert fly(planner, 1000, 2, 3) == 1000


def test_a_pilot_pays_for_what_its_trees_do_to_the_step_behind_them() -> None:
    def credit(after_ms: float) -> float:
        planner = Planner([], CostCurve([(1, 1.0), (4, 1.5)]))
        for _ in range(10):
            planner.coasted([Passed(1, 1, 4, 1, 1.5)], after_ms)
        return planner._pilot_credit

    assert credit(0.0) - credit(0.02) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("pass_ms", [0.0, 0.125])
def test_a_trial_whose_steps_are_cold_is_no_reason_to_give_a_drafter_up(pass_ms: float) -> None:
    """Where it is known what a draft takes otherwise; a step of this drafter is worth it when warm."""
    source, asked = Chain(depth=3), 0
    source.pass_ms = pass_ms
    controller = Controller([source], CostCurve([(1, 1.0), (4, 1.4)]), 4)
    for _ in range(600):
        (tree,) = controller.propose([DraftContext(0, [5], 16, 15)])
        asked = asked + 1 if controller.asked else 0  # in a row: warm from the sixth on
        path = AcceptedPath(tuple(range(len(tree))), (*tree.token_list[1:], 9))
        controller.observe([Outcome(0, tree, path)])
        slow = 8.0 if 0 < asked < 6 else 1.0
        rest = controller.planner.curve.ms(1) if len(tree) == 1 else 1.4
        draft_ms = 0.5 if asked else 0.0
        controller.observe_cost(StepCost(len(tree), draft_ms * slow, rest * slow))
    assert (source.asked > 550) == (pass_ms > 0)
