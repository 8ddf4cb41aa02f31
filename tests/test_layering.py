"""Imports point one way, and the compiled module has one door."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: From the bottom up: a module may import its own layer and those before it.
LAYERS = (
    {"errors", "config", "_libs", "_version"},
    {
        "tree",
        "grammar",
        "schema_limits",
        "sampling",
        "logprobs",
        "text",
        "model_file",
        "chat",
        "exactness",
        "prefill",
    },
    {"prefix", "prefix_store"},
    {"accept", "calibration", "stats", "native"},
    {"cost", "draft_head", "drafter"},
    {"verifier", "sequence", "drafts", "registry", "prefix_cache", "planner"},
    {"controller", "decoder"},
    {"generate"},
    {"cursor", "job"},
    {"scheduler"},
    {"llama", "async_engine", "info", "bench"},
    {"cli", "server"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def sources() -> list[tuple[str, Path]]:
    """(dotted module name, file) of everything that is shipped."""
    found = [
        (".".join(("pyspec", *path.relative_to(ROOT / "pyspec").with_suffix("").parts)), path)
        for path in (ROOT / "pyspec").rglob("*.py")
    ]
    found += [(f"pyspec.drafts.{path.stem}", path) for path in (ROOT / "drafts").rglob("*.py")]
    return [(name.removesuffix(".__init__"), path) for name, path in found]


def imports(path: Path) -> set[str]:
    """The pyspec modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "pyspec" else {str(node.module), *names}
    return {name for name in found if name.split(".")[0] in ("pyspec", "drafts")}


def layer(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


MODULES = sources()


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_dependencies_point_one_way(name: str, path: Path) -> None:
    own = layer(name)
    if not own or own == "reference":  # the package itself re-exports; references stand alone
        return
    assert own in RANK, f"{own} has no layer, add it to LAYERS"
    for imported in imports(path):
        other = layer(imported)
        assert not imported.startswith("drafts"), f"{name} imports {imported}, not pyspec.drafts"
        if other in RANK and other != own:
            assert RANK[other] <= RANK[own], f"{name} imports {imported}, which is above it"


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_compiled_module_and_references_have_one_door(name: str, path: Path) -> None:
    text = path.read_text()
    if layer(name) != "native":
        assert "_pyspec_cffi" not in text, f"{name} touches the compiled module"
    if layer(name) != "reference":
        assert not any(layer(imported) == "reference" for imported in imports(path)), (
            f"{name} imports a reference, which only tests may"
        )


def test_a_second_copy_of_the_drafts_is_refused() -> None:
    code = "import drafts"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "ImportError: import pyspec.drafts instead of drafts" in done.stderr


def test_importing_the_package_leaves_llama_cpp_alone() -> None:
    code = "import sys, pyspec; assert 'llama_cpp' not in sys.modules; pyspec.Llama; assert 'llama_cpp' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
