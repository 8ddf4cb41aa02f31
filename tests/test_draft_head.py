"""The trimmed draft head: exact rows of the output matrix, and only of the tokens in it."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from pyspec import ArgumentError, DraftConfig, DraftError, Engine, StateError
from pyspec.draft_head import DraftHead
from pyspec.model_file import ModelFile
from pyspec.native import NativeEngine
from tests.prompts import FEW

ROWS = 300


@pytest.fixture
def native(model) -> Iterator[NativeEngine]:
    from pyspec import EngineConfig

    with NativeEngine.open(
        model, EngineConfig(n_threads=1, n_slots=2), n_ctx=256, max_nodes=8, mtp=True
    ) as opened:
        yield opened


def test_drafts_are_the_whole_head_s_restricted_to_the_subset(native: NativeEngine) -> None:
    prompt = native.tokenize(FEW[1])
    n_vocab = native.info.n_vocab
    for slot in range(2):
        native.prefill(slot, prompt[:-1])
    whole = native.mtp_draft([0], [prompt[-1]], 1, n_vocab)
    head = DraftHead.open(native, DraftConfig("mtp", head_rows=ROWS))
    assert head is not None
    part = native.mtp_draft([1], [prompt[-1]], 1, ROWS)

    tokens, log_probs = whole.tokens[0, 0, 0], whole.log_probs[0, 0, 0].astype(np.float64)
    inside = np.isin(tokens, list(head.present))
    expected = log_probs[inside] - np.log(np.exp(log_probs[inside]).sum())
    assert part.tokens[0, 0, 0].tolist() == tokens[inside][:ROWS].tolist()
    np.testing.assert_allclose(part.log_probs[0, 0, 0], expected[:ROWS], atol=2e-5)


def test_tokens_of_the_text_come_in(native: NativeEngine) -> None:
    head = DraftHead.open(native, DraftConfig("mtp", head_rows=100))
    assert head is not None and 900 not in head.present
    head.follow(0, [5, 900, 901])
    head.follow(0, [5, 900, 901, 902])
    assert {900, 901, 902} <= head.present
    native.prefill(0, [5, 900])
    drafts = native.mtp_draft([0], [901], 3, 4)
    assert set(drafts.tokens.reshape(-1).tolist()) <= head.present


def test_end_of_generation_tokens_can_be_drafted(native: NativeEngine) -> None:
    head = DraftHead.open(native, DraftConfig("mtp", head_rows=64))
    assert head is not None
    assert {t for t in range(native.info.n_vocab) if native.is_eog(t)} <= head.present


def test_text_does_not_change(model, plain: Engine) -> None:
    expected = plain.complete(FEW[1], max_tokens=60, temperature=0, ignore_end=True)
    config = DraftConfig("mtp", depth=3, top_k=2, head_rows=ROWS)
    with Engine(model, config, n_threads=1, n_ctx=512) as engine:
        found = engine.complete(FEW[1], max_tokens=60, temperature=0, ignore_end=True)
    assert found.tokens == expected.tokens
    assert found.stats.accepted > 0


def test_small_vocabularies_are_read_whole(native: NativeEngine) -> None:
    assert DraftHead.open(native, DraftConfig("mtp")) is None
    assert DraftHead.open(native, DraftConfig("mtp", head_rows=0)) is None


def test_rows_are_those_of_the_file(model) -> None:
    matrix = next(t for t in gguf.GGUFReader(model).tensors if t.name == "token_embd.weight")
    wanted = np.asarray([7, 8, 9, 3, 5, 4, len(matrix.data) - 1], np.int32)
    rows = ModelFile.read(model).rows("token_embd.weight", wanted)
    assert np.array_equal(rows, matrix.data[wanted])


def test_wrong_rows_are_refused(native: NativeEngine, model) -> None:
    tokens = np.arange(4, dtype=np.int32)
    rows = ModelFile.read(model).rows("token_embd.weight", tokens)
    with pytest.raises(StateError, match="not trimmed"):
        native.draft_head_add(tokens, rows[:4])
    with pytest.raises(ArgumentError, match="draft head of 0 rows"):
        native.draft_head_init(0)
    native.draft_head_init(6)
    with pytest.raises(StateError, match="trimmed already"):
        native.draft_head_init(6)
    with pytest.raises(ArgumentError, match="are not 4 rows"):
        native.draft_head_add(tokens, rows[:3])
    native.draft_head_add(tokens, rows[:4])
    with pytest.raises(ArgumentError, match="token 3 is in the draft head already"):
        native.draft_head_add(np.asarray([4, 3], np.int32), rows[:2])
    with pytest.raises(ArgumentError, match="room for 6 rows and holds 4; 3 more"):
        native.draft_head_add(np.asarray([5, 6, 7], np.int32), rows[:3])
    with pytest.raises(ArgumentError, match="token 5000"):
        native.draft_head_add(np.asarray([5000], np.int32), rows[:1])


def test_no_head_to_trim_without_a_drafter(plain: Engine) -> None:
    with pytest.raises((StateError, DraftError), match="no drafter is open"):
        plain.native.draft_head_init(8)
