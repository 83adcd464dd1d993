"""One data set as a folder, arrays, parquet, a saved data set and a tar file: the same splits and pixels."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import CLASSES, LABELS, folder, npy, npz, parquet, pixels, saved, table, tar
from PIL import Image

from hwnas.cli.command import as_typed, compose
from hwnas.data.dataset import Dataset
from hwnas.data.loading import inspect_dataset, load_dataset
from hwnas.errors import ConfigError, DataError, UnknownName

SIZE = 12


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The `dataset` section of each form."""
    pytest.importorskip("datasets")
    top = tmp_path_factory.mktemp("forms")
    return {make.__name__: make(top / make.__name__) for make in (folder, npz, npy, parquet, saved, tar)}


def load(section: dict[str, Any]) -> Dataset:
    return load_dataset(section, SIZE, 3)


@pytest.mark.parametrize("form", ["npz", "npy", "parquet", "saved", "tar"])
def test_each_form_gives_the_splits_and_pixels_of_the_folder(forms: dict[str, dict[str, Any]], form: str) -> None:
    expected, dataset = load(forms["folder"]), load(forms[form])
    assert dataset.class_names == expected.class_names == CLASSES
    for part in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(dataset, part).labels, getattr(expected, part).labels)
        np.testing.assert_array_equal(getattr(dataset, part).images, getattr(expected, part).images)
    assert inspect_dataset(forms[form]).channels == 3


def test_a_path_after_dataset_is_read_as_what_it_holds(forms: dict[str, dict[str, Any]]) -> None:
    for section in forms.values():
        config = compose("search", as_typed(["target=null_fp32", f"dataset={section['root']}"]))
        assert (config.dataset.name, str(config.dataset.root)) == (section["name"], section["root"])


@pytest.mark.parametrize("form", ["folder", "npz", "parquet"])
def test_one_training_gives_one_top1_in_each_form(forms: dict[str, dict[str, Any]], form: str) -> None:
    from hwnas.accuracy import load_estimator
    from hwnas.space.search_space import SearchSpace

    space = SearchSpace.load("mnasnet_small", channels=3, classes=len(CLASSES), image_size=SIZE)
    values = [load_estimator("proxy", dataset=load(forms[name]), space=space, config={"max_steps": 3, "threads": 1})
              .evaluate(space.reference, 0).value for name in ("folder", form)]
    assert values[0] == values[1]


def test_a_changed_pixel_or_label_changes_the_fingerprint(tmp_path: Path) -> None:
    images, labels = pixels(), LABELS.copy()
    fingerprints = set()
    for pixel, label in ((0, 0), (1, 0), (0, 1)):
        images[0, 0, 0, 0], labels[0] = pixel, label
        np.savez(tmp_path / "x.npz", images=images, labels=labels)
        fingerprints.add(load({"name": "arrays", "root": str(tmp_path / "x.npz")}).fingerprint)
    assert len(fingerprints) == 3


@pytest.mark.parametrize(("written", "name"), [
    ("timm:hfds", "timm:hfds"), ("timm:tar", "timm:tar"), ("'timm:hfds/some/name'", "timm:hfds/some/name"),
    ("arrays", "arrays")])
def test_each_form_is_chosen_by_one_word_on_the_command_line(written: str, name: str) -> None:
    config = compose("search", ["target=null_fp32", f"dataset={written}", "dataset.root=/data/parts"])
    assert config.dataset.name == name
    assert str(config.dataset.root) == "/data/parts"
    with pytest.raises(UnknownName, match="data set"):
        compose("search", ["target=null_fp32", "dataset=tim:hfds"])


def test_parts_held_apart_stay_apart(tmp_path: Path) -> None:
    images = pixels()
    np.savez(tmp_path / "x.npz", train_images=images, train_labels=LABELS, test_images=images[::4],
             test_labels=LABELS[::4])
    assert len(load({"name": "arrays", "root": str(tmp_path / "x.npz")}).test) == len(images[::4])


NOISE = np.random.default_rng(0).integers(0, 256, (4, 8, 8), np.uint8)


