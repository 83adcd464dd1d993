"""Tables: what is stored is what was measured, and a file that is torn, foreign or edited is refused by place."""

from __future__ import annotations

import json

import pytest

from hwnas.errors import TableError
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.table import TABLE, LatencyTable, TableKey, TimedNetwork, find_table, table_path
from hwnas.space.architecture import Architecture
from hwnas.system.paths import home
from hwnas.target import Target

TARGET = Target("xeon_int8", "openvino", "int8")
KEY = TableKey.of(TARGET, (32,), 1, 10)


def network(width: int) -> Architecture:
    return Architecture((("ds_r1_k3_s1_c16",), ("ir_r2_k3_s2_e3_c24",)), width, 1, 64, "relu", 32, 1, 10)


def timed(width: int) -> TimedNetwork:
    one = network(width)
    turns = tuple(Turn((108.1 / 1e3, (100 + width) / 1e3), (150.0,)) for _ in range(8))
    return TimedNetwork("mnasnet_small", one, Measurement(turns, 0.15, Protocol()))


@pytest.fixture
def table() -> LatencyTable:
    return LatencyTable(KEY, {"name": "amd-epyc-f26m2s1-2c", "cpu": "AMD EPYC"}, "openvino 2026.4.1",
                        "2026-11-20T10:00:00+00:00", Protocol(), network(32), 0.15, [timed(8), timed(16)],
                        {"mnasnet_small": {"n": 2, "mean_error": 0.03}})


def test_what_is_saved_is_what_is_loaded(table, tmp_path):
    path = tmp_path / "t.json"
    table.save(path)
    again = LatencyTable.load(path)
    assert again == table
    turns = tuple(Turn((0.01004, 0.01007), (150.0,)) for _ in range(8))
    again = Measurement.from_dict(Measurement(turns, 0.15, Protocol()).to_dict(), Protocol(), "here")
    assert again.turns[0].samples_ms == pytest.approx((0.01004, 0.01007), rel=1e-9)


def test_the_key_names_everything_that_times_depend_on():
    assert str(KEY) == "openvino-int8-t1-b1-32px-c1-k10"
    every = Target("x", "onnxruntime", "fp32", threads=0, batch=4)
    assert str(TableKey.of(every, (48, 32), 3, 5)) == "onnxruntime-fp32-tall-b4-32-48px-c3-k5"
    for key in (KEY, TableKey.of(every, (32, 48), 3, 5)):
        assert TableKey.read(str(key)) == key
    assert TableKey.read("notes") is None
    # two targets of one protocol share a table
    assert TableKey.of(Target("epyc_int8", "openvino", "int8", vendor="amd"), (32,), 1, 10) == KEY


def test_the_users_table_comes_before_the_shipped_one(table, tmp_path, monkeypatch):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    assert find_table("nowhere", KEY) is None
    table.save(table_path(home() / "latency_tables", table.host_name, KEY))
    found = find_table(table.host_name, KEY)
    assert found is not None
    assert str(found.path).startswith(str(tmp_path))


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_torn_file_is_refused_by_name(table, tmp_path, cut):
    path = tmp_path / "t.json"
    table.save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TableError, match=str(path)):
        LatencyTable.load(path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d.update(version=99), "version 99"),
    (lambda d: d["networks"].append(d["networks"][0]), "is in it twice"),
    (lambda d: d["networks"][1]["samples_us"][0].__setitem__(0, -5), r"networks\[1\]"),
    (lambda d: d["networks"][0]["architecture"].update(stages=[["xx_c3"]]), "kind must be"),
    (lambda d: d["protocol"].update(surprise=1), "surprise"), (lambda d: d.update(created="lately"), "isoformat"),
])
def test_an_edited_file_is_refused_with_what_is_wrong(table, tmp_path, change, message):
    path = tmp_path / "t.json"
    table.save(path)
    data = json.loads(path.read_text())
    assert data["format"] == TABLE.format
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TableError, match=message):
        LatencyTable.load(path)


@pytest.mark.parametrize(("key", "host", "version", "named"), [
    (TableKey.of(TARGET, (64,), 1, 10), "amd-epyc-f26m2s1-2c", None, "64px"),
    (KEY, "intel-xeon-f6m85s7-8c", None, "intel-xeon"),
    (KEY, "amd-epyc-f26m2s1-2c", "openvino 2027.1", "2027.1")])
def test_a_table_of_another_key_host_or_version_is_refused(table, key, host, version, named):
    table.check(KEY, "amd-epyc-f26m2s1-2c", "openvino 2026.4.1")
    with pytest.raises(TableError, match=named):
        table.check(key, host, version)
