"""Anthropic's messages: answers in blocks, streams, tools, token counts."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from pyspec.errors import ArgumentError
from pyspec.generate import GenerationResult
from pyspec.server.errors import ERRORS, StrictRoute, problem
from pyspec.server.output import CallArguments, CallStart, Content, Piece, Reasoning, json_object
from pyspec.server.schemas import (
    MAX_STOPS,
    Count,
    GenerationRequest,
    Model,
    Parameters,
    Stop,
    ToolName,
    ToolText,
    text_of,
)
from pyspec.server.service import Answer, Conversation, Service, unless_gone
from pyspec.server.sse import EventStream, event
from pyspec.server.tools import MAX_TOOLS, Tool, Toolbox

Json = dict[str, Any]

PING = event({"type": "ping"}, "ping")


class ToolParam(Model):
    """A tool on offer."""

    name: ToolName
    description: ToolText | None = None
    input_schema: Parameters = Field(default_factory=dict)
    type: str | None = None


class ToolChoice(Model):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Model):
    """``thinking``."""

    type: Literal["enabled", "disabled", "adaptive"]


class Message(Model):
    """A message: text, or blocks."""

    role: Literal["user", "assistant"]
    content: str | list[Json]


class CountRequest(GenerationRequest):
    """``POST /v1/messages/count_tokens``."""

    messages: list[Message] = Field(min_length=1)
    system: str | list[Json] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def conversation(self) -> Conversation:
        """What is asked, in no API's words."""
        messages: list[Json] = []
        if system := text_of(self.system, "system"):
            messages.append({"role": "system", "content": system})
        for index, message in enumerate(self.messages):
            messages += _messages(message, f"messages.{index}.content")
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        opening = ""
        if self.messages[-1].role == "assistant":  # an answer that has begun already
            opening, thinks = messages.pop()["content"].rstrip(), False
        return Conversation(
            messages=messages,
            toolbox=self.toolbox(),
            variables={"enable_thinking": thinks, **self.chat_template_kwargs},
            opening=opening,
        )

    def toolbox(self) -> Toolbox:
        """The tools and the choice among them."""
        for tool in self.tools or ():
            if tool.type not in (None, "custom"):
                raise ArgumentError(f"tool {tool.name!r} has type {tool.type!r}, must be 'custom'")
        tools = tuple(
            Tool(tool.name, tool.description or "", tool.input_schema) for tool in self.tools or ()
        )
        choice = self.tool_choice or ToolChoice()
        if choice.type == "tool":
            if choice.name is None:
                raise ArgumentError("tool_choice.name is missing")
            return Toolbox(tools, "required", choice.name, parallel=False)
        parallel = not choice.disable_parallel_tool_use
        if choice.type == "any":
            return Toolbox(tools, "required", None, parallel)
        return Toolbox(tools, choice.type, None, parallel)


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    max_tokens: Count
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None


