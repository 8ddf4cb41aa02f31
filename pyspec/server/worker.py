"""`Worker`: the one thread that owns the engine, and the queue in front of it.

Requests wait in line, take a slot when one is free, and leave between steps: finished, failed, or
because their client has gone. All running requests share every step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pyspec.config import SamplingConfig
from pyspec.errors import PyspecError, StateError
from pyspec.generate import Engine, Prompt
from pyspec.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a slot; sent once, before any text."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text as it appears."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well."""

    reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that did not."""

    error: Exception


Event = Started | Delta | Finished | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the worker.

    Attributes:
        prompt: Gives the prompt; called by the worker, which alone may use the engine.
        sampling: How to draw.
        max_tokens: Most tokens, or None.
        stop: Stop strings.
        ignore_end: Go on after end-of-generation tokens.
    """

    prompt: Callable[[Engine], Prompt]
    sampling: SamplingConfig
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    cancelled: bool = False
    sequence: Sequence | None = None
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def next_event(self) -> Event:
        """The next thing that happens to this request."""
        return await self._events.get()

    def cancel(self) -> None:
        """Gives the request up: it leaves the queue, or its slot after the running step."""
        self.cancelled = True

    def send(self, event: Event) -> None:
        """Hands an event to the request's client; called by the worker."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class QueueFullError(PyspecError):
    """More requests are waiting than the server is willing to hold."""


class Worker:
    """Runs jobs on `engine` in a thread of its own.

    Args:
        engine: Used by the worker's thread alone from `start` to `stop`.
        max_waiting: Most jobs in line; more are refused.
    """

    def __init__(self, engine: Engine, max_waiting: int = 256) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stopping = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pyspec-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends all jobs and waits for the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True while jobs are served."""
        return self._thread.is_alive() and not self._stopping

    @property
    def load(self) -> tuple[int, int]:
        """Jobs running, and jobs in line."""
        return len(self._running), len(self._waiting)

    def submit(self, job: Job) -> None:
        """Puts a job in line.

        Raises:
            QueueFullError: The line is full.
            StateError: The worker has stopped.
        """
        with self._wake:
            if not self.alive:
                raise StateError("the server is shutting down")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting already, try later"
                )
            self._waiting.append(job)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._admit()
                self._prefill()
                self._step()
        except Exception as error:  # nothing must leave clients waiting for ever
            log.exception("the worker failed")
            self._stopping = True
            self._end_all(error)
        else:
            self._end_all(StateError("the server is shutting down"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._waiting or self._running)
            return not self._stopping

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running if job.cancelled]:
            self._leave(job)

    def _admit(self) -> None:
        """Gives free slots to waiting jobs, in order."""
        while self._waiting and len(self._running) < self.engine.config.n_slots:
            job = self._waiting.popleft()
            if job.cancelled:
                continue
            try:
                job.sequence = self.engine.begin(
                    job.prompt(self.engine),
                    max_tokens=job.max_tokens,
                    stop=job.stop,
                    ignore_end=job.ignore_end,
                    sampling=job.sampling,
                )
            except Exception as error:  # whatever a request does, the others go on
                job.send(Failed(error))
            else:
                self._running.append(job)
                job.send(Started(job.sequence.prompt_length))

    def _prefill(self) -> None:
        """Processes one batch of the first prompt that is not read yet."""
        for job in self._running:
            sequence = _sequence(job)
            if sequence.prefilled < sequence.prompt_length - 1:
                try:
                    self.engine.prefill(sequence)
                except PyspecError as error:
                    sequence.fail(error)
                    self._settle(job)
                return

    def _step(self) -> None:
        """One step for all whose prompt is read."""
        jobs = {
            id(sequence): job
            for job in self._running
            if (sequence := _sequence(job)).prefilled == sequence.prompt_length - 1
        }
        if not jobs:
            return
        sequences = [_sequence(job) for job in jobs.values()]
        try:
            emissions = self.engine.step(sequences)
        except PyspecError as error:
            emissions = []
            for sequence in sequences:
                sequence.fail(error)
        for emission in emissions:
            if emission.text:
                jobs[id(emission.sequence)].send(Delta(emission.text))
        for job in jobs.values():
            self._settle(job)

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
                    str(sequence.finish_reason), sequence.prompt_length, sequence.stats.generated
                )
            )

    def _leave(self, job: Job) -> None:
        self._running.remove(job)
        self.engine.end(_sequence(job))

    def _end_all(self, error: Exception) -> None:
        with self._wake:
            waiting, self._waiting = list(self._waiting), deque()
        for job in [*self._running, *waiting]:
            job.send(Failed(error))
        for job in list(self._running):
            self._leave(job)


def _sequence(job: Job) -> Sequence:
    assert job.sequence is not None, "only jobs with a slot run"
    return job.sequence
