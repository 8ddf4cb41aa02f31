"""OpenAI's responses, stateless: what came before is in every request."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from pyspec.errors import ArgumentError
from pyspec.generate import GenerationResult
from pyspec.logprobs import TokenLogprob
from pyspec.server.errors import ERRORS, StrictRoute, problem
from pyspec.server.openai_chat import ResponseFormat, TokenNames, call_id, thinking_variables
from pyspec.server.output import CallArguments, CallStart, Piece, Reasoning
from pyspec.server.schemas import (
    MAX_TOP_LOGPROBS,
    Count,
    GenerationRequest,
    Model,
    Parameters,
    Stops,
    ToolName,
    ToolText,
    call_arguments,
    text_of,
)
from pyspec.server.service import Answer, Conversation, Service, unless_gone
from pyspec.server.sse import EventStream, event
from pyspec.server.tools import MAX_TOOLS, Tool, Toolbox

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_ROLES = ("system", "developer", "user", "assistant")


class FunctionTool(Model):
    """A tool on offer."""

    type: Literal["function"]
    name: ToolName
    description: ToolText | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class NamedTool(Model):
    """A choice of one tool."""

    type: Literal["function"]
    name: str


class TextFormat(ResponseFormat):
    """``text.format``; its schema is not wrapped."""

    name: str | None = None

    def schema_of_answer(self) -> Any | None:
        """The schema that the answer must satisfy, or None."""
        if self.type != "json_schema":
            return super().schema_of_answer()
        if self.schema_ is None:
            raise ArgumentError("text.format.schema is missing")
        return self.schema_


class Text(Model):
    """``text``."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))


class ReasoningOptions(Model):
    """``reasoning``."""

    effort: str | None = None
    summary: str | None = None


