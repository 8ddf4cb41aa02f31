"""Tools and reasoning: the parser on text, the grammar on the demo model, both through clients."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec import ArgumentError, Engine
from pyspec.chat import ChatTemplate
from pyspec.server.output import (
    CallArguments,
    CallStart,
    Content,
    OutputParser,
    Piece,
    Reasoning,
    json_object,
    merge,
)
from pyspec.server.service import Conversation, chat_prompt
from pyspec.server.tools import CallGrammar, Tool, Toolbox
from tests.conftest import OpenEngine
from tests.servers import serve

openai = pytest.importorskip("openai")

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "hourly": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"]}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK, "note": {}}


def parse(text: str, cuts: list[int] | None = None, **options: Any) -> list[Piece]:
    """The merged pieces of `text`, pushed in parts that end at `cuts`."""
    parser = OutputParser(**options)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts or ()), len(text)]
    pieces = [piece for a, b in itertools.pairwise(edges) for piece in parser.push(text[a:b])]
    return merge([*pieces, *parser.finish()])


# ---- the parser ----

HERMES = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "n": {"a": "}"}}}\n</tool_call>'
)
XML = """<tool_call>
<function=weather>
<parameter=city>
Rome "a"
and <b>
</parameter>
<parameter=days>
2
</parameter>
<parameter=hourly>
True
</parameter>
</function>
</tool_call>"""
XML_ARGUMENTS = {"city": 'Rome "a"\nand <b>', "days": 2, "hourly": True}

TEXTS = {
    "content": ("just text\n", [Content("just text\n")]),
    "hermes": (
        HERMES,
        [CallStart(0, "weather"), CallArguments(0, '{"city": "Rome", "n": {"a": "}"}}')],
    ),
    "xml": (
        XML,
        [
            CallStart(0, "weather"),
            CallArguments(0, '{"city": "Rome \\"a\\"\\nand <b>", "days": 2, "hourly": true}'),
        ],
    ),
    "content-then-two-calls": (
        f"Let me see.\n\n{HERMES}\n{XML}\n",
        [
            Content("Let me see."),
            CallStart(0, "weather"),
            CallArguments(0, '{"city": "Rome", "n": {"a": "}"}}'),
            CallStart(1, "weather"),
            CallArguments(1, '{"city": "Rome \\"a\\"\\nand <b>", "days": 2, "hourly": true}'),
        ],
    ),
    "mark-in-an-argument": (
        '<tool_call>{"name":"note","arguments":{"x":"</tool_call>"}}</tool_call>',
        [CallStart(0, "note"), CallArguments(0, '{"x":"</tool_call>"}')],
    ),
    "other-order": (
        '<tool_call>{"arguments": {"zone": "CET"}, "name": "clock"}</tool_call>',
        [CallStart(0, "clock"), CallArguments(0, '{"zone": "CET"}')],
    ),
    "arguments-as-text": (
        '<tool_call>{"name": "clock", "arguments": "{\\"zone\\": \\"CET\\"}"}</tool_call>',
        [CallStart(0, "clock"), CallArguments(0, '{"zone": "CET"}')],
    ),
    "no-parameters": (
        "<tool_call><function=note></function></tool_call>",
        [CallStart(0, "note"), CallArguments(0, "{}")],
    ),
    "no-call-at-all": (
        "<tool_call>maybe</tool_call> not",
        [Content("<tool_call>maybe</tool_call> not")],
    ),
    "cut-in-the-head": ('<tool_call>{"name": "wea', [Content('<tool_call>{"name": "wea')]),
    "cut-in-the-arguments": (
        '<tool_call>{"name": "note", "arguments": {"a": [1, ',
        [CallStart(0, "note"), CallArguments(0, '{"a": [1, ')],
    ),
    "never-closed": (
        '<tool_call>{"name": "note", "arguments": {}}',
        [CallStart(0, "note"), CallArguments(0, "{}")],
    ),
    "almost-a-mark": ("a <tool_ b </tool_call>", [Content("a <tool_ b </tool_call>")]),
}


@pytest.mark.parametrize(("text", "pieces"), TEXTS.values(), ids=TEXTS)
def test_text_becomes_pieces(text: str, pieces: list[Piece]) -> None:
    assert parse(text, schemas=SCHEMAS) == pieces


@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(0, 250), max_size=40))
def test_pieces_do_not_depend_on_how_text_arrives(name: str, cuts: list[int]) -> None:
    text, pieces = TEXTS[name]
    assert parse(text, cuts, schemas=SCHEMAS) == pieces


MARKS = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "\n"]
MARKS += ["</parameter>", '{"name": "f", "arguments": ', "{", "}", '"', "<", " ", "x", "</think>"]


@given(st.lists(st.sampled_from(MARKS), max_size=14), st.lists(st.integers(0, 99), max_size=9))
def test_any_text_parses_the_same_in_any_parts(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    whole = parse(text, schemas={"f": {}}, thinking=True)
    assert parse(text, cuts, schemas={"f": {}}, thinking=True) == whole
    assert parse(text, list(range(len(text))), schemas={"f": {}}, thinking=True) == whole


@given(st.dictionaries(st.sampled_from("abc"), st.text() | st.integers() | st.none(), min_size=1))
def test_xml_arguments_come_back(arguments: dict[str, Any]) -> None:
    kinds = {str: "string", int: "integer", type(None): "null"}
    schema = {"properties": {k: {"type": kinds[type(v)]} for k, v in arguments.items()}}
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    if any("</parameter>" in value for value in values.values()):
        return
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    start, found = parse(text, schemas={"f": schema})
    assert start == CallStart(0, "f")
    assert isinstance(found, CallArguments) and json.loads(found.text) == arguments


@pytest.mark.parametrize(
    "arguments", ['{"x": "\\ud800"}', '{"x": NaN}', '{"x": 1e999}', "[" * 5000, '{"x": 1']
)
def test_arguments_of_any_kind_can_be_sent(arguments: str) -> None:
    """Whole or as blocks, an answer is valid UTF-8 and strict JSON around what a model wrote."""
    for text in (
        f'<tool_call>{{"name": "note", "arguments": {arguments}}}</tool_call>',
        f'<tool_call>{{"arguments": {arguments}, "name": "\\udfff"}}</tool_call>',
        f"<tool_call><function=weather><parameter=days>{arguments}</parameter></function></tool_call>",
    ):
        pieces = parse(text, schemas=SCHEMAS)
        json.dumps(pieces, ensure_ascii=False).encode()
        found = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        json.dumps(json_object(found), ensure_ascii=False, allow_nan=False).encode()


def test_arguments_stream() -> None:
    parser = OutputParser(schemas=SCHEMAS)
    seen = [parser.push(char) for char in HERMES]
    assert sum(1 for pieces in seen if pieces) > 20


def test_only_the_first_call_counts_without_parallel_calls() -> None:
    pieces = parse(f"{HERMES}\n{HERMES}", schemas=SCHEMAS, parallel=False)
    assert [piece for piece in pieces if isinstance(piece, CallStart)] == [CallStart(0, "weather")]


@pytest.mark.parametrize(
    ("text", "options", "pieces"),
    [
        pytest.param(
            "why\n</think>\n\nso",
            {"thinking": True},
            [Reasoning("why"), Content("so")],
            id="opened",
        ),
        pytest.param(
            "<think>\nwhy\n</think>\n\nso",
            {"thinks": True},
            [Reasoning("why"), Content("so")],
            id="opens",
        ),
        pytest.param("no <think>", {"thinks": True}, [Content("no <think>")], id="later"),
        pytest.param("why not", {"thinking": True}, [Reasoning("why not")], id="cut"),
        pytest.param("</think>so", {"thinking": True}, [Content("so")], id="empty"),
        pytest.param("<think>a</think>b", {}, [Content("<think>a</think>b")], id="off"),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_reasoning(text: str, options: Any, pieces: list[Piece], step: int) -> None:
    assert parse(text, list(range(0, len(text), step)), **options) == pieces
    with_tools = parse(text, list(range(0, len(text), step)), schemas={}, **options)
    assert with_tools == pieces


# ---- the toolbox ----


def test_toolbox_refuses_what_cannot_be() -> None:
    a = Tool("a")
    with pytest.raises(ArgumentError, match="two entries called 'a'"):
        Toolbox((a, a))
    with pytest.raises(ArgumentError, match="'b', which is not among the tools"):
        Toolbox((a,), "required", "b")


# ---- templates ----

QWEN35 = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}\
{% endfor %}{{ '</tools> as <function=name><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{%- for call in message.tool_calls or [] %}{% for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>' + value | string }}{% endfor %}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}"""

