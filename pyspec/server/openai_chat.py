"""OpenAI's chat completions and completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from pyspec.errors import ArgumentError
from pyspec.generate import GenerationResult
from pyspec.logprobs import TokenLogprob
from pyspec.server.errors import ERRORS, StrictRoute, problem
from pyspec.server.output import CallArguments, CallStart, Content, Piece, Reasoning
from pyspec.server.schemas import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    Count,
    GenerationRequest,
    Model,
    Parameters,
    Stops,
    StreamOptions,
    ToolCall,
    ToolName,
    ToolText,
    text_of,
)
from pyspec.server.service import Answer, Choice, Conversation, Service, Update, unless_gone
from pyspec.server.sse import EventStream, event
from pyspec.server.tools import MAX_TOOLS, Tool, Toolbox

Json = dict[str, Any]


# ---- requests ----


class _Request(GenerationRequest):
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[list[int], Field(min_length=0)]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[list[int]], Field(max_length=MAX_PROMPTS)]
    ) = ""
    max_tokens: Count | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt) or [""]  # type: ignore[arg-type]

    def check(self) -> None:
        """Refuses what is not supported."""
        if self.echo:
            raise ArgumentError("echo is true, which is not supported")
        if self.suffix:
            raise ArgumentError("suffix is given, which is not supported: the model fills no gaps")
        if (self.best_of or 1) > (self.n or 1):
            raise ArgumentError("best_of is above n, which is not supported")


class Message(Model):
    """A chat message. Fields beside these reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Json] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None

    def for_template(self, index: int) -> Json:
        """The message as chat templates expect it, its content one string."""
        fields = {**(self.model_extra or {}), "role": self.role}
        fields["content"] = text_of(self.content, f"messages.{index}.content")
        if self.role == "developer":
            fields["role"] = "system"
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return fields


class Function(Model):
    """The function of a tool."""

    name: ToolName
    description: ToolText | None = None
    parameters: Parameters | None = None


class ToolParam(Model):
    """A tool on offer."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Model):
    """The function of a named choice."""

    name: str


class NamedTool(Model):
    """A choice of one tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class SchemaFormat(Model):
    """``response_format.json_schema``."""

    name: str = ""
    schema_: Json | bool = Field(True, alias="schema")


class ResponseFormat(Model):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: SchemaFormat | None = None
    schema_: Json | None = Field(None, alias="schema")

    def schema_of_answer(self) -> Any | None:
        """The schema that the answer must satisfy, or None."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return self.schema_ or {"type": "object"}
        if self.json_schema is None:
            raise ArgumentError("response_format.json_schema is missing")
        return self.json_schema.schema_


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    functions: list[Any] | None = None
    function_call: Any | None = None

    def conversation(self) -> Conversation:
        """What is asked, in no API's words."""
        if self.functions or self.function_call:
            raise ArgumentError("functions and function_call are not supported, use tools")
        if any(kind != "text" for kind in self.modalities or ()):
            raise ArgumentError("modalities asks for more than text, which is not supported")
        return Conversation(
            messages=[m.for_template(index) for index, m in enumerate(self.messages)],
            toolbox=self.toolbox(),
            schema=self.response_format.schema_of_answer() if self.response_format else None,
            variables={**thinking_variables(self.reasoning_effort), **self.chat_template_kwargs},
        )

    def toolbox(self) -> Toolbox:
        """The tools and the choice among them."""
        tools = tuple(
            Tool(t.function.name, t.function.description or "", t.function.parameters or {})
            for t in self.tools or ()
        )
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return Toolbox(tools, "required", self.tool_choice.function.name, parallel=False)
        return Toolbox(tools, self.tool_choice or "auto", None, parallel)

    def top(self) -> int | None:
        """Runners-up to give with log-probabilities, or None for none of these."""
        if self.top_logprobs and not self.logprobs:
            raise ArgumentError("top_logprobs is given, but logprobs is not true")
        return (self.top_logprobs or 0) if self.logprobs else None


def thinking_variables(effort: str | None) -> Json:
    """Template variables for an effort of reasoning."""
    if effort is None:
        return {}
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


# ---- answers ----


