"""A classifier: a deployed file, with what its metadata say, which turns pictures into answers."""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.data.dataset import CLASSIFICATION, MOST_PIXELS, DatasetOptions, Preparation, normalise, resize
from hwnas.data.decoding import Decoder, Source
from hwnas.data.pixels import ALL_16_BITS
from hwnas.errors import CandidateError, ConfigError, ModelError, StudyError
from hwnas.runtimes.child import probe_model
from hwnas.runtimes.foreign import read_model
from hwnas.runtimes.runtime import deployed_of, inspected, load_runtime
from hwnas.system.run_folder import Manifest, ModelFolder
from hwnas.target import Target
from hwnas.tasks.task import Answer, load_task

if TYPE_CHECKING:
    from hwnas.runtimes.runtime import Compiled

_CHUNK = 256  # images in memory
_ANSWERS = "predict"  # target for a file of any runtime: only its answers count, and no fallback is an error


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A network's file and its metadata: how images are prepared and normalised, and the names of the classes."""

    path: Path
    preparation: Preparation
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    task: str = CLASSIFICATION

    @classmethod
    def read(cls, path: Path, target: Target, memory_mb: int = 2048) -> ModelFile:
        """Read a file after a child process with limited memory has run it for `target`. ModelError if that fails or if
        hwnas did not export it; TargetError as `Runtime.check`."""
        # 1. Run it in a child process, which may crash in place of this one.
        runtime = load_runtime(target.runtime)
        runtime.check(target)
        try:
            probe_model(path, target, memory_mb=memory_mb, look=target.name == _ANSWERS)
        except CandidateError as error:
            raise ModelError(str(error)) from None
        # 2. Read how to prepare an image. The input must fit the last of the preparation's sizes.
        model = read_model(path, runtime)
        about = model.metadata
        try:
            mean, std, classes = (tuple(json.loads(about[key])) for key in ("mean", "std", "class_names"))
            preparation = Preparation.of_facts(json.loads(about["preparation"]))
            image = (preparation.channels, preparation.sizes[-1], preparation.sizes[-1])
            if model.input.shape != (None, *image) or not len(mean) == len(std) == image[0]:
                raise ValueError(f"its input is not [n, {', '.join(map(str, image))}]")
            return cls(path, preparation, tuple(map(float, mean)), tuple(map(float, std)), tuple(map(str, classes)),
                       str(about.get("task", CLASSIFICATION)))
        except (KeyError, ValueError, TypeError) as error:
            raise ModelError(f"{path} does not say how its images are prepared ({type(error).__name__}: {error}): "
                             "hwnas did not export it. Give its training's command again."
                             ) from None


def deployed_file(model: Path, precision: str = "int8", target: Target | None = None) -> Path:
    """Return the file that the model folder `model` deploys; if `model` is a file, return it.

    It is the int8 file if `precision` asks for it and it was made, in the format of the `target`'s runtime if there is
    one. ConfigError if there is no file, StudyError if it is not the file that was made.
    """
    if not model.is_dir():
        return model
    folder, manifest = ModelFolder(model), Manifest.find(model)
    has_int8 = folder.int8.is_file() or (manifest is not None and folder.int8.name in manifest.files)
    path = folder.int8 if has_int8 and precision == "int8" else folder.onnx
    if target is not None and (own := deployed_of(path, target.runtime)).is_file():
        path = own
    if not path.is_file() and (manifest is None or path.name not in manifest.files):
        raise ConfigError(f"model: {model} has no {path.name}. Give models/ID of a run, or the folder of a finished "
                          "hwnas train.")
    if manifest is not None and (fault := manifest.fault(path)):
        raise StudyError(f"model: {model}: {fault}. Give the command that made it again.")
    return path


