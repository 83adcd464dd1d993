"""Judges a latency model on networks that its table has never seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, MeasurementInvalid, TableError

if TYPE_CHECKING:
    from hwnas.latency.deployment import Deployment
    from hwnas.latency.model import LatencyModel, Predictions
    from hwnas.latency.table import LatencyTable
    from hwnas.latency.validation import Stored, TimedOne
    from hwnas.space.architecture import Architecture
    from hwnas.space.search_space import SearchSpace



@dataclass(frozen=True)
class Job:
    """What is judged: a space on a deployment, by its table and model."""

    deployment: Deployment
    space: SearchSpace
    table: LatencyTable
    model: LatencyModel


def out_path(config: Any, measured: str) -> Path:
    """Where the report goes; ConfigError when it is no .json file."""
    from hwnas.space.search_space import find_space

    if config.out is None and measured:
        return Path(measured).with_name(f"{Path(measured).stem}-again.json")
    name = f"validation-{config.target.name}-{find_space(config.space).stem}.json"
    out = Path(str(config.out)) if config.out is not None else Path("runs") / name
    if out.suffix != ".json" or out.is_dir():
        raise ConfigError(f"out must be a .json file, got {str(out)!r}: the picture lies beside it as .png.")
    return out


def job_of(config: Any, deployment: Deployment, console: Console) -> Job:
    """Space, table and model; a host without a table is calibrated first, where it is this machine."""
    from hwnas.latency.deployment import calibration_options, latency_model, space_of

    space = space_of(config)
    table, model = latency_model(deployment, space, calibration_options(config), console)
    return Job(deployment, space, table, model)


def measure_and_judge(job: Job, sizes: tuple[int, int], seed: int, seconds: float, out: Path,
                      console: Console) -> None:
    """Measure networks that the table does not hold, and some that it does, and report."""
    from hwnas.latency.held_out_networks import ANCHOR, held_out_networks
    from hwnas.latency.validation import chosen_anchors
    from hwnas.runtimes.runtime import load_runtime

    n, n_anchors = sizes
    version = load_runtime(job.deployment.target.runtime).version()
    known = {one.architecture.id for one in job.table.networks}
    chosen = held_out_networks(job.space, job.model, n, seed, known)
    chosen += [(ANCHOR, one) for one in chosen_anchors(job.table, job.space.name, n_anchors)]
    partial = partial_of(job, n, seed, version, out)
    networks = measure_chosen(job, chosen, seed, seconds, partial, console)
    origin = {"runtime": version, "seed": seed, "measured_at": _now(), "n_asked": n,
              "n_failed": len(chosen) - len(networks)}
    anchors = [one for one in networks if one.group == ANCHOR]
    report = write_report(job, [one for one in networks if one.group != ANCHOR], anchors, origin, out)
    partial.remove()
    tell(report, out, console)


def partial_of(job: Job, n: int, seed: int, version: str, out: Path) -> Any:
    """The file of measurements under way, which only the same validation goes on with."""
    from hwnas.latency.validation import Partial, table_identity

    header = {"table": table_identity(job.table), "host": job.deployment.host_name, "runtime": version, "n": n,
              "seed": seed, "space": {"name": job.space.name, "fingerprint": job.space.fingerprint}}
    return Partial(out.with_suffix(".partial.jsonl"), header, job.table.protocol)


def measure_chosen(job: Job, chosen: Sequence[tuple[str, Architecture]], seed: int, seconds: float, partial: Any,
                   console: Console) -> list[TimedOne]:
    """Time them in mixed order; those that an interrupted run has timed are taken from its file."""
    import random

    from hwnas.latency.timing import time_networks
    from hwnas.latency.validation import TimedOne
    from hwnas.runtimes.runtime import load_runtime

    target, table = job.deployment.target, job.table
    runtime = load_runtime(target.runtime)
    runtime.check(target)
    if partial.foreign:
        console.say(f"note: {partial.path} is of another table, seed or n; it is replaced.")
    found = partial.measured()
    if found:
        console.say(f"{len(found)} of {len(chosen)} networks were measured before the interruption")
    partial.start()
    waiting = [one for _, one in chosen if one.id not in found]
    random.Random(seed).shuffle(waiting)  # so that a drift of the machine does not pass for a difference of groups
    if waiting:
        with console.step("time networks") as report:
            found |= time_networks(waiting, target, runtime, table.reference,
                                   replace(table.protocol, max_seconds=seconds), seed=seed,
                                   quiet_ms=table.quiet_ms or None, progress=report,
                                   timed=lambda one, measurement, _: partial.add(one, measurement))
    return [TimedOne(group, one, found[one.id]) for group, one in chosen if one.id in found]


def judge_again(config: Any, deployment: Deployment, path: Path, out: Path, console: Console) -> None:
    """Compare a report's measurements with what the present table predicts; nothing is measured."""
    from hwnas.latency.validation import load

    stored = load(path)
    job = job_of(config, replace(deployment, here=False), console)
    check_same(stored, job, path)
    known = {one.architecture.id for one in job.table.networks}
    networks = [one for one in stored.networks if one.architecture.id not in known]
    console.say(f"These networks were measured earlier ({path}, {stored.measured_at}), those of the front chosen by "
                "the table of then; predictions are of the present table.")
    if len(networks) < len(stored.networks):
        console.say(f"{len(stored.networks) - len(networks)} of its {len(stored.networks)} networks are in the table "
                    "by now, so they are left out.")
    origin = {"runtime": stored.runtime, "seed": stored.seed, "measured_at": stored.measured_at,
              "n_asked": len(stored.networks), "n_failed": 0}
    tell(write_report(job, networks, stored.anchors, origin, out), out, console)


