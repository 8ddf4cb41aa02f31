"""accept(): sample-and-match, and what truncation keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec import AcceptedPath, DraftTree, TreeError, accept
from tests.test_tree import trees

#      0:1
#     /    \
#   1:5    2:6
#    |    /   \
#   3:7  4:5  5:8
TREE = DraftTree.from_parents([1, 5, 6, 7, 5, 8], [-1, 0, 0, 1, 2, 2])


@pytest.mark.parametrize(
    ("target", "nodes", "tokens"),
    [
        pytest.param({0: 9}, (0,), (9,), id="nothing-accepted"),
        pytest.param({0: 5, 1: 9}, (0, 1), (5, 9), id="first-child"),
        pytest.param({0: 6, 2: 8, 5: 3}, (0, 2, 5), (6, 8, 3), id="second-branch-to-leaf"),
        pytest.param({0: 6, 2: 5, 4: 7}, (0, 2, 4), (6, 5, 7), id="same-token-other-branch"),
    ],
)
def test_walks(target: dict[int, int], nodes: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    path = accept(TREE, target.__getitem__)
    assert path.nodes == nodes
    assert path.tokens == tokens
    assert path.bonus_token == tokens[-1]
    assert path.accepted == len(nodes) - 1


def test_samples_each_walked_node_once_in_order() -> None:
    asked: list[int] = []

    def sample(node: int) -> int:
        asked.append(node)
        return {0: 6, 2: 8, 5: 3}[node]

    accept(TREE, sample)
    assert asked == [0, 2, 5]


def test_stop_token_ends_the_walk_even_where_a_child_carries_it() -> None:
    path = accept(TREE, {0: 6}.__getitem__, stop_tokens={6})
    assert path == AcceptedPath((0,), (6,))


def test_max_tokens_ends_the_walk() -> None:
    path = accept(TREE, {0: 6, 2: 8}.__getitem__, max_tokens=2)
    assert path == AcceptedPath((0, 2), (6, 8))


@given(trees(), st.randoms())
def test_equals_decoding_token_by_token(tree: DraftTree, random) -> None:
    """The emitted tokens are what a token-by-token decoder would have drawn."""
    target = {
        tuple(tree.path_tokens(node).tolist()): random.randint(0, 40) for node in range(len(tree))
    }
    path = accept(tree, lambda node: target[tuple(tree.path_tokens(node).tolist())])
    context = [int(tree.tokens[0])]
    for token in path.tokens:
        assert token == target[tuple(context)]
        context.append(token)
    assert tuple(context) not in all_of(tree), "the walk ends only where no node matches"


def all_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node).tolist()) for node in range(len(tree))}


@pytest.mark.parametrize(
    ("stop", "remaining", "keep"),
    [(None, None, 3), (2, None, 2), (None, 1, 1), (3, 2, 2), (2, 3, 2), (9, 9, 3)],
)
def test_truncate(stop: int | None, remaining: int | None, keep: int) -> None:
    path = AcceptedPath((0, 2, 5), (6, 8, 3)).truncate(stop, remaining)
    assert path.nodes == (0, 2, 5)[:keep]
    assert path.tokens == (6, 8, 3)[:keep]
    assert path.bonus_token not in path.tokens[:-1], "the last token kept is the new root"


def test_refuses_a_path_that_emits_nothing() -> None:
    with pytest.raises(TreeError, match="cut to 0 tokens"):
        AcceptedPath((0,), (1,)).truncate(0)
    with pytest.raises(TreeError, match="must start at node 0"):
        AcceptedPath((1,), (1,))
    with pytest.raises(TreeError, match="one token per node"):
        AcceptedPath((0,), (1, 2))
