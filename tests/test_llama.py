"""`pyspec.Llama` is `llama_cpp.Llama` in every result, and reads the model less often."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyspec import ArgumentError, DraftConfig, DraftError, Llama
from tests import synthetic_models
from tests.prompts import CODE, OTHER, PROSE
from tests.synthetic_models import Synthetic, preset, write

import llama_cpp  # isort: skip - on the patched libraries, which pyspec.llama has seen to

synthetic = synthetic_models.synthetic

OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 7}
CODE_PROMPT, PROSE_PROMPT = CODE[0], PROSE[0]
FIXED = DraftConfig("mtp", depth=3)


class Pair:
    """Parent and child on the same file; `same` runs something on both and compares."""

    def __init__(self, model: Path, draft: str | DraftConfig = FIXED, **options: Any) -> None:
        options = OPTIONS | options
        self.parent = llama_cpp.Llama(str(model), **options)
        self.child = Llama(model, draft=draft, **options)

    def same(self, run: Callable[[llama_cpp.Llama], Any], what: str = "result") -> Any:
        expected, found = (run(llama) for llama in (self.parent, self.child))
        assert found == expected, what
        assert state_of(self.child) == state_of(self.parent), "state"
        return found

    def close(self) -> None:
        self.parent.close()
        self.child.close()


def state_of(llama: llama_cpp.Llama) -> tuple[int, list[int]]:
    return llama.n_tokens, llama._input_ids.tolist()


def anonymous(value: Any) -> Any:
    """A response without what differs from call to call."""
    if isinstance(value, dict):
        return {k: anonymous(v) for k, v in value.items() if k not in ("id", "created")}
    return [anonymous(v) for v in value] if isinstance(value, list) else value


def completion(prompt: Any, **options: Any) -> Callable[[llama_cpp.Llama], Any]:
    def run(llama: llama_cpp.Llama) -> Any:
        found = llama.create_completion(prompt, **options)
        return anonymous(found if isinstance(found, dict) else list(found))

    return run


def chat(text: str, **options: Any) -> Callable[[llama_cpp.Llama], Any]:
    def run(llama: llama_cpp.Llama) -> Any:
        messages = [{"role": "user", "content": text}]
        found = llama.create_chat_completion(messages, **options)
        found = anonymous(found if isinstance(found, dict) else list(found))
        return without_call_ids(found)

    return run


def without_call_ids(found: Any) -> Any:
    """Tool calls carry the completion's random id."""
    if isinstance(found, dict):
        return {k: without_call_ids(v) for k, v in found.items() if k != "tool_call_id"}
    return [without_call_ids(v) for v in found] if isinstance(found, list) else found


@pytest.fixture(scope="module")
def opened(model: Path) -> Iterator[Pair]:
    found = Pair(model)
    yield found
    found.close()


@pytest.fixture
def pair(opened: Pair) -> Pair:
    """Both without a text, and with the same seed."""
    for llama in (opened.parent, opened.child):
        llama.reset()
        llama.set_seed(7)
    return opened


@pytest.fixture(scope="module")
def scored(model: Path) -> Iterator[Pair]:
    """With the logits of all tokens, for log-probabilities."""
    found = Pair(model, logits_all=True, n_ctx=256)
    yield found
    found.close()


SAMPLING = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 3},
    "unseeded": {"temperature": 0.8},
    "hot": {"temperature": 1.5, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 5},
    "negative-temperature": {"temperature": -1.0, "seed": 5},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "greedy-penalties": {"temperature": 0, "repeat_penalty": 1.3},
    "typical": {"typical_p": 0.7, "seed": 11},
    "mirostat-1": {"mirostat_mode": 1, "seed": 2},
    "mirostat-2": {"mirostat_mode": 2, "seed": 2},
    "logit-bias": {"temperature": 0, "logit_bias": {"10": -100.0, "32": 2.5}},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_completions(pair: Pair, name: str) -> None:
    for prompt in (CODE_PROMPT, PROSE_PROMPT, OTHER[3]):
        pair.same(completion(prompt, max_tokens=40, **SAMPLING[name]), prompt)


