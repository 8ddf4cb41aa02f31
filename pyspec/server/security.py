"""What protects the server from its clients: keys, origins, and limits on what a request may be.

`Guard` is ASGI middleware in front of everything. It reads a body whole before the application
sees it, so that nothing behind it can be made to hold more than allowed.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyspec.errors import ArgumentError

OPEN_PATHS = ("/", "/health")
"""Reading these needs no key; nor does what the page is made of, under ``/page/``."""

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""The ``X-Request-ID`` of the request that the running task answers."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may ask, and how much.

    Attributes:
        api_keys: Keys of which a request must carry one; none: no key is needed.
        cors: Origins whose pages may use the server, ``*`` for all; the server's own page may.
        max_body: Most bytes of a request body.
        max_depth: Most brackets a JSON body may nest, schemas included.
        max_stops: Most stop strings.
        max_choices: Most choices, or prompts, of a request.
        body_timeout: Seconds that a client may pause while it sends a body.
    """

    api_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    max_body: int = 16 << 20
    max_depth: int = 64
    max_stops: int = 16
    max_choices: int = 64
    body_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body", "max_depth", "max_stops", "max_choices"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}, must be at least 1")
        for key in self.api_keys:
            if not key.strip() or not key.isascii() or not key.isprintable():
                raise ArgumentError("api_key is empty or not printable ASCII, must be a word")
        for origin in self.cors:
            parts = urlsplit(origin)
            if origin != "*" and not (parts.scheme and parts.netloc and not parts.path):
                raise ArgumentError(f"cors is {origin!r}, must be like https://example.org or *")


class Refused(Exception):
    """A request that is not let through."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def install(app: FastAPI, config: SecurityConfig) -> None:
    """Puts the guard, and CORS where it is asked for, in front of `app`."""
    app.add_middleware(Guard, config=config)
    if config.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID"],
        )


class Guard:
    """Lets through what the configuration allows; answers the rest in the API's own error shape.

    Args:
        app: The application behind it.
        config: What is allowed.
    """

    def __init__(self, app: ASGIApp, config: SecurityConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        try:
            self._check_key(scope, headers)
            self._check_origin(headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = await self._checked_body(headers, receive)
        except Refused as refused:
            await _answer(scope["path"], refused)(scope, receive, tagged)
        except ConnectionError:  # the client has gone: nobody to answer
            pass
        else:
            await self._app(scope, receive, tagged)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path, method = scope["path"], scope["method"]
        is_open = path in OPEN_PATHS or path.startswith("/page/")
        if not self._config.api_keys or (is_open and method in ("GET", "HEAD")):
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Every key is compared, and in constant time: an answer's time tells nothing.
        found = [
            hmac.compare_digest(key.encode("utf-8", "replace"), known.encode())
            for known in self._config.api_keys
        ]
        if not any(found):
            problem = "the API key is wrong" if key else "an API key is needed"
            raise Refused(401, problem, {"WWW-Authenticate": "Bearer"})

    def _check_origin(self, headers: Headers) -> None:
        """Refuses other sites' pages, even where their browsers do not ask for permission first."""
        origin = headers.get("origin")
        cors = self._config.cors
        if origin is None or "*" in cors or origin in cors:
            return
        host = urlsplit(origin).netloc
        if host and host == headers.get("host") and (self._config.api_keys or _is_local(host)):
            return
        raise Refused(403, f"pages of {origin[:100]!r} may not use this server: see --cors")

    async def _checked_body(self, headers: Headers, receive: Receive) -> Receive:
        most = self._config.max_body
        too_long = Refused(413, f"the body is longer than {most} bytes", {"Connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            raise too_long
        body = bytearray()
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), self._config.body_timeout)
            except TimeoutError:
                raise Refused(
                    408, "the body did not arrive in time", {"Connection": "close"}
                ) from None
            if message["type"] == "http.disconnect":
                raise ConnectionError
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > most:
                raise too_long
        check_body(bytes(body), self._config)
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return replay


def check_body(body: bytes, config: SecurityConfig) -> None:
    """Refuses a JSON body that nests too deep, or asks for too many choices or stops.

    What is no JSON passes: it is not for this function to say so.
    """
    if body.count(b"[") + body.count(b"{") > config.max_depth and _depth(body) > config.max_depth:
        raise Refused(400, f"the body nests more than {config.max_depth} levels of JSON")
    if not re.search(rb'"(n|best_of|stop|stop_sequences|prompt|input)"', body):
        return
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    for name, count, most in _counts(fields if isinstance(fields, dict) else {}, config):
        if count > most:
            raise Refused(400, f"{name} asks for {count}, and {most} are allowed")


def _counts(fields: dict[str, Any], config: SecurityConfig) -> Iterator[tuple[str, int, int]]:
    for name in ("n", "best_of"):
        if isinstance(fields.get(name), int):
            yield name, fields[name], config.max_choices
    for name in ("stop", "stop_sequences"):
        if isinstance(fields.get(name), list):
            yield name, len(fields[name]), config.max_stops
    for name in ("prompt", "input"):
        value = fields.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str):
            yield name, len(value), config.max_choices


def _depth(body: bytes) -> int:
    depth = deepest = 0
    for found in _BRACKETS.finditer(body):
        mark = found[0]
        if mark in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in b"]}":
            depth -= 1
    return deepest


def _is_local(netloc: str) -> bool:
    """Whether a host is this machine by a name that no one else can give to it."""
    host = urlsplit(f"//{netloc}").hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _answer(path: str, refused: Refused) -> JSONResponse:
    status = refused.status
    kinds = {401: "authentication_error", 403: "permission_error", 413: "request_too_large"}
    if path.startswith("/v1/messages"):  # Anthropic's shape
        kind = kinds.get(status, "invalid_request_error")
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(refused)}}
    else:
        code = {401: "invalid_api_key", 413: "request_too_large"}.get(status)
        error = {"message": str(refused), "type": "invalid_request_error", "param": None}
        body = {"error": {**error, "code": code}}
    return JSONResponse(body, status, headers=refused.headers)
