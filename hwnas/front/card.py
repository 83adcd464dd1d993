"""`card.md`: what a network is, how to feed and load it, and its measurements with place and date."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.data.dataset import Preparation, Task
from hwnas.front.rows import FrontRow
from hwnas.networks.network import FoundNetwork, TimmNetwork
from hwnas.runtimes.runtime import FP32, Shown, deployed_of, load_runtime
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.training.job import TrainingJob

_HINTS = {"int8": "f32", "fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_ANYWHERE = ("openvino", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Input:
    """A network's input and task. Inputs are square images of `channels`, scaled to 0..1, minus `mean`, over `std`."""

    dataset: str
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    task: Task
    preparation: Preparation | None = None


def card_text(row: FrontRow, given: Input, target: Target, *, date: str, runtime: str, recipe: str = "",
              quantised: str = "") -> str:
    """Text of `card.md`. `runtime` is name and version, `date` the day of the measurement; `recipe` and `quantised`
    (how the int8 file was made) are one line each.

    A row without a target is a network that is not deployed yet, one without an architecture a file of unknown origin.
    """
    file = "model_int8.onnx" if target.precision == "int8" else "model.onnx"
    shape = f"{target.batch}, {given.channels}, {given.size}, {given.size}"
    parts = [
        f"# {row.id}", _summary(row, given, target),
        "## Input", _input(given),
        *(part for name in _shown(target) for part in _used_in(name, row, target, Path(file))),
        *(["## timm (fp32 weights, e.g. to train on)", _code(_timm(row, given))] if row.architecture else []),
        *_commands(row, given),
        "## Measured", _describe_measurement(row, given.task.metric, target, date, runtime),
        "## The same with OpenVINO's own tool", _code(_benchmark_app(file, shape, target), "sh"),
        _note(target) if row.target else "",
    ]
    if recipe:
        parts += ["## Trained", recipe]
    if row.network is not None and row.network.pretrained is not None:
        of = "" if isinstance(row.network, TimmNetwork) else "what it keeps of "
        parts += ["## Pretrained", f"Its training began with {of}{row.network.pretrained}"]
    if quantised:
        parts += ["## Quantised", f"Activation ranges: {quantised}."]
    return "\n\n".join(part for part in parts if part) + "\n"


def training_card(job: TrainingJob, summary: Mapping[str, Any]) -> str:
    """Text of the card of a training that has ended: its fp32 file, scored in ONNX Runtime and not timed."""
    data = job.dataset
    row = replace(
        FrontRow.of(job.network, host=summary["host"], top1_test_fp32=summary["top1_test"], n_test=summary["n_test"],
                    top1_test_low=summary["top1_test_low"], top1_test_high=summary["top1_test_high"]),
        params=summary["params"], macs=summary["macs"])
    given = Input(data.name, data.channels, data.image_size, data.mean, data.std, data.task, data.preparation)
    told = ", ".join(f"{key} {value}" for key, value in job.identity.items() if value not in (None, 0, 0.0))
    return card_text(row, given, replace(FP32, batch=1), recipe=f"{told}.", runtime=f"onnxruntime "
                     f"{summary['versions']['onnxruntime']}", date=day_of(job.summary))


