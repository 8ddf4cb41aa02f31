"""Many clients at once for a long time: does the server fail, leak, or lose its speed?

    python tests/bench/soak.py                                   # the demo model, auto beside none
    python tests/bench/soak.py --model padded.gguf --slots 2 --limit 400 --draft auto --draft none

Every client sends requests of random length, temperature and kind (chat or text, streamed or whole,
with a JSON schema, with stop strings), goes on with its chat or starts another, and now and then
hangs up in the middle. There is a server for each way of drafting; they are soaked in turns, in
stretches of equal requests, so that what slows the machine slows both. Reported: requests, errors,
tokens a second, what a step took and gave, memory after a warm-up and at the end. Needs the packages
of the tests (``scripts/setup test``).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
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
WARM_UP = 2
"""Stretches after which memory should no longer grow."""


@dataclass
class Report:
    """What a soak found.

    Attributes:
        requests: Answers that were read to their end.
        cancelled: Those that were hung up on.
        errors: What went wrong, in words.
        seconds: How long it took.
        counts: What the server's counters (``/metrics``) have grown by.
        rss: Bytes of memory, about once a second.
    """

    requests: int = 0
    cancelled: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)
    rss: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Generated, of all clients together."""
        return self.counts["generated_tokens"] / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """What is printed of a stretch."""
        counts = {name: round(count, 1) for name, count in self.counts.items()}
        steps = self.counts["steps"]
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_step": round(counts["generated_tokens"] / steps, 2) if steps else None,
            "ms_per_step": round(1e3 * counts["step_seconds"] / steps, 2) if steps else None,
            "requests": self.requests,
            "cancelled": self.cancelled,
            "errors": self.errors,
            "seconds": round(self.seconds, 1),
            **counts,
            "rss_mb": round(median(self.rss) / 1e6, 1),
        }


def drift(rss: Sequence[int]) -> float:
    """Growth of memory: the median of the last third over that of the first, less one."""
    third = max(1, len(rss) // 3)
    return median(rss[-third:]) / median(rss[:third]) - 1 if rss else 0.0


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


async def soak(
    url: str, pid: int, seconds: float, clients: int, limit: int = 80, seed: int = 0
) -> Report:
    """Runs the clients against a server and watches its memory."""
    report = Report()
    began = time.monotonic()
    until = began + seconds
    process = psutil.Process(pid)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def watch() -> None:
            while time.monotonic() < until:
                report.rss.append(process.memory_info().rss)
                await asyncio.sleep(min(1.0, seconds / 20))

        before = await _counts(http)
        seeds = range(seed, seed + clients)
        crowd = [Client(http, report, one, limit).run(until) for one in seeds]
        await asyncio.gather(watch(), *crowd)
        report.seconds = time.monotonic() - began
        after = await _counts(http)
        report.counts = {name: after[name] - before[name] for name in after}
        for _ in range(100):  # those who hung up are soon forgotten
            health = (await http.get("/health")).json()
            if not health["running"] and not health["waiting"]:
                break
            await asyncio.sleep(0.1)
        else:
            report.errors.append(f"still busy: {health}")
    return report


async def _counts(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text

    def total(name: str) -> float:
        return sum(float(n) for n in re.findall(rf"^pyspec_{name} (\S+)$", text, re.MULTILINE))

    return {
        "generated_tokens": total("generated_tokens_total"),
        "prompt_tokens": total("prompt_tokens_total"),
        "cached_prompt_tokens": total("cached_prompt_tokens_total"),
        "steps": total("steps_total"),
        "step_seconds": total(r"step_seconds_sum\{stage=\"\w+\"\}"),
    }


def options_of(draft: str) -> list[str]:
    """``mtp/depth=2`` as options of ``pyspec serve``."""
    name, *limits = draft.split("/")
    pairs = (limit.split("=") for limit in limits)
    return ["--draft", name, *(word for key, value in pairs for word in (f"--draft-{key}", value))]


@click.command()
@click.option("--model", default="demo", show_default=True, help="A GGUF file.")
@click.option("--minutes", default=5.0, show_default=True, help="For every way of drafting.")
@click.option("--rounds", default=5, show_default=True, help="Stretches, the first two to warm up.")
@click.option("--clients", default=8, show_default=True)
@click.option("--slots", default=8, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option(
    "--draft", "drafts", multiple=True, default=("auto", "none"), show_default=True,
    help="Ways of drafting, the second to compare with: auto, none, mtp/depth=2.",
)  # fmt: skip
@click.option("--limit", default=80, show_default=True, help="Most tokens of an answer.")
def main(
    model: str,
    minutes: float,
    rounds: int,
    clients: int,
    slots: int,
    threads: int,
    drafts: tuple[str, ...],
    limit: int,
) -> None:
    """Soaks a server for every way of drafting, in turns; prints JSON."""
    found: dict[str, list[Report]] = {draft: [] for draft in drafts}
    load = psutil.getloadavg()[0]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shared = ["--slots", str(slots), "--threads", str(threads), "--cache-ram", "64M"]
        servers = {
            draft: stack.enter_context(running(directory, *options_of(draft), *shared, model=model))
            for draft in drafts
        }
        for turn in range(rounds):
            for draft, server in servers.items():
                seconds = 60 * minutes / rounds
                pid, seed = server.process.pid, 1000 * turn
                report = asyncio.run(soak(server.url, pid, seconds, clients, limit, seed))
                found[draft].append(report)
                speed = report.tokens_per_second
                click.echo(f"{turn + 1}/{rounds} {draft}: {speed:.1f} tokens/s", err=True)
        stopped = {draft: server.stop() for draft, server in servers.items()}
    result: dict[str, Any] = {
        "model": Path(model).name,
        "load_before": round(load, 2),
        **{"clients": clients, "slots": slots, "threads": threads, "limit": limit},
    }
    for draft, reports in found.items():
        tokens = sum(report.counts["generated_tokens"] for report in reports)
        result[draft] = {
            "tokens_per_second": round(tokens / sum(report.seconds for report in reports), 1),
            "requests": sum(report.requests for report in reports),
            "cancelled": sum(report.cancelled for report in reports),
            "errors": sum(len(report.errors) for report in reports),
            "drift": round(drift([median(report.rss) for report in reports[WARM_UP:]]), 4),
            "exit": stopped[draft],
            "stretches": [report.as_dict() for report in reports],
        }
    if len(drafts) > 1:
        ours, others = (found[draft] for draft in drafts[:2])
        speeds = [result[draft]["tokens_per_second"] for draft in drafts[:2]]
        pairs = zip(ours, others, strict=True)
        result["ratio"] = {
            "total": round(speeds[0] / speeds[1], 3),
            "stretches": [round(a.tokens_per_second / b.tokens_per_second, 3) for a, b in pairs],
        }
    click.echo(json.dumps(result, indent=1))
    sys.exit(any(report.errors for reports in found.values() for report in reports))


if __name__ == "__main__":
    main()
