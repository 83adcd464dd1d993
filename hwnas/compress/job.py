"""The inputs of a compression (options, source network, data, target), and the folder that it fills."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, DatasetInfo, Split, subset
from hwnas.data.loading import inspect_dataset, read_images
from hwnas.errors import CandidateError, ConfigError, DataError, ModelError, StudyError
from hwnas.latency.deployment import Deployment, open_device
from hwnas.latency.device import DeviceOptions
from hwnas.latency.timing import HERE, Device
from hwnas.lazy import LazyModule
from hwnas.networks.origin import describe_training
from hwnas.networks.quantize import load_fp32, name_nodes, needs_narrow_weights, tuning_of
from hwnas.runtimes.child import Progress, run_child, serve
from hwnas.runtimes.foreign import check_path, input_of, load_checked, sized
from hwnas.runtimes.runtime import one_line
from hwnas.system.cores import usable_cores
from hwnas.system.documents import check_identity, content_of, load_json, read_json
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import Manifest, ModelFolder, WorkFolder
from hwnas.target import Target
from hwnas.training.place import PlaceOptions, resolved

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from hwnas.networks.quantize import TunedFor
    from hwnas.runtimes.runtime import Runtime
else:
    onnx = LazyModule("onnx")


LEAST_CALIBRATION = 8
IDENTITY = "identity.json"  # among the steps
_IMAGES = 2  # that a file must answer at once when it is checked


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """How many images tell what a node costs in accuracy, and how many nodes are timed and left in fp32."""

    images: int = option(low=1, high=100_000)
    nodes: int = option(low=1, high=1000)


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """Options of the quantisation-aware fine-tuning."""

    epochs: int = option(low=1, high=1000)
    batch_size: int = option(low=2, high=65_536)
    lr: float = option(low=1e-8, high=100)
    distil: float = option(low=0, high=1)
    shift: float = option(low=0, high=0.5)
    zoom: float = option(low=0, high=0.5)
    rotate: float = option(low=0, high=180)


@dataclass(frozen=True)
class CompressOptions(DeviceOptions):
    """Options of a compression. `max_drop` is in points of validation top-1; `conf/compress.yaml` explains the rest."""

    target: Target
    dataset: dict[str, Any]
    model: str | None
    max_drop: float = option(low=0, high=100)
    all: bool = option()
    out: str | None = option()
    overwrite: bool = option()
    seed: int = option(low=0)
    split_seed: int = option(low=0)
    train_images: int | None = option(low=2)
    calibration_images: int = option(low=LEAST_CALIBRATION, high=100_000)
    validation_images: int | None = option(low=2)
    threads: int = option(low=0, high=4096)
    seconds: float = option(low=1, high=86_400)
    sensitivity: SensitivityOptions = option()
    qat: TuningOptions = option()
    memory_mb: int = option(low=1)
    timeout: float = option(low=1)
    training: PlaceOptions = option()

    def deciding(self) -> dict[str, int | None]:
        """The options that decide every step, by key: all but the limit and those that only cost time."""
        return {key: getattr(self, key) for key in ("split_seed", "seed", "train_images", "calibration_images",
                                                     "validation_images")}

    def tuning(self) -> dict[str, float]:
        """The further options that decide the fine-tuning, by key."""
        return {f"qat.{key}": value for key, value in asdict(self.qat).items()}


@dataclass(frozen=True, slots=True)
class Source:
    """An fp32 network: its file, the shape of its images, its classes, and its `metadata_props`.

    `tunable`: it is a model folder with weights, which can be fine-tuned. A bare file is used as it is. `trained` says
    in words how it was trained, where that is known.
    """

    path: Path
    label: str
    content: str
    shape: tuple[int, int, int]
    classes: int
    tunable: bool
    metadata: Mapping[str, str]
    trained: str = ""

    def fed(self, dataset: Dataset) -> Dataset:
        """The data set with the normalisation that the network was trained with, if its file names it."""
        try:
            mean, std = (tuple(map(float, load_json(self.metadata[key]))) for key in ("mean", "std"))
        except (KeyError, ValueError, TypeError):
            return dataset
        return replace(dataset, mean=mean, std=std) if len(mean) == len(std) == dataset.channels else dataset


def name_of(model: str) -> str:
    """The network's name for a result folder: the name of its folder, or of its file."""
    path = Path(os.path.abspath(model))
    return path.name.removesuffix(".onnx") or "model"