def day_of(path: Path) -> str:
    """The day that a file was written, ISO 8601, UTC."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()


def _summary(row: FrontRow, given: Input, target: Target) -> str:
    kind = "A timm network" if row.is_baseline else "A network found by hwnas" if row.architecture else "A network"
    if row.is_control:
        kind = f"The known network {row.name} of the search's space" if row.is_known else \
            f"A network drawn at random, a control of {row.control_of},"
    where = (f"deployed as `{target.name}` ({target.runtime}, {target.precision}, {target.threads or 'all'} thread(s), "
             f"batch {target.batch})" if row.target else "trained, and exported in fp32")
    made = f" It joined the front after the search: {row.origin}." if row.origin else ""
    size = f"{row.params:,} parameters, {row.macs / 1e6:.2f} million multiply-accumulates." if row.architecture else ""
    text = f"{kind} for {given.dataset} ({len(given.task.class_names)} classes), {where}.{made}"
    return "\n\n".join([text, *([f"`{row.architecture}`", size] if row.architecture else [])])


def _input(given: Input) -> str:
    kind = "one grey channel" if given.channels == 1 else f"{given.channels} channels (RGB order)"
    return (f"`images`: float32 [n, {given.channels}, {given.size}, {given.size}], {kind}. "
            f"Output `logits`: float32 [n, {len(given.task.class_names)}].\n\n"
            f"`images = (pixels / 255 - mean) / std` with mean = {_numbers(given.mean)}, std = {_numbers(given.std)} "
            f"per channel.{_prepared(given)}\n\nClasses, in order: {', '.join(given.task.class_names)}.")


def _prepared(given: Input) -> str:
    """The way from image files (or pixels) to `images`, as code; nothing where the data set does not say."""
    if given.preparation is None:
        return ""
    source = "paths" if given.preparation.pictures else "pictures"
    mean, std = (f"np.array({_numbers(values)}, np.float32)[:, None, None]" for values in (given.mean, given.std))
    return ("\n\nPixels as they were in training and test:\n\n" + _code(
        f"{given.preparation.code()}\n\nmean = {mean}\nstd = {std}\n"
        f"images = (np.stack([prepared(each) for each in {source}]) - mean) / std"))


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def _shown(target: Target) -> list[str]:
    """Runtimes that a card shows code for: the target's own, and those that read ONNX files."""
    own = [] if target.runtime in _ANYWHERE or not isinstance(load_runtime(target.runtime), Shown) else [target.runtime]
    return [*own, *_ANYWHERE]


def _used_in(name: str, row: FrontRow, target: Target, onnx: Path) -> list[str]:
    runtime = load_runtime(name)
    assert isinstance(runtime, Shown)
    file = str(deployed_of(onnx, name))
    return [f"## {runtime.title}", _code(runtime.usage(file, target)), _speed(row, target, name, file)]


def _speed(row: FrontRow, target: Target, runtime: str, file: str) -> str:
    """The latency that was measured with the lines above, or that none was."""
    if target.runtime == runtime and row.verified and row.latency_ms is not None:
        return f"Measured: {_ms(row.latency_ms, row.latency_ms_low, row.latency_ms_high)} a batch, see below."
    return ("Its latency was not measured in this runtime: "
            f"`python -m hwnas.benchmark +target=NAME model={file}` does, with a target that runs {runtime}.")


def _timm(row: FrontRow, given: Input) -> str:
    if row.is_baseline and not isinstance(row.network, FoundNetwork):
        network, shape = row.network, f"{given.channels}, {len(given.task.class_names)}, {given.size}"
        made = {"stem_stride": int("-stem1" in row.id), "pad_type": "", "cut": ""}
        if isinstance(network, TimmNetwork):
            made = {key: getattr(network.baseline, key) for key in made}
        options = "".join(f", {key}={json.dumps(value)}" for key, value in made.items() if value)
        return ("import safetensors.torch; from hwnas.networks.baselines import Baseline\n"
                f'model = Baseline("{row.name}"{options}).build({shape})  # a timm network\n'
                'model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))')
    name = f"hwnas_{row.id.replace('-', '_')}"
    return ("import pathlib, safetensors.torch, timm; from hwnas.networks.build import register; "
            "from hwnas.space import Architecture\n"
            f'register(Architecture.from_yaml(pathlib.Path("architecture.yaml").read_text()), "{name}")\n'
            f'model = timm.create_model("{name}"); '
            'model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))')


