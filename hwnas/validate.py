"""Validation: a latency model judged on networks that its table has never seen, and the file of such a judgement."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, HwnasError, MeasurementInvalid, TableError, UserError
from hwnas.latency.agreement import compared, describe, evaluate, finite, validation_figure
from hwnas.latency.deployment import CalibrationOptions, Deployment, MeasuringOptions, latency_model
from hwnas.latency.held_out_networks import ANCHOR, TimedOne, chosen_anchors, held_out_networks, pace
from hwnas.latency.table import LatencyTable, Measurement, Protocol
from hwnas.latency.timing import time_networks
from hwnas.pictures import figure_bytes
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import find_space
from hwnas.system.documents import WRONG, Document, load_json
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import check_replaceable

if TYPE_CHECKING:
    from hwnas.latency.model import LatencyModel, Predictions
    from hwnas.space.search_space import SearchSpace

USAGE = """Predicted against measured latency, on networks never seen: half random, half from the predicted front.

    python -m hwnas.validate +target=xeon_int8 space=mnasnet n=60 seed=7 out=v.json   # and v.png
    python -m hwnas.validate +target=xeon_int8 space=mnasnet measured=v.json          # the same networks again"""

VALIDATION = Document("hwnas-validation", 1, "a validation", "Name the JSON file that hwnas.validate wrote.",
                      TableError, two_fields=True, shape={
                          "host": {"name": str}, "table": {"key": str}, "space": {"name": str}, "seed": int,
                          "networks": [dict], "anchor_networks?": [dict]})
PARTIAL = replace(VALIDATION, format="hwnas-validation-partial", name="an unfinished validation", shape=None)


@dataclass(frozen=True)
class ValidateOptions(MeasuringOptions):
    """Options of `conf/validate.yaml`. `n` networks are measured, and `anchors` of the table again."""

    n: int = option(low=4, high=5000)
    seed: int = option(low=0, high=2**31)
    anchors: int = option(low=0, high=500)
    seconds: float = option(low=1, high=86_400)
    out: str | None = option()
    measured: str | None = option()
    calibration: CalibrationOptions = option()


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


def network_to_dict(network: TimedOne, predicted: tuple[float, float, float]) -> dict[str, Any]:
    """A network's entry; `predicted` is mean, low and high in ms. Numbers of an INVALID measurement are null."""
    measurement = network.measurement
    return {"id": network.architecture.id, "group": network.group, "architecture": network.architecture.to_dict(),
            **{name: round(ms, 6) for name, ms in zip(("predicted_ms", "low_ms", "high_ms"), predicted, strict=True)},
            "latency_ms": finite(measurement.latency_ms), "halves_ms": [finite(ms) for ms in measurement.halves_ms()],
            "half_width": finite(measurement.half_width), "valid": measurement.valid, "reason": measurement.reason,
            **measurement.to_dict()}


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    text = json.dumps({**VALIDATION.header, **report}, separators=(",", ":"), allow_nan=False)
    write_atomic(path, text)


def load(path: Path) -> Stored:
    """Read what was measured; TableError names file, place and what is wrong with it."""
    data = VALIDATION.read(path)
    try:
        protocol = Protocol.from_dict(data["protocol"])
        networks = [_read_timed(entry, protocol, f"{path}: networks[{index}]")
                    for index, entry in enumerate(data["networks"])]
        anchors = [_read_timed(entry, protocol, f"{path}: anchors[{index}]")
                   for index, entry in enumerate(data.get("anchor_networks", []))]
        return Stored(str(data["host"]["name"]), str(data["table"]["key"]), str(data["runtime"]),
                      str(data["space"]["name"]), int(data["seed"]), str(data["measured_at"]), networks,
                      anchors)
    except TableError:
        raise
    except (*WRONG, HwnasError) as error:
        raise TableError(f"{path}: {type(error).__name__}: {error}. Measure anew: python -m hwnas.validate +target=…"
                         ) from None


