"""A zoo of baselines: latency is measured before any is trained, and those that cannot be worth it are left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hwnas.cli.progress import Console, Report
from hwnas.errors import ConfigError, DeviceError, HwnasError, TargetError
from hwnas.front.score import Timing
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import Reference, prepare_untrained, time_files
from hwnas.networks.network import FoundNetwork, Network, TimmNetwork
from hwnas.system.documents import Document
from hwnas.system.paths import temporary_folder, write_atomic
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target

FILE = "zoo.json"
DOCUMENT = Document("hwnas-zoo", 1, "a zoo's latencies", "Remove it; the zoo is timed anew.", shape={"networks": [
    {"id": str, "image_size": int, "latency_ms": (float, None), "top1_published": float, "behind": str}]})
_ROUNDS, _CALLS, MOST_SECONDS = 8, 20, 60.0  # of the timing: it only ranks, and what is trained is timed again


@dataclass(frozen=True, slots=True)
class Timed:
    """A network before its training: measured median in ms (None: not valid, or not exported), published top-1 in per
    cent, and the id of the network that makes it not worth training (empty: none)."""

    id: str
    image_size: int
    latency_ms: float | None
    top1_published: float
    behind: str = ""


def published_of(zoo: Mapping[str, object]) -> dict[str, float]:
    """Published ImageNet top-1 in per cent by timm's names, of a section `zoo`; ConfigError for anything else."""
    networks = zoo.get("networks")
    if not isinstance(networks, Mapping) or not networks or not all(
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 100
            for value in networks.values()):
        raise ConfigError("zoo.networks must hold timm names with their published ImageNet top-1 in per cent, as "
                          "conf/zoo/default.yaml does.")
    return {str(name): float(value) for name, value in networks.items()}


def worth_training(networks: Sequence[FoundNetwork | TimmNetwork], published: Mapping[str, float], run: RunFolder,
                   target: Target, timing: Timing, console: Console) -> list[FoundNetwork | TimmNetwork]:
    """`networks` without those of the zoo that are slower than another of the same image size and, by published top-1,
    less accurate. Cuts are all kept: nothing is published of them.

    What was measured stands in `zoo.json` of the run folder, and is read from there by the next call. One that cannot
    be measured is kept: its training will say why.
    """
    zoo = {network.id: network for network in networks if network.name in published}
    if len(zoo) < 2:
        return list(networks)
    path = run.path / FILE
    latencies = _held(path, zoo)
    if latencies is None:
        with console.step("time the zoo", MOST_SECONDS) as report:
            latencies = time_untrained(zoo, target, timing, report)
        if untimed := [id for id in zoo if id not in latencies]:
            console.remark(f"not timed before their training: {', '.join(untimed)}")
    timed = [Timed(id, network.shape.image_size, latencies.get(id), published[network.name])
             for id, network in zoo.items()]
    rows = [replace(row, behind=_behind(row, timed)) for row in timed]
    write_atomic(path, json.dumps({**DOCUMENT.header, "networks": [asdict(row) for row in rows]}, indent=1) + "\n")
    for row in rows:
        if row.behind:
            console.remark(f"{row.id} is not trained: {row.latency_ms:.3g} ms, slower than {row.behind}, and less "
                           f"accurate on ImageNet ({row.top1_published:g} %, published).")
    left = {row.id for row in rows if row.behind}
    return [network for network in networks if network.id not in left]


def _behind(row: Timed, rows: Sequence[Timed]) -> str:
    """The id of the fastest other that is faster and more accurate, on images of one size; empty: none."""
    better = [(other.latency_ms, other.id) for other in rows if other.latency_ms is not None
              and row.latency_ms is not None and other.image_size == row.image_size
              and other.latency_ms < row.latency_ms and other.top1_published > row.top1_published]
    return min(better, default=(0.0, ""))[1]


def time_untrained(networks: Mapping[str, Network], target: Target, timing: Timing, report: Report
                   ) -> dict[str, float]:
    """Median latency in ms of each network that can be exported, compiled and timed, all in the same rounds."""
    runtime = timing.device.runtime(target.runtime)
    with temporary_folder() as name:
        files = {}
        for index, (id, network) in enumerate(networks.items()):
            key = hashlib.sha256(network.identity.encode()).hexdigest()[:8]
            try:
                path = prepare_untrained(network.build(), key, network.shape.image, target, Path(name))
                runtime.compile(path, target)  # one that cannot be must not spoil the others' timing
            except (TargetError, DeviceError):  # not of this network
                raise
            except HwnasError:
                continue
            files[id] = TimedFile(path, target, network.shape.image)
            report(0.0, f"exported {index + 1} of {len(networks)}")
        protocol = Protocol(min_rounds=_ROUNDS, min_calls=_CALLS, max_seconds=MOST_SECONDS, copies=1)
        reference = Reference(timing.reference, target.batch)
        measured = time_files(files, target, reference, protocol, seed=timing.seed, progress=report,
                              device=timing.device) if files else {}
    return {id: each.latency_ms for id, each in measured.items() if each.valid}


def _held(path: Path, zoo: Mapping[str, Network]) -> dict[str, float] | None:
    """The latencies of an earlier call for the same networks; None where there are none, or some are unknown."""
    content = DOCUMENT.find(path) or {"networks": []}
    held = {row["id"]: row["latency_ms"] for row in content["networks"]}
    return held if {*held} == {*zoo} and None not in held.values() else None
