"""Time of a pass by kind of layer, through llama.cpp's evaluation callback.

llama.cpp is asked to stop behind the named tensors that end a kind of layer, and the time from one
stop to the next is counted for it. The pass is a chain of tokens on a context of its own; stopping
costs a little, so the sum is somewhat more than the time of an undisturbed pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pyspec._libs import use_patched_libraries
from pyspec.bench.figures import LayerResult
from pyspec.errors import ComputeError

KINDS = ("gdn", "attention", "ffn", "head", "other")
_ENDS = {
    "attn_output": "mixer",  # of attention, or of a recurrence whose projection follows
    "linear_attn_out": "gdn",
    "attn_residual": "residual",
    "post_ffn": "ffn",
    "post_moe": "ffn",
    "l_out": "ffn",
    "result_norm": "other",
    "result_output": "head",
}
_NAME = re.compile(r"^([a-zA-Z_]+?)(?:-(\d+))?$")


def by_layer(
    model_address: int,
    path: Path,
    sizes: Sequence[int],
    *,
    threads: int,
    rounds: int,
    progress: Callable[[float], object],
) -> list[LayerResult]:
    """Median milliseconds of every kind of layer, for passes of so many tokens.

    Raises:
        ComputeError: llama.cpp opens no context, or fails in a pass.
    """
    llama_cpp: Any = use_patched_libraries().llama_cpp
    name_of = llama_cpp._lib.ggml_get_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    watch = _Watch(name_of)
    callback = llama_cpp.ggml_backend_sched_eval_callback(watch)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, 512
    params.n_threads = params.n_threads_batch = threads
    params.cb_eval = callback
    model = ctypes.c_void_p(model_address)
    with _silence(llama_cpp._lib):
        context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise ComputeError(f"{path}: llama.cpp opens no context")
    times: dict[int, list[dict[str, float]]] = {n: [] for n in sizes}
    try:
        total = (rounds + 1) * len(sizes)
        for turn in range(rounds + 1):
            for number, n in enumerate(sizes):
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
                watch.clear()
                _decode(llama_cpp, context, n)
                if turn:
                    times[n].append(dict(watch.ms))
                progress((turn * len(sizes) + number + 1) / total)
    finally:
        with _silence(llama_cpp._lib):
            llama_cpp.llama_free(context)
    return [
        LayerResult(n, {kind: round(median(one[kind] for one in own), 4) for kind in KINDS})
        for n, own in times.items()
    ]


@contextlib.contextmanager
def _silence(library: ctypes.CDLL) -> Iterator[None]:
    """Without llama.cpp's log; who gets it is as before afterwards."""
    pointers = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    get, put = pointers(("llama_log_get", library)), pointers(("llama_log_set", library))
    nobody = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_ignore)
    function, data = ctypes.c_void_p(), ctypes.c_void_p()
    get(ctypes.byref(function), ctypes.byref(data))
    put(ctypes.cast(nobody, ctypes.c_void_p), None)
    try:
        yield
    finally:
        put(function, data)


def _ignore(level: int, text: bytes, data: int) -> None:
    pass


class _Watch:
    """The callback: asked before a tensor whether to stop behind it, then told that it is done."""

    def __init__(self, name_of: Callable[[int], bytes]) -> None:
        self._name_of = name_of
        self._kinds: dict[bytes, str | None] = {}
        self.clear()

    def clear(self) -> None:
        """Starts a new pass."""
        self.ms = dict.fromkeys(KINDS, 0.0)
        self._began = time.perf_counter()
        self._mixer = 0.0

    def __call__(self, tensor: int, ask: bool, user_data: object) -> bool:
        name = self._name_of(tensor)
        if name not in self._kinds:
            found = _NAME.match(name.decode("utf-8", "replace"))
            self._kinds[name] = _ENDS.get(found.group(1)) if found else None
        kind = self._kinds[name]
        if ask:
            if kind is not None:
                self._began = time.perf_counter()  # all was asked for, now it is computed
            return kind is not None
        ms = 1e3 * (time.perf_counter() - self._began)
        if kind == "mixer":
            self._mixer += ms
            return True
        if kind == "residual":
            kind = "other"
            self.ms["attention"] += self._mixer
        elif kind == "gdn":
            ms += self._mixer
        if kind in ("gdn", "other"):
            self._mixer = 0.0
        self.ms[kind or "other"] += ms
        return True


def _decode(llama_cpp: Any, context: Any, n: int) -> None:
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    try:
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i] = i % 64, i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        if status := llama_cpp.llama_decode(context, batch):
            raise ComputeError(f"a pass of {n} tokens failed with status {status}")
    finally:
        llama_cpp.llama_batch_free(batch)
