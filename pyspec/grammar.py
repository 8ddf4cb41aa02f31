"""GBNF grammars from JSON schemas and fixed text.

    builder = GrammarBuilder()
    body = builder.schema({"type": "integer"}, "body")
    text = builder.build(f'"answer: " {body}')

llama-cpp-python's converter does the work; what it lets through and JSON forbids is put right here.
`pyspec.schema_limits` says which schemas are refused.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import unquote

from pyspec.errors import SamplerError
from pyspec.schema_limits import check_choices, check_limits, objects

MAX_INTEGER = 10**15
"""Greatest integer that a schema without a bound allows; -1 times it is the least."""

_CHAR = (r'char ::= [^"\\] |', r'char ::= [^"\\\x7F\x00-\x1F] |')


def schema_grammar(schema: Any) -> str:
    """The grammar of the JSON texts that satisfy `schema`, itself JSON text or its value.

    Raises:
        SamplerError: The schema uses something that cannot become a grammar, or breaks a limit.
    """
    builder = GrammarBuilder()
    return builder.build(builder.schema(schema, "value-of"))


class GrammarBuilder:
    """Collects rules; `build` gives the grammar's text."""

    def __init__(self) -> None:
        self._converter = _converter_class()(
            prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False
        )
        self._schemas = 0

    def schema(self, schema: Any, name: str) -> str:
        """Adds the rules of a JSON schema; returns the name of the one to start from."""
        self._schemas += 1
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            # A copy, since the converter writes into what it reads.
            value = json.loads(text)
            check_limits(text, value)
            value = self._converter.resolve_refs(value, f"schema{self._schemas}")
            check_choices(value, self._converter._refs)
            return str(self._converter.visit(value, name))
        except SamplerError:
            raise
        except Exception as error:  # the converter raises whatever Python does on a bad schema
            raise SamplerError(
                f"json_schema cannot become a grammar: {error or type(error).__name__}"
            ) from None

    def rule(self, name: str, body: str) -> str:
        """Adds a rule; returns its name, which differs from `name` where that one is taken."""
        return str(self._converter._add_rule(name, body))

    def until(self, text: str, name: str) -> str:
        """Adds the rule of anything that ends with the first `text` in it; returns its name.

        One rule per state of the automaton of Knuth, Morris and Pratt.
        """
        names = [f"{name}-{state}" for state in range(len(text))]
        for state, rule in enumerate(names):
            steps = {char: _advance(text, state, char) for char in dict.fromkeys(text)}
            onward = [
                f"{literal(char)} {names[to]}" if to < len(text) else literal(char)
                for char, to in steps.items()
                if to
            ]
            others = "".join(_in_class(char) for char, to in steps.items() if to)
            self._converter._rules[rule] = " | ".join([*onward, f"[^{others}] {names[0]}"])
        return names[0]

    def build(self, root: str) -> str:
        """The grammar whose texts match the expression `root`."""
        self._converter._rules["root"] = root
        return str(self._converter.format_grammar()).replace(*_CHAR)


