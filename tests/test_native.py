"""`pyspec.native`: libpyspec through its binding.

The yardstick everywhere is plain decoding: one token, one forward pass, committed at once.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyspec.accept import accept
from pyspec.config import EngineConfig, SamplingConfig
from pyspec.errors import (
    AbortedError,
    ArgumentError,
    ContextError,
    DraftError,
    LibraryError,
    ModelError,
    PyspecError,
    SamplerError,
    StateError,
    TreeError,
)
from pyspec.native import NativeEngine, NativeSampler, binding, library_version
from pyspec.tree import DraftTree, TreeBuilder

ROOT = Path(__file__).resolve().parent.parent
CODE = '''
def read_lines(path, encoding="utf-8"):
    """Return the lines of a file, without line ends."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]


class Counter(dict):
    def __missing__(self, key):
        return 0

    def update(self, iterable):
        for element in iterable:
            self[element] += 1
'''
GREEDY = SamplingConfig(temperature=0)
RANDOM = SamplingConfig(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=11)

LOGITS_TOLERANCE = 1e-3
"""Largest difference of a logit between a pass of one column and one of several."""


@pytest.fixture(scope="module")
def model_path(request: pytest.FixtureRequest) -> Path:
    """A small hybrid with an MTP block: the demo model, or the one PYSPEC_TEST_MODEL names."""
    other = os.environ.get("PYSPEC_TEST_MODEL")
    return Path(other) if other else request.getfixturevalue("model")


def open_native(path: Path, *, slots: int = 1, nodes: int = 8, mtp: bool = True, **options: object):
    """An engine as these tests use it."""
    settings = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0, "n_slots": slots} | options
    return NativeEngine.open(path, EngineConfig(**settings), max_nodes=nodes, mtp=mtp)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[NativeEngine]:
    """One engine of three slots for all tests that leave it as they found it."""
    with open_native(model_path, slots=3) as opened:
        yield opened


@pytest.fixture
def clean(engine: NativeEngine) -> NativeEngine:
    """The shared engine, its slots empty."""
    for slot in range(3):
        engine.reset(slot)
    return engine


@pytest.fixture(scope="module")
def prompt(engine: NativeEngine) -> list[int]:
    """Token ids of some code."""
    return engine.tokenize(CODE)[:60]


def mtp_chain(
    engine: NativeEngine, slots: list[int], roots: list[int], depth: int, top_k: int = 1
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens and log-probabilities [n, depth, top_k] of a chain for every slot."""
    drafts = engine.mtp_draft(slots, roots, depth, top_k)
    assert (drafts.levels == depth).all()
    return drafts.tokens[:, :, 0], drafts.log_probs[:, :, 0]


def siblings(root: int, tokens: NDArray, log_probs: NDArray, nodes: int) -> DraftTree:
    """The best part of a chain with siblings at every depth; [depth, top_k] each."""
    builder, above = TreeBuilder(root), 0
    for row, scores in zip(tokens.tolist(), log_probs.tolist(), strict=True):
        level = [builder.add(above, *one) for one in zip(row, scores, strict=True)]
        above = level[0]
    return builder.best(nodes)


def chain(slot: int, tokens: list[int]) -> tuple[int, list[int], list[int]]:
    """A chain as `verify` takes it."""
    return slot, tokens, list(range(-1, len(tokens) - 1))


def step_plain(engine: NativeEngine, slot: int, token: int) -> NDArray[np.float32]:
    """Plain decoding of one token; the logits after it."""
    engine.verify([chain(slot, [token])])
    logits = engine.logits(slot, 0)
    engine.commit(slot, [0])
    return logits


class Plain:
    """Plain greedy decoding of a prompt: the tokens, and the logits that each came from."""

    def __init__(self, engine: NativeEngine, slot: int, prompt: list[int], n: int) -> None:
        engine.reset(slot)
        engine.prefill(slot, prompt[:-1])
        self.tokens: list[int] = []
        self.logits: list[NDArray[np.float32]] = []
        token = prompt[-1]
        for _ in range(n):
            self.logits.append(step_plain(engine, slot, token))
            token = int(self.logits[-1].argmax())
            self.tokens.append(token)
        engine.reset(slot)


def assert_logits(actual: NDArray[np.float32], expected: NDArray[np.float32], where: str) -> None:
    """Equal up to rounding, and the same best token unless the two best are as good as equal."""
    difference = float(np.abs(actual - expected).max())
    assert difference < LOGITS_TOLERANCE, f"logits at {where} differ by {difference}"
    first, second = np.sort(expected)[-1:-3:-1]
    if first - second > 2 * LOGITS_TOLERANCE:
        assert actual.argmax() == expected.argmax(), f"best token at {where}"


# ---- facts and text ---------------------------------------------------------------------------------


def test_info_tells_what_the_file_is(engine: NativeEngine, model_path: Path) -> None:
    info = engine.info
    assert info.arch == "qwen35"
    assert info.is_hybrid and not info.is_recurrent
    assert info.n_layer_recurrent == info.n_layer * 3 // 4
    assert info.n_layer_mtp == 1
    assert info.n_ctx == 512 <= info.n_ctx_train
    assert 0 < info.size_bytes < model_path.stat().st_size
    assert info.bytes_kv > 0 and info.bytes_state > 0 and info.bytes_mtp > 0
    assert info.tree
    assert 0 < info.bytes_rollback < 7 * info.bytes_state  # a tape of 8 nodes, not 7 states
    assert library_version()


@pytest.mark.parametrize(
    "text", ["", "x", "def f(x):\n    return x", "naïve ☃ 東京 🙂", "\0 a\tb\r\n", "x" * 3000]
)
def test_text_survives_tokens(engine: NativeEngine, text: str) -> None:
    tokens = engine.tokenize(text)
    assert b"".join(map(engine.token_to_piece, tokens)).decode() == text


def test_special_tokens_are_read_only_on_demand(engine: NativeEngine) -> None:
    name = engine.token_to_piece(engine.info.token_eos, special=True)
    assert engine.tokenize(name, parse_special=True) == [engine.info.token_eos]
    assert len(engine.tokenize(name)) > 1
    assert engine.token_to_piece(engine.info.token_eos) == b""
    assert engine.is_eog(engine.info.token_eos)
    assert not engine.is_eog(engine.tokenize("x")[0])


def test_invalid_utf8_is_tokenized(engine: NativeEngine) -> None:
    assert engine.tokenize(b"ok \xff\xfe \xc3")


# ---- verify and commit ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8], ids=lambda n: f"chain-n{n}")
def test_chain_logits_equal_plain_decoding(clean: NativeEngine, prompt: list[int], n: int) -> None:
    plain = Plain(clean, 0, prompt, n)
    clean.prefill(0, prompt[:-1])
    clean.verify([chain(0, [prompt[-1], *plain.tokens[: n - 1]])])
    for node in range(n):
        assert_logits(clean.logits(0, node), plain.logits[node], f"node {node}")
    assert clean.length(0) == len(prompt) - 1  # unchanged until commit


def walk(
    engine: NativeEngine, slots: list[int], plains: list[Plain], prompts: list[list[int]], seed: int
) -> Iterator[None]:
    """Speculates along known sequences with random drafts: some right, then some wrong.

    Every sequence of `slots` takes part in a step by chance. Yields after every step.
    """
    chance = random.Random(seed)
    vocabulary = engine.info.n_vocab
    done = [0] * len(plains)  # tokens of `plain` that are committed or the root
    while any(n < len(plain.tokens) for n, plain in zip(done, plains, strict=True)):
        trees, takes = [], []
        for i, plain in enumerate(plains):
            if done[i] >= len(plain.tokens) or (len(plains) > 1 and chance.random() < 0.3):
                continue
            root = plain.tokens[done[i] - 1] if done[i] else prompts[i][-1]
            right = min(chance.randint(0, 7), len(plain.tokens) - done[i] - 1)
            wrong = chance.randint(0, 7 - right)
            drafts = plain.tokens[done[i] : done[i] + right]
            drafts += [chance.randrange(vocabulary) for _ in range(wrong)]
            trees.append(chain(slots[i], [root, *drafts]))
            takes.append((i, chance.randint(0, right) + 1))
        if not trees:
            continue
        engine.verify(trees)
        for i, take in takes:
            for node in range(take):
                where = f"slot {slots[i]}, token {done[i] + node}"
                expected = plains[i].logits[done[i] + node]
                assert_logits(engine.logits(slots[i], node), expected, where)
            engine.commit(slots[i], range(take))
            done[i] += take
            assert engine.length(slots[i]) == len(prompts[i]) - 1 + done[i]
        yield


def test_200_steps_of_random_length_equal_plain_decoding(
    clean: NativeEngine, prompt: list[int]
) -> None:
    steps = 0
    for seed in range(5):
        plain = Plain(clean, 0, prompt, 150)
        clean.prefill(0, prompt[:-1])
        steps += sum(1 for _ in walk(clean, [0], [plain], [prompt], seed))
        clean.reset(0)
    assert steps > 200


def test_interleaved_sequences_equal_plain_decoding(clean: NativeEngine, prompt: list[int]) -> None:
    prompts = [prompt, prompt[:3], prompt[20:45]]
    plains = [Plain(clean, slot, prompts[slot], 80) for slot in range(3)]
    for slot in range(3):
        clean.prefill(slot, prompts[slot][:-1])
    for _ in walk(clean, [0, 1, 2], plains, prompts, seed=3):
        pass


def test_empty_sequence_takes_a_tree(clean: NativeEngine, prompt: list[int]) -> None:
    plain = Plain(clean, 0, prompt[:1], 4)
    clean.verify([chain(0, [prompt[0], *plain.tokens[:3]])])
    for node in range(4):
        assert_logits(clean.logits(0, node), plain.logits[node], f"node {node}")
    clean.commit(0, [0, 1])
    assert clean.length(0) == 2


def test_prefill_in_parts_equals_prefill_at_once(clean: NativeEngine, prompt: list[int]) -> None:
    clean.prefill(0, prompt[:-1])
    for part in (prompt[:1], prompt[1:30], [], prompt[30:-1]):
        clean.prefill(1, part)
    assert_logits(step_plain(clean, 1, prompt[-1]), step_plain(clean, 0, prompt[-1]), "root")


@pytest.mark.parametrize("batch", [1, 16, 33, 512])
def test_batch_size_does_not_matter(
    model_path: Path, clean: NativeEngine, prompt: list[int], batch: int
) -> None:
    plain = Plain(clean, 0, prompt, 1)
    with open_native(model_path, n_batch=batch, n_ubatch=batch) as other:
        other.prefill(0, prompt[:-1])
        assert_logits(step_plain(other, 0, prompt[-1]), plain.logits[0], "root")


@pytest.mark.parametrize("then", ["verify", "prefill", "draft", "save", "copy"])
def test_uncommitted_tree_leaves_no_trace(
    clean: NativeEngine, prompt: list[int], then: str
) -> None:
    plain = Plain(clean, 0, prompt, 3)
    clean.prefill(0, prompt[:-2] if then == "prefill" else prompt[:-1])
    clean.verify([chain(0, [5, 6, 7, 8])])
    slot = 0
    if then == "prefill":
        clean.prefill(0, prompt[-2:-1])
    elif then == "draft":
        mtp_chain(clean, [0], [prompt[-1]], 2)
    elif then == "save":
        clean.restore(1, clean.save(0))
        slot = 1
    elif then == "copy":
        clean.copy(0, 1)
        slot = 1
    clean.verify([chain(slot, [prompt[-1], *plain.tokens[:2]])])
    for node in range(3):
        assert_logits(clean.logits(slot, node), plain.logits[node], f"node {node}")


def test_other_sequences_keep_their_tree(clean: NativeEngine, prompt: list[int]) -> None:
    plain = Plain(clean, 0, prompt, 4)
    clean.prefill(0, prompt[:-1])
    clean.verify([chain(0, [prompt[-1], *plain.tokens[:2]])])
    clean.prefill(1, prompt)
    clean.verify([chain(1, [3, 4])])
    with pytest.raises(StateError, match="logits of sequence 0 were overwritten"):
        clean.logits(0, 0)
    clean.commit(0, [0, 1])
    assert_logits(step_plain(clean, 0, plain.tokens[1]), plain.logits[2], "after commit")


# ---- trees ------------------------------------------------------------------------------------------


def random_parents(n: int, seed: int) -> list[int]:
    """A random tree of n nodes that likes to go deep."""
    chance = random.Random(seed)
    return [-1, *(chance.randint(max(0, node - 6), node - 1) for node in range(1, n))]


TREES = {
    "root-only": [-1],
    "chain-n8": list(range(-1, 7)),
    "star-n8": [-1, *[0] * 7],
    "binary-n7": [-1, 0, 0, 1, 1, 2, 2],
    "comb-n8": [-1, 0, 0, 1, 1, 3, 3, 5],
    "late-branch-n8": [-1, 0, 1, 2, 3, 4, 4, 4],
    "deep-n63": list(range(-1, 62)),
    "star-n64": [-1, *[0] * 63],
    "random-n33": random_parents(33, 1),
    "random-n64": random_parents(64, 2),
}
"""Parents of trees of many shapes; the ids tell shape and size."""


@pytest.fixture(scope="module")
def wide(model_path: Path) -> Iterator[NativeEngine]:
    """An engine for trees of 64 nodes: slot 0 speculates, slot 1 decodes plainly."""
    with open_native(model_path, slots=3, nodes=64) as opened:
        yield opened


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def node_tokens(engine: NativeEngine, root: int, n: int) -> list[int]:
    """A root and n - 1 random tokens."""
    chance = random.Random(n)
    return [root, *(chance.randrange(engine.info.n_vocab) for _ in range(n - 1))]


def plain_logits(
    engine: NativeEngine, state: bytes, tokens: list[int], parents: list[int]
) -> list[NDArray[np.float32]]:
    """Logits of every node, each path decoded plainly in slot 1 from a saved state."""
    known: dict[int, NDArray[np.float32]] = {}
    leaves = set(range(len(parents))) - set(parents)
    for leaf in sorted(leaves):
        engine.restore(1, state)
        for node in path_to(parents, leaf):
            logits = step_plain(engine, 1, tokens[node])
            known.setdefault(node, logits)
    return [known[node] for node in range(len(parents))]


@pytest.mark.parametrize("shape", TREES)
def test_every_path_of_a_tree_equals_plain_decoding(
    wide: NativeEngine, prompt: list[int], shape: str
) -> None:
    parents = TREES[shape]
    wide.reset(0)
    wide.prefill(0, prompt[:-1])
    state = wide.save(0)
    tokens = node_tokens(wide, prompt[-1], len(parents))
    expected = plain_logits(wide, state, tokens, parents)
    wide.verify([(0, tokens, parents)])
    for node, logits in enumerate(expected):
        assert_logits(wide.logits(0, node), logits, f"node {node}")


@pytest.mark.parametrize("shape", TREES)
def test_commit_of_any_path_equals_plain_decoding_of_it(
    wide: NativeEngine, prompt: list[int], shape: str
) -> None:
    parents = TREES[shape]
    wide.reset(0)
    wide.prefill(0, prompt[:-1])
    state = wide.save(0)
    tokens = node_tokens(wide, prompt[-1], len(parents))
    for node in sorted(set(random.Random(3).choices(range(len(parents)), k=6))):
        path = path_to(parents, node)
        wide.restore(0, state)
        wide.restore(1, state)
        wide.verify([(0, tokens, parents)])
        wide.commit(0, path)
        for step in path:
            step_plain(wide, 1, tokens[step])
        assert wide.length(0) == wide.length(1) == len(prompt) - 1 + len(path)
        drafts = [mtp_chain(wide, [slot], [prompt[0]], 3, 2) for slot in range(2)]
        assert_close(drafts[0][1], drafts[1][1], 0.01, f"draft log_probs after node {node}")
        for token in prompt[:3]:  # the first reads the committed state, the others what follows
            actual, expected = (step_plain(wide, slot, token) for slot in range(2))
            assert_logits(actual, expected, f"after node {node}")


def test_trees_of_unlike_shape_share_a_verify(wide: NativeEngine, prompt: list[int]) -> None:
    shapes = [TREES["comb-n8"], TREES["root-only"], TREES["random-n33"]]
    starts = [prompt[:20], prompt[:7], prompt[5:40]]
    expected = []
    trees = []
    for parents, start in zip(shapes, starts, strict=True):
        wide.reset(0)
        wide.prefill(0, start[:-1])
        state = wide.save(0)
        tokens = node_tokens(wide, start[-1], len(parents))
        trees.append((tokens, parents))
        expected.append((state, plain_logits(wide, state, tokens, parents)))
    for order in ([0, 1, 2], [2, 0], [1]):
        for slot in order:
            wide.restore(slot, expected[slot][0])
        wide.verify([(slot, *trees[slot]) for slot in order])
        for slot in order:
            for node, logits in enumerate(expected[slot][1]):
                assert_logits(wide.logits(slot, node), logits, f"slot {slot}, node {node}")
        for slot in order:
            wide.commit(slot, path_to(trees[slot][1], len(trees[slot][1]) - 1))


@pytest.mark.parametrize("config", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_tree_speculation_emits_what_plain_decoding_emits(
    wide: NativeEngine, prompt: list[int], config: SamplingConfig
) -> None:
    outputs = []
    for nodes in (1, 4, 12, 40):
        wide.reset(0)
        wide.prefill(0, prompt[:-1])
        sampler, root, out = wide.sampler(config), prompt[-1], []
        while len(out) < 150:
            tokens, log_probs = mtp_chain(wide, [0], [root], 4, 12)
            tree = siblings(root, tokens[0], log_probs[0], nodes)
            wide.verify([(0, tree.tokens, tree.parents)])
            path, bonus = wide.accept(sampler, 0, 150 - len(out), False)
            wide.commit(0, path)
            out += [*tree.tokens[path[1:]].tolist(), bonus]
            root = bonus
        outputs.append(out)
    assert outputs[1:] == outputs[:1] * 3


def test_graphs_are_kept_while_the_size_of_trees_changes(clean: NativeEngine) -> None:
    """A size that comes back costs no building; the first two times of each size do."""
    clean.prefill(0, [5, 6, 7])
    sizes = (1, 4, 2, 7, 3)

    def verify(rounds: int) -> int:
        clean.timings(reset=True)
        for _ in range(rounds):
            for n in sizes:
                clean.verify([(0, [5] * n, range(-1, n - 1))])
                clean.commit(0, [0])
        return clean.timings().n_graph_reused

    verify(2)
    assert verify(6) == 6 * len(sizes)


# ---- state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [1, 3, 4], ids=["rollback-3", "rollback-1", "no-rollback"])
@pytest.mark.parametrize("how", ["copy", "same-engine", "other-engine"])
def test_state_moves_to_another_sequence(
    model_path: Path, clean: NativeEngine, prompt: list[int], how: str, take: int
) -> None:
    plain = Plain(clean, 0, prompt, 12)
    clean.prefill(0, prompt[:-1])
    clean.verify([chain(0, [prompt[-1], *plain.tokens[:3]])])
    clean.commit(0, range(take))
    state = clean.save(0)
    other = open_native(model_path, slots=3) if how == "other-engine" else clean
    try:
        if how == "copy":
            clean.prefill(1, prompt[:7])  # something to be overwritten
            clean.copy(0, 1)
        else:
            other.restore(1, state)
        assert other.length(1) == clean.length(0) == len(prompt) - 1 + take
        root = plain.tokens[take - 1]
        expected = mtp_chain(clean, [0], [root], 3, 2)
        actual = mtp_chain(other, [1], [root], 3, 2)
        np.testing.assert_array_equal(actual[0], expected[0], "draft tokens")
        np.testing.assert_allclose(actual[1], expected[1], atol=1e-5, err_msg="draft log_probs")
        for i in range(take, 12):
            assert_logits(step_plain(other, 1, plain.tokens[i - 1]), plain.logits[i], f"copy {i}")
        for i in range(take, 12):
            assert_logits(step_plain(clean, 0, plain.tokens[i - 1]), plain.logits[i], f"first {i}")
    finally:
        if other is not clean:
            other.close()


def test_empty_sequence_is_saved_and_copied(clean: NativeEngine, prompt: list[int]) -> None:
    clean.prefill(1, prompt)
    clean.restore(1, clean.save(0))
    clean.prefill(2, prompt)
    clean.copy(0, 2)
    assert [clean.length(slot) for slot in range(3)] == [0, 0, 0]
    assert_logits(step_plain(clean, 1, prompt[0]), step_plain(clean, 2, prompt[0]), "root")


def test_reset_forgets(clean: NativeEngine, prompt: list[int]) -> None:
    plain = Plain(clean, 0, prompt, 2)
    clean.prefill(0, prompt[10:40])
    clean.verify([chain(0, [1, 2, 3])])
    clean.reset(0)
    assert clean.length(0) == 0
    with pytest.raises(StateError, match="sequence 0 has no uncommitted tree"):
        clean.commit(0, [0])
    clean.prefill(0, prompt[:-1])
    assert_logits(step_plain(clean, 0, prompt[-1]), plain.logits[0], "root")


def damage(state: bytes, at: int) -> bytes:
    """`state` with one bit turned."""
    return state[:at] + bytes([state[at] ^ 4]) + state[at + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: b"", "is no saved sequence"),
        (lambda s: b"x" * 300, "is no saved sequence"),
        (lambda s: s[:-1], "is truncated"),
        (lambda s: s[:40], "is no saved sequence"),
        (lambda s: s + b"\0", "is damaged"),
        (lambda s: damage(s, len(s) // 2), "is damaged"),
        (lambda s: damage(s, 17), "of another model"),
    ],
    ids=["empty", "noise", "truncated", "header-only", "longer", "bit-in-body", "other-model"],
)
def test_bad_state_is_refused(
    clean: NativeEngine, prompt: list[int], change: Callable[[bytes], bytes], message: str
) -> None:
    clean.prefill(0, prompt)
    clean.prefill(1, prompt[:5])
    with pytest.raises(ArgumentError, match=message):
        clean.restore(1, change(clean.save(0)))
    assert clean.length(1) == 5


def test_state_of_another_kind_of_engine_is_refused(
    model_path: Path, clean: NativeEngine, prompt: list[int]
) -> None:
    clean.prefill(0, prompt)
    state = clean.save(0)
    refusals = [
        ({"slots": 2}, ArgumentError, "by an engine of 3 sequences; this one has 2"),
        ({"mtp": False}, ArgumentError, "saved with MTP, the engine was opened without it"),
        ({"n_ctx": 16}, ContextError, f"holds {len(prompt)} tokens; its context has 16"),
        ({"cache_type_k": "f32"}, ArgumentError, "does not fit sequence 0"),
    ]
    for options, kind, message in refusals:
        with open_native(model_path, **({"slots": 3} | options)) as other:
            with pytest.raises(kind, match=message):
                other.restore(0, state)
            other.prefill(0, prompt[:16])  # still of use


# ---- abort ------------------------------------------------------------------------------------------


def abort_soon(engine: NativeEngine, seconds: float) -> threading.Thread:
    """Aborts from another thread."""
    thread = threading.Timer(seconds, engine.abort)
    thread.start()
    return thread


def test_abort_ends_a_running_prefill_and_costs_nothing_else(
    model_path: Path, clean: NativeEngine, prompt: list[int]
) -> None:
    tokens = prompt * 8
    plain = Plain(clean, 0, tokens[:129], 1)
    with open_native(model_path, n_batch=128) as other:
        other.prefill(0, tokens[:128])
        began = time.perf_counter()
        thread = abort_soon(other, 0.02)
        with pytest.raises(AbortedError):
            while True:
                other.prefill(0, tokens[128:384])
                assert time.perf_counter() - began < 60
                other.reset(0)
                other.prefill(0, tokens[:128])
        thread.join()
        # Whole batches are kept.
        assert other.length(0) % 128 == 0
        if other.length(0) != 128:
            other.reset(0)
            other.prefill(0, tokens[:128])
        assert_logits(step_plain(other, 0, tokens[128]), plain.logits[0], "after the abort")


def test_abort_of_a_verify_leaves_the_sequence(clean: NativeEngine, prompt: list[int]) -> None:
    plain = Plain(clean, 0, prompt, 2)
    clean.prefill(0, prompt[:-1])
    for _ in range(200):
        thread = abort_soon(clean, random.random() * 0.004)
        try:
            for _ in range(50):
                clean.verify([chain(0, [prompt[-1], 1, 2, 3, 4, 5, 6, 7])])
        except AbortedError:
            break
        finally:
            thread.join()
    assert clean.length(0) == len(prompt) - 1
    try:
        clean.verify([chain(0, [prompt[-1], plain.tokens[0]])])
    except AbortedError:  # the abort came after the last call
        clean.verify([chain(0, [prompt[-1], plain.tokens[0]])])
    for node in range(2):
        assert_logits(clean.logits(0, node), plain.logits[node], f"node {node}")


def test_abort_between_calls_ends_the_next(clean: NativeEngine, prompt: list[int]) -> None:
    clean.abort()
    with pytest.raises(AbortedError):
        clean.prefill(0, prompt)
    clean.prefill(0, prompt)
    clean.abort()
    with pytest.raises(AbortedError):
        mtp_chain(clean, [0], [1], 1)
    mtp_chain(clean, [0], [1], 1)


# ---- sampling ---------------------------------------------------------------------------------------


def draws(engine: NativeEngine, sampler: NativeSampler, n: int) -> list[int]:
    """n draws at the root of slot 0's tree."""
    return [engine.sample(sampler, 0, 0) for _ in range(n)]


@pytest.fixture
def at_root(clean: NativeEngine, prompt: list[int]) -> NativeEngine:
    """The shared engine with a tree of one node in slot 0."""
    clean.prefill(0, prompt[:30])
    clean.verify([chain(0, [prompt[30]])])
    return clean


SAMPLINGS = {
    "greedy": GREEDY,
    "plain": SamplingConfig(temperature=1, top_k=0, top_p=1, min_p=0, seed=1),
    "all": SamplingConfig(
        temperature=1.5,
        top_k=80,
        top_p=0.98,
        min_p=0.01,
        typical_p=0.97,
        repeat_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        penalty_last_n=16,
        logit_bias={5: 2.0},
        seed=4,
    ),
    "whole-context": SamplingConfig(temperature=1, repeat_penalty=1.3, penalty_last_n=-1, seed=2),
    "grammar": SamplingConfig(temperature=2, seed=3, grammar="root ::= [a-z ]+"),
    "grammar-no-top-k": SamplingConfig(temperature=2, seed=3, top_k=0, grammar="root ::= [a-z ]+"),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_same_seed_same_tokens(at_root: NativeEngine, name: str) -> None:
    first, second = (at_root.sampler(SAMPLINGS[name]) for _ in range(2))
    tokens = draws(at_root, first, 40)
    assert draws(at_root, second, 40) == tokens
    first.reset()
    assert draws(at_root, first, 40) == tokens


@pytest.mark.parametrize("name", SAMPLINGS)
def test_clone_draws_what_the_original_would(at_root: NativeEngine, name: str) -> None:
    sampler = at_root.sampler(SAMPLINGS[name])
    draws(at_root, sampler, 13)
    copy = sampler.clone()
    expected = draws(at_root, sampler, 30)
    sampler.close()
    assert draws(at_root, copy, 30) == expected


def test_no_seed_means_another_every_time(at_root: NativeEngine) -> None:
    config = SamplingConfig(temperature=3, top_k=0, top_p=1, min_p=0)
    first, second = (at_root.sampler(config) for _ in range(2))
    tokens = draws(at_root, first, 30)
    assert draws(at_root, second, 30) != tokens
    first.reset()
    assert draws(at_root, first, 30) == tokens  # but a reset repeats


def test_greedy_takes_the_best(at_root: NativeEngine) -> None:
    logits = at_root.logits(0, 0)
    config = SamplingConfig(temperature=0, top_k=1, top_p=0.01, typical_p=0.01, min_p=0.99)
    assert draws(at_root, at_root.sampler(config), 3) == [int(logits.argmax())] * 3
    best = int(logits.argmax())
    biased = SamplingConfig(temperature=0, logit_bias={best: -100.0})
    logits[best] -= 100
    assert draws(at_root, at_root.sampler(biased), 1) == [int(logits.argmax())]


def test_sampling_follows_the_probabilities(at_root: NativeEngine) -> None:
    n = 20000
    config = SamplingConfig(temperature=0.7, top_k=5, top_p=1, min_p=0, seed=0)
    tokens, counts = np.unique(draws(at_root, at_root.sampler(config), n), return_counts=True)
    logits = at_root.logits(0, 0).astype(np.float64) / 0.7
    best = np.argsort(-logits)[:5]
    probs = np.exp(logits[best] - logits[best].max())
    expected = dict(zip(best.tolist(), probs / probs.sum(), strict=True))
    assert set(tokens.tolist()) <= set(expected)
    for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        deviation = (expected[token] * (1 - expected[token]) / n) ** 0.5
        assert abs(count / n - expected[token]) < 5 * deviation + 1e-9, f"share of token {token}"


def test_penalties_see_prompt_and_draws(at_root: NativeEngine) -> None:
    logits = at_root.logits(0, 0)
    best, second = np.argsort(-logits)[:2].tolist()
    config = SamplingConfig(temperature=0, presence_penalty=50.0, penalty_last_n=64)
    assert draws(at_root, at_root.sampler(config), 2) == [best, second]
    sampler = at_root.sampler(config)
    sampler.accept_prompt([best])
    assert draws(at_root, sampler, 1) == [second]


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("top_k", [0, 40])
def test_grammar_shapes_the_text(
    clean: NativeEngine, prompt: list[int], temperature: float, top_k: int
) -> None:
    grammar = 'root ::= "{" [0-9]{3} ("," [0-9]{3})? "}"'
    config = SamplingConfig(temperature=temperature, top_k=top_k, seed=5, grammar=grammar)
    sampler = clean.sampler(config)
    clean.prefill(0, prompt[:-1])
    token, out = prompt[-1], b""
    for _ in range(20):
        clean.verify([chain(0, [token])])
        token = clean.sample(sampler, 0, 0)
        clean.commit(0, [0])
        if clean.is_eog(token):
            break
        out += clean.token_to_piece(token)
    assert clean.is_eog(token)
    digits = out.decode().strip("{}").split(",")
    assert out[:1] == b"{" and out[-1:] == b"}"
    assert 1 <= len(digits) <= 2 and all(len(d) == 3 and d.isdigit() for d in digits)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a', "grammar does not parse: unexpected end of input"),
        ("nonsense", "grammar does not parse: expecting ::="),
        ('top ::= "a"', "grammar has no rule 'root'"),
        ("root ::= missing", "rule 'missing' is not defined"),
        ('root ::= root "a" | "b"', "grammar is refused: unsupported grammar, left recursion"),
        ("# nothing\n", "grammar has no rule 'root'"),
    ],
)
def test_bad_grammar_is_refused(
    engine: NativeEngine, capfd: pytest.CaptureFixture[str], grammar: str, message: str
) -> None:
    with pytest.raises(SamplerError, match=message):
        engine.sampler(SamplingConfig(grammar=grammar))
    assert capfd.readouterr().err == ""


def test_a_grammar_that_nothing_satisfies_is_reported(at_root: NativeEngine) -> None:
    bias = {token: float("-inf") for token in range(at_root.info.n_vocab)}
    for temperature in (0, 1):
        sampler = at_root.sampler(SamplingConfig(temperature=temperature, logit_bias=bias))
        with pytest.raises(SamplerError, match="rejects every token"):
            draws(at_root, sampler, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {-1: 1.0}}, "logit_bias entry is token -1"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias entry is token 1000000"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of token 1"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias of token 1"),
        ({"json_schema": "{}"}, "json_schema must be turned into a grammar"),
    ],
)
def test_bad_sampling_is_refused(engine: NativeEngine, options: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        engine.sampler(SamplingConfig(**options))


@pytest.mark.parametrize("config", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("stop", [False, True], ids=["", "stop-eog"])
def test_accept_equals_the_reference_walk(
    clean: NativeEngine, prompt: list[int], config: SamplingConfig, stop: bool
) -> None:
    end = clean.info.token_eos
    chance = random.Random(0)
    bias = replace(config, logit_bias={end: 6.0})
    clean.prefill(0, prompt[:20])
    native, reference = clean.sampler(bias), clean.sampler(bias)
    lengths = set()
    for step in range(60):
        guess = reference.clone()
        root = prompt[20 + step % 30]
        # Drafts that are often right: what a copy of the sampler draws on the way.
        drafts: list[int] = []
        for _ in range(chance.randint(0, 7)):
            clean.verify([chain(0, [root, *drafts])])
            drafts.append(clean.sample(guess, 0, len(drafts)))
        if drafts and chance.random() < 0.5:
            drafts[chance.randrange(len(drafts))] = chance.randrange(clean.info.n_vocab)
        clean.verify([chain(0, [root, *drafts])])
        most = chance.randint(1, 8)
        tree = DraftTree.chain([root, *drafts])
        expected = accept(
            tree,
            lambda node: clean.sample(reference, 0, node),
            max_tokens=most,
            stop_tokens=frozenset({end}) if stop else frozenset(),
        )
        nodes, bonus = clean.accept(native, 0, most, stop)
        assert (tuple(nodes), bonus) == (expected.nodes, expected.bonus_token), f"step {step}"
        lengths.add(len(nodes))
    assert len(lengths) > 3


@pytest.mark.parametrize("config", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_speculation_emits_what_plain_decoding_emits(
    clean: NativeEngine, prompt: list[int], config: SamplingConfig
) -> None:
    outputs = []
    for depth in (0, 1, 3, 7):
        clean.reset(0)
        clean.prefill(0, prompt[:-1])
        sampler, root, out = clean.sampler(config), prompt[-1], []
        while len(out) < 150:
            drafts = mtp_chain(clean, [0], [root], depth)[0][0, :, 0].tolist() if depth else []
            tokens = [root, *drafts]
            clean.verify([chain(0, tokens)])
            nodes, bonus = clean.accept(sampler, 0, 150 - len(out), False)
            clean.commit(0, nodes)
            out += [*(tokens[node] for node in nodes[1:]), bonus]
            root = bonus
        outputs.append(out)
    assert outputs[1:] == outputs[:1] * 3


# ---- MTP --------------------------------------------------------------------------------------------


def test_mtp_agrees_with_the_target(clean: NativeEngine, prompt: list[int]) -> None:
    plain = Plain(clean, 0, prompt, 200)
    clean.prefill(0, prompt[:-1])
    roots, hits = [prompt[-1], *plain.tokens], 0
    for root, token in pairwise(roots):
        hits += int(mtp_chain(clean, [0], [root], 1)[0][0, 0, 0]) == token
        step_plain(clean, 0, root)
    assert hits / 200 > 0.4


def test_mtp_after_rollback_equals_a_fresh_prefill(clean: NativeEngine, prompt: list[int]) -> None:
    chance = random.Random(1)
    tokens = prompt + Plain(clean, 0, prompt, 90).tokens
    for slot in range(2):
        clean.prefill(slot, prompt[:-1])
    for at in walk_with_drafts(clean, 0, tokens, len(prompt) - 1, chance):
        for i in range(clean.length(1), at):
            step_plain(clean, 1, tokens[i])
        plainly = mtp_chain(clean, [1], [tokens[at]], 4, 3)
        clean.reset(2)
        clean.prefill(2, tokens[:at])
        freshly = mtp_chain(clean, [2], [tokens[at]], 4, 3)
        actual = mtp_chain(clean, [0], [tokens[at]], 4, 3)
        np.testing.assert_array_equal(actual[0][:, :, 0], plainly[0][:, :, 0], "draft tokens")
        assert_close(actual[1], plainly[1], 2e-3, f"log_probs at {at}, plain")
        # A pass of many columns computes in another order than passes of few.
        assert_close(actual[1][:, 0], freshly[1][:, 0], 0.1, f"log_probs at {at}, fresh")


def assert_close(actual: NDArray, expected: NDArray, tolerance: float, what: str) -> None:
    """Equal up to a difference."""
    difference = float(np.abs(actual - expected).max())
    assert difference < tolerance, f"{what} differ by {difference}"


def walk_with_drafts(
    engine: NativeEngine, slot: int, tokens: list[int], at: int, chance: random.Random
) -> Iterator[int]:
    """Steps along known tokens with wrong drafts behind the right ones, drafting now and then."""
    while at + 9 < len(tokens):
        right, wrong = chance.randint(0, 3), chance.randint(0, 4)
        if chance.random() < 0.6:
            mtp_chain(engine, [slot], [tokens[at]], chance.randint(1, 5))
        drafts = tokens[at + 1 : at + 1 + right] + [chance.randrange(500) for _ in range(wrong)]
        engine.verify([chain(slot, [tokens[at], *drafts])])
        engine.commit(slot, range(right + 1))
        at += right + 1
        yield at


def test_mtp_drafts_for_several_sequences_as_for_each(
    clean: NativeEngine, prompt: list[int]
) -> None:
    parts = [prompt[:40], prompt[5:12], prompt[:1]]
    for slot, part in enumerate(parts):
        clean.prefill(slot, part[:-1])
    roots = [part[-1] for part in parts]
    alone = [mtp_chain(clean, [slot], [roots[slot]], 5, 4) for slot in range(3)]
    for order in ([0, 1, 2], [2, 0], [1]):
        tokens, log_probs = mtp_chain(clean, order, [roots[slot] for slot in order], 5, 4)
        assert tokens.shape == log_probs.shape == (len(order), 5, 4)
        for row, slot in enumerate(order):
            assert_close(log_probs[row], alone[slot][1][0], 2e-3, f"log_probs of {slot}")
            np.testing.assert_array_equal(tokens[row, :, 0], alone[slot][0][0, :, 0])


def test_mtp_log_probs_are_of_a_softmax_in_order(clean: NativeEngine, prompt: list[int]) -> None:
    clean.prefill(0, prompt[:-1])
    vocabulary = clean.info.n_vocab
    tokens, log_probs = mtp_chain(clean, [0], [prompt[-1]], 2, vocabulary)
    for level in range(2):
        assert sorted(tokens[0, level].tolist()) == list(range(vocabulary))
        assert np.all(np.diff(log_probs[0, level]) <= 0)
        assert np.exp(log_probs[0, level].astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)
    few, few_probs = mtp_chain(clean, [0], [prompt[-1]], 2, 3)
    np.testing.assert_array_equal(few, tokens[:, :, :3])
    np.testing.assert_allclose(few_probs, log_probs[:, :, :3], atol=1e-5)


def test_mtp_catches_up_after_long_plain_decoding(model_path: Path, prompt: list[int]) -> None:
    tokens = (prompt * 10)[:501]
    with open_native(model_path, slots=2, nodes=64) as engine:
        for at in range(0, 480, 60):
            for slot in range(2):
                engine.verify([chain(slot, tokens[at : at + 60])])
                engine.commit(slot, range(60))
            mtp_chain(engine, [1], [tokens[at + 60]], 1)  # this one keeps up
        first, second = (mtp_chain(engine, [slot], [tokens[480]], 3, 2) for slot in range(2))
        np.testing.assert_array_equal(first[0][:, :, 0], second[0][:, :, 0])
        assert_close(first[1], second[1], 0.1, "log_probs")


def test_mtp_stops_at_the_end_of_the_context(model_path: Path, prompt: list[int]) -> None:
    with open_native(model_path, n_ctx=32) as engine:
        engine.prefill(0, prompt[:28])
        mtp_chain(engine, [0], [1], 4)
        with pytest.raises(ContextError, match="holds 28 tokens; 5 more exceed its context of 32"):
            mtp_chain(engine, [0], [1], 5)


# ---- limits and errors ------------------------------------------------------------------------------


def test_context_is_used_to_its_last_token(model_path: Path, prompt: list[int]) -> None:
    with open_native(model_path, n_ctx=32) as engine:
        assert engine.info.n_ctx == 32
        engine.prefill(0, prompt[:28])
        engine.verify([chain(0, prompt[28:32])])
        engine.commit(0, range(4))
        assert engine.length(0) == 32
        with pytest.raises(ContextError, match="holds 32 tokens; 1 more exceed its context of 32"):
            engine.verify([chain(0, [1])])
        with pytest.raises(ContextError, match="holds 32 tokens; 2 more"):
            engine.prefill(0, [1, 2])
        engine.reset(0)
        with pytest.raises(ContextError, match="holds 0 tokens; 33 more"):
            engine.prefill(0, prompt[:33])
        assert engine.length(0) == 0


@pytest.mark.parametrize(
    ("slot", "tokens", "parents", "message"),
    [
        (0, [], [], "has 0 nodes; at least the root"),
        (0, [1] * 9, range(-1, 8), "has 9 nodes; the engine was opened for 8"),
        (0, [1, 2], [0, 0], "the root has parent 0; it must be -1"),
        (1, [1, 2, 3], [-1, 0, 2], "tree of sequence 1: node 2 has parent 2; a parent must come"),
        (0, [1, 2], [-1, -1], "node 1 has parent -1"),
        (0, [1, 2], [-1, 5], "node 1 has parent 5"),
        (0, [1, -2], [-1, 0], "node 1 has token -2; the vocabulary"),
        (0, [10**6], [-1], "node 0 has token 1000000"),
        (0, [1, 2, 3], [-1, 0], "3 tokens and 2 parents"),
    ],
)
def test_bad_tree_is_refused(
    clean: NativeEngine, slot: int, tokens: list[int], parents: list[int], message: str
) -> None:
    with pytest.raises(TreeError, match=message):
        clean.verify([(slot, tokens, list(parents))])


@pytest.mark.parametrize("slot", [-1, 3, 2**31 - 1])
@pytest.mark.parametrize(
    "call",
    [
        lambda e, s: e.length(s),
        lambda e, s: e.reset(s),
        lambda e, s: e.copy(s, 0),
        lambda e, s: e.copy(0, s),
        lambda e, s: e.save(s),
        lambda e, s: e.restore(s, b""),
        lambda e, s: e.prefill(s, [1]),
        lambda e, s: e.verify([(s, [1], [-1])]),
        lambda e, s: e.commit(s, [0]),
        lambda e, s: e.logits(s, 0),
        lambda e, s: e.hidden(s, 0),
        lambda e, s: mtp_chain(e, [s], [1], 1),
        lambda e, s: e.accept(e.sampler(GREEDY), s, 1),
        lambda e, s: e.sample(e.sampler(GREEDY), s, 0),
    ],
    ids=[
        *("length", "reset", "copy-from", "copy-to", "save", "restore", "prefill"),
        *("verify", "commit", "logits", "hidden", "draft", "accept", "sample"),
    ],
)
def test_slot_that_does_not_exist(
    clean: NativeEngine, call: Callable[[NativeEngine, int], object], slot: int
) -> None:
    with pytest.raises(ArgumentError, match=f"there is no sequence {slot}; the engine was opened"):
        call(clean, slot)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda e: e.verify([]), ArgumentError, "verify of 0 trees"),
        (lambda e: e.verify([(0, [1], [-1])] * 2), ArgumentError, "sequence 0 has two trees"),
        (lambda e: e.verify([(0, [1], [-1])] * 4), ArgumentError, "verify of 4 trees"),
        (lambda e: e.commit(0, [0]), StateError, "has no uncommitted tree"),
        (lambda e: e.logits(0, 0), StateError, "has no uncommitted tree"),
        (lambda e: e.hidden(0, 0), StateError, "has no uncommitted tree"),
        (lambda e: e.accept(e.sampler(GREEDY), 0, 1), StateError, "has no uncommitted tree"),
        (lambda e: e.prefill(0, [1, -1]), ArgumentError, "token -1 at index 1"),
        (lambda e: e.prefill(0, [10**6]), ArgumentError, "token 1000000 at index 0"),
        (lambda e: mtp_chain(e, [], [], 1), ArgumentError, "draft for 0 sequences"),
        (lambda e: mtp_chain(e, [0, 0], [1, 1], 1), ArgumentError, "named twice"),
        (lambda e: mtp_chain(e, [0], [1, 2], 1), ArgumentError, "1 slots has 2 roots"),
        (lambda e: mtp_chain(e, [0], [-1], 1), ArgumentError, "root of the draft is token -1"),
        (lambda e: mtp_chain(e, [0], [1], 0), ArgumentError, "depth is 0"),
        (lambda e: mtp_chain(e, [0], [1], 65), ArgumentError, "depth is 65"),
        (lambda e: mtp_chain(e, [0], [1], 1, 0), ArgumentError, "top_k is 0"),
        (lambda e: mtp_chain(e, [0], [1], 1, 10**6), ArgumentError, "top_k is 1000000"),
        (lambda e: e.token_to_piece(-1), ArgumentError, "token_to_piece is token -1"),
        (lambda e: e.sampler(GREEDY).accept_prompt([-1]), ArgumentError, "prompt of the sampler"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_bad_call_is_refused(
    clean: NativeEngine,
    call: Callable[[NativeEngine], object],
    kind: type[PyspecError],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        call(clean)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "path of sequence 0 has 0 nodes"),
        ([1], "must start at the root"),
        ([0, 2], "node 2 is no child of node 0"),
        ([0, 1, 1], "node 1 is no child of node 1"),
        ([0, 9], "node 9 is not in its tree of 3"),
        ([0, -1], "node -1 is not in its tree"),
        ([0, 1, 2, 0], "has 4 nodes; its tree has 3"),
        (range(100), "has 100 nodes"),
    ],
)
def test_bad_path_is_refused_and_changes_nothing(
    clean: NativeEngine, path: list[int], message: str
) -> None:
    clean.prefill(0, [1, 2, 3])
    clean.verify([chain(0, [4, 5, 6])])
    with pytest.raises(ArgumentError, match=message):
        clean.commit(0, list(path))
    for node in (-1, 3):
        with pytest.raises(ArgumentError, match=f"there is no node {node} in its tree of 3"):
            clean.logits(0, node)
    clean.commit(0, [0, 1])
    assert clean.length(0) == 5


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        (0, {}, "max_nodes is 0; it must be 1 to 64"),
        (65, {}, "max_nodes is 65"),
        (8, {"n_threads": 100000}, "n_threads is 100000"),
        (8, {"n_ctx": 2**31}, "more than llama.cpp can address"),
        (8, {"n_batch": 2**31}, "out of range"),
    ],
)
def test_bad_engine_options_are_refused(
    model_path: Path, nodes: int, options: dict, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_native(model_path, nodes=nodes, **options)


def test_quantized_cache_of_odd_width_is_refused_with_the_reason(model_path: Path) -> None:
    # q8_0 works where heads are multiples of 32; without flash attention V cannot be quantized.
    with pytest.raises(PyspecError, match=r"[Ff]lash"):
        open_native(model_path, cache_type_v="q8_0", flash_attn=False)


# ---- files ------------------------------------------------------------------------------------------


def rewritten(source: Path, target: Path, drop: Callable[[str], bool], **values: object) -> Path:
    """A copy of a GGUF file without some tensors, with some metadata values changed."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    arch = reader.get_field("general.architecture").contents()
    writer = GGUFWriter(target, values.pop("arch", arch))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = values.get(name.rpartition(".")[2], field.contents())
        sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        if not drop(tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture
def bad_file(request: pytest.FixtureRequest, model_path: Path, tmp_path: Path) -> Path:
    """A file that is not what it should be."""
    target = tmp_path / f"{request.param}.gguf"
    data = model_path.read_bytes()
    match request.param:
        case "directory":
            target.mkdir()
        case "empty":
            target.write_bytes(b"")
        case "text":
            target.write_text("not a model\n" * 100)
        case "header":
            target.write_bytes(data[:100])
        case "metadata":
            target.write_bytes(data[:10000])
        case "tensors":
            target.write_bytes(data[: len(data) * 2 // 3])
        case "version":
            target.write_bytes(data[:4] + struct.pack("<I", 99) + data[8:])
        case "architecture":
            rewritten(model_path, target, lambda name: False, arch="qwenXX")
        case "no-tensors":
            rewritten(model_path, target, lambda name: True)
        case "tensor-missing":
            rewritten(model_path, target, lambda name: name == "blk.1.ssm_conv1d.weight")
        case "mtp-only":
            block = f"blk.{trunk_layers(model_path)}."
            trunk = lambda name: name.startswith("blk.") and not name.startswith(block)  # noqa: E731
            rewritten(model_path, target, trunk)
    return target


def trunk_layers(path: Path) -> int:
    """Layers without MTP blocks."""
    from gguf import GGUFReader

    return int(GGUFReader(path).get_field("qwen35.block_count").contents()) - 1


@pytest.mark.parametrize(
    ("bad_file", "message"),
    [
        ("missing", "No such file"),
        ("directory", "not a regular file"),
        ("empty", "not a GGUF file"),
        ("text", "not a GGUF file"),
        ("header", "failed to read key-value pairs"),
        ("metadata", "failed to read key-value pairs"),
        ("tensors", "data is not within the file bounds, model is corrupted or incomplete"),
        ("version", "GGUF file is version 99"),
        ("architecture", "unknown model architecture: 'qwenXX'"),
        ("no-tensors", "tensor 'token_embd.weight' not found"),
        ("tensor-missing", "tensor 'blk.1.ssm_conv1d.weight' not found"),
        ("mtp-only", "holds MTP blocks only, without the trunk"),
    ],
    indirect=["bad_file"],
)
def test_bad_file_is_refused_with_name_and_reason(
    bad_file: Path, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match=f"{bad_file.name}.*: .*{message}"):
        open_native(bad_file, mtp=False)
    assert capfd.readouterr().err == ""


def test_file_without_mtp_block(model_path: Path, tmp_path: Path, prompt: list[int]) -> None:
    layers = trunk_layers(model_path)
    path = rewritten(
        model_path,
        tmp_path / "trunk.gguf",
        lambda name: name.startswith(f"blk.{layers}."),
        block_count=layers,
        nextn_predict_layers=0,
        recurrent_layers=[(i + 1) % 4 != 0 for i in range(layers)],
    )
    with pytest.raises(DraftError, match=r"trunk\.gguf has no MTP block"):
        open_native(path)
    with open_native(path, mtp=False) as engine:
        assert engine.info.n_layer_mtp == 0
        engine.prefill(0, prompt)
        engine.verify([chain(0, [1, 2])])
        with pytest.raises(DraftError, match="opened without mtp"):
            mtp_chain(engine, [0], [1], 1)
        with pytest.raises(StateError, match="hidden states are kept only"):
            engine.hidden(0, 0)


def test_file_name_that_is_not_utf8(model_path: Path, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xf6del.gguf"))
    shutil.copyfile(model_path, path)
    open_native(path).close()


def test_progress_is_reported_and_may_give_up(model_path: Path) -> None:
    seen: list[float] = []
    config = EngineConfig(n_ctx=64, n_threads=1)
    NativeEngine.open(model_path, config, progress=seen.append).close()
    assert seen == sorted(seen) and seen[-1] == 1.0
    with pytest.raises(AbortedError, match="loading was given up"):
        NativeEngine.open(model_path, config, progress=lambda fraction: False)

    def fail(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        NativeEngine.open(model_path, config, progress=fail)


# ---- life -------------------------------------------------------------------------------------------


def test_engines_share_a_model(model_path: Path, prompt: list[int]) -> None:
    first = open_native(model_path)
    plain = Plain(first, 0, prompt, 3)
    second = NativeEngine.attach(first, EngineConfig(n_ctx=128, n_threads=1), max_nodes=4, mtp=True)
    assert second.model_address == first.model_address
    first.close()  # the model lives on
    second.prefill(0, prompt[:-1])
    second.verify([chain(0, [prompt[-1], *plain.tokens[:2]])])
    for node in range(3):
        assert_logits(second.logits(0, node), plain.logits[node], f"node {node}")
    second.close()


def test_attaching_to_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="llama_model to attach to is NULL"):
        NativeEngine.attach(0, EngineConfig())
    with pytest.raises(ArgumentError, match=r"str is no llama_cpp\.Llama"):
        NativeEngine.attach("model.gguf", EngineConfig())


def test_attaches_to_a_llama_cpp_llama(
    model_path: Path, clean: NativeEngine, prompt: list[int]
) -> None:
    from pyspec._libs import use_patched_libraries

    plain = Plain(clean, 0, prompt, 4)
    llama = use_patched_libraries().Llama(
        str(model_path), n_ctx=64, n_threads=1, logits_all=True, verbose=False
    )
    llama.eval(prompt)
    before = np.array(llama.scores[: len(prompt)])
    with NativeEngine.attach(llama, EngineConfig(n_ctx=128, n_threads=1), max_nodes=4) as engine:
        engine.prefill(0, prompt[:-1])
        engine.verify([chain(0, [prompt[-1], *plain.tokens[:3]])])
        for node in range(4):
            assert_logits(engine.logits(0, node), plain.logits[node], f"node {node}")
        with pytest.raises(DraftError, match="attached model has no MTP block loaded"):
            NativeEngine.attach(llama, EngineConfig(n_ctx=128), mtp=True)
    llama.reset()  # and is as it was
    llama.eval(prompt)
    np.testing.assert_array_equal(llama.scores[: len(prompt)], before, "logits of the Llama")
    llama.close()


def test_reasons_are_found_beside_llama_cpp(
    tmp_path: Path, model_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from pyspec._libs import use_patched_libraries

    llama_cpp = use_patched_libraries()  # sets a log callback of its own
    path = tmp_path / "cut.gguf"
    path.write_bytes(model_path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="model is corrupted or incomplete"):
        open_native(path)
    seen: list[bytes] = []

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, user: object) -> None:
        seen.append(text)

    llama_cpp.llama_log_set(log, None)
    with pytest.raises(ModelError, match="model is corrupted or incomplete"):
        open_native(path)
    assert not seen  # ours go into the exception
    assert not llama_cpp.llama_model_load_from_file(
        bytes(path), llama_cpp.llama_model_default_params()
    )
    assert seen  # theirs go where they went
    llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, None)
    assert "error" not in capfd.readouterr().err


def test_use_after_close_is_refused(model_path: Path) -> None:
    engine = open_native(model_path)
    sampler = engine.sampler(GREEDY)
    info = engine.info
    engine.close()
    engine.close()
    assert engine.closed and engine.info == info
    for call in (lambda: engine.length(0), lambda: engine.tokenize("x"), engine.abort):
        with pytest.raises(StateError, match="the engine is closed"):
            call()
    sampler.clone().close()  # needs no engine
    sampler.close()
    with pytest.raises(StateError, match="the sampler is closed"):
        sampler.reset()


def test_close_ends_a_call_in_another_thread(model_path: Path, prompt: list[int]) -> None:
    engine = open_native(model_path, n_ctx=4000, n_batch=4096)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(1000):
                engine.prefill(0, (prompt * 60)[:3500])
                engine.reset(0)
        except PyspecError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    engine.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert isinstance(errors[0], AbortedError | StateError)


def test_calls_release_the_gil(model_path: Path, prompt: list[int]) -> None:
    with open_native(model_path, n_ctx=4000, n_batch=4096, n_ubatch=4096) as engine:
        ticks = 0
        done = threading.Event()
        thread = threading.Thread(
            target=lambda: (engine.prefill(0, (prompt * 60)[:3500]), done.set())
        )
        thread.start()
        while not done.wait(0.002):
            ticks += 1
        thread.join()
        assert ticks > 3


@pytest.mark.parametrize("ending", ["", "del engine", "sys.exit(3)", "engine.close()", "1 / 0"])
def test_interpreter_exit_does_not_crash(model_path: Path, ending: str) -> None:
    code = f"""
import sys
from pyspec.config import EngineConfig, SamplingConfig
from pyspec.native import NativeEngine
engine = NativeEngine.open({str(model_path)!r}, EngineConfig(n_ctx=64, n_threads=2), mtp=True)
sampler = engine.sampler(SamplingConfig())
engine.prefill(0, [1, 2, 3])
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = {"sys.exit(3)": 3, "1 / 0": 1}.get(ending, 0)
    assert done.returncode == expected, done.stderr
    assert done.stderr == "" or ending == "1 / 0"


def test_exit_with_a_running_daemon_thread_does_not_crash(model_path: Path) -> None:
    code = f"""
import threading, time
from pyspec.config import EngineConfig
from pyspec.native import NativeEngine
engine = NativeEngine.open({str(model_path)!r}, EngineConfig(n_ctx=4000, n_threads=1))
threading.Thread(target=lambda: engine.prefill(0, [5] * 3900), daemon=True).start()
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_engine_is_freed_by_the_collector(model_path: Path) -> None:
    engine = open_native(model_path)
    handle = engine._handle
    del engine
    gc.collect()
    assert handle.closed


def test_timings_add_up(clean: NativeEngine, prompt: list[int]) -> None:
    clean.timings(reset=True)
    began = time.perf_counter()
    clean.prefill(0, prompt)
    mtp_chain(clean, [0], [1], 3)
    clean.verify([chain(0, [1, 2, 3])])
    clean.accept(clean.sampler(RANDOM), 0, 1)
    clean.commit(0, [0])
    spent = 1e6 * (time.perf_counter() - began)
    timings = clean.timings()
    stages = (timings.prefill, timings.draft, timings.verify, timings.sample, timings.commit)
    assert timings.prefill > 0 and timings.draft > 0 and timings.verify > 0
    assert sum(stages) <= spent
    assert timings.n_prefill_tokens == len(prompt)
    assert (timings.n_verify, timings.n_verify_nodes) == (1, 3)
    assert timings.n_draft_passes == 4  # one of the prefill, three of the draft
    assert clean.timings(reset=True) == timings
    assert clean.timings().verify == 0


# ---- interface --------------------------------------------------------------------------------------


def build_cffi():
    """The build script as a module."""
    path = ROOT / "pyspec" / "native" / "build_cffi.py"
    spec = importlib.util.spec_from_file_location("build_cffi", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_header_states_its_own_checksum() -> None:
    script = build_cffi()
    header = script.HEADER.read_text()
    script.check_abi(header)
    assert script.abi(header) == script.abi(header.replace("// one forward", "//  Another comment"))
    changed = header.replace("int32_t token_to", "int64_t token_to").replace("n_nodes;", "n_node;")
    with pytest.raises(SystemExit, match="PYSPEC_ABI must be 0x"):
        script.check_abi(changed)


def test_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale:
        PYSPEC_ABI = binding.lib.PYSPEC_ABI
        pyspec_abi = staticmethod(lambda: 7)
        pyspec_version = binding.lib.pyspec_version

    monkeypatch.setattr(binding, "lib", Stale)
    with pytest.raises(LibraryError, match="has interface 0x7, the extension module was built for"):
        binding.check_library()
