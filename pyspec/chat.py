"""Chat messages to a prompt, through the model's own Jinja template in a sandbox."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyspec.errors import TemplateError
from pyspec.prefill import ChatPrompt

_MOST_KNOWN = 1 << 14  # messages whose ends are remembered


class ChatTemplate:
    """A model's chat template.

    Args:
        source: Jinja source, as the GGUF carries it.
        bos_token: Text of the beginning-of-sequence token, given to the template.
        eos_token: Text of the end-of-sequence token.

    Raises:
        TemplateError: The source is not a Jinja template.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda layout: datetime.now().strftime(layout),
            bos_token=bos_token,
            eos_token=eos_token,
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template does not parse: {error}") from None
        self._known: dict[bytes, _Known | None] = {}

    def prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> ChatPrompt:
        """`render`, with the places where a later chat may go on from this one.

        A message ends where rendering the messages up to it gives a beginning of the whole prompt.

        Raises:
            TemplateError: As `render`.
        """
        text = self.render(messages, **variables)
        data = text.encode()
        ends: list[tuple[int, bool]] = []
        seen = hashlib.blake2b(json.dumps(variables, sort_keys=True, default=repr).encode())
        for count, message in enumerate(messages, 1):
            seen.update(json.dumps(message, default=repr).encode())
            known = self._rendered(seen.digest(), messages[:count], variables)
            if known is not None and hashlib.blake2b(data[: known.size]).digest() == known.digest:
                ends.append((known.size, message.get("role") == "assistant"))
        return ChatPrompt(text, ends)

    def _rendered(
        self, key: bytes, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]
    ) -> _Known | None:
        """Size and digest of what messages alone render to; remembered, as chats grow."""
        with suppress(KeyError):  # another thread may clear it
            return self._known[key]
        found = None
        with suppress(TemplateError):  # not every beginning of a chat is one
            data = self.render(messages, **variables | {"add_generation_prompt": False}).encode()
            found = _Known(len(data), hashlib.blake2b(data).digest())
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = found
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, ending where the assistant is to speak.

        Raises:
            TemplateError: The template refuses the messages; carries its message.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {error}") from None
        except Exception as error:  # a template can fail in any way Python code can
            raise TemplateError(f"chat template: {type(error).__name__}: {error}") from None


class _Known(NamedTuple):
    """Bytes of a rendered text, and its digest."""

    size: int
    digest: bytes


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
