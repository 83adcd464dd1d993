"""Pictures with boxes: the same in each format, and what is wrong in one clear line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boxes_fixtures import SIZE, shapes, write_coco, write_voc, write_yolo
from PIL import Image

from hwnas.data.dataset import Dataset
from hwnas.data.loading import inspect_dataset, load_dataset
from hwnas.errors import DataError

PARTS = {"train": 12, "val": 4}


def load(name: str, root: Path, **changes: Any) -> Dataset:
    return load_dataset({"name": name, "root": str(root), **changes}, 32, 0)


def boxes_of(data: Dataset) -> list[set[tuple[int, ...]]]:
    """The boxes of each test image, in pixels of the file."""
    assert data.test.boxes is not None
    names = sorted(range(len(data.class_names)), key=lambda at: data.class_names[at])
    return [{(names.index(int(label)), *np.round(np.array(box) * [*SIZE, *SIZE]).astype(int))
             for label, *box in image if label >= 0} for image in data.test.boxes]


def test_every_format_gives_the_same_boxes(tmp_path: Path) -> None:
    write = {"coco": write_coco, "yolo": write_yolo, "voc": write_voc}
    read = {name: load(name, each(tmp_path / name, PARTS)) for name, each in write.items()}
    wanted = [{(["green", "red"].index(name), *box) for name, *box in boxes} for _, boxes in shapes(4, 1)]
    for data in read.values():
        assert boxes_of(data) == wanted
        assert (data.task, len(data.train), len(data.validation), len(data.test)) == ("detection", 10, 2, 4)
        assert data.train.images.shape[1:] == (3, 32, 32)
        assert any("no object" in remark for remark in data.remarks)
    assert "objects to learn from" in read["coco"].describe()[0]


def test_pictures_are_stretched_and_nothing_is_cut_off(tmp_path: Path) -> None:
    data = load("coco", write_coco(tmp_path, PARTS))
    image, _ = shapes(4, 1)[0]
    whole = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(data.test.images[0].transpose(1, 2, 0), whole)
    assert data.preparation is not None
    assert data.preparation.of_facts(data.preparation.facts()).whole


def turn(path: Path, orientation: int) -> None:
    """Store a picture so that a viewer, who turns it by its EXIF orientation, shows it as it was."""
    exif = Image.Exif()
    exif[274] = orientation
    with Image.open(path) as image:
        image.transpose(INVERSE[orientation]).save(path, exif=exif)


INVERSE = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
           6: Image.Transpose.ROTATE_90}


@pytest.mark.parametrize("orientation", INVERSE)
@pytest.mark.parametrize("write", [write_coco, write_yolo, write_voc])
def test_boxes_and_pixels_are_turned_alike_or_refused(write: Any, orientation: int, tmp_path: Path) -> None:
    name, root = write.__name__.removeprefix("write_"), write(tmp_path, PARTS)
    wanted = load(name, root)
    turn(sorted(root.rglob("*.png"))[0], orientation)
    with pytest.raises(DataError, match=r"dataset\.upright=true"):
        load(name, root)
    upright = load(name, root, upright=True)
    for part in ("train", "validation", "test"):
        assert np.array_equal(getattr(upright, part).images, getattr(wanted, part).images)
        assert np.array_equal(getattr(upright, part).boxes, getattr(wanted, part).boxes)


def test_a_picture_whose_sides_are_swapped_says_how_boxes_of_others_are_meant(tmp_path: Path) -> None:
    def swap_sides(content: dict[str, Any]) -> None:
        content["images"][1].update(width=SIZE[1], height=SIZE[0])
        content["annotations"] = [each for each in content["annotations"] if each["image_id"] != 7]

    root = write_coco(tmp_path, PARTS, swap_sides)
    for part in PARTS:
        turn(root / part / "0.png", 3)
        turn(root / part / "1.png", 6)  # its annotation has the sides of the file
    assert len(load("coco", root).train) == 10
    with pytest.raises(DataError, match=r"dataset\.upright=false"):
        load("coco", root, upright=True)


def test_the_size_of_a_turned_picture_is_not_guessed(tmp_path: Path) -> None:
    root = write_coco(tmp_path, PARTS, lambda content: content["images"][0].update(width=None, height=None))
    turn(root / "train" / "0.png", 6)
    with pytest.raises(DataError, match=r"dataset\.upright=true"):
        load("coco", root)
    assert len(load("coco", root, upright=True).train) == 10


def test_another_box_is_another_data_set(tmp_path: Path) -> None:
    before = load("coco", write_coco(tmp_path, PARTS)).fingerprint
    content = json.loads((tmp_path / "train.json").read_text())
    content["annotations"][0]["bbox"][2] += 1
    (tmp_path / "train.json").write_text(json.dumps(content))
    assert load("coco", tmp_path).fingerprint != before


@pytest.mark.parametrize("layout", ["exported", "official", "merged", "alone"])
def test_other_layouts_of_coco_are_read(tmp_path: Path, layout: str) -> None:
    write_coco(tmp_path, PARTS)
    if layout == "exported":
        for part in PARTS:
            (tmp_path / f"{part}.json").rename(tmp_path / part / "_annotations.coco.json")
    elif layout == "merged":
        (tmp_path / "annotations").mkdir()
        for part, name in (("train", "trainval35k"), ("val", "valminusminival2014")):
            (tmp_path / f"{part}.json").rename(tmp_path / "annotations" / f"instances_{name}.json")
            (tmp_path / part).rename(tmp_path / name)
    elif layout == "official":
        (tmp_path / "annotations").mkdir()
        for part in PARTS:
            (tmp_path / f"{part}.json").rename(tmp_path / "annotations" / f"instances_{part}2017.json")
            (tmp_path / part).rename(tmp_path / f"{part}2017")
    else:
        (tmp_path / "val.json").unlink()
        (tmp_path / "train.json").rename(tmp_path / "annotations.json")
        (tmp_path / "train").rename(tmp_path / "images")
    info = inspect_dataset({"name": "coco", "root": str(tmp_path)})
    assert (info.task, info.classes, info.channels) == ("detection", 2, 3)
    assert len(load("coco", tmp_path).test) == (4 if layout != "alone" else 2)


def first(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda content: change(content["annotations"][0])


FAULTS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (first(lambda each: each.update(bbox=["1", "2", "3", "4"])), "four finite numbers"),
    (first(lambda each: each.update(bbox=[1, 2, float("nan"), 4])), "four finite numbers, got [1, 2, nan"),
    (first(lambda each: each.update(bbox=[9, 9, -5, 4])), "negative size"),
    (first(lambda each: each.update(bbox=[9, 9, 5])), "four finite numbers"),
    (first(lambda each: [each.pop(key) for key in ("bbox", "segmentation")]), "has no bbox"),
    (first(lambda each: each.update(id=1)), "is there twice"),
    (first(lambda each: each.update(image_id=1)), "image_id 1"),
    (lambda content: content["images"][1].update(id=0), "two images have the id 0"),
    (lambda content: content["images"][1].update(file_name="0.png"), "is twice"),
    (lambda content: content["images"][1].update(file_name="../0.png"), "leads out of"),
    (lambda content: content["images"][1].update(file_name="gone.png"), "which is not there"),
    (lambda content: [each.update(file_name=f"gone/{each['id']}", width=0, height=0) for each in content["images"]],
     "and 11 more, which is not there"),
    (lambda content: content["images"][1].update(width=48, height=64), "Give the images that were annotated"),
    (lambda content: content["images"][1].update(width=0), "width and height"),
    (lambda content: content["categories"][0].update(name=""), "a category needs"),
    (lambda content: content.update(images=[]), "image_id 0"),
    (lambda content: content.pop("annotations"), "lists of images, annotations and categories"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_what_is_wrong_is_one_line(tmp_path: Path, fault: Callable[[dict[str, Any]], None], said: str) -> None:
    with pytest.raises(DataError) as raised:
        load("coco", write_coco(tmp_path, {"train": 12}, fault))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_boxes_without_area_or_outside_are_left_out_and_counted(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["annotations"][0]["bbox"] = [5, 5, 0, 5]
        content["annotations"][1]["bbox"] = [500, 5, 5, 5]
        content["annotations"][2]["bbox"] = [SIZE[0] - 10, 5, 30, 5]
        content["annotations"][3]["iscrowd"] = 1

    data = load("coco", write_coco(tmp_path, {"train": 12}, change))
    said, = (remark for remark in data.remarks if "boxes" in remark and "area" in remark)
    assert all(f"1 boxes {what}" in said for what in ("without area", "outside", "that reach beyond", "of a crowd"))
    boxes = np.concatenate([part.targets.reshape(-1, 5) for part in (data.train, data.validation, data.test)])
    assert boxes[boxes[:, 0] >= 0].max() <= 1


@pytest.mark.parametrize("name", ["coco", "voc"])
def test_crowds_and_difficult_objects_are_in_their_images_and_are_not_to_be_detected(tmp_path: Path, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        for each in content["annotations"]:
            each["iscrowd"] = int(each["image_id"] == 0)

    root = write_coco(tmp_path, PARTS, change) if name == "coco" else write_voc(tmp_path, PARTS)
    for path in root.glob("Annotations/*0.xml"):
        path.write_text(path.read_text().replace("<difficult>0", "<difficult>1"))
    assert load(name, root).test.targets[0].max() == -1
    assert load(name, root, task="multilabel").test.targets[0].max() > -1


def test_two_images_are_too_few(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least"):
        load("coco", write_coco(tmp_path, {"train": 2}))


@pytest.mark.parametrize(("line", "said"), [
    ("7 .5 .5 .1 .1", "class 7"), ("0 .5 .5 .1", "four shares"), ("a .5 .5 .1 .1", "four shares"),
    ("0 .5 .5 nan .1", "four finite numbers"), ("0 .5 .5 -.2 .1", "negative size")])
def test_a_wrong_line_of_yolo_is_named(tmp_path: Path, line: str, said: str) -> None:
    write_yolo(tmp_path, PARTS)
    (tmp_path / "labels" / "train" / "3.txt").write_text(line)
    with pytest.raises(DataError, match="line 1") as raised:
        load("yolo", tmp_path)
    assert said in str(raised.value)


@pytest.mark.parametrize(("path", "folders"), [
    ("path: ../datasets/mine\n", ("images/train2017", "images/val2017")), ("", ("../first/images", "../second/images")),
    ("path: all\n", ("one", "two"))])
def test_folders_of_yolo_may_be_called_as_data_yaml_says(tmp_path: Path, path: str, folders: tuple[str, str]) -> None:
    write_yolo(tmp_path / "a", PARTS)
    write_yolo(tmp_path / "b", {})
    said = (tmp_path / "b" / "data.yaml").read_text()
    for part, folder in zip(PARTS, folders, strict=True):
        place = folder.removeprefix("../")
        images = tmp_path / "b" / ("all" if path == "path: all\n" else "") / place
        shutil.copytree(tmp_path / "a" / "images" / part, images)
        shutil.copytree(tmp_path / "a" / "labels" / part, Path(str(images).replace("/images", "/labels")),
                        dirs_exist_ok=True)
        said += f"{part}: {folder}\n"
    (tmp_path / "b" / "data.yaml").write_text(path + said)
    mine, other = (load("yolo", tmp_path / name) for name in ("a", "b"))
    assert np.array_equal(mine.test.images, other.test.images)
    assert np.array_equal(mine.test.targets, other.test.targets)


@pytest.mark.parametrize(("entries", "n_test", "n_left"), [
    ("train: images/train\nval: images/test\n", 4, 12), ("train: images/train\nval: images/train\n", 2, 10),
    ("train: images/train\nval: images/test\ntest: images/test\n", 4, 12),
    ("path: /elsewhere\ntrain: /else/train\nval: ../../val\n", 4, 12), ("train: .\nval: ''\n", 4, 12),
    ("train: images/train\n", 2, 10),
    (f"train: {'x' * 300}\n", 4, 12)])
def test_parts_of_yolo_share_no_images(tmp_path: Path, entries: str, n_test: int, n_left: int) -> None:
    write_yolo(tmp_path, {"train": 12, "test": 4})
    (tmp_path / "data.yaml").write_text((tmp_path / "data.yaml").read_text() + entries)
    data = load("yolo", tmp_path)
    assert (len(data.test), len(data.train) + len(data.validation)) == (n_test, n_left)
    assert not [remark for remark in data.remarks if "are also in" in remark]


def test_a_folder_above_the_root_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_yolo(tmp_path / "inner", {"train": 12})
    write_yolo(tmp_path / "outer", {"other": 12})
    (tmp_path / "inner" / "data.yaml").write_text(
        (tmp_path / "inner" / "data.yaml").read_text() + "train: images/train\nval: ../outer/images/other\n")
    monkeypatch.chdir(tmp_path / "inner")
    data = load("yolo", Path("."))
    assert len(data.train) + len(data.validation) + len(data.test) == 12


@pytest.mark.parametrize(("entries", "said"), [
    ("train: [images/train, images/test]\n", "train has 2 folders"),
    ("train: images\nval: images/test\n", "train and val have 4 images in common")])
def test_folders_of_yolo_that_cannot_be_told_apart_are_refused(tmp_path: Path, entries: str, said: str) -> None:
    write_yolo(tmp_path, {"train": 12, "test": 4})
    (tmp_path / "data.yaml").write_text((tmp_path / "data.yaml").read_text() + entries)
    with pytest.raises(DataError, match=said):
        load("yolo", tmp_path)


@pytest.mark.parametrize("entries", [
    "path: .\ntrain: train.txt\nval: val.txt\n", "", "train: lists/train.txt\nval: /content/x/lists/val.txt\n",
    "path: ../elsewhere\ntrain: images/Train\nval: images/gone\n"])
def test_lists_and_folders_of_yolo_divide_the_images(tmp_path: Path, entries: str) -> None:
    root = write_yolo(tmp_path, {"Train": 12, "Validation": 5})
    where = root / ("lists" if "lists/" in entries else "")
    where.mkdir(exist_ok=True)
    if "Train" not in entries:
        for part in ("Train", "Validation"):
            lines = [f"./images/{part}/{at}.png" for at in range(12 if part == "Train" else 5)]
            (where / f"{'train' if part == 'Train' else 'val'}.txt").write_text("\n".join(lines))
    (root / "data.yaml").write_text((root / "data.yaml").read_text() + entries)
    data = load("yolo", root)
    assert (len(data.test), len(data.train) + len(data.validation)) == (5, 12)


def test_a_part_that_data_yaml_names_and_is_not_there_is_told(tmp_path: Path) -> None:
    root = write_yolo(tmp_path, {"train": 12})
    (root / "data.yaml").write_text((root / "data.yaml").read_text() + "train: ../train/images\ntest: ../test/images\n")
    (root / "train").mkdir()
    for kind in ("images", "labels"):
        (root / kind / "train").rename(root / "train" / kind)
    assert any("test: ../test/images" in remark for remark in load("yolo", root).remarks)


@pytest.mark.parametrize(("names", "said"), [("[yes, no]", "quotes"), ("{1: a, 2: b}", "list of the classes' names")])
def test_names_of_yolo_that_are_no_text_are_refused(tmp_path: Path, names: str, said: str) -> None:
    write_yolo(tmp_path, PARTS)
    (tmp_path / "data.yaml").write_text(f"names: {names}\n")
    with pytest.raises(DataError, match=said):
        load("yolo", tmp_path)


def test_points_of_yolo_are_no_outline(tmp_path: Path) -> None:
    write_yolo(tmp_path, PARTS)
    said = (tmp_path / "data.yaml").read_text().replace('["red", "green"]', "{'0': red, '1': green}")
    (tmp_path / "data.yaml").write_text(said + "kpt_shape: [3, 2]\n")
    (tmp_path / "labels" / "val" / "0.txt").write_text("\ufeff1.0 .5 .5 .5 .5 .1 .1 .9 .9 .2 .3")
    assert boxes_of(load("yolo", tmp_path))[0] == {(0, 16, 12, 48, 36)}


def test_boxes_of_yolo_may_lie_beside_the_images(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "a", {"train": 12})
    flat = tmp_path / "b"
    shutil.copytree(root / "images" / "train", flat)
    shutil.copytree(root / "labels" / "train", flat, dirs_exist_ok=True)
    (flat / "classes.txt").write_text("red\ngreen\n")
    data = load("yolo", flat)
    assert len(data.train) + len(data.validation) + len(data.test) == 12
    assert not data.left_out


def test_images_without_a_file_of_boxes_are_told_apart_from_those_without_objects(tmp_path: Path) -> None:
    write_yolo(tmp_path, PARTS)
    first, second, *_ = sorted((tmp_path / "labels" / "train").iterdir())
    first.unlink()
    second.write_text("")
    n = sum(len([*(tmp_path / "images" / part).iterdir()]) - len([*(tmp_path / "labels" / part).iterdir()])
            for part in PARTS)
    said = load("yolo", tmp_path).remarks
    assert any(remark.startswith(f"{n} images have no text file with boxes") for remark in said)


def test_an_outline_of_yolo_counts_as_its_box(tmp_path: Path) -> None:
    write_yolo(tmp_path, PARTS)
    (tmp_path / "labels" / "val" / "0.txt").write_text("1 .25 .5 .5 .25 .75 .5 .5 .75")
    assert boxes_of(load("yolo", tmp_path))[0] == {(0, 16, 12, 48, 36)}


@pytest.mark.parametrize(("rename", "n_test", "n_left"), [
    ({"train": "train", "val": "val"}, 4, 12), ({"train": "train", "val": "val_old"}, 4, 12),
    ({"train": "", "val": "val"}, None, None), ({"train": "train", "val": "train_extra"}, 2, 10)])
def test_folders_of_yolo_are_parts_by_their_names(tmp_path: Path, rename: dict[str, str], n_test: int | None,
                                                  n_left: int | None) -> None:
    root = write_yolo(tmp_path, PARTS)
    for part, name in rename.items():
        for kind in ("images", "labels"):
            if name:
                (root / kind / part).rename(root / kind / name)
    if not rename["train"]:  # nothing is there to learn from
        shutil.rmtree(root / "images" / "train")
        (root / "images" / "train").mkdir()
        with pytest.raises(DataError):
            load("yolo", root)
        return
    (root / "test").mkdir()  # images without labels, and of no part
    Image.new("RGB", SIZE).save(root / "test" / "0.png")
    data = load("yolo", root)
    assert (len(data.test), len(data.train) + len(data.validation)) == (n_test, n_left)


def test_yolo_s_images_in_one_folder_are_for_training(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "a", {"train": 12})
    for kind in ("images", "labels"):
        (root / kind / "train").rename(root / f"{kind}_")
        (root / kind).rmdir()
        (root / f"{kind}_").rename(root / kind)
    (root / "train_results").mkdir()
    (root / "test.txt").write_text("./images/0.png")
    data = load("yolo", root)
    assert len(data.train) + len(data.validation) + len(data.test) == 12


def test_layouts_of_voc_that_tools_write_are_read(tmp_path: Path) -> None:
    first = load("voc", write_voc(tmp_path / "a", PARTS))
    root = write_voc(tmp_path / "b", PARTS)
    for before, after in (("JPEGImages", "images"), ("Annotations", "annotations")):
        (root / before).rename(root / after)
    lists = root / "ImageSets" / "Main"
    for kind, ending in (("images", "png"), ("annotations", "xml")):
        (root / kind / f"train0.{ending}").rename(root / kind / f"train 0.{ending}")
    (lists / "train.txt").write_text((lists / "train.txt").read_text().replace("train0\n", "train 0\n"))
    for part, name in zip(PARTS, ("Train", "Validation"), strict=True):
        stems = (lists / f"{part}.txt").read_text().splitlines()
        (lists / f"{part}.txt").unlink()
        (lists / f"{name}.txt").write_text("\n".join(stem if " " in stem else f"{stem}.png  1" for stem in stems))
    for path in (root / "annotations").glob("*.xml"):
        text = path.read_text().replace("<width>64</width>", "<width>0</width>").replace(
            "<height>48</height>", "<height>0</height>")
        path.write_text(text.replace("<filename>", "<filename>/home/me/"))
    (root / "annotations" / "._train0.xml").write_bytes(b"\0")
    second = load("voc", root)
    assert np.array_equal(first.test.targets, second.test.targets)
    assert np.array_equal(first.test.images, second.test.images)
    (lists / "Train.txt").rename(lists / "first_half.txt")
    (lists / "Validation.txt").unlink()
    with pytest.raises(DataError, match=r"first_half\.txt is no list of a part"):
        load("voc", root)


@pytest.mark.parametrize(("name", "write", "folder"), [("voc", write_voc, "JPEGImages"), ("coco", write_coco, "train")])
def test_images_that_nobody_has_annotated_are_counted(tmp_path: Path, name: str, write: Any, folder: str) -> None:
    root = write(tmp_path, PARTS)
    assert not load(name, root).left_out
    Image.new("RGB", SIZE).save(root / folder / "new.png")
    assert load(name, root).left_out == {"image without annotation": 1}


def test_a_picture_of_voc_is_that_of_the_same_name(tmp_path: Path) -> None:
    root = write_voc(tmp_path, PARTS)
    before = load("voc", root)
    path = root / "Annotations" / "val0.xml"
    path.write_text(path.read_text().replace("val0.png", "val1.png"))
    assert np.array_equal(load("voc", root).test.images, before.test.images)


def test_forms_of_coco_that_tools_write_are_read(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for image in content["images"]:
            image |= {"width": None, "height": None, "file_name": f"sub\\{image['file_name']}"}
        for each in content["annotations"]:
            left, top, width, height = each.pop("bbox")
            each["segmentation"] = [[left, top, left + width, top, left + width, top + height]]
            each |= {"iscrowd": "0", "category_id": float(each["category_id"]), "image_id": float(each["image_id"])}
        content["annotations"].append({"id": 999, "image_id": 0, "category_id": 3, "segmentation": [[1.0, 2.0]],
                                       "bbox": [1, 1, 0, 0]})

    first, root = load("coco", write_coco(tmp_path / "a", PARTS)), write_coco(tmp_path / "b", PARTS, change)
    for part in PARTS:
        (root / part).rename(root / f"{part}_")
        (root / part).mkdir()
        (root / f"{part}_").rename(root / part / "sub")
        (root / f"{part}.json").rename(root / f"instances_{part}.json")
    (root / "._instances_train.json").write_bytes(b"\0")
    (root / "val_answers.json").write_text("[]")
    second = load("coco", root)
    assert np.array_equal(first.test.targets, second.test.targets)


def test_an_id_of_coco_that_is_a_list_is_one_line(tmp_path: Path) -> None:
    for key in ("category_id", "image_id", "id"):
        root = write_coco(tmp_path / key, PARTS, lambda content, key=key: content["annotations"][0].update({key: [1]}))
        with pytest.raises(DataError, match="numbers, got"):
            load("coco", root)


@pytest.mark.parametrize(("text", "said"), [
    ("<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>&b;</annotation>", "entities"), ("<annotation>", "no XML"),
    ("<annotation><size><width>64</width></size></annotation>", "height")])
def test_a_wrong_file_of_voc_is_named(tmp_path: Path, text: str, said: str) -> None:
    write_voc(tmp_path, PARTS)
    (tmp_path / "Annotations" / "train3.xml").write_text(text)
    with pytest.raises(DataError, match=r"train3\.xml") as raised:
        load("voc", tmp_path)
    assert said in str(raised.value)


def as_shares(content: dict[str, Any]) -> None:
    for each in content["annotations"]:
        each["bbox"] = [side / length for side, length in zip(each["bbox"], SIZE * 2, strict=True)]


def as_corners(content: dict[str, Any]) -> None:
    for each in content["annotations"]:
        left, top, width, height = each["bbox"]
        each["bbox"] = [left, top, left + width, top + height]
        each["bbox"][0] += 20  # most objects are not at the left


@pytest.mark.parametrize(("change", "said"), [
    (as_shares, "no box is larger than a pixel"), (as_corners, "boxes do not fit into their images")])
def test_boxes_in_another_form_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str) -> None:
    root = write_coco(tmp_path / "a", {"train": 16, "val": 8}, change)
    with pytest.raises(DataError, match=said) as caught:
        load_dataset({"name": "coco", "root": str(root)}, 32, 0)
    assert "left, top, width and height in pixels" in str(caught.value)


def test_labels_that_lie_elsewhere_are_asked_for(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "a", {"train": 4})
    (root / "labels").rename(root / "texts")
    with pytest.raises(DataError, match=r"labels.train: no text file with boxes"):
        load_dataset({"name": "yolo", "root": str(root)}, 32, 0)
