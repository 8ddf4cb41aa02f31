"""``pyspec info``: what a model is, and what can be done with it."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pyspec.cli import console, options
from pyspec.generate import Engine
from pyspec.info import ModelReport, report


@click.command()
@options.model_argument
@options.draft_options
@options.engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(model: str, as_json: bool, **values: Any) -> None:
    """Show architecture, layers, draft sources, memory and verification cost of a model."""
    config, draft = options.take_engine(values), options.take_draft(values)
    with console.progress("Loading") as progress:
        engine = Engine(model, draft, config, progress=progress)
    with engine:
        found = report(engine)
    if as_json:
        click.echo(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        _show(found)


def _show(found: ModelReport) -> None:
    layers = ", ".join(f"{count} {kind}" for kind, count in found.layers.items() if count)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("model", found.path)
    table.add_row("architecture", found.arch)
    table.add_row("parameters", f"{found.parameters:,}")
    table.add_row("layers", layers)
    for label, types in found.exactness.items():
        if types:
            table.add_row(f"{label} types", ", ".join(types))
    table.add_row("context", f"{found.context['used']} of {found.context['trained']} trained")
    table.add_row("drafters", ", ".join(found.drafts))
    for name, lacking in found.missing.items():
        table.add_row("", f"not {name}: {lacking}")
    table.add_row("weights", _mib(found.memory["weights"]))
    table.add_row("compute buffers", _mib(found.memory["compute"]))
    parts = ("attention_cache", "state", "rollback", "mtp_cache")
    details = ", ".join(f"{part.replace('_', ' ')} {_mib(found.memory[part])}" for part in parts)
    table.add_row("memory per slot", f"{_mib(found.memory['per_slot'])} ({details})")
    if found.verify_ms:
        costs = ", ".join(f"{nodes}: {ms:.3g} ms" for nodes, ms in found.verify_ms.items())
        table.add_row("pass by nodes", costs)
    out = Console(highlight=False, soft_wrap=True)
    out.print(table)
    for warning in found.warnings:
        out.print(f"[yellow]warning:[/yellow] {warning}")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
