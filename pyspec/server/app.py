"""The application: one module per API on one `Service`, health, and what is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from pyspec._version import __version__
from pyspec.generate import Engine
from pyspec.scheduler import Scheduler
from pyspec.server import anthropic, embeddings, openai_chat, page, responses, tokens
from pyspec.server.errors import ERRORS, handle_errors
from pyspec.server.security import SecurityConfig
from pyspec.server.security import install as install_security
from pyspec.server.service import Service
from pyspec.server.telemetry import Telemetry


def create_app(
    engine: Engine,
    model_name: str,
    max_waiting: int = 256,
    security: SecurityConfig | None = None,
    timeout: float | None = None,
) -> FastAPI:
    """The application that serves `engine` under `model_name`.

    The engine belongs to the scheduler's thread from start-up to shutdown.

    Args:
        engine: Decodes.
        model_name: What clients call the model.
        max_waiting: Most choices in line; requests past that get 503.
        security: Who may ask, and how much.
        timeout: Seconds that a request may take when it does not say itself; None for no limit.
    """
    scheduler = Scheduler(engine, max_waiting)
    service = Service(scheduler, model_name, timeout)
    telemetry = Telemetry(scheduler)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        try:
            yield
        finally:
            telemetry.close()
            await asyncio.to_thread(scheduler.stop)
            service.close()

    app = FastAPI(title="pyspec", version=__version__, lifespan=lifespan)
    app.state.scheduler = scheduler
    app.state.service = service
    handle_errors(app)
    _add_facts(app, service)
    for api in (openai_chat, responses, anthropic, embeddings, tokens):
        app.include_router(api.router(service))
    page.install(app)
    install_security(app, security or SecurityConfig())
    telemetry.install(app)
    return app


def _add_facts(app: FastAPI, service: Service) -> None:
    scheduler, started = service.scheduler, int(time.time())
    name = service.model_name
    entry = {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "pyspec",
        "max_model_len": service.engine.n_ctx,
        # Anthropic's names
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
    }

    @app.get("/health", responses={503: {"description": "No request is taken."}})
    def health() -> Response:
        """200 while requests are taken."""
        running, waiting = scheduler.load
        status = HTTPStatus.OK if scheduler.alive else HTTPStatus.SERVICE_UNAVAILABLE
        state = "ok" if scheduler.alive else "stopped"
        return JSONResponse({"status": state, "running": running, "waiting": waiting}, status)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """The one model that is served."""
        pages = {"first_id": name, "last_id": name, "has_more": False}
        return {"object": "list", "data": [entry], **pages}

    @app.get("/v1/models/{wanted:path}", responses=ERRORS)
    def model(wanted: str) -> dict[str, Any]:
        """The model by name."""
        if wanted != name:
            raise HTTPException(
                HTTPStatus.NOT_FOUND, f"no model is called {wanted!r}, only {name!r}"
            )
        return entry