def check_same(stored: Stored, job: Job, path: Path) -> None:
    """TableError when report and table are of different hosts, keys, runtimes or spaces; names both."""
    for what, has, wanted in (("host", stored.host, job.table.host_name), ("key", stored.key, str(job.table.key)),
                              ("runtime", stored.runtime, job.table.runtime_version),
                              ("space", stored.space, job.space.name)):
        if has != wanted:
            raise TableError(f"{path}: measured for {what} {has}, the table is of {wanted}. Measure for this one: "
                             f"python -m hwnas.validate +target={job.deployment.target.name} space={job.space.name}")


def write_report(job: Job, networks: Sequence[TimedOne], anchors: Sequence[TimedOne], origin: dict[str, Any],
                 out: Path) -> dict[str, Any]:
    """Predict, compare, write report and picture; MeasurementInvalid when no network has a valid time."""
    from hwnas.latency.validation import pace, save
    from hwnas.latency.validation_picture import validation_figure
    from hwnas.latency.validation_report import compared, evaluate
    from hwnas.pictures.style import figure_bytes
    from hwnas.system.paths import write_atomic

    if not any(one.measurement.valid for one in networks):
        reason = networks[0].measurement.reason if networks else "no network is left to be judged"
        raise MeasurementInvalid(f"none of {len(networks)} networks has a valid time: {reason}. Stop what else runs "
                                 "here and give the command again.")
    tied = pace(job.table, {one.architecture.id: one.measurement for one in anchors})
    predictions = job.model.predict_architectures([one.architecture for one in networks])
    report = {**evaluate(networks, predictions, job.table.quiet_ms, tied), **origin, "created": _now(),
              **_what(job, networks, predictions)}
    report["anchor_networks"] = [{"architecture": one.architecture.to_dict(), "group": one.group,
                                  **one.measurement.to_dict()} for one in anchors]
    save(out, report)
    groups = [one.group for one in networks if one.measurement.valid]
    figure = validation_figure(compared(networks, predictions, job.table.quiet_ms / tied.factor), groups, report)
    write_atomic(out.with_suffix(".png"), figure_bytes(figure, "png"))
    return report


def tell(report: dict[str, Any], out: Path, console: Console) -> None:
    """Print the report, and where it lies."""
    from hwnas.latency.validation_report import describe

    where = f"{report['target']}, space {report['space']['name']}, on {report['host']['name']}"
    for line in ["", f"{where}: predicted against measured", "", *describe(report), ""]:
        console.say(line)
    if report["n_failed"]:
        console.say(f"{report['n_failed']} networks could not be exported or compiled; they are in none of the figures")
    console.say(f"report: {out}, picture: {out.with_suffix('.png')}")


def _what(job: Job, networks: Sequence[TimedOne], predictions: Predictions) -> dict[str, Any]:
    from hwnas.latency.validation import network_to_dict, table_identity

    ends = zip(predictions.mean.tolist(), predictions.low.tolist(), predictions.high.tolist(), strict=True)
    protocol = networks[0].measurement.protocol
    return {"target": job.deployment.target.name, "host": job.table.host, "table": table_identity(job.table),
            "space": {"name": job.space.name, "fingerprint": job.space.fingerprint},
            "protocol": protocol.to_dict(),
            "networks": [network_to_dict(one, end) for one, end in zip(networks, ends, strict=True)]}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
