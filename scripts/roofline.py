#!/usr/bin/env python3
"""Compute how fast memory bandwidth lets a model decode, plainly and with speculation.

Nothing is measured. A step is taken to last as long as it takes to read once every byte that it
needs; arithmetic, launches and synchronisation come on top, so real figures are below.

    python scripts/roofline.py                       # the table of docs/performance.md
    python scripts/roofline.py --bits 8.5 --context 32768 --json roofline.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from synthetic_model import PRESETS, Shape, tensors

#: Peak memory bandwidth in GB/s, as Apple states it (technical specifications of the machines).
#: M3 Max and M4 Max: the variants with all memory channels. There is no M4 Ultra.
CHIPS = {
    "M1": 68.25,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": 400,
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": 546,
}
MODELS = {
    "Qwen3.5-0.8B": "qwen35-0.8b",
    "Qwen3.5-4B": "qwen35-4b",
    "3.6-27B": "qwen36-27b",
    "3.6-35B-A3B": "qwen36-35b-a3b",
}
Q4_K_M = 4.85
"""Bits a weight of a whole Q4_K_M file, about."""

F32, F16 = 4, 2
CONV = 3  # past tokens that the short convolution sees


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes that a step reads and writes.

    Attributes:
        weights: Of the layers and the head that the nodes use.
        draft: Of the MTP block and the head that it reads, for all drafts of the step.
        cache: Keys and values of the context, read once for all nodes.
        state: Recurrent states, read and written once.
        tape: What the nodes leave for rollback, written once and read once.
    """

    weights: float
    draft: float
    cache: float
    state: float
    tape: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.draft + self.cache + self.state + self.tape


def weights(shape: Shape, bits: float, nodes: int) -> tuple[float, float, float]:
    """Bytes of the layers for `nodes` tokens, of the MTP block for one, and of the head.

    Of a mixture's experts, those that at least one of the nodes uses: with E experts of which k are
    used, independently and evenly, E (1 - (1 - k/E)^n) are expected.
    """
    trunk = block = head = 0.0
    mtp = f"blk.{shape.layers}."
    for tensor in tensors(shape):
        count = 1.0
        for size in tensor.shape:
            count *= size
        count *= F32 if tensor.keep else bits / 8
        if "_exps." in tensor.name:
            share = shape.experts_used / shape.experts
            if tensor.name.startswith(mtp):
                block += count * share
            else:
                trunk += count * (1 - (1 - share) ** nodes)
        elif tensor.name.startswith(mtp):
            block += count
        elif tensor.name == "output.weight" or (shape.tied and tensor.name == "token_embd.weight"):
            head += count
        elif tensor.name != "token_embd.weight":  # single rows of it are read
            trunk += count
    return trunk, block, head


def step(
    shape: Shape, *, bits: float, context: int, nodes: int, passes: int, head_rows: int = 0
) -> Step:
    """Bytes of a step that verifies `nodes` nodes after `passes` passes of the MTP block.

    Args:
        shape: The model.
        bits: Bits a weight.
        context: Tokens in the sequence.
        nodes: Nodes of the tree, the root included.
        passes: Passes of the MTP block; 0 drafts nothing.
        head_rows: Rows of the head that the MTP block reads; 0 for all.
    """
    trunk, block, head = weights(shape, bits, nodes)
    attention = sum((layer + 1) % 4 == 0 for layer in range(shape.layers))
    recurrent = shape.layers - attention
    row = 2 * shape.heads_kv * shape.head_dim * F16  # key and value of a token in a layer
    channels = 2 * shape.k_heads * shape.gdn_dim + shape.v_heads * shape.gdn_dim
    state = recurrent * (shape.v_heads * shape.gdn_dim**2 + CONV * channels) * F32
    innovations = shape.v_heads * shape.gdn_dim + shape.k_heads * shape.gdn_dim + shape.v_heads
    tape = recurrent * nodes * (innovations + channels) * F32 if nodes > 1 else 0
    draft_head = head * (head_rows / shape.vocab if head_rows else 1)
    return Step(
        trunk + head,
        passes * (block + draft_head + context * row),
        attention * context * row,
        2 * state,
        2 * tape,
    )


def expected_tokens(accept: float, depth: int) -> float:
    """Tokens a step of a chain of `depth` drafts, each right with probability `accept`.

    Leviathan et al., arXiv 2211.17192, equation 1.
    """
    return depth + 1.0 if accept == 1 else (1 - accept ** (depth + 1)) / (1 - accept)


def rows(bits: float, context: int, depth: int, accepts: list[float], head_rows: int) -> list[dict]:
    """For every model and chip the limits in tokens per second."""
    found = []
    for model, name in MODELS.items():
        shape = PRESETS[name]
        plain = step(shape, bits=bits, context=context, nodes=1, passes=0)
        spec = step(
            shape, bits=bits, context=context, nodes=depth + 1, passes=depth, head_rows=head_rows
        )
        for chip, bandwidth in CHIPS.items():
            found.append(
                {
                    "model": model,
                    "chip": chip,
                    "bandwidth_GB_s": bandwidth,
                    "plain_bytes": asdict(plain),
                    "step_bytes": asdict(spec),
                    "plain_tps": round(bandwidth * 1e9 / plain.total, 1),
                    "tps": {
                        f"{accept:g}": round(
                            expected_tokens(accept, depth) * bandwidth * 1e9 / spec.total, 1
                        )
                        for accept in accepts
                    },
                }
            )
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--bits", default=Q4_K_M, show_default=True, help="Bits a weight.")
@click.option("--context", default=4096, show_default=True, help="Tokens in the sequence.")
@click.option("--depth", default=3, show_default=True, help="Drafts of a step, a chain by MTP.")
@click.option("--accept", default="0.6,0.8", show_default=True, help="Acceptance of a draft.")  # fmt: skip
@click.option("--head-rows", default=32768, show_default=True, help="Rows of the head that the drafter reads; 0 for all.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all of it.")
def main(
    bits: float, context: int, depth: int, accept: str, head_rows: int, json_file: Path | None
) -> None:
    """Print, as Markdown, the limits in tokens per second that bandwidth sets."""
    accepts = [float(text) for text in accept.split(",")]
    found = rows(bits, context, depth, accepts, head_rows)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    mb = 1e6
    click.echo("Bytes of a step, MB:\n")
    click.echo("| model | weights | drafting | KV | GDN state | tape | plain: all |")
    click.echo("|---|---|---|---|---|---|---|")
    for model in MODELS:
        one = next(row for row in found if row["model"] == model)
        parts = one["step_bytes"]
        cells = (f"{parts[key] / mb:.1f}" for key in ("weights", "draft", "cache", "state", "tape"))
        click.echo(
            f"| {model} | {' | '.join(cells)} | {sum(one['plain_bytes'].values()) / mb:.1f} |"
        )
    names = ", ".join(f"{value:g}" for value in accepts)
    click.echo(f"\nTokens per second, at most: plain, then at acceptance {names}:\n")
    click.echo(f"| chip | GB/s | {' | '.join(MODELS)} |")
    click.echo("|---|---|" + "---|" * len(MODELS))
    for chip, bandwidth in CHIPS.items():
        cells = []
        for one in (row for row in found if row["chip"] == chip):
            limits = ", ".join(f"{value:.0f}" for value in one["tps"].values())
            cells.append(f"{one['plain_tps']:.0f}; {limits}")
        click.echo(f"| {chip} | {bandwidth:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
