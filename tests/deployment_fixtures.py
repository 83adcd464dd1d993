"""A tiny data set and the settings to make networks deployable with, shared by tests of the verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, Split
from hwnas.front.make import BuildSettings
from hwnas.front.rows import FrontRow
from hwnas.front.score import Scores
from hwnas.front.verification import SearchFacts, environment_of, make_rows, results_of, verify_front, write_results
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import FoundNetwork, Shape, TimmNetwork
from hwnas.networks.quantize import needs_narrow_weights
from hwnas.space.architecture import Architecture
from hwnas.study.objective import Objective
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host, Target
from hwnas.training.recipe import FULL_TRAINING, Recipe


def tiny_split(n: int, seed: int) -> Split:
    """Images of 16 px whose left half is bright in class 0, the right half in class 1."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    images = rng.integers(0, 60, (n, 1, 16, 16))
    for image, label in zip(images, labels, strict=True):
        image[:, :, 8 * label : 8 * label + 8] += 150
    return Split(images.astype(np.uint8), labels.astype(np.int64))


def pictures(root: Path, **n: int) -> Path:
    """JPEG files of three classes, of all shapes: noise of another colour on the left, in the middle, on the right;
    `n` of each class in `train` and `test`."""
    rng = np.random.default_rng(0)
    for part in n:
        for label in range(3):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(n[part]):
                height, width = rng.integers(40, 200, 2)
                pixels = rng.integers(0, 90, (height, width, 3))
                pixels[:, label * width // 3 : (label + 1) * width // 3, label] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)
    return root


def sides_data() -> Dataset:
    """Two classes, 96 / 16 / 40 images."""
    return Dataset("sides", tiny_split(96, 0), tiny_split(16, 1), tiny_split(40, 2), ("left", "right"), 1, 16, (0.4,),
                   (0.3,), "sides-1")


def tiny_architecture(width: int = 8, size: int = 16) -> Architecture:
    return Architecture(((f"ds_r1_k3_s2_c{width}",),), 8, 2, 0, "relu", size, 1, 2)


def tiny_network(width: int = 8) -> FoundNetwork:
    return FoundNetwork(tiny_architecture(width))


def tiny_baseline(name: str = "mobilenetv3_small_050", stem_stride: int = 0) -> TimmNetwork:
    return TimmNetwork(Baseline(name, stem_stride), Shape(1, 16, 2))


def tiny_finalist(width: int = 8, **changes: Any) -> FrontRow:
    values = {"top1_proxy": 0.8, "latency_ms_predicted": 0.1, "latency_ms_predicted_low": 0.05,
              "latency_ms_predicted_high": 0.4, "reward": 0.7, "target": "ort_int8"}
    return FrontRow.of(tiny_network(width), **{**values, **changes})


def finish(run: RunFolder, rows: Sequence[FrontRow], making: BuildSettings, facts: SearchFacts,
           objective: Objective | None = None) -> list[FrontRow]:
    """From finalists and baselines to the written run, verified where `facts.host` is this one."""
    console, objective = Console(quiet=True), objective or Objective(None)
    made = make_rows([replace(row, host=facts.host) for row in rows], run, making, 1, console)
    environment = environment_of(making, facts)
    if facts.host == Host.detect().name:
        results = verify_front(made, run, making, facts.timing, objective, environment, console)
    else:
        results = results_of(Scores(made), run, making, objective, environment)
    write_results(run, results, making)
    return results.rows


def tiny_recipe(**changes: Any) -> Recipe:
    values = {"epochs": 3, "min_steps": 24, "shift": 0.0, "zoom": 0.0, "rotate": 0.0, "threads": 1, **changes}
    return Recipe.from_config(values, FULL_TRAINING)


def tiny_making(target: Target | None = None, **changes: Any) -> BuildSettings:
    target, host = target or Target("ort_int8", "onnxruntime", "int8"), Host.detect()
    return BuildSettings(**{"dataset": sides_data(), "recipe": tiny_recipe(), "seed": 0, "target": target,
                            "n_calibration": 64, "threads": 1,
                            "narrow": [target.name] * needs_narrow_weights(target, host.vendor, host.flags), **changes})


def measured(ms: float, quiet_ms: float = 0.1, reference_ms: float = 0.1) -> Measurement:
    """Eight turns of about `ms`; INVALID when the reference stands far above its quiet time."""
    turns = tuple(Turn((ms * (1 + i / 1000),) * 10, (1e3 * reference_ms,)) for i in range(8))
    return Measurement(turns, quiet_ms, Protocol())


def spoil(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
