"""A `BenchResult` for people."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pyspec.bench.runner import BenchResult, Spread


def render(result: BenchResult, console: Console) -> None:
    """Prints the tables of speed, acceptance and time by stage."""
    machine = result.machine
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
    console.print(f"{result.model} on {where}", soft_wrap=True)
    speed = _table("draft", "tokens/s", "speed-up", "tokens a step", "accepted at depth 1, 2, ...")
    for one in result.results:
        rates = " ".join(f"{rate:.2f}" for rate in one.acceptance_by_depth) or "-"
        tokens_per_step = f"{one.tokens_per_step:.2f}"
        speed.add_row(
            one.draft, _spread(one.decode_tps, 0), _spread(one.speedup, 2), tokens_per_step, rates
        )
    console.print(speed)
    stages = _table("ms a step", *result.results[0].ms)
    for one in result.results:
        stages.add_row(one.draft, *(f"{value:.3f}" for value in one.ms.values()))
    console.print(stages)
    for name, count in result.divergent.items():
        if count:
            console.print(
                f"[yellow]warning:[/yellow] {name}: {count} prompts differ from plain decoding"
            )


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE, pad_edge=False)


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.min:.{digits}f}-{spread.max:.{digits}f})"
