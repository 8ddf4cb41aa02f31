#!/usr/bin/env python3
"""Writes tests/data/dflash_stock.json: the blocks that unpatched llama.cpp drafts on the demo model.

    LLAMA_CPP_LIB_PATH=<libraries of the unpatched source> python scripts/make_dflash_vectors.py

Run it again whenever the demo model or its drafter changes; it needs PyTorch, whose blocks it keeps
beside. pyspec is not imported: the libraries are llama.cpp's own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
VECTORS = ROOT / "tests" / "data" / "dflash_stock.json"
SKIP, EVERY, LENGTH = 8, 16, 512

sys.path.insert(0, str(ROOT / "scripts"))

from dflash.gguf_file import read_drafter  # noqa: E402
from dflash.llama import DraftContext, Model, TargetContext  # noqa: E402


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def llama_blocks(
    target: Path, drafter: Path, tokens: Sequence[int], anchors: Sequence[int]
) -> list[NDArray[np.float32]]:
    """Logits [block_size - 1, V] that llama.cpp's graphs give for the block at every anchor."""
    cfg, _ = read_drafter(drafter)
    n_ctx = len(tokens) + cfg.block_size
    with (
        Model(target) as theirs,
        Model(drafter) as ours,
        TargetContext(theirs, cfg.target_layers, n_ctx) as reader,
        DraftContext(ours, reader, n_ctx) as context,
    ):
        features, _ = reader.read(tokens)
        injected, blocks = 0, []
        for anchor in anchors:  # ascending: each injects what the one before had not
            context.inject(features[injected:anchor], injected)
            injected = anchor
            logits = context.block(tokens[anchor], cfg.mask_token, anchor, cfg.block_size)
            blocks.append(logits[1:])
    return blocks


def torch_blocks(
    target: Path, drafter: Path, tokens: Sequence[int], anchors: Sequence[int]
) -> NDArray[np.float32]:
    """The same [anchors, block_size - 1, V] by the training code, on the target's features."""
    import torch
    from dflash.model import Drafter
    from dflash.train import adopt, shared_matrices

    cfg, weights = read_drafter(drafter)
    model = Drafter(cfg, *shared_matrices(target))
    adopt(model, weights)
    with Model(target) as theirs, TargetContext(theirs, cfg.target_layers, len(tokens)) as reader:
        features, _ = reader.read(tokens)
    with torch.no_grad():
        hidden = model(
            torch.from_numpy(features)[None],
            torch.tensor(tokens)[None],
            torch.tensor([anchors]),
            cfg.block_size,
        )
        return model.logits(hidden)[0].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ROOT / "pyspec" / "models"
    parser.add_argument("--model", type=Path, default=models / "demo.gguf")
    parser.add_argument("--drafter", type=Path, default=models / "demo-dflash.gguf")
    parser.add_argument("--out", type=Path, default=VECTORS)
    options = parser.parse_args()
    if "LLAMA_CPP_LIB_PATH" not in os.environ:
        sys.exit("LLAMA_CPP_LIB_PATH must name the libraries of the unpatched llama.cpp")

    import llama_cpp

    text = (ROOT / "tests" / "data" / "heldout.txt").read_text("utf-8")
    llama = llama_cpp.Llama(str(options.model), vocab_only=True, verbose=False)
    tokens = llama.tokenize(text.encode(), add_bos=False, special=True)[:LENGTH]
    anchors = list(range(SKIP, len(tokens), EVERY))
    found = llama_blocks(options.model, options.drafter, tokens, anchors)
    ours = torch_blocks(options.model, options.drafter, tokens, anchors)
    cases = []
    for anchor, stock, torch_logits in zip(anchors, found, ours, strict=True):
        best = np.sort(stock, 1)
        cases.append(
            {
                "anchor": anchor,
                "stock": stock.argmax(1).tolist(),
                "gap": np.round(best[:, -1] - best[:, -2], 4).tolist(),
                "torch": torch_logits.argmax(1).tolist(),
            }
        )
    difference = max(float(np.abs(a - b).max()) for a, b in zip(found, ours, strict=True))
    same = np.mean([np.equal(case["stock"], case["torch"]).mean() for case in cases])
    document = {
        "target_sha256": digest(options.model),
        "drafter_sha256": digest(options.drafter),
        "tokens": tokens,
        "torch_difference": round(difference, 4),
        "cases": cases,
    }
    options.out.write_text(json.dumps(document) + "\n")
    print(
        f"{len(cases)} blocks; PyTorch differs by at most {difference:.3f}, same first choice {same:.2%}"
    )


if __name__ == "__main__":
    main()
