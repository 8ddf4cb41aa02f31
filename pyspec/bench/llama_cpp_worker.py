"""Decodes with a plain `llama_cpp.Llama` in a process of its own, on llama.cpp as it was released.

Run as a file, so that nothing of pyspec is imported. Reads one JSON object a line, answers one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from itertools import islice
from typing import Any


def main() -> None:
    """Serves standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with contextlib.redirect_stdout(sys.stderr):
        llama: Any = None
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if llama is None:
                    llama, answer = _open(request)
                else:
                    answer = _decode(llama, request)
            except Exception as error:  # told to the one who asked
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")


def _open(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import llama_cpp

    llama = llama_cpp.Llama(verbose=False, logits_all=False, **request)
    return llama, {"version": llama_cpp.__version__}


def _decode(llama: Any, request: dict[str, Any]) -> dict[str, Any]:
    prompt, count, sampling = request["prompt"], request["max_tokens"], request["sampling"]
    llama.reset()
    if hasattr(llama, "_ctx"):
        llama._ctx.kv_cache_clear() if hasattr(llama._ctx, "kv_cache_clear") else None
    if "seed" in request:
        llama.set_seed(request["seed"])
    began = time.perf_counter()
    stream = llama.generate(prompt, reset=True, **sampling)
    tokens = [next(stream)]
    first = time.perf_counter()
    tokens += islice(stream, count - 1)
    end = time.perf_counter()
    return {
        "tokens": [int(token) for token in tokens],
        "prompt_ms": 1e3 * (first - began),
        "decode_ms": 1e3 * (end - first),
    }


if __name__ == "__main__":
    main()
