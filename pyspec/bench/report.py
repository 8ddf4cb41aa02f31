"""A `BenchResult` for people, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pyspec.bench.figures import BenchResult, Spread

_DEPTHS = 6
"""Depths that a table shows; JSON has all."""

_BUSY = 0.25  # of the cores, used by others before anything is measured


def render(result: BenchResult, console: Console) -> None:
    """Prints a table for every scenario that was measured."""
    console.print(headline(result), soft_wrap=True)
    busy, cores = result.machine.get("busy") or 0.0, result.machine["cores"]
    if busy > _BUSY * cores:
        console.print(
            "[yellow]warning:[/yellow] this machine is busy: when the run began, other processes "
            f"used {busy:.1f} of {cores} cores; figures are worth no more than the machine is quiet",
            soft_wrap=True,
        )
    for part in (
        _speed,
        _sources,
        _sets,
        _stages,
        _prompt,
        _context,
        _concurrency,
        _cost,
        _layers,
        _memory,
    ):
        table = part(result)
        if table is not None:
            console.print(table)
    for name, count in result.divergent.items():
        if count:
            console.print(
                f"[yellow]warning:[/yellow] {name}: {count} prompts differ from plain decoding",
                soft_wrap=True,
            )
    for note in result.notes:
        console.print(f"not measured: {note}", soft_wrap=True)
    if result.interrupted:
        console.print("[yellow]interrupted:[/yellow] this is what was measured so far")


def headline(result: BenchResult) -> str:
    """The model and the machine in a line."""
    machine = result.machine
    memory = f", {machine['memory'] / 2**30:.0f} GiB" if machine.get("memory") else ""
    threads = f", {result.results[0].threads} used" if result.results else ""
    return (
        f"{result.model} on {machine['cpu']}, {machine['cores']} cores{threads}{memory}, "
        f"{machine['system']}, pyspec {machine['pyspec']}"
    )


def to_csv(result: BenchResult) -> str:
    """All figures, one a row; columns that a row has no figure for are empty."""
    rows = result.rows()
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _speed(result: BenchResult) -> Table | None:
    if not result.results:
        return None
    table = _table("draft", "tokens/s", "speed-up", "tokens a step", "accepted at depth 1, 2, ...")
    for one in result.results:
        rates = " ".join(f"{rate:.2f}" for rate in one.acceptance_by_depth[:_DEPTHS]) or "-"
        per_step = "-" if one.tokens_per_step is None else f"{one.tokens_per_step:.2f}"
        speed, gain = _spread(one.decode_tps, 0), _spread(one.speedup, 2)
        table.add_row(one.draft, speed, gain, per_step, rates)
    return table


def _sources(result: BenchResult) -> Table | None:
    names = list(dict.fromkeys(name for one in result.results for name in one.acceptance_by_source))
    own = [one for one in result.results if one.ms and one.acceptance_by_source]
    if len(names) < 2 or not own:
        return None
    names = [name for name in names if any(name in one.acceptance_by_source for one in own)]
    table = _table("accepted of the nodes by", *names)
    for one in own:
        rates = [one.acceptance_by_source.get(name) for name in names]
        table.add_row(one.draft, *("-" if rate is None else f"{rate:.2f}" for rate in rates))
    return table


def _sets(result: BenchResult) -> Table | None:
    names = list(dict.fromkeys(name for one in result.results for name in one.speedup_by_set))
    if len(names) < 2:
        return None
    table = _table("speed-up on", *names)
    for one in result.results[1:]:
        values = [one.speedup_by_set.get(name) for name in names]
        table.add_row(one.draft, *("-" if v is None else f"{v:.2f}" for v in values))
    return table


def _stages(result: BenchResult) -> Table | None:
    own = [one for one in result.results if one.ms]
    if not own:
        return None
    table = _table("ms a step", *own[0].ms, "Python", "reuse", "nodes")
    for one in own:
        total = sum(one.ms.values())
        outside = "-" if one.native_ms is None else f"{max(total - one.native_ms, 0):.3f}"
        reuse = "-" if one.graph_reuse is None else f"{one.graph_reuse:.0%}"
        steps = sum(one.trees.values())
        nodes = sum(n * times for n, times in one.trees.items()) / steps if steps else 0
        stages = (f"{value:.3f}" for value in one.ms.values())
        table.add_row(one.draft, *stages, outside, reuse, f"{nodes:.1f}")
    return table


def _prompt(result: BenchResult) -> Table | None:
    return _grid(
        "prompt tokens/s",
        ((one.draft, str(one.tokens), _spread(one.tps, 0)) for one in result.prompt),
    )


def _context(result: BenchResult) -> Table | None:
    return _grid(
        "tokens/s behind",
        (
            (one.draft, str(one.tokens), f"{_spread(one.decode_tps, 0)} {one.speedup:.2f}x")
            for one in result.context
        ),
    )


def _concurrency(result: BenchResult) -> Table | None:
    return _grid(
        "total tokens/s of",
        (
            (one.draft, str(one.sequences), f"{_spread(one.tps, 0)} {one.speedup:.2f}x")
            for one in result.concurrency
        ),
    )


def _cost(result: BenchResult) -> Table | None:
    if not result.cost:
        return None
    table = _table("nodes", *(str(one.nodes) for one in result.cost))
    table.add_row("ms a pass, fastest", *(f"{one.ms.min:.2f}" for one in result.cost))
    table.add_row("median", *(f"{one.ms.median:.2f}" for one in result.cost))
    table.add_row("of one node", *(f"{one.of_one:.2f}" for one in result.cost))
    return table


def _layers(result: BenchResult) -> Table | None:
    if not result.layers:
        return None
    table = _table("ms a pass of", *result.layers[0].ms)
    for one in result.layers:
        table.add_row(f"{one.nodes} tokens", *(f"{value:.3f}" for value in one.ms.values()))
    return table


def _memory(result: BenchResult) -> Table | None:
    if not result.memory:
        return None
    table = _table("MiB", "nodes", "weights", "cache", "state", "rollback", "snapshots", "peak")
    for one in result.memory:
        sizes = (one.weights, one.cache, one.state, one.rollback, one.snapshots, one.peak_rss)
        known = one.weights > 0
        cells = [f"{size / 2**20:.1f}" if size is not None else "-" for size in sizes]
        nodes = str(one.nodes) if known else "-"
        table.add_row(one.draft, nodes, *(cells if known else [*["-"] * 5, cells[-1]]))
    return table


def _grid(title: str, cells: Iterable[tuple[str, str, str]]) -> Table | None:
    """A table of (row, column, text)."""
    found: dict[str, dict[str, str]] = {}
    for row, column, text in cells:
        found.setdefault(row, {})[column] = text
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    if not found:
        return None
    table = _table(title, *columns)
    for row, values in found.items():
        table.add_row(row, *(values.get(column, "-") for column in columns))
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    table.columns[0].no_wrap = True
    return table


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.min:.{digits}f}-{spread.max:.{digits}f})"
