"""`NativeEngine`: a model with its sequences, as libpyspec holds it."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyspec.config import MAX_NODES, SPLIT_MODES, EngineConfig, SamplingConfig
from pyspec.errors import ArgumentError, TreeError
from pyspec.native.binding import Handle, Progress, check, ffi, last_failure, lib, text
from pyspec.native.pilot import Pilot
from pyspec.native.sampler import NativeSampler
from pyspec.tree import DraftTree

#: ggml_type of each name that `EngineConfig` allows for a cache.
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}

CacheTypes = tuple[str | None, str | None]
"""Of keys and of values, by name."""

SlotTree = tuple[int, Sequence[int] | NDArray[np.int32], Sequence[int] | NDArray[np.int32]]
"""Slot, tokens [n] and parents [n] of a draft tree."""


@dataclass(frozen=True, slots=True)
class NativeInfo:
    """Facts about an open engine; the comments of `pyspec_info` in `pyspec.h` say what each is."""

    arch: str
    desc: str
    n_params: int
    size_bytes: int
    n_vocab: int
    n_ctx_train: int
    n_ctx: int
    n_embd: int
    n_layer: int
    n_layer_recurrent: int
    n_layer_mtp: int
    token_bos: int
    token_eos: int
    token_eot: int
    add_bos: bool
    is_recurrent: bool
    is_hybrid: bool
    n_threads: int
    tree: bool
    bytes_kv: int
    bytes_state: int
    bytes_rollback: int
    bytes_mtp: int
    bytes_compute: int


@dataclass(frozen=True, slots=True)
class NativeTimings:
    """Microseconds by stage and counts, since the last reset."""

    prefill: int
    draft: int
    verify: int
    sample: int
    commit: int
    n_prefill_tokens: int
    n_verify: int
    n_verify_nodes: int
    n_draft_passes: int
    n_graph_reused: int


class MtpDrafts(NamedTuple):
    """What `NativeEngine.mtp_draft` returns for n sequences.

    Attributes:
        levels: int32 [n]; levels that were drafted.
        parents: int32 [n, depth, width]; the candidate of the level before (its row times top_k,
            plus its rank) that a row expands; -1 is the root, -2 an unused row.
        tokens: int32 [n, depth, width, top_k]; candidates, best first.
        log_probs: float32 like `tokens`.
    """

    levels: NDArray[np.int32]
    parents: NDArray[np.int32]
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DflashInfo:
    """Facts about an open DFlash drafter; see `pyspec_dflash_info` in `pyspec.h`."""

    block_size: int
    max_depth: int
    selector: int
    markov: bool
    confidence: bool
    bytes: int


class DflashDrafts(NamedTuple):
    """What `NativeEngine.dflash_draft` returns for n sequences.

    Attributes:
        tokens: int32 [n, depth, top_k]; candidates of every position.
        log_probs: float32 like `tokens`.
        pairs: float32 [n, depth, top_k, top_k]; score of candidate c behind candidate p of the
            position before at [p, c]; None when not asked for.
        confidence: float32 [n, depth]; None when not asked for.
    """

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    pairs: NDArray[np.float32] | None
    confidence: NDArray[np.float32] | None


class CoastStep(NamedTuple):
    """A step of `NativeEngine.coast`.

    Attributes:
        ms: Wall time.
        path: Accepted nodes, the root first.
        drawn: The token drawn behind each of them.
        tree: The tree; None for a root alone.
    """

    ms: float
    path: list[int]
    drawn: list[int]
    tree: DraftTree | None


class CoastSteps(NamedTuple):
    """What `NativeEngine.coast` returns.

    Attributes:
        steps: The steps.
        sample_ms: What drawing took in all of them.
        commit_ms: And committing.
    """

    steps: list[CoastStep]
    sample_ms: float
    commit_ms: float


_COAST_STEPS = 32


def _new_coast_steps(max_nodes: int) -> tuple[Any, dict[str, Any]]:
    """A `pyspec_coast_steps *` and the arrays that it points to."""
    arrays = {name: ffi.new("int32_t[]", _COAST_STEPS) for name in ("nodes", "accepted", "us")}
    for name in ("tokens", "parents", "depths", "path", "drawn"):
        arrays[name] = ffi.new("int32_t[]", _COAST_STEPS * max_nodes)
    arrays["log_probs"] = ffi.new("float[]", _COAST_STEPS * max_nodes)
    return ffi.new("pyspec_coast_steps *", arrays), arrays


def _coast_steps(steps: Any) -> list[CoastStep]:
    found, n = [], steps.n_steps
    sizes, lengths = ffi.unpack(steps.nodes, n), ffi.unpack(steps.accepted, n)
    times, drawn = ffi.unpack(steps.us, n), ffi.unpack(steps.drawn, sum(lengths))
    nodes = walked = 0
    for size, length, us in zip(sizes, lengths, times, strict=True):
        path, tree = [0], None
        if size > 1:
            path = ffi.unpack(steps.path + walked, length)
            arrays = (steps.tokens, steps.parents, steps.depths, steps.log_probs)
            tree = DraftTree.trusted(*[ffi.unpack(array + nodes, size) for array in arrays])
        found.append(CoastStep(us / 1e3, path, drawn[walked : walked + length], tree))
        nodes, walked = nodes + size, walked + length
    return found


def _abort(pointer: Any) -> None:
    lib.pyspec_engine_abort(pointer, True)


def _release(handle: Handle) -> None:
    handle.free(lib.pyspec_engine_close, _abort)


class NativeEngine:
    """Sequences of one model: prefill, verify trees, commit paths, draft with the MTP block.

    Made by `open` or `attach`; a context manager. Calls release the GIL. One call runs at a time;
    only `abort` may be called beside it.
    """

    def __init__(
        self,
        pointer: Any,
        config: EngineConfig,
        path: str | os.PathLike[str] | None,
        keep: object = None,
    ) -> None:
        self.config = config
        self.path = path  # of the model's file, where it is known
        self._handle = Handle(pointer, "engine")
        self._keep = keep  # what owns the model
        self._finalizer = weakref.finalize(self, _release, self._handle)
        # Buffers that every step reuses.
        self._nodes = ffi.new("int32_t[64]")
        self._counts = ffi.new("int32_t[2]")
        self._coast_steps, self._coast_arrays = _new_coast_steps(MAX_NODES)

    # ---- life ----

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig,
        *,
        n_ctx: int | None = None,
        max_nodes: int = 16,
        mtp: bool = False,
        draft_cache: CacheTypes = (None, None),
        progress: Callable[[float], object] | None = None,
    ) -> Self:
        """Loads a GGUF file.

        Args:
            path: The file; of a model in parts, the first.
            config: How to open it.
            n_ctx: Tokens per sequence; None takes the config's, 0 the training context.
            max_nodes: Nodes a tree may have.
            mtp: Open the MTP block as a drafter.
            draft_cache: Types of keys and values in the cache of a drafter that is opened here; None
                takes the target's.
            progress: Called with the fraction loaded; returns False to give up.
        """
        params = _params(config, n_ctx, max_nodes, mtp, draft_cache)
        out = ffi.new("pyspec_engine **")
        watch = Progress(progress) if progress else None
        handle = ffi.new_handle(watch) if watch else ffi.NULL
        callback = lib.pyspec_on_progress if watch else ffi.NULL
        status = lib.pyspec_engine_open(os.fsencode(path), params, callback, handle, out)
        if watch is not None and watch.error is not None:
            raise watch.error
        check(status)
        return cls(out[0], config, path)

    @classmethod
    def attach(
        cls,
        model: Any,
        config: EngineConfig,
        *,
        n_ctx: int | None = None,
        max_nodes: int = 16,
        mtp: bool = False,
        draft_cache: CacheTypes = (None, None),
    ) -> Self:
        """Opens contexts of its own on a model that is loaded already.

        Args:
            model: A `llama_cpp.Llama`, which must stay open, another `NativeEngine`, or the address
                of a `llama_model`.
            config: How to open it; what concerns the weights is ignored.
            n_ctx: As for `open`.
            max_nodes: As for `open`.
            mtp: As for `open`; the model must have been loaded with its MTP block.
            draft_cache: As for `open`.
        """
        params = _params(config, n_ctx, max_nodes, mtp, draft_cache)
        out = ffi.new("pyspec_engine **")
        address = ffi.cast("void *", _model_address(model))
        check(lib.pyspec_engine_attach(address, params, out))
        path = model.path if isinstance(model, NativeEngine) else getattr(model, "model_path", None)
        return cls(out[0], config, path, keep=model)

    def close(self) -> None:
        """Frees everything; ends a call that runs in another thread. Safe to call twice."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._handle.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def abort(self) -> None:
        """Ends the running call, or else the next one, with `AbortedError`. From any thread."""
        lib.pyspec_engine_abort(self._handle.pointer, True)

    def set_threads(self, n_threads: int) -> None:
        """Threads of verify passes from here on; at most those that the engine was opened with."""
        self._call(lib.pyspec_engine_set_threads, n_threads)
        self.__dict__.pop("info", None)

    # ---- facts ----

    @cached_property
    def info(self) -> NativeInfo:
        """Facts about model and engine."""
        out = ffi.new("pyspec_info *")
        self._call(lib.pyspec_engine_info, out)
        values = {field.name: getattr(out, field.name) for field in fields(NativeInfo)}
        return NativeInfo(**values | {name: text(values[name]) for name in ("arch", "desc")})

    def timings(self, *, reset: bool = False) -> NativeTimings:
        """Time spent in native code by stage."""
        out = ffi.new("pyspec_timings *")
        with self._handle.lock:
            lib.pyspec_engine_timings(self._handle.pointer, out, reset)
        return NativeTimings(
            **{field.name: getattr(out, field.name) for field in fields(NativeTimings)}
        )

    @property
    def model_address(self) -> int:
        """Address of the `llama_model`."""
        return int(ffi.cast("uintptr_t", lib.pyspec_engine_model(self._handle.pointer)))

    @property
    def context_address(self) -> int:
        """Address of the target's `llama_context`."""
        return int(ffi.cast("uintptr_t", lib.pyspec_engine_context(self._handle.pointer)))

    # ---- text ----

    def tokenize(
        self, data: str | bytes, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Token ids of UTF-8 text.

        Args:
            data: The text.
            add_special: Put before it what the model expects before every text.
            parse_special: Read the names of special tokens as these tokens.
        """
        raw = data.encode() if isinstance(data, str) else data
        size = len(raw) + 8
        while True:
            out = ffi.new("int32_t[]", size)
            with self._handle.lock:
                n = lib.pyspec_tokenize(
                    self._handle.pointer, raw, len(raw), add_special, parse_special, out, size
                )
            if n >= 0:
                return ffi.unpack(out, n) if n else []
            _check_count(n)
            size = -n

    def token_to_piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; of a special one only with `special`."""
        size = 64
        while True:
            out = ffi.new("char[]", size)
            with self._handle.lock:
                n = lib.pyspec_token_to_piece(self._handle.pointer, token, special, out, size)
            if n >= 0:
                return bytes(ffi.buffer(out, n))
            _check_count(n)
            size = -n

    def is_eog(self, token: int) -> bool:
        """True for a token that ends generation."""
        return lib.pyspec_token_is_eog(self._handle.pointer, token)

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source in the file, or None."""
        pointer = lib.pyspec_chat_template(self._handle.pointer)
        return text(pointer) if pointer else None

    # ---- sequences ----

    def length(self, slot: int) -> int:
        """Tokens in the target's memory."""
        with self._handle.lock:
            n = lib.pyspec_seq_length(self._handle.pointer, slot)
        check(n)
        return n

    def reset(self, slot: int) -> None:
        """Forgets a sequence."""
        self._call(lib.pyspec_seq_reset, slot)

    def copy(self, source: int, target: int) -> None:
        """Makes sequence `target` what `source` is."""
        self._call(lib.pyspec_seq_copy, source, target)

    def save(self, slot: int) -> bytes:
        """All of a sequence; an uncommitted tree is dropped."""
        size = self._call(lib.pyspec_seq_save, slot, ffi.NULL, 0)
        out = bytearray(size)
        self._call(lib.pyspec_seq_save, slot, ffi.from_buffer(out), size)
        return bytes(out)

    def restore(self, slot: int, state: bytes) -> None:
        """Makes a sequence what was saved."""
        self._call(lib.pyspec_seq_restore, slot, ffi.from_buffer(state), len(state))

    # ---- decode ----

    def prefill(self, slot: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Appends tokens to a sequence; no logits are kept."""
        data, array = _int32(tokens)
        self._call(lib.pyspec_prefill, slot, data, len(array))

    def verify(self, trees: Iterable[SlotTree], *, greedy: bool = False) -> None:
        """One forward pass over a tree per slot; the sequences stay as they are until `commit`.

        Args:
            trees: Slots and their trees.
            greedy: Only greedy samplers will draw, so the pass may choose their tokens itself. No
                result depends on it.
        """
        keep = []
        rows = []
        for slot, tokens, parents in trees:
            n = len(tokens)
            if n != len(parents):
                raise TreeError(
                    f"tree of sequence {slot} has {n} tokens and {len(parents)} parents"
                )
            data = (
                ffi.new("int32_t[]", tokens if type(tokens) is list else list(tokens)),
                ffi.new("int32_t[]", parents if type(parents) is list else list(parents)),
            )
            keep.append(data)
            rows.append((slot, n, *data))
        self._call(lib.pyspec_verify, ffi.new("pyspec_tree[]", rows), len(rows), greedy)

    def commit(self, slot: int, nodes: Sequence[int]) -> None:
        """Moves a sequence along a path of its tree, from the root, and forgets the rest."""
        n = len(nodes)
        path = self._nodes if n <= 64 else ffi.new("int32_t[]", n)
        path[0:n] = nodes
        self._call(lib.pyspec_commit, slot, path, n)

    def logits(self, slot: int, node: int) -> NDArray[np.float32]:
        """float32 [n_vocab]; a copy of the logits at a node of the last verified tree."""
        return self._row(lib.pyspec_logits, slot, node, self.info.n_vocab)

    def hidden(self, slot: int, node: int) -> NDArray[np.float32]:
        """float32 [n_embd]; a copy of the post-norm hidden state at a node; only with `mtp`."""
        return self._row(lib.pyspec_hidden, slot, node, self.info.n_embd)

    # ---- sampling ----

    def sampler(self, config: SamplingConfig) -> NativeSampler:
        """A sampler for this model."""
        with self._handle.lock:
            return NativeSampler.create(self._handle.pointer, config)

    def sample(self, sampler: NativeSampler, slot: int, node: int) -> int:
        """Draws the target's token at a node and takes it into the sampler."""
        with sampler.handle.lock:
            self._call(lib.pyspec_sample, sampler.handle.pointer, slot, node, self._counts)
            return self._counts[0]

    def accept(
        self, sampler: NativeSampler, slot: int, max_nodes: int, stop_eog: bool = True
    ) -> tuple[list[int], int]:
        """Sample-and-match along the last verified tree.

        Args:
            sampler: The request's sampler; advances by one token per node of the result.
            slot: The sequence.
            max_nodes: Most nodes to walk, root included.
            stop_eog: End the walk at a token that ends generation.

        Returns:
            The accepted nodes, and the token drawn at the last of them.
        """
        n, bonus = self._counts, self._counts + 1
        with sampler.handle.lock:
            self._call(
                lib.pyspec_accept,
                sampler.handle.pointer,
                slot,
                max_nodes,
                stop_eog,
                self._nodes,
                n,
                bonus,
            )
            return ffi.unpack(self._nodes, n[0]), bonus[0]

    def coast(
        self,
        sampler: NativeSampler,
        slot: int,
        root: int,
        *,
        max_steps: int,
        max_tokens: int,
        stop_eog: bool = True,
        max_ms: float = 0.0,
        pilot: Pilot | None = None,
        text: Sequence[int] = (),
    ) -> CoastSteps:
        """Decodes a sequence for a while in one call, as `verify`, `accept` and `commit` would.

        Args:
            sampler: The request's sampler; advances by one token per drawn one.
            slot: The sequence.
            root: The last emitted token.
            max_steps: Most steps; 32 are taken at most.
            max_tokens: Most tokens to draw.
            stop_eog: End behind a token that ends generation.
            max_ms: End behind the step after which so much time has passed.
            pilot: Drafts; without one, steps are plain. A step in which it gives way is not taken.
            text: All tokens up to and with the root, for the pilot; its index reads on from where it
                is, and reads what is drawn.

        Returns:
            The steps; none if the pilot gives way at once. A pass that fails or is aborted behind the
            first ends it early, and the failure is left to the next call.
        """
        steps = self._coast_steps
        n_new, new = pilot.index.unread(text) if pilot is not None else (0, ffi.NULL)
        with sampler.handle.lock:
            self._call(
                lib.pyspec_coast,
                sampler.handle.pointer,
                slot,
                root,
                min(max_steps, _COAST_STEPS),
                min(max_tokens, 1 << 30),
                stop_eog,
                int(1e3 * max_ms),
                ffi.NULL if pilot is None else pilot.rules,
                n_new,
                new,
                steps,
            )
            found = _coast_steps(steps)
        if pilot is not None:
            drawn = sum([len(one.drawn) for one in found])
            pilot.index.has_read(len(text) + drawn, found[-1].drawn[-1] if found else root)
        return CoastSteps(found, steps.sample_us / 1e3, steps.commit_us / 1e3)

    def top(self, slot: int, node: int, top_k: int) -> tuple[list[int], list[float]]:
        """The `top_k` most probable tokens at a node of the last verified tree, best first.

        Returns:
            Tokens and natural logarithms of their probabilities.
        """
        tokens, log_probs = ffi.new("int32_t[]", top_k), ffi.new("float[]", top_k)
        self._call(lib.pyspec_top, slot, node, top_k, tokens, log_probs)
        return ffi.unpack(tokens, top_k), ffi.unpack(log_probs, top_k)

    # ---- drafting ----

    def mtp_draft(
        self,
        slots: Sequence[int],
        roots: Sequence[int],
        depth: int,
        top_k: int = 1,
        *,
        width: int = 1,
        min_prob: float = 0.0,
    ) -> MtpDrafts:
        """Drafts for n slots at once with the model's own MTP block, level by level.

        Args:
            slots: The sequences, n of them.
            roots: For each, the last emitted token.
            depth: Levels.
            top_k: Candidates of an expanded node.
            width: Nodes expanded at every level; 1 is a chain along the best candidates.
            min_prob: Nodes whose path is less probable are not expanded.
        """
        if len(slots) != len(roots):
            raise ArgumentError(f"draft for {len(slots)} slots has {len(roots)} roots")
        shape = (len(slots), max(depth, 0), max(width, 0), max(top_k, 0))
        tokens, log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
        parents, levels = np.empty(shape[:3], np.int32), np.empty(shape[0], np.int32)
        drafts = ffi.new(
            "pyspec_mtp_drafts *",
            {
                "depth": depth,
                "width": width,
                "top_k": top_k,
                "min_prob": min_prob,
                "levels": ffi.from_buffer("int32_t[]", levels),
                "parents": ffi.from_buffer("int32_t[]", parents),
                "tokens": ffi.from_buffer("int32_t[]", tokens),
                "log_probs": ffi.from_buffer("float[]", log_probs),
            },
        )
        self._call(
            lib.pyspec_mtp_draft,
            len(slots),
            ffi.new("int32_t[]", list(slots)),
            ffi.new("int32_t[]", list(roots)),
            drafts,
        )
        return MtpDrafts(levels, parents, tokens, log_probs)

    def dflash_open(self, path: str | os.PathLike[str]) -> DflashInfo:
        """Opens a DFlash drafter for this engine, before any sequence holds tokens.

        Raises:
            DraftError: The file is no drafter, or one of another target.
        """
        out = ffi.new("pyspec_dflash_info *")
        self._call(lib.pyspec_dflash_open, os.fsencode(path), out)
        return DflashInfo(**{field.name: getattr(out, field.name) for field in fields(DflashInfo)})

    def dflash_listen(self, on: bool) -> None:
        """Whether the DFlash drafter listens, as it does from the start.

        While it does not, the target's features are not kept. Tokens that are committed meanwhile are
        none of its text, which closes up over them.
        """
        self._call(lib.pyspec_dflash_listen, on)

    def dflash_draft(
        self,
        slots: Sequence[int],
        roots: Sequence[int],
        depth: int,
        top_k: int,
        *,
        pairs: bool = False,
        confidence: bool = False,
    ) -> DflashDrafts:
        """Predicts a block for n slots at once, in one pass of the DFlash drafter.

        Args:
            slots: The sequences, n of them.
            roots: For each, the last emitted token.
            depth: Positions that are read, at most the drafter's `max_depth`.
            top_k: Candidates of a position; a drafter with a selector fixes their number.
            pairs: Also the scores of candidates behind each candidate of the position before.
            confidence: Also the confidence head's figures.
        """
        if len(slots) != len(roots):
            raise ArgumentError(f"draft for {len(slots)} slots has {len(roots)} roots")
        shape = (len(slots), max(depth, 0), max(top_k, 0))
        out = DflashDrafts(
            np.empty(shape, np.int32),
            np.empty(shape, np.float32),
            np.empty((*shape, shape[2]), np.float32) if pairs else None,
            np.empty(shape[:2], np.float32) if confidence else None,
        )
        self._call(
            lib.pyspec_dflash_draft,
            len(slots),
            ffi.new("int32_t[]", list(slots)),
            ffi.new("int32_t[]", list(roots)),
            depth,
            top_k,
            ffi.from_buffer("int32_t[]", out.tokens),
            *(
                ffi.NULL if array is None else ffi.from_buffer("float[]", array)
                for array in (out.log_probs, out.pairs, out.confidence)
            ),
        )
        return out

    def draft_head_init(self, n_rows: int) -> None:
        """Makes room for `n_rows` rows of the output matrix, the only ones the drafter then reads.

        Raises:
            DraftError: The output matrix of this model or drafter cannot be trimmed.
        """
        self._call(lib.pyspec_draft_head_init, n_rows)

    def draft_head_add(self, tokens: NDArray[np.int32], rows: NDArray[np.uint8]) -> None:
        """Adds tokens to the trimmed head.

        Args:
            tokens: int32 [n]; none of them in it already.
            rows: uint8 [n, bytes of a row]; their rows of the output matrix as in the file.
        """
        data, array = _int32(tokens)
        rows = np.ascontiguousarray(rows)
        self._call(lib.pyspec_draft_head_add, len(array), data, ffi.from_buffer(rows), rows.nbytes)

    # ---- calls ----

    def _call(self, function: Any, *arguments: Any) -> int:
        with self._handle.lock:
            pointer = self._handle.pointer
            status = function(pointer, *arguments)
            if status == lib.PYSPEC_ERR_ABORTED:
                lib.pyspec_engine_abort(pointer, False)  # it has ended one call
        if status < 0:
            check(status)
        return status

    def _row(self, function: Any, slot: int, node: int, n: int) -> NDArray[np.float32]:
        with self._handle.lock:
            pointer = function(self._handle.pointer, slot, node)
            if pointer:
                return np.frombuffer(ffi.buffer(pointer, 4 * n), np.float32).copy()
            raise last_failure()


def _check_count(n: int) -> None:
    if n == -(2**31):
        raise last_failure()


def _int32(values: ArrayLike) -> tuple[Any, NDArray[np.int32]]:
    """Values as a C array, and what keeps it alive."""
    array = np.ascontiguousarray(values, np.int32).reshape(-1)
    return (ffi.from_buffer("int32_t[]", array) if array.size else ffi.NULL), array


def _params(
    config: EngineConfig, n_ctx: int | None, max_nodes: int, mtp: bool, draft_cache: CacheTypes
) -> Any:
    flash_attn = -1 if config.flash_attn is None else int(config.flash_attn)
    return ffi.new(
        "pyspec_engine_params *",
        {
            "n_ctx": (config.n_ctx or 0) if n_ctx is None else n_ctx,
            "n_seq_max": config.n_slots,
            "n_batch": config.n_batch,
            "n_ubatch": config.n_ubatch,
            "max_nodes": max_nodes,
            "n_threads": config.n_threads,
            "n_threads_batch": config.n_threads,
            "n_gpu_layers": config.n_gpu_layers,
            "split_mode": SPLIT_MODES.index(config.split_mode),
            "main_gpu": config.main_gpu,
            "tensor_split": config.tensor_split,
            "flash_attn": flash_attn,
            "graph_argmax": config.graph_argmax,
            "type_k": CACHE_TYPES[config.cache_type_k],
            "type_v": CACHE_TYPES[config.cache_type_v],
            "draft_type_k": -1 if draft_cache[0] is None else CACHE_TYPES[draft_cache[0]],
            "draft_type_v": -1 if draft_cache[1] is None else CACHE_TYPES[draft_cache[1]],
            "use_mmap": config.use_mmap,
            "use_mlock": config.use_mlock,
            "offload_kqv": config.offload_kqv,
            "mtp": mtp,
            "verbose": config.verbose,
        },
    )


def _model_address(model: Any) -> int:
    if isinstance(model, NativeEngine):
        return model.model_address
    if isinstance(model, int):
        return model
    pointer = getattr(model, "model", None)  # llama_cpp.Llama
    if pointer is None:
        raise ArgumentError(f"{type(model).__name__} is no llama_cpp.Llama and no model address")
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0
