"""A compression whose files are scored and timed on another machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compress_fixtures import command
from device_fixtures import Board

from hwnas.latency import agent
from hwnas.target import Host

pytestmark = pytest.mark.usefixtures("any_machine")


def test_a_compression_is_decided_there(board: Board, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(agent, "KEPT_COMPILED", 2)
    out, given = tmp_path / "out", ["max_drop=5", "seconds=5"]
    there = ["device=me@board", f"device_python={board.python}", "device_name=board-2c"]
    assert command(trained, out, *given, *there) == 0, capsys.readouterr().err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["host"], summary["identity"]["host"], summary["keeps_limit"]) == ("board-2c", "board-2c", True)
    assert summary["latency_ms"] > 0
    calls = board.calls
    assert command(trained, out, *given) == 2  # here it would be another one
    assert f"host was board-2c, is {Host.detect().name}" in capsys.readouterr().err
    assert board.calls == calls
