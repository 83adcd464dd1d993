"""The network that the benchmark times: a file as it is, or a timm network that is built here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hwnas.errors import ConfigError, HwnasError, ModelError
from hwnas.networks.baselines import TIMM
from hwnas.runtimes.foreign import check_path
from hwnas.target.target import Target


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An ONNX file to time, with its name in the printed lines."""

    path: Path
    label: str


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The user's options about the network. None: the network itself decides."""

    channels: int | None = None
    image_size: int | None = None
    classes: int | None = None
    quantize: bool = False


def model_file(model: str, target: Target, options: ModelOptions, folder: Path, memory_mb: int, seed: int) -> ModelFile:
    """The file of `model`: a checked path, or a timm network exported to `folder` (and quantised for int8)."""
    if model.startswith(TIMM):
        return ModelFile(_timm_file(model.removeprefix(TIMM), target, options, folder, seed), model)
    if options.classes is not None:
        raise ConfigError("classes goes with timm: networks only; a file has the classes that it has. Leave it out.")
    if options.quantize and target.precision != "int8":
        raise ConfigError(f"quantize=true goes with an int8 target; {target.name} runs {target.precision}.")
    check_path(model, memory_mb)
    return ModelFile(Path(os.path.abspath(model)), model)


def _timm_file(name: str, target: Target, options: ModelOptions, folder: Path, seed: int) -> Path:
    from hwnas.networks.baselines import check_timm

    check_timm(name)
    import timm

    own = timm.get_pretrained_cfg(name)
    size = own.input_size if own and own.input_size else (3, 224, 224)
    channels, image_size = options.channels or size[0], options.image_size or size[-1]
    classes = options.classes or (own.num_classes if own else 0) or 1000
    try:
        return _built(name, target, folder, (channels, image_size, image_size), classes, seed)
    except HwnasError:
        raise
    except Exception as error:  # a network may raise any error for a size that it cannot take
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"{TIMM}{name} cannot be built for {channels}×{image_size}×{image_size} images and {classes} "
                         f"classes: {said}") from None


def _built(name: str, target: Target, folder: Path, shape: tuple[int, int, int], classes: int, seed: int) -> Path:
    import torch

    from hwnas.networks.baselines import Baseline
    from hwnas.networks.export import export_onnx, randomise
    from hwnas.networks.quantize import quantize_static, tuning_of

    torch.manual_seed(seed)
    network = randomise(Baseline(name).build(shape[0], classes, shape[-1]).eval(), seed)
    fp32, int8 = folder / "model.onnx", folder / "model_int8.onnx"
    export_onnx(network, fp32, shape)
    if target.precision != "int8":
        return fp32
    quantize_static(fp32, int8, None, tuned_for=tuning_of(target))
    return int8
