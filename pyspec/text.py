"""From token pieces to text: UTF-8 safe, incremental, with stop strings.

Tokens carry bytes, and a character may be spread over several of them. `TextStream` hands out text
only when its characters are complete and can no longer be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from pyspec.errors import ArgumentError, EncodingError

_Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Collects pieces of bytes and emits text.

    Bytes that are no UTF-8 become U+FFFD, as everywhere.

    Args:
        piece: The bytes of a token.
        stops: Strings that end generation; the text ends before the first that appears.
        pending: Bytes of an incomplete character at the end of the prompt.
    """

    def __init__(
        self, piece: Callable[[int], bytes], stops: Sequence[str] = (), pending: bytes = b""
    ) -> None:
        if any(not stop for stop in stops):
            raise ArgumentError("stop is '', must be a non-empty string")
        self._piece = piece
        self._stops = tuple(stops)
        self._decoder = _Decoder(errors="replace")
        self._held = self._decoder.decode(pending)
        self._parts: list[str] = []
        self.stopped_by: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether a string may end it."""
        return bool(self._stops)

    @property
    def text(self) -> str:
        """All text emitted so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def count_until_stop(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens` it takes to complete a stop string, or None; changes nothing."""
        if not self._stops:
            return None
        decoder = _Decoder(errors="replace")
        decoder.setstate(self._decoder.getstate())
        held = self._held
        for count, token in enumerate(tokens, 1):
            held += decoder.decode(self._piece(token))
            if any(stop in held for stop in self._stops):
                return count
        return None

    def push(self, tokens: Sequence[int]) -> str:
        """Adds tokens; returns the text that is safe to show."""
        self._held += self._decoder.decode(b"".join(map(self._piece, tokens)))
        return self._release(final=False)

    def finish(self) -> str:
        """Returns the text still held back; an incomplete character becomes U+FFFD."""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        cut = len(self._held)
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            cut, self.stopped_by = min(hits)
            text, self._held = self._held[:cut], ""
        else:
            if not final:
                cut -= max((overlap(self._held, stop) for stop in self._stops), default=0)
            text, self._held = self._held[:cut], self._held[cut:]
        if text:
            self._parts.append(text)
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop` itself."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def split_incomplete(data: bytes) -> tuple[bytes, bytes]:
    """Splits bytes before an incomplete UTF-8 character at their very end (0 to 3 bytes)."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # continuation
            continue
        size = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC2 else 1
        return (data[:-back], data[-back:]) if size > back else (data, b"")
    return data, b""


def check_utf8(data: bytes, name: str) -> bytes:
    """Returns `data` if it is UTF-8, an incomplete character at its end being allowed.

    Raises:
        EncodingError: Names `name`, the offending byte and its position.
    """
    head, _ = split_incomplete(data)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EncodingError(
            f"{name} is not valid UTF-8: byte 0x{head[error.start]:02x} at position {error.start}"
        ) from None
    return data
