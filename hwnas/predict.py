"""Classifies the images of a folder with a network: python -m hwnas.predict model=runs/x/models/ID images=DIR

Prints a line of CSV for each image (file, class, confidence), or writes them to out=FILE.csv. The images are prepared
as the network's card says. +target=NAME runs it as that target does; otherwise ONNX Runtime, on every core.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.options import Config, option, read_command
from hwnas.errors import CandidateError, ConfigError, DataError, ModelError, StudyError, Unfinished

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hwnas.cli.progress import Console
    from hwnas.data.dataset import Preparation
    from hwnas.data.folder import Entry
    from hwnas.target import Target

_CHUNK = 256  # images in memory


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """Options of `conf/predict.yaml`."""

    model: str | None
    images: str | None
    out: str | None
    target: dict[str, Any] | None
    memory_mb: int = option(low=1)


@dataclass(frozen=True)
class Model:
    """A network's file, and what its `metadata_props` say: how an image is prepared, normalised and called."""

    path: Path
    preparation: Preparation
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]


def run(config: Config, console: Console) -> None:
    """The command: `model` is a model folder or an ONNX file of hwnas, `images` a folder, `out` the CSV file.

    Unfinished when some images cannot be decoded; they have a line without class.
    """
    from hwnas.cli.progress import show
    from hwnas.runtimes.child import probe_model
    from hwnas.runtimes.runtime import load_runtime
    from hwnas.system.paths import write_atomic
    from hwnas.system.tables import table_csv

    options = read_command(PredictOptions, config)
    if not options.model or not options.images:
        raise ConfigError("which network, and which images? Add model=DIR (models/ID of a run, or of hwnas.train or "
                          "hwnas.compress) and images=DIR.")
    if options.out and os.path.lexists(options.out):
        raise ConfigError(f"{options.out} is there already. Choose another out=FILE.csv.")
    path = _file(Path(options.model), options.target)
    target = _target(options.target, path)
    load_runtime(target.runtime).check(target)
    try:
        probe_model(path, target, memory_mb=options.memory_mb)
    except CandidateError as error:
        raise ModelError(str(error)) from None
    left_out = Counter[str]()
    rows = list(_answers(_read(path), target, _files(Path(options.images), left_out), console))
    if options.out:
        write_atomic(options.out, table_csv(rows))
        console.say(f"{len(rows)} images: {options.out}")
    else:
        show(table_csv(rows).removesuffix("\n"))
    missing = [str(row["file"]) for row in rows if row["class"] is None]
    if missing:
        raise Unfinished(f"{len(missing)} of {len(rows)} images cannot be decoded ({missing[0]}). Remove or mend them.",
                         part=len(missing) < len(rows))


def _file(model: Path, target: dict[str, Any] | None) -> Path:
    """The file that `model` deploys; StudyError when it is not the one that was made."""
    from hwnas.system.run_folder import Manifest, ModelFolder

    if not model.is_dir():
        return model
    folder = ModelFolder(model)
    path = folder.int8 if folder.int8.is_file() and (target or {}).get("precision", "int8") == "int8" else folder.onnx
    manifest = Manifest.find(model)
    if not path.is_file():
        raise ConfigError(f"model: {model} has no {path.name}. Give models/ID of a run, or the folder of a finished "
                          "hwnas.train or hwnas.compress.")
    if manifest is not None and (fault := manifest.fault(path)):
        raise StudyError(f"model: {model}: {fault}. Give the command that made it again.")
    return path


def _target(given: dict[str, Any] | None, path: Path) -> Target:
    from hwnas.target import Target

    if given is not None:
        return Target.from_config(given)
    return Target("predict", "onnxruntime", "int8" if path.name == "model_int8.onnx" else "fp32", threads=0, batch=64)


def _read(path: Path) -> Model:
    """What a file that the child has opened says of itself; ModelError when hwnas did not export it."""
    from hwnas.data.dataset import Preparation
    from hwnas.runtimes.foreign import input_of, load_checked

    proto = load_checked(path)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    try:
        mean, std, classes = (tuple(json.loads(about[key])) for key in ("mean", "std", "class_names"))
        preparation = Preparation.of_facts(json.loads(about["preparation"]))
        image = (preparation.channels, preparation.sizes[-1], preparation.sizes[-1])
        if input_of(proto, str(path)).shape[1:] != image or not len(mean) == len(std) == image[0]:
            raise ValueError(f"its input is not {image}")
        return Model(path, preparation, tuple(map(float, mean)), tuple(map(float, std)), tuple(map(str, classes)))
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path} does not say how its images are prepared ({type(error).__name__}: {error}): hwnas "
                         "did not export it, or an earlier version did. Give its training's command again.") from None


def _files(folder: Path, left_out: Counter[str]) -> list[Entry]:
    """The image files below a folder, by name."""
    from hwnas.data.folder import EXTENSIONS, image_files

    if not folder.is_dir():
        raise DataError(f"images: there is no folder {folder}. Give one.")
    files = sorted(image_files(str(folder), 0, left_out), key=lambda entry: entry.path)
    if not files:
        raise DataError(f"images: {folder} has no images ({', '.join(EXTENSIONS)}).")
    return files


def _answers(model: Model, target: Target, files: Sequence[Entry], console: Console) -> Iterator[dict[str, Any]]:
    """File, class and confidence of each image; no class for one that cannot be decoded."""
    import numpy as np

    from hwnas.data.dataset import DatasetOptions, resize
    from hwnas.data.decoding import Decoder
    from hwnas.runtimes.runtime import load_runtime

    first, *later = model.preparation.sizes
    channels = model.preparation.channels
    decoder = Decoder({"images": files}, channels, DatasetOptions("images", channels=channels, skip_unreadable=True),
                      lambda: "")
    compiled = load_runtime(target.runtime).compile(model.path, target)
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (model.mean, model.std))
    with console.step("classify") as report:
        for start in range(0, len(files), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(files)))
            (images, kept), = decoder([("images", rows)], first, None)
            for size in later:
                images = resize(images, size)
            fed = np.asarray((np.asarray(images, np.float32) / 255 - mean) / std, np.float32)
            shares = iter(_softmax(compiled.logits(fed), model) if len(images) else ())
            for row, there in zip(rows.tolist(), kept, strict=True):
                share = next(shares) if there else None
                yield {"file": files[row].path, "class": None if share is None else model.classes[int(share.argmax())],
                       "confidence": None if share is None else round(float(share.max()), 4)}
            report((rows[-1] + 1) / len(files), f"{rows[-1] + 1} of {len(files)}")


def _softmax(logits: NDArray[np.float32], model: Model) -> NDArray[np.float32]:
    import numpy as np

    if logits.shape[1:] != (len(model.classes),):
        raise ModelError(f"{model.path} has {len(model.classes)} names for answers of shape {list(logits.shape[1:])}. "
                         "Give the command that made it again.")
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.predict`."""
    from hwnas.cli.command import run_command

    return run_command(run, "predict", __doc__ or "", argv, target=False)


if __name__ == "__main__":
    raise SystemExit(command())
