"""What a table predicted in searches and what was measured, kept beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from table_fixtures import _table

from hwnas.errors import UserError
from hwnas.latency.history import (
    Outcome,
    append_history,
    describe_history,
    history_path,
    keep_history,
    read_history,
)
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable
from hwnas.space.search_space import SearchSpace

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


def test_a_line_that_holds_no_latency_is_skipped(table: LatencyTable) -> None:
    network = table.networks[0].architecture
    append_history(table, [ONE, replace(ONE, id=network.id, architecture=network, table_ms=1.2)])
    path = history_path(table)
    good = path.read_text()
    for what, instead in (('"factor":0.9', '"factor":0'), ('"measured_ms":1.05', '"measured_ms":NaN'),
                          ('"architecture":{', '"architecture":{"blocks":7,"x":'),
                          ('"channels":1', '"channels":3'), ('"table_ms":1.2', '"table_ms":"a"'),
                          ('"measured_at":"2026-11-25T10:00:00+00:00"', '"measured_at":5')):
        last = good.splitlines()[1]
        assert what in last
        path.write_text(good.splitlines()[0] + "\n" + last.replace(what, instead) + ("}" if "{" in what else "") + "\n")
        assert [each.id for each in read_history(table)] == [ONE.id]
    path.write_text(good)
    assert read_history(table)[1].architecture == network


def test_a_run_keeps_the_history_that_it_began_with(table: LatencyTable, tmp_path: Path) -> None:
    append_history(table, [ONE])
    began = keep_history(table, tmp_path / "history.jsonl")
    append_history(table, [replace(ONE, run="runs/b")])
    assert keep_history(table, tmp_path / "history.jsonl") == began == [ONE]
    assert keep_history(table, tmp_path / "older.jsonl", begun=True) == []


def test_searches_teach_how_networks_differ_and_not_their_session(table: LatencyTable) -> None:
    """Half of a search's networks take 20 % longer than the table says, in a session twice as slow."""
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    alone = LatencyModel.fit(table, space)
    seen = [space.decode(space.to_params(codes)) for codes in space.sample(np.random.default_rng(5), 12)]
    usual = alone.predict_architectures(seen).mean
    slow = 1.2 ** (np.arange(12) % 2)
    history = [Outcome("runs/a", f"2026-11-2{at % 9}", 1.0, network.id, 1, 1, 1, 2 * ms * slower, None, network)
               for at, (network, ms, slower) in enumerate(zip(seen, usual, slow, strict=True))]
    refined = LatencyModel.fit(table, space, history=history)

    def apart(model: LatencyModel) -> float:
        off = np.log(model.predict_architectures(seen).mean / (usual * slow))
        return float(np.abs(off - np.median(off)).mean())

    assert apart(refined) < 0.8 * apart(alone)
    assert refined.learnt == alone.learnt
    assert abs(np.median(refined.predict_architectures(seen).mean / usual) - 1) < 0.15
    assert np.allclose(refined.of_table.predict_architectures(seen).mean, usual)
    for held in ([replace(each, architecture=None) for each in history], history[:3]):
        assert np.allclose(LatencyModel.fit(table, space, history=held).predict_architectures(seen).mean, usual)


def test_a_line_behind_a_torn_one_is_kept(table: LatencyTable) -> None:
    append_history(table, [ONE])
    path = history_path(table)
    path.write_text(path.read_text() + '{"table":')
    append_history(table, [replace(ONE, id="bbbb0000")])
    assert [each.id for each in read_history(table)] == [ONE.id, "bbbb0000"]


def test_each_run_is_a_line(table: LatencyTable) -> None:
    later = replace(ONE, run="runs/b", measured_at="2026-11-26T10:00:00+00:00", measured_ms=2.0)
    first, second, every = describe_history([later, ONE])
    assert "runs/a" in first
    assert "1 of 1 networks inside" in first
    assert "0 of 1" in second
    assert "in all: 1 of 2" in every
    assert "by the table alone" not in every
    assert "mean error 4.8% (14.3% by the table alone)" in describe_history([replace(ONE, table_ms=1.2)])[0]


def test_a_history_that_cannot_be_written_is_one_line(table: LatencyTable) -> None:
    history_path(table).mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write"):
        append_history(table, [ONE])
