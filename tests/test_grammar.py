"""Grammars from JSON schemas: what a strict parser accepts, and limits that hold."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec import Engine, SamplerError, SamplingConfig
from pyspec.grammar import (
    GrammarBuilder,
    _advance,
    _integers,
    literal,
    schema_grammar,
)
from pyspec.schema_limits import MAX_REPEAT, MAX_SCHEMA_DEPTH
from tests.conftest import OpenEngine

CUT = "(cut)"

NODE = {
    "type": "object",
    "properties": {
        "v": {"enum": [1, 2]},
        "next": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["v", "next"],
}


def written(engine: Engine, grammar: str, seed: int = 1, prompt: str = "x = ") -> str:
    options = {"grammar": grammar, "seed": seed, "temperature": 3, "top_k": 0, "min_p": 0}
    result = engine.complete(prompt, max_tokens=80, **options)
    return result.text + CUT * (result.finish_reason == "length")


@pytest.mark.parametrize(
    ("schema", "holds"),
    [
        pytest.param(True, lambda value: True, id="true"),
        pytest.param(
            {"type": ["string", "null"], "maxLength": 3},
            lambda v: v is None or len(v) <= 3,
            id="union",
        ),
        pytest.param(
            {"enum": ["a\\b", 'é"q\n']}, lambda value: value in ["a\\b", 'é"q\n'], id="escapes"
        ),
        pytest.param(
            {"type": "string", "pattern": r"^\d{3}-[\w.]$"},
            lambda value: re.fullmatch(r"[0-9]{3}-[a-zA-Z0-9_.]", value),
            id="pattern",
        ),
        pytest.param(NODE, lambda value: value["v"] in (1, 2) and "next" in value, id="recursive"),
        pytest.param(
            {
                "$defs": {"string": {"type": "boolean"}},
                "type": "object",
                "properties": {"é": {"$ref": "#/$defs/string"}, "s": {"enum": ["x"]}},
                "required": ["é", "s"],
            },
            lambda value: isinstance(value["é"], bool) and value["s"] == "x",
            id="definition-named-as-a-type",
        ),
    ],
)
def test_texts_satisfy_the_schema(plain: Engine, schema: Any, holds: Any) -> None:
    ended = [
        json.loads(text)
        for seed in range(3)
        if not (text := written(plain, schema_grammar(schema), seed)).endswith(CUT)
    ]
    assert ended and all(map(holds, ended)), ended


def pattern(text: str) -> dict[str, str]:
    return {"type": "string", "pattern": f"^{text}$"}


#: Thirty definitions, each either of two references to the next: 2^30 ways to begin.
FORKS: dict[str, Any] = {
    "$defs": {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(30)
    }
    | {"d30": {"type": "null"}},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        pytest.param([], "must be an object", id="list"),
        pytest.param({"maxItems": 10**9, "items": {}}, "maxItems asks for 1000000000", id="items"),
        pytest.param({"type": "string", "minLength": -1}, "minLength asks for -1", id="negative"),
        pytest.param(
            {"type": "string", "pattern": "^a{99999999999}$"}, "not understood", id="pattern"
        ),
        pytest.param(pattern("(a{1,99}){1,99}"), "stands for 9803 characters", id="nested-counts"),
        pytest.param(pattern("(a?){1,50}"), "may be empty", id="nothing-repeated"),
        pytest.param(pattern("("), "not understood", id="open-group"),
        pytest.param(FORKS, "more than 2000 ways", id="forks"),
        pytest.param({"enum": ["x" * 70000]}, "70014 characters", id="long"),
        pytest.param({"type": "wrong"}, "cannot become a grammar", id="type"),
        pytest.param({"$ref": "https://example.com"}, "cannot become a grammar", id="remote"),
        pytest.param({"$ref": "#/nowhere"}, "cannot become a grammar", id="dangling"),
        pytest.param({"const": float("nan")}, "cannot become a grammar", id="nan"),
    ],
)
def test_bad_schemas_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(SamplerError, match=words):
        schema_grammar(schema)


numbers = st.integers(-(10**5), 10**5) | st.integers(-30, 120)


@given(numbers, numbers, numbers)
def test_bounds_of_integers(a: int, b: int, value: int) -> None:
    """GBNF of digits reads as a regular expression without its spaces and quotes."""
    least, greatest = sorted((a, b))
    text = re.sub(r"[ \"]", "", _integers(least, greatest))
    for number in (value, least, greatest, least - 1, greatest + 1, 0, -1):
        matches = re.fullmatch(text, str(number)) is not None
        assert matches == (least <= number <= greatest), (number, text)
    assert not re.fullmatch(text, "-0") and not re.fullmatch(text, "007")


def test_integers_keep_their_bounds(plain: Engine) -> None:
    schema = {"type": "integer", "exclusiveMinimum": -2.5, "maximum": 11}
    found = {int(written(plain, schema_grammar(schema), seed)) for seed in range(8)}
    assert found <= set(range(-2, 12)) and len(found) > 1
    with pytest.raises(SamplerError, match="no integer is between 4 and 3"):
        schema_grammar({"type": "integer", "minimum": 3.5, "maximum": 3.6})


def test_depth_has_a_limit() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_SCHEMA_DEPTH - 1):
        schema = {"items": schema}
    assert schema_grammar(schema)
    with pytest.raises(SamplerError, match="nested deeper"):
        schema_grammar({"items": schema})


def test_a_schema_that_is_itself_is_refused_by_the_sampler(plain: Engine) -> None:
    with pytest.raises(SamplerError):
        plain.generate("a", json_schema={"$ref": "#"})


def test_most_repetitions_parse(plain: Engine) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": MAX_REPEAT}
    assert isinstance(json.loads(written(plain, schema_grammar(schema))), list)


@given(st.text("ab", min_size=1, max_size=5), st.text("ab", max_size=20))
def test_the_automaton_finds_the_first_appearance(end: str, text: str) -> None:
    state, seen = 0, 0
    while state < len(end) and seen < len(text):
        state, seen = _advance(end, state, text[seen]), seen + 1
    assert (state == len(end)) == (end in text)
    if end in text:
        assert seen == text.index(end) + len(end)


@pytest.mark.parametrize("end", ["</think>", "aab", "\n]^-\\"])
def test_until_ends_at_the_first(plain: Engine, end: str) -> None:
    """Anything passes; after the first appearance, only what comes next does."""
    builder = GrammarBuilder()
    grammar = builder.build(f"{literal(end[:-1])} {builder.until(end, 'any')} {literal('!')}")
    for seed in range(4):
        text = written(plain, grammar, seed, prompt=f"{end}{end}{end}")
        _, found, tail = text[len(end) - 1 :].partition(end)
        assert text.startswith(end[:-1]) and (not found or tail == "!"), text
    last = builder.build(f"{literal(end)} {literal('!')}")
    assert written(plain, last) == f"{end}!"


#: A bracket may be either of two arrays, at every depth: 2^n ways to have come to depth n.
DOUBLING: dict[str, Any] = {
    "$defs": {
        name: {
            "type": "array",
            "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        }
        for name in ("a", "b")
    },
    "$ref": "#/$defs/a",
}


def test_a_grammar_that_explodes_ends_its_own_request(
    plain: Engine, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspec.decoder.SLOW_DRAW_SECONDS", 0.2)
    engine = open_engine("mtp", n_slots=2, n_ctx=256)
    (bracket,) = engine.native.tokenize("[")
    poison = SamplingConfig(json_schema=DOUBLING, temperature=0, logit_bias={bracket: 90})
    good = SamplingConfig(temperature=0)
    sequences = [
        engine.begin("x", sampling=sampling, max_tokens=60, ignore_end=True)
        for sampling in (poison, good)
    ]
    try:
        while live := [s for s in sequences if s.finish_reason is None]:
            engine.step(live)
        assert "to follow the grammar" in str(sequences[0].error)
        expected = plain.complete("x", max_tokens=60, temperature=0, ignore_end=True)
        assert sequences[1].text.text == expected.text
    finally:
        for sequence in sequences:
            engine.end(sequence)
