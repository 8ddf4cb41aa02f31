#!/usr/bin/env python3
"""Write a GGUF file to measure with: random weights in the shape of a real GatedDeltaNet hybrid, or
the demo model at the cost of a larger one."""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from padded_model import pad, times_for
from synthetic_model import PRESETS, TYPES, preset, tensors, write

GIVEN = click.core.ParameterSource.COMMANDLINE
PADDED = "padded-demo"
MODELS = Path(__file__).resolve().parents[1] / "pyspec" / "models"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="PRESET", type=click.Choice([*PRESETS, PADDED]))
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
@click.option(
    "--megabytes", type=float, default=150, show_default=True, help="Size of a padded-demo."
)
@click.pass_context
def main(
    context: click.Context,
    name: str,
    path: Path,
    kind: str,
    layers: int | None,
    vocab: int | None,
    seed: int,
    megabytes: float,
) -> None:
    """Write a model to FILE, to measure speed, memory and rounding with.

    \b
    PRESET is one of
      qwen35-0.8b     24 layers, width 1024, head tied to the embedding
      qwen35-4b       32 layers, width 2560
      qwen36-27b      64 layers, width 5120
      qwen36-35b-a3b  40 layers, width 2048, 256 experts of which 8 are used
      tiny-qwen35, tiny-qwen35moe, tiny-qwen3next   a few megabytes, for tests
      padded-demo     the demo model at the cost of one of --megabytes

    All but the last have random weights. Every fourth layer is an attention layer, the others are
    GatedDeltaNet layers; a block for multi-token prediction follows (not in tiny-qwen3next). The
    vocabulary is bytes, special tokens and meaningless words, so any text can be put in; what comes
    out means nothing.

    padded-demo is the demo model of the package with zeros beside its feed-forward weights, the MTP
    block's included. They change no bit of what it computes: text and acceptance are the demo's, those
    of a small model. But a step reads as many bytes as a model of that size has. Its DFlash drafter,
    padded as much, is written beside it. What it lacks of a real model of that size are the large
    vocabulary, attention and recurrence.

    \b
    A third of the 0.8B, 0.5 GB, in ten seconds:
      python scripts/make_synthetic.py qwen35-0.8b model.gguf --layers 8
    For a quick test:
      python scripts/make_synthetic.py tiny-qwen35moe tiny.gguf --type Q4_0
      pyspec generate tiny.gguf -p abc --temp 0
    What speculation gains where a step takes as long as with 300 MB of weights:
      python scripts/make_synthetic.py padded-demo padded.gguf --megabytes 300
      pyspec bench padded.gguf
    """
    given = {option for option in context.params if context.get_parameter_source(option) is GIVEN}
    others = given & ({"kind", "layers", "vocab", "seed"} if name == PADDED else {"megabytes"})
    for option in others:
        raise click.UsageError(f"{name} has no --{'type' if option == 'kind' else option}")
    if name == PADDED:
        write_padded(path, megabytes)
    else:
        write_random(name, path, kind, layers, vocab, seed)


def write_random(
    name: str, path: Path, kind: str, layers: int | None, vocab: int | None, seed: int
) -> None:
    """Writes a preset."""
    shape = preset(name, layers, vocab)
    sizes = [tensor.shape for tensor in tensors(shape)]
    total = len(sizes)
    with click.progressbar(length=total, label=f"{name} {kind}", file=sys.stderr) as bar:
        write(
            path, shape, kind.upper(), seed, progress=lambda _, done, __: bar.update(done - bar.pos)
        )
    click.echo(f"{path}: {total} tensors, {path.stat().st_size / 1e6:.1f} MB", err=True)


def write_padded(path: Path, megabytes: float) -> None:
    """Writes the demo model and its drafter, padded by the same factor."""
    try:
        times = times_for(MODELS / "demo.gguf", megabytes)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    drafter = path.with_name(f"{path.stem}-dflash.gguf")
    for source, target in (("demo.gguf", path), ("demo-dflash.gguf", drafter)):
        pad(MODELS / source, target, times)
        size = target.stat().st_size / 1e6
        click.echo(f"{target}: {size:.1f} MB, feed-forward {times} times as wide", err=True)


if __name__ == "__main__":
    main()
