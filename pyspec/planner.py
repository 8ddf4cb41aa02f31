"""`Planner`: in which steps a drafter that costs time is asked, and which one.

Drafters that cost nothing are asked in every step, so the worth of their trees is known before the
others are asked. Of each of the others it is known what steps that asked it were worth, in these
requests and in all. The best of them is asked in the steps where that is more.

What is not asked is not learned of. So each is tried for a few steps now and then: a trial loses
tokens, and the more it lost, the longer it is until the next, so that all trials of a drafter cost a
fixed small share of speed. Besides, a balance counts what drafting has won or lost against plain
decoding. While it is negative, nobody is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspec.cost import CostCurve, follow
from pyspec.drafter import DraftContext, Outcome, Passed, StepCost

_FADE = 0.98  # of a drafter's record, per step
_LOCAL = 0.9  # of the record of all steps: text repeats itself here, and is new there
_TRUST = 6.0  # steps that what all requests have taught counts for in a new one
_MARGIN = 0.03  # tokens a sequence by which asking must be worth more than not asking
_TRIAL, _RETRIAL = 5, 3  # steps of the first trial and of later ones
_ABORT = 4.0  # tokens a sequence that a trial may lose before it ends early
_GROWTH = 3  # by which the interval between trials grows at most, if they lose next to nothing
_SHARE = 0.003  # of all tokens that the trials of one drafter may cost
_TRY_SOON, _TRY_LATE = 24, 4096  # steps from one trial to the next, at least and at most
_HOLD, _LONG_HOLD = 8, 128  # steps that it stands that nobody is asked, while the free are silent
_AHEAD = 256  # steps of which it can be known that nothing need be decided in them, at most
_PYTHON_MS = 0.1  # that Python takes in a step with drafts, when it is warm, for each half of it
_SLOW = 1.25  # times the usual, beyond which a step that asked somebody counts as delayed
_EARSHOT = 64  # steps before and after being asked in which a drafter listens
_ENOUGH = 2.0  # expected tokens a sequence beyond which a step is no place for a trial
_PILOT_SHARE = 0.02  # of a step that a pilot takes, with what it does to the processor's caches
_PILOT_CREDIT, _PILOT_RETURN = 6.0, 2.0  # tokens that it may lose, at first and when it is back
_GROUNDED, _LONG_GROUNDED = 64, 1024  # steps that it stays away then, at first and at most
_CREDIT = 24.0  # tokens a sequence that the balance holds at most
_DEBT = 2.0  # and that it owes at most
_INTEREST = 0.01  # of all tokens, by which it grows


@dataclass(slots=True)
class Record:
    """Fading sums over steps."""

    tokens: float = 0.0
    ms: float = 0.0
    steps: float = 0.0

    def add(
        self, tokens: float, ms: float, fade: float = _FADE, steps: int = 1, most: float = 2.0
    ) -> None:
        """So many steps more, all alike.

        What takes longer than `most` times the usual was delayed from outside.
        """
        if self.steps:
            ms = min(ms, most * self.ms / self.steps)
        fade **= steps
        self.tokens = fade * self.tokens + steps * tokens
        self.ms = fade * self.ms + steps * ms
        self.steps = fade * self.steps + steps

    @property
    def mean_tokens(self) -> float:
        """Tokens a step."""
        return self.tokens / self.steps

    @property
    def mean_ms(self) -> float:
        """Milliseconds a step."""
        return self.ms / self.steps


@dataclass(slots=True)
class Known:
    """What is known of a drafter.

    Attributes:
        all: By number of sequences: the steps that asked it; tokens of all sequences.
        own: By slot: the same of the request there; its own tokens.
        last: The step in which it was last asked.
        due: The step from which on it may be tried again.
        interval: Steps from the last trial until then.
    """

    all: dict[int, Record] = field(default_factory=dict)
    own: dict[int, Record] = field(default_factory=dict)
    last: int = 0
    due: int = 0
    interval: float = _TRY_SOON / 2


class Planner:
    """Chooses drafters for a controller, and learns what they give.

    Args:
        names: The drafters that cost time.
        curve: What a verify pass costs.
    """

    def __init__(self, names: Sequence[str], curve: CostCurve) -> None:
        self.curve = curve
        self._recent: dict[int, Record] = {}  # by number of sequences: of all steps
        self._known = {name: Known() for name in names}
        self._n = 1  # sequences of this step
        self._slots: frozenset[int] = frozenset()  # that the asked drafter drafts for
        self._gave: list[tuple[int, int]] = []  # tokens of each slot in this step
        self._step = 0
        self._asked = ""  # in this step
        self._trying = ""
        self._tried = 0  # steps of the trial so far
        self._length = _TRIAL  # of it
        self._lost = 0.0  # tokens that it has lost
        self._spent = 0.0  # the same, with what it had to catch up with
        self._hold = 0  # step until which nobody is asked while the free drafters are silent
        self._patience = _HOLD  # steps of the next hold
        self.silent = False  # nobody had anything to propose in this step
        self.idle = False  # nothing was drafted in this step, whatever there is
        self._pilot_credit = _PILOT_CREDIT  # tokens that the pilot may still lose
        self._grounded = 0  # step until which steps are plain, as the pilot has lost too many
        self._away = _GROUNDED  # steps that it stays away next time
        self._next_change = _EARSHOT  # step in which listeners may change
        self._vain_ms = 0.0  # what a step takes in which the free drafters are asked in vain
        self._free_worth = 0.0  # of the trees of the free drafters in this step
        self._balance = _CREDIT
        self.rate = 1.0
        """Tokens a millisecond, all sequences together, of the last few steps.

        What a millisecond is worth depends on the text here: tokens that are not gained now are made
        at the speed of the steps that follow.
        """

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._step

    @property
    def holds(self) -> bool:
        """Whether nobody is asked in this step if the free drafters are silent."""
        return self._step < self._hold

    def _recent_of(self, n: int) -> Record:
        """At first as plain decoding is."""
        recent = self._recent.get(n)
        if recent is None:
            recent = self._recent[n] = Record(float(n), self.curve.ms(n), 1.0)
        return recent

    # ---- choose ----

    def rests(self) -> bool:
        """Begins a step; True where nobody is asked, not even for free: the balance is negative."""
        self._step += 1
        self.idle = self.is_plain
        return self.idle

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        """Begins to plan a step in which it does not rest."""
        self._n = len(contexts)
        self._asked = ""
        self.rate = self.rate_of(self._n)

    def rate_of(self, n: int) -> float:
        """The rate of steps of `n` sequences."""
        recent = self._recent_of(n)
        return max(recent.tokens, 1e-3) / recent.ms

    def ask(self, contexts: Sequence[DraftContext], worth: float, tokens: float) -> str:
        """The drafter to ask in this step; empty for nobody.

        Args:
            contexts: The sequences.
            worth: Of the trees of the free drafters: expected tokens less what the step's time is
                worth in tokens.
            tokens: Expected tokens of these trees.
        """
        self._free_worth = worth
        slots = self._allowed(contexts)
        allowed = list(slots)
        if self._trying not in allowed:
            self._trying = ""
        if not self._trying:
            self._begin_trial(allowed, tokens)
        if self._trying and self._is_place_for(self._trying, tokens):
            self._asked = self._trying
        else:
            self._asked = self._best(slots, worth + _MARGIN * self._n)
        if self._asked:
            self._known[self._asked].last = self._step
        self._slots = slots.get(self._asked, frozenset())
        if tokens == self._n and not self._asked:  # the free drafters are silent
            due = min([self._known[name].due for name in allowed], default=self._step + _AHEAD)
            self._hold = min(self._step + self._patience, due)
            self._patience = min(2 * self._patience, _LONG_HOLD)
        elif self._asked:
            self._patience = _HOLD
        return self._asked

    def _allowed(self, contexts: Sequence[DraftContext]) -> dict[str, frozenset[int]]:
        """By name: the slots of the sequences that a drafter may draft for, where there are any."""
        open_ = [one for one in contexts if one.depth > 0]
        if all([one.only is None for one in open_]):
            return dict.fromkeys(self._known, frozenset([one.slot for one in open_]))
        found = {}
        for name in self._known:
            if slots := [one.slot for one in open_ if one.only is None or name in one.only]:
                found[name] = frozenset(slots)
        return found

    def _best(self, slots: dict[str, frozenset[int]], least: float) -> str:
        """The drafter of the highest worth above `least`, if there is one."""
        best = ""
        for name, own in slots.items():
            if (worth := self._worth(name, own)) > least:
                best, least = name, worth
        return best

    def listens(self, name: str) -> bool:
        """Whether a drafter is likely to be asked soon, or was lately."""
        known = self._known[name]
        return self._step < known.last + _EARSHOT or known.due < self._step + 2 * _EARSHOT

    @property
    def may_change_listeners(self) -> bool:
        """Whether it is time to ask who listens."""
        if self._step < self._next_change:
            return False
        self._next_change = self._step + _EARSHOT
        return True

    def _is_place_for(self, name: str, tokens: float) -> bool:
        """Whether a trial fits here: not where the free drafters promise much as it is."""
        return tokens < _ENOUGH * self._n or not self._known[name].all

    def _worth(self, name: str, slots: frozenset[int]) -> float:
        """What a step is worth to the sequences that asks `name` for those in `slots`."""
        if not self._known[name].all:
            return -math.inf
        tokens, ms = self._usual(name, slots)
        return tokens - self.rate * ms

    def _usual(self, name: str, slots: frozenset[int]) -> tuple[float, float]:
        """Expected tokens and milliseconds of a step that asks `name` for the sequences in `slots`."""
        known, n = self._known[name], self._n
        if n in known.all:
            usual, ms = known.all[n].mean_tokens / n, known.all[n].mean_ms
        else:  # known for another number of sequences: scaled as plain decoding is
            other = min(known.all, key=lambda number: abs(number - n))
            usual = known.all[other].mean_tokens / other
            ms = known.all[other].mean_ms * self.curve.ms(n) / self.curve.ms(other)
        known_here = [_expected(known.own.get(slot), usual, ms) for slot in slots]
        tokens = sum([own for own, _ in known_here])
        return tokens + (n - len(slots)), sum([own for _, own in known_here]) / max(len(slots), 1)

    def _begin_trial(self, allowed: list[str], tokens: float) -> None:
        for name in allowed:
            known = self._known[name]
            due = not known.all or self._step >= known.due
            if due and self._is_place_for(name, tokens):
                self._trying, self._tried, self._lost, self._spent = name, 0, 0.0, 0.0
                self._length = _RETRIAL if known.all else _TRIAL
                return

    def _end_trial(self) -> None:
        """Sets when the drafter is tried again, so that its trials cost their share at most.

        At first they cost more: one that lost little may have had bad luck.
        """
        known, lost = self._known[self._trying], self._lost / self._n
        growth = _GROWTH * (1.0 + max(lost / self._tried, 0.0)) ** 2
        share = self._spent / self._n / _SHARE
        known.interval = min(max(share, _TRY_SOON), growth * known.interval, _TRY_LATE)
        known.due = self._step + int(known.interval)
        self._trying = ""

    # ---- learn ----

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learns how many tokens a step that asked a drafter gave each request."""
        self._gave = [(one.slot, len(one.path.tokens)) for one in outcomes]

    def observe_cost(self, cost: StepCost, tokens: int, warm_ms: float = math.inf) -> None:
        """Learns what a step cost that gave `tokens` in all.

        Args:
            warm_ms: What the asked drafter takes for such a draft when it is asked all the time.
        """
        if self.idle or self.silent:
            self._n, self._asked = cost.columns, ""
        n, ms = self._n, cost.draft_ms + cost.rest_ms
        self.curve.observe(cost.columns, cost.rest_ms - cost.other_ms)
        self._recent_of(n).add(tokens, ms, _LOCAL)
        if not (self._asked or self.idle) and cost.columns == n:
            self._vain_ms = follow(self._vain_ms, ms)
        self._balance += _INTEREST * tokens - self._loss(cost, tokens)
        self._balance = min(max(self._balance, -_DEBT * n), _CREDIT * n)
        if self._asked:
            self._learn(cost, tokens, warm_ms)

    # ---- coasts ----

    @property
    def is_plain(self) -> bool:
        """Whether nobody is asked in the steps ahead, not even for free: the balance is negative."""
        return self._balance < 0.0

    def steps_ahead(self, free: bool) -> int:
        """Steps from here on for which nothing need be decided, but by a pilot of the free drafters.

        Args:
            free: Whether there are free drafters.
        """
        if self.is_plain:
            steps = math.ceil(-self._balance / (_INTEREST * self._n))
        elif self._asked or self._trying or not all([one.all for one in self._known.values()]):
            return 0
        elif not free:
            steps = self._hold - self._step - 1
        else:
            dues = [one.due - self._step - 1 for one in self._known.values()]
            steps = min([due for due in dues if due > 0], default=_AHEAD)
        return min(steps, _AHEAD)

    def terms_of(self, slot: int) -> dict[str, Any]:
        """What a pilot of the free drafters must know, as `PilotRules` has it.

        Args:
            slot: The one sequence.
        """
        self._n, recent = 1, self._recent_of(1)
        trial_waits = any([self._step >= one.due for one in self._known.values()])
        slots = frozenset((slot,))
        return {
            "recent": (recent.tokens, recent.ms),
            "fade": _LOCAL,
            "others": [self._usual(name, slots) for name, one in self._known.items() if one.all],
            "margin": _MARGIN,
            "least": _ENOUGH - 1.0 if trial_waits else 0.0,
        }

    @property
    def grounded(self) -> int:
        """Steps from here on that are better plain than with a pilot."""
        return max(self._grounded - self._step - 1, 0)

    def _judge_pilot(self, passed: Sequence[Passed], after_ms: float) -> None:
        """Whether what its trees give is more than what it takes."""
        plain = self.curve.ms(1)
        for steps, n, columns, tokens, ms in passed:
            gain = -_PILOT_SHARE * steps
            if columns > n:
                gain += tokens - (ms + after_ms) / plain
            self._pilot_credit = min(self._pilot_credit + gain, _PILOT_CREDIT)
        if self._pilot_credit < 0.0:
            self._grounded = self._step + self._away
            self._away = min(2 * self._away, _LONG_GROUNDED)
            self._pilot_credit = _PILOT_RETURN
        elif self._pilot_credit > 2 * _PILOT_RETURN:
            self._away = _GROUNDED

    def coasted(self, passed: Sequence[Passed], after_ms: float | None = None) -> None:
        """Steps of a coast went by.

        Args:
            after_ms: By which the plain step behind a pilot's tree takes longer; None where none flew.
        """
        for steps, n, columns, tokens, ms in passed:
            self._step += steps
            self.curve.observe(columns, ms / steps)
            self._recent_of(n).add(tokens / steps, ms / steps, _LOCAL, steps)
            self._balance += _INTEREST * tokens
            if columns > n:
                self._balance -= n * self.curve.ms(columns) / self.curve.ms(n) - tokens
            self._balance = min(max(self._balance, -_DEBT * n), _CREDIT * n)
        if after_ms is not None:
            self._judge_pilot(passed, after_ms)

    def _loss(self, cost: StepCost, tokens: int) -> float:
        """Tokens that plain decoding would have given in the same time, less those there are.

        Of the verify pass the usual time counts: this one may have been delayed from outside.
        """
        n = self._n
        plain = self.curve.ms(n)
        draft_ms = min(cost.draft_ms + cost.other_ms, plain)
        if cost.columns == n:  # the roots alone, as in plain decoding
            if not self._asked:
                # What it takes to ask the free drafters in vain.
                return 0.0 if self.idle else n * max(self._vain_ms - plain, 0.0) / plain
            return n * draft_ms / plain
        return n * (draft_ms + self.curve.ms(cost.columns)) / plain - tokens

    def _learn(self, cost: StepCost, tokens: int, warm_ms: float) -> None:
        n = self._n
        if self._trying != self._asked:
            self._record(tokens, cost.draft_ms + cost.rest_ms)
            return
        if self._tried or math.isfinite(warm_ms):
            # Where steps are short a trial takes much longer than what it tries: nothing of it is in
            # the processor's caches yet, and graphs of its sizes are built.
            draft_ms = min(cost.draft_ms, warm_ms + _PYTHON_MS)
            rest_ms = min(cost.rest_ms, self.curve.ms(cost.columns) + _PYTHON_MS)
            self._record(tokens, draft_ms + rest_ms)
        lost = self._free_worth - (tokens - self.rate * (cost.draft_ms + cost.rest_ms))
        self._spent += lost
        # The first step also makes up for what was left out, such as a whole prompt.
        late_ms = 0.0 if self._tried else max(cost.draft_ms - self.curve.ms(n), 0.0)
        self._lost += lost - self.rate * late_ms
        self._tried += 1
        if self._tried == self._length or (self._tried > 1 and self._lost > _ABORT * n):
            self._end_trial()

    def _record(self, tokens: int, ms: float) -> None:
        """Adds a step of the asked drafter to what is known of it, and to that of each request."""
        known = self._known[self._asked]
        known.all.setdefault(self._n, Record()).add(tokens, ms, most=_SLOW)
        for slot, gave in self._gave:
            if slot in self._slots:
                known.own.setdefault(slot, Record()).add(gave, ms)

    def forget(self, slot: int) -> None:
        """Drops what a slot's request has taught."""
        for known in self._known.values():
            known.own.pop(slot, None)


def _expected(own: Record | None, tokens: float, ms: float) -> tuple[float, float]:
    """Tokens and milliseconds that a step of a request can be expected to take, `tokens` and `ms` being usual."""
    if own is None:
        return tokens, ms
    weight = own.steps + _TRUST
    return (own.tokens + _TRUST * tokens) / weight, (own.ms + _TRUST * ms) / weight
