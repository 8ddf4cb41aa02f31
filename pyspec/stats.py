"""What a generation cost and gained: counts of drafts, and milliseconds by stage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pyspec.accept import AcceptedPath
from pyspec.tree import DraftTree

STAGES = ("draft", "verify", "sample", "commit")
"""The timed stages of a step, in order; what is left of its wall time is ``other``."""


class StepClock:
    """Wall time of one step, split by stage.

    ``with clock: ... with clock.stage("verify"): ...``; entering the clock again starts afresh.
    """

    __slots__ = ("_began", "_stage", "ms", "total_ms")

    def __init__(self) -> None:
        self.ms = dict.fromkeys(STAGES, 0.0)
        self.total_ms = 0.0
        self._began = 0
        self._stage = _Stage(self.ms)

    def stage(self, name: str) -> _Stage:
        """A context that adds its wall time to the stage `name`."""
        self._stage.name = name
        return self._stage

    def __enter__(self) -> StepClock:
        for name in STAGES:
            self.ms[name] = 0.0
        self._began = time.perf_counter_ns()
        return self

    def __exit__(self, *exc: object) -> None:
        self.total_ms = (time.perf_counter_ns() - self._began) / 1e6


class _Stage:
    __slots__ = ("_began", "_ms", "name")

    def __init__(self, ms: dict[str, float]) -> None:
        self._ms = ms
        self._began = 0
        self.name = ""

    def __enter__(self) -> None:
        self._began = time.perf_counter_ns()

    def __exit__(self, *exc: object) -> None:
        self._ms[self.name] += (time.perf_counter_ns() - self._began) / 1e6


@dataclass(slots=True)
class Stats:
    """Counters of one generation.

    Attributes:
        draft: Name of the drafter.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: How many of them were not read again, but taken from an earlier request.
        generated: Tokens emitted; an end-of-generation token is not one of them.
        steps: Verify passes of the target.
        drafted: Draft nodes verified, roots not counted.
        accepted: Draft nodes accepted.
        trees: Number of nodes, root included, to the number of steps whose tree had so many.
        prompt_ms: Wall time of prompt processing.
        decode_ms: Wall time of all steps, streaming consumers not counted.
        ms: Wall time by stage.
        rollback_bytes: Memory that rolling back needs for one sequence.
    """

    draft: str = "none"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    trees: dict[int, int] = field(default_factory=dict)
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    rollback_bytes: int = 0
    _depths: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    """Depth of a tree and number of accepted nodes to steps."""
    _drafted_marks: dict[frozenset[str], int] = field(default_factory=dict, repr=False)
    """Drafters to the number of nodes that they, and no others, proposed."""
    _accepted_marks: dict[frozenset[str], int] = field(default_factory=dict, repr=False)

    def add_path(self, tree: DraftTree, path: AcceptedPath) -> None:
        """Counts one step's tree and what was accepted of it."""
        accepted, size = len(path.nodes) - 1, len(tree.token_list)
        self.steps += 1
        self.drafted += size - 1
        self.accepted += accepted
        self.trees[size] = self.trees.get(size, 0) + 1
        if size == 1:
            return
        depths = tree.max_depth, accepted
        self._depths[depths] = self._depths.get(depths, 0) + 1
        if not tree.sources:  # unnamed ones are the drafter's own
            own = frozenset((self.draft,))
            self._drafted_marks[own] = self._drafted_marks.get(own, 0) + size - 1
            self._accepted_marks[own] = self._accepted_marks.get(own, 0) + accepted
            return
        for mark in tree.sources[1:]:
            self._drafted_marks[mark] = self._drafted_marks.get(mark, 0) + 1
        for node in path.nodes[1:]:
            mark = tree.sources[node]
            self._accepted_marks[mark] = self._accepted_marks.get(mark, 0) + 1

    def add_plain(self, steps: int) -> None:
        """Counts steps whose trees were roots alone."""
        if steps:
            self.steps += steps
            self.trees[1] = self.trees.get(1, 0) + steps

    @property
    def drafted_by_depth(self) -> list[int]:
        """``[d]``: steps whose tree reached depth d + 1."""
        return self._by_depth(0)

    @property
    def accepted_by_depth(self) -> list[int]:
        """``[d]``: steps that accepted a node at depth d + 1; as long as `drafted_by_depth`."""
        return self._by_depth(1)

    def _by_depth(self, which: int) -> list[int]:
        deepest = max((depth for depth, _ in self._depths), default=0)
        counts = [0] * deepest
        for depths, steps in self._depths.items():
            for level in range(depths[which]):
                counts[level] += steps
        return counts

    @property
    def drafted_by_source(self) -> dict[str, int]:
        """Drafter to the number of nodes that it proposed, alone or with others."""
        return _by_name(self._drafted_marks)

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """The same of the accepted nodes."""
        return _by_name(self._accepted_marks)

    def add_time(self, clock: StepClock) -> None:
        """Adds the wall time of one step."""
        self.decode_ms += clock.total_ms
        for name in STAGES:
            self.ms[name] += clock.ms[name]

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted nodes; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """``[d]``: share of the steps with a draft at depth d + 1 that accepted one there."""
        return acceptance_by_depth(self.accepted_by_depth, self.drafted_by_depth)

    @property
    def acceptance_by_source(self) -> dict[str, float]:
        """Drafter to the accepted share of the nodes that it proposed."""
        return {
            name: round(self.accepted_by_source.get(name, 0) / drafted, 4)
            for name, drafted in sorted(self.drafted_by_source.items())
        }

    @property
    def tokens_per_step(self) -> float:
        """Tokens drawn per verify pass; 1 is plain decoding."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens read per second."""
        return (
            1e3 * (self.prompt_tokens - self.cached_tokens) / self.prompt_ms
            if self.prompt_ms
            else 0.0
        )

    @property
    def decode_tps(self) -> float:
        """Generated tokens per second, prompt processing not counted."""
        return 1e3 * self.generated / self.decode_ms if self.decode_ms else 0.0

    @property
    def stage_ms(self) -> dict[str, float]:
        """Milliseconds by stage, ``other`` (Python between native calls) last."""
        return {**self.ms, "other": max(0.0, self.decode_ms - sum(self.ms.values()))}

    def as_dict(self) -> dict[str, Any]:
        """The ``stats`` object of ``pyspec generate --json``."""
        return {
            "draft": self.draft,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated": self.generated,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "tokens_per_step": round(self.tokens_per_step, 4),
            "prompt_tps": round(self.prompt_tps, 2),
            "decode_tps": round(self.decode_tps, 2),
            "ms": {name: round(value, 3) for name, value in self.stage_ms.items()},
            "rollback_bytes": self.rollback_bytes,
        }


def _by_name(marks: dict[frozenset[str], int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for mark, nodes in marks.items():
        for name in mark:
            counts[name] = counts.get(name, 0) + nodes
    return counts


def acceptance_by_depth(accepted: list[int], drafted: list[int]) -> list[float]:
    """Element-wise share of `accepted` in `drafted`, rounded to four digits."""
    return [
        round(hit / tried, 4) if tried else 0.0
        for hit, tried in zip(accepted, drafted, strict=True)
    ]