def target_of(path: Path) -> Target:
    """Return ONNX Runtime on every core in the precision of a file, whose bytes are searched and not parsed."""
    is_int8 = False
    with (contextlib.suppress(OSError, ValueError),  # the reader of the file says why it cannot be read
          open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content):
        is_int8 = content.find(b"DequantizeLinear") >= 0
    return Target(_ANSWERS, "onnxruntime", "int8" if is_int8 else "fp32", threads=0, batch=64)


@dataclass(frozen=True, slots=True)
class Classifier:
    """A file compiled for a target, which takes pictures."""

    file: ModelFile
    compiled: Compiled

    @classmethod
    def compile(cls, file: ModelFile, target: Target) -> Classifier:
        """Compile the file for `target`; CandidateError if the runtime cannot."""
        runtime = load_runtime(target.runtime)
        compiled = inspected(runtime, file.path, target) if target.name == _ANSWERS else runtime.compile(
            file.path, target)
        return cls(file, compiled)

    def answers(self, sources: Sequence[Source], skip: bool = False, report: Callable[[int], None] | None = None
                ) -> Iterator[list[Answer] | None]:
        """Yield the answers to each image: one class, or all objects in it.

        An unreadable image raises DataError, or yields None with `skip`. `report` gets the number of images that are
        done.
        """
        preparation = self.file.preparation
        options = DatasetOptions("images", channels=preparation.channels, skip_unreadable=skip, max_pixels=MOST_PIXELS,
                                 levels=preparation.levels or ALL_16_BITS, upright=preparation.upright)
        decoder = Decoder({"images": sources}, preparation.channels, options, refuses_dark=preparation.levels is None,
                          whole=preparation.whole)
        first, *later = preparation.sizes  # images are decoded at the first size, and resized through the others
        task, n_classes = load_task(self.file.task), len(self.file.classes)
        for start in range(0, len(sources), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(sources)))
            (images, readable), = decoder([("images", rows)], first, None)
            for size in later:
                images = resize(images, size)
            batch_answers: Iterator[list[Answer]] = iter(())
            if len(images):
                outputs = self.compiled.logits(normalise(images, self.file.mean, self.file.std))
                if outputs.shape[1] != task.n_outputs(n_classes):
                    raise ModelError(f"{self.file.path} has {n_classes} names for answers of shape "
                                     f"{list(outputs.shape[1:])}. Give the command that made it again.")
                batch_answers = iter(task.tell(outputs, self.file.classes))
            for is_readable in readable:
                yield next(batch_answers) if is_readable else None
            if report is not None:
                report(int(rows[-1]) + 1)


@dataclass(frozen=True, slots=True)
class Cascade:
    """Two classifiers. Images of which `fast` is less confident than `threshold` go on to `accurate`."""

    fast: Classifier
    accurate: Classifier
    threshold: float

    def __post_init__(self) -> None:
        """Raise ConfigError unless both know the same classes and their task has confidences. Image sizes may
        differ."""
        files = self.fast.file, self.accurate.file
        if files[0].classes != files[1].classes:
            raise ConfigError(f"{files[0].path} and {files[1].path} know different classes. Give two networks of one "
                              "run.")
        if not load_task(files[0].task).is_sure:
            raise ConfigError(f"{files[0].path}: a pair needs networks that give each image one class. Give one "
                              "network.")

    def answers(self, sources: Sequence[Source], skip: bool = False, report: Callable[[int], None] | None = None
                ) -> Iterator[list[Answer] | None]:
        """Yield the answers as `Classifier.answers`. Each network gets the images as it takes them."""
        for start in range(0, len(sources), _CHUNK):
            chunk = sources[start : start + _CHUNK]
            answers = [*self.fast.answers(chunk, skip)]
            unsure = [at for at, answer in enumerate(answers)
                      if answer is not None and answer[0].confidence < self.threshold]
            for at, answer in zip(unsure, self.accurate.answers([chunk[at] for at in unsure], skip), strict=True):
                answers[at] = answer
            yield from answers
            if report is not None:
                report(start + len(chunk))
