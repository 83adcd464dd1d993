"""The attacks of tests/soak: `make soak` runs them, and `make test` a short form of some."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from study_fixtures import opened, searched

from hwnas.cli.command import run_command
from tests.soak.fullness import FullDisk, missing

ROOT = Path(__file__).parents[2]


def attack(name: str, out: Path, *options: str) -> tuple[str, list[dict]]:
    """What `tests.soak.NAME` says, and its lines of results but the first; it must find nothing."""
    results = out / "results.jsonl"
    done = subprocess.run([sys.executable, "-m", f"tests.soak.{name}", *options, "--out", str(out / "out"),
                           "--results", str(results)], capture_output=True, text=True, timeout=900, check=False,
                          cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, [json.loads(line) for line in results.read_text().splitlines()[1:]]


@pytest.mark.soak
def test_killed_commands_lose_nothing_and_go_on(tmp_path: Path) -> None:
    _, kills = attack("kills", tmp_path, "--commands", "train,verify", "--kills", "6")
    assert [(kill["lost"], kill["leftovers"], kill["resumed"]) for kill in kills] == [([], 0, True)] * 6


@pytest.mark.parametrize(("examples", "steps", "minutes"), [
    (1, 2, 10), pytest.param(60, 12, 4, marks=pytest.mark.soak)])
def test_whatever_happens_to_a_run_folder_is_gone_on_with_or_refused(tmp_path, examples, steps, minutes):
    said, sequences = attack("sequences", tmp_path, "--examples", str(examples), "--steps", str(steps), "--seed", "13",
                             "--minutes", str(minutes))
    assert said.rstrip().endswith(": 0 wrong")
    assert sum(len(sequence["steps"]) for sequence in sequences) >= examples


needs_notices = pytest.mark.skipif(bool(missing()), reason=missing())


@needs_notices
def test_a_refused_write_is_told_and_counted_whoever_writes(tmp_path: Path) -> None:
    """SQLite and the C library's buffers write without Python; what is outside of the folder is not counted."""
    other = tmp_path / "other"
    (disk_folder := tmp_path / "disk").mkdir()
    seen: list[str] = []

    def run(at: int, once: bool) -> FullDisk:
        disk = FullDisk(disk_folder, at, once, lambda: seen.append("full"))
        pid = os.fork()
        if pid == 0:
            disk.enter()
            refused = 0
            for write in (lambda: other.write_text("x"), lambda: (disk_folder / "text").write_text("x"),
                          lambda: np.save(disk_folder / "array", np.zeros(9)),
                          lambda: sqlite3.connect(disk_folder / "database").execute("create table if not exists a(b)")):
                try:
                    write()
                except (OSError, sqlite3.Error):
                    refused += 1
            os._exit(refused)
        while disk.answer(0.05):
            pass
        seen.append(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        disk.close()
        return disk

    n = run(0, once=False).writes
    assert n > 8
    assert (seen, other.read_text()) == (["0"], "x")
    assert run(1, once=False).refused == "write text"
    assert run(2, once=True).refused.endswith("array.npy")
    assert seen == ["0", "full", "2", "full", "1"]  # the database has its table by then


@needs_notices
def test_a_search_on_a_full_disk_keeps_its_trials_and_goes_on(tmp_path: Path) -> None:
    """The short form: the search loop on a real database, with made-up scores, a disk full at two of its writes."""
    def search(folder: Path, at: int) -> tuple[int, int | None, list[str]]:
        folder.mkdir(exist_ok=True)
        disk, said = FullDisk(folder, at), tmp_path / "said.txt"
        pid = os.fork()
        if pid == 0:
            disk.enter()
            with said.open("w") as sys.stderr:
                code = run_command(lambda config, console: searched(opened(folder), 2), "report", "", ["run=x"],
                                   target=False)
            os._exit(code)
        while disk.answer(0.05):
            pass
        disk.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return disk.writes, code, said.read_text().splitlines()

    def complete(folder: Path) -> dict[int, list[float]]:
        query = "select trial_id, value from trial_values join trials using (trial_id) where state = 'COMPLETE'"
        kept: dict[int, list[float]] = {}
        with closing(sqlite3.connect(folder / "study.db")) as database, suppress(sqlite3.OperationalError):
            for number, value in database.execute(query):
                kept.setdefault(number, []).append(value)
        return kept

    n, code, lines = search(tmp_path / "whole", 0)
    assert (code, lines, len(complete(tmp_path / "whole"))) == (0, [], 2)
    for at in (n // 3, 2 * n // 3):
        folder = tmp_path / f"full{at}"
        _, code, lines = search(folder, at)
        assert code == 0 or (code, len(lines), "ree space" in lines[-1]) == (2, 1, True), lines
        kept = complete(folder)
        assert search(folder, 0)[1:] == (0, [])
        assert complete(folder).items() >= kept.items()
        assert len(complete(folder)) == 2


@needs_notices
@pytest.mark.soak
def test_commands_on_a_full_disk_lose_nothing_and_go_on(tmp_path: Path) -> None:
    _, lines = attack("full_disk", tmp_path, "--commands", "train,search,quantize,profile,verify", "--writes", "3")
    assert len(lines) == 5 * 3 * 2
