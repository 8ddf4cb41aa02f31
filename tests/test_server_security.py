"""Who may ask, how much, and what a client can do to the server: nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec import ArgumentError, DraftConfig, Engine
from pyspec.server.security import Refused, SecurityConfig, check_body
from tests.servers import Running, running, serving
from tests.test_cli import run

HELLO = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, DraftConfig("mtp"), n_slots=2, n_ctx=512, n_threads=1) as opened:
        yield opened


def talk(
    engine: Engine, config: SecurityConfig, *requests: tuple[str, str, dict[str, Any]]
) -> list[httpx.Response]:
    """The answers to requests (method, path, options of httpx), one after another."""

    async def ask() -> list[httpx.Response]:
        async with serving(engine, security=config) as client:
            return [await client.request(m, path, **options) for m, path, options in requests]

    return asyncio.run(ask())


def post(
    path: str = CHAT, body: Any = HELLO, **headers: str | bytes
) -> tuple[str, str, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return (
        "POST",
        path,
        {"content": content, "headers": {"Content-Type": "application/json"} | headers},
    )


# ---- keys and origins ----


def test_a_key_is_asked_for_everywhere_but_at_the_door(engine: Engine) -> None:
    config = SecurityConfig(api_keys=("one", "two"))
    for path in ("/", "/health", "/page/page.js"):
        assert talk(engine, config, ("GET", path, {}))[0].status_code == 200, path
    closed = [("GET", p, {}) for p in ("/v1/models", "/metrics", "/v1/speculation", "/docs", "/x")]
    wrong = [
        post(),
        post(Authorization="Bearer three"),
        post(Authorization="Bearer "),
        post(Authorization="Basic one"),
        post(x_api_key=b"on\xc3\xa9"),
        post("/", Authorization="one"),
    ]
    for answer in talk(engine, config, *closed, *wrong):
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    right = [post(Authorization="bearer two"), post(x_api_key="one")]
    assert [answer.status_code for answer in talk(engine, config, *right)] == [200, 200]
    (theirs,) = talk(engine, config, post("/v1/messages"))
    assert theirs.json()["error"]["type"] == "authentication_error"
    assert theirs.json()["type"] == "error"


@pytest.mark.parametrize(
    ("origin", "config", "status"),
    [
        pytest.param("http://localhost", {}, 200, id="own page"),
        pytest.param("https://evil.example", {}, 403, id="other site"),
        pytest.param("null", {}, 403, id="sandboxed"),
        pytest.param("http://localhost.evil.example", {}, 403, id="alike"),
        pytest.param("https://app.example", {"cors": ("https://app.example",)}, 200, id="allowed"),
        pytest.param("https://evil.example", {"cors": ("https://app.example",)}, 403, id="not it"),
        pytest.param("https://any.example", {"cors": ("*",)}, 200, id="all"),
    ],
)
def test_other_sites_pages_are_refused(
    engine: Engine, origin: str, config: dict[str, Any], status: int
) -> None:
    (answer,) = talk(engine, SecurityConfig(**config), post(Origin=origin))
    assert answer.status_code == status
    allowed = answer.headers.get("Access-Control-Allow-Origin")
    assert (allowed in (origin, "*")) is bool(config and status == 200)


def test_a_name_that_points_here_is_no_own_page(engine: Engine) -> None:
    """DNS rebinding: a foreign name resolves to this machine, and origin and host agree."""
    foreign = {"Host": "evil.example", "Origin": "http://evil.example"}
    by_number = {"Host": "192.0.2.7:80", "Origin": "http://192.0.2.7:80"}
    answers = talk(engine, SecurityConfig(), post(**foreign), post(**by_number))
    assert [answer.status_code for answer in answers] == [403, 200]


def test_preflight(engine: Engine) -> None:
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    request = ("OPTIONS", CHAT, {"headers": headers})
    (shut,) = talk(engine, SecurityConfig(), request)
    assert shut.status_code in (403, 405) and "Access-Control-Allow-Origin" not in shut.headers
    config = SecurityConfig(api_keys=("k",), cors=("https://app.example",))
    (open_,) = talk(engine, config, request)
    assert open_.status_code == 200
    assert open_.headers["Access-Control-Allow-Origin"] == "https://app.example"


# ---- limits ----

LIMITS = SecurityConfig(max_body=4000, max_depth=8, max_stops=2, max_choices=3)


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param(b" " * 4001, 413, "4000 bytes", id="long"),
        pytest.param(nested(9), 400, "8 levels", id="deep"),
        pytest.param(nested(8), 400, "messages", id="deep-enough"),
        pytest.param({**HELLO, "stop": list("abc")}, 400, "stop", id="stops"),
        pytest.param({**HELLO, "n": 4}, 400, "n ", id="choices"),
        pytest.param({"prompt": list("abcd")}, 400, "prompt", id="prompts"),
        pytest.param({**HELLO, "stop": list("ab")}, 200, "", id="fine"),
        pytest.param({**HELLO, "user": "[" * 500 + '\\"[['}, 200, "", id="brackets in strings"),
    ],
)
def test_limits(engine: Engine, body: Any, status: int, words: str) -> None:
    (answer,) = talk(engine, LIMITS, post("/v1/completions" if "prompt" in words else CHAT, body))
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert words in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(JSON, st.integers(1, 5))
def test_depth_is_that_of_the_value(value: Any, most: int) -> None:
    config = SecurityConfig(max_depth=most, max_stops=99, max_choices=99)
    try:
        check_body(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"), config)
    except Refused:
        assert depth_of(value) > most
    else:
        assert depth_of(value) <= most


@given(st.binary(max_size=300))
def test_no_body_breaks_the_check(body: bytes) -> None:
    try:
        check_body(body, SecurityConfig(max_depth=2))
    except Refused as refused:
        assert refused.status == 400


@pytest.mark.parametrize(
    "options",
    [{"max_body": 0}, {"api_keys": ("",)}, {"api_keys": ("\u00e9",)}, {"cors": ("example.org",)}],
    ids=str,
)
def test_bad_settings_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"max_body|api_key|cors"):
        SecurityConfig(**options)


def test_request_ids_come_back(engine: Engine) -> None:
    answers = talk(engine, SecurityConfig(), post(X_Request_ID="mine-1"), post(X_Request_ID="a b"))
    assert answers[0].headers["X-Request-ID"] == "mine-1"
    assert answers[1].headers["X-Request-ID"] not in ("", "a b")


# ---- as a command ----


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("server")
    env = {"PYSPEC_API_KEY": "secret-key", "PYSPEC_CTX": "2048"}
    with running(directory, "--max-body", "1M", env=env) as opened:
        yield opened
        assert opened.process.poll() is None, "the server died"
        assert opened.stop() == 0
        log = opened.log.read_text()
    assert "Traceback" not in log, log
    assert "4 slots of 2048 tokens" in log
    for secret in ("secret-key", "needle-in-the-prompt", "X-Secret"):
        assert secret not in log


def ask(server: Running, **options: Any) -> httpx.Response:
    headers = {"Authorization": "Bearer secret-key", "X-Secret": "header"}
    return httpx.post(server.url + CHAT, headers=headers, timeout=30, **options)


def raw(server: Running, length: int) -> socket.socket:
    """A connection that has sent the head of a request."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret-key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()
    )
    return connection