TOOLS = (Tool("weather", "Forecast", WEATHER), Tool("clock", "Time", CLOCK))


def test_prompt_of_a_template_that_knows_no_tools(plain: Engine) -> None:
    """Everything about tools becomes text, so the model sees it."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "clock", "arguments": {"zone": "CET"}},
    }
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
    ]
    prompt = chat_prompt(plain, Conversation(messages, Toolbox(TOOLS)))
    text = b"".join(plain.native.token_to_piece(t, special=True) for t in prompt.tokens).decode()
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools")
    assert '"name": "weather"' in text
    assert '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>" in text


# ---- the grammar ----


@pytest.mark.parametrize("xml", [False, True], ids=["hermes", "xml"])
@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_are_calls(plain: Engine, xml: bool, seed: int) -> None:
    grammar = CallGrammar(Toolbox(TOOLS, "required", None, parallel=False), xml).build(None, False)
    text = plain.complete("x", grammar=grammar, seed=seed, max_tokens=200, temperature=1.5).text
    start, arguments = parse(text, schemas={"weather": WEATHER, "clock": CLOCK})
    assert isinstance(start, CallStart) and isinstance(arguments, CallArguments)
    value = json.loads(arguments.text)
    if start.name == "weather":
        assert value["city"] in ("Paris", "Rome") and value["days"] in (1, 2, 3)
    else:
        assert value == {"zone": value["zone"]} and value["zone"] in ("CET", "UTC")


def test_xml_text_parameters_take_anything(plain: Engine) -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    toolbox = Toolbox((Tool("ask", "", schema),), "required", "ask", parallel=False)
    grammar = CallGrammar(toolbox, True).build(None, False)
    result = plain.complete(
        "</parameter>\n" * 9, grammar=grammar, seed=1, max_tokens=200, temperature=0
    )
    start, *rest = parse(result.text, schemas={"ask": schema})
    assert start == CallStart(0, "ask") and len(rest) == 1


def test_definitions_of_two_tools_do_not_mix(plain: Engine) -> None:
    def tool(name: str, value: str) -> Tool:
        return Tool(
            name,
            "",
            {
                "type": "object",
                "$defs": {"item": {"enum": [value]}},
                "properties": {"x": {"$ref": "#/$defs/item"}},
                "required": ["x"],
            },
        )

    tools = (tool("one", "first"), tool("two", "second"))
    for name, value in (("one", "first"), ("two", "second")):
        for xml in (False, True):
            toolbox = Toolbox(tools, "required", name, parallel=False)
            grammar = CallGrammar(toolbox, xml).build(None, False)
            text = plain.complete("x", grammar=grammar, max_tokens=100).text
            _, arguments = parse(text, schemas=toolbox.schemas)
            assert json.loads(arguments.text) == {"x": value}  # type: ignore[union-attr]


def test_reasoning_may_come_before_what_the_grammar_forces(plain: Engine) -> None:
    toolbox = Toolbox((Tool("clock", "", CLOCK),), "required", parallel=False)
    grammar = CallGrammar(toolbox, False).build(None, True)
    prompt = "x </think>\n\n<tool_call>" * 5  # leads the model to end its reasoning
    text = plain.complete(prompt, grammar=grammar, temperature=0, max_tokens=80).text
    reasoning, start, arguments = parse(text, thinking=True, schemas=toolbox.schemas)
    assert (reasoning, start) == (Reasoning("x"), CallStart(0, "clock"))
    assert json.loads(arguments.text)["zone"] in ("CET", "UTC")  # type: ignore[union-attr]


# ---- with the real client ----

HELLO: Any = [{"role": "user", "content": "How is the weather?"}]
PARAMS: Any = [
    {"type": "function", "function": {"name": t.name, "parameters": t.parameters}} for t in TOOLS
]


@pytest.fixture(scope="module")
def engine(open_engine: OpenEngine) -> Engine:
    return open_engine("mtp", n_slots=2, n_ctx=1024)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Any]:
    with (
        serve(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


@pytest.fixture
def thinking(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template like that of Qwen3.5 instead of the demo's."""
    monkeypatch.setitem(engine.__dict__, "chat_template", ChatTemplate(QWEN35))


