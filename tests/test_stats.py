"""Stats: what is counted, what is derived, and the JSON object's keys."""

from __future__ import annotations

import time

from pyspec import AcceptedPath, DraftTree, Stats
from pyspec.stats import STAGES, StepClock


def test_counts_paths() -> None:
    stats = Stats("mtp", prompt_tokens=4)
    stats.add_path(DraftTree.chain([1, 2, 3, 4]), AcceptedPath((0, 1, 2), (2, 3, 9)))
    stats.add_path(DraftTree.chain([9, 8]), AcceptedPath((0,), (7,)))
    stats.add_path(DraftTree.root(7), AcceptedPath((0,), (6,)))
    assert (stats.steps, stats.drafted, stats.accepted) == (3, 4, 2)
    assert stats.drafted_by_depth == [2, 1, 1]
    assert stats.accepted_by_depth == [1, 1, 0]
    assert stats.acceptance_by_depth == [0.5, 1.0, 0.0]
    assert stats.acceptance_rate == 0.5
    assert stats.tokens_per_step == 1 + 2 / 3


def test_sibling_counts_at_its_own_depth() -> None:
    stats = Stats()
    stats.add_path(DraftTree.from_parents([1, 2, 3], [-1, 0, 0]), AcceptedPath((0, 2), (3, 4)))
    assert stats.acceptance_by_depth == [1.0]
    assert (stats.drafted, stats.accepted) == (2, 1)


def test_clock_splits_time_by_stage() -> None:
    clock, stats = StepClock(), Stats()
    for _ in range(2):
        with clock:
            with clock.stage("verify"):
                time.sleep(0.002)
            time.sleep(0.001)
        stats.add_time(clock)
    assert stats.ms["verify"] >= 4
    assert stats.ms["draft"] == 0
    assert stats.stage_ms["other"] >= 2
    assert abs(sum(stats.stage_ms.values()) - stats.decode_ms) < 1e-6


def test_json_object() -> None:
    found = Stats("none", prompt_tokens=3).as_dict()
    assert list(found) == [
        "draft",
        "prompt_tokens",
        "cached_tokens",
        "generated",
        "steps",
        "drafted",
        "accepted",
        "acceptance_rate",
        "tokens_per_step",
        "prompt_tps",
        "decode_tps",
        "ms",
        "rollback_bytes",
    ]
    assert list(found["ms"]) == [*STAGES, "other"]