def usage(answer: Answer) -> Json:
    """OpenAI's ``usage`` object."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


class ChatShape:
    """The parts of a chat completion."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, logprobs: bool) -> None:
        self._tokens = TokenNames(service)
        self._logprobs = logprobs
        self._called: set[int] = set()

    def choice(self, index: int, choice: Choice) -> Json:
        """One of the ``choices`` of a whole answer."""
        message: Json = {"role": "assistant", "content": choice.text(Content)}
        if reasoning := choice.text(Reasoning):
            message["reasoning_content"] = reasoning
        if calls := collect_calls(choice.pieces):
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in calls
            ]
        return {
            "index": index,
            "message": message,
            "finish_reason": _reason(choice.finished, bool(calls)),
            "logprobs": self._entries(choice.logprobs),
        }

    def opening(self, index: int) -> Json | None:
        """What a stream says first of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, update: Update) -> list[Json]:
        """What a stream says of an update."""
        deltas = [self._delta(update.index, piece) for piece in update.pieces]
        if not deltas and update.logprobs:
            deltas = [{"content": ""}]
        chunks = [self._chunk(update.index, delta) for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = self._entries(update.logprobs)
        if update.finished:
            reason = _reason(update.finished, update.index in self._called)
            chunks.append(self._chunk(update.index, {}, reason))
        return chunks

    def _delta(self, index: int, piece: Piece) -> Json:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text}
        if isinstance(piece, CallArguments):
            return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
        self._called.add(index)
        function = {"name": piece.name, "arguments": ""}
        head = {"index": piece.call, "id": call_id(), "type": "function", "function": function}
        return {"tool_calls": [head]}

    def _chunk(self, index: int, delta: Json, reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}

    def _entries(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if not self._logprobs:
            return None
        return {"content": [self._tokens.entry(entry) for entry in entries], "refusal": None}


class CompletionShape:
    """The parts of a completion."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, logprobs: bool) -> None:
        self._tokens = TokenNames(service)
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, choice: Choice) -> Json:
        """One of the ``choices`` of a whole answer."""
        reason = _reason(choice.finished, False)
        return self._choice(index, choice.text(Content), reason, choice.logprobs)

    def opening(self, index: int) -> Json | None:
        """What a stream says first of a choice."""
        return None

    def chunks(self, update: Update) -> list[Json]:
        """What a stream says of an update."""
        text = "".join(piece.text for piece in update.pieces if isinstance(piece, Content))
        reason = _reason(update.finished, False) if update.finished else None
        return [self._choice(update.index, text, reason, update.logprobs)]

    def _choice(
        self, index: int, text: str, reason: str | None, entries: Sequence[TokenLogprob]
    ) -> Json:
        logprobs = self._entries(index, entries) if self._logprobs else None
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def _entries(self, index: int, entries: Sequence[TokenLogprob]) -> Json:
        names = [self._tokens.text(entry.token) for entry in entries]
        offsets = []
        for name in names:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(name)
        return {
            "tokens": names,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._tokens.text(token): finite(value) for token, value in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }


class TokenNames:
    """Tokens as log-probabilities name them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def text(self, token: int) -> str:
        """The text of a token; bytes that are no UTF-8 become U+FFFD."""
        return self._bytes(token).decode("utf-8", "replace")

    def entry(self, found: TokenLogprob) -> Json:
        """An entry of ``logprobs.content``."""
        top = [self._named(token, logprob) for token, logprob in found.top]
        return {**self._named(found.token, found.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> Json:
        data = self._bytes(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }

    def _bytes(self, token: int) -> bytes:
        return self._service.engine.whole_piece(token)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold, as OpenAI gives that of an impossible token."""
    return max(logprob, -9999.0)


Shape = ChatShape | CompletionShape


def collect_calls(pieces: Sequence[Piece]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of every call among `pieces`."""
    calls: list[tuple[str, str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((call_id(), piece.name, ""))
        elif isinstance(piece, CallArguments):
            id, name, arguments = calls[piece.call]
            calls[piece.call] = (id, name, arguments + piece.text)
    return calls


def call_id() -> str:
    """A new id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _reason(finished: GenerationResult | None, called: bool) -> str:
    assert finished is not None, "the choice has ended"
    return "tool_calls" if called and finished.finish_reason == "stop" else finished.finish_reason


async def _chunks(
    answer: Answer, head: Json, shape: Shape, include_usage: bool
) -> AsyncIterator[str]:
    extra: Json = {"usage": None} if include_usage else {}
    try:
        for index in range(answer.size):
            if opening := shape.opening(index):
                yield event({**head, "choices": [opening], **extra})
        async for update in answer.updates():
            for chunk in shape.chunks(update):
                yield event({**head, "choices": [chunk], **extra})
        if include_usage:
            yield event({**head, "choices": [], "usage": usage(answer)})
        yield event("[DONE]")
    except Exception as error:  # the status has been sent: the stream itself must tell
        yield event(problem(error).openai())


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, responses=ERRORS, tags=["OpenAI"])

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several prompts."""
        body.check()
        prompts = await service.prompts(body.prompts)
        options = body.options(body.max_tokens, body.stop, body.n or 1, body.logprobs)
        answer = await service.answer(prompts, options, request)
        shape = CompletionShape(service, body.logprobs is not None)
        return await respond(answer, shape, body, request)

    @routes.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        limit = body.max_completion_tokens or body.max_tokens
        options = body.options(limit, body.stop, body.n or 1, body.top())
        prompt = await service.chat_prompt(body.conversation())
        answer = await service.answer([prompt], options, request)
        return await respond(answer, ChatShape(service, bool(body.logprobs)), body, request)

    async def respond(answer: Answer, shape: Shape, body: _Request, request: Request) -> Response:
        head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "object": shape.chunk if body.stream else shape.whole,
            "created": int(time.time()),
            "model": service.model_name,
        }
        if body.stream:
            chunks = _chunks(answer, head, shape, body.include_usage)
            return EventStream(chunks, request, answer.cancel)
        try:
            choices = await unless_gone(answer.collect(), request)
        except BaseException:
            answer.cancel()
            raise
        entries = [shape.choice(index, choice) for index, choice in enumerate(choices)]
        return JSONResponse({**head, "choices": entries, "usage": usage(answer)})

    return routes
