"""`card.md` says what a network is, how to feed and load it, and gives its measurements with place and date."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hwnas.front.explore import load_template
from hwnas.front.rows import FrontRow
from hwnas.networks.baselines import MODULE
from hwnas.networks.network import FoundNetwork, TimmNetwork
from hwnas.runtimes.runtime import FP32, Shown, deployed_of, load_runtime, threads_of
from hwnas.target import Target
from hwnas.tasks.task import load_task, trunk_of

if TYPE_CHECKING:
    from hwnas.data.dataset import Dataset
    from hwnas.front.pairs import Pair
    from hwnas.training.job import TrainingJob

MOST_CLASSES = 20  # that a card names, from the worst on
_ANYWHERE = ("openvino", "onnxruntime")  # runtimes that read ONNX files


def card_text(row: FrontRow, data: Dataset, target: Target, *, date: str, runtime: str, recipe: str = "",
              quantised: str = "", recall: Mapping[str, float] = MappingProxyType({}), machine: str = "",
              pair: Pair | None = None) -> str:
    """Return the text of `card.md`.

    Args:
        row: The network. Without a target it is not deployed yet; without an architecture its origin is unknown.
        data: Images and classes, prepared as the network takes them.
        target: The deployment.
        date: The day of the measurement.
        runtime: Name and version.
        recipe: How it was trained, one line.
        quantised: How the int8 file was made, one line.
        recall: Share of the test images of each class that the deployed file answers rightly.
        machine: How the machine was when it was timed.
        pair: With a faster network that answers first.
    """
    file = "model_int8.onnx" if target.precision == "int8" else "model.onnx"
    target = replace(target, threads=row.threads or threads_of(target))
    pretrained = None if row.network is None else row.network.pretrained
    worst = sorted(recall.items(), key=lambda item: (item[1], item[0]))[:MOST_CLASSES]
    # The target's own runtime comes first, then those that read ONNX files.
    own = [target.runtime] if isinstance(load_runtime(target.runtime), Shown) else []
    return load_template("card.md.j2").render(
        row=row, data=data, target=target, date=date, version=runtime, recipe=recipe, quantised=quantised,
        classes=json.dumps(data.class_names, ensure_ascii=False),
        mean=_numbers(data.mean), std=_numbers(data.std), kind=_kind(row), torch=_in_torch(row, data),
        answers=load_task(data.task).card(len(data.class_names)),
        measured=_measured(row), machine=machine, pair=pair,
        recall=[(name, f"{100 * share:.1f} %") for name, share in worst],
        where=f"deployed as `{target.name}` ({target.runtime}, {target.precision}, "
              f"{target.threads} thread{'s' * (target.threads > 1)}, batch {target.batch})" if row.target else
              "trained, and exported in fp32",
        runtimes=[_used_in(name, row, target, Path(file), runtime, data.task)
                  for name in dict.fromkeys([*own, *_ANYWHERE])],
        pretrained=pretrained and f"{'' if isinstance(row.network, TimmNetwork) else 'what it keeps of '}{pretrained}")


def training_card(job: TrainingJob, summary: Mapping[str, Any]) -> str:
    """Return the card of a training that has ended: its fp32 file is scored in ONNX Runtime and not timed."""
    row = replace(
        FrontRow.of(job.network, host=summary["host"], top1_test_fp32=summary["top1_test"], n_test=summary["n_test"],
                    top1_test_low=summary["top1_test_low"], top1_test_high=summary["top1_test_high"],
                    metric=load_task(job.dataset.task).metric),
        params=summary["params"], macs=summary["macs"])
    facts = ", ".join(f"{key} {value}" for key, value in job.identity.items() if value not in (None, 0, 0.0))
    return card_text(row, job.dataset, replace(FP32, batch=1), recipe=f"{facts}.", runtime=f"onnxruntime "
                     f"{summary['versions']['onnxruntime']}",
                     date=datetime.fromtimestamp(job.summary.stat().st_mtime, UTC).date().isoformat())


def _kind(row: FrontRow) -> str:
    """Return the network's kind, as the beginning of a sentence."""
    if row.is_control:
        return f"The known network {row.name} of the search's space" if row.is_known else \
            f"A network drawn at random, a control of {row.control_of},"
    if row.kind == "obvious cut":
        return "An obvious cut of another network"
    return "A timm network" if row.is_baseline else "A network found by hwnas" if row.architecture else "A network"


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def _used_in(name: str, row: FrontRow, target: Target, onnx: Path, versions: str, task: str
             ) -> tuple[Shown, str, str, str]:
    """Return a runtime, the file that it loads, the package to install with pip, and a sentence on its speed."""
    runtime = load_runtime(name)
    assert isinstance(runtime, Shown)
    file, measured = str(deployed_of(onnx, name)), re.search(rf"\b{name} (\d[\w.]*)", versions)
    package = runtime.package + (f"=={measured[1]}" if measured else "")
    return runtime, file, package, _speed(row, target, name, file, task)


