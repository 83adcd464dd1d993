"""Predictions of a run that is verified later: moved to the session of then, and kept in the history of their table."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from search_fixtures import rows_of

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.errors import StudyError
from hwnas.front import predictions
from hwnas.front.predictions import find_prediction, move_to_now
from hwnas.front.rows import load_front
from hwnas.latency.deployment import Deployment
from hwnas.latency.history import read_history
from hwnas.latency.session import Session
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host
from hwnas.verify import run as verify

pytestmark = pytest.mark.usefixtures("any_machine")
LONG_AGO = (datetime.now(UTC) - timedelta(hours=5)).isoformat(timespec="seconds")


@pytest.fixture
def older(finished: Path, tmp_path: Path) -> Path:
    """The finished run, as if it had been made five hours ago."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    environment = json.loads((out / "environment.json").read_text())
    environment["session"]["measured_at"] = LONG_AGO
    (out / "environment.json").write_text(json.dumps(environment))
    return out


def test_a_run_verified_later_has_predictions_of_the_session_of_then(older: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    before = {row["id"]: float(row["latency_ms_predicted"]) for row in rows_of(older / "front.csv")
              if row["latency_ms_predicted"]}
    now = Session(1.25, 0.01, 7, "", datetime.now(UTC).isoformat(timespec="seconds"))
    monkeypatch.setattr(predictions, "measure_session", lambda deployment, table, space_name, console: replace(
        now, table=predictions.name_of(table)))
    assert run_command(verify, "verify", "", [f"run={older}"], target=False) == 0, capsys.readouterr().err
    after = {row["id"]: float(row["latency_ms_predicted"]) for row in rows_of(older / "front.csv")
             if row["latency_ms_predicted"]}
    assert after == {id: pytest.approx(1.25 * ms, rel=1e-3) for id, ms in before.items()}
    environment = json.loads((older / "environment.json").read_text())
    assert environment["session"]["factor"] == 1.25
    assert "25.0% slower" in (older / "report.html").read_text()
    found = find_prediction(environment, Host.detect().name, older / "environment.json")
    assert found is not None
    kept = [each for each in read_history(found[1]) if each.run == str(older)]
    assert {each.id: each.predicted_ms for each in kept} == {id: pytest.approx(ms) for id, ms in after.items()}
    assert {each.factor for each in kept} == {1.25}


@pytest.mark.parametrize(("change", "moves"), [
    ({}, True), ({"measured_at": datetime.now(UTC).isoformat()}, False), ({"why": "the machine was busy"}, True)])
def test_a_fresh_session_is_not_measured_again(older: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str],
                                               moves: bool) -> None:
    environment = RunFolder(older).read_environment()
    began, table, space = find_prediction(environment, Host.detect().name, older) or pytest.fail("it says nothing")
    began = replace(began, **change)
    now = replace(began, factor=2.0, why="")
    monkeypatch.setattr(predictions, "measure_session", lambda *_: now)
    deployment = Deployment(None, Host.detect().name, True)  # type: ignore[arg-type]
    rows = load_front(RunFolder(older))
    moved, session = move_to_now(rows, began, table, space, deployment, Console(quiet=True))
    assert session == (now if moves else began)
    assert [row.latency_ms_predicted for row in moved] == [
        None if row.latency_ms_predicted is None else pytest.approx((2.0 if moves else 1.0) * row.latency_ms_predicted)
        for row in rows]
    monkeypatch.setattr(predictions, "measure_session", lambda *_: replace(now, why="busy"))
    assert move_to_now(rows, began, table, space, deployment, Console(quiet=True)) == (rows, began)


def test_a_run_whose_table_or_host_is_another_keeps_its_predictions(older: Path) -> None:
    environment, path = RunFolder(older).read_environment(), older / "environment.json"
    assert find_prediction(environment, "elsewhere", path) is None
    assert find_prediction({**environment, "session": None}, Host.detect().name, path) is None
    other = {**environment["session"], "table": environment["session"]["table"] + "x"}
    assert find_prediction({**environment, "session": other}, Host.detect().name, path) is None
    for wrong in ({"factor": -1.0}, {"measured_at": "yesterday"}, {"n": "many"}):
        torn = {**environment, "session": {**environment["session"], **wrong}}
        with pytest.raises(StudyError, match=r"environment\.json"):
            find_prediction(torn, Host.detect().name, path)
