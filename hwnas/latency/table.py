"""Latency tables: JSON files of the times on one host for one runtime, precision, threads, batch and input.

A file has host, runtime, key, protocol, reference and held-out error. Each network has its architecture, the way in
which it was chosen (`origin`), raw samples, and the machine's `conditions`. On a GPU each turn has its state (`gpu`:
MHz, degrees Celsius, NVML's reasons). `spent_s` and the slow results of a fit (`learnt`) are by space. Files may be
compressed (.json.gz).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hwnas.errors import HwnasError, TableError
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.space.architecture import Architecture
from hwnas.system.documents import WRONG, Document
from hwnas.system.paths import table_dirs, write_atomic
from hwnas.target import Target

_SHAPE = {"host": {"name": str}, "key": {"runtime": str, "precision": str, "threads": int, "batch": int, "sizes": [int],
                                         "channels": int, "classes": int},
          "error": {"*": {"*": float}}, "spent_s?": {"*": float}, "learnt?": {"*": dict}, "processes?": {"*": int},
          "failed?": {"*": str}, "networks": [dict]}
TABLE = Document("hwnas-latency-table", 2, "a latency table", "Move it away; the next run measures anew.", TableError,
                 two_fields=True, shape=_SHAPE)
LEAST_NETWORKS = 10  # fewer of a space cannot be split into fitted and held-out networks
_KEY = re.compile(r"(?P<runtime>.+)-(?P<precision>[a-z0-9]+)-t(?P<threads>all|\d+)-b(?P<batch>\d+)"
                  r"-(?P<sizes>\d+(?:-\d+)*)px-c(?P<channels>\d+)-k(?P<classes>\d+)")


@dataclass(frozen=True, slots=True)
class TableKey:
    """The facts on which a table's times depend, beside the host. As text it is the stem of the file's name."""

    runtime: str
    precision: str
    threads: int
    batch: int
    sizes: tuple[int, ...]
    channels: int
    classes: int

    @classmethod
    def of(cls, target: Target, sizes: tuple[int, ...], channels: int, classes: int) -> TableKey:
        """Return the key of a target's times at an input; `threads` 0 (every core) is a key of its own."""
        return cls(target.runtime, target.precision, target.threads, target.batch, tuple(sorted(sizes)),
                   channels, classes)

    @property
    def images(self) -> str:
        """The options of `hwnas profile` for images and classes like the table's."""
        return f"image_size={max(self.sizes)} channels={self.channels} classes={self.classes}"

    def __str__(self) -> str:
        size = "-".join(map(str, self.sizes))
        threads = self.threads or "all"
        return (f"{self.runtime}-{self.precision}-t{threads}-b{self.batch}"
                f"-{size}px-c{self.channels}-k{self.classes}")

    @classmethod
    def read(cls, text: str) -> TableKey | None:
        """Read a key from the text that `str` gives; None for a text that is no key."""
        parts = _KEY.fullmatch(text)
        if parts is None:
            return None
        threads = 0 if parts["threads"] == "all" else int(parts["threads"])
        return cls(parts["runtime"], parts["precision"], threads, int(parts["batch"]),
                   tuple(map(int, parts["sizes"].split("-"))), int(parts["channels"]), int(parts["classes"]))


@dataclass(frozen=True)
class TimedNetwork:
    """One timed network: its architecture and its samples. `origin` says how a calibration chose it (known, extreme,
    telling, random, front), or that a race needed it (asked)."""

    space: str
    architecture: Architecture
    measurement: Measurement
    origin: str = "random"


