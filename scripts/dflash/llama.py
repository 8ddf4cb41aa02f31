"""libllama's own DFlash path, driven the way `common/speculative.cpp` drives it.

`TargetContext` reads the features, `DraftContext` injects them and runs the block pass. Which
libllama that is: the one in `LLAMA_CPP_LIB_PATH` when that is set, else pyspec's patched one.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: Functions of `llama-ext.h`, which has no C linkage: their names as the C++ compiler writes them.
SET_LAYER_INPUT = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
GET_LAYER_INPUT = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
SET_NEXTN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
GET_NEXTN = "_Z26llama_get_embeddings_nextnP13llama_context"
DECODE = 1  # LLAMA_PROCESS_TYPE_DECODE


def bindings() -> ModuleType:
    """`llama_cpp` on the chosen libllama."""
    if "LLAMA_CPP_LIB_PATH" not in os.environ:
        from pyspec._libs import use_patched_libraries

        return use_patched_libraries()
    import llama_cpp

    return llama_cpp


def quiet(api: ModuleType) -> None:
    """Keep llama.cpp from logging to stderr."""
    global _no_log
    _no_log = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(_no_log, ctypes.c_void_p(0))


def symbol(api: ModuleType, name: str, result: Any, *arguments: Any) -> Any:
    """A function of `llama-ext.h`."""
    function = getattr(api.llama_cpp._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


class Model:
    """A loaded GGUF file."""

    def __init__(self, path: Path) -> None:
        self.api = bindings()
        quiet(self.api)
        self.api.llama_backend_init()
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self.pointer = self.api.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.n_embd = int(self.api.llama_model_n_embd(self.pointer))
        vocab = self.api.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(self.api.llama_vocab_n_tokens(vocab))

    def close(self) -> None:
        if self.pointer:
            self.api.llama_model_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Context:
    """A context of one sequence and its batch."""

    def __init__(self, model: Model, n_ctx: int, threads: int, other: Any = None) -> None:
        self.model, self.api, self.n_ctx = model, model.api, n_ctx
        params = self.api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = threads
        if other is not None:
            params.ctx_other = other
        self.pointer = self.api.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise ValueError("llama.cpp cannot open a context")
        self.batch = self.api.llama_batch_ext_init(self.pointer)

    def _add(self, index: int, position: int, output: bool) -> None:
        where = (ctypes.c_int32 * 4)(position, position, position, 0)
        if index < 0 or not self.api.llama_batch_ext_set_pos(self.batch, index, where):
            raise ValueError(f"position {position} does not fit into a context of {self.n_ctx}")
        self.api.llama_batch_ext_set_output_logits(self.batch, index, output)

    def _process(self) -> None:
        status = self.api.llama_process(self.pointer, DECODE, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_process returned {status}")

    def logits(self, rows: int) -> NDArray[np.float32]:
        """[rows, n_vocab] of the last call's outputs."""
        pointer = self.api.llama_get_logits(self.pointer)
        return np.ctypeslib.as_array(pointer, (rows, self.model.n_vocab)).copy()

    def forget(self, begin: int = -1) -> None:
        """Drop positions from `begin`; everything by default."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.pointer), 0, begin, -1)

    def close(self) -> None:
        if self.pointer:
            self.api.llama_batch_ext_free(self.batch)
            self.api.llama_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class TargetContext(_Context):
    """Reads text and hands out the features of every position.

    Args:
        model: The target.
        layers: Layers whose inputs are the features.
        n_ctx: Longest text.
        threads: CPU threads.
    """

    def __init__(self, model: Model, layers: tuple[int, ...], n_ctx: int, threads: int = 1) -> None:
        super().__init__(model, n_ctx, threads)
        self.layers = layers
        pointer, index = ctypes.c_void_p, ctypes.c_uint32
        enable = symbol(self.api, SET_LAYER_INPUT, None, pointer, index, ctypes.c_bool)
        floats = ctypes.POINTER(ctypes.c_float)
        self._layer = symbol(self.api, GET_LAYER_INPUT, floats, pointer, index)
        for layer in layers:
            enable(self.pointer, layer, True)

    def read(
        self, tokens: ArrayLike, logits: bool = False
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Features [T, layers * n_embd] of a text from position 0 and, if wanted, logits [T, V]."""
        tokens = np.asarray(tokens, np.int32)
        self.forget()
        self.api.llama_batch_ext_clear(self.batch)
        for position, token in enumerate(tokens.tolist()):
            index = self.api.llama_batch_ext_add_token(self.batch, 0, token)
            self._add(index, position, logits or position == len(tokens) - 1)
        self._process()
        shape = (len(tokens), self.model.n_embd)
        parts = [np.ctypeslib.as_array(self._layer(self.pointer, i), shape) for i in self.layers]
        return np.concatenate(parts, 1), self.logits(len(tokens)) if logits else None


class DraftContext(_Context):
    """A drafter's context: `inject` what the target has read, then `block`.

    Args:
        model: The drafter.
        target: The context whose model lends embeddings and head.
        n_ctx: Longest text with a block.
        threads: CPU threads.
        nextn: Ask for the extra output of DSpark (confidence) and DFlash2 (lattice).
    """

    def __init__(
        self, model: Model, target: _Context, n_ctx: int, threads: int = 1, nextn: bool = False
    ) -> None:
        super().__init__(model, n_ctx, threads, other=target.pointer)
        self.api.llama_set_causal_attn(self.pointer, False)
        if nextn:
            pointer = ctypes.c_void_p
            enable = symbol(self.api, SET_NEXTN, None, pointer, ctypes.c_bool, ctypes.c_bool)
            enable(self.pointer, True, False)

    def inject(self, features: NDArray[np.float32], begin: int = 0) -> None:
        """Write the keys and values of features [T, n_features], which begin at a position."""
        features = np.ascontiguousarray(features, np.float32)
        self.api.llama_batch_ext_clear(self.batch)
        for i, row in enumerate(features):
            embd = self.api.llama_cpp.llama_embd(
                row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, row.size
            )
            index = self.api.llama_batch_ext_add_embd(self.batch, 0, embd)
            self._add(index, begin + i, False)
        self._process()

    def block(self, anchor: int, mask: int, position: int, size: int) -> NDArray[np.float32]:
        """Logits [size, V] of a block that begins with `anchor` at a position, then forget it."""
        self.api.llama_batch_ext_clear(self.batch)
        for i in range(size):
            index = self.api.llama_batch_ext_add_token(self.batch, 0, mask if i else anchor)
            self._add(index, position + i, True)
        self._process()
        out = self.logits(size)
        self.forget(position)
        return out

    def nextn(self, rows: int) -> NDArray[np.float32]:
        """The extra output [rows, n_embd] of the last block."""
        floats = ctypes.POINTER(ctypes.c_float)
        read = symbol(self.api, GET_NEXTN, floats, ctypes.c_void_p)
        return np.ctypeslib.as_array(read(self.pointer), (rows, self.model.n_embd)).copy()
