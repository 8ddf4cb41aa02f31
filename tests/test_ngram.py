"""`ngram`: what it finds, that it is the reference's, and that it takes constant time a token."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspec.drafts.ngram import NgramDrafter

from pyspec import ArgumentError, DraftConfig, DraftContext, DraftTree, StateError
from pyspec.native.binding import check, ffi, lib
from pyspec.native.ngram import SuffixIndex
from pyspec.reference import ngram as reference

small_texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
repetitive = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), small_texts).map(
    lambda parts: parts[1] + parts[0] * 9
)


def assert_is_reference(tree: DraftTree, tokens: list[int], depth: int, max_nodes: int) -> None:
    expected = reference.tree(tokens, depth, max_nodes)
    assert tree.token_list == expected[0]
    assert tree.parent_list == expected[1]
    assert tree.log_prob_list == pytest.approx(expected[2], abs=1e-6)
    DraftTree(tree.tokens, tree.parents, tree.depths, tree.log_probs)  # checks that it is one


@given(small_texts | repetitive, st.data())
def test_drafts_are_the_references_however_the_text_arrived(tokens: list[int], data) -> None:
    index = SuffixIndex()
    known = 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        depth, nodes = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 20))
        tree = index.draft(tokens[:known], depth, nodes)
        assert_is_reference(tree, tokens[:known], depth, nodes)


@pytest.mark.parametrize("n_vocab", [8, 40])
def test_many_runs_are_kept_apart(n_vocab: int) -> None:
    """More of them than places in a table at first."""
    draw = random.Random(n_vocab)
    text = [draw.randrange(n_vocab) for _ in range(1500)]
    index, found = SuffixIndex(), 0
    for end in range(20, 1500, 37):
        tree = index.draft(text[:end], 4, 16)
        assert_is_reference(tree, text[:end], 4, 16)
        found += len(tree) > 1
    assert found > 10


@given(small_texts | repetitive, st.integers(1, 64), st.integers(1, 64))
def test_drafts_stay_within_their_limits(tokens: list[int], depth: int, nodes: int) -> None:
    tree = SuffixIndex().draft(tokens, depth, nodes)
    assert len(tree) <= nodes and tree.max_depth <= depth
    assert_is_reference(tree, tokens, depth, nodes)


@given(small_texts, st.integers(1, 8))
def test_drafts_are_continuations_of_matches(tokens: list[int], depth: int) -> None:
    tree = SuffixIndex().draft(tokens, depth, 64)
    continuations = {tuple((tokens[end:] * depth)[:depth]) for _, end in reference.matches(tokens)}
    paths = {tuple(tree.path_tokens(node)[1:].tolist()) for node in range(1, len(tree))}
    assert all(any(whole[: len(path)] == path for whole in continuations) for path in paths)
    assert (len(tree) > 1) == bool(continuations)
    assert (tree.log_probs <= 0).all()


def test_what_came_more_often_is_more_probable() -> None:
    tree = SuffixIndex().draft([1, 2, 3, 7, 1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, 64)
    scores = dict(zip(tree.token_list[1:], tree.log_prob_list[1:], strict=True))
    assert scores[7] > scores[8]


def test_a_long_match_is_worth_more_than_a_short_one() -> None:
    index = SuffixIndex()
    short = index.draft([5, 6, 9, 1, 5, 6], 1, 64).log_prob_list[1]
    long = index.draft([*range(20), 99, *range(20)], 1, 64).log_prob_list[1]
    assert short < -1.0 and long > -0.05


def test_another_text_in_the_slot_is_noticed(plain) -> None:
    drafter = NgramDrafter(plain.native, DraftConfig("ngram", depth=4))
    first = [1, 2, 3, 4, 1, 2, 3]
    (tree,) = drafter.propose([DraftContext(0, first, 8, 4)])
    assert tree.tokens.tolist()[1] == 4
    (tree,) = drafter.propose([DraftContext(0, [9, 8, 7, 6, 5, 9, 8], 8, 4)])
    assert tree.tokens.tolist()[1] == 7


def test_after_a_failed_call_the_text_is_read_anew() -> None:
    index = SuffixIndex()
    index.draft([1, 2, 3, 4], 2, 8)
    with pytest.raises(ArgumentError):
        index.draft([1, 2, 3, 4, 5], -1, 8)
    assert len(index.draft([1, 2, 3, 4], 2, 8)) == 1


def test_what_breaks_a_rule_is_refused() -> None:
    out = ffi.new("pyspec_ngram **")
    check(lib.pyspec_ngram_open(out))
    nodes, log_probs = ffi.new("int32_t[]", 64), ffi.new("float[]", 64)

    def draft(n_new: int, tokens: object, depth: int, max_nodes: int) -> int:
        return lib.pyspec_ngram_draft(
            out[0], n_new, tokens, depth, max_nodes, nodes, nodes, nodes, log_probs
        )

    try:
        for arguments in (
            (0, ffi.NULL, 1, 4),  # a text of no tokens has no root
            (-1, ffi.NULL, 1, 4),
            (1, ffi.NULL, 1, 4),
            (1, [7], 65, 4),
            (1, [7], 1, 65),
            (1, [7], 1, 0),
            (1, [7], -1, 4),
        ):
            with pytest.raises(ArgumentError, match="ngram"):
                check(draft(*arguments))
        assert draft(1, [7], 1, 4) == 1
    finally:
        lib.pyspec_ngram_close(out[0])
    index = SuffixIndex()
    index.close()
    index.close()
    with pytest.raises(StateError):
        index.draft([1], 1, 1)


@pytest.mark.parametrize("length", [100_000])
def test_long_contexts_are_read_once(plain, length: int) -> None:
    drafter = NgramDrafter(plain.native, DraftConfig("ngram", depth=8))
    tokens = [(i * i) % 1009 for i in range(length)]
    drafter.propose([DraftContext(0, tokens, 16, 8)])
    steps = []
    for token in range(200):
        tokens.append(token)
        began = time.thread_time()
        drafter.propose([DraftContext(0, tokens, 16, 8)])
        steps.append(time.thread_time() - began)
    # Reading 100,000 tokens anew would take a thousand times as long as one.
    assert sorted(steps)[100] < 1e-3
