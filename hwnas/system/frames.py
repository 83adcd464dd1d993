"""Frames: messages between two processes over pipes. A frame is plain values as JSON, and bytes behind them.

Nobody believes what arrives: sizes are held against limits before anything is read, JSON is plain values, and what is
torn or too large is an error. Eight bytes come first: how long the JSON is and how long the bytes, big-endian.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hwnas.system.documents import load_json

MOST_JSON, MOST_BYTES = 32 << 20, 64 << 20
_HEAD = struct.Struct(">II")
_PART = 1 << 16


class LinkLost(Exception):
    """The other side has ended, or what it sent is torn."""


class Untrusted(Exception):
    """What the other side sent is no frame, or larger than a frame may be."""


class Silent(Exception):
    """The other side sent nothing for as long as was waited."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message: plain values, and bytes that belong to them."""

    values: Mapping[str, Any]
    content: bytes = field(default=b"", repr=False)


def send(line: int, values: Mapping[str, Any], content: bytes = b"") -> None:
    """Write a frame to the file descriptor `line`; LinkLost where nobody reads it any more."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MOST_JSON or len(content) > MOST_BYTES:
        raise ValueError(f"a frame of {len(text)} and {len(content)} bytes is too large to be sent")
    write_all(line, _HEAD.pack(len(text), len(content)) + text + content)


def write_all(line: int, content: bytes) -> None:
    """Write bytes to the file descriptor `line`; LinkLost where nobody reads them any more."""
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[os.write(line, rest[:_PART]):]
    except OSError as error:
        raise LinkLost(error.strerror or str(error)) from None


def receive(line: int, silence_s: float | None = None) -> Frame:
    """The next frame from the file descriptor `line`.

    LinkLost at its end, Untrusted for what is no frame, Silent where nothing at all comes for `silence_s` seconds.
    """
    n_text, n_content = _HEAD.unpack(exactly(line, _HEAD.size, silence_s))
    if n_text > MOST_JSON or n_content > MOST_BYTES:
        raise Untrusted(f"a frame of {n_text} and {n_content} bytes is announced; at most {MOST_JSON} and {MOST_BYTES} "
                        "are taken")
    text = exactly(line, n_text, silence_s)
    try:
        values = load_json(text)
    except ValueError as error:
        raise Untrusted(f"a frame is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise Untrusted("a frame is no section of keys and values")
    return Frame(values, exactly(line, n_content, silence_s))


def exactly(line: int, n: int, silence_s: float | None = None) -> bytes:
    """The next `n` bytes; errors as `receive`."""
    parts = bytearray()
    while len(parts) < n:
        if silence_s is not None and not readable(line, silence_s):
            raise Silent
        try:
            part = os.read(line, min(n - len(parts), _PART))
        except OSError as error:
            raise LinkLost(error.strerror or str(error)) from None
        if not part:
            raise LinkLost("it ended" if not parts else "it ended in the middle of a message")
        parts += part
    return bytes(parts)


def readable(line: int, seconds: float) -> bool:
    """Whether something can be read (or the end has come) within so many seconds."""
    until = time.monotonic() + seconds
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(line, select.POLLIN | select.POLLHUP | select.POLLERR)
    while not (ready := poll.poll(max(0.0, until - time.monotonic()) * 1e3)):
        if time.monotonic() >= until:
            return False
    return bool(ready)
