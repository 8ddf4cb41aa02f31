"""The page at ``/``: a chat, and what speculation does while it answers.

Plain HTML, CSS and JavaScript beside this file; nothing is fetched from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

FILES = Path(__file__).parent

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def install(app: FastAPI) -> None:
    """Adds ``/`` and ``/page/...``."""

    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return FileResponse(FILES / "index.html", headers=_HEADERS)

    app.mount("/page", StaticFiles(directory=FILES / "static"), name="page")
