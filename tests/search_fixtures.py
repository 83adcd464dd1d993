"""What a search has acknowledged, read from outside; the hosts of shipped tables."""

from __future__ import annotations

import csv
import sqlite3
import subprocess
import time
from pathlib import Path

from hwnas.system.paths import shipped

HOSTS = sorted({path.parent.name for path in shipped("latency_tables").rglob("*.json.gz")})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def acknowledged(out: Path) -> set[str]:
    """Numbers of the trials that the database holds as complete, asked while others write to it."""
    if not (out / "study.db").is_file():
        return set()
    try:
        with sqlite3.connect(f"file:{out / 'study.db'}?mode=ro", uri=True, timeout=10) as database:
            rows = database.execute("select number from trials where state = 'COMPLETE'").fetchall()
            return {str(row[0]) for row in rows}
    except sqlite3.OperationalError:
        return set()


def wait_for_trials(out: Path, n: int, worker: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while len(acknowledged(out)) < n and time.monotonic() < deadline and worker.poll() is None:
        time.sleep(0.05)
