"""From finalists to a verified front: train and export all, score and time them with the baselines, write the run."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hwnas.cli.progress import Console
from hwnas.front.card import Input, card_text
from hwnas.front.comparison import compare
from hwnas.front.finalists import Finalist
from hwnas.front.make import Made, Making, make_all
from hwnas.front.report import write_report
from hwnas.front.rows import FrontRow, mark_front, save_front, told_exactly
from hwnas.front.score import Scores, Timing, verify_rows
from hwnas.latency.measurement import Protocol
from hwnas.networks.baselines import Baseline
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder
from hwnas.target.host import Host
from hwnas.target.target import Target

FORMAT = "hwnas-environment/1"
_PACKAGES = ("torch", "torchvision", "timm", "optuna", "onnx", "onnxruntime", "openvino", "numpy", "scikit-learn")


@dataclass(frozen=True)
class Facts:
    """What the search tells the report: where for, in which space, under which cap, how good the latency model is.

    `host` is the machine searched for; `here` says whether it is this one, so that it can be verified now.
    """

    host: str
    here: bool
    space: str
    timing: Timing
    cap_ms: float | None = None
    workers: int = 1
    latency_model: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)


def finish(run: RunFolder, finalists: Sequence[Finalist], baselines: Sequence[Baseline], making: Making, facts: Facts,
           console: Console) -> list[FrontRow]:
    """Everything after the search; returns the rows of front.csv. Killed at any point, the same call goes on.

    On another host than the one searched for nothing is verified: the rows keep their predictions, and
    `python -m hwnas.verify run=DIR` over there completes them.
    """
    rows, _ = make_rows(run, finalists, baselines, making, facts, console)
    environment = environment_of(making, facts)
    if not facts.here or not run.front_csv.is_file():
        write_results(run, Scores(mark_front(rows, facts.cap_ms)), making, environment)
    if not facts.here:
        console.say(f"not verified: this is not {facts.host}. Over there: python -m hwnas.verify run={run.path}")
        return mark_front(rows, facts.cap_ms)
    return verify_and_write(run, rows, making, facts.timing, environment, console)


def verify_and_write(run: RunFolder, rows: Sequence[FrontRow], making: Making, timing: Timing,
                     environment: Mapping[str, Any], console: Console) -> list[FrontRow]:
    """Score and time `rows` here, then write everything that depends on it."""
    scores = verify_rows(rows, run, making.dataset, making.target, timing, console)
    scores.rows = mark_front(scores.rows, environment.get("cap_ms"))
    host = Host.detect()
    environment = {**environment, "created": now(), "host": host.to_dict(), "verified_here": True,
                   "runtime": load_runtime(making.target.runtime).version(), "executed": scores.executed,
                   "versions": versions()}
    write_results(run, scores, making, environment)
    for row in scores.rows:
        if not row.verified:
            console.say(f"not verified: {row.id}: {row.reason or 'its exported file is missing'}")
        elif row.meets_cap is False and not row.is_baseline:
            console.say(f"{row.id} breaks its cap: {row.latency_ms:.4g} ms measured.")
    return scores.rows


def make_rows(run: RunFolder, finalists: Sequence[Finalist], baselines: Sequence[Baseline], making: Making,
              facts: Facts, console: Console) -> tuple[list[FrontRow], dict[str, Made]]:
    """Train, export and quantise every network, and score it in fp32; a failure becomes the row's reason."""
    networks: list[Finalist | Baseline] = [*finalists, *baselines]
    rows, made = {}, {}
    with console.step("train finalists and baselines") as report:
        for network, outcome in make_all(networks, run, making, facts.workers, report):
            row = row_of(network, making, facts)
            if outcome.made is None:
                console.say(f"{network.id}: {outcome.reason}")
                rows[network.id] = replace(row, reason=outcome.reason)
                continue
            made[network.id] = outcome.made
            rows[network.id] = replace(row, params=outcome.made.params, macs=outcome.made.macs,
                                       top1_test_fp32=outcome.top1_fp32, n_test=outcome.n_test)
    return [rows[network.id] for network in networks], made