class Partial:
    """Finished measurements of a validation under way, one per line, behind a header that says which validation it
    is."""

    def __init__(self, path: Path, header: Mapping[str, Any], protocol: Protocol) -> None:
        self.path, self.protocol = path, protocol
        self.header = json.loads(json.dumps({**PARTIAL.header, **header}))

    def measured(self) -> dict[str, Measurement]:
        """Valid measurements by architecture id; none when the file is missing or of another validation."""
        lines = self._lines()
        if not lines or lines[0] != self.header:
            return {}
        measurements = {}
        for index, entry in enumerate(lines[1:]):
            measurement = Measurement.from_dict(entry, self.protocol, f"{self.path}: line {index + 2}")
            if measurement.valid:
                measurements[str(entry["id"])] = measurement
        return measurements

    @property
    def foreign(self) -> bool:
        """Whether the file holds measurements of another table, space, seed or number of networks."""
        lines = self._lines()
        return bool(lines) and lines[0] != self.header

    def start(self) -> None:
        """Begin the file. If it is this validation's already, only a torn end is cut off."""
        lines = self._lines()
        kept = lines if lines and lines[0] == self.header else [self.header]
        write_atomic(self.path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))

    def add(self, architecture: Architecture, measurement: Measurement) -> None:
        """Append a measurement so that it outlives a kill; UserError when the disk is full."""
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps({"id": architecture.id, **measurement.to_dict()}, separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}. Free space or choose another place: "
                            "out=FILE.") from None

    def remove(self) -> None:
        """Remove the file, because the validation is finished."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        """The lines that can be read; a line cut off by a kill ends them."""
        entries: list[dict[str, Any]] = []
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return entries
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: cannot be read: {error}. Move it away or choose another place: out=FILE."
                            ) from None
        for line in text.split("\n")[:-1]:
            try:
                entries.append(load_json(line))
            except ValueError:
                break
        return entries


def _read_timed(data: Mapping[str, Any], protocol: Protocol, where: str) -> TimedOne:
    try:
        return TimedOne(str(data["group"]), Architecture.from_dict(data["architecture"], where),
                        Measurement.from_dict(data, protocol, where))
    except KeyError as error:
        raise TableError(f"{where}: {error} is missing. Measure anew: python -m hwnas.validate +target=…") from None


@dataclass(frozen=True)
class Job:
    """What is judged: the table and the model of a space on a deployment."""

    deployment: Deployment
    space: SearchSpace
    table: LatencyTable
    model: LatencyModel


def main(config: Config, console: Console) -> None:
    """Do what `conf/validate.yaml` asks: measure networks and judge the model, or judge those of a report again."""
    options = read_command(ValidateOptions, config)
    out = out_path(options)
    deployment = options.deployment(console)
    if options.measured:
        judge_again(options, deployment, Path(options.measured), out, console)
        return
    if not deployment.at_hand:
        raise ConfigError(f"host={deployment.host_name} is not this machine, and a validation measures. Give the "
                          "command over there, or device=user@host, or judge its report here: measured=FILE.")
    measure_and_judge(job_of(options, deployment, console), options, out, console)


def out_path(options: ValidateOptions) -> Path:
    """Where the report goes; ConfigError when it is no .json file."""
    if options.out is None and options.measured:
        measured = Path(options.measured)
        return measured.with_name(f"{measured.stem}-again.json")
    name = f"validation-{options.target.name}-{find_space(options.space).stem}.json"
    out = Path("runs") / name if options.out is None else Path(options.out)
    if out.suffix != ".json" or out.is_dir():
        raise ConfigError(f"out must be a .json file, got {str(out)!r}: the picture lies beside it as .png.")
    check_replaceable(out, out.with_suffix(".png"))
    return out


def job_of(options: ValidateOptions, deployment: Deployment, console: Console) -> Job:
    """Space, table and model. A host without a table is calibrated first, where it is this machine."""
    space = options.search_space()
    return Job(deployment, space, *latency_model(deployment, space, options.calibration, console))


def measure_and_judge(job: Job, options: ValidateOptions, out: Path, console: Console) -> None:
    """Measure networks that the table does not hold, and some that it does, and report."""
    n, seed = options.n, options.seed
    version = job.deployment.device.runtime(job.deployment.target.runtime).version()
    known = {network.architecture.id for network in job.table.networks}
    chosen = held_out_networks(job.space, job.model, n, seed, known)
    chosen += [(ANCHOR, architecture) for architecture in chosen_anchors(job.table, job.space.name, options.anchors)]
    partial = partial_of(job, n, seed, version, out)
    networks = measure_chosen(job, chosen, seed, options.seconds, partial, console)
    origin = {"runtime": version, "seed": seed, "measured_at": _now(), "n_asked": n,
              "n_failed": len(chosen) - len(networks)}
    anchors = [network for network in networks if network.group == ANCHOR]
    report = write_report(job, [network for network in networks if network.group != ANCHOR], anchors, origin, out)
    partial.remove()
    tell(report, out, console)


def partial_of(job: Job, n: int, seed: int, version: str, out: Path) -> Partial:
    """The file of measurements under way. Only the same validation goes on with it."""
    header = {"table": table_identity(job.table), "host": job.deployment.host_name, "runtime": version, "n": n,
              "seed": seed, "space": {"name": job.space.name, "fingerprint": job.space.fingerprint}}
    return Partial(out.with_suffix(".partial.jsonl"), header, job.table.protocol)


def measure_chosen(job: Job, chosen: Sequence[tuple[str, Architecture]], seed: int, seconds: float, partial: Partial,
                   console: Console) -> list[TimedOne]:
    """Time the networks in mixed order. Those that an interrupted run has timed are taken from its file."""
    target, table = job.deployment.target, job.table
    runtime = job.deployment.device.runtime(target.runtime)
    runtime.check(target)
    if partial.foreign:
        console.say(f"note: {partial.path} is of another table, seed or n; it is replaced.")
    measurements = partial.measured()
    if measurements:
        console.say(f"{len(measurements)} of {len(chosen)} networks were measured before the interruption")
    partial.start()
    waiting = [architecture for _, architecture in chosen if architecture.id not in measurements]
    random.Random(seed).shuffle(waiting)  # so that a drift of the machine does not pass for a difference of groups
    if waiting:
        with console.step("time networks") as report:
            measurements |= time_networks(waiting, target, runtime, table.reference,
                                          replace(table.protocol, max_seconds=seconds), seed=seed,
                                          quiet_ms=table.quiet_ms or None, progress=report,
                                          device=job.deployment.device,
                                          timed=lambda network, measurement, _: partial.add(network, measurement))
    return [TimedOne(group, architecture, measurements[architecture.id])
            for group, architecture in chosen if architecture.id in measurements]


def judge_again(options: ValidateOptions, deployment: Deployment, path: Path, out: Path, console: Console) -> None:
    """Compare a report's measurements with the predictions of the present table; nothing is measured."""
    stored = load(path)
    job = job_of(options, replace(deployment, at_hand=False), console)
    check_same(stored, job, path)
    known = {network.architecture.id for network in job.table.networks}
    networks = [network for network in stored.networks if network.architecture.id not in known]
    console.say(f"These networks were measured earlier ({path}, {stored.measured_at}), those of the front chosen by "
                "the table of then; predictions are of the present table.")
    if len(networks) < len(stored.networks):
        console.say(f"{len(stored.networks) - len(networks)} of its {len(stored.networks)} networks are in the table "
                    "by now, so they are left out.")
    origin = {"runtime": stored.runtime, "seed": stored.seed, "measured_at": stored.measured_at,
              "n_asked": len(stored.networks), "n_failed": 0}
    tell(write_report(job, networks, stored.anchors, origin, out), out, console)


