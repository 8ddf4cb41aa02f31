"""What the APIs' requests share, checked by pydantic, and the limits on them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pyspec.config import MAX_NODES, SamplingConfig
from pyspec.errors import ArgumentError
from pyspec.server.service import Options

MAX_STOPS = 256
"""Most stop strings of a request; `security` allows fewer."""

MAX_CHOICES = 128
"""Most choices of a request (``n``); `security` allows fewer."""

MAX_PROMPTS = 256
"""Most prompts of a completion request."""

MAX_TOP_LOGPROBS = 20
"""Most runners-up that log-probabilities come with."""

MAX_BIASES = 1024
"""Most entries of ``logit_bias``."""

MAX_SECONDS = 86400.0
"""Longest deadline of a request."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
ToolText = Annotated[str, Field(max_length=1 << 16)]
Parameters = dict[str, Any]

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


class Model(BaseModel):
    """A request or a part of one. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class GenerationRequest(Model):
    """What every API's requests may say about decoding, pyspec's own fields included."""

    model: str = ""
    stream: bool = False
    temperature: Finite | None = Field(None, ge=0, le=100)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: Finite | None = Field(None, ge=0, le=1)
    typical_p: Finite | None = Field(None, gt=0, le=1)
    repeat_penalty: Finite | None = Field(None, ge=0.01, le=100)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[Finite, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_BIASES
    )
    seed: int | None = None
    ignore_eos: bool = Field(False, description="Go on after end-of-generation tokens.")
    draft: str | None = Field(None, description="Drafter of this request; none decodes plainly.")
    draft_nodes: int | None = Field(
        None, ge=1, le=MAX_NODES, description="Most nodes of this request's draft trees."
    )
    timeout: Finite | None = Field(
        None, gt=0, le=MAX_SECONDS, description="Seconds from arrival until the request fails."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template."
    )

    def options(
        self,
        max_tokens: int | None,
        stop: str | list[str] | None = None,
        choices: int = 1,
        top_logprobs: int | None = None,
    ) -> Options:
        """How to decode; what is not given keeps pyspec's default."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return Options(
            sampling=SamplingConfig(**given, seed=None if self.seed is None else self.seed % 2**32),
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            ignore_end=self.ignore_eos,
            choices=choices,
            draft=self.draft,
            draft_nodes=self.draft_nodes,
            top_logprobs=top_logprobs,
            timeout=self.timeout,
        )


class StreamOptions(Model):
    """``stream_options``."""

    include_usage: bool = False


class FunctionCall(Model):
    """The function of a call in a message."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Model):
    """A call in a message of the assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it, its arguments an object."""
        function = self.function
        arguments = call_arguments(function.name, function.arguments)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": function.name, "arguments": arguments},
        }


def call_arguments(name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call in a message as an object.

    Raises:
        ArgumentError: They are text, and it is no JSON object.
    """
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgumentError(f"arguments of the call of {name!r} are no JSON object")
    return value


def text_of(content: object, where: str) -> str:
    """The text of a message's content: a string, or parts of which only text is understood.

    Raises:
        ArgumentError: A part is no text; names it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ArgumentError(f"{where} must be text or a list of parts")
    return "".join(_part_text(part, f"{where}.{index}") for index, part in enumerate(content))


_NOT_YET = {
    "image": ("image", "image_url", "input_image"),
    "audio": ("audio", "input_audio"),
    "video": ("video", "video_url"),
    "file": ("file", "input_file", "document"),
}


def _part_text(part: object, where: str) -> str:
    part = part if isinstance(part, dict) else {}
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise ArgumentError(f"{where}.text must be a string")
    for what, kinds in _NOT_YET.items():
        if kind in kinds:
            raise ArgumentError(
                f"{where} is {what} input, which is not supported yet: only text is"
            )
    raise ArgumentError(f"{where} has type {kind!r}, must be 'text'")
