"""`Engine`: a model, a drafter and the one decode loop.

    with pyspec.Engine("model.gguf", draft="mtp") as engine:
        for piece in engine.generate("def main(", max_tokens=64, temperature=0):
            print(piece, end="", flush=True)

An engine serves one thread. It holds `n_slots` sequences; `generate` uses one of them, a server
drives several with `begin`, `prefill`, `step` and `end`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pyspec._libs import use_patched_libraries
from pyspec._version import __version__
from pyspec.config import DEFAULT_CTX, MAX_NODES, DraftConfig, EngineConfig, SamplingConfig
from pyspec.controller import Controller
from pyspec.cost import CostCurve, Tuning, curve_of, measure, settle_threads
from pyspec.decoder import Decoder, Emission
from pyspec.drafter import Drafter, PlainDecoding
from pyspec.errors import ArgumentError, ContextError, StateError, TemplateError
from pyspec.model_file import ModelFile, resolve_model
from pyspec.native import NativeEngine, NativeInfo
from pyspec.prefill import BLOCK, ChatPrompt, PrefillPlan, Segment
from pyspec.prefix_cache import PrefixCache, Slots, free_share
from pyspec.registry import AUTO, choose
from pyspec.sampling import resolve
from pyspec.sequence import FinishReason, Sequence
from pyspec.stats import Stats, StepClock
from pyspec.text import TextStream, split_incomplete
from pyspec.verifier import Verifier

if TYPE_CHECKING:
    from pyspec.chat import ChatTemplate

_log = logging.getLogger("pyspec")

Prompt = str | bytes | Many[int]
"""Text, bytes (which may end in the middle of a character), or token ids."""

_CACHE_TYPE_NAMES = ("cache_type_k", "cache_type_v", "offload_kqv")

Progress = Callable[[float], bool | None]
"""Called with the fraction done; returning False gives up."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What a generation produced.

    Attributes:
        tokens: The generated tokens, without an end-of-generation token.
        text: Their text, up to a stop string. Where the prompt ended in the middle of a character,
            it begins with that character.
        finish_reason: ``"stop"``, ``"length"`` or ``"aborted"``.
        stats: Counters and times.
        seed: The seed that was used.
        stopped_by: The stop string that ended it, if one did.
    """

    tokens: list[int]
    text: str
    finish_reason: str
    stats: Stats
    seed: int
    stopped_by: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The object that ``pyspec generate --json`` prints."""
        return {
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats.as_dict(),
        }


