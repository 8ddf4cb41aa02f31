"""Random draft trees give plain text, greedy and seeded: hybrids, sliding windows, attention alone.

A drafter that knows the plain text drafts trees of random shapes and sizes in which each node goes
on with the true text with a probability of 0.7, so that every step accepts and rejects something.
A divergence is reported with the gap between the two best logits at its place. The quick tests take
a cross-section of the prompts; ``pytest --full`` takes all 50 x 300 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pyspec import DraftConfig, Engine, SamplingConfig
from pyspec.drafter import DraftContext, Drafter
from pyspec.registry import registry
from pyspec.tree import DraftTree
from tests.prompts import FEW, PROMPTS
from tests.synthetic_models import Synthetic, synthetic  # noqa: F401

NODES = 24
TRUE = 0.7

GREEDY = SamplingConfig(temperature=0)
SAMPLED = SamplingConfig(temperature=0.8, seed=11)
PENALISED = SamplingConfig(temperature=1.0, repeat_penalty=1.1, top_k=0, seed=4)


class RandomTrees(Drafter):
    """Trees of random shape around a text that is known beforehand."""

    name = "random-trees"
    text: ClassVar[list[int]] = []

    def __init__(self, native: Any, config: DraftConfig) -> None:
        super().__init__(native, config)
        self._random = random.Random(5)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._tree(context) for context in contexts]

    def _tree(self, context: DraftContext) -> DraftTree:
        pick = self._random
        future = self.text[len(context.tokens) :]
        tokens, parents, depths = [context.root], [-1], [0]
        children: dict[int, set[int]] = {0: set()}
        true = 0  # the deepest node on the true path
        for _ in range(pick.randrange(min(NODES, context.max_nodes))):
            right = pick.random() < TRUE and depths[true] < len(future)
            parent = true if right else pick.randrange(len(tokens))
            token = future[depths[true]] if right else pick.randrange(self.native.info.n_vocab)
            if depths[parent] >= context.max_depth or token in children[parent]:
                continue
            children[parent].add(token)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            node = len(tokens) - 1
            children[node] = set()
            if right or (parent == true and future[depths[true] :][:1] == [token]):
                true = node
        return DraftTree.from_parents(tokens, parents)


@pytest.fixture(scope="module")
def known() -> Iterator[None]:
    """Makes the drafter known as any other."""
    registry()[RandomTrees.name] = RandomTrees
    yield
    del registry()[RandomTrees.name]


Engines = tuple[Engine, Engine]
MODELS = ["demo", "tiny-qwen35moe", "gemma3", "kimi-linear", "smollm2"]


@pytest.fixture(scope="module", params=MODELS)
def engines(
    request: pytest.FixtureRequest,
    known: None,
    model: Path,
    synthetic: Synthetic,  # noqa: F811
) -> Iterator[Engines]:
    """Plain decoding and random trees on the same weights."""
    if request.param == "smollm2":
        path = request.getfixturevalue("smollm2_file")
    else:
        path = model if request.param == "demo" else synthetic(request.param)
    with Engine(path, "none", n_ctx=1024, n_threads=1) as plain:
        drafts = DraftConfig(RandomTrees.name, nodes=NODES)
        with Engine(path, drafts, share=plain, n_ctx=1024, n_threads=1) as trees:
            yield plain, trees


def divergence(engines: Engines, prompt: bytes, n: int, sampling: SamplingConfig) -> str | None:
    """None when both give the same tokens; else where they part, and by how little."""
    plain, trees = engines
    options = {"max_tokens": n, "ignore_end": True, "sampling": sampling}
    expected = plain.complete(prompt, **options)
    RandomTrees.text = plain.tokenize(prompt) + expected.tokens
    found = trees.complete(prompt, **options)
    assert found.stats.as_dict()["tokens_per_step"] > 1.3, "the trees were not accepted"
    if found.tokens == expected.tokens:
        return None
    at = next(
        i
        for i, pair in enumerate(zip(found.tokens, expected.tokens, strict=False))
        if len({*pair}) > 1
    )
    gap = top_gap(plain, [*plain.tokenize(prompt), *expected.tokens[:at]])
    return f"{prompt!r}: token {at}, top-2 gap {gap:.2g}"


def top_gap(engine: Engine, tokens: list[int]) -> float:
    """The gap between the two best logits behind a text."""
    sequence = engine.begin(tokens)
    try:
        while not engine.prefill(sequence):
            pass
        engine.native.verify([(sequence.slot, tokens[-1:], [-1])])
        best = np.sort(engine.native.logits(sequence.slot, 0))
        return float(best[-1] - best[-2])
    finally:
        engine.end(sequence)


def assert_none_diverges(
    engines: Engines, prompts: Sequence[bytes], n: int, sampling: SamplingConfig
) -> None:
    found = [divergence(engines, prompt, n, sampling) for prompt in prompts]
    differing = [one for one in found if one is not None]
    assert not differing, f"{len(differing)} of {len(prompts)} texts diverge: {differing}"


SAMPLINGS = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(SAMPLED, id="t0.8"),
    pytest.param(PENALISED, id="penalties"),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_random_trees_give_plain_text(engines: Engines, sampling: SamplingConfig) -> None:
    real = engines[0].native.info.n_params > 10**8  # a hundred times as slow
    assert_none_diverges(engines, FEW[:1] if real else FEW, 40 if real else 80, sampling)


@pytest.mark.full
@pytest.mark.timeout(7200)  # SmolLM2 takes a quarter of an hour for each
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_random_trees_give_plain_text_on_all_prompts(
    engines: Engines, sampling: SamplingConfig
) -> None:
    assert len(PROMPTS) == 50
    assert_none_diverges(engines, PROMPTS, 300, sampling)
