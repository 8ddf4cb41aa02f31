"""The HTTP side: routes, streams and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException

from pyspec.errors import (
    AbortedError,
    AllocationError,
    ComputeError,
    ContextError,
    PyspecError,
    StateError,
)
from pyspec.generate import Engine
from pyspec.server.schemas import ChatRequest, CompletionRequest, error_body, usage
from pyspec.server.worker import Delta, Event, Failed, Finished, Job, QueueFullError, Worker

T = TypeVar("T")

Choice = Callable[[int, str | None, str | None], dict[str, Any]]
"""(index, text, finish reason) to one entry of ``choices``."""


class ClientGone(Exception):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What tells the two endpoints' answers apart."""

    prefix: str
    whole: str
    chunk: str
    whole_choice: Choice
    chunk_choice: Choice
    opening: Callable[[int], dict[str, Any]] | None = None

    def head(self, model: str, stream: bool) -> dict[str, Any]:
        """The fields in front of ``choices``."""
        return {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.chunk if stream else self.whole,
            "created": int(time.time()),
            "model": model,
        }


def _choice(**body: Any) -> dict[str, Any]:
    return {**body, "logprobs": None}


COMPLETION = Shape(
    "cmpl",
    "text_completion",
    "text_completion",
    lambda i, text, reason: _choice(index=i, text=text or "", finish_reason=reason),
    lambda i, text, reason: _choice(index=i, text=text or "", finish_reason=reason),
)

CHAT = Shape(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda i, text, reason: _choice(
        index=i, message={"role": "assistant", "content": text or ""}, finish_reason=reason
    ),
    lambda i, text, reason: _choice(
        index=i, delta={} if text is None else {"content": text}, finish_reason=reason
    ),
    lambda i: _choice(index=i, delta={"role": "assistant", "content": ""}, finish_reason=None),
)


def create_app(engine: Engine, model_name: str, max_waiting: int = 256) -> FastAPI:
    """The application that serves `engine` under `model_name`.

    The engine belongs to the application's worker thread from start-up to shutdown.
    """
    worker = Worker(engine, max_waiting)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)

    app = FastAPI(title="pyspec", lifespan=lifespan)
    app.state.worker = worker
    _handle_errors(app)

    @app.get("/health")
    def health() -> Response:
        """200 while requests are served."""
        running, waiting = worker.load
        status = HTTPStatus.OK if worker.alive else HTTPStatus.SERVICE_UNAVAILABLE
        body = {
            "status": "ok" if worker.alive else "stopped",
            "running": running,
            "waiting": waiting,
        }
        return JSONResponse(body, status)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """The one model that is served."""
        model = {"id": model_name, "object": "model", "created": started, "owned_by": "pyspec"}
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """The model by name."""
        if name != model_name:
            raise HTTPException(
                HTTPStatus.NOT_FOUND, f"no model is called {name!r}, only {model_name!r}"
            )
        return models()["data"][0]

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several prompts."""
        sampling = body.sampling()
        jobs = [
            Job(_constant(prompt), sampling, body.max_tokens, body.stops, body.ignore_eos)
            for prompt in body.prompts
        ]
        return await _answer(jobs, body.stream, body.include_usage, COMPLETION, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        messages = [message.for_template() for message in body.messages]

        def prompt(engine: Engine) -> str:
            return engine.chat_template.render(messages, **body.chat_template_kwargs)

        sampling = body.sampling(body.json_schema)
        job = Job(prompt, sampling, body.limit, body.stops, body.ignore_eos)
        return await _answer([job], body.stream, body.include_usage, CHAT, request)

    async def _answer(
        jobs: list[Job], stream: bool, include_usage: bool, shape: Shape, request: Request
    ) -> Response:
        head = shape.head(model_name, stream)
        try:
            for job in jobs:
                worker.submit(job)
            first = [await _unless_gone(_next(jobs[0]), request)]
            if stream:
                chunks = _chunks(jobs, first, head, include_usage, shape)
                return EventSourceResponse(chunks, sep="\n")
            answer = _collect(jobs, first, head, shape)
            return JSONResponse(await _unless_gone(answer, request))
        except BaseException:
            _cancel(jobs)
            raise

    return app


async def _collect(
    jobs: list[Job], first: list[Event], head: dict[str, Any], shape: Shape
) -> dict[str, Any]:
    """The whole answer, once all jobs are done."""
    choices, prompt_tokens, completion_tokens = [], 0, 0
    for index, job in enumerate(jobs):
        text, event = "", first.pop() if first else await _next(job)
        while not isinstance(event, Finished):
            text += event.text if isinstance(event, Delta) else ""
            event = await _next(job)
        prompt_tokens += event.prompt_tokens
        completion_tokens += event.completion_tokens
        choices.append(shape.whole_choice(index, text, event.reason))
    return {**head, "choices": choices, "usage": usage(prompt_tokens, completion_tokens)}


async def _chunks(
    jobs: list[Job], first: list[Event], head: dict[str, Any], include_usage: bool, shape: Shape
) -> AsyncIterator[dict[str, str]]:
    """The answer as server-sent events. Closing it, as a leaving client does, cancels the jobs."""
    prompt_tokens = completion_tokens = 0
    try:
        for index, job in enumerate(jobs):
            if shape.opening is not None:
                yield _event({**head, "choices": [shape.opening(index)]})
            event = first.pop() if first else await _next(job)
            while not isinstance(event, Finished):
                if isinstance(event, Delta):
                    yield _event({**head, "choices": [shape.chunk_choice(index, event.text, None)]})
                event = await _next(job)
            prompt_tokens += event.prompt_tokens
            completion_tokens += event.completion_tokens
            yield _event({**head, "choices": [shape.chunk_choice(index, None, event.reason)]})
        if include_usage:
            yield _event({**head, "choices": [], "usage": usage(prompt_tokens, completion_tokens)})
        yield {"data": "[DONE]"}
    except PyspecError as error:
        yield _event(error_body(str(error), "server_error"))
    finally:
        _cancel(jobs)


async def _unless_gone(work: Awaitable[T], request: Request) -> T:
    """The result of `work`; gives up at once when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(job: Job) -> Event:
    """The job's next event; raises the error of one that failed."""
    event = await job.next_event()
    if isinstance(event, Failed):
        raise event.error
    return event


def _cancel(jobs: list[Job]) -> None:
    for job in jobs:
        job.cancel()


def _event(body: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(body, ensure_ascii=False, separators=(",", ":"))}


def _constant(prompt: str | list[int]) -> Callable[[Engine], str | list[int]]:
    return lambda _: prompt


def _handle_errors(app: FastAPI) -> None:
    def reply(
        status: int, message: str, param: str | None = None, code: str | None = None
    ) -> JSONResponse:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse(error_body(message, kind, param, code), status)

    @app.exception_handler(PyspecError)
    def refused(_: Request, error: PyspecError) -> Response:
        if isinstance(error, QueueFullError):
            answer = reply(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="queue_full")
            answer.headers["Retry-After"] = "1"
            return answer
        if isinstance(error, StateError):
            return reply(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if isinstance(error, ComputeError | AllocationError | AbortedError):
            return reply(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return reply(HTTPStatus.BAD_REQUEST, str(error), code=code)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
        return reply(HTTPStatus.BAD_REQUEST, message, param)

    @app.exception_handler(HTTPException)
    def http(_: Request, error: HTTPException) -> Response:
        return reply(error.status_code, str(error.detail))

    @app.exception_handler(ClientGone)
    def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    def broken(_: Request, error: Exception) -> Response:
        return reply(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
