"""Many clients at once for a long time: does the server fail, leak, or lose its speed?

    python tests/bench/soak.py --minutes 5             # with --draft auto, then with --draft none

Every client sends requests of random length, temperature and kind (chat or text, streamed or whole,
with a JSON schema, with stop strings), goes on with its chat or starts another, and now and then
hangs up in the middle. Reported: requests, errors, tokens a second, memory after a warm-up and at
the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.servers import running

WORDS = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ok": {"type": "boolean"},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "ok", "numbers"],
    "additionalProperties": False,
}
WARM_UP = 0.3  # share of the time after which memory should no longer grow


@dataclass
class Report:
    """What a soak found.

    Attributes:
        requests: Answers that were read to their end.
        cancelled: Those that were hung up on.
        errors: What went wrong, in words.
        tokens_per_second: Generated, of all clients together.
        rss: Bytes of memory, about once a second: from the warm-up's end on.
    """

    requests: int = 0
    cancelled: int = 0
    errors: list[str] = field(default_factory=list)
    tokens_per_second: float = 0.0
    rss: list[int] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """Growth of memory: the median of the last third over that of the first, less one."""
        third = max(1, len(self.rss) // 3)
        first, last = sorted(self.rss[:third]), sorted(self.rss[-third:])
        return last[len(last) // 2] / first[len(first) // 2] - 1 if self.rss else 0.0


class Client:
    """One client with a chat of its own."""

    def __init__(self, http: httpx.AsyncClient, report: Report, seed: int, limit: int) -> None:
        self._http = http
        self._report = report
        self._random = random.Random(seed)
        self._limit = limit
        self._messages: list[dict[str, str]] = []

    async def run(self, until: float) -> None:
        """Sends requests until a time."""
        while time.monotonic() < until:
            path, body = self._request()
            try:
                if self._random.random() < 0.15:
                    await self._hang_up(path, body)
                else:
                    await self._finish(path, body)
            except Exception as error:
                self._report.errors.append(f"{type(error).__name__}: {error}")

    def _text(self, most: int) -> str:
        size = self._random.randint(1, most)
        at = self._random.randrange(len(WORDS) - size)
        return WORDS[at : at + size]

    def _request(self) -> tuple[str, dict[str, Any]]:
        draw = self._random
        body: dict[str, Any] = {
            "max_tokens": draw.randint(1, self._limit),
            "temperature": draw.choice([0, 0, 0.5, 1.0, 1.5]),
            "seed": draw.randrange(2**31),
            "stream": draw.random() < 0.6,
        }
        if draw.random() < 0.2:
            body["stop"] = draw.sample(["\n\n", "def ", ")", "return"], draw.randint(1, 3))
        if draw.random() < 0.25:
            return "/v1/completions", {**body, "prompt": self._text(1500)}
        if len(self._messages) > 6 or draw.random() < 0.3:
            self._messages = [{"role": "system", "content": WORDS[:600]}]
        self._messages.append({"role": "user", "content": self._text(500)})
        if draw.random() < 0.2:
            wanted = {"name": "thing", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
            body["max_tokens"] = 200
        return "/v1/chat/completions", {**body, "messages": list(self._messages)}

    async def _hang_up(self, path: str, body: dict[str, Any]) -> None:
        wait = self._random.uniform(0, 0.5)
        try:
            async with asyncio.timeout(wait), self._http.stream("POST", path, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
        except TimeoutError:
            self._report.cancelled += 1

    async def _finish(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._http.post(path, json=body)
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code} {answer.text[:200]}")
        text, reason = _streamed(answer.text) if body["stream"] else _whole(answer.json())
        if "response_format" in body and reason == "stop" and "stop" not in body:
            assert isinstance(json.loads(text)["ok"], bool), text
        if "messages" in body:
            self._messages.append({"role": "assistant", "content": text})
        self._report.requests += 1


def _whole(answer: dict[str, Any]) -> tuple[str, str]:
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text or "", choice["finish_reason"]


def _streamed(text: str) -> tuple[str, str]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    pieces, reason = [], ""
    for line in lines[:-1]:
        chunk = json.loads(line)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            pieces.append(choice.get("delta", {}).get("content") or choice.get("text") or "")
            reason = choice["finish_reason"] or reason
    assert reason, "a stream without an end"
    return "".join(pieces), reason


async def soak(url: str, pid: int, seconds: float, clients: int, limit: int = 80) -> Report:
    """Runs the clients against a server and watches its memory."""
    report = Report()
    began = time.monotonic()
    until = began + seconds
    process = psutil.Process(pid)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def watch() -> None:
            while time.monotonic() < until:
                if time.monotonic() > began + WARM_UP * seconds:
                    report.rss.append(process.memory_info().rss)
                await asyncio.sleep(min(1.0, seconds / 20))

        before = await _generated(http)
        crowd = [Client(http, report, seed, limit).run(until) for seed in range(clients)]
        await asyncio.gather(watch(), *crowd)
        tokens = await _generated(http) - before
        report.tokens_per_second = tokens / (time.monotonic() - began)
        for _ in range(100):  # those who hung up are soon forgotten
            health = (await http.get("/health")).json()
            if not health["running"] and not health["waiting"]:
                break
            await asyncio.sleep(0.1)
        else:
            report.errors.append(f"still busy: {health}")
    return report


async def _generated(http: httpx.AsyncClient) -> float:
    text = (await http.get("/metrics")).text
    found = re.search(r"^pyspec_generated_tokens_total ([\d.e+]+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@click.command()
@click.option("--minutes", default=5.0, show_default=True)
@click.option("--clients", default=8, show_default=True)
@click.option("--slots", default=8, show_default=True)
@click.option("--draft", "drafts", multiple=True, default=("auto", "none"), show_default=True)
@click.option("--limit", default=80, show_default=True, help="Most tokens of an answer.")
def main(minutes: float, clients: int, slots: int, drafts: tuple[str, ...], limit: int) -> None:
    """Soaks servers of the demo model, one way of drafting after another; prints JSON."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for draft in drafts:
            options = ("--draft", draft, "--slots", str(slots), "--cache-ram", "64M")
            with running(Path(directory), *options) as server:
                pid = server.process.pid
                report = asyncio.run(soak(server.url, pid, 60 * minutes, clients, limit))
                status = server.stop()
            found[draft] = {**asdict(report), "drift": round(report.drift, 4), "exit": status}
            found[draft]["rss"] = [
                size >> 20 for size in report.rss[:: max(1, len(report.rss) // 20)]
            ]
    if len(drafts) == 2:
        speeds = [found[draft]["tokens_per_second"] for draft in drafts]
        found["ratio"] = round(speeds[0] / speeds[1], 3) if speeds[1] else None
    click.echo(json.dumps(found, indent=1))
    sys.exit(any(found[draft]["errors"] for draft in drafts))


if __name__ == "__main__":
    main()
