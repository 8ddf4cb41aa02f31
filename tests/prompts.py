"""Fifty prompts that no training text contains: code, prose, other scripts, and awkward ends."""

from __future__ import annotations

from pathlib import Path

CODE = [
    "def main(argv=None):\n",
    "class RingBuffer:\n    def __init__(self, size):\n        self.size = size\n",
    "import os\nimport sys\nfrom pathlib import Path\n\n",
    "def count_words(path):\n    words = {}\n    for line in open(path):\n",
    "    def test_roundtrip(self):\n        data = b'abc'\n        self.assertEqual(",
    "for key, value in settings.items():\n    if value is None:\n        ",
    "try:\n    import curses\nexcept ImportError:\n    curses = None\n\n",
    "@property\ndef shape(self):\n    ",
    "def gcd(a, b):\n    while b:\n        ",
    "if __name__ == '__main__':\n    ",
    "class ParseError(Exception):\n    ",
    'def escape(text):\n    """Replace special characters',
    "with open(filename, 'rb') as f:\n    header = f.read(",
    "parser.add_argument('--verbose', action='store_true', help=",
    "async def handle(reader, writer):\n    data = await reader.",
    "return [item for item in items if ",
    "x = [[0] * width for _ in range(height)]\n",
    "def __repr__(self):\n    return '%s(%r)' % (",
    "raise ValueError('expected a positive number, got ",
]

PROSE = [
    "The river turned twice before it reached the mill, and",
    "A compiler reads a program and",
    "This module provides classes that",
    "Return the number of items in the list, or",
    "On the third day it rained. The market stayed closed, so",
    "If the argument is omitted, the default is",
    "Note that this function does not",
    "Dear Ms. Okafor,\n\nThank you for",
    "Changed in version 3.9: added the",
    "It is an error to call this method when",
    "The kitchen smelled of cardamom;",
    "1. Open the lid.\n2. Pour in the water.\n3. ",
    "Q: How many legs has a spider?\nA:",
    "WARNING: do not",
]

OTHER = [
    "Größe und Länge: ",
    "naïve café, déjà vu",
    "Приведение типов",
    "日本語のテキスト",
    "emoji: 🎉🎉",
    "tab\tseparated\tvalues\n1\t2\t",
    "\n\n\n\n",
    "        ",
]

ONE_TOKEN = ["a", " ", "\n", "def"]

MID_CHARACTER = [
    "caf\u00e9".encode()[:-1],
    "print('\u20ac".encode()[:-1],
    "# \u65e5\u672c".encode()[:-2],
    "\U0001f389".encode()[:-1],
]


def as_bytes(prompt: str | bytes) -> bytes:
    """The bytes of a prompt."""
    return prompt.encode() if isinstance(prompt, str) else prompt


PROMPTS: list[bytes] = [
    as_bytes(prompt) for prompt in (b"", *CODE, *PROSE, *OTHER, *ONE_TOKEN, *MID_CHARACTER)
]

FEW: list[bytes] = [
    as_bytes(p) for p in (b"", CODE[0], CODE[4], PROSE[2], OTHER[3], "a", *MID_CHARACTER[:2])
]
"""A cross-section for quick tests."""


def held_out(count: int) -> list[str]:
    """Beginnings of sources that the demo model was not trained on."""
    text = (Path(__file__).parent / "data" / "heldout.txt").read_text("utf-8")
    return [one.strip("\n")[:160] for one in text.split("<|endoftext|>")][:count]
