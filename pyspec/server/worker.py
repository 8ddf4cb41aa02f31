"""`Worker`: the one thread that owns the engine, and the line in front of it.

Jobs wait in line, take a slot when one is free, and leave between steps: finished, failed, past
their deadline, or because their client has gone. All running jobs share every step; the prompts of
joining ones are read in small chunks between the steps, in turns, so nobody's stream stalls.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pyspec.chat import ChatPrompt
from pyspec.config import SamplingConfig
from pyspec.decoder import Emission
from pyspec.errors import PyspecError, QueueFullError, StateError
from pyspec.generate import Engine
from pyspec.logprobs import TokenLogprob
from pyspec.prefill import Segment
from pyspec.sequence import Sequence as Request
from pyspec.server.security import REQUEST_ID

log = logging.getLogger(__name__)

PREFILL_CHUNK = 128
"""Prompt tokens after which it is enough between two steps while others are being decoded."""

SHUTTING_DOWN = "the server is shutting down"


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
    """The last event of a job that went well.

    Attributes:
        reason: ``"stop"`` or ``"length"``.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens generated.
        stopped_by: The stop string that ended it, if one did.
        cached_tokens: Prompt tokens that needed no processing.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    stopped_by: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a job that did not."""

    error: Exception


Event = Started | Delta | Finished | Failed
Send = Callable[[Event], None]
"""Takes an event to whoever waits for it; called by the worker's thread."""


@dataclass(slots=True, eq=False)
class Job:
    """One choice of a request on its way through the worker.

    Attributes:
        prompt: Token ids.
        chat: The rendered chat that they are of, or None.
        sampling: How to draw.
        max_tokens: Most tokens, or None.
        stop: Stop strings.
        ignore_end: Go on after end-of-generation tokens.
        draft: As for `Engine.begin`.
        draft_nodes: As for `Engine.begin`.
        top_logprobs: As for `Engine.begin`.
        deadline: The `time.monotonic` at which it fails, or None.
        send: Takes its events.
        request_id: What the client calls its request.
    """

    prompt: Sequence[int]
    sampling: SamplingConfig
    chat: ChatPrompt | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    draft: str | None = None
    draft_nodes: int | None = None
    top_logprobs: int | None = None
    deadline: float | None = None
    send: Send = lambda _: None
    request_id: str = field(default_factory=REQUEST_ID.get)
    cancelled: bool = False
    sequence: Request | None = None
    sent_tokens: int = 0

    def cancel(self) -> None:
        """Gives the job up: it leaves the line, or its slot after the running step."""
        self.cancelled = True


