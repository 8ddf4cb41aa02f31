"""A token has the same bits as a draft node as it has alone: products, attention, whole models."""

from __future__ import annotations

import numpy as np
import pytest

from pyspec._libs import use_patched_libraries
from pyspec.exactness import by_exactness, is_exact
from tests import synthetic_models
from tests.bench import batch_invariance as measure
from tests.bench import ggml_ops
from tests.bench.llama_tree import Context, Model
from tests.synthetic_models import Synthetic

synthetic = synthetic_models.synthetic

AVX2 = "CPU : SSE3 = 1 | AVX2 = 1 | FMA = 1 | REPACK = 1 | "
SYSTEM = use_patched_libraries().llama_print_system_info().decode()
TYPES = ["F32", *measure.TYPES]
PRODUCTS = [
    *(pytest.param(kind, False, id=kind) for kind in TYPES),
    *(
        pytest.param(kind, True, id=f"{kind}-repacked")
        for kind in TYPES
        if measure.can_repack(kind)
    ),
]


@pytest.mark.skipif("AVX512_VNNI = 1" not in SYSTEM, reason="needs AVX-512 VNNI")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_products_of_a_whole_prompt(kind: str) -> None:
    """What `repack_vnni` multiplies has no bound on columns."""
    assert measure.mul_mat_differences(kind, True, [200, 512]) == []


@pytest.mark.parametrize(("kind", "repack"), PRODUCTS)
def test_products(kind: str, repack: bool) -> None:
    """The table says what this machine does."""
    different = measure.mul_mat_differences(kind, repack, [2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64, 128])
    if is_exact(kind, SYSTEM):
        assert different == []
        assert measure.mul_mat_differences(kind, repack, [3, 17], threads=2, seed=1) == []
        assert measure.mul_mat_id_differences(kind, repack, [2, 9, 32]) == []


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("threads", [1, 2])
def test_ordered_attention_over_holes(kind: str, threads: int) -> None:
    assert measure.attention_differences("ordered", kind, threads, trials=15) == 0


@pytest.mark.parametrize(
    ("head", "heads", "heads_kv", "kind"),
    [
        pytest.param(64, 2, 1, "F16", id="demo"),
        pytest.param(256, 8, 2, "F16", id="0.8b"),
        pytest.param(72, 6, 2, "BF16", id="odd"),
        pytest.param(40, 3, 3, "F32", id="no-group"),
        pytest.param(96, 5, 1, "Q8_0", id="q8_0"),
        pytest.param(576, 4, 1, "Q4_0", id="q4_0"),
    ],
)
def test_ordered_attention_of_rows_together(
    head: int, heads: int, heads_kv: int, kind: str
) -> None:
    """A row among others, by any number of threads, over cells that it does not see: as alone."""
    rng = np.random.default_rng(head)
    for rows in (1, 2, 5, 16, 77):
        cells = int(rng.integers(2, 300))
        q = rng.standard_normal((heads, rows, head)).astype(np.float32)
        k, v = rng.standard_normal((2, heads_kv, cells, head)).astype(np.float32)
        # Some queries see nearly all, some nearly nothing; one sees nothing at all.
        seen = rng.random((rows, cells)) < rng.random((rows, 1)) ** 2
        seen[0] = rows == 1
        bias = np.where(rng.random((rows, cells)) < 0.3, rng.standard_normal((rows, cells)), 0)
        mask = np.where(seen, bias, -np.inf)
        together = measure.attention("ordered", kind, 1, q, k, v, mask)
        assert np.array_equal(together, measure.attention("ordered", kind, 3, q, k, v, mask))
        for row in range(rows):
            cut = np.flatnonzero(seen[row])
            if not len(cut):
                assert not together[row].any()
                continue
            alone = measure.attention(
                "ordered", kind, 1, q[:, [row]], k[:, cut], v[:, cut], mask[[row]][:, cut]
            )[0]
            assert np.array_equal(together[row], alone), f"row {row} of {rows}"
        if kind in ("F16", "BF16", "F32"):
            # What a row does not see may be anything; another sequence's overflow, for example.
            row = rows - 1
            k[:, ~seen[row]], v[:, ~seen[row]] = np.nan, np.inf
            poisoned = measure.attention("ordered", kind, 1, q, k, v, mask)[row]
            assert np.array_equal(together[row], poisoned)


def test_ordered_attention_is_attention() -> None:
    """Against float64: a score of 64 products and a sum of 200 weights, in float32."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, 9, 64)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 200, 64)).astype(np.float32)
    mask = np.where(rng.random((9, 200)) < 0.6, 0, -np.inf)
    scores = np.einsum("hrd,hcd->rhc", q.astype(float), k.repeat(2, 0)) / 8 + mask[:, None]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("rhc,hcd->rhd", weights, v.repeat(2, 0))
    found = measure.attention("ordered", "F32", 2, q, k, v, mask)
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * 2**-24 * abs(v).max())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-qwen35moe"])
def test_whole_model(name: str, kind: str, synthetic: Synthetic) -> None:
    """Logits of all nodes of random trees against plain decoding of their paths, bit for bit."""
    if not is_exact(kind, SYSTEM):
        pytest.skip("not exact on this processor")
    rng = np.random.default_rng(0)
    with (
        Model(synthetic(name, kind)) as model,
        Context(model, nodes=64) as tree,
        Context(model, nodes=64) as plain,
    ):
        text = rng.integers(model.vocab, size=20).tolist()
        tree.decode(text)
        plain.decode(text)
        for nodes in (1, 2, 5, 8, 13, 33, 64):
            parents = [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, nodes))]
            tokens = rng.integers(model.vocab, size=nodes).tolist()
            logits = tree.tree(tokens, parents)
            path = _deepest_path(parents)
            tree.accept(path)
            for node in path:
                alone = plain.decode([tokens[node]])[0]
                assert np.array_equal(logits[node], alone), f"logits of node {node} of {nodes}"
        token = [int(rng.integers(model.vocab))]
        assert np.array_equal(tree.decode(token), plain.decode(token)), (
            "logits after the last commit"
        )


def _deepest_path(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    node, path = int(np.argmax(depths)), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize(
    ("kind", "system", "expected"),
    [
        ("Q4_K", AVX2, True),
        ("q6_k", AVX2, True),
        ("Q2_K", AVX2, False),
        ("Q8_0", AVX2 + "LLAMAFILE = 1 | ", None),
        ("Q8_0", AVX2 + "LLAMAFILE = 0 | ", True),
        ("Q8_0", "CPU : NEON = 1 | ", None),
        ("Q8_0", "MTL : EMBED_LIBRARY = 1 | " + AVX2, None),
        ("TQ1_0", AVX2, None),
    ],
)
def test_table(kind: str, system: str, expected: bool | None) -> None:
    assert is_exact(kind, system) is expected


def test_types_of_a_file() -> None:
    assert by_exactness(["F32", "Q4_K", "Q2_K", "TQ1_0", "Q4_K"], AVX2) == {
        "exact": ["F32", "Q4_K"], "inexact": ["Q2_K"], "unknown": ["TQ1_0"]
    }  # fmt: skip


def test_ggml_knows_the_features_that_the_bench_reports() -> None:
    assert all(ggml_ops.cpu_has(name) in (True, False) for name in measure.FEATURES)
