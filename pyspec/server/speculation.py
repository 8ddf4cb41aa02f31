"""Live statistics of speculation: what was drafted and accepted, by source and depth, and how fast.

The speed of plain decoding is not measured but estimated from the same steps: a step without its
drafting takes a time that depends on how many nodes it verifies, and plain decoding verifies one
node a sequence.
"""

from __future__ import annotations

import codecs
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pyspec.decoder import Emission
from pyspec.generate import Engine
from pyspec.tree import DraftTree

WINDOW_SECONDS = 10.0
"""Speeds are those of the steps of the last so many seconds with steps."""

TARGET = "target"
"""The source of tokens that the model itself gave: one a step."""

Hit = tuple[str, int]
"""Source and depth of a draft, from 1."""


class Taken(NamedTuple):
    """One sequence's part in one step.

    Attributes:
        request: The client's name for the request.
        emission: What the decoder gave.
        drafted: Every (source, depth) that its tree had a draft of.
        accepted: Those of the accepted drafts.
        emitted: Tokens generated; one that ends the request is none.
    """

    request: str
    emission: Emission
    drafted: frozenset[Hit]
    accepted: list[Hit]
    emitted: int


@dataclass(slots=True)
class Tally:
    """Counts of steps, tokens and drafts."""

    steps: int = 0
    tokens: int = 0
    ms: float = 0.0
    drafted: dict[Hit, int] = field(default_factory=dict)
    accepted: dict[Hit, int] = field(default_factory=dict)
    drafted_at: dict[int, int] = field(default_factory=dict)
    accepted_at: dict[int, int] = field(default_factory=dict)

    def add(self, taken: Taken, ms: float) -> None:
        """Counts one sequence's part in a step of `ms` milliseconds."""
        self.steps += 1
        self.tokens += taken.emitted
        self.ms += ms
        _count(self.drafted, taken.drafted)
        _count(self.accepted, taken.accepted)
        _count(self.drafted_at, {depth for _, depth in taken.drafted})
        _count(self.accepted_at, range(1, taken.emission.path.accepted + 1))

    def as_dict(self) -> dict[str, Any]:
        """For `/v1/speculation`."""
        sources = sorted({source for source, _ in self.drafted})
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_step": round(self.tokens / self.steps, 3) if self.steps else 0.0,
            "acceptance_by_depth": _shares(self.accepted_at, self.drafted_at),
            "acceptance_by_source": {
                source: _shares(_of(self.accepted, source), _of(self.drafted, source))
                for source in sources
            },
        }


@dataclass(slots=True)
class Live:
    """A slot: its request, its counts, its last tree with drafts, and when its last step was."""

    request: str
    tally: Tally = field(default_factory=Tally)
    last: Taken | None = None
    running: bool = True
    step: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class CostCurve:
    """Milliseconds of a step, drafting left out, by the number of nodes that it verifies."""

    def __init__(self) -> None:
        self._mean: dict[int, tuple[float, float]] = {}  # nodes: (weight, mean ms)

    def add(self, nodes: int, ms: float) -> None:
        """Takes in a step; old ones fade."""
        weight, mean = self._mean.get(nodes, (0.0, 0.0))
        weight = min(weight + 1, 100.0)
        self._mean[nodes] = (weight, mean + (ms - mean) / weight)

    def at(self, nodes: float) -> tuple[float, str]:
        """The time of a step of `nodes`, and how it is known.

        ``measured``: there were such steps. ``fitted``: a line through those of other sizes.
        ``bound``: steps of one size only; a smaller one takes no longer.
        """
        weight, mean = self._mean.get(round(nodes), (0.0, 0.0))
        if weight >= 5 and abs(nodes - round(nodes)) < 0.05:
            return mean, "measured"
        sizes = np.asarray(list(self._mean), float)
        weights = np.asarray([weight for weight, _ in self._mean.values()])
        means = np.asarray([mean for _, mean in self._mean.values()])
        if len(sizes) < 2 or np.ptp(sizes) < 2:
            return (float(np.average(means, weights=weights)) if len(sizes) else 0.0), "bound"
        slope, base = np.polyfit(sizes, means, 1, w=np.sqrt(weights))
        least = float(means.min())
        # More nodes never take less time, so no line may say that fewer take more.
        return (float(base + slope * nodes) if slope > 0 and base > 0 else least), "fitted"


