"""Frames between processes: what is sent arrives, what is torn or too large is an error and never a guess."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwnas.system.frames import MOST_BYTES, MOST_JSON, Frame, LinkLost, Silent, Untrusted, readable, receive, send

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.dictionaries(TEXT, st.recursive(
    st.none() | st.booleans() | st.integers(-2**53, 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(TEXT, part, max_size=4), max_leaves=12), max_size=6)


@pytest.fixture
def line() -> Iterator[tuple[int, int]]:
    """A pipe: where to read, where to write."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


@given(st.lists(st.tuples(VALUES, st.binary(max_size=200)), min_size=1, max_size=4))
def test_what_is_sent_arrives_in_order(messages: list[tuple[dict[str, object], bytes]]) -> None:
    back, to = os.pipe()
    for values, content in messages:
        send(to, values, content)
    os.close(to)
    assert [receive(back) for _ in messages] == [Frame(values, content) for values, content in messages]
    with pytest.raises(LinkLost, match="it ended"):
        receive(back)
    os.close(back)


@given(VALUES, st.binary(max_size=50), st.data())
def test_a_torn_frame_is_a_lost_link(values: dict[str, object], content: bytes, data: st.DataObject) -> None:
    back, to = os.pipe()
    send(to, values, content)
    whole = os.read(back, 1 << 16)
    os.write(to, whole[: data.draw(st.integers(1, len(whole) - 1))])
    os.close(to)
    with pytest.raises(LinkLost, match="it ended"):
        receive(back)
    os.close(back)


@pytest.mark.parametrize(("head", "why"), [
    (struct.pack(">II", MOST_JSON + 1, 0), "at most"), (struct.pack(">II", 2, MOST_BYTES + 1), "at most"),
    (b"HTTP/1.1", "at most"), (struct.pack(">II", 2, 0) + b"[]", "no section"),
    (struct.pack(">II", 3, 0) + b"{,}", "no JSON"), (struct.pack(">II", 4, 0) + b"\xff\xfe{}", "no JSON"),
    (struct.pack(">II", 100_000, 0) + b"[" * 100_000, "no JSON")])
def test_what_is_no_frame_is_refused_before_it_is_read(line: tuple[int, int], head: bytes, why: str) -> None:
    back, to = line
    threading.Thread(target=os.write, args=(to, head)).start()  # some are longer than a pipe holds
    with pytest.raises(Untrusted, match=why):
        receive(back)


def test_silence_is_told_from_the_end(line: tuple[int, int]) -> None:
    back, to = line
    assert not readable(back, 0.01)
    os.write(to, b"\0\0")
    with pytest.raises(Silent):
        receive(back, 0.01)
    os.close(to)
    assert readable(back, 0.01)


def test_a_reader_that_is_gone_is_a_lost_link(line: tuple[int, int]) -> None:
    back, to = line
    os.close(back)
    with pytest.raises(LinkLost):
        send(to, {"op": "ping"})


def test_nothing_too_large_is_sent(line: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="too large"):
        send(line[1], {}, bytes(MOST_BYTES + 1))
