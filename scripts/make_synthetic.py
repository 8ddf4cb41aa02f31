#!/usr/bin/env python3
"""Write a GGUF file with random weights and the layer shapes of a real GatedDeltaNet hybrid."""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from synthetic_model import PRESETS, TYPES, preset, tensors, write


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="PRESET", type=click.Choice(list(PRESETS)))
@click.argument(
    "path", metavar="FILE", type=click.Path(dir_okay=False, writable=True, path_type=Path)
)
@click.option("--type", "kind", type=click.Choice(TYPES, case_sensitive=False), default="Q8_0",
              show_default=True, help="Type of the matrices. Norms, the convolution and the router stay F32.")  # fmt: skip
@click.option(
    "--layers", type=click.IntRange(1), help="Fewer or more layers than the real model has."
)
@click.option(
    "--vocab", type=click.IntRange(259), help="Another number of tokens than the real model has."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The same seed gives the same file."
)
def main(
    name: str, path: Path, kind: str, layers: int | None, vocab: int | None, seed: int
) -> None:
    """Write a model of random weights to FILE, to measure speed, memory and rounding with.

    \b
    PRESET is one of
      qwen35-0.8b     24 layers, width 1024, head tied to the embedding
      qwen35-4b       32 layers, width 2560
      qwen36-27b      64 layers, width 5120
      qwen36-35b-a3b  40 layers, width 2048, 256 experts of which 8 are used
      tiny-qwen35, tiny-qwen35moe, tiny-qwen3next   a few megabytes, for tests

    Every fourth layer is an attention layer, the others are GatedDeltaNet layers; a block for
    multi-token prediction follows (not in tiny-qwen3next). The vocabulary is bytes, special tokens
    and meaningless words, so any text can be put in; what comes out means nothing.

    \b
    A third of the 0.8B, 0.5 GB, in ten seconds:
      python scripts/make_synthetic.py qwen35-0.8b model.gguf --layers 8
    For a quick test:
      python scripts/make_synthetic.py tiny-qwen35moe tiny.gguf --type Q4_0
      pyspec generate tiny.gguf -p abc --temp 0
    """
    shape = preset(name, layers, vocab)
    sizes = [tensor.shape for tensor in tensors(shape)]
    total = len(sizes)
    with click.progressbar(length=total, label=f"{name} {kind}", file=sys.stderr) as bar:
        write(
            path, shape, kind.upper(), seed, progress=lambda _, done, __: bar.update(done - bar.pos)
        )
    click.echo(f"{path}: {total} tensors, {path.stat().st_size / 1e6:.1f} MB", err=True)


if __name__ == "__main__":
    main()
