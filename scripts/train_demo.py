"""Train the demo model that pyspec ships, measure it, and write it as a GGUF file."""

from __future__ import annotations

import datetime
import json
from dataclasses import fields
from pathlib import Path

import click
import torch
from demo_model.config import DemoConfig
from demo_model.export import write_gguf
from demo_model.train import Plan, Trainer


def deadline_of(minutes: float, until: str | None) -> float:
    now = datetime.datetime.now()
    if until is None:
        return (now + datetime.timedelta(minutes=minutes)).timestamp()
    end = datetime.datetime.combine(now.date(), datetime.time.fromisoformat(until))
    return (end if end > now else end + datetime.timedelta(days=1)).timestamp()


def plan_options(command):
    """One option for every field of Plan."""
    for item in reversed(fields(Plan)):
        command = click.option(
            f"--{item.name.replace('_', '-')}",
            type=type(item.default),
            default=item.default,
            show_default=True,
            help=item.metadata["help"],
        )(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--threads",
    default=1,
    show_default=True,
    help="CPU threads; one is best on a machine that is shared.",
)
def main(threads: int) -> None:
    """Train a thin, deep Qwen3.5-style model on a CPU: GatedDeltaNet, attention, one MTP block.

    The text is the standard library of the Python that runs this script. Everything lives in one
    FOLDER: tokenizer, token streams, checkpoint, quality.json and the files for transformers.

    \b
    A run of 100 minutes, then the file:
      python scripts/train_demo.py train  build/demo --minutes 100
      python scripts/train_demo.py eval   build/demo
      python scripts/train_demo.py export build/demo --llama-cpp LLAMA_CPP_TREE --outfile demo.gguf

    Ctrl-C saves a checkpoint and stops; the same `train` command goes on from it.
    """
    torch.set_num_threads(threads)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--minutes",
    default=100.0,
    show_default=True,
    help="Length of the run, or what is left of it, from now.",
)
@click.option(
    "--until",
    metavar="HH:MM",
    help="End at this time of day instead; pauses shorten the run, not the decay.",
)
@plan_options
def train(folder: Path, minutes: float, until: str | None, **plan) -> None:
    """Train in FOLDER, or go on from its checkpoint.

    The schedule is in parts of the run's time: the model starts with --first-layers layers, grows
    to 24 at --grow-at without changing its function, sees longer text from --long-at, and its
    learning rate falls from --decay-at until the trunk is frozen at --freeze-at; from then on the
    MTP block alone learns to match the main head.
    """
    trainer = Trainer(folder, DemoConfig(), Plan(**plan), deadline_of(minutes, until))
    trainer.run()
    report(trainer)


@main.command("eval")
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
def evaluate(folder: Path) -> None:
    """Print the held-out quality of FOLDER's checkpoint and write it to quality.json."""
    report(Trainer(folder, DemoConfig(), Plan(), 0.0))


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--llama-cpp",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="A llama.cpp source tree, for its converter.",
)
@click.option(
    "--outfile", required=True, type=click.Path(path_type=Path), help="The GGUF to write."
)
@click.option(
    "--outtype", default="q8_0", show_default=True, type=click.Choice(["q8_0", "f16", "f32"])
)
def export(folder: Path, llama_cpp: Path, outfile: Path, outtype: str) -> None:
    """Write FOLDER's checkpoint as one GGUF file, grown to full depth if it is not yet."""
    write_gguf(folder, DemoConfig().num_hidden_layers, llama_cpp, outfile, outtype)
    click.echo(f"{outfile}: {outfile.stat().st_size / 1e6:.2f} MB")


def report(trainer: Trainer) -> None:
    quality = trainer.quality(rows=128)
    (trainer.folder / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    click.echo(json.dumps(quality, indent=1))


if __name__ == "__main__":
    main()
