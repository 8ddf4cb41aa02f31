"""``pyspec tune``: measures what verification costs on this machine, and keeps it."""

from __future__ import annotations

import json
from typing import Any

import click

from pyspec.cli import console, options
from pyspec.config import DEFAULT_NODES, MAX_NODES
from pyspec.cost import Tuning, choose_threads, curve_of, measure
from pyspec.errors import ArgumentError
from pyspec.generate import context_of
from pyspec.model_file import ModelFile, resolve_model
from pyspec.native import NativeEngine


@click.command()
@options.model_argument
@click.option(
    "--nodes",
    type=click.IntRange(2, MAX_NODES),
    default=DEFAULT_NODES,
    show_default=True,
    metavar="N",
    help="Largest tree to measure.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    metavar="N",
    help="Passes of every size.",
)
@click.option(
    "--context",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Tokens in front of the trees.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.engine_options
def tune(model: str, nodes: int, rounds: int, context: int, as_json: bool, **values: Any) -> None:
    """Measure the cost of verification once, for all later runs on this machine.

    How much is worth drafting depends on what a pass over 2, 4 or 16 tokens costs compared with
    one token. Without this, every start measures it briefly. In a small model one thread can be
    faster than all; which is so is measured first, unless --threads is given. The result is kept in
    the user's cache directory (PYSPEC_CACHE_DIR puts it elsewhere), for this file, these options and
    this machine; `serve`, `generate` and `bench` use it. Run it while nothing else is running.
    """
    config = options.take_engine(values)
    file = ModelFile.read(resolve_model(model))
    n_ctx = context_of(config, file)
    if context + nodes > n_ctx:
        raise ArgumentError(
            f"context is {context}, with {nodes} nodes it exceeds the {n_ctx} tokens that a "
            "sequence holds: give a larger --ctx"
        )
    with console.progress("Loading") as report:
        native = NativeEngine.open(file.path, config, n_ctx=n_ctx, max_nodes=nodes, progress=report)
    with native:
        if not native.info.tree:
            raise ArgumentError(f"{file.path} is decoded plainly: there is nothing to tune")
        threads = choose_threads(native) if config.n_threads == 0 else native.info.n_threads
        with console.progress("Measuring") as report, console.interruptible(native.abort):
            curve = curve_of(
                measure(
                    native, nodes, rounds=rounds, seconds=3600, context=context, progress=report
                )
            )
    path = Tuning(str(file.path), threads, curve.points).save(file, config)
    if as_json:
        click.echo(
            json.dumps(
                {"model": model, "threads": threads, "points": curve.points, "file": str(path)}
            )
        )
        return
    first = curve.ms(1)
    click.echo("nodes        ms   of one")
    for columns, ms in curve.points:
        click.echo(f"{columns:5d} {ms:9.2f} {ms / first:7.2f}x")
    click.echo(f"With {threads} {'thread' if threads == 1 else 'threads'}. Kept in {path}")
