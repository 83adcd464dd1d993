"""hwnas.validate: what is written, what an interruption keeps, the session, and bad input in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_fixtures import NEVER_OLD, MadeUpTimer, made_up_ms, sample_networks, table_of

import hwnas.latency.draws
import hwnas.latency.timing
from experiments.common import load_validation
from hwnas.cli.command import run_command
from hwnas.errors import TableError
from hwnas.latency.draws import draw_held_out
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable, table_path
from hwnas.space.architecture import Architecture
from hwnas.system.paths import home
from hwnas.target import Host
from hwnas.validate import FIGURES, USAGE, main, summarise

QUIET_MS = 0.1
HOST = Host.detect().name


def timed(one, seed: int = 1) -> Measurement:
    """Nine turns with 1 % of noise."""
    noise = np.exp(0.01 * np.random.default_rng((int(one.id, 16), seed)).standard_normal(9))
    times_ms = (made_up_ms(one) * noise).tolist()
    return Measurement(tuple(Turn((ms,) * 3, (1002.0 * QUIET_MS,)) for ms in times_ms), QUIET_MS, Protocol())


@cache
def drawn(table_size: int, n: int, seed: int) -> list:
    """A cell for what was drawn beside the same table by the same seed."""
    return []


@pytest.fixture
def user(hwnas_home, tmp_path, monkeypatch) -> Path:
    """A user folder of its own, and the current folder. Equal draws are made once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hwnas.latency.draws, "POPULATION", 40)
    monkeypatch.setattr(hwnas.latency.draws, "GENERATIONS", 1)

    def draw_once(space, predict, n, seed, known_ids):
        cell = drawn(len(known_ids), n, seed)
        cell += [] if cell else draw_held_out(space, predict, n, seed, known_ids)
        return cell.copy()

    monkeypatch.setattr("hwnas.validate.draw_held_out", draw_once)
    return tmp_path


@pytest.fixture(scope="module")
def fitted(space) -> LatencyTable:
    """A table of this host for the null runtime, with what was learnt from it."""
    table = table_of(space, sample_networks(space, 40, 0))
    networks = [replace(each, measurement=timed(each.architecture, seed=0)) for each in table.networks]
    table = replace(table, networks=networks, created=NEVER_OLD)
    model = LatencyModel.fit(table, space)
    return replace(table, error={space.name: model.error}, learnt={space.name: model.learnt.to_dict()})


@pytest.fixture
def table(fitted, user) -> LatencyTable:
    """The table, saved in this test's own folder."""
    return saved(replace(fitted))


def saved(table: LatencyTable) -> LatencyTable:
    table.save(table_path(home() / "latency_tables", table.host_name, table.key))
    return table


class Timer(MadeUpTimer):
    """On a machine that is as it was."""

    def measurement(self, network: Architecture, index: int) -> Measurement:
        return timed(network)


class Otherwise(Timer):
    """A machine on which the network `index` takes `factor(one, index)` times as long beside the same reference."""

    def __init__(self, factor: Callable[[Architecture, int], float]) -> None:
        super().__init__()
        self.factor = factor

    def measurement(self, network: Architecture, index: int) -> Measurement:
        measured, factor = timed(network), self.factor(network, index)
        return replace(measured, turns=tuple(Turn(tuple(factor * ms for ms in turn.samples_ms), turn.probe_us)
                                             for turn in measured.turns))


@pytest.fixture
def timer(monkeypatch) -> Timer:
    return use(Timer(), monkeypatch)


def use(timer: Timer, monkeypatch) -> Timer:
    monkeypatch.setattr("hwnas.validate.time_networks", timer)
    return timer


def validate(*overrides: str) -> int:
    return run_command(main, "validate", USAGE, ["-q", "+target=null_fp32", "n=12", *overrides])


def read(path: str | Path) -> dict:
    return json.loads(Path(path).read_text())


def test_a_report_says_it_all_and_reads_back(table, timer, user, capsys):
    assert validate("out=v.json", "seed=3") == 0
    report = read("v.json")
    assert (report["format"], report["version"]) == ("hwnas-validation", 1)
    assert {"n", *(name for name, _, _ in FIGURES)} <= set(report)
    assert (report["n"], report["n_invalid"], report["seed"], report["target"]) == (12, 0, 3, "null_fp32")
    assert report["host"]["name"] == HOST
    assert report["table"]["key"] == str(table.key)
    assert report["reference"]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert (report["session"]["factor"], report["session"]["log_std"]) == (1, 0)
    assert [report["groups"][name]["n"] for name in ("random", "front")] == [6, 6]
    ids = [one["id"] for one in report["networks"]]
    assert sorted(ids) == sorted(timer.asked)
    assert not set(ids) & {one.architecture.id for one in table.networks}
    for one, stored in zip(report["networks"], load_validation(Path("v.json")).networks, strict=True):
        assert stored.architecture.id == one["id"]
        assert stored.measurement.latency_ms == pytest.approx(one["latency_ms"], rel=1e-3)
        assert one["low_ms"] < one["predicted_ms"] < one["high_ms"]
    assert not list(user.glob("*.partial.json"))
    said = capsys.readouterr().err
    for words in ("within 5 %", "Spearman", "of this session", "v.json"):
        assert words in said


