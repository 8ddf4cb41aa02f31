"""The prompts that `pyspec bench` uses: small sets written for it, or a file of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pyspec.errors import ArgumentError
from pyspec.text import check_utf8

BUILT_IN = (
    'def read_config(path):\n    """Read a configuration file',
    "class LinkedList:\n    def __init__(self):\n        self.head = None\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "    def test_empty(self):\n        self.assertEqual(",
    "try:\n    import ssl\nexcept ImportError:\n",
    "for name, value in sorted(headers.items()):\n    if ",
    "# This module provides a simple interface to the operating system",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
)
"""The set ``code``."""

_REPORT = (
    "The harbour office counted 412 arrivals in March. Of these, 230 were fishing boats, 121 were "
    "freighters and 61 were yachts. The north pier was closed for nine days, because two of its "
    "bollards had come loose in the storm of the fourth. No one was hurt. The repair cost 18,400 "
    "crowns, which is less than the council had set aside. From April on, boats longer than twenty "
    "metres have to give notice a day before they arrive."
)
_TABLE = (
    "name,town,hours\nAda Brandt,Lund,31\nIvo Maric,Split,27\nNoor Haddad,Utrecht,40\n"
    "Jonas Eklund,Visby,18\nMei Tanaka,Otaru,36\n"
)
_FUNCTION = (
    "def total(items):\n    result = 0\n    for item in items:\n        if item.price is not None:\n"
    "            result += item.price * item.count\n    return result\n"
)


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


SETS: dict[str, tuple[str, ...]] = {
    "code": BUILT_IN,
    "prose": (
        "The lighthouse keeper wrote every evening, and that evening",
        "A compiler reads a program and",
        "Rain had fallen on the valley for three days when",
        "There are two ways to sharpen a chisel. The first",
    ),
    "chat": tuple(
        map(
            _chat,
            (
                "How do I keep bread fresh for longer?",
                "Explain in three sentences what a hash table is.",
                "Write a Python function that reverses the words of a sentence.",
                "My train is late and I miss the connection. What are my rights?",
            ),
        )
    ),
    "json": (
        '{\n  "name": "sensor-7",\n  "readings": [\n    {"time": "08:00", "value": 21.4},\n',
        "A JSON list of five European capitals with country and population:\n```json\n[\n  {",
        _chat("Give me this table as a JSON array of objects.\n\n" + _TABLE) + "```json\n[\n",
    ),
    "copy": (
        _chat("Summarise in two sentences, in the words of the text:\n\n" + _REPORT),
        _chat("Repeat this text word by word:\n\n" + _REPORT) + "The harbour office",
        _chat("Rename `result` to `amount`, change nothing else:\n\n" + _FUNCTION) + "def total(",
    ),
}
"""Prompts by kind of text."""


class BenchPrompt(NamedTuple):
    """A prompt, and the name of the set that its figures are counted for."""

    text: str | tuple[int, ...]
    group: str


def built_in(names: Sequence[str] = ("code",)) -> list[BenchPrompt]:
    """The prompts of the named sets; ``all`` is every set.

    Raises:
        ArgumentError: There is no such set.
    """
    chosen: list[str] = []
    for name in names:
        if name != "all" and name not in SETS:
            raise ArgumentError(
                f"no prompt set is called {name!r}, there are: all, {', '.join(SETS)}"
            )
        chosen += SETS if name == "all" else (name,)
    return [BenchPrompt(text, name) for name in dict.fromkeys(chosen) for text in SETS[name]]


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, or the built-in ones on code.

    A file holds a JSON array of strings; or, as ``.jsonl``, a string or an object with ``prompt`` or
    ``text`` a line; or else one prompt a line, empty lines left out.

    Raises:
        ArgumentError: The file cannot be read, or has no prompt.
        EncodingError: It is not UTF-8.
    """
    if path is None:
        return list(BUILT_IN)
    try:
        text = check_utf8(path.read_bytes(), str(path)).decode("utf-8", "replace")
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from None
    if path.suffix == ".jsonl":
        prompts = _lines(path, text)
    elif text.lstrip().startswith("["):
        prompts = _parse(path, text)
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ArgumentError(f"{path} has no prompt")
    return prompts


def _lines(path: Path, text: str) -> list[str]:
    prompts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ArgumentError(f"{path}, line {number} is not JSON: {error}") from None
        if isinstance(value, dict):
            value = value.get("prompt", value.get("text"))
        if not isinstance(value, str):
            raise ArgumentError(
                f'{path}, line {number} must be a string or an object with "prompt" or "text"'
            )
        prompts.append(value)
    return prompts


def _parse(path: Path, text: str) -> list[str]:
    try:
        prompts = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"{path} is not JSON: {error}") from None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ArgumentError(f"{path} must be a JSON array of strings")
    return prompts