@dataclass
class LatencyTable:
    """All measurements of one key on one host.

    `processes`: for each space, the number of processes that timed its networks, one for each wave; no entry if one
    process timed all waves. `failed`: the reasons why networks could not be timed, by their id; only a race keeps them.
    """

    key: TableKey
    host: dict[str, Any]
    runtime_version: str
    created: str
    protocol: Protocol
    reference: Architecture
    quiet_ms: float
    networks: list[TimedNetwork] = field(default_factory=list)
    error: dict[str, dict[str, float]] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)
    learnt: dict[str, dict[str, Any]] = field(default_factory=dict)
    path: Path | None = None
    processes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def host_name(self) -> str:
        """The name of the machine that was measured."""
        return str(self.host["name"])

    def spaces(self) -> set[str]:
        """Return the names of the search spaces from which its networks were drawn."""
        return {network.space for network in self.networks}

    def save(self, path: Path) -> None:
        """Write the file as a whole or not at all, compressed if its name ends in .gz."""
        data = {
            **TABLE.header, "host": self.host, "runtime": self.runtime_version,
            "created": self.created,
            "key": {**{name: getattr(self.key, name) for name in TableKey.__slots__}, "sizes": list(self.key.sizes)},
            "protocol": self.protocol.to_dict(),
            "reference": {"architecture": self.reference.to_dict(), "quiet_us": round(self.quiet_ms * 1e3, 2)},
            "error": self.error, "spent_s": {name: round(spent, 1) for name, spent in self.spent_s.items()},
            "learnt": self.learnt, "processes": self.processes,
            **({"failed": self.failed} if self.failed else {}),
            "networks": [{"space": network.space, "architecture": network.architecture.to_dict(),
                          "origin": network.origin, **network.measurement.to_dict()} for network in self.networks],
        }
        text = json.dumps(data, separators=(",", ":"))
        write_atomic(path, gzip.compress(text.encode(), 6, mtime=0) if path.suffix == ".gz" else text)
        self.path = path

    @classmethod
    def load(cls, path: Path) -> LatencyTable:
        """Read a table; TableError names the file, the place in it and the fault."""
        data, networks = TABLE.read(path), []
        try:
            protocol = Protocol.from_dict(data["protocol"])
            key = TableKey(**{**data["key"], "sizes": tuple(data["key"]["sizes"])})
            for index, entry in enumerate(data["networks"]):
                place = f"{path}: networks[{index}]"
                networks.append(TimedNetwork(str(entry["space"]), Architecture.from_dict(entry["architecture"], place),
                                             Measurement.from_dict(entry, protocol, place),
                                             str(entry.get("origin", "random"))))
            names = [(network.space, network.architecture.id) for network in networks]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise TableError(f"{path}: network {twice[1]} of {twice[0]} is in it twice.")
            datetime.fromisoformat(data["created"])  # TypeError or ValueError if it is no date
            return cls(key, dict(data["host"]), str(data["runtime"]), str(data["created"]), protocol,
                       Architecture.from_dict(data["reference"]["architecture"], f"{path}: reference"),
                       float(data["reference"]["quiet_us"]) / 1e3, networks, dict(data["error"]),
                       dict(data.get("spent_s", {})), dict(data.get("learnt", {})), path,
                       dict(data.get("processes", {})), dict(data.get("failed", {})))
        except TableError:
            raise
        except (*WRONG, HwnasError) as error:
            raise TableError(f"{path}: {type(error).__name__}: {error}. {TABLE.remedy}") from None

    def check(self, key: TableKey, host_name: str, runtime_version: str | None,
              remedy: str = "Measure this one: hwnas profile target=NAME space=SPACE fresh=true") -> None:
        """Raise TableError if the table is of another key, host or (unless None) runtime version; it names both."""
        for fact, has, wanted in (("key", str(self.key), str(key)), ("host", self.host_name, host_name),
                                  ("runtime", self.runtime_version, runtime_version or self.runtime_version)):
            if has != wanted:
                raise TableError(f"{self.path}: measured for {fact} {has}, asked for {wanted}. {remedy}")


def table_path(folder: Path, host_name: str, key: TableKey | str) -> Path:
    """Return the path of a table below a `latency_tables` folder."""
    return folder / host_name / f"{key}.json"


def find_table(host_name: str, key: TableKey | str) -> LatencyTable | None:
    """Return the user's table, else the shipped one, else None. TableError if the table is there but broken."""
    for folder in table_dirs():
        path = table_path(folder, host_name, key)
        for there in (path, path.with_name(f"{path.name}.gz")):
            if there.exists():  # a folder too: an error now, not after minutes of measuring
                return LatencyTable.load(there)
    return None


def list_tables() -> Iterator[tuple[str, TableKey, Path]]:
    """Yield host, key and file of every table at hand: the user's first, then the shipped ones, each sorted by path."""
    for folder in table_dirs():
        for path in sorted([*folder.glob("*/*.json"), *folder.glob("*/*.json.gz")]):
            key = TableKey.read(path.name.removesuffix(".gz").removesuffix(".json"))
            if key is not None:
                yield path.parent.name, key, path


def known_hosts() -> list[str]:
    """Return the names of the hosts with tables, sorted."""
    return sorted({path.name for folder in table_dirs() if folder.is_dir()
                   for path in folder.iterdir() if path.is_dir()})