def source_of(model: str, target: Target, info: DatasetInfo, options: CompressOptions, copies: Path) -> Source:
    """Open the network `model`. A checked copy of a bare file, with fixed axes and named nodes, goes to `copies`.

    UserError when it is torn, incomplete, or made for other channels or classes than those of the data set.
    """
    if Path(model).is_dir():
        source = _folder(ModelFolder(Path(model)), target, options)
    else:
        source = _bare(model, target, options, copies)
    for what, its, wanted in (("channels", info.channels, source.shape[0]), ("classes", info.classes, source.classes)):
        if its != wanted:
            raise DataError(f"{source.label} was made for {wanted} {what}, the data set {info.name} has {its}. Give "
                            "the data set that it was trained on.")
    if source.shape[1] != source.shape[2]:
        raise ModelError(f"{source.label} takes images of {source.shape[1]}×{source.shape[2]} pixels; only square ones "
                         "can be scored here.")
    return source


def _folder(folder: ModelFolder, target: Target, options: CompressOptions) -> Source:
    """The network in a folder that a search or hwnas.train wrote; StudyError when its files are not those made then."""
    if not (folder.architecture.is_file() or folder.baseline.is_file()):
        raise ConfigError(f"model: {folder.path} has neither architecture.yaml nor baseline.yaml. Give models/ID of a "
                          "search, the folder of a hwnas train, or an .onnx file.")
    for path in (folder.weights, folder.onnx):
        if not path.is_file():
            raise ConfigError(f"model: {folder.path} has no {path.name}: its training is not finished. Give its "
                              "command again.")
    manifest = Manifest.find(folder.path)
    faults = manifest.faults(folder.weights, folder.onnx) if manifest else [f"no {folder.manifest.name}"]
    if faults:
        raise StudyError(f"model: {folder.path}: {'; '.join(faults)}. Give the command that made it again.")
    label = os.fspath(folder.onnx)
    checked = _checked(folder.onnx, label, target, options, None)
    channels, height, width = checked["shape"]
    return Source(folder.onnx, label, content_of(folder.onnx), (channels, height, width), int(checked["classes"]), True,
                  checked["metadata"], describe_training(folder.path))


def _bare(model: str, target: Target, options: CompressOptions, copies: Path) -> Source:
    """The network in a bare file. Its copy is named by its content, so that it never replaces a copy in use."""
    check_path(model, options.memory_mb)
    image_size: int | None = options.dataset.get("image_size")
    content, size = content_of(Path(model)), f"-{image_size}" if image_size else ""
    copy = copies / f"source-{content}{size}.onnx"
    copy.parent.mkdir(parents=True, exist_ok=True)
    checked = _checked(Path(model), model, target, options, copy)
    channels, height, width = checked["shape"]
    return Source(copy, model, content, (channels, height, width), int(checked["classes"]), False,
                  checked["metadata"])


def _checked(path: Path, label: str, target: Target, options: CompressOptions, copy: Path | None) -> dict[str, Any]:
    """What a limited child process says of a file that came from elsewhere; ModelError when it refuses it."""
    job = {"path": os.path.abspath(path), "label": label, "copy": copy and os.path.abspath(copy),
           "image_size": options.dataset.get("image_size") if copy else None}
    try:
        return dict(run_child("hwnas.compress.job", job, target, timeout_s=options.timeout,
                              memory_mb=options.memory_mb))
    except CandidateError as error:
        raise ModelError(str(error)) from None


