"""Predictions of a run that is verified later: moved to the session of then."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from search_fixtures import rows_of

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.errors import StudyError, TableError
from hwnas.front import predictions, verification
from hwnas.front.predictions import Predicted, find_prediction, follow_reference, move_to_now
from hwnas.front.rows import load_front
from hwnas.latency.deployment import Deployment
from hwnas.latency.session import Predict, Session
from hwnas.latency.table import LatencyTable
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host
from hwnas.verify import run as verify

pytestmark = pytest.mark.usefixtures("any_machine")
HERE = Deployment(None, Host.detect().name, True)  # type: ignore[arg-type]
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


def find(run: Path, host_name: str = Host.detect().name, version: str = "", **session: object) -> Predicted | None:
    """What predicted a run, where its session says something else."""
    folder = RunFolder(run)
    environment = folder.read_environment()
    environment = {**environment, "session": {**environment["session"], **session}}
    return find_prediction(environment, load_front(folder), host_name, version or load_runtime("openvino").version(),
                           folder.environment)


@pytest.mark.soak  # short forms below
def test_a_run_verified_later_has_predictions_of_the_session_of_then(older, monkeypatch, capsys):
    before = {row["id"]: float(row["latency_ms_predicted"]) for row in rows_of(older / "front.csv")
              if row["latency_ms_predicted"]}
    now = Session(1.25, 0.01, 7, "", datetime.now(UTC).isoformat(timespec="seconds"))
    monkeypatch.setattr(predictions, "measure_session", lambda deployment, table, *_: replace(
        now, table=predictions.name_of(table)))
    monkeypatch.setattr(verification, "probe_model", lambda *args, **options: None)  # four starts of Python
    given = [f"run={older}", "verification.seconds=1"]
    assert run_command(verify, "verify", "", given, target=False) == 0, capsys.readouterr().err
    after = {row["id"]: float(row["latency_ms_predicted"]) for row in rows_of(older / "front.csv")
             if row["latency_ms_predicted"]}
    assert after == {id: pytest.approx(1.25 * ms, rel=1e-3) for id, ms in before.items()}
    environment = json.loads((older / "environment.json").read_text())
    assert environment["session"]["factor"] == 1.25
    assert "25.0% slower" in (older / "report.html").read_text()


@pytest.mark.parametrize(("change", "moves"), [
    ({}, True), ({"measured_at": datetime.now(UTC).isoformat()}, False), ({"why": "X is not this machine"}, True)])
def test_a_fresh_session_is_not_measured_again(older, monkeypatch, change, moves):
    predicted = find(older, standard_error=0.06, **change)
    now = replace(predicted.session, factor=2.0, standard_error=0.01, why="")
    monkeypatch.setattr(predictions, "measure_session", lambda *_: now)
    rows = load_front(RunFolder(older))
    moved, session = move_to_now(rows, predicted, HERE, Console(quiet=True))
    assert session == (now if moves else predicted.session)
    for before, after in zip(rows, moved, strict=True):
        if before.latency_ms_predicted is None:
            assert after == before
            continue
        assert after.latency_ms_predicted == pytest.approx((2.0 if moves else 1.0) * before.latency_ms_predicted)
        widths = [np.log(row.latency_ms_predicted_high / row.latency_ms_predicted_low) for row in (before, after)]
        assert widths[1] < widths[0] if moves else widths[1] == pytest.approx(widths[0])  # the session is known now


def test_the_panel_stands_beside_the_model_that_predicted(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = find(older, factor=1.5)
    model = SimpleNamespace(predict_architectures=lambda networks: SimpleNamespace(mean=np.full(len(networks), 3.0)))
    asked: list[np.ndarray] = []

    def measure(deployment: Deployment, table: LatencyTable, predict: Predict, *_: object) -> Session:
        asked.append(predict([network.architecture for network in table.networks[:2]]))
        return predicted.session

    monkeypatch.setattr(predictions, "measure_session", measure)
    for each in (replace(predicted, model=model), predicted):  # type: ignore[arg-type]
        move_to_now(load_front(RunFolder(older)), each, HERE, Console(quiet=True))
    assert asked[0].tolist() == [2.0, 2.0]  # in the session of the table
    assert len(set(asked[1])) == 2  # fitted on the table


@pytest.mark.parametrize("fault", ["busy", "disagrees"])
def test_where_the_session_cannot_be_told_predictions_stay_and_say_why(older, monkeypatch, fault):
    predicted = find(older)

    def measure(*_: object) -> Session:
        if fault == "disagrees":
            raise TableError("it does not tell this machine as it is.")
        return replace(predicted.session, factor=1.5, why="busy")

    monkeypatch.setattr(predictions, "measure_session", measure)
    rows = load_front(RunFolder(older))
    moved, session = move_to_now(rows, predicted, HERE, Console(quiet=True))
    assert [row.latency_ms_predicted for row in moved] == [row.latency_ms_predicted for row in rows]
    assert session.factor == predicted.session.factor
    assert "as wide as sessions differ, ± 10%" in str(session)
    for before, after in zip(rows, moved, strict=True):
        assert before.latency_ms_predicted is None or (after.latency_ms_predicted_low < before.latency_ms_predicted_low)
    assert ("busy" if fault == "busy" else "does not tell this machine") in session.why


def test_predictions_follow_the_reference_to_the_moment_of_their_verification(older: Path) -> None:
    rows, predicted = load_front(RunFolder(older)), find(older)
    began = replace(predicted.session, reference_ms=0.1)
    moved, sessions = follow_reference(rows, {"": began}, 0.12, "")
    assert sessions[""].factor == pytest.approx(1.2 * began.factor, rel=0.01)
    for before, after in zip(rows, moved, strict=True):
        if before.latency_ms_predicted is not None:
            pace = sessions[""].factor / began.factor
            assert after.latency_ms_predicted == pytest.approx(pace * before.latency_ms_predicted)
            assert after.latency_ms_predicted_high == pytest.approx(pace * before.latency_ms_predicted_high)
    for same in (follow_reference(rows, {"": began}, None, ""), follow_reference(rows, {"other": began}, 0.12, "mine"),
                 follow_reference(rows, {"mine": began}, 0.12, "mine")):
        assert [row.latency_ms_predicted for row in same[0]] == [row.latency_ms_predicted for row in rows]


def test_predictions_are_moved_only_by_what_made_them(older: Path) -> None:
    assert find(older) is not None
    assert find(older, host_name="elsewhere") is None
    assert find(older, version="another 1") is None
    long = f"openvino-int8-t1-b{'1' * 5000}-24px-c1-k10 of now"
    for other in ({"table": "../../x of y"}, {"table": "x" * 5000}, {"table": long},
                  {"of": "a kill came between two files"}):
        assert find(older, **other) is None
    folder = RunFolder(older)
    environment = {**folder.read_environment(), "session": None}  # a run from before sessions
    assert find_prediction(environment, [], Host.detect().name, "", folder.environment) is None
    for wrong in ({"factor": -1.0}, {"measured_at": "yesterday"}, {"n": "many"}):
        with pytest.raises(StudyError, match=r"environment\.json"):
            find(older, **wrong)


@pytest.mark.soak
def test_a_run_without_what_predicted_it_is_verified_and_says_so(older, capsys):
    environment = json.loads((older / "environment.json").read_text())
    environment["session"]["table"] += "x"
    (older / "environment.json").write_text(json.dumps(environment))
    before = (older / "front.csv").read_text()
    assert run_command(verify, "verify", "", [f"run={older}"], target=False) == 0
    assert "predictions are left as they were" in capsys.readouterr().err
    assert "session" not in json.loads((older / "environment.json").read_text())
    assert [row["latency_ms_predicted"] for row in rows_of(older / "front.csv")] == [
        row["latency_ms_predicted"] for row in csv.DictReader(before.splitlines())]
