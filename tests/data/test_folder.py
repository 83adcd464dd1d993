from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import counts
from PIL import Image, features

from hwnas.data import decoding as image_files
from hwnas.data.dataset import Dataset, DatasetOptions, left_out_text
from hwnas.data.decoding import _Gate, decode
from hwnas.data.folder import image_folder
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
    assert counts(dataset) == {"train": {"cat": 13, "dog": 26}, "validation": {"cat": 2, "dog": 4},
                                "test": {"cat": 5, "dog": 10}}
    everything = np.concatenate([part.images for part in (dataset.train, dataset.validation, dataset.test)])
    assert len({image.tobytes() for image in everything}) == 60


def test_folders_may_lie_deeper_than_python_calls(tmp_path: Path) -> None:
    fill(tmp_path, {"cat": 20, "dog": 20})
    deep = tmp_path.joinpath("cat", *["d"] * 350)
    os.makedirs(deep)
    Image.new("RGB", (8, 8)).save(deep / "deep.png")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        info = image_folder(DatasetOptions("imagefolder", tmp_path))
    finally:
        sys.setrecursionlimit(limit)
    assert np.bincount(info.parts["train"]).tolist() == [21, 20]


@pytest.mark.parametrize(("given", "images"), [
    ({"train": 10, "val": 3}, (8, 2, 3)), ({"train": 5, "valid": 2, "test": 4}, (5, 2, 4)),
    ({"Train": 6, "VAL": 3, "Test": 4}, (6, 3, 4)), ({"training": 6, "validation": 3, "testing": 4}, (6, 3, 4))])
def test_parts_in_folders_stay_apart_and_a_missing_one_comes_from_train(
        tmp_path: Path, given: dict[str, int], images: tuple[int, ...]) -> None:
    for part, n in given.items():
        fill(tmp_path / part, {"a": n, "b": n})
    (tmp_path / "notes").mkdir()
    data = load(tmp_path, validation_fraction=0.2)
    assert [tuple(part.values()) for part in counts(data).values()] == [(n, n) for n in images]
    assert list(data.left_out) == [f"folder notes/ beside {next(iter(given))}/"]


def test_grey_files_make_one_channel_and_colour_is_not_dropped_in_silence(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 6, "b": 6}, mode="L")
    assert inspect_dataset({"name": "imagefolder", "root": str(tmp_path)}).channels == 1
    assert load(tmp_path).train.images.shape[1] == 1
    assert load(tmp_path, channels=3).train.images.shape[1] == 3
    fill(tmp_path, {"c": 150, "d": 150}, mode="L", size=(8, 8))  # more than are looked at
    Image.new("RGB", (8, 8), "red").save(tmp_path / "c" / "001.png")
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


def test_skipping_keeps_images_and_labels_together(tmp_path: Path) -> None:
    for value, name in ((10, "dark"), (240, "light")):
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(10):
            Image.new("L", (8, 8), value).save(tmp_path / "train" / name / f"{index:03}.png")
    (tmp_path / "train" / "dark" / "002.png").write_bytes(b"")
    for number, path in enumerate(sorted(tmp_path.glob("train/*/*.png"))):  # equal files go to one set
        with path.open("ab") as file:
            file.write(bytes([number]) * (path.stat().st_size > 0))
    dataset = load(tmp_path, skip_unreadable=True)
    for part in (dataset.train, dataset.validation, dataset.test):
        np.testing.assert_array_equal(part.images[:, 0, 0, 0], np.where(part.labels == 0, 10, 240))


@pytest.fixture
def mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images, which are kept in a file however few they are."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(image_files, "IN_MEMORY", 0)
    return fill(tmp_path / "data", {"a": 10, "b": 10})


def test_large_sets_are_mapped_from_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "data"
    fill(root / "train", {"a": 10, "b": 10})
    fill(root / "val", {"a": 3, "b": 3})
    break_file(root)
    wanted = load(root, skip_unreadable=True)
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(image_files, "IN_MEMORY", 0)
    first = load(root, skip_unreadable=True)
    monkeypatch.setattr(image_files, "decode", None)
    second = load(root, skip_unreadable=True)
    for got in (first, second):
        assert isinstance(got.train.images, np.memmap)
        assert (got.skipped, got.left_out) == (1, {"cannot be decoded": 1})
        for part in ("train", "validation", "test"):
            np.testing.assert_array_equal(getattr(got, part).images, getattr(wanted, part).images)
    assert sorted(path.suffix for path in (home() / "cache").glob("images-*")) == [".json", ".npy"]


