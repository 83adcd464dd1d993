"""The weights of trials: they are kept in the run folder, so that a finalist goes on with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hwnas.accuracy.estimator import Estimate
from hwnas.errors import UserError
from hwnas.front.make import TrainedWeights
from hwnas.study.record import EVALUATED, outcome
from hwnas.training.loop import Checkpoint

KEPT = "weights"  # user attribute of a trial: key and steps of the weights in its file
MOST_BYTES = 512 << 20  # of all files; of more, those of the most clearly beaten networks are removed


def keep_weights(folder: Path, trial: FrozenTrial, estimate: Estimate, fingerprint: str) -> dict[str, Any]:
    """Write the weights that an estimate comes with, and return the trial's attributes about them.

    Nothing is returned if there are none, or if no disk takes them: then a finalist starts anew.
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
    """Return the weights of evaluated networks after their trials, by network id; their files may be gone."""
    return {trial.user_attrs["architecture_id"]: TrainedWeights(attrs["key"], _file(folder, trial), int(attrs["steps"]))
            for trial in trials if (attrs := trial.user_attrs.get(KEPT)) and outcome(trial) == EVALUATED}


def remove_worst(folder: Path, trials: Sequence[FrozenTrial]) -> None:
    """Remove weights down to MOST_BYTES, first of the one that the most others beat in top-1 and latency."""
    with_files = [trial for trial in trials if KEPT in trial.user_attrs and _file(folder, trial).is_file()]
    bytes_of = {trial.number: _file(folder, trial).stat().st_size for trial in with_files}
    points = {trial.number: (trial.user_attrs["top1_proxy"], trial.user_attrs["latency_ms_predicted"])
              for trial in with_files}
    while sum(bytes_of.values()) > MOST_BYTES:
        worst = max(with_files, key=lambda trial: sum(
            top1 >= points[trial.number][0] and ms <= points[trial.number][1] for top1, ms in points.values()))
        _file(folder, worst).unlink(missing_ok=True)
        with_files.remove(worst)
        del points[worst.number], bytes_of[worst.number]


def _file(folder: Path, trial: FrozenTrial) -> Path:
    return folder / f"{trial.number}.safetensors"
