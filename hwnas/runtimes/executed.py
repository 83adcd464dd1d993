"""Show what a runtime makes of an ONNX file, node by node: what fell back, what was inserted, and each node's time.

A runtime names the nodes of the file of which an executed node was made. The file says what they were meant to be. A
convolution whose data and weights are dequantised is meant for int8, and so is all between two quantise pairs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hwnas.lazy import onnx
from hwnas.networks.qdq import Graph

if TYPE_CHECKING:
    from onnx import NodeProto

    from hwnas.runtimes.runtime import NodeTime
    from hwnas.target import Target

PRECISION, REFERENCE, DEVICE = "another precision", "reference kernel", "another device"
FALLBACKS = (PRECISION, REFERENCE, DEVICE)  # it does not run as file and target ask
INSERTED, LEFT = "inserted", "left by the file"  # costs that are no fallback
WEIGHTED = ("Conv", "Gemm", "MatMul", "ConvTranspose")
ACTIVATIONS = ("Relu", "Clip", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh", "LeakyRelu", "PRelu", "Elu", "Selu",
               "Celu", "Gelu", "Mish", "Softplus", "Softsign", "ThresholdedRelu")
_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_MOVES = ("MaxPool", "Flatten", "Reshape", "Identity", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Pad",
          "Concat", "Resize", "DepthToSpace", "SpaceToDepth")  # values pass unchanged: the nodes behind them decide
# Kinds of executed nodes: LiteRT writes CONV_2D and DEQUANTIZE where others write Conv and DequantizeLinear.
_CONVERSIONS = re.compile(r"Reorder|Convert|Memcpy|Quantize|Dequantize|Cast", re.IGNORECASE)
_WEIGHTED_KINDS = re.compile(r"Conv(?!ert)|Gemm|MatMul|Fully_?Connected", re.IGNORECASE)
_ARRANGES = re.compile(r"Transpose(?!_Conv)|Reshape|Reorder|Convert|Memcpy|Cast", re.IGNORECASE)  # layout or type alone
_ENDS = re.compile(r"[/_:.]")  # one of these precedes what a runtime adds to a name


@dataclass(frozen=True, slots=True)
class FileOperator:
    """One operator of the file. `role` is the name that people use (Swish, for Sigmoid and Mul). `meant` is the
    precision that file and target ask for, empty for none."""

    role: str
    meant: str
    weighted: bool


@dataclass(frozen=True, slots=True)
class ExecutedNode:
    """One node as it was executed, with its share of the whole time. Facts that the runtime does not give are empty.

    `role` is that of the first weighted operator in it, or of the first one. An inserted node's role is its kind.
    `meant` is the precision asked for, and `findings` are some of FALLBACKS, INSERTED, LEFT.
    """

    name: str
    kind: str
    role: str
    meant: str
    precision: str
    implementation: str
    device: str
    ms: float
    share: float
    findings: tuple[str, ...]


def executed(nodes: Sequence[NodeTime], onnx_path: str | os.PathLike[str], target: Target) -> list[ExecutedNode]:
    """Return a profile on a target, compared with the ONNX file. Shares sum to 1, and are equal if no time was seen."""
    file = _File(Graph(onnx.load(os.fspath(onnx_path), load_external_data=False)), target)
    total = sum(node.ms for node in nodes)
    return [_judged(node, node.ms / total if total else 1 / len(nodes), file, target) for node in nodes]


def _judged(node: NodeTime, share: float, file: _File, target: Target) -> ExecutedNode:
    # 1. Find the file's operators in it. A convolution may be fused into a node that is named by its activation alone.
    parts = [file.node_of(part, node.kind) for part in node.name.split(",")]
    operators = [file.operators[part] for part in dict.fromkeys(parts) if part in file.operators]
    if _WEIGHTED_KINDS.search(node.kind) and not any(each.weighted for each in operators):
        operators += [each for part in parts if (each := file.weighted_before(part)) is not None][:1]
    first = next((each for each in operators if each.weighted), operators[0] if operators else None)
    asked_precisions = {each.meant for each in operators if each.meant}
    # 2. Compare how it ran with what was asked. An inserted node has no asked precision.
    findings = []
    if node.device and node.device != target.device:
        findings.append(DEVICE)
    if node.reference:
        findings.append(REFERENCE)
    if first is None or re.match(_CONVERSIONS, node.kind):
        findings.append(INSERTED)
    elif node.precision and asked_precisions and node.precision not in asked_precisions:
        findings.append(PRECISION)
    elif first.weighted and not asked_precisions and node.precision not in ("", target.precision):
        findings.append(LEFT)
    inserted = INSERTED in findings
    name = next((part for part in parts if part in file.operators), node.name.split(",")[0])
    return ExecutedNode(
        name=name, kind=node.kind, role=node.kind if first is None or inserted else first.role,
        ms=node.ms, share=share,
        meant="" if inserted else ",".join(sorted(asked_precisions)), precision=node.precision,
        implementation=node.implementation, device=node.device, findings=tuple(findings))


class _File:
    """The file's operators, found by the names that runtimes use. `operators` holds all nodes except constants and
    pairs, by name: the node's own, or its first output's if it has none."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph = graph
        self.outputs = {value.name for value in graph.proto.graph.output}
        roles: dict[str, str] = {}  # of activations of several nodes, by each of these nodes
        for node in graph.proto.graph.node:
            role, _, parts = _composite(node, graph)
            roles |= {_name(part): role for part in parts}
        self.operators: dict[str, FileOperator] = {}
        self._names: dict[str, str] = {}
        self._nodes = {_name(node): node for node in graph.proto.graph.node}
        for node in graph.proto.graph.node:
            name = _name(node)
            self._names |= dict.fromkeys([*filter(None, node.output), *filter(None, [node.name])], name)
            if node.op_type not in (*_PAIRS, "Constant"):
                role = roles.get(name) or _role(node, graph)
                self.operators[name] = FileOperator(role, self._meant(node, target), node.op_type in WEIGHTED)

    def node_of(self, part: str, kind: str) -> str:
        """Return the node that a runtime's name means: the same name, or its longest beginning that is a node's."""
        exact = part
        while part and part not in self._names:
            ends = [match.start() for match in re.finditer(_ENDS, part)]
            part = part[: ends[-1]] if ends else ""
        # A reorder is named after the node beside it, of which it is no part.
        return "" if re.match(_ARRANGES, kind) and part != exact else self._names.get(part, "")

    def weighted_before(self, name: str) -> FileOperator | None:
        """Return the weighted operator whose result reaches a node only through activations, moves, pairs, Mul, Add."""
        node = self._nodes.get(name)
        while node is not None and node.op_type not in WEIGHTED:
            passes = node.op_type in (*_PAIRS, *_MOVES, *ACTIVATIONS, "Mul", "Add")
            node = self.graph.producer.get(node.input[0]) if passes and node.input else None
        return None if node is None else self.operators[_name(node)]

    def _meant(self, node: NodeProto, target: Target) -> str:
        """Return the asked precision: for a weighted operator the target's, or none if that is int8 and the file did
        not quantise it. Any other operator has int8 if the target has it and a pair is on every side."""
        if target.precision != "int8":
            return target.precision if node.op_type in WEIGHTED else ""
        if node.op_type in WEIGHTED:
            return "int8" if all(self.graph.kind(name) == "DequantizeLinear" for name in node.input[:2]) else ""
        data = [name for name in node.input
                if name and name not in self.graph.weights and self.graph.kind(name) != "Constant"]
        if not data or not all(map(self._dequantised, data)):
            return ""
        ends = _composite(node, self.graph)[1] or node.output  # of the whole activation that starts here
        return "int8" if all(map(self._quantised, ends)) else ""

    def _dequantised(self, tensor: str) -> bool:
        """Return whether a tensor was int8, and has only been moved since."""
        node = self.graph.producer.get(tensor)
        return node is not None and (node.op_type == "DequantizeLinear" or (
            node.op_type in _MOVES and self._dequantised(node.input[0])))

    def _quantised(self, tensor: str) -> bool:
        """Return whether all that read a tensor read it as int8, perhaps after moving it."""
        readers = self.graph.consumers.get(tensor, [])
        return bool(readers) and tensor not in self.outputs and all(
            reader.op_type == "QuantizeLinear" or (reader.op_type in _MOVES and self._quantised(reader.output[0]))
            for reader in readers)


