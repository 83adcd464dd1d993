"""A line in training: legs that go on, that are resumed where they were killed, and that keep their state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training_fixtures import same_weights

from hwnas.data.dataset import Dataset, Split
from hwnas.errors import StudyError, TrainingError, UserError
from hwnas.networks.network import build
from hwnas.space.architecture import Architecture
from hwnas.training import line, loop
from hwnas.training.line import Keeping, Leg, Stretch, key_of, train_leg
from hwnas.training.loop import Checkpoint, grade
from hwnas.training.recipe import FINE_TUNING

ARCHITECTURE = Architecture((("ds_r1_k3_s1_c8",), ("ir_r1_k3_s2_e2_c8",)), 8, 2, 0, "relu", 16, 1, 4)
RECIPE = replace(FINE_TUNING, epochs=1, batch_size=16, threads=1)


@pytest.fixture(scope="module")
def data() -> Dataset:
    rng = np.random.default_rng(0)
    labels = np.arange(160) % 4
    images = rng.integers(0, 80, (160, 1, 16, 16)).astype(np.uint8)
    for at, label in enumerate(labels):
        images[at, :, 4 * label:4 * label + 4] += 150
    part = Split(images, labels.astype(np.int64))
    return Dataset("bars", part, part.take(np.arange(40)), part.take(np.arange(40, 80)), tuple("abcd"), 1, 16, (0.4,),
                   (0.3,), "bars")


def begin() -> nn.Module:
    return build(ARCHITECTURE)


def stretch(leg: Leg, done: int = 0, before: str = "", begins: Callable[[], nn.Module] = begin) -> Stretch:
    return Stretch(leg, done, before, key_of(before, leg), begins)


def trained(folder: Path, data: Dataset, *legs: Leg, keep: Keeping | None = None) -> nn.Module:
    """The average after these legs of one line."""
    keep, path, done, key = keep or Keeping(pytest.fail), folder / "0.safetensors", 0, ""
    for leg in legs:
        part = stretch(leg, done, key)
        model, _ = train_leg(part, path, path, data=data, recipe=RECIPE, seed=3, keep=keep)
        done, key = done + leg.steps, part.after
    return model


def test_two_constant_legs_are_one_of_their_length(tmp_path: Path, data: Dataset) -> None:
    whole = trained(tmp_path / "a", data, Leg(14, 1.0, 1.0))
    parts = trained(tmp_path / "b", data, Leg(9, 1.0, 1.0), Leg(5, 1.0, 1.0))
    assert same_weights(whole, parts)


def test_a_line_learns_and_ends_with_a_rate_of_zero(tmp_path: Path, data: Dataset) -> None:
    model = trained(tmp_path, data, Leg(60, 1.0, 1.0, warmup=5), Leg(20, 1.0, 0.0))
    assert grade(model, data.validation, data).score > 0.8
    leg = Leg(20, 0.5, 0.0)
    rates = [leg.rate(step) for step in range(20)]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (0.5, pytest.approx(0, abs=0.01))
    assert [Leg(9, 1.0, 1.0, warmup=4).rate(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0, 20.0])
def test_a_leg_keeps_its_seconds_on_a_machine_that_is_slower_than_planned(
        times: float, tmp_path: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes so many times the planned second, the first one longer still."""
    leg, now, rates = Leg(60, 1.0, 0.0), [0.0], list[float]()
    update = line.LineTraining.update

    def slow(self: line.LineTraining, images: Any, targets: Any, step: int) -> tuple[float, float]:
        now[0] += times * (1.0 if now[0] else 3.0)
        rates.append(leg.rate(step))
        return update(self, images, targets, step)

    monkeypatch.setattr(line.LineTraining, "update", slow)
    monkeypatch.setattr(line.time, "monotonic", lambda: now[0])
    path, planned_s = tmp_path / "0.safetensors", float(leg.steps)
    part = replace(stretch(leg), seconds=planned_s)
    train_leg(part, path, path, data=data, recipe=RECIPE, seed=3, keep=Keeping(pytest.fail))
    assert now[0] <= planned_s + 3 * times
    assert times > 1 or len(rates) >= leg.steps - 3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.05 or times > 10, "the rate still falls to its end"


