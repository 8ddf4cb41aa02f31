"""The controller under a played clock: real drafts and real acceptance, but costs from a table.

What the controller decides does then not depend on what else the machine does, and the same text can
be priced as on other machines. Used by `tests/test_policy.py` and by ``must_show.py run policy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspec import DraftConfig, DraftContext, Drafter, DraftTree, Engine, Outcome, SamplingConfig
from pyspec.controller import Controller
from pyspec.cost import CostCurve
from pyspec.drafter import Coast, Passed, StepCost, Text
from pyspec.generate import Prompt


@dataclass(frozen=True)
class Machine:
    """What steps cost.

    Attributes:
        points: Columns of a verify pass and milliseconds.
        passes: Milliseconds of a drafting pass by drafter.
        control_ms: Of the controller, in a step that asks anybody.
        idle_ms: Of the controller, in another.
        coast_ms: Of a pilot, in a step of a coast.
        tree_ms: Of Python's share in a step with drafts beyond that of a plain one.
    """

    points: tuple[tuple[int, float], ...]
    passes: dict[str, float]
    control_ms: float = 0.015
    idle_ms: float = 0.003
    coast_ms: float = 0.003
    tree_ms: float = 0.09


MACHINES = {
    # The demo model on two cores: columns cost nearly as much as tokens.
    "tiny": Machine(
        ((1, 0.33), (2, 0.45), (3, 0.58), (4, 0.62), (6, 0.86), (8, 1.06), (12, 1.63), (16, 2.1)),
        {"mtp": 0.035, "dflash": 0.45},
    ),
    # A model of some hundred MB on two cores: four columns for the price of one, more for their own.
    "cpu": Machine(
        ((1, 11), (2, 11), (3, 11.5), (4, 12), (6, 16), (8, 18), (12, 28), (16, 35)),
        {"mtp": 0.6, "dflash": 3.0},
    ),
    # A machine that waits for memory: columns are nearly free.
    "gpu": Machine(((1, 20), (16, 24), (32, 32)), {"mtp": 1.0, "dflash": 4.0}),
}


class PlayedClock(Drafter):
    """Stands before a drafter and tells it what a step costs on a machine."""

    name = "played"

    def __init__(self, engine: Engine, machine: Machine) -> None:
        self.inner, self.machine, self.native = engine.drafter, machine, engine.native
        self.curve = CostCurve(machine.points)
        self.ms = 0.0
        if isinstance(self.inner, Controller):
            tree_ms = [(n, ms + machine.tree_ms * (n > 1)) for n, ms in machine.points]
            self.inner.curve = self.inner.planner.curve = CostCurve(tree_ms)
        self.native.timings(reset=True)

    def coast(self, texts: Sequence[Text], alone: bool) -> Coast | None:
        # A pilot measures what its steps take: each is told the played time of those before it.
        getattr(self.inner, "_briefed", {}).clear()
        coast = self.inner.coast(texts, alone)
        return coast and coast._replace(steps=1)

    def coasted(self, passed: Sequence[Passed]) -> None:
        played = [one._replace(ms=one.steps * self.curve.ms(one.columns)) for one in passed]
        self.ms += sum(one.ms for one in played)
        if isinstance(self.inner, Controller):
            self.ms += self.machine.coast_ms
        self.inner.coasted(played)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        for source in getattr(self.inner, "sources", ()):
            if source.pass_ms:
                source.pass_ms = self.machine.passes[source.name]
        return self.inner.propose(contexts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.inner.observe(outcomes)

    def observe_cost(self, cost: StepCost) -> None:
        asked = getattr(self.inner, "asked", self.inner.name)
        passes = self.native.timings(reset=True).n_draft_passes
        draft = passes * self.machine.passes.get(asked, 0.0)
        if isinstance(self.inner, Controller):
            idle = self.inner.planner.idle
            draft += self.machine.idle_ms if idle else self.machine.control_ms
        rest = self.curve.ms(cost.columns) + self.machine.tree_ms * (cost.columns > 1)
        self.ms += draft + rest
        self.inner.observe_cost(StepCost(cost.columns, draft, rest))


def speedup(
    draft: DraftConfig,
    machine: Machine,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    max_tokens: int,
) -> float:
    """Speed against plain decoding on `machine`, over all prompts in turn."""
    with Engine("demo", draft=draft, n_threads=1) as engine:
        clock = PlayedClock(engine, machine)
        engine._decoder.drafter = clock
        tokens = 0
        for prompt in prompts:
            result = engine.complete(
                prompt, max_tokens=max_tokens, ignore_end=True, sampling=sampling
            )
            tokens += result.stats.generated
        return tokens * clock.curve.ms(1) / clock.ms
