"""``pyspec bench``: plain against speculative decoding, and against peers, on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pyspec.bench import (
    SCENARIOS,
    SETS,
    PeerConfig,
    Sizes,
    built_in,
    every_draft,
    read_peer,
    read_prompts,
    render,
    run,
)
from pyspec.bench.report import to_csv
from pyspec.bench.runner import fixed_seed
from pyspec.cli import console, options
from pyspec.config import DraftConfig
from pyspec.errors import ArgumentError
from pyspec.model_file import ModelFile, resolve_model

_FILE = click.Path(path_type=Path)
EVERY = "every"


class BenchCommand(click.Command):
    """Takes a bare ``--json`` in front of MODEL for what it is, as the other commands do."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Where FILE of ``--json`` would leave no MODEL, that word is MODEL."""
        found, *_ = self.make_parser(ctx).parse_args(list(args))
        lacking = not isinstance(found.get("model"), str)
        if lacking and "--json" in args and found.get("json_file") != "-":
            after = args.index("--json") + 1
            args = [*args[:after], "-", *args[after:]]
        return super().parse_args(ctx, args)


@click.command(cls=BenchCommand)
@options.model_argument
@click.option(
    "--draft",
    default="auto",
    show_default=True,
    metavar="A,B,...",
    help="Drafters to compare with plain decoding, each with limits of its own where wanted: "
    "mtp/depth=3/top_k=2. 'every' for each that the file can feed, and all together.",
)
@click.option(
    "--scenario",
    default="decode",
    show_default=True,
    metavar="A,B,...",
    help=f"What to measure: {', '.join(SCENARIOS)}; 'all' for everything.",
)
@click.option("--prompts", type=_FILE, metavar="FILE", help="Own prompts: a JSON array of strings; .jsonl with a string or {\"prompt\": ...} a line; or one prompt a line.")  # fmt: skip
@click.option(
    "--set",
    "sets",
    default="code",
    show_default=True,
    metavar="A,B,...",
    help=f"Built-in prompts: {', '.join(SETS)}; 'all' for all of them.",
)
@click.option("-n", "max_tokens", type=click.IntRange(min=1), default=128, show_default=True, metavar="N", help="Tokens a run.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, metavar="R", help="Rounds over all prompts.")  # fmt: skip
@click.option("--concurrency", default="1,2,4,8", show_default=True, metavar="N,...", help="Numbers of requests at once.")  # fmt: skip
@click.option("--contexts", default="1024,8192,32768", show_default=True, metavar="N,...", help="Tokens in front, in the scenario 'context'.")  # fmt: skip
@click.option("--prompt-lengths", default="128,512,2048", show_default=True, metavar="N,...", help="Tokens of the prompts that the scenario 'prompt' reads.")  # fmt: skip
@click.option("--cost-nodes", type=click.IntRange(1, 64), default=32, show_default=True, metavar="N", help="Largest tree of the scenario 'cost'.")  # fmt: skip
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME[=PATH]",
    help="Measure beside it, in turn: llama-server=PATH, or llama-cpp-python[=FOLDER of libraries].",
)
@click.option("--peer-spec", default="", metavar="A,B,...", help="llama-server's --spec-type, such as draft-mtp or ngram-mod.  [default: what the file can feed]")  # fmt: skip
@click.option("--peer-n-max", default="1,2,3,4", show_default=True, metavar="N,...", help="Most drafts a step of the server; each is tried.")  # fmt: skip
@click.option("--peer-threads", default="", metavar="N,...", help="Threads of the peers; each is tried.  [default: as many as pyspec uses]")  # fmt: skip
@click.option("--peer-synthetic", type=click.FloatRange(0, 1), default=None, metavar="A", help="The server takes a draft for right with this probability, as oracle:A does.")  # fmt: skip
@options.draft_limit_options
@options.sampling_options(temperature=0.0, seed="0")
@options.engine_options
@click.option("--json", "json_file", is_flag=False, flag_value="-", type=_FILE, metavar="[FILE]", help="Write the figures as one JSON object, without FILE to standard output.")  # fmt: skip
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write them as CSV; - for standard output.")  # fmt: skip
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write one page with plots; needs pyspec[plot].")  # fmt: skip
def bench(
    model: str,
    draft: str,
    scenario: str,
    prompts: Path | None,
    sets: str,
    max_tokens: int,
    repeat: int,
    concurrency: str,
    contexts: str,
    prompt_lengths: str,
    cost_nodes: int,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    **values: Any,
) -> None:
    """Compare drafters with plain decoding, and with peers, in alternating runs.

    \b
    pyspec bench model.gguf                                  what speculation gains here
    pyspec bench model.gguf --draft every --set all          by drafter and kind of text
    pyspec bench model.gguf --scenario all --html bench.html
    pyspec bench model.gguf --peer llama-server=PATH         beside llama.cpp's own speculation

    Every prompt is decoded plainly and with every drafter and peer in turn, several rounds; medians
    and extremes are told. Ctrl-C shows what was measured so far. Run it while nothing else is
    running, and trust runs of 256 tokens and more (-n 256): in shorter ones the first trials of
    auto's drafters count for much.
    """
    if html_file is not None:
        from pyspec.bench.page import require_plots

        require_plots()
    base = options.take_draft({key: values.pop(key) for key in list(values) if key.startswith("draft_")}, "auto")  # fmt: skip
    peers = _peers(values)
    sizes = Sizes(
        max_tokens,
        repeat,
        _numbers("--prompt-lengths", prompt_lengths),
        _numbers("--concurrency", concurrency),
        _numbers("--contexts", contexts),
        cost_nodes,
    )
    names = list(SCENARIOS) if scenario == "all" else _names("--scenario", scenario)
    result = run(
        model,
        _drafts(model, draft, base),
        read_prompts(prompts) if prompts else built_in(_names("--set", sets)),
        sizes=sizes,
        scenario=names,
        peers=peers,
        config=options.take_engine(values),
        sampling=fixed_seed(options.take_sampling(values)),
        progress=console.progress,
    )
    to_stdout = any(str(file) == "-" for file in (json_file, csv_file) if file is not None)
    render(result, console.errors() if to_stdout else Console(highlight=False))
    if json_file is not None:
        _write(json_file, json.dumps(result.as_dict(), indent=2, ensure_ascii=False) + "\n")
    if csv_file is not None:
        _write(csv_file, to_csv(result))
    if html_file is not None:
        from pyspec.bench.page import page

        _write(html_file, page(result))