def row_of(network: Finalist | Baseline, making: Making, facts: Facts) -> FrontRow:
    """A row that holds what is known before training."""
    known: dict[str, Any] = dict.fromkeys((
        "top1_proxy", "top1_test_fp32", "top1_test", "top1_test_low", "top1_test_high", "n_test",
        "latency_ms_predicted", "latency_ms_predicted_low", "latency_ms_predicted_high", "latency_ms",
        "latency_ms_low", "latency_ms_high", "reward", "meets_cap", "int8_share", "fallback_share"))
    known |= {"params": 0, "macs": 0, "reward_winner": False, "name": network.id, "architecture": str(network)}
    if isinstance(network, Finalist):
        known |= {"architecture": str(network.architecture), "top1_proxy": network.top1_proxy,
                  "latency_ms_predicted": network.latency_ms, "latency_ms_predicted_low": network.latency_ms_low,
                  "latency_ms_predicted_high": network.latency_ms_high, "reward": network.reward,
                  "reward_winner": network.reward_winner, "params": network.architecture.params,
                  "macs": network.architecture.macs}
    else:
        known["name"] = network.name
    return FrontRow(id=network.id, is_baseline=isinstance(network, Baseline), verified=False, on_front=False,
                    dominated_by="", target=making.target.name, host=facts.host, precision="", reason="", **known)


def write_results(run: RunFolder, scores: Scores, making: Making, environment: Mapping[str, Any]) -> None:
    """Cards, answers, samples, comparisons, environment, front, pictures, report: in this order, each whole."""
    data = making.dataset
    if scores.predicted:
        protocol = next((one.protocol for one in scores.measurements.values()), Protocol())
        run.write_predictions(data.test.labels, scores.predicted)
        run.write_measurements({
            "format": "hwnas-measurements/1", "host": environment["host"]["name"], "created": environment["created"],
            "runtime": environment["runtime"], "protocol": protocol.to_dict(),
            "networks": {name: one.to_dict() for name, one in scores.measurements.items()}})
    correct = {name: answers == data.test.labels for name, answers in scores.predicted.items()}
    run.write_json(run.comparisons, [one.to_dict() for one in compare(scores.rows, correct)])
    run.write_json(run.environment, environment)
    for row in scores.rows:
        folder = run.model(row.id)
        if folder.onnx.is_file():
            write_atomic(folder.card, _card(row, making, environment))
    scores.rows = told_exactly(run, scores.rows, environment)
    save_front(run, scores.rows)
    write_report(run)


def _card(row: FrontRow, making: Making, environment: Mapping[str, Any]) -> str:
    data = making.dataset
    size = data.image_size
    if not row.is_baseline:
        size = int(row.architecture.rpartition("@")[2])
    given = Input(data.name, data.channels, size, data.mean, data.std, data.class_names)
    recipe = f"Recipe `{making.recipe.name}`, seed {making.seed}, {len(data.train)} images of {data.name}: " \
             f"{', '.join(f'{key} {value}' for key, value in asdict(making.recipe).items() if key != 'name')}."
    return card_text(row, given, making.target, date=str(environment["created"])[:10],
                     runtime=str(environment["runtime"]), recipe=recipe)


def environment_of(making: Making, facts: Facts) -> dict[str, Any]:
    """Content of `environment.json` before anything is verified; `verification` is what another host needs."""
    data, target = making.dataset, making.target
    return {
        "format": FORMAT, "created": now(), "searched_for": facts.host, "verified_here": False,
        "host": Host.detect().to_dict(), "target": asdict(target), "runtime": load_runtime(target.runtime).version(),
        "versions": versions(), "space": facts.space, "cap_ms": facts.cap_ms,
        "dataset": {"name": data.name, "fingerprint": data.fingerprint, "image_size": data.image_size,
                    "channels": data.channels, "mean": list(data.mean), "std": list(data.std), "skipped": data.skipped,
                    "images": {"train": len(data.train), "validation": len(data.validation), "test": len(data.test)},
                    "class_names": list(data.class_names)},
        "latency_model": dict(facts.latency_model), "search": dict(facts.search),
        "certificate": dict(facts.certificate), "recipe": asdict(making.recipe),
        "executed": {},
        "measuring": {"seconds": facts.timing.seconds, "seed": facts.timing.seed, "quiet_ms": facts.timing.quiet_ms,
                      "reference": json.loads(json.dumps(facts.timing.reference.to_dict()))},
    }


def versions() -> dict[str, str]:
    """Versions of Python, hwnas and what it stands on."""
    from hwnas import __version__

    found = {"python": platform.python_version(), "hwnas": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    """This moment as ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


__all__ = ["Facts", "Target", "finish", "make_rows", "verify_and_write", "write_results"]
