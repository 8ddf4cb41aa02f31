"""Logits that stay where they were computed: the rows that a caller gets are those of a copy.

Yardsticks are rows taken at once, passes that must copy, and decoding each sequence alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from ctypes import POINTER, c_bool, c_float, c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyspec.config import EngineConfig
from pyspec.native import NativeEngine
from pyspec.native.engine import SlotTree
from tests.bench.llama_tree import Context, Model, _function, llama_cpp

set_output_argmax = _function("llama_set_output_argmax", None, c_void_p, c_bool)
output_argmax = _function(
    "llama_get_output_argmax_ith", c_int32, c_void_p, c_int32, POINTER(c_float)
)

NODES = 8
SLOTS = 4


def open_native(path: Path, **options: Any) -> NativeEngine:
    settings = {"n_ctx": 256, "n_threads": 1, "n_gpu_layers": 0, "n_slots": SLOTS} | options
    return NativeEngine.open(path, EngineConfig(**settings), max_nodes=NODES)


def random_tree(slot: int, chance: random.Random, vocabulary: int) -> SlotTree:
    n = chance.randint(1, NODES)
    tokens = [chance.randrange(vocabulary) for _ in range(n)]
    return slot, tokens, [-1, *(chance.randrange(node) for node in range(1, n))]


def rows(engine: NativeEngine, trees: list[SlotTree]) -> list[NDArray[np.float32]]:
    return [engine.logits(slot, node) for slot, tokens, _ in trees for node in range(len(tokens))]


def whole(engine: NativeEngine, n_rows: int) -> NDArray[np.float32]:
    """All outputs of the last pass, by llama.cpp's own call for them."""
    pointer = llama_cpp.llama_get_logits(engine.context_address)
    return np.ctypeslib.as_array(pointer, (n_rows, engine.info.n_vocab)).copy()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[NativeEngine]:
    with open_native(model) as opened:
        yield opened


@pytest.mark.parametrize("then", ["commit", "save", "copy", "reset", "restore", "draw"])
def test_rows_stay_whatever_is_done_with_other_sequences(engine: NativeEngine, then: str) -> None:
    chance = random.Random(then)
    for slot in range(SLOTS):
        engine.reset(slot)
        engine.prefill(slot, [3 + slot, 5, 7])
    for _ in range(5):
        trees = [random_tree(slot, chance, engine.info.n_vocab) for slot in range(3)]
        engine.verify(trees)
        expected = rows(engine, trees)
        engine.verify(trees)  # the same again, none of its rows asked for
        engine.commit(2, [0])  # the accepted path is folded into the state before anything reads it
        if then == "save":
            engine.save(2)
        elif then == "copy":
            engine.copy(2, 3)
        elif then == "reset":
            engine.reset(2)
        elif then == "restore":
            engine.restore(3, engine.save(2))
        np.testing.assert_array_equal(rows(engine, trees[:2]), expected[: -len(trees[2][1])])


def test_the_whole_is_made_of_the_rows(engine: NativeEngine) -> None:
    chance = random.Random(1)
    for slot in range(SLOTS):
        engine.reset(slot)
    for _ in range(5):
        trees = [random_tree(slot, chance, engine.info.n_vocab) for slot in range(SLOTS)]
        engine.verify(trees)
        before = rows(engine, trees)
        np.testing.assert_array_equal(whole(engine, len(before)), before)
        np.testing.assert_array_equal(rows(engine, trees), before)


def test_outputs_of_several_graphs_are_those_of_one(model: Path, engine: NativeEngine) -> None:
    """A pass of three trees with room for one in a graph copies, as upstream does."""
    chance = random.Random(2)
    with open_native(model, n_ubatch=NODES + 1) as other:
        for one in (engine, other):
            for slot in range(SLOTS):
                one.reset(slot)
        for _ in range(5):
            trees = [random_tree(slot, chance, engine.info.n_vocab) for slot in range(3)]
            engine.verify(trees)
            other.verify(trees)
            np.testing.assert_array_equal(rows(other, trees), rows(engine, trees))


@pytest.mark.parametrize("ask", ["rows", "whole", "argmax"])
def test_interleaved_sequences_get_their_own_rows(model: Path, ask: str) -> None:
    """Sequences that llama.cpp sorts for its graph: outputs are told in the order of the batch."""
    chance = random.Random(3)
    texts = [[chance.randrange(400) for _ in range(6)] for _ in range(3)]
    with Model(model) as weights:
        with Context(weights, sequences=3) as alone:
            expected = [alone.decode(text, sequence=i) for i, text in enumerate(texts)]
        with Context(weights, sequences=3) as together:
            batch = llama_cpp.llama_batch_init(18, 0, 1)
            order = [(i, at) for at in range(6) for i in range(3)]
            for k, (i, at) in enumerate(order):
                batch.token[k], batch.pos[k] = texts[i][at], at
                batch.n_seq_id[k], batch.seq_id[k][0] = 1, i
                batch.logits[k] = True
            batch.n_tokens = len(order)
            set_output_argmax(together.handle, ask == "argmax")
            assert llama_cpp.llama_decode(together.handle, batch) == 0
            if ask == "whole":
                pointer = llama_cpp.llama_get_logits(together.handle)
                found = np.ctypeslib.as_array(pointer, (18, weights.vocab)).copy()
            else:
                found = np.stack(
                    [
                        np.ctypeslib.as_array(
                            llama_cpp.llama_get_logits_ith(together.handle, k), (weights.vocab,)
                        ).copy()
                        for k in range(18)
                    ]
                )
            best = [output_argmax(together.handle, k, None) for k in range(18)]
            llama_cpp.llama_batch_free(batch)
    assert best == (found.argmax(axis=1).tolist() if ask == "argmax" else [-1] * 18)
    for k, (i, at) in enumerate(order):
        np.testing.assert_allclose(found[k], expected[i][at], atol=1e-3, err_msg=f"{i}, {at}")
