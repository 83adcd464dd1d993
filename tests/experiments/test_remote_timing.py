"""The experiment that holds times over ssh against times here: how it compares, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device_fixtures import Board

from hwnas.errors import ConfigError


def test_the_ratio_is_of_the_same_round() -> None:
    from experiments.remote_timing.run import describe, summary

    rows = [{"round": number, "network": "a", "here_ms": 1.0 + number, "there_ms": 1.01 * (1.0 + number)}
            for number in range(4)]
    result = summary(rows)
    assert result["ratio"] == pytest.approx(1.01)
    assert result["within"]
    assert describe(result).endswith("median over 4 pairs: over ssh +1.00% of here, within 2%")
    slow = summary([{**row, "there_ms": 2 * row["here_ms"]} for row in rows[:1]])
    assert not slow["within"]
    assert slow["networks"][0]["here_spread"] is None


@pytest.mark.parametrize(("arguments", "match"), [
    (["out=x"], "device=user@host and out=DIR"), (["device=a@b", "out=x", "n=3"], "no option is called 'n'"),
    (["device=a@b", "out=x", "rounds=none"], "rounds must be a whole number")])
def test_wrong_options_are_one_line(arguments: list[str], match: str) -> None:
    from experiments.remote_timing.run import main

    with pytest.raises(ConfigError, match=match):
        main(arguments)


@pytest.mark.usefixtures("any_machine")
def test_a_small_run(board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from experiments.remote_timing.run import main

    main(["device=me@board", f"device_python={board.python}", f"out={tmp_path}", "networks=1", "rounds=2", "seconds=2",
          "target=ort_fp32"])
    assert "median over 2 pairs" in capsys.readouterr().out
    assert json.loads((tmp_path / "remote.json").read_text())["pairs"] == 2
    assert len((tmp_path / "rounds.csv").read_text().splitlines()) == 3
    assert board.calls == 2
