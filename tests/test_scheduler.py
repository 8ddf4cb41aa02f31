"""The scheduler without HTTP: who is served when, and how jobs end."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyspec import Engine, QueueFullError, SamplingConfig, StateError
from pyspec.errors import DeadlineError
from pyspec.job import Delta, Event, Failed, Finished, Job, Line, Started
from pyspec.prefill import BLOCK
from pyspec.scheduler import PREFILL_CHUNK, Scheduler
from tests.conftest import OpenEngine


class Client:
    """A job and its events."""

    def __init__(self, engine: Engine, prompt: str, **options: Any) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        sampling = SamplingConfig(temperature=0)
        self.job = Job(
            engine.tokenize(prompt), sampling, ignore_end=True, send=self.events.put, **options
        )

    def until(self, kind: type) -> Any:
        """The next event of a kind."""
        while not isinstance(event := self.events.get(timeout=20), kind):
            assert not isinstance(event, Failed | Finished), event
        return event

    def text(self) -> str:
        """All text, when the job has ended."""
        text = ""
        while not isinstance(event := self.events.get(timeout=20), Finished):
            text += event.text if isinstance(event, Delta) else ""
        return text


@pytest.fixture(scope="module")
def engine(open_engine: OpenEngine) -> Engine:
    return open_engine("mtp", n_slots=3, n_ctx=2048)


@contextmanager
def working(engine: Engine, **options: Any) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, **options)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()


@pytest.fixture
def log(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every prefill (slot, tokens) and step (slots) that the engine is asked for."""
    entries: list[tuple[str, Any]] = []
    prefill, step = engine.prefill, engine.step

    def logged_prefill(sequence: Any, limit: int | None = None) -> bool:
        before = sequence.prefilled
        done = prefill(sequence, limit)
        entries.append(("prefill", (sequence.slot, sequence.prefilled - before)))
        return done

    def logged_step(sequences: Any) -> Any:
        entries.append(("step", [sequence.slot for sequence in sequences]))
        return step(sequences)

    monkeypatch.setattr(engine, "prefill", logged_prefill)
    monkeypatch.setattr(engine, "step", logged_step)
    return entries


LONG, MIDDLE = "x = 1\n" * 300, "x = 1\n" * 70