def _drafts(model: str, text: str, base: DraftConfig) -> list[DraftConfig]:
    """The drafters of ``--draft``; limits in a name go before the command's own."""
    found = []
    for name in _names("--draft", text):
        if name == EVERY:
            found += every_draft(ModelFile.read(resolve_model(model)), base)
            continue
        name, *limits = name.split("/")
        fields: dict[str, Any] = {}
        for limit in limits:
            key, _, value = limit.partition("=")
            if key in ("cache_type_k", "cache_type_v"):
                fields[key] = value
            elif key in ("depth", "top_k", "width", "nodes", "head_rows") and value.isdigit():
                fields[key] = int(value)
            else:
                raise ArgumentError(
                    f"--draft has the limit {limit!r}, must be depth=N, top_k=N, width=N, nodes=N, "
                    "head_rows=N, cache_type_k=TYPE or cache_type_v=TYPE"
                )
        found.append(replace(base, name=name, **fields))
    return found


def _peers(values: dict[str, Any]) -> list[PeerConfig]:
    texts = values.pop("peers")
    kinds, n_max = values.pop("peer_spec"), values.pop("peer_n_max")
    threads, synthetic = values.pop("peer_threads"), values.pop("peer_synthetic")
    return [
        read_peer(
            text,
            kinds=tuple(_names("--peer-spec", kinds)) if kinds else (),
            n_max=_numbers("--peer-n-max", n_max),
            threads=_numbers("--peer-threads", threads) if threads else (),
            synthetic=synthetic,
        )
        for text in texts
    ]


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ArgumentError(f"{option} names nothing")
    return names


def _numbers(option: str, text: str) -> tuple[int, ...]:
    names = _names(option, text)
    if not all(name.isdecimal() and int(name) > 0 for name in names):
        raise ArgumentError(f"{option} is {text!r}, must be numbers above 0, separated by commas")
    return tuple(dict.fromkeys(map(int, names)))


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from None
