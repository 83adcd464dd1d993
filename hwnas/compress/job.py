"""The inputs of a compression (options, source network, data, target), and the folder that it fills."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.options import flag, number
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, DatasetInfo
from hwnas.errors import CandidateError, ConfigError, DataError, ModelError, StudyError
from hwnas.runtimes.foreign import check_path, input_of, load_checked, sized
from hwnas.system.documents import check_identity, content_of
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import ModelFolder
from hwnas.system.work_folder import WorkFolder
from hwnas.target.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from hwnas.data.dataset import Split
    from hwnas.networks.quantize import TunedFor


LEAST_CALIBRATION = 8
IDENTITY = "identity.json"  # among the steps


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """Options of a compression. `max_drop` is in points of validation top-1; `conf/compress.yaml` explains the rest."""

    max_drop: float
    every_step: bool
    seed: int
    train_images: int | None
    calibration_images: int
    validation_images: int | None
    threads: int
    seconds: float
    sensitivity_images: int
    sensitivity_nodes: int
    epochs: int
    batch_size: int
    lr: float
    distil: float
    shift: float
    zoom: float
    rotate: float

    @classmethod
    def from_config(cls, config: Any) -> CompressOptions:
        """Read `conf/compress.yaml`; ConfigError names key, rule and value."""
        return cls(
            max_drop=float(number(config, "max_drop", 0, 100)), every_step=flag(config, "all"),
            seed=number(config, "seed", 0, whole=True),
            train_images=number(config, "train_images", 2, whole=True, optional=True),
            calibration_images=number(config, "calibration_images", LEAST_CALIBRATION, 100_000, whole=True),
            validation_images=number(config, "validation_images", 2, whole=True, optional=True),
            threads=number(config, "threads", 0, 4096, whole=True),
            seconds=float(number(config, "seconds", 1, 86_400)),
            sensitivity_images=number(config, "sensitivity.images", 1, 100_000, whole=True),
            sensitivity_nodes=number(config, "sensitivity.nodes", 1, 1000, whole=True),
            epochs=number(config, "qat.epochs", 1, 1000, whole=True),
            batch_size=number(config, "qat.batch_size", 2, 65_536, whole=True),
            lr=float(number(config, "qat.lr", 1e-8, 100)), distil=float(number(config, "qat.distil", 0, 1)),
            shift=float(number(config, "qat.shift", 0, 0.5)), zoom=float(number(config, "qat.zoom", 0, 0.5)),
            rotate=float(number(config, "qat.rotate", 0, 180)))

    def deciding(self) -> dict[str, Any]:
        """The options that decide every step, by key: all but the limit and those that only cost time."""
        return {key: getattr(self, key) for key in ("seed", "train_images", "calibration_images",
                                                     "validation_images")}

    def tuning(self) -> dict[str, Any]:
        """The further options that decide the fine-tuning, by key."""
        keys = ("epochs", "batch_size", "lr", "distil", "shift", "zoom", "rotate")
        return {f"qat.{key}": getattr(self, key) for key in keys}


@dataclass(frozen=True, slots=True)
class Source:
    """An fp32 network: its file, the shape of its images, its classes, and its `metadata_props`.

    `tunable`: it is a model folder with weights, which can be fine-tuned. A bare file is used as it is.
    """

    path: Path
    label: str
    content: str
    shape: tuple[int, int, int]
    classes: int
    tunable: bool
    metadata: Mapping[str, str]

    def fed(self, dataset: Dataset) -> Dataset:
        """The data set with the normalisation that the network was trained with, if its file names it."""
        try:
            mean, std = (tuple(map(float, json.loads(self.metadata[key]))) for key in ("mean", "std"))
        except (KeyError, ValueError, TypeError):
            return dataset
        return replace(dataset, mean=mean, std=std) if len(mean) == len(std) == dataset.channels else dataset


def name_of(model: str) -> str:
    """The network's name for a result folder: the name of its folder, or of its file."""
    path = Path(os.path.abspath(model))
    return path.name.removesuffix(".onnx") or "model"


