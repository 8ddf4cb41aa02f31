"""Errors in the shape of the API that is spoken, and bodies that must be strict JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pyspec.errors import (
    AbortedError,
    AllocationError,
    ComputeError,
    ContextError,
    DeadlineError,
    PyspecError,
    QueueFullError,
    StateError,
)
from pyspec.server.service import ClientGone

ANTHROPIC_PATH = "/v1/messages"

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_TAGS = {"str", "int", "float", "bool", "none", "dict", "json", "constrained-str"}


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, before it takes an API's shape."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def openai(self) -> dict[str, Any]:
        """OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": detail}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's shape."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def problem(error: BaseException) -> Problem:
    """What an error means for its request."""
    if isinstance(error, QueueFullError):
        return Problem(503, str(error), code="queue_full", retry_after=1)
    if isinstance(error, DeadlineError):
        return Problem(408, str(error), code="timeout")
    if isinstance(error, StateError):
        return Problem(503, str(error), retry_after=5)
    if isinstance(error, ComputeError | AllocationError | AbortedError):
        return Problem(500, str(error))
    if isinstance(error, ContextError):
        return Problem(400, str(error), code="context_length_exceeded")
    if isinstance(error, PyspecError):
        return Problem(400, str(error))
    return Problem(500, f"{type(error).__name__}: {error}")


def respond(request: Request, found: Problem) -> Response:
    """The answer that tells a problem."""
    anthropic = request.url.path.startswith(ANTHROPIC_PATH)
    headers = {} if found.retry_after is None else {"Retry-After": str(found.retry_after)}
    if found.status == 408:  # clients would send the request again, and wait as long
        headers["x-should-retry"] = "false"
    body = found.anthropic() if anthropic else found.openai()
    return JSONResponse(body, found.status, headers)


def handle_errors(app: FastAPI) -> None:
    """Makes every error of `app` an answer in the right shape."""

    @app.exception_handler(PyspecError)
    def refused(request: Request, error: PyspecError) -> Response:
        return respond(request, problem(error))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        found = _most_telling(error)
        param, message = _param(found["loc"]), str(found["msg"])
        if param is None and "json" not in request.headers.get("content-type", ""):
            message = "the body must be JSON, and Content-Type application/json"
        return respond(request, Problem(400, f"{param}: {message}" if param else message, param))

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        answer = respond(request, Problem(error.status_code, str(error.detail)))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientGone)
    def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    def broken(request: Request, error: Exception) -> Response:
        return respond(request, problem(error))


def _most_telling(error: RequestValidationError) -> dict[str, Any]:
    """Of the errors of the first wrong field, the one that a branch of a union got furthest with."""
    errors = list(error.errors())
    field = errors[0]["loc"][:2]
    return max((one for one in errors if one["loc"][:2] == field), key=lambda one: len(one["loc"]))


def _param(place: tuple[str | int, ...]) -> str | None:
    """The field that an error is about; the branches of unions are no part of its name."""
    parts = [str(part) for part in place if part != "body"]
    named = [part for part in parts if part not in _TAGS and "[" not in part and "(" not in part]
    return ".".join(named) or None


class StrictRoute(APIRoute):
    """A route whose body must be strict JSON: valid UTF-8, no NaN, no lone surrogates, not deep."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that reads JSON strictly."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(
                HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {error}"
            ) from None


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused."},
    503: {"model": ErrorBody, "description": "Too many requests are waiting."},
}
"""What every route's documentation says of errors."""
