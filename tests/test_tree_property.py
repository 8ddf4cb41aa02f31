"""Committing a path of a verified tree equals decoding that path plainly, to the last bit.

What is compared: `logits` of every node, and the whole saved `state` of a sequence afterwards (the
gated delta net states, the convolution windows, the positions and data of the attention cells). The
plain side appends the path token by token with `prefill`, which is llama.cpp's own decoding without
trees, so the two share no op on the recurrent layers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyspec.config import EngineConfig
from pyspec.errors import ArgumentError, ContextError, PyspecError, StateError, TreeError
from pyspec.native import NativeEngine
from tests.synthetic_models import Synthetic, synthetic  # noqa: F401

SLOTS = 4
NODES = 64
RELAXED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

Parents = list[int]


def parents_of(rule: str, n: int, rng: random.Random) -> Parents:
    """A tree's shape; `deep` keeps to a few branches, `bushy` does not."""
    pick = {
        "chain": lambda i: i - 1,
        "star": lambda i: 0,
        "deep": lambda i: max(0, i - 1 - rng.randrange(3)),
        "bushy": lambda i: rng.randrange(i),
    }[rule]
    return [-1, *(pick(i) for i in range(1, n))]


def path_to(parents: Parents, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


shapes = st.builds(
    lambda rule, n, seed: parents_of(rule, n, random.Random(seed)),
    st.sampled_from(["chain", "star", "deep", "bushy"]),
    st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 31, 32, 33, 63, 64])),
    st.integers(0, 10**6),
)


class Pair:
    """Two engines on one model: what the first does with trees, the second does without."""

    def __init__(self, path: Path, **options: str) -> None:
        config = EngineConfig(n_threads=1, n_slots=SLOTS, **options)
        self.tree = NativeEngine.open(path, config, n_ctx=1024, max_nodes=NODES)
        self.plain = NativeEngine.attach(self.tree, config, n_ctx=1024, max_nodes=NODES)
        assert self.tree.info.tree, "this build must verify trees of this model"
        self.rng = random.Random(1)

    def token(self) -> int:
        return self.rng.randrange(self.tree.info.n_vocab)

    def tokens(self, n: int) -> list[int]:
        return [self.token() for _ in range(n)]

    def start(self, slot: int, n: int) -> None:
        """The same text of n tokens in both."""
        text = self.tokens(n)
        for engine in (self.tree, self.plain):
            engine.reset(slot)
            engine.prefill(slot, text)

    def plain_logits(self, slot: int, token: int) -> np.ndarray:
        """Decodes one token without branches and keeps it."""
        self.plain.verify([(slot, [token], [-1])])
        logits = self.plain.logits(slot, 0)
        self.plain.commit(slot, [0])
        return logits

    def close(self) -> None:
        self.plain.close()
        self.tree.close()

    def assert_same_state(self, slot: int) -> None:
        mine, theirs = self.tree.save(slot), self.plain.save(slot)
        assert mine == theirs, f"state of sequence {slot} differs"


MODELS = [
    "demo",
    "tiny-qwen35",
    "tiny-qwen35moe",
    "gemma3",
    "kimi-linear",
    "kimi-k3",
    "bailingmoe3",
]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, model: Path, synthetic: Synthetic) -> Iterator[Pair]:  # noqa: F811
    path = model if request.param == "demo" else synthetic(request.param)
    pair = Pair(path)
    yield pair
    pair.close()


@RELAXED
@given(parents=shapes, prompt=st.sampled_from([1, 2, 3, 7, 40]))
def test_every_path_equals_plain_decoding(pair: Pair, parents: Parents, prompt: int) -> None:
    assert_every_path_is_plain(pair, parents, prompt)


CACHES = [
    ("demo", "q8_0", "q8_0"),
    ("demo", "q8_0", "q4_0"),
    ("gemma3", "q8_0", "q8_0"),
    ("kimi-linear", "q8_0", "q8_0"),
]


