"""What a GPU must show of trainings: the CPU's losses, its checkpoints, bf16, and every estimator. `make test-gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_fixtures import stripes

from hwnas.accuracy.proxy import Proxy
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.networks.network import build
from hwnas.space.architecture import Architecture
from hwnas.training import place
from hwnas.training.batches import Batches
from hwnas.training.loop import Training, lay_out, seeded, train
from hwnas.training.recipe import FULL_TRAINING, PROXY, Recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU")]
ARCHITECTURE = Architecture((("ds_r1_k3_s2_c8",), ("ir_r2_k3_s2_e3_c16_se0.25",)), 8, 1, 32, "relu", 16, 1, 4)
RECIPE = replace(FULL_TRAINING, epochs=4, min_steps=0, max_steps=0, batch_size=32, threads=1)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("stripes", stripes(512, 0), stripes(160, 1), stripes(160, 2), ("a", "b", "c", "d"), 1, 16,
                   (0.3,), (0.2,), "stripes", flip=False)


def losses(dataset: Dataset, recipe: Recipe) -> list[float]:
    with seeded(0, 1):
        training = Training(lay_out(build(ARCHITECTURE), recipe), Batches(dataset.train, dataset, recipe, 0), recipe)
        training.run()
    return [row["train_loss"] for row in training.rows]


def test_losses_are_those_of_the_cpu(dataset: Dataset, shown: Callable[[str], None]) -> None:
    here, there = losses(dataset, RECIPE), losses(dataset, replace(RECIPE, device="cuda"))
    shown(f"losses of four epochs: CPU {np.round(here, 4).tolist()}, GPU {np.round(there, 4).tolist()}")
    assert there[0] == pytest.approx(here[0], rel=1e-3)  # rounding alone; it grows with the steps
    assert there == pytest.approx(here, rel=0.05)


def test_bf16_comes_near_them(dataset: Dataset, shown: Callable[[str], None]) -> None:
    whole, half = (losses(dataset, replace(RECIPE, device="cuda", precision=kind)) for kind in ("fp32", "bf16"))
    shown(f"losses of four epochs on the GPU: fp32 {np.round(whole, 4).tolist()}, bf16 {np.round(half, 4).tolist()}")
    assert half != whole
    assert half == pytest.approx(whole, rel=0.1)


def test_a_training_repeats_itself(dataset: Dataset, shown: Callable[[str], None]) -> None:
    recipe = replace(RECIPE, device="cuda")
    first, second = losses(dataset, recipe), losses(dataset, recipe)
    shown(f"the same seed twice on the GPU: {'the same bits' if first == second else 'other bits'}")
    assert first == pytest.approx(second, rel=1e-3)


def test_every_augmentation_works_there(dataset: Dataset) -> None:
    recipe = replace(RECIPE, device="cuda", epochs=1, erase=0.5, mixup=0.2, cutmix=0.5, rotate=10.0, zoom=0.1)
    for each in (recipe, replace(recipe, rand_augment=5)):
        network = train(build(ARCHITECTURE), dataset.train, recipe=each, dataset=dataset, seed=0)
        assert place.device_of(network).type == "cpu"


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_checkpoint_goes_on_on_the_other_device(first: str, then: str, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    from hwnas.cli.command import as_typed, compose
    from hwnas.training.job import make_job
    from hwnas.training.job import train as train_job
    from hwnas.training.loop import Checkpoint

    (tmp_path / "architecture.yaml").write_text(replace(ARCHITECTURE, classes=10, image_size=8).to_yaml())

    def job(device: str) -> Any:
        return make_job(compose("train", as_typed([
            f"architecture={tmp_path / 'architecture.yaml'}", f"out={tmp_path / 'out'}", "dataset=digits", "epochs=4",
            "batch_size=32", f"device={device}", "threads=1"]), target=False), QUIET)

    save = Checkpoint.save

    def ending(self: Checkpoint, path: Path) -> None:
        save(self, path)
        if len(self.rows) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", ending)
        with pytest.raises(KeyboardInterrupt):
            train_job(job(first), QUIET)
    done = train_job(job(then), QUIET)
    assert [row["epoch"] for row in done.rows] == [1, 2, 3, 4]
    assert done.rows[-1]["train_loss"] < done.rows[0]["train_loss"]


def test_estimators_say_there_what_they_say_here(dataset: Dataset, tmp_path: Path, shown: Callable[[str], None],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    recipe = replace(PROXY, threads=1)
    values = [Proxy(dataset, replace(recipe, device=device)).evaluate(ARCHITECTURE, 0).value
              for device in ("cpu", "cuda")]
    shown(f"proxy: {values[0]:.3f} on the CPU, {values[1]:.3f} on the GPU")
    assert values[0] == pytest.approx(values[1], abs=0.15)


def test_a_gpu_that_is_hidden_is_refused_and_not_replaced() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "hwnas.search", "+target=ort_fp32", "dataset=digits",
                           "training.device=cuda"], env=hidden, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 2, done.stderr
    assert "training.device=cuda: torch" in done.stderr
