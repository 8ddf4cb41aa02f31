"""What a model writes, told apart as it appears: reasoning, content, tool calls.

Text arrives in arbitrary pieces. `OutputParser` passes on at once whatever can no longer be the
beginning of a mark, so reasoning, content and arguments of calls all stream. It reads calls as the
Hermes and Qwen templates write them, whichever the model chose:

    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>

What only looks like a call is content, verbatim.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspec.text import overlap

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_TAIL = re.compile(r"\s*\}?\s*(?:</tool_call>)?")
_XML_HEAD = re.compile(r"\s*<function=([^>\n]+)>")
_XML_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_XML_END = re.compile(r"\s*</function>")
_PARAMETER_END = re.compile(r"\n?</parameter>")


class Reasoning(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class CallStart(NamedTuple):
    """The call number `call` begins; its arguments follow."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """Some more of the JSON text of a call's arguments."""

    call: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments


class OutputParser:
    """Turns text into pieces.

    Args:
        thinks: A ``<think>`` at the beginning opens reasoning.
        thinking: The prompt has opened reasoning already.
        schemas: By name, the JSON schema of each tool's arguments; None where nothing is a call.
        parallel: More than one call counts; what follows the first is dropped otherwise.
    """

    def __init__(
        self,
        *,
        thinks: bool = False,
        thinking: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        parallel: bool = True,
    ) -> None:
        self._schemas = schemas
        self._parallel = parallel
        self._buffer = ""
        self._out: list[Piece] = []
        self._calls = 0
        self._name = ""  # of the last call
        self._thought = False  # reasoning has ended
        self._fresh = True  # nothing but space has come in this part yet
        self._json = _JsonEnd()
        self._parameter: _Parameter | None = None
        self._parameters = 0
        self._state: Callable[[bool], bool] = self._content
        if thinking:
            self._state = self._reasoning
        elif thinks:
            self._state = self._opening

    @property
    def reasoning(self) -> bool:
        """True while the model reasons."""
        return self._state == self._reasoning

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._calls

    def push(self, text: str) -> list[Piece]:
        """Takes more text; returns what is certain now."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """The rest, when no more text comes."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Piece]:
        while (self._buffer or (final and self._state == self._call)) and self._state(final):
            pass
        out, self._out = self._out, []
        return out

    # Every state takes what it can from the buffer and returns whether to go on with the rest.

    def _opening(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._state = self._reasoning
            return True
        if not final and THINK.startswith(text):
            return False
        self._state = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        ended = self._text(THINK_END, Reasoning, final)
        if ended:
            self._state, self._fresh = self._content, True
        return ended

    def _content(self, final: bool) -> bool:
        if self._schemas is None:
            text = self._buffer.lstrip("\n") if self._fresh and self._thought else self._buffer
            self._buffer = ""
            self._emit(Content, text)
            return False
        ended = self._text(CALL, Content, final)
        if ended:
            self._state = self._call
        return ended

    def _text(self, mark: str, kind: type[Reasoning] | type[Content], final: bool) -> bool:
        """Emits text up to `mark` without the space around it; True when the mark has come."""
        if self._fresh:
            self._buffer = self._buffer.lstrip()
        text, found, rest = self._buffer.partition(mark)
        if found:
            self._emit(kind, text.rstrip())
            self._buffer = rest
            self._thought = self._thought or kind is Reasoning
            return True
        keep = 0 if final else overlap(text, mark)
        sure = text[: len(text) - keep].rstrip()
        if final and not self._calls:
            sure = text
        self._buffer = text[len(sure) :] if not final else ""
        self._emit(kind, sure)
        return False

    def _emit(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        if text:
            self._fresh = False
            self._out.append(kind(text))

    # ---- calls ----

    def _call(self, final: bool) -> bool:
        if self._calls and not self._parallel:
            self._state = self._ignore
            return True
        if found := _JSON_HEAD.match(self._buffer):
            self._begin(_name(found[1]), found.end())
            self._json = _JsonEnd()
            self._state = self._json_arguments
            return True
        if found := _XML_HEAD.match(self._buffer):
            self._begin(found[1].strip(), found.end())
            self._arguments("{")
            self._parameters = 0
            self._state = self._xml_body
            return True
        text, ended, rest = self._buffer.partition(CALL_END)
        if not ended and not final:
            return False
        self._buffer = rest
        if call := _whole_call(text):
            self._begin(call[0], 0)
            self._arguments(call[1])
        else:
            self._fresh = False
            self._out.append(Content(CALL + text + ended))
        self._state = self._content
        return True

    def _json_arguments(self, final: bool) -> bool:
        size = self._json.scan(self._buffer)
        self._arguments(self._buffer[:size])
        self._buffer = self._buffer[size:]
        if self._json.done:
            self._state = self._tail
        return self._json.done

    def _tail(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        rest = text[1:].lstrip() if text.startswith("}") else text
        if not final and CALL_END.startswith(rest) and rest != CALL_END:
            return False
        found = _TAIL.match(self._buffer)
        self._buffer = self._buffer[found.end() :] if found else text
        self._state, self._fresh = self._content, True
        return True

    def _xml_body(self, final: bool) -> bool:
        if found := _XML_PARAMETER.match(self._buffer):
            if found.end() == len(self._buffer) and not found[0].endswith("\n") and not final:
                return False  # a newline may follow that belongs to the mark
            self._buffer = self._buffer[found.end() :]
            self._open_parameter(found[1].strip())
            return True
        found = _XML_END.match(self._buffer)
        if found or CALL_END in self._buffer:  # no more than this can be made of it
            end = found.end() if found else self._buffer.index(CALL_END)
            self._buffer = self._buffer[end:]
            self._arguments("}")
            self._state = self._tail
            return True
        return False

    def _open_parameter(self, name: str) -> None:
        schema = (self._schemas or {}).get(self._name, {})
        properties = schema.get("properties")
        self._parameter = _Parameter(properties.get(name) if isinstance(properties, dict) else None)
        comma = ", " if self._parameters else ""
        self._parameters += 1
        self._arguments(f"{comma}{_json(name)}: {self._parameter.opening}")
        self._state = self._xml_value

    def _xml_value(self, final: bool) -> bool:
        parameter = self._parameter
        assert parameter is not None, "a value belongs to a parameter"
        found = _PARAMETER_END.search(self._buffer)
        if found:
            self._arguments(parameter.last(self._buffer[: found.start()]))
            self._buffer = self._buffer[found.end() :]
            self._state = self._xml_body
            return True
        if parameter.streams:
            keep = 0 if final else overlap(self._buffer, "\n</parameter>")
            keep = keep or (0 if final else overlap(self._buffer, "</parameter>"))
            sure = len(self._buffer) - keep
            self._arguments(parameter.part(self._buffer[:sure]))
            self._buffer = self._buffer[sure:]
        return False

    def _ignore(self, final: bool) -> bool:
        self._buffer = ""
        return False

    def _begin(self, name: str, size: int) -> None:
        self._name = name
        self._out.append(CallStart(self._calls, name))
        self._calls += 1
        self._buffer = self._buffer[size:]

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._calls - 1, text))


class _JsonEnd:
    """Finds where a JSON object ends that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.done = False

    def scan(self, text: str) -> int:
        """How much of `text` belongs to the object."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
        return len(text)


class _Parameter:
    """The value of an XML parameter as JSON: text streams, all else is read when it is whole."""

    def __init__(self, schema: object) -> None:
        types = schema_types(schema)
        self.streams = types == {"string"} or not types
        self._text = "string" in types
        self.opening = '"' if self.streams else ""

    def part(self, text: str) -> str:
        return _json(text)[1:-1]

    def last(self, text: str) -> str:
        if self.streams:
            return self.part(text) + '"'
        plain = text.strip()
        value = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
        return value if _is_json(value) else _json(text)


def schema_types(schema: object) -> set[str]:
    """The types that a JSON schema allows for a value; empty where it does not tell."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(name) for name in kind}
    if isinstance(values := schema.get("enum"), list):
        return {"string"} if all(isinstance(value, str) for value in values) else {"enum"}
    for union in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(union), list):
            return set().union(*(schema_types(option) or {"any"} for option in options))
    return {"any"} if schema.keys() & {"properties", "items", "const", "$ref", "allOf"} else set()


def json_object(text: str) -> dict[str, Any] | None:
    """The object that `text` is as JSON, or None; what cannot be sent on as JSON is none."""
    try:
        value = json.loads(text, strict=False)
        # A model may write NaN, numbers past all bounds, and halves of characters.
        clean = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        value = json.loads(clean)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is written in another order, or None."""
    call = json_object(text) or {}
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, _json(arguments)


def _name(quoted: str) -> str:
    found = json_object(f'{{"name": {quoted}}}')
    return str(found["name"]) if found else quoted


def _is_json(text: str) -> bool:
    return json_object(f'{{"": {text}}}') is not None


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of the same kind joined."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text)
        elif (
            isinstance(piece, CallArguments)
            and isinstance(last, CallArguments)
            and piece.call == last.call
        ):
            out[-1] = CallArguments(last.call, last.text + piece.text)
        else:
            out.append(piece)
    return out
