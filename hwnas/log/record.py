"""Record: what a verified run tells other tools, with names and units of their own, read from its files alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hwnas.errors import StudyError, hidden
from hwnas.front.deploy import DEPLOY
from hwnas.front.rows import FrontRow, front_json, load_front
from hwnas.runtimes.runtime import deployed_of
from hwnas.stats import hypervolume_2d
from hwnas.system.run_folder import Content, Manifest, RunFolder
from hwnas.target import target_named

TRIAL = ("top1_proxy", "latency_ms_predicted", "reward", "seconds")  # columns of trials.csv that are told by trial
HYPERVOLUME = "hypervolume_top1_ms"  # area between a front, top-1 0 and the reference latency


@dataclass(frozen=True)
class Step:
    """What is known once a trial has ended: its `number`, the `time_s` since 1970, and numbers by name."""

    number: int
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class NetworkRecord:
    """A verified network: what it is, its numbers (top-1 from 0 to 1, `_ms`, `_mb`), and the files of its model."""

    name: str
    facts: Mapping[str, str]
    metrics: Mapping[str, float]
    files: Sequence[Path]


@dataclass(frozen=True)
class Record:
    """A run. `id` stays when it is copied, renamed or verified again; `content` changes with what is told of it.

    `options` are those of `config.yaml` by dotted key, as text without passwords. `rows` are those of `front.csv` with
    their types. `remarks` say what of the run could not be read, and why.
    """

    id: str
    content: str
    name: str
    summary: str
    options: Mapping[str, str]
    metrics: Mapping[str, float]
    steps: Sequence[Step]
    rows: Sequence[Mapping[str, Any]]
    networks: Sequence[NetworkRecord]
    picture: Path | None
    files: Sequence[Path]
    remarks: Sequence[str]

    @classmethod
    def read(cls, folder: RunFolder) -> Record:
        """The record of a run.

        Args:
            folder: The folder of a verified run. Nothing in it is run, and a link out of it is not followed.

        Returns:
            All that a destination needs.

        Raises:
            StudyError: The folder has no front.csv, no verified network, or a file that cannot be read.
        """
        rows, trials, environment = load_front(folder), folder.read_trials(), folder.read_environment()
        verified = [row for row in rows if row.verified and row.latency_ms is not None and row.top1_test is not None]
        if not verified:
            raise StudyError(f"{folder.path}: no network is verified. On the machine it is for: hwnas verify "
                             f"run={folder.path}")
        remarks: list[str] = []
        files = [path for path in (folder.front_csv, folder.front_png, folder.report) if _is_inside(path, folder)]
        if len(files) < 3:
            remarks.append(f"no picture or report. Write them: hwnas report run={folder.path}")
        table = json.loads(front_json(rows))["rows"]
        by_id = {values["id"]: values for values in table}
        networks = [_network(row, by_id[row.id], folder, environment, remarks) for row in verified]
        reference_ms = _reference_ms(trials, verified, environment)
        first = trials[0] if trials else {}
        born = [environment.get("searched_for"), environment.get("space"), [
            (environment.get(part) or {}).get(key) for part, key in (("target", "name"), ("dataset", "fingerprint"))],
            *(first.get(key) for key in ("id", "seed", "started"))]
        told = [folder.config, folder.trials_csv, folder.environment, folder.comparisons, *files]
        told += [folder.model(row.id).manifest for row in verified]
        picture = folder.front_png if folder.front_png in files else None
        return cls(
            _digest(born if trials else folder.config_text()), _digest([str(Content.of(path)) for path in told]),
            folder.path.resolve().name,
            " ".join(str(item.get("sentence")) for item in folder.read_comparisons() if item.get("verdict") == DEPLOY),
            dict(_flat(folder.read_config(), "")), _metrics(rows, verified, trials, environment, reference_ms),
            _steps(trials, reference_ms), table, networks, picture, files, remarks)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _is_inside(path: Path, folder: RunFolder) -> bool:
    """Whether there is such a file; a link out of the folder could name any file of this machine."""
    return path.is_file() and path.resolve().is_relative_to(folder.path.resolve())


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Options by dotted key. Passwords are hidden when a run is written, and once more here."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, hidden(value if isinstance(value, str) else json.dumps(value, default=str), whole=True)


def _network(row: FrontRow, values: Mapping[str, Any], folder: RunFolder, environment: Mapping[str, Any],
             remarks: list[str]) -> NetworkRecord:
    """A row with the files of its model: those that are as they were made."""
    model, target = folder.model(row.id), target_named(environment["target"], row.target)
    deployed = deployed_of(model.deployed(target.precision), target.runtime)
    manifest = Manifest.find(model.path) if _is_inside(model.manifest, folder) else None
    files = []
    for path in dict.fromkeys((model.onnx, deployed)):
        fault = "it is not there, or has no manifest"
        if manifest is not None and _is_inside(path, folder) and not (fault := manifest.fault(path)):
            files.append(path)
        else:
            remarks.append(f"left out: {path}: {fault}")
    if files and _is_inside(model.card, folder):
        files.append(model.card)
    known = {name: value for name, value in values.items() if value not in (None, "")}
    numbers = {name: value for name, value in known.items() if isinstance(value, int | float)
               and not isinstance(value, bool)}
    if deployed in files:
        numbers["size_mb"] = deployed.stat().st_size / 1e6
    return NetworkRecord(f"{row.label} {row.id}".strip(), {name: str(value) for name, value in known.items()
                                                           if name not in numbers}, _finite(numbers), files)


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _reference_ms(trials: Sequence[Mapping[str, Any]], verified: Sequence[FrontRow],
                  environment: Mapping[str, Any]) -> float:
    """The latency that hypervolumes are counted from: the cap, otherwise the slowest network that was seen."""
    if environment.get("cap_ms"):
        return float(environment["cap_ms"])
    seen = [row.latency_ms for row in verified] + [trial["latency_ms_predicted"] for trial in _able(trials)]
    return max(float(latency_ms) for latency_ms in seen if latency_ms is not None)


def _able(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Trials with an accuracy and a latency, in order."""
    return [trial for trial in trials if trial.get("top1_proxy") is not None
            and trial.get("latency_ms_predicted") is not None]