class Speculation:
    """Statistics of one engine; written by the scheduler's thread, read by any.

    Args:
        engine: Names the drafter and gives the text of tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._slots: dict[int, Live] = {}
        self._total = Tally()
        self._curve = CostCurve()
        self._recent: deque[tuple[float, int, int, float]] = deque()

    def add_step(
        self, emissions: Iterable[tuple[str, Emission]], stage_ms: dict[str, float]
    ) -> list[Taken]:
        """Takes in one step of all running sequences."""
        taken = [self._taken(request, emission) for request, emission in emissions]
        ms = sum(stage_ms.values())
        with self._lock:
            for one in taken:
                slot = one.emission.sequence.slot
                live = self._slots.get(slot)
                if live is None or not live.running or live.request != one.request:
                    live = self._slots[slot] = Live(one.request)
                live.tally.add(one, ms)
                if live.last is None or len(one.emission.tree) > 1:
                    live.last = one
                live.step = self._total.steps
                self._total.add(one, ms / len(taken))
            self._note(taken, ms, stage_ms)
        return taken

    def _note(self, taken: list[Taken], ms: float, stage_ms: dict[str, float]) -> None:
        if not taken:
            return
        widest = max(len(one.emission.tree) for one in taken)
        self._curve.add(widest * len(taken), ms - stage_ms["draft"])  # trees are padded
        now = time.monotonic()
        self._recent.append((now, len(taken), sum(one.emitted for one in taken), ms))
        while self._recent[0][0] < now - WINDOW_SECONDS:
            self._recent.popleft()

    def end(self, slot: int) -> None:
        """Marks a slot as idle; its last tree stays to be seen."""
        with self._lock:
            if slot in self._slots:
                self._slots[slot].running = False

    def _taken(self, request: str, emission: Emission) -> Taken:
        tree, path = emission.tree, emission.path
        depths = tree.depths.tolist()
        drafted = frozenset(
            (source, depths[node])
            for node in range(1, len(tree))
            for source in self._sources(tree, node)
        )
        accepted = [
            (source, depths[node])
            for node in path.nodes[1:]
            for source in self._sources(tree, node)
        ]
        is_end = emission.sequence.is_end
        ended = is_end is not None and is_end(path.bonus_token)
        return Taken(request, emission, drafted, accepted, len(path.tokens) - ended)

    def _sources(self, tree: DraftTree, node: int) -> list[str]:
        marks = sorted(tree.sources[node]) if tree.sources else []
        return marks or [self._engine.drafter.name]

    # ---- for readers ----

    def event(self, taken: Taken) -> dict[str, Any]:
        """What a subscriber gets of a sequence's step. Called in order, by the scheduler's thread."""
        sequence, _, tree, path, _ = taken.emission
        live = self._slots[sequence.slot]
        by_node = [self._sources(tree, node) for node in path.nodes[1:]]
        marks = [*by_node, [TARGET]][: taken.emitted]
        return {
            "request": taken.request,
            "slot": sequence.slot,
            "tokens": [
                {"text": live.decoder.decode(self._engine.piece(token)), "sources": sources}
                for token, sources in zip(path.tokens, marks, strict=False)
            ],
            "tree": self._tree(taken),
        }

    def _tree(self, taken: Taken) -> dict[str, Any]:
        tree, path = taken.emission.tree, taken.emission.path
        return {
            "tokens": [self._text(token) for token in tree.tokens.tolist()],
            "parents": tree.parents.tolist(),
            "sources": [[], *(self._sources(tree, node) for node in range(1, len(tree)))],
            "probabilities": [round(float(p), 4) for p in np.exp(tree.log_probs)],
            "accepted": list(path.nodes),
            "bonus": self._text(path.bonus_token),
        }

    def _text(self, token: int) -> str:
        return self._engine.piece(token).decode("utf-8", "replace")

    def snapshot(self) -> dict[str, Any]:
        """The object of `/v1/speculation`; speeds are tokens a second while decoding."""
        with self._lock:
            slots = [self._slot(slot, live) for slot, live in sorted(self._slots.items())]
            return {
                "draft": self._engine.drafter.name,
                "slots": slots,
                "total": self._total.as_dict(),
                "speed": self._speed(),
                "cache": self._cache(),
            }

    def _slot(self, slot: int, live: Live) -> dict[str, Any]:
        tally = live.tally
        return {
            "slot": slot,
            "request": live.request,
            "running": live.running,
            "last_step": live.step,
            **tally.as_dict(),
            "tokens_per_second": round(1e3 * tally.tokens / tally.ms, 2) if tally.ms else 0.0,
            "tree": self._tree(live.last) if live.last else None,
        }

    def _speed(self) -> dict[str, Any]:
        steps = len(self._recent)
        if not steps:
            return {"tokens_per_second": 0.0, "plain": 0.0, "ratio": 0.0, "plain_is": "unknown"}
        _, sequences, tokens, ms = np.asarray(self._recent).sum(0).tolist()
        each = sequences / steps
        plain_ms, known = self._curve.at(each)
        speed = 1e3 * tokens / ms if ms else 0.0
        plain = 1e3 * each / plain_ms if plain_ms else 0.0
        return {
            "tokens_per_second": round(speed, 2),
            "plain": round(plain, 2),
            "ratio": round(speed / plain, 3) if plain else 0.0,
            "plain_is": known,
        }

    def _cache(self) -> dict[str, int] | None:
        cache = self._engine.cache
        if cache is None:
            return None
        counts = cache.counts
        return {
            "hits": counts.hits,
            "misses": counts.misses,
            "reused_tokens": counts.reused_tokens,
            "checkpoints": len(cache),
            "bytes": cache.held,
            "disk_bytes": cache.store.bytes if cache.store else 0,
        }


def _count(counts: dict[Any, int], keys: Iterable[Any]) -> None:
    for key in keys:
        counts[key] = counts.get(key, 0) + 1


def _of(counts: dict[Hit, int], source: str) -> dict[int, int]:
    return {depth: count for (name, depth), count in counts.items() if name == source}


def _shares(hits: dict[int, int], tries: dict[int, int]) -> list[float]:
    """``[d]``: the share of hits at depth d + 1."""
    deepest = max(tries, default=0)
    return [
        round(hits.get(depth, 0) / tries[depth], 4) if tries.get(depth) else 0.0
        for depth in range(1, deepest + 1)
    ]