def test_long_prompts_do_not_stall_running_streams(engine: Engine, log: list[Any]) -> None:
    """While one is decoded, others are read in small chunks, in turns, a step between each."""
    with working(engine) as scheduler:
        first = Client(engine, "import", max_tokens=400)
        scheduler.submit(first.job)
        first.until(Delta)
        second, third = (Client(engine, LONG, max_tokens=4) for _ in range(2))
        scheduler.submit(second.job)
        scheduler.submit(third.job)
        for client in (second, third, first):
            client.text()
    chunks = [(i, *entry[1]) for i, entry in enumerate(log) if entry[0] == "prefill"]
    joining = [chunk for chunk in chunks if chunk[1] != first_slot(log)]
    assert len(joining) > 4
    assert all(size <= max(PREFILL_CHUNK, BLOCK) for _, _, size in joining)
    both = joining[1 : 2 * (len(joining) // 2) - 1]
    assert all(a[1] != b[1] for a, b in itertools.pairwise(both)), "prompts take turns"
    for (i, *_), (j, *_) in itertools.pairwise(joining):
        assert any(entry[0] == "step" for entry in log[i:j]), "a step between two chunks"


def first_slot(log: list[Any]) -> int:
    return int(log[0][1][0])


def test_a_prompt_is_read_in_whole_batches_when_nobody_waits(engine: Engine, log: Any) -> None:
    with working(engine) as scheduler:
        client = Client(engine, LONG, max_tokens=2)
        scheduler.submit(client.job)
        client.text()
    sizes = [entry[1][1] for entry in log if entry[0] == "prefill"]
    assert sizes[0] == engine.config.n_batch


def test_text_does_not_depend_on_the_chunks_of_the_prompt(engine: Engine, plain: Engine) -> None:
    with working(engine) as scheduler:
        clients = [Client(engine, MIDDLE + f"y{i} = ", max_tokens=30) for i in range(4)]
        for client in clients:
            scheduler.submit(client.job)
        texts = [client.text() for client in clients]
    for i, text in enumerate(texts):
        alone = plain.complete(MIDDLE + f"y{i} = ", max_tokens=30, temperature=0, ignore_end=True)
        assert text == alone.text


def test_a_cancelled_job_leaves_after_the_running_step(engine: Engine, log: list[Any]) -> None:
    with working(engine) as scheduler:
        gone, stays = (Client(engine, "import", max_tokens=1500) for _ in range(2))
        scheduler.submit(gone.job)
        scheduler.submit(stays.job)
        gone.until(Delta), stays.until(Delta)
        gone.job.cancel()
        at = len(log)
        wait_for(lambda: scheduler.load == (1, 0))
        together = [slots for kind, slots in log[at:] if kind == "step" and len(slots) == 2]
        assert len(together) <= 1 + 1  # the running one, and one that began before `at` was read
        stays.until(Delta)
        stays.job.cancel()


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_deadlines_end_jobs_that_run_and_that_wait(engine: Engine) -> None:
    with working(engine) as scheduler:
        running = [Client(engine, "import", max_tokens=1900) for _ in range(3)]
        for client in running:
            scheduler.submit(client.job)
            client.until(Started)
        now = time.monotonic()
        running[0].job.deadline = now + 0.2
        waiting = Client(engine, "import", max_tokens=5, deadline=now + 0.05)
        scheduler.submit(waiting.job)
        late = failure(waiting)
        assert isinstance(late, DeadlineError) and "waiting in line" in str(late)
        assert isinstance(failure(running[0]), DeadlineError)
        for client in running[1:]:
            client.job.cancel()


def failure(client: Client) -> Exception:
    while not isinstance(event := client.events.get(timeout=20), Failed):
        assert not isinstance(event, Finished)
    return event.error


def test_draining_refuses_what_waits_and_lets_running_jobs_end(engine: Engine) -> None:
    with working(engine) as scheduler:
        short = Client(engine, "import", max_tokens=100)
        long = [Client(engine, "import", max_tokens=1900) for _ in range(2)]
        for client in (short, *long):
            scheduler.submit(client.job)
            client.until(Started)
        waiting = Client(engine, "import", max_tokens=5)
        scheduler.submit(waiting.job)
        scheduler.drain(1.0)
        assert isinstance(failure(waiting), StateError)
        with pytest.raises(StateError, match="shutting down"):
            scheduler.submit(Client(engine, "a").job)
        assert short.text()
        assert all(isinstance(failure(client), StateError) for client in long)
        assert scheduler.load == (0, 0) and not scheduler.alive


def test_the_line_has_a_bound_for_whole_requests(engine: Engine) -> None:
    with working(engine, max_waiting=4) as scheduler:
        clients = [Client(engine, "import", max_tokens=1900) for _ in range(8)]
        for client in clients[:3]:
            scheduler.submit(client.job)
            client.until(Started)
        scheduler.submit(*(client.job for client in clients[3:6]))
        with pytest.raises(QueueFullError, match="3 requests are waiting"):
            scheduler.submit(clients[6].job, clients[7].job)
        assert scheduler.load == (3, 3)


def test_requests_take_turns_in_line() -> None:
    def job() -> Job:
        return Job([1], SamplingConfig())

    many, one = [job() for _ in range(3)], [job()]
    line = Line()
    line.add(many)
    line.add(one)
    assert [line.take() for _ in range(4)] == [many[0], one[0], many[1], many[2]]
    assert len(line) == 0
    line.add(many)
    assert line.remove(lambda j: j is many[1]) == [many[1]]
    assert len(line) == 2


@pytest.mark.parametrize("call", ["step", "prefill"])
def test_an_unexpected_failure_of_a_call_leaves_the_scheduler_alive(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with working(engine) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(engine, call, lambda *_: 1 // 0)
            client = Client(engine, "import os", max_tokens=5)
            scheduler.submit(client.job)
            assert "ZeroDivisionError" in str(failure(client))
        again = Client(engine, "import os", max_tokens=5)
        scheduler.submit(again.job)
        assert again.text()


def test_what_fails_at_the_end_of_a_request_is_no_failure_of_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = engine.drafter.forget
    failures = [RuntimeError("a plugin") for _ in range(engine.config.n_slots)]

    def failing(slot: int) -> None:
        forget(slot)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(engine.drafter, "forget", failing)
    with working(engine) as scheduler:
        for _ in range(2 * engine.config.n_slots):
            client = Client(engine, "def", max_tokens=4)
            scheduler.submit(client.job)
            client.until(Finished)
    assert not failures


def test_a_failure_of_the_thread_reaches_everybody(engine: Engine) -> None:
    with working(engine) as scheduler:
        scheduler.on_step = lambda _: 1 // 0  # type: ignore[assignment, return-value]
        clients = [Client(engine, "import", max_tokens=5) for _ in range(5)]
        scheduler.submit(*(client.job for client in clients))
        for client in clients:
            assert "ZeroDivisionError" in str(failure(client))
        wait_for(lambda: not scheduler.alive)
        with pytest.raises(StateError, match="no more requests"):
            scheduler.submit(Client(engine, "a").job)


def test_what_is_given_up_is_told_what_it_has(engine: Engine) -> None:
    with working(engine) as scheduler:
        clients = [Client(engine, "import", max_tokens=1900) for _ in range(4)]
        for client in clients:
            scheduler.submit(client.job)
        for client in clients[:3]:
            client.until(Delta)
        clients[3].job.cancel()
        assert "before it had a slot" in str(failure(clients[3]))
        for client in clients[:3]:
            client.job.cancel()
            while not isinstance(event := client.events.get(timeout=20), Finished):
                assert isinstance(event, Delta)
            assert event.result.finish_reason == "aborted"
            assert 0 < len(event.result.tokens) < 1900
