"""Single ggml operators on the CPU, called from Python: enough of ggml for tests and benchmarks.

Builds on the libraries that `llama_cpp` was loaded with. One graph holds one result; its inputs
are numpy arrays. Weights may be placed in the CPU's repacking buffer, as llama.cpp places them.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

import numpy as np

from pyspec._libs import use_patched_libraries

_lib = use_patched_libraries().llama_cpp._lib


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def _function(name: str, result: object, *arguments: object):
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


ggml_init = _function("ggml_init", c_void_p, _InitParams)
ggml_free = _function("ggml_free", None, c_void_p)
new_tensor = _function("ggml_new_tensor", c_void_p, c_void_p, c_int, c_int, POINTER(c_int64))
new_graph = _function("ggml_new_graph", c_void_p, c_void_p)
build_forward = _function("ggml_build_forward_expand", None, c_void_p, c_void_p)
nbytes = _function("ggml_nbytes", c_size_t, c_void_p)
nelements = _function("ggml_nelements", c_int64, c_void_p)
row_size = _function("ggml_row_size", c_size_t, c_int, c_int64)
quantize_chunk = _function(
    "ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
)
tensor_set = _function("ggml_backend_tensor_set", None, c_void_p, c_void_p, c_size_t, c_size_t)
tensor_get = _function("ggml_backend_tensor_get", None, c_void_p, c_void_p, c_size_t, c_size_t)
cpu_init = _function("ggml_backend_cpu_init", c_void_p)
set_threads = _function("ggml_backend_cpu_set_n_threads", None, c_void_p, c_int)
backend_free = _function("ggml_backend_free", None, c_void_p)
cpu_buffer_type = _function("ggml_backend_cpu_buffer_type", c_void_p)
cpu_reg = _function("ggml_backend_cpu_reg", c_void_p)
reg_proc = _function("ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p)
reg_dev = _function("ggml_backend_reg_dev_get", c_void_p, c_void_p, c_size_t)
alloc_tensors = _function("ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, c_void_p, c_void_p)
buffer_free = _function("ggml_backend_buffer_free", None, c_void_p)
graph_compute = _function("ggml_backend_graph_compute", c_int, c_void_p, c_void_p)
supports_op = _function("ggml_backend_dev_supports_op", c_bool, c_void_p, c_void_p)
mul_mat = _function("ggml_mul_mat", c_void_p, c_void_p, c_void_p, c_void_p)
mul_mat_id = _function("ggml_mul_mat_id", c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
soft_max_ext = _function(
    "ggml_soft_max_ext", c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float
)
flash_attn_ext = _function(
    "ggml_flash_attn_ext", c_void_p, *[c_void_p] * 5, c_float, c_float, c_float
)
flash_attn_set_ordered = _function("ggml_flash_attn_ext_set_ordered", None, c_void_p, c_bool)
tensor_type = _function("ggml_get_type_traits", c_void_p, c_int)

TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11,
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "I32": 26, "BF16": 30, "MXFP4": 39,
}  # fmt: skip


def cpu_has(feature: str) -> bool:
    """Whether ggml was compiled for, and found, a CPU feature such as ``avx512_vnni``."""
    return bool(_function(f"ggml_cpu_has_{feature}", c_int)())


def repack_buffer_type() -> int | None:
    """The buffer type that repacks weights, when this CPU has one."""
    get = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(
        reg_proc(cpu_reg(), b"ggml_backend_dev_get_extra_bufts")
    )
    found = get(reg_dev(cpu_reg(), 0))
    name = _function("ggml_backend_buft_name", c_char_p, c_void_p)
    index = 0
    while found and found[index]:
        if name(found[index]) == b"CPU_REPACK":
            return found[index]
        index += 1
    return None


def quantize(values: np.ndarray, kind: str) -> bytes:
    """`values` (rows of float32) as bytes of the ggml type `kind`."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == "F32":
        return values.tobytes()
    *_, columns = values.shape
    rows = values.size // columns
    out = np.empty(rows * row_size(TYPES[kind], columns), np.uint8)
    quantize_chunk(TYPES[kind], values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    return out.tobytes()


class Op:
    """One graph on the CPU backend: inputs by name, weights in a chosen buffer, one result.

    Use it as a context manager: make tensors with `input` and `weight`, then `finish` with the
    result's tensor, `set` the inputs and `run`.
    """

    def __init__(self, threads: int = 1) -> None:
        size = 1 << 20
        self.ctx = ggml_init(_InitParams(size, None, True))
        self._weights = ggml_init(_InitParams(size, None, True))
        self._buffers: list[int] = []
        self._backend = cpu_init()
        set_threads(self._backend, threads)

    def __enter__(self) -> Op:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            buffer_free(buffer)
        ggml_free(self.ctx)
        ggml_free(self._weights)
        backend_free(self._backend)

    def input(self, kind: str, *shape: int) -> int:
        """A tensor with the sizes `shape`, innermost first, as ggml writes them."""
        return new_tensor(self.ctx, TYPES[kind], len(shape), (c_int64 * len(shape))(*shape))

    def weight(self, kind: str, *shape: int) -> int:
        """As `input`, allocated by `place_weights`."""
        return new_tensor(self._weights, TYPES[kind], len(shape), (c_int64 * len(shape))(*shape))

    def place_weights(self, buffer_type: int | None = None) -> None:
        """Allocate the weights; in the CPU's plain buffer when `buffer_type` is None."""
        buffer = alloc_tensors(self._weights, buffer_type or cpu_buffer_type())
        self._buffers.append(buffer)

    def finish(self, result: int) -> None:
        """Allocate everything else; `run` computes `result`."""
        self.result = result
        self._graph = new_graph(self.ctx)
        build_forward(self._graph, result)
        self._buffers.append(alloc_tensors(self.ctx, cpu_buffer_type()))

    def supported(self) -> bool:
        """Whether the CPU backend takes the operator with its weights where they are."""
        return supports_op(reg_dev(cpu_reg(), 0), self.result)

    def set(self, tensor: int, data: bytes | np.ndarray) -> None:
        data = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        assert len(data) == nbytes(tensor), f"{len(data)} bytes for a tensor of {nbytes(tensor)}"
        tensor_set(tensor, data, 0, len(data))

    def run(self) -> np.ndarray:
        """Compute; the result as a flat float32 array."""
        self.compute()
        out = np.empty(nelements(self.result), np.float32)
        tensor_get(self.result, out.ctypes.data, 0, out.nbytes)
        return out

    def compute(self) -> None:
        status = graph_compute(self._backend, self._graph)
        assert status == 0, f"ggml_backend_graph_compute: status {status}"

    def seconds(self) -> float:
        """Processor time of one computation; other work of the machine does not count."""
        start = time.thread_time()
        self.compute()
        return time.thread_time() - start
