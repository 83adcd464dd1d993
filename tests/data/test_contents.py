"""A data set is known by the bytes of its files, which are read once."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hwnas.data import contents, loading
from hwnas.data.contents import Contents, state_of
from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.system.paths import home

N = 8


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(contents, "SETTLED_NS", 0)


def pixels(change: int = 0) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (2 * N, 8, 8, 3), np.uint8)
    images[3, 4, 5] ^= change
    return images


def folder(root: Path, change: int = 0) -> dict[str, Any]:
    for row, image in enumerate(pixels(change)):
        path = root / "ab"[row // N] / f"{row:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, compress_level=0)  # of one size whatever it shows
    return {"name": "imagefolder", "root": str(root)}


def fashion(root: Path, change: int = 0) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    labels = (np.arange(40) % 10).astype(np.uint8)
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), np.uint8)
    images[0, 0, 0] ^= change
    for stem in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (root / f"{stem}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return {"name": "fashion_mnist", "root": str(root)}


def cifar(root: Path, change: int = 0) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = np.random.default_rng(0).integers(0, 256, (20, 3073), np.uint8)
        rows[:, 0], rows[0, 1] = np.arange(20) % 10, change
        (root / f"{name}.bin").write_bytes(rows.tobytes())
    return {"name": "cifar10", "root": str(root)}


def tar(root: Path, change: int = 0) -> dict[str, Any]:
    folder(root / "files", change)
    with tarfile.open(root / "train.tar", "w") as file:
        file.add(root / "files", arcname=".")
    shutil.rmtree(root / "files")
    return {"name": "timm:tar", "root": str(root)}


def npz(root: Path, change: int = 0) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    np.savez(root / "x.npz", images=pixels(change), labels=np.repeat([0, 1], N))
    return {"name": "arrays", "root": str(root / "x.npz")}


def _table(change: int) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = [{"bytes": b"P6 8 8 255 " + image.tobytes(), "path": None} for image in pixels(change)]
    return datasets.Dataset.from_dict({"image": rows, "label": [0] * N + [1] * N}, features=features)


def parquet(root: Path, change: int = 0) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    _table(change).to_parquet(str(root / "train.parquet"))
    return {"name": "timm:hfds", "root": str(root)}


def saved(root: Path, change: int = 0) -> dict[str, Any]:
    _table(change).save_to_disk(str(root))
    return {"name": "timm:hfds", "root": str(root)}


def load(section: dict[str, Any]) -> Dataset:
    return load_dataset(section, 8, 0)


def replace_pixels(make: Callable[..., dict[str, Any]], root: Path) -> None:
    """Other pixels in files of the same names, sizes and times of change."""
    before = {path: path.stat() for path in root.rglob("*") if path.is_file()}
    make(root, 255)
    for path, status in before.items():
        assert path.stat().st_size == status.st_size
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("make", [folder, fashion, cifar, tar, npz, parquet, saved])
def test_other_pixels_are_another_data_set_though_name_size_and_age_are_the_same(tmp_path: Path, make: Any) -> None:
    section = make(tmp_path / "data")
    first = load(section)
    assert load(section).fingerprint == first.fingerprint
    replace_pixels(make, tmp_path / "data")
    second = load(section)
    assert any((getattr(second, part).images != getattr(first, part).images).any()
               for part in ("train", "validation", "test"))
    assert second.fingerprint != first.fingerprint
    assert second.at_size(16).fingerprint != first.at_size(16).fingerprint


@pytest.mark.parametrize("change", [{"seed": 1}, {"image_size": 12}, {"validation_fraction": 0.3},
                                    {"channels": 1}])
def test_split_and_size_belong_to_the_fingerprint(tmp_path: Path, change: dict[str, Any]) -> None:
    section = folder(tmp_path / "data")
    seed = change.pop("seed", 0)
    assert load_dataset({**section, **change}, 8, seed).fingerprint != load(section).fingerprint


def test_the_rows_of_the_split_belong_to_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options say how to split; which images come of it is the code's."""
    section, split = folder(tmp_path / "data"), loading.split
    first = load(section)
    monkeypatch.setattr(loading, "split", lambda *given: {**(sets := split(*given)), "validation": sets["test"],
                                                         "test": sets["validation"]})
    assert load(section).fingerprint != first.fingerprint


def test_a_second_start_reads_no_file_and_a_changed_file_alone_is_read_again(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    section, read = folder(tmp_path / "data"), list[str]()
    hash_file = contents._hash
    monkeypatch.setattr(contents, "_hash", lambda path: read.append(os.path.basename(path)) or hash_file(path))
    first = load(section).fingerprint
    assert len(read) == 2 * N
    assert load(section).fingerprint == first
    assert len(read) == 2 * N
    path = tmp_path / "data" / "a" / "05.png"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 0))
    assert load(section).fingerprint == first
    assert read[2 * N:] == ["05.png"]
    path.unlink()
    load(section)
    stored, = (home() / "cache").glob("contents-*.json")
    assert len(json.loads(stored.read_text())["files"]) == 2 * N  # nothing was read, so nothing was written
    assert read[2 * N:] == ["05.png"]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": "other/1"}', b'{"format": "hwnas-contents/1"}',
                                    b'{"format": "hwnas-contents/9", "files": {}}',
                                    b'{"format": "hwnas-contents/1", "files": {"a": 1}}', b"\xff\x00", b"[1]"])
def test_a_torn_or_foreign_list_is_made_again(tmp_path: Path, damage: bytes) -> None:
    section = folder(tmp_path / "data")
    first = load(section).fingerprint
    stored, = (home() / "cache").glob("contents-*.json")
    whole = stored.read_bytes()
    stored.write_bytes(damage)
    assert load(section).fingerprint == first
    assert stored.read_bytes() == whole


def test_a_list_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = folder(tmp_path / "data")
    first = load(section).fingerprint
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "file"))
    assert load(section).fingerprint == first


def test_a_file_that_changed_just_now_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SETTLED_NS", 10**12)
    load(folder(tmp_path / "data"))
    assert not list((home() / "cache").glob("contents-*.json"))


def test_lists_of_data_sets_not_used_for_long_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MOST_LISTS", 2)
    for name in "xyz":
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
        state = state_of(os.stat(tmp_path / name / "f"))
        assert Contents(tmp_path / name, {"f": state}).identity
    assert len(list((home() / "cache").glob("contents-*.json"))) == 2
