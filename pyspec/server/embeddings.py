"""OpenAI's embeddings: no model that pyspec decodes gives any, and this says why."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from pyspec.errors import ArgumentError
from pyspec.server.errors import ERRORS, StrictRoute
from pyspec.server.schemas import Model
from pyspec.server.service import Service


class EmbeddingRequest(Model):
    """``POST /v1/embeddings``."""

    input: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1)]
    model: str = ""


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, responses=ERRORS, tags=["OpenAI"])

    @routes.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> None:
        """Refused, with the reason."""
        pooling = service.engine.file.get("pooling_type", 0)
        reason = (
            "pyspec decodes models and does not pool them"
            if pooling
            else "it is a generative model, trained for no embeddings: its file names no pooling"
        )
        raise ArgumentError(f"model {service.model_name!r} gives no embeddings: {reason}")

    return routes
