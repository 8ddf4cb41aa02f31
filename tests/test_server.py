"""The server: in process through ASGI, and as a command with the real OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from pyspec import DraftConfig, Engine
from pyspec.server.app import create_app
from tests.test_cli import COMMAND, assert_one_line

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "Say hello"}]


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, DraftConfig("mtp"), n_slots=2, n_ctx=512, n_threads=1) as opened:
        yield opened


@asynccontextmanager
async def serving(engine: Engine, **options: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, whose worker runs as long."""
    app = create_app(engine, "demo", **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


def ask(engine: Engine, path: str, body: object, **options: int) -> httpx.Response:
    async def talk() -> httpx.Response:
        async with serving(engine, **options) as client:
            content = body if isinstance(body, bytes) else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(talk())


def events(response: httpx.Response) -> list[dict]:
    """The chunks of a stream, its end mark checked."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ---- answers ----


def test_completion(engine: Engine) -> None:
    body = {"prompt": "import os\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = ask(engine, "/v1/completions", body).json()
    expected = engine.complete("import os\n", max_tokens=12, temperature=0, ignore_end=True)
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {"index": 0, "text": expected.text, "finish_reason": "length", "logprobs": None}
    ]
    prompt = expected.stats.prompt_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}
    assert found["usage"].items() >= usage.items()


def test_chat_streams_what_it_answers_at_once(engine: Engine) -> None:
    body = {"messages": HELLO, "max_tokens": 16, "seed": 4, "ignore_eos": True}
    whole = ask(engine, "/v1/chat/completions", body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(ask(engine, "/v1/chat/completions", streamed))
    assert whole["object"] == "chat.completion"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_stop_prompts_and_tokens(engine: Engine) -> None:
    body = {"prompt": ["import", "def"], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    choices = ask(engine, "/v1/completions", body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    text = choices[0]["text"]
    stop = text[4:6]
    stopped = ask(engine, "/v1/completions", {**body, "prompt": "import", "stop": [stop]}).json()
    assert stopped["choices"][0]["text"] == text[: text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    ids = {**body, "prompt": engine.tokenize("import")}
    assert ask(engine, "/v1/completions", ids).json()["choices"][0]["text"] == text


def test_json_schema(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    body = {
        "messages": HELLO,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    answer = ask(engine, "/v1/chat/completions", body).json()["choices"][0]
    assert isinstance(json.loads(answer["message"]["content"])["ok"], bool)


def test_models_and_health(engine: Engine) -> None:
    async def talk() -> list[httpx.Response]:
        async with serving(engine) as client:
            paths = ("/health", "/v1/models", "/v1/models/demo", "/v1/models/other", "/nowhere")
            return [await client.get(path) for path in paths]

    health, models, one, other, nowhere = asyncio.run(talk())
    assert health.json() == {"status": "ok", "running": 0, "waiting": 0}
    assert [entry["id"] for entry in models.json()["data"]] == ["demo"]
    assert one.json()["object"] == "model"
    assert (other.status_code, nowhere.status_code) == (404, 404)
    assert "'other'" in other.json()["error"]["message"]
    assert nowhere.json()["error"]["type"] == "invalid_request_error"


# ---- refusals ----


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        pytest.param("completions", b"{", "", id="no-json"),
        pytest.param("completions", {"prompt": 3}, "prompt", id="prompt-type"),
        pytest.param("completions", {"temperature": -1}, "temperature", id="temperature"),
        pytest.param("completions", {"max_tokens": 0}, "max_tokens", id="max-tokens"),
        pytest.param("completions", {"n": 0}, "n", id="n"),
        pytest.param("completions", {"prompt": [10**9]}, "token 1000000000", id="token"),
        pytest.param("completions", {"prompt": [-(2**70)]}, "token -", id="huge-token"),
        pytest.param("completions", {"prompt": "a", "stop": ""}, "stop", id="stop"),
        pytest.param("completions", {"prompt": "x = 1\n" * 400}, "context holds 512", id="context"),
        pytest.param("chat/completions", {}, "messages", id="no-messages"),
        pytest.param("chat/completions", {"messages": []}, "messages", id="empty-messages"),
        pytest.param(
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content",
            id="image",
        ),
        pytest.param("chat/completions", {"messages": HELLO, "tools": [{}]}, "tools", id="tools"),
        pytest.param(
            "chat/completions",
            {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}},
            },
            "json_schema",
            id="schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_requests_get_openai_errors(
    engine: Engine, path: str, body: object, words: str, stream: bool
) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    answer = ask(engine, f"/v1/{path}", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_a_full_line_is_refused_for_now(engine: Engine) -> None:
    answer = ask(engine, "/v1/completions", {"prompt": ["a"] * 9}, max_waiting=2)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"


def test_a_failing_request_leaves_the_others_alone(engine: Engine) -> None:
    """A sampler that fails in the middle of a step ends its own request only."""
    good = {"prompt": "import os\n", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    async def talk() -> list[httpx.Response]:
        async with serving(engine) as client:
            bad = {"prompt": [-5], "max_tokens": 5}
            posts = [client.post("/v1/completions", json=body) for body in (good, bad, good, bad)]
            return await asyncio.gather(*posts)

    answers = asyncio.run(talk())
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400]
    expected = engine.complete("import os\n", max_tokens=60, temperature=0, ignore_end=True).text
    assert [a.json()["choices"][0]["text"] for a in answers[::2]] == [expected] * 2


def test_many_at_once_equal_each_alone(engine: Engine) -> None:
    bodies = [
        {"prompt": f"def f{i}(", "max_tokens": 10 + i, "seed": i, "ignore_eos": True}
        for i in range(7)
    ]

    async def talk() -> list[httpx.Response]:
        async with serving(engine) as client:
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )

    answers = asyncio.run(talk())
    for body, answer in zip(bodies, answers, strict=True):
        alone = engine.complete(
            body["prompt"], max_tokens=body["max_tokens"], seed=body["seed"], ignore_end=True
        )
        assert answer.json()["choices"][0]["text"] == alone.text


# ---- as a command ----


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running command and the base URL that it announces."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, line + (process.stderr.read() if process.stderr else "")
        for _ in range(100):
            try:
                if httpx.get(f"{found.group()}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield process, found.group()
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert "Traceback" not in err, err


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """``pyspec serve demo --draft mtp`` on a free port; its base URL."""
    arguments = ["serve", "demo", "--draft", "mtp", "--port", "0", "--threads", "1"]
    with started(*arguments, "--slots", "1") as (_, url):
        yield url


@pytest.fixture
def client(server: str) -> Iterator:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_openai_client_streams_a_chat(client) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens == 24
    whole = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"
    assert len(chunks) > 4


def test_openai_client_completes_and_lists(client) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    options = {"model": "demo", "prompt": "import ", "max_tokens": 10, "seed": 5}
    first, second = (client.completions.create(**options) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text


def test_openai_client_understands_errors(client) -> None:
    with pytest.raises(openai.BadRequestError, match="context holds"):
        client.completions.create(model="demo", prompt="x = 1\n" * 5000)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def wait_until_idle(server: str, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while (health := httpx.get(f"{server}/health").json())["running"] or health["waiting"]:
        assert time.monotonic() < end, health
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_place(server: str, stream: bool) -> None:
    """The only slot is free again long before the abandoned request could have ended."""
    body = {"prompt": "import", "max_tokens": 4000, "stream": stream, "ignore_eos": True}
    host, port = server.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        for _ in range(100):
            if httpx.get(f"{server}/health").json()["running"]:
                break
            time.sleep(0.02)
        else:
            pytest.fail("the request did not start")
    wait_until_idle(server, seconds=2)


def test_a_waiting_client_that_leaves_is_forgotten(client, server: str) -> None:
    first = threading.Thread(
        target=lambda: client.completions.create(
            model="demo", prompt="import", max_tokens=150, extra_body={"ignore_eos": True}
        )
    )
    first.start()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server}/v1/completions", json={"max_tokens": 4000}, timeout=0.05)
    first.join()
    wait_until_idle(server, seconds=3)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_stream_ends_in_words_when_the_server_is_stopped(path: str) -> None:
    """SIGTERM: what runs has its time, then an error in the API's shape; the process ends well."""
    arguments = ["serve", "demo", "--port", "0", "--threads", "1", "--shutdown-seconds", "0.3"]
    with started(*arguments) as (process, url):
        body = {
            "prompt": "import",
            "messages": HELLO,
            "max_tokens": 4000,
            "stream": True,
            "ignore_eos": True,
        }
        lines: list[str] = []
        with httpx.stream("POST", f"{url}{path}", json=body, timeout=30) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 20:
                    process.send_signal(signal.SIGTERM)
        last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
        assert "shutting down" in last["error"]["message"]
        assert process.wait(timeout=20) in (0, -signal.SIGTERM)


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(["serve", "demo", "--port", port], f"port {port}", "in use")


def test_unknown_host() -> None:
    assert_one_line(["serve", "demo", "--host", "256.0.0.1"], "256.0.0.1")