class Engine:
    """A model opened for decoding.

    Args:
        model: Path of a GGUF file, or ``"demo"`` for the model in the package.
        draft: A drafter's name, ``"auto"`` for what the file offers, or a whole `DraftConfig`.
        config: How to open the model; or give single fields of `EngineConfig` by name.
        progress: Called with the loaded fraction; returning False gives up.
        share: An engine whose loaded weights are used, and its number of threads unless either has
            one given; or the address of a loaded `llama_model`. It must stay open as long as this
            one.
        drafters: Kinds of drafter to use in place of those that `draft` names.
        min_nodes: Nodes that a verify pass must take, where that is more than the drafter needs.
        **options: Fields of `EngineConfig`, such as ``n_ctx=8192``.

    Raises:
        ModelError: The file is missing, damaged, or of an unknown architecture.
        DraftError: There is no such drafter, or the file lacks what it needs.
        ArgumentError: An option breaks its rule.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        draft: str | DraftConfig = "auto",
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        share: Engine | NativeEngine | int | None = None,
        drafters: Many[type[Drafter]] = (),
        min_nodes: int = 1,
        **options: Any,
    ) -> None:
        self.config = _config_of(config, options)
        self.draft = draft if isinstance(draft, DraftConfig) else DraftConfig(draft)
        self.file = ModelFile.read(resolve_model(model))
        drafters = list(drafters) or choose(self.draft, self.file)
        for drafter in drafters:
            self.draft = drafter.configured(self.file, self.draft)
        tree_nodes = max(drafter.max_nodes(self.draft) for drafter in drafters)
        self.max_nodes = max(min_nodes, tree_nodes)
        self._native_options: dict[str, Any] = {
            "n_ctx": context_of(self.config, self.file),
            "max_nodes": self.max_nodes,
            "mtp": any(drafter.uses_mtp for drafter in drafters),
            "draft_cache": (self.draft.cache_type_k, self.draft.cache_type_v),
        }
        if share is None:
            self.native = NativeEngine.open(
                self.file.path, self.config, progress=progress, **self._native_options
            )
        else:
            share = share.native if isinstance(share, Engine) else share
            self.native = NativeEngine.attach(share, self.config, **self._native_options)
        self.plain_because = _why_plain(self.native.info)
        if self.plain_because:
            if drafters != [PlainDecoding]:
                _log.warning("%s: %s", self.file.path.name, self.plain_because)
            drafters = [PlainDecoding]
        self.native.path = self.file.path
        try:
            tuning = Tuning.load(self.file, self.config)
            if self.config.n_threads == 0:
                like = share if isinstance(share, NativeEngine) else None
                settle_threads(self.native, tuning, like)
            self.drafter = self._open_drafter(drafters, tree_nodes, tuning)
        except BaseException:
            self.native.close()
            raise
        self._decoder = Decoder(self.drafter, Verifier(self.native, self.max_nodes))
        self.cache = self._open_cache()
        self._slots = Slots(self.native, self.config.n_slots, self.drafter.forget, self.cache)
        self._pieces: dict[int, bytes] = {}
        self._whole_pieces: dict[int, bytes] = {}

    def _open_drafter(
        self, drafters: list[type[Drafter]], max_nodes: int, tuning: Tuning | None
    ) -> Drafter:
        """The drafter itself where limits are fixed, else a controller over all of them."""
        sources = [drafter(self.native, self.draft) for drafter in drafters]
        if len(sources) == 1 and (self.draft.fixed or drafters == [PlainDecoding]):
            return sources[0]
        curve = (
            CostCurve(tuning.points)
            if tuning
            else curve_of(
                measure(
                    self.native,
                    max_nodes,
                    rounds=10,
                    seconds=0.3,
                    brief=True,
                    slots=self.config.n_slots,
                )
            )
        )
        return Controller(sources, curve, max_nodes)

    # ---- one request at a time ----

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Many[str] = (),
        ignore_end: bool = False,
        sampling: SamplingConfig | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Generation:
        """Starts to continue `prompt`; iterate the result for text, or take its `result()`.

        An empty prompt starts from the model's beginning-of-text token, or its end-of-text token
        where it has no other.

        Args:
            prompt: Text, bytes or token ids.
            max_tokens: Most tokens to generate; None for as many as the context holds.
            stop: Strings that end generation; not part of the text.
            ignore_end: Go on after end-of-generation tokens.
            sampling: How to draw; or give single fields of `SamplingConfig` by name.
            progress: Called with the fraction of the prompt that is processed.
            **options: Fields of `SamplingConfig`, such as ``temperature=0``.

        Raises:
            ContextError: The prompt does not fit into the context.
            SamplerError: The grammar or schema does not parse.
        """
        request = request_of(
            max_tokens=max_tokens, stop=stop, ignore_end=ignore_end, sampling=sampling, **options
        )
        return Generation(self, self.begin(prompt, **request), progress)

    def complete(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """`generate`, waiting for the end."""
        return self.generate(prompt, **options).result()

    # ---- several requests at once ----

    def begin(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Many[str] = (),
        ignore_end: bool = False,
        sampling: SamplingConfig | None = None,
        special: bool = True,
        segments: Many[Segment] | None = None,
        chat: ChatPrompt | None = None,
        draft: str | None = None,
        draft_nodes: int | None = None,
        top_logprobs: int | None = None,
    ) -> Sequence:
        """Takes a free slot for a request; `prefill` and `step` it, and give it back with `end`.

        With a prefix cache, the longest beginning of the prompt that is known is not read again
        (`Sequence.prefilled`); the text is the same to the byte.

        Args:
            special: Read special tokens in a text prompt as such, as llama.cpp does.
            segments: Parts of the prompt at whose ends later prompts may part from this one; None
                takes the messages of a rendered chat.
            chat: The rendered chat that the tokens of `prompt` are of.
            draft: ``"none"`` decodes this request plainly; None drafts as the engine does.
            draft_nodes: Most nodes of this request's trees, the root included; the engine's own
                limit holds beside it.
            top_logprobs: Record every token's log-probability and so many runners-up in
                `Sequence.logprobs`.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ArgumentError(f"max_tokens is {max_tokens}, must be at least 1")
        self._check_draft(draft, draft_nodes)
        tokens, pending = self._tokens_of(prompt, special)
        if len(tokens) > self.n_ctx:
            raise ContextError(f"prompt has {len(tokens)} tokens, context holds {self.n_ctx}")
        if not self._slots:
            raise StateError(f"all {self.config.n_slots} slots are taken, end a sequence first")
        resolved = resolve(sampling or SamplingConfig())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        text = TextStream(self.piece, stops, pending)
        sampler = self.native.sampler(resolved)
        sampler.accept_prompt(tokens)
        if segments is None:
            chat = prompt if isinstance(prompt, ChatPrompt) else chat
            segments = self.segments(chat, tokens) if chat is not None else ()
        plan = PrefillPlan.of(len(tokens) - 1, segments, self._block)
        slot, held = self._slots.take(tokens, plan)
        return Sequence(
            slot=slot,
            tokens=tokens,
            prompt_length=len(tokens),
            sampler=sampler,
            seed=resolved.seed or 0,
            text=text,
            max_tokens=self.n_ctx if max_tokens is None else max_tokens,
            room=self.n_ctx,
            is_end=None if ignore_end else self.native.is_eog,
            stats=Stats(
                self.drafter.name,
                prompt_tokens=len(tokens),
                cached_tokens=held,
                rollback_bytes=self.native.info.bytes_rollback,
            ),
            draft=None if draft == self.drafter.name else draft,
            draft_nodes=draft_nodes,
            top_logprobs=top_logprobs,
            prefilled=held,
            plan=plan,
        )

    def prefill(self, sequence: Sequence, limit: int | None = None) -> bool:
        """Processes the next passes of a prompt; True when all of it is in the target.

        The last prompt token is left out: it is the root of the first tree.

        Args:
            sequence: A sequence whose prompt is not read yet.
            limit: Tokens after which it is enough; None for the engine's batch. A pass is never
                cut, since that could change how it rounds.
        """
        plan, began = sequence.plan, time.perf_counter()
        if not sequence.begun:
            self._begin_reading(sequence)
        enough = sequence.prefilled + (limit or self.config.n_batch)
        while sequence.prefilled < min(plan.length, enough):
            end = plan.next_end(sequence.prefilled)
            with self._intact([sequence]):
                self.native.prefill(sequence.slot, sequence.tokens[sequence.prefilled : end])
            sequence.prefilled = end
            if end in plan.stops:
                self._slots.keep(sequence.slot, sequence.tokens, plan, end)
        sequence.stats.prompt_ms += 1e3 * (time.perf_counter() - began)
        return sequence.prefilled == plan.length

    def step(self, sequences: Many[Sequence]) -> list[Emission]:
        """One speculative step for every sequence at once; see `pyspec.decoder`."""
        with self._intact(sequences):
            return self._decoder.step(sequences)

    @property
    def clock(self) -> StepClock:
        """Wall time of the last step by stage."""
        return self._decoder.clock

    def end(self, sequence: Sequence) -> None:
        """Gives a sequence's slot back, whatever became of it."""
        if sequence.finish_reason is None:
            sequence.finish_reason = FinishReason.ABORTED
        good = sequence.intact and sequence.finish_reason is not FinishReason.ERROR
        try:
            if not self.native.closed:
                self.drafter.forget(sequence.slot)
        finally:
            if not self.native.closed:
                plan = sequence.plan if good else None
                self._slots.give_back(sequence.slot, sequence.tokens, plan)
            sequence.sampler.close()

    def _begin_reading(self, sequence: Sequence) -> None:
        tokens, plan = sequence.tokens, sequence.plan
        cached = self._slots.catch_up(sequence.slot, tokens, plan, sequence.prefilled)
        sequence.begun = True
        sequence.prefilled = sequence.stats.cached_tokens = cached

    @contextmanager
    def _intact(self, sequences: Many[Sequence]) -> Iterator[None]:
        """Marks sequences whose state a failed call may have left half written."""
        try:
            yield
        except BaseException:
            for sequence in sequences:
                sequence.intact = False
            raise

    # ---- prefixes ----

    @cached_property
    def _block(self) -> int:
        """Tokens of a whole pass."""
        return min(self.config.n_batch, self.config.n_ubatch, BLOCK)

    def _open_cache(self) -> PrefixCache | None:
        config = self.config
        if config.cache_ram == 0 and config.cache_dir is None:
            return None
        limit = free_share() if config.cache_ram is None else config.cache_ram
        store = None
        if config.cache_dir is not None:
            from pyspec.prefix_store import PrefixStore, model_digest

            directory = Path(config.cache_dir)
            identity = self._identity(model_digest(self.file.path, directory))
            store = PrefixStore(directory, identity, config.cache_disk)
        return PrefixCache(limit, store)

    def _identity(self, model: str) -> dict[str, Any]:
        """All that the bytes of a saved sequence depend on."""
        names = ("n_slots", "n_batch", "n_ubatch", "n_gpu_layers", "flash_attn")
        llama_cpp = use_patched_libraries()
        return {
            "model": model,
            "pyspec": __version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "mtp": self._native_options["mtp"],
            "drafter": self.draft.model,
            "draft_cache": self._native_options["draft_cache"],
            **{name: getattr(self.config, name) for name in (*names, *_CACHE_TYPE_NAMES)},
        }

    def segments(self, prompt: ChatPrompt, tokens: Many[int]) -> list[Segment]:
        """Where in `tokens`, those of `prompt`, its messages end, as far as tokens end there.

        Asks for the text of every token, so the thread that decodes should call it.
        """
        if self.cache is None:
            return []
        pieces = [self.whole_piece(token) for token in tokens]
        text = prompt.encode()
        if b"".join(pieces[1:]) == text:  # the tokenizer has put something before the text
            pieces[0] = b""
        elif b"".join(pieces) != text:
            return []
        lengths = {size: n for n, size in enumerate(accumulate(map(len, pieces)), 1)}
        return [
            Segment(lengths[end], generated)
            for end, generated in prompt.message_ends
            if end in lengths
        ]

    # ---- text ----

    @property
    def n_ctx(self) -> int:
        """Tokens that a sequence may hold."""
        return self.native.info.n_ctx

    def tokenize(self, text: str | bytes, *, special: bool = True) -> list[int]:
        """Token ids of `text`, with what the model puts before every text."""
        return self._tokens_of(text, special)[0]

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self.native.token_to_piece(token, special=False)
        return found

    def whole_piece(self, token: int) -> bytes:
        """The bytes of a token, of a special one its name."""
        found = self._whole_pieces.get(token)
        if found is None:
            found = self.native.token_to_piece(token, special=True)
            self._whole_pieces[token] = found
        return found

    def detokenize(self, tokens: Many[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            TemplateError: It has none, or one that does not parse.
        """
        source = self.native.chat_template
        if not source:
            raise TemplateError(f"{self.file.path} has no chat template")
        info = self.native.info
        bos, eos = (
            self.native.token_to_piece(token, special=True).decode("utf-8", "replace")
            if token >= 0
            else ""
            for token in (info.token_bos, info.token_eos)
        )
        from pyspec.chat import ChatTemplate  # Jinja only where chats are

        return ChatTemplate(source, bos, eos)

    def _tokens_of(self, prompt: Prompt, special: bool) -> tuple[list[int], bytes]:
        """Token ids of a prompt, and the bytes of an incomplete character at its end."""
        if not isinstance(prompt, str | bytes):
            tokens = [self._checked(token) for token in prompt]
            pending = split_incomplete(b"".join(map(self.piece, tokens[-4:])))[1]
        else:
            data = prompt.encode() if isinstance(prompt, str) else prompt
            whole, pending = split_incomplete(data)
            tokens = list(self.native.tokenize(whole, add_special=True, parse_special=special))
            tokens += [self._byte_tokens[byte] for byte in pending]
        return tokens or [self._start_token()], pending

    def _check_draft(self, draft: str | None, nodes: int | None) -> None:
        able = (PlainDecoding.name, self.drafter.name, *self.drafter.names, AUTO)
        if draft is not None and draft not in able:
            raise ArgumentError(
                f"draft is {draft!r}, must be one of {', '.join(dict.fromkeys(able))}: "
                f"the engine drafts with {self.drafter.name}"
            )
        if nodes is not None and not 1 <= nodes <= MAX_NODES:
            raise ArgumentError(f"draft_nodes is {nodes}, must be 1 to {MAX_NODES}")

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.native.info.n_vocab:
            raise ArgumentError(
                f"prompt has token {token}, the vocabulary has {self.native.info.n_vocab} tokens"
            )
        return int(token)

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """The token of every single byte, for characters that a prompt leaves incomplete."""
        vocabulary = range(self.native.info.n_vocab)
        pieces = ((self.native.token_to_piece(token, special=False), token) for token in vocabulary)
        return {piece[0]: token for piece, token in pieces if len(piece) == 1}

    def _start_token(self) -> int:
        info = self.native.info
        for token in (info.token_bos, info.token_eos, info.token_eot):
            if token >= 0:
                return token
        raise ArgumentError("prompt is empty, and the model has no token to start from")

    # ---- life ----

    def abort(self) -> None:
        """Ends the running native call with `AbortedError`; may be called from any thread."""
        self.native.abort()

    def close(self) -> None:
        """Frees the model. Safe to call twice."""
        if not self.native.closed:
            self._slots.close()
        self.drafter.close()
        self.native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Generation(Iterator[str]):
    """A running generation: iterate it for text as it appears, ask `result()` for everything.

    Dropping it, or `close()`, ends it and frees its slot.
    """

    def __init__(
        self, engine: Engine, sequence: Sequence, progress: Progress | None = None
    ) -> None:
        self._engine = engine
        self._sequence = sequence
        self._progress = progress
        self._open = True

    def __next__(self) -> str:
        if not self._open:
            raise StopIteration
        try:
            self._prefill()
            while self._sequence.finish_reason is None:
                emissions = self._engine.step([self._sequence])
                if text := "".join(emission.text for emission in emissions):
                    return text
        except BaseException:
            self.close()
            raise
        self.close()
        if self._sequence.error is not None:
            raise self._sequence.error
        raise StopIteration

    def _prefill(self) -> None:
        sequence = self._sequence
        while sequence.prefilled < sequence.prompt_length - 1:
            self._engine.prefill(sequence)
            done = sequence.prefilled / (sequence.prompt_length - 1)
            if self._progress is not None and self._progress(done) is False:
                sequence.finish_reason = FinishReason.ABORTED
                return

    def close(self) -> None:
        """Ends the generation; what it has so far stays in `partial()`."""
        if self._open:
            self._open = False
            self._engine.end(self._sequence)

    def __del__(self) -> None:
        self.close()

    def result(self) -> GenerationResult:
        """Runs to the end and returns everything."""
        for _ in self:
            pass
        return self.partial()

    def partial(self) -> GenerationResult:
        """What there is so far."""
        return result_of(self._sequence)


def result_of(sequence: Sequence) -> GenerationResult:
    """What a sequence has produced so far."""
    return GenerationResult(
        tokens=sequence.output,
        text=sequence.text.text,
        finish_reason=str(sequence.finish_reason or FinishReason.ABORTED),
        stats=sequence.stats,
        seed=sequence.seed,
        stopped_by=sequence.text.stopped_by,
    )


def request_of(
    *,
    max_tokens: int | None = None,
    stop: str | Many[str] = (),
    ignore_end: bool = False,
    sampling: SamplingConfig | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of `Engine.generate` as those of `Engine.begin`.

    Raises:
        ArgumentError: An option of `SamplingConfig` breaks its rule, or is none.
    """
    return {
        "max_tokens": max_tokens,
        "stop": stop,
        "ignore_end": ignore_end,
        "sampling": _sampling_of(sampling, options),
    }


def _why_plain(info: NativeInfo) -> str | None:
    """Why drafts cannot be verified in one pass; recurrent layers need trees and a tape for it."""
    if info.tree or info.n_layer_recurrent == 0:
        return None
    return (
        f"decoded plainly: llama.cpp verifies no draft trees for the recurrent layers of {info.arch}"
        " on this backend"
    )


def _config_of(config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    if config is not None and options:
        raise ArgumentError(
            f"config is given, and {', '.join(options)} by name: must be one of the two"
        )
    _check_names(EngineConfig, options)
    return config or EngineConfig(**options)


def _sampling_of(sampling: SamplingConfig | None, options: dict[str, Any]) -> SamplingConfig:
    if sampling is not None and options:
        raise ArgumentError(
            f"sampling is given, and {', '.join(options)} by name: must be one of the two"
        )
    _check_names(SamplingConfig, options)
    return sampling or SamplingConfig(**options)


def context_of(config: EngineConfig, file: ModelFile) -> int:
    """Tokens that a sequence holds: the option, or what the model was trained for."""
    trained = int(file.get("context_length", 0)) or DEFAULT_CTX
    return config.n_ctx or (trained if config.n_ctx == 0 else min(DEFAULT_CTX, trained))


def _check_names(kind: type, options: dict[str, Any]) -> None:
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    for name in options:
        if name not in known:
            raise ArgumentError(f"no option is called {name!r}, there are: {', '.join(known)}")
