"""`Outbox`: from the scheduler's thread to the event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from pyspec.job import Event, Send


class Outbox:
    """The events of a request's jobs, in the order they happen, for the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def sender(self, index: int) -> Send:
        """What puts events of job `index` in here, from any thread."""

        def send(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return send

    async def next(self) -> tuple[int, Event]:
        """The next event and the index of its job."""
        return await self._events.get()
