"""A llama.cpp context with draft trees, called from Python: for tests and benchmarks below pyspec."""

from __future__ import annotations

from ctypes import POINTER, byref, c_bool, c_float, c_int, c_int32, c_uint32, c_void_p
from pathlib import Path

import numpy as np

from pyspec._libs import use_patched_libraries

llama_cpp = use_patched_libraries()
_lib = llama_cpp.llama_cpp._lib


def _function(name: str, result: object, *arguments: object):
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


_batch_init = _function("llama_batch_ext_init", c_void_p, c_void_p)
_batch_free = _function("llama_batch_ext_free", None, c_void_p)
_batch_clear = _function("llama_batch_ext_clear", None, c_void_p)
_add_token = _function("llama_batch_ext_add_token", c_int32, c_void_p, c_int32, c_int32)
_set_pos = _function("llama_batch_ext_set_pos", c_bool, c_void_p, c_int32, POINTER(c_int32))
_set_logits = _function("llama_batch_ext_set_output_logits", c_bool, c_void_p, c_int32, c_bool)
_set_parent = _function("llama_batch_ext_set_parent", c_bool, c_void_p, c_int32, c_int32)
_process = _function("llama_process", c_int32, c_void_p, c_int, c_void_p)
_tree_init = _function("llama_tree_init", c_int32, c_void_p, c_uint32, c_int)
_accept = _function("llama_memory_seq_accept", c_bool, c_void_p, c_int32, POINTER(c_int32), c_int32)
_logits = _function("llama_get_logits", POINTER(c_float), c_void_p)
_DECODE = 1
FORMS = {"row": 0, "chunk": 1}


class Model:
    """A model file; a context manager."""

    def __init__(self, path: Path | str, repack: bool = True) -> None:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = repack
        self.handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ValueError(f"{path} does not load")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle))

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_model_free(self.handle)


class Context:
    """One sequence of a model; a context manager.

    Args:
        nodes: Nodes that a tree may have; 0 leaves the context as upstream's.
        form: ``row`` or ``chunk``, see llama.h.
        snapshots: Upstream's way to roll back: states kept per sequence.
        flash: Flash attention.
    """

    def __init__(
        self, model: Model, *, nodes: int = 0, form: str = "row", snapshots: int = 0,
        flash: bool = True, threads: int = 1, size: int = 1024,
    ) -> None:  # fmt: skip
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        params.n_rs_seq = snapshots
        self.vocab = model.vocab
        self.handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise ValueError("no context")
        if nodes and (status := _tree_init(self.handle, nodes, FORMS[form])):
            raise ValueError(f"llama_tree_init: {status}")
        self._memory = llama_cpp.llama_get_memory(self.handle)
        self._batch = _batch_init(self.handle)
        self.length = 0

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        _batch_free(self._batch)
        llama_cpp.llama_free(self.handle)

    def decode(self, tokens: list[int], read: bool = True) -> np.ndarray | None:
        """Append `tokens` in one batch; the logits behind each of them, unless not `read`."""
        rows = self._run(tokens, [self.length + i for i in range(len(tokens))], None, read)
        self.length += len(tokens)
        return rows

    def tree(self, tokens: list[int], parents: list[int], read: bool = True) -> np.ndarray | None:
        """Process a draft tree behind the sequence; the logits of its nodes. See `accept`."""
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return self._run(tokens, [self.length + depth for depth in depths], parents, read)

    def accept(self, path: list[int]) -> None:
        """Append the tokens along `path` of the last tree; drop the others."""
        if not _accept(self._memory, 0, (c_int32 * len(path))(*path), len(path)):
            raise ValueError(f"no such path: {path}")
        self.length += len(path)

    def remove(self, count: int) -> bool:
        """Take the last `count` tokens back, where the memory can."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, self.length - count, -1):
            return False
        self.length -= count
        return True

    def _run(
        self, tokens: list[int], positions: list[int], parents: list[int] | None, read: bool
    ) -> np.ndarray | None:
        _batch_clear(self._batch)
        for index, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            if _add_token(self._batch, 0, int(token)) != index:
                raise ValueError(f"token {token} does not fit into the batch")
            _set_pos(self._batch, index, byref(c_int32(position)))
            _set_logits(self._batch, index, True)
            if parents is not None and not _set_parent(self._batch, index, int(parents[index])):
                raise ValueError(f"node {index} cannot have the parent {parents[index]}")
        status = _process(self.handle, _DECODE, self._batch)
        if status:
            raise ValueError(f"llama_process: status {status}")
        if not read:
            return None
        return np.ctypeslib.as_array(_logits(self.handle), (len(tokens), self.vocab)).copy()
