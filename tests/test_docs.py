"""The pages agree with the tree: links, files, data, parts and options that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from pyspec.cli import main
from tests.bench.must_show import PARTS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "ggml_patches" / "README.md"]

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
FILE = re.compile(
    r"(?<![\w./-])((?:pyspec|drafts|tests|scripts|docs|ggml_patches|data)/[\w./*-]*[\w*])"
)
CONTEXT = click.Context(main)
COMMANDS = {name: main.get_command(CONTEXT, name) for name in main.list_commands(CONTEXT)}
COMMAND = re.compile(rf"\bpyspec +({'|'.join(COMMANDS)})\b([^`#\n]*)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as links spell them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@every_page
def test_links(page: Path) -> None:
    for name, anchor in LINK.findall(page.read_text()):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


@every_page
def test_files(page: Path) -> None:
    for name in FILE.findall(page.read_text()):
        assert any(list(folder.glob(name)) for folder in (ROOT, DOCS, ROOT / "pyspec")), name


@every_page
def test_options(page: Path) -> None:
    for name, rest in COMMAND.findall(page.read_text()):
        known = {text for param in COMMANDS[name].params for text in param.opts}
        assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= known | {"--help"}, name + rest


def test_data_and_parts_are_explained() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = {path for name in FILE.findall(text) if "data/" in name for path in DOCS.glob(name)}
    assert set((DOCS / "data").iterdir()) <= named
    for part in PARTS:
        assert f"`{part.name}`" in text, part.name
