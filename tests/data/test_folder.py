from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hwnas.data import decoding as image_files
from hwnas.data.dataset import Dataset
from hwnas.data.decoding import decode
from hwnas.data.loading import inspect_dataset, load_dataset
from hwnas.errors import DataError
from hwnas.system.paths import home


def fill(folder: Path, classes: dict[str, int], mode: str = "RGB", size: tuple[int, int] = (20, 16)) -> Path:
    """Class folders with random PNG images."""
    rng = np.random.default_rng(0)
    for name, n in classes.items():
        (folder / name).mkdir(parents=True)
        for index in range(n):
            shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
            Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / name / f"{index:03}.png")
    return folder


def load(root: Path, **changes: Any) -> Dataset:
    return load_dataset({"name": "imagefolder", "root": str(root), **changes}, 16, 0)


def test_one_folder_is_split_into_three(tmp_path: Path) -> None:
    fill(tmp_path, {"cat": 20, "dog": 40})
    dataset = load(tmp_path, validation_fraction=0.1, test_fraction=0.25)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.counts() == {"train": {"cat": 13, "dog": 26}, "validation": {"cat": 2, "dog": 4},
                                "test": {"cat": 5, "dog": 10}}
    everything = np.concatenate([part.images for part in (dataset.train, dataset.validation, dataset.test)])
    assert len({image.tobytes() for image in everything}) == 60


def test_val_becomes_the_test_set_and_validation_comes_from_train(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 10})
    fill(tmp_path / "val", {"a": 3, "b": 3})
    assert load(tmp_path, validation_fraction=0.2).counts() == {
        "train": {"a": 8, "b": 8}, "validation": {"a": 2, "b": 2}, "test": {"a": 3, "b": 3}}


def test_test_folder_is_the_test_set(tmp_path: Path) -> None:
    for part, n in (("train", 5), ("valid", 2), ("test", 4)):
        fill(tmp_path / part, {"a": n, "b": n})
    assert load(tmp_path).counts() == {
        "train": {"a": 5, "b": 5}, "validation": {"a": 2, "b": 2}, "test": {"a": 4, "b": 4}}


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    fill(tmp_path, {"train": 8, "bus": 8})
    assert load(tmp_path).class_names == ("bus", "train")


def test_grey_files_make_one_channel_and_colour_is_not_dropped_in_silence(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 6, "b": 6}, mode="L")
    assert inspect_dataset({"name": "imagefolder", "root": str(tmp_path)}).channels == 1
    assert load(tmp_path).train.images.shape[1] == 1
    assert load(tmp_path, channels=3).train.images.shape[1] == 3


def test_a_colour_image_beyond_those_looked_at_is_named(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 150, "b": 150}, mode="L", size=(8, 8))
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a" / "001.png")
    with pytest.raises(DataError, match=r"001\.png: a colour image \(RGB\) among grey ones"):
        load(tmp_path)
    assert load(tmp_path, channels=1).channels == 1


def test_images_are_scaled_and_their_centre_is_kept(tmp_path: Path) -> None:
    array = np.zeros((20, 60), np.uint8)
    array[:, 16:44] = 255
    Image.fromarray(array).save(tmp_path / "middle.png")
    assert decode(Image.open(tmp_path / "middle.png"), 10, 1).min() == 255
    Image.fromarray(np.full((8, 8), 0x8000, np.uint16)).save(tmp_path / "deep.png")
    assert set(decode(Image.open(tmp_path / "deep.png"), 8, 1).ravel()) == {128}
    assert decode(Image.open(tmp_path / "middle.png"), 10, 3).shape == (3, 10, 10)


def break_file(root: Path) -> Path:
    path = root / "train" / "a" / "004.png"
    path.write_bytes(path.read_bytes()[:60])
    return path


def test_an_unreadable_image_is_named_or_counted(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 10})
    fill(tmp_path / "val", {"a": 3, "b": 3})
    broken = break_file(tmp_path)
    with pytest.raises(DataError, match=rf"{broken}: unreadable image .*dataset\.skip_unreadable=true"):
        load(tmp_path)
    dataset = load(tmp_path, skip_unreadable=True, validation_fraction=0.2)
    assert dataset.skipped == 1
    assert sum(map(len, (dataset.train, dataset.validation, dataset.test))) == 25
    for part in (dataset.train, dataset.validation, dataset.test):
        assert len(part.images) == len(part.labels)


