"""Server-sent events: a response that pings while it waits and notices a client that leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pyspec.server.service import disconnected

PING_SECONDS = 10.0
"""Longest silence of a stream."""


def event(body: dict[str, Any] | str, name: str | None = None) -> str:
    """One event; a body that is no string becomes JSON."""
    text = body if isinstance(body, str) else _json(body)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """Sends events until they end or the client leaves.

    Args:
        events: The events, as `event` makes them.
        request: Whom they are for.
        close: Called in the end, whatever happened.
        ping: What to send when there has been nothing for a while.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        request: Request,
        close: Callable[[], None],
        ping: str = ": ping\n\n",
    ) -> None:
        self._close = close
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(
            _with_pings(events, request, ping), headers=headers, media_type="text/event-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _with_pings(
    events: AsyncIterator[str], request: Request, ping: str
) -> AsyncIterator[str]:
    gone = asyncio.ensure_future(disconnected(request))
    pending: asyncio.Future[str] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_advance(events))
            await asyncio.wait(
                (pending, gone), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if pending.done():
                text, pending = pending.result(), None
                if not text:
                    return
                yield text
            elif gone.done():
                return
            else:
                yield ping
    finally:
        gone.cancel()
        if pending is not None:
            pending.cancel()


async def _advance(events: AsyncIterator[str]) -> str:
    return await anext(events, "")


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