def literal(text: str) -> str:
    """`text` as a GBNF string."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    escapes |= {chr(code): f"\\x{code:02X}" for code in range(32) if chr(code) not in escapes}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'


def _in_class(char: str) -> str:
    escapes = {"\\": r"\\", "]": r"\]", "^": r"\x5E", "-": r"\x2D", "\n": r"\n", "\r": r"\r"}
    return escapes.get(char, char)


def _advance(text: str, state: int, char: str) -> int:
    """Length of the longest beginning of `text` that ends ``text[:state] + char``."""
    seen = text[:state] + char
    return next(
        size for size in range(len(seen), -1, -1) if text.startswith(seen[len(seen) - size :])
    )


def _plain_classes(pattern: str) -> str:
    r"""``\d``, ``\w`` and ``\s`` written as sets, which is all that the converter knows."""
    sets = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " \\t\\r\\n"}
    inside = False

    def plain(found: re.Match[str]) -> str:
        nonlocal inside
        text = found[0]
        if text in "[]":
            inside = text == "["
        elif text[1:] in sets:
            return sets[text[1:]] if inside else f"[{sets[text[1:]]}]"
        return text

    return re.sub(r"\\.|\[|\]", plain, pattern, flags=re.DOTALL)


def _range(low: int, high: int) -> str:
    """The expression of the whole numbers from `low` to `high`, both at least 0."""
    options = []
    for size in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 10 ** (size - 1) if size > 1 else 0)
        options.append(_digits(str(least), str(min(high, 10**size - 1))))
    return " | ".join(options)


def _digits(low: str, high: str) -> str:
    """The expression of the numbers between two of the same length."""
    if low == high:
        return literal(low)
    first, last, rest = low[0], high[0], len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return " ".join(["[0-9]"] * len(low))
    if not rest:
        return f"[{first}-{last}]"
    if first == last:
        return f"{literal(first)} ({_digits(low[1:], high[1:])})"
    options = [f"{literal(first)} ({_digits(low[1:], '9' * rest)})"]
    if int(last) - int(first) > 1:
        middle = _digits(str(int(first) + 1), str(int(last) - 1))
        options.append(f"{middle} {' '.join(['[0-9]'] * rest)}")
    options.append(f"{literal(last)} ({_digits('0' * rest, high[1:])})")
    return " | ".join(options)


def _bounds(schema: dict[str, Any]) -> tuple[int, int] | None:
    """The least and the greatest integer that a schema allows, or None where it sets no bound."""
    low = [
        *(math.ceil(schema[name]) for name in ("minimum",) if name in schema),
        *(math.floor(schema[name]) + 1 for name in ("exclusiveMinimum",) if name in schema),
    ]
    high = [
        *(math.floor(schema[name]) for name in ("maximum",) if name in schema),
        *(math.ceil(schema[name]) - 1 for name in ("exclusiveMaximum",) if name in schema),
    ]
    if not low and not high:
        return None
    least, greatest = max([*low, -MAX_INTEGER]), min([*high, MAX_INTEGER])
    if least > greatest:
        raise ValueError(f"no integer is between {least} and {greatest}")
    return least, greatest


def _integers(least: int, greatest: int) -> str:
    """The expression of the integers between two."""
    options = []
    if least < 0:
        negative = _range(max(1, -greatest), -least)
        options.append(f'"-" ({negative})')
    if greatest >= 0:
        options.append(_range(max(0, least), greatest))
    return " | ".join(options)


def _pointed_at(schema: Any, ref: str) -> Any:
    """What a JSON pointer in a fragment (RFC 6901) points to."""
    if ref != "#" and not ref.startswith("#/"):
        raise ValueError(f"$ref {ref!r} points outside of the schema")
    found = schema
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name) if isinstance(found, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"$ref {ref!r} points to nothing") from None
    return found


@cache
def _converter_class() -> Any:
    # Imported here: llama_cpp loads the libraries, and only schemas need it.
    from llama_cpp.llama_grammar import PRIMITIVE_RULES, SchemaConverter

    class Converter(SchemaConverter):  # type: ignore[misc]
        """With unions, escapes and references put right."""

        def visit(self, schema: Any, name: str) -> Any:
            """The rule of a schema; ``true`` and ``{}`` allow every value."""
            if schema is True or schema == {}:
                return self._add_primitive("value", PRIMITIVE_RULES["value"])
            if not isinstance(schema, dict):
                raise ValueError(f"{schema!r} is no schema")
            if schema.get("items") == {}:
                schema = {**schema, "items": True}
            if "enum" in schema or "const" in schema:
                schema = {key: schema[key] for key in ("enum", "const") if key in schema}
            elif isinstance(schema.get("type"), list) and "$ref" not in schema:
                schema = {"anyOf": [{**schema, "type": kind} for kind in schema["type"]]}
            if schema.get("type") == "integer" and (bounds := _bounds(schema)):
                return self._add_rule(name, f"({_integers(*bounds)}) space")
            return super().visit(schema, name)

        def resolve_refs(self, schema: Any, url: str) -> Any:
            """Finds what every reference points to; `url` keeps those of several schemas apart."""
            for node in objects(schema):
                if isinstance(ref := node.get("$ref"), str):
                    self._refs[url + ref] = _pointed_at(schema, ref)
                    node["$ref"] = url + ref
            return schema

        def _visit_pattern(self, pattern: str, name: str) -> Any:
            return super()._visit_pattern(_plain_classes(pattern), name)

        def _resolve_ref(self, ref: str) -> Any:
            # Named by the whole reference: definitions of the same name may differ.
            name = f"ref-{list(self._refs).index(ref)}-"
            if name not in self._rules and ref not in self._refs_being_resolved:
                self._refs_being_resolved.add(ref)
                found = self.visit(self._refs[ref], name)
                self._refs_being_resolved.remove(ref)
                if found != name:  # a primitive, or a name that was taken
                    self._rules[name] = found
            return name

        def _format_literal(self, literal_: str) -> str:
            with suppress(ValueError):  # JSON text, whose escapes a model would not write
                literal_ = json.dumps(json.loads(literal_), ensure_ascii=False)
            return literal(literal_)

    return Converter