@pytest.mark.parametrize(("arrays", "message"), [
    ({"images": NOISE[:, :, :, None].repeat(5, 3), "labels": np.arange(4)}, "which axis holds the channels"),
    ({"images": NOISE}, "without train_labels"),
    ({"images": NOISE, "labels": np.arange(3)}, r"shape \[3\], for 4 images"),
    ({"images": NOISE, "labels": np.array([0, 1, 2, -1])}, "label -1"),
    ({"images": NOISE, "labels": np.arange(4), "class_names": np.array(["a", "b"])}, "label 3"),
    ({"images": NOISE, "labels": np.array([0, 1, -1, 1]), "class_names": np.array(["a", "b", "c"])}, "label -1"),
    ({"images": NOISE, "labels": np.array([0, 1, 3, 1]), "class_names": np.array(["a", "b", "c"])}, "label 3"),
    ({"images": NOISE, "labels": np.arange(4), "x_holdout": NOISE}, "'x_holdout' is not known"),
    ({"pictures": NOISE}, "no images and labels; there is pictures"),
    ({"images": NOISE, "labels": np.array([None] * 4)}, "without objects"),
])
def test_arrays_that_cannot_be_meant_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load({"name": "arrays", "root": str(tmp_path / "x.npz")})


def test_names_of_classes_may_be_called_otherwise(tmp_path: Path) -> None:
    names, labels = np.array(["ant", "bee"]), np.arange(16) % 2
    images = np.random.default_rng(1).integers(0, 256, (16, 8, 8), np.uint8)
    for more, expected in (({"classes": names}, ("ant", "bee")), ({"classes": np.arange(2)}, ("0", "1")),
                           ({"class_names": names, "classes": names[::-1]}, ("ant", "bee")),
                           ({"image_ids": np.arange(16), "label_names": names}, ("ant", "bee"))):
        np.savez(tmp_path / "x.npz", images=images, labels=labels, **more)
        assert load({"name": "arrays", "root": str(tmp_path / "x.npz")}).class_names == expected


def test_a_tar_file_is_read_as_its_folder_would_be(tmp_path: Path) -> None:
    folder(tmp_path / "x")
    for number, path in enumerate(sorted((tmp_path / "x").rglob("*.png"))):
        Image.open(path).save(path.with_suffix(("", ".webp", ".tif")[number % 3] or ".png"))
        if number % 3:
            path.unlink()
    (tmp_path / "x" / "__MACOSX").mkdir()
    for name in ("bolt/._00.png", "__MACOSX/._00.png"):
        (tmp_path / "x" / name).write_bytes(b"of a system")
    for place in (".", "above", "train"):
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            tar.add(tmp_path / "x", arcname=place)
        data = load({"name": "timm:tar", "root": str(tmp_path / "x.tar")})
        assert data.class_names == CLASSES
        assert sum(map(len, (data.train, data.validation, data.test))) == len(LABELS)
    whole = (tmp_path / "x.tar").read_bytes()
    for inside, place, said in (("x", "Test", "Test/ and train/ would be mixed"),
                                ("x/nut", "old/bolt", "old/bolt/ and train/bolt/ would be one class"),
                                ("x/nut", "train/nut/old", "train/nut/ and train/nut/old/ in it both hold images")):
        (tmp_path / "x.tar").write_bytes(whole)
        with tarfile.open(tmp_path / "x.tar", "a") as tar:
            tar.add(tmp_path / inside, arcname=place)
        with pytest.raises(DataError, match=said):
            load({"name": "timm:tar", "root": str(tmp_path / "x.tar")})


@pytest.mark.parametrize(("content", "message"), [(b"", "cannot be read"), (b"PK\x03\x04 torn", "cannot be read")])
def test_a_torn_file_is_told_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load({"name": "arrays", "root": str(tmp_path / "x.npz")})


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize("key", ["input_key", "target_key"])
def test_a_column_that_is_not_there_is_told(forms: dict[str, dict[str, Any]], form: str, key: str) -> None:
    with pytest.raises(DataError, match=rf"no column 'nowhere' among image, label.*{key}="):
        load({**forms[form], "options": {key: "nowhere"}})


