#!/usr/bin/env python3
"""The figures of docs/performance.md: every part measures one claim and writes docs/data/PART.json.

    python tests/bench/must_show.py list
    python tests/bench/must_show.py run greedy
    python tests/bench/must_show.py run peers --server PATH/llama-server

A part takes less than a minute on two cores. Run it while nothing else is running. All but
memory-serve run after ``scripts/setup``; that needs the packages of the tests, too.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from pyspec.drafts.dflash import DflashDrafter  # noqa: E402

from pyspec.bench import BenchPrompt, PeerConfig, Sizes, built_in, render, run  # noqa: E402
from pyspec.bench.contestants import label  # noqa: E402
from pyspec.bench.figures import BenchResult, DraftResult  # noqa: E402
from pyspec.bench.machine import machine, peak_rss  # noqa: E402
from pyspec.config import DraftConfig, EngineConfig, SamplingConfig  # noqa: E402
from pyspec.generate import Engine  # noqa: E402
from pyspec.model_file import ModelFile, resolve_model  # noqa: E402
from pyspec.native import NativeEngine  # noqa: E402
from tests import prompts as texts  # noqa: E402
from tests.bench.policy import MACHINES, speedup  # noqa: E402

GREEDY = SamplingConfig(temperature=0, seed=0)
SAMPLED = SamplingConfig(temperature=0.8, seed=0)
ACCEPT = 0.8
NODES = 16

CHAIN = DraftConfig("mtp", depth=3)
TREE = DraftConfig("mtp", depth=4, top_k=2)
DFLASH = DraftConfig("dflash", depth=7, top_k=1)
DDTREE = DraftConfig("dflash", top_k=4)
NGRAM = DraftConfig("ngram", depth=4)
AUTO = DraftConfig("auto")
EVERY = [CHAIN, TREE, DFLASH, DDTREE, NGRAM, AUTO]


@dataclass
class Options:
    """What the command line says."""

    server: Path | None
    synthetic: Path | None
    rounds: int | None


@dataclass
class Part:
    """A claim that is measured."""

    name: str
    claim: str
    measure: Callable[[Options], tuple[BenchResult | None, dict[str, Any]]]


# ---- prompts ----


def held_out(count: int) -> list[BenchPrompt]:
    """Beginnings of sources that the demo model was not trained on."""
    return [BenchPrompt(one, "held out") for one in texts.held_out(count)]


def random_tokens(model: str, count: int, length: int = 48) -> list[BenchPrompt]:
    """Prompts without any meaning."""
    draw = random.Random(0)
    n_vocab = len(ModelFile.read(resolve_model(model)).strings("tokenizer.ggml.tokens"))
    return [
        BenchPrompt(tuple(draw.randrange(260, n_vocab) for _ in range(length)), "random")
        for _ in range(count)
    ]


# ---- the parts ----


def sources(options: Options, sampling: SamplingConfig) -> tuple[BenchResult, dict[str, Any]]:
    """Every drafter on 20 held-out prompts of 256 tokens."""
    sizes = Sizes(256, options.rounds or 1)
    result = run("demo", EVERY, held_out(20), config=EngineConfig(), sampling=sampling, sizes=sizes)
    return result, _speeds(result)


def _on_every_set(options: Options, sampling: SamplingConfig) -> tuple[BenchResult, dict[str, Any]]:
    """auto on random tokens and every built-in set."""
    prompts = [*random_tokens("demo", 12), *built_in(["all"])]
    sizes = Sizes(256, options.rounds or 5)
    result = run("demo", [AUTO], prompts, config=EngineConfig(), sampling=sampling, sizes=sizes)
    return result, {"speedup_by_set": result.results[1].speedup_by_set, "at_least": 0.97}


def never_loses(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """At temperature 1 with the whole distribution."""
    whole = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    return _on_every_set(options, whole)


def never_loses_sampled(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """The same at temperature 0.8 with the usual limits."""
    return _on_every_set(options, SAMPLED)


def never_loses_greedy(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """The same, greedy."""
    return _on_every_set(options, GREEDY)


def synthetic(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """The 0.8B shape at an acceptance of 0.8 on both sides, the drafting paid on both sides."""
    drafts = [
        DraftConfig(f"oracle:{ACCEPT}+mtp", depth=depth, head_rows=rows)
        for depth, rows in ((1, None), (2, None), (3, None), (3, 0))
    ]
    drafts.append(DraftConfig(f"oracle:{ACCEPT}+mtp"))
    peers = _server(options, kinds=("draft-mtp",), n_max=(1, 2, 3, 4), synthetic=ACCEPT)
    result = run(
        str(_synthetic(options)),
        drafts,
        [BenchPrompt("abcdefgh ijklmnop qrst", "")],
        config=EngineConfig(n_ctx=512),
        sampling=GREEDY,
        sizes=Sizes(40, options.rounds or 5),
        peers=peers,
    )
    return result, _at_acceptance(result)


def synthetic_four(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """The same with four requests at once."""
    result = run(
        str(_synthetic(options)),
        [DraftConfig(f"oracle:{ACCEPT}+mtp", depth=depth) for depth in (1, 2, 3)],
        [BenchPrompt("abcdefgh ijklmnop qrst" + chr(97 + i), "") for i in range(4)],
        config=EngineConfig(n_ctx=512),
        sampling=GREEDY,
        sizes=Sizes(24, options.rounds or 3, sequences=(4,)),
        scenario=["concurrency"],
        peers=_server(options, kinds=("draft-mtp",), n_max=(1, 2, 3), synthetic=ACCEPT),
    )
    return result, _together(result)


def sweep(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """Fixed tree sizes against the controller, on three kinds of prompt."""
    fixed = [DraftConfig("mtp", depth=6, top_k=2, nodes=nodes) for nodes in (2, 4, 8, 12)]
    fixed += [DraftConfig("dflash", depth=15, top_k=4, nodes=nodes) for nodes in (2, 4, 8, 16, 32)]
    prompts = [*held_out(3), *built_in(["prose"])[:3], *random_tokens("demo", 3)]
    result = run(
        "demo",
        [*fixed, AUTO],
        prompts,
        config=EngineConfig(),
        sampling=GREEDY,
        sizes=Sizes(192, options.rounds or 2),
    )
    auto = result.results[-1].speedup_by_set
    best = {name: max(one.speedup_by_set[name] for one in result.results[:-1]) for name in auto}
    return result, {
        "auto": auto,
        "best_fixed": best,
        "auto_of_best": {name: round(auto[name] / best[name], 4) for name in auto},
    }


def policy(options: Options) -> tuple[None, dict[str, Any]]:
    """The controller against a sweep of fixed settings, at played costs: `tests/bench/policy.py`."""
    fixed = [DraftConfig("ngram", depth=depth, nodes=depth + 1) for depth in (1, 3, 7, 15, 31)]
    fixed += [DraftConfig("mtp", depth=depth) for depth in (1, 2, 3, 5, 7)]
    fixed += [DraftConfig("mtp", depth=4, top_k=2), DraftConfig("dflash", depth=7, top_k=2)]
    drawn = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    kinds = {
        "code, greedy": (texts.held_out(10), GREEDY),
        "code, T = 0.8": (texts.held_out(10), SAMPLED),
        "random, T = 1": ([one.text for one in random_tokens("demo", 8)], drawn),
    }
    found: dict[str, Any] = {}
    for where, costs in MACHINES.items():
        for kind, (asked, sampling) in kinds.items():
            speeds = {
                label(one): round(speedup(one, costs, asked, sampling, 200), 4)
                for one in (*fixed, AUTO)
            }
            auto = speeds.pop(label(AUTO))
            best = max(speeds, key=lambda name: speeds[name])
            found[f"{where}, {kind}"] = {
                "auto": auto,
                "best_fixed": best,
                "auto_of_best": round(auto / max(1.0, speeds[best]), 4),
                "fixed": speeds,
            }
    return None, found


def orchestration(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """What a step of 16 nodes takes outside native code."""
    result = run(
        str(_synthetic(options)),
        [DraftConfig("oracle:0.8", depth=NODES - 1, nodes=NODES)],
        [BenchPrompt("abcdefgh ijklmnop qrst", "")],
        config=EngineConfig(n_ctx=512),
        sampling=GREEDY,
        sizes=Sizes(64, options.rounds or 5),
    )
    tree = DraftConfig("mtp", depth=5, top_k=3, nodes=NODES)
    demo = run(
        "demo", [tree], held_out(4), config=EngineConfig(), sampling=GREEDY, sizes=Sizes(192, 3)
    )
    return result, {
        **_outside(result.results[1]),
        "at_most": 0.03,
        "demo": _outside(demo.results[1]),
    }


def _outside(one: DraftResult) -> dict[str, Any]:
    step = sum(one.ms.values())
    outside = step - (one.native_ms or 0)
    return {
        "step_ms": round(step, 4),
        "outside_native_us": round(1e3 * outside, 1),
        "between_stages_us": round(1e3 * one.ms["other"], 1),
        "outside_native_share": round(outside / step, 5),
        "graph_reuse": one.graph_reuse,
    }


def peers(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """llama-server's kinds of speculation on the demo model, each at its best length and threads."""
    result = run(
        "demo",
        [CHAIN, AUTO],
        held_out(8),
        config=EngineConfig(),
        sampling=GREEDY,
        sizes=Sizes(192, options.rounds or 1),
        peers=_server(
            options,
            kinds=("draft-mtp", "draft-dflash", "ngram-simple"),
            n_max=(1, 2, 3, 4, 6),
            threads=(1, 2),
        ),
    )
    return result, _against_peers(result)


