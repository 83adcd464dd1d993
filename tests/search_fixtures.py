"""What a search has acknowledged, read from outside, and tables as text."""

from __future__ import annotations

import csv
import sqlite3
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A table as text."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def asked(out: Path, query: str) -> set[str]:
    """The first column of what the study's database answers, asked while others write to it."""
    if not (out / "study.db").is_file():
        return set()
    try:
        with sqlite3.connect(f"file:{out / 'study.db'}?mode=ro", uri=True, timeout=10) as database:
            return {str(row[0]) for row in database.execute(query).fetchall()}
    except sqlite3.OperationalError:
        return set()


def acknowledged(out: Path) -> set[str]:
    """Numbers of the trials that the database holds as complete."""
    return asked(out, "select number from trials where state = 'COMPLETE'")


def wait_for_trials(out: Path, n: int, worker: subprocess.Popen[str]) -> None:
    wait_until(lambda: len(acknowledged(out)) >= n, worker)


def workers_of(out: Path) -> set[str]:
    """Workers that have claimed a trial which has not ended."""
    return asked(out, "select json_extract(value_json, '$.worker') from trial_user_attributes where key = 'claim' "
                      "and value_json != 'null'")


def wait_until(reached: Callable[[], bool], *workers: subprocess.Popen[str]) -> None:
    """Return once it is reached; a worker that ends before fails the test."""
    deadline = time.monotonic() + 900
    while not reached():
        assert [worker.poll() for worker in workers] == [None] * len(workers)
        assert time.monotonic() < deadline
        time.sleep(0.05)
