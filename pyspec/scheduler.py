"""`Scheduler`: many requests on one engine, as many at once as it has slots; the one loop there is.

Jobs wait in line, take a slot when one is free, and leave between steps: finished, failed, past
their deadline, or given up. All running jobs share every step; the prompts of joining ones are read
in small chunks between the steps, in turns, so nobody's stream stalls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from pyspec.decoder import Emission
from pyspec.errors import PyspecError, QueueFullError, StateError
from pyspec.generate import Engine, result_of
from pyspec.job import Delta, Failed, Finished, Job, Line, Started

_log = logging.getLogger("pyspec")

PREFILL_CHUNK = 128
"""Prompt tokens after which it is enough between two steps while others are being decoded."""

SHUTTING_DOWN = "shutting down: no more requests are taken"


class Scheduler:
    """Runs jobs on `engine` in a thread of its own.

    Args:
        engine: Used by the scheduler's thread alone from `start` to `stop`, its text functions aside.
        max_waiting: Most jobs in line; more are refused.

    Attributes:
        on_step: Called with the jobs of every step and what it added to them, by the thread.
        on_end: Called with every job that gives its slot back, by the thread.
    """

    def __init__(self, engine: Engine, max_waiting: int = 256) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self.on_step: Callable[[list[tuple[Job, Emission]]], None] = lambda _: None
        self.on_end: Callable[[Job], None] = lambda _: None
        self._waiting = Line()
        self._running: list[Job] = []
        self._joining: deque[Job] = deque()
        self._stopped: Exception | None = None  # what whoever is still there is told
        self._drain_until: float | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pyspec-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Refuses new jobs and those in line; running ones may end within `seconds`."""
        with self._wake:
            self._drain_until = self._drain_until or time.monotonic() + seconds
            self._wake.notify()

    def stop(self, error: Exception | None = None, *, abort: bool = False) -> None:
        """Ends all jobs and waits for the thread.

        Args:
            error: What the jobs fail with.
            abort: End a running call of the engine, too; it is of no use afterwards.
        """
        with self._wake:
            self._stopped = self._stopped or error or StateError(SHUTTING_DOWN)
            self._wake.notify()
        if abort:
            self.engine.abort()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True while jobs are taken."""
        return self._thread.is_alive() and self._stopped is None and self._drain_until is None

    @property
    def load(self) -> tuple[int, int]:
        """Jobs running, and jobs in line."""
        return len(self._running), len(self._waiting)

    def submit(self, *jobs: Job) -> None:
        """Puts the jobs of one request in line, all or none. From any thread.

        Raises:
            QueueFullError: The line is full.
            StateError: The scheduler takes no more.
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
            self._stopped = _as_own(error, "the engine's thread failed")
        assert self._stopped is not None
        self._end_all(self._stopped)

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopped or self._waiting or self._running)
            return self._stopped is None

    def _drop(self) -> None:
        """Lets go of jobs that were given up or whose time is over."""
        now = time.monotonic()
        until = self._drain_until

        def over(job: Job) -> bool:
            return job.cancelled or (job.deadline is not None and now >= job.deadline)

        with self._wake:
            dropped = self._waiting.remove(lambda job: until is not None or over(job))
        leaving = [job for job in self._running if over(job) or (until and now >= until)]
        for job in leaving:
            self._leave(job)
        for job in (*dropped, *leaving):
            if over(job):
                job.dismiss()
            else:
                job.send(Failed(StateError(SHUTTING_DOWN)))

    def _admit(self) -> None:
        """Gives free slots to waiting jobs, in order."""
        while self._waiting and len(self._running) < self.engine.config.n_slots:
            with self._wake:
                job = self._waiting.take()
            try:
                job.sequence = self.engine.begin(job.prompt, **job.options)
            except Exception as error:  # whatever a request does, the others go on
                job.send(Failed(error))
            else:
                self._running.append(job)
                self._joining.append(job)
                job.send(Started(job.sequence.prompt_length))

    def _prefill(self) -> None:
        """Reads one chunk of one prompt; joining jobs take turns."""
        decoding = len(self._running) > len(self._joining)
        while self._joining:
            job = self._joining.popleft()
            if job.is_read:
                continue
            try:
                self.engine.prefill(job.sequence, PREFILL_CHUNK if decoding else None)
            except Exception as error:  # the prompt is lost, the engine is not
                job.sequence.fail(_as_own(error, "reading a prompt failed"))
                self._settle(job)
            else:
                if not job.is_read:
                    self._joining.append(job)
            return

    def _step(self) -> None:
        """One step for all whose prompt is read."""
        jobs = {id(job.sequence): job for job in self._running if job.is_read}
        if not jobs:
            return
        sequences = [job.sequence for job in jobs.values()]
        try:
            emissions = self.engine.step(sequences)
        except Exception as error:  # the step is lost, the engine is not
            emissions, own = [], _as_own(error, "a step failed")
            for sequence in sequences:
                sequence.fail(own)
        self.on_step([(jobs[id(emission.sequence)], emission) for emission in emissions])
        for emission in emissions:
            self._tell(jobs[id(emission.sequence)], emission.text)
        for job in jobs.values():
            self._settle(job)

    def _tell(self, job: Job, text: str) -> None:
        generated = job.sequence.stats.generated
        logprobs = tuple(job.sequence.logprobs[job.sent_tokens :])
        for entry in logprobs:  # looked up here: whoever shows them must not wait for a step
            self.engine.piece(entry.token)
            for token in (entry.token, *(token for token, _ in entry.top)):
                self.engine.whole_piece(token)
        if text or logprobs:
            job.send(Delta(text, generated - job.sent_tokens, logprobs))
            job.sent_tokens = generated

    def _settle(self, job: Job) -> None:
        """Lets a job go when its sequence has ended."""
        sequence = job.sequence
        if sequence.finish_reason is None:
            return
        self._leave(job)
        if sequence.error is not None:
            job.send(Failed(sequence.error))
        else:
            job.send(Finished(result_of(sequence)))

    def _leave(self, job: Job) -> None:
        if job in self._joining:
            self._joining.remove(job)
        try:
            self.engine.end(job.sequence)
            self.on_end(job)
        except Exception:  # of somebody else's drafter or counter: the job has ended all the same
            _log.exception("a request ended with an error")
        finally:
            self._running.remove(job)

    def _end_all(self, error: Exception) -> None:
        with self._wake:
            waiting = self._waiting.remove(lambda _: True)
        for job in [*self._running, *waiting]:
            job.send(Failed(error))
        for job in list(self._running):
            self._leave(job)


def _as_own(error: Exception, what: str) -> PyspecError:
    """A failure that nobody foresaw, in words that name it; it is logged."""
    if isinstance(error, PyspecError):
        return error
    _log.error("%s", what, exc_info=error)
    return StateError(f"{what}: {type(error).__name__}: {error}")
