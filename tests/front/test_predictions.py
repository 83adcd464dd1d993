"""Predictions of a run beside what its verifications measure: they follow the reference network."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from search_fixtures import rows_of

from hwnas.cli.command import run_command
from hwnas.errors import StudyError
from hwnas.front import verification
from hwnas.front.predictions import can_follow, describe_session, follow_reference
from hwnas.front.rows import FrontRow, load_front
from hwnas.latency.session import Session
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host
from hwnas.verify import run as verify

pytestmark = pytest.mark.usefixtures("any_machine")
BEGAN = Session(1.1, 0.01, 7, "a table", reference_ms=0.1)


@pytest.fixture
def rows(finished: Path) -> list[FrontRow]:
    """Rows of a finished run; some of them have no prediction."""
    held = load_front(RunFolder(finished))
    assert {row.latency_ms_predicted is None for row in held} == {True, False}
    return held


def predicted(rows: list[FrontRow]) -> list[float]:
    """Predicted latencies with both ends of their intervals, ms."""
    return [ms for row in rows if row.latency_ms_predicted is not None for ms in (
        row.latency_ms_predicted, row.latency_ms_predicted_low or 0.0, row.latency_ms_predicted_high or 0.0)]


def test_predictions_follow_the_reference_to_the_moment_of_their_verification(rows):
    session = describe_session({"": BEGAN}, rows)
    moved, later = follow_reference(rows, session, 0.12, "")
    assert predicted(moved) == pytest.approx([1.2 * ms for ms in predicted(rows)], rel=0.01)
    again, same = follow_reference(moved, later, 0.12, "")  # a second verification moves from the search's session too
    assert (predicted(again), same["of"]) == (pytest.approx(predicted(moved)), later["of"])
    back, _ = follow_reference(again, same, 0.1, "")
    assert predicted(back) == pytest.approx(predicted(rows))
    unknown = describe_session({"": replace(BEGAN, reference_ms=0.0)}, rows)
    old = {"told": "of an earlier version", "of_deployments": {}}
    for before, now_ms, name in ((session, None, ""), (session, 0.12, "other"), (unknown, 0.12, ""), (old, 0.12, "")):
        assert predicted(follow_reference(rows, before, now_ms, name)[0]) == predicted(rows)


def test_the_sessions_of_several_deployments_are_told_and_the_first_ran_the_reference(rows):
    described = describe_session({"a": BEGAN, "b": replace(BEGAN, factor=1.2, reference_ms=0.3)}, rows)
    assert described["reference_ms"] == 0.1
    assert "a: this session is 10.0% slower" in described["told"]
    assert "b: this session is 20.0% slower" in described["told"]


def test_only_predictions_of_the_kept_session_are_moved(rows):
    environment = {"session": describe_session({"": BEGAN}, rows), "searched_for": "h", "runtime": "openvino 1, x 2"}
    assert can_follow(rows, environment, "h", "openvino 1")
    assert can_follow(rows, {**environment, "session": {**asdict(BEGAN), **environment["session"]}}, "h", "x 2")
    assert not can_follow(rows, environment, "elsewhere", "openvino 1")
    assert not can_follow(rows, environment, "h", "openvino 2")
    for wrong in ({"of": "a kill came between two files"}, {"drift": 0.0}):
        assert not can_follow(rows, {**environment, "session": {**environment["session"], **wrong}}, "h", "openvino 1")


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A finished run whose reference took a quarter less time when it was searched."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    environment = json.loads((out / "environment.json").read_text())
    environment["session"] |= {"reference_ms": 0.8 * environment["session"]["reference_ms"]}
    (out / "environment.json").write_text(json.dumps(environment))
    return out


def test_a_session_that_cannot_be_is_refused(copied):
    text = (copied / "environment.json").read_text()
    for wrong in ('"reference_ms": "long"', '"reference_ms": 1e999'):
        held = json.loads(text)["session"]["reference_ms"]
        (copied / "environment.json").write_text(text.replace(f'"reference_ms": {held}', wrong))
        with pytest.raises(StudyError, match=r"environment\.json"):
            RunFolder(copied).read_environment()


@pytest.mark.soak  # short forms above
@pytest.mark.parametrize("same", [True, False])
def test_a_run_verified_later_has_predictions_of_the_session_of_then(same, copied, monkeypatch, capsys):
    before = {row["id"]: float(row["latency_ms_predicted"]) for row in rows_of(copied / "front.csv")
              if row["latency_ms_predicted"]}
    if not same:
        environment = json.loads((copied / "environment.json").read_text())
        environment["session"]["of"] = "a kill came between two files"
        (copied / "environment.json").write_text(json.dumps(environment))
    monkeypatch.setattr(verification, "probe_model", lambda *args, **options: None)  # four starts of Python
    given = [f"run={copied}", "verification.seconds=1", f"host={Host.detect().name}"]
    assert run_command(verify, "verify", "", given, target=False) == 0
    said = capsys.readouterr().err
    with (copied / "front.csv").open() as file:
        after = {row["id"]: float(row["latency_ms_predicted"]) for row in csv.DictReader(file)
                 if row["latency_ms_predicted"]}
    assert ("predictions are left as they were" in said) is not same
    session = json.loads((copied / "environment.json").read_text())["session"]
    assert load_runtime("openvino").version() in json.loads((copied / "environment.json").read_text())["runtime"]
    if same:
        assert after == {id: pytest.approx(session["drift"] * ms, rel=1e-3) for id, ms in before.items()}
        assert "since then, by the reference network" in (copied / "report.html").read_text()
    else:
        assert (after, session["reference_ms"]) == (before, 0.0)
