"""A uvicorn server that lets running answers end when it is told to stop."""

from __future__ import annotations

import math
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

SECONDS = 5.0
"""How long running answers may take to end."""

_CLOSING_SECONDS = 3
"""What ended answers may take to reach their clients."""


class GracefulServer(uvicorn.Server):
    """On SIGINT or SIGTERM nothing new is taken, and whatever waits in line is refused.

    Running answers have `seconds` to end; those that have not are told so in their API's words.
    A second SIGINT ends everything at once.
    """

    def __init__(self, app: FastAPI, seconds: float = SECONDS, **config: Any) -> None:
        self._scheduler = app.state.scheduler
        self._seconds = seconds
        patience = math.ceil(seconds) + _CLOSING_SECONDS
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=patience, **config))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on a signal."""
        self._scheduler.drain(self._seconds)
        super().handle_exit(sig, frame)
