from __future__ import annotations

import gzip
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import counts, fashion

from hwnas.data import dataset
from hwnas.data.arrays import digit_images, read_idx
from hwnas.data.dataset import Dataset, DatasetOptions, Split, resize
from hwnas.data.loading import inspect_dataset, load_dataset
from hwnas.errors import ConfigError, DataError, UnknownName
from hwnas.networks.network import build
from hwnas.space.architecture import Architecture
from hwnas.system.paths import shipped
from hwnas.training.loop import train
from hwnas.training.recipe import PROXY


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset({"name": "digits", "validation_fraction": 0.2, "test_fraction": 0.2}, 32, 0)


def test_digits_are_split_into_three_stratified_sets(digits: Dataset) -> None:
    assert (digits.channels, digits.image_size, len(digits.class_names)) == (1, 32, 10)
    assert len(digits.train) + len(digits.validation) + len(digits.test) == 1797
    assert len(digits.test) >= 350
    of_class = counts(digits)
    assert set(of_class) == {"train", "validation", "test"}
    assert all(34 <= n <= 38 for name in ("validation", "test") for n in of_class[name].values())
    assert digits.train.images.dtype == np.uint8
    assert digits.train.images.shape[1:] == (1, 32, 32)
    assert digits.train.images.max() == 255


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    images, labels = digit_images()
    np.testing.assert_array_equal(images[:, 0], np.rint(load_digits().images * (255 / 16)))
    np.testing.assert_array_equal(labels, load_digits().target)


def test_normalise_gives_zero_mean_and_unit_deviation(digits: Dataset) -> None:
    images = digits.normalise(digits.train.images)
    assert images.dtype == np.float32
    assert abs(float(images.mean())) < 1e-3
    assert abs(float(images.std()) - 1) < 1e-3


def test_another_size_is_another_fingerprint_with_the_same_normalisation(digits: Dataset) -> None:
    small = digits.at_size(24)
    assert small.image_size == 24
    assert small.test.images.shape == (len(digits.test), 1, 24, 24)
    assert (small.mean, small.std) == (digits.mean, digits.std)
    assert small.fingerprint != digits.fingerprint
    assert digits.at_size(32) is digits


@pytest.mark.parametrize("px", [32, 20, 28])
def test_images_that_are_resized_when_they_are_read_are_the_same(px: int) -> None:
    images = np.random.default_rng(0).integers(0, 255, (30, 3, 28, 28), dtype=np.uint8)
    now, later = (Split(images, np.zeros(30, np.int64)).resize(px, each) for each in (False, True))
    assert len(later) == 30
    assert later.images.shape == now.images.shape
    for rows in (slice(3, 9), np.array([7, 1, 1]), 4, np.int64(2)):
        assert np.array_equal(later.images[rows], now.images[rows])
    assert np.array_equal(np.asarray(later.images), now.images)
    assert np.array_equal(later.take(np.array([2, 5])).images, now.images[[2, 5]])
    assert later.images.nbytes == now.images.nbytes


