"""What `pyspec bench` measures; every function fills its part of the result.

All contestants take turns on the same prompts, so that what slows the machine slows all of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from pyspec.bench.contestants import Contestant, Own, Run, label
from pyspec.bench.figures import (
    ConcurrencyResult,
    ContextResult,
    CostResult,
    DraftResult,
    MemoryResult,
    PromptResult,
    Spread,
)
from pyspec.bench.layers import by_layer
from pyspec.config import DEFAULT_NODES, DraftConfig
from pyspec.cost import measure
from pyspec.errors import DraftError
from pyspec.generate import Engine, context_of
from pyspec.native import NativeTimings
from pyspec.stats import acceptance_by_depth

if TYPE_CHECKING:
    from pyspec.bench.runner import Bench

Report = Callable[[float], object]
"""Takes the fraction done."""

_WARM_TOKENS = 32


# ---- decode ----


def decode(bench: Bench, report: Report) -> None:
    """Speed of decoding, plain and with every drafter, on all prompts, several rounds."""
    with bench.contestants() as contestants:
        runs: list[list[Run]] = [[] for _ in contestants]
        for one in contestants:  # warm caches and clocks, not measured
            one.decode(bench.prompts[0][0], min(bench.sizes.max_tokens, _WARM_TOKENS))
            if isinstance(one, Own):
                one.engine.native.timings(reset=True)
        total = bench.sizes.repeat * len(bench.prompts) * len(contestants)
        try:
            for _ in range(bench.sizes.repeat):
                for prompt, _ in bench.prompts:
                    for at, one in enumerate(contestants):
                        runs[at].append(one.decode(prompt, bench.sizes.max_tokens))
                        if at == 0:
                            _teach(contestants, prompt, runs[0][-1])
                        report(sum(map(len, runs)) / total)
        finally:
            _summarise(bench, contestants, runs)


def _teach(contestants: Sequence[Contestant], prompt: list[int], plain: Run) -> None:
    """Tells the oracles what plain decoding said."""
    for one in contestants:
        if isinstance(one, Own):
            one.learn(prompt, plain.tokens)


def _summarise(bench: Bench, contestants: Sequence[Contestant], runs: list[list[Run]]) -> None:
    """Fills the result with what there is; the runs of an unfinished turn are left out."""
    count = min(map(len, runs))
    if not count:
        return
    groups = [group for _, group in bench.prompts]
    plain = runs[0][:count]
    for one, own in zip(contestants, runs, strict=True):
        own = own[:count]
        bench.result.results.append(_summary(one, own, plain, groups))
        if one is not contestants[0]:
            rounds = -(-count // len(groups))
            differ = sum(a.tokens != b.tokens for a, b in zip(own, plain, strict=True))
            bench.result.divergent[one.name] = -(-differ // rounds)


def _summary(
    one: Contestant, own: list[Run], plain: list[Run], groups: Sequence[str]
) -> DraftResult:
    ratios = [mine.decode_tps / other.decode_tps for mine, other in zip(own, plain, strict=True)]
    by_set: dict[str, list[float]] = {}
    for number, ratio in enumerate(ratios):
        by_set.setdefault(groups[number % len(groups)], []).append(ratio)
    read_ms = sum(run.prompt_ms for run in own)
    result = DraftResult(
        draft=one.name,
        decode_tps=Spread.of([run.decode_tps for run in own]),
        speedup=Spread.of(ratios),
        tokens_per_step=None,
        acceptance_by_depth=[],
        ms={},
        kind=one.kind,
        threads=one.threads,
        speedup_by_set={name: round(median(part), 4) for name, part in by_set.items() if name},
        prompt_tps=round(1e3 * sum(run.prompt_tokens for run in own) / read_ms, 2)
        if read_ms
        else 0.0,
        identical=round(
            sum(a.tokens == b.tokens for a, b in zip(own, plain, strict=True)) / len(own), 4
        ),
        runs=[round(run.decode_tps, 2) for run in own],
    )
    if isinstance(one, Own):
        return replace(result, **_own_figures(own, one.engine.native.timings()))
    passes = sum(run.decoded - run.accepted for run in own)
    drafted = sum(run.drafted for run in own)
    return replace(
        result,
        tokens_per_step=round(sum(run.decoded for run in own) / passes, 4) if passes else None,
        acceptance_by_source={one.name: round(sum(run.accepted for run in own) / drafted, 4)}
        if drafted
        else {},
    )


def _own_figures(own: list[Run], native: NativeTimings) -> dict[str, Any]:
    """What pyspec's counters tell beside speed."""
    stats = [run.stats for run in own if run.stats is not None]
    steps = sum(one.steps for one in stats)
    depth = max(len(one.drafted_by_depth) for one in stats)
    drafted, accepted = [0] * depth, [0] * depth
    sources: dict[str, list[int]] = {}
    trees: dict[int, int] = {}
    for one in stats:
        for level, hit in enumerate(one.accepted_by_depth):
            drafted[level] += one.drafted_by_depth[level]
            accepted[level] += hit
        for name, tried in one.drafted_by_source.items():
            known = sources.setdefault(name, [0, 0])
            known[0] += tried
            known[1] += one.accepted_by_source.get(name, 0)
        for nodes, times in one.trees.items():
            trees[nodes] = trees.get(nodes, 0) + times
    inside = native.draft + native.verify + native.sample + native.commit
    return {
        "tokens_per_step": round(1 + sum(one.accepted for one in stats) / steps, 4),
        "acceptance_by_depth": acceptance_by_depth(accepted, drafted),
        "acceptance_by_source": {
            name: round(hit / tried, 4) for name, (tried, hit) in sorted(sources.items()) if tried
        },
        "ms": {
            stage: round(sum(one.stage_ms[stage] for one in stats) / steps, 4)
            for stage in stats[0].stage_ms
        },
        "trees": dict(sorted(trees.items())),
        "graph_reuse": round(sum(run.reused for run in own) / steps, 4),
        "native_ms": round(inside / 1e3 / native.n_verify, 4) if native.n_verify else None,
    }


