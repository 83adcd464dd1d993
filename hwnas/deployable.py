"""Makes one network deployable: trained in full, exported, held against torch, quantised. Resumes after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.baselines import Baseline, count_macs, count_params
from hwnas.errors import CandidateError
from hwnas.export import MIN_PARITY_IMAGES, Parity, check_parity, export_onnx
from hwnas.finalists import Finalist
from hwnas.paths import write_atomic
from hwnas.quantize import quantize_static, tuning_of
from hwnas.run_folder import ModelFolder
from hwnas.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from hwnas.accuracy.data import Dataset
    from hwnas.accuracy.recipe import Recipe

RECIPE_KEY = "hwnas_recipe"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Making:
    """What every finalist and baseline of a run shares: data, recipe, seed, target, images to calibrate int8 with."""

    dataset: Dataset
    recipe: Recipe
    seed: int
    target: Target
    n_calibration: int = 512
    threads: int = 0


@dataclass(frozen=True)
class Made:
    """A deployable network: its torch form, parity, and whether its weights were there already."""

    params: int
    macs: int
    parity: Parity
    reused: bool


def make(network: Finalist | Baseline, folder: ModelFolder, making: Making, progress: Progress | None = None) -> Made:
    """Fill `models/<id>/` with everything but the card.

    Weights that are there for the same network, recipe, seed and data are not trained again. CandidateError when
    training, export, the parity gate or quantisation fails; then no exported file of this network is left.
    """
    from hwnas.accuracy.training import seeded

    data = making.dataset.at_size(image_size(network, making.dataset))
    wanted = fingerprint(network, making, data)
    with seeded(making.seed, making.threads):
        model = _build(network, data)
        params, macs = count_params(model), count_macs(model, (data.channels, data.image_size, data.image_size))
        _describe(network, folder)
        reused = stored_fingerprint(folder.weights) == wanted
        if not reused:
            _discard(folder)
            model = _train(model, data, making, progress)
            write_atomic(folder.weights, _weights(model, wanted))
    if reused:
        _load(model, folder.weights)
    parity = _export(model.eval(), network, folder, making, data)
    return Made(params, macs, parity, reused)


def image_size(network: Finalist | Baseline, dataset: Dataset) -> int:
    """Side of the network's input: a finalist's own, a baseline's is the data set's."""
    return network.architecture.image_size if isinstance(network, Finalist) else dataset.image_size


def fingerprint(network: Finalist | Baseline, making: Making, data: Dataset) -> str:
    """Names everything that decides the weights: network, recipe, seed, data."""
    what = json.dumps(network.architecture.to_dict()) if isinstance(network, Finalist) else str(network)
    content = "|".join((what, making.recipe.fingerprint, str(making.seed), data.fingerprint, str(data.image_size)))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def stored_fingerprint(weights: Path) -> str | None:
    """The fingerprint in the header of a `weights.safetensors`; None when the file is not there or not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="np") as file:
            return (file.metadata() or {}).get(RECIPE_KEY)
    except (OSError, SafetensorError):
        return None


def _build(network: Finalist | Baseline, data: Dataset) -> nn.Module:
    classes = len(data.class_names)
    if isinstance(network, Baseline):
        return network.build(data.channels, classes, data.image_size)
    from hwnas.network import build

    return build(network.architecture)


def _describe(network: Finalist | Baseline, folder: ModelFolder) -> None:
    if isinstance(network, Baseline):
        write_atomic(folder.baseline, network.to_yaml())
    else:
        write_atomic(folder.architecture, network.architecture.to_yaml())


def _discard(folder: ModelFolder) -> None:
    """What was made of other weights must not stay beside new ones."""
    for path in (folder.card, folder.int8, folder.onnx, folder.weights):
        path.unlink(missing_ok=True)


def _train(model: nn.Module, data: Dataset, making: Making, progress: Progress | None) -> nn.Module:
    from hwnas.accuracy.training import train

    return train(model, data.train, recipe=making.recipe, dataset=data, seed=making.seed, progress=progress)


def _weights(model: nn.Module, wanted: str) -> bytes:
    import torch
    from safetensors.torch import save

    tensors = {name: tensor.detach().contiguous(memory_format=torch.contiguous_format).clone()
               for name, tensor in model.state_dict().items()}
    return save(tensors, {RECIPE_KEY: wanted})  # one key: their order in the file is random


def _load(model: nn.Module, weights: Path) -> None:
    from safetensors.torch import load_file

    model.load_state_dict(load_file(weights))


def _export(model: nn.Module, network: Finalist | Baseline, folder: ModelFolder, making: Making,
            data: Dataset) -> Parity:
    shape = (data.channels, data.image_size, data.image_size)
    try:
        export_onnx(model, folder.onnx, shape, metadata(network, making, data))
        parity = check_parity(model, folder.onnx, parity_images(data, making.seed))
        if making.target.precision == "int8":
            quantize_static(folder.onnx, folder.int8, calibration_images(data, making.n_calibration, making.seed),
                            tuned_for=tuning_of(making.target), threads=max(1, making.threads))
    except CandidateError:
        folder.onnx.unlink(missing_ok=True)
        folder.int8.unlink(missing_ok=True)
        raise
    return parity


def calibration_images(data: Dataset, n: int, seed: int) -> NDArray[np.float32]:
    """At most `n` training images, drawn by `seed`, normalised; what int8 ranges are measured on."""
    rows = np.random.default_rng(seed).permutation(len(data.train))[:n]
    return data.normalise(np.asarray(data.train.images[np.sort(rows)]))


def parity_images(data: Dataset, seed: int) -> NDArray[np.float32]:
    """256 normalised inputs: training images, filled up with seeded noise where the set is smaller."""
    images = calibration_images(data, MIN_PARITY_IMAGES, seed)
    missing = MIN_PARITY_IMAGES - len(images)
    noise = np.random.default_rng(seed).standard_normal((missing, *images.shape[1:]), dtype=np.float32)
    return np.concatenate([images, noise])


def metadata(network: Finalist | Baseline, making: Making, data: Dataset) -> Mapping[str, str]:
    """`metadata_props` of the ONNX files: who the network is, how it is fed, what its classes are called."""
    from hwnas import __version__

    architecture = network.architecture if isinstance(network, Finalist) else network
    return {
        "hwnas_version": __version__, "hwnas_id": network.id, "architecture": str(architecture),
        "dataset": data.name, "dataset_fingerprint": data.fingerprint, "recipe": fingerprint(network, making, data),
        "input": f"float32 [n, {data.channels}, {data.image_size}, {data.image_size}], (pixels / 255 - mean) / std",
        "mean": json.dumps(list(data.mean)), "std": json.dumps(list(data.std)),
        "class_names": json.dumps(list(data.class_names), ensure_ascii=False),
    }
