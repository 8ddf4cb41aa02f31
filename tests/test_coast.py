"""Steps for which no drafter is asked: several in one native call, and the text is as ever.

The yardstick is the step of four calls: propose, verify, accept, commit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pyspec.drafts.ngram import NgramDrafter

import pyspec.decoder
from pyspec import (
    AcceptedPath,
    DraftConfig,
    DraftContext,
    DraftTree,
    Engine,
    EngineConfig,
    Outcome,
    SamplingConfig,
)
from pyspec.calibration import Calibration
from pyspec.controller import Controller
from pyspec.cost import CostCurve
from pyspec.drafter import Drafter, Passed, StepCost
from pyspec.errors import AbortedError, ArgumentError, ContextError, SamplerError, TreeError
from pyspec.generate import GenerationResult
from pyspec.native import NativeEngine, NativeSampler
from pyspec.native.engine import CoastStep, CoastSteps
from pyspec.native.ngram import SuffixIndex
from pyspec.native.pilot import Pilot, PilotRules
from pyspec.planner import Record
from pyspec.sequence import Sequence as Request
from pyspec.stats import Stats
from tests.conftest import OpenEngine
from tests.prompts import FEW

GREEDY = SamplingConfig(temperature=0)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(SamplingConfig(temperature=0.8, seed=11), id="t0.8"),
    pytest.param(SamplingConfig(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=5), id="t1"),
]
REPEATING = b"def main():\n    pass\n" * 8
PROMPTS = [REPEATING, b"x = 1\n" * 20, FEW[1], FEW[4]]
NGRAM = frozenset(("ngram",))
DRAFTS = ["none", "ngram", "auto"]
"""Under `ngram` a controller has no other drafter, so its pilot is used from the first step on.

Under `auto` the others are tried first, and time decides when: only the text is certain.
"""
N_CTX = 256
MOST = 32
"""Steps of a native call at most."""


@dataclass
class Watched:
    """What an engine has been asked.

    Attributes:
        coasts: What every native coast gave.
        piloted: Whether it had a pilot.
    """

    coasts: list[CoastSteps] = field(default_factory=list)
    piloted: list[bool] = field(default_factory=list)

    @property
    def steps(self) -> list[CoastStep]:
        """All steps that were coasted."""
        return [step for coast in self.coasts for step in coast.steps]


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Keeps what the coasts of `engine` give from here on."""
    watched, coast = Watched(), engine.native.coast

    def watched_coast(*arguments: Any, **options: Any) -> CoastSteps:
        found = coast(*arguments, **options)
        watched.coasts.append(found)
        watched.piloted.append(options["pilot"] is not None)
        return found

    monkeypatch.setattr(engine.native, "coast", watched_coast)
    return watched


def certain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Time ends no coast, and where n-grams alone draft, their columns cost nothing."""
    monkeypatch.setattr(pyspec.decoder, "COAST_MS", 1e6)
    controller = engine.drafter
    if isinstance(controller, Controller) and controller.names == NGRAM:
        curve = CostCurve([(1, 1e6), (64, 1e6)])
        monkeypatch.setattr(curve, "observe", lambda *_: None)
        monkeypatch.setattr(controller, "curve", curve)
        monkeypatch.setattr(controller.planner, "curve", curve)
        monkeypatch.setattr(controller.planner, "_recent", {})
        monkeypatch.setattr(controller.planner, "_balance", 24.0)
    return engine


def step_by_step(engine: Engine, prompt: Any, **options: Any) -> GenerationResult:
    """The same without a coast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.drafter, "coast", lambda *_: None)
        watched = watch(engine, patch)
        result = engine.complete(prompt, **options)
    assert not watched.coasts
    return result


def begin(engine: Engine, prompt: Any, **options: Any) -> Request:
    sequence = engine.begin(prompt, **options)
    while not engine.prefill(sequence):
        pass
    return sequence


def assert_adds_up(stats: Stats, ended: bool) -> None:
    """Every token is drawn in a step, or was drafted in one and accepted."""
    assert sum(stats.trees.values()) == stats.steps
    assert sum((size - 1) * steps for size, steps in stats.trees.items()) == stats.drafted
    assert stats.generated + ended == stats.steps + stats.accepted
    assert stats.accepted <= stats.drafted
    assert sum(stats.stage_ms.values()) == pytest.approx(stats.decode_ms)


