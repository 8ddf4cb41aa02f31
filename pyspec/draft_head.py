"""`DraftHead`: the drafter reads a subset of the output matrix.

With a vocabulary of 248,000 tokens every drafting pass reads the whole output matrix: 208 of 537 MB
in the shape of Qwen3.5-0.8B. Nearly all text is made of far fewer tokens. The rows of the frequent
ones are copied once, as they are in the file; a token's rank in a byte-pair vocabulary says how
frequent it is. Special tokens, the tokens that a text contains, and those of its scripts are added
as they come. Drafts are tokens of the subset; verification reads the whole matrix, so the text does
not change.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from pyspec.config import DraftConfig
from pyspec.errors import DraftError
from pyspec.model_file import ModelFile

if TYPE_CHECKING:
    from pyspec.native import NativeEngine

ROWS = 32768
"""Rows that are read when nothing is said."""

WORTHWHILE = 2 * ROWS
"""Vocabularies up to this size are read whole."""

RESERVE = 2048
"""Rows kept free for tokens that texts bring."""

_MATRICES = ("output.weight", "token_embd.weight")  # the second one where they are tied

_ROWS_AT_ONCE = 2048

SCRIPT_ROWS = 1024
"""Tokens of a script that are added when it is first seen."""


class DraftHead:
    """Keeps the drafter's subset of the vocabulary; made by `open`."""

    def __init__(self, native: NativeEngine, file: ModelFile, matrix: str, n_rows: int) -> None:
        self._native = native
        self._file = file
        self._matrix = matrix
        self._known: dict[int, int] = {}  # tokens of each slot that were looked at
        self._seen_scripts = {"LATIN"}
        n_vocab = file.tensors[matrix].shape[0]
        self._room = min(n_rows + RESERVE, n_vocab)
        native.draft_head_init(self._room)
        self.present: set[int] = set()
        info = native.info
        special = [info.token_bos, info.token_eos, info.token_eot]
        last = range(max(0, n_vocab - 1024), n_vocab)  # where special tokens are
        self._add(range(n_rows))
        self._add(token for token in special if token >= 0)
        self._add(token for token in last if native.is_eog(token))

    @classmethod
    def open(cls, native: NativeEngine, config: DraftConfig) -> DraftHead | None:
        """Trims the head of the drafter that `native` has open; None where it is read whole.

        Raises:
            DraftError: Rows are asked for, and the head cannot be trimmed.
        """
        n_vocab = native.info.n_vocab
        if config.head_rows == 0 or (config.head_rows is None and n_vocab <= WORTHWHILE):
            return None
        try:
            if native.path is None:
                raise DraftError("the head cannot be trimmed: the model's file is not known")
            file = ModelFile.read(native.path)
            matrix = next((name for name in _MATRICES if name in file.tensors), None)
            if matrix is None:
                raise DraftError(f"the head cannot be trimmed: {file.path} has no output matrix")
            return cls(native, file, matrix, min(config.head_rows or ROWS, n_vocab))
        except DraftError:
            if config.head_rows is not None:
                raise
            return None

    def follow(self, slot: int, tokens: Sequence[int]) -> None:
        """Adds what the text of a slot contains, and more tokens of its scripts, while room lasts.

        Args:
            slot: The sequence.
            tokens: All of it; what was looked at before is skipped.
        """
        known = self._known.get(slot, 0)
        self._known[slot] = len(tokens)
        new = [t for t in tokens[known if known <= len(tokens) else 0 :] if t not in self.present]
        if not new:
            return
        self._add(new)
        for token in dict.fromkeys(new):
            script = _script(self._native.token_to_piece(token))
            if script and script not in self._seen_scripts:
                self._seen_scripts.add(script)
                self._add(self._tokens_of(script))

    def forget(self, slot: int) -> None:
        """The slot holds another text from here on."""
        self._known.pop(slot, None)

    def _add(self, tokens: Iterable[int]) -> None:
        wanted = dict.fromkeys(token for token in tokens if token not in self.present)
        new = np.fromiter(islice(wanted, self._room - len(self.present)), np.int32)
        for at in range(0, len(new), _ROWS_AT_ONCE):
            some = new[at : at + _ROWS_AT_ONCE]
            self._native.draft_head_add(some, self._file.rows(self._matrix, some))
            self.present.update(some.tolist())

    def _tokens_of(self, script: str) -> list[int]:
        """The first tokens of a script, which are the frequent ones."""
        pieces = map(self._native.token_to_piece, range(self._native.info.n_vocab))
        found = (token for token, piece in enumerate(pieces) if _script(piece) == script)
        return list(islice(found, SCRIPT_ROWS))


def _script(piece: bytes) -> str:
    """The script of a token's first letter, as Unicode names it; empty without a letter."""
    for character in piece.decode("utf-8", "ignore"):
        if character.isalpha():
            return unicodedata.name(character, "").partition(" ")[0]
    return ""
