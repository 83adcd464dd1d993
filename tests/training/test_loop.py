"""The training loop: what the seed decides, what is left alone, how images are changed, what recipes say."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from training_fixtures import same_weights, stripes_data

from hwnas.accuracy.proxy import ProxyOptions
from hwnas.data.dataset import Dataset, Split
from hwnas.errors import ConfigError, TrainingError, UnknownName
from hwnas.networks.network import build
from hwnas.space.architecture import Architecture
from hwnas.training.batches import augment
from hwnas.training.loop import predict, seeded, train
from hwnas.training.recipe import FULL_TRAINING, PROXY, Recipe

SHORT = replace(PROXY, epochs=2, min_steps=0, max_steps=0, batch_size=16, threads=1)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return stripes_data(256)


def network(seed: int = 0) -> Any:
    with seeded(seed):
        return build(Architecture((("ds_r1_k3_s2_c8",), ("ir_r1_k3_s2_e3_c16_se0.25",)), 8, 1, 0, "relu", 16, 1, 4))


def test_a_strided_convolution_of_one_pixel_gets_the_gradients_of_any_layout(dataset: Dataset) -> None:
    """With channels last they are wrong on many CPUs, or the process crashes (oneDNN's issue 6035)."""
    split = Split(np.repeat(dataset.train.images, 3, axis=1), dataset.train.labels)
    coloured = replace(dataset, train=split, channels=3, mean=(0.3,) * 3, std=(0.2,) * 3)
    trained = []
    for channels_last in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                                    torch.nn.Flatten(), torch.nn.Linear(8, 4))
        recipe = replace(SHORT, channels_last=channels_last)
        trained.append(train(model, split, recipe=recipe, dataset=coloured, seed=0))
    assert same_weights(*trained)


def test_a_short_training_learns(dataset: Dataset) -> None:
    recipe = replace(SHORT, epochs=4)
    model = train(network(), dataset.train, recipe=recipe, dataset=dataset, seed=0)
    assert not model.training
    assert (predict(model, dataset.test.images, dataset).argmax(1) == dataset.test.labels).mean() > 0.8


@pytest.mark.parametrize("change", [
    {}, {"ema_decay": 0.9, "zoom": 0.1, "rotate": 10.0, "erase": 0.5, "optimizer": "sgd"}])
def test_the_seed_decides_every_bit(dataset: Dataset, change: dict[str, Any]) -> None:
    part, recipe = dataset.train.take(np.arange(96)), replace(SHORT, **change)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed * 17 + len(runs))  # what others drew from torch's own generator must not matter
        runs.append(train(network(), part, recipe=recipe, dataset=dataset, seed=seed))
    assert same_weights(runs[0], runs[1])
    assert not same_weights(runs[0], runs[2])


def test_training_leaves_generators_and_threads_alone(dataset: Dataset) -> None:
    def state() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
                torch.get_num_threads()]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = state()
        train(network(), dataset.train.take(np.arange(32)), recipe=replace(SHORT, epochs=1), dataset=dataset, seed=0)
        assert state() == before
    finally:
        torch.set_num_threads(threads)


def test_validation_images_choose_between_the_last_weights_and_their_average(dataset: Dataset, monkeypatch) -> None:
    recipe, images = replace(SHORT, epochs=1, ema_decay=0.9999), dataset.validation.images

    def kept(answers: Any = None) -> tuple[torch.nn.Module, torch.nn.Module]:
        model, validation = network(), None if answers is None else Split(images, answers)
        return model, train(model, dataset.train, recipe=recipe, dataset=dataset, seed=0, validation=validation)

    last, average = kept()
    assert average is not last
    by_last, by_average = (predict(model, images, dataset).argmax(axis=1) for model in (last, average))
    assert (by_last != by_average).any()
    model, result = kept(by_last)
    assert result is model
    assert not result.training
    model, result = kept(by_average)
    assert torch.equal(*(next(one.parameters()) for one in (result, average)))
    monkeypatch.setattr("hwnas.training.loop.predict", Mock(side_effect=MemoryError))
    with pytest.raises(TrainingError, match="out of memory while training"):
        kept(by_average)


def test_predict_normalises_images(dataset: Dataset) -> None:
    model = network()
    images = dataset.test.images
    logits = predict(model, images, dataset)
    assert logits.shape == (80, 4)
    assert logits.dtype == np.float32
    assert model.training
    with torch.no_grad():
        wanted = model.eval()(torch.from_numpy(dataset.normalise(images)))
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


def batch(n: int = 64, size: int = 12) -> Any:
    return torch.randn(n, 2, size, size, generator=torch.Generator().manual_seed(1))


