"""The content of a trial of the study: its user attributes, its outcome and its row in trials.csv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hwnas.study.objective import COSTS, LATENCY
from hwnas.system.run_folder import OF_EVERY_TRIAL

# Outcomes of a finished trial, in the user attribute `outcome`. A FAIL without an outcome was lost with its worker.
EVALUATED = "evaluated"
INFEASIBLE = "infeasible"
DUPLICATE = "duplicate"
FAILED = "failed"
LOST = "lost"
DROPPED = "dropped"  # a line of a race that others beat
KNOWN = "known"  # the first rung of a race: every line starts there
LINE = "line"  # user attribute of a trial: source, move and legs of a line; a trial without it is no line
REUSED = "reused_from"  # user attribute of a trial: run folder of the earlier search that measured its accuracy
RECORD = "hwnas"  # user attribute of a study: its format, its identity and perhaps OBJECTIVES
OBJECTIVES = "objectives"  # in RECORD: names of the known objectives, unless they are latency alone
CHOSEN = "chosen"  # in RECORD: the choices that a measurement decided when the study was created
DEPLOYMENT = "deployment"  # attribute and column: the deployment of several that is predicted to be the fastest
CAP = "latency_ms"  # name of the constraint: upper quantile of the prediction minus the cap, in ms


def minimised(study: optuna.Study) -> tuple[str, ...]:
    """Return the names of a multi-objective study's known objectives, in the order of its values."""
    return tuple(study.user_attrs.get(RECORD, {}).get(OBJECTIVES, (LATENCY,)))


def outcome(trial: FrozenTrial) -> str | None:
    """Return the trial's outcome, one of the constants above; None while it waits or runs."""
    if not trial.state.is_finished():
        return None
    return str(trial.user_attrs.get("outcome", LOST))


def find_settled(trials: Iterable[FrozenTrial], *, running: bool = False) -> dict[str, FrozenTrial]:
    """Return trials by architecture id, for architectures that need no training any more.

    Such an architecture was evaluated, is over the cap, or failed for a reason of its own. With `running`, trials that
    run now count as well. If several trials have the same architecture, an evaluated one is returned.
    """
    by_id: dict[str, FrozenTrial] = {}
    for trial in trials:
        name = trial.user_attrs.get("architecture_id")
        if name is None:
            continue
        if (running and trial.state == TrialState.RUNNING) or outcome(trial) in (EVALUATED, INFEASIBLE, FAILED):
            first = by_id.setdefault(name, trial)
            if trial.state == TrialState.COMPLETE and first.state != TrialState.COMPLETE:
                by_id[name] = trial
    return by_id


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of trials by outcome. `evaluated` counts architectures, `asks` all trials that this study started."""

    evaluated: int
    infeasible: int
    failed: int
    duplicates: int
    running: int
    asks: int


def count(trials: Sequence[FrozenTrial]) -> Counts:
    """Count the trials of a study, without reused trials of an earlier search."""
    own = [trial for trial in trials if REUSED not in trial.user_attrs and trial.state != TrialState.WAITING]
    tally = Counter(map(outcome, own))
    evaluated = {trial.user_attrs.get("architecture_id", str(trial.number)) for trial in own
                 if trial.state == TrialState.COMPLETE}
    twice = tally[EVALUATED] - len(evaluated)
    return Counts(len(evaluated), tally[INFEASIBLE], tally[FAILED], tally[DUPLICATE] + twice,
                  tally[None], len(own))


def trial_rows(study: optuna.Study) -> list[dict[str, Any]]:
    """Return the rows of trials.csv by trial number, one for every trial that was started.

    The columns are OF_EVERY_TRIAL. If the study minimises other costs than latency, the costs follow, after
    `objectives` with their names. If the search chooses among deployments, `deployment` follows: the one that is
    predicted to be the fastest. `state` is Optuna's. `outcome` is evaluated, infeasible (over the cap), duplicate,
    failed (the candidate's own failure) or dropped (others beat it in the race). It is lost if the worker died and no
    other did the work, and "running" while the trial runs. Latencies are in ms, top-1 is from 0 to 1. A training took
    `seconds`. `started` and `finished` are local ISO times. None: not known.
    """
    rows, first, costs = [], dict[str, int](), minimised(study)
    more = {OBJECTIVES: " ".join(costs)} if costs != (LATENCY,) else {}
    columns = [COSTS[name].predicted for name in costs if more and name != LATENCY]
    trials = study.get_trials(deepcopy=False)
    if any(DEPLOYMENT in trial.user_attrs for trial in trials):
        columns.append(DEPLOYMENT)
    for trial in trials:
        if trial.state == TrialState.WAITING:
            continue
        row = {**_row(trial), **more, **{column: trial.user_attrs.get(column) for column in columns}}
        if row["outcome"] == EVALUATED:  # two workers may have evaluated the same network: the first trial counts
            number = first.setdefault(row["id"], trial.number)
            if number != trial.number:
                row.update(outcome=DUPLICATE, duplicate_of=number)
        rows.append(row)
    return rows


def _row(trial: FrozenTrial) -> dict[str, Any]:
    attrs: Mapping[str, Any] = trial.user_attrs
    line: Mapping[str, Any] = attrs.get(LINE, {})
    legs = line.get("legs", ())
    reason = attrs.get("reason")
    if outcome(trial) == LOST and reason is None:
        reason = "its worker died or was stopped for too long"
    values = {
        "number": trial.number, "state": trial.state.name, "outcome": outcome(trial) or trial.state.name.lower(),
        "id": attrs.get("architecture_id"), "reason": reason,
        "feasible": all(value <= 0 for value in trial.constraints.values()) if "architecture_id" in attrs else None,
        "started": _iso(trial.datetime_start), "finished": _iso(trial.datetime_complete),
        "rungs": " ".join(str(leg["rung"]) for leg in legs) or (KNOWN if line else None), "source": line.get("source"),
        "move": line.get("move") or None, "steps": sum(int(leg["steps"]) for leg in legs) if line else None,
        "gain": next((float(leg["gain"]) for leg in legs if "gain" in leg), None),
    }
    return {column: values[column] if column in values else attrs.get(column) for column in OF_EVERY_TRIAL}


def _iso(moment: Any) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")