def peers_four(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """Four requests at once on the demo model."""
    result = run(
        "demo",
        [CHAIN, AUTO],
        held_out(8),
        config=EngineConfig(),
        sampling=GREEDY,
        sizes=Sizes(128, options.rounds or 5, sequences=(1, 4)),
        scenario=["concurrency"],
        peers=_server(options, kinds=("draft-mtp",), n_max=(1, 2, 3, 4), threads=(1, 2)),
    )
    return result, _together(result)


def memory(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """Peak memory of a process that decodes, pyspec's and llama-server's."""
    result = run(
        "demo",
        [CHAIN, AUTO],
        held_out(1),
        config=EngineConfig(),
        sampling=GREEDY,
        sizes=Sizes(32, 1),
        scenario=["memory"],
        peers=_server(options, kinds=("draft-mtp",), n_max=(3,)),
    )
    return result, {one.draft: one.peak_rss for one in result.memory}


def memory_synthetic(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """The same for the 0.8B shape."""
    result = run(
        str(_synthetic(options)),
        [CHAIN, AUTO],
        [BenchPrompt("abcdefgh", "")],
        config=EngineConfig(n_ctx=512),
        sampling=GREEDY,
        sizes=Sizes(8, 1),
        scenario=["memory"],
        peers=_server(options, kinds=("draft-mtp",), n_max=(3,)),
    )
    return result, {one.draft: one.peak_rss for one in result.memory}


def memory_serve(options: Options) -> tuple[None, dict[str, Any]]:
    """The same of a server, with one slot and with four, after requests that filled them twice."""
    found: dict[str, Any] = {"machine": machine()}
    for slots in (1, 4):
        for draft in ("none", "mtp", "auto"):
            found[f"{draft}, slots={slots}"] = _peak_of_server(draft, slots)
    return None, found


def _peak_of_server(draft: str, slots: int) -> int | None:
    try:
        import httpx

        from tests.servers import running
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"memory-serve needs {error.name}, one of the packages of the tests: scripts/setup test"
        ) from None
    options = ("--draft", draft, "--slots", str(slots))
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), *options) as server:

        def ask(prompt: str) -> None:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 32, "temperature": 0}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

        with ThreadPoolExecutor(slots) as clients:
            list(clients.map(ask, texts.held_out(2 * slots)))
        return peak_rss(server.process.pid)