def test_a_leg_that_left_out_steps_and_was_killed_counts_those_that_it_trained(
        tmp_path: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    leg, now, updates = Leg(60, 1.0, 0.0), [0.0], list[int]()
    update = line.LineTraining.update

    def slow(self: line.LineTraining, images: Any, targets: Any, step: int) -> tuple[float, float]:
        now[0] += 3.0  # a step takes three planned seconds
        updates.append(step)
        if len(updates) == 12:
            raise KeyboardInterrupt
        return update(self, images, targets, step)

    monkeypatch.setattr(loop, "SAVE_S", -1.0)  # every step is kept
    monkeypatch.setattr(line.LineTraining, "update", slow)
    monkeypatch.setattr(line.time, "monotonic", lambda: now[0])
    path, part = tmp_path / "0.safetensors", replace(stretch(leg), seconds=60.0)

    def train() -> int:
        return train_leg(part, path, path, data=data, recipe=RECIPE, seed=3, keep=Keeping(pytest.fail))[1]

    with pytest.raises(KeyboardInterrupt):
        train()
    assert train() == len(updates) - 1 < leg.steps / 2
    assert train() == len(updates) - 1, "killed before the leg was recorded"


def test_a_killed_leg_goes_on_from_its_last_state_to_the_same_weights(tmp_path, data, monkeypatch):
    legs = Leg(10, 1.0, 1.0, warmup=3), Leg(8, 1.0, 0.0)
    whole = trained(tmp_path / "a", data, *legs)
    monkeypatch.setattr(loop, "SAVE_S", -1.0)  # every step is kept
    saves = 0

    class Killed(BaseException):
        pass

    class Mortal(Keeping):
        def save(self, path: Path, state: Checkpoint) -> None:
            nonlocal saves
            super().save(path, state)
            saves += 1
            if saves in (4, 12):
                raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            trained_again(tmp_path / "b", data, legs, Mortal(pytest.fail))
    assert same_weights(whole, trained_again(tmp_path / "b", data, legs, Keeping(pytest.fail)))


def trained_again(folder: Path, data: Dataset, legs: tuple[Leg, ...], keep: Keeping) -> nn.Module:
    """Goes on with the legs of a line that was killed, as a race does: legs that have ended are not trained again."""
    path = folder / "0.safetensors"
    state = keep.load(path)
    done, key, ended = 0, "", False
    for leg in legs:
        part = stretch(leg, done, key)
        later = [stretch(other, done + leg.steps, part.after).after for other in legs[1:]]
        ended = state is not None and state.identity["line"] in later
        if not ended:
            model, _ = train_leg(part, path, path, data=data, recipe=RECIPE, seed=3, keep=keep)
        done, key = done + leg.steps, part.after
    return model


def test_a_line_whose_state_is_gone_is_no_line(tmp_path: Path, data: Dataset) -> None:
    keep, path = Keeping(pytest.fail), tmp_path / "lines" / "0.safetensors"
    first = stretch(Leg(3, 1.0, 1.0))
    train_leg(first, path, path, data=data, recipe=RECIPE, seed=3, keep=keep)
    assert keep.average(path, first.after).keys() == begin().state_dict().keys()
    with pytest.raises(StudyError, match="does not hold the weights of this line any more"):
        keep.average(path, "another")
    path.unlink()
    with pytest.raises(StudyError, match="does not hold the weights of this line any more"):
        train_leg(stretch(Leg(3, 1.0, 1.0), 3, first.after), path, path, data=data, recipe=RECIPE, seed=3, keep=keep)


def test_a_full_disk_ends_no_line(tmp_path: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(tmp_path / "a", data, Leg(6, 1.0, 1.0), Leg(4, 1.0, 0.0))

    def full(self: Checkpoint, path: Path) -> None:
        raise UserError("no space left on device")

    monkeypatch.setattr(Checkpoint, "save", full)
    said: list[str] = []
    again = trained(tmp_path / "b", data, Leg(6, 1.0, 1.0), Leg(4, 1.0, 0.0), keep=Keeping(said.append))
    assert same_weights(whole, again)
    assert len(said) == 1
    assert "The race goes on" in said[0]


def test_a_loss_that_is_not_finite_ends_the_line(tmp_path: Path, data: Dataset) -> None:
    def broken() -> nn.Module:
        model = begin()
        torch.nn.init.constant_(next(model.parameters()), float("nan"))
        return model

    path, part = tmp_path / "0.safetensors", stretch(Leg(3, 1.0, 1.0), begins=broken)
    with pytest.raises(TrainingError, match="training: loss is nan after 0 steps"):
        train_leg(part, path, path, data=data, recipe=RECIPE, seed=3, keep=Keeping(pytest.fail))


def test_fewer_images_than_a_batch_can_be_trained_on(tmp_path: Path, data: Dataset) -> None:
    few = replace(data, train=data.train.take(np.arange(3)))
    trained(tmp_path, few, Leg(5, 1.0, 1.0))
