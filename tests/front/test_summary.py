"""The closing lines of a search and of a verification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from front_fixtures import make_row

from hwnas.front.summary import summary_lines


def lines_of(*rows, comparisons=()) -> list[str]:
    return list(summary_lines(rows, comparisons, Path("report.html")))


def test_a_predicted_latency_and_a_top1_of_fp32_are_marked_wherever_they_stand() -> None:
    measured = make_row("measured0")
    unknown = make_row("unknown00", verified=False, latency_ms=None, reason="timing INVALID")
    unscored = replace(unknown, id="unscored0", top1_test=None)
    lines = lines_of(measured, unknown, unscored)
    assert "0.105 ms" in lines[2]
    assert "predicted" not in lines[2]
    for line, top1 in ((lines[0], "96.50%"), (lines[1], "97.00% in fp32")):
        assert f"top-1  {top1}" in line.replace("top-1 97", "top-1  97").replace("top-1 96", "top-1  96")
        assert "~0.100 ms predicted" in line
        assert "not verified: timing INVALID" in line


def test_what_to_deploy_stands_last_but_one() -> None:
    comparisons = [{"verdict": "deploy", "sentence": "Deploy a."}, {"verdict": "beats", "sentence": "It beats b."}]
    assert lines_of(make_row(), comparisons=comparisons)[1:] == ["It beats b.", "Deploy a.", "report: report.html"]
    assert not lines_of()
