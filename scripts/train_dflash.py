#!/usr/bin/env python3
"""Train a DFlash drafter for a target, measure it, and write it as a GGUF file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.config import DrafterConfig, spread_layers
from dflash.data import Generator, Recipe, Shard, read_prompts, shards
from dflash.gguf_file import Target, write_drafter

if TYPE_CHECKING:
    from dflash.model import Drafter

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
PLAN_IMPORT = "the training part needs PyTorch: pip install -e '.[train]'"


class Layers(click.ParamType):
    """A list of layer numbers, such as 2,7,12."""

    name = "layers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} must be layer numbers with commas between them", param, ctx)


def plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option for every field of Plan."""
    try:
        from dflash.train import Plan
    except ImportError:  # without PyTorch the command says so when it is run
        return command
    for item in reversed(fields(Plan)):
        command = click.option(
            f"--{item.name.replace('_', '-')}",
            type=type(item.default),
            default=item.default,
            show_default=True,
            help=item.metadata["help"],
        )(command)
    return command


def feature_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option(
        "--target-layers", type=Layers(), metavar="N,N,...",
        help="Layers whose inputs are the features, instead of evenly spaced ones.",
    )(command)  # fmt: skip
    return click.option(
        "--features", default=5, show_default=True, help="Number of evenly spaced feature layers."
    )(command)


