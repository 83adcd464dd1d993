"""Nodes of ONNX files without the onnx package: what it reads, and never a wrong answer for a torn file."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from hwnas.runtimes.wire import Node, nodes_of

NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
NODES = st.lists(st.tuples(NAMES, st.lists(NAMES, max_size=3), st.lists(NAMES, max_size=3)), max_size=6)


def written(path: Path, nodes: list[tuple[str, list[str], list[str]]]) -> bytes:
    inner = helper.make_graph([helper.make_node("Inner", ["a"], ["b"])], "g", [], [])
    made = [helper.make_node(kind, inputs, outputs, name=f"{kind} of x", domain=kind[:2], alpha=1.5, axes=[1, 2],
                             body=inner) for kind, inputs, outputs in nodes]
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    proto = helper.make_model(helper.make_graph(made, "g", [], [], [weight]), ir_version=9)
    content: bytes = proto.SerializeToString()
    path.write_bytes(content)
    return content


def count(path: Path) -> int:
    """Nodes of a file; 0 where it is refused, which any other error is not."""
    try:
        return len(nodes_of(path))
    except ValueError:
        return 0


@given(nodes=NODES)
def test_the_outermost_nodes_are_those_of_onnx(tmp_path_factory: pytest.TempPathFactory,
                                               nodes: list[tuple[str, list[str], list[str]]]) -> None:
    path = tmp_path_factory.getbasetemp() / "wire.onnx"
    written(path, nodes)
    assert nodes_of(path) == [Node(kind, tuple(inputs), tuple(outputs), f"{kind} of x", kind[:2])
                              for kind, inputs, outputs in nodes]


def test_a_torn_graph_is_an_error_and_never_fewer_nodes(tmp_path: Path) -> None:
    path = tmp_path / "torn.onnx"
    content = written(path, [("Conv", ["a", "b"], ["c"])] * 3)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert count(path) in (0, 3)  # 3: what is behind the graph was torn off


@given(st.binary(max_size=300))
def test_any_bytes_are_nodes_or_a_value_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(content)
    assert count(path) >= 0