def test_skipping_keeps_images_and_labels_together(tmp_path: Path) -> None:
    for value, name in ((10, "dark"), (240, "light")):
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(10):
            Image.new("L", (8, 8), value).save(tmp_path / "train" / name / f"{index:03}.png")
    (tmp_path / "train" / "dark" / "002.png").write_bytes(b"")
    dataset = load(tmp_path, skip_unreadable=True)
    for part in (dataset.train, dataset.validation, dataset.test):
        np.testing.assert_array_equal(part.images[:, 0, 0, 0], np.where(part.labels == 0, 10, 240))


def test_large_sets_are_mapped_from_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 10})
    fill(tmp_path / "val", {"a": 3, "b": 3})
    break_file(tmp_path)
    wanted = load(tmp_path, skip_unreadable=True)
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(image_files, "IN_MEMORY", 0)
    first = load(tmp_path, skip_unreadable=True)
    monkeypatch.setattr(image_files, "decode", None)
    second = load(tmp_path, skip_unreadable=True)
    for got in (first, second):
        assert isinstance(got.train.images, np.memmap)
        assert got.skipped == 1
        for part in ("train", "validation", "test"):
            np.testing.assert_array_equal(getattr(got, part).images, getattr(wanted, part).images)
    assert sorted(path.suffix for path in (home() / "cache").iterdir()) == [".json", ".npy"]


def test_an_ended_decoding_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "data" / "train", {"a": 10, "b": 10})
    break_file(tmp_path / "data")
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(image_files, "IN_MEMORY", 0)
    with pytest.raises(DataError, match="unreadable image"):
        load(tmp_path / "data")
    assert list((home() / "cache").iterdir()) == []


@pytest.mark.parametrize(("classes", "said"), [
    ({"a": 10}, "one class only"),
    ({"a": 10, "b": 0}, r"b: no images \("),
    ({"a": 10, "b": 3}, "a class needs at least 4 images; 'b' has 3"),
    ({}, "empty, no class folders"),
])
def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path, classes: dict[str, int], said: str) -> None:
    fill(tmp_path, classes)
    with pytest.raises(DataError, match=said):
        load(tmp_path)


def test_places_that_are_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(DataError, match=r"dataset\.root is not set"):
        inspect_dataset({"name": "imagefolder"})
    fill(tmp_path / "val", {"a": 3, "b": 3})
    with pytest.raises(DataError, match="val/ without train/"):
        load(tmp_path)


def test_classes_that_differ_are_named(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 10})
    fill(tmp_path / "val", {"a": 3, "c": 3})
    with pytest.raises(DataError, match=r"val: classes differ from train/: 'c' only here, 'b' only there"):
        load(tmp_path)


def test_hidden_and_foreign_files_do_not_count(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 8, "b": 8})
    fingerprint = load(tmp_path).fingerprint
    (tmp_path / ".cache").mkdir()
    (tmp_path / "a" / ".hidden.png").write_bytes(b"no image")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    assert load(tmp_path).fingerprint == fingerprint


def test_the_fingerprint_follows_the_files_not_the_place(tmp_path: Path) -> None:
    fill(tmp_path / "one", {"a": 8, "b": 8})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert load(tmp_path / "one").fingerprint == load(tmp_path / "two").fingerprint
    (tmp_path / "two" / "a" / "003.png").rename(tmp_path / "two" / "a" / "300.png")
    assert load(tmp_path / "one").fingerprint != load(tmp_path / "two").fingerprint


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    root = fill(tmp_path / "images", {"a": 12, "b": 12})
    file = min((root / "a").iterdir())
    file.rename(file.with_name(f"\udcff (1), x=y{file.suffix}"))
    assert len(load(root).train) > 0
    (root / "b").rename(root / "\udcff")
    with pytest.raises(DataError, match=r"class '\\udcff' is not UTF-8"):
        load(root)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 60, "b": 70}, size=(8, 8))
    seen: list[tuple[int, int]] = []
    load_dataset({"name": "imagefolder", "root": str(tmp_path)}, 8, 0, lambda done, total: seen.append((done, total)))
    assert seen == [(100, 130), (130, 130)]


@pytest.mark.soak
def test_real_satellite_tiles(data_root: Path) -> None:
    info = inspect_dataset({"name": "imagefolder", "root": str(data_root / "eurosat")})
    assert (info.channels, info.classes, info.native_size) == (3, 10, 64)