@pytest.fixture(scope="module", params=CACHES, ids="-".join)
def quantised(request: pytest.FixtureRequest, model: Path, synthetic: Synthetic) -> Iterator[Pair]:  # noqa: F811
    """Pairs whose attention caches are quantised: gated delta net, sliding window, compressed."""
    name, k, v = request.param
    path = model if name == "demo" else synthetic(name)
    pair = Pair(path, cache_type_k=k, cache_type_v=v)
    yield pair
    pair.close()


@settings(RELAXED, max_examples=8)
@given(parents=shapes, prompt=st.sampled_from([1, 40]))
def test_every_path_with_a_quantised_cache(quantised: Pair, parents: Parents, prompt: int) -> None:
    assert_every_path_is_plain(quantised, parents, prompt)


def assert_every_path_is_plain(pair: Pair, parents: Parents, prompt: int) -> None:
    """For every node of a random tree: its path committed, then one token more."""
    n = len(parents)
    tokens = pair.tokens(n)
    pair.start(0, prompt)
    before = pair.tree.save(0)
    nodes = range(n) if n <= 9 else sorted({n - 1, *(pair.rng.randrange(n) for _ in range(3))})
    for node in nodes:
        path = path_to(parents, node)
        pair.tree.restore(0, before)
        pair.tree.verify([(0, tokens, parents)])
        logits = [pair.tree.logits(0, step) for step in path]
        pair.tree.commit(0, path)

        pair.plain.restore(0, before)
        pair.plain.prefill(0, [tokens[step] for step in path[:-1]])
        np.testing.assert_array_equal(
            logits[-1], pair.plain_logits(0, tokens[path[-1]]), err_msg=f"logits of node {node}"
        )
        pair.assert_same_state(0)

        after = pair.token()
        for engine in (pair.tree, pair.plain):
            engine.prefill(0, [after])
        pair.assert_same_state(0)


@RELAXED
@given(
    trees=st.lists(shapes, min_size=2, max_size=SLOTS),
    prompts=st.lists(st.integers(1, 30), min_size=SLOTS, max_size=SLOTS),
    data=st.data(),
)
def test_sequences_do_not_see_each_other(
    pair: Pair, trees: list[Parents], prompts: list[int], data: st.DataObject
) -> None:
    """Trees of unequal sizes in one call; every sequence as if it were alone."""
    texts = [pair.tokens(len(parents)) for parents in trees]
    for slot in range(len(trees)):
        pair.start(slot, prompts[slot])
    pair.tree.verify([(slot, texts[slot], trees[slot]) for slot in range(len(trees))])
    for slot, parents in enumerate(trees):
        node = data.draw(st.integers(0, len(parents) - 1), label="accepted node")
        path = path_to(parents, node)
        logits = pair.tree.logits(slot, node)
        pair.tree.commit(slot, path)
        pair.plain.prefill(slot, [texts[slot][step] for step in path[:-1]])
        np.testing.assert_array_equal(logits, pair.plain_logits(slot, texts[slot][node]))
    for slot in range(len(trees)):
        pair.assert_same_state(slot)


def test_a_node_does_not_see_its_cousins(pair: Pair) -> None:
    """Other branches, other tokens in them, other node numbers: the same logits."""
    pair.start(0, 20)
    branch = pair.tokens(4)
    pair.tree.verify([(0, branch, [-1, 0, 1, 2])])
    alone = [pair.tree.logits(0, node) for node in range(4)]
    for others in (3, 17, 60):
        noise = pair.tokens(others)
        # the branch's nodes come last but for the root; the others hang on the root and each other
        tokens = [branch[0], *noise, *branch[1:]]
        parents = [-1, *(pair.rng.randrange(i) for i in range(1, others + 1))]
        parents += [0, others + 1, others + 2]
        pair.tree.verify([(0, tokens, parents)])
        for step, node in enumerate([0, others + 1, others + 2, others + 3]):
            np.testing.assert_array_equal(
                pair.tree.logits(0, node), alone[step], err_msg=f"{others} cousins, step {step}"
            )


