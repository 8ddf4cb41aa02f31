"""`Llama`: a `llama_cpp.Llama` that speculates. Existing code changes one import.

    from pyspec import Llama

    llm = Llama("model.gguf", n_ctx=4096)
    print(llm("def main(", max_tokens=64, temperature=0)["choices"][0]["text"])
    print(llm.spec_stats.tokens_per_step)

Text, stops, chat formats, log-probabilities and samplers are the parent's own code. What changes is
where tokens come from: a `Cursor` reads several of them in one pass of the model, and the parent's
sampler draws at each, so the text is the parent's, for greedy decoding and for every seed.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

import numpy as np

from pyspec._libs import use_patched_libraries
from pyspec.config import DraftConfig, EngineConfig
from pyspec.cursor import Cursor
from pyspec.errors import ArgumentError, ContextError, ModelError, PyspecError, StateError
from pyspec.generate import Engine
from pyspec.model_file import ModelFile, resolve_model
from pyspec.native.engine import CACHE_TYPES
from pyspec.registry import choose
from pyspec.stats import Stats

use_patched_libraries()

import llama_cpp  # noqa: E402 - on the patched libraries
from llama_cpp import _internals  # noqa: E402

_log = logging.getLogger("pyspec")

CACHE_BYTES = 256 << 20
"""Most bytes that states kept for going back to an earlier text take, unless told otherwise."""

F = TypeVar("F", bound=Callable[..., Any])

UNLIMITED = 1 << 30
"""Tokens that a generation without a limit may ask for."""

_WIDEST_PASS = 64
_CACHE_NAMES = {number: name for name, number in CACHE_TYPES.items()}
_INIT = inspect.signature(llama_cpp.Llama.__init__)
_GENERATE = inspect.signature(llama_cpp.Llama.generate)
#: What the speculative engine cannot be told; another value than the default takes the parent's way.
_UNSUPPORTED = [
    "vocab_only",
    "rope_scaling_type",
    "pooling_type",
    "attention_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "embedding",
    "draft_model",
]


def _like(parent: F) -> Callable[[Callable[..., Any]], F]:
    """Gives a method the signature and the documentation of the parent's."""
    return functools.wraps(parent)  # type: ignore[return-value]


