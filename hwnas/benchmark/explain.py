"""Explain what a target executes of a network, operator by operator: precision, fallbacks and time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hwnas.cli.progress import UNKNOWN, count, text_table
from hwnas.runtimes.executed import DEVICE, FALLBACKS, INSERTED, LEFT, PRECISION, REFERENCE, ExecutedNode, executed
from hwnas.runtimes.runtime import NodeTime
from hwnas.target import Target

NAMED = 3  # most nodes that a line names
SMALL = 0.0005  # share of the time below which a row joins the others
_SAID = {PRECISION: "falls back to another precision", REFERENCE: "falls back to slow kernels, as no fast one takes it",
         DEVICE: "falls back to another device", LEFT: "left by the file, which has no int8 for it",
         INSERTED: "inserted conversions and reorders"}


def judge_nodes(nodes: Sequence[Mapping[str, Any]], file: Path, target: Target) -> dict[str, Any]:
    """Return the profiled nodes compared with their file, as plain values, with the `batch` and `threads` of the
    profile."""
    return {"batch": target.batch, "threads": target.threads,
            "nodes": [asdict(node) for node in executed([NodeTime(**node) for node in nodes], file, target)]}


def explanation_lines(told: Mapping[str, Any], target: Target) -> Iterator[str]:
    """Yield the table of operators as executed, and what fell back."""
    on = count(told["threads"], "thread") if told["threads"] else "all cores"
    yield f"Operators at batch {told['batch']}, on {on}:"
    nodes = [ExecutedNode(**{**node, "findings": tuple(node["findings"])}) for node in told["nodes"]]
    yield from text_table([_HEAD, *_rows(nodes)], words=(0, 2, 3, 4, 7))
    yield ""
    yield from _findings(nodes, target)


_HEAD = ("operator", "nodes", "asked", "runs in", "kernel", "profiled ms", "share", "")


def _rows(nodes: Sequence[ExecutedNode]) -> Iterator[tuple[str, ...]]:
    """Yield a row for all nodes that ran alike, the longest time first. The last row sums up the shortest."""
    groups: dict[tuple[Any, ...], list[ExecutedNode]] = {}
    for node in nodes:
        groups.setdefault((node.role, node.meant, node.precision, node.implementation, node.findings), []).append(node)
    rest = []
    for (role, meant, precision, kernel, findings), part in sorted(
            groups.items(), key=lambda item: -sum(node.share for node in item[1])):
        share = sum(node.share for node in part)
        if share < SMALL and not {*findings} & {*FALLBACKS}:
            rest += part
            continue
        yield (role, str(len(part)), meant or UNKNOWN, precision or UNKNOWN, kernel or UNKNOWN,
               f"{sum(node.ms for node in part):.4f}", f"{share:.1%}", ", ".join(findings))
    if rest:
        yield ("others", str(len(rest)), "", "", "", f"{sum(node.ms for node in rest):.4f}", _share(rest), "")


def _findings(nodes: Sequence[ExecutedNode], target: Target) -> Iterator[str]:
    """Yield a line for each finding: its number of nodes, their share of the time, and a few of their names."""
    if not any(node.precision for node in nodes):
        yield f"{target.runtime} does not say the precision of its nodes, so it is not known what falls back."
    elif not any({*node.findings} & {*FALLBACKS} for node in nodes):
        yield "No node that the runtime reports falls back."
    for finding, text in _SAID.items():
        if part := [node for node in nodes if finding in node.findings]:
            names = f" ({', '.join(node.name for node in part)})" if len(part) <= NAMED else ""
            yield f"{text}: {len(part)} nodes, {_share(part)} of the time{names}"


def _share(nodes: Iterable[ExecutedNode]) -> str:
    return f"{sum(node.share for node in nodes):.1%}"
