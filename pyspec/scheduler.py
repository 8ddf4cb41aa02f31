"""`Scheduler`: many requests on one engine, as many at once as it has slots.

Jobs wait in line, take a slot when one is free, and leave between steps: finished, failed, or given
up. All that run share every step; the prompts of joining ones are read batch by batch in between.
One thread calls `turn` over and over; others may submit jobs and cancel them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from pyspec.errors import PyspecError, QueueFullError, StateError
from pyspec.generate import Engine, GenerationResult, Prompt, result_of
from pyspec.sequence import Sequence

Event = str | GenerationResult | Exception
"""More text; or the last event of a job: what became of it."""


class Job:
    """One request.

    Args:
        prompt: Text, bytes or token ids.
        put: Takes its events; called by the scheduler's thread.
        **options: As for `Engine.begin`.
    """

    def __init__(self, prompt: Prompt, put: Callable[[Event], None], **options: Any) -> None:
        self.prompt = prompt
        self.put = put
        self.options = options
        self.cancelled = False
        self.sequence: Sequence | None = None

    def cancel(self) -> None:
        """Gives it up: it leaves the line, or its slot after the running step. From any thread."""
        self.cancelled = True


class Scheduler:
    """Runs jobs on an engine.

    Args:
        engine: Used by `turn` alone while there are jobs.
        max_waiting: Most jobs in line; None for any number.
    """

    def __init__(self, engine: Engine, max_waiting: int | None = None) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._closed = False
        self._wake = threading.Condition()

    @property
    def load(self) -> tuple[int, int]:
        """Jobs running, and jobs in line."""
        return len(self._running), len(self._waiting)

    def submit(self, job: Job) -> None:
        """Puts a job in line. From any thread.

        Raises:
            QueueFullError: The line is full.
            StateError: The scheduler was closed.
        """
        with self._wake:
            if self._closed:
                raise StateError("the scheduler is closed")
            if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting, no more than "
                    f"{self.max_waiting} may"
                )
            self._waiting.append(job)
            self._wake.notify()

    def wait(self) -> bool:
        """Waits for something to do; False when the scheduler was closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._waiting or self._running)
            return not self._closed

    def close(self) -> None:
        """Takes no more jobs, and ends `wait`. From any thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def turn(self) -> None:
        """Lets jobs leave and join, reads one batch of a prompt, and steps all the others."""
        self._drop_cancelled()
        self._admit()
        self._prefill()
        self._step()

    def end_all(self, error: Exception) -> None:
        """Fails all jobs."""
        with self._wake:
            waiting, self._waiting = list(self._waiting), deque()
        running = list(self._running)
        for job in running:
            self._leave(job)
        for job in (*running, *waiting):
            job.put(error)

    def _drop_cancelled(self) -> None:
        with self._wake:
            dropped = [job for job in self._waiting if job.cancelled]
            self._waiting = deque(job for job in self._waiting if job not in dropped)
        for job in dropped:
            job.put(StateError("the request was given up before it had a slot"))
        for job in [job for job in self._running if job.cancelled]:
            self._leave(job)
            job.put(result_of(_sequence(job)))

    def _admit(self) -> None:
        """Gives free slots to waiting jobs, in order."""
        while self._waiting and len(self._running) < self.engine.config.n_slots:
            job = self._waiting.popleft()
            try:
                job.sequence = self.engine.begin(job.prompt, **job.options)
            except Exception as error:  # whatever a request does, the others go on
                job.put(error)
            else:
                self._running.append(job)

    def _prefill(self) -> None:
        """Reads one batch of a prompt; joining jobs take turns."""
        job = next((job for job in self._running if not _is_read(job)), None)
        if job is None:
            return
        self._running.remove(job)
        self._running.append(job)
        try:
            self.engine.prefill(_sequence(job))
        except PyspecError as error:
            _sequence(job).fail(error)
            self._settle(job)

    def _step(self) -> None:
        """One step for all whose prompt is read."""
        jobs = {id(job.sequence): job for job in self._running if _is_read(job)}
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
                jobs[id(emission.sequence)].put(emission.text)
        for job in jobs.values():
            self._settle(job)

    def _settle(self, job: Job) -> None:
        """Lets a job go when its sequence has ended."""
        sequence = _sequence(job)
        if sequence.finish_reason is None:
            return
        self._leave(job)
        if sequence.error is not None:
            job.put(sequence.error)
        else:
            job.put(result_of(sequence))

    def _leave(self, job: Job) -> None:
        self._running.remove(job)
        self.engine.end(_sequence(job))


def _sequence(job: Job) -> Sequence:
    assert job.sequence is not None, "only jobs with a slot run"
    return job.sequence


def _is_read(job: Job) -> bool:
    sequence = _sequence(job)
    return sequence.prefilled >= sequence.prompt_length - 1
