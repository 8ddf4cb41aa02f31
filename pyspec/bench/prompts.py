"""The prompts that `pyspec bench` uses: beginnings of Python code, or a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path

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


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, or the built-in ones.

    A file holds a JSON array of strings, or else one prompt a line, empty lines left out.

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
    if text.lstrip().startswith("["):
        prompts = _parse(path, text)
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ArgumentError(f"{path} has no prompt")
    return prompts


def _parse(path: Path, text: str) -> list[str]:
    try:
        prompts = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"{path} is not JSON: {error}") from None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ArgumentError(f"{path} must be a JSON array of strings")
    return prompts
