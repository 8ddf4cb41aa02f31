"""Chat messages to a prompt, through the model's own Jinja template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyspec.errors import TemplateError


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


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
