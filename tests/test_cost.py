"""The cost curve: what it says between its points, and how it follows measurements."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec import ArgumentError, Engine, EngineConfig
from pyspec.cost import (
    CostCurve,
    Measurement,
    Tuning,
    choose_threads,
    curve_of,
    follow,
    measure,
    settle_threads,
)
from pyspec.model_file import ModelFile

points = st.dictionaries(st.integers(1, 64), st.floats(0.1, 100), min_size=1, max_size=8)


@given(points, st.integers(1, 200))
def test_a_curve_goes_through_its_points_and_stays_positive(known, columns: int) -> None:
    curve = CostCurve(known.items())
    for n, ms in known.items():
        assert curve.ms(n) == pytest.approx(ms)
    assert curve.ms(columns) > 0


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=8, unique=True), st.integers(1, 199))
def test_a_rising_curve_rises_between_its_points(ms: list[float], columns: int) -> None:
    curve = CostCurve(zip(range(1, 100, 9), sorted(ms), strict=False))
    assert curve.ms(columns) <= curve.ms(columns + 1) + 1e-9


def test_a_curve_follows_what_is_measured_and_forgets_outliers() -> None:
    curve = CostCurve([(1, 1.0), (4, 2.0)])
    for _ in range(200):
        curve.observe(4, 3.0)
    assert curve.ms(4) == pytest.approx(3.0, rel=0.02)
    curve.observe(4, 1000.0)
    assert curve.ms(4) < 3.2


def test_a_larger_pass_is_never_cheaper() -> None:
    curve = curve_of([Measurement(1, [9.0, 9.5]), Measurement(2, [2.0]), Measurement(4, [3.0])])
    assert curve.points == [(1, 2.0), (2, 2.0), (4, 3.0)]


def test_running_times_fall_faster_than_they_rise() -> None:
    assert follow(0, 5) == 5
    assert 10 - follow(10, 5) > follow(10, 15) - 10 > 0
    assert follow(10, 1e6) < 11


@pytest.mark.parametrize("bad", [[], [(0, 1.0)], [(1, 0.0)]])
def test_no_curve_without_points(bad) -> None:
    with pytest.raises(ArgumentError, match="cost curve needs points"):
        CostCurve(bad)


def test_measuring_leaves_the_engine_unused(mtp) -> None:
    measured = measure(mtp.native, 4, rounds=2, seconds=10)
    assert [one.columns for one in measured] == [1, 2, 3, 4]
    assert all(ms > 0 for one in measured for ms in one.ms)
    assert mtp.native.length(0) == 0


class Played:
    """An engine whose passes take as long as `seconds` says of (threads, columns).

    `delayed` tells which of them are delayed from outside, by their numbers.
    """

    def __init__(self, seconds, threads: int = 4, size: int = 1 << 20, delayed=()) -> None:
        self.seconds, self.columns, self.delayed = seconds, [], delayed
        self.info = SimpleNamespace(
            n_threads=threads, size_bytes=size, token_bos=1, n_ctx=64, n_vocab=9
        )

    def verify(self, trees) -> None:
        (_, tokens, _) = trees[0]
        late = 0.02 if len(self.columns) in self.delayed else 0
        self.columns.append(len(tokens))
        time.sleep(self.seconds(self.info.n_threads, len(tokens)) + late)

    def reset(self, slot: int) -> None:
        pass

    def set_threads(self, n: int) -> None:
        self.info.n_threads = n


@pytest.mark.parametrize(
    ("seconds", "size", "expected"),
    [
        pytest.param(lambda n, columns: 0.004 * n, 1 << 20, 1, id="threads-wait"),
        pytest.param(lambda n, columns: 0.016 / n, 1 << 20, 4, id="threads-help"),
        pytest.param(lambda n, columns: 0.004 * n, 1 << 31, 4, id="large-models-take-all"),
    ],
)
def test_the_faster_number_of_threads_is_taken(seconds, size: int, expected: int) -> None:
    native = Played(seconds, size=size)
    assert choose_threads(native) == native.info.n_threads == expected


@pytest.mark.parametrize("delayed", [range(7), range(6, 13)], ids=["first", "last"])
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param(lambda n, columns: 0.002 * n, 1, id="threads-wait"),
        pytest.param(lambda n, columns: 0.008 / n, 4, id="threads-help"),
    ],
)
def test_a_delay_does_not_choose_the_threads(seconds, expected: int, delayed: range) -> None:
    native = Played(seconds, delayed=delayed)
    assert choose_threads(native) == native.info.n_threads == expected
    assert len(native.columns) <= 13


def test_threads_that_wait_long_for_a_core_are_not_taken() -> None:
    """On a busy machine a pass of several threads can take a second."""
    native = Played(lambda n, columns: 0.5 if n > 1 else 0.001)
    assert choose_threads(native) == 1
    assert len(native.columns) == 3


def test_probing_threads_of_a_slow_model_takes_one_pass_of_each() -> None:
    native = Played(lambda n, columns: 0.4 / n)
    assert choose_threads(native) == 4
    assert len(native.columns) == 3


@pytest.mark.parametrize(
    ("tuned", "given", "chosen", "expected"),
    [
        pytest.param(None, 0, 3, 3, id="as-the-other-chose"),
        pytest.param(2, 0, 3, 2, id="as-tuned"),
        pytest.param(None, 3, 3, 1, id="the-other-was-told"),
        pytest.param(None, 0, 8, 1, id="more-than-there-are"),
        pytest.param(9, 0, 3, 1, id="tuned-with-more-than-there-are"),
    ],
)
def test_threads_are_settled_once(tuned, given: int, chosen: int, expected: int) -> None:
    native = Played(lambda n, columns: 0.001 * n)
    tuning = Tuning("x", tuned, [(1, 1.0)]) if tuned else None
    like = SimpleNamespace(
        config=EngineConfig(n_threads=given), info=SimpleNamespace(n_threads=chosen)
    )
    assert settle_threads(native, tuning, like) == native.info.n_threads == expected
    assert bool(native.columns) == (expected == 1)


def test_engines_on_the_same_weights_have_the_same_threads(model, probes) -> None:
    with Engine(model, "mtp", n_ctx=64) as owner:
        chosen = owner.native.info.n_threads
        for draft in ("none", "mtp", "auto"):
            with Engine(model, draft, n_ctx=64, share=owner) as other:
                assert other.native.info.n_threads == chosen
        with Engine(model, "none", n_ctx=64, n_threads=1, share=owner) as other:
            assert other.native.info.n_threads == 1
        assert len(probes) == 1


@pytest.mark.parametrize(
    ("pass_seconds", "sizes"),
    [(0.0, {1, 2, 3, 4, 6, 8}), (0.04, {1, 2, 4, 8}), (0.31, {1, 4})],
)
def test_slow_models_are_measured_briefly(pass_seconds: float, sizes: set[int]) -> None:
    native = Played(lambda n, columns: pass_seconds)
    measured = measure(native, 8, rounds=1, seconds=0.1, brief=True)
    assert {one.columns for one in measured} == sizes


def test_threads_are_chosen_among_those_of_the_engine(plain) -> None:
    assert choose_threads(plain.native) == plain.native.info.n_threads == 1
    with pytest.raises(ArgumentError, match="2 threads; it must be 1 to 1"):
        plain.native.set_threads(2)


def test_tuning_is_kept_for_file_and_options(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYSPEC_CACHE_DIR", str(tmp_path))
    file, config = ModelFile.read(model), EngineConfig()
    assert Tuning.load(file, config) is None
    tuning = Tuning(str(model), 2, [(1, 1.5), (4, 2.5)])
    path = tuning.save(file, config)
    assert Tuning.load(file, config) == tuning
    assert Tuning.load(file, EngineConfig(n_threads=1)) is None
    path.write_text("{")
    assert Tuning.load(file, config) is None
    path.write_text('{"model": "x", "threads": 1, "points": []}')
    assert Tuning.load(file, config) is None


def test_a_delayed_step_of_a_new_size_is_not_believed() -> None:
    curve = CostCurve([(1, 10.0), (8, 24.0)])
    expected = curve.ms(32)
    curve.observe(32, 4000.0)
    assert curve.ms(32) < 1.5 * expected
    for _ in range(100):
        curve.observe(32, 80.0)
    assert curve.ms(32) == pytest.approx(80.0, rel=0.1)