def _name(node: NodeProto) -> str:
    return str(node.name or node.output[0])


def _role(node: NodeProto, graph: Graph) -> str:
    """Return the operator's type. A convolution with groups is called depthwise or grouped."""
    groups = next((each.i for each in node.attribute if each.name == "group"), 1)
    if node.op_type != "Conv" or groups == 1:
        return str(node.op_type)
    before = graph.producer.get(node.input[1])
    name = before.input[0] if before is not None and before.op_type == "DequantizeLinear" else node.input[1]
    weight = graph.weights.get(name)
    return "Conv (depthwise)" if weight is not None and weight.dims[1] == 1 else "Conv (grouped)"


def _composite(node: NodeProto, graph: Graph) -> tuple[str, tuple[str, ...], tuple[NodeProto, ...]]:
    """Return an activation of several nodes that starts at `node`: its name, the tensors it ends in, its nodes."""
    nothing: tuple[str, tuple[str, ...], tuple[NodeProto, ...]] = ("", (), ())
    if node.op_type in ("Sigmoid", "HardSigmoid"):
        gated = [reader for reader in graph.consumers.get(node.output[0], []) if reader.op_type == "Mul"
                 and {*reader.input} == {node.input[0], node.output[0]}]
        name = "Swish" if node.op_type == "Sigmoid" else "HardSwish"
        return (name, tuple(gated[0].output), (node, gated[0])) if gated else nothing
    if node.op_type == "Div":
        end = graph.gelu_of(node.input[0])
        parts = _between(node.input[0], end, graph) if end else ()
        return ("Gelu", (end,), parts) if node in parts else nothing
    return nothing


def _between(first: str, last: str, graph: Graph) -> tuple[NodeProto, ...]:
    """Return the nodes that compute `last` from `first`."""
    waiting = [last]
    parts: list[NodeProto] = []
    while waiting:
        node = graph.producer.get(waiting.pop())
        if node is not None and node.op_type != "Constant" and node not in parts:
            parts.append(node)
            waiting += [name for name in node.input if name != first]
    return tuple(parts)
