"""`Decoder.step()`: one speculative step. The only decode loop there is runs this, over and over.

    propose   the drafter guesses a tree of continuations for every sequence
    verify    the target reads all trees in one forward pass; no state moves
    accept    tokens are drawn along each tree with the request's sampler, cut at a stop
    commit    each sequence moves along its accepted path; the rest of its tree is forgotten
    emit      the drafter learns the outcome, the tokens become text

Which drafter it is, the decoder does not know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from typing import NamedTuple

from pyspec.accept import AcceptedPath
from pyspec.drafter import Drafter, Outcome, StepCost
from pyspec.errors import PyspecError, SamplerError
from pyspec.logprobs import token_logprob
from pyspec.sequence import Sequence
from pyspec.stats import StepClock
from pyspec.tree import DraftTree
from pyspec.verifier import Verifier

SLOW_DRAW_SECONDS = 2.0
"""Longest that the draws of one sequence in one step may take.

A grammar can double the ways that it must follow with every token. Its request fails before it takes
all time and memory; the others go on.
"""


class Turn(NamedTuple):
    """One sequence's part in a step."""

    sequence: Sequence
    tree: DraftTree
    path: AcceptedPath


class Emission(NamedTuple):
    """What one step added to one sequence, and the tree that it came from."""

    sequence: Sequence
    text: str
    tree: DraftTree
    path: AcceptedPath


class Decoder:
    """Decodes sequences step by step with a drafter and a verifier."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.drafter = drafter
        self.verifier = verifier
        self.clock = StepClock()

    def step(self, sequences: Many[Sequence]) -> list[Emission]:
        """One step for every sequence at once; each emits at least one token, or fails alone."""
        with self.clock as clock:
            with clock.stage("draft"):
                trees = self._propose(sequences)
            with clock.stage("verify"):
                self._verify(sequences, trees)
            with clock.stage("sample"):
                turns = self._accept(sequences, trees)
            with clock.stage("commit"):
                self._commit(turns)
            emissions = self._emit(turns)
        for sequence in sequences:
            sequence.stats.add_time(clock)
        columns = len(trees) * max(len(tree) for tree in trees)
        draft_ms = clock.ms["draft"]
        self.drafter.observe_cost(StepCost(columns, draft_ms, clock.total_ms - draft_ms))
        return emissions

    def _propose(self, sequences: Many[Sequence]) -> list[DraftTree]:
        limit = self.verifier.max_nodes
        return self.drafter.propose([sequence.draft_context(limit) for sequence in sequences])

    def _verify(self, sequences: Many[Sequence], trees: list[DraftTree]) -> None:
        greedy = all(one.sampler.greedy and one.top_logprobs is None for one in sequences)
        self.verifier.verify([one.slot for one in sequences], trees, greedy=greedy)

    def _accept(self, sequences: Many[Sequence], trees: list[DraftTree]) -> list[Turn]:
        turns = []
        for sequence, tree in zip(sequences, trees, strict=True):
            began = time.perf_counter()
            try:
                path = self.verifier.accept(
                    sequence.slot,
                    tree,
                    sequence.sampler,
                    max_tokens=sequence.remaining,
                    stop_at_end=sequence.is_end is not None,
                )
            except PyspecError as error:
                sequence.fail(error)
            else:
                if (took := time.perf_counter() - began) > SLOW_DRAW_SECONDS:
                    sequence.fail(SamplerError(f"a step took {took:.1f} s to follow the grammar"))
                    continue
                path = sequence.cut(path)
                if sequence.top_logprobs is not None:
                    self._record(sequence, path, sequence.top_logprobs)
                turns.append(Turn(sequence, tree, path))
        return turns

    def _record(self, sequence: Sequence, path: AcceptedPath, n_top: int) -> None:
        """Log-probabilities of a path's tokens, each from the logits at the node it was drawn at."""
        sequence.logprobs += [
            token_logprob(self.verifier.logits(sequence.slot, node), token, n_top)
            for node, token in zip(path.nodes, path.tokens, strict=True)
        ]

    def _commit(self, turns: list[Turn]) -> None:
        self.verifier.commit([turn.sequence.slot for turn in turns], [turn.path for turn in turns])

    def _emit(self, turns: list[Turn]) -> list[Emission]:
        self.drafter.observe([Outcome(turn.sequence.slot, turn.tree, turn.path) for turn in turns])
        return [Emission(turn[0], turn[0].emit(*turn[1:]), *turn[1:]) for turn in turns]
