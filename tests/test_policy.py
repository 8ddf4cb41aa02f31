"""What the controller decides on real text, at costs that are played: it repeats exactly."""

from __future__ import annotations

import random

import pytest

from pyspec import DraftConfig, SamplingConfig
from tests.bench.policy import MACHINES, speedup
from tests.prompts import held_out

GREEDY = SamplingConfig(temperature=0)
SAMPLED = SamplingConfig(temperature=0.8, seed=0)
RANDOM = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)

FIXED = [
    DraftConfig("ngram", depth=4),
    DraftConfig("mtp", depth=1),
    DraftConfig("mtp", depth=3),
    DraftConfig("mtp", depth=4, top_k=2),
]


def meaningless(count: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(260, 1024) for _ in range(48)) for _ in range(count)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("machine", MACHINES)
def test_auto_comes_close_to_the_best_fixed_setting(machine: str, sampling: SamplingConfig) -> None:
    prompts = held_out(4)
    auto = speedup(DraftConfig("auto"), MACHINES[machine], prompts, sampling, 160)
    fixed = [speedup(one, MACHINES[machine], prompts, sampling, 160) for one in FIXED]
    # Of 640 tokens the first trials are a part that can be seen.
    assert auto >= 0.93 * max(1.0, *fixed)


@pytest.mark.parametrize("machine", MACHINES)
def test_auto_does_not_lose_on_text_that_nothing_predicts(machine: str) -> None:
    auto = speedup(DraftConfig("auto"), MACHINES[machine], meaningless(8), RANDOM, 256)
    assert auto >= 0.97
