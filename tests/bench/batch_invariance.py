#!/usr/bin/env python3
"""Which matrix products and attention paths of this CPU are batch-invariant, and what they cost.

A path is batch-invariant when a column has the same bits whatever stands beside it. Writes the
table of docs/exactness.md as JSON:

    python tests/bench/batch_invariance.py --json docs/data/batch_invariance.json

Times are processor time of one thread, the median of alternating runs; they count what the
arithmetic costs, with the weights in the cache.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.bench import ggml_ops as ggml

TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
         "IQ4_NL", "IQ4_XS", "MXFP4"]  # fmt: skip
COLUMNS = [2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64]
TIMED = [1, 2, 4, 8, 16, 32, 64]
#: Rows by columns of the weights: widths that blocks of 32 and 256 divide; 16 divides the rows, or only 8.
SHAPES = [(520, 1024), (528, 1024), (96, 3584)]
FEATURES = ["avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "dotprod",
            "matmul_int8", "sve", "llamafile"]  # fmt: skip


def weights(rng: np.random.Generator, kind: str, *shape: int) -> bytes:
    return ggml.quantize(rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]), kind)


def inputs(rng: np.random.Generator, columns: int, width: int) -> np.ndarray:
    """Columns as activations are: a few channels much larger than the others."""
    scale = np.exp(rng.standard_normal((1, width)))
    return (rng.standard_normal((columns, width)) * scale).astype(np.float32)


def can_repack(kind: str) -> bool:
    """Whether this processor repacks weights of a type."""
    with ggml.Op() as op:
        weight = op.weight(kind, 256, 16)
        op.place_weights(ggml.repack_buffer_type())
        op.finish(ggml.mul_mat(op.ctx, weight, op.input("F32", 256, 1)))
        return op.supported()


def mul_mat_differences(
    kind: str, repack: bool, columns: list[int], threads: int = 1, seed: int = 0
) -> list[int] | None:
    """The numbers of columns at which some column differs from itself alone; None: no such path."""
    rng = np.random.default_rng(seed)
    different, measured = set(), False
    for rows, width in SHAPES:
        data, x = weights(rng, kind, rows, width), inputs(rng, max(columns), width)

        def product(count: int, data: bytes = data, rows: int = rows, width: int = width):
            op = ggml.Op(threads)
            weight = op.weight(kind, width, rows)
            op.place_weights(ggml.repack_buffer_type() if repack else None)
            x = op.input("F32", width, count)
            op.finish(ggml.mul_mat(op.ctx, weight, x))
            if op.supported():
                op.set(weight, data)
            return op, x

        op, one = product(1)
        with op:
            if not op.supported():
                continue
            measured = True
            alone = []
            for column in x:
                op.set(one, column)
                alone.append(op.run())
        for count in columns:
            op, many = product(count)
            with op:
                op.set(many, x[:count])
                if not np.array_equal(op.run().reshape(count, rows), alone[:count]):
                    different.add(count)
    return sorted(different) if measured else None


def mul_mat_id_differences(kind: str, repack: bool, columns: list[int]) -> list[int] | None:
    """As `mul_mat_differences` for a mixture of 8 experts, 2 of which serve a column."""
    rng = np.random.default_rng(0)
    experts, used, rows, width = 8, 2, 112, 1024
    data, x = weights(rng, kind, experts, rows, width), inputs(rng, max(columns), width)
    # Some experts are popular, so that they see many columns at once.
    share = np.array([8, 4, 2, 1, 1, 1, 1, 1]) / 19
    ids = np.array([rng.choice(experts, used, replace=False, p=share) for _ in x], np.int32)

    def product(count: int):
        op = ggml.Op()
        weight = op.weight(kind, width, rows, experts)
        op.place_weights(ggml.repack_buffer_type() if repack else None)
        x, chosen = op.input("F32", width, 1, count), op.input("I32", used, count)
        op.finish(ggml.mul_mat_id(op.ctx, weight, x, chosen))
        if op.supported():
            op.set(weight, data)
        return op, x, chosen

    op, one, chosen = product(1)
    with op:
        if not op.supported():
            return None
        alone = []
        for column, id_ in zip(x, ids, strict=True):
            op.set(one, column)
            op.set(chosen, id_)
            alone.append(op.run())
    different = []
    for count in columns:
        op, many, chosen = product(count)
        with op:
            op.set(many, x[:count])
            op.set(chosen, ids[:count])
            if not np.array_equal(op.run().reshape(count, -1), alone[:count]):
                different.append(count)
    return different


def times(kind: str, rows: int = 3584, width: int = 1024, repeats: int = 15) -> Iterator[dict]:
    """Microseconds of a product with and without repacking, alternating."""
    rng = np.random.default_rng(0)
    data = weights(rng, kind, rows, width)
    for count in TIMED:
        ops = {}
        for repack in (False, True):
            op = ggml.Op()
            weight = op.weight(kind, width, rows)
            op.place_weights(ggml.repack_buffer_type() if repack else None)
            x = op.input("F32", width, count)
            op.finish(ggml.mul_mat(op.ctx, weight, x))
            if op.supported():
                op.set(weight, data)
                op.set(x, inputs(rng, count, width))
                op.compute()
                ops[repack] = op
            else:
                op.__exit__()
        taken: dict[bool, list[float]] = {repack: [] for repack in ops}
        for _ in range(repeats):
            for repack, op in ops.items():
                taken[repack].append(op.seconds() * 1e6)
        for repack, op in ops.items():
            op.__exit__()
            yield {
                "repack": repack,
                "columns": count,
                "us": round(float(np.median(taken[repack])), 1),
            }


def attention_differences(
    mode: str, kind: str = "F16", threads: int = 1, cells: int = 512, trials: int = 40
) -> int:
    """Out of `trials` rows, how many differ between a tree's cells and the same cells alone.

    A row sees the cells of a text and of its ancestors in a tree; the siblings in between are
    masked. Alone it sees the same cells closed up, as plain decoding leaves them. `mode` is
    ``off`` (softmax between two products), ``default`` or ``ordered`` (flash attention).
    """
    rng = np.random.default_rng(0)
    head, heads, heads_kv = 64, 4, 2
    different = 0
    for _ in range(trials):
        text, nodes = int(rng.integers(1, 400)), int(rng.integers(2, 65))
        seen = np.zeros(nodes, bool)
        seen[[0, -1]] = True
        seen |= rng.random(nodes) < 0.5
        k, v = rng.standard_normal((2, heads_kv, cells, head)).astype(np.float32)
        q = rng.standard_normal((heads, head)).astype(np.float32)
        visible = np.r_[np.ones(text, bool), seen, np.zeros(cells - text - nodes, bool)]
        closed = np.r_[np.flatnonzero(visible), np.flatnonzero(~visible)]
        rows = nodes
        tree_q = rng.standard_normal((heads, rows, head)).astype(np.float32)
        tree_q[:, -1] = q
        tree_mask = np.where(rng.random((rows, cells)) < 0.5, 0, -np.inf)
        tree_mask[:, 0], tree_mask[-1] = 0, np.where(visible, 0, -np.inf)
        alone_mask = np.where(np.arange(cells) < visible.sum(), 0, -np.inf)[None]
        tree = attention(mode, kind, threads, tree_q, k, v, tree_mask)[-1]
        alone = attention(mode, kind, threads, q[:, None], k[:, closed], v[:, closed], alone_mask)[
            0
        ]
        different += not np.array_equal(tree, alone)
    return different


def attention(mode: str, kind: str, threads: int, q, k, v, mask) -> np.ndarray:
    heads, rows, head = q.shape
    heads_kv, cells, _ = k.shape
    with ggml.Op(threads) as op:
        q_in = op.input("F32", head, rows, heads)
        k_in = op.input(kind, head, cells, heads_kv)
        if mode == "off":
            v = v.transpose(0, 2, 1)
            v_in = op.input(kind, cells, head, heads_kv)
            mask_in = op.input("F32", cells, rows)
            scores = ggml.mul_mat(op.ctx, k_in, q_in)
            probs = ggml.soft_max_ext(op.ctx, scores, mask_in, head**-0.5, 0.0)
            op.finish(ggml.mul_mat(op.ctx, v_in, probs))  # head, rows, heads
            shape = (heads, rows, head)
        else:
            v_in = op.input(kind, head, cells, heads_kv)
            mask_in = op.input("F16", cells, rows)
            out = ggml.flash_attn_ext(op.ctx, q_in, k_in, v_in, mask_in, head**-0.5, 0.0, 0.0)
            ggml.flash_attn_set_ordered(out, mode == "ordered")
            op.finish(out)  # head, heads, rows
            shape = (rows, heads, head)
        op.set(q_in, q)
        op.set(k_in, ggml.quantize(k, kind))
        op.set(v_in, ggml.quantize(v, kind))
        op.set(mask_in, mask.astype(np.float32 if mode == "off" else np.float16))
        result = op.run().reshape(shape)
    return result.transpose(1, 0, 2) if mode == "off" else result


def label(different: list[int]) -> str:
    return f"differs from {different[0]} columns on" if different else "exact"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--json", "path", type=click.Path(path_type=Path), help="Write the figures to this file."
)
@click.option("--types", default=",".join(TYPES), show_default=True, help="Types of the weights.")
@click.option("--no-times", is_flag=True, help="Compare bits only.")
def main(path: Path | None, types: str, no_times: bool) -> None:
    """Measure on this CPU which products give a column the same bits in a batch as alone."""
    table = []
    for kind in types.split(","):
        row: dict = {"type": kind}
        for name, repack in (("plain", False), ("repacked", True)):
            different = mul_mat_differences(kind, repack, COLUMNS)
            if different is not None:
                threads = mul_mat_differences(kind, repack, [2, 5, 16], threads=2)
                row[name] = {
                    "differs_at": sorted({*different, *(threads or [])}),
                    "experts_differ_at": mul_mat_id_differences(kind, repack, COLUMNS),
                }
        if not no_times:
            row["us"] = list(times(kind))
        table.append(row)
        for name in ("plain", "repacked"):
            if name in row:
                dense, experts = row[name]["differs_at"], row[name]["experts_differ_at"]
                click.echo(f"{kind:7} {name:8} {label(dense)}; experts: {label(experts)}")
    attentions = [
        {
            "mode": mode,
            "kv": kind,
            "threads": threads,
            "of": 40,
            "differs": attention_differences(mode, kind, threads),
        }
        for mode in ("off", "default", "ordered")
        for kind in ("F16", "Q8_0")
        for threads in (1, 2)
        if not (mode == "off" and kind == "Q8_0")
    ]
    for row in attentions:
        where = f"attention {row['mode']}, {row['kv']}, {row['threads']} threads"
        click.echo(f"{where}: {row['differs']} of {row['of']} rows differ")
    document = {
        "cpu": {
            "machine": platform.machine(),
            "features": [name for name in FEATURES if ggml.cpu_has(name)],
        },
        "columns": COLUMNS,
        "mul_mat": table,
        "attention": attentions,
    }
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
