"""The command that makes an int8 file of an fp32 ONNX file, with no more loss of accuracy than is allowed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hwnas.benchmark.files import NetworkOptions, noting_waits
from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, show
from hwnas.data.loading import inspect_dataset, read_images
from hwnas.errors import CandidateError, ConfigError, DataError, ModelError, Unfinished
from hwnas.latency.copies import TimedFile
from hwnas.latency.deployment import Deployment
from hwnas.latency.measurement import Protocol, describe_machine
from hwnas.latency.timing import reference_network, time_files
from hwnas.lazy import onnx
from hwnas.networks.qdq import Graph, quantised_nodes
from hwnas.networks.quantize import (
    Method,
    activation_ranges,
    calibration_images,
    find_errors,
    load_fp32,
    needs_narrow_weights,
    quantise_graph,
    quantize_static,
    tuning_of,
)
from hwnas.networks.running import logits_of
from hwnas.runtimes.foreign import input_of
from hwnas.runtimes.runtime import load_runtime, predict
from hwnas.stats import paired_difference
from hwnas.system.documents import load_json
from hwnas.system.paths import temporary_folder, write_atomic
from hwnas.system.run_folder import check_replaceable
from hwnas.target import Host, Target
from hwnas.tasks.task import load_task

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from hwnas.data.dataset import Dataset

USAGE = """int8 under an accuracy limit: the layers that int8 costs most stay in fp32 until the limit is kept.

    hwnas quantize target=ort_int8 model=network.onnx dataset=imagefolder dataset.root=/images max_drop=0.5

Validation images decide; the file chosen is then asked about the test images once. --show-config prints every option.
For quantisation-aware training of a file that is not hwnas' own, take NNCF."""
JUDGES = 192  # images by which the cost of a layer is measured


@dataclass(frozen=True)
class QuantizeOptions(NetworkOptions):
    """Options of `conf/quantize.yaml`. `max_drop` is in points of validation top-1."""

    max_drop: float = option(low=0, high=100)
    images: int = option(low=8, high=100_000)
    split_seed: int = option(low=0)
    seconds: float = option(low=1, high=86_400)
    out: str | None = option()
    dataset: dict[str, Any] = field(default_factory=dict)


def main(config: Config, console: Console) -> None:
    """Quantise, judge, time, and write the file that keeps the limit; or else write the best and raise Unfinished."""
    options = read_command(QuantizeOptions, config)
    if not options.model or options.is_built or options.target.precision != "int8":
        raise ConfigError("which file, for which int8 target? Add model=FILE.onnx and target=NAME.")
    out = Path(options.out or f"{Path(options.model).name.removesuffix('.onnx')}_int8.onnx")
    check_replaceable(out)
    target = Deployment.of(options.target, None, console).target
    load_runtime(target.runtime).check(target)
    with temporary_folder() as name:
        folder = Path(name)
        # A child process, which may crash or take too much memory, checks the file and writes it in one piece.
        with console.step("check the file") as report:
            task = {**options.network_job(folder), "batches": [1]}
            checked_file = options.prepare_to_send(task, folder, noting_waits(report, console))
        fp32, shape = Path(checked_file["file"]), tuple(checked_file["input"]["image"])
        data = _images(options, load_fp32(fp32, str(options.model)), shape, console)
        job = _Job(fp32, str(options.model), target, data, options, folder)
        chosen = job.search(console)
        network = onnx.load(chosen.path)
        network.producer_name = "hwnas"  # near the file's beginning, so that the same command may replace it
        write_atomic(out, network.SerializeToString())
        for line in job.lines(chosen, shape, console):
            show(line)
    console.say(f"written: {out}")
    if chosen.drop[0] > options.max_drop:
        raise Unfinished(f"{chosen.drop[0]:.2f} points are lost, more than max_drop={options.max_drop:g} allows. Give "
                         "more images=N, allow more, or train with NNCF.", part=True)


