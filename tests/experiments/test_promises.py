"""The attacks of experiments/promises, as `make soak` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_killed_commands_lose_nothing_and_go_on(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = subprocess.run([sys.executable, "-m", "experiments.promises.kills", "--commands", "train,verify", "--kills",
                           "6", "--out", str(tmp_path / "out"), "--results", str(results)], capture_output=True,
                          text=True, timeout=900, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [json.loads(line) for line in results.read_text().splitlines()[1:]]
    assert [(kill["lost"], kill["leftovers"], kill["resumed"]) for kill in kills] == [([], 0, True)] * 6