class Llama(llama_cpp.Llama):  # type: ignore[misc]
    """A `llama_cpp.Llama` that drafts ahead.

    Args:
        model_path: Path of a GGUF file, or ``"demo"`` for the model in the package.
        draft: A drafter's name, ``"auto"`` for what the file offers, ``"none"`` to draft nothing,
            or a whole `DraftConfig`.
        cache_bytes: Most bytes of saved states. A hybrid model cannot forget its last tokens, so
            without one, a text that parts from the last is read anew from its beginning.
        **options: All that `llama_cpp.Llama` takes.

    Some options leave no room for speculation (`plain_because` says which); everything works then
    as in the parent, at its speed.

    Raises:
        ValueError: The file does not exist or is no model.
        DraftError: There is no such drafter, or the file lacks what it needs.
        ArgumentError: An option of `draft` breaks its rule.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        draft: str | DraftConfig = "auto",
        cache_bytes: int = CACHE_BYTES,
        **options: Any,
    ) -> None:
        self.draft = draft if isinstance(draft, DraftConfig) else DraftConfig(draft)
        self.cache_bytes = cache_bytes
        self.plain_because: str | None = None
        self._cursor: Cursor | None = None
        self._stats = Stats()
        self._max_tokens: int | None = None  # of the completion that calls `generate`
        if cache_bytes < 0:
            raise ArgumentError(f"cache_bytes is {cache_bytes}, must be 0 or more")
        path = os.fspath(resolve_model(model_path))
        given = _bind(_INIT, self, path, **options)
        self.plain_because = _why_parent(given)
        self._load_mtp = False
        if self.plain_because or not os.path.exists(path):
            super().__init__(path, **options)
        else:
            self._open(path, given, options)
        if self.plain_because:
            level = logging.INFO if self.draft.name in ("auto", "none") else logging.WARNING
            _log.log(level, "%s: %s", path, self.plain_because)

    def _open(self, path: str, given: dict[str, Any], options: dict[str, Any]) -> None:
        """Loads the model, with the engine's context in the place of the parent's."""
        kinds = choose(self.draft, _read_header(path))
        self._load_mtp = any(kind.uses_mtp for kind in kinds)
        # The parent's own context is opened as small as it gets, and closed at once.
        super().__init__(path, **{**options, "n_ctx": 1, "n_batch": 1, "n_ubatch": 1})
        self._ctx.close()
        n_ctx = given["n_ctx"] or self._model.n_ctx_train()
        self.n_batch = min(n_ctx, given["n_batch"])
        self.context_params.n_ctx = n_ctx
        self.context_params.n_batch = self.n_batch
        self.context_params.n_ubatch = min(self.n_batch, given["n_ubatch"])
        engine = self._open_engine(path, n_ctx)
        self._n_ctx = engine.n_ctx if engine else n_ctx
        self.input_ids = np.ndarray((self._n_ctx,), dtype=np.intc)
        rows = self._n_ctx if self._logits_all else given["n_batch"]
        self.scores = np.ndarray((rows, self._n_vocab), dtype=np.single)
        if engine is not None:
            scores = self.scores if self._logits_all else None
            self._cursor = Cursor(engine, self.cache_bytes, scores)
            self._ctx = _EngineContext(engine, self._cursor, self._model, self.context_params)
        else:
            self._open_parents_context()
        self._stack.callback(self._ctx.close)
        self._adapt_lora()

    def _open_engine(self, path: str, n_ctx: int) -> Engine | None:
        params = self.context_params
        config = EngineConfig(
            n_ctx=-(-n_ctx // 256) * 256,  # as llama.cpp rounds it for the parent
            n_batch=params.n_batch,
            n_ubatch=params.n_ubatch,
            n_threads=self.n_threads,
            flash_attn=bool(params.flash_attn_type),
            cache_type_k=_CACHE_NAMES[params.type_k],
            cache_type_v=_CACHE_NAMES[params.type_v],
            offload_kqv=params.offload_kqv,
            verbose=self.verbose,
        )
        width = _WIDEST_PASS if self._logits_all else 1
        try:
            engine = Engine(path, self.draft, config, share=self._model.model, min_nodes=width)
        except ModelError as error:  # nothing that generates, such as an encoder
            self.plain_because = str(error)
            return None
        if engine.plain_because:
            self.plain_because = engine.plain_because
            engine.close()
            return None
        return engine

    def _open_parents_context(self) -> None:
        self._ctx = _internals.LlamaContext(
            model=self._model, params=self.context_params, verbose=self.verbose
        )
        self._batch = self._stack.enter_context(
            closing(
                _internals.LlamaBatch(
                    n_tokens=self.n_batch,
                    embd=0,
                    n_seq_max=self.context_params.n_ctx,
                    verbose=self.verbose,
                )
            )
        )
        self._n_ctx = self.n_ctx()

    def _adapt_lora(self) -> None:
        if self._lora_adapter is None:
            return
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self._lora_adapter)  # type: ignore[misc]
        scales = (ctypes.c_float * 1)(self.lora_scale)
        if llama_cpp.llama_set_adapters_lora(self._ctx.ctx, adapters, 1, scales):
            raise RuntimeError(f"Failed to set LoRA adapter from lora path: {self.lora_path}")

    @property
    def model_params(self) -> Any:
        """The parent's `llama_model_params`; set by it just before the model is loaded."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.load_mtp = self._load_mtp
        self._model_params = params

    # ---- what was gained ----

    @property
    def spec_stats(self) -> Stats:
        """Counters and times of the last generation, up to now if it is running."""
        return self._stats

    # ---- tokens ----

    @_like(llama_cpp.Llama.generate)
    def generate(self, *args: Any, **options: Any) -> Generator[int, Sequence[int] | None, None]:
        remaining, self._max_tokens = self._max_tokens, None
        call = _bind(_GENERATE, self, *args, **options)
        tokens = call["tokens"] = list(call["tokens"])
        self._stats = Stats("none", prompt_tokens=len(tokens))
        if self._cursor is None:
            yield from self._count(super().generate(**call))
            return
        reset, stopping_criteria = call.pop("reset"), call.pop("stopping_criteria")
        del call["tokens"]
        self._stats.draft = self._cursor.stats.draft
        self._cursor.begin(self._stats)
        self._sampler = self._init_sampler(**call)
        self._read(tokens if reset else [*self._input_ids.tolist(), *tokens], remaining)
        while True:
            began = time.perf_counter()
            token = self.sample()
            self._add_sampling_time(1e3 * (time.perf_counter() - began))
            if stopping_criteria is not None and stopping_criteria(
                self._input_ids, self._scores[0, :]
            ):
                return
            self._stats.generated += not self._is_end(token)
            drafts = yield token
            remaining = remaining and max(remaining - 1, 1)
            if drafts or not self._step(token):
                self._feed([token], remaining or UNLIMITED, drafts)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens after those that are there; `sample` then draws what follows."""
        if self._cursor is None:
            super().eval(tokens)
        elif len(tokens):
            self._feed(list(tokens))

    @_like(llama_cpp.Llama.sample)
    def sample(self, *args: Any, idx: int | None = None, **options: Any) -> int:
        if self._cursor is not None and self.n_tokens > 0:
            # The parent turns an index into a row of the last pass: idx - n_tokens.
            idx = self.n_tokens + self._row_of(idx)
        return int(super().sample(*args, idx=idx, **options))  # type: ignore[misc]

    def reset(self) -> None:
        """Starts from an empty text."""
        if self._cursor is None:
            super().reset()
        self.n_tokens = 0
        self._requires_eval = True

    def _create_completion(self, *args: Any, max_tokens: int | None = 16, **options: Any) -> Any:
        self._max_tokens = max_tokens if max_tokens and max_tokens > 0 else None
        try:
            yield from super()._create_completion(  # type: ignore[misc]
                *args, max_tokens=max_tokens, **options
            )
        finally:
            self._max_tokens = None

    @property
    def _at(self) -> Cursor:
        assert self._cursor is not None, "the parent's own way is taken"
        return self._cursor

    def _read(self, text: list[int], remaining: int | None = 1) -> None:
        """Makes `text` what was evaluated."""
        self.n_tokens = 0
        if text:
            with _parents_errors():
                self._at.read(text, remaining=remaining or UNLIMITED)
            self._note(text)

    def _feed(
        self, tokens: list[int], remaining: int = 1, drafts: Sequence[int] | None = None
    ) -> None:
        """Evaluates `tokens` after the `n_tokens` that are there."""
        if self._at.length != self.n_tokens:  # cut or replaced from outside
            self._read([*self._input_ids.tolist(), *tokens], remaining)
            return
        with _parents_errors():
            self._at.extend(tokens, remaining=remaining, drafts=drafts)
        self._note(tokens)

    def _step(self, token: int) -> bool:
        """Goes on with `token` if it was drafted."""
        if self._at.length != self.n_tokens or not self._at.step(token):
            return False
        self._note([token])
        return True

    def _note(self, tokens: list[int]) -> None:
        end = self.n_tokens + len(tokens)
        self.input_ids[self.n_tokens : end] = tokens
        self.n_tokens = end
        self._requires_eval = False

    def _row_of(self, position: int | None) -> int:
        """The row of the logits after the token at `position`, by default the last."""
        cursor = self._at
        if cursor.length != self.n_tokens or cursor.row is None:
            self._read(self._input_ids.tolist())
        row = cursor.row if position is None else cursor.row_of(position)
        if row is None:
            raise ValueError(f"idx is {position}, the last evaluation kept no logits for it")
        return row

    def _is_end(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, token))

    def _add_sampling_time(self, ms: float) -> None:
        self._stats.ms["sample"] += ms
        self._stats.decode_ms += ms

    def _count(self, tokens: Iterator[int]) -> Iterator[int]:
        """Counts what the parent generates: a step a token."""
        for token in tokens:
            self._stats.steps += 1
            self._stats.generated += not self._is_end(token)
            yield token

    # ---- states ----

    def save_state(self) -> llama_cpp.LlamaState:
        """What was evaluated, to be loaded by this or an equal `Llama`."""
        if self._cursor is None:
            return super().save_state()
        if self._cursor.length != self.n_tokens:
            self._read(self._input_ids.tolist())
        state = self._cursor.save() if self.n_tokens else b""
        rows = self.n_tokens if self._logits_all else 0
        return llama_cpp.LlamaState(
            scores=self.scores[:rows].copy(),
            input_ids=self.input_ids.copy(),
            n_tokens=self.n_tokens,
            llama_state=state,
            llama_state_size=len(state),
            seed=self._seed,
        )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Goes back to what `save_state` returned.

        Raises:
            RuntimeError: It is no state of such a `Llama`.
        """
        if self._cursor is None:
            super().load_state(state)
            return
        self.reset()
        if state.n_tokens:
            # The last token is read again: the logits after it are no part of a state.
            text = state.input_ids[: state.n_tokens - 1].tolist()
            try:
                self._cursor.load(text, state.llama_state)
            except PyspecError as error:
                raise RuntimeError(f"Failed to set llama state data: {error}") from error
        self.scores[: len(state.scores)] = state.scores
        self.input_ids[: len(state.input_ids)] = state.input_ids
        self.n_tokens = state.n_tokens
        self._seed = state.seed

    # ---- life ----

    def close(self) -> None:
        """Frees the model."""
        if hasattr(self, "_stack"):
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "draft": self.draft, "cache_bytes": self.cache_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _EngineContext(_internals.LlamaContext):  # type: ignore[misc]
    """The target context of an engine, where the parent keeps its own."""

    def __init__(self, engine: Engine, cursor: Cursor, model: Any, params: Any) -> None:
        self.model, self.params, self.verbose, self.sampler = model, params, False, None
        self.ctx = engine.native.context_address
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self._engine, self._cursor = engine, cursor
        self._exit_stack = ExitStack()
        self._exit_stack.callback(self._release)
        model._exit_stack.callback(self.close)  # before the model

    def _release(self) -> None:
        self._engine.close()
        self.ctx = None

    def kv_cache_clear(self) -> None:
        self._cursor.clear()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """True for a cut at the end: `Llama.n_tokens` alone says how long the text is."""
        return p1 < 0

    def decode(self, batch: Any) -> None:
        raise StateError("the context belongs to the speculative engine: call Llama.eval instead")

    encode = decode


