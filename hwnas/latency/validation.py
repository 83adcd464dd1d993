"""The file of a validation: timed networks, kept as they come, read again, and the anchors that tell the pace."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.errors import HwnasError, TableError, UserError
from hwnas.latency.measurement import Measurement, Protocol, robust_error
from hwnas.latency.table import LatencyTable
from hwnas.space.architecture import Architecture
from hwnas.system.documents import read_document
from hwnas.system.paths import write_atomic

LEAST = 5  # valid ones, below which the reference alone has to do


@dataclass(frozen=True, slots=True)
class Pace:
    """A run's latencies over those of the calibration, both held against the reference; `n` anchors tell (0: none)."""

    factor: float
    standard_error: float
    n: int


def chosen_anchors(table: LatencyTable, space_name: str, n: int) -> list[Architecture]:
    """`n` networks of the table spread evenly over its latencies."""
    valid = sorted((one for one in table.networks if one.space == space_name and one.measurement.valid),
                   key=lambda one: one.measurement.latency_ms)
    if not n:
        return []
    picked = np.unique(np.linspace(0, len(valid) - 1, min(n, len(valid)) + 2)[1:-1].round().astype(int))
    return [valid[int(index)].architecture for index in picked]


def pace(table: LatencyTable, again: Mapping[str, Measurement]) -> Pace:
    """From the anchors' measurements in a later run, by architecture id."""
    before = {one.architecture.id: one.measurement for one in table.networks}
    logs = [np.log(one.at_ms(table.quiet_ms) / before[name].at_ms(table.quiet_ms)) for name, one in again.items()
            if one.valid and name in before and before[name].valid]
    if len(logs) < LEAST:
        return Pace(1.0, float("nan"), 0)
    return Pace(float(np.exp(np.median(logs))), robust_error(np.array(logs)), len(logs))

FORMAT, VERSION = "hwnas-validation", 1
PARTIAL = "hwnas-validation-partial"


@dataclass(frozen=True)
class TimedOne:
    """A network that no table holds, how it was chosen (`random` or `front`), and its samples."""

    group: str
    architecture: Architecture
    measurement: Measurement


@dataclass(frozen=True)
class Stored:
    """What a validation file says was measured, and where."""

    host: str
    key: str
    runtime: str
    space: str
    seed: int
    measured_at: str
    networks: list[TimedOne]
    anchors: list[TimedOne]


def table_identity(table: LatencyTable) -> dict[str, Any]:
    """Which table predicted: name, date, key and a hash of the file's content."""
    content = table.path.read_bytes() if table.path and table.path.is_file() else b""
    return {"file": table.path.name if table.path else None, "created": table.created, "key": str(table.key),
            "networks": len(table.networks), "sha256": hashlib.sha256(content).hexdigest()[:16]}


def network_to_dict(one: TimedOne, predicted: tuple[float, float, float]) -> dict[str, Any]:
    """A network's entry; `predicted` is mean, low and high in ms. Numbers of an INVALID measurement are null."""
    found = one.measurement
    return {"id": one.architecture.id, "group": one.group, "architecture": one.architecture.to_dict(),
            **{name: round(ms, 6) for name, ms in zip(("predicted_ms", "low_ms", "high_ms"), predicted, strict=True)},
            "latency_ms": finite(found.latency_ms), "halves_ms": [finite(ms) for ms in found.halves_ms()],
            "half_width": finite(found.half_width), "valid": found.valid, "reason": found.reason,
            **found.to_dict()}


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **report}, separators=(",", ":"), allow_nan=False)
    write_atomic(path, text)


def load(path: Path) -> Stored:
    """Read what was measured; TableError names file, place and what is wrong with it."""
    data = read_document(path, FORMAT, VERSION, "a validation", "Name the JSON file that hwnas.validate wrote.")
    try:
        protocol = Protocol(**data["protocol"])
        networks = [_timed(entry, protocol, f"{path}: networks[{index}]")
                    for index, entry in enumerate(data["networks"])]
        anchors = [_timed(entry, protocol, f"{path}: anchors[{index}]")
                   for index, entry in enumerate(data.get("anchor_networks", []))]
        return Stored(str(data["host"]["name"]), str(data["table"]["key"]), str(data["runtime"]),
                      str(data["space"]["name"]), int(data["seed"]), str(data["measured_at"]), networks,
                      anchors)
    except TableError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, HwnasError) as error:
        raise TableError(f"{path}: {type(error).__name__}: {error}. Measure anew: python -m hwnas.validate +target=…"
                         ) from None


class Partial:
    """Finished measurements of a validation under way, one a line behind a header that says of which one."""

    def __init__(self, path: Path, header: Mapping[str, Any], protocol: Protocol) -> None:
        self.path, self.protocol = path, protocol
        self.header = json.loads(json.dumps({"format": PARTIAL, "version": VERSION, **header}))

    def measured(self) -> dict[str, Measurement]:
        """Valid measurements by architecture id; none when the file is missing or of another validation."""
        lines = self._lines()
        if not lines or lines[0] != self.header:
            return {}
        found = {}
        for index, entry in enumerate(lines[1:]):
            one = Measurement.from_dict(entry, self.protocol, f"{self.path}: line {index + 2}")
            if one.valid:
                found[str(entry["id"])] = one
        return found

    @property
    def foreign(self) -> bool:
        """Whether the file holds measurements of another table, space, seed or number of networks."""
        lines = self._lines()
        return bool(lines) and lines[0] != self.header

    def start(self) -> None:
        """Begin the file, unless it is this validation's: then its torn end, if any, is cut off."""
        lines = self._lines()
        kept = lines if lines and lines[0] == self.header else [self.header]
        write_atomic(self.path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))

    def add(self, one: Architecture, measurement: Measurement) -> None:
        """Append a measurement so that it outlives a kill; UserError when the disk is full."""
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps({"id": one.id, **measurement.to_dict()}, separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}. Free space or choose another place: "
                            "out=FILE.") from None

    def remove(self) -> None:
        """The validation is finished."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        """What can be read: a line cut off by a kill ends it."""
        found: list[dict[str, Any]] = []
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return found
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: cannot be read: {error}. Move it away or choose another place: out=FILE."
                            ) from None
        for line in text.split("\n")[:-1]:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found


def _timed(data: Mapping[str, Any], protocol: Protocol, where: str) -> TimedOne:
    try:
        return TimedOne(str(data["group"]), Architecture.from_dict(data["architecture"], where),
                        Measurement.from_dict(data, protocol, where))
    except KeyError as error:
        raise TableError(f"{where}: {error} is missing. Measure anew: python -m hwnas.validate +target=…") from None


def finite(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None
