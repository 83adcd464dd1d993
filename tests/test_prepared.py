"""What a search writes down before its first trial."""

from __future__ import annotations

from types import SimpleNamespace

import optuna
import pytest

from hwnas import prepared
from hwnas.progress import Console


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
            "latency_model": (None, None), "search_options": None, "_open_study": study}
    for name, value in made.items():
        monkeypatch.setattr(prepared, name, lambda *_, value=value: value)
    prepared.prepare(None, Console(quiet=True))
    assert study.user_attrs["setup_seconds"] == seconds