def test_options_of_completions(pair: Pair) -> None:
    tokens = pair.child.tokenize(CODE_PROMPT.encode())
    for prompt, options in (
        (CODE_PROMPT, {"echo": True, "max_tokens": 8}),
        (tokens, {"max_tokens": 8}),
        (CODE_PROMPT, {"stop": ["\n\n", "return"], "max_tokens": 200}),
        (CODE_PROMPT, {"stop": "self", "max_tokens": 200}),
        (CODE_PROMPT, {"max_tokens": 1}),
        (CODE_PROMPT, {"suffix": "\n    return", "max_tokens": 8}),
        (CODE_PROMPT * 40, {"max_tokens": None}),  # to the end of the context
    ):
        pair.same(completion(prompt, temperature=0, **options), str(options))


def test_call_is_a_completion(pair: Pair) -> None:
    pair.same(lambda llama: anonymous(llama(CODE_PROMPT, max_tokens=12, temperature=0)))


@pytest.mark.parametrize("options", [{}, {"stop": ["\n\n"]}, {"temperature": 0}], ids=str)
def test_streams(pair: Pair, options: dict[str, Any]) -> None:
    for prompt in (CODE_PROMPT, OTHER[3], OTHER[4]):
        pair.same(completion(prompt, stream=True, max_tokens=30, seed=4, **options), prompt)


def test_a_stream_that_is_dropped(pair: Pair) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        stream = llama.create_completion(CODE_PROMPT, stream=True, max_tokens=60, seed=4)
        first = [next(stream)["choices"][0]["text"] for _ in range(9)]
        stream.close()
        return first, completion(PROSE_PROMPT, max_tokens=9, seed=1)(llama)

    pair.same(run)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA},
}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"seed": 1, "stream": True},
        {"response_format": {"type": "json_object", "schema": SCHEMA}, "seed": 1},
        {"tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "look_up"}}, "seed": 1},
    ],
    ids=["greedy", "stream", "schema", "tools"],
)
def test_chats(pair: Pair, options: dict[str, Any]) -> None:
    pair.same(chat("Write a function.", max_tokens=30, **options))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_grammars(pair: Pair, temperature: float) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        grammar = llama_cpp.LlamaGrammar.from_string(
            'root ::= "[" [0-9]{1,3} ("," [0-9]{1,3}){2,6} "]"', verbose=False
        )
        return completion("x = ", grammar=grammar, temperature=temperature, seed=5)(llama)

    pair.same(run)