def test_a_column_of_numbers_is_no_images(forms: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load({**forms["saved"], "options": {"input_key": "label"}})


def test_columns_beside_images_and_labels_are_not_decoded(forms: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    import datasets

    rows = table()
    rows.add_column("mask", [b"torn"] * len(rows)).cast_column("mask", datasets.Image()).save_to_disk(str(tmp_path))
    data = load({"name": "timm:hfds", "root": str(tmp_path)})
    np.testing.assert_array_equal(data.train.images, load(forms["saved"]).train.images)


def test_copies_stay_in_one_part_in_each_form(tmp_path: Path) -> None:
    rows = table()
    twice = rows.from_dict({name: [*rows[name]] * 2 for name in rows.column_names}, features=rows.features)
    twice.save_to_disk(str(tmp_path / "saved"))
    data = load({"name": "timm:hfds", "root": str(tmp_path / "saved")})
    parts = [{image.tobytes() for image in part.images} for part in (data.train, data.validation, data.test)]
    assert sum(map(len, parts)) == len({*parts[0], *parts[1], *parts[2]})


def test_a_filtered_data_set_has_the_classes_that_are_left(tmp_path: Path) -> None:
    rows = table().filter(lambda row: row["label"] != 1)
    rows.save_to_disk(str(tmp_path / "saved"))
    data = load({"name": "timm:hfds", "root": str(tmp_path / "saved")})
    assert data.class_names == (CLASSES[0], *CLASSES[2:])
    assert {*data.train.labels.tolist()} == {*range(len(CLASSES) - 1)}


def test_a_part_without_labels_is_left_out_and_one_of_another_name_refused(tmp_path: Path) -> None:
    import datasets

    rows = table()
    hidden = rows.map(lambda row: {"label": -1})
    datasets.DatasetDict({"Train": rows, "test": hidden}).save_to_disk(str(tmp_path / "hidden"))
    data = load({"name": "timm:hfds", "root": str(tmp_path / "hidden")})
    assert "the test part has no labels" in " ".join(data.remarks)
    assert len(data.train) + len(data.validation) + len(data.test) == len(rows)
    datasets.DatasetDict({"train": rows, "extra": rows}).save_to_disk(str(tmp_path / "extra"))
    with pytest.raises(DataError, match="'extra' is none of"):
        load({"name": "timm:hfds", "root": str(tmp_path / "extra")})


def test_parts_may_count_their_classes_in_another_order(tmp_path: Path) -> None:
    import datasets

    rows = table()
    names = rows.features["label"].names
    turned = rows.map(lambda row: {"label": len(names) - 1 - row["label"]}).cast_column(
        "label", datasets.ClassLabel(names=names[::-1]))
    for name, test in (("same", rows), ("turned", turned)):
        parts = datasets.DatasetDict({"train": rows, "test": test})
        parts.with_format("numpy" if name == "turned" else None).save_to_disk(str(tmp_path / name))
    same, other = (load({"name": "timm:hfds", "root": str(tmp_path / name)}) for name in ("same", "turned"))
    assert other.class_names == same.class_names
    assert np.array_equal(other.test.labels, same.test.labels)


def test_a_row_without_an_image_is_an_unreadable_one(tmp_path: Path) -> None:
    rows = table()
    rows.from_dict({"image": [*rows["image"][:-1], None], "label": LABELS}, features=rows.features).save_to_disk(
        str(tmp_path / "saved"))
    section = {"name": "timm:hfds", "root": str(tmp_path / "saved")}
    with pytest.raises(DataError, match="no image in this row"):
        load(section)
    whole = load({**section, "skip_unreadable": True})
    assert sum(map(len, (whole.train, whole.validation, whole.test))) == len(LABELS) - 1


@pytest.mark.parametrize(("section", "error", "message"), [
    ({"name": "timm:hfds"}, DataError, "dataset.root is not set"),
    ({"name": "timm:hfds/cifar10"}, ConfigError, "write timm:hfds"),
    ({"name": "timm:wds", "root": "."}, ConfigError, "timm:tar"), ({"name": "timm:tar"}, DataError, "train.tar"),
    ({"name": "timm:hfds", "root": "nowhere"}, DataError, "no such folder"),
    ({"name": "timm:tar", "root": "."}, DataError, "no train.tar"),
    ({"name": "timm:hfds", "options": {"colour": 1}}, ConfigError, "input_key, target_key"),
    ({"name": "arrays"}, DataError, "dataset.root is not set"),
    ({"name": "arrays", "root": "x"}, DataError, "no such file")])
def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any],
                                   error: type[Exception], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        load(section)
