#!/usr/bin/env python3
"""Train a DFlash drafter for a target, measure it, and write it as a GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.config import spread_layers
from dflash.data import Generator, Recipe, read_prompts
from dflash.gguf_file import Target

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train a block-diffusion drafter (DFlash) for TARGET, a GGUF file that pyspec loads."""


@main.command()
@click.argument("target", type=FILE)
@click.argument("folder", type=FOLDER)
@click.option("--prompts", type=FILE)
@click.option("--tokens", default=600_000, show_default=True)
@click.option("--held-out-tokens", default=24_000, show_default=True)
@click.option("--features", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--slots", default=16, show_default=True)
def generate(target: Path, folder: Path, prompts: Path | None, tokens: int, held_out_tokens: int, features: int, **options: Any) -> None:
    facts = Target.read(target)
    recipe = Recipe(spread_layers(facts.n_layer, features), **options)
    train, held_out = read_prompts(prompts)
    maker = Generator(folder, facts, recipe)
    for texts, count, kept in ((held_out, held_out_tokens, True), (train, tokens, False)):
        with tqdm(total=count, unit="tok", unit_scale=True, desc="held out" if kept else "train") as bar:
            maker.run(texts, count, kept, bar.update)


if __name__ == "__main__":
    main()
