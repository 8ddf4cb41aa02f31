"""Alternating runs: every prompt is decoded plainly and with every drafter, in turn, several times.

Plain decoding is measured on an engine of its own, opened for trees of one node and without an MTP
block, so it carries none of speculation's cost. All engines share the loaded weights.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from pyspec.bench.oracle import PREFIX, OracleDrafter, OracleMtpDrafter, parse
from pyspec.config import DraftConfig, EngineConfig, SamplingConfig
from pyspec.drafter import Drafter
from pyspec.generate import Engine, GenerationResult, Progress
from pyspec.model_file import ModelFile, resolve_model
from pyspec.registry import choose
from pyspec.stats import acceptance_by_depth

PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of a figure over all runs."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of `values`, rounded to four digits."""
        return cls(*(round(pick(values), 4) for pick in (median, min, max)))


@dataclass(frozen=True, slots=True)
class DraftResult:
    """One drafter's figures.

    Attributes:
        draft: Its name.
        decode_tps: Tokens per second of the single runs.
        speedup: Ratio to plain decoding of the same prompt in the same round.
        tokens_per_step: Tokens drawn per verify pass, over all runs.
        acceptance_by_depth: Share of drafts accepted at depth 1, 2, ...
        ms: Milliseconds per step, by stage.
    """

    draft: str
    decode_tps: Spread
    speedup: Spread
    tokens_per_step: float
    acceptance_by_depth: list[float]
    ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The object that ``pyspec bench --json`` writes.

    Attributes:
        model: Path of the model.
        machine: Processor, number of cores, system.
        results: Plain decoding first, then every drafter.
        divergent: Drafter to the number of prompts whose tokens differ from plain decoding's.
    """

    model: str
    machine: dict[str, Any]
    results: list[DraftResult]
    divergent: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """JSON's view: `model`, `machine`, `results`."""
        fields = asdict(self)
        del fields["divergent"]
        return fields


def run(
    model: str,
    drafts: Sequence[DraftConfig],
    prompts: Sequence[str],
    *,
    max_tokens: int,
    repeat: int,
    config: EngineConfig,
    sampling: SamplingConfig,
    loading: Progress | None = None,
    progress: Callable[[float], object] | None = None,
) -> BenchResult:
    """Decodes all `prompts` with all `drafts` and plainly, `repeat` times, alternating.

    Args:
        sampling: Must be greedy or carry a seed, so that every run decodes the same text.
        loading: Called with the loaded fraction of the model.
        progress: Called with the fraction of the runs done.
    """
    with ExitStack() as stack:
        engines = _open_all(stack, model, drafts, config, loading)
        runs = _alternate(engines, prompts, max_tokens, repeat, sampling, progress)
        names = [engine.drafter.name for engine in engines]
        return BenchResult(
            str(engines[0].file.path),
            machine(),
            [_summary(name, own, runs[0]) for name, own in zip(names, runs, strict=True)],
            {
                name: sum(a.tokens != b.tokens for a, b in zip(own, runs[0], strict=True)) // repeat
                for name, own in zip(names[1:], runs[1:], strict=True)
            },
        )


def _open_all(
    stack: ExitStack,
    model: str,
    drafts: Sequence[DraftConfig],
    config: EngineConfig,
    loading: Progress | None,
) -> list[Engine]:
    """An engine for plain decoding, then one per drafter, all on the same weights."""
    file = ModelFile.read(resolve_model(model))
    baseline = DraftConfig(PLAIN)
    drafters = {draft: _kinds(draft, file) for draft in (baseline, *drafts)}
    # The first one opened loads the weights, so it must be one that needs the MTP block's, too.
    order = sorted(drafters, key=lambda draft: not any(one.uses_mtp for one in drafters[draft]))
    opened: dict[DraftConfig, Engine] = {}
    for draft in order:
        if draft is baseline or draft.name != PLAIN:
            owner = next(iter(opened.values()), None)
            engine = Engine(
                model, draft, config, progress=loading, share=owner, drafters=drafters[draft]
            )
            opened[draft] = stack.enter_context(engine)
    return [opened[draft] for draft in drafters if draft in opened]


def _kinds(draft: DraftConfig, file: ModelFile) -> list[type[Drafter]]:
    if draft.name.startswith(PREFIX):
        return [OracleMtpDrafter if parse(draft.name)[1] else OracleDrafter]
    return choose(draft, file)


def _alternate(
    engines: Sequence[Engine],
    prompts: Sequence[str],
    max_tokens: int,
    repeat: int,
    sampling: SamplingConfig,
    progress: Callable[[float], object] | None,
) -> list[list[GenerationResult]]:
    """For every engine its results, in the same order of rounds and prompts."""
    runs: list[list[GenerationResult]] = [[] for _ in engines]

    def decode(engine: Engine, prompt: str, tokens: int) -> GenerationResult:
        result = engine.complete(prompt, max_tokens=tokens, ignore_end=True, sampling=sampling)
        if engine is engines[0]:
            recorded[prompt] = engine.tokenize(prompt) + result.tokens
        return result

    recorded: dict[str, list[int]] = {}
    oracles = [
        (engine, oracle)
        for engine in engines
        for oracle in getattr(engine.drafter, "sources", [engine.drafter])
        if isinstance(oracle, OracleDrafter)
    ]

    for engine in engines:  # warm caches and clocks, not measured
        decode(engine, prompts[0], min(max_tokens, 32))
    total, done = repeat * len(prompts) * len(engines), 0
    for _ in range(repeat):
        for prompt in prompts:
            for own, engine in zip(runs, engines, strict=True):
                for one, oracle in oracles:
                    if one is engine:
                        oracle.record(recorded[prompt])
                own.append(decode(engine, prompt, max_tokens))
                done += 1
                if progress is not None:
                    progress(done / total)
    return runs


def _summary(name: str, own: list[GenerationResult], plain: list[GenerationResult]) -> DraftResult:
    stats = [result.stats for result in own]
    steps = sum(one.steps for one in stats)
    depth = max(len(one.drafted_by_depth) for one in stats)
    drafted, accepted = [0] * depth, [0] * depth
    for one in stats:
        for level, (tried, hit) in enumerate(
            zip(one.drafted_by_depth, one.accepted_by_depth, strict=True)
        ):
            drafted[level] += tried
            accepted[level] += hit
    stages = stats[0].stage_ms
    return DraftResult(
        draft=name,
        decode_tps=Spread.of([one.decode_tps for one in stats]),
        speedup=Spread.of(
            [
                mine.decode_tps / other.stats.decode_tps
                for mine, other in zip(stats, plain, strict=True)
            ]
        ),
        tokens_per_step=round(1 + sum(one.accepted for one in stats) / steps, 4),
        acceptance_by_depth=acceptance_by_depth(accepted, drafted),
        ms={stage: round(sum(one.stage_ms[stage] for one in stats) / steps, 4) for stage in stages},
    )


def fixed_seed(sampling: SamplingConfig) -> SamplingConfig:
    """`sampling` with a seed, so that all runs decode the same text."""
    return sampling if sampling.seed is not None else replace(sampling, seed=0)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform(terse=True)}


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
