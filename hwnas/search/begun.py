"""Weights that a trial learnt: kept in the run folder, so that a finalist goes on with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hwnas.accuracy.estimator import Estimate
from hwnas.errors import StudyError, UserError
from hwnas.front.make import TrainedWeights
from hwnas.study.record import EVALUATED, outcome
from hwnas.training.loop import Checkpoint

KEPT = "weights"  # user attribute of a trial: key and steps of the weights in its file
MOST_KEPT = 100  # files; of more, those of the most clearly beaten networks are removed


def keep_weights(folder: Path, trial: FrozenTrial, estimate: Estimate, fingerprint: str) -> dict[str, Any]:
    """Write the weights that an estimate comes with, and return what the trial says of them.

    Nothing is returned if there are none, or if no disk takes them: then a finalist begins anew.
    """
    if estimate.weights is None:
        return {}
    content = "|".join((trial.user_attrs["architecture_id"], str(trial.user_attrs["seed"]), fingerprint))
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    try:
        folder.mkdir(exist_ok=True)
        Checkpoint({"line": key}, 0, [], estimate.weights, {}, {}).save(_file(folder, trial))
    except (OSError, UserError):
        return {}
    return {KEPT: {"key": key, "steps": estimate.steps}}


def find_weights(folder: Path, trials: Sequence[FrozenTrial]) -> dict[str, TrainedWeights]:
    """Return the weights of evaluated networks that are in the folder, by network id."""
    found = {}
    for trial in trials:
        said, path = trial.user_attrs.get(KEPT), _file(folder, trial)
        if said is None or outcome(trial) != EVALUATED or not path.is_file():
            continue
        try:
            state = Checkpoint.load(path)
        except StudyError:  # torn
            continue
        if state is not None and state.identity.get("line") == said["key"]:
            found[trial.user_attrs["architecture_id"]] = TrainedWeights(said["key"], path, int(said["steps"]))
    return found


def remove_worst(folder: Path, trials: Sequence[FrozenTrial]) -> None:
    """Remove what is too much: the weights of the network that the most others beat in top-1 and in latency."""
    kept = [trial for trial in trials if KEPT in trial.user_attrs and _file(folder, trial).is_file()]
    points = {trial.number: (trial.user_attrs["top1_proxy"], trial.user_attrs["latency_ms_predicted"])
              for trial in kept}
    while len(kept) > MOST_KEPT:
        worst = max(kept, key=lambda trial: sum(
            top1 >= points[trial.number][0] and ms <= points[trial.number][1] for top1, ms in points.values()))
        _file(folder, worst).unlink(missing_ok=True)
        points.pop(worst.number)
        kept.remove(worst)


def _file(folder: Path, trial: FrozenTrial) -> Path:
    return folder / f"{trial.number}.safetensors"
