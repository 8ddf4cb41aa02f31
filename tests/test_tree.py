"""DraftTree: construction, refusals, paths, pruning and merging."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec import DraftTree, TreeError, merge
from pyspec.tree import TreeBuilder


@st.composite
def trees(draw: st.DrawFn, root: int = 0, most: int = 24) -> DraftTree:
    """Random trees whose siblings carry distinct tokens."""
    n = draw(st.integers(1, most))
    tokens, parents = [root], [-1]
    for node in range(1, n):
        parent = draw(st.integers(0, node - 1))
        taken = {tokens[i] for i in range(node) if parents[i] == parent}
        token = draw(st.integers(0, 40).filter(lambda t, taken=taken: t not in taken))
        tokens.append(token)
        parents.append(parent)
    scores = [0.0, *draw(st.lists(st.floats(-9, 0, width=32), min_size=n - 1, max_size=n - 1))]
    return DraftTree.from_parents(tokens, parents, scores)


def all_paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node).tolist()) for node in range(len(tree))}


def test_chain() -> None:
    tree = DraftTree.chain([7, 8, 9], source="mtp")
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.depths.tolist() == [0, 1, 2]
    assert tree.is_chain and tree.max_depth == 2
    assert [array.dtype for array in (tree.tokens, tree.parents, tree.depths)] == [np.int32] * 3
    assert tree.sources == (frozenset({"mtp"}),) * 3


def test_root_only() -> None:
    tree = DraftTree.root(5)
    assert len(tree) == 1 and tree.max_depth == 0 and tree.is_chain
    assert tree.child(0, 5) is None


@pytest.mark.parametrize(
    ("tokens", "parents", "depths", "message"),
    [
        pytest.param([], [], [], "0 nodes", id="empty"),
        pytest.param([1] * 65, range(-1, 64), range(65), "65 nodes", id="too-many"),
        pytest.param([1, 2], [-1, 1], [0, 1], "node 1 has parent 1", id="own-parent"),
        pytest.param([1, 2, 3], [-1, 2, 0], [0, 1, 1], "node 1 has parent 2", id="later-parent"),
        pytest.param([1, 2], [-1, -1], [0, 0], "node 1 has parent -1", id="two-roots"),
        pytest.param([1, 2], [0, 0], [0, 1], "node 0 has parent 0", id="no-root"),
        pytest.param([1, 2], [-1, 0], [0, 2], "node 1 has depth 2, must be 1", id="depth-gap"),
        pytest.param([1, 2], [-1], [0, 1], "parents has 1 entries, tokens has 2", id="lengths"),
    ],
)
def test_refuses(tokens: list, parents: list, depths: list, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        DraftTree(
            np.asarray(tokens), np.asarray(parents), np.asarray(depths), np.zeros(len(tokens))
        )


def test_refuses_two_dimensions() -> None:
    with pytest.raises(TreeError, match=r"tokens has shape \(1, 2\)"):
        DraftTree(np.ones((1, 2)), np.zeros(2), np.zeros(2), np.zeros(2))


def test_a_builder_keeps_best_paths() -> None:
    builder = TreeBuilder(5)
    first = builder.add(0, 1, -0.1)
    for token, log_prob in ((2, -2.0), (3, -3.0)):
        builder.add(0, token, log_prob)
    for token, log_prob in ((4, -0.5), (5, -1.0), (6, -4.0)):
        builder.add(first, token, log_prob)
    assert all_paths(builder.best(5)) == {(5,), (5, 1), (5, 1, 4), (5, 1, 5), (5, 2)}


@given(trees(), st.integers(1, 24))
def test_the_best_of_a_builder_are_a_tree_of_the_best_paths(tree: DraftTree, nodes: int) -> None:
    builder = TreeBuilder(int(tree.tokens[0]))
    builder.add_tree(tree)
    whole, part = builder.best(), builder.best(nodes)
    assert all_paths(part) <= all_paths(whole) == all_paths(tree)
    best = np.sort(whole.path_log_probs())[::-1][:nodes]
    np.testing.assert_allclose(np.sort(part.path_log_probs())[::-1], best, rtol=1e-5, atol=1e-5)


@given(trees())
def test_built_trees_obey_the_rules_of_trees(tree: DraftTree) -> None:
    builder = TreeBuilder(int(tree.tokens[0]))
    builder.add_tree(tree, frozenset(["a"]))
    best = builder.best()
    again = DraftTree(best.tokens, best.parents, best.depths, best.log_probs, best.sources)
    assert all_paths(again) == all_paths(best) and again.sources == best.sources


@given(trees())
def test_paths_and_children_agree(tree: DraftTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node
        assert len(path) == tree.depths[node] + 1
        for parent, child in pairwise(path):
            assert child in tree.children(parent)
            assert tree.child(parent, int(tree.tokens[child])) == child


@given(trees(), st.integers(1, 30), st.integers(0, 10))
def test_pruned_is_a_subtree_of_best_paths(tree: DraftTree, nodes: int, depth: int) -> None:
    small = tree.pruned(nodes, depth)
    assert len(small) <= nodes and small.max_depth <= depth
    assert all_paths(small) <= all_paths(tree)
    able = np.sort(tree.path_log_probs()[tree.depths <= depth])[::-1]
    kept = np.sort(small.path_log_probs())[::-1]
    np.testing.assert_allclose(kept, able[: len(kept)], atol=1e-5)


@given(st.lists(trees(), min_size=1, max_size=4))
def test_merge_is_the_union_of_paths(some: list[DraftTree]) -> None:
    union = set().union(*(all_paths(tree) for tree in some))
    merged = merge(some)
    assert all_paths(merged) <= union
    assert len(merged) == min(64, len(union))
    assert len(all_paths(merged)) == len(merged), "no path appears twice"


def test_merge_keeps_sources_and_best_score() -> None:
    mtp = DraftTree.chain([1, 2, 3], [0, -0.1, -0.2])
    ngram = DraftTree.chain([1, 2, 4], [0, -0.5, -0.3])
    merged = merge({"mtp": mtp, "ngram": ngram})
    assert all_paths(merged) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4)}
    shared = merged.child(0, 2)
    assert shared is not None
    assert merged.sources[shared] == {"mtp", "ngram"}
    assert merged.log_probs[shared] == np.float32(-0.1)
    assert merged.sources[merged.child(shared, 4)] == {"ngram"}


def test_merge_refuses_different_roots() -> None:
    with pytest.raises(TreeError, match="start from tokens 1 and 2"):
        merge([DraftTree.root(1), DraftTree.root(2)])
    with pytest.raises(TreeError, match="at least one tree"):
        merge([])


def test_merge_respects_budget() -> None:
    wide = DraftTree.from_parents(range(11), [-1] + [0] * 10, [0, *(-np.arange(10.0))])
    merged = merge([wide], nodes=4)
    assert sorted(merged.tokens[1:].tolist()) == [1, 2, 3]
