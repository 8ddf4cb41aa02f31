"""DFlash drafters: the tree of a block, conditional scores, and files that do not fit."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspec.drafts.dflash import (
    MarkovHead,
    best_first_tree,
    lattice_candidates,
    marginal_candidates,
)

from pyspec import DraftConfig, DraftError, Engine, EngineConfig
from pyspec.native import NativeEngine
from tests import synthetic_models
from tests.conftest import SyntheticDrafter
from tests.prompts import FEW
from tests.synthetic_models import Synthetic

synthetic = synthetic_models.synthetic


@st.composite
def blocks(draw) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of a block: tokens and log-probabilities [depth, top_k], best first."""
    depth, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    raw = draw(
        st.lists(st.floats(0.01, 1), min_size=depth * top_k, max_size=depth * top_k, unique=True)
    )
    shares = -np.sort(-np.array(raw, np.float32).reshape(depth, top_k), axis=1)
    log_probs = np.log(shares / (shares.sum(1, keepdims=True) + 0.1))
    tokens = np.arange(depth * top_k, dtype=np.int32).reshape(depth, top_k)
    return tokens, log_probs.astype(np.float32)


@given(blocks(), st.integers(1, 30))
def test_the_tree_is_the_chain_and_the_best_paths(block, nodes: int) -> None:
    tokens, log_probs = block
    depth, top_k = tokens.shape
    tree = best_first_tree(99, marginal_candidates(tokens, log_probs), depth, nodes)
    assert len(tree) <= nodes
    paths = {tuple(tree.path_tokens(node)[1:].tolist()) for node in range(1, len(tree))}
    chain = [tuple(tokens[: at + 1, 0].tolist()) for at in range(min(depth, nodes - 1))]
    assert set(chain) <= paths

    score = dict(zip(tokens.reshape(-1).tolist(), log_probs.reshape(-1).tolist(), strict=True))
    every: list[tuple[int, ...]] = [()]
    for row in tokens.tolist():
        every += [(*path, token) for path in every for token in row if len(path) == row[0] // top_k]
    others = [path for path in every if path and path not in chain]
    best = sorted(others, key=lambda path: -sum(score[t] for t in path))
    kept = sorted(
        (sum(score[t] for t in path) for path in paths if path not in chain), reverse=True
    )
    expected = [sum(score[t] for t in path) for path in best[: len(kept)]]
    np.testing.assert_allclose(kept, expected, atol=1e-5)
    assert len(tree) == min(nodes, len(every))


def test_a_lattice_scores_behind_each_candidate() -> None:
    tokens = np.array([[1, 2], [3, 4]], np.int32)
    pairs = np.array([[[0, -1], [0, -1]], [[2, 0], [0, 3]]], np.float32)
    candidates = lattice_candidates(tokens, pairs)
    assert [token for token, _, _ in candidates(1, 0)] == [3, 4]
    assert [token for token, _, _ in candidates(1, 1)] == [4, 3]
    for number in range(2):
        assert sum(math.exp(score) for _, score, _ in candidates(1, number)) == pytest.approx(1)
    tree = best_first_tree(0, candidates, 2, 16)
    assert len(tree) == 7


def test_scores_behind_another_candidate_are_exact(
    model: Path, synthetic_drafter: SyntheticDrafter
) -> None:
    """With all tokens as candidates nothing is approximated: a softmax with another bias."""
    path = synthetic_drafter("dspark")
    with NativeEngine.open(model, EngineConfig(n_threads=1), n_ctx=256, max_nodes=4) as native:
        native.dflash_open(path)
        prompt = native.tokenize(FEW[1])
        native.prefill(0, prompt[:-1])
        n_vocab = native.info.n_vocab
        drafts = native.dflash_draft([0], [prompt[-1]], 2, n_vocab)
    tokens, log_probs = drafts.tokens[0], drafts.log_probs[0]
    found = MarkovHead(str(path)).candidates(prompt[-1], tokens, log_probs)(1, 5)

    weights = {one.name: one for one in gguf.GGUFReader(path).tensors}
    w1, w2 = (
        gguf.dequantize(weights[name].data, weights[name].tensor_type).astype(np.float64)
        for name in ("markov_w1.weight", "markov_w2.weight")
    )
    logits = np.empty(n_vocab)
    logits[tokens[1]] = log_probs[1]
    logits += w2 @ (w1[tokens[0, 5]] - w1[tokens[0, 0]])
    logits -= np.log(np.exp(logits).sum())
    np.testing.assert_allclose(
        [score for _, score, _ in found], logits[[t for t, _, _ in found]], atol=1e-5
    )


def test_the_shipped_drafter_is_found_beside_the_model_and_drafts_well(model: Path) -> None:
    with Engine(model, DraftConfig("dflash", depth=7), n_threads=1, n_ctx=512) as engine:
        results = [engine.complete(prompt, max_tokens=64, temperature=0) for prompt in FEW[:4]]
    assert sum(r.stats.tokens_per_step * r.stats.steps for r in results) > 1.2 * sum(
        r.stats.steps for r in results
    )


def test_a_sequence_moves_with_what_its_drafter_knows(
    model: Path, synthetic_drafter: SyntheticDrafter
) -> None:
    config = EngineConfig(n_threads=1, n_slots=2)
    with NativeEngine.open(model, config, n_ctx=256, max_nodes=8) as native:
        native.dflash_open(synthetic_drafter("dflash"))
        prompt = native.tokenize(FEW[1])
        native.prefill(0, prompt[:-1])
        native.verify([(0, [prompt[-1], 7, 8], [-1, 0, 0])])
        native.commit(0, [0, 2])
        expected = native.dflash_draft([0], [9], 5, 3)
        native.restore(1, native.save(0))
        found = native.dflash_draft([1], [9], 5, 3)
        assert np.array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.log_probs, expected.log_probs)