@pytest.mark.parametrize("echo", [False, True], ids=["output", "echo"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities(scored: Pair, stream: bool, echo: bool) -> None:
    for temperature in (0, 0.8):
        options = {"temperature": temperature, "seed": 2, "max_tokens": 20, "stop": ["\n\n"]}
        scored.same(completion(CODE[8], logprobs=3, stream=stream, echo=echo, **options))


def test_log_probabilities_of_chats(scored: Pair) -> None:
    scored.same(chat("Hello", logprobs=True, top_logprobs=2, max_tokens=10, seed=3))


def test_all_logits(scored: Pair) -> None:
    """Prompts that share a beginning, longer and shorter than one pass of the child."""
    long, other = CODE[1] * 4, CODE[1] * 2 + CODE[0]
    for prompt in (long, long + CODE[0], other, PROSE[0], long, other):
        scored.same(completion(prompt, max_tokens=12, seed=1))
        np.testing.assert_array_equal(scored.child._scores, scored.parent._scores, "logits")
        assert scored.child.eval_logits == scored.parent.eval_logits


def test_logits_without_all_of_them(pair: Pair) -> None:
    with pytest.raises(ValueError, match="logits_all=False"):
        pair.child(CODE_PROMPT, logprobs=2)


def test_logits_processors_see_what_the_parents_see(pair: Pair) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        seen = []

        def watch(input_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
            seen.append((input_ids.tolist(), float(logits.sum()), int(logits.argmax())))
            logits[10] = -np.inf
            return logits

        processors = llama_cpp.LogitsProcessorList([watch])
        found = completion(CODE_PROMPT, logits_processor=processors, seed=6, max_tokens=25)(llama)
        return found, seen

    pair.same(run)
    assert pair.child.spec_stats.accepted > 0, "speculation stays on"


def test_stopping_criteria(pair: Pair) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        seen = []

        def enough(input_ids: np.ndarray, logits: np.ndarray) -> bool:
            seen.append(input_ids.tolist())
            return len(seen) > 11 or logits.shape != (llama.n_vocab(),)

        criteria = llama_cpp.StoppingCriteriaList([enough])
        return completion(CODE_PROMPT, stopping_criteria=criteria, max_tokens=40)(llama), seen

    pair.same(run)


def test_after_an_exception(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(input_ids: np.ndarray, logits: np.ndarray) -> bool:
        if len(input_ids) > 15:
            raise KeyboardInterrupt
        return False

    def run(llama: llama_cpp.Llama) -> Any:
        criteria = llama_cpp.StoppingCriteriaList([give_up])
        with pytest.raises(KeyboardInterrupt):
            llama(CODE_PROMPT, stopping_criteria=criteria, max_tokens=40)
        return completion(CODE_PROMPT * 2, max_tokens=20, seed=1)(llama)

    pair.same(run)
    verifier, calls = pair.child._cursor._verifier, []
    commit = verifier.commit

    def fail_once(*arguments: Any) -> None:
        calls.append(commit(*arguments))
        if len(calls) == 5:
            raise MemoryError("after the engine has moved, before the text has")

    monkeypatch.setattr(verifier, "commit", fail_once)
    with pytest.raises(MemoryError):
        pair.child(CODE_PROMPT, max_tokens=40)
    before = state_of(pair.child)[1]
    cursor = pair.child._cursor
    assert len(before) > 9 and cursor._native.length(0) == len(cursor._committed), "tokens"
    assert take(pair.child, 9, [65], reset=False, temp=0.0) == take(
        pair.parent, 9, [*before, 65], temp=0.0
    )


def test_minimum_of_tokens(pair: Pair) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        least = llama_cpp.MinTokensLogitsProcessor(20, llama.token_eos())
        processors = llama_cpp.LogitsProcessorList([least])
        return completion(CODE_PROMPT, logits_processor=processors, seed=1, max_tokens=30)(llama)

    pair.same(run)


# ---- one token after the other ----


def take(llama: llama_cpp.Llama, n: int, tokens: list[int], **options: Any) -> list[int]:
    generator = llama.generate(tokens, **options)
    found = [next(generator) for _ in range(n)]
    generator.close()
    return found


def test_generate(pair: Pair) -> None:
    tokens = pair.child.tokenize(CODE_PROMPT.encode())

    def run(llama: llama_cpp.Llama) -> Any:
        llama.set_seed(5)
        first = take(llama, 20, tokens)
        again = take(llama, 7, llama._input_ids.tolist())  # all of it is there
        more = take(llama, 7, tokens[:3], reset=False, temp=0.0)
        return first, again, more, take(llama, 7, [], top_k=3, reset=False)

    pair.same(run)


def test_tokens_sent_to_a_generator_are_drafts(model: Path, pair: Pair) -> None:
    llama = pair.child
    tokens = llama.tokenize(CODE_PROMPT.encode())
    expected = take(llama, 30, tokens, temp=0.0)
    for drafts in (expected[1:4], [0, 0], [*expected[1:2], 0]):
        generator = llama.generate(tokens, temp=0.0)
        found = [next(generator)]
        found += [generator.send(drafts if i == 0 else None) for i in range(29)]
        assert found == expected
    generator = llama.generate(tokens, temp=0.0)
    found = [next(generator), *(generator.send([0, 0]) for _ in range(9))]
    assert found == expected[:10] and llama.spec_stats.accepted == 0
    assert llama.spec_stats.drafted >= 2 * 8, "they take the place of the drafter's"


def test_eval_and_sample(pair: Pair) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        llama.reset()
        assert state_of(llama) == (0, [])
        llama._sampler = None  # the parent keeps that of the last generation
        llama.eval(llama.tokenize(CODE_PROMPT.encode()))
        found = []
        for _ in range(12):
            found.append(llama.sample(temp=0.0))
            llama.eval(found[-1:])
        return found, llama.eval_tokens

    pair.same(run)


def test_a_text_that_is_cut(pair: Pair) -> None:
    """`n_tokens` is the parent's way to go back, which its hybrids cannot follow."""
    llama = pair.child
    tokens = llama.tokenize((CODE[3] * 3).encode())
    llama.reset()
    llama.eval(tokens)
    llama._sampler = None
    expected = llama.sample(temp=0.0)
    llama.eval(tokens[:9])
    llama.n_tokens = len(tokens)
    assert llama.sample(temp=0.0) == expected
    llama.n_tokens = 5
    llama.eval(tokens[5:])
    assert llama._cursor.tokens == llama._input_ids.tolist() == tokens
    assert llama.sample(temp=0.0) == expected


def operation(
    what: str,
    text: list[int],
    n: int,
    draw: int,
    room: bool,
    states: dict[llama_cpp.Llama, llama_cpp.LlamaState],
) -> Callable[[llama_cpp.Llama], Any]:
    def run(llama: llama_cpp.Llama) -> Any:
        llama.set_seed(draw)
        if what == "generate":
            return take(llama, n, text, temp=draw % 2 * 0.8)
        if what == "follow" and room:  # a further turn
            return take(llama, n, llama._input_ids.tolist() + text, temp=draw % 2 * 0.8)
        if what == "eval" and room:
            llama.eval(text)
        elif what == "save":
            states[llama] = llama.save_state()
        elif what == "load" and llama in states:
            llama.load_state(states[llama])
        elif what == "reset":
            llama.reset()
        return None

    return run


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls(pair: Pair, seed: int) -> None:
    """Evaluations, generations that are dropped, states and resets leave both alike."""
    dice = random.Random(seed)
    texts = [pair.child.tokenize(text.encode()) for text in (*CODE[:4], *PROSE[:3], CODE[3] * 3)]
    states: dict[llama_cpp.Llama, llama_cpp.LlamaState] = {}
    pair.same(lambda llama: llama.reset())
    for _ in range(25):
        what = dice.choice(["generate", "generate", "follow", "eval", "reset", "save", "load"])
        text, n, draw = dice.choice(texts), dice.randint(1, 12), dice.randrange(1000)
        room = pair.child.n_ctx() - pair.child.n_tokens - len(text) - n > 0

        pair.same(operation(what, text, n, draw, room, states), what)


# ---- states, caches, memory ----


def test_states(pair: Pair) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        found = [completion(CODE_PROMPT, max_tokens=20, seed=3)(llama)]
        state = llama.save_state()
        found.append(completion(PROSE_PROMPT, max_tokens=20, seed=4)(llama))
        llama.load_state(pickle.loads(pickle.dumps(state)))
        assert llama._seed == state.seed == 3
        assert state_of(llama) == (state.n_tokens, state.input_ids[: state.n_tokens].tolist())
        tokens = [*llama._input_ids.tolist(), 65]
        return found, take(llama, 10, tokens, temp=0.0)

    pair.same(run)


def test_states_of_others_are_refused(pair: Pair) -> None:
    pair.child.eval([65, 66])
    state = pair.child.save_state()
    state.n_tokens -= 1
    with pytest.raises(RuntimeError, match="Failed to set llama state data"):
        pair.child.load_state(state)
    pair.parent.eval([65, 66])
    with pytest.raises(RuntimeError, match="Failed to set llama state data"):
        pair.child.load_state(pair.parent.save_state())
    pair.same(completion(CODE_PROMPT, max_tokens=5, seed=3))


def test_a_cache(pair: Pair) -> None:
    def run(llama: llama_cpp.Llama) -> Any:
        llama.set_cache(llama_cpp.LlamaRAMCache())
        prompts = (CODE_PROMPT, PROSE_PROMPT, CODE_PROMPT + "    ", CODE_PROMPT)
        found = [completion(prompt, max_tokens=10, seed=3)(llama) for prompt in prompts]
        llama.set_cache(None)
        return found

    pair.same(run)


def tokens_read(llama: Llama, prompt: list[int], n: int = 3) -> int:
    """Prompt tokens that the model processes for a generation."""
    native = llama._cursor._native
    native.timings(reset=True)
    take(llama, n, prompt)
    return native.timings().n_prefill_tokens


def test_only_what_is_new_is_read(pair: Pair) -> None:
    llama = pair.child
    system = llama.tokenize((CODE[1] * 3).encode())
    first, second, third = (
        llama.tokenize(text.encode()) for text in (CODE[3] * 2, PROSE[0] * 4, PROSE[1] * 4)
    )
    llama._cursor.clear()
    assert tokens_read(llama, system + first) == len(system + first) - 1
    # A next turn, whose reply was replaced by the client.
    assert tokens_read(llama, system + first + second) <= len(second)
    # Another conversation after the same system prompt; its state is kept from then on.
    assert tokens_read(llama, system + second) == len(system + second) - 1
    assert tokens_read(llama, system + third) < len(third)
    llama.reset()
    assert tokens_read(llama, system + first + third) <= len(third)


def test_without_saved_states(model: Path, pair: Pair) -> None:
    with closing_llama(model, cache_bytes=0) as llama:
        tokens = llama.tokenize((CODE[1] * 3).encode())
        for _ in range(2):
            assert tokens_read(llama, [*tokens, 65]) == len(tokens)
            assert tokens_read(llama, [66, *tokens]) == len(tokens)
    with pytest.raises(ArgumentError, match="cache_bytes is -1"):
        Llama(model, cache_bytes=-1)


class closing_llama:
    def __init__(self, model: Path, **options: Any) -> None:
        self.llama = Llama(model, **OPTIONS | options)

    def __enter__(self) -> Llama:
        return self.llama

    def __exit__(self, *exception: object) -> None:
        self.llama.close()


def test_dropping_it_frees_the_model(model: Path) -> None:
    llama = Llama(model, **OPTIONS)
    llama("x", max_tokens=2)
    engine = llama._cursor._native
    gone = weakref.ref(llama)
    gc.disable()
    try:
        del llama
        assert gone() is None and engine.closed
    finally:
        gc.enable()


def test_after_close(model: Path) -> None:
    with closing_llama(model) as llama:
        pass
    with pytest.raises(Exception, match="closed"):
        llama.eval([65])
    llama.close()


# ---- other ways to open it ----


def test_what_was_gained(model: Path, pair: Pair) -> None:
    pair.child(CODE_PROMPT, max_tokens=60, temperature=0)
    stats = pair.child.spec_stats
    assert "mtp" in stats.draft.split("+") and stats.generated == 60
    assert stats.tokens_per_step > 1 and stats.steps < 60
    pair.child(CODE_PROMPT, max_tokens=1)
    assert pair.child.spec_stats.drafted == 0, "nothing is drafted that nobody asked for"
    assert set(stats.as_dict()["ms"]) >= {"draft", "verify", "sample", "commit"}
    with closing_llama(model, draft="none") as llama:
        assert llama.plain_because is None
        pair.parent.reset()
        found = completion(CODE_PROMPT, max_tokens=60, temperature=0)
        assert found(llama) == found(pair.parent)
        stats = llama.spec_stats
        assert (stats.draft, stats.tokens_per_step, stats.drafted) == ("none", 1, 0)


def test_trees(model: Path, pair: Pair) -> None:
    with closing_llama(model, draft=DraftConfig("mtp", depth=3, top_k=3, nodes=10)) as llama:
        found = completion(CODE_PROMPT, max_tokens=60, temperature=0.8, seed=2)
        pair.parent.reset()
        assert found(llama) == found(pair.parent)
        assert llama.spec_stats.drafted > 3 * llama.spec_stats.steps


def test_attention_alone(smollm2_file: Path) -> None:
    found = Pair(smollm2_file, "auto", n_ctx=256)
    try:
        assert found.child.plain_because is None
        found.same(completion(CODE_PROMPT, max_tokens=20, seed=3))
        found.same(completion(CODE_PROMPT + "x", max_tokens=20, seed=3))
    finally:
        found.close()


WAYS_TO_OPEN = {
    "small-batches": {"n_batch": 24, "n_ubatch": 8},
    "quantised-keys": {"type_k": 8},
    "whole-context": {"n_ctx": 0},
    "no-mmap": {"use_mmap": False, "offload_kqv": False},
}


@pytest.mark.parametrize("name", WAYS_TO_OPEN)
def test_ways_to_open_it(model: Path, name: str) -> None:
    found = Pair(model, **{"n_ctx": 256} | WAYS_TO_OPEN[name])
    try:
        assert found.child.plain_because is None
        found.same(lambda llama: (llama.n_ctx(), llama.n_batch, llama.scores.shape))
        for prompt in (CODE[1] * 4, CODE[1] * 4 + PROSE[0]):
            found.same(completion(prompt, max_tokens=16, seed=3))
    finally:
        found.close()


def test_flash_attention(model: Path) -> None:
    """Upstream's depends on the batch; ours is the same with and without drafts."""
    with (
        closing_llama(model, flash_attn=True) as drafting,
        closing_llama(model, flash_attn=True, draft="none") as plain,
    ):
        found = completion(CODE_PROMPT, max_tokens=60, seed=3)
        assert found(drafting) == found(plain)
        assert drafting.spec_stats.accepted


def test_a_drafter_hears_of_the_steps_that_it_proposed_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing_llama(model, draft="auto") as llama:
        drafter, calls = llama._cursor._drafter, Counter()
        for name in ("propose", "observe", "observe_cost"):
            method = getattr(drafter, name)
            monkeypatch.setattr(
                drafter, name, lambda *a, n=name, m=method: calls.update([n]) or m(*a)
            )
        completion(CODE_PROMPT, max_tokens=12, seed=3)(llama)
        for token in range(300, 306):
            llama.eval([token])
        assert calls["propose"] >= calls["observe"] == calls["observe_cost"] > 0


@pytest.mark.skipif(
    "AVX512_VNNI = 1" not in llama_cpp.llama_print_system_info().decode(),
    reason="other kernels read more than 128 columns of Q5_K and Q6_K otherwise than one",
)
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_long_prompts_of_k_quants(tmp_path: Path, kind: str) -> None:
    """The parent reads a prompt's last token with all others, the child alone; also behind a state."""
    shape = replace(preset("tiny-qwen35"), v_heads=16)  # all rows in whole groups of 16
    write(tmp_path / "model.gguf", shape, kind)
    found = Pair(tmp_path / "model.gguf", n_ctx=1024)
    dice = random.Random(kind)
    try:
        for case in range(8):
            one = [dice.randrange(97, 123) for _ in range(dice.randint(150, 400))]
            answer = found.same(lambda llama, text=one: take(llama, 30, text), f"text {case}")
            cut = dice.randint(130, len(one))
            for begin in ([*one, *answer], one[:cut]):
                text = [*begin, *(dice.randrange(97, 123) for _ in range(dice.randint(1, 200)))]
                found.same(lambda llama, text=text: take(llama, 30, text), f"text {case}, behind")
    finally:
        found.close()


def write_lora(path: Path, model: Path) -> None:
    """A random adapter of rank 2 for every feed-forward output."""
    reader, dice = gguf.GGUFReader(model), np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    for tensor in reader.tensors:
        if tensor.name.startswith(("blk.0.ffn_down", "blk.1.ffn_down")):
            n_in, n_out = (int(n) for n in tensor.shape)
            for part, shape in (("a", (2, n_in)), ("b", (n_out, 2))):
                values = dice.normal(0, 0.5, shape).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.lora_{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_lora(model: Path, pair: Pair, tmp_path: Path) -> None:
    write_lora(tmp_path / "lora.gguf", model)
    found = Pair(model, lora_path=str(tmp_path / "lora.gguf"), n_ctx=256)
    try:
        run = completion(CODE_PROMPT, max_tokens=30, temperature=0)
        assert found.same(run) != pair.same(run), "the adapter has an effect"
    finally:
        found.close()


def test_what_is_logged(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with closing_llama(model, verbose=True) as llama:
        llama("x", max_tokens=3)
        llama("x", max_tokens=3)
    assert "llama" in capfd.readouterr().err
    with closing_llama(model) as llama:
        llama("x", max_tokens=3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rope_freq_base": 20000.0}, "rope_freq_base"),
        ({"draft_model": lambda ids, **_: ids[:0]}, "draft_model"),
    ],
    ids=["rope", "draft-model"],
)
def test_options_that_leave_no_room(model: Path, options: dict[str, Any], why: str) -> None:
    if why == "draft_model":  # the parent cannot take drafts back on a hybrid either
        with closing_llama(model, **options) as llama:
            assert why in str(llama.plain_because)
        return
    found = Pair(model, **options, n_ctx=256)
    try:
        assert why in str(found.child.plain_because)
        found.same(completion(CODE_PROMPT, max_tokens=10, seed=3))
        assert found.child.spec_stats.tokens_per_step == 1
        assert found.child.spec_stats.generated == 10
    finally:
        found.close()


def test_backends_that_verify_no_trees(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known only once the engine is open; the parent's context takes its place."""
    monkeypatch.setattr("pyspec.generate._why_plain", lambda info: "decoded plainly: a test")
    found = Pair(model, n_ctx=256)
    try:
        assert found.child.plain_because == "decoded plainly: a test"
        found.same(completion(CODE_PROMPT, max_tokens=10, seed=3))
        found.same(lambda llama: (llama.n_ctx(), llama._n_ctx, llama.n_batch, llama.scores.shape))
        state = found.child.save_state()
        assert found.parent.save_state().llama_state == state.llama_state
    finally:
        found.close()


def test_embeddings(model: Path) -> None:
    found = Pair(model, embedding=True, n_ctx=256, n_batch=64)
    try:
        assert "embedding" in str(found.child.plain_because)
        found.same(lambda llama: llama.embed(["one", "two"], normalize=True))
        found.same(lambda llama: llama.create_embedding("one"))
    finally:
        found.close()


def test_no_embeddings_without_the_option(pair: Pair) -> None:
    for llama in (pair.parent, pair.child):
        with pytest.raises(RuntimeError, match="embedding=True"):
            llama.embed("one")


def test_tokens_and_facts(pair: Pair) -> None:
    pair.same(lambda llama: llama.tokenize(b"def main(): pass", special=True))
    pair.same(lambda llama: llama.detokenize([65, 66, 300]))
    for fact in ("n_ctx", "n_embd", "n_vocab", "token_eos", "token_bos", "token_nl"):
        pair.same(lambda llama, fact=fact: getattr(llama, fact)(), fact)
    pair.same(lambda llama: llama.pooling_type())
    pair.same(lambda llama: (llama.metadata, llama.chat_format, llama.n_batch, llama._n_ctx))
    pair.same(lambda llama: llama.context_params.n_ctx)
    pair.same(lambda llama: (llama.scores.shape, llama.input_ids.shape))


def test_tools_without_a_choice(pair: Pair) -> None:
    """The parent's own handler of tools completes twice: the choice, then the arguments."""

    def run(llama: llama_cpp.Llama) -> Any:
        before, llama.chat_format = llama.chat_format, "chatml-function-calling"
        try:
            return chat("Look up.", tools=[TOOL], tool_choice="auto", max_tokens=30, seed=1)(llama)
        finally:
            llama.chat_format = before

    pair.same(run)


def test_pickles(model: Path) -> None:
    with closing_llama(model, draft="none", cache_bytes=1 << 20, n_ctx=256) as llama:
        state = llama.__getstate__()
        other = pickle.loads(pickle.dumps(llama))
        assert (other.draft, other.cache_bytes) == (llama.draft, 1 << 20)
        assert other.__getstate__() == state and other.plain_because is None
        other.close()


def test_errors_are_the_parents(pair: Pair, tmp_path: Path) -> None:
    def error_of(run: Callable[[llama_cpp.Llama], Any], llama: llama_cpp.Llama) -> Any:
        try:
            run(llama)
        except Exception as error:
            return type(error), str(error)[:40]

    for prompt in (CODE[1] * 100, ""):  # the model has no token to begin a text with
        pair.same(lambda llama, prompt=prompt: error_of(lambda it: it(prompt), llama))
    tokens = pair.child.tokenize((CODE[1] * 40).encode())[: pair.child.n_ctx() - 3]

    def run_over(llama: llama_cpp.Llama) -> Any:
        return error_of(lambda it: take(it, 9, tokens), llama)[0]

    pair.same(run_over)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF and no more")
    for path in (tmp_path / "missing.gguf", damaged):
        for kind in (llama_cpp.Llama, Llama):
            with pytest.raises(ValueError, match=str(path)):
                kind(str(path), verbose=False)


def test_drafters_that_do_not_fit(model: Path, synthetic: Synthetic) -> None:
    with pytest.raises(DraftError, match="no drafter is called 'nonsense'"):
        Llama(model, draft="nonsense")
    with pytest.raises(DraftError, match="MTP"):
        Llama(synthetic("tiny-qwen3next"), draft="mtp")


def test_outlines_runs_on_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # to compile its kernels takes longer than this
    pytest.importorskip("numba", reason="outlines masks the logits with it")
    outlines = pytest.importorskip("outlines")

    def run(llama: llama_cpp.Llama) -> Any:
        model = outlines.from_llamacpp(llama, chat_mode=False)
        one = model("x = ", outlines.types.Regex(r"[0-9]{3}(, [0-9]{2}){3}"), max_tokens=40, seed=1)
        chosen = outlines.Generator(model, list[int])("[1, 2", max_tokens=20, seed=2)
        return one, chosen, "".join(model.stream("def ", max_tokens=10, temperature=0))

    found = pair.same(run)
    assert len(found[0].split(", ")) == 4
