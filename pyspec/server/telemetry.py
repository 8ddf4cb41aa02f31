"""What the server can tell of itself: Prometheus metrics, and live statistics of speculation.

`Telemetry` is told of every step by the scheduler and of every answer by its middleware. It serves
``/metrics``, ``/v1/speculation`` and ``/v1/speculation/stream``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    exposition,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sse_starlette import EventSourceResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyspec.generate import Engine
from pyspec.info import report
from pyspec.job import Job
from pyspec.scheduler import Scheduler
from pyspec.server.speculation import Speculation, Taken

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_BACKLOG = 1024  # events that a slow subscriber may be behind


class Metrics:
    """The counters of one application, in a registry of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "pyspec_http_requests", "Answers.", ["endpoint", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "pyspec_http_request_seconds",
            "Time to the end of an answer.",
            ["endpoint"],
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.prompt = Counter("pyspec_prompt_tokens", "Prompt tokens.", registry=registry)
        self.cached = Counter(
            "pyspec_cached_prompt_tokens", "Prompt tokens not read again.", registry=registry
        )
        self.generated = Counter("pyspec_generated_tokens", "Tokens generated.", registry=registry)
        self.finished = Counter(
            "pyspec_requests_finished", "Generations by how they ended.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.steps = Counter("pyspec_steps", "Verify passes.", registry=registry)
        names = ["source", "depth"]
        self.drafted = Counter(
            "pyspec_draft_steps", "Trees with a draft of a source at a depth.", names,
            registry=registry,
        )  # fmt: skip
        self.accepted = Counter(
            "pyspec_accepted_drafts", "Accepted drafts by source and depth.", names,
            registry=registry,
        )  # fmt: skip
        self.step_seconds = Histogram(
            "pyspec_step_seconds",
            "Wall time of a step by stage.",
            ["stage"],
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        load = Gauge("pyspec_requests", "Requests now.", ["state"], registry=registry)
        load.labels("running").set_function(lambda: scheduler.load[0])
        load.labels("waiting").set_function(lambda: scheduler.load[1])
        slots = Gauge("pyspec_slots", "Requests decoded at the same time.", registry=registry)
        slots.set(scheduler.engine.config.n_slots)
        memory = Gauge("pyspec_memory_bytes", "Memory by use.", ["use"], registry=registry)
        for use, size in report(scheduler.engine).memory.items():
            memory.labels(use).set(size)
        ProcessCollector(registry=registry)
        registry.register(_CacheCollector(scheduler.engine))

    def add_step(self, taken: list[Taken], stage_ms: dict[str, float]) -> None:
        """Counts one step of the scheduler."""
        self.steps.inc()
        for stage, ms in stage_ms.items():
            self.step_seconds.labels(stage).observe(ms / 1e3)
        self.generated.inc(sum(one.emitted for one in taken))
        for counter, hits in (
            (self.drafted, [hit for one in taken for hit in one.drafted]),
            (self.accepted, [hit for one in taken for hit in one.accepted]),
        ):
            for source, depth in hits:
                counter.labels(source, str(depth)).inc()


class _CacheCollector(Collector):
    """Reads the prefix cache when it is asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> list[Metric]:
        cache = self._engine.cache
        if cache is None:
            return []
        counts, store = cache.counts, cache.store
        size = GaugeMetricFamily("pyspec_cache_bytes", "Bytes of checkpoints.", labels=["place"])
        size.add_metric(["memory"], cache.held)
        size.add_metric(["disk"], store.bytes if store else 0)
        return [
            CounterMetricFamily("pyspec_cache_hits", "Prompts begun by one.", counts.hits),
            CounterMetricFamily("pyspec_cache_misses", "Prompts read whole.", counts.misses),
            CounterMetricFamily("pyspec_cache_evicted", "Dropped for room.", counts.evicted),
            GaugeMetricFamily("pyspec_cache_checkpoints", "Checkpoints kept.", len(cache)),
            size,
        ]


class Telemetry:
    """Collects on the scheduler's thread, serves on the event loop.

    Args:
        scheduler: Its steps and jobs are watched.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.metrics = Metrics(scheduler)
        self.speculation = Speculation(scheduler.engine)
        self._scheduler = scheduler
        self._subscribers: dict[asyncio.Queue[str | None], Callable[[str | None], None]] = {}
        scheduler.on_step = self._steps
        scheduler.on_end = self._end

    def install(self, app: FastAPI) -> None:
        """Adds the routes and the middleware that counts answers."""
        app.include_router(self._router())
        app.add_middleware(_CountAnswers, metrics=self.metrics)

    def close(self) -> None:
        """Ends all live streams."""
        for hand_over in list(self._subscribers.values()):
            hand_over(None)

    # ---- on the scheduler's thread ----

    def _steps(self, emissions: list[tuple[Job, Any]]) -> None:
        """Takes in a step, or those of a coast."""
        clock = self._scheduler.engine.clock
        stages = {**clock.ms, "other": max(0.0, clock.total_ms - sum(clock.ms.values()))}
        singles = [(job, one) for job, emission in emissions for one in emission.single()]
        if len(singles) == len({id(job) for job, _ in singles}):
            self._step(singles, stages)
            return
        share = {name: ms / len(singles) for name, ms in stages.items()}
        for one in singles:
            self._step([one], share)

    def _step(self, emissions: list[tuple[Job, Any]], stages: dict[str, float]) -> None:
        taken = self.speculation.add_step(
            [(job.request_id, emission) for job, emission in emissions], stages
        )
        self.metrics.add_step(taken, stages)
        if self._subscribers:
            self._publish({"type": "step", **event} for event in map(self.speculation.event, taken))

    def _end(self, job: Job) -> None:
        sequence = job.sequence
        self.metrics.prompt.inc(sequence.prompt_length)
        self.metrics.cached.inc(sequence.stats.cached_tokens)
        self.metrics.finished.labels(str(sequence.finish_reason or "aborted")).inc()
        self.speculation.end(sequence.slot)
        if self._subscribers:
            self._publish([{"type": "end", "request": job.request_id, "slot": sequence.slot}])

    def _publish(self, events: Any) -> None:
        for event in events:
            line = json.dumps(event, ensure_ascii=False)
            for hand_over in list(self._subscribers.values()):
                hand_over(line)

    # ---- on the event loop ----

    async def _events(self) -> AsyncIterator[dict[str, str]]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | None] = asyncio.Queue(_BACKLOG)

        def put(line: str | None) -> None:
            if queue.full():  # too slow: it misses the oldest
                queue.get_nowait()
            queue.put_nowait(line)

        def hand_over(line: str | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(put, line)

        self._subscribers[queue] = hand_over
        try:
            yield {"comment": "open"}
            while (line := await queue.get()) is not None:
                yield {"data": line}
        finally:
            del self._subscribers[queue]

    def _router(self) -> APIRouter:
        router = APIRouter(tags=["telemetry"])

        @router.get("/metrics", response_class=Response)
        def metrics() -> Response:
            """Prometheus metrics."""
            text = exposition.generate_latest(self.metrics.registry)
            return Response(text, media_type=exposition.CONTENT_TYPE_LATEST)

        @router.get("/v1/speculation")
        def speculation() -> dict[str, Any]:
            """How speculation goes: per slot and in total, the last trees, speed."""
            return self.speculation.snapshot()

        @router.get("/v1/speculation/stream", include_in_schema=False)  # it has no end
        async def stream() -> EventSourceResponse:
            """Server-sent events: one per step and request, with tokens by source and the tree.

            A request is named by the ``X-Request-ID`` that its client sent.
            """
            return EventSourceResponse(self._events(), sep="\n")

        return router


class _CountAnswers:
    """ASGI middleware: counts answers by route and status. Unknown paths share one label."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = "499", time.perf_counter()  # nobody there any more

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, status).inc()
            self._metrics.request_seconds.labels(endpoint).observe(time.perf_counter() - began)
