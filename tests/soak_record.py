"""The last whole run of the soak tests, and which of them what changed since then touches."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("soak.json")
# Folders of tests that run whole commands: whatever part of hwnas changes may show there.
WHOLE = {"search", "experiments", "api", "wheel"}
EVERYTHING = {"pyproject.toml", "constraints.txt", "Makefile"}


def read_touched(record: Path = RECORD) -> set[str] | None:
    """Packages, commands and folders of tests that changed since the recorded run; None where that is not known."""
    try:
        commit = json.loads(record.read_text())["commit"]
        done = subprocess.run(["git", "diff", "--name-only", commit, "--"], cwd=ROOT, capture_output=True, text=True,
                              check=True)
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError):
        return None  # no record, no repository, or one that does not hold the commit
    return touched_by(done.stdout.split())


def touched_by(paths: list[str]) -> set[str] | None:
    """The areas that changed `paths` belong to; None: all of them. The record itself stands for none."""
    paths = [path for path in paths if path != f"tests/{RECORD.name}"]
    if EVERYTHING & {*paths} or any(path.startswith("tests/") and path.count("/") == 1 for path in paths):
        return None
    parts = [Path(path).with_suffix("").parts for path in paths]
    areas = {part[1].removeprefix("test_") for part in parts if len(part) > 1 and part[0] in ("hwnas", "tests")}
    if areas or any(part[0] in ("conf", "search_spaces", "latency_tables") for part in parts):
        areas |= WHOLE
    return areas | ({"experiments"} if any(part[0] == "experiments" for part in parts) else set())


def area_of(path: Path) -> str:
    """The package or command that the tests of a file are about."""
    return path.relative_to(ROOT / "tests").parts[0].removeprefix("test_").removesuffix(".py")


def write_record(host: str, counts: dict[str, int], seconds: float, record: Path = RECORD) -> None:
    """Keep what a whole run came to, with the commit that it ran on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.strip()
    known: dict[str, Any] = {"commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}", "host": host,
                             "seconds": round(seconds), **counts}
    record.write_text(json.dumps(known, indent=1) + "\n")
