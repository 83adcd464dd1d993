"""What a check of a network shows: a table of its operators as executed, what fell back, and the advice that follows.

Format history of the JSON file
    1   first: model, target, host, runtime, input, executed precisions, nodes, operators of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from hwnas.cli.progress import UNKNOWN, text_table
from hwnas.latency.fallbacks import CheckedBlock, left_out, warning
from hwnas.runtimes.executed import DEVICE, FALLBACKS, INSERTED, LEFT, PRECISION, REFERENCE, Executed, ExecutedNode
from hwnas.system.documents import Document, now
from hwnas.system.paths import write_atomic
from hwnas.system.tables import shown_csv
from hwnas.target import Host, Target

CHECK = Document("hwnas-check", 1, "a check of a network", "Check it again.", two_fields=True)
_GATES = ("Sigmoid", "HardSigmoid")  # activations that stand in no other's place
NAMED = 3  # nodes that a line names
_SMALL = 0.0005  # share below which a row is put with the others
# What the tables begin with, of this version and of earlier ones, by which they are known again.
NODES_BEGIN, BLOCKS_BEGIN = (",".join(field.name for field in fields(row)[:6]) for row in (ExecutedNode, CheckedBlock))
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one network. `made_up`: quantised here, with made-up ranges."""

    model: str
    target: Target
    host: Host
    runtime: str
    made_up: bool
    image: tuple[int, ...]
    execution: Mapping[str, Any]
    executed: Executed

    def save(self, out: Path) -> tuple[Path, Path]:
        """Write the table of nodes (.csv) and everything (.json), both named after `out`."""
        csv, whole = (out.with_suffix(suffix) for suffix in (".csv", ".json"))
        plain = self.executed.to_dict()
        data = {**CHECK.header, "created": now(), "model": self.model,
                "made_up_ranges": self.made_up, "target": asdict(self.target), "host": self.host.to_dict(),
                "runtime": self.runtime, "input": list(self.image), "execution": dict(self.execution),
                "advice": list(advice(self.executed, self.target)), **plain}
        write_atomic(csv, shown_csv([{**node, "made_of": " ".join(node["made_of"]),
                                      "findings": ", ".join(node["findings"])} for node in plain["nodes"]]))
        write_atomic(whole, json.dumps(data, indent=1, allow_nan=False))
        return csv, whole


def lines(check: Check) -> Iterator[str]:
    """What is printed, line by line."""
    for name, text in _facts(check):
        yield f"{name:<10} {text}"
    yield ""
    yield from text_table([_HEAD, *_rows(check.executed.nodes)], words=(0, 2, 3, 4, 7))
    yield ""
    yield from advice(check.executed, check.target)


def _facts(check: Check) -> Iterator[tuple[str, str]]:
    target, counts = check.target, check.execution["precisions"]
    yield "model", check.model
    yield "input", ("×".join(map(str, check.image)) + f" float32, batch {target.batch}"
                    + (", quantised with made-up ranges (right for timing only)" if check.made_up else ""))
    yield "target", f"{target.name}: {target.precision} on {check.runtime}, threads {target.threads or 'all'}"
    yield "host", f"{check.host.name} ({check.host.cpu})"
    yield "executed", ("convolutions and matrix products: "
                       + (", ".join(f"{count} in {name}" for name, count in sorted(counts.items())) or UNKNOWN))
    yield "time", (f"{check.executed.ms:.4g} ms, the sum of {len(check.executed.nodes)} nodes' (undisturbed: python -m "
                   "hwnas.benchmark)")


_HEAD = ("operator", "nodes", "asked", "runs in", "kernel", "ms", "share", "")


def _rows(nodes: Sequence[ExecutedNode]) -> Iterator[tuple[str, ...]]:
    """The nodes that ran alike as one row, the longest time first; the shortest together at the end."""
    groups = grouped(nodes, lambda node: (node.role, node.meant, node.precision, node.implementation, node.findings,
                                          node.serves))
    rest = []
    for (role, meant, precision, kernel, findings, serves), part in groups:
        share = sum(node.share for node in part)
        if share < _SMALL and not {*findings} & {*FALLBACKS}:
            rest += part
            continue
        said = ", ".join(findings) + (f" for {serves}" if serves else "")
        yield (role, str(len(part)), meant or UNKNOWN, precision or UNKNOWN, kernel or UNKNOWN,
               f"{sum(node.ms for node in part):.4f}", f"{share:.1%}", said)
    if rest:
        yield ("others", str(len(rest)), "", "", "", f"{sum(node.ms for node in rest):.4f}",
               f"{sum(node.share for node in rest):.1%}", "")


