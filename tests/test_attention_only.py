"""Draft trees on a real model without recurrent layers: SmolLM2-135M from the package registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.bench.llama_tree import Context, Model

TEXT = [504, 2774, 6330, 42, 260, 1270, 18029, 4052]


@pytest.fixture(scope="module")
def smollm2(smollm2_file: Path) -> Iterator[Model]:
    with Model(smollm2_file) as model:
        yield model


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def cache(request: pytest.FixtureRequest) -> str:
    """The type of the attention cache."""
    return request.param


@pytest.fixture(scope="module")
def greedy(smollm2: Model, cache: str) -> tuple[list[int], np.ndarray]:
    """Forty tokens of plain text with the logits behind each."""
    with Context(smollm2, nodes=16, cache=cache) as plain:
        rows = [plain.decode(TEXT)[-1]]
        text = [int(rows[0].argmax())]
        for _ in range(40):
            rows.append(plain.decode(text[-1:])[0])
            text.append(int(rows[-1].argmax()))
    return text, np.array(rows)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_trees_give_plain_text(
    smollm2: Model, greedy: tuple[list[int], np.ndarray], cache: str, seed: int
) -> None:
    """Each node on the true path has plain decoding's logits, bit for bit, whatever else is drafted."""
    text, rows = greedy
    rng = np.random.default_rng(seed)
    with Context(smollm2, nodes=16, cache=cache) as context:
        context.decode(TEXT)
        done = 0
        while done < len(text) - 1:
            tokens, parents, path = _draft(rng, text[done:-1], smollm2.vocab)
            logits = context.tree(tokens, parents)[path]
            expected = rows[done + 1 : done + 1 + len(path)]
            assert np.array_equal(logits, expected), _report(logits, expected)
            context.accept(path)
            done += len(path)
        assert context.length == len(TEXT) + done


def test_commit_then_plain(
    smollm2: Model, greedy: tuple[list[int], np.ndarray], cache: str
) -> None:
    """A plain token behind an accepted path gets the logits of plain decoding."""
    text, rows = greedy
    with Context(smollm2, nodes=16, cache=cache) as context:
        context.decode(TEXT)
        context.tree([text[0], 7, text[1], 8, text[2]], [-1, 0, 0, 2, 2])
        context.accept([0, 2, 4])
        assert np.array_equal(context.decode(text[3:4])[0], rows[4])


def _draft(
    rng: np.random.Generator, future: list[int], vocab: int
) -> tuple[list[int], list[int], list[int]]:
    """A random tree whose nodes go on with the true text with a probability of 0.7 each."""
    tokens, parents, path = [future[0]], [-1], [0]
    for node in range(1, int(rng.integers(2, 17))):
        true = path[-1] == len(tokens) - 1 or rng.random() < 0.3
        if true and len(path) < len(future) and rng.random() < 0.7:
            parents.append(path[-1])
            tokens.append(future[len(path)])
            path.append(node)
        else:
            parents.append(int(rng.integers(node)))
            tokens.append(int(rng.integers(vocab)))
    return tokens, parents, path


def _report(logits: np.ndarray, expected: np.ndarray) -> str:
    gaps = np.diff(np.sort(expected)[:, -2:]).ravel()
    different = np.abs(logits - expected).max(axis=1)
    flips = logits.argmax(axis=1) != expected.argmax(axis=1)
    return f"largest differences {different}, top-2 gaps {gaps}, other greedy token {flips}"
