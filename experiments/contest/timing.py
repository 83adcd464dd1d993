"""Latency of all deployed files together: interleaved rounds beside one reference, on one core."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.contest.data import data_info
from experiments.contest.networks import Network, Training
from experiments.contest.options import Options
from experiments.contest.scoring import PRECISIONS, file_of, read_score, target_of
from experiments.contest.training import summary_of
from hwnas.cli.progress import Console
from hwnas.errors import StudyError
from hwnas.front.score import LEAST_ROUNDS
from hwnas.latency.table import Measurement, Protocol
from hwnas.latency.timing import Reference, TimedFile, reference_network, time_files
from hwnas.system.paths import write_atomic
from hwnas.system.tables import finite

FORMAT = "hwnas-contest-latency/1"


@dataclass(frozen=True)
class Latencies:
    """What was timed, by (network's label, precision), and contents of the files; `facts`: host, runtime, day, batch,
    target."""

    measured: Mapping[tuple[str, str], Measurement]
    files: Mapping[tuple[str, str], str]
    facts: Mapping[str, Any]

    def of(self, label: str, precision: str, file: str) -> Measurement | None:
        """None where it was not timed, or INVALID, or when another file than `file` (by content) was."""
        key = label, precision
        found = self.measured.get(key)
        return found if found is not None and self.files[key] == file and usable(found) else None


def time_all(networks: Sequence[Network], options: Options, console: Console) -> None:
    """Time every scored file of seed 0; nothing where these very files were timed here, all with a valid result."""
    from hwnas.system.documents import content_of

    files = {f"{network.label} {precision}": file_of(options.out, Training(network, 0), precision).path
             for network in networks for precision in PRECISIONS
             if read_score(options.out, Training(network, 0), precision)}
    if not files:
        raise StudyError(f"{options.out} holds no scored file to time. Give steps=train,score first.")
    contents = {name: content_of(path) for name, path in files.items()}
    if _held(options) == contents:
        console.say(f"these {len(files)} files were timed already: {_path(options.out, options.batch)}")
        return
    found = _measure(files, networks, options, console)
    facts = {"format": FORMAT, "target": options.target, "batch": options.batch, **_circumstances(options),
             "protocol": next(iter(found.values())).protocol.to_dict()}
    write_atomic(_path(options.out, options.batch), json.dumps(finite({**facts, "networks": {
        name: {"file": contents[name], **one.to_dict()} for name, one in found.items()}}),
        separators=(",", ":")) + "\n")
    for name, one in found.items():
        if not usable(one):
            console.say(f"{name}: INVALID: {one.reason or 'too few turns'}. The same command times all again; let the "
                        "machine rest meanwhile, or give more seconds=N.")


def read_latencies(out: Path, batch: int = 1) -> Latencies | None:
    """None where nothing was timed; StudyError when the file is torn."""
    path = _path(out, batch)
    if not path.is_file():
        return None
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        protocol = Protocol(**held["protocol"])
        names = {name: (name.rpartition(" ")[0], name.rpartition(" ")[2]) for name in held["networks"]}
        found = {names[name]: Measurement.from_dict(one, protocol, f"{path}: {name}")
                 for name, one in held["networks"].items()}
        files = {names[name]: str(one["file"]) for name, one in held["networks"].items()}
        facts = {key: held[key] for key in ("host", "runtime", "measured_at", "batch", "target")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"cannot read {path}: {error}. Remove it, then give steps=time.") from None
    return Latencies(found, files, facts)


def usable(measured: Measurement) -> bool:
    """Whether it is a number with an error."""
    return measured.valid and bool(np.isfinite(measured.std_ms))


def _path(out: Path, batch: int) -> Path:
    return out / f"latency-b{batch}.json"


def _held(options: Options) -> Mapping[str, str]:
    """Contents of the files that were timed for this target, host and runtime, where all came out valid."""
    held = read_latencies(options.out, options.batch)
    here = {**_circumstances(options), "target": options.target}
    if held is None or not all(usable(one) for one in held.measured.values()):
        return {}
    if any(held.facts[key] != here[key] for key in ("target", "host", "runtime")):
        return {}
    return {" ".join(key): file for key, file in held.files.items()}


def _circumstances(options: Options) -> dict[str, Any]:
    from hwnas.runtimes.runtime import load_runtime
    from hwnas.target import Host

    return {"host": Host.detect().name, "runtime": load_runtime(target_of(options, "fp32", 1).runtime).version(),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds")}


def _measure(files: Mapping[str, Path], networks: Sequence[Network], options: Options, console: Console,
             ) -> dict[str, Measurement]:
    protocol = Protocol(min_rounds=LEAST_ROUNDS, max_rounds=2 * LEAST_ROUNDS, max_seconds=options.seconds)
    if options.batch > 1:  # a batch takes long, and its throughput is known well enough from fewer calls
        protocol = Protocol(min_rounds=8, min_calls=2, max_calls=8, max_seconds=options.seconds)
    info, sizes = data_info(options), _sizes(options, networks)
    timed = {}
    for name, path in files.items():
        label, precision = name.rsplit(" ", 1)
        shape = info.channels, sizes[label], sizes[label]
        timed[name] = TimedFile(path, target_of(options, precision, options.batch), shape)
    target = target_of(options, "int8", 1)
    network = reference_network(info.channels, info.classes, max(sizes.values()))
    with console.step(f"time {len(files)} files") as report:
        return time_files(timed, target, Reference(network), protocol, progress=report)


def _sizes(options: Options, networks: Sequence[Network]) -> dict[str, int]:
    """Side of each network's images, by label."""
    found = {network.label: summary_of(options.out, Training(network, 0)) for network in networks}
    return {label: int(summary["identity"]["image_size"]) for label, summary in found.items() if summary}