class ResponseRequest(GenerationRequest):
    """``POST /v1/responses``."""

    input: str | Annotated[list[Json], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stop: Stops | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any | None = None
    background: bool | None = None

    def check(self) -> None:
        """Refuses what needs memory of earlier requests."""
        for name in ("previous_response_id", "conversation", "background"):
            if getattr(self, name):
                raise ArgumentError(
                    f"{name} is given, but responses are not stored here: send the whole input"
                )

    def in_no_apis_words(self) -> Conversation:
        """The conversation that is asked to go on."""
        effort = self.reasoning.effort if self.reasoning else None
        return Conversation(
            messages=_messages(self.input, self.instructions),
            toolbox=self.toolbox(),
            schema=self.text.format.schema_of_answer() if self.text else None,
            variables={**thinking_variables(effort), **self.chat_template_kwargs},
        )

    def toolbox(self) -> Toolbox:
        """The tools and the choice among them."""
        tools = tuple(
            Tool(tool.name, tool.description or "", tool.parameters or {})
            for tool in self.tools or ()
        )
        if isinstance(self.tool_choice, NamedTool):
            return Toolbox(tools, "required", self.tool_choice.name, parallel=False)
        return Toolbox(
            tools, self.tool_choice or "auto", None, self.parallel_tool_calls is not False
        )

    @property
    def top(self) -> int | None:
        """Runners-up to give with log-probabilities, or None for none of these."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None


def _messages(items: str | list[Json], instructions: str | None) -> list[Json]:
    """Messages for a chat template; calls and reasoning join the assistant's message around them."""
    messages: list[Json] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for index, item in enumerate(items):
        _add_item(messages, item, f"input.{index}")
    return messages


def _add_item(messages: list[Json], item: Json, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise ArgumentError(f"{where}.role is {role!r}, must be one of {', '.join(_ROLES)}")
        text = text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            _assistant(messages)["content"] += text
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": text})
    elif kind == "function_call":
        name = item.get("name")
        if not isinstance(name, str):
            raise ArgumentError(f"{where}.name must be a string")
        given = item.get("arguments", "")
        if not isinstance(given, str):
            raise ArgumentError(f"{where}.arguments must be a string")
        function = {"name": name, "arguments": call_arguments(name, given)}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = text_of(item.get("output"), f"{where}.output")
        id = str(item.get("call_id", ""))
        messages.append({"role": "tool", "tool_call_id": id, "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        text = "".join(text for text in texts if isinstance(text, str))
        _assistant(messages)["reasoning_content"] = text
    else:
        raise ArgumentError(f"{where} has type {kind!r}, which is not supported")


def _assistant(messages: list[Json]) -> Json:
    """The assistant's message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# ---- answers ----


class ResponseWriter:
    """Puts a response together piece by piece; every change is an event of the stream."""

    def __init__(self, service: Service, body: ResponseRequest) -> None:
        self._tokens = TokenNames(service)
        self._logprobs = body.top is not None
        self._sequence = 0
        self._item: Json | None = None
        self._held: list[Json] = []
        self.response = _skeleton(service, body)

    def begin(self) -> list[str]:
        """The first events."""
        return [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]

    def add(self, piece: Piece) -> list[str]:
        """The events of a piece."""
        if isinstance(piece, CallStart):
            return [*self.close(), *self._open("function_call", piece.name)]
        kind = "function_call"
        if not isinstance(piece, CallArguments):
            kind = "reasoning" if isinstance(piece, Reasoning) else "message"
        events = []
        if self._item is None or self._item["type"] != kind:
            events = [*self.close(), *self._open(kind)]
        return [*events, self._grow(piece.text)]

    def add_logprobs(self, entries: list[TokenLogprob]) -> None:
        """Keeps entries for the next piece of content."""
        if self._logprobs:
            self._held += [self._tokens.entry(entry) for entry in entries]

    def close(self) -> list[str]:
        """The events that end the open item."""
        item, self._item = self._item, None
        if item is None:
            return []
        item["status"] = "completed"
        place = self._place(item)
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **place, **fields)]
        else:
            part = item["content"][0]
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            at = {**place, "content_index": 0}
            events = [
                self._event(f"response.{part['type']}.done", **at, text=part["text"], **extra),
                self._event("response.content_part.done", **at, part=part),
            ]
        index = place["output_index"]
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def end(self, answer: Answer, finished: GenerationResult) -> list[str]:
        """The last events."""
        if self._item is not None and self._held and self._item["type"] == "message":
            self._item["content"][0]["logprobs"] += self._held
        events = self.close()
        done = finished.finish_reason != "length"
        self.response["status"] = "completed" if done else "incomplete"
        if not done:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["completed_at"] = int(time.time())
        self.response["usage"] = _usage(answer)
        name = f"response.{self.response['status']}"
        return [*events, self._event(name, response=self.response)]

    def fail(self, error: Exception) -> list[str]:
        """The events of a failure."""
        found = problem(error)
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": found.message}
        return [self._event("response.failed", response=self.response)]

    def _open(self, kind: str, name: str = "") -> list[str]:
        item: Json = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"id": _id("fc"), "call_id": call_id(), "name": name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"id": _id("rs"), "summary": [], "content": []}
        else:
            item |= {"id": _id("msg"), "role": "assistant", "content": []}
        self._item = item
        self.response["output"].append(item)
        place = self._place(item)
        events = [
            self._event("response.output_item.added", output_index=place["output_index"], item=item)
        ]
        if kind == "function_call":
            return events
        part: Json = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        added = self._event("response.content_part.added", **place, content_index=0, part=part)
        return [*events, added]

    def _grow(self, text: str) -> str:
        item = self._item
        assert item is not None, "an item is open"
        place = self._place(item)
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        part = item["content"][0]
        part["text"] += text
        place["content_index"] = 0
        if item["type"] == "reasoning":
            return self._event("response.reasoning_text.delta", **place, delta=text)
        entries, self._held = self._held, []
        part["logprobs"] += entries
        return self._event("response.output_text.delta", **place, delta=text, logprobs=entries)

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": len(self.response["output"]) - 1}

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _skeleton(service: Service, body: ResponseRequest) -> Json:
    choice = body.tool_choice or "auto"
    text = body.text or Text()
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text.format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [{"strict": None, **tool.model_dump()} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(answer: Answer) -> Json:
    given, made = answer.prompt_tokens, answer.completion_tokens
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": given + made,
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


async def _events(answer: Answer, writer: ResponseWriter) -> AsyncIterator[str]:
    try:
        for text in writer.begin():
            yield text
        async for update in answer.updates():
            writer.add_logprobs(update.logprobs)
            for piece in update.pieces:
                for text in writer.add(piece):
                    yield text
            if update.finished:
                for text in writer.end(answer, update.finished):
                    yield text
    except Exception as error:  # the status has been sent: the stream itself must tell
        for text in writer.fail(error):
            yield text


async def _whole(answer: Answer, writer: ResponseWriter) -> Json:
    (choice,) = await answer.collect()
    writer.add_logprobs(choice.logprobs)
    for piece in choice.pieces:
        writer.add(piece)
    assert choice.finished is not None, "the choice has ended"
    writer.end(answer, choice.finished)
    return writer.response


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, responses=ERRORS, tags=["OpenAI"])

    @routes.post("/v1/responses")
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answers an input, in items."""
        body.check()
        options = body.options(body.max_output_tokens, body.stop, 1, body.top)
        prompt = await service.chat_prompt(body.in_no_apis_words())
        answer = await service.answer([prompt], options, request)
        writer = ResponseWriter(service, body)
        if body.stream:
            return EventStream(_events(answer, writer), request, answer.cancel)
        try:
            return JSONResponse(await unless_gone(_whole(answer, writer), request))
        except BaseException:
            answer.cancel()
            raise

    return routes
