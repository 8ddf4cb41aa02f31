"""`PrefillPlan`: in which passes a prompt is read, and where a checkpoint is taken on the way.

A pass of at most 64 tokens rounds like decoding, however tokens are spread over such passes
(docs/exactness.md); a larger one may round otherwise. So that a state can be reused and the text
stays the same to the byte, the large passes of a prompt are a function of its tokens and segments
alone, and a saved state fits a prompt only where its large passes are those of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

from pyspec.config import MAX_NODES

SMALL = MAX_NODES
"""Most tokens of a pass that rounds as decoding does."""

BLOCK = 256
"""Most tokens of any pass: a prompt that joins keeps running requests waiting for one at most."""

Pass = tuple[int, int]
"""First token of a pass, and the one after its last."""


class Segment(NamedTuple):
    """A part of a prompt whose end is a place to come back to, such as a message of a chat.

    Attributes:
        end: Tokens of the prompt up to and with this segment.
        generated: The model's own words: read in small passes, as they were decoded.
    """

    end: int
    generated: bool = False


class ChatPrompt(str):
    """A rendered chat that knows where its messages end.

    Attributes:
        message_ends: For every message that has an end of its own, the bytes of UTF-8 up to it, and
            whether it is the assistant's.
    """

    message_ends: list[tuple[int, bool]]

    def __new__(cls, text: str, message_ends: Many[tuple[int, bool]] = ()) -> ChatPrompt:
        prompt = super().__new__(cls, text)
        prompt.message_ends = list(message_ends)
        return prompt


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How a prompt is read.

    Attributes:
        length: Tokens to read; the last of the prompt, the root of the first tree, is not counted.
        passes: The passes of more than `small` tokens, in order.
        stops: Lengths at which a checkpoint is taken, ascending.
        small: Most tokens of the other passes.
    """

    length: int
    passes: tuple[Pass, ...] = ()
    stops: tuple[int, ...] = ()
    small: int = SMALL

    @classmethod
    def of(cls, length: int, segments: Many[Segment] = (), block: int = BLOCK) -> PrefillPlan:
        """The plan of a prompt.

        Every segment is cut into passes of `block` tokens from its own start, generated ones and
        rests of at most 64 tokens into small passes.

        Args:
            length: Tokens to read.
            segments: Parts of the prompt in order; what follows the last is open, and so are those
                that end outside of it.
            block: Most tokens of a pass.
        """
        passes: list[Pass] = []
        ends: list[int] = []
        start = 0
        for end, generated in [*segments, Segment(length)]:
            if not start < end <= length:
                continue
            if not generated:
                cuts = range(start, end, block)
                passes += [(at, min(at + block, end)) for at in cuts]
            ends.append(end)
            start = end
        large = tuple(part for part in passes if part[1] - part[0] > SMALL)
        return cls(length, large, _stops(ends, block), min(SMALL, block))

    def next_end(self, at: int) -> int:
        """Where the pass that begins at token `at` ends."""
        limits = [self.length, at + self.small]
        for start, end in self.passes:
            if start == at:
                return end
            if start > at:
                limits.append(start)
                break
        limits += [stop for stop in self.stops if stop > at][:1]
        return min(limits)

    def until(self, length: int) -> tuple[Pass, ...]:
        """The large passes that the first `length` tokens take part in."""
        return tuple(part for part in self.passes if part[0] < length)


def _stops(ends: list[int], block: int) -> tuple[int, ...]:
    """After the first segment, the last two closed ones, the last block, and the whole prompt.

    Those that are less than 64 tokens from the one before are not worth it.
    """
    if not ends:
        return ()
    *closed, length = ends
    open_start = closed[-1] if closed else 0
    last_block = open_start + (length - open_start) // block * block
    stops: list[int] = []
    for stop in sorted({*closed[:1], *closed[-2:], last_block, length}):
        if stop - (stops[-1] if stops else 0) >= SMALL:
            stops.append(stop)
    return tuple(stops)