def check_source(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> dict[str, Any]:
    """Write a copy with fixed image axes, a free batch axis and named nodes to `job["copy"]`, and run it once in fp32.

    Without a `copy`, the file itself must have all that, and is run as it is.
    ModelError for a file that is torn, hostile, quantised, or no classifier of images.
    """
    label, path = job["label"], Path(job["path"])
    check_path(path, job["memory_mb"])
    proto = load_checked(path)
    model_input = input_of(proto, label)
    shape = sized(model_input, label, None, job["image_size"], size_option="dataset.image_size")
    if len(shape) != 3:
        raise ModelError(f"{label} takes inputs of {len(shape)} axes; images [channels, height, width] are expected.")
    if model_input.shape[0] is not None:
        raise ModelError(f"{label}: the batch axis of input {model_input.name!r} is fixed to {model_input.shape[0]}. "
                         "Export it with a dynamic batch axis.")
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    if job["copy"] is None:
        return _answers(path, label, shape, target, runtime) | {"metadata": metadata}
    axes = next(value for value in proto.graph.input if value.name == model_input.name).type.tensor_type.shape.dim
    axes[0].dim_param = "batch"
    for axis, size in zip(axes[1:], shape, strict=True):
        axis.dim_value = size
    del proto.graph.value_info[:]  # it may contain the open axes; runtimes infer it again
    name_nodes(proto)
    try:
        onnx.load_external_data_for_model(proto, str(path.parent))
        write_atomic(job["copy"], proto.SerializeToString())
    except (ValueError, OSError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{label} cannot be copied: {one_line(error)}. Export it again.") from None
    return _answers(job["copy"], label, shape, target, runtime) | {"metadata": metadata}


def _answers(path: str | Path, label: str, shape: Sequence[int], target: Target, runtime: Runtime) -> dict[str, Any]:
    """Run a file once in fp32: the shape of its images and its number of classes."""
    try:
        load_fp32(path, label)
        compiled = runtime.compile(path, replace(target, precision="fp32"))
        logits = compiled.logits(np.zeros((_IMAGES, *shape), np.float32))
    except CandidateError as error:
        raise ModelError(str(error)) from None
    if logits.ndim != 2 or len(logits) != _IMAGES:
        raise ModelError(f"{label} answers {list(logits.shape)} to a batch of {_IMAGES}; [batch, classes] is expected. "
                         "Give a classifier.")
    return {"shape": list(shape), "classes": logits.shape[1]}


@dataclass(frozen=True)
class CompressJob:
    """The network, data, target and options. `calibration` holds normalised training images [n, c, h, w]. Files are
    scored and timed on `device`."""

    source: Source
    dataset: Dataset
    validation: Split
    calibration: NDArray[np.float32]
    target: Target
    options: CompressOptions
    folder: ModelFolder
    identity: Mapping[str, Any]
    device: Device = HERE

    @property
    def runtime(self) -> Runtime:
        """The target's runtime on the device."""
        return self.device.runtime(self.target.runtime)

    @property
    def steps(self) -> Path:
        """The folder with every finished step's result and file."""
        return self.folder.path / "steps"

    @property
    def summary(self) -> Path:
        """The path of `summary.json`, which is written last."""
        return self.folder.path / "summary.json"

    @property
    def table(self) -> Path:
        """The path of `table.csv`, with one line for each step."""
        return self.folder.path / "table.csv"

    @property
    def tuned_for(self) -> TunedFor:
        """The runtime whose kernels the int8 files suit."""
        return tuning_of(self.target)

    @property
    def narrow(self) -> bool:
        """Whether the weights need 7 bits on the machine that the network is for."""
        host = self.device.host
        return needs_narrow_weights(self.target, host.vendor, host.flags)

    @property
    def threads(self) -> int:
        """Number of threads for calibration and training."""
        return self.options.threads or len(usable_cores())


def make_job(config: Config, console: Console) -> CompressJob:
    """Read and check every option, the model and the data; a UserError names the fault."""
    options = read_command(CompressOptions, config)
    options = replace(options, training=PlaceOptions(resolved(options.training.device)))
    target, device = _target(options, console)
    if not options.model:
        raise ConfigError("which network? Add model=FOLDER (models/ID of a search, or hwnas.train's) or "
                          "model=FILE.onnx.")
    model = str(Path(options.model).expanduser())
    out = Path(options.out or Path("runs") / f"compress-{name_of(model)}-{target.name}")
    info = inspect_dataset(options.dataset)
    WorkFolder(out, "compress").take_up(options.overwrite)
    source = source_of(model, target, info, options, out / "steps")
    dataset = _dataset(options, info, source, console)
    validation, calibration = _parts(dataset, options)
    identity = {"model": source.content, "dataset": dataset.name, "dataset.fingerprint": dataset.fingerprint,
                "target": str(replace(target, name="", vendor="", price_per_hour=None)), "host": device.host.name,
                "runtime": device.runtime(target.runtime).version(), **options.deciding()}
    if needs_narrow_weights(target, device.host.vendor, device.host.flags):
        identity["weight_bits"] = 7
    return CompressJob(source, dataset, validation, calibration, target, options, ModelFolder(out), identity, device)


def _target(options: CompressOptions, console: Console) -> tuple[Target, Device]:
    target = options.target
    if target.precision != "int8":
        raise ConfigError(f"target {target.name} runs {target.precision}; compressing is for int8 targets, such as "
                          f"target={target.name.removesuffix(target.precision)}int8.")
    deployment = Deployment.of(target, None, console, open_device(options, console))
    deployment.device.runtime(target.runtime).check(target)
    return target, deployment.device


def _dataset(options: CompressOptions, info: DatasetInfo, source: Source, console: Console) -> Dataset:
    """The images in the form that the network takes. A line says so if it was trained on other ones.

    DataError when they are of another data set: a network that is never right cannot lose accuracy by rounding.
    """
    name, data, split_seed = source.metadata.get("dataset"), options.dataset, options.split_seed
    if "hwnas_version" in source.metadata and name not in (None, data["name"]):
        raise DataError(f"{source.label} was trained on the data set {name}, this is {data['name']}. Give "
                        f"dataset={name} with the options that it was trained with.")
    size = source.shape[1]
    dataset = read_images(data, size, split_seed, console).at_size(size)
    trained_on = source.metadata.get("dataset_fingerprint")
    if trained_on not in (None, dataset.fingerprint):
        console.say(f"note: {source.label} was trained with the images {trained_on}, these are {dataset.fingerprint}: "
                    "other files, size or split, so that some of those it is judged on may have trained it. Give the "
                    "search's seed, or the training's split_seed, as split_seed.")
    if options.train_images:  # the same part as in hwnas.train with this option
        rows = subset(dataset.train.labels, options.train_images, split_seed)
        dataset = replace(dataset, train=dataset.train.take(rows))
    return source.fed(dataset)


def _parts(dataset: Dataset, options: CompressOptions) -> tuple[Split, NDArray[np.float32]]:
    """The validation images for decisions, and training images of every class for calibration."""
    train, validation, classes = dataset.train, dataset.validation, len(dataset.class_names)
    if options.validation_images:
        validation = validation.take(subset(validation.labels, options.validation_images, options.split_seed))
    rows = subset(train.labels, options.calibration_images, options.seed)
    if len(rows) < LEAST_CALIBRATION:
        raise DataError(f"the calibration set has {len(rows)} image{'' if len(rows) == 1 else 's'}; ranges need at "
                        f"least {LEAST_CALIBRATION} training images. Add images.")
    if options.calibration_images < classes:
        raise ConfigError(f"calibration_images is {options.calibration_images}, but {dataset.name} has {classes} "
                          f"classes: some would be missing. Set calibration_images={classes} or more.")
    missing = sorted(set(range(classes)) - set(train.labels[rows].tolist()))
    if missing:
        raise DataError(f"class {dataset.class_names[missing[0]]!r} has no training image to calibrate with. Add some.")
    return validation, dataset.normalise(np.asarray(train.images[rows]))


def check_folder(job: CompressJob) -> None:
    """StudyError when the folder belongs to another compression; the message names the difference."""
    path = job.steps / IDENTITY
    if not path.is_file():
        write_atomic(path, json.dumps(dict(job.identity), indent=1) + "\n")
        return
    try:
        stored = read_json(path)
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {path}: {error}. Choose another out=FOLDER.") from None
    check_identity(stored if isinstance(stored, dict) else {}, job.identity, path, work="compression")


if __name__ == "__main__":  # the limited child process
    sys.exit(serve(check_source))
