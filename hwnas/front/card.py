"""`card.md`: what a network is, how to feed and load it, and its measurements with place and date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hwnas.data.dataset import Preparation, Task
from hwnas.front.rows import FrontRow
from hwnas.target import Target

_HINTS = {"int8": "f32", "fp32": "f32", "bf16": "bf16", "fp16": "f16"}


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


def card_text(row: FrontRow, given: Input, target: Target, *, date: str, runtime: str, recipe: str = "") -> str:
    """Text of `card.md`. `runtime` is name and version, `date` the day of the measurement, `recipe` one line."""
    file = "model_int8.onnx" if target.precision == "int8" else "model.onnx"
    shape = f"{target.batch}, {given.channels}, {given.size}, {given.size}"
    parts = [
        f"# {row.id}", _summary(row, given, target),
        "## Input", _input(given),
        "## OpenVINO", _code(_openvino(file, target)),
        "## ONNX Runtime", _code(_onnxruntime(file, target)),
        "## timm (fp32 weights, e.g. to train on)", _code(_timm(row, given)),
        "## Measured", _describe_measurement(row, given.task.metric, target, date, runtime),
        "## The same with OpenVINO's own tool", _code(_benchmark_app(file, shape, target), "sh"),
        _note(target),
    ]
    if recipe:
        parts += ["## Trained", recipe]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(row: FrontRow, given: Input, target: Target) -> str:
    kind = "A timm baseline" if row.is_baseline else "A network found by hwnas"
    if row.is_control:
        kind = f"A network drawn at random, a control of {row.control_of},"
    return (f"{kind} for {given.dataset} ({len(given.task.class_names)} classes), deployed as `{target.name}` "
            f"({target.runtime}, {target.precision}, {target.threads or 'all'} thread(s), batch {target.batch}).\n\n"
            f"`{row.architecture}`\n\n{row.params:,} parameters, {row.macs / 1e6:.2f} million multiply-accumulates.")


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


def _openvino(file: str, target: Target) -> str:
    options = {"INFERENCE_PRECISION_HINT": _HINTS[target.precision], "NUM_STREAMS": "1"}
    if target.threads:
        options["INFERENCE_NUM_THREADS"] = str(target.threads)
    text = ", ".join(f'"{key}": "{value}"' for key, value in options.items())
    return ("import numpy as np, openvino\n"
            f'network = openvino.Core().compile_model("{file}", "CPU", {{{text}}})\n'
            "request = network.create_infer_request()\n"
            "images = np.ascontiguousarray(images, np.float32)  # write the next images into this very array\n"
            "request.set_input_tensor(openvino.Tensor(images, shared_memory=True))\n"
            "request.infer()  # this call is what was timed; `network(images)` copies, and takes longer\n"
            'logits = request.get_tensor("logits").data')


def _onnxruntime(file: str, target: Target) -> str:
    threads = f"options.intra_op_num_threads = {target.threads}\n" if target.threads else ""
    return ("import onnxruntime\n"
            f"options = onnxruntime.SessionOptions()\n{threads}"
            f'session = onnxruntime.InferenceSession("{file}", options, providers=["CPUExecutionProvider"])\n'
            'logits = session.run(["logits"], {"images": images})[0]')


def _timm(row: FrontRow, given: Input) -> str:
    if row.is_baseline:
        shape, stem_stride = f"{given.channels}, {len(given.task.class_names)}, {given.size}", int(row.id != row.name)
        return ("import safetensors.torch; from hwnas.networks.baselines import Baseline\n"
                f'model = Baseline("{row.name}", {stem_stride}).build({shape})  # a timm network\n'
                'model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))')
    return ("import pathlib, safetensors.torch, timm; from hwnas.networks.build import register; "
            "from hwnas.space import Architecture\n"
            f'register(Architecture.from_yaml(pathlib.Path("architecture.yaml").read_text()), "hwnas_{row.id}")\n'
            f'model = timm.create_model("hwnas_{row.id}"); '
            'model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))')


def _describe_measurement(row: FrontRow, metric: str, target: Target, date: str, runtime: str) -> str:
    lines = [(f"test {metric}, deployed", _percent(row.top1_test, row.top1_test_low, row.top1_test_high, row.n_test)),
             (f"test {metric}, fp32", _percent(row.top1_test_fp32)),
             ("latency of one batch", _ms(row.latency_ms, row.latency_ms_low, row.latency_ms_high)),
             ("50, 90, 99 of 100 calls within", _percentiles(row)),
             ("latency predicted", _ms(row.latency_ms_predicted, row.latency_ms_predicted_low,
                                       row.latency_ms_predicted_high)),
             ("precision executed", row.precision + _int8(row.int8_share))]
    table = "\n".join(f"| {name} | {value} |" for name, value in lines if value)
    where = f"On {row.host}, {runtime}, {date}." if row.verified else \
        f"Not verified on {row.host} yet: `python -m hwnas.verify run=DIR` on that machine completes this."
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
