"""What a trial learnt is kept, and a finalist goes on with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from deployment_fixtures import tiny_making, tiny_network
from optuna.trial import TrialState
from safetensors.numpy import load_file
from study_fixtures import OBJECTIVE, Scores, TinySpace, opened, predict

from hwnas.accuracy.estimator import Estimate
from hwnas.front import make as making_module
from hwnas.front.make import fingerprint, make, steps_left
from hwnas.search import trial_weights
from hwnas.search.sampling import SamplingWorker
from hwnas.search.trial_weights import find_weights, keep_weights
from hwnas.study.candidate import SearchOptions
from hwnas.system.run_folder import ModelFolder

torch = pytest.importorskip("torch")


class Trained(Scores):
    """Scores that come with weights."""

    fingerprint = "scores"

    def evaluate(self, architecture: Any, seed: int) -> Estimate:
        return replace(super().evaluate(architecture, seed), weights={"w": torch.full((2,), float(len(self.calls)))},
                       steps=80)


def search(folder: Path, n: int) -> optuna.Study:
    study = opened(folder)
    options, lines = SearchOptions(n, OBJECTIVE), folder / "lines"
    SamplingWorker(study, TinySpace(), predict, Trained(), options, folder=lines).search()
    return study


def test_the_weights_of_each_trial_are_kept_and_found(tmp_path: Path) -> None:
    study = search(tmp_path, 3)
    found = find_weights(tmp_path / "lines", study.trials)
    assert [(weights.steps, float(weights.read()["w"][0])) for weights in found.values()] == [
        (80, 1.0), (80, 2.0), (80, 3.0)]
    assert len({weights.key for weights in found.values()}) == 3
    first, second, third = found.values()
    first.path.unlink()
    second.path.write_bytes(second.path.read_bytes()[:50])
    assert [weights.is_kept() for weights in (first, second, third)] == [False, False, True]
    assert find_weights(tmp_path / "lines", study.trials) == found


def test_of_many_the_clearly_beaten_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_weights, "MOST_BYTES", 3 * 600)
    study = search(tmp_path, 9)
    kept = [weights for weights in find_weights(tmp_path / "lines", study.trials).values() if weights.is_kept()]
    assert 1 < len(kept) == len([*(tmp_path / "lines").iterdir()]) < 9
    assert sum(weights.path.stat().st_size for weights in kept) <= 3 * 600
    done = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    best = max(done, key=lambda trial: trial.values[0]).user_attrs["architecture_id"]
    assert find_weights(tmp_path / "lines", study.trials)[best].is_kept()


def test_a_disk_that_takes_nothing_costs_the_weights_alone(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("no folder")
    study = search(tmp_path, 2)
    assert find_weights(tmp_path / "lines", study.trials) == {}
    assert len(study.trials) == 2


def test_a_finalist_goes_on_with_them_for_the_steps_that_are_left(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, making = tiny_network(), tiny_making()
    trial = optuna.create_trial(state=TrialState.COMPLETE, values=[0.5, 1.0], user_attrs={
        "architecture_id": network.trained_id, "seed": 0, "outcome": "evaluated"})
    learnt = {name: tensor + 1 for name, tensor in network.build().state_dict().items()}
    estimate = Estimate(0.5, 0.5, 0.5, 0.0, "proxy", weights=learnt, steps=3)
    trial.user_attrs = {**trial.user_attrs, **keep_weights(tmp_path / "lines", trial, estimate, "f")}
    goes_on = replace(making, begun=find_weights(tmp_path / "lines", [trial]))
    whole, left = (each.recipe_of(network).steps_for(len(making.dataset.train)) for each in (making, goes_on))
    assert left == steps_left(whole, 3) < whole
    assert fingerprint(network, goes_on) != fingerprint(network, making)
    monkeypatch.setattr(making_module, "train", lambda model, *rest, **options: model)
    folder = ModelFolder(tmp_path / "models" / "one")
    make(network, folder, goes_on)
    assert all((load_file(folder.weights)[name] == tensor.numpy()).all() for name, tensor in learnt.items())
    assert make(network, folder, goes_on).reused
    for path in (tmp_path / "lines").iterdir():
        path.unlink()
    assert make(network, folder, goes_on).reused, "its weights are not needed any more"
    folder.weights.unlink()
    assert not make(network, folder, goes_on).reused, "it is trained anew"
    assert make(network, folder, goes_on).reused
    assert (steps_left(400, 80), steps_left(160, 80), steps_left(159, 80)) == (320, 80, 159)
