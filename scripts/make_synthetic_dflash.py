#!/usr/bin/env python3
"""Write a drafter with random weights for a target: DFlash, DSpark or DFlash2."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import click
import numpy as np
from dflash.config import DrafterConfig, spread_layers, tensor_shapes
from dflash.gguf_file import Target, write_drafter
from numpy.typing import NDArray

VARIANTS = ("dflash", "dspark", "dflash2")
RANK = 32  # of the Markov head and of the selector
CONV_KERNEL, CONV_GROUP = 4, 32
Shape = tuple[int, ...]


def dspark_shapes(cfg: DrafterConfig) -> dict[str, Shape]:
    """The Markov head and the confidence head."""
    return {
        "markov_w1.weight": (cfg.n_vocab, RANK),
        "markov_w2.weight": (cfg.n_vocab, RANK),
        "conf_proj.weight": (1, cfg.n_embd + RANK),
        "conf_proj.bias": (1,),
    }


def dflash2_shapes(cfg: DrafterConfig) -> dict[str, Shape]:
    """The selector and the convolutions of every layer."""
    shapes: dict[str, Shape] = {
        "selector_predecessor.weight": (cfg.n_vocab, RANK),
        "selector_successor.weight": (cfg.n_vocab, RANK),
        "selector_hidden.weight": (RANK, cfg.n_embd),
    }
    for i in range(cfg.n_layer):
        for part in ("attn", "ffn"):
            shapes[f"blk.{i}.{part}_conv_base"] = (2, CONV_KERNEL, cfg.n_embd)
            shapes[f"blk.{i}.{part}_conv_proj.weight"] = (
                2 * CONV_KERNEL * cfg.n_embd // CONV_GROUP,
                cfg.n_embd,
            )
    return shapes


def values(name: str, shape: Shape, seed: int) -> NDArray[np.float32]:
    """Random values that keep activations near unit variance; they depend on name and seed alone."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    out = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * out
    if name.endswith("conv_base"):  # nearly the identity: the first tap is the token itself
        out *= 0.1
        out[:, 0] += 1
        return out
    if name.endswith("conv_proj.weight"):
        return 0.1 * out / np.float32(np.sqrt(shape[-1]))
    if name == "conf_proj.bias":
        return out
    return out / np.float32(np.sqrt(shape[-1]))


def make(
    path: Path,
    target: Target,
    variant: str = "dflash",
    *,
    layers: int = 2,
    block_size: int = 16,
    features: int = 5,
    top_k: int = 4,
    sample_from_anchor: bool = True,
    kind: str = "Q8_0",
    seed: int = 0,
) -> DrafterConfig:
    """Write the file; returns what its metadata says.

    Raises:
        ValueError: The target is too narrow for a selector of `top_k`, has too few layers for
            `features`, or no token that can serve as a mask.
    """
    if target.mask_token is None:
        raise ValueError(f"{target.path} has no token that can serve as a mask")
    if variant == "dflash2" and target.n_embd < top_k * (top_k + 1):
        raise ValueError(
            f"a selector of {top_k} needs a width of {top_k * (top_k + 1)}, got {target.n_embd}"
        )
    cfg = DrafterConfig(
        n_embd=target.n_embd,
        n_vocab=target.n_vocab,
        n_layer=layers,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        n_ff=2 * target.n_embd,
        block_size=block_size,
        mask_token=target.mask_token,
        target_layers=spread_layers(target.n_layer, min(features, target.n_layer - 3)),
        rope_base=target.rope_base,
        n_ctx=target.n_ctx,
    )
    shapes: dict[str, Shape] = dict(tensor_shapes(cfg))
    extra: dict[str, Any] = {}
    if variant == "dspark":
        shapes |= dspark_shapes(cfg)
        extra = {"sample_from_anchor": sample_from_anchor, "has_confidence_head": True}
    elif variant == "dflash2":
        shapes |= dflash2_shapes(cfg)
        extra = {
            "conv_kernel_size": CONV_KERNEL,
            "conv_group_size": CONV_GROUP,
            "selector_rank": RANK,
            "selector_top_k": top_k,
        }
    weights = {name: values(name, shape, seed) for name, shape in shapes.items()}
    write_drafter(path, cfg, weights, target.path, kind, f"synthetic {variant}", extra)
    return cfg


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("variant", type=click.Choice(VARIANTS))
@click.argument("target", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("path", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--layers", type=click.IntRange(1), default=2, show_default=True, help="Blocks of the drafter."
)
@click.option(
    "--block-size",
    type=click.IntRange(2),
    default=16,
    show_default=True,
    help="Tokens of a block, the anchor included.",
)
@click.option(
    "--features",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Target layers that give features.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Candidates of a DFlash2 selector.",
)
@click.option(
    "--bonus-anchor",
    is_flag=True,
    help="DSpark whose first row predicts nothing, as SpecForge exports it.",
)
@click.option(
    "--type",
    "kind",
    type=click.Choice(["F32", "F16", "Q8_0"]),
    default="Q8_0",
    show_default=True,
    help="Type of the matrices.",
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same weights.")
def main(variant: str, target: Path, path: Path, bonus_anchor: bool, **options: Any) -> None:
    """Write to FILE a drafter of random weights for TARGET, a GGUF file, to test the decoding with.

    \b
    VARIANT is one of
      dflash    plain: every position of the block is predicted on its own
      dspark    with a Markov head (scores depend on the previous draft) and a confidence head
      dflash2   with a selector lattice over the best candidates, and convolutions

    \b
    python scripts/make_synthetic_dflash.py dspark pyspec/models/demo.gguf dspark.gguf
    """
    try:
        make(path, Target.read(target), variant, sample_from_anchor=not bonus_anchor, **options)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{path}: {path.stat().st_size / 1e6:.2f} MB", err=True)


if __name__ == "__main__":
    main()
