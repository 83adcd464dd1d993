"""What a search writes down, and refuses, before its first trial."""

from __future__ import annotations

from types import SimpleNamespace

import optuna
import pytest

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.errors import StudyError
from hwnas.search import road
from hwnas.search.road import make_plan
from hwnas.system.paths import shipped
from hwnas.system.run_folder import RunFolder


class Costly:
    """An estimator that has worked before the first score."""

    fingerprint = "costly"
    setup_seconds = 0.0

    def prepare(self, console: Console) -> None:
        self.setup_seconds = 12.5


@pytest.mark.parametrize(("estimator", "seconds"), [(Costly(), 12.5), (SimpleNamespace(fingerprint="proxy"), 0.0)])
def test_the_study_holds_what_came_before_the_trials(tmp_path, monkeypatch, estimator, seconds):
    study = optuna.create_study()
    options = SimpleNamespace(calibration=None, storage="sqlite:///none/study.db")
    plan = SimpleNamespace(deployment=None, space=None, reuse=None, options=options)
    made = {"_load_data": None, "look_up": None, "_chosen": SimpleNamespace(why="", accuracy="x"),
            "_estimator": estimator, "latency_model": (None, None), "search_options": None, "_identity": {},
            "_open_study": study}
    for name, value in made.items():
        monkeypatch.setattr(road, name, lambda *_, value=value: value)
    road.prepare(plan, RunFolder(tmp_path), Console(quiet=True))
    assert study.user_attrs["setup_seconds"] == seconds


def test_a_study_of_another_estimator_is_refused_before_that_one_works(tmp_path, monkeypatch):
    monkeypatch.delenv("HWNAS_OWN_TABLES", raising=False)
    host = max(path.name for path in shipped("latency_tables").iterdir() if path.is_dir())
    config = compose("search", ["+target=epyc_int8", f"host={host}", f"out={tmp_path}", "baselines=[]"])
    first, other = Costly(), Costly()
    plan, run = make_plan(config, Console(quiet=True)), RunFolder(tmp_path)
    monkeypatch.setattr(road, "_estimator", lambda *_: first)
    road.prepare(plan, run, Console(quiet=True))
    road.prepare(plan, run, Console(quiet=True))
    other.fingerprint = "other"
    monkeypatch.setattr(road, "_estimator", lambda *_: other)
    with pytest.raises(StudyError, match=r"cannot resume, accuracy was proxy \(costly\), now proxy \(other\)"):
        road.prepare(plan, run, Console(quiet=True))
    assert (first.setup_seconds, other.setup_seconds) == (12.5, 0)


def test_a_plan_writes_nothing(tmp_path):
    plan = make_plan(compose("search", ["+target=xeon_int8", f"out={tmp_path / 'run'}", "baselines=[]"]),
                     Console(quiet=True))
    assert plan.out == tmp_path / "run"
    assert not list(tmp_path.iterdir())
