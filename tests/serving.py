"""A server in a thread, for tests that speak to it as clients do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from pyspec import Engine
from pyspec.server.app import create_app


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