def _messages(message: Message, where: str) -> list[Json]:
    """A message as chat templates expect it; results of tools become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: Json = {"role": message.role, "content": ""}
    results: list[Json] = []
    for index, block in enumerate(message.content):
        at = f"{where}.{index}"
        kind = block.get("type")
        if kind == "tool_use" and message.role == "assistant":
            found.setdefault("tool_calls", []).append(_call(block, at))
        elif kind == "tool_result" and message.role == "user":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": str(block.get("tool_use_id", "")),
                    "content": text_of(block.get("content"), f"{at}.content"),
                }
            )
        elif kind == "thinking" and message.role == "assistant":
            found["reasoning_content"] = str(block.get("thinking", ""))
        elif kind == "redacted_thinking" and message.role == "assistant":
            continue
        else:
            found["content"] += text_of([block], where)
    keep = found["content"] or message.role == "assistant" or not results
    return [*results, found] if keep else results


def _call(block: Json, where: str) -> Json:
    name, arguments = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ArgumentError(f"{where} needs a name that is text and an input that is an object")
    function = {"name": name, "arguments": arguments}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


# ---- answers ----


class MessageWriter:
    """Puts a message together piece by piece; every change is an event of the stream."""

    def __init__(self, service: Service, answer: Answer) -> None:
        self._answer = answer
        self._block: Json | None = None
        self._arguments = ""
        self.message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": service.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def begin(self) -> list[str]:
        """The first events."""
        return [event({"type": "message_start", "message": self.message}, "message_start"), PING]

    def add(self, piece: Piece) -> list[str]:
        """The events of a piece."""
        if isinstance(piece, CallStart):
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}"}
            return [*self.close(), self._open({**block, "name": piece.name, "input": {}})]
        if isinstance(piece, CallArguments):
            self._arguments += piece.text
            return [self._delta({"type": "input_json_delta", "partial_json": piece.text})]
        kind, name = ("text", "text") if isinstance(piece, Content) else ("thinking", "thinking")
        events = []
        if self._block is None or self._block["type"] != kind:
            extra = {"signature": ""} if isinstance(piece, Reasoning) else {}
            events = [*self.close(), self._open({"type": kind, name: "", **extra})]
        assert self._block is not None, "a block is open"
        self._block[name] += piece.text
        return [*events, self._delta({"type": f"{kind}_delta", name: piece.text})]

    def close(self) -> list[str]:
        """The events that end the open block."""
        block, self._block = self._block, None
        if block is None:
            return []
        if block["type"] == "tool_use":
            block["input"] = json_object(self._arguments) or {}  # none of a call that was cut
            self._arguments = ""
        stop = {"type": "content_block_stop", "index": len(self.message["content"]) - 1}
        return [event(stop, "content_block_stop")]

    def end(self, finished: GenerationResult) -> list[str]:
        """The last events."""
        events = self.close()
        called = any(block["type"] == "tool_use" for block in self.message["content"])
        reason = "max_tokens"
        if finished.finish_reason == "stop":
            reason = "tool_use" if called else "end_turn"
        if finished.stopped_by is not None:
            reason = "stop_sequence"
        outcome = {"stop_reason": reason, "stop_sequence": finished.stopped_by}
        usage = self._usage()
        self.message |= {**outcome, "usage": usage}
        return [
            *events,
            event({"type": "message_delta", "delta": outcome, "usage": usage}, "message_delta"),
            event({"type": "message_stop"}, "message_stop"),
        ]

    def _open(self, block: Json) -> str:
        self._block = block
        self.message["content"].append(block)
        index = len(self.message["content"]) - 1
        body = {"type": "content_block_start", "index": index, "content_block": block}
        return event(body, "content_block_start")

    def _delta(self, delta: Json) -> str:
        index = len(self.message["content"]) - 1
        body = {"type": "content_block_delta", "index": index, "delta": delta}
        return event(body, "content_block_delta")

    def _usage(self) -> Json:
        cached = self._answer.cached_tokens
        return {
            "input_tokens": self._answer.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.completion_tokens,
        }


async def _events(answer: Answer, writer: MessageWriter) -> AsyncIterator[str]:
    try:
        for text in writer.begin():
            yield text
        async for update in answer.updates():
            for piece in update.pieces:
                for text in writer.add(piece):
                    yield text
            if update.finished:
                for text in writer.end(update.finished):
                    yield text
    except Exception as error:  # the status has been sent: the stream itself must tell
        yield event(problem(error).anthropic(), "error")


async def _whole(answer: Answer, writer: MessageWriter) -> Json:
    (choice,) = await answer.collect()
    for piece in choice.pieces:
        writer.add(piece)
    assert choice.finished is not None, "the choice has ended"
    writer.end(choice.finished)
    return writer.message


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, responses=ERRORS, tags=["Anthropic"])

    @routes.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation."""
        options = body.options(body.max_tokens, body.stop_sequences)
        prompt = await service.chat_prompt(body.conversation())
        answer = await service.answer([prompt], options, request)
        writer = MessageWriter(service, answer)
        if body.stream:
            return EventStream(_events(answer, writer), request, answer.cancel, PING)
        try:
            return JSONResponse(await unless_gone(_whole(answer, writer), request))
        except BaseException:
            answer.cancel()
            raise

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest) -> dict[str, int]:
        """How many tokens a conversation's prompt has."""
        prompt = await service.chat_prompt(body.conversation())
        return {"input_tokens": len(prompt.tokens)}

    return routes