def _images(options: QuantizeOptions, proto: ModelProto, shape: Sequence[int], console: Console) -> Dataset:
    """Return the data set in the network's size and normalised by the mean and std in the file's metadata, if any."""
    info = inspect_dataset(options.dataset)
    if load_task(info.task).reads_boxes:
        raise DataError(f"{info.name} is for {info.task}, and hwnas quantize judges networks that give each image one "
                        "class. Give such images; hwnas search quantises the others.")
    if len(shape) != 3 or shape[1] != shape[2] or info.channels != shape[0]:
        remedy = ("Export it with the channels first" if len(shape) == 3 and shape[2] == info.channels
                  else "Give the data set that it was trained on")
        raise DataError(f"{options.model} takes images of {'×'.join(map(str, shape))}; {info.name} has square ones of "
                        f"{info.channels} channels. {remedy}.")
    if (fixed := input_of(proto, str(options.model)).shape[0]) is not None:
        raise ModelError(f"{options.model}: the batch axis is fixed to {fixed}, and int8 files are made by many images "
                         "at a time. Export it with a dynamic batch axis.")
    data = read_images(options.dataset, shape[1], options.split_seed, console).at_size(shape[1])
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    if metadata.get("dataset_fingerprint") not in (None, data.fingerprint):
        console.remark(f"note: {options.model} names another split, size or place of its images: if the split is "
                       "another one, it learnt from test images. The search's seed is split_seed here.")
    try:
        mean, std = (tuple(map(float, load_json(metadata[key]))) for key in ("mean", "std"))
    except (KeyError, ValueError, TypeError):
        console.remark(f"note: {options.model} names no mean and std; it is fed with those of {info.name}, {data.mean} "
                       f"and {data.std}. If it was trained with others, add them to its metadata_props, as JSON lists.")
        return data
    return replace(data, mean=mean, std=std)


@dataclass(frozen=True)
class _Found:
    """An int8 file, its layers in fp32, and its loss of top-1 in points: mean and ends of the 95 % interval."""

    path: Path
    kept: tuple[str, ...]
    drop: tuple[float, float, float]


