"""The figures of a benchmark, as they are written to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any


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
    """One contestant's figures of the decode scenario.

    Attributes:
        draft: Its name; plain decoding is ``none``.
        decode_tps: Tokens per second of the single runs.
        speedup: Ratio to plain decoding of the same prompt in the same round.
        tokens_per_step: Tokens drawn per verify pass, over all runs; None where a peer tells not.
        acceptance_by_depth: Share of drafts accepted at depth 1, 2, ...; empty where unknown.
        ms: Milliseconds per step, by stage; empty for peers.
        kind: ``pyspec``, ``llama-server`` or ``llama-cpp-python``.
        threads: Threads of a pass.
        acceptance_by_source: Drafter to the share of its nodes that were accepted.
        speedup_by_set: Median speed-up of every prompt set.
        trees: Number of nodes to the number of steps whose tree had so many.
        graph_reuse: Share of the steps whose pass ran an earlier pass's graph.
        native_ms: Milliseconds per step inside native code, all stages together.
        prompt_tps: Prompt tokens per second.
        identical: Share of the runs that gave plain decoding's very tokens.
        runs: Tokens per second of every single run, by round and prompt.
    """

    draft: str
    decode_tps: Spread
    speedup: Spread
    tokens_per_step: float | None
    acceptance_by_depth: list[float]
    ms: dict[str, float]
    kind: str = "pyspec"
    threads: int = 0
    acceptance_by_source: dict[str, float] = field(default_factory=dict)
    speedup_by_set: dict[str, float] = field(default_factory=dict)
    trees: dict[int, int] = field(default_factory=dict)
    graph_reuse: float | None = None
    native_ms: float | None = None
    prompt_tps: float = 0.0
    identical: float = 1.0
    runs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Speed of reading a prompt of `tokens` tokens."""

    draft: str
    tokens: int
    tps: Spread


@dataclass(frozen=True, slots=True)
class ConcurrencyResult:
    """Total tokens per second of `sequences` requests at once, their short prompts included.

    `speedup` compares with plain decoding of pyspec at the same number.
    """

    draft: str
    sequences: int
    tps: Spread
    speedup: float


@dataclass(frozen=True, slots=True)
class ContextResult:
    """Speeds behind a prompt of `tokens` tokens."""

    draft: str
    tokens: int
    prompt_tps: float
    decode_tps: Spread
    speedup: float


@dataclass(frozen=True, slots=True)
class CostResult:
    """Milliseconds of a verify pass of `nodes` nodes; `of_one` compares the fastest with one node."""

    nodes: int
    ms: Spread
    of_one: float


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """Bytes that decoding with a drafter takes.

    Attributes:
        draft: The drafter, or the peer.
        nodes: Nodes that a tree may have.
        weights: Of the model's file.
        cache: Attention cache of one sequence.
        state: Recurrent state of one sequence.
        rollback: What rolling back takes for one sequence beside that.
        snapshots: What a copy of the state for every draft would take instead.
        peak_rss: Resident memory of a process of its own at its highest, mapped weights included.
    """

    draft: str
    nodes: int
    weights: int
    cache: int
    state: int
    rollback: int
    snapshots: int
    peak_rss: int | None


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Milliseconds of a pass of `nodes` tokens by kind of layer; see `pyspec.bench.layers`."""

    nodes: int
    ms: dict[str, float]


@dataclass(slots=True)
class BenchResult:
    """The object that ``pyspec bench --json`` writes.

    Attributes:
        model: Path of the model.
        machine: Processor, number of cores, memory, system, versions.
        settings: What the figures depend on: prompts, tokens, sampling, rounds.
        results: The decode scenario: plain decoding first, then every drafter, then the peers.
        prompt, concurrency, context, cost, memory, layers: The other scenarios' figures.
        notes: What was left out, and why.
        interrupted: Whether it was ended before all was measured.
        divergent: Drafter to the number of prompts whose tokens differ from plain decoding's.
    """

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    results: list[DraftResult] = field(default_factory=list)
    prompt: list[PromptResult] = field(default_factory=list)
    concurrency: list[ConcurrencyResult] = field(default_factory=list)
    context: list[ContextResult] = field(default_factory=list)
    cost: list[CostResult] = field(default_factory=list)
    memory: list[MemoryResult] = field(default_factory=list)
    layers: list[LayerResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    divergent: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON's view: `model`, `machine`, `settings`, `results`, and the scenarios measured."""
        found = asdict(self)
        always = ("model", "machine", "settings", "results")
        return {name: value for name, value in found.items() if name in always or value}

    def rows(self) -> list[dict[str, Any]]:
        """CSV's view: one row a figure, with ``scenario``, ``draft`` and the figure's own fields."""
        found = []
        for name in SCENARIO_FIELDS:
            for one in getattr(self, name):
                found.append({"scenario": "decode" if name == "results" else name, **_flat(one)})
        return found


SCENARIO_FIELDS = ("results", "prompt", "concurrency", "context", "cost", "memory", "layers")


def _flat(one: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in fields(one):
        value = getattr(one, item.name)
        if is_dataclass(value):
            row |= {f"{item.name}.{part.name}": getattr(value, part.name) for part in fields(value)}
        elif isinstance(value, dict):
            row |= {f"{item.name}.{key}": part for key, part in value.items()}
        elif isinstance(value, list):
            if item.name != "runs":
                row |= {f"{item.name}.{i + 1}": part for i, part in enumerate(value)}
        else:
            row[item.name] = value
    return row