def check_same(stored: Stored, job: Job, path: Path) -> None:
    """TableError when report and table differ in host, key, runtime or space; it names both."""
    for what, has, wanted in (("host", stored.host, job.table.host_name), ("key", stored.key, str(job.table.key)),
                              ("runtime", stored.runtime, job.table.runtime_version),
                              ("space", stored.space, job.space.name)):
        if has != wanted:
            raise TableError(f"{path}: measured for {what} {has}, the table is of {wanted}. Measure for this one: "
                             f"python -m hwnas.validate +target={job.deployment.target.name} space={job.space.name}")


def write_report(job: Job, networks: Sequence[TimedOne], anchors: Sequence[TimedOne], origin: dict[str, Any],
                 out: Path) -> dict[str, Any]:
    """Predict, compare, write report and picture; MeasurementInvalid when no network has a valid time."""
    if not any(network.measurement.valid for network in networks):
        reason = networks[0].measurement.reason if networks else "no network is left to be judged"
        raise MeasurementInvalid(f"none of {len(networks)} networks has a valid time: {reason}. Stop what else runs "
                                 "here and give the command again.")
    tied = pace(job.table, {network.architecture.id: network.measurement for network in anchors})
    predictions = job.model.predict_architectures([network.architecture for network in networks])
    report = {**evaluate(networks, predictions, job.table.quiet_ms, tied), **origin, "created": _now(),
              **_what(job, networks, predictions)}
    report["anchor_networks"] = [{"architecture": network.architecture.to_dict(), "group": network.group,
                                  **network.measurement.to_dict()} for network in anchors]
    save(out, report)
    groups = [network.group for network in networks if network.measurement.valid]
    figure = validation_figure(compared(networks, predictions, job.table.quiet_ms / tied.factor), groups, report)
    write_atomic(out.with_suffix(".png"), figure_bytes(figure, "png"))
    return report


def tell(report: dict[str, Any], out: Path, console: Console) -> None:
    """Print the report, and where it lies."""
    where = f"{report['target']}, space {report['space']['name']}, on {report['host']['name']}"
    for line in ["", f"{where}: predicted against measured", "", *describe(report), ""]:
        console.say(line)
    if report["n_failed"]:
        console.say(f"{report['n_failed']} networks could not be exported or compiled; they are in none of the figures")
    console.say(f"report: {out}, picture: {out.with_suffix('.png')}")


def _what(job: Job, networks: Sequence[TimedOne], predictions: Predictions) -> dict[str, Any]:

    ends = zip(predictions.mean.tolist(), predictions.low.tolist(), predictions.high.tolist(), strict=True)
    protocol = networks[0].measurement.protocol
    return {"target": job.deployment.target.name, "host": job.table.host, "table": table_identity(job.table),
            "space": {"name": job.space.name, "fingerprint": job.space.fingerprint},
            "protocol": protocol.to_dict(),
            "networks": [network_to_dict(network, end) for network, end in zip(networks, ends, strict=True)]}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.validate`."""
    return run_command(main, "validate", USAGE, argv)


if __name__ == "__main__":
    sys.exit(command())
