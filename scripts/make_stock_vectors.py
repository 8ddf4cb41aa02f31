#!/usr/bin/env python3
"""Writes tests/data/stock_greedy.json: what unpatched llama.cpp decodes greedily on the demo model.

    LLAMA_CPP_LIB_PATH=<libraries of the unpatched source> python scripts/make_stock_vectors.py

Run it again whenever the demo model changes. pyspec is not imported: the libraries are llama.cpp's
own, built from the pinned source with GGML_LLAMAFILE=OFF as pyspec's are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from prompts import PROMPTS  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "pyspec" / "models" / "demo.gguf")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "stock_greedy.json")
    parser.add_argument("-n", type=int, default=200, help="tokens per prompt")
    options = parser.parse_args()

    import llama_cpp

    sha256 = digest(options.model)
    # With flash attention, llama.cpp's default, and without it. Without, pyspec computes the same bits;
    # with it, pyspec sums in an order of its own, which does not depend on the rest of a batch.
    llamas = {
        name: llama_cpp.Llama(
            str(options.model), n_ctx=1024, n_threads=1, flash_attn=flash_attn, verbose=False
        )
        for name, flash_attn in (("flash_attn", True), ("no_flash_attn", False))
    }
    llama = llamas["flash_attn"]
    single = {piece: t for t in range(llama.n_vocab()) if len(piece := llama.detokenize([t])) == 1}
    vectors = []
    for prompt in PROMPTS:
        tokens = tokenize(llama, prompt, single)
        vectors.append(
            {
                "prompt": prompt.hex(),
                "tokens": tokens,
                **{name: greedy(one, tokens, options.n) for name, one in llamas.items()},
            }
        )
        print(f"{len(vectors)}/{len(PROMPTS)}", end="\r", file=sys.stderr)
    if digest(options.model) != sha256:
        sys.exit(f"{options.model} has changed meanwhile: run this again")
    document = {
        "model_sha256": sha256,
        "llama_cpp_python": llama_cpp.__version__,
        "vectors": vectors,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps(document, separators=(",", ":")).replace('{"p', '\n{"p') + "\n"
    )


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tokenize(llama, prompt: bytes, single: dict[bytes, int]) -> list[int]:
    """Token ids; bytes of an incomplete character at the end become one token each."""
    whole = prompt.decode("utf-8", "ignore").encode()
    tokens = llama.tokenize(whole, add_bos=True, special=True) if whole else []
    tokens += [single[bytes([byte])] for byte in prompt[len(whole) :]]
    return tokens or [llama.token_bos() if llama.token_bos() >= 0 else llama.token_eos()]


def greedy(llama, tokens: list[int], n: int) -> list[int]:
    """`n` tokens by plain llama_decode, one at a time, end-of-generation tokens included."""
    llama.reset()
    llama._ctx.kv_cache_clear()
    out: list[int] = []
    llama.eval(tokens)
    for _ in range(n):
        logits = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),))
        out.append(int(logits.argmax()))
        llama.eval(out[-1:])
    return out


if __name__ == "__main__":
    main()
