"""The shipped model: what it is, and that llama.cpp computes what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyspec import Engine

VECTORS = Path(__file__).parent / "data" / "demo_logits.npz"


def log_softmax(logits: NDArray) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence(reference: NDArray, found: NDArray) -> NDArray[np.float64]:
    """KL divergence of every row's distribution from the reference's, in nats."""
    return (np.exp(reference) * (reference - found)).sum(-1)


@pytest.fixture(scope="module")
def vectors() -> Iterator[dict[str, NDArray]]:
    """Made by scripts/make_demo_vectors.py: tokens [T], logits [T, V], mtp_logits [T - 1, V]."""
    with np.load(VECTORS) as data:
        yield dict(data)


def test_logits_agree_with_transformers(plain: Engine, vectors: dict[str, NDArray]) -> None:
    """Weights are the same; only the rounding of activations (Q8_0 products) is left."""
    tokens = vectors["tokens"].tolist()
    expected = log_softmax(vectors["logits"])
    sequence = plain.begin(tokens[:1])
    native, slot = plain.native, sequence.slot
    try:
        rows = []
        for token in tokens:
            native.verify([(slot, [token], [-1])])
            rows.append(native.logits(slot, 0))
            native.commit(slot, [0])
    finally:
        plain.end(sequence)
    found = log_softmax(np.array(rows))
    assert divergence(expected, found).max() < 0.02, "logits: KL of the worst position"
    assert divergence(expected, found).mean() < 2e-3, "logits: mean KL"
    decided = np.sort(expected, -1)[:, -1] - np.sort(expected, -1)[:, -2] > 0.2
    same = expected.argmax(-1) == found.argmax(-1)
    assert same[decided].all(), "logits: best token wherever it leads by more than 0.2"


def test_mtp_logits_agree_with_the_training_code(mtp: Engine, vectors: dict[str, NDArray]) -> None:
    """The block's first draft at every position, its best candidates and their probabilities."""
    tokens = vectors["tokens"].tolist()
    expected = log_softmax(vectors["mtp_logits"])
    sequence = mtp.begin(tokens[:1])
    native, slot = mtp.native, sequence.slot
    agree, worst = 0, 0.0
    try:
        native.prefill(slot, tokens[:1])
        for position, token in enumerate(tokens[1:]):
            drafted = native.mtp_draft([slot], [token], 1, 4)
            drafts, scores = drafted.tokens[:, 0], drafted.log_probs[:, 0]
            reference = expected[position][drafts[0, 0]]
            likely = reference > np.log(0.02)
            worst = max(worst, float(np.abs(scores[0, 0] - reference)[likely].max(initial=0)))
            agree += int(drafts[0, 0, 0] == expected[position].argmax())
            native.verify([(slot, [token], [-1])])
            native.commit(slot, [0])
    finally:
        mtp.end(sequence)
    assert worst < 0.3, "mtp log-probabilities of likely candidates"
    assert agree >= 0.95 * (len(tokens) - 1), "mtp: best candidate"


def test_is_small_and_complete(model: Path, plain: Engine) -> None:
    assert model.stat().st_size <= 12 * 2**20
    info = plain.native.info
    assert (info.arch, info.n_layer_mtp) == ("qwen35", 1)
    assert info.n_layer_recurrent * 4 == info.n_layer * 3
    assert plain.native.chat_template


def test_writes_python(plain: Engine) -> None:
    """Sixteen texts, since what four of them hold is luck: 4 to 7 of the signs, depending on seeds."""
    prompts = ("def ", "class ", "import ", "for ") * 4
    text = "".join(
        plain.complete(prompt, max_tokens=60, temperature=0.7, seed=seed, ignore_end=True).text
        for seed, prompt in enumerate(prompts)
    )
    signs = ("self", "return", "def ", "import", "(", ":\n", "    ", " = ")
    assert sum(sign in text for sign in signs) >= 6, text
