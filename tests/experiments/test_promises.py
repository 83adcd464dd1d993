"""The attacks of experiments/promises: `make soak` runs them, and `make test` a short form of some."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def attack(name: str, out: Path, *options: str) -> tuple[str, list[dict]]:
    """What `experiments.promises.NAME` says, and its lines of results but the first; it must find nothing."""
    results = out / "results.jsonl"
    done = subprocess.run([sys.executable, "-m", f"experiments.promises.{name}", *options, "--out", str(out / "out"),
                           "--results", str(results)], capture_output=True, text=True, timeout=900, check=False,
                          cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, [json.loads(line) for line in results.read_text().splitlines()[1:]]


@pytest.mark.soak
def test_killed_commands_lose_nothing_and_go_on(tmp_path: Path) -> None:
    _, kills = attack("kills", tmp_path, "--commands", "train,verify", "--kills", "6")
    assert [(kill["lost"], kill["leftovers"], kill["resumed"]) for kill in kills] == [([], 0, True)] * 6


@pytest.mark.parametrize(("examples", "steps", "minutes"), [
    (2, 2, 10), pytest.param(60, 12, 4, marks=pytest.mark.soak)])
def test_whatever_happens_to_a_run_folder_is_gone_on_with_or_refused(tmp_path: Path, examples: int, steps: int,
                                                                     minutes: int) -> None:
    said, sequences = attack("sequences", tmp_path, "--examples", str(examples), "--steps", str(steps), "--seed", "13",
                             "--minutes", str(minutes))
    assert said.rstrip().endswith(": 0 wrong")
    assert sum(len(sequence["steps"]) for sequence in sequences) >= examples
