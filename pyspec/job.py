"""`Job`: a request on its way through a `Scheduler`, the events of its life, and the line it waits in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from pyspec.config import SamplingConfig
from pyspec.errors import DeadlineError, StateError
from pyspec.generate import GenerationResult, Prompt, result_of
from pyspec.logprobs import TokenLogprob
from pyspec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Started:
    """The job has a slot; sent once, before any text."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added.

    Attributes:
        text: Text that is safe to show; may be empty.
        tokens: How many tokens were generated since the last delta.
        logprobs: Their log-probabilities, when asked for.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a job that went well, or was given up after it had a slot."""

    result: GenerationResult


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a job that did not."""

    error: Exception


Event = Started | Delta | Finished | Failed
Send = Callable[[Event], None]
"""Takes an event to whoever waits for it; called by the scheduler's thread."""


class Job:
    """A request, or one choice of it.

    Args:
        prompt: As for `Engine.begin`.
        sampling: How to draw.
        send: Takes its events.
        deadline: The `time.monotonic` at which it fails, or None.
        request_id: What its client calls the request.
        **options: All else that `Engine.begin` takes.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingConfig | None = None,
        *,
        send: Send = lambda _: None,
        deadline: float | None = None,
        request_id: str = "",
        **options: Any,
    ) -> None:
        self.prompt = prompt
        self.send = send
        self.deadline = deadline
        self.request_id = request_id
        self.options = {"sampling": sampling, **options}
        self.cancelled = False
        self.sent_tokens = 0
        self._sequence: Sequence | None = None  # once it has a slot

    def cancel(self) -> None:
        """Gives it up: it leaves the line, or its slot after the running step. From any thread."""
        self.cancelled = True

    @property
    def sequence(self) -> Sequence:
        """What it is in the engine; it has a slot."""
        assert self._sequence is not None, "only jobs with a slot run"
        return self._sequence

    @sequence.setter
    def sequence(self, sequence: Sequence) -> None:
        self._sequence = sequence

    @property
    def is_read(self) -> bool:
        """Whether its whole prompt is in the target."""
        return self.sequence.prefilled >= self.sequence.prompt_length - 1

    def dismiss(self) -> None:
        """Tells that its time is over, or what it has when it was given up."""
        sequence = self._sequence
        if not self.cancelled:
            done = f"{sequence.stats.generated} tokens" if sequence else "waiting in line"
            self.send(Failed(DeadlineError(f"the request's time is over, after {done}")))
        elif sequence is not None:
            self.send(Finished(result_of(sequence)))
        else:
            self.send(Failed(StateError("the request was given up before it had a slot")))


class Line:
    """Waiting jobs: requests take turns, so that one with many choices does not block the rest."""

    def __init__(self) -> None:
        self._requests: deque[deque[Job]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._requests))

    def add(self, jobs: Many[Job]) -> None:
        """Puts the jobs of a request in line."""
        if jobs:
            self._requests.append(deque(jobs))

    def take(self) -> Job:
        """The next job."""
        request = self._requests.popleft()
        job = request.popleft()
        if request:
            self._requests.append(request)
        return job

    def remove(self, gone: Callable[[Job], bool]) -> list[Job]:
        """Takes out the jobs that `gone` is true for."""
        removed = [job for request in self._requests for job in request if gone(job)]
        if removed:
            kept = (deque(j for j in request if j not in removed) for request in self._requests)
            self._requests = deque(request for request in kept if request)
        return removed
