"""What every drafter must keep, whichever it is: run over all that the demo model can feed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

import pyspec.registry
from pyspec import DraftConfig, DraftContext, Drafter, DraftError, DraftTree, Engine, SamplingConfig
from pyspec.accept import AcceptedPath
from pyspec.model_file import ModelFile, resolve_model
from pyspec.registry import choose, offers, registry
from pyspec.sequence import Sequence as Request
from tests.conftest import OpenEngine, SyntheticDrafter
from tests.prompts import FEW

GREEDY = SamplingConfig(temperature=0)
NAMES = ["none", "mtp", "ngram", "draft-model", "dflash", "dspark", "dflash2"]


@pytest.fixture(params=[*NAMES, "mtp-wide"])
def engine(
    request: pytest.FixtureRequest, open_engine: OpenEngine, synthetic_drafter: SyntheticDrafter
) -> Engine:
    limits: dict[str, Any] = {"depth": 4, "top_k": 2, "nodes": 7}
    name = request.param
    if name == "mtp-wide":
        name, limits["width"] = "mtp", 2
    elif name == "draft-model":
        limits["model"] = str(resolve_model("demo"))
    elif name in ("dspark", "dflash2"):
        name, limits["model"] = "dflash", str(synthetic_drafter(name))
    return open_engine(name, **limits, n_slots=3)


def begin(engine: Engine, prompt: bytes | Sequence[int], n: int = 64) -> Request:
    sequence = engine.begin(prompt, max_tokens=n, ignore_end=True, sampling=GREEDY)
    while not engine.prefill(sequence):
        pass
    return sequence


def context(sequence: Request, nodes: int = 7, depth: int = 4) -> DraftContext:
    return DraftContext(sequence.slot, sequence.tokens, nodes, depth)


def commit(engine: Engine, sequence: Request, tree: DraftTree, accepted: int) -> None:
    """Takes `accepted` nodes along the first path of `tree`, whatever the target thinks of them."""
    path = [0]
    while len(path) <= accepted and len(children := tree.children(path[-1])):
        path.append(int(children[0]))
    engine.native.verify([(sequence.slot, tree.tokens, tree.parents)])
    bonus = int(engine.native.logits(sequence.slot, path[-1]).argmax())
    engine.native.commit(sequence.slot, path)
    emitted = (*tree.tokens[path[1:]].tolist(), bonus)
    sequence.tokens.extend(emitted)
    outcome = pyspec.Outcome(sequence.slot, tree, AcceptedPath(tuple(path), emitted))
    engine.drafter.observe([outcome])


def same(one: DraftTree, other: DraftTree) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.parents, other.parents)


@pytest.mark.parametrize("prompt", FEW, ids=repr)
def test_trees_start_at_the_root_and_keep_the_limits(engine: Engine, prompt: bytes) -> None:
    sequence = begin(engine, prompt)
    try:
        for nodes, depth in [(7, 4), (3, 4), (7, 1), (2, 1), (1, 4), (7, 0), (1, 0)]:
            (tree,) = engine.drafter.propose([context(sequence, nodes, depth)])
            assert tree.tokens[0] == sequence.tokens[-1]
            assert len(tree) <= nodes and tree.max_depth <= depth
            assert (tree.log_probs <= 0).all()
            assert tree.tokens.min() >= 0
            assert tree.tokens.max() < engine.native.info.n_vocab
    finally:
        engine.end(sequence)


def test_same_context_gives_the_same_tree(engine: Engine) -> None:
    first, second = begin(engine, FEW[1]), begin(engine, FEW[1])
    try:
        trees = [engine.drafter.propose([context(one)])[0] for one in (first, second, first)]
        together = engine.drafter.propose([context(first), context(second)])
        assert all(same(trees[0], tree) for tree in (*trees, *together))
    finally:
        engine.end(first)
        engine.end(second)


@pytest.mark.parametrize("accepted", range(5))
def test_after_any_acceptance_drafts_equal_a_fresh_start(engine: Engine, accepted: int) -> None:
    """What a drafter keeps of a sequence must not depend on how the sequence came about."""
    sequence = begin(engine, FEW[1])
    try:
        for _ in range(4):
            (tree,) = engine.drafter.propose([context(sequence)])
            commit(engine, sequence, tree, accepted)
        (grown,) = engine.drafter.propose([context(sequence)])
        fresh = begin(engine, sequence.tokens)
        (expected,) = engine.drafter.propose([context(fresh)])
        engine.end(fresh)
        assert same(grown, expected)
    finally:
        engine.end(sequence)


def test_plain_steps_in_between_do_no_harm(engine: Engine) -> None:
    sequence = begin(engine, FEW[1])
    try:
        for depth in (4, 0, 0, 4, 0, 4):
            (tree,) = engine.drafter.propose([context(sequence, depth=depth)])
            commit(engine, sequence, tree, 2)
        commit(engine, sequence, DraftTree.root(sequence.tokens[-1]), 0)  # not asked at all
        (grown,) = engine.drafter.propose([context(sequence)])
        fresh = begin(engine, sequence.tokens)
        (expected,) = engine.drafter.propose([context(fresh)])
        engine.end(fresh)
        assert same(grown, expected)
    finally:
        engine.end(sequence)


def test_it_drafts_whether_it_has_listened_or_not(engine: Engine) -> None:
    sequence = begin(engine, FEW[1])
    first = begin(engine, FEW[2])
    (expected,) = engine.drafter.propose([context(first)])
    engine.end(first)
    try:
        for listens in (True, False, False, True, False, True):
            engine.drafter.listen(listens)
            for _ in range(2):
                (tree,) = engine.drafter.propose([context(sequence)])
                assert tree.tokens[0] == sequence.tokens[-1]
                assert len(tree) <= 7 and tree.max_depth <= 4
                commit(engine, sequence, tree, 1)
                commit(engine, sequence, DraftTree.root(sequence.tokens[-1]), 0)
        again = begin(engine, FEW[2])
        (tree,) = engine.drafter.propose([context(again)])
        engine.end(again)
        assert same(tree, expected)
    finally:
        engine.drafter.listen(True)
        engine.end(sequence)


def test_a_slot_keeps_nothing_of_its_last_sequence(engine: Engine) -> None:
    first = begin(engine, FEW[2])
    (expected,) = engine.drafter.propose([context(first)])
    engine.end(first)
    other = begin(engine, FEW[1])
    (tree,) = engine.drafter.propose([context(other)])
    commit(engine, other, tree, 1)
    engine.end(other)
    again = begin(engine, FEW[2])
    try:
        assert again.slot == other.slot
        assert same(engine.drafter.propose([context(again)])[0], expected)
    finally:
        engine.end(again)


def test_sequences_do_not_mix(engine: Engine) -> None:
    alone = []
    for prompt in FEW[1:4]:
        sequence = begin(engine, prompt)
        alone.append(engine.drafter.propose([context(sequence)])[0])
        engine.end(sequence)
    together = [begin(engine, prompt) for prompt in FEW[1:4]]
    try:
        trees = engine.drafter.propose([context(sequence) for sequence in together])
        assert all(map(same, trees, alone))
        limits = [context(together[0], 2, 1), context(together[1], 1, 0), context(together[2])]
        mixed = engine.drafter.propose(limits)
        assert [tree.max_depth for tree in mixed[:2]] <= [1, 0]
        assert same(mixed[2], alone[2])
    finally:
        for sequence in together:
            engine.end(sequence)


# ---- registry ----


def test_built_in_drafters_are_found(model) -> None:
    assert {"none", "mtp", "ngram", "draft-model", "dflash", "ddtree"} <= set(registry())
    file = ModelFile.read(model)
    offered = {offer.name for offer in offers(file) if offer.missing is None}
    assert offered >= {"none", "mtp", "ngram"} and "draft-model" not in offered
    assert {kind.name for kind in choose(DraftConfig(), file)} >= {"mtp", "ngram"}
    assert [kind.name for kind in choose(DraftConfig("mtp"), file)] == ["mtp"]


def test_third_parties_register_by_entry_point(
    monkeypatch: pytest.MonkeyPatch, model, plain: Engine
) -> None:
    point = EntryPoint("echo", f"{__name__}:EchoDrafter", pyspec.registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    registry.cache_clear()
    try:
        with Engine(model, DraftConfig("echo", depth=2), share=plain, n_threads=1) as engine:
            found = engine.complete(FEW[1], max_tokens=20, temperature=0, ignore_end=True)
        expected = plain.complete(FEW[1], max_tokens=20, temperature=0, ignore_end=True)
        assert found.tokens == expected.tokens
        assert found.stats.draft == "echo" and found.stats.drafted > 0
    finally:
        registry.cache_clear()


class EchoDrafter(Drafter):
    """Guesses that the last token comes again."""

    name = "echo"

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [DraftTree.chain([one.root] * (1 + min(2, one.max_depth))) for one in contexts]


@pytest.mark.parametrize("target", ["no_such_module:Drafter", "json:JSONDecoder"])
def test_broken_entry_points_are_named(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    point = EntryPoint("broken", target, pyspec.registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    registry.cache_clear()
    try:
        with pytest.raises(DraftError, match=f"'broken' \\({target}\\)"):
            registry()
    finally:
        registry.cache_clear()