def check_call(call: Any, name: str | None = None) -> None:
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == name or call.function.name in ("weather", "clock")
    value = json.loads(call.function.arguments)
    assert value.get("city") in ("Paris", "Rome") or value.get("zone") in ("CET", "UTC")


def test_required_calls(client: Any) -> None:
    options = {"model": "demo", "messages": HELLO, "tools": PARAMS, "tool_choice": "required"}
    options |= {"parallel_tool_calls": False, "max_tokens": 200}
    for seed in range(2):
        whole = client.chat.completions.create(**options, seed=seed).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        (call,) = whole.message.tool_calls
        check_call(call)
        plain = client.chat.completions.create(**options, seed=seed, extra_body={"draft": "none"})
        assert plain.choices[0].message.tool_calls[0].function == call.function


def test_named_call_streams(client: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=HELLO,
            tools=PARAMS,
            tool_choice=named,
            seed=1,
            stream=True,
            max_tokens=200,
        )
    )
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    deltas = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert deltas[0].id.startswith("call_") and deltas[0].function.name == "weather"
    assert all(delta.index == 0 and delta.function.name is None for delta in deltas[1:])
    assert len(deltas) > 3
    value = json.loads("".join(delta.function.arguments for delta in deltas))
    assert value["city"] in ("Paris", "Rome") and value["days"] in (1, 2, 3)


