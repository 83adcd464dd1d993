"""The stored timings and scores of timm's networks, in a file for each host, deployment and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hwnas import __version__
from hwnas.errors import TableError
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.networks.quantize import RECIPE
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.documents import Document
from hwnas.system.libraries import version_of
from hwnas.system.paths import hold, home, write_atomic
from hwnas.target import Host, Target

PROTOCOL = Protocol(warmup_calls=3, min_calls=3, copies=2, min_rounds=8, max_rounds=16, half_width=0.04)


def _check_scores(content: Mapping[str, Any]) -> None:
    """Raise ValueError for an impossible score."""
    for key, each in content.get("scored", {}).items():
        if not 0 <= each["right"] <= each["images"] or not each["images"]:
            raise ValueError(f"{key}: {each['right']} of {each['images']} images are right")


RECORD = Document("hwnas-zoo", 1, "a record of timed networks", "Move it away; they are timed anew.", TableError,
                  shape={"protocol": dict, "timed": {"*": dict}, "failed": {"*": str},
                         "scored?": {"*": {"weights": str, "right": int, "images": int}}}, rule=_check_scores)


@dataclass
class ZooRecord:
    """The record of networks (`resnet50@224`) in one deployment: measurements, and reasons why there is none. `scored`
    has, by network and images, the weights of a scored file, and how many images it answered rightly."""

    target: Target
    path: Path
    timed: dict[str, Measurement] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    scored: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, target: Target) -> ZooRecord:
        """Open the record of a target on this host, by the installed versions. Raises TableError for a torn file."""
        versions = [load_runtime(target.runtime).version(), *(f"{name} {version_of(name)}" for name in (
            "timm", "torch")), f"hwnas {__version__}", *([RECIPE] if target.precision == "int8" else [])]
        name = "-".join([target.precision, f"t{target.threads or 'all'}", f"b{target.batch}", *versions])
        record = cls(target, home() / "zoo" / Host.detect().name / f"{name.replace(' ', '-')}.json")
        record._read()
        return record

    def _read(self) -> None:
        """Add the content of the file, if there is one."""
        if (content := RECORD.find(self.path)) is not None:
            protocol = Protocol.from_dict(content["protocol"])
            self.timed |= {key: Measurement.from_dict(entry, protocol, f"{self.path}: {key}")
                           for key, entry in content["timed"].items()}
            self.failed |= content["failed"]
            self.scored |= content.get("scored", {})

    def keep(self, timed: Mapping[str, Measurement] = MappingProxyType({}),
             failed: Mapping[str, str] = MappingProxyType({}),
             scored: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> None:
        """Store the results of a wave or a scored file, beside what other processes have stored meanwhile."""
        with hold(self.path.with_suffix(".lock")):
            self._read()
            self.timed |= timed
            self.failed |= failed
            self.scored |= scored
            write_atomic(self.path, json.dumps({
                **RECORD.header, "protocol": PROTOCOL.to_dict(), "failed": self.failed, "scored": self.scored,
                "timed": {key: each.to_dict() for key, each in self.timed.items()}}))
            self._read()  # as another call will: times are rounded when stored
