"""What `model=` of `python -m hwnas.compress` names: a model folder, or a bare ONNX file that is checked in a child."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.accuracy.dataset import Dataset, DatasetInfo
from hwnas.errors import CandidateError, ConfigError, DataError
from hwnas.foreign_model import ModelError, check_path, input_of, load_checked, sized
from hwnas.run_folder import ModelFolder
from hwnas.target import Target
from hwnas.training_options import content_of

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True, slots=True)
class Source:
    """An fp32 network: the file that is worked on, what it takes and gives, and who wrote it (`metadata_props`).

    `tunable`: a model folder with its weights, which may be fine-tuned; a bare file is taken as it is.
    """

    path: Path
    label: str
    content: str
    shape: tuple[int, int, int]
    classes: int
    tunable: bool
    metadata: Mapping[str, str]

    def fed(self, dataset: Dataset) -> Dataset:
        """The data set normalised as the network was trained, where its file says how."""
        try:
            mean, std = (tuple(map(float, json.loads(self.metadata[key]))) for key in ("mean", "std"))
        except (KeyError, ValueError, TypeError):
            return dataset
        return replace(dataset, mean=mean, std=std) if len(mean) == len(std) == dataset.channels else dataset


def name_of(model: str) -> str:
    """How a result's folder is called after the network: its folder's name, or its file's."""
    path = Path(os.path.abspath(model))
    return path.name.removesuffix(".onnx") or "model"


def source_of(model: str, target: Target, info: DatasetInfo, image_size: int | None, copies: Path, memory_mb: int,
              timeout_s: float) -> Source:
    """The network behind `model`; a bare file's checked copy, axes fixed and nodes named, goes to the folder `copies`.

    UserError when it is torn, incomplete, or made for other channels or classes than the data set has.
    """
    if Path(model).is_dir():
        found = _folder(ModelFolder(Path(model)), memory_mb)
    else:
        found = _bare(model, target, info, image_size, copies, memory_mb, timeout_s)
    for what, its, wanted in (("channels", info.channels, found.shape[0]), ("classes", info.classes, found.classes)):
        if its != wanted:
            raise DataError(f"{found.label} was made for {wanted} {what}, the data set {info.name} has {its}. Give the "
                            "data set that it was trained on.")
    if found.shape[1] != found.shape[2]:
        raise ModelError(f"{found.label} takes images of {found.shape[1]}×{found.shape[2]} pixels; only square ones "
                         "can be scored here.")
    return found


def _folder(folder: ModelFolder, memory_mb: int) -> Source:
    """A folder that a search or hwnas.train wrote."""
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
    """Its copy is named by its content: another file's, refused later, must not take the place of one in use."""
    from hwnas.runtimes.child import run_child

    check_path(model, memory_mb)
    content, size = content_of(Path(model)), f"-{image_size}" if image_size else ""
    copy = copies / f"source-{content}{size}.onnx"
    copy.parent.mkdir(parents=True, exist_ok=True)
    job = {"path": os.path.abspath(model), "label": model, "channels": info.channels, "image_size": image_size,
           "copy": os.path.abspath(copy)}
    try:
        found = run_child("hwnas.compress_child", job, target, timeout_s=timeout_s, memory_mb=memory_mb)
    except CandidateError as error:
        raise ModelError(str(error)) from None
    channels, height, width = found["shape"]
    return Source(copy, model, content, (channels, height, width), int(found["classes"]), False,
                  found["metadata"])


def metadata_of(proto: ModelProto) -> dict[str, str]:
    """`metadata_props` by key."""
    return {entry.key: entry.value for entry in proto.metadata_props}
