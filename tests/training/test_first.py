"""A trial's weights: what is kept of them, that finalists go on from them, and that nobody is trained longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from deployment_fixtures import tiny_baseline, tiny_dataset, tiny_making, tiny_network, tiny_recipe
from safetensors.numpy import load_file, save_file
from torch import nn

from hwnas.accuracy.proxy import Proxy, ProxyOptions
from hwnas.front import make as deployable
from hwnas.front.make import fingerprint, make
from hwnas.networks.network import Network
from hwnas.networks.weights import PretrainedOptions, find_pretrained
from hwnas.search.minutes import Pace
from hwnas.system.run_folder import ModelFolder
from hwnas.training.first import FirstTraining
from hwnas.training.loop import seeded

RECIPE = tiny_recipe(epochs=1, min_steps=6, max_steps=6)


def first_in(folder: Path, **changes) -> FirstTraining:
    return FirstTraining(**{"recipe": RECIPE, "train_images": 64, "image_size": 0, "seed": 3, "folder": folder,
                            **changes})


def same(left: nn.Module, right: nn.Module) -> bool:
    mine, its = left.state_dict(), right.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.fixture
def begun(tmp_path: Path) -> Network:
    """A network with pretrained weights."""
    plain = tiny_baseline("test_efficientnet")
    with seeded(5):
        save_file({name: tensor.numpy() for name, tensor in plain.build().state_dict().items()},
                  tmp_path / "w.safetensors", {"norm": "mean 0.5 std 0.25"})
    weights, _ = find_pretrained(plain.name, PretrainedOptions(file=tmp_path / "w.safetensors"), 1)
    return replace(plain, baseline=replace(plain.baseline, pretrained=weights))


def test_training_it_now_gives_what_the_trial_ended_with(tmp_path):
    one, data, first = tiny_network(), tiny_dataset(), first_in(tmp_path / "kept")
    Proxy(data, RECIPE, ProxyOptions(train_images=64, validation_images=16), keep=first.keep).evaluate(
        one.architecture, seed=first.seed)
    assert first.is_kept(one.id)
    models = []
    for folder in (first.folder, tmp_path / "none"):
        with seeded(first.seed):
            models.append(replace(first, folder=folder).trained(one.build(), one.id, data, data))
    with seeded(first.seed):
        untrained = one.build()
    assert same(*models)
    assert not same(models[0], untrained)
    assert all(model.training for model in models)


def test_a_stopped_trial_keeps_nothing(tmp_path):
    one, first = tiny_network(), first_in(tmp_path / "kept")
    proxy = Proxy(tiny_dataset(), replace(RECIPE, epochs=3, min_steps=0, max_steps=0),
                  ProxyOptions(validation_images=16, stop_ratio=1.0, min_history=1), keep=first.keep)
    proxy.hopeless = lambda *_: True  # type: ignore[method-assign]
    assert proxy.evaluate(one.architecture).stopped
    assert not first.folder.exists()


def test_images_are_resized_once_as_the_trials_were(tmp_path):
    one, data = tiny_network(), tiny_dataset()
    first = first_in(tmp_path / "kept", image_size=data.image_size)
    Proxy(data, RECIPE, ProxyOptions(train_images=64, validation_images=16, image_size=data.image_size),
          keep=first.keep).evaluate(one.architecture, seed=first.seed)
    models = []
    for folder in (first.folder, tmp_path / "none"):
        with seeded(first.seed):
            smaller = data.at_size(data.image_size // 2)
            models.append(replace(first, folder=folder).trained(one.build(), one.id, smaller, data))
    assert same(*models)


def test_weights_of_other_images_or_other_pretrained_weights_are_not_taken(tmp_path):
    one, first = tiny_network(), first_in(tmp_path, origin="these images")
    first.keep(one.id, one.build())
    assert first.is_kept(one.id)
    assert not replace(first, origin="others").is_kept(one.id)


def test_a_folder_that_takes_no_file_costs_the_weights_not_the_trial(tmp_path):
    (tmp_path / "kept").write_text("a user's file in its place")
    first_in(tmp_path / "kept").keep("one", nn.Linear(1, 1))
    assert (tmp_path / "kept").read_text() == "a user's file in its place"


@pytest.mark.parametrize("spoil", ["torn", "another network's", "another training's", "missing"])
def test_weights_that_are_not_the_trials_are_not_taken(tmp_path, spoil):
    one, data, first = tiny_network(), tiny_dataset(), first_in(tmp_path / "kept")
    strange = nn.Linear(2, 2) if spoil == "another network's" else one.build()
    (replace(first, seed=4) if spoil == "another training's" else first).keep(one.id, strange)
    path = first.path(one.id)
    if spoil == "torn":
        path.write_bytes(path.read_bytes()[:-100])
    elif spoil == "missing":
        path.unlink()
    models = []
    for folder in (first.folder, tmp_path / "none"):
        with seeded(1):
            models.append(replace(first, folder=folder).trained(one.build(), one.id, data, data))
    assert same(*models)


def test_beaten_trials_weights_go_and_those_of_running_ones_stay(tmp_path):
    first, model = first_in(tmp_path), nn.Linear(1, 1)
    for name in ("good", "beaten", "running"):
        first.keep(name, model)
    (tmp_path / "mine.safetensors").write_bytes(b"a user's")
    first.keep_only({"good"}, {"good", "beaten"})
    assert {path.stem for path in tmp_path.iterdir()} == {"good", "running", "mine"}
    first.forget()
    assert [path.stem for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "mine.safetensors").unlink()
    first.forget()
    assert not tmp_path.exists()
    first.forget()


def test_a_full_disk_costs_the_weights_not_the_trial(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    first = first_in(tmp_path)
    monkeypatch.setattr("hwnas.training.first.write_atomic", full)
    first.keep("one", nn.Linear(1, 1))
    assert not first.is_kept("one")


def test_every_change_of_the_training_has_another_fingerprint(tmp_path):
    first = first_in(tmp_path)
    others = [replace(first, **change) for change in (
        {"recipe": replace(RECIPE, lr=1e-4)}, {"train_images": 32}, {"image_size": 8}, {"seed": 4})]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert replace(first, folder=tmp_path / "elsewhere").fingerprint == first.fingerprint


def test_pretrained_networks_are_trained_as_trials_were_before_their_last_training(begun, tmp_path, monkeypatch):
    first = first_in(tmp_path / "kept", seed=0)
    making = tiny_making(first=first)
    last = {}
    monkeypatch.setattr(deployable, "_train", lambda model, *_: last.setdefault(len(last), model))
    for name in ("one", "two"):
        make(begun, ModelFolder(tmp_path / name), making)
    assert same(last[0], last[1])
    with seeded(0):
        assert not same(last[0], begun.start())
    assert fingerprint(begun, making) != fingerprint(begun, replace(making, first=None))
    assert fingerprint(begun, making) != fingerprint(begun, replace(making, first=replace(first, seed=1)))
    plain = tiny_baseline("test_efficientnet")  # begins with random weights: no trial was like it
    assert making.first_of(plain) is None
    assert fingerprint(plain, making) == fingerprint(plain, replace(making, first=None))
    assert np.array_equal(*(load_file(tmp_path / name / "weights.safetensors")["classifier.weight"]
                            for name in ("one", "two")))


def test_minutes_count_the_first_training_where_the_trials_weights_are_not_kept(begun, tmp_path):
    first = first_in(tmp_path / "kept")
    making = tiny_making(first=first)
    steps = first.images(96) / making.recipe.batch_for(96)
    assert steps == 6 * RECIPE.batch_for(64) / making.recipe.batch_for(96)
    known = Pace({begun.id: 2.0}, 1.0)
    assert known.with_networks([begun], making).seconds([begun], 10, 1) == 1 + 2 * (10 + steps)
    first.keep(begun.name, begun.build())
    assert known.with_networks([begun], making).seconds([begun], 10, 1) == 1 + 2 * 10


@pytest.mark.parametrize("kept", [False, True])
def test_progress_counts_both_trainings_as_one(tmp_path, begun, kept):
    first, shares = first_in(tmp_path / "kept", recipe=replace(RECIPE, batch_size=16)), []
    if kept:
        first.keep(begun.name, begun.start())
    making = tiny_making(first=first)
    make(begun, ModelFolder(tmp_path / "made"), making, lambda step, steps: shares.append((step, steps)))
    last = making.recipe_of(begun).steps_for(len(making.dataset.train))
    wanted = last if kept else last + first.steps(len(making.dataset.train))
    assert {steps for _, steps in shares} == {wanted}
    assert [step for step, _ in shares] == sorted(step for step, _ in shares)
    assert shares[-1][0] == wanted
