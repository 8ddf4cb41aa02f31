"""The examples of docs/library.md run as they stand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pyspec.native import engine

PAGE = Path(__file__).resolve().parent.parent / "docs" / "library.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def title(example: str) -> str:
    return next(iter(re.findall(r"\b(?:Llama|Engine|AsyncEngine)(?=\()", example)))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for a core of a busy machine cost more than they bring."""
    params = engine._params
    monkeypatch.setattr(
        engine, "_params", lambda config, *more: params(replace(config, n_threads=1), *more)
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=title)
def test_examples(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, PAGE.name, "exec"), {"__name__": "example"})
    printed, complaints = capsys.readouterr()
    assert printed.strip() and not complaints


def test_there_is_one_for_every_way_in() -> None:
    for name in ("Llama", "Engine", "AsyncEngine"):
        assert any(re.search(rf"\b{name}\(", example) for example in EXAMPLES), name
