"""Nodes of an ONNX file, read from its bytes: a device counts them without the onnx package.

The file is protocol-buffer wire format (https://protobuf.dev/programming-guides/encoding); numbers of fields are those
of onnx.proto, which never change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GRAPH, _NODE = 7, 1  # of ModelProto, of GraphProto
_INPUT, _OUTPUT, _NAME, _OP_TYPE, _DOMAIN = 1, 2, 3, 4, 7  # of NodeProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the outermost graph: its operator, the names of what it reads and writes, its own name, and the
    domain of its operator."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str = ""
    domain: str = ""


def nodes_of(path: str | os.PathLike[str]) -> list[Node]:
    """The nodes of an ONNX file's graph, in order; OSError, or ValueError where it is no whole ONNX file."""
    content = memoryview(Path(path).read_bytes())
    graphs = [part for number, part in _fields(content) if number == _GRAPH]
    if not graphs:
        raise ValueError("it holds no graph")
    return [_node(part) for graph in graphs for number, part in _fields(graph) if number == _NODE]


def _node(content: memoryview) -> Node:
    texts: dict[int, list[str]] = {_INPUT: [], _OUTPUT: [], _OP_TYPE: [""], _NAME: [""], _DOMAIN: [""]}
    for number, part in _fields(content):
        if number in texts:
            texts[number].append(bytes(part).decode())
    return Node(texts[_OP_TYPE][-1], tuple(texts[_INPUT]), tuple(texts[_OUTPUT]), texts[_NAME][-1], texts[_DOMAIN][-1])


def _fields(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(number, content) of every field that holds bytes: texts and messages; numbers are passed over."""
    at, end = 0, len(content)
    while at < end:
        key, at = _varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            _, at = _varint(content, at)
            continue
        size = _FIXED.get(kind, 0)
        if kind == _BYTES:
            size, at = _varint(content, at)
        elif not size:
            raise ValueError(f"a field of unknown kind {kind}")
        if size > end - at:
            raise ValueError("it ends early")
        if kind == _BYTES:
            yield key >> 3, content[at : at + size]
        at += size


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError("it ends early")
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")