def test_secrets_stay_out_of_the_log(server: Running) -> None:
    message = {"role": "user", "content": "needle-in-the-prompt"}
    assert ask(server, json={"messages": [message], "max_tokens": 2}).status_code == 200
    assert ask(server, json={"messages": [message], "max_tokens": -2}).status_code == 400
    assert ask(server, content=b"needle-in-the-prompt").status_code == 400


def test_a_hundred_megabytes_are_refused(server: Running) -> None:
    with raw(server, 100 << 20) as connection:  # announced: refused before they are sent
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield bytes(1 << 20)

    try:  # not announced: refused when they are too many
        status = ask(server, content=body()).status_code
    except httpx.TransportError:  # the server did not wait for the rest
        status = 413
    assert status == 413
    assert sent < 100 << 20
    assert ask(server, json=HELLO).status_code == 200


def test_odd_clients_do_no_harm(server: Running) -> None:
    body = json.dumps({**HELLO, "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
    open_ = []
    for sent in (b"", body[:5]):  # slow: the rest never comes
        connection = raw(server, len(body))
        connection.sendall(sent)
        open_.append(connection)
    half = raw(server, len(body))  # half-closed: will send nothing more, but read
    half.sendall(body)
    half.shutdown(socket.SHUT_WR)
    deaf = raw(server, len(body))  # never reads its stream
    deaf.sendall(body)
    open_ += [half, deaf]
    junk = raw(server, 10)
    junk.sendall(b"\xff" * 10 + b"GET / HTTP/9.9\r\n\r\n")
    open_.append(junk)
    began = time.monotonic()
    for _ in range(5):
        assert ask(server, json=HELLO).status_code == 200
    assert time.monotonic() - began < 20
    for connection in open_:
        connection.close()
    end = time.monotonic() + 20
    while (health := httpx.get(server.url + "/health").json())["running"]:
        assert time.monotonic() < end, health
        time.sleep(0.05)


def test_servers_that_are_ended_in_a_stream_leave_a_good_cache(tmp_path: Path) -> None:
    """Their successors go on from what they had read, and write the same text."""
    cache = ("--cache-dir", str(tmp_path / "cache"), "--slots", "2")
    content = "Some words to be read only once, if all goes well. " * 60
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 30}
    expected = None
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
        with running(tmp_path, *cache) as server:
            answer = httpx.post(server.url + CHAT, json=body, timeout=60).json()
            usage, expected = answer["usage"], expected or answer["choices"]
            assert answer["choices"] == expected
            reused = usage["prompt_tokens_details"]["cached_tokens"]
            if number == signal.SIGKILL:  # the first
                assert reused == 0
                time.sleep(1.5)  # checkpoints are written within a second or so
            else:
                assert reused >= usage["prompt_tokens"] - 64
            status = end_in_a_stream(server, body, number)
            assert status == (0 if number == signal.SIGTERM else -signal.SIGKILL)
            log = server.log.read_text()
            assert "Traceback" not in log and "ignored" not in log


def end_in_a_stream(server: Running, body: dict[str, Any], number: int) -> int:
    """The exit status of a server that gets a signal while it streams."""
    long = {**body, "stream": True, "max_tokens": 3000, "ignore_eos": True}
    received = threading.Event()

    def read() -> None:
        try:
            with httpx.stream("POST", server.url + CHAT, json=long, timeout=60) as stream:
                for _ in stream.iter_lines():
                    received.set()
        except httpx.TransportError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert received.wait(30)
    status = server.stop(number)
    reader.join(30)
    assert not reader.is_alive()
    return status


# ---- options ----


def test_help_is_grouped_and_teaches() -> None:
    text = run("serve", "--help").stdout
    for heading in ("Model:", "Speculation:", "Serving:", "Safety:", "General:"):
        assert f"\n{heading}\n" in text
    assert "Other options" not in text
    assert "PYSPEC_" in text
    assert "[default: 16M]" in text and "default: (" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("slot = 1", ["'slot'", "no option"], id="unknown"),
        pytest.param("slots = [1]", ["slots", "one value"], id="list"),
        pytest.param("cors = 'x'", ["cors", "a list"], id="no-list"),
        pytest.param("slots", ["TOML"], id="syntax"),
        pytest.param("config = 'x'", ["'config'"], id="config"),
        pytest.param("slots = 0", ["n_slots", "between 1 and 64"], id="value"),
    ],
)
def test_bad_configuration_files(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    result = run("serve", "demo", "--config", str(file), "--port", "0")
    assert result.exit_code == 1
    assert all(word in result.output for word in words), result.output


def test_command_line_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("slots = 2\nctx = 256\nthreads = 1\ndraft = 'none'\n")
    with running(
        tmp_path, "--config", str(file), "--draft", "mtp", env={"PYSPEC_CTX": "512"}
    ) as it:
        line = it.log.read_text()
    assert "draft mtp, 2 slots of 512 tokens" in line