def source_of(model: str, target: Target, info: DatasetInfo, image_size: int | None, copies: Path, memory_mb: int,
              timeout_s: float) -> Source:
    """Open the network `model`. A checked copy of a bare file, with fixed axes and named nodes, goes to `copies`.

    UserError when it is torn, incomplete, or made for other channels or classes than those of the data set.
    """
    if Path(model).is_dir():
        source = _folder(ModelFolder(Path(model)), memory_mb)
    else:
        source = _bare(model, target, info, image_size, copies, memory_mb, timeout_s)
    for what, its, wanted in (("channels", info.channels, source.shape[0]), ("classes", info.classes, source.classes)):
        if its != wanted:
            raise DataError(f"{source.label} was made for {wanted} {what}, the data set {info.name} has {its}. Give "
                            "the data set that it was trained on.")
    if source.shape[1] != source.shape[2]:
        raise ModelError(f"{source.label} takes images of {source.shape[1]}×{source.shape[2]} pixels; only square ones "
                         "can be scored here.")
    return source


def _folder(folder: ModelFolder, memory_mb: int) -> Source:
    """The network in a folder that a search or hwnas.train wrote."""
    if not (folder.architecture.is_file() or folder.baseline.is_file()):
        raise ConfigError(f"model: {folder.path} has neither architecture.yaml nor baseline.yaml. Give models/ID of a "
                          "search, the folder of a python -m hwnas.train, or an .onnx file.")
    for path in (folder.weights, folder.onnx):
        if not path.is_file():
            raise ConfigError(f"model: {folder.path} has no {path.name}: its training is not finished. Give its "
                              "command again.")
    check_path(folder.onnx, memory_mb)
    proto, label = load_checked(folder.onnx), os.fspath(folder.onnx)
    axes = sized(input_of(proto, label), label, None, None)
    shape = proto.graph.output[0].type.tensor_type.shape.dim
    if len(axes) != 3 or len(shape) != 2 or shape[1].dim_value <= 0:
        raise ModelError(f"{label} is not a classifier of images [channels, height, width]. Export it again.")
    return Source(folder.onnx, label, content_of(folder.onnx), (axes[0], axes[1], axes[2]), shape[1].dim_value, True,
                  metadata_of(proto))


def _bare(model: str, target: Target, info: DatasetInfo, image_size: int | None, copies: Path, memory_mb: int,
          timeout_s: float) -> Source:
    """The network in a bare file. Its copy is named by its content, so that it never replaces a copy in use."""
    from hwnas.runtimes.child import run_child

    check_path(model, memory_mb)
    content, size = content_of(Path(model)), f"-{image_size}" if image_size else ""
    copy = copies / f"source-{content}{size}.onnx"
    copy.parent.mkdir(parents=True, exist_ok=True)
    job = {"path": os.path.abspath(model), "label": model, "channels": info.channels, "image_size": image_size,
           "copy": os.path.abspath(copy)}
    try:
        checked = run_child("hwnas.compress.child", job, target, timeout_s=timeout_s, memory_mb=memory_mb)
    except CandidateError as error:
        raise ModelError(str(error)) from None
    channels, height, width = checked["shape"]
    return Source(copy, model, content, (channels, height, width), int(checked["classes"]), False,
                  checked["metadata"])


def metadata_of(proto: ModelProto) -> dict[str, str]:
    """`metadata_props` by key."""
    return {entry.key: entry.value for entry in proto.metadata_props}


@dataclass(frozen=True)
class CompressJob:
    """The network, data, target and options. `calibration` holds normalised training images [n, c, h, w]."""

    source: Source
    dataset: Dataset
    validation: Split
    calibration: NDArray[np.float32]
    target: Target
    options: CompressOptions
    folder: ModelFolder
    identity: Mapping[str, Any]

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
        from hwnas.networks.quantize import tuning_of

        return tuning_of(self.target)

    @property
    def threads(self) -> int:
        """Number of threads for calibration and training."""
        from hwnas.target.host import usable_cores

        return self.options.threads or len(usable_cores())