def _commands(row: FrontRow, given: Input) -> list[str]:
    """The commands that write what is deployed; nothing where the file does not say how images are prepared."""
    if given.preparation is None:
        return []
    sides = f"{given.preparation.sizes[0]}, " * 2
    if given.preparation.pictures:
        sides = "height, width, "
    lines = [("predict model=DIR images=FOLDER", "classifies a folder of images"),
             (f"export model=DIR format=uint8 out={row.id}.onnx", "ONNX: takes pixels, and prepares them itself"),
             (f"export model=DIR format=openvino out={row.id}", f"the same for a model server: {row.id}/1/model.xml"),
             (f"export model=DIR format=timm out={row.id}-timm", "weights that timm loads without hwnas")]
    known = lines if row.architecture else lines[:3]
    text = "\n".join(f"python -m hwnas.{command}  # {what}" for command, what in known)
    said = f"DIR is this folder. Pixels are uint8 [n, {sides}{given.channels}], decoded."
    if given.preparation.pictures:
        said += (f" `image_size=N` takes square pictures of N px alone, and {given.preparation.sizes[0]} px need no "
                 "resizing. In training, JPEG files of more than twice that size were decoded at a fraction of it "
                 "(`draft`, above), which gives slightly other pixels than all of them.")
    return ["## What takes pixels, and what needs no hwnas", _code(text, "sh"), said]


def _describe_measurement(row: FrontRow, metric: str, target: Target, date: str, runtime: str) -> str:
    lines = [(f"test {metric}, deployed", _percent(row.top1_test, row.top1_test_low, row.top1_test_high, row.n_test)),
             (f"test {metric}, fp32", _percent(row.top1_test_fp32) if row.target else
              _percent(row.top1_test_fp32, row.top1_test_low, row.top1_test_high, row.n_test)),
             ("latency of one batch", _ms(row.latency_ms, row.latency_ms_low, row.latency_ms_high)),
             ("50, 90, 99 of 100 calls within", _percentiles(row)),
             ("latency predicted", _ms(row.latency_ms_predicted, row.latency_ms_predicted_low,
                                       row.latency_ms_predicted_high)),
             ("precision executed", row.precision + _int8(row.int8_share))]
    table = "\n".join(f"| {name} | {value} |" for name, value in lines if value)
    where = f"On {row.host}, {runtime}, {date}." if row.verified else \
        f"Not verified on {row.host} yet: `python -m hwnas.verify run=DIR` on that machine completes this."
    if not row.target:
        where = f"On {row.host}, {runtime}, {date}."
    reason = f"\n\nReason: {row.reason}" if row.reason else ""
    return f"{where}\n\n| what | value |\n|---|---|\n{table}{reason}"


def _int8(share: float | None) -> str:
    return "" if share is None else f", {share:.0%} of convolutions and matrix products in int8"


def _percent(value: float | None, low: float | None = None, high: float | None = None, n: int | None = None) -> str:
    if value is None:
        return ""
    bounds = f" (95 %: {100 * low:.2f} to {100 * high:.2f})" if low is not None and high is not None else ""
    return f"{100 * value:.2f} %{bounds}" + (f" on {n} images" if n else "")


def _ms(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g} ms" + (f" (90 %: {low:.4g} to {high:.4g})" if low is not None and high is not None else "")


def _percentiles(row: FrontRow) -> str:
    """Of all calls of the measurement; empty where nothing was measured."""
    values = (row.latency_ms_p50, row.latency_ms_p90, row.latency_ms_p99)
    if all(value is None for value in values):
        return ""
    text = ", ".join("too few calls" if value is None else f"{value:.4g}" for value in values)
    return f"{text} ms, with whatever else the machine did meanwhile"


def _benchmark_app(file: str, shape: str, target: Target) -> str:
    threads = f" -nthreads {target.threads}" if target.threads else ""
    return (f"benchmark_app -m {file} -d CPU -api sync -hint none -nstreams 1{threads} "
            f"-infer_precision {_HINTS[target.precision]} -shape \"images[{shape.replace(' ', '')}]\" -t 10")


def _note(target: Target) -> str:
    text = "Its median also holds what a shared machine adds; hwnas prints the quiet time (see the run's report)."
    return text if target.runtime == "openvino" else f"The target runs {target.runtime}, so its figures differ. {text}"


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"
