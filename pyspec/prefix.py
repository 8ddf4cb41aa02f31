"""`Prefix`, a beginning of a prompt, and `Checkpoint`, the state that it leaves."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyspec.prefill import Pass, PrefillPlan

Key = tuple[bytes, tuple[Pass, ...]]
"""Tokens and large passes."""


@dataclass(slots=True, eq=False)
class Prefix:
    """A beginning of a prompt and how it was read.

    Attributes:
        tokens: int32, native byte order.
        passes: Its large passes.
    """

    tokens: bytes
    passes: tuple[Pass, ...]

    @classmethod
    def of(cls, tokens: Many[int], plan: PrefillPlan, length: int) -> Prefix:
        """The first `length` of `tokens`, read as `plan` says."""
        return cls(np.asarray(tokens[:length], np.int32).tobytes(), plan.until(length))

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4

    def begins(self, prompt: bytes, plan: PrefillPlan) -> bool:
        """Whether a prompt can go on from here."""
        return (
            self.length <= plan.length
            and prompt.startswith(self.tokens)
            and self.passes == plan.until(self.length)
        )

    @property
    def key(self) -> Key:
        """Equal for equal prefixes."""
        return self.tokens, self.passes


@dataclass(slots=True, eq=False)
class Checkpoint(Prefix):
    """A prefix with the state that it leaves.

    Attributes:
        size: Bytes of the state.
        state: What `NativeEngine.save` gave; None when it is on disk only.
        file: Where it is on disk, once it is.
    """

    size: int = 0
    state: bytes | None = None
    file: Path | None = None