F16 = ("f16", "f16")
CACHES = [F16, ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")]
"""Types of keys and values."""


def cache_types(options: Options) -> tuple[None, dict[str, Any]]:
    """Acceptance and speed with other cache types, on the target's side and on the drafters'."""
    found = {"machine": machine()}
    for cache in CACHES:
        found[f"target {'/'.join(cache)}"] = _with_caches(options, cache, [F16])[0]
    drafted = _with_caches(options, F16, CACHES)
    for cache, figures in zip(CACHES, drafted, strict=True):
        found[f"drafter {'/'.join(cache)}"] = figures
    return None, found


def _with_caches(
    options: Options, target: tuple[str, str], drafter: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The figures of one run for every types of the drafters' caches."""
    result = run(
        "demo",
        [replace(draft, cache_type_k=k, cache_type_v=v) for k, v in drafter for draft in (CHAIN, DFLASH)],
        held_out(12),
        config=EngineConfig(n_threads=1, cache_type_k=target[0], cache_type_v=target[1]),
        sampling=GREEDY,
        sizes=Sizes(128, options.rounds or 2),
    )  # fmt: skip
    plain, *others = result.results
    return [
        {
            "bytes_per_token": _cache_bytes(target, cache),
            "plain_tokens_per_second": plain.decode_tps.median,
            **{
                name: {
                    "acceptance_length": one.tokens_per_step,
                    "tokens_per_second": one.decode_tps.median,
                    "speedup": one.speedup.median,
                }
                for name, one in zip(("mtp", "dflash"), pair, strict=True)
            },
        }
        for cache, pair in zip(drafter, zip(others[::2], others[1::2], strict=True), strict=True)
    ]


def _cache_bytes(target: tuple[str, str], drafter: tuple[str, str]) -> dict[str, int]:
    """Bytes that a token takes in the attention caches of the demo model and its drafters."""
    n_ctx = 1024
    with Engine(
        "demo",
        DraftConfig("mtp", cache_type_k=drafter[0], cache_type_v=drafter[1]),
        EngineConfig(n_ctx=n_ctx, cache_type_k=target[0], cache_type_v=target[1]),
    ) as engine:
        info = engine.native.info
        dflash = ModelFile.read(DflashDrafter.file_for(engine.file, DFLASH))
    values = sum(
        Fraction(size, block) * dflash.get("attention.head_count_kv") * dflash.get(f"attention.{side}_length")
        for side, name in zip(("key", "value"), drafter, strict=True)
        for block, size in [GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]]
    )  # fmt: skip
    return {
        "target": info.bytes_kv // n_ctx,
        "mtp": info.bytes_mtp // n_ctx,
        "dflash": int(values * dflash.get("block_count")),
    }


def rollback(options: Options) -> tuple[None, dict[str, Any]]:
    """Rollback memory of the 35B-A3B shape: a file whose weights are a hole, opened by both."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "35b-a3b.gguf"
        _write_hollow(path, "qwen36-35b-a3b", "F16")
        with NativeEngine.open(
            path, EngineConfig(n_threads=1), n_ctx=512, max_nodes=NODES, mtp=True
        ) as native:
            info = native.info
        found: dict[str, Any] = {
            "nodes": NODES,
            "state_bytes": info.bytes_state,
            "rollback_bytes": info.bytes_rollback,
        }
        if options.server is not None:
            found["stock_log"] = lines = _stock_memory(options.server, path, NODES - 1)
            sizes = [
                float(size) for line in lines for size in re.findall(r"size = +([\d.]+) MiB", line)
            ]
            if sizes:
                stock = int(max(sizes) * 2**20) - info.bytes_state
                found["stock_snapshot_bytes"] = stock
                found["of_stock"] = round(info.bytes_rollback / stock, 4)
        found["of_computed_snapshots"] = round(
            info.bytes_rollback / ((NODES - 1) * info.bytes_state), 4
        )
        found["at_most"] = 0.1
    return None, found


PARTS = [
    Part("greedy", "every drafter on held-out code, greedy", lambda o: sources(o, GREEDY)),
    Part("sampled", "the same at temperature 0.8", lambda o: sources(o, SAMPLED)),
    Part("never-loses", "auto at least 0.97x on every kind, random tokens, too", never_loses),
    Part("never-loses-sampled", "the same at temperature 0.8", never_loses_sampled),
    Part("never-loses-greedy", "the same, greedy", never_loses_greedy),
    Part("synthetic", "0.8B shape at acceptance 0.8 beside llama-server", synthetic),
    Part("synthetic-4", "the same, four requests at once", synthetic_four),
    Part("sweep", "the controller against fixed sizes", sweep),
    Part("policy", "the same at played costs of three machines", policy),
    Part("orchestration", "time outside native code at 16 nodes", orchestration),
    Part("peers", "llama-server on the demo model", peers),
    Part("peers-4", "the same, four requests at once", peers_four),
    Part("memory", "peak memory on the demo model", memory),
    Part("memory-synthetic", "peak memory on the 0.8B shape", memory_synthetic),
    Part("memory-serve", "peak memory of a server on the demo model", memory_serve),
    Part("cache-types", "acceptance and speed by the types of the attention caches", cache_types),
    Part("rollback", "rollback memory of the 35B-A3B shape", rollback),
]


# ---- what follows from the figures ----


def _speeds(result: BenchResult) -> dict[str, Any]:
    return {
        one.draft: {
            "speedup": one.speedup.median,
            "acceptance_length": one.tokens_per_step,
            "tokens_per_second": one.decode_tps.median,
        }
        for one in result.results
    }


def _against_peers(result: BenchResult) -> dict[str, Any]:
    own = [one for one in result.results if one.kind == "pyspec"]
    others = [one for one in result.results if one.kind != "pyspec"]
    if not others:
        return _speeds(result)
    best, stock = (max(part, key=lambda one: one.decode_tps.median) for part in (own, others))
    ratios = [mine / theirs for mine, theirs in zip(best.runs, stock.runs, strict=True)]
    return {
        "best": best.draft,
        "best_stock": stock.draft,
        "ratio": round(sorted(ratios)[len(ratios) // 2], 4),
        "at_least": 1.25,
        **_speeds(result),
    }


def _together(result: BenchResult) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in dict.fromkeys(one.sequences for one in result.concurrency):
        speeds = {
            one.draft: one.tps.median for one in result.concurrency if one.sequences == number
        }
        own = max(speed for name, speed in speeds.items() if not name.startswith("llama"))
        stock = [speed for name, speed in speeds.items() if name.startswith("llama")]
        ratio = round(own / max(stock), 4) if stock else None
        found[str(number)] = {"total": speeds, "ratio_to_best_stock": ratio}
    return found


def _at_acceptance(result: BenchResult) -> dict[str, Any]:
    """Speed at exactly the acceptance asked for: a run of 40 tokens has good or bad luck.

    A chain of d drafts that are each right with probability a gives (1 - a^(d+1)) / (1 - a) tokens a
    step (Leviathan et al., arXiv 2211.17192, eq. 1). Divided by the measured milliseconds of a step.
    """
    found: dict[str, Any] = {}
    for one in result.results:
        depth = re.search(r"(?:depth=|draft-mtp/)(\d+)", one.draft)
        if not one.tokens_per_step or (depth is None and "none" not in one.draft):
            continue
        step_ms = 1e3 * one.tokens_per_step / one.decode_tps.median
        d = int(depth.group(1)) if depth else 0
        expected = (1 - ACCEPT ** (d + 1)) / (1 - ACCEPT)
        found[one.draft] = {
            "step_ms": round(step_ms, 3),
            "tokens_per_step": one.tokens_per_step,
            "expected_tokens_per_step": round(expected, 4),
            "tokens_per_second_at_acceptance": round(1e3 * expected / step_ms, 2),
            "measured_tokens_per_second": one.decode_tps.median,
        }
    speeds = {name: one["tokens_per_second_at_acceptance"] for name, one in found.items()}
    own = max(speed for name, speed in speeds.items() if not name.startswith("llama"))
    stock = [speed for name, speed in speeds.items() if name.startswith("llama")]
    if stock:
        found["ratio_to_best_stock"] = round(own / max(stock), 4)
        found["at_least"] = 1.25
    return found


# ---- helpers ----


def _server(options: Options, **fields: Any) -> list[PeerConfig]:
    if options.server is None:
        click.echo("no --server: measured without peers", err=True)
        return []
    return [PeerConfig("llama-server", options.server.absolute(), **fields)]


def _synthetic(options: Options) -> Path:
    if options.synthetic is None:
        raise click.UsageError(
            "this part needs --synthetic FILE: python scripts/make_synthetic.py qwen35-0.8b FILE "
            "--layers 8 --type Q4_0"
        )
    return options.synthetic


def _write_hollow(path: Path, name: str, kind: str) -> None:
    """A model file with true metadata and no weights: their place is a hole that reads as zeros."""
    import gguf
    import numpy as np
    import synthetic_model as sm

    shape = sm.preset(name, vocab=1024)
    writer = gguf.GGUFWriter(path, shape.arch)
    sm._write_metadata(writer, shape, kind, 32_768)
    total = 0
    for tensor in sm.tensors(shape):
        type_ = sm._type_of(tensor, kind)
        size = sm._bytes(tensor.shape, type_)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, type_)
        total += size + 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + total)


def _stock_memory(server: Path, model: Path, n_max: int) -> list[str]:
    """What llama-server logs of its recurrent memory."""
    command = [str(server), "--model", str(model), "--ctx-size", "512", "--parallel", "1"]
    command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(n_max), "--no-warmup"]
    command += ["--host", "127.0.0.1", "--port", "0", "--verbose"]
    found: list[str] = []
    end = time.monotonic() + 40
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if re.search(r"llama_memory_recurrent: size =", line):
                    found.append(line.strip())
                if "rs_seq" in "".join(found) or time.monotonic() > end:
                    break
        finally:
            process.kill()
    return found


@click.group()
def main() -> None:
    """Measure the figures of docs/performance.md."""


@main.command("list")
def list_parts() -> None:
    """Name the parts."""
    for part in PARTS:
        click.echo(f"{part.name:20} {part.claim}")


@main.command("run")
@click.argument("names", nargs=-1, required=True, type=click.Choice([part.name for part in PARTS]))
@click.option("--server", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Stock llama-server.")  # fmt: skip
@click.option("--synthetic", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The 0.8B shape, from scripts/make_synthetic.py.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), help="Rounds over all prompts.  [default: the part's]")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "docs" / "data", help="Folder of the JSON files.")  # fmt: skip
@click.option("--label", default="", help="Appended to the files' names, such as the model's type.")
def run_parts(
    names: tuple[str, ...],
    server: Path | None,
    synthetic: Path | None,
    rounds: int | None,
    out: Path,
    label: str,
) -> None:
    """Measure the parts NAMES."""
    console = Console(highlight=False, width=120)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        part = next(part for part in PARTS if part.name == name)
        began = time.monotonic()
        result, summary = part.measure(Options(server, synthetic, rounds))
        data: dict[str, Any] = {"claim": part.claim, "summary": summary}
        if result is not None:
            render(result, console)
            found = result.as_dict()
            found["model"] = Path(found["model"]).name
            data |= found
        console.print_json(json.dumps(summary))
        path = out / f"{name}{'-' + label if label else ''}.json"
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        console.print(f"{path}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
