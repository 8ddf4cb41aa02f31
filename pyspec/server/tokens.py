"""Text to tokens and back, as llama.cpp's server offers it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from pyspec.errors import ArgumentError
from pyspec.generate import Engine
from pyspec.server.errors import ERRORS, StrictRoute
from pyspec.server.openai_chat import Message, ToolParam
from pyspec.server.schemas import Model
from pyspec.server.service import Conversation, Service, chat_prompt
from pyspec.server.tools import MAX_TOOLS, Tool, Toolbox

Json = dict[str, Any]

MAX_TOKENS = 1 << 20
"""Most tokens of a request."""


class TokenizeRequest(Model):
    """``POST /tokenize``: a text as it is, or a conversation as the chat template shows it."""

    content: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Model):
    """``POST /detokenize``."""

    tokens: list[int] = Field(max_length=MAX_TOKENS)


def _tokenize(engine: Engine, body: TokenizeRequest) -> Json:
    if (body.content is None) == (body.messages is None):
        raise ArgumentError("content or messages must be given, and not both")
    if body.content is not None:
        tokens = engine.native.tokenize(
            body.content, add_special=body.add_special, parse_special=body.parse_special
        )
    else:
        messages = [m.for_template(index) for index, m in enumerate(body.messages or ())]
        tools = tuple(
            Tool(t.function.name, t.function.description or "", t.function.parameters or {})
            for t in body.tools or ()
        )
        tokens = chat_prompt(engine, Conversation(messages, Toolbox(tools))).tokens
    found: list[Any] = tokens
    if body.with_pieces:
        found = [{"id": token, "piece": _piece(engine, token)} for token in tokens]
    return {"tokens": found, "count": len(tokens), "max_model_len": engine.n_ctx}


def _piece(engine: Engine, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are no UTF-8 on their own."""
    data = engine.native.token_to_piece(token, special=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _detokenize(engine: Engine, tokens: list[int]) -> str:
    n_vocab = engine.native.info.n_vocab
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise ArgumentError(f"tokens has {token}, the vocabulary has {n_vocab} tokens")
    pieces = (engine.native.token_to_piece(token, special=True) for token in tokens)
    return b"".join(pieces).decode("utf-8", "replace")


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, responses=ERRORS, tags=["Tokens"])

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Json:
        """The tokens of a text or of a conversation's prompt."""
        return await service.aside(_tokenize, service.engine, body)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Json:
        """The text of tokens."""
        return {"content": await service.aside(_detokenize, service.engine, body.tokens)}

    return routes
