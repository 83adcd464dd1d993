"""Nodes of ONNX files: never fewer than a file has, and one kind of error for what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from hwnas.errors import FileError
from hwnas.runtimes.runtime import nodes_of


def count(path: Path) -> int:
    """Nodes of a file; 0 where it is refused, which any other error is not."""
    try:
        return len(nodes_of(path))
    except FileError:
        return 0


def test_a_torn_graph_is_an_error_and_never_fewer_nodes(tmp_path: Path) -> None:
    path = tmp_path / "torn.onnx"
    inner = helper.make_graph([helper.make_node("Inner", ["a"], ["b"])], "g", [], [])
    nodes = [helper.make_node("Conv", ["a", "b"], ["c"], body=inner) for _ in range(3)]
    content = helper.make_model(helper.make_graph(nodes, "g", [], []), ir_version=9).SerializeToString()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        assert count(path) in (0, 3)  # 3: what is behind the graph was torn off
    assert [node.op_type for node in nodes_of(path)] == ["Conv"] * 3


@given(st.binary(max_size=300))
def test_any_bytes_are_nodes_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(content)
    assert count(path) >= 0
