"""``pyspec generate``: continues a prompt."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from pyspec.cli import console, options
from pyspec.errors import AbortedError, ArgumentError, EncodingError
from pyspec.generate import Engine, Generation, GenerationResult
from pyspec.text import check_utf8


@click.command()
@options.model_argument
@click.argument("stdin", metavar="[-]", required=False)
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the prompt from a file, byte for byte.",
)
@click.option(
    "-n",
    "max_tokens",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Most tokens to generate.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--ignore-end", is_flag=True, help="Go on after the model's end of text.")
@click.option("--chat", is_flag=True, help="Put the prompt as a user's message.")
@options.draft_options
@options.sampling_options(options.SAMPLING.temperature)
@options.grammar_options
@options.engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def generate(
    model: str,
    stdin: str | None,
    prompt: str | None,
    file: Path | None,
    max_tokens: int,
    stop: tuple[str, ...],
    ignore_end: bool,
    chat: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Continue a prompt given with -p, -f or on standard input (-)."""
    data = _read_prompt(stdin, prompt, file)
    _read_grammars(values)
    engine_config = options.take_engine(values)
    draft, sampling = options.take_draft(values), options.take_sampling(values)
    with console.progress("Loading") as report:
        engine = Engine(model, draft, engine_config, progress=report)
    with engine, console.interruptible(engine.abort):
        text: bytes | str = data
        if chat:
            message = {"role": "user", "content": _decode(data)}
            text = engine.chat_template.render([message])
        with console.progress("Prompt") as report:
            generation = engine.generate(
                text,
                max_tokens=max_tokens,
                stop=stop,
                ignore_end=ignore_end,
                sampling=sampling,
                progress=report,
            )
            first = next(generation, "")
        result = _run(generation, first, show=not as_json)
        if as_json:
            click.echo(json.dumps(result.as_dict(), ensure_ascii=False))
        else:
            _summarise(result)
    if result.finish_reason == "aborted":
        sys.exit(130)


def _run(generation: Generation, first: str, show: bool) -> GenerationResult:
    """Prints text as it appears; Ctrl-C ends it with what there is."""
    try:
        if show:
            click.echo(first, nl=False)
        for piece in generation:
            if show:
                click.echo(piece, nl=False)
    except (KeyboardInterrupt, AbortedError):
        generation.close()
    if show:
        click.echo()
    return generation.partial()


def _summarise(result: GenerationResult) -> None:
    if sys.stderr.isatty():
        stats = result.stats
        console.errors().print(
            f"[dim]{stats.draft}: {stats.generated} tokens at {stats.decode_tps:.1f}/s, "
            f"{stats.tokens_per_step:.2f} a step, {stats.acceptance_rate:.0%} of drafts accepted; "
            f"prompt {stats.prompt_tokens} tokens at {stats.prompt_tps:.0f}/s; "
            f"seed {result.seed}[/dim]",
            soft_wrap=True,
        )


def _read_prompt(stdin: str | None, prompt: str | None, file: Path | None) -> bytes:
    if stdin not in (None, "-"):
        raise click.UsageError(f"unexpected argument {stdin!r}: give the prompt with -p, -f or -")
    if sum(source is not None for source in (stdin, prompt, file)) != 1:
        raise click.UsageError("give one prompt, with -p TEXT, -f FILE or - for standard input")
    if prompt is not None:
        return check_utf8(os.fsencode(prompt), "-p")
    if file is not None:
        return check_utf8(_read(file), str(file))
    return check_utf8(sys.stdin.buffer.read(), "standard input")


def _read_grammars(values: dict[str, Any]) -> None:
    """Replaces the files of ``--grammar`` and ``--json-schema`` by what they contain."""
    for name in ("grammar", "json_schema"):
        if (path := values[name]) is not None:
            data = check_utf8(_read(path), str(path))
            values[name] = data.decode("utf-8", "replace")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from None


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise EncodingError("a chat message cannot end in the middle of a character") from None