# ---- prompts, contexts, concurrency ----


def prompt(bench: Bench, report: Report) -> None:
    """Speed of reading prompts: drafters read them, too."""
    n_ctx = context_of(bench.config, bench.file)
    lengths = [length for length in bench.sizes.prompts if length + 8 <= n_ctx]
    for length in set(bench.sizes.prompts) - set(lengths):
        bench.result.notes.append(f"prompt of {length} tokens: the context holds {n_ctx}")
    with bench.contestants() as contestants:
        rates: dict[tuple[str, int], list[float]] = {}
        total, done = bench.sizes.repeat * len(lengths) * len(contestants), 0
        for one in contestants:
            one.decode(bench.text(32), 2)
        for _ in range(bench.sizes.repeat):
            for length in lengths:
                for one in contestants:
                    run = one.decode(bench.text(length), 2)
                    rates.setdefault((one.name, length), []).append(
                        1e3 * run.prompt_tokens / run.prompt_ms
                    )
                    done += 1
                    report(done / total)
    bench.result.prompt += [
        PromptResult(name, length, Spread.of(values)) for (name, length), values in rates.items()
    ]


def context(bench: Bench, report: Report) -> None:
    """Speed of decoding behind long prompts; the time of a step grows with what it attends to."""
    room = int(bench.file.get("context_length", 0)) or context_of(bench.config, bench.file)
    count = bench.sizes.max_tokens
    lengths = [length for length in bench.sizes.contexts if length + count <= room]
    for length in sorted(set(bench.sizes.contexts) - set(lengths)):
        bench.result.notes.append(f"context of {length} tokens: the model was trained for {room}")
    for at, length in enumerate(lengths):
        with bench.contestants(n_ctx=length + count + 64) as contestants:
            runs: list[list[Run]] = [[] for _ in contestants]
            total = bench.sizes.repeat * len(contestants)
            for done in range(total):
                one, own = contestants[done % len(contestants)], runs[done % len(contestants)]
                text = bench.text(length)
                own.append(one.decode(text, count))
                if not done:
                    _teach(contestants, text, own[0])
                report((at + (done + 1) / total) / len(lengths))
            plain = median(run.decode_tps for run in runs[0])
            for one, own in zip(contestants, runs, strict=True):
                speed = Spread.of([run.decode_tps for run in own])
                read = sum(run.prompt_tokens for run in own) / sum(run.prompt_ms for run in own)
                bench.result.context.append(
                    ContextResult(
                        one.name,
                        length,
                        round(1e3 * read, 2),
                        speed,
                        round(speed.median / plain, 4),
                    )
                )


def concurrency(bench: Bench, report: Report) -> None:
    """Total speed of several requests that are stepped together on one engine."""
    numbers = bench.sizes.sequences
    with bench.contestants(n_slots=max(numbers)) as contestants:
        rates: dict[tuple[int, str], list[float]] = {}
        total, done = bench.sizes.repeat * len(numbers) * len(contestants), 0
        for one in contestants:
            one.decode(bench.prompts[0][0], min(bench.sizes.max_tokens, _WARM_TOKENS))
        if any(isinstance(one, Own) and one.oracles for one in contestants):
            for text, _ in bench.prompts[: max(numbers) + bench.sizes.repeat]:
                _teach(contestants, text, contestants[0].decode(text, bench.sizes.max_tokens))
        for turn in range(bench.sizes.repeat):
            for number in numbers:
                texts = [bench.prompts[(turn + i) % len(bench.prompts)][0] for i in range(number)]
                for one in contestants:
                    speed = one.decode_together(texts, bench.sizes.max_tokens)
                    if speed is not None:
                        rates.setdefault((number, one.name), []).append(speed)
                    done += 1
                    report(done / total)
    for (number, name), values in rates.items():
        plain = median(rates[number, contestants[0].name])
        bench.result.concurrency.append(
            ConcurrencyResult(name, number, Spread.of(values), round(median(values) / plain, 4))
        )


