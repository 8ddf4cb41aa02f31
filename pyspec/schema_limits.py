"""Limits on JSON schemas that are to become grammars.

A schema comes from a stranger, and a grammar is followed in every way that it can be: a few lines of
schema can have more ways than there is time.
"""

from __future__ import annotations

import re
import re._parser as regex  # type: ignore[import-not-found]
from typing import Any

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


def check_limits(text: str, schema: Any) -> None:
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


def check_choices(schema: Any, refs: dict[str, Any]) -> None:
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

    for node in objects(schema):
        count(node)


def objects(value: Any) -> list[dict[str, Any]]:
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