class Outbox:
    """The events of a request's jobs, in the order they happen, for the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def sender(self, index: int) -> Send:
        """What puts events of job `index` in here, from any thread."""

        def send(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return send

    async def next(self) -> tuple[int, Event]:
        """The next event and the index of its job."""
        return await self._events.get()


class DeadlineError(PyspecError):
    """A request took longer than it was given."""


class Line:
    """Waiting jobs: requests take turns, so that one with many choices does not block the rest."""

    def __init__(self) -> None:
        self._requests: deque[deque[Job]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._requests))

    def add(self, jobs: Sequence[Job]) -> None:
        """Puts the jobs of a request in line."""
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


class Worker:
    """Runs jobs on `engine` in a thread of its own.

    Args:
        engine: Used by the worker's thread alone from `start` to `stop`, its text functions aside.
        max_waiting: Most jobs in line; more are refused.
    """

    def __init__(self, engine: Engine, max_waiting: int = 256) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self.names: dict[int, bytes] = {}  # of tokens that log-probabilities were sent of
        self.on_step: Callable[[list[tuple[Job, Emission]]], None] = lambda _: None
        self.on_end: Callable[[Job], None] = lambda _: None
        self._waiting = Line()
        self._running: list[Job] = []
        self._joining: deque[Job] = deque()
        self._stopping = False
        self._drain_until: float | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pyspec-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Refuses new jobs and those in line; running ones may end within `seconds`."""
        with self._wake:
            self._drain_until = self._drain_until or time.monotonic() + seconds
            self._wake.notify()

    def stop(self) -> None:
        """Ends all jobs and waits for the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True while jobs are taken."""
        return self._thread.is_alive() and not self._stopping and self._drain_until is None

    @property
    def load(self) -> tuple[int, int]:
        """Jobs running, and jobs in line."""
        return len(self._running), len(self._waiting)

    def submit(self, *jobs: Job) -> None:
        """Puts the jobs of one request in line, all or none.

        Raises:
            QueueFullError: The line is full.
            StateError: The worker has stopped.
        """
        with self._wake:
            if not self.alive:
                raise StateError(SHUTTING_DOWN)
            waiting = len(self._waiting)
            if waiting + len(jobs) > self.max_waiting:
                raise QueueFullError(
                    f"{waiting} requests are waiting, and no more than {self.max_waiting} may: "
                    "try later"
                )
            self._waiting.add(jobs)
            self._wake.notify()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._drop()
                self._admit()
                self._prefill()
                self._step()
        except Exception as error:  # nothing must leave clients waiting for ever
            log.exception("the worker failed")
            self._stopping = True
            self._end_all(error)
        else:
            self._end_all(StateError(SHUTTING_DOWN))

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._waiting or self._running)
            return not self._stopping

    def _drop(self) -> None:
        """Lets go of jobs whose client has gone or whose time is over."""
        now = time.monotonic()
        until = self._drain_until

        def over(job: Job) -> bool:
            return job.cancelled or (job.deadline is not None and now >= job.deadline)

        with self._wake:
            dropped = self._waiting.remove(lambda job: until is not None or over(job))
        for job in dropped:
            self._fail(job, until is not None)
        for job in [job for job in self._running if over(job) or (until and now >= until)]:
            self._leave(job)
            self._fail(job, not over(job))

    def _fail(self, job: Job, shutdown: bool) -> None:
        if shutdown:
            job.send(Failed(StateError(SHUTTING_DOWN)))
        elif not job.cancelled:
            job.send(Failed(DeadlineError(f"the request's time is over, after {_done(job)}")))

    def _admit(self) -> None:
        """Gives free slots to waiting jobs, in order."""
        while self._waiting and len(self._running) < self.engine.config.n_slots:
            with self._wake:
                job = self._waiting.take()
            try:
                job.sequence = self.engine.begin(
                    job.prompt,
                    max_tokens=job.max_tokens,
                    stop=job.stop,
                    ignore_end=job.ignore_end,
                    sampling=job.sampling,
                    draft=job.draft,
                    draft_nodes=job.draft_nodes,
                    top_logprobs=job.top_logprobs,
                    segments=self._segments(job),
                )
            except Exception as error:  # whatever a request does, the others go on
                job.send(Failed(error))
            else:
                self._running.append(job)
                self._joining.append(job)
                job.send(Started(job.sequence.prompt_length))

    def _segments(self, job: Job) -> list[Segment] | None:
        return None if job.chat is None else self.engine.segments(job.chat, job.prompt)

    def _prefill(self) -> None:
        """Reads one chunk of one prompt; joining jobs take turns."""
        decoding = len(self._running) > len(self._joining)
        while self._joining:
            job = self._joining.popleft()
            sequence = _sequence(job)
            if _is_read(sequence):
                continue
            try:
                self.engine.prefill(sequence, PREFILL_CHUNK if decoding else None)
            except PyspecError as error:
                sequence.fail(error)
                self._settle(job)
            else:
                if not _is_read(sequence):
                    self._joining.append(job)
            return

    def _step(self) -> None:
        """One step for all whose prompt is read."""
        jobs = {id(sequence): job for job in self._running if _is_read(sequence := _sequence(job))}
        if not jobs:
            return
        sequences = [_sequence(job) for job in jobs.values()]
        try:
            emissions = self.engine.step(sequences)
        except Exception as error:  # the step is lost, the server is not
            if not isinstance(error, PyspecError):
                log.exception("a step failed")
                error = StateError(f"a step failed: {type(error).__name__}: {error}")
            emissions = []
            for sequence in sequences:
                sequence.fail(error)
        self.on_step([(jobs[id(emission.sequence)], emission) for emission in emissions])
        for emission in emissions:
            self._tell(jobs[id(emission.sequence)], emission.text)
        for job in jobs.values():
            self._settle(job)

    def _tell(self, job: Job, text: str) -> None:
        sequence = _sequence(job)
        generated = len(sequence.tokens) - sequence.prompt_length
        logprobs = tuple(sequence.logprobs[job.sent_tokens :])
        for entry in logprobs:
            self._name(entry)
        if text or logprobs:
            job.send(Delta(text, generated - job.sent_tokens, logprobs))
            job.sent_tokens = generated

    def _name(self, entry: TokenLogprob) -> None:
        """Looks up what the event loop needs to show an entry."""
        self.engine.piece(entry.token)
        for token in (entry.token, *(token for token, _ in entry.top)):
            if token not in self.names:
                self.names[token] = self.engine.native.token_to_piece(token, special=True)

    def _settle(self, job: Job) -> None:
        """Lets a job go when its sequence has ended."""
        sequence = _sequence(job)
        if sequence.finish_reason is None:
            return
        self._leave(job)
        if sequence.error is not None:
            job.send(Failed(sequence.error))
        else:
            job.send(
                Finished(
                    str(sequence.finish_reason),
                    sequence.prompt_length,
                    sequence.stats.generated,
                    sequence.text.stopped_by,
                    sequence.stats.cached_tokens,
                )
            )

    def _leave(self, job: Job) -> None:
        self._running.remove(job)
        if job in self._joining:
            self._joining.remove(job)
        self.engine.end(_sequence(job))
        self.on_end(job)

    def _end_all(self, error: Exception) -> None:
        with self._wake:
            waiting = self._waiting.remove(lambda _: True)
        for job in [*self._running, *waiting]:
            job.send(Failed(error))
        for job in list(self._running):
            self._leave(job)


def _sequence(job: Job) -> Request:
    assert job.sequence is not None, "only jobs with a slot run"
    return job.sequence


def _is_read(sequence: Request) -> bool:
    return sequence.prefilled >= sequence.prompt_length - 1


def _done(job: Job) -> str:
    if job.sequence is None:
        return "waiting in line"
    return f"{len(job.sequence.tokens) - job.sequence.prompt_length} tokens"
