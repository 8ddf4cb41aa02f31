"""What speculation gains by the number of requests that are decoded together.

    python scripts/make_synthetic.py padded-demo padded.gguf --megabytes 300
    python tests/bench/slots.py padded.gguf

All requests take part in every step and none ends early; prompts are not counted. Half of them are
greedy, half at temperature 0.8. Processor time of one thread, ways of drafting in turns, medians;
prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pyspec import DraftConfig, Engine, SamplingConfig
from tests.prompts import CODE, PROSE

PROMPTS = [*CODE, *PROSE]


def run(engine: Engine, requests: int, tokens: int, turn: int) -> tuple[int, int, float]:
    """Tokens, steps and seconds of processor time, until the first request has its tokens."""
    sequences = []
    for i in range(requests):
        sampling = SamplingConfig(temperature=0.8 * (i % 2), seed=i)
        prompt = PROMPTS[(i + 3 * turn) % len(PROMPTS)]
        options: dict[str, Any] = {"max_tokens": tokens, "ignore_end": True}
        sequences.append(engine.begin(prompt, sampling=sampling, **options))
    for sequence in sequences:
        while not engine.prefill(sequence):
            pass
    steps, began = 0, time.process_time()
    while all(sequence.finish_reason is None for sequence in sequences):
        engine.step(sequences)
        steps += 1
    seconds = time.process_time() - began
    made = sum(len(sequence.output) for sequence in sequences)
    for sequence in sequences:
        engine.end(sequence)
    return made, steps, seconds


def opened(owner: Engine, draft: str, requests: int) -> Engine:
    """An engine for a way of drafting, such as ``mtp/2``: chains of two drafts.

    All use the same weights: where in memory they lie makes a difference, too.
    """
    name, _, depth = draft.partition("/")
    config = DraftConfig(name, depth=int(depth), top_k=1) if depth else DraftConfig(name)
    options: dict[str, Any] = {"n_ctx": 1024, "n_slots": requests, "n_threads": 1}
    return Engine(owner.file.path, config, share=owner, **options)


@click.command()
@click.argument("model")
@click.option("--requests", "counts", multiple=True, type=int, default=(1, 2, 4, 8))
@click.option("--draft", "drafts", multiple=True, default=("none", "mtp/1", "mtp/2", "mtp/3"))
@click.option("--tokens", default=150, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(
    model: str, counts: tuple[int, ...], drafts: tuple[str, ...], tokens: int, rounds: int
) -> None:
    """Measures MODEL with every way of drafting; the first is what the others are compared with."""
    found: dict[str, Any] = {"model": Path(model).name, "unit": "tokens a second, all requests"}
    owner = Engine(model, "mtp", n_ctx=64, n_threads=1)
    for requests in counts:
        engines = {draft: opened(owner, draft, requests) for draft in drafts}
        speeds: dict[str, list[float]] = {draft: [] for draft in drafts}
        row: dict[str, Any] = {}
        for turn in range(rounds):
            for draft, engine in engines.items():
                made, steps, seconds = run(engine, requests, tokens, turn)
                speeds[draft].append(made / seconds)
                row[draft] = {"ms_per_step": round(1e3 * seconds / steps, 1)}
        for draft, engine in engines.items():
            engine.close()
            ratios = [a / b for a, b in zip(speeds[draft], speeds[drafts[0]], strict=True)]
            row[draft] |= {
                "tokens_per_second": round(median(speeds[draft]), 1),
                "ratio": round(median(ratios), 2),
            }
        found[str(requests)] = row
        click.echo(f"{requests}: {row}", err=True)
    click.echo(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
