"""Engine and Generation: prompts of every kind, streaming, limits, slots and their end."""

from __future__ import annotations

from pathlib import Path

import pytest

import pyspec
from pyspec import (
    ArgumentError,
    ContextError,
    DraftConfig,
    DraftError,
    Engine,
    SamplerError,
    SamplingConfig,
)
from pyspec.errors import ModelError, StateError, TemplateError
from tests.conftest import OpenEngine


def test_streaming_equals_waiting(mtp: Engine) -> None:
    options = {"max_tokens": 50, "temperature": 0.7, "seed": 1, "ignore_end": True}
    generation = mtp.generate("import os\n", **options)
    pieces = list(generation)
    result = generation.result()
    assert len(pieces) > 3
    assert "".join(pieces) == result.text
    assert result.tokens == mtp.complete("import os\n", **options).tokens
    assert result.text == mtp.detokenize(result.tokens)


def test_result_adds_up(mtp: Engine) -> None:
    result = mtp.complete("def ", max_tokens=40, temperature=0, ignore_end=True)
    stats = result.stats
    assert (stats.draft, result.finish_reason) == ("mtp", "length")
    assert stats.generated == len(result.tokens) == 40
    assert stats.accepted + stats.steps == 40
    assert 0 < stats.acceptance_rate <= 1
    assert stats.drafted_by_depth[0] >= stats.drafted_by_depth[-1]
    assert sum(stats.stage_ms.values()) == pytest.approx(stats.decode_ms)
    assert stats.rollback_bytes > 0
    assert list(result.as_dict()) == ["tokens", "text", "finish_reason", "stats"]


def test_plain_decoding_carries_no_cost_of_trees(plain: Engine, mtp: Engine) -> None:
    stats = plain.complete("def ", max_tokens=8, temperature=0).stats
    assert (stats.drafted, stats.tokens_per_step) == (0, 1.0)
    assert stats.rollback_bytes <= mtp.native.info.bytes_rollback / 2
    assert plain.native.info.bytes_mtp == 0


@pytest.mark.parametrize(
    "prompt", ["", b"", [], "a", b"caf\xc3", "é", [5, 6]], ids=lambda prompt: repr(prompt)
)
def test_takes_every_kind_of_prompt(mtp: Engine, prompt: str | bytes | list[int]) -> None:
    result = mtp.complete(prompt, max_tokens=6, temperature=0, ignore_end=True)
    assert len(result.tokens) == 6
    assert result.stats.prompt_tokens >= 1


def test_prompt_that_ends_inside_a_character_keeps_its_bytes(plain: Engine) -> None:
    tokens = plain.tokenize(b"caf\xc3")
    assert b"".join(map(plain.piece, tokens)) == b"caf\xc3"
    assert plain.tokenize("caf") == tokens[:-1]


def test_text_continues_a_cut_character(plain: Engine) -> None:
    """The model is forced to complete the character; the text then begins with it."""
    (rest,) = (plain.tokenize("é")[-1:],)
    if plain.piece(rest[0]) != b"\xa9":
        pytest.skip("the vocabulary has é in one token")
    result = plain.complete(
        b"caf\xc3", max_tokens=1, temperature=0, logit_bias={rest[0]: 1000.0}, ignore_end=True
    )
    assert result.text == "é"


def test_end_token_ends_and_is_no_output(plain: Engine, mtp: Engine) -> None:
    end = plain.native.info.token_eos
    for engine in (plain, mtp):
        options = {"max_tokens": 20, "temperature": 0, "logit_bias": {end: 1000.0}}
        result = engine.complete("x = ", **options)
        assert (result.tokens, result.text, result.finish_reason) == ([], "", "stop")
        going_on = engine.complete("x = ", **options, ignore_end=True)
        assert going_on.tokens == [end] * 20
        assert going_on.finish_reason == "length"


def test_context_overflow_names_the_numbers(open_engine: OpenEngine) -> None:
    engine = open_engine("mtp", n_ctx=64)
    limit = engine.n_ctx
    with pytest.raises(
        ContextError, match=rf"prompt has {limit + 1} tokens, context holds {limit}"
    ):
        engine.generate([5] * (limit + 1))
    full = engine.complete([5] * limit, temperature=0, ignore_end=True)
    assert (len(full.tokens), full.finish_reason) == (1, "length")


def test_bad_arguments_are_named(plain: Engine) -> None:
    with pytest.raises(ArgumentError, match="max_tokens is 0"):
        plain.generate("a", max_tokens=0)
    with pytest.raises(ArgumentError, match="'temprature'"):
        plain.generate("a", temprature=1)
    with pytest.raises(ArgumentError, match="token 999999999"):
        plain.generate([999999999])
    with pytest.raises(ArgumentError, match="must be one of the two"):
        plain.generate("a", sampling=pyspec.SamplingConfig(), top_k=3)
    with pytest.raises(SamplerError):
        plain.generate("a", grammar="root ::= (")
    with pytest.raises(SamplerError, match="json_schema cannot become a grammar"):
        plain.generate("a", json_schema={"type": "wrong"})
    assert plain.complete("a", max_tokens=2).tokens, "the engine is as before"


