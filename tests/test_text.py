"""TextStream: whole characters only, stop strings, incomplete prompts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec import ArgumentError, EncodingError
from pyspec.text import TextStream, check_utf8, split_incomplete


def stream(pieces: list[bytes], stops: tuple[str, ...] = (), pending: bytes = b"") -> TextStream:
    return TextStream(pieces.__getitem__, stops, pending)


@given(st.text(), st.lists(st.integers(0, 60)), st.booleans())
def test_any_split_of_the_bytes_gives_the_text(
    text: str, cuts: list[int], one_by_one: bool
) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    out = stream(pieces)
    shown = [out.push([token]) for token in range(len(pieces))]
    assert "\ufffd" not in "".join(shown) or "\ufffd" in text
    assert "".join(shown) + out.finish() == text == out.text


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stops_cut_at_the_first_that_appears(text: str, stops: list[str]) -> None:
    pieces = [char.encode() for char in text]
    out = stream(pieces, tuple(stops))
    shown = ""
    for token in range(len(pieces)):
        expected_end = out.count_until_stop([token])
        shown += out.push([token])
        assert (out.stopped_by is not None) == (expected_end == 1)
        if out.stopped_by:
            break
    shown += out.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    read = text[: min(ends, default=len(text))]
    cut = min((read.find(stop) for stop in stops if stop in read), default=len(read))
    assert shown == text[:cut]


def test_count_until_stop_changes_nothing() -> None:
    out = stream([b"a", b"EN", b"D", b"x"], ("END",))
    assert out.count_until_stop([0, 1, 2, 3]) == 3
    assert out.count_until_stop([0, 1]) is None
    assert out.push([0, 1]) == "a"
    assert out.count_until_stop([2]) == 1
    assert out.push([2]) == ""
    assert (out.text, out.stopped_by) == ("a", "END")


def test_possible_stop_is_held_back_and_released() -> None:
    out = stream([b"one E", b"N", b"ough"], ("END",))
    assert out.push([0]) == "one "
    assert out.push([1]) == ""
    assert out.push([2]) == "ENough"


def test_incomplete_end_becomes_replacement() -> None:
    out = stream([b"caf\xc3"])
    assert out.push([0]) == "caf"
    assert out.finish() == "\ufffd"


def test_pending_bytes_of_the_prompt_are_completed() -> None:
    out = stream([b"\xa9!"], pending=b"\xc3")
    assert out.push([0]) == "é!"


def test_refuses_empty_stop() -> None:
    with pytest.raises(ArgumentError, match="non-empty"):
        stream([], ("",))


@given(st.text(min_size=1))
def test_split_incomplete_finds_cut_characters(text: str) -> None:
    data = text.encode()
    size = len(text[-1].encode())
    for cut in range(1, size):
        assert split_incomplete(data[:-cut]) == (data[:-size], data[-size:-cut])
    assert split_incomplete(data) == (data, b"")


def test_check_utf8() -> None:
    assert check_utf8("né".encode()[:-1], "-p") == b"n\xc3"
    with pytest.raises(EncodingError, match="notes is not valid UTF-8: byte 0xff at position 2"):
        check_utf8(b"ab\xffcd", "notes")
    with pytest.raises(EncodingError, match="position 0"):
        check_utf8(b"\x80", "-p")