def make_job(config: Any, console: Console) -> CompressJob:
    """Read and check every option, the model and the data; a UserError names the fault."""
    from hwnas.cli.options import flag, number, section
    from hwnas.data.loading import inspect_dataset
    from hwnas.runtimes.runtime import load_runtime
    from hwnas.target.host import Host

    options = CompressOptions.from_config(config)
    split_seed = number(config, "split_seed", 0, whole=True)
    memory_mb, timeout_s = number(config, "memory_mb", 1, whole=True), float(number(config, "timeout", 1))
    target = _target(config, console)
    if not config.model:
        raise ConfigError("which network? Add model=FOLDER (models/ID of a search, or hwnas.train's) or "
                          "model=FILE.onnx.")
    model = str(Path(str(config.model)).expanduser())
    out = Path(str(config.out)) if config.out else Path("runs") / f"compress-{name_of(model)}-{target.name}"
    data = section(config, "dataset")
    info = inspect_dataset(data)
    WorkFolder(out, "compress").take_up(flag(config, "overwrite"))
    source = source_of(model, target, info, data.get("image_size"), out / "steps", memory_mb, timeout_s)
    dataset = _dataset(data, info, source, options.train_images, split_seed, console)
    validation, calibration = _parts(dataset, options, split_seed)
    dataset = dataset.as_in(_begun_with(out / "steps").get("dataset.fingerprint"), out, console.say)
    identity = {"model": source.content, "dataset": dataset.name, "dataset.fingerprint": dataset.fingerprint,
                "target": str(replace(target, name="", vendor="", price_per_hour=None)), "host": Host.detect().name,
                "runtime": load_runtime(target.runtime).version(), "split_seed": split_seed, **options.deciding()}
    return CompressJob(source, dataset, validation, calibration, target, options, ModelFolder(out), identity)


def _target(config: Any, console: Console) -> Target:
    from hwnas.latency.deployment import Deployment
    from hwnas.runtimes.runtime import load_runtime

    target = Deployment.from_config(config, console).target
    if target.precision != "int8":
        raise ConfigError(f"target {target.name} runs {target.precision}; compressing is for int8 targets, such as "
                          f"+target={target.name.removesuffix(target.precision)}int8.")
    load_runtime(target.runtime).check(target)
    return target


def _dataset(data: dict[str, Any], info: DatasetInfo, source: Source, train_images: int | None, split_seed: int,
             console: Console) -> Dataset:
    """The images in the form that the network takes. A line says so if it was trained on other ones.

    DataError when they are of another data set: a network that is never right cannot lose accuracy by rounding.
    """
    from hwnas.data.loading import load_dataset
    from hwnas.data.splits import subset

    name = source.metadata.get("dataset")
    if "hwnas_version" in source.metadata and name not in (None, data["name"]):
        raise DataError(f"{source.label} was trained on the data set {name}, this is {data['name']}. Give "
                        f"dataset={name} with the options that it was trained with.")
    size = source.shape[1]
    with console.step("read images") as report:
        dataset = load_dataset(data, size, split_seed, lambda done, total: report(done / total)).at_size(size)
    trained_on = source.metadata.get("dataset_fingerprint")
    if trained_on not in (None, dataset.fingerprint, dataset.former):
        console.say(f"note: {source.label} was trained with the images {trained_on}, these are {dataset.fingerprint}: "
                    "other files, size or split, so that some of those it is judged on may have trained it. Give the "
                    "search's seed, or the training's split_seed, as split_seed.")
    if train_images:  # the same part as in hwnas.train with this option
        rows = subset(dataset.train.labels, train_images, split_seed)
        dataset = replace(dataset, train=dataset.train.take(rows))
    return source.fed(dataset)


def _parts(dataset: Dataset, options: CompressOptions, split_seed: int) -> tuple[Split, NDArray[np.float32]]:
    """The validation images for decisions, and training images of every class for calibration."""
    from hwnas.data.splits import subset

    train, validation, classes = dataset.train, dataset.validation, len(dataset.class_names)
    if options.validation_images:
        validation = validation.take(subset(validation.labels, options.validation_images, split_seed))
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


def _begun_with(steps: Path) -> Mapping[str, Any]:
    """The identity of the compression with these steps; empty where there is none that `check_folder` accepts."""
    try:
        return dict(json.loads((steps / IDENTITY).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def check_folder(job: CompressJob) -> None:
    """StudyError when the folder belongs to another compression; the message names the difference."""
    path = job.steps / IDENTITY
    if not path.is_file():
        write_atomic(path, json.dumps(dict(job.identity), indent=1) + "\n")
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {path}: {error}. Choose another out=FOLDER.") from None
    check_identity(stored if isinstance(stored, dict) else {}, job.identity, path, work="compression")
