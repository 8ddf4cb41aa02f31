"""Naive reference of `pyspec/native/src/ngram.cpp`: what followed the same tokens before.

Matches are earlier places of a text that end as the text does. Their continuations are merged into a
trie. A node's probability is its share of the weight of all continuations that pass its parent, where
some is kept back for what was never seen: little behind a long match, much behind a short one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LENGTHS = (5, 3, 2)
"""Lengths of the runs at the end of the text that are looked up, the longest first."""

SCAN = 16
"""Most places that are compared; of each length the most recent ones."""

LONGEST = 32
"""Tokens beyond which the length of a match does not count."""

MATCHES = 4
"""Most matches whose continuations are followed: the longest, and of these the most recent."""

RECENCY = 0.8
"""Weight of a match relative to the one before it in that order, lengths aside."""

DOUBT = 8.0
"""Weight kept back, times the square of the length of the match."""


def matches(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """(length, position behind it) of the matches of the end of `tokens`, the best first."""
    n = len(tokens)
    found: dict[int, int] = {}
    for length in LENGTHS:
        for end in range(n - 1, length - 1, -1):
            if len(found) == SCAN:
                break
            if tokens[end - length : end] == tokens[n - length :] and end not in found:
                found[end] = _common(tokens, end)
    ranked = sorted(found.items(), key=lambda item: (-item[1], -item[0]))
    return [(length, end) for end, length in ranked[:MATCHES]]


def _common(tokens: Sequence[int], end: int) -> int:
    """How many tokens before `end` equal those before the end of the text."""
    length = 0
    while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def tree(
    tokens: Sequence[int], depth: int, max_nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """The trie of all continuations, cut to its most probable nodes.

    A continuation that reaches the end of the text goes on with its own beginning: text that repeats
    itself is drafted as far as is asked for.

    Args:
        tokens: The text; its last token is the root.
        depth: Deepest node.
        max_nodes: Most nodes, the root included.

    Returns:
        Tokens, parents and natural logarithms of the probabilities given the parent.
    """
    nodes, parents, weights, lengths, depths = [tokens[-1]], [-1], [0.0], [0], [0]
    found = matches(tokens)
    for rank, (length, end) in enumerate(found):
        weight = RECENCY**rank * (length / found[0][0]) ** 2
        node = 0
        weights[0] += weight
        for level in range(depth):
            token = tokens[end + level % (len(tokens) - end)]
            child = next(
                (c for c in range(len(nodes)) if parents[c] == node and nodes[c] == token), None
            )
            if child is None:
                child = len(nodes)
                nodes.append(token)
                parents.append(node)
                weights.append(0.0)
                lengths.append(0)
                depths.append(level + 1)
            node = child
            weights[node] += weight
            lengths[node] = max(lengths[node], length + level)
    log_probs, total = [0.0], [0.0]
    for node in range(1, len(nodes)):
        doubt = DOUBT / lengths[node] ** 2
        log_probs.append(math.log(weights[node] / (weights[parents[node]] + doubt)))
        total.append(total[parents[node]] + log_probs[node])
    order = sorted(range(len(nodes)), key=lambda node: (-total[node], depths[node], node))
    kept = sorted(order[: max(max_nodes, 1)])
    return (
        [nodes[node] for node in kept],
        [kept.index(parents[node]) if node else -1 for node in kept],
        [log_probs[node] for node in kept],
    )
