"""Tools: what a request offers, how the prompt shows them, and the grammar of forced calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspec.errors import ArgumentError
from pyspec.grammar import GrammarBuilder, literal
from pyspec.server.output import CALL, CALL_END, THINK_END, schema_types

MAX_TOOLS = 128
"""Most tools that a request may offer."""

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: What calls it.
        description: What it is for.
        parameters: JSON schema of its arguments.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description}
        schema = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": schema}}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request and what it may do with them.

    Attributes:
        tools: The tools on offer.
        mode: Whether the model may or must call.
        name: The only tool that may be called, or None.
        parallel: Several calls in one answer are allowed.
    """

    tools: tuple[Tool, ...] = ()
    mode: Mode = "auto"
    name: str | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise ArgumentError(f"tools has {len(names)} entries, at most {MAX_TOOLS}")
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"tools has two entries called {name!r}")
        if self.name is not None and self.name not in names:
            raise ArgumentError(f"tool_choice names {self.name!r}, which is not among the tools")
        if self.mode == "required" and not names:
            raise ArgumentError("tool_choice asks for a call, but there are no tools")

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the prompt lists."""
        return () if self.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.shown if self.name in (None, tool.name))

    @property
    def schemas(self) -> dict[str, dict[str, Any]] | None:
        """Schemas of arguments by name, or None when nothing may be called."""
        return {tool.name: tool.parameters for tool in self.shown} or None


class CallGrammar:
    """The grammar of an answer: calls, a JSON value, or either; reasoning before it.

    Args:
        toolbox: What may be called.
        xml: Calls are written as Qwen3-Coder and Qwen3.5 do, instead of as Hermes does.
    """

    def __init__(self, toolbox: Toolbox, xml: bool) -> None:
        self._toolbox = toolbox
        self._xml = xml
        self._builder = GrammarBuilder()

    def build(self, schema: Any | None, thinking: bool) -> str:
        """The grammar's text.

        Args:
            schema: JSON schema of an answer that calls nothing; None for no such answer.
            thinking: The prompt has opened reasoning, which comes first.
        """
        choices = []
        if self._toolbox.callable:
            choices.append(self._calls())
        if schema is not None:
            choices.append(self._builder.schema(schema, "answer"))
        root = " | ".join(choices)
        if thinking:
            reasoning = self._builder.until(THINK_END, "reasoning")
            root = f"{reasoning} [\\n]? [\\n]? ({root})"
        return self._builder.build(root)

    def _calls(self) -> str:
        forms = [self._call(i, tool) for i, tool in enumerate(self._toolbox.callable)]
        call = self._builder.rule("call", " | ".join(forms))
        return f'{call} ("\\n" {call})*' if self._toolbox.parallel else call

    def _call(self, index: int, tool: Tool) -> str:
        body = self._xml_call(index, tool) if self._xml else self._json_call(index, tool)
        return f"{literal(CALL + chr(10))} {body} {literal(chr(10) + CALL_END)}"

    def _json_call(self, index: int, tool: Tool) -> str:
        schema = {"type": "object", **tool.parameters}
        arguments = self._builder.schema(schema, f"arguments-of-{index}")
        head = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        return f"{literal(head)} {arguments} {literal('}')}"

    def _xml_call(self, index: int, tool: Tool) -> str:
        properties = tool.parameters.get("properties") or {}
        required = tool.parameters.get("required") or []
        parts = [literal(f"<function={tool.name}>\n")]
        for number, (name, schema) in enumerate(properties.items()):
            part = self._xml_parameter(name, schema, f"value-{number}-of-{index}", tool)
            parts.append(part if name in required else f"({part})?")
        return " ".join([*parts, literal("</function>")])

    def _xml_parameter(self, name: str, schema: Any, rule: str, tool: Tool) -> str:
        head, end = literal(f"<parameter={name}>\n"), "\n</parameter>\n"
        types = schema_types(schema)
        if types and types != {"string"}:
            whole = {**schema, "$defs": tool.parameters.get("$defs", {})}
            return f"{head} {self._builder.schema(whole, rule)} {literal(end)}"
        values = schema.get("enum") if isinstance(schema, dict) else None
        if values:
            return f"{head} ({' | '.join(map(literal, values))}) {literal(end)}"
        return f"{head} {self._builder.until(end, rule)}"


def describe(tools: Sequence[Tool]) -> str:
    """System text that shows tools in Hermes' format, for templates that know none."""
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools>:\n<tools>\n{lines}\n"
        "</tools>\n\nFor each function call, return a JSON object with function name and arguments "
        f'within {CALL}{CALL_END}:\n{CALL}\n{{"name": <function-name>, '
        f'"arguments": <arguments-object>}}\n{CALL_END}'
    )


def without_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """`messages` for a template that knows no tools: everything about them becomes text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    system = describe(tools)
    if plain and plain[0]["role"] == "system":
        system = f"{plain[0]['content']}\n\n{system}"
        plain = plain[1:]
    return [{"role": "system", "content": system}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if not message.get("tool_calls"):
        return message
    calls = [
        f"{CALL}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}"
        for call in message["tool_calls"]
    ]
    text = "\n".join(filter(None, [message["content"], *calls]))
    return {"role": "assistant", "content": text}