@pytest.mark.parametrize("limit", ["IN_MEMORY", "KEPT"])
@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_images_whose_file_is_torn_are_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str,
                                                     suffix: str) -> None:
    fill(tmp_path / "data", {"a": 10, "b": 10})
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(image_files, limit, 0)
    first = np.array(load(tmp_path / "data").train.images)
    (kept,) = (home() / "cache").glob(f"images-*{suffix}")
    kept.write_bytes(kept.read_bytes()[: kept.stat().st_size // 2])
    np.testing.assert_array_equal(load(tmp_path / "data").train.images, first)


def test_an_ended_decoding_leaves_no_file(mapped: Path) -> None:
    (mapped / "a" / "004.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="unreadable image"):
        load(mapped)
    assert list((home() / "cache").glob("*images*")) == []


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_a_full_disk_is_one_line_and_one_that_cannot_reserve_is_filled_with_zeros(mapped: Path, fault: int, monkeypatch
                                                                                 ) -> None:
    def refuse(*_: int) -> None:
        raise OSError(fault, os.strerror(fault))

    wanted = load(mapped).test.images
    for path in (home() / "cache").glob("images-*"):
        path.unlink()
    monkeypatch.setattr(image_files, "ZEROS", 1000)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if fault == errno.EOPNOTSUPP:
        np.testing.assert_array_equal(load(mapped).test.images, wanted)
        return
    with pytest.raises(DataError, match=rf"needs 15,488 bytes in {home() / 'cache'}: No space left .* HWNAS_HOME"):
        load(mapped)
    assert not list((home() / "cache").glob("*images*"))


SMALL_DISK = """
import sys
from hwnas.cli.command import run_command
from hwnas.data import decoding
from hwnas.data.loading import load_dataset
decoding.IN_MEMORY = 0
data = {"name": "imagefolder", "root": sys.argv[1]}
sys.exit(run_command(lambda *_: load_dataset(data, 256, 0), "train", "", [], target=False))
"""


@pytest.mark.soak
def test_a_small_disk_ends_no_process(tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a": 10, "b": 10})
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True,
                      check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        done = subprocess.run([sys.executable, "-c", SMALL_DISK, str(tmp_path / "data")], capture_output=True,
                              text=True, env={**os.environ, "HWNAS_HOME": str(disk)}, timeout=60, check=False)
        left = [path.name for path in disk.rglob("*images*")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert (done.returncode, left) == (2, [])
    line, = done.stderr.splitlines()
    assert f"3,932,288 bytes in {disk / 'cache'}" in line


def bomb(path: Path, side: int = 13_000) -> None:
    """A black PNG of 1 bit a pixel: some KiB, which claim `side` times `side` pixels."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((1 + (side + 7) // 8) * side), 1)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
                     + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


PEAK = """
import resource, sys
from hwnas.data.loading import load_dataset
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = load_dataset({"name": "imagefolder", "root": sys.argv[1], "skip_unreadable": True}, 16, 0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, data.left_out)
"""


def test_an_image_that_claims_too_many_pixels_costs_no_memory(tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a": 10, "b": 10})
    bomb(tmp_path / "data" / "a" / "bomb.png")
    said = r"bomb\.png: image too large \(13000 x 13000 pixels, more than 50000000\)\. Set dataset\.max_pixels higher"
    with pytest.raises(DataError, match=said):
        load(tmp_path / "data")
    shutil.copy(tmp_path / "data" / "a" / "bomb.png", tmp_path / "data" / "b" / "bomb.png")
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path / "data")], capture_output=True, text=True,
                          timeout=60, check=True)
    grown, left_out = done.stdout.split(maxsplit=1)
    assert left_out.strip() == "{'too many pixels': 2}"
    assert int(grown) < 100  # MiB; to decode one takes 160, and its conversion 640 more
    assert not done.stderr


def test_pixels_in_flight_are_bounded_over_all_threads() -> None:
    gate, now, peak = _Gate(100), [0], [0]
    lock = threading.Lock()

    def pass_with(pixels: int) -> None:
        with gate.hold(pixels):
            with lock:
                now[0] += min(pixels, 100)
                peak[0] = max(peak[0], now[0])
            with lock:
                now[0] -= min(pixels, 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pass_with, [30, 60, 10, 1000, 40, 50] * 50))
    assert 0 < peak[0] <= 100
    late = threading.Thread(target=pass_with, args=(60,))
    with gate.hold(60):
        late.start()
        late.join(0.1)
        assert late.is_alive()
    late.join()
    with gate.hold(100):
        pass


def test_images_are_decoded_within_that_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, hold = list[int](), _Gate.hold
    monkeypatch.setattr(_Gate, "hold", lambda gate, pixels: held.append(pixels) or hold(gate, pixels))
    monkeypatch.setattr(image_files, "FREE", 0)
    fill(tmp_path, {"a": 10, "b": 10})
    load(tmp_path)
    assert len(held) == 20


def test_every_file_is_read_or_counted_by_reason(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 10})
    fill(tmp_path / "val", {"a": 3, "b": 3})
    folder = tmp_path / "train" / "a"
    kinds = {"gif": "GIF", "jfif": "JPEG", **({"avif": "AVIF"} if features.check("avif") else {})}
    for ending, kind in kinds.items():
        Image.new("RGB", (16, 16), "red").save(folder / f"x.{ending}", kind)
    for name in ("x.heic", "y.HEIC", "notes.txt", "README", "x.averylongending", ".hidden"):
        (folder / name).write_bytes(b"something")
    break_file(tmp_path)
    dataset = load(tmp_path, skip_unreadable=True)
    assert len(dataset.train) + len(dataset.validation) == 19 + len(kinds)
    assert dataset.left_out == {"ending .heic": 2, "ending .txt": 1, "no image's ending": 2, "cannot be decoded": 1,
                                "hidden or made by a system": 1}
    assert dataset.describe()[-1].startswith("left out: 2 (ending .heic), 2 (no image's ending), 1 (cannot be decoded)")
    assert left_out_text({f"ending .{n}": 1 for n in range(9)}).endswith("and 3 for other reasons")
    assert not left_out_text({})


@pytest.mark.parametrize(("classes", "said"), [
    ({"a": 10}, "one class only"), ({"a": 10, "b": 0}, r"b: no images \("),
    ({"a": 10, "b": 3}, "a class needs at least 4 images; 'b' has 3"), ({}, "empty, no class folders"),
    ({"val/a": 3, "val/b": 3}, "val/ without train/"), ({"01 trainset": 4, "02 testset": 4}, "parts, not classes"),
    ({"train/Cat": 10, "train/b": 10, "val/cat": 3}, r"val: train/ has no class 'cat'\. Did you mean Cat\?"),
    *((dict.fromkeys(layout.split(), 4), said) for layout, said in (
        ("training_set/a training_set/b test_set/a test_set/b", "parts, not classes. Give test/ and train/ one"),
        ("seg_pred/x seg_train/seg_train/a seg_test/seg_test/a", "seg_test/ and seg_train/ are parts, not classes"),
        ("train test", "test/ and train/ are parts, not classes"),
        ("train/train/a test/test/a", "classes are further down, in train/. Move them up"),
        ("train/images/a train/images/b val/images/a", "classes are further down, in images/"),
        ("color/a color/b color/c gray/a gray/b gray/c", "versions of one data set, give one: dataset.root="),
        ("fold1/cat fold1/dog fold2/cat fold2/dog fold3/cat fold3/dog", "hold the same folders, such as cat/.*If they "
                                                                        "are folds, join"),
        ("a b augmented/a augmented/b", "called as the classes beside it"),
        ("cat/train cat/test dog/train dog/test", "each class has a train/ of its own"))),
    *((dict.fromkeys(layout.split(), 1), rf"Did you mean dataset\.root=\S*/here/{meant}\?") for layout, meant in (
        ("parts/a parts/b", "parts"), ("x/parts/a x/parts/b", "x/parts"),
        ("images/train/a images/train/b images/val/a labels/train", "images")))])
def test_what_cannot_be_learnt_from_is_refused_and_its_right_place_named(tmp_path: Path, classes: dict[str, int],
                                                                         said: str) -> None:
    (tmp_path / "here").mkdir()
    root = fill(tmp_path / "here", classes)
    with pytest.raises(DataError, match=said):
        load(root)
    with pytest.raises(DataError, match=said):  # before anything is timed
        inspect_dataset({"name": "imagefolder", "root": str(root)})


def test_folders_in_classes_are_read_unless_all_hold_the_same_images(tmp_path: Path) -> None:
    fill(tmp_path / "years", dict.fromkeys(("cat/2021", "cat/2022", "dog/2021", "dog/2023"), 4))
    fill(tmp_path / "notes", {"cat/images": 4, "cat/notes": 0, "dog/images": 4, "dog/notes": 0})
    fill(tmp_path / "beside", {"cat": 4, "cat/old": 4, "cat/new": 4, "dog/old": 4, "dog/new": 4})
    for root in tmp_path.iterdir():
        assert load(root).class_names == ("cat", "dog")


def test_places_that_are_no_data_set(tmp_path: Path) -> None:
    fill(tmp_path, {"x": 1})
    for name in ("x.zip", "x.csv"):
        (tmp_path / name).touch()
    for place, said in (("absent", "no such folder"), ("x", "1 images and no class folders"),
                        ("x.zip", r"x\.zip: a file, not a folder of images\. Give"),
                        ("x.csv", r"in Python a table: hwnas\.search\(target, pandas\.read_csv")):
        with pytest.raises(DataError, match=said):
            load(tmp_path / place)
    with pytest.raises(DataError, match=r"dataset\.root is not set"):
        inspect_dataset({"name": "imagefolder"})


def test_a_class_may_be_missing_in_what_is_held_out(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 10, "c": 10, "d": 10})
    fill(tmp_path / "val", {"a": 3, "b": 0, "d": 2})
    fill(tmp_path / "test", {"b": 3, "c": 2, "d": 1})
    data = load(tmp_path)
    assert data.class_names == ("a", "b", "c", "d")
    assert list(counts(data)["validation"].values()) == [3, 0, 0, 2]
    assert list(counts(data)["test"].values()) == [0, 3, 2, 1]
    assert [remark for remark in data.remarks if "has no image" in remark] == [
        "val/ has no image of 'b', 'c'", "test/ has no image of 'a'"]


def copy_all(source: Path, to: Path) -> None:
    for path in sorted(source.rglob("*.png")):
        place = to / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def test_test_images_that_are_also_in_train_are_counted_and_named(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 10})
    assert not load(tmp_path / "train").remarks
    copy_all(tmp_path / "train", tmp_path / "val")
    Image.new("RGB", (9, 9)).save(tmp_path / "val" / "a" / "new.png")
    copies, held = load(tmp_path).remarks
    assert copies == "20 of 21 test images are also in train or validation, such as val/a/000.png and val/a/001.png"
    assert held.startswith("the val part holds the test images")
    shutil.copytree(tmp_path / "train", tmp_path / "test")
    assert [remark[:50] for remark in load(tmp_path).remarks] == [
        "20 of 21 validation images are also in train, such", "20 of 20 test images are also in train or validati"]


def test_copies_go_to_one_set_and_those_of_another_class_are_named(tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a": 20, "b": 20})
    for path in sorted((tmp_path / "data").rglob("*.png")):
        shutil.copy(path, path.with_name(f"copy-{path.name}"))
    data = load(tmp_path / "data")
    sets = [{image.tobytes() for image in part.images} for part in (data.train, data.validation, data.test)]
    assert len(set.union(*sets)) == sum(map(len, sets)) == 40
    assert sum(map(len, (data.train, data.validation, data.test))) == 80
    assert not data.remarks
    shutil.copy(tmp_path / "data" / "a" / "000.png", tmp_path / "data" / "b" / "x.png")
    remark, = load(tmp_path / "data").remarks
    assert remark == "1 images are copies of images of another class, such as b/x.png of a/000.png"


def test_arrays_that_share_images_are_named_too(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    labels = np.arange(20) % 2
    np.savez(tmp_path / "x.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    remark, = load_dataset({"name": "arrays", "root": str(tmp_path / "x.npz")}, 8, 0).remarks
    assert remark.startswith("20 of 20 test images are also in train or validation, such as test image 0")
    twice = np.random.default_rng(1).integers(0, 256, (40, 8, 8), np.uint8).repeat(2, 0)
    np.savez(tmp_path / "x.npz", images=twice, labels=np.arange(80) // 2 % 2)
    data = load_dataset({"name": "arrays", "root": str(tmp_path / "x.npz")}, 8, 0)
    sets = [{image.tobytes() for image in part.images} for part in (data.train, data.validation, data.test)]
    assert (sum(map(len, sets)), data.remarks) == (40, ())


def test_what_systems_leave_behind_is_left_out_and_counted(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 10, "b": 10})
    fingerprint = load(tmp_path).fingerprint
    for name in ("__MACOSX", "@eaDir", "lost+found", ".ipynb_checkpoints", "a/@eaDir", "$RECYCLE.BIN"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "a" / "000.png", tmp_path / name / "x.png")
    for name in ("Thumbs.db", "desktop.ini", "b/._000.png", "a/.DS_Store", "beside.png", "a/notes.txt"):
        (tmp_path / name).write_bytes(b"left")
    data = load(tmp_path)
    assert data.class_names == ("a", "b")
    assert data.fingerprint == fingerprint
    assert data.left_out == {"hidden or made by a system": 10, "image beside folders": 1, "ending .txt": 1}


def test_names_that_look_the_same_are_one_class_or_one_error(tmp_path: Path) -> None:
    fill(tmp_path / "Train", {"caf\u00e9": 10, "b": 10})
    fill(tmp_path / "TEST", {"cafe\u0301": 3, "b ": 3})
    data = load(tmp_path)
    assert data.class_names == ("b", "caf\u00e9")
    assert counts(data)["test"] == {"b": 3, "caf\u00e9": 3}
    fill(tmp_path / "Train", {"cafe\u0301": 2})
    with pytest.raises(DataError, match=r"'caf\\xe9' look the same.*Make them one"):
        load(tmp_path)


@pytest.mark.parametrize("names", [
    ("test tube", "train station"), ("trainer", "valve"), ("contest", "train"), ("train", "tram")])
def test_a_class_may_be_called_like_a_part(tmp_path: Path, names: tuple[str, str]) -> None:
    fill(tmp_path, dict.fromkeys((*names, "bus"), 4))
    assert load(tmp_path).class_names == tuple(sorted((*names, "bus")))


def test_links_in_a_circle_to_nothing_and_pipes_are_counted_once(tmp_path: Path) -> None:
    fill(tmp_path / "data", {"a": 10, "b": 10})
    for name, target in (("up", "."), ("a/up", ".."), ("a/same", "."), ("b/top", "../.."), ("b/a", "../a/itself")):
        (tmp_path / "data" / name).symlink_to(target)
    (tmp_path / "data" / "a" / "itself.png").symlink_to("itself.png")
    (tmp_path / "data" / "a" / "link.png").symlink_to("nothing")
    os.mkfifo(tmp_path / "data" / "a" / "pipe.jpg")
    data = load(tmp_path / "data")
    assert sum(map(len, (data.train, data.validation, data.test))) == 20
    assert data.left_out == {"link to a folder that is listed already": 4, "link to nothing": 2,
                             "no image's ending": 1, "no regular file": 1}


def test_the_first_lines_say_what_the_data_are(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 10, "b": 20})
    fill(tmp_path / "val", {"a": 3, "b": 9})
    lines = load(tmp_path).describe()
    assert len(lines) <= 4
    for text in ("2 classes", "25 training, 5 validation and 12 test images", "always answering 'b' is right for 75.0%",
                 "20 x 16 px, RGB"):
        assert text in "\n".join(lines)


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