def _speed(row: FrontRow, target: Target, runtime: str, file: str, task: str) -> str:
    """Return the latency that was measured in this runtime, or say that none was."""
    if target.runtime == runtime and row.verified and row.latency_ms is not None:
        return f"Measured: {_ms(row.latency_ms, row.latency_ms_low, row.latency_ms_high)} a batch, see below."
    if target.precision == "int8" and target.runtime != runtime:
        return (f"Its latency was not measured in this runtime. The int8 file was made for {target.runtime}: another "
                "one may run parts of it in fp32, and answer a few images otherwise."
                + ("" if load_task(task).reads_boxes else " `hwnas quantize target=NAME model=model.onnx dataset=NAME` "
                   f"makes one for {runtime}."))
    return ("Its latency was not measured in this runtime: "
            f"`hwnas benchmark target=NAME model={file}` does, with a target that runs {runtime}.")


def _in_torch(row: FrontRow, data: Dataset) -> str:
    """Return lines of Python that load the weights in the card's folder."""
    n_classes, around = len(data.class_names), row.name
    if isinstance(row.network, FoundNetwork):
        around = row.network.architecture.around
    lines = ["import pathlib, hwnas; from hwnas.networks.network import Shape, load_weights, read_network",
             "from hwnas.system.run_folder import ModelFolder; folder = ModelFolder(pathlib.Path())",
             f"model = read_network(folder, Shape({data.channels}, {data.image_size}, {n_classes})).build()",
             f'load_weights(model, folder.weights, "weights", {n_classes})']
    if trunk_of(around)[1].startswith(MODULE):
        lines.insert(2, f"hwnas.register_module(module, {list(data.mean)}, {list(data.std)})  # as the search got it")
    return "\n".join(lines)


def _measured(row: FrontRow) -> list[tuple[str, str]]:
    """Return names and values of the card's table. Unknown values are empty."""
    bounds = (row.top1_test_low, row.top1_test_high, row.n_test)
    calls_ms = (row.latency_ms_p50, row.latency_ms_p90, row.latency_ms_p99)
    calls = ", ".join("too few calls" if value is None else f"{value:.4g}" for value in calls_ms)
    in_int8 = "" if row.int8_share is None else f", {row.int8_share:.0%} of convolutions and matrix products in int8"
    return [(f"test {row.metric}, deployed", _percent(row.top1_test, *bounds)),
            (f"test {row.metric}, fp32", _percent(row.top1_test_fp32, *(() if row.target else bounds))),
            ("latency of one batch", _ms(row.latency_ms, row.latency_ms_low, row.latency_ms_high)),
            ("50, 90, 99 of 100 calls within", "" if calls_ms == (None, None, None) else
             f"{calls} ms, with whatever else the machine did meanwhile"),
            ("latency predicted", _ms(row.latency_ms_predicted, row.latency_ms_predicted_low,
                                      row.latency_ms_predicted_high)),
            ("precision executed", row.precision + in_int8)]


def _percent(value: float | None, low: float | None = None, high: float | None = None, n: int | None = None) -> str:
    if value is None:
        return ""
    bounds = f" (95 %: {100 * low:.2f} to {100 * high:.2f})" if low is not None and high is not None else ""
    return f"{100 * value:.2f} %{bounds}" + (f" on {n} images" if n else "")


def _ms(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g} ms" + (f" (90 %: {low:.4g} to {high:.4g})" if low is not None and high is not None else "")
