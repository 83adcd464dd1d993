"""CompressJob: what one compression is made of, checked before it starts; its identity names what decides its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.compress_options import LEAST_CALIBRATION, CompressOptions
from hwnas.compress_source import Source, name_of, source_of
from hwnas.errors import ConfigError, DataError, StudyError
from hwnas.paths import write_atomic
from hwnas.progress import Console
from hwnas.run_folder import ModelFolder, RunFolder
from hwnas.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.accuracy.dataset import Dataset, DatasetInfo, Split
    from hwnas.quantize import TunedFor


@dataclass(frozen=True)
class CompressJob:
    """A network, the data, the target and the options. `calibration`: normalised training images [n, c, h, w]."""

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
        """Every finished step's result and file."""
        return self.folder.path / "steps"

    @property
    def summary(self) -> Path:
        """`summary.json`, written last."""
        return self.folder.path / "summary.json"

    @property
    def table(self) -> Path:
        """`table.csv`: a line a step."""
        return self.folder.path / "table.csv"

    @property
    def tuned_for(self) -> TunedFor:
        """Whose kernels the int8 files suit."""
        from hwnas.quantize import tuning_of

        return tuning_of(self.target)

    @property
    def threads(self) -> int:
        """Threads of calibration and training."""
        from hwnas.latency.host import usable_cores

        return self.options.threads or len(usable_cores())


def make_job(config: Any, console: Console) -> CompressJob:
    """Read and check every option, the model and the data; a UserError names what is wrong."""
    from hwnas.accuracy.data import inspect_dataset
    from hwnas.command import number
    from hwnas.latency.host import Host
    from hwnas.plan import section
    from hwnas.runtimes import load_runtime

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
    folder = RunFolder.create(out).path
    source = source_of(model, target, info, data.get("image_size"), folder / "steps", memory_mb, timeout_s)
    dataset = _dataset(data, info, source, options.train_images, split_seed, console)
    validation, calibration = _parts(dataset, options, split_seed)
    identity = {"model": source.content, "dataset": dataset.name, "dataset.fingerprint": dataset.fingerprint,
                "target": str(replace(target, name="", vendor="", price_per_hour=None)), "host": Host.detect().name,
                "runtime": load_runtime(target.runtime).version(), "split_seed": split_seed, **options.deciding()}
    return CompressJob(source, dataset, validation, calibration, target, options, ModelFolder(folder), identity)


def _target(config: Any, console: Console) -> Target:
    from hwnas.deployment import Deployment
    from hwnas.runtimes import load_runtime

    target = Deployment.from_config(config, console).target
    if target.precision != "int8":
        raise ConfigError(f"target {target.name} runs {target.precision}; compressing is for int8 targets, such as "
                          f"+target={target.name.removesuffix(target.precision)}int8.")
    load_runtime(target.runtime).check(target)
    return target


def _dataset(data: dict[str, Any], info: DatasetInfo, source: Source, train_images: int | None, split_seed: int,
             console: Console) -> Dataset:
    """The images as the network takes them; says so when they are not those that it was trained with.

    DataError when they are of another data set: what is never right loses nothing by rounding.
    """
    from hwnas.accuracy.data import load_dataset
    from hwnas.accuracy.splits import subset

    name = source.metadata.get("dataset")
    if "hwnas_version" in source.metadata and name not in (None, data["name"]):
        raise DataError(f"{source.label} was trained on the data set {name}, this is {data['name']}. Give "
                        f"dataset={name} with the options that it was trained with.")
    size = source.shape[1]
    with console.step("read images") as report:
        dataset = load_dataset(data, size, split_seed, lambda done, total: report(done / total)).at_size(size)
    trained_on = source.metadata.get("dataset_fingerprint")
    if trained_on not in (None, dataset.fingerprint):
        console.say(f"note: {source.label} was trained with the images {trained_on}, these are {dataset.fingerprint}: "
                    "other files, size or split, so that some of those it is judged on may have trained it. Give the "
                    "search's seed, or the training's split_seed, as split_seed.")
    if train_images:  # the part that hwnas.train takes of as many
        rows = subset(dataset.train.labels, train_images, split_seed)
        dataset = replace(dataset, train=dataset.train.take(rows))
    return source.fed(dataset)


def _parts(dataset: Dataset, options: CompressOptions, split_seed: int) -> tuple[Split, NDArray[np.float32]]:
    """Validation images that decide, and training images of every class that calibrate."""
    from hwnas.accuracy.splits import subset

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


def check_folder(job: CompressJob) -> None:
    """StudyError when the folder holds the steps of another compression (naming what differs), or files that a search
    or a training wrote there: an int8 file and a summary would take the place of theirs."""
    from hwnas.training_checkpoint import check_identity

    path, folder = job.steps / "identity.json", job.folder
    if not path.is_file():
        theirs = [file.name for file in (folder.architecture, folder.baseline, folder.weights, folder.onnx, folder.int8,
                                         job.summary, job.table) if file.exists()]
        if theirs:
            raise StudyError(f"{folder.path} is no compression's folder: its {theirs[0]} comes from elsewhere and "
                             "could be lost. Choose another out=FOLDER.")
        write_atomic(path, json.dumps(dict(job.identity), indent=1) + "\n")
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {path}: {error}. Choose another out=FOLDER.") from None
    try:
        check_identity(stored if isinstance(stored, dict) else {}, job.identity, path)
    except StudyError as error:
        raise StudyError(str(error).replace("another training", "another compression")) from None
