"""Metrics and live statistics agree with what the requests got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pyspec import DraftConfig, DraftTree, Engine
from pyspec.accept import AcceptedPath
from pyspec.decoder import Emission
from pyspec.native.engine import CoastStep, CoastSteps
from pyspec.server.speculation import TARGET, CostCurve, Speculation
from pyspec.stats import STAGES
from tests.conftest import OpenEngine
from tests.servers import running, serve, serving
from tests.test_coast import DRAFTS, certain

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "def main():\n" * 20}],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    options = {"n_slots": 2, "n_ctx": 1024, "n_threads": 1, "cache_ram": 1 << 26}
    with Engine(model, DraftConfig("mtp", top_k=2), **options) as opened:
        yield opened


def samples(text: str) -> dict[tuple, float]:
    """Every sample of an exposition by its name and sorted labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_happened(engine: Engine) -> None:
    async def talk() -> tuple[list[dict], dict, dict]:
        async with serving(engine) as client:
            answers = [(await client.post(CHAT, json=BODY)).json() for _ in range(2)]
            await client.post(CHAT, json={})
            await client.get("/nowhere")
            await client.get("/somewhere")
            found = (await client.get("/v1/speculation")).json()
            return answers, samples((await client.get("/metrics")).text), found

    answers, found, live = asyncio.run(talk())
    usage = answers[1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > usage["prompt_tokens"] - 64
    total = live["total"]
    stats = engine.complete(
        engine.chat_template.render(BODY["messages"]), max_tokens=40, temperature=0, ignore_end=True
    ).stats
    endpoint = ("endpoint", CHAT)
    expected = {
        ("pyspec_http_requests_total", endpoint, ("status", "200")): 2,
        ("pyspec_http_requests_total", endpoint, ("status", "400")): 1,
        ("pyspec_http_requests_total", ("endpoint", "other"), ("status", "404")): 2,
        ("pyspec_http_request_seconds_count", endpoint): 3,
        ("pyspec_prompt_tokens_total",): 2 * usage["prompt_tokens"],
        ("pyspec_cached_prompt_tokens_total",): cached,
        ("pyspec_generated_tokens_total",): 80,
        ("pyspec_requests_finished_total", ("reason", "length")): 2,
        ("pyspec_steps_total",): total["steps"],
        ("pyspec_requests", ("state", "running")): 0,
        ("pyspec_requests", ("state", "waiting")): 0,
        ("pyspec_slots",): 2,
        ("pyspec_cache_hits_total",): 1,
        ("pyspec_cache_misses_total",): 1,
        ("pyspec_memory_bytes", ("use", "weights")): engine.native.info.size_bytes,
    }
    assert {key: found.get(key) for key in expected} == expected
    for stage in (*STAGES, "other"):
        assert found["pyspec_step_seconds_count", ("stage", stage)] == total["steps"]
    assert found["pyspec_cache_bytes", ("place", "memory")] > 0
    # both requests drafted as one does in the library
    assert total["steps"] == 2 * stats.steps
    assert total["acceptance_by_depth"] == stats.acceptance_by_depth
    assert total["acceptance_by_source"] == {"mtp": stats.acceptance_by_depth}
    labels = (("depth", "1"), ("source", "mtp"))
    assert found[("pyspec_accepted_drafts_total", *labels)] == 2 * stats.accepted_by_depth[0]
    assert found[("pyspec_draft_steps_total", *labels)] == 2 * stats.drafted_by_depth[0]


def test_the_document_has_no_answer_without_an_end(engine: Engine) -> None:
    """Tools that call everything in the OpenAPI document must come back."""

    async def talk() -> dict:
        async with serving(engine) as client:
            return (await client.get("/openapi.json")).json()

    paths = asyncio.run(talk())["paths"]
    assert {"/metrics", "/v1/speculation"} <= set(paths)
    assert "/v1/speculation/stream" not in paths


def test_two_applications_do_not_share_counters(engine: Engine) -> None:
    async def steps() -> float:
        async with serving(engine) as client:
            await client.post(CHAT, json=BODY)
            return samples((await client.get("/metrics")).text)[
                "pyspec_requests_finished_total",
                (
                    "reason",
                    "length",
                ),
            ]

    assert asyncio.run(steps()) == asyncio.run(steps()) == 1


def test_live_statistics(engine: Engine) -> None:
    async def talk() -> tuple[dict, dict]:
        async with serving(engine) as client:
            before = (await client.get("/v1/speculation")).json()
            headers = {"X-Request-ID": "mine"}
            await client.post(CHAT, json=BODY, headers=headers)
            return before, (await client.get("/v1/speculation")).json()

    before, after = asyncio.run(talk())
    assert before["slots"] == [] and before["speed"]["plain_is"] == "unknown"
    (slot,) = after["slots"]
    assert (slot["request"], slot["running"], slot["tokens"]) == ("mine", False, 40)
    tree = slot["tree"]
    n = len(tree["tokens"])
    assert len(tree["parents"]) == len(tree["sources"]) == len(tree["probabilities"]) == n
    assert tree["accepted"][0] == 0 and max(tree["accepted"]) < n
    assert after["speed"]["tokens_per_second"] > 0 and after["speed"]["plain"] > 0
    assert after["cache"]["misses"] == 1


def test_the_stream_tells_every_token_and_its_source(tmp_path: Path) -> None:
    """Followed from outside, as the page does."""
    with running(tmp_path, "--draft", "mtp", "--slots", "2") as server, httpx.Client() as client:
        events: list[dict] = []
        with client.stream("GET", server.url + "/v1/speculation/stream", timeout=30) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(":")  # open: nothing is missed from here on
            body = {**BODY, "seed": 3, "temperature": 1.0}
            answer = httpx.post(
                server.url + CHAT, json=body, headers={"X-Request-ID": "mine"}, timeout=30
            ).json()
            for line in lines:
                if line.startswith("data:"):
                    events.append(json.loads(line[5:]))
                    if events[-1]["type"] == "end":
                        break
    steps = [event for event in events if event["type"] == "step"]
    assert {event["request"] for event in events} == {"mine"}
    tokens = [token for event in steps for token in event["tokens"]]
    assert "".join(token["text"] for token in tokens) == answer["choices"][0]["message"]["content"]
    for event in steps:
        *drafts, last = [token["sources"] for token in event["tokens"]]
        assert last == [TARGET] and drafts == [["mtp"]] * len(drafts)
        assert len(event["tree"]["accepted"]) == len(event["tokens"])


class Coasts:
    """What an engine has coasted."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []  # steps
        self.steps: list[CoastStep] = []
        self._coast = engine.native.coast
        monkeypatch.setattr(engine.native, "coast", self.coast)

    def coast(self, *arguments: Any, **options: Any) -> CoastSteps:
        found = self._coast(*arguments, **options)
        self.calls.append(len(found.steps))
        self.steps += found.steps
        return found


def follow(url: str, bodies: list[dict]) -> tuple[list[dict], list[dict]]:
    """The answers to requests that are made one behind the other, and all events meanwhile."""
    events: list[dict] = []
    with (
        httpx.Client() as client,
        client.stream("GET", url + "/v1/speculation/stream", timeout=30) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith(":")  # open: nothing is missed from here on
        answers = [
            httpx.post(
                url + CHAT, json=body, headers={"X-Request-ID": str(number)}, timeout=30
            ).json()
            for number, body in enumerate(bodies)
        ]
        for line in lines:
            if line.startswith("data:"):
                events.append(json.loads(line[5:]))
                if sum(event["type"] == "end" for event in events) == len(bodies):
                    return answers, events
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("draft", DRAFTS)
def test_coasts_are_told_step_by_step(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """Several steps in one call count as so many, and the stream tells every token once."""
    engine = certain(open_engine(draft, n_slots=2, n_ctx=1024), monkeypatch)
    coasts = Coasts(engine, monkeypatch)
    end = engine.native.info.token_eos
    sampled = {**BODY, "max_tokens": 70, "temperature": 0.8, "ignore_eos": False}
    bodies = [
        {**BODY, "max_tokens": 120},
        {**BODY, "max_tokens": 150, "temperature": 0.8, "seed": 5},
        *[{**sampled, "seed": seed, "logit_bias": {str(end): 4.0}} for seed in range(3)],
    ]
    with serve(engine) as url:
        answers, events = follow(url, bodies)
        found = samples(httpx.get(url + "/metrics").text)
        live = httpx.get(url + "/v1/speculation").json()
    if draft != "auto":
        assert max(coasts.calls) > 1
        drafted = any(step.tree is not None and len(step.path) > 1 for step in coasts.steps)
        assert drafted == (draft == "ngram")
    reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
    assert "stop" in reasons  # an end token is no text, but a token that was drawn

    steps = [event for event in events if event["type"] == "step"]
    for number, answer in enumerate(answers):
        own = [event for event in events if event["request"] == str(number)]
        assert [event["type"] for event in own[-2:]] == ["step", "end"]
        tokens = [token for event in own[:-1] for token in event["tokens"]]
        assert len(tokens) == answer["usage"]["completion_tokens"]
        text = "".join(token["text"] for token in tokens)
        assert text == answer["choices"][0]["message"]["content"]
        for event in own[:-1]:
            accepted = event["tree"]["accepted"]
            assert len(event["tokens"]) in (len(accepted), len(accepted) - 1)
            if len(event["tokens"]) == len(accepted):
                assert event["tokens"][-1]["sources"] == [TARGET]

    generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
    drawn = sum(len(event["tree"]["accepted"]) for event in steps)
    assert drawn == generated + reasons.count("stop")
    assert found[("pyspec_generated_tokens_total",)] == generated
    assert found[("pyspec_steps_total",)] == len(steps) == live["total"]["steps"]
    assert sum(coasts.calls) <= len(steps)
    assert draft == "auto" or sum(coasts.calls) == len(steps)
    assert draft != "none" or len(steps) == drawn
    for stage in (*STAGES, "other"):
        assert found["pyspec_step_seconds_count", ("stage", stage)] == len(steps)
    counted = sum(
        value for (name, *_), value in found.items() if name == "pyspec_accepted_drafts_total"
    )
    marked = [
        source
        for event in steps
        for token in event["tokens"]
        for source in token["sources"]
        if source != TARGET
    ]
    assert counted == len(marked)
    assert draft == "auto" or (draft == "ngram") == bool(marked)


def test_sources_are_told_apart(engine: Engine) -> None:
    tree = DraftTree(
        np.array([5, 6, 7, 8]),
        np.array([-1, 0, 0, 1]),
        np.array([0, 1, 1, 2]),
        np.zeros(4),
        (frozenset(), frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})),
    )
    sequence = engine.begin("x")
    speculation = Speculation(engine)
    stages = dict.fromkeys(STAGES, 1.0)
    sequence.tokens.append(9)
    for nodes, tokens in [((0, 1, 3), (6, 8, 9)), ((0, 2), (7, 9)), ((0,), (9,))]:
        emission = Emission(sequence, "", tree, AcceptedPath(nodes, tokens))
        speculation.add_step([("r", emission)], stages)
    engine.end(sequence)
    total = speculation.snapshot()["total"]
    assert total["acceptance_by_depth"] == [0.6667, 0.3333]
    assert total["acceptance_by_source"] == {"a": [0.3333, 0.3333], "b": [0.3333, 0.3333]}
    assert total["tokens_per_step"] == 2


@given(st.floats(0.1, 50), st.floats(0.01, 10), st.integers(1, 4))
def test_plain_speed_is_fitted_from_other_steps(base: float, slope: float, at: int) -> None:
    curve = CostCurve()
    for nodes in (8, 12, 16):
        for _ in range(6):
            curve.add(nodes, base + slope * nodes)
    ms, known = curve.at(at)
    assert known == "fitted"
    assert ms == pytest.approx(base + slope * at, rel=1e-6)
    for _ in range(6):
        curve.add(at, 3.0)
    assert curve.at(at) == (pytest.approx(3.0), "measured")


def test_plain_speed_has_a_bound_when_nothing_else_is_known() -> None:
    curve = CostCurve()
    assert curve.at(1) == (0.0, "bound")
    curve.add(4, 2.0)
    assert curve.at(1) == (2.0, "bound")
