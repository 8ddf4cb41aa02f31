"""Prompts go on from earlier ones, and the text is the same to the byte."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec import ArgumentError, DraftConfig, Engine, SamplingConfig
from pyspec.chat import ChatTemplate
from pyspec.prefill import BLOCK, SMALL, PrefillPlan, Segment
from pyspec.prefix import Prefix
from pyspec.prefix_cache import PER_CONVERSATION, PrefixCache
from pyspec.prefix_store import PrefixStore, model_digest

WORDS = (Path(__file__).parent / "data" / "heldout.txt").read_text()


@pytest.fixture(scope="module")
def words(model: Path) -> list[int]:
    """A few thousand tokens of text."""
    with Engine(model, "none", n_ctx=64, n_threads=1) as engine:
        return engine.tokenize(WORDS)[:6000]


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[tuple[Engine, Engine]]:
    """With and without reuse, drafting with MTP."""
    options = {"n_slots": 2, "n_ctx": 4096, "n_threads": 1}
    with (
        Engine(model, DraftConfig("mtp"), **options, cache_ram=1 << 28) as cached,
        Engine(model, DraftConfig("mtp"), **options, share=cached) as fresh,
    ):
        yield cached, fresh


@pytest.fixture
def cached(engines: tuple[Engine, Engine]) -> Engine:
    return engines[0]


@pytest.fixture
def fresh(engines: tuple[Engine, Engine]) -> Engine:
    return engines[1]


def run(
    engine: Engine, tokens: list[int], segments: list[Segment] = (), n: int = 24, **options
) -> tuple[list[int], int]:
    """Generated tokens, and how many of the prompt were not read."""
    sampling = SamplingConfig(**{"temperature": 0, **options})
    sequence = engine.begin(
        tokens, max_tokens=n, ignore_end=True, sampling=sampling, segments=list(segments)
    )
    try:
        while not engine.prefill(sequence):
            pass
        while sequence.finish_reason is None:
            engine.step([sequence])
        return sequence.output, sequence.stats.cached_tokens
    finally:
        engine.end(sequence)


# ---- plans ----

SEGMENTS = st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=8)


def plan_of(length: int, raw: list[tuple[int, bool]], block: int) -> PrefillPlan:
    segments = [Segment(*pair) for pair in sorted(raw)]
    return PrefillPlan.of(length, segments, block)


@given(st.integers(0, 3000), SEGMENTS, st.sampled_from([8, 64, 65, 512]))
def test_a_plan_reads_every_token_once(length: int, raw: list, block: int) -> None:
    plan = plan_of(length, raw, block)
    at, visited = 0, []
    while at < length:
        end = plan.next_end(at)
        assert at < end <= min(length, at + block)
        assert end - at <= SMALL or (at, end) in plan.passes
        visited.append(at := end)
    assert set(plan.stops) <= set(visited)
    assert all(start in (0, *visited) for start, _ in plan.passes)


@given(SEGMENTS, st.integers(1, 3000), st.integers(0, 200), st.sampled_from([64, 65, 512]))
def test_a_longer_chat_has_the_plan_of_the_shorter(
    raw: list, length: int, more: int, block: int
) -> None:
    """What follows the last segment does not change how the segments before are read."""
    closed = [pair for pair in raw if pair[0] <= length]
    last = max((end for end, _ in closed), default=0)
    one, two = (plan_of(n, closed, block) for n in (length, length + more))
    assert one.until(last) == two.until(last)


def test_generated_segments_are_read_as_they_were_decoded() -> None:
    plan = PrefillPlan.of(2000, [Segment(600), Segment(1500, True)], 512)
    assert plan.passes == ((0, 512), (512, 600), (1500, 2000))
    assert plan.next_end(600) == 664


# ---- the text is the same ----


@pytest.mark.parametrize(
    ("size", "options"),
    [(2000, {}), (700, {"temperature": 0.9, "seed": 11})],
    ids=["greedy", "seeded"],
)
def test_two_turns_of_a_chat(
    cached: Engine, fresh: Engine, words: list[int], size: int, options: dict
) -> None:
    """2,000 tokens and their answer, then 100 more: only what is new is read."""
    first = words[300 : 300 + size]
    answer, _ = run(cached, first, [Segment(size - 10)], **options)
    second = [*first, *answer, *words[4000:4100]]
    turns = [Segment(size - 10), Segment(len(first) + len(answer), True)]
    text, reused = run(cached, second, turns, **options)
    assert text == run(fresh, second, turns, **options)[0]
    assert reused == len(first) + len(answer) - 1  # the last answered token was never read
    # again, as a client does that wants another answer: nothing but the last segment is read
    again, reused = run(cached, second, turns, **options)
    assert again == text
    assert reused >= turns[0].end


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_text_prompts_go_on_from_the_last_block(
    model: Path, words: list[int], threads: int
) -> None:
    """Holes that rejected drafts left in a slot, restored states, both classes of passes."""
    options = {"n_ctx": 4096, "n_threads": threads}
    with (
        Engine(model, DraftConfig("mtp", top_k=2), **options, cache_ram=1 << 28) as cached,
        Engine(model, DraftConfig("mtp", top_k=2), **options, share=cached) as fresh,
    ):
        prompt = words[:400]
        for more in (40, 300):
            sampling = {"temperature": 1.2, "seed": more}
            text, reused = run(cached, prompt, n=60, **sampling)
            assert text == run(fresh, prompt, n=60, **sampling)[0]
            prompt = [*prompt, *text, *words[2000 : 2000 + more]]
        text, reused = run(cached, prompt)
        assert text == run(fresh, prompt)[0]
        assert reused >= BLOCK


def test_conversations_that_part_share_their_beginning(
    cached: Engine, fresh: Engine, words: list[int]
) -> None:
    system = words[100:400]
    for at in (600, 900, 1200):
        prompt = [*system, *words[at : at + 150]]
        text, reused = run(cached, prompt, [Segment(300), Segment(440)])
        assert text == run(fresh, prompt, [Segment(300), Segment(440)])[0]
        assert reused == (0 if at == 600 else 300)


def test_states_of_other_segments_are_not_taken(cached: Engine, words: list[int]) -> None:
    """Tokens alone do not say how they were read."""
    prompt = words[3000:3500]
    run(cached, prompt, [Segment(200), Segment(490)])
    assert run(cached, prompt, [Segment(220), Segment(490)])[1] == 0


def test_an_aborted_or_failed_request_harms_no_later_one(
    cached: Engine, fresh: Engine, words: list[int]
) -> None:
    prompt = words[5000:5300]
    sequence = cached.begin(prompt)
    cached.abort()
    with pytest.raises(Exception, match="abort"):
        cached.prefill(sequence)
    cached.end(sequence)
    assert run(cached, prompt) == (run(fresh, prompt)[0], 0)
    sequence = cached.begin(prompt)  # left before its prompt is read: what is there is kept
    cached.end(sequence)
    assert sequence.stats.cached_tokens == 0
    assert run(cached, prompt)[0] == run(fresh, prompt)[0]


def test_requests_that_come_together_read_their_prompt_once(
    cached: Engine, words: list[int]
) -> None:
    prompt = words[4200:4700]
    together = [cached.begin(prompt, max_tokens=8, ignore_end=True) for _ in range(2)]
    for sequence in together:
        while not cached.prefill(sequence):
            pass
    assert [sequence.stats.cached_tokens for sequence in together] == [0, len(prompt) - 1]
    for sequence in together:
        cached.end(sequence)


def test_a_prompt_that_is_known_whole_is_not_read(cached: Engine, fresh: Engine) -> None:
    """Nor is one of a single token, which has nothing to read."""
    for tokens in ([5], [5, *range(3, 90)]):
        first = run(cached, tokens)[0]
        assert run(cached, tokens)[0] == first == run(fresh, tokens)[0]


def test_without_a_cache_nothing_is_kept(fresh: Engine, words: list[int]) -> None:
    assert fresh.cache is None
    run(fresh, words[:200])
    assert [fresh.native.length(slot) for slot in range(2)] == [0, 0]
    assert run(fresh, words[:200])[1] == 0


# ---- bounds ----


def prefix_of(n: int, first: int = 0) -> Prefix:
    return Prefix(np.arange(first, first + n, dtype=np.int32).tobytes(), ())


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=40))
def test_memory_is_bounded_and_the_oldest_go(adds: list[tuple[int, int]]) -> None:
    cache = PrefixCache(1000)
    for first, length in adds:
        cache.add(prefix_of(length, 10 * first), bytes(100 * length))
        assert cache.held <= 1000
        assert cache.held == sum(entry.size for entry in cache._entries.values())
    if adds:
        assert prefix_of(adds[-1][1], 10 * adds[-1][0]) in cache


def test_use_keeps_a_checkpoint() -> None:
    cache = PrefixCache(300)
    for first in (0, 10, 20):
        cache.add(prefix_of(2, first), bytes(100))
    found = cache.find(prefix_of(4).tokens, PrefillPlan(4))
    assert found is not None and cache.load(found) == bytes(100)
    cache.add(prefix_of(2, 30), bytes(100))
    assert prefix_of(2) in cache and prefix_of(2, 10) not in cache


def test_a_conversation_keeps_its_first_and_last_checkpoints() -> None:
    cache = PrefixCache(10**6)
    for length in range(1, 10):
        cache.add(prefix_of(length), bytes(8))
    kept = sorted(entry.length for entry in cache._entries.values())
    assert kept == [1, 7, 8, 9] and len(kept) == PER_CONVERSATION


def test_memory_too_small_for_any_state_does_no_harm(model: Path, words: list[int]) -> None:
    with Engine(model, DraftConfig("mtp"), n_ctx=1024, n_threads=1, cache_ram=1) as engine:
        first = run(engine, words[:300])
        assert run(engine, words[:300]) == first


# ---- disk ----


def open_on(model: Path, directory: Path, **options) -> Engine:
    defaults = {"n_ctx": 4096, "n_threads": 1, "cache_ram": 1 << 28}
    return Engine(model, DraftConfig("mtp"), cache_dir=str(directory), **defaults | options)


def test_a_restart_goes_on_where_it_was(
    model: Path, fresh: Engine, tmp_path: Path, words: list[int]
) -> None:
    first, segments = words[:2000], [Segment(1990)]
    with open_on(model, tmp_path) as engine:
        answer, _ = run(engine, first, segments)
    second = [*first, *answer, *words[3000:3100]]
    segments.append(Segment(len(first) + len(answer), True))
    with open_on(model, tmp_path, cache_ram=0) as engine:
        text, reused = run(engine, second, segments)
    assert text == run(fresh, second, segments)[0]
    assert reused == len(first) + len(answer) - 1
    with open_on(model, tmp_path, n_slots=2) as engine:  # states of other settings stay apart
        assert run(engine, second, segments)[1] == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign", "removed"])
def test_damaged_files_are_ignored(
    model: Path,
    tmp_path: Path,
    words: list[int],
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = words[:300]
    with open_on(model, tmp_path) as engine:
        text, _ = run(engine, prompt)
    files = list(tmp_path.rglob("*.prefix"))
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "removed":
            file.unlink()
        else:
            cuts = {"cut": data[:-1], "flipped": data, "emptied": b"", "foreign": b"#!/bin/sh\n"}
            file.write_bytes(cuts[damage])
    with caplog.at_level(logging.WARNING, "pyspec"), open_on(model, tmp_path) as engine:
        assert run(engine, prompt) == (text, 0)
    assert ("ignored" in caplog.text) is (damage != "removed")
    with open_on(model, tmp_path) as engine:  # and written anew
        assert run(engine, prompt) == (text, BLOCK)  # the last whole pass


def test_files_are_bounded_and_leftovers_removed(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, {"model": "x"}, limit=2000)
    cache = PrefixCache(10**6, store)
    for first in range(10):
        cache.add(prefix_of(3, 10 * first), bytes(400))
    cache.close()
    files = list(tmp_path.rglob("*.prefix"))
    assert 0 < sum(file.stat().st_size for file in files) == store.bytes <= 2000
    leftover = store.directory / f".{'0' * 32}.1.tmp"
    leftover.write_bytes(b"half")
    with_leftover = PrefixCache(0, PrefixStore(tmp_path, {"model": "x"}))
    assert len(with_leftover) == len(files) and not leftover.exists()
    with_leftover.close()


def test_a_directory_that_cannot_be_made_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cache_dir"):
        open_on(model, tmp_path / "file" / "below")


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    one, two = tmp_path / "a-00001-of-00002.gguf", tmp_path / "a-00002-of-00002.gguf"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    notes = tmp_path / "notes"
    first = model_digest(one, notes)
    assert model_digest(one, notes) == first == model_digest(one, tmp_path / "other")
    two.write_bytes(b"33")
    assert model_digest(one, notes) != first


# ---- chats ----


def test_message_ends_are_where_later_chats_part(model: Path, cached: Engine) -> None:
    chat = [
        {"role": "system", "content": "Be brief. " * 30},
        {"role": "user", "content": "Größe? 日本語 " * 30},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why"},
    ]
    short, long = (cached.chat_template.prompt(chat[:n]) for n in (2, 4))
    assert short == cached.chat_template.render(chat[:2])
    ends = [(long.encode()[:end].decode(), generated) for end, generated in long.message_ends]
    assert [generated for _, generated in ends] == [False, False, True, False]
    assert all(text.endswith("<|im_end|>\n") for text, _ in ends)
    assert long.message_ends[:2] == short.message_ends
    tokens = cached.tokenize(long)
    assert len(cached.segments(long, tokens)) == 4
    for prompt in (short, long):
        cached.complete(prompt, max_tokens=4, temperature=0)
    stats = cached.complete(long, max_tokens=4, temperature=0).stats
    assert stats.cached_tokens > len(cached.tokenize(short)) - 20


def test_templates_that_refuse_beginnings_or_rewrite_them() -> None:
    source = (
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }};{% endfor %}"
    )
    template = ChatTemplate(source)
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    assert template.prompt(messages).message_ends == [(6, False)]
