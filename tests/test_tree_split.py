"""Trees of several sequences in one llama.cpp batch: unequal sizes, and more than a pass takes.

pyspec gives every sequence cells of its own and pads its trees to one size. A context may as well
hold the sequences in one cache (`kv_unified`), take trees of any sizes in one batch, and divide the
batch over passes: no tree may be torn, and no sequence may notice the others.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.llama_tree import Context, Model
from tests.synthetic_models import Synthetic, synthetic  # noqa: F401

NODES = 16
PROMPTS = (40, 3, 21)


@pytest.mark.parametrize("ubatch", [512, 20])
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("name", ["gemma3", "tiny-qwen35", "kimi-linear"])
def test_a_forest_equals_plain_decoding(
    synthetic: Synthetic,  # noqa: F811
    name: str,
    unified: bool,
    ubatch: int,
) -> None:
    rng = np.random.default_rng(3)
    with (
        Model(synthetic(name)) as model,
        Context(
            model, nodes=NODES, sequences=3, unified=unified, ubatch=ubatch, size=3 * 256
        ) as forest,
        Context(model, nodes=NODES, sequences=3, size=3 * 256) as plain,
    ):
        for sequence, length in enumerate(PROMPTS):
            text = rng.integers(256, size=length).tolist()
            for context in (forest, plain):
                for token in text:  # one pass each: prompts round alike however they are divided
                    context.decode([token], read=False, sequence=sequence)
        for sizes in [(7, 7, 7), (16, 1, 9), (1, 16, 16), (5, 4, 3)] * 3:
            trees = [_tree(rng, size, model.vocab) for size in sizes]
            rows = forest.forest(trees)
            assert rows is not None
            first = 0
            for sequence, (tokens, parents) in enumerate(trees):
                path = [int(rng.integers(len(tokens)))]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                forest.accept(path, sequence)
                for node in path:
                    expected = plain.decode([tokens[node]], sequence=sequence)
                    assert expected is not None
                    np.testing.assert_array_equal(
                        rows[first + node], expected[0], err_msg=f"{sizes}: {sequence}, node {node}"
                    )
                first += len(tokens)


def _tree(rng: np.random.Generator, size: int, vocab: int) -> tuple[list[int], list[int]]:
    parents = [-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, size))]
    return rng.integers(vocab, size=size).tolist(), parents
