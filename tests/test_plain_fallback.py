"""A hybrid whose backend or architecture verifies no trees is decoded plainly, with one clear line."""

from __future__ import annotations

import dataclasses
import logging
from functools import cached_property
from pathlib import Path

import pytest

from pyspec import Engine
from pyspec.info import report
from pyspec.native import NativeEngine


@pytest.fixture
def no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine says that it verifies no trees."""
    real = NativeEngine.info.func
    info = cached_property(lambda native: dataclasses.replace(real(native), tree=False))
    info.__set_name__(NativeEngine, "info")
    monkeypatch.setattr(NativeEngine, "info", info)


def test_decodes_plainly_and_says_so(
    no_trees: None, model: Path, plain: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Engine(model, "mtp", n_ctx=256, n_threads=1) as engine:
        assert engine.drafter.name == "none"
        found = engine.complete("def main(", max_tokens=20, temperature=0)
        assert report(engine).warnings[0].startswith("decoded plainly: ")
    assert [record.getMessage() for record in caplog.records] == [
        f"{model.name}: decoded plainly: llama.cpp verifies no draft trees for the recurrent layers"
        " of qwen35 on this backend"
    ]
    assert found.tokens == plain.complete("def main(", max_tokens=20, temperature=0).tokens
    assert found.stats.as_dict()["tokens_per_step"] == 1.0
