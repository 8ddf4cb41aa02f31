"""`Decoder.step()`: one speculative step. The only decode loop there is runs this, over and over.

    propose   the drafter guesses a tree of continuations for every sequence
    verify    the target reads all trees in one forward pass; no state moves
    accept    tokens are drawn along each tree with the request's sampler, cut at a stop
    commit    each sequence moves along its accepted path; the rest of its tree is forgotten
    emit      the drafter learns the outcome, the tokens become text

Which drafter it is, the decoder does not know. Where it need not be asked, a single sequence takes
several steps in one native call (`Decoder._coast`): plain ones, or with the trees of a pilot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from pyspec.accept import AcceptedPath
from pyspec.drafter import Coast, Drafter, Outcome, Passed, StepCost
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

COAST_MS = 8.0
"""Time after which a coast takes no further step: text is to come at a steady pace."""


class Turn(NamedTuple):
    """One sequence's part in a step.

    Attributes:
        sequence: The sequence.
        tree: Its tree.
        path: What was accepted of it.
        plain: A token of every plain step that was taken together with it.
    """

    sequence: Sequence
    tree: DraftTree
    path: AcceptedPath
    plain: tuple[int, ...] = ()


class Emission(NamedTuple):
    """What one step added to one sequence; a `Turn` and its text."""

    sequence: Sequence
    text: str
    tree: DraftTree
    path: AcceptedPath
    plain: tuple[int, ...] = ()

    def single(self) -> list[Emission]:
        """The same step by step, without text."""
        tokens = (self.path.bonus_token, *self.plain)
        plain = [Emission(self.sequence, "", *_plain(*pair)) for pair in pairwise(tokens)]
        return [Emission(self.sequence, "", self.tree, self.path), *plain]


class Decoder:
    """Decodes sequences step by step with a drafter and a verifier."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.drafter = drafter
        self.verifier = verifier
        self.clock = StepClock()

    def step(self, sequences: Many[Sequence]) -> list[Emission]:
        """One step for every sequence at once, or several of a single one.

        Each sequence emits at least one token, or fails alone.
        """
        with self.clock as clock:
            coasted = self._coast(sequences)
            turns, columns = self._speculate(sequences) if coasted is None else (coasted[0], 0)
            emissions = [Emission(one[0], one[0].emit(*one[1:]), *one[1:]) for one in turns]
        for sequence in sequences:
            sequence.stats.add_time(clock)
        if coasted is not None:
            self.drafter.coasted(coasted[1])
        else:
            rest_ms = clock.total_ms - clock.ms["draft"]
            other_ms = rest_ms - clock.ms["verify"] - clock.ms["sample"]
            self.drafter.observe_cost(StepCost(columns, clock.ms["draft"], rest_ms, other_ms))
        return emissions

    def _speculate(self, sequences: Many[Sequence]) -> tuple[list[Turn], int]:
        """A step with drafts; returns the tokens in its pass, too."""
        with self.clock.stage("draft"):
            trees = self._propose(sequences)
        turns = self._walk(sequences, trees)
        self.drafter.observe([Outcome(one.sequence.slot, one.tree, one.path) for one in turns])
        return turns, len(trees) * max(len(tree) for tree in trees)

    def _walk(self, sequences: Many[Sequence], trees: list[DraftTree]) -> list[Turn]:
        with self.clock.stage("verify"):
            self._verify(sequences, trees)
        with self.clock.stage("sample"):
            turns = self._accept(sequences, trees)
        with self.clock.stage("commit"):
            self._commit(turns)
        return turns

    # ---- steps for which the drafter need not be asked ----

    def _coast(self, sequences: Many[Sequence]) -> tuple[list[Turn], list[Passed]] | None:
        """Steps without the drafter; None where it must be asked."""
        first, n = sequences[0], len(sequences)
        with self.clock.stage("draft"):
            coast = self.drafter.coast(sequences, n == 1 and first.may_be_piloted)
        if coast is None:
            return None
        if n == 1 and first.may_coast:
            return self._coast_alone(first, coast)
        began = time.perf_counter()
        turns = self._walk(sequences, [DraftTree.root(one.tokens[-1]) for one in sequences])
        return turns, [Passed(1, n, n, n, 1e3 * (time.perf_counter() - began))]

    def _coast_alone(
        self, sequence: Sequence, coast: Coast
    ) -> tuple[list[Turn], list[Passed]] | None:
        """Several steps in one native call: where steps are short, Python is what takes long.

        None where the pilot gives way at once. A sampler that fails fails its request alone.
        """
        root, ms = sequence.tokens[-1], self.clock.ms
        try:
            with self.clock.stage("verify"):
                steps, sample_ms, commit_ms = self.verifier.coast(
                    sequence.slot,
                    root,
                    sequence.sampler,
                    max_steps=coast.steps,
                    max_tokens=sequence.remaining,
                    stop_at_end=sequence.is_end is not None,
                    max_ms=COAST_MS,
                    pilot=coast.pilot,
                    text=sequence.tokens,
                )
        except SamplerError as error:
            sequence.fail(error)
            return [], []
        if not steps:
            return None
        ms["verify"] -= sample_ms + commit_ms
        ms["sample"], ms["commit"] = sample_ms, commit_ms
        turns, passed = [], []
        for tree, run in groupby(steps, attrgetter("tree")):  # plain steps in a row have None
            first, *more = run
            if tree is None:
                plain = [one.drawn[0] for one in more]
                turns.append(Turn(sequence, *_plain(root, first.drawn[0]), tuple(plain)))
                n = 1 + len(plain)
                passed.append(Passed(n, 1, 1, n, first.ms + sum([one.ms for one in more])))
            else:
                path = AcceptedPath.trusted(tuple(first.path), tuple(first.drawn))
                turns.append(Turn(sequence, tree.marked(coast.source), path))
                passed.append(Passed(1, 1, len(tree), len(first.drawn), first.ms))
                root = first.drawn[-1]
        return turns, passed

    # ---- the parts of a step ----

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


def _plain(root: int, token: int) -> tuple[DraftTree, AcceptedPath]:
    """Tree and path of a plain step that drew `token` behind `root`."""
    return DraftTree.root(root), AcceptedPath.trusted((0,), (token,))
