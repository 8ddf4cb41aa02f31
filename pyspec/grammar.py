"""GBNF grammars from JSON schemas and fixed text.

    builder = GrammarBuilder()
    body = builder.schema({"type": "integer"}, "body")
    text = builder.build(f'"answer: " {body}')

llama-cpp-python's converter does the work; what it lets through and JSON forbids is put right here.
A schema comes from a stranger, so its size, depth, choices and repetitions have limits: a grammar is
followed in every way that it can be, and a few lines of schema can have more ways than time.
"""

from __future__ import annotations

import json
import re
import re._parser as regex  # type: ignore[import-not-found]
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import unquote

from pyspec.errors import SamplerError

MAX_SCHEMA_CHARS = 1 << 16
"""Longest schema, as JSON text."""

MAX_SCHEMA_DEPTH = 48
"""Deepest nesting of objects and arrays in a schema."""

MAX_REPEAT = 1000
"""Most repetitions that a schema may ask for: ``minItems``, ``maxLength``, ``{n}`` in a pattern."""

MAX_CHOICES = 2000
"""Most ways in which one value may begin, references followed."""

MAX_PATTERN_SIZE = 2000
"""Most characters that a pattern stands for, its repetitions written out."""

MAX_PROPERTIES = 256
"""Most properties of an object."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
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
            _check_limits(text, value)
            value = self._converter.resolve_refs(value, f"schema{self._schemas}")
            _check_choices(value, self._converter._refs)
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


def _check_limits(text: str, schema: Any) -> None:
    if len(text) > MAX_SCHEMA_CHARS:
        raise SamplerError(f"json_schema has {len(text)} characters, at most {MAX_SCHEMA_CHARS}")
    if not isinstance(schema, dict | bool):
        raise SamplerError(f"json_schema is {text[:40]}, must be an object")
    level, depth = [schema] if isinstance(schema, dict) else [], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise SamplerError(f"json_schema is nested deeper than {MAX_SCHEMA_DEPTH}")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                _check_counts(node)
            children = node.values() if isinstance(node, dict) else node
            below += [child for child in children if isinstance(child, dict | list)]
        level = below


def _check_counts(node: dict[str, Any]) -> None:
    for name in _COUNTS:
        count = node.get(name, 0)
        if isinstance(count, int) and not 0 <= count <= MAX_REPEAT:
            raise SamplerError(f"json_schema: {name} asks for {count}, must be 0 to {MAX_REPEAT}")
    properties = node.get("properties", ())
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise SamplerError(
            f"json_schema: an object has {len(properties)} properties, at most {MAX_PROPERTIES}"
        )
    if isinstance(pattern := node.get("pattern"), str):
        _check_pattern(pattern)


def _check_pattern(pattern: str) -> None:
    """Refuses a regular expression that a grammar follows in too many ways."""
    try:
        size = _written_out(regex.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise SamplerError(
            f"json_schema: pattern {pattern[:40]!r} is not understood: {error}"
        ) from None
    if size > MAX_PATTERN_SIZE:
        raise SamplerError(
            f"json_schema: pattern {pattern[:40]!r} stands for {size} characters, "
            f"at most {MAX_PATTERN_SIZE}"
        )


def _written_out(parsed: Any) -> int:
    """Characters of a parsed expression with its repetitions written out."""
    size = 0
    for operation, argument in parsed:
        name = str(operation)
        if name.endswith("REPEAT"):
            low, high, body = argument
            if body.getwidth()[0] == 0:
                raise SamplerError("json_schema: pattern repeats something that may be empty")
            times = low + 1 if high is regex.MAXREPEAT else high
            size += times * _written_out(body)
        elif name == "SUBPATTERN":
            size += _written_out(argument[-1])
        elif name == "BRANCH":
            size += sum(map(_written_out, argument[1]))
        else:
            size += 1
    return size


def _check_choices(schema: Any, refs: dict[str, Any]) -> None:
    """Refuses a schema one of whose values may begin in too many ways."""
    known: dict[int, int] = {}

    def count(node: Any) -> int:
        if not isinstance(node, dict):
            return 1
        if id(node) not in known:
            known[id(node)] = 1  # a reference to itself begins in no new way
            unions = [node[name] for name in ("anyOf", "oneOf") if isinstance(node.get(name), list)]
            ways = sum(count(option) for union in unions for option in union)
            if isinstance(values := node.get("enum"), list):
                ways += len(values)
            if isinstance(types := node.get("type"), list):
                ways += len(types)
            if isinstance(ref := node.get("$ref"), str):
                ways += count(refs.get(ref))
            known[id(node)] = max(1, ways)
            if ways > MAX_CHOICES:
                raise SamplerError(
                    f"json_schema: a value may begin in more than {MAX_CHOICES} ways"
                )
        return known[id(node)]

    for node in _objects(schema):
        count(node)


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


def _objects(value: Any) -> list[dict[str, Any]]:
    """All objects in a JSON value."""
    found, left = [], [value]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            found.append(node)
            left += node.values()
        elif isinstance(node, list):
            left += node
    return found


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
            return super().visit(schema, name)

        def resolve_refs(self, schema: Any, url: str) -> Any:
            """Finds what every reference points to; `url` keeps those of several schemas apart."""
            for node in _objects(schema):
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
