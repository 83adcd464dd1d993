"""The latency models of a search by estimates, in the session of the run. Missing tables are calibrated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, ConfigError, TableError
from hwnas.latency.calibration import CalibrationOptions
from hwnas.latency.deployment import Deployment, kept_table, latency_model
from hwnas.latency.model import LatencyModel
from hwnas.latency.session import Session, measure_session
from hwnas.latency.table import LatencyTable
from hwnas.search.deployments import CalibratedDeployment
from hwnas.search.plan import Plan
from hwnas.space.search_space import SearchSpace
from hwnas.system.documents import Document
from hwnas.system.run_folder import RunFolder

DECIDED = Document("hwnas-deployments", 1, "the deployments of a search", "Delete it, and they are chosen again.",
                   shape={"asked": [str], "targets": [str]})
LEAST_CALIBRATION = 0.25  # minutes: one wave of networks
CALIBRATION_ENDS_S = 15.0  # of a calibration, beyond its minutes: its first export, last wave and fit


def calibrate(plan: Plan, run: RunFolder, console: Console) -> tuple[CalibratedDeployment, ...]:
    """Return the plan's deployments, each with the model that predicts its latencies in the run's session.

    A deployment of a set that cannot be calibrated is left out, and a line says why. The process that comes first
    decides this for all others and for later calls.
    """
    target_names = [deployment.target.name for deployment in plan.deployments]
    several = len(target_names) > 1
    decision = DECIDED.find(run.deployments) if several else None
    if decision is not None and decision["asked"] != target_names:
        decision = None  # opening the study will say what has changed
    # If an earlier process has decided, only its deployments are taken; otherwise all that can be calibrated.
    calibrated: list[CalibratedDeployment] = []
    for deployment, calibration in _divide_minutes(plan.deployments, plan.space, plan.options.calibration):
        if decision is not None and deployment.target.name not in decision["targets"]:
            continue
        try:
            table, model = latency_model(deployment, plan.space, calibration, console)
            session = _find_session(plan, deployment, run, table, model, console)
        except (CandidateError, TableError) as error:
            if not several or decision is not None:
                raise
            console.remark(f"note: not deployed as {deployment.target.name}: {error}")
            continue
        calibrated.append(CalibratedDeployment(deployment, model.in_session(session.factor, session.log_std), session,
                                               table))
    if not calibrated:
        raise ConfigError(f"no deployment of target={plan.options.target['name']} could be calibrated: each line above "
                          "says why.")
    if several and decision is None:
        names = [each.name for each in calibrated]
        run.write_json(run.deployments, {**DECIDED.header, "asked": target_names, "targets": names})
    return tuple(calibrated)


def _divide_minutes(deployments: Sequence[Deployment], space: SearchSpace, whole: CalibrationOptions
                    ) -> Iterator[tuple[Deployment, CalibrationOptions]]:
    """Yield each deployment with the options of its calibration, if it needs one. The first one that lacks a table may
    take all minutes. The others share as many seconds as it took, since they start from its table, but each has time
    for a wave of networks."""
    lacking = [deployment for deployment in deployments if not has_table(deployment, space)]
    least, others = min(LEAST_CALIBRATION, whole.minutes), len(lacking) - 1
    left_s = 0.0  # for all others
    # The caller calibrates between two yields, so the time until the next one is that of the calibration.
    for deployment in deployments:
        began = time.monotonic()
        if deployment not in lacking[1:]:
            yield deployment, whole
            left_s += time.monotonic() - began if deployment in lacking else 0.0
        else:
            minutes = (left_s / others - CALIBRATION_ENDS_S) / 60
            yield deployment, replace(whole, minutes=min(whole.minutes, max(least, minutes)))
            left_s, others = left_s - (time.monotonic() - began), others - 1


def has_table(deployment: Deployment, space: SearchSpace) -> bool:
    """Return whether no calibration is needed. A table of another runtime counts too: its use is refused."""
    try:
        table = kept_table(deployment, space)
    except TableError:
        return True
    return table is not None and space.name in table.spaces()


def _find_session(plan: Plan, deployment: Deployment, run: RunFolder, table: LatencyTable, model: LatencyModel,
                  console: Console) -> Session:
    """Return the session that the run's predictions are of. The process that comes first measures it."""
    path = file_of(plan, deployment, run.session)
    with run.hold("session", console.say):
        session = Session.find(path, table)
        if session is None:
            session = measure_session(deployment, table, model, console)
            session.save(path)
        return session


def file_of(plan: Plan, deployment: Deployment, path: Path) -> Path:
    """Return the file of a run for one of its deployments: `path` itself if there is only one."""
    return path.with_stem(f"{path.stem}-{deployment.target.name}") if len(plan.deployments) > 1 else path
