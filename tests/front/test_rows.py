"""Rows of front.csv: round trip, the front itself, intervals."""

from __future__ import annotations

import json

import pytest
from front_fixtures import make_row
from hypothesis import given
from hypothesis import strategies as st

from hwnas.errors import StudyError
from hwnas.front.rows import front_csv, load_front, mark_front, save_front, sort_rows
from hwnas.system.run_folder import RunFolder


def test_both_files_keep_every_value_and_its_type(tmp_path):
    rows = [make_row(reason='parity, "off" by 3\nlines', meets_cap=True),
            make_row("b", verified=False, latency_ms=None, latency_ms_low=None, latency_ms_high=None, top1_test=None,
                     n_test=None, int8_share=None, reward=None)]
    path = tmp_path / "front.csv"
    path.write_text(front_csv(rows))
    assert sorted(load_front(RunFolder(tmp_path)), key=lambda row: row.id) == sorted(rows, key=lambda row: row.id)
    run = RunFolder(tmp_path)
    save_front(run, [make_row(meets_cap=None, verified=True)])
    data = json.loads(run.front_json.read_text())
    assert data["format"] == "hwnas-front/1"
    assert data["rows"][0]["meets_cap"] is None
    assert data["rows"][0]["verified"] is True
    assert data["rows"][0]["params"] == 12345


@pytest.mark.parametrize(("p99", "cap_ms", "cap_p99_ms", "meets"), [
    (0.3, None, 0.25, False), (0.3, 1.0, 0.25, False), (0.3, 1.0, 0.4, True), (0.3, None, None, None),
    (None, None, 0.25, None), (0.3, 0.01, 0.4, False), (None, 1.0, 0.25, None), (None, 0.01, 0.25, False)])
def test_a_cap_of_the_tail_is_judged_as_measured(p99, cap_ms, cap_p99_ms, meets) -> None:
    (row,) = mark_front([make_row(latency_ms=0.2, latency_ms_p99=p99)], cap_ms, cap_p99_ms)
    assert row.meets_cap is meets
    assert row.on_front is (meets is not False)


@pytest.mark.parametrize(("old", "new", "told"), [
    ("true", "maybe", "line 2: verified cannot be 'maybe'"), ("12345", "many", "line 2: params cannot be 'many'"),
    ("top1_proxy", "proxy", "no column 'top1_proxy'"),
])
def test_torn_csv_is_told_by_place(tmp_path, old: str, new: str, told: str) -> None:
    path = tmp_path / "front.csv"
    path.write_text(front_csv([make_row()]).replace(old, new, 1))
    with pytest.raises(StudyError, match=told.replace("?", r"\?")):
        load_front(RunFolder(tmp_path))


def test_the_front_is_what_none_dominates_and_of_predictions_while_nothing_is_verified():
    rows = [make_row("fast", latency_ms=0.1, top1_test=0.90), make_row("good", latency_ms=0.3, top1_test=0.98),
            make_row("bad", latency_ms=0.2, top1_test=0.89),
            make_row("base", is_baseline=True, latency_ms=0.25, top1_test=0.99),
            make_row("random", is_control=True, control_of="fast", latency_ms=0.05, top1_test=0.995)]
    marked = {row.id: row for row in mark_front(rows)}
    assert {row.id for row in marked.values() if row.on_front} == {"fast", "base"}
    assert marked["bad"].dominated_by == marked["good"].dominated_by == "random"
    known = mark_front([*rows, make_row("known", is_control=True, latency_ms=0.04, top1_test=0.7)])
    assert {row.id for row in known if row.on_front} == {"known", "fast", "base"}, "one can deploy a known network"
    over = {row.id: row for row in mark_front(rows, cap_ms=0.2)}
    assert {row.id for row in over.values() if row.on_front} == {"fast"}
    assert [row.on_front for row in mark_front([make_row("a"), make_row("b")])] == [True, True]
    waiting = {"verified": False, "latency_ms": None, "top1_test": None}
    rows = [make_row("a", latency_ms_predicted=0.1, top1_test_fp32=0.9, **waiting),
            make_row("b", latency_ms_predicted=0.2, top1_test_fp32=0.8, **waiting)]
    assert [row.on_front for row in mark_front(rows)] == [True, False]
    measured = mark_front([*rows, make_row("c", latency_ms=0.5, top1_test=0.5)])
    assert {row.id for row in measured if row.on_front} == {"c"}


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1)), min_size=1, max_size=12))
def test_every_row_off_the_front_is_dominated_by_one_on_it(points: list[tuple[float, float]]) -> None:
    rows = mark_front([make_row(str(i), latency_ms=ms, top1_test=top1) for i, (ms, top1) in enumerate(points)])
    front = [row for row in rows if row.on_front]
    assert front
    assert all(not row.dominated_by for row in front)
    for row in rows:
        if not row.on_front:
            assert any(other.latency_ms <= row.latency_ms and other.top1_test >= row.top1_test for other in front)


def test_rows_are_sorted_finalists_first_from_fast_to_slow() -> None:
    rows = [make_row("base", is_baseline=True, latency_ms=0.01), make_row("slow", latency_ms=1.0),
            make_row("unknown", verified=False, latency_ms_predicted=None), make_row("quick", latency_ms=0.1)]
    assert [row.id for row in sort_rows(rows)] == ["quick", "slow", "unknown", "base"]
