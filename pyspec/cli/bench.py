"""``pyspec bench``: plain against speculative decoding on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pyspec.bench import read_prompts, render, run
from pyspec.bench.runner import fixed_seed
from pyspec.cli import console, options
from pyspec.errors import ArgumentError


@click.command()
@options.model_argument
@click.option(
    "--draft",
    default="auto",
    show_default=True,
    metavar="A,B,...",
    help="Drafters to compare with plain decoding.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="One prompt a line, or a JSON array of strings.  [default: built-in prompts]",
)
@click.option(
    "-n",
    "max_tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens a run.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="R",
    help="Rounds over all prompts.",
)
@options.draft_limit_options
@options.sampling_options(temperature=0.0)
@options.engine_options
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the figures as JSON; - for standard output.",
)
def bench(
    model: str,
    draft: str,
    prompts: Path | None,
    max_tokens: int,
    repeat: int,
    json_file: Path | None,
    **values: Any,
) -> None:
    """Compare drafters with plain decoding, in alternating runs on the same prompts."""
    names = [name.strip() for name in draft.split(",") if name.strip()]
    if not names:
        raise ArgumentError("--draft names no drafter")
    limits = {name: values.pop(name) for name in list(values) if name.startswith("draft_")}
    drafts = [options.take_draft(dict(limits), name) for name in names]
    with console.progress("Measuring") as progress:
        result = run(
            model,
            drafts,
            read_prompts(prompts),
            max_tokens=max_tokens,
            repeat=repeat,
            config=options.take_engine(values),
            sampling=fixed_seed(options.take_sampling(values)),
            progress=progress,
        )
    to_stdout = json_file is not None and str(json_file) == "-"
    render(result, console.errors() if to_stdout else Console(highlight=False))
    if json_file is not None:
        _write(json_file, json.dumps(result.as_dict(), indent=2, ensure_ascii=False))


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        click.echo(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from None