def test_what_would_not_fit_into_memory_is_resized_batch_by_batch_and_trains_alike(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    part = Split(rng.integers(0, 255, (64, 1, 24, 24), dtype=np.uint8), np.arange(64) % 2)
    data = Dataset("noise", part, part, part, ("a", "b"), 1, 24, (0.5,), (0.3,), "noise")
    recipe, made = replace(PROXY, min_steps=6, max_steps=6, batch_size=8), []
    for most in (dataset.MOST_RESIZED, 100):
        monkeypatch.setattr(dataset, "MOST_RESIZED", most)
        fed = data.at_size(16)
        assert isinstance(fed.train.images, np.ndarray) == (most > 100)
        torch.manual_seed(0)
        model = build(Architecture((("ds_r1_k3_s2_c8",),), 8, 1, 0, "relu", 16, 1, 2))
        made.append(train(model, fed.train, recipe=recipe, dataset=fed, seed=0, validation=fed.validation))
    assert all(torch.equal(*pair) for pair in zip(*(model.state_dict().values() for model in made), strict=True))


def test_resize_pads_28_to_32_and_interpolates_otherwise() -> None:
    images = np.full((2, 1, 28, 28), 200, np.uint8)
    padded = resize(images, 32)
    assert padded[:, :, 2:-2, 2:-2].min() == 200
    assert padded[:, :, :2].max() == 0
    assert resize(images, 56).shape == (2, 1, 56, 56)
    assert resize(images, 56).min() == 200
    assert resize(images, 28) is images


def test_fashion_mnist_keeps_its_test_part_and_leaves_the_root_alone(tmp_path: Path) -> None:
    place = tmp_path / "FashionMNIST" / "raw"
    fashion(place, sizes=(200, 50), packed=True)
    before = sorted(os.listdir(place))
    config = {"name": "fashion_mnist", "root": str(tmp_path), "validation_fraction": 0.1}
    info = inspect_dataset(config)
    assert (info.channels, info.classes, info.native_size) == (1, 10, 28)
    dataset = load_dataset(config, 32, 0)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [180, 20, 50]
    np.testing.assert_array_equal(dataset.test.images[:, 0, 2:-2, 2:-2],
                                  read_idx(place / "t10k-images-idx3-ubyte.gz", 3))
    assert sorted(os.listdir(place)) == before
    fashion(tmp_path / "other" / "raw", sizes=(200, 50))
    unpacked = load_dataset({**config, "root": str(tmp_path / "other")}, 32, 0)
    np.testing.assert_array_equal(unpacked.train.images, dataset.train.images)


@pytest.mark.parametrize(("damage", "said"), [
    (lambda path: path.unlink(), "is missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read"),
    (lambda path: path.write_bytes(gzip.compress(b"nothing of the kind")), "not an IDX file"),
    (lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5])), "bytes where"),
])
def test_damaged_fashion_mnist_is_named(tmp_path: Path, damage: Any, said: str) -> None:
    fashion(tmp_path, packed=True)
    damage(tmp_path / "train-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=rf"train-images-idx3-ubyte.*{said}|{said}.*train-images-idx3-ubyte"):
        load_dataset({"name": "fashion_mnist", "root": str(tmp_path)}, 32, 0)


def test_missing_files_name_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.root=FOLDER .* dataset\.download=true"):
        inspect_dataset({"name": "fashion_mnist", "root": str(tmp_path)})
    with pytest.raises(DataError, match=r"dataset\.root is not set"):
        inspect_dataset({"name": "fashion_mnist"})


def test_what_is_fetched_is_read_by_hwnas_alone_and_a_failure_is_one_line(tmp_path, monkeypatch):
    import torchvision

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network\nhere")

    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "__init__", lambda *_, **__: pytest.fail("reads"))
    monkeypatch.setattr(torchvision.datasets.utils, "download_url", refuse)
    with pytest.raises(DataError, match=r"^cannot download fashion_mnist: no network here\. .*dataset\.root=FOLDER"):
        inspect_dataset({"name": "fashion_mnist", "root": str(tmp_path), "download": True})


@pytest.mark.parametrize(("change", "said"), [
    ({"validation_fraction": 0.5, "test_fraction": 0.5}, "must leave at least 0.2"),
    ({"image_size": 4}, r"dataset\.image_size must be null or a whole number from 8 to 1024, got 4"),
    ({"channels": 3}, r"dataset\.channels: digits has 1, got 3"),
    ({"name": "fasion_mnist"}, "Did you mean fashion_mnist"),
    ({"validation_fracton": 0.1}, "Did you mean validation_fraction"),
    ({"name": "digit_scenes", "options": {"sed": 1}}, r"unknown key of dataset\.options 'sed'"),
    ({"name": "digit_scenes", "options": {"seed": -1}}, r"dataset\.options\.seed must be"),
    ({"name": "digit_scenes", "channels": 3}, "digit_scenes has 1, got 3"),
])
def test_options_name_key_rule_and_value(change: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, UnknownName), match=said):
        inspect_dataset({"name": "digits", **change})


@pytest.mark.parametrize("name", ["digit_scenes", "digits", "fashion_mnist", "imagefolder"])
def test_shipped_configs_are_valid(name: str) -> None:
    import yaml

    config = yaml.safe_load((shipped("conf") / "dataset" / f"{name}.yaml").read_text())
    assert DatasetOptions.from_config(config).name == name


def test_subsets_are_stratified() -> None:
    labels = np.asarray([0] * 90 + [1] * 10)
    chosen = dataset.subset(labels, 20, 0)
    assert np.bincount(labels[chosen]).tolist() == [18, 2]
    assert len(dataset.subset(labels, 1000, 0)) == 100


@pytest.mark.soak
def test_real_fashion_mnist(data_root: Path) -> None:
    dataset = load_dataset({"name": "fashion_mnist", "root": str(data_root / "fashion_mnist"),
                            "validation_fraction": 0.1}, 32, 0)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [54_000, 6_000, 10_000]
    assert set(counts(dataset)["test"].values()) == {1000}
    assert dataset.mean[0] == pytest.approx(0.286 * 28 * 28 / 32 / 32, abs=0.003)
