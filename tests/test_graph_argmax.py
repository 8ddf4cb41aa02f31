"""Greedy tokens chosen in the forward pass: the row walk's, whatever else the pass holds or is asked.

`graph_argmax` is off unless asked for, as here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyspec import Engine, SamplingConfig
from pyspec.config import EngineConfig
from pyspec.errors import StateError
from pyspec.logprobs import TokenLogprob
from pyspec.native import NativeEngine
from pyspec.sequence import Sequence

NODES = 12
SLOTS = 3
GREEDY = SamplingConfig(temperature=0)
SAMPLED = SamplingConfig(temperature=0.9, seed=5)

SHAPES = {
    "root-only": [-1],
    "chain-n12": list(range(-1, NODES - 1)),
    "star-n12": [-1] + [0] * (NODES - 1),
    "comb": [-1, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10],
    "two-chains": [-1, 0, 1, 2, 3, 4, 0, 6, 7, 8, 9],
    "late-sibling": [-1, 0, 1, 2, 0, 1, 3, 3, 2],
}


def open_native(path: Path, graph_argmax: bool, **options: Any) -> NativeEngine:
    settings = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0, "n_slots": SLOTS} | options
    config = EngineConfig(graph_argmax=graph_argmax, **settings)
    return NativeEngine.open(path, config, max_nodes=NODES)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[NativeEngine, NativeEngine]]:
    """One that chooses on the graph, and one that walks rows."""
    with open_native(model, True) as graph, open_native(model, False) as rows:
        yield graph, rows


def fresh(pair: tuple[NativeEngine, NativeEngine]) -> tuple[NativeEngine, NativeEngine]:
    for engine in pair:
        for slot in range(SLOTS):
            engine.reset(slot)
            engine.prefill(slot, [3 + slot, 5, 7, 11])
    return pair


def tree_of(
    engine: NativeEngine, slot: int, root: int, parents: list[int], k: int
) -> tuple[int, list[int], list[int]]:
    """A tree of this shape with tokens that depend on k."""
    tokens = [root]
    for node, parent in enumerate(parents[1:], 1):
        tokens.append((tokens[parent] * 7 + node * 13 + k) % engine.info.n_vocab)
    return slot, tokens, parents


@pytest.mark.parametrize("shape", SHAPES)
def test_same_tokens_as_rows(pair: tuple[NativeEngine, NativeEngine], shape: str) -> None:
    """At every node, walked or not; then on along the walk, many steps."""
    graph, rows = fresh(pair)
    parents = SHAPES[shape]
    roots = [1, 2, 3]
    for step in range(6):
        trees = [tree_of(graph, slot, roots[slot], parents, step) for slot in range(SLOTS)]
        for slot, tokens, _ in trees:
            # what the target would say behind the root, in place of a child: the walk goes on there
            rows.verify([(slot, tokens[:1], [-1])])
            if len(tokens) > 1:
                tokens[1] = rows.sample(rows.sampler(GREEDY), slot, 0)
        graph.verify(trees, greedy=True)
        rows.verify(trees)
        for slot, tokens, _ in trees:
            samplers = graph.sampler(GREEDY), rows.sampler(GREEDY)
            for node in range(len(tokens)):
                token = graph.sample(samplers[0], slot, node)
                assert token == rows.sample(samplers[1], slot, node)
                assert token == int(graph.logits(slot, node).argmax())
            walks = [one.accept(s, slot, NODES) for one, s in zip(pair, samplers, strict=True)]
            assert walks[0] == walks[1]
            assert len(walks[0][0]) > 1 or len(parents) == 1
            roots[slot] = walks[0][1]
            for one in pair:
                one.commit(slot, walks[0][0])


def test_mixed_requests_switching_back_and_forth(pair: tuple[NativeEngine, NativeEngine]) -> None:
    """Greedy and sampled sequences, together and alone, hinted rightly or not."""
    chance = random.Random(4)
    graph, rows = fresh(pair)
    samplers = [[e.sampler(GREEDY), e.sampler(SAMPLED), e.sampler(GREEDY)] for e in pair]
    roots = [1, 2, 3]
    for _ in range(60):
        slots = sorted(chance.sample(range(SLOTS), chance.randint(1, SLOTS)))
        shape = SHAPES[chance.choice([*SHAPES])]
        trees = [tree_of(graph, slot, roots[slot], shape, chance.randrange(9)) for slot in slots]
        graph.verify(trees, greedy=1 not in slots or chance.random() < 0.2)
        rows.verify(trees)
        for slot in chance.sample(slots, len(slots)):
            found = graph.accept(samplers[0][slot], slot, NODES)
            assert found == rows.accept(samplers[1][slot], slot, NODES)
            if chance.random() < 0.3:
                node = chance.randrange(len(shape))
                np.testing.assert_array_equal(graph.logits(slot, node), rows.logits(slot, node))
                assert graph.top(slot, node, 4) == rows.top(slot, node, 4)
            roots[slot] = found[1]
            for one in pair:
                one.commit(slot, found[0])


def test_several_graphs_a_pass(model: Path, pair: tuple[NativeEngine, NativeEngine]) -> None:
    _, rows = fresh(pair)
    with open_native(model, True, n_ubatch=NODES + 1) as graph:
        fresh((graph, graph))
        trees = [tree_of(rows, slot, 4, SHAPES["comb"], slot) for slot in range(SLOTS)]
        graph.verify(trees, greedy=True)
        rows.verify(trees)
        for slot in range(SLOTS):
            for node in range(NODES):
                token = graph.sample(graph.sampler(GREEDY), slot, node)
                assert token == rows.sample(rows.sampler(GREEDY), slot, node)


def test_nothing_stale_is_drawn(pair: tuple[NativeEngine, NativeEngine]) -> None:
    graph, _ = fresh(pair)
    sampler = graph.sampler(GREEDY)
    graph.verify([(0, [1, 2], [-1, 0])], greedy=True)
    graph.prefill(1, [5])
    with pytest.raises(StateError, match="overwritten"):
        graph.sample(sampler, 0, 0)
    graph.verify([(1, [1], [-1])], greedy=True)
    graph.verify([(1, [9], [-1])])  # rows now: the ids of the pass before are gone
    assert graph.sample(sampler, 1, 0) == int(graph.logits(1, 0).argmax())
    with pytest.raises(StateError, match="overwritten"):
        graph.accept(sampler, 0, 2)


def test_switching_keeps_both_graphs(pair: tuple[NativeEngine, NativeEngine]) -> None:
    graph, _ = fresh(pair)
    tree = tree_of(graph, 0, 1, SHAPES["comb"], 0)
    for round_ in range(20):
        if round_ == 6:
            graph.timings(reset=True)
        graph.verify([tree], greedy=round_ % 2 == 0)
    assert graph.timings().n_graph_reused == 14


def test_which_samplers_are_greedy(pair: tuple[NativeEngine, NativeEngine]) -> None:
    engine = pair[0]
    assert engine.sampler(GREEDY).greedy and engine.sampler(GREEDY).clone().greedy
    for other in (
        SAMPLED,
        SamplingConfig(temperature=0, logit_bias={3: 1.0}),
        SamplingConfig(temperature=0, repeat_penalty=1.1),
        SamplingConfig(temperature=0, grammar='root ::= "a"*'),
    ):
        assert not engine.sampler(other).greedy


def generated(
    engine: Engine, sampling: SamplingConfig, top_logprobs: int | None
) -> tuple[list[int], list[TokenLogprob]]:
    """Tokens and their log-probabilities."""
    sequence = engine.begin(
        "def main(", max_tokens=40, sampling=sampling, top_logprobs=top_logprobs
    )
    while not engine.prefill(sequence):
        pass
    while sequence.finish_reason is None:
        engine.step([sequence])
    engine.end(sequence)
    return sequence.output, sequence.logprobs


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_engines_give_the_same_text(
    model: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And passes are told to be greedy when no other row is needed."""
    hints: set[bool] = set()
    verify = NativeEngine.verify

    def spy(self: NativeEngine, trees: Any, *, greedy: bool = False) -> None:
        hints.add(greedy)
        verify(self, trees, greedy=greedy)

    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
    with (
        Engine(model, draft, graph_argmax=True, **options) as graph,
        Engine(model, draft, graph_argmax=False, share=graph, **options) as rows,
    ):
        monkeypatch.setattr(NativeEngine, "verify", spy)
        for sampling in (GREEDY, SAMPLED):
            for top_logprobs in (None, 2):
                expected = generated(rows, sampling, top_logprobs)
                assert generated(graph, sampling, top_logprobs) == expected
                hints.clear()
                with monkeypatch.context() as step_by_step:
                    step_by_step.setattr(Sequence, "may_coast", property(lambda self: False))
                    assert generated(graph, sampling, top_logprobs) == expected
                assert hints == {sampling is GREEDY and top_logprobs is None}