@dataclass(frozen=True)
class _Job:
    fp32: Path
    label: str
    target: Target
    data: Dataset
    options: QuantizeOptions
    folder: Path

    def search(self, console: Console) -> _Found:
        """Return the first int8 file that keeps the limit, with more and more layers in fp32; or else the best one."""
        images = calibration_images(self.data, self.options.images, self.options.seed)
        right = self._right(self.fp32, "fp32")
        best: _Found | None = None
        for path, fp32_layers in self._files(images, console):
            with console.step(f"score with {len(fp32_layers)} layers in fp32") as report:
                mean, low, high = paired_difference(right, self._right(path, "int8", report))
            chosen = _Found(path, fp32_layers, (100 * mean, 100 * low, 100 * high))
            best = chosen if best is None or chosen.drop < best.drop else best
            if chosen.drop[0] <= self.options.max_drop:
                return chosen
        assert best is not None  # the first file has all layers in int8
        return best

    def _files(self, images: NDArray[np.float32], console: Console) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """Yield int8 files with more and more layers in fp32: none (or the head), then the layers that cost most."""
        # 1. The file with all layers in int8 (or all but the head), with the best ranges of activations.
        host, tuned = Host.detect(), tuning_of(self.target)
        narrow, threads = needs_narrow_weights(self.target, host.vendor, host.flags), self.target.threads or 1
        first = self.folder / "int8-0.onnx"
        with console.step("choose ranges") as report:
            first_result = quantize_static(self.fp32, first, images, tuned_for=tuned, narrow=narrow, threads=threads,
                                           label=self.label, report=report)
        yield first, first_result.kept
        proto, method = load_fp32(self.fp32, self.label), cast(Method, first_result.method)
        ranges = activation_ranges(proto, images, [method], tuned_for=tuned, threads=threads)[method]
        mean_errors, biases = {}, ""
        if first_result.corrected:
            mean_errors = find_errors(proto, ranges, images, tuned_for=tuned, narrow=narrow, threads=threads)
            biases = ", biases corrected"
        judges = images[:: max(1, len(images) // JUDGES)]
        fp32_logits = logits_of(proto, judges, threads)

        def int8(fp32_layers: Collection[str]) -> ModelProto:
            network = deepcopy(proto)
            note = f"{method}, {len(fp32_layers)} layers in fp32{biases}"
            quantise_graph(network, ranges, note=note, tuned_for=tuned, kept=fp32_layers, narrow=narrow,
                           errors=mean_errors)
            return network

        # 2. The cost of a layer: the error of the logits that is left when this layer alone goes back to fp32.
        names = [node.name for node in quantised_nodes(Graph(proto)) if node.name not in first_result.kept]
        if len(names) < 2:
            return  # without its only layer in int8 the file would be in fp32
        errors = {}
        with console.step("what each layer costs") as report:
            for index, name in enumerate(names):
                errors[name] = float(np.square(
                    logits_of(int8((*first_result.kept, name)), judges, threads) - fp32_logits).sum())
                report((index + 1) / len(names), name)
        # 3. Layers in fp32: the 1, 2, 4, 8, … that leave the smallest errors, at most all but one.
        order = sorted(names, key=errors.__getitem__)
        for n in sorted({min(1 << power, len(order) - 1) for power in range(len(order).bit_length())}):
            path, fp32_layers = self.folder / f"int8-{n}.onnx", (*first_result.kept, *order[:n])
            path.write_bytes(int8(fp32_layers).SerializeToString())
            yield path, fp32_layers

    def _right(self, path: Path, precision: str, report: Callable[[float], None] | None = None) -> NDArray[np.bool_]:
        """Return for each validation image whether its answer is right."""
        compiled = self._compiled(path, precision)
        answer = compiled.logits(self.data.normalise(np.asarray(self.data.validation.images[:1]))).shape[1:]
        if answer != (len(self.data.class_names),):
            raise DataError(f"{self.label} answers an image with {list(answer)} numbers; {self.data.name} has "
                            f"{len(self.data.class_names)} classes. Give the data set that it was trained on.")
        answers = predict(compiled, replace(self.data, test=self.data.validation), report)
        return np.asarray(answers == self.data.validation.labels)

    def _compiled(self, path: Path, precision: str) -> Any:
        try:
            return load_runtime(self.target.runtime).compile(path, replace(self.target, precision=precision))
        except CandidateError as error:
            raise ModelError(f"{self.label}: {error}") from None

    def lines(self, chosen: _Found, shape: Sequence[int], console: Console) -> Iterator[str]:
        """Yield lines for the user: both files' top-1 on the test images and latency, timed together, and the loss."""
        files = {"fp32": self.fp32, "int8": chosen.path}
        timed = {name: TimedFile(path, replace(self.target, precision=name), tuple(shape))
                 for name, path in files.items()}
        with console.step("time both", self.options.seconds) as report:
            measured = time_files(timed, self.target, reference_network(),
                                  Protocol(max_seconds=self.options.seconds), progress=report)
        for name, path in files.items():
            top1 = float((predict(self._compiled(path, name), self.data) == self.data.test.labels).mean())
            each = measured[name]
            took = (f"{each.latency_ms:.4g} ms (90 %: {each.latency_ms_low:.4g} to {each.latency_ms_high:.4g})"
                    if each.valid else f"INVALID: {each.reason}")
            yield f"{name}  top-1 {top1:.2%} on {len(self.data.test)} test images  {took}"
        fp32_note = f", {len(chosen.kept)} layers in fp32" if chosen.kept else ""
        yield (f"validation top-1, int8 minus fp32: {-chosen.drop[0]:+.2f} points (95 %: {-chosen.drop[2]:+.2f} to "
               f"{-chosen.drop[1]:+.2f}){fp32_note}")
        if chosen.drop[0] <= self.options.max_drop < chosen.drop[2]:
            yield (f"max_drop={self.options.max_drop:g} is kept on these {len(self.data.validation)} validation "
                   f"images. They are too few to rule out a loss of up to {chosen.drop[2]:.2f} points.")
        yield describe_machine(measured.values())


command = partial(run_command, main, "quantize", USAGE)

if __name__ == "__main__":
    sys.exit(command())
