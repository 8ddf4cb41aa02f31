"""`AsyncEngine`: many requests at once, for asyncio and for threads.

    async with pyspec.AsyncEngine("model.gguf", n_slots=8) as engine:
        async for piece in engine.generate("def main(", max_tokens=64):
            print(piece, end="", flush=True)
        results = await asyncio.gather(*(engine.complete(prompt) for prompt in prompts))

One thread owns the engine and steps all running requests together; the event loop never waits for
the model.
"""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from pyspec.config import DraftConfig, EngineConfig, SamplingConfig
from pyspec.errors import AbortedError, StateError
from pyspec.generate import Engine, GenerationResult, Progress, Prompt, request_of
from pyspec.job import Delta, Event, Failed, Finished, Job
from pyspec.scheduler import Scheduler


class AsyncEngine:
    """An engine whose slots serve many requests at once.

    Args:
        model: Path of a GGUF file, ``"demo"``, or an `Engine` that is open already; from then on
            the async engine alone uses it.
        draft: As for `Engine`.
        config: As for `Engine`; ``n_slots`` is how many requests run at once, the others wait.
        max_waiting: Most requests in line.
        progress: Called with the loaded fraction, by the thread that loads.
        **options: Fields of `EngineConfig`, such as ``n_slots=8``.

    The model is loaded by ``async with``, by ``with``, or by `start`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Engine,
        draft: str | DraftConfig = "auto",
        config: EngineConfig | None = None,
        *,
        max_waiting: int = 1024,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self._open: Callable[[], Engine] = (
            (lambda: model)
            if isinstance(model, Engine)
            else (lambda: Engine(model, draft, config, progress=progress, **options))
        )
        self._max_waiting = max_waiting
        self._scheduler: Scheduler | None = None

    # ---- requests ----

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Many[str] = (),
        ignore_end: bool = False,
        sampling: SamplingConfig | None = None,
        **options: Any,
    ) -> AsyncGeneration:
        """Puts a request in line: iterate the result with ``async for``, or await its `result`.

        Arguments are those of `Engine.generate`. To be called in a running event loop.

        Raises:
            ArgumentError: An option breaks its rule.
            QueueFullError: `max_waiting` requests are in line already.
            StateError: The engine is not running.
        """
        request = request_of(
            max_tokens=max_tokens, stop=stop, ignore_end=ignore_end, sampling=sampling, **options
        )
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def send(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(prompt, send=send, **request)
        self._running().submit(job)
        return AsyncGeneration(job, events)

    async def complete(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """`generate`, waiting for the end; when the waiting task is cancelled, so is the request."""
        generation = self.generate(prompt, **options)
        try:
            return await generation.result()
        finally:
            generation.cancel()

    def chat(
        self,
        messages: Many[Mapping[str, Any]],
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGeneration:
        """`generate` for the prompt that the model's chat template makes of `messages`.

        Args:
            messages: As in OpenAI's API: mappings with ``role`` and ``content``.
            template: Variables for the template, such as ``{"enable_thinking": False}``.
            **options: As for `generate`.

        Raises:
            TemplateError: The model has no template, or it refuses the messages.
        """
        return self.generate(self._prompt_of(messages, template), **options)

    def submit(self, prompt: Prompt, **options: Any) -> BlockingGeneration:
        """`generate` for threads: iterate the result with ``for``, or call its `result`."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        job = Job(prompt, send=events.put, **request_of(**options))
        self._running().submit(job)
        return BlockingGeneration(job, events)

    @property
    def load(self) -> tuple[int, int]:
        """Requests running, and requests in line."""
        return self._running().load

    @property
    def engine(self) -> Engine:
        """The engine, for facts and for its text functions; the thread alone decodes with it."""
        return self._running().engine

    def _prompt_of(
        self, messages: Many[Mapping[str, Any]], variables: Mapping[str, Any] | None
    ) -> str:
        return self.engine.chat_template.prompt(messages, **(variables or {}))

    def _running(self) -> Scheduler:
        if self._scheduler is None:
            raise StateError("the engine is not running: use `async with`, `with` or start()")
        return self._scheduler

    # ---- life ----

    def start(self) -> Self:
        """Loads the model and begins to serve."""
        if self._scheduler is None:
            self._serve(self._open())
        return self

    def close(self) -> None:
        """Ends all requests with `AbortedError`, and frees the model. Safe to call twice."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:  # a long prompt need not be read to its end
            scheduler.stop(AbortedError("the engine was closed"), abort=True)
            scheduler.engine.close()

    def _serve(self, engine: Engine) -> None:
        self._scheduler = Scheduler(engine, self._max_waiting)
        self._scheduler.start()

    async def __aenter__(self) -> Self:
        if self._scheduler is None:
            self._serve(await asyncio.to_thread(self._open))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Request:
    """A request of an `AsyncEngine`, whoever waits for it.

    Dropping it gives it up, and frees its slot after the running step.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: Finished | Failed | None = None

    def cancel(self) -> None:
        """Gives it up; its result then has the finish reason ``"aborted"``."""
        self._job.cancel()

    def _take(self, event: Event) -> str | None:
        """The text of an event that has some; the last one is kept."""
        if isinstance(event, Delta):
            return event.text
        if isinstance(event, Finished | Failed):
            self._last = event
        return None

    def _end(self, done: Exception) -> Exception:
        """What iterating ends with: `done`, or why the request failed."""
        return self._last.error if isinstance(self._last, Failed) else done

    def _result(self) -> GenerationResult:
        assert isinstance(self._last, Finished)
        return self._last.result

    def __del__(self) -> None:
        self.cancel()


class AsyncGeneration(_Request, AsyncIterator[str]):
    """A request of an `AsyncEngine`: text as it appears, then the result.

    Dropping it gives it up, and frees its slot after the running step.
    """

    def __init__(self, job: Job, events: asyncio.Queue[Event]) -> None:
        super().__init__(job)
        self._events = events

    async def __anext__(self) -> str:
        while self._last is None:
            text = self._take(await self._events.get())
            if text is not None:
                return text
        raise self._end(StopAsyncIteration())

    async def result(self) -> GenerationResult:
        """Everything, once it has ended: waits for that, and skips the pieces before it."""
        async for _ in self:
            pass
        return self._result()


class BlockingGeneration(_Request, Iterator[str]):
    """A request of an `AsyncEngine`, for threads: text as it appears, then the result."""

    def __init__(self, job: Job, events: queue.SimpleQueue[Event]) -> None:
        super().__init__(job)
        self._events = events

    def __next__(self) -> str:
        return self._next(None)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Everything, once it has ended: waits for that, and skips the pieces before it.

        Raises:
            TimeoutError: No piece came for `timeout` seconds; it can be asked again.
        """
        with suppress(StopIteration):
            while True:
                self._next(timeout)
        return self._result()

    def _next(self, timeout: float | None) -> str:
        while self._last is None:
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"no text came for {timeout} seconds") from None
            text = self._take(event)
            if text is not None:
                return text
        raise self._end(StopIteration())