def grouped(nodes: Iterable[ExecutedNode], key: Callable[[ExecutedNode], _Key]
            ) -> list[tuple[_Key, list[ExecutedNode]]]:
    """Nodes by key, the groups with most time first."""
    groups: dict[_Key, list[ExecutedNode]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return sorted(groups.items(), key=lambda item: -sum(node.share for node in item[1]))


def advice(executed: Executed, target: Target) -> Iterator[str]:
    """What follows, a line each: what falls back and what that costs, what is left in floating point and by whom, what
    was inserted, what each activation costs."""
    falling = [node for node in executed.nodes if node.falls_back]
    for (role, finding), part in grouped(falling, lambda node: (node.role, node.findings[0])):
        yield _falls_back(role, finding, part, executed, target)
    if not any(node.precision for node in executed.nodes):
        yield f"{target.runtime} does not tell what its nodes are executed in: what falls back is not known."
    elif not falling:
        yield "Nothing that the runtime tells of falls back."
    left = [node for node in executed.nodes if LEFT in node.findings]
    if left:
        runs = ", ".join(sorted({node.precision for node in left}))
        yield (f"left in {runs} by the file: {_counted(left)}, {_share(left)} of the time"
               + (" (such as the two of each squeeze-and-excite, which the int8 recipe leaves)"
                  if target.precision == "int8" else ""))
    inserted = [node for node in executed.nodes if INSERTED in node.findings]
    if inserted:
        around = grouped((node for node in inserted if node.serves), lambda node: node.serves)[:NAMED]
        words = ", ".join(f"{_share(part)} around {role}" for role, part in around)
        yield (f"inserted: {len(inserted)} conversions and reorders, {_share(inserted)} of the time"
               + (f": {words}" if words else ""))
    yield from _activations(executed)


_CAUSE = {
    PRECISION: "{asked} was asked for, and {runs} runs", REFERENCE: "no fast kernel takes it ({kernel} runs)",
    DEVICE: "it runs on {device}, and not on {wanted}"}


def _falls_back(role: str, finding: str, part: Sequence[ExecutedNode], executed: Executed, target: Target) -> str:
    node = part[0]
    cause = _CAUSE[finding if finding in _CAUSE else PRECISION].format(
        asked=node.meant, runs=node.precision, kernel=node.implementation, device=node.device, wanted=target.device)
    ours = {name for each in part for name in each.made_of}
    wholes = {each.whole for each in executed.operators if each.name in ours}
    every = {each.whole for each in executed.operators if each.role == role}
    count = f"{len(wholes)} of {len(every)} {role}" if every else f"{len(part)} {role}"
    around = [each for each in executed.nodes if INSERTED in each.findings and each.serves == role]
    cost = f"{_share(part)} of the time" + (f", {_share([*part, *around])} with the conversions around" * bool(around))
    names = f" ({', '.join(each.name for each in part)})" if len(part) <= NAMED else ""
    return f"falls back: {count}: {cause}: {cost}{names}{_instead(role, executed)}"


def _instead(role: str, executed: Executed) -> str:
    """Other activations of the file that are fused here, for an activation that is not."""
    apart = {node.role for node in executed.nodes}
    others = {each.role for each in executed.operators if each.activation}
    if role not in others or not (fused := sorted(others - apart - {*_GATES})):
        return ""
    return f"; {' or '.join(fused)} in its place, fused here, would save up to that"


def _activations(executed: Executed) -> Iterator[str]:
    """What each activation costs where it is a node of its own; fused ones cost nothing that can be told apart."""
    wholes: dict[str, set[str]] = {}
    for each in executed.operators:
        if each.activation:
            wholes.setdefault(each.role, set()).add(each.whole)
    if not wholes:
        return
    whole_of = {each.name: each.whole for each in executed.operators}
    costs = []
    for role, every in wholes.items():
        own = [node for node in executed.nodes if node.role == role]
        around = [node for node in executed.nodes if INSERTED in node.findings and node.serves == role] if own else []
        alone = {whole_of[name] for node in own for name in node.made_of} & every
        share = sum(node.share for node in (*own, *around))
        costs.append((share, f"{role} {share:.1%} ({len(alone)} of {len(every)} in nodes of their own)" if alone else
                      f"{role} 0 % (all {len(every)} fused or folded)"))
    yield "activations: " + ", ".join(text for _, text in sorted(costs, key=lambda cost: -cost[0]))


def _counted(nodes: Iterable[ExecutedNode]) -> str:
    return ", ".join(f"{len(part)} {role}" for role, part in grouped(nodes, lambda node: node.role))


def _share(nodes: Iterable[ExecutedNode]) -> str:
    return f"{sum(node.share for node in nodes):.1%}"


def block_lines(rows: Sequence[CheckedBlock], target: Target) -> Iterator[str]:
    """The table of a space's kinds of blocks in each precision, and what follows."""
    head = ("block", "squeeze", "activation", "as", "precision", "µs", "against fp32", "falls back", "inserted", "")
    plain = {(row.block, row.activation): row.ms for row in rows if row.precision == "fp32"}
    table = [head]
    for row in rows:
        fp32 = plain.get((row.block, row.activation))
        ratio = f"{row.ms / fp32:.2f}" if row.ms and fp32 else UNKNOWN
        table.append((row.kind, "yes" if row.se else "no", row.activation, row.block, row.precision,
                      f"{1e3 * row.ms:.1f}" if row.ms is not None else UNKNOWN, ratio, f"{row.fallback_share:.0%}",
                      f"{row.inserted_share:.0%}", row.refused or row.falls))
    yield from text_table(table, words=(0, 1, 2, 3, 4, 9))
    yield ""
    told = all(row.told for row in rows if row.precision == target.precision)
    yield warning(rows, target) or (
        f"{target.name} runs every kind of block as it is asked." if told else
        f"{target.runtime} does not tell what its nodes are executed in: what falls back is not known.")
    if left := left_out(rows, target):
        yield f"a search leaves out, unless fallbacks=true: {'; '.join(left.values())}"
    slower = [row for row in rows if row.precision == target.precision != "fp32" and row.ms
              and (fp32 := plain.get((row.block, row.activation))) and row.ms > fp32]
    if slower:
        yield f"slower in {target.precision} than in fp32: {'; '.join(row.name for row in slower)}"


def save_rows(rows: Sequence[CheckedBlock], out: Path, kept: Path) -> tuple[Path, Path]:
    """Write the table of blocks (.csv) and a copy of what is kept of them (.json), both named after `out`."""
    csv, whole = (out.with_suffix(suffix) for suffix in (".csv", ".json"))
    write_atomic(csv, shown_csv([asdict(row) for row in rows]))
    write_atomic(whole, kept.read_bytes())
    return csv, whole
