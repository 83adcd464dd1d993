"""The command that compares predicted with measured latency, on networks that the table has never seen.

Predictions are moved to the run's session as in a search: a panel of the table's networks is timed again first.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, number, text_table
from hwnas.errors import ConfigError, MeasurementInvalid, TableError
from hwnas.latency.calibration import CalibrationOptions
from hwnas.latency.deployment import Deployment, MeasuringOptions, latency_model
from hwnas.latency.draws import draw_held_out
from hwnas.latency.session import FRESH_S, Session, measure_session
from hwnas.latency.table import LatencyTable, TimedNetwork
from hwnas.latency.timing import WAVE, time_networks
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import find_space
from hwnas.stats import spearman
from hwnas.system.documents import Document, now
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import check_replaceable
from hwnas.system.tables import finite

if TYPE_CHECKING:
    from hwnas.latency.measurement import Measurement
    from hwnas.latency.model import LatencyModel

USAGE = """Predicted against measured latency, on networks never seen: half random, half from the predicted front.

    hwnas validate target=xeon_int8 space=mnasnet n=60 seed=7 out=v.json"""

VALIDATION = Document("hwnas-validation", 1, "a validation", "Name the JSON file that hwnas.validate wrote.",
                      TableError, two_fields=True, shape={"networks": [{"group": str, "architecture": dict}]})
WAVE_S = 60.0  # most seconds of timing for a wave of networks
FIGURES = (  # name in the report, in words, format
    ("within_5", "within 5 %", ".1%"), ("within_10", "within 10 %", ".1%"), ("mean_error", "mean error", ".1%"),
    ("bias", "median signed error", "+.1%"), ("spearman", "Spearman", ".4f"),
    ("coverage", "90 % interval covers", ".1%"),
    ("least_third_coverage", "in the third where it covers least", ".1%"),
    ("median_half_width", "its half-width", ".1%"))


@dataclass(frozen=True)
class ValidateOptions(MeasuringOptions):
    """The options of `conf/validate.yaml`. `n` networks are measured."""

    n: int = option(low=4, high=5000)
    seed: int = option(low=0, high=2**31)
    out: str | None = option()
    calibration: CalibrationOptions = option()


def main(config: Config, console: Console) -> None:
    """Measure networks that the table does not have, judge the model by them, and write and print a report."""
    options = read_command(ValidateOptions, config)
    out = choose_out(options)
    deployment, space = options.deployment(console), options.search_space()
    table, model = latency_model(deployment, space, options.calibration, console)
    known_ids = {network.architecture.id for network in table.networks}
    chosen = draw_held_out(space, lambda codes: model.predict(codes).mean, options.n, options.seed, known_ids)
    partial = out.with_suffix(".partial.json")
    session = measure_session(deployment, table, model, console)
    timed = measure_networks(deployment, table, space.name, chosen, options.seed, partial, console)
    report = {"target": deployment.target.name, "space": {"name": space.name, "fingerprint": space.fingerprint},
              **describe_table(table), "seed": options.seed, "measured_at": now(),
              "n_failed": len(chosen) - len(timed), **judge(table, model, timed, session)}
    save(out, report)
    partial.unlink(missing_ok=True)
    tell(report, out, console)


def choose_out(options: ValidateOptions) -> Path:
    """Choose the path of the report. Raises ConfigError if it is no .json file."""
    if options.out is not None:
        out = Path(options.out)
    else:
        out = Path("runs") / f"validation-{options.target.name}-{find_space(options.space).stem}.json"
    if out.suffix != ".json" or out.is_dir():
        raise ConfigError(f"out must be a .json file, got {str(out)!r}.")
    check_replaceable(out)
    return out


def describe_table(table: LatencyTable) -> dict[str, Any]:
    """Return the facts about a table for a report, with a hash of the file's content."""
    content = table.path.read_bytes() if table.path and table.path.is_file() else b""
    return {"host": table.host, "runtime": table.runtime_version,
            "table": {"file": table.path.name if table.path else None, "created": table.created,
                      "key": str(table.key), "networks": len(table.networks),
                      "sha256": hashlib.sha256(content).hexdigest()[:16]}}


def measure_networks(deployment: Deployment, table: LatencyTable, space: str,
                     chosen: Sequence[tuple[str, Architecture]], seed: int, partial: Path, console: Console
                     ) -> list[TimedNetwork]:
    """Measure networks in mixed order, so that a drift of the machine does not look like a difference of groups.

    Args:
        chosen: (group, network); the group becomes the origin.
        partial: The file of a table of all valid measurements. An interrupted run's measurements are not repeated.

    Returns:
        The measured networks, in the order of `chosen`; networks that cannot be exported or compiled are missing.
    """
    target, device = deployment.target, deployment.device
    device.runtime(target.runtime).check(target)
    stored_table, groups = open_partial(partial, table), {network.id: group for group, network in chosen}
    measured = {network.architecture.id: network for network in stored_table.networks}
    waiting = [network for _, network in chosen if network.id not in measured]
    random.Random(seed).shuffle(waiting)
    if len(waiting) < len(chosen):
        console.say(f"{len(chosen) - len(waiting)} of {len(chosen)} networks were measured before the interruption")

    def keep(network: Architecture, measurement: Measurement) -> None:
        timed = TimedNetwork(space, network, measurement, groups[network.id])
        measured[network.id] = timed
        if measurement.valid:  # another run repeats the others
            stored_table.networks.append(timed)
            stored_table.save(partial)

    if waiting:
        with console.step("time networks", WAVE_S * math.ceil(len(waiting) / WAVE)) as progress:
            time_networks(waiting, target, table.reference, replace(table.protocol, max_seconds=WAVE_S),
                          seed=seed, progress=progress, device=device, timed=keep)
    return [measured[network.id] for _, network in chosen if network.id in measured]


