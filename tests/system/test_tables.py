"""Tables as text: the bytes of `trials.csv` and `front.csv` as they have been since the first version, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from front_fixtures import make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from hwnas.errors import StudyError
from hwnas.front.rows import Cost, front_csv
from hwnas.system.run_folder import OF_EVERY_TRIAL, TRIALS, RunFolder
from hwnas.system.tables import read_frame, read_table, shown_csv, table_csv

NAN = float("nan")
ROWS = [
    {"number": 0, "state": "COMPLETE", "outcome": "evaluated", "id": "12345678", "architecture": "ds_r1 | relu@32",
     "top1_proxy": 0.8123456789, "top1_std": 1e-5, "latency_ms_predicted": 0.25, "latency_ms_predicted_low": 0.2,
     "latency_ms_predicted_high": 1 / 3, "reward": -1.5, "seconds": 12345678.9, "steps": 3,
     "extrapolated": None, "feasible": True, "duplicate_of": None, "reason": None, "seed": 2**63 - 1,
     "started": "2026-11-22T10:00:00", "finished": "2026-11-22T10:01:00"},
    {"number": 1, "state": "FAIL", "outcome": "failed", "id": "1234e567", "architecture": None, "top1_proxy": None,
     "top1_std": None, "latency_ms_predicted": 100.0, "latency_ms_predicted_low": None,
     "latency_ms_predicted_high": None, "reward": NAN, "seconds": None, "steps": None,
     "extrapolated": None, "feasible": False, "duplicate_of": 0, "reason": 'loss, "nan"\nat epoch 1 é', "seed": 7,
     "started": None, "finished": None, "curve": [0.1, NAN], "size_mb_predicted": 1.25}]
TRIALS_CSV = """\
number,state,outcome,id,architecture,top1_proxy,top1_std,latency_ms_predicted,latency_ms_predicted_low,\
latency_ms_predicted_high,reward,seconds,steps,extrapolated,feasible,duplicate_of,reason,seed,started,\
finished,curve,size_mb_predicted
0,COMPLETE,evaluated,12345678,ds_r1 | relu@32,0.812346,1e-05,0.25,0.2,0.333333,-1.5,1.23457e+07,3,,true,,,\
9223372036854775807,2026-11-22T10:00:00,2026-11-22T10:01:00,,
1,FAIL,failed,1234e567,,,,100,,,nan,,,,false,0,"loss, ""nan""
at epoch 1 é",7,,,"[0.1, null]",1.25
"""
FRONT_CSV = """\
id,name,architecture,is_baseline,label,is_control,control_of,verified,top1_proxy,top1_estimated,\
top1_estimated_low,top1_estimated_high,top1_test_fp32,top1_test,top1_test_low,top1_test_high,n_test,\
latency_ms_predicted,latency_ms_predicted_low,latency_ms_predicted_high,latency_ms,latency_ms_low,latency_ms_high,\
latency_ms_p50,latency_ms_p90,latency_ms_p99,quiet_share,slowdown,pause_factor,steps,params,macs,reward,\
reward_winner,on_front,meets_cap,dominated_by,target,host,threads,precision,int8_share,fallback_share,\
reason,objectives,size_mb_predicted,size_mb
12345678,12345678,stem16s1 ir_r1_k3_s1_e3_c16 head0 relu@32,false,,false,,true,0.91,,,,0.97,0.965,0.94,0.98,360,0.1,\
0.09,0.115,1e-07,0.104,0.107,,,,,,,,12345,678901,0.93,false,true,,,xeon_int8,intel-xeon-f6m143s8-2c,,int8,0.98,0.02,,\
latency_ms size_mb,1.25,
3fa91c20,3fa91c20,stem16s1 ir_r1_k3_s1_e3_c16 head0 relu@32,false,,false,,true,0.91,,,,0.97,0.965,0.94,0.98,360,0.1,\
0.09,0.115,0.333333,0.104,0.107,,,,,,,,12345,678901,nan,false,true,true,,xeon_int8,intel-xeon-f6m143s8-2c,,int8,0.98,0.02,\
"parity, ""off"" by 3
lines é",,,
b,resnet10t,stem16s1 ir_r1_k3_s1_e3_c16 head0 relu@32,true,,false,,false,0.91,,,,0.97,,0.94,0.98,,0.1,0.09,0.115,,,\
,,,,,,,,\
5000000000,678901,,false,true,,,xeon_int8,intel-xeon-f6m143s8-2c,,int8,,0.02,,,,
"""


def test_both_tables_have_the_bytes_that_they_had():
    assert table_csv(ROWS) == TRIALS_CSV
    rows = [make_row(reason='parity, "off" by 3\nlines é', meets_cap=True, latency_ms=1 / 3, reward=NAN),
            make_row("b", verified=False, latency_ms=None, latency_ms_low=None, latency_ms_high=None, top1_test=None,
                     n_test=None, int8_share=None, reward=None, is_baseline=True, name="resnet10t", params=5 * 10**9),
            make_row("12345678", latency_ms=1e-7, objectives=("latency_ms", "size_mb"),
                     costs=(Cost("size_mb", 1.25, None),))]
    assert front_csv(rows) == FRONT_CSV


def test_each_column_comes_back_with_its_type_as_rows_and_as_a_frame():
    first, second = read_table(TRIALS_CSV, TRIALS)
    assert first == {**ROWS[0], "top1_proxy": 0.812346, "latency_ms_predicted_high": 0.333333, "seconds": 12345700.0,
                     "curve": None, "size_mb_predicted": None}
    assert {name: type(value) for name, value in first.items() if value is not None} == {
        name: type(value) for name, value in ROWS[0].items() if value is not None}
    assert (second["curve"], second["reason"], second["size_mb_predicted"]) == ("[0.1, null]", ROWS[1]["reason"], 1.25)
    frame = read_frame(TRIALS_CSV, TRIALS)
    assert frame.dtypes[["number", "id", "reward", "feasible"]].astype(str).tolist() == [
        "Int64", "string", "Float64", "boolean"]
    assert frame["seed"][0] == 2**63 - 1
    assert frame["id"].tolist() == ["12345678", "1234e567"]
    assert frame["steps"].isna().tolist() == [False, True]
    assert read_table("", {}) == read_table(table_csv([]), {}) == read_table(table_csv([], OF_EVERY_TRIAL), {}) == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.fixed_dictionaries({}, optional={
    "number": st.integers(0, 2**63 - 1), "id": st.text('a01e,"; \né', min_size=1),
    "stopped": st.none() | st.booleans()}), max_size=5))
def test_what_is_written_is_read_back(rows: list[dict]) -> None:
    columns = {name: kind | None for name, kind in (("number", int), ("id", str), ("stopped", bool))}
    wanted = [{name: row.get(name) for name in columns} for row in rows]
    assert read_table(table_csv(rows, columns), columns) == wanted


def test_a_torn_cell_is_told_by_place(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.trials_csv.write_text(TRIALS_CSV.replace(",7,", ",seven,"))
    with pytest.raises(StudyError, match=r"trials\.csv, line 3: seed cannot be 'seven'\."):
        run.read_trials()


def test_blank_lines_count_in_the_place_of_a_fault() -> None:
    with pytest.raises(ValueError, match="line 6: n cannot be 'x'"):
        read_table('\nn,text\n\n1,"a\nb"\nx,c\n', {"n": int})
    with pytest.raises(ValueError, match="line 4: 1 cells"):
        read_table("n,text\n\n1,a\n2\n", {"n": int})


@pytest.mark.parametrize(("name", "cell"), [
    ("=1+1", "'=1+1"), ("+1", "+1"), ("-1.5", "-1.5"), ("-1+1", "'-1+1"), ("-x", "'-x"),
    ("@sum", "'@sum"), ("\t=1", "\\t=1"), ("a\x1b[0m", "a\\x1b[0m"),
    ("Screenshot 3.45\u202fPM", "Screenshot 3.45\u202fPM"), ("Möwe", "Möwe"), ("\udce9", "\\udce9")])
def test_names_run_nothing_in_a_spreadsheet_or_a_terminal(name: str, cell: str) -> None:
    assert shown_csv([{"name": name, "value": -1.5}]) == f"name,value\n{cell},-1.5\n"