def _bind(signature: inspect.Signature, *args: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a call by name, defaults included, without ``self``."""
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    named = dict(bound.arguments)
    del named["self"]
    return named


def _why_parent(options: dict[str, Any]) -> str | None:
    """Why the parent's own way must be taken with these options."""
    plain = llama_cpp.llama_context_default_params()
    for name in _UNSUPPORTED:
        value = options[name]
        if value not in (_INIT.parameters[name].default, getattr(plain, name, None)):
            return f"decoded plainly: the option {name} leaves no room for speculation"
    for name in ("type_k", "type_v"):
        if options[name] is not None and options[name] not in _CACHE_NAMES:
            return f"decoded plainly: speculation knows no cache of {name} {options[name]}"
    if hasattr(options["chat_handler"], "mtmd_ctx"):
        return "decoded plainly: images are evaluated by their chat handler"
    return None


def _read_header(path: str) -> ModelFile:
    try:
        return ModelFile.read(path)
    except ModelError as error:  # what the parent raises for a file that is no model
        raise ValueError(f"Failed to load model from file: {error}") from None


@contextmanager
def _parents_errors() -> Iterator[None]:
    """What the parent raises when the context is full."""
    try:
        yield
    except ContextError as error:
        raise RuntimeError(f"llama_decode returned 1: {error}") from error