def open_partial(path: Path, table: LatencyTable) -> LatencyTable:
    """Return the valid measurements of an unfinished validation, as a table. It is empty if there is no file of this
    session, or if the file was made with another table."""
    if path.exists() and time.time() - path.stat().st_mtime <= FRESH_S:  # of this session
        draft = LatencyTable.load(path)
        if (draft.key, draft.host_name, draft.created) == (table.key, table.host_name, table.created):
            return draft
    return replace(table, networks=[], error={}, spent_s={}, learnt={}, processes={}, path=path)


def judge(table: LatencyTable, model: LatencyModel, networks: Sequence[TimedNetwork], session: Session
          ) -> dict[str, Any]:
    """Compare the model's predictions with networks that were measured in a session; return a part of the report.

    Raises:
        MeasurementInvalid: No network has a valid time.
    """
    valid = [network.measurement for network in networks if network.measurement.valid]
    if not valid:
        reason = networks[0].measurement.reason if networks else "no network is left to be judged"
        raise MeasurementInvalid(f"none of {len(networks)} networks has a valid time: {reason}. Stop what else runs "
                                 "here and give the command again.")
    # The machine's speed at the table's time and now, by the reference network.
    quiet_ms, run_ms = table.quiet_ms, float(np.median([measurement.quiet_ms for measurement in valid]))
    predictions = model.in_session(session.factor, session.log_std).predict_architectures(
        [network.architecture for network in networks])
    predicted = list(zip(predictions.mean, predictions.low, predictions.high, strict=True))
    rows = pd.DataFrame(
        [(network.origin, *ms, network.measurement.latency_ms) for network, ms in zip(networks, predicted, strict=True)
         if network.measurement.valid], columns=["group", "predicted_ms", "low_ms", "high_ms", "measured_ms"])
    return {
        "protocol": valid[0].protocol.to_dict(), **summarise(rows), "n_invalid": len(networks) - len(valid),
        "groups": {str(group): summarise(part) for group, part in rows.groupby("group")},
        "session": asdict(session),
        "reference": {"calibration_ms": quiet_ms, "run_ms": run_ms, "ratio": round(run_ms / quiet_ms, 5)},
        "networks": [network_to_dict(network, ms) for network, ms in zip(networks, predicted, strict=True)]}


def network_to_dict(network: TimedNetwork, predicted: tuple[float, float, float]) -> dict[str, Any]:
    """Return a network's entry; `predicted` is mean, low and high in ms. Numbers of an INVALID measurement are NaN."""
    measurement, (mean_ms, low_ms, high_ms) = network.measurement, predicted
    return {"id": network.architecture.id, "group": network.origin, "architecture": network.architecture.to_dict(),
            "predicted_ms": mean_ms, "low_ms": low_ms, "high_ms": high_ms, "latency_ms": measurement.latency_ms,
            "half_width": measurement.half_width, "valid": measurement.valid, "reason": measurement.reason,
            **measurement.to_dict()}


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report whole or not at all; numbers that JSON cannot hold become null."""
    write_atomic(path, json.dumps(finite({**VALIDATION.header, **report}), separators=(",", ":")))


def summarise(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the figures of rows with `predicted_ms`, its 90 % interval `low_ms` to `high_ms`, and `measured_ms`.

    Returns:
        Errors and shares as fractions, the rank correlation; None for a figure without a value.
    """
    signed = rows.predicted_ms / rows.measured_ms - 1  # above 0: the network is faster than predicted
    error, width_ms = signed.abs(), rows.high_ms - rows.low_ms
    inside = rows.measured_ms.between(rows.low_ms, rows.high_ms).to_numpy(float)
    # The coverage of each third by predicted latency: a good average may hide fast networks that are badly covered.
    thirds = np.array_split(inside[np.argsort(rows.predicted_ms.to_numpy(), kind="stable")], 3)
    values = {
        "within_5": (error <= 0.05).mean(), "within_10": (error <= 0.10).mean(), "mean_error": error.mean(),
        "bias": signed.median(),
        "spearman": spearman(rows.predicted_ms, rows.measured_ms) if len(rows) > 2 else math.nan,
        "coverage": inside.mean() if len(inside) else math.nan,
        "least_third_coverage": min((third.mean() for third in thirds if len(third)), default=math.nan),
        "median_half_width": (width_ms / 2 / rows.predicted_ms).median()}
    return {"n": len(rows), **finite({name: round(of, 6) for name, of in values.items()})}


def tell(report: Mapping[str, Any], out: Path, console: Console) -> None:
    """Print the table of figures, the session and networks behind them, and the path of the report."""
    parts = {"all": report, **report["groups"]}
    rows = [["", *parts], ["networks", *(str(part["n"]) for part in parts.values())],
            *([words, *(number(part[name], form) for part in parts.values())] for name, words, form in FIGURES)]
    lines = [f"{report['target']}, space {report['space']['name']}, on {report['host']['name']}: predicted against "
             "measured", "", *text_table(rows), "", report["session"]["told"]]
    if report["n_invalid"]:
        lines.append(f"{report['n_invalid']} networks INVALID: the machine was too restless; in none of the figures")
    if report["n_failed"]:
        lines.append(f"{report['n_failed']} networks could not be exported or compiled; in none of the figures")
    for line in ["", *lines, "", f"report: {out}"]:
        console.say(line)


command = partial(run_command, main, "validate", USAGE)

if __name__ == "__main__":
    sys.exit(command())