def test_parallel_calls(client: Any) -> None:
    for seed in range(8):
        answer = client.chat.completions.create(
            model="demo",
            messages=HELLO,
            tools=PARAMS,
            tool_choice="required",
            max_tokens=120,
            seed=seed,
            temperature=1.5,
        ).choices[0]
        calls = answer.message.tool_calls
        for call in calls[:-1] if answer.finish_reason == "length" else calls:
            check_call(call)
        if len(calls) > 1:
            assert len({call.id for call in calls}) == len(calls)
            return
    pytest.fail("no seed called twice")


def test_auto_and_none_leave_text_alone(client: Any) -> None:
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model="demo", messages=HELLO, tools=PARAMS, tool_choice=choice, max_tokens=10, seed=1
        )
        assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_a_schema_or_a_call(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    for seed in range(2):
        message = (
            client.chat.completions.create(
                model="demo",
                messages=HELLO,
                tools=PARAMS,
                response_format=form,
                max_tokens=150,
                seed=seed,
            )
            .choices[0]
            .message
        )
        if message.tool_calls:
            check_call(message.tool_calls[0])
        else:
            assert json.loads(message.content) == "yes"


@pytest.mark.usefixtures("thinking")
def test_reasoning_content(client: Any) -> None:
    options = {"model": "demo", "messages": HELLO, "max_tokens": 20, "seed": 1}
    body = {"ignore_eos": True}
    whole = client.chat.completions.create(**options, extra_body=body)
    assert whole.choices[0].message.content == ""
    reasoning = whole.choices[0].message.reasoning_content
    assert reasoning and whole.usage.completion_tokens_details.reasoning_tokens == 20
    chunks = client.chat.completions.create(**options, extra_body=body, stream=True)
    deltas = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert "".join(filter(None, deltas)) == reasoning
    quiet = client.chat.completions.create(
        **options, extra_body={**body, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert quiet.choices[0].message.content
    assert not hasattr(quiet.choices[0].message, "reasoning_content")
    item = client.responses.create(
        model="demo", input="Hi", max_output_tokens=10, extra_body={**body, "seed": 1}
    ).output[0]
    assert item.type == "reasoning" and item.content[0].text


@pytest.mark.usefixtures("thinking")
def test_xml_calls_when_the_template_writes_them(client: Any) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        tools=PARAMS,
        tool_choice="required",
        max_tokens=200,
        seed=1,
        parallel_tool_calls=False,
        reasoning_effort="none",
        logprobs=True,
    ).choices[0]
    check_call(answer.message.tool_calls[0])
    text = "".join(entry.token for entry in answer.logprobs.content)
    assert text.startswith("<tool_call>\n<function=")


def test_responses_call_functions(client: Any) -> None:
    tools = [{"type": "function", "name": t.name, "parameters": t.parameters} for t in TOOLS]
    options = {"model": "demo", "input": "x", "tools": tools, "max_output_tokens": 200}
    options |= {"tool_choice": {"type": "function", "name": "clock"}, "extra_body": {"seed": 3}}
    whole = client.responses.create(**options)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "clock"
    assert json.loads(call.arguments)["zone"] in ("CET", "UTC")
    with client.responses.stream(**options) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and len(deltas) > 1
    assert events[-1].response.output[0].arguments == call.arguments


def test_a_template_that_refuses_gives_its_message(
    client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = ChatTemplate("{{ raise_exception('Roles must alternate') }}")
    monkeypatch.setitem(engine.__dict__, "chat_template", refusing)
    with pytest.raises(openai.BadRequestError, match="Roles must alternate"):
        client.chat.completions.create(model="demo", messages=HELLO)
