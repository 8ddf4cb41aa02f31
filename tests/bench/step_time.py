#!/usr/bin/env python3
"""Time of one verification step against the number of draft nodes: trees, and upstream's snapshots.

Makes random-weight models with the layer shapes of Qwen3.5-0.8B and measures, alternating in one
run, what a step costs that verifies N nodes and keeps three of them:

    python tests/bench/step_time.py --json docs/data/step_time.json

\b
  row, chunk   a draft tree (half of its nodes have a sibling), then llama_memory_seq_accept();
               the two forms of ggml_gated_delta_net_tree()
  snapshots    upstream: a chain of N tokens in a context with n_rs_seq = N - 1, then
               llama_memory_seq_rm(); no tree, and a copy of the state for every token

Times are medians; processor time with one thread, wall-clock time with more.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from synthetic_model import preset, write  # noqa: E402

from tests.bench.llama_tree import FORMS, Context, Model  # noqa: E402

NODES = [1, 2, 4, 8, 16, 32, 64]
KEPT = 3
PREFIX = 64


def tree_parents(nodes: int) -> list[int]:
    """A chain in which every second node has a sibling: two nodes a depth."""
    return [-1, *(max(0, (node - 1) // 2 * 2 - 1) for node in range(1, nodes))]


def path_of(parents: list[int], length: int) -> list[int]:
    """The first nodes of the deepest path."""
    path, node = [], len(parents) - 1
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1][:length]


def steps(
    model: Model, nodes: int, threads: int, stack: contextlib.ExitStack
) -> dict[str, Callable]:
    """For every way to verify `nodes` nodes, a function that does it once."""
    rng = np.random.default_rng(nodes)
    prefix = rng.integers(300, model.vocab, PREFIX).tolist()
    tokens = rng.integers(300, model.vocab, nodes).tolist()
    parents = tree_parents(nodes)
    path = path_of(parents, KEPT)

    def open_context(**options: object) -> Context:
        context = stack.enter_context(Context(model, threads=threads, **options))
        context.decode(prefix, read=False)
        return context

    def tree(context: Context) -> Callable:
        def step() -> None:
            context.tree(tokens, parents, read=False)
            context.accept(path)

        return step

    def chain(context: Context) -> Callable:
        def step() -> None:
            context.decode(tokens, read=False)
            if len(path) < nodes and not context.remove(nodes - len(path)):
                raise RuntimeError("upstream did not roll back")

        return step

    ways = {form: tree(open_context(nodes=nodes, form=form)) for form in FORMS}
    return {**ways, "snapshots": chain(open_context(snapshots=nodes - 1))}


def measure(path: Path, threads: int, repeats: int, nodes: list[int]) -> list[dict]:
    """One row for each number of nodes: milliseconds a step of every way."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    rows = []
    with Model(path) as model:
        for count in nodes:
            with contextlib.ExitStack() as stack:
                ways = steps(model, count, threads, stack)
                taken: dict[str, list[float]] = {way: [] for way in ways}
                for repeat in range(repeats + 1):
                    for way, step in ways.items():
                        start = clock()
                        step()
                        if repeat:  # the first one is a warm-up
                            taken[way].append((clock() - start) * 1e3)
            row = {"nodes": count, **{way: round(median(t), 1) for way, t in taken.items()}}
            rows.append(row)
            click.echo("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option(
    "--json", "out", type=click.Path(path_type=Path), help="Write the figures to this file."
)
@click.option("--type", "kinds", multiple=True, default=("Q8_0", "Q4_0"), show_default=True)
@click.option("--layers", type=int, default=8, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--repeats", type=int, default=9, show_default=True)
@click.option("--nodes", default=",".join(map(str, NODES)), show_default=True)
@click.option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the models in this folder.",
)
def main(
    out: Path | None, kinds: tuple[str, ...], layers: int, threads: int, repeats: int, nodes: str,
    models: Path | None,
) -> None:  # fmt: skip
    document = {
        "model": f"qwen35-0.8b, {layers} layers, random weights",
        "threads": threads,
        "clock": "processor time" if threads == 1 else "wall clock",
        "kept": KEPT,
        "ms": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = models or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in kinds:
            path = folder / f"qwen35-0.8b-{layers}-{kind}.gguf"
            if not path.exists():
                write(path, preset("qwen35-0.8b", layers=layers), kind)
            click.echo(f"{kind}, {threads} thread(s), ms a step")
            document["ms"][kind] = measure(
                path, threads, repeats, [int(n) for n in nodes.split(",")]
            )
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