def feature_layers(target: Target, count: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    layers = given or spread_layers(target.n_layer, count)
    if layers[-1] >= target.n_layer:
        raise ValueError(
            f"target layer {layers[-1]} does not exist, {target.path} has 0 to {target.n_layer - 1}"
        )
    return layers


def use_threads(threads: int) -> None:
    try:
        import torch
    except ImportError:
        raise click.ClickException(PLAN_IMPORT) from None
    torch.set_num_threads(threads)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train a block-diffusion drafter (DFlash) for TARGET, a GGUF file that pyspec loads.

    FOLDER holds everything: the data, the checkpoint, quality.json. Each command goes on where it
    was stopped; Ctrl-C loses nothing.

    \b
    For the demo model, on one CPU core:
      python scripts/train_dflash.py generate pyspec/models/demo.gguf build/dflash --tokens 400000
      python scripts/train_dflash.py train    pyspec/models/demo.gguf build/dflash --minutes 40 \\
          --layers 2 --block-size 12 --shortest-block 6 --ff 384 --lr 2e-3
      python scripts/train_dflash.py eval     pyspec/models/demo.gguf build/dflash
      python scripts/train_dflash.py export   pyspec/models/demo.gguf build/dflash -o drafter.gguf

    `generate` may run on while `train` runs: new data is taken up. docs/dflash.md explains the file
    and what to look at when a drafter is bad.
    """


@main.command()
@click.argument("target", type=FILE)
@click.argument("folder", type=FOLDER)
@click.option("--prompts", type=FILE, help='JSONL with {"prompt": text} or {"messages": [...]} lines. Default: the sources of Python\'s standard library, which the demo model was trained on.')  # fmt: skip
@click.option("--tokens", default=400_000, show_default=True, help="Positions to make for training, prompts included.")  # fmt: skip
@click.option("--held-out-tokens", default=24_000, show_default=True, help="Positions to make from held-out prompts, for evaluation.")  # fmt: skip
@click.option("--prompt-tokens", default=160, show_default=True, help="Longest prompt; longer ones are cut.")  # fmt: skip
@click.option("--new-tokens", default=256, show_default=True, help="Longest continuation.")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8), show_default=True, help="Of the continuations, in turn; give it several times.")  # fmt: skip
@click.option("--slots", default=16, show_default=True, help="Continuations decoded at once.")
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@click.option("--seed", default=0, show_default=True, help="Of order and sampling.")
@feature_options
def generate(
    target: Path,
    folder: Path,
    prompts: Path | None,
    tokens: int,
    held_out_tokens: int,
    features: int,
    target_layers: tuple[int, ...] | None,
    **options: Any,
) -> None:
    """Let TARGET continue prompts, and keep its features at every position.

    Drafts must guess what the target writes, not what people write, so the data is the target's own
    output. A position takes 2 bytes for every feature: 1.6 kB for the demo model, 50 kB for a model
    of width 5120.
    """
    facts = Target.read(target)
    recipe = Recipe(feature_layers(facts, features, target_layers), **options)
    train, held_out = read_prompts(prompts)
    maker = Generator(folder, facts, recipe)
    for texts, count, kept in ((held_out, held_out_tokens, True), (train, tokens, False)):
        with tqdm(
            total=count, unit="tok", unit_scale=True, desc="held out" if kept else "train"
        ) as bar:
            maker.run(texts, count, kept, bar.update)


@main.command()
@click.argument("target", type=FILE)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--run", type=FOLDER, help="Another folder for the checkpoint, to try something on the same data.")  # fmt: skip
@click.option("--from", "start", type=FILE, help="Begin with the weights and shapes of this drafter GGUF or checkpoint.")  # fmt: skip
@click.option("--layers", default=5, show_default=True, help="Blocks of the drafter.")
@click.option("--heads", type=int, help="Query heads. Default: width / head size.")
@click.option("--kv-heads", type=int, help="Key and value heads. Default: half of them.")
@click.option("--head-dim", type=int, help="Head size. Default: 128, or 64 below a width of 1024.")
@click.option("--ff", type=int, help="Width of the feed-forward layers. Default: 3 times the width.")  # fmt: skip
@click.option("--block-size", default=16, show_default=True, help="Longest block, anchor included.")
@click.option("--mask-token", type=int, help="Token that stands for a position to predict. Default: one that no text contains.")  # fmt: skip
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@plan_options
def train(
    target: Path,
    folder: Path,
    run: Path | None,
    start: Path | None,
    threads: int,
    layers: int,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    ff: int | None,
    block_size: int,
    mask_token: int | None,
    **plan: Any,
) -> None:
    """Train on the data in FOLDER, or go on from the checkpoint there.

    The loss of the k-th draft weighs exp(-(k - 1) / gamma), for a draft counts only when all
    before it are right. A quality line is printed every two minutes: watch `chain` against
    `unigram`, and `top1`, which should fall with the depth and differ from it to the next.
    """
    use_threads(threads)
    from dflash.train import Plan, Trainer, read_start

    facts = Target.read(target)
    feature_ids = tuple(json.loads((folder / "recipe.json").read_text())["target_layers"])
    weights = None
    if start is not None:
        shape, weights = read_start(start)
        cfg = replace(shape, block_size=block_size)
        if cfg.target_layers != feature_ids:
            raise click.ClickException(
                f"{start} reads layers {cfg.target_layers}, the data in {folder} has {feature_ids}"
            )
    else:
        mask = facts.mask_token if mask_token is None else mask_token
        if mask is None:
            raise click.ClickException(f"{target} has no token that serves as mask: --mask-token")
        size = head_dim or (64 if facts.n_embd < 1024 else 128)
        queries = heads or max(2, facts.n_embd // size)
        cfg = DrafterConfig(
            n_embd=facts.n_embd,
            n_vocab=facts.n_vocab,
            n_layer=layers,
            n_head=queries,
            n_head_kv=kv_heads or max(1, queries // 2),
            head_dim=size,
            n_ff=ff or 3 * facts.n_embd,
            block_size=block_size,
            mask_token=mask,
            target_layers=feature_ids,
            rope_base=facts.rope_base,
            n_ctx=facts.n_ctx,
        )
    trainer = Trainer(run or folder, folder, target, cfg, Plan(**plan), weights)
    done = trainer.run(report=lambda: measure(trainer.model, folder, rows=8, nodes=(16,)))
    click.echo("done" if done else "stopped: the same command goes on", err=True)


def measure(
    model: Drafter,
    folder: Path,
    rows: int,
    nodes: tuple[int, ...] = (8, 16),
    size: int | None = None,
) -> dict[str, Any]:
    """Held-out quality of a drafter."""
    from dflash.quality import blocks, evaluate

    return evaluate(
        partial(blocks, model),
        model.cfg.n_vocab,
        held_out(folder),
        size or model.cfg.block_size,
        rows,
        nodes,
    )


def held_out(folder: Path) -> list[Shard]:
    return [Shard.load(path) for path in shards(folder, held_out=True)]


@main.command("eval")
@click.argument("target", type=FILE)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--drafter", type=FILE, help="A drafter GGUF or checkpoint. Default: FOLDER/checkpoint.pt.")  # fmt: skip
@click.option("--block-size", "sizes", type=int, multiple=True, help="Measure with blocks of this size; may be given several times. Default: the drafter's.")  # fmt: skip
@click.option("--rows", default=64, show_default=True, help="Continuations to measure on.")
@click.option("--nodes", type=int, multiple=True, default=(8, 16), show_default=True, help="Nodes of the trees, root included.")  # fmt: skip
@click.option("--llama", is_flag=True, help="Run a drafter GGUF by llama.cpp instead of PyTorch: what decoding will see.")  # fmt: skip
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
def evaluate(
    target: Path,
    folder: Path,
    drafter: Path | None,
    sizes: tuple[int, ...],
    rows: int,
    nodes: tuple[int, ...],
    llama: bool,
    threads: int,
) -> None:
    """Print how many tokens a step yields on held-out continuations, as JSON.

    `chain` drafts the first choices, `tree_N` a DDTree of N nodes; `unigram` does the same with the
    marginal distribution of the text. 1 is plain decoding. A drafter that is worse with --llama
    than without suffers from a difference between training and decoding.
    """
    path = drafter or folder / "checkpoint.pt"
    measured = (with_llama if llama else with_torch)(
        target, folder, path, sizes, rows, nodes, threads
    )
    text = json.dumps(measured, indent=1)
    (folder / "quality.json").write_text(text + "\n")
    click.echo(text)


def with_torch(
    target: Path,
    folder: Path,
    drafter: Path,
    sizes: tuple[int, ...],
    rows: int,
    nodes: tuple[int, ...],
    threads: int,
) -> dict[str, Any]:
    use_threads(threads)
    from dflash.model import Drafter
    from dflash.train import adopt, read_start, shared_matrices

    cfg, weights = read_start(drafter)
    model = Drafter(cfg, *shared_matrices(target))
    adopt(model, weights)
    return {
        f"block_{size}": measure(model, folder, rows, nodes, size)
        for size in sizes or (cfg.block_size,)
    }


def with_llama(
    target: Path,
    folder: Path,
    drafter: Path,
    sizes: tuple[int, ...],
    rows: int,
    nodes: tuple[int, ...],
    threads: int,
) -> dict[str, Any]:
    use_threads(threads)
    from dflash.quality import LlamaBlocks, evaluate

    if drafter.suffix != ".gguf":
        raise click.ClickException("--llama needs --drafter with a GGUF file")
    texts = held_out(folder)
    longest = max(int(max(shard.offsets[1:] - shard.offsets[:-1])) for shard in texts)
    drafts = LlamaBlocks(target, drafter, longest + 64, threads)
    vocabulary = drafts.cfg.n_vocab
    try:
        return {
            f"block_{size}": evaluate(drafts, vocabulary, texts, size, rows, nodes)
            for size in sizes or (drafts.cfg.block_size,)
        }
    finally:
        drafts.close()


@main.command()
@click.argument("target", type=FILE)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--outfile", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The GGUF file to write.")  # fmt: skip
@click.option("--checkpoint", type=FILE, help="Default: FOLDER/checkpoint.pt.")
@click.option("--type", "kind", type=click.Choice(["Q8_0", "F16", "F32"]), default="Q8_0", show_default=True, help="Type of the matrices.")  # fmt: skip
@click.option("--name", help="Name in the file. Default: the target's file name and DFlash.")
def export(target: Path, folder: Path, outfile: Path, checkpoint: Path | None, kind: str, name: str | None) -> None:  # fmt: skip
    """Write FOLDER's drafter as a GGUF file, for pyspec and for llama.cpp."""
    use_threads(1)
    from dflash.train import read_start

    cfg, weights = read_start(checkpoint or folder / "checkpoint.pt")
    write_drafter(outfile, cfg, weights, target, kind, name or f"{target.stem} DFlash")
    click.echo(f"{outfile}: {outfile.stat().st_size / 1e6:.2f} MB", err=True)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
