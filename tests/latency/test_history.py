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
                          ('"table_ms":1.2', '"table_ms":"a"')):
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


def test_networks_that_searches_measured_refine_the_model(table: LatencyTable) -> None:
    """Networks of a search take 20 % longer than the table says: alike ones are predicted so afterwards, and the
    factor of its session is no part of it."""
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    alone = LatencyModel.fit(table, space)
    seen = [space.decode(space.to_params(codes)) for codes in space.sample(np.random.default_rng(5), 12)]
    usual = alone.predict_architectures(seen).mean
    slow = 1.2 ** (np.arange(12) % 2)  # half of them, so that it is not the run's
    history = [Outcome("runs/a", f"2026-11-2{at % 9}", 0.5, network.id, 1, 1, 1, 0.5 * ms * slower, None, network)
               for at, (network, ms, slower) in enumerate(zip(seen, usual, slow, strict=True))]
    refined = LatencyModel.fit(table, space, history=history)
    before, after = (np.abs(np.log(model.predict_architectures(seen).mean / (usual * slow))).mean()
                     for model in (alone, refined))
    assert after < 0.8 * before
    assert refined.learnt == alone.learnt
    unknown = [replace(each, architecture=None) for each in history]
    assert np.allclose(LatencyModel.fit(table, space, history=unknown).predict_architectures(seen).mean, usual)


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
