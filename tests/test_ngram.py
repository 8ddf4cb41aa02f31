"""`ngram`: what it finds, and that it finds it in constant time a token."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspec.drafts.ngram import LENGTHS, MATCHES, NgramDrafter, SuffixIndex

from pyspec import DraftConfig, DraftContext

small_texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def searched(tokens: list[int]) -> list[tuple[int, int]]:
    """What `SuffixIndex.matches` must find, by looking everywhere."""
    found: list[tuple[int, int]] = []
    for length in LENGTHS:
        if len(tokens) < length:
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            run = tokens[end - length : end]
            if run == tokens[-length:] and end not in {other for _, other in found}:
                found.append((length, end))
    return found[:MATCHES]


@given(small_texts, st.data())
def test_matches_are_those_of_a_search_however_the_text_arrived(tokens: list[int], data) -> None:
    index = SuffixIndex()
    known = 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        index.follow(tokens[:known])
    assert index.matches() == searched(tokens)


@given(small_texts, st.integers(1, 8))
def test_drafts_are_continuations_of_matches(tokens: list[int], depth: int) -> None:
    index = SuffixIndex()
    index.follow(tokens)
    tree = index.tree(depth).best()
    continuations = set()
    for _, end in searched(tokens):
        text = tokens[end:]
        continuations.add(tuple((text * depth)[:depth]))
    paths = {tuple(tree.path_tokens(node)[1:].tolist()) for node in range(1, len(tree))}
    assert all(any(whole[: len(path)] == path for whole in continuations) for path in paths)
    assert (len(tree) > 1) == bool(continuations)
    assert (tree.log_probs <= 0).all()


def test_what_came_more_often_is_more_probable() -> None:
    index = SuffixIndex()
    index.follow([1, 2, 3, 7, 1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3])
    tree = index.tree(1)
    scores = dict(zip(tree.tokens[1:], tree.log_probs[1:], strict=True))
    assert scores[7] > scores[8]


def test_another_text_in_the_slot_is_noticed(plain) -> None:
    drafter = NgramDrafter(plain.native, DraftConfig("ngram", depth=4))
    first = [1, 2, 3, 4, 1, 2, 3]
    (tree,) = drafter.propose([DraftContext(0, first, 8, 4)])
    assert tree.tokens.tolist()[1] == 4
    (tree,) = drafter.propose([DraftContext(0, [9, 8, 7, 6, 5, 9, 8], 8, 4)])
    assert tree.tokens.tolist()[1] == 7


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
    assert sorted(steps)[100] < 2e-3
