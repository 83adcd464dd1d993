from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hwnas.errors import UserError
from hwnas.system import paths
from hwnas.system.paths import hold


def test_home_is_what_the_variable_says_and_comes_before_what_is_shipped(monkeypatch, tmp_path):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "mine"))
    assert paths.home() == tmp_path / "mine"
    monkeypatch.setenv("HWNAS_HOME", "~/mine")
    assert paths.home() == Path.home() / "mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWNAS_HOME", "mine")
    assert paths.home() == tmp_path / "mine"
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    assert paths.table_dirs() == [tmp_path / "latency_tables"]  # as the tests run
    monkeypatch.delenv("HWNAS_OWN_TABLES")
    for folders, name in ((paths.data_dirs("search_spaces"), "search_spaces"), (paths.table_dirs(), "latency_tables")):
        assert folders == [tmp_path / name, paths.shipped(name)]
        assert folders[1].is_dir()
    assert paths.shipped("conf").is_absolute()
    assert (paths.shipped("conf") / "target").is_dir()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.ESTALE])
def test_a_home_that_cannot_be_entered_is_not_looked_through(
        number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As root's in a container of another user: what is shipped is there all the same."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "closed"))
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, **options)

    monkeypatch.setattr(paths.os, "stat", refuse)
    assert paths.data_dirs("conf") == [paths.shipped("conf")]


@pytest.mark.parametrize(("number", "is_told"), [(errno.ENAMETOOLONG, True), (errno.EACCES, True),
                                                 (errno.ENOENT, False)])
def test_a_path_that_the_system_refuses_is_one_line(number: int, is_told: bool) -> None:
    told = paths.unusable(OSError(number, os.strerror(number), "/some/where"))
    assert (told is not None) == is_told
    assert told is None or str(told).startswith("/some/where: ")
    assert paths.unusable(OSError(number, os.strerror(number))) is None


def test_home_without_the_variable_is_the_platforms_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HWNAS_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert paths.home() == tmp_path / "hwnas"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert paths.home() == Path.home() / ".local" / "share" / "hwnas"


def test_text_and_bytes_are_written_whole_or_not_at_all(tmp_path):
    paths.write_atomic(tmp_path / "new" / "text", "größe\n")
    paths.write_atomic(tmp_path / "new" / "bytes", b"\x00\xff")
    assert (tmp_path / "new" / "text").read_bytes() == "größe\n".encode()
    assert (tmp_path / "new" / "bytes").read_bytes() == b"\x00\xff"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bytes", "text"]
    path = tmp_path / "report.html"
    paths.write_atomic(path, "old")
    with pytest.raises(UserError, match=r"report.html: 'by \\ud800' is no text"):
        paths.write_atomic(path, "by \ud800 and others")
    assert path.read_text() == "old"
    assert {entry.name for entry in tmp_path.iterdir()} == {"new", "report.html"}
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        paths.write_atomic(tmp_path / "run" / "front.csv", "x")


@pytest.mark.parametrize(("number", "step"), [(errno.ENOSPC, "Free space"), (errno.EROFS, "writable disk")])
def test_failed_write_keeps_the_old_file_and_says_why(monkeypatch, tmp_path, number, step):
    path = tmp_path / "front.csv"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=step) as caught:
        paths.write_atomic(path, "new")
    assert str(path) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("error", "told"), [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "images.npy"), "images.npy: No space left on device. Free space"),
    (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "/temporary: File too large. Free space"),
    (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "/temporary: no folder for"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), None)])
def test_a_write_without_space_is_told_from_other_errors(monkeypatch, error, told):
    monkeypatch.setenv("TMPDIR", "/temporary")
    line = paths.no_space(error)
    assert (line is None) == (told is None)
    assert told is None or str(line).startswith(told)


def test_a_full_disk_under_a_lock_asks_for_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(UserError, match=r"\.lock: No space left on device\. Free space"), hold(tmp_path / ".lock"):
        pass


KILLED_WHILE_WRITING = """
import os, sys
from hwnas.system.paths import write_atomic
os.fsync = lambda handle: os.kill(os.getpid(), 9)
write_atomic(sys.argv[1], "new" * 1000)
"""


def test_kill_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "front.csv"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(path)], timeout=300, check=False)
    assert done.returncode == -9
    assert path.read_text() == "old"


def test_a_temporary_folder_is_gone_behind_its_block_and_what_a_kill_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path))
    code = ("import os, sys; from pathlib import Path; from hwnas.system.paths import temporary_folder\n"
            "with temporary_folder() as folder:\n"
            "    Path(folder, 'x').write_text('x'); print(folder, flush=True); sys.stdin.read(1)\n")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as held:
        assert held.stdout is not None
        left = Path(held.stdout.readline().strip())
        assert left.parent == tmp_path

        def look() -> Path:
            paths._remove_left_folders.cache_clear()
            with paths.temporary_folder() as folder:
                return Path(folder)

        assert not look().exists()
        assert (left / "x").exists()  # its process is at work
        held.kill()
        held.wait()
    assert (left / "x").exists()
    foreign = tmp_path / "hwnas-mine"
    foreign.mkdir()
    look()
    assert [path.name for path in tmp_path.iterdir()] == ["hwnas-mine"]
