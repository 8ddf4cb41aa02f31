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
CACHE_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}

#: Sequence, token, position, and batch index of the parent: -1 for a root, None outside of trees.
Node = tuple[int, int, int, int | None]


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
    """Sequences of a model; a context manager.

    Args:
        nodes: Nodes that a tree may have; 0 leaves the context as upstream's.
        form: ``row`` or ``chunk``, see llama.h.
        snapshots: Upstream's way to roll back: states kept per sequence.
        flash: Flash attention.
        size: Cells of the attention cache.
        sequences: Their number. They share the cells when `unified`, else each has a part of them.
        ubatch: Tokens that a forward pass takes.
        cache: Type of the attention cache.
    """

    def __init__(
        self, model: Model, *, nodes: int = 0, form: str = "row", snapshots: int = 0,
        flash: bool = True, threads: int = 1, size: int = 1024, sequences: int = 1,
        unified: bool = False, ubatch: int = 512, cache: str = "f16",
    ) -> None:  # fmt: skip
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, 512, ubatch
        params.n_seq_max, params.kv_unified = sequences, unified
        params.type_k = params.type_v = CACHE_TYPES[cache]
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
        self.lengths = [0] * sequences

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        _batch_free(self._batch)
        llama_cpp.llama_free(self.handle)

    @property
    def length(self) -> int:
        """Tokens of sequence 0."""
        return self.lengths[0]

    def decode(self, tokens: list[int], read: bool = True, sequence: int = 0) -> np.ndarray | None:
        """Append `tokens` in one batch; the logits behind each of them, unless not `read`."""
        start = self.lengths[sequence]
        nodes = [(sequence, token, start + i, None) for i, token in enumerate(tokens)]
        rows = self._run(nodes, read)
        self.lengths[sequence] += len(tokens)
        return rows

    def tree(self, tokens: list[int], parents: list[int], read: bool = True) -> np.ndarray | None:
        """Process a draft tree behind sequence 0; the logits of its nodes. See `accept`."""
        return self.forest([(tokens, parents)], read)

    def forest(
        self, trees: list[tuple[list[int], list[int]]], read: bool = True
    ) -> np.ndarray | None:
        """Process a tree behind each of the first sequences; the logits of all nodes in turn."""
        nodes: list[Node] = []
        for sequence, (tokens, parents) in enumerate(trees):
            first = len(nodes)
            for token, parent in zip(tokens, parents, strict=True):
                position = self.lengths[sequence] if parent < 0 else nodes[first + parent][2] + 1
                nodes.append((sequence, token, position, -1 if parent < 0 else first + parent))
        return self._run(nodes, read)

    def accept(self, path: list[int], sequence: int = 0) -> None:
        """Append the tokens along `path` of the last tree; drop the others."""
        if not _accept(self._memory, sequence, (c_int32 * len(path))(*path), len(path)):
            raise ValueError(f"no such path: {path}")
        self.lengths[sequence] += len(path)

    def remove(self, count: int) -> bool:
        """Take the last `count` tokens of sequence 0 back, where the memory can."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, self.length - count, -1):
            return False
        self.lengths[0] -= count
        return True

    def _run(self, nodes: list[Node], read: bool) -> np.ndarray | None:
        _batch_clear(self._batch)
        for index, (sequence, token, position, parent) in enumerate(nodes):
            if _add_token(self._batch, sequence, int(token)) != index:
                raise ValueError(f"token {token} does not fit into the batch")
            _set_pos(self._batch, index, byref(c_int32(position)))
            _set_logits(self._batch, index, True)
            if parent is not None and not _set_parent(self._batch, index, parent):
                raise ValueError(f"node {index} cannot have the parent {parent}")
        status = _process(self.handle, _DECODE, self._batch)
        if status:
            raise ValueError(f"llama_process: status {status}")
        if not read:
            return None
        return np.ctypeslib.as_array(_logits(self.handle), (len(nodes), self.vocab)).copy()