# ---- cost, memory, layers ----


def cost(bench: Bench, report: Report) -> None:
    """Time of a verify pass against the number of its nodes, nothing drafted."""
    drafting = [draft for draft in bench.drafts if draft.name != "none"] or bench.drafts
    draft = replace(drafting[0], name="ngram", depth=1, top_k=1, nodes=bench.sizes.nodes)
    config = replace(bench.config, n_slots=1)
    with Engine(
        bench.file.path,
        draft,
        config,
        share=bench.owner,
        min_nodes=bench.sizes.nodes,
    ) as engine:
        if engine.plain_because:
            bench.result.notes.append(f"cost: {engine.plain_because}")
            return
        measured = measure(
            engine.native,
            bench.sizes.nodes,
            rounds=max(bench.sizes.repeat, 3) + 1,
            seconds=3600,
            progress=report,
        )
    first = min(measured[0].ms)
    bench.result.cost += [
        CostResult(one.columns, Spread.of(one.ms), round(min(one.ms) / first, 4))
        for one in measured
    ]


def memory(bench: Bench, report: Report) -> None:
    """What every drafter keeps for a sequence, and the peak of a process that decodes with it."""
    for done, draft in enumerate(bench.drafts):
        with bench.engine(draft, replace(bench.config, n_slots=1)) as engine:
            info, nodes = engine.native.info, engine.max_nodes
            bench.result.memory.append(
                MemoryResult(
                    label(draft),
                    nodes,
                    info.size_bytes,
                    info.bytes_kv,
                    info.bytes_state,
                    info.bytes_rollback,
                    (nodes - 1) * info.bytes_state,
                    _peak_of(bench, draft),
                )
            )
        report((done + 1) / (len(bench.drafts) + 1))
    if bench.peers:
        with bench.contestants() as contestants:
            for one in contestants:
                if not isinstance(one, Own):
                    one.decode(bench.prompts[0][0], _WARM_TOKENS)
                    peak = getattr(one, "peak_rss", None)
                    bench.result.memory.append(MemoryResult(one.name, 0, 0, 0, 0, 0, 0, peak))


# What a child took at its highest, told by itself: what the parent learns of it (wait4) counts the
# parent's own pages, which a child shares until it starts its program.
_PEAK_ENTRY = """
import re, resource, sys
from pyspec.cli import main
try:
    main()
finally:
    try:
        found = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())
        peak = 1024 * int(found[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("peak", peak, file=sys.stderr)
"""


def _peak_of(bench: Bench, draft: DraftConfig) -> int | None:
    """Peak resident memory of a process that decodes with `draft` and nothing else."""
    if draft.name.startswith("oracle:") or os.name != "posix":
        return None
    config = bench.config
    limits = {
        "--draft-depth": draft.depth,
        "--draft-top-k": draft.top_k,
        "--draft-width": draft.width,
        "--draft-nodes": draft.nodes,
        "--draft-model": draft.model,
        "--draft-head-rows": draft.head_rows,
        "--draft-cache-type-k": draft.cache_type_k,
        "--draft-cache-type-v": draft.cache_type_v,
        "--cache-type-k": config.cache_type_k,
        "--cache-type-v": config.cache_type_v,
        "--ctx": config.n_ctx,
        "--gpu-layers": config.n_gpu_layers,
    }
    command = [sys.executable, "-c", _PEAK_ENTRY, "generate", str(bench.file.path), "-"]
    command += ["-n", str(_WARM_TOKENS), "--temp", "0", "--ignore-end", "--draft", draft.name]
    command += ["--threads", str(config.n_threads)]
    for flag, value in limits.items():
        if value is not None:
            command += [flag, str(value)]
    prompt = b"".join(map(bench.owner.token_to_piece, bench.prompts[0][0]))
    process = subprocess.run(command, input=prompt, capture_output=True)
    peak = re.search(rb"^peak (\d+)$", process.stderr, re.MULTILINE)
    if process.returncode or not peak:
        raise DraftError(f"{' '.join(command)} ended with status {process.returncode}")
    return int(peak[1])


def layers(bench: Bench, report: Report) -> None:
    """Where the time of a pass goes: recurrent layers, attention, feed-forward, head."""
    sizes = [n for n in (1, 4, DEFAULT_NODES) if n <= bench.sizes.nodes]
    bench.result.layers += by_layer(
        bench.owner.model_address,
        bench.file.path,
        sizes,
        threads=bench.owner.info.n_threads,
        rounds=max(bench.sizes.repeat, 3),
        progress=report,
    )
