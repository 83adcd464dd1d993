"""What a table predicted in searches and what was measured, kept beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from table_fixtures import _table

from hwnas.errors import UserError
from hwnas.latency.history import Outcome, append_history, describe_history, history_path, read_history
from hwnas.latency.table import LatencyTable

ONE = Outcome("runs/a", "2026-11-25T10:00:00+00:00", 0.9, "aaaa0000", 1.0, 0.9, 1.1, 1.05)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LatencyTable:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    return _table("xeon_int8", 24, "mnasnet_small", 10)


def test_what_is_added_is_read_and_the_last_verification_of_a_run_counts(table: LatencyTable) -> None:
    assert read_history(table) == []
    other = replace(ONE, id="bbbb0000", measured_ms=2.0)
    append_history(table, [ONE, other])
    again = replace(ONE, measured_ms=0.5, measured_at="2026-11-25T12:00:00+00:00")
    append_history(table, [again])
    assert {each.id: each for each in read_history(table)} == {ONE.id: again, other.id: other}
    assert read_history(replace(table, created="2020-01-01")) == []


def test_torn_and_foreign_lines_are_skipped(table: LatencyTable) -> None:
    append_history(table, [ONE])
    path = history_path(table)
    path.write_text(f'[]\n{{"table": 1}}\n{path.read_text()}{{"table":"{table.created}","run":')
    assert read_history(table) == [ONE]


def test_each_run_is_a_line(table: LatencyTable) -> None:
    later = replace(ONE, run="runs/b", measured_at="2026-11-26T10:00:00+00:00", measured_ms=2.0)
    first, second, every = describe_history([later, ONE])
    assert "runs/a" in first
    assert "1 of 1 networks inside" in first
    assert "0 of 1" in second
    assert "in all: 1 of 2" in every


def test_a_history_that_cannot_be_written_is_one_line(table: LatencyTable) -> None:
    history_path(table).mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write"):
        append_history(table, [ONE])
