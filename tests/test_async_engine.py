"""`AsyncEngine`: many requests share an engine, and none notices the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from pyspec import (
    AbortedError,
    ArgumentError,
    AsyncEngine,
    ContextError,
    Engine,
    QueueFullError,
    SamplerError,
    SamplingConfig,
    StateError,
)
from tests.conftest import OpenEngine
from tests.prompts import CODE, PROSE

PROMPTS = [*CODE[:5], *PROSE[:3]]
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[AsyncEngine]:
    with AsyncEngine(model, n_slots=3, n_ctx=512, n_threads=1) as found:
        yield found


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(test(), 60)

    return asyncio.run(limited())


def idle(engine: AsyncEngine) -> bool:
    """Waits until no request is left."""
    for _ in range(500):
        if engine.load == (0, 0):
            return True
        threading.Event().wait(0.01)
    return False


def test_many_at_once_are_the_same_as_one_by_one(engine: AsyncEngine, plain: Engine) -> None:
    options = [
        {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 20 + i} for i in range(len(PROMPTS))
    ]
    options[3]["json_schema"] = SCHEMA

    async def test() -> Any:
        return await asyncio.gather(
            *(engine.complete(p, **o) for p, o in zip(PROMPTS, options, strict=True))
        )

    found = run(test)
    for prompt, how, result in zip(PROMPTS, options, found, strict=True):
        expected = plain.complete(prompt, **how)
        assert (result.text, result.tokens) == (expected.text, expected.tokens), prompt
        assert result.finish_reason == expected.finish_reason
    assert any(result.stats.accepted for result in found)
    assert idle(engine)


def test_streams(engine: AsyncEngine) -> None:
    async def test() -> None:
        # With a string to look for, text comes step by step, however short steps are.
        generation = engine.generate(PROMPTS[0], max_tokens=30, temperature=0, stop="\0")
        pieces = [piece async for piece in generation]
        result = await generation.result()
        assert "".join(pieces) == result.text and len(pieces) > 3
        assert [piece async for piece in generation] == [], "it has ended"
        assert await generation.result() is result

    run(test)


def test_the_event_loop_is_free_meanwhile(engine: AsyncEngine) -> None:
    async def test() -> None:
        job = asyncio.ensure_future(engine.complete(PROMPTS[0], max_tokens=60, ignore_end=True))
        turns = 0
        while not job.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 50

    run(test)


def test_threads(engine: AsyncEngine, plain: Engine) -> None:
    found: dict[str, list[str]] = {}

    def work(prompt: str) -> None:
        found[prompt] = list(engine.submit(prompt, max_tokens=20, temperature=0, stop="\n\n"))

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for prompt in PROMPTS:
        expected = plain.complete(prompt, max_tokens=20, temperature=0, stop="\n\n").text
        assert "".join(found[prompt]) == expected


def test_results_of_threads(engine: AsyncEngine) -> None:
    generation = engine.submit(PROMPTS[0], max_tokens=20, sampling=SamplingConfig(seed=4))
    result = generation.result(60)
    assert generation.result(0) is result and result.seed == 4
    many = [engine.submit(prompt, max_tokens=4) for prompt in PROMPTS]
    assert all(len(one.result(60).tokens) <= 4 for one in many)


def test_a_result_that_takes_too_long(engine: AsyncEngine) -> None:
    blockers = [engine.submit("x", max_tokens=500, ignore_end=True) for _ in range(3)]
    generation = engine.submit("y", max_tokens=2, ignore_end=True)
    with pytest.raises(TimeoutError, match=r"for 0\.001 seconds"):
        generation.result(0.001)
    for blocker in blockers:
        blocker.cancel()
    assert len(generation.result(60).tokens) == 2


def test_giving_up(engine: AsyncEngine) -> None:
    async def test() -> None:
        generation = engine.generate("x", max_tokens=500, ignore_end=True)
        first = await anext(generation)
        generation.cancel()
        result = await generation.result()
        assert result.finish_reason == "aborted" and result.text.startswith(first)
        assert len(result.tokens) < 500

    run(test)
    assert idle(engine)


def test_what_is_dropped_frees_its_slot(engine: AsyncEngine) -> None:
    async def test() -> None:
        async for _ in engine.generate("x", max_tokens=500, ignore_end=True):
            break
        task = asyncio.ensure_future(engine.complete("x", max_tokens=500, ignore_end=True))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)
    for _ in engine.submit("x", max_tokens=500, ignore_end=True):
        break
    assert idle(engine)


def test_waiting_requests_can_be_given_up(engine: AsyncEngine) -> None:
    blockers = [engine.submit("x", max_tokens=400, ignore_end=True) for _ in range(3)]
    waiting = engine.submit("y", max_tokens=400)
    waiting.cancel()
    for blocker in blockers:
        blocker.cancel()
    with pytest.raises(StateError, match="given up"):
        waiting.result(60)


def test_errors_reach_their_request_alone(engine: AsyncEngine) -> None:
    async def test() -> None:
        good = asyncio.ensure_future(engine.complete(PROMPTS[0], max_tokens=20, temperature=0))
        with pytest.raises(ContextError, match="context holds 512"):
            await engine.complete("x" * 5000)
        with pytest.raises(SamplerError, match="grammar"):
            await engine.complete("x", grammar="root ::= (")
        with pytest.raises(ArgumentError, match="max_tokens is 0"):
            await engine.complete("x", max_tokens=0)
        with pytest.raises(ArgumentError, match="temperature is -1"):
            engine.generate("x", temperature=-1)
        with pytest.raises(ArgumentError, match="'heat'"):
            engine.submit("x", heat=1)
        assert len((await good).tokens) == 20

    run(test)


def test_chats(engine: AsyncEngine) -> None:
    messages = [{"role": "user", "content": "Hello"}]

    async def test() -> Any:
        return await engine.chat(messages, max_tokens=8, temperature=0).result()

    prompt = engine.engine.chat_template.render(messages)
    expected = engine.submit(prompt, max_tokens=8, temperature=0).result(60)
    assert run(test).tokens == expected.tokens


def test_the_next_turn_of_a_chat_reads_what_is_new(model: Any) -> None:
    """Where the first message ends, although the second is another one."""
    system = {"role": "system", "content": "import os\n" * 60}

    async def test() -> list[int]:
        options = {"n_ctx": 1024, "n_threads": 1, "cache_ram": 1 << 25}
        async with AsyncEngine(model, "none", **options) as engine:
            chats = [[system, {"role": "user", "content": text}] for text in ("One.", "Two?")]
            results = [await engine.chat(chat, max_tokens=2).result() for chat in chats]
        return [result.stats.cached_tokens for result in results]

    first, second = run(test)
    assert first == 0 and second > 64


def test_a_full_line(open_engine: OpenEngine, model: Any) -> None:
    with AsyncEngine(model, "none", n_ctx=256, n_threads=1, max_waiting=2) as engine:
        jobs = [engine.submit("x", max_tokens=200, ignore_end=True)]
        while engine.load != (1, 0):
            threading.Event().wait(0.001)
        jobs += [engine.submit("x", max_tokens=200) for _ in range(2)]
        with pytest.raises(QueueFullError, match="no more than 2"):
            engine.submit("x")
        with pytest.raises(QueueFullError, match="no more than 2"):
            run(lambda: engine.complete("x"))
    for job in jobs:  # close() has ended them
        with pytest.raises(AbortedError):
            job.result(60)
    engine.close()
    with pytest.raises(StateError, match="not running"):
        engine.submit("x")


def test_closing_does_not_wait_for_a_long_prompt(model: Any) -> None:
    with AsyncEngine(model, "none", n_ctx=8192, n_batch=8192, n_threads=1) as engine:
        job = engine.submit([65] * 8000, max_tokens=1)
        while engine.load != (1, 0):
            threading.Event().wait(0.001)
        native = engine.engine.native
    with pytest.raises(AbortedError):
        job.result(60)
    assert native.closed


def test_entering_it_in_an_event_loop(model: Any) -> None:
    async def test() -> None:
        async with AsyncEngine(model, "none", n_ctx=256, n_threads=1) as engine:
            running = engine.generate("x", max_tokens=200, ignore_end=True)
            await anext(running)
            native = engine.engine.native
        assert native.closed
        with pytest.raises(AbortedError):
            await running.result()

    run(test)


def test_an_engine_that_is_open_already(model: Any) -> None:
    with AsyncEngine(Engine(model, "none", n_ctx=256, n_threads=1)) as engine:
        assert len(engine.submit("x", max_tokens=3, ignore_end=True).result(60).tokens) == 3


def test_an_unexpected_failure_reaches_its_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncEngine(model, "none", n_ctx=256, n_threads=1) as engine:

        def fail(_: Any) -> None:
            raise RuntimeError("a defect")

        with monkeypatch.context() as patch:
            patch.setattr(engine.engine, "step", fail)
            jobs = [engine.submit("x", max_tokens=3) for _ in range(3)]
            for job in jobs:
                with pytest.raises(StateError, match="a defect"):
                    job.result(60)
        assert len(engine.submit("x", max_tokens=3, ignore_end=True).result(60).tokens) == 3


def test_models_that_do_not_load() -> None:
    with pytest.raises(Exception, match="missing"):
        AsyncEngine("missing.gguf").start()