# ---- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_are_those_of_single_steps(
    open_engine: OpenEngine,
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    sampling: SamplingConfig,
) -> None:
    engine, plain = certain(open_engine(draft), monkeypatch), open_engine("none")
    watched = watch(engine, monkeypatch)
    for prompt in PROMPTS:
        options = {"max_tokens": 130, "ignore_end": True, "sampling": sampling}
        expected = step_by_step(plain, prompt, **options)
        found = engine.complete(prompt, **options)
        assert found.tokens == expected.tokens, prompt
        assert len(found.tokens) == found.stats.generated == 130
        assert (found.text, found.finish_reason) == (expected.text, "length")
        assert_adds_up(found.stats, ended=False)
        assert found.stats.drafted_by_source.keys() <= engine.drafter.names
        if draft == "none":
            assert (found.stats.steps, found.stats.trees) == (130, {1: 130})
    steps = watched.steps
    if draft == "none":
        assert len(steps) == 130 * len(PROMPTS) and not any(watched.piloted)
    if draft != "auto":
        assert max(len(coast.steps) for coast in watched.coasts) > 1
        drafted = [step for step in steps if step.tree is not None and len(step.path) > 1]
        assert (draft == "ngram") == bool(drafted)


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_a_coast_gives_is_told_step_by_step(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """To who steps the engine, and to the drafter."""
    engine = certain(open_engine(draft), monkeypatch)
    passed: list[Passed] = []
    coasted = engine.drafter.coasted

    def kept(some: Sequence[Passed]) -> None:
        passed.extend(some)
        coasted(some)

    monkeypatch.setattr(engine.drafter, "coasted", kept)
    sampling = SamplingConfig(temperature=0.8, seed=3)
    sequence = begin(engine, REPEATING, max_tokens=150, ignore_end=True, sampling=sampling)
    held, trees, ms, asked = list(sequence.tokens), Counter[int](), 0.0, 0
    while sequence.finish_reason is None:
        before = len(passed)
        emissions = engine.step([sequence])
        asked += len(passed) == before
        ms += engine.clock.total_ms
        for one in [single for emission in emissions for single in emission.single()]:
            assert one.sequence is sequence and one.plain == ()
            assert one.tree.token_list[0] == held[-1]
            drafts = [one.tree.token_list[node] for node in one.path.nodes[1:]]
            assert [*drafts, one.path.bonus_token] == list(one.path.tokens)
            held += one.path.tokens
            trees[len(one.tree)] += 1
            if len(passed) > before and len(one.tree) > 1:
                assert set(one.tree.sources[1:]) == {NGRAM}
    engine.end(sequence)
    assert held == sequence.tokens and trees == sequence.stats.trees
    assert sequence.stats.steps - asked == sum(one.steps for one in passed)
    assert draft == "auto" or asked == 0
    if asked == 0:
        columns = Counter[int]()
        for one in passed:
            columns[one.columns] += one.steps
        assert columns == trees and sum(one.tokens for one in passed) == 150
    assert all(one.n == 1 and one.ms > 0 for one in passed)
    assert sum(one.ms for one in passed) < ms


@pytest.mark.parametrize("draft", DRAFTS)
def test_they_end_where_single_steps_end(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    engine, plain = certain(open_engine(draft), monkeypatch), open_engine("none")
    end = plain.native.info.token_eos
    watched = watch(engine, monkeypatch)
    reasons = []
    for seed in range(12):
        sampling = SamplingConfig(temperature=1.0, seed=seed, logit_bias={end: 3.0})
        options = {"max_tokens": 60, "sampling": sampling}
        expected = step_by_step(plain, PROMPTS[seed % 4], **options)
        found = engine.complete(PROMPTS[seed % 4], **options)
        ended = expected.finish_reason == "stop"
        assert (found.tokens, found.text) == (expected.tokens, expected.text)
        assert found.finish_reason == expected.finish_reason
        assert end not in found.tokens
        assert found.stats.generated == len(expected.tokens)
        assert_adds_up(found.stats, ended)
        reasons.append((found.finish_reason, len(found.tokens) > 2))
    assert ("stop", True) in reasons and ("length", True) in reasons
    last = [coast.steps[-1].drawn[-1] for coast in watched.coasts if len(coast.steps) > 1]
    assert draft == "auto" or end in last  # not only in steps of their own


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_drafted_end_ends(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """Text that has repeated itself with the end token in it: it is in the trees."""
    engine, plain = certain(open_engine(draft), monkeypatch), open_engine("none")
    end = plain.native.info.token_eos
    x, y = plain.tokenize("x")[-1], plain.tokenize("\n")[-1]
    prompt = [x, y, end] * 24
    follows = {"logit_bias": {x: 1000.0, y: 1000.0, end: 1008.0}}
    watched = watch(engine, monkeypatch)
    for seed in range(6):
        sampling = SamplingConfig(temperature=1.0, seed=seed, **follows)
        going_on = step_by_step(plain, prompt, max_tokens=40, sampling=sampling, ignore_end=True)
        expected = going_on.tokens[: going_on.tokens.index(end)]
        found = engine.complete(prompt, max_tokens=40, sampling=sampling)
        assert (found.tokens, found.finish_reason) == (expected, "stop")
        assert_adds_up(found.stats, ended=True)
        beyond = engine.complete(prompt, max_tokens=40, sampling=sampling, ignore_end=True)
        assert beyond.tokens == going_on.tokens
    trees = [step.tree for step in watched.steps if step.tree is not None]
    assert draft == "auto" or any(end in tree.token_list for tree in trees) == (draft == "ngram")


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_context_is_filled_to_its_last_place(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    engine = certain(open_engine(draft, n_ctx=64), monkeypatch)
    plain = open_engine("none", n_ctx=64)
    watched = watch(engine, monkeypatch)
    for left in (50, 33, 7, 2, 1, 0):
        prompt = (plain.tokenize(b"x = 1\n") * 20)[: engine.n_ctx - left]
        expected = step_by_step(plain, prompt, temperature=0, ignore_end=True)
        found = engine.complete(prompt, temperature=0, ignore_end=True)
        assert (found.tokens, found.finish_reason) == (expected.tokens, "length")
        assert len(found.tokens) == left + 1
        assert_adds_up(found.stats, ended=False)
    assert draft == "auto" or len(watched.steps) > 10


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_time_ends_coasts(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    engine = certain(open_engine(draft), monkeypatch)
    options = {"max_tokens": 40, "temperature": 0, "ignore_end": True}
    lengths, found = [], []
    for ms in (1e6, 0.0):
        monkeypatch.setattr(pyspec.decoder, "COAST_MS", ms)
        with pytest.MonkeyPatch.context() as patch:
            watched = watch(engine, patch)
            found.append(engine.complete(REPEATING, **options).tokens)
        lengths.append({len(coast.steps) for coast in watched.coasts})
    assert found[0] == found[1]
    assert max(lengths[0]) > 1 and lengths[1] == {1}


def test_streamed_pieces_are_the_text(open_engine: OpenEngine) -> None:
    for draft in ("none", "auto"):
        options = {"max_tokens": 120, "temperature": 0.8, "seed": 2, "ignore_end": True}
        generation = open_engine(draft).generate(REPEATING, **options)
        pieces = list(generation)
        result = generation.result()
        assert len(pieces) >= 3  # steps of a coast are at most 32
        assert "".join(pieces) == result.text == open_engine("none").detokenize(result.tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": "no such text"},
        {"top_logprobs": 2},
        {"sampling": SamplingConfig(temperature=0, grammar='root ::= ("x" | "=" | [a-z0-9 \\n])+')},
    ],
    ids=["stop", "logprobs", "grammar"],
)
@pytest.mark.parametrize("draft", ["none", "auto"])
def test_what_must_be_looked_at_token_by_token_does_not_coast(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, draft: str, options: dict
) -> None:
    engine, plain = open_engine(draft), open_engine("none")
    watched = watch(engine, monkeypatch)
    options = {"max_tokens": 40, "ignore_end": True, "sampling": GREEDY} | options
    sequence = begin(engine, REPEATING, **options)
    while sequence.finish_reason is None:
        engine.step([sequence])
    engine.end(sequence)
    assert not watched.coasts
    if "sampling" not in options or options["sampling"] is GREEDY:
        expected = step_by_step(plain, REPEATING, max_tokens=40, temperature=0, ignore_end=True)
        assert sequence.output == expected.tokens
    if "top_logprobs" in options:
        assert len(sequence.logprobs) == 40


@pytest.mark.parametrize(
    ("draft", "options", "most"),
    [
        ("ngram", {"draft": "none"}, 1),
        ("ngram", {"draft_nodes": 2}, 2),
        ("auto", {"draft": "mtp"}, 64),
        ("auto", {"draft": "none"}, 1),
        ("auto", {"draft_nodes": 3}, 3),
    ],
)
def test_requests_with_limits_of_their_own_get_no_pilot(
    open_engine: OpenEngine,
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    options: dict[str, Any],
    most: int,
) -> None:
    engine = certain(open_engine(draft), monkeypatch)
    watched = watch(engine, monkeypatch)

    def decode(**limits: Any) -> Stats:
        sequence = begin(
            engine, REPEATING, max_tokens=80, ignore_end=True, sampling=GREEDY, **limits
        )
        while sequence.finish_reason is None:
            engine.step([sequence])
        engine.end(sequence)
        return sequence.stats

    stats = decode(**options)
    assert not any(watched.piloted) and max(stats.trees) <= most
    if "draft" in options:
        assert stats.drafted_by_source.keys() <= {options["draft"]}
    decode()
    assert draft == "auto" or any(watched.piloted)


def test_a_sampler_that_rejects_everything_fails_its_request_alone(plain: Engine) -> None:
    nothing = SamplingConfig(
        temperature=0, logit_bias=dict.fromkeys(range(plain.native.info.n_vocab), float("-inf"))
    )
    sequence = begin(plain, "x", max_tokens=4, sampling=nothing)
    try:
        assert plain.step([sequence]) == []
        assert isinstance(sequence.error, SamplerError)
        assert sequence.finish_reason == "error" and sequence.intact
    finally:
        plain.end(sequence)


# ---- several sequences --------------------------------------------------------------------------


def test_plain_sequences_together_ask_nobody_and_are_as_alone(
    open_engine: OpenEngine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("none", n_slots=3)
    sampling = SamplingConfig(temperature=0.8, seed=4)

    def never(*_: Any) -> Any:
        raise AssertionError("a drafter that drafts nothing was asked")

    passed: list[Passed] = []
    monkeypatch.setattr(engine.drafter, "propose", never)
    monkeypatch.setattr(engine.drafter, "observe", never)
    monkeypatch.setattr(engine.drafter, "observe_cost", never)
    monkeypatch.setattr(engine.drafter, "coasted", passed.extend)
    limits = [20, 33, 47]
    waiting = [
        begin(engine, prompt, max_tokens=n, ignore_end=True, sampling=sampling)
        for prompt, n in zip(PROMPTS, limits, strict=False)
    ]
    running = list(waiting)
    while running:
        emissions = engine.step(running)
        if len(running) > 1:
            assert [one.sequence for one in emissions] == running
            assert all(len(one.tree) == 1 and not one.plain for one in emissions)
            assert [one[:4] for one in passed] == [(1, len(running), len(running), len(running))]
        assert sum(one.tokens for one in passed) == sum(
            len(one.path.tokens) + len(one.plain) for one in emissions
        )
        passed.clear()
        running = [one for one in running if one.finish_reason is None]
    for sequence, prompt, n in zip(waiting, PROMPTS, limits, strict=False):
        engine.end(sequence)
        alone = step_by_step(plain, prompt, max_tokens=n, ignore_end=True, sampling=sampling)
        assert sequence.output == alone.tokens and sequence.stats.trees == {1: n}


def test_a_request_that_cannot_coast_does_not_change_its_neighbour(
    open_engine: OpenEngine, plain: Engine
) -> None:
    engine = open_engine("none", n_slots=3)
    options = {"ignore_end": True, "sampling": SamplingConfig(temperature=0.8, seed=4)}
    expected = step_by_step(plain, REPEATING, max_tokens=60, **options).tokens
    free = begin(engine, REPEATING, max_tokens=60, **options)
    watched = begin(engine, REPEATING, max_tokens=25, top_logprobs=1, **options)
    while free.finish_reason is None:
        running = [one for one in (free, watched) if one.finish_reason is None]
        engine.step(running)
    assert free.output == expected and watched.output == expected[:25]
    assert len(watched.logprobs) == 25
    engine.end(free)
    engine.end(watched)


def test_several_sequences_coast_while_drafting_does_not_pay(
    open_engine: OpenEngine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("auto", n_slots=3)
    controller = engine.drafter
    assert isinstance(controller, Controller)
    passed: list[Passed] = []
    coasted = controller.coasted

    def kept(some: Sequence[Passed]) -> None:
        passed.extend(some)
        coasted(some)

    monkeypatch.setattr(controller, "coasted", kept)
    options = {"ignore_end": True, "sampling": GREEDY}
    running = [begin(engine, prompt, max_tokens=30, **options) for prompt in PROMPTS[:2]]
    for _ in range(30):
        controller.planner._balance = -1.0
        engine.step(running)
    assert [one[:4] for one in passed] == [(1, 2, 2, 2)] * 30
    for sequence, prompt in zip(running, PROMPTS, strict=False):
        engine.end(sequence)
        assert sequence.output == step_by_step(plain, prompt, max_tokens=30, **options).tokens


def test_several_sequences_are_drafted_for_together(
    open_engine: OpenEngine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pilot is for one alone; for several its drafter is asked."""
    engine = certain(open_engine("ngram", n_slots=2), monkeypatch)
    options = {"max_tokens": 60, "ignore_end": True, "sampling": GREEDY}
    both = [begin(engine, prompt, **options) for prompt in PROMPTS[:2]]
    while all(one.finish_reason is None for one in both):
        engine.step(both)
    for sequence, prompt in zip(both, PROMPTS, strict=False):
        assert sequence.stats.drafted > 5
        while sequence.finish_reason is None:  # alone in the end, with a pilot
            engine.step([sequence])
        engine.end(sequence)
        assert sequence.output == step_by_step(plain, prompt, **options).tokens
        assert_adds_up(sequence.stats, ended=False)


# ---- drafters of others -------------------------------------------------------------------------


class Learner(NgramDrafter):
    """Is told what was accepted."""

    name = "learner"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[int] = []

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self.seen.extend(outcome.path.tokens)


class Accountant(NgramDrafter):
    """Is told what steps cost."""

    name = "accountant"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.costs: list[StepCost] = []

    def observe_cost(self, cost: StepCost) -> None:
        self.costs.append(cost)


@pytest.mark.parametrize(
    "kinds",
    [[NgramDrafter], [Learner], [Accountant], [Learner, NgramDrafter], [Accountant, NgramDrafter]],
    ids=lambda kinds: "+".join(kind.name for kind in kinds),
)
def test_drafters_that_learn_are_told_of_every_step(
    plain: Engine,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[type[Drafter]],
) -> None:
    options = {"max_tokens": 150, "temperature": 0, "ignore_end": True}
    with Engine("demo", DraftConfig("auto"), share=plain, drafters=kinds, n_threads=1) as engine:
        controller = engine.drafter
        assert isinstance(controller, Controller)
        watched = watch(engine, monkeypatch)
        result = engine.complete(REPEATING, **options)
        source = next(one for one in controller.sources if type(one) is kinds[0])
        if isinstance(source, Learner):
            assert source.seen == result.tokens
        elif isinstance(source, Accountant):
            assert len(source.costs) == result.stats.steps
            assert sum(cost.columns for cost in source.costs) == sum(
                size * steps for size, steps in result.stats.trees.items()
            )
        assert bool(watched.coasts) == (
            kinds == [NgramDrafter]
        )  # who learns nothing may be left out
    assert result.tokens == step_by_step(plain, REPEATING, **options).tokens


# ---- the native call ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native(plain: Engine) -> Iterator[NativeEngine]:
    """Two sequences, trees of up to 12 nodes."""
    config = EngineConfig(n_ctx=N_CTX, n_slots=2, n_threads=1)
    with NativeEngine.attach(plain.native, config, n_ctx=N_CTX, max_nodes=12) as opened:
        yield opened


def rules(calibration: Calibration, **changes: Any) -> PilotRules:
    """Columns cost next to nothing: whatever is drafted is verified."""
    found = PilotRules(
        calibration,
        slot=0,
        first_class=calibration.first_class(NGRAM, NGRAM),
        max_nodes=12,
        root_ms=1e6,  # no plain step takes longer: none pays for the tree before it
        column_ms=0.0,
        costs_ms=[(size, 1e-9 * size) for size in range(2, 13)],
        recent=(1.0, 1.0),
        fade=0.9,
    )
    return found._replace(**changes)


def pilot_of(depth: int = 8, **changes: Any) -> Pilot:
    pilot = Pilot(SuffixIndex(), depth)
    pilot.set_rules(rules(Calibration(), **changes))
    return pilot


def fill(native: NativeEngine, text: list[int], slot: int = 0) -> None:
    """The sequence that decoding of `text` goes on from."""
    native.reset(slot)
    if text[:-1]:
        native.prefill(slot, text[:-1])


def coast_on(
    native: NativeEngine,
    sampler: NativeSampler,
    text: list[int],
    max_ms: float = 1e6,
    **limits: Any,
) -> CoastSteps:
    """A coast of slot 0 behind the last of `text`, which no time ends unless it is asked to."""
    return native.coast(sampler, 0, text[-1], text=text, max_ms=max_ms, **limits)


def repeat(
    native: NativeEngine, text: list[int], coasts: list[tuple[int, list[CoastStep]]], **options: Any
) -> list[int]:
    """Takes the steps of coasts once more, in single calls, and compares what they leave behind.

    Args:
        native: The engine; slot 0 is as the last coast left it.
        text: What slot 0 held before the first, with the root.
        coasts: Limits on tokens, and steps.
        options: The sampler as it was before, and whether an end token ends.

    Returns:
        The text then.
    """
    sampler: NativeSampler = options["sampler"]
    length, state = native.length(0), native.save(0)
    following = following_logits(native, coasts[-1][1][-1].drawn[-1])
    fill(native, text)
    held = list(text)
    for left, steps in coasts:
        for step in steps:
            tree = step.tree or DraftTree.root(held[-1])
            assert tree.token_list[0] == held[-1]
            DraftTree(
                tree.tokens, tree.parents, tree.depths, tree.log_probs
            )  # checks that it is one
            assert len(tree) <= 12 and tree.max_depth <= left - 1
            assert native.length(0) + len(tree) <= native.info.n_ctx
            native.verify([(0, tree.token_list, tree.parent_list)], greedy=sampler.greedy)
            nodes, bonus = native.accept(sampler, 0, min(left, len(tree)), options["stop_eog"])
            assert step.path == nodes
            assert step.drawn == [*[tree.token_list[node] for node in nodes[1:]], bonus]
            native.commit(0, nodes)
            left -= len(step.drawn)
            held += step.drawn
        assert left >= 0
    assert native.length(0) == length == len(held) - 1
    assert native.save(0) == state
    assert (following_logits(native, held[-1]) == following).all()
    return held


def following_logits(native: NativeEngine, root: int) -> NDArray[np.float32]:
    """Logits behind `root`, which is not committed; none where there is no place for it."""
    if native.length(0) == native.info.n_ctx:
        return np.zeros(0, np.float32)
    native.verify([(0, [root], [-1])])
    return native.logits(0, 0)


def texts(native: NativeEngine) -> list[list[int]]:
    """Texts that repeat themselves, and one that does not."""
    one = native.tokenize("for i in range(10):\n    print(i)\n")
    return [one * 4, native.tokenize("x = 1\n" * 12), native.tokenize("abcabcabc"), one]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("piloted", [False, True], ids=["plain", "pilot"])
def test_a_coast_is_verify_accept_and_commit(
    native: NativeEngine, sampling: SamplingConfig, piloted: bool
) -> None:
    trees = accepted = 0
    for text in texts(native):
        pilot = pilot_of() if piloted else None
        fill(native, text)
        sampler = native.sampler(sampling)
        again, held, coasts = sampler.clone(), list(text), []
        for max_steps, max_tokens in ((5, 100), (32, 100), (32, 9)):
            found = coast_on(
                native,
                sampler,
                held,
                max_steps=max_steps,
                max_tokens=max_tokens,
                stop_eog=False,
                pilot=pilot,
            )
            drawn = [token for step in found.steps for token in step.drawn]
            assert len(found.steps) == max_steps or len(drawn) == max_tokens
            assert len(drawn) <= max_tokens
            coasts.append((max_tokens, found.steps))
            held += drawn
            assert found.sample_ms >= 0 and found.commit_ms >= 0
            assert all(step.ms > 0 for step in found.steps)
            trees += sum(step.tree is not None for step in found.steps)
            accepted += sum(len(step.path) - 1 for step in found.steps)
            if pilot is not None:
                assert_has_read(pilot.index, held)
        assert repeat(native, text, coasts, sampler=again, stop_eog=False) == held
    assert (trees > 10 and accepted > 10) == piloted


def assert_has_read(index: SuffixIndex, text: list[int]) -> None:
    """`index` knows all of `text`, and drafts what one drafts that has read it at once."""
    assert index.unread(text)[0] == 0
    index.has_read(len(text), text[-1])
    tree, fresh = index.draft(text, 8, 12), SuffixIndex().draft(text, 8, 12)
    assert tree.token_list == fresh.token_list
    assert tree.parent_list == fresh.parent_list
    assert tree.log_prob_list == fresh.log_prob_list


@pytest.mark.parametrize("piloted", [False, True], ids=["plain", "pilot"])
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    max_steps=st.integers(1, 40),
    max_tokens=st.integers(1, 50),
    free=st.integers(1, 40),
    depth=st.integers(0, 12),
    max_nodes=st.integers(1, 12),
)
def test_limits_hold(
    native: NativeEngine,
    piloted: bool,
    max_steps: int,
    max_tokens: int,
    free: int,
    depth: int,
    max_nodes: int,
) -> None:
    """Also where the context ends."""
    text = (native.tokenize("x = 1\n") * 60)[: native.info.n_ctx - free + 1]
    fill(native, text)
    max_tokens = min(max_tokens, free)
    pilot = pilot_of(depth, max_nodes=max_nodes) if piloted else None
    sampler = native.sampler(GREEDY)
    again = sampler.clone()
    found = coast_on(
        native,
        sampler,
        text,
        max_steps=max_steps,
        max_tokens=max_tokens,
        stop_eog=False,
        pilot=pilot,
    )
    drawn = sum(len(step.drawn) for step in found.steps)
    assert 1 <= len(found.steps) <= min(max_steps, MOST) and drawn <= max_tokens
    assert len(found.steps) == min(max_steps, MOST) or drawn == max_tokens
    for step in found.steps:
        assert step.tree is None or (step.tree.max_depth <= depth and len(step.tree) <= max_nodes)
    repeat(native, text, [(max_tokens, found.steps)], sampler=again, stop_eog=False)


def test_time_ends_a_coast_behind_a_step(native: NativeEngine) -> None:
    text = texts(native)[0]
    for pilot in (None, pilot_of()):
        fill(native, text)
        found = coast_on(
            native,
            native.sampler(GREEDY),
            text,
            max_steps=32,
            max_tokens=100,
            max_ms=0,
            pilot=pilot,
        )
        assert len(found.steps) == 1
        assert native.length(0) == len(text) - 1 + len(found.steps[0].drawn)


@pytest.mark.parametrize("piloted", [False, True], ids=["plain", "pilot"])
def test_an_end_token_ends_a_coast_if_asked(native: NativeEngine, piloted: bool) -> None:
    end = native.info.token_eos
    x, y = native.tokenize("x\n")
    text = [*[x, y, end] * 16, x]
    drafted = 0
    for seed in range(8):
        sampling = SamplingConfig(
            temperature=1.0, seed=seed, logit_bias={x: 1000.0, y: 1000.0, end: 1008.0}
        )
        fill(native, text)
        state = native.save(0)
        runs = []
        for stop_eog in (True, False):
            native.restore(0, state)
            found = coast_on(
                native,
                native.sampler(sampling),
                text,
                max_steps=20,
                max_tokens=20,
                stop_eog=stop_eog,
                pilot=pilot_of() if piloted else None,
            )
            runs.append([token for step in found.steps for token in step.drawn])
            last = found.steps[-1]
            if stop_eog and last.tree is not None:
                drafted += last.tree.child(last.path[-1], end) is not None
        ended, going_on = runs
        assert len(going_on) == 20 and end in going_on
        assert ended == going_on[: going_on.index(end) + 1]
    assert (drafted > 0) == piloted  # the tree had it, and its children


def test_a_pilot_that_gives_way_takes_no_step(native: NativeEngine) -> None:
    text = texts(native)[0]
    fill(native, text)
    sampler = native.sampler(GREEDY)
    pilot = pilot_of(least=1e9)
    for _ in range(2):
        found = coast_on(native, sampler, text, max_steps=5, max_tokens=50, pilot=pilot)
        assert found.steps == [] and native.length(0) == len(text) - 1
        assert pilot.index.unread(text)[0] == 0
        pilot.index.has_read(len(text), text[-1])
    pilot.set_rules(rules(Calibration()))
    found = coast_on(native, sampler, text, max_steps=5, max_tokens=50, pilot=pilot)
    assert len(found.steps) == 5


def test_a_pilot_gives_way_in_the_middle(native: NativeEngine) -> None:
    """Where its trees end: behind so many steps, all of which have one."""
    sampling = SamplingConfig(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3)
    lengths = set()
    for text in texts(native):
        fill(native, text)
        pilot, held = pilot_of(least=1e-3), list(text)
        found = coast_on(
            native,
            native.sampler(sampling),
            text,
            max_steps=32,
            max_tokens=100,
            stop_eog=False,
            pilot=pilot,
        )
        assert all(step.tree is not None for step in found.steps)
        held += [token for step in found.steps for token in step.drawn]
        if len(found.steps) < 32:
            assert pilot.look(held).gives_way
        lengths.add(len(found.steps))
    assert any(0 < length < 32 for length in lengths)


def test_an_index_follows_a_text_that_was_replaced(native: NativeEngine) -> None:
    short, long = texts(native)[:2]
    # Longer than what was there before, and what it drafts comes from its beginning.
    other = [*range(300, 340), *range(400, 500), *range(300, 306)]
    pilot = pilot_of()
    for text in (short, long, short, other, [*long, *short]):
        fill(native, text)
        found = coast_on(
            native,
            native.sampler(GREEDY),
            text,
            max_steps=3,
            max_tokens=20,
            stop_eog=False,
            pilot=pilot,
        )
        fresh = SuffixIndex().draft(text, 8, 12)
        assert found.steps[0].tree is not None
        assert found.steps[0].tree.token_list == fresh.token_list


def test_wrong_arguments_of_a_coast_are_named(native: NativeEngine) -> None:
    text = texts(native)[0]
    fill(native, text)
    sampler = native.sampler(GREEDY)

    def coast(
        slot: int = 0, root: int = text[-1], n: int = 4, steps: int = 4, **options: Any
    ) -> CoastSteps:
        return native.coast(sampler, slot, root, max_steps=steps, max_tokens=n, **options)

    with pytest.raises(ArgumentError, match="max_steps is 0"):
        coast(steps=0)
    with pytest.raises(ArgumentError, match="max_tokens 0"):
        coast(n=0)
    with pytest.raises(ArgumentError, match=r"max_steps is -1 and max_tokens -7"):
        coast(n=-7, steps=-1)
    for slot in (-1, 2):
        with pytest.raises(ArgumentError, match=f"no sequence {slot}"):
            coast(slot)
        with pytest.raises(ArgumentError, match=f"no sequence {slot}"):
            coast(slot, pilot=pilot_of(), text=text)
    for root in (-1, native.info.n_vocab):
        with pytest.raises(TreeError, match=f"token {root}"):
            coast(root=root)
    with pytest.raises(ArgumentError, match="a text of 0 tokens"):
        coast(pilot=pilot_of(), text=[])
    for change in (
        {"slot": -1},
        {"first_class": -1},
        {"max_nodes": 0},
        {"max_nodes": 65},
        {"recent": (1.0, 0.0)},
        {"fade": 1.0},
    ):
        with pytest.raises(ArgumentError, match="pilot: "):
            coast(pilot=pilot_of(**change), text=text)
    for depth in (-1, 65):
        with pytest.raises(ArgumentError, match=f"depth {depth}"):
            coast(pilot=pilot_of(depth), text=text)
    assert native.length(0) == len(text) - 1
    assert len(coast(max_ms=1e6).steps) == 4, "the sequence is as before"


@pytest.mark.parametrize("change", [{"first_class": 1 << 20}, {"slot": 1 << 16}])
def test_rules_that_nothing_can_be_learned_with_are_refused_before_a_step(
    native: NativeEngine, change: dict[str, int]
) -> None:
    text = texts(native)[0]
    fill(native, text)
    with pytest.raises(ArgumentError):
        coast_on(
            native,
            native.sampler(GREEDY),
            text,
            max_steps=4,
            max_tokens=40,
            pilot=pilot_of(**change),
        )
    assert native.length(0) == len(text) - 1


@pytest.mark.parametrize("piloted", [False, True], ids=["plain", "pilot"])
def test_a_full_context_is_named(native: NativeEngine, piloted: bool) -> None:
    text = (native.tokenize("x = 1\n") * 60)[: native.info.n_ctx + 1]
    fill(native, text)
    with pytest.raises(ContextError, match=str(N_CTX)):
        coast_on(
            native,
            native.sampler(GREEDY),
            text,
            max_steps=4,
            max_tokens=4,
            pilot=pilot_of() if piloted else None,
        )
    assert native.length(0) == native.info.n_ctx


def test_after_a_failure_the_index_reads_anew(native: NativeEngine) -> None:
    text = texts(native)[1]
    fill(native, text)
    pilot, sampler = pilot_of(), native.sampler(GREEDY)
    limits: dict[str, Any] = {"max_steps": 3, "max_tokens": 20, "max_ms": 1e6, "pilot": pilot}
    found = native.coast(sampler, 0, text[-1], text=text, **limits)
    held = text + [token for step in found.steps for token in step.drawn]
    with pytest.raises(ArgumentError):  # that it read what is new is not undone
        native.coast(sampler, 7, 9, text=[*held, 5, 7, 9], **limits)
    found = native.coast(sampler, 0, held[-1], text=held, **limits)
    assert found.steps[0].tree is not None
    assert found.steps[0].tree.token_list == SuffixIndex().draft(held, 8, 12).token_list


# ---- abort --------------------------------------------------------------------------------------


@pytest.mark.parametrize("piloted", [False, True], ids=["plain", "pilot"])
def test_an_abort_in_a_coast_keeps_its_steps(native: NativeEngine, piloted: bool) -> None:
    """They are returned; the next call fails, and the one behind it goes on."""
    text = texts(native)[0]
    fill(native, text, 1)
    expected, state, sampler = [], native.save(1), native.sampler(GREEDY)
    while len(expected) < 120:
        root = expected[-1] if expected else text[-1]
        found = native.coast(sampler, 1, root, max_steps=32, max_tokens=32, stop_eog=False)
        expected += [token for step in found.steps for token in step.drawn]
    early = 0
    for attempt in range(40):
        native.restore(0, state)
        pilot, held, aborted = pilot_of() if piloted else None, list(text), False
        timer = threading.Timer(0.0004 * (1 + attempt % 12), native.abort)
        timer.start()
        while len(held) < len(text) + 100:
            try:
                found = coast_on(
                    native,
                    sampler,
                    held,
                    max_steps=32,
                    max_tokens=len(text) + 100 - len(held),
                    stop_eog=False,
                    pilot=pilot,
                )
            except AbortedError:
                aborted = True
                continue
            drawn = [token for step in found.steps for token in step.drawn]
            held += drawn
            early += len(found.steps) < 32 and len(held) < len(text) + 100
            assert native.length(0) == len(held) - 1
        timer.join()
        if not aborted:  # it came after the last call
            with pytest.raises(AbortedError):
                native.prefill(0, [held[-1]])
        assert held[len(text) :] == expected[:100]
        if early >= 3:
            return
    raise AssertionError("no abort came within a coast")


@pytest.mark.parametrize("draft", ["none", "auto"])
def test_an_aborted_generation_is_the_beginning_of_the_text(plain: Engine, draft: str) -> None:
    options = {"max_tokens": 900, "temperature": 0, "ignore_end": True}
    with Engine("demo", draft, share=plain, n_ctx=1200, n_threads=1) as engine:
        expected = engine.complete(REPEATING, **options)
        for seconds in (0.002, 0.01, 0.02):
            generation = engine.generate(REPEATING, **options)
            pieces = [next(generation)]
            timer = threading.Timer(seconds, engine.abort)
            timer.start()
            with pytest.raises(AbortedError):
                while True:
                    pieces.extend(generation)
                    engine.native.prefill(0, [1])  # it was quicker: the abort is for this call
                    engine.native.reset(0)
            timer.join()
            partial = generation.partial()
            n = len(partial.tokens)
            assert n > 0 and partial.tokens == expected.tokens[:n]
            assert expected.text.startswith("".join(pieces))
            assert_adds_up(partial.stats, ended=False)
            assert engine.complete(REPEATING, **options).tokens == expected.tokens


# ---- a pilot and the controller -----------------------------------------------------------------


class Held(NamedTuple):
    """A sequence, as a drafter sees it."""

    slot: int
    tokens: list[int]


small_texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
repetitive = st.tuples(small_texts, st.lists(st.integers(0, 3), min_size=1, max_size=7)).map(
    lambda parts: parts[0] + parts[1] * 6
)
lessons = st.lists(st.tuples(st.integers(0, 59), st.booleans()), max_size=40)
milliseconds = st.floats(1e-3, 20.0)
recents = st.tuples(st.floats(0.0, 30.0), st.floats(0.01, 30.0))
rising = st.lists(st.floats(0.0, 5.0), min_size=9, max_size=9)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def curve_of_steps(first: float, more: list[float]) -> CostCurve:
    points, ms = [], first
    for size, step in zip(SIZES, more, strict=True):
        points.append((size, ms))
        ms += step
    return CostCurve(points)


def taught(calibration: Calibration, some: list[tuple[int, bool]]) -> None:
    first = calibration.first_class(NGRAM, NGRAM)
    for kind, hit in some:
        calibration.observe(0, first + kind, hit)


@settings(deadline=None, max_examples=150)
@given(small_texts | repetitive, lessons, st.floats(0.01, 5.0), rising, recents)
def test_a_pilot_chooses_what_a_controller_chooses(
    tokens: list[int],
    lesson: list[tuple[int, bool]],
    first: float,
    more: list[float],
    recent: tuple[float, float],
) -> None:
    source = NgramDrafter(None, DraftConfig("ngram"))  # type: ignore[arg-type]
    controller = Controller([source], curve_of_steps(first, more), 24)
    taught(controller._calibration, lesson)
    controller.planner._recent[1] = Record(*recent, 1.0)
    coast = controller.coast([Held(0, tokens)], True)
    assert coast is not None and coast.pilot is not None
    rules = coast.pilot.rules
    assert rules.recent_tokens / rules.recent_ms == recent[0] / recent[1]
    view = coast.pilot.look(tokens)
    (tree,) = controller.propose([DraftContext(0, tokens, 24, 64)])
    proposal = controller._proposals.get(0)
    if proposal is not None:
        floor = controller.planner.rate * rules.column_ms
        assert floor == pytest.approx(controller._floor, rel=1e-12)
    values = [1.0]
    if proposal is not None:
        values, _ = controller._calibration.values(0, proposal.tree, NGRAM, controller._floor)
    assert view.gives_way == (view.gain < 0.0) == False  # noqa: E712 - nobody to give way to
    size, _, worth = controller._choose_size([values])
    plain = 1.0 - controller.planner.rate * controller.curve.ms(1)
    assert view.gain == pytest.approx(worth - plain, rel=1e-6, abs=1e-9)
    assert len(tree) == size
    if view.nodes != size:  # as good as each other
        rate = controller.planner.rate

        def gain(n: int) -> float:
            cost = 1.05 * (controller.curve.ms(n) - controller.curve.ms(1))
            return sum(sorted(values, reverse=True)[1:n]) - rate * cost

        assert gain(view.nodes) == pytest.approx(gain(size), abs=1e-9)


@settings(deadline=None, max_examples=150)
@given(
    small_texts | repetitive,
    lessons,
    st.lists(st.floats(0.0, 3.0), min_size=8, max_size=8),
    st.floats(0.0, 0.5),
    recents,
    st.integers(1, 12),
)
def test_a_pilots_gain_is_its_definition(
    tokens: list[int],
    lesson: list[tuple[int, bool]],
    more: list[float],
    column_ms: float,
    recent: tuple[float, float],
    depth: int,
) -> None:
    """Written down once more, without the controller."""
    calibration = Calibration()
    taught(calibration, lesson)
    costs = [(size, sum(more[: i + 1])) for i, size in enumerate(SIZES[1:])]
    pilot = Pilot(SuffixIndex(), depth)
    pilot.set_rules(
        rules(calibration, max_nodes=24, column_ms=column_ms, costs_ms=costs, recent=recent)
    )
    view = pilot.look(tokens)

    rate = max(recent[0], 1e-3) / recent[1]
    tree = SuffixIndex().draft(tokens, depth, 24)
    values = [1.0]
    if len(tree) > 1:
        values, _ = calibration.values(0, tree.marked(NGRAM), NGRAM, rate * column_ms)
    ranked = sorted(values, reverse=True)
    gains = {1: 0.0}
    if len(ranked) > 1 and ranked[1] >= rate * column_ms:
        gains |= {n: sum(ranked[1:n]) - rate * ms for n, ms in costs if n <= len(ranked)}
    best = max(gains.values())
    assert view.gain == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert gains[view.nodes] == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert view == pilot.look(tokens)  # looking changes nothing


@settings(deadline=None)
@given(
    repetitive,
    st.lists(st.tuples(st.floats(0.0, 12.0), milliseconds), max_size=3),
    st.floats(0.0, 1.0),
    st.floats(-1.0, 3.0),
    milliseconds,
    recents,
)
def test_it_gives_way_where_another_drafter_is_worth_more(
    tokens: list[int],
    others: list[tuple[float, float]],
    margin: float,
    least: float,
    root_ms: float,
    recent: tuple[float, float],
) -> None:
    pilot = pilot_of(others=others, margin=margin, least=least, root_ms=root_ms, recent=recent)
    view = pilot.look(tokens)
    rate = max(recent[0], 1e-3) / recent[1]
    worth = 1.0 + view.gain - rate * root_ms
    better = [n - rate * ms - worth - margin for n, ms in others]
    assume(all(abs(one) > 1e-9 for one in (*better, view.gain - least)))
    assert view.gives_way == (any(one > 0 for one in better) or view.gain < least)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_coast_drafts_and_learns_as_its_controller(
    native: NativeEngine, sampling: SamplingConfig
) -> None:
    """Tree by tree, where time decides nothing: columns cost nothing."""
    sizes, learned = set(), set()
    for text in texts(native)[:3]:
        controllers = [
            Controller(
                [NgramDrafter(native, DraftConfig("ngram"))],
                CostCurve([(1, 1e6), (12, 1e6)]),
                12,
            )
            for _ in range(2)
        ]
        coasting, stepping = controllers
        fill(native, text)
        fill(native, text, 1)
        sampler = native.sampler(sampling)
        again = sampler.clone()
        coast = coasting.coast([Held(0, text)], True)
        assert coast is not None and coast.pilot is not None and coast.source == NGRAM
        found = coast_on(
            native, sampler, text, max_steps=32, max_tokens=80, stop_eog=False, pilot=coast.pilot
        )
        held = list(text)
        for step in found.steps:
            left = 80 - (len(held) - len(text))
            (tree,) = stepping.propose([DraftContext(0, held, 12, left - 1)])
            taken = step.tree or DraftTree.root(held[-1])
            assert tree.token_list == taken.token_list and tree.parent_list == taken.parent_list
            assert tree.log_prob_list == pytest.approx(taken.log_prob_list, abs=1e-6)
            native.verify([(1, tree.token_list, tree.parent_list)])
            nodes, bonus = native.accept(again, 1, min(left, len(tree)), False)
            native.commit(1, nodes)
            tokens = (*[tree.token_list[node] for node in nodes[1:]], bonus)
            assert (step.path, tuple(step.drawn)) == (nodes, tokens)
            path = AcceptedPath(tuple(nodes), tokens)
            stepping.observe([Outcome(0, tree, path)])
            held += tokens
            sizes.add(len(tree))
        beliefs = [
            [
                one._calibration.probability(slot, kind, -0.7)
                for slot in (0, 1)
                for kind in range(60)
            ]
            for one in controllers
        ]
        assert beliefs[0] == pytest.approx(beliefs[1], abs=1e-12)
        learned.update(round(belief, 9) for belief in beliefs[0])
        for one in controllers:
            one.close()
    assert len(sizes) > 2 and len(learned) > 5
