"""Requests as clients send them, checked by pydantic, and the pieces of the answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pyspec.config import SamplingConfig

MAX_STOPS = 16


class _Request(BaseModel):
    """What both completion endpoints share. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, json_schema: Any = None) -> SamplingConfig:
        """The `SamplingConfig` of this request; what is not given keeps pyspec's default."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        seed = None if self.seed is None else self.seed % 2**32
        return SamplingConfig(**given, seed=seed, json_schema=json_schema)


class CompletionRequest(_Request):
    """``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    max_tokens: int | None = Field(None, ge=1)
    echo: Literal[False] = False
    logprobs: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one per choice of the answer."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt) or [""]  # type: ignore[arg-type]


class TextPart(BaseModel):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A chat message. Fields beside these reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, its content one string."""
        fields = self.model_dump()
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        elif self.content is None:
            fields["content"] = ""
        return fields


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: Literal[False] | None = None
    tools: None = None

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def json_schema(self) -> Any:
        """The schema that ``response_format`` asks for, or None."""
        wanted = (self.response_format or {}).get("type", "text")
        if wanted == "json_object":
            return {"type": "object"}
        if wanted == "json_schema":
            return (self.response_format or {}).get("json_schema", {}).get("schema", {})
        return None


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