def test_invalid_and_failed_networks_are_counted_and_in_no_figure(table, user, monkeypatch, capsys):
    use(Timer(invalid=2, missing=1), monkeypatch)
    assert validate() == 0
    report = read("runs/validation-null_fp32-mnasnet_small.json")  # where no out is named
    assert (report["n"], report["n_invalid"], report["n_failed"]) == (9, 2, 1)
    invalid = [one for one in report["networks"] if not one["valid"]]
    assert all(one["latency_ms"] is None and "no turn" in one["reason"] for one in invalid)
    said = capsys.readouterr().err
    assert "2 networks INVALID" in said
    assert "1 networks could not be exported" in said


def test_a_restless_machine_gives_no_report(table, user, monkeypatch, capsys):
    use(Timer(invalid=12), monkeypatch)
    assert validate("out=v.json") == 1
    assert "none of 12 networks has a valid time" in capsys.readouterr().err
    assert not Path("v.json").exists()


def test_an_interrupted_validation_goes_on_beside_the_same_table(table, user, monkeypatch, capsys):
    first = use(Timer(breaks_after=5, invalid=1), monkeypatch)
    assert validate("out=v.json") == 130
    partial = Path("v.partial.json")
    kept = partial.read_bytes()
    second = use(Timer(), monkeypatch)
    assert validate("out=v.json") == 0
    assert "4 of 12 networks were measured before" in capsys.readouterr().err
    assert set(second.asked) & set(first.asked) == {first.asked[0]}  # the INVALID one is tried again
    assert len(second.asked) == 8
    assert read("v.json")["n"] == 12
    assert not partial.exists()
    Path("x.partial.json").write_bytes(kept)
    saved(replace(table, created="2100-02-02T00:00:00+00:00"))
    third = use(Timer(), monkeypatch)
    assert validate("out=x.json") == 0
    assert len(third.asked) == 12


def test_a_report_of_something_else_is_refused(table, timer, user):
    assert validate("out=v.json") == 0
    report = read("v.json")
    for change, named in (({"format": "x"}, "not a validation"), ({"networks": [{}]}, r"networks\[0\]")):
        Path("v.json").write_text(json.dumps({**report, **change}))
        with pytest.raises(TableError, match=named):
            load_validation(Path("v.json"))


@pytest.mark.parametrize(("override", "named"), [
    ("out=v.csv", ["out", ".json"]),
    ("space=mnasnett", ["mnasnett"])])
def test_bad_input_is_one_line(table, timer, user, capsys, override, named):
    assert validate(override) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert all(word in said for word in named)
    assert not timer.asked


def test_predictions_are_moved_to_the_session_that_a_panel_of_the_table_tells(table, user, monkeypatch, capsys):
    """The reference landed well: all others look 8 % slower than it says."""
    saved(replace(table, created="2026-01-01"))
    slower = Otherwise(lambda one, index: 1.08)
    use(slower, monkeypatch)
    monkeypatch.setattr("hwnas.latency.session.time_networks", slower)
    assert validate("out=v.json") == 0
    report = read("v.json")
    assert report["session"]["factor"] == pytest.approx(1.08, abs=0.01)
    assert report["mean_error"] < 0.04
    assert "slower than the latency table's" in capsys.readouterr().err


def rows_of(error) -> pd.DataFrame:
    """Networks of 0.1, 0.2, … ms, predicted with the given signed errors and intervals of -7 to +8 %."""
    measured_ms = 0.1 * np.arange(1, len(error) + 1)
    predicted_ms = measured_ms * (1 + np.asarray(error, float))
    return pd.DataFrame({"predicted_ms": predicted_ms, "low_ms": 0.93 * predicted_ms, "high_ms": 1.08 * predicted_ms,
                         "measured_ms": measured_ms})


def test_the_third_that_is_covered_least_is_told():
    found = summarise(rows_of(np.repeat([0.0, 0.0, 0.2], 10)))
    assert (found["coverage"], found["least_third_coverage"]) == (pytest.approx(2 / 3, abs=1e-5), 0)


@given(st.floats(-0.3, 0.3), st.integers(3, 30))
def test_a_shift_changes_the_errors_but_not_the_order(shift, n):
    found = summarise(rows_of(np.full(n, shift)))
    assert found["mean_error"] == pytest.approx(abs(shift), abs=1e-5)
    assert found["bias"] == pytest.approx(shift, abs=1e-5)
    assert found["spearman"] == 1
    if not 0.0499 < abs(shift) < 0.0501 and not 0.0999 < abs(shift) < 0.1001:
        assert found["within_5"] == float(abs(shift) <= 0.05)
        assert found["within_10"] == float(abs(shift) <= 0.10)


@settings(max_examples=50)
@given(st.lists(st.floats(-0.5, 0.5), max_size=40))
def test_figures_are_consistent(error):
    rows = rows_of(error)
    found = summarise(rows)
    assert found["n"] == len(error)
    if not error:
        assert found["within_5"] is found["spearman"] is None
        return
    assert 0 <= found["within_5"] <= found["within_10"] <= 1
    inside = [low <= ms <= high for low, ms, high in zip(rows.low_ms, rows.measured_ms, rows.high_ms, strict=True)]
    assert found["coverage"] == pytest.approx(np.mean(inside), abs=1e-6)