def test_shifts_move_whole_pixels_and_mirrorings_swap_sides() -> None:
    images, still = batch(), replace(PROXY, shift=0.0)
    assert torch.equal(augment(images, still, False, torch.Generator().manual_seed(0))[0], images)
    mirrored, came_from = augment(images, still, True, torch.Generator().manual_seed(0))
    assert came_from is not None
    swapped = [torch.equal(a, b.flip(-1)) for a, b in zip(mirrored, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(mirrored, images, strict=True)]
    assert all(a != b for a, b in zip(swapped, kept, strict=True))
    assert 16 < sum(swapped) < 48
    assert [float(each[0, 0]) == -1 for each in came_from] == swapped
    moved, came_from = augment(images, replace(PROXY, shift=0.25), False, torch.Generator().manual_seed(0))
    assert came_from is not None
    again = torch.nn.functional.grid_sample(images, torch.nn.functional.affine_grid(
        came_from, list(images.shape), align_corners=False), padding_mode="border", align_corners=False)
    assert torch.allclose(again, moved, atol=1e-4)
    for one, other in zip(moved, images, strict=True):
        assert any(torch.equal(one[:, 3:9, 3:9], other[:, 3 + y:9 + y, 3 + x:9 + x])
                   for y in range(-3, 4) for x in range(-3, 4))


def test_affine_maps_stay_near() -> None:
    zooming = replace(PROXY, shift=0.0, zoom=0.1)
    ramp = torch.linspace(-1, 1, 16).expand(32, 1, 16, 16)
    turned, _ = augment(ramp, replace(zooming, rotate=10.0), False, torch.Generator().manual_seed(0))
    assert 0 < float((turned - ramp).abs().mean()) < 0.2
    assert float((augment(ramp, zooming, True, torch.Generator().manual_seed(0))[0]
                  + ramp).abs().mean(dim=(1, 2, 3)).min()) < 0.1


def test_a_recipe_is_checked() -> None:
    assert Recipe.from_config({"lr": 1, "epochs": 3}, PROXY).lr == 1.0
    with pytest.raises(ConfigError, match=r"proxy\.epochs must be a whole number from 1 to 100000, got 0"):
        Recipe.from_config({"epochs": 0}, PROXY, "proxy")
    with pytest.raises(UnknownName, match="Did you mean adam or radam or adamw"):
        Recipe.from_config({"optimizer": "adamm"}, PROXY)
    with pytest.raises(ConfigError, match=r"proxy\.lr_end must not be above proxy\.lr=0\.005, got 0\.1"):
        Recipe.from_config({"lr_end": 0.1}, PROXY, "proxy")
    with pytest.raises(ConfigError, match="batch_size must be even with mixup or cutmix, got 31"):
        Recipe.from_config({"mixup": 0.1, "batch_size": 31}, PROXY)
    assert Recipe.from_config({"lr": 1e-6}, FULL_TRAINING).lr_end == 1e-6


def test_fingerprints_follow_what_is_asked() -> None:
    assert PROXY.fingerprint == replace(PROXY, name="other", threads=2).fingerprint
    assert PROXY.fingerprint != replace(PROXY, lr=0.5).fingerprint
    full = ProxyOptions().train_images
    assert (PROXY.steps_for(full), full) == (80, 80 * PROXY.batch_size)
    assert PROXY.steps_for(1000) == 80  # small sets are passed over more often


# As they stand in studies and weights: a change of these voids them.
GOLDEN = ("epochs=1;min_steps=80;max_steps=80;batch_size=64;optimizer='adamw';lr=0.005;weight_decay=0.05;"
          "schedule='cosine';warmup=0.1;label_smoothing=0.1;ema_decay=0.0;clip_norm=1.0;shift=0.06;zoom=0.0;rotate=0.0;"
          "erase=0.0;channels_last=True")


def test_the_text_of_a_fingerprint_stays() -> None:
    assert PROXY.fingerprint == hashlib.sha256(GOLDEN.encode()).hexdigest()[:12] == "b5da6f5683a4"
    assert replace(PROXY, mixup=0.2).fingerprint == hashlib.sha256(f"{GOLDEN};mixup=0.2".encode()).hexdigest()[:12]
    assert FULL_TRAINING.fingerprint == "c7e3769b7311"
    assert len({PROXY.fingerprint, *(replace(PROXY, **change).fingerprint for change in (
        {"lr_end": 1e-5}, {"rand_augment": 3}, {"precision": "bf16"}, {"erase": 0.1}))}) == 5


def test_lengths_fit_small_and_large_sets() -> None:
    recipe = replace(PROXY, epochs=4, min_steps=100, max_steps=300, batch_size=64)
    assert [recipe.steps_for(n) for n in (640, 64_000, 3200)] == [100, 300, 200]
    assert [recipe.batch_for(n) for n in (2, 20, 400, 4000)] == [2, 2, 50, 64]
    exact = Recipe.from_config({"epochs": 30}, recipe)
    assert exact.steps_for(64_000) == 30_000


@pytest.mark.parametrize(("images", "epochs"), [(2, 1), (5, 3)])
def test_a_handful_of_images_can_be_trained(dataset: Dataset, images: int, epochs: int) -> None:
    few = dataset.train.take(np.arange(images))
    recipe = replace(SHORT, epochs=epochs)
    model = train(network(), few, recipe=recipe, dataset=dataset, seed=0)
    assert np.isfinite(predict(model, few.images, dataset)).all()
