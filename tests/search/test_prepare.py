"""What a search writes down, and refuses, before its first trial."""

from __future__ import annotations

from types import SimpleNamespace

import optuna
import pytest

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.errors import StudyError
from hwnas.search import prepare as prepared
from hwnas.system.paths import shipped


class Costly:
    """An estimator that has worked before the first score."""

    fingerprint = "costly"
    setup_seconds = 0.0

    def prepare(self, console: Console) -> None:
        self.setup_seconds = 12.5


@pytest.mark.parametrize(("estimator", "seconds"), [(Costly(), 12.5), (SimpleNamespace(fingerprint="proxy"), 0.0)])
def test_the_study_holds_what_came_before_the_trials(monkeypatch, estimator, seconds):
    study = optuna.create_study()
    made = {"make_plan": SimpleNamespace(deployment=None, space=None, calibration=None, reuse=None), "_load_data": None,
            "_chosen": SimpleNamespace(why="", accuracy="x"), "_estimator": estimator, "_making": None,
            "latency_model": (None, None), "search_options": None, "_identity": {}, "_url": "sqlite:///none/study.db",
            "_open_study": study}
    for name, value in made.items():
        monkeypatch.setattr(prepared, name, lambda *_, value=value: value)
    prepared.prepare(None, Console(quiet=True))
    assert study.user_attrs["setup_seconds"] == seconds


def test_a_study_of_another_estimator_is_refused_before_that_one_works(tmp_path, monkeypatch):
    monkeypatch.delenv("HWNAS_OWN_TABLES", raising=False)
    host = max(path.name for path in shipped("latency_tables").iterdir() if path.is_dir())
    config = compose("search", ["+target=epyc_int8", f"host={host}", f"out={tmp_path}", "baselines=[]"])
    first, other = Costly(), Costly()
    monkeypatch.setattr(prepared, "_estimator", lambda *_: first)
    prepared.prepare(config, Console(quiet=True))
    prepared.prepare(config, Console(quiet=True))
    other.fingerprint = "other"
    monkeypatch.setattr(prepared, "_estimator", lambda *_: other)
    with pytest.raises(StudyError, match=r"cannot resume, accuracy was proxy \(costly\), now proxy \(other\)"):
        prepared.prepare(config, Console(quiet=True))
    assert (first.setup_seconds, other.setup_seconds) == (12.5, 0)