def test_features_do_not_pile_up_while_nothing_is_drafted(
    model: Path, synthetic_drafter: SyntheticDrafter
) -> None:
    config = EngineConfig(n_threads=1)
    with NativeEngine.open(model, config, n_ctx=1024, max_nodes=4) as native:
        native.dflash_open(synthetic_drafter("dflash"))
        native.prefill(0, [5, 6, 7])
        native.timings(reset=True)
        for _ in range(600):
            native.verify([(0, [5], [-1])])
            native.commit(0, [0])
        assert native.timings().n_draft_passes == 2  # once 256 have gathered, and again


def test_what_it_does_not_hear_is_none_of_its_text(
    model: Path, synthetic_drafter: SyntheticDrafter
) -> None:
    config = EngineConfig(n_threads=1, n_slots=3)
    with NativeEngine.open(model, config, n_ctx=1024, max_nodes=8) as native:
        native.dflash_open(synthetic_drafter("dflash"))

        def draft(slot: int, root: int) -> list[float]:
            return native.dflash_draft([slot], [root], 5, 3).log_probs.tolist()

        prompt = native.tokenize(FEW[1])
        native.dflash_listen(False)
        native.prefill(0, prompt)
        for _ in range(300):  # more than features would gather
            native.verify([(0, [5, 6], [-1, 0])])
            native.commit(0, [0, 1])
        native.timings(reset=True)
        assert draft(0, 9) == draft(1, 9)  # slot 1 is empty
        assert native.timings().n_draft_passes == 2  # nothing had to be read before

        native.dflash_listen(True)
        native.prefill(1, prompt)
        before = draft(1, 9)
        native.dflash_listen(False)
        native.dflash_listen(True)
        assert draft(1, 9) == before != draft(2, 9)

        native.verify([(1, [9, 7, 8], [-1, 0, 0])])
        native.dflash_listen(False)
        native.commit(1, [0, 2])  # was heard
        heard = draft(1, 9)
        native.verify([(1, [9], [-1])])
        native.dflash_listen(True)
        native.commit(1, [0])  # was not
        assert draft(1, 9) == heard != before
        native.restore(2, native.save(1))
        assert draft(2, 9) == heard
        native.prefill(2, prompt)
        native.prefill(1, prompt)
        assert draft(2, 9) == draft(1, 9) != heard


def test_without_a_drafter_there_is_nobody_to_listen(model: Path) -> None:
    config = EngineConfig(n_threads=1)
    with (
        NativeEngine.open(model, config, n_ctx=256, max_nodes=4) as native,
        pytest.raises(DraftError, match="no DFlash drafter is open"),
    ):
        native.dflash_listen(False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder, model: model, "is no DFlash drafter: its architecture is qwen35"),
        (lambda folder, model: folder / "none.gguf", "none.gguf"),
        (lambda folder, model: _text(folder), "is not a GGUF file"),
    ],
    ids=["a-model", "missing", "no-gguf"],
)
def test_files_that_are_no_drafter_are_refused(model: Path, tmp_path: Path, make, message) -> None:
    with pytest.raises(DraftError, match=message):
        Engine(model, DraftConfig("dflash", model=str(make(tmp_path, model))))


def test_drafters_of_another_target_are_refused(
    model: Path, synthetic: Synthetic, synthetic_drafter: SyntheticDrafter
) -> None:
    target = synthetic("tiny-qwen35")
    with pytest.raises(DraftError, match=r"made for a hidden size of 160, the target has"):
        Engine(target, DraftConfig("dflash", model=str(synthetic_drafter("dflash"))))
    with pytest.raises(DraftError, match=r"has a vocabulary of|has another vocabulary"):
        Engine(target, DraftConfig("draft-model", model=str(model)))


def test_the_native_side_refuses_them_too(model: Path) -> None:
    with NativeEngine.open(model, EngineConfig(n_threads=1), n_ctx=64, max_nodes=4) as native:
        with pytest.raises(DraftError, match="is no DFlash drafter"):
            native.dflash_open(model)
        with pytest.raises(DraftError, match="no DFlash drafter is open"):
            native.dflash_draft([0], [1], 1, 1)


def _text(folder: Path) -> Path:
    path = folder / "text.gguf"
    path.write_text("no")
    return path