def test_abandoned_generations_free_their_slot(mtp: Engine) -> None:
    for _ in mtp.generate("a", max_tokens=50):
        break
    never_started = mtp.generate("a", max_tokens=50)
    with pytest.raises(StateError, match="all 1 slots are taken"):
        mtp.generate("b")
    never_started.close()
    partial = mtp.generate("a", max_tokens=50, temperature=0, ignore_end=True)
    next(partial)
    partial.close()
    assert partial.partial().finish_reason == "aborted"
    assert 0 < len(partial.partial().tokens) < 50
    assert list(partial) == []


def test_progress_can_give_up_a_prompt(mtp: Engine) -> None:
    seen: list[float] = []

    def progress(done: float) -> bool:
        seen.append(done)
        return len(seen) < 2

    result = mtp.generate([5] * 2000, progress=progress).result()
    assert (result.finish_reason, result.tokens) == ("aborted", [])
    assert seen == sorted(seen) and len(seen) == 2


def test_missing_sources_are_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf: No such file"):
        Engine(tmp_path / "nowhere.gguf")
    with pytest.raises(DraftError, match="no drafter is called 'guess', there are: auto, none"):
        Engine(model, draft="guess")
    with pytest.raises(ArgumentError, match="draft_nodes is 65"):
        Engine(model, draft=DraftConfig(nodes=65))
    with pytest.raises(ArgumentError, match="'threads'"):
        Engine(model, threads=2)


def test_auto_takes_what_the_file_offers(open_engine: OpenEngine) -> None:
    names = open_engine("auto").drafter.name.split("+")
    assert {"mtp", "ngram"} <= set(names) and "none" not in names


def test_closed_engine_says_so(model: Path) -> None:
    engine = Engine(model, draft="none", n_ctx=64, n_threads=1)
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.generate("a")


def test_chat_template_or_a_clear_refusal(plain: Engine) -> None:
    if plain.native.chat_template:
        text = plain.chat_template.render([{"role": "user", "content": "Hi"}])
        assert "Hi" in text
    else:
        with pytest.raises(TemplateError, match="has no chat template"):
            _ = plain.chat_template


def test_orchestration_is_cheap(mtp: Engine) -> None:
    """Python between native calls: far below a millisecond a step even on a busy machine."""
    stats = mtp.complete("import ", max_tokens=120, temperature=0, ignore_end=True).stats
    assert stats.stage_ms["other"] / stats.steps < 1.0


# ---- what one request may change ----


@pytest.mark.parametrize(
    ("options", "most"),
    [
        pytest.param({}, 3, id="as-the-engine"),
        pytest.param({"draft": "auto"}, 3, id="auto"),
        pytest.param({"draft": "none"}, 0, id="none"),
        pytest.param({"draft_nodes": 2}, 1, id="two-nodes"),
        pytest.param({"draft_nodes": 64}, 3, id="more-than-the-engine"),
    ],
)
def test_a_request_may_draft_less_than_the_engine(
    open_engine: OpenEngine, options: dict, most: int
) -> None:
    mtp, sampling = open_engine("mtp", depth=3), SamplingConfig(temperature=0)
    sequence = mtp.begin("import os\n", max_tokens=30, sampling=sampling, **options)
    try:
        while not mtp.prefill(sequence, limit=1):
            pass
        while sequence.finish_reason is None:
            mtp.step([sequence])
        assert len(sequence.stats.drafted_by_depth) == most
    finally:
        mtp.end(sequence)
    expected = mtp.complete("import os\n", max_tokens=30, temperature=0)
    assert sequence.text.text == expected.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"draft": "elf"}, "draft is 'elf', must be one of none, mtp, auto", id="name"),
        pytest.param({"draft_nodes": 0}, "draft_nodes is 0", id="no-nodes"),
        pytest.param({"draft_nodes": 65}, "draft_nodes is 65", id="many-nodes"),
    ],
)
def test_a_request_cannot_draft_otherwise(mtp: Engine, options: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        mtp.begin("a", **options)


def test_logprobs_are_recorded_for_emitted_tokens(mtp: Engine) -> None:
    sampling = SamplingConfig(seed=3)
    sequence = mtp.begin("import os\n", max_tokens=30, sampling=sampling, top_logprobs=2)
    try:
        while not mtp.prefill(sequence):
            pass
        while sequence.finish_reason is None:
            mtp.step([sequence])
        assert [entry.token for entry in sequence.logprobs] == sequence.output
        for entry in sequence.logprobs:
            (_, best), (_, second) = entry.top
            assert 0 >= best >= second and best >= entry.logprob
    finally:
        mtp.end(sequence)
