"""A data set is known by the bytes of its files, which are read once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import LABELS, fashion, folder, npz, parquet, saved, tar

from hwnas.data import contents, loading
from hwnas.data.contents import Contents, state_of
from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.system.paths import home

N = len(LABELS)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(contents, "SETTLED_NS", 0)


def load(section: dict[str, Any]) -> Dataset:
    return load_dataset(section, 12, 0)


def replace_pixels(make: Callable[..., dict[str, Any]], root: Path) -> None:
    """Other pixels in files of the same names, sizes and times of change."""
    before = {path: path.stat() for path in root.rglob("*") if path.is_file()}
    make(root, 255)
    for path, status in before.items():
        assert path.stat().st_size == status.st_size
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("make", [folder, fashion, tar, npz, parquet, saved])
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


@pytest.mark.parametrize("change", [{"seed": 1}, {"image_size": 8}, {"validation_fraction": 0.3},
                                    {"channels": 1}])
def test_split_and_size_belong_to_the_fingerprint(tmp_path: Path, change: dict[str, Any]) -> None:
    section = folder(tmp_path / "data")
    seed = change.pop("seed", 0)
    assert load_dataset({**section, **change}, 12, seed).fingerprint != load(section).fingerprint


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
    assert len(read) == N
    assert load(section).fingerprint == first
    assert len(read) == N
    path = tmp_path / "data" / "bolt" / "05.png"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 0))
    assert load(section).fingerprint == first
    assert read[N:] == ["05.png"]
    path.unlink()
    load(section)
    stored, = (home() / "cache").glob("contents-*.json")
    assert len(json.loads(stored.read_text())["files"]) == N  # nothing was read, so nothing was written
    assert read[N:] == ["05.png"]


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
