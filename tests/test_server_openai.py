"""OpenAI's APIs, spoken by the real client to a server with eight slots that drafts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pyspec import Engine
from tests.conftest import OpenEngine
from tests.servers import serve

openai = pytest.importorskip("openai")

HELLO: Any = [{"role": "user", "content": "Say hello"}]
PROMPT = "import os\n"
PLAIN = {"ignore_eos": True}


@pytest.fixture(scope="module")
def client(open_engine: OpenEngine) -> Iterator[Any]:
    with (
        serve(open_engine("mtp", n_slots=8, n_ctx=512)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


def refusal(client: Any, path: str, body: dict[str, Any]) -> Any:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(path, body=body, cast_to=object)
    return caught.value


# ---- the same text, whatever is drafted and whoever else is served ----


def requests() -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"extra_body": {"top_k": 0, "min_p": 0, "repeat_penalty": 1.2}},
        {"logit_bias": {"20": 5, "30": -100}},
        {"temperature": 2.0, "stop": ["\n"]},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"draft_nodes": 2}},
    ]
    return [{"seed": 100 + i, "max_tokens": 40 + i, **kind} for i, kind in enumerate(kinds)]


def ask(client: Any, options: dict[str, Any], **extra: Any) -> str:
    options = dict(options)
    body = {**PLAIN, **options.pop("extra_body", {}), **extra}
    whole = client.chat.completions.create(model="demo", messages=HELLO, extra_body=body, **options)
    return str(whole.choices[0].message.content)


def test_same_seed_same_text_as_plain_decoding_alone_and_together(client: Any) -> None:
    plain = [ask(client, options, draft="none", draft_nodes=None) for options in requests()]
    assert len(set(plain)) == len(plain)
    assert [ask(client, options) for options in requests()] == plain
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda options: ask(client, options), requests())) == plain


def test_answers_are_the_engines(client: Any, plain: Engine) -> None:
    found = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=30, seed=7, extra_body=PLAIN
    )
    expected = plain.complete(PROMPT, max_tokens=30, seed=7, ignore_end=True)
    assert found.choices[0].text == expected.text
    assert found.usage.completion_tokens == 30


# ---- streams ----


def test_a_stream_is_the_whole_in_pieces(client: Any) -> None:
    options = {"model": "demo", "messages": HELLO, "max_tokens": 24, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**options, extra_body=PLAIN)
    chunks = list(
        client.chat.completions.create(
            **options, extra_body=PLAIN, stream=True, stream_options={"include_usage": True}
        )
    )
    texts, reasons = ["", "", ""], {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == dict.fromkeys(range(3), "length")
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 3 * 24
    # Several choices run at once: their chunks alternate.
    order = [chunk.choices[0].index for chunk in chunks[3:-1]]
    assert order != sorted(order)


def test_choices_have_seeds_of_their_own(client: Any) -> None:
    together = client.completions.create(
        model="demo", prompt=["a", "def "], n=2, max_tokens=12, seed=5, extra_body=PLAIN
    )
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    alone = [
        client.completions.create(
            model="demo", prompt=prompt, max_tokens=12, seed=seed, extra_body=PLAIN
        )
        for prompt in ("a", "def ")
        for seed in (5, 6)
    ]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_ends_the_text_before_it(client: Any, stream: bool) -> None:
    options = {"model": "demo", "prompt": PROMPT, "temperature": 0, "extra_body": PLAIN}
    text = client.completions.create(**options, max_tokens=30).choices[0].text
    stop = text[9:12]
    cut = client.completions.create(**options, max_tokens=30, stop=["@@", stop], stream=stream)
    parts = list(cut) if stream else [cut]
    assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


# ---- log-probabilities ----


def teacher_forced(engine: Engine, prompt: str, tokens: list[int]) -> list[np.ndarray]:
    """Log-softmax of plain decoding's logits at every token, by another way than the server's."""
    ids = engine.tokenize(prompt)
    sequence = engine.begin(ids, max_tokens=1)
    try:
        while not engine.prefill(sequence):
            pass
        out = []
        for root in [ids[-1], *tokens[:-1]]:
            engine.native.verify([(sequence.slot, [root], [-1])])
            logits = engine.native.logits(sequence.slot, 0).astype(np.float64)
            engine.native.commit(sequence.slot, [0])
            out.append(logits - logits.max() - math.log(np.exp(logits - logits.max()).sum()))
        return out
    finally:
        engine.end(sequence)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_are_the_targets_for_accepted_drafts_too(
    client: Any, plain: Engine, stream: bool
) -> None:
    expected = plain.complete(PROMPT, max_tokens=25, seed=9, ignore_end=True)
    options = {"model": "demo", "prompt": PROMPT, "max_tokens": 25, "seed": 9, "logprobs": 4}
    found = client.completions.create(**options, extra_body=PLAIN, stream=stream)
    entries = [part.choices[0].logprobs for part in (found if stream else [found])]
    names = [name for entry in entries for name in entry.tokens]
    values = [value for entry in entries for value in entry.token_logprobs]
    tops = [top for entry in entries for top in entry.top_logprobs]
    offsets = [offset for entry in entries for offset in entry.text_offset]
    assert "".join(names) == expected.text
    assert offsets == [len("".join(names[:i])) for i in range(25)]
    for token, value, top, row in zip(
        expected.tokens, values, tops, teacher_forced(plain, PROMPT, expected.tokens), strict=True
    ):
        assert value == pytest.approx(row[token], abs=1e-9)
        assert sorted(top.values()) == pytest.approx(sorted(np.sort(row)[-4:]), abs=1e-9)


def test_chat_logprobs_belong_to_the_text(client: Any) -> None:
    options = {"model": "demo", "messages": HELLO, "max_tokens": 20, "seed": 2}
    whole = client.chat.completions.create(
        **options, logprobs=True, top_logprobs=2, extra_body=PLAIN
    )
    (choice,) = whole.choices
    entries = choice.logprobs.content
    assert len(entries) == 20 and all(len(entry.top_logprobs) == 2 for entry in entries)
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert data.decode(errors="replace") == choice.message.content
    chunks = client.chat.completions.create(**options, logprobs=True, stream=True, extra_body=PLAIN)
    streamed = [
        entry.logprob
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.logprob for entry in entries]
    bare = client.chat.completions.create(**options, extra_body=PLAIN)
    assert bare.choices[0].logprobs is None


def test_logprobs_end_where_a_stop_string_cuts(client: Any) -> None:
    options = {"model": "demo", "prompt": PROMPT, "temperature": 0, "extra_body": PLAIN}
    text = client.completions.create(**options, max_tokens=20).choices[0].text
    cut = client.completions.create(**options, max_tokens=20, stop=text[9:12], logprobs=0)
    (choice,) = cut.choices
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    assert len("".join(choice.logprobs.tokens[:-1])) < len(choice.text)


# ---- formats ----


def test_answers_follow_a_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="demo", messages=HELLO, response_format=form, seed=seed, max_tokens=60
        )
        value = json.loads(answer.choices[0].message.content)
        assert isinstance(value["ok"], bool) and value["kind"] in ("a", "b")
        assert answer.choices[0].finish_reason == "stop"


def test_bias_forbids_a_token(client: Any) -> None:
    options = {"model": "demo", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    first = client.completions.create(**options).choices[0].logprobs.tokens[0]
    (token,) = client.post("/../tokenize", body={"content": first}, cast_to=object)["tokens"]
    banned = client.completions.create(**options, logit_bias={str(token): -100})
    assert banned.choices[0].logprobs.tokens[0] != first


def test_models_and_embeddings(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError, match="no model is called 'x'"):
        client.models.retrieve("x")
    with pytest.raises(openai.BadRequestError, match="'demo' gives no embeddings: it is a gen"):
        client.embeddings.create(model="demo", input="a")


def test_tokenize_and_back(client: Any, plain: Engine) -> None:
    def post(path: str, **body: Any) -> Any:
        return client.post(f"/../{path}", body=body, cast_to=object)

    text = "def f(x): <|im_end|>é"
    found = post("tokenize", content=text)
    assert found["count"] == len(found["tokens"]) and 2 in found["tokens"]
    assert post("detokenize", tokens=found["tokens"])["content"] == text
    assert 2 not in post("tokenize", content=text, parse_special=False)["tokens"]
    prompt = plain.chat_template.render(HELLO)
    assert post("tokenize", messages=HELLO)["tokens"] == plain.tokenize(prompt)
    pieces = post("tokenize", content="é", with_pieces=True)["tokens"]
    data = b"".join(
        p.encode() if isinstance(p, str) else bytes(p) for p in (t["piece"] for t in pieces)
    )
    assert data.decode() == "é"


# ---- responses ----


def test_response_streams_what_it_answers_at_once(client: Any) -> None:
    options = {"model": "demo", "input": "Say hello", "max_output_tokens": 20, "instructions": "Go"}
    body = {**PLAIN, "seed": 4}
    whole = client.responses.create(**options, extra_body=body)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 20
    with client.responses.stream(**options, extra_body=body) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


def test_response_with_earlier_items_schema_and_logprobs(client: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    found = client.responses.create(
        model="demo",
        input=items,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    assert found.status == "completed"
    assert isinstance(json.loads(found.output_text)["ok"], bool)
    (part,) = found.output[0].content
    assert "".join(entry.token for entry in part.logprobs).startswith(part.text.strip())


# ---- refusals ----

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
AUDIO = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(60):
    DEEP = {"type": "array", "items": DEEP}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        pytest.param("chat", {"messages": IMAGE}, "content.0 is image input", id="image"),
        pytest.param("chat", {"messages": AUDIO}, "content.1 is audio input", id="audio"),
        pytest.param("chat", {"messages": [{"role": "elf", "content": ""}]}, "role", id="role"),
        pytest.param("chat", {"top_logprobs": 2}, "logprobs is not true", id="top-logprobs"),
        pytest.param("chat", {"response_format": {"type": "xml"}}, "response_format", id="format"),
        pytest.param("chat", schema_of({"type": "elf"}), "cannot become a grammar", id="schema"),
        pytest.param("chat", schema_of({"$ref": "#"}), "left recursion", id="poison"),
        pytest.param("chat", schema_of(DEEP), "nested deeper", id="deep-schema"),
        pytest.param("chat", schema_of({"maxItems": 10**9, "items": {}}), "maxItems", id="items"),
        pytest.param("chat", {"functions": [{}]}, "use tools", id="functions"),
        pytest.param("chat", {"modalities": ["audio"]}, "modalities", id="modalities"),
        pytest.param("chat", {"stop": ["a"] * 17}, "stop", id="stops"),
        pytest.param("chat", {"n": 129}, "n asks for 129", id="choices"),
        pytest.param("chat", {"stop": ["a", ""]}, "stop.1: String should have", id="empty-stop"),
        pytest.param("chat", {"tool_choice": "required"}, "no tools", id="no-tools"),
        pytest.param("chat", {"draft": "elf"}, "draft is 'elf'", id="draft"),
        pytest.param("chat", {"draft_nodes": 65}, "draft_nodes", id="draft-nodes"),
        pytest.param("chat", {"timeout": 0}, "timeout", id="timeout"),
        pytest.param("chat", {"logit_bias": {"9999": 1}}, "9999", id="bias-token"),
        pytest.param("chat", {"chat_template_kwargs": {"self": 1}}, "not free", id="kwargs"),
        pytest.param("completions", {"prompt": "a", "echo": True}, "echo", id="echo"),
        pytest.param("completions", {"prompt": "a", "suffix": "b"}, "suffix", id="suffix"),
        pytest.param("completions", {"prompt": "a", "best_of": 2}, "best_of", id="best-of"),
        pytest.param(
            "responses", {"input": "a", "previous_response_id": "r"}, "stored", id="state"
        ),
        pytest.param("responses", {"input": [{"type": "elf"}]}, "'elf'", id="item"),
        pytest.param("responses", {"input": [{"role": "tool"}]}, "input.0.role", id="item-role"),
    ],
)
def test_refusals_name_the_offender(client: Any, path: str, body: Any, words: str) -> None:
    if path == "chat":
        path, body = "chat/completions", {"messages": HELLO, **body}
    error = refusal(client, f"/{path}", {**body, "max_tokens": 3})
    assert words in str(error.body["message"]), error.body
    assert error.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"messages": ', id="cut"),
        pytest.param(b"[" * 100000, id="deep"),
        pytest.param(b'{"prompt": "\\ud800"}', id="surrogate"),
        pytest.param(b'{"prompt": "\xff"}', id="utf-8"),
        pytest.param(b'{"temperature": NaN}', id="nan"),
        pytest.param(b'{"temperature": 1e999}', id="infinite"),
        pytest.param(b'{"seed": 1' + b"0" * 5000 + b"}", id="huge"),
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="list"),
    ],
)
def test_bodies_must_be_json(client: Any, content: bytes) -> None:
    answer = client._client.post(
        "/completions", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_without_its_type_is_told_so(client: Any) -> None:
    answer = client._client.post("/completions", content=b'{"prompt": "a"}')
    assert answer.status_code == 400
    assert "Content-Type application/json" in answer.json()["error"]["message"]
