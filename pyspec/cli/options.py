"""The options that commands share, each defined once, and how they become configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from pyspec.config import CACHE_TYPES, DraftConfig, EngineConfig, SamplingConfig

Command = TypeVar("Command", bound=Callable[..., Any])

DRAFT, ENGINE, SAMPLING = DraftConfig(), EngineConfig(), SamplingConfig()
"""Where the defaults of the options come from."""

model_argument = click.argument("model", metavar="MODEL")


def _all(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


draft_limit_options = _all(
    click.option(
        "--draft-model",
        default=None,
        metavar="FILE",
        help="GGUF of a drafter that is a model of its own: a DFlash file, or a small model.",
    ),
    click.option(
        "--draft-depth",
        type=int,
        default=None,
        metavar="N",
        help="Longest chain of drafts.  [default: chosen in every step]",
    ),
    click.option(
        "--draft-top-k",
        type=int,
        default=None,
        metavar="K",
        help="Candidates of a node; 1 drafts a chain.  [default: chosen in every step]",
    ),
    click.option(
        "--draft-width",
        type=int,
        default=None,
        metavar="N",
        help="Nodes that a model expands at every depth.  [default: 1]",
    ),
    click.option(
        "--draft-nodes",
        type=int,
        default=None,
        metavar="N",
        help="Most nodes of a draft tree, its root included.  [default: chosen, 16 at most]",
    ),
    click.option(
        "--draft-head-rows",
        type=int,
        default=None,
        metavar="N",
        help="Rows of the output matrix that the drafter reads; 0 for all.  [default: chosen]",
    ),
    click.option(
        "--draft-cache-type-k",
        default=None,
        metavar="TYPE",
        help="Type of the keys in the drafter's attention cache.  [default: the model's]",
    ),
    click.option(
        "--draft-cache-type-v",
        default=None,
        metavar="TYPE",
        help="Type of the values in it.  [default: the model's]",
    ),
)

draft_options = _all(
    click.option(
        "--draft",
        default=DRAFT.name,
        show_default=True,
        metavar="NAME",
        help="Drafter: none, mtp, dflash, ngram, ..., or auto for all that the file offers.",
    ),
    draft_limit_options,
)

engine_options = _all(
    click.option(
        "--ctx",
        "n_ctx",
        type=int,
        default=None,
        metavar="N",
        help="Tokens of context; 0 for all the model was trained for.  [default: 4096 at most]",
    ),
    click.option(
        "--threads",
        "n_threads",
        type=int,
        default=0,
        metavar="N",
        help="CPU threads.  [default: all physical cores; for steps of a small model one, where that "
        "is measured to be faster]",
    ),
    click.option(
        "--gpu-layers",
        "n_gpu_layers",
        type=int,
        default=-1,
        metavar="N",
        help="Layers on the GPU, where there is one.  [default: all]",
    ),
    click.option(
        "--cache-type-k",
        default=ENGINE.cache_type_k,
        show_default=True,
        metavar="TYPE",
        help=f"Type of the keys in the attention cache: {', '.join(CACHE_TYPES)}.",
    ),
    click.option(
        "--cache-type-v",
        default=ENGINE.cache_type_v,
        show_default=True,
        metavar="TYPE",
        help="Type of the values in it; quantized ones need flash attention.",
    ),
    click.option("--verbose", is_flag=True, help="Show llama.cpp's own log."),
)


def sampling_options(temperature: float, seed: str = "a new one") -> Callable[[Command], Command]:
    """``--temp`` with the given default, and its companions; `seed` says what theirs is."""
    return _all(
        click.option(
            "--temp",
            "temperature",
            type=float,
            default=temperature,
            show_default=True,
            metavar="T",
            help="Temperature; 0 is greedy.",
        ),
        click.option(
            "--top-k",
            type=int,
            default=SAMPLING.top_k,
            show_default=True,
            metavar="K",
            help="Sample from the K best tokens; 0 for all.",
        ),
        click.option(
            "--top-p",
            type=float,
            default=SAMPLING.top_p,
            show_default=True,
            metavar="P",
            help="Nucleus sampling; 1 turns it off.",
        ),
        click.option(
            "--min-p",
            type=float,
            default=SAMPLING.min_p,
            show_default=True,
            metavar="P",
            help="Drop tokens below this share of the best; 0 turns it off.",
        ),
        click.option(
            "--repeat-penalty",
            type=float,
            default=SAMPLING.repeat_penalty,
            show_default=True,
            metavar="R",
            help="Penalty of recent tokens; 1 is none.",
        ),
        click.option(
            "--seed",
            type=int,
            default=None,
            metavar="S",
            help=f"Random seed: the same seed gives the same text.  [default: {seed}]",
        ),
    )


grammar_options = _all(
    click.option(
        "--grammar",
        type=click.Path(path_type=Path),
        default=None,
        metavar="FILE",
        help="GBNF grammar that the output must follow.",
    ),
    click.option(
        "--json-schema",
        type=click.Path(path_type=Path),
        default=None,
        metavar="FILE",
        help="JSON schema that the output must satisfy.",
    ),
)


def take(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Removes from `values` those that are fields of the dataclass `kind`, and returns them."""
    names = {field.name for field in fields(kind)}
    return {name: values.pop(name) for name in list(values) if name in names}


def take_engine(values: dict[str, Any]) -> EngineConfig:
    """The `EngineConfig` of a command's options."""
    return EngineConfig(**take(EngineConfig, values))


def take_draft(values: dict[str, Any], name: str | None = None) -> DraftConfig:
    """The `DraftConfig` of a command's options; `name` stands in for ``--draft``."""
    fields = {
        key.removeprefix("draft_"): values.pop(key)
        for key in list(values)
        if key.startswith("draft_")
    }
    return DraftConfig(name=values.pop("draft") if name is None else name, **fields)


def take_sampling(values: dict[str, Any]) -> SamplingConfig:
    """The `SamplingConfig` of a command's options."""
    return SamplingConfig(**take(SamplingConfig, values))
