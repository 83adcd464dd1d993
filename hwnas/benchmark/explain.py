"""Explain what a target executes of a network, operator by operator: precision, fallbacks, time, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from hwnas.benchmark.roofs import Roofs
from hwnas.cli.progress import UNKNOWN, text_table
from hwnas.lazy import onnx
from hwnas.runtimes.executed import DEVICE, FALLBACKS, INSERTED, LEFT, PRECISION, REFERENCE, ExecutedNode, executed
from hwnas.runtimes.runtime import NodeTime
from hwnas.target import Target

NAMED = 3  # nodes that a line names
REPEATS = 100  # inferences that times are the mean of
SMALL = 0.0005  # share below which a row is put with the others
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
_SAID = {PRECISION: "falls back to another precision", REFERENCE: "falls back to slow kernels, as no fast one takes it",
         DEVICE: "falls back to another device", LEFT: "left by the file, which has no int8 for it",
         INSERTED: "inserted conversions and reorders"}


def judge_nodes(nodes: Sequence[NodeTime], file: Path, target: Target) -> dict[str, Any]:
    """Return what was made of the file, as plain values: `nodes`, and `work` of the operators."""
    return {"nodes": [asdict(node) for node in executed(nodes, file, target)], "work": work_of(file, target.batch)}


def work_of(file: Path, batch: int) -> dict[str, list[float]]:
    """Return the FLOPs of each operator by name, and the elements that it reads, has as weights, and writes."""
    proto = onnx.load(str(file), load_external_data=False)
    for value in proto.graph.input:
        if (axes := value.type.tensor_type.shape.dim) and not axes[0].dim_value:
            axes[0].dim_value = batch
    graph = onnx.shape_inference.infer_shapes(proto).graph
    shapes = {value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
              for value in (*graph.input, *graph.output, *graph.value_info)}
    weights = {each.name: list(each.dims) for each in graph.initializer}
    from_weights = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"
                    and node.input[0] in weights}
    work = {}
    for node in graph.node:
        named = {name: prod(shapes.get(name) or weights.get(name) or (0,)) for name in (*node.input, *node.output)
                 if name}
        own = sum(named[name] for name in node.input if name and (name in weights or name in from_weights))
        read = sum(named[name] for name in node.input if name) - own
        written = sum(named[name] for name in node.output if name)
        flops = written
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and len(node.input) > 1:
            shape = shapes.get(node.input[1]) or weights.get(node.input[1]) or [1]
            is_turned = any(each.name == "transB" and each.i for each in node.attribute)
            summed = shape[-1] if is_turned or len(shape) == 1 else shape[-2]  # of a product: its inner axis
            if node.op_type == "ConvTranspose":  # each value that is read reaches all weights of its channel
                flops = 2 * read * prod(shape[1:])
            else:
                flops = 2 * written * (prod(shape[1:]) if node.op_type == "Conv" else summed)
        work[node.name or node.output[0]] = [float(flops), float(read), float(own), float(written)]
    return work


def explanation_lines(told: Mapping[str, Any], target: Target, roofs: Roofs | None) -> Iterator[str]:
    """Yield the table of operators as executed, what fell back, and what bounds the time."""
    nodes = [ExecutedNode(**{**node, "findings": tuple(node["findings"])}) for node in told["nodes"]]
    bounds = {node.name: _bound(node, told["work"], roofs) for node in nodes}
    yield from text_table([_HEAD, *_rows(nodes, bounds)], words=(0, 2, 3, 4, 7, 8))
    yield ""
    yield from _findings(nodes, target)
    if roofs is None:
        yield "what bounds the operators is not known: no roof was measured"
        return
    shares = {bound: sum(node.share for node in nodes if bounds[node.name] == bound)
              for bound in dict.fromkeys(bounds.values()) if bound}
    yield ("bound by " + ", ".join(f"{bound} {share:.0%}" for bound, share in sorted(
        shares.items(), key=lambda item: -item[1])) + f" of the time (roofs: {roofs.peak:.0f} GFLOP/s, "
        f"{roofs.cache:.0f} GB/s in the cache, {roofs.memory:.0f} in memory)")


def _bound(node: ExecutedNode, work: Mapping[str, Sequence[float]], roofs: Roofs | None) -> str:
    parts = [work[name] for name in node.made_of if name in work]
    if roofs is None or not parts or node.ms <= 0:
        return ""
    moved = (parts[0][1] + sum(part[2] for part in parts) + parts[-1][3]) * ELEMENT_BYTES.get(node.precision, 4)
    return roofs.bound(sum(part[0] for part in parts), moved, node.ms)


_HEAD = ("operator", "nodes", "asked", "runs in", "kernel", "profiled ms", "share", "bound by", "")


def _rows(nodes: Sequence[ExecutedNode], bounds: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the nodes that ran alike as one row, the longest time first; the shortest together at the end."""
    groups: dict[tuple[Any, ...], list[ExecutedNode]] = {}
    for node in nodes:
        groups.setdefault((node.role, node.meant, node.precision, node.implementation, node.findings,
                           bounds[node.name]), []).append(node)
    rest = []
    for (role, meant, precision, kernel, findings, bound), part in sorted(
            groups.items(), key=lambda item: -sum(node.share for node in item[1])):
        share = sum(node.share for node in part)
        if share < SMALL and not {*findings} & {*FALLBACKS}:
            rest += part
            continue
        yield (role, str(len(part)), meant or UNKNOWN, precision or UNKNOWN, kernel or UNKNOWN,
               f"{sum(node.ms for node in part):.4f}", f"{share:.1%}", bound or UNKNOWN, ", ".join(findings))
    if rest:
        yield ("others", str(len(rest)), "", "", "", f"{sum(node.ms for node in rest):.4f}", _share(rest), "", "")


def _findings(nodes: Sequence[ExecutedNode], target: Target) -> Iterator[str]:
    """Yield a line for each finding: how many nodes it is of, their share of the time, and a few of their names."""
    if not any(node.precision for node in nodes):
        yield f"{target.runtime} does not tell what its nodes are executed in: what falls back is not known."
    elif not any(node.falls_back for node in nodes):
        yield "Nothing that the runtime tells of falls back."
    for finding, said in _SAID.items():
        if part := [node for node in nodes if finding in node.findings]:
            names = f" ({', '.join(node.name for node in part)})" if len(part) <= NAMED else ""
            yield f"{said}: {len(part)} nodes, {_share(part)} of the time{names}"


def _share(nodes: Iterable[ExecutedNode]) -> str:
    return f"{sum(node.share for node in nodes):.1%}"