def test_no_drift_over_500_steps(pair: Pair) -> None:
    """Random accept lengths, with save and restore, copies, resets and dropped trees in between."""
    rng = random.Random(7)
    for slot in range(2):
        pair.start(slot, 5)
    for step in range(500):
        slot = rng.randrange(2)
        if pair.tree.length(slot) > 900:
            pair.start(slot, 5)
        parents = parents_of(
            rng.choice(["chain", "deep", "bushy"]), rng.choice([1, 3, 4, 8, 12]), rng
        )
        tokens = pair.tokens(len(parents))
        pair.tree.verify([(slot, tokens, parents)])
        event = rng.random()
        if event < 0.1:  # cancelled: the tree is forgotten
            pair.tree.verify([(slot, tokens[:1], [-1])])
            path = [0]
        else:
            path = path_to(parents, rng.randrange(len(parents)))
        pair.tree.commit(slot, path)
        pair.plain.prefill(slot, [tokens[node] for node in path])
        if event > 0.95:  # saved and restored between steps
            for engine in (pair.tree, pair.plain):
                engine.restore(slot, engine.save(slot))
        elif event > 0.9:  # the other sequence becomes a copy
            for engine in (pair.tree, pair.plain):
                engine.copy(slot, 1 - slot)
            pair.assert_same_state(1 - slot)
        if step % 50 == 49:
            pair.assert_same_state(slot)
    for slot in range(2):
        pair.assert_same_state(slot)


BAD_TREES = {
    "two-roots": ([1, 2], [-1, -1]),
    "parent-after-child": ([1, 2, 3], [-1, 2, 0]),
    "own-parent": ([1, 2], [-1, 1]),
    "root-has-parent": ([1], [0]),
    "no-nodes": ([], []),
    "too-many-nodes": ([1] * (NODES + 1), list(range(-1, NODES))),
    "no-such-token": ([10**8], [-1]),
    "lengths-differ": ([1, 2], [-1]),
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_a_bad_tree_changes_nothing(pair: Pair, name: str) -> None:
    """Refused with a reason before anything is touched; neighbours and the sequence go on."""
    for slot in range(2):
        pair.start(slot, 9)
    before = [pair.tree.save(slot) for slot in range(2)]
    good = pair.tokens(3)
    pair.tree.verify([(1, good, [-1, 0, 0])])
    tokens, parents = BAD_TREES[name]
    with pytest.raises((TreeError, ArgumentError), match=r"\w"):
        pair.tree.verify([(0, tokens, parents)])
    pair.tree.commit(1, [0, 2])
    pair.plain.prefill(1, [good[0], good[2]])
    pair.assert_same_state(1)
    assert pair.tree.save(0) == before[0]


@pytest.mark.parametrize("path", [[1], [0, 3], [0, 1, 2], [0, 9], []], ids=str)
def test_an_unknown_path_is_refused(pair: Pair, path: list[int]) -> None:
    """After which the tree can still be committed along a real one."""
    pair.start(0, 9)
    tokens = pair.tokens(4)
    pair.tree.verify([(0, tokens, [-1, 0, 0, 1])])
    with pytest.raises(PyspecError, match="sequence 0"):
        pair.tree.commit(0, path)
    pair.tree.commit(0, [0, 1, 3])
    pair.plain.prefill(0, [tokens[0], tokens[1], tokens[3]])
    pair.assert_same_state(0)


def test_commit_needs_a_tree(pair: Pair) -> None:
    pair.start(0, 3)
    with pytest.raises(StateError, match="verify one first"):
        pair.tree.commit(0, [0])


def test_a_full_context_is_refused_and_harms_nobody(pair: Pair) -> None:
    pair.start(0, 1020)
    pair.start(1, 8)
    with pytest.raises(ContextError, match=r"1020.*1024"):
        pair.tree.verify([(0, pair.tokens(8), list(range(-1, 7)))])
    tokens = pair.tokens(4)
    pair.tree.verify([(0, tokens, [-1, 0, 1, 2]), (1, tokens, [-1, 0, 0, 0])])
    pair.tree.commit(0, [0, 1, 2, 3])
    pair.tree.commit(1, [0, 3])
    pair.plain.prefill(0, tokens)
    pair.plain.prefill(1, [tokens[0], tokens[3]])
    for slot in range(2):
        pair.assert_same_state(slot)