def _hypervolume(pairs: Sequence[tuple[Any, Any]], reference_ms: float) -> float:
    return hypervolume_2d([top1 for top1, _ in pairs], [latency for _, latency in pairs], (0.0, reference_ms))


def _metrics(rows: Sequence[FrontRow], verified: Sequence[FrontRow], trials: Sequence[Mapping[str, Any]],
             environment: Mapping[str, Any], reference_ms: float) -> dict[str, float]:
    best = max(verified, key=lambda row: (row.top1_test or 0.0, -(row.latency_ms or 0.0)))
    front = [(row.top1_test, row.latency_ms) for row in verified if row.on_front]
    return _finite({
        "n_trials": len(trials), "n_trials_evaluated": sum(trial.get("outcome") == "evaluated" for trial in trials),
        "n_networks": len(rows), "n_networks_verified": len(verified), "n_networks_on_front": len(front),
        "top1_test_best": best.top1_test, "latency_ms_of_best": best.latency_ms,
        "latency_ms_fastest": min(row.latency_ms or 0.0 for row in verified),
        f"{HYPERVOLUME}_verified": _hypervolume(front, reference_ms), "hypervolume_reference_ms": reference_ms,
        "spent_s": sum((environment.get("spent_s") or {}).values()) or None})


def _steps(trials: Sequence[Mapping[str, Any]], reference_ms: float) -> list[Step]:
    """The numbers of each trial, and the hypervolume of all up to it."""
    steps, seen = [], list[tuple[Any, Any]]()
    for trial in sorted(trials, key=lambda trial: trial["number"]):
        values = _finite({name: trial.get(name) for name in TRIAL})
        if _able([trial]):
            seen.append((trial["top1_proxy"], trial["latency_ms_predicted"]))
            values[HYPERVOLUME] = _hypervolume(seen, reference_ms)
        if values:
            steps.append(Step(trial["number"], _seconds(trial.get("finished") or trial.get("started")), values))
    return steps


def _seconds(time: str | None) -> float:
    """Seconds since 1970 of a local ISO time; 0 where there is none."""
    try:
        return datetime.fromisoformat(time or "").timestamp()
    except ValueError:
        return 0.0
