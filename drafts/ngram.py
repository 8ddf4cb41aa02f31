"""`ngram`: drafts what followed the same tokens before, in the prompt or the output.

Whenever the last few tokens were seen before, what came after them may come again: in code, in
quotations, in summaries of a text. The continuations of several matches are merged into one tree,
weighted by how long the match is, how often they occur, and how recent they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING

from pyspec.config import DraftConfig
from pyspec.drafter import DraftContext, Drafter
from pyspec.tree import DraftTree, TreeBuilder

if TYPE_CHECKING:
    from pyspec.native import NativeEngine

LENGTHS = (5, 4, 3, 2)
"""Lengths of the suffixes that are looked up, the longest first."""

MATCHES = 4
"""Most matches whose continuations are followed."""

_RECENCY = 0.8
"""Weight of a match relative to the next more recent one."""


class NgramDrafter(Drafter):
    """A trie of the continuations of the longest matches of a sequence's suffix."""

    name = "ngram"
    auto = True
    free = True
    auto_limits = (10, 4)

    def __init__(self, native: NativeEngine, config: DraftConfig) -> None:
        super().__init__(native, config)
        self._indices: dict[int, SuffixIndex] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._propose(context) for context in contexts]

    def _propose(self, context: DraftContext) -> DraftTree:
        index = self._indices.setdefault(context.slot, SuffixIndex())
        index.follow(context.tokens)
        depth = min(self.limits.depth, context.depth)
        if depth < 1 or not index.matches():
            return DraftTree.root(context.root)
        return index.tree(depth).best(context.max_nodes)

    def forget(self, slot: int) -> None:
        self._indices.pop(slot, None)


class SuffixIndex:
    """Where every run of 2 to 5 tokens of one sequence occurred; constant time per new token."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the sequence."""
        self.tokens: list[int] = []
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in LENGTHS]
        self._before: list[list[int]] = [[] for _ in LENGTHS]  # the occurrence before, or -1

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes over a sequence that has grown; one that was replaced is read anew."""
        known = len(self.tokens)
        if known > len(tokens) or (known and self.tokens[-1] != tokens[known - 1]):
            self.clear()
            known = 0
        self.tokens.extend(tokens[known:])
        # A run is known by the position behind it: there its continuation begins.
        for length, latest, before in zip(LENGTHS, self._latest, self._before, strict=True):
            for end in range(known + 1, len(self.tokens) + 1):
                if end < length:
                    before.append(-1)
                    continue
                run = tuple(self.tokens[end - length : end])
                before.append(latest.get(run, -1))
                latest[run] = end

    def matches(self) -> list[tuple[int, int]]:
        """(length, position behind it) of earlier occurrences of the suffix.

        The longest come first, and of one length the most recent.
        """
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        for length, before in zip(LENGTHS, self._before, strict=True):
            end = before[-1] if before else -1
            while end >= 0 and len(found) < MATCHES:
                if end not in seen:
                    seen.add(end)
                    found.append((length, end))
                end = before[end - 1]
            if len(found) >= MATCHES:
                break
        return found

    def tree(self, depth: int) -> TreeBuilder:
        """The continuations of `matches`, up to `depth` tokens each.

        One that reaches the end of the sequence goes on with its own beginning: text that repeats
        itself is drafted as far as is asked for.
        """
        tokens = self.tokens
        builder = TreeBuilder(tokens[-1])
        matches = self.matches()
        if not matches:
            return builder
        weights: dict[int, float] = {}  # of every node
        longest = matches[0][0]
        for rank, (length, end) in enumerate(matches):
            weight = _RECENCY**rank * 0.5 ** (longest - length)
            node = 0
            weights[0] = weights.get(0, 0.0) + weight
            for token in islice(cycle(tokens[end : end + depth]), depth):
                node = builder.add(node, token, -math.inf)
                weights[node] = weights.get(node, 0.0) + weight
        # A share of the weight is kept back for what was never seen, less behind a long match.
        doubt = 1.0 / longest
        for node in range(1, len(builder)):
            share = weights[node] / (weights[builder.parents[node]] + doubt)
            builder.log_probs[node] = math.log(share)
        return builder
