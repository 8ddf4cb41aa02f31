"""Anthropic's messages, spoken by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pyspec import Engine
from pyspec.chat import ChatTemplate
from tests.conftest import OpenEngine
from tests.servers import serve
from tests.test_server_tools import CLOCK, QWEN35, WEATHER

anthropic = pytest.importorskip("anthropic")

HELLO: Any = [{"role": "user", "content": "Say hello"}]
TOOLS: Any = [
    {"name": "weather", "description": "Forecast", "input_schema": WEATHER},
    {"name": "clock", "input_schema": CLOCK},
]
PLAIN = {"ignore_eos": True, "seed": 5}


@pytest.fixture(scope="module")
def engine(open_engine: OpenEngine) -> Engine:
    return open_engine("mtp", n_slots=2, n_ctx=1024)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Any]:
    with (
        serve(engine) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as opened,
    ):
        yield opened


def create(client: Any, **options: Any) -> Any:
    options = {"model": "demo", "messages": HELLO, "max_tokens": 20, "extra_body": PLAIN} | options
    return client.messages.create(**options)


def test_message(client: Any, plain: Engine) -> None:
    found = create(client, system="Be kind.")
    messages = [{"role": "system", "content": "Be kind."}, *HELLO]
    expected = plain.complete(
        plain.chat_template.render(messages), max_tokens=20, seed=5, ignore_end=True
    )
    assert (found.type, found.role, found.model) == ("message", "assistant", "demo")
    assert [(block.type, block.text) for block in found.content] == [("text", expected.text)]
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
    assert found.usage.input_tokens == expected.stats.prompt_tokens
    assert found.usage.output_tokens == 20
    again = create(client, system=[{"type": "text", "text": "Be kind."}])
    assert again.content[0].text == expected.text


def test_stream(client: Any) -> None:
    whole = create(client)
    options = {"model": "demo", "messages": HELLO, "max_tokens": 20, "extra_body": PLAIN}
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    raw = create(client, stream=True)
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_stop_sequence_is_named(client: Any) -> None:
    text = create(client).content[0].text
    stop = text[5:8]
    cut = create(client, stop_sequences=["@@", stop])
    assert cut.content[0].text == text[: text.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_that_has_begun_goes_on(client: Any, plain: Engine) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "def f("}]
    found = create(client, messages=begun)
    prompt = plain.chat_template.render(HELLO) + "def f("
    expected = plain.complete(prompt, max_tokens=20, seed=5, ignore_end=True)
    assert found.content[0].text == expected.text


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        pytest.param({"type": "any"}, ("weather", "clock"), id="any"),
        pytest.param({"type": "tool", "name": "clock"}, ("clock",), id="named"),
    ],
)
def test_tools(client: Any, choice: Any, names: tuple[str, ...]) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    options["extra_body"] = {"seed": 5}
    found = create(client, **options)
    (block,) = found.content
    assert (found.stop_reason, block.type) == ("tool_use", "tool_use")
    assert block.name in names and block.id.startswith("toolu_")
    assert block.input.get("city") in ("Paris", "Rome") or block.input["zone"] in ("CET", "UTC")
    with client.messages.stream(model="demo", messages=HELLO, **options) as stream:
        parts = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    assert final.content[0].input == block.input and len(parts) > 2


def test_a_whole_exchange_about_tools_is_a_prompt(client: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "time?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "CET"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "9"}],
                },
                {"type": "text", "text": "thanks"},
            ],
        },
    ]
    assert create(client, messages=messages, tools=TOOLS).content[0].text
    counted = client.messages.count_tokens(model="demo", messages=messages, tools=TOOLS)
    assert counted.input_tokens == create(client, messages=messages, tools=TOOLS).usage.input_tokens
    fewer = client.messages.count_tokens(model="demo", messages=messages)
    assert fewer.input_tokens < counted.input_tokens


def test_thinking_only_when_asked_for(
    client: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engine.__dict__, "chat_template", ChatTemplate(QWEN35))
    assert [block.type for block in create(client).content] == ["text"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    found = create(client, thinking=thinking, max_tokens=16)
    assert [block.type for block in found.content] == ["thinking"]
    with client.messages.stream(
        model="demo", messages=HELLO, max_tokens=16, thinking=thinking, extra_body=PLAIN
    ) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == found.content[0].thinking


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"messages": []}, "messages", id="no-messages"),
        pytest.param({"messages": [{"role": "system", "content": "a"}]}, "role", id="role"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "image input",
            id="image",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "file", id="file"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "tool_use",
            id="use",
        ),
        pytest.param({"max_tokens": 0}, "max_tokens", id="max-tokens"),
        pytest.param({"tool_choice": {"type": "any"}}, "no tools", id="no-tools"),
        pytest.param({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash", id="built-in"),
        pytest.param({"messages": [{"role": "user", "content": "a" * 5000}]}, "context", id="long"),
    ],
)
def test_errors_have_anthropics_shape(client: Any, options: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, **options)
    assert set(caught.value.body) == {"type", "error"}
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error" and words in error["message"], error


def test_a_second_turn_reads_only_what_is_new(open_engine: OpenEngine) -> None:
    """In both APIs, with tools and a system text in front, and across them."""
    engine = open_engine("mtp", n_slots=2, n_ctx=1024, cache_ram=1 << 28)
    question = {"role": "user", "content": "Say hello. " * 20}
    with (
        serve(engine) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        options = {"system": "Be kind.", "tools": TOOLS}
        first = create(client, messages=[question], **options)
        assert first.usage.cache_read_input_tokens == 0
        answer = {"role": "assistant", "content": first.content[0].text}
        turns = [question, answer, {"role": "user", "content": "Again!"}]
        second = create(client, messages=turns, **options)
        old = first.usage.input_tokens
        assert second.usage.cache_read_input_tokens >= old - 64
        found = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "messages": [{"role": "system", "content": "Be kind."}, *turns],
                "tools": [
                    {
                        "type": "function",
                        "function": {**tool, "parameters": tool["input_schema"]},
                    }
                    for tool in TOOLS
                ],
                "max_tokens": 20,
                **PLAIN,
            },
            timeout=60,
        ).json()
        assert found["choices"][0]["message"]["content"] == second.content[0].text
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= old


def test_models(client: Any) -> None:
    assert [(model.id, model.type) for model in client.models.list()] == [("demo", "model")]
    assert client.models.retrieve("demo").display_name == "demo"


def test_deadline_and_unknown_paths(client: Any) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        create(client, extra_body={**PLAIN, "timeout": 0.001}, max_tokens=900)
    assert caught.value.status_code == 408
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.body["error"]["type"] == "timeout_error"
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/nowhere", body={}, cast_to=object)
