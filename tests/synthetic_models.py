"""Fixtures: random-weight models, written once a session. A test module takes the fixture so:

from tests import synthetic_models

synthetic = synthetic_models.synthetic

def test_something(synthetic):
    path = synthetic("tiny-qwen35moe", "Q4_0")
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from synthetic_model import PRESETS, preset, write

from tests import tiny_architectures

#: PRESET or architecture of `tiny_architectures`, type, and `layers` or `vocab` when they differ from
#: the preset's; the file's path.
Synthetic = Callable[..., Path]


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Synthetic:
    """Writes random-weight models, equal ones once."""
    folder = tmp_path_factory.mktemp("synthetic")

    def make(name: str, kind: str = "Q8_0", **sizes: int) -> Path:
        label = "-".join([name, kind, *(f"{key}{value}" for key, value in sorted(sizes.items()))])
        path = folder / f"{label}.gguf"
        if not path.exists():
            if name in PRESETS:
                write(path, preset(name, **sizes), kind)
            else:
                tiny_architectures.write(path, name, kind, **sizes)
        return path

    return make
