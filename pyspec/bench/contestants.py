"""`Contestant`: whatever decodes the same prompts in the same run, pyspec itself or a peer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pyspec.bench.oracle import OracleDrafter
from pyspec.config import DraftConfig, SamplingConfig
from pyspec.generate import Engine
from pyspec.stats import Stats


@dataclass(frozen=True, slots=True)
class Run:
    """One request as a contestant decoded it.

    Attributes:
        tokens: The generated tokens.
        decoded: How many of them `decode_ms` is the time of: a peer's first token comes out of the
            prompt's pass, pyspec's does not.
        decode_ms: Wall time of decoding.
        prompt_tokens: Prompt tokens that were read in `prompt_ms`.
        prompt_ms: Wall time of reading the prompt.
        drafted: Draft tokens verified.
        accepted: Those accepted.
        reused: Passes of the target, reading left out, that ran an earlier pass's graph.
        stats: All that pyspec counts; None for peers.
    """

    tokens: list[int]
    decoded: int
    decode_ms: float
    prompt_tokens: int
    prompt_ms: float
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    stats: Stats | None = None

    @property
    def decode_tps(self) -> float:
        """Tokens per second of decoding."""
        return 1e3 * self.decoded / self.decode_ms if self.decode_ms else 0.0


class Contestant(ABC):
    """Decodes prompts of token ids, alone or several at once.

    Attributes:
        name: In tables.
        kind: ``pyspec``, ``llama-server`` or ``llama-cpp-python``.
        threads: Threads of a decoding pass.
    """

    name: str
    kind: str
    threads: int

    @abstractmethod
    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """One request, through end-of-generation tokens, to its limit."""

    def decode_together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float | None:
        """Total tokens per second of all prompts at once, reading included; None where it cannot."""
        return None


class Own(Contestant):
    """A pyspec engine."""

    kind = "pyspec"

    def __init__(self, engine: Engine, sampling: SamplingConfig) -> None:
        self.engine = engine
        self.sampling = sampling
        self.name = label(engine.draft)
        self.threads = engine.native.info.n_threads
        drafters = getattr(engine.drafter, "sources", [engine.drafter])
        self.oracles = [one for one in drafters if isinstance(one, OracleDrafter)]
        self._known: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Tells an oracle what follows a prompt."""
        if self.oracles:
            self._known[tuple(prompt)] = [*prompt, *tokens]

    def _record(self, prompt: Sequence[int], slot: int) -> None:
        for oracle in self.oracles:
            oracle.record(self._known.get(tuple(prompt), ()), slot)

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        for slot in range(self.engine.config.n_slots):
            self._record(prompt, slot)
        graphs = [self._reused()]
        result = self.engine.complete(
            list(prompt),
            max_tokens=max_tokens,
            ignore_end=True,
            sampling=self.sampling,
            progress=lambda _: graphs.append(self._reused()),
        )
        stats = result.stats
        return Run(
            result.tokens,
            stats.generated,
            stats.decode_ms,
            max(stats.prompt_tokens - 1, 0),
            stats.prompt_ms,
            stats.drafted,
            stats.accepted,
            self._reused() - graphs[-1],
            stats,
        )

    def _reused(self) -> int:
        return self.engine.native.timings().n_graph_reused

    def decode_together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float | None:
        engine = self.engine
        if len(prompts) > engine.config.n_slots:
            return None
        began = time.perf_counter()
        sequences = []
        try:
            for prompt in prompts:
                sequences.append(
                    engine.begin(
                        list(prompt),
                        max_tokens=max_tokens,
                        ignore_end=True,
                        sampling=self.sampling,
                    )
                )
                self._record(prompt, sequences[-1].slot)
                while not engine.prefill(sequences[-1]):
                    pass
            while running := [one for one in sequences if one.finish_reason is None]:
                engine.step(running)
            seconds = time.perf_counter() - began
        finally:
            for sequence in sequences:
                engine.end(sequence)
        return sum(one.stats.generated for one in sequences) / seconds


def label(draft: DraftConfig) -> str:
    """A drafter's name with its limits: ``mtp/depth=3/top_k=2``."""
    limits = {
        "depth": draft.depth,
        "top_k": draft.top_k,
        "width": draft.width,
        "nodes": draft.nodes,
        "head_rows": draft.head_rows,
        "cache_type_k": draft.cache_type_k,
        "cache_type_v": draft.cache_type_v,
    }
    return "/".join(
        [draft.name, *(f"{key}={value}" for key, value in limits.items() if value is not None)]
    )
