"""Servers for tests: in process through ASGI, in a thread, and as a command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from pyspec import Engine
from pyspec.server.app import create_app
from tests.test_cli import COMMAND


@asynccontextmanager
async def serving(engine: Engine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, whose worker runs as long."""
    app = create_app(engine, "demo", **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@contextmanager
def serve(engine: Engine, **options: Any) -> Iterator[str]:
    """Serves `engine` as ``demo`` on a free port; gives its URL."""
    app = create_app(engine, "demo", **options)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


@dataclass(frozen=True)
class Running:
    """A server process.

    Attributes:
        url: Its address.
        process: The process.
        log: Where its two output streams go.
    """

    url: str
    process: subprocess.Popen
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@contextmanager
def running(
    directory: Path, *arguments: str, model: str = "demo", env: dict[str, str] | None = None
) -> Iterator[Running]:
    """``pyspec serve MODEL`` on a free port."""
    log = directory / f"server-{time.monotonic_ns()}.log"
    command = [*COMMAND, "serve", model, "--port", "0", "--threads", "1", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
    try:
        yield Running(_url_of(log, process), process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _url_of(log: Path, process: subprocess.Popen) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"http://\S+:\d+", log.read_text()):
            url = found.group()
            try:
                httpx.get(f"{url}/health")
            except httpx.TransportError:
                pass
            else:
                return url
        time.sleep(0.05)
    raise AssertionError(log.read_text())
