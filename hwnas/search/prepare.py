"""Prepare what a search needs: data, latency model, estimator, study. A machine without a table is measured here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import optuna

from hwnas.accuracy.estimator import BUILT_IN, AccuracyEstimator, load_estimator
from hwnas.accuracy.proxy import Proxy
from hwnas.cli.options import plain
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.data.loading import read_images
from hwnas.errors import CandidateError, ConfigError, TableError
from hwnas.front.make import BuildSettings
from hwnas.front.score import scoring_seconds
from hwnas.latency.deployment import CalibrationOptions, Deployment, kept_table, latency_model
from hwnas.latency.measured import MeasuredLatency, answered
from hwnas.latency.model import LatencyModel
from hwnas.latency.session import Session, measure_session
from hwnas.latency.table import LatencyTable
from hwnas.networks.network import FoundNetwork
from hwnas.networks.quantize import needs_narrow_weights
from hwnas.samplers.informed import Context
from hwnas.search.course import NOT_ONE, known_networks
from hwnas.search.deployments import BestOf, CalibratedDeployment, Latency, model_of_all
from hwnas.search.minutes import (
    DRAWN,
    FEW_TRIALS,
    LEAST_FINALISTS,
    MANY_TRIALS,
    SMALLEST_PROXY_PX,
    Clock,
    Pace,
    mean_step_seconds,
    pace_of,
    proxy_length,
    trials_seconds,
)
from hwnas.search.plan import RACE, Plan, line_recipe
from hwnas.search.trial import SearchOptions, reuse_trials
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import check_cap
from hwnas.study.storage import HEARTBEAT_S, tell_held
from hwnas.study.study import check_resumable, database_path, held_choice, open_study
from hwnas.system.documents import Document
from hwnas.system.paths import check_home
from hwnas.system.run_folder import RunFolder

DECIDED = Document("hwnas-deployments", 1, "the deployments of a search", "Delete it, and they are chosen again.",
                   shape={"asked": [str], "targets": [str]})
LEAST_CALIBRATION = 0.25  # minutes: one wave of networks
CALIBRATION_ENDS_S = 15.0  # of a calibration, beyond its minutes: its first export, last wave and fit
LENGTH = {"epochs", "min_steps", "max_steps", "image_size", "train_images", "seeds"}  # options of the proxy


@dataclass(frozen=True)
class PreparedSearch:
    """The objects that the trials and the verification work with. `estimator` is None where lines race."""

    plan: Plan
    run: RunFolder
    dataset: Dataset
    estimator: AccuracyEstimator | None
    calibrated: tuple[CalibratedDeployment, ...]
    model: Latency | BestOf
    options: SearchOptions
    opened: optuna.Study | None
    clock: Clock | None = None
    pace: Pace | None = None

    @property
    def table(self) -> LatencyTable:
        """That of the first deployment, which runs the reference network of all timings."""
        return self.calibrated[0].table

    @property
    def narrow(self) -> tuple[str, ...]:
        """The targets for which int8 weights need 7 bits, by the CPU that their tables name."""
        return tuple(each.name for each in self.calibrated if needs_narrow_weights(
            each.deployment.target, each.table.host.get("vendor", ""), each.table.host.get("flags", ())))

    @property
    def study(self) -> optuna.Study:
        """The study, which is open once everything is prepared."""
        assert self.opened is not None
        return self.opened


def prepare(plan: Plan, run: RunFolder, console: Console, clock: Clock | None = None) -> PreparedSearch:
    """Load the data, measure this host if no table fits, open the study. With a `clock` the machine's pace is measured
    too, and a new study's trials get the length that the minutes allow."""
    if not plan.races and not all(_has_table(deployment, plan.space) for deployment in plan.deployments):
        check_home()
    url = plan.options.storage or database_path(run.path)
    tell_held(url, console.say)
    dataset = _load_data(plan, console)
    check_resumable(url, _identity_unmeasured(plan, dataset))
    estimator = None if plan.races else _estimator(plan, dataset)
    if plan.races:
        calibrated = tuple(_measured(plan, deployment, run, console) for deployment in plan.deployments)
    else:
        plan, calibrated = _learn_latency(plan, run, console)
    model = model_of_all(calibrated)
    pace = _pace(plan, dataset, console) if clock is not None else None
    try:
        options = answered(lambda: search_options(plan, model), console)
        if plan.races:
            answered(lambda: known_networks(plan.space, model.predict, options), console)
    finally:
        _tell_failed(plan, calibrated, console)
    prepared = PreparedSearch(plan, run, dataset, estimator, calibrated, model, options, None, clock, pace)
    return _prepare_race(prepared, url) if estimator is None else _prepare_estimates(prepared, url, console)


def _learn_latency(plan: Plan, run: RunFolder, console: Console) -> tuple[Plan, tuple[CalibratedDeployment, ...]]:
    """Return the plan with its calibrated deployments, and what predicts the latencies of each in the run's session.

    Of a set a deployment that cannot be calibrated is left out, and a line says why. The process that comes first
    decides, for all others and for later calls.
    """
    asked = [deployment.target.name for deployment in plan.deployments]
    decided = DECIDED.find(run.deployments) if plan.others else None
    if decided is not None and decided["asked"] != asked:
        decided = None  # the study says what has changed
    calibrated: list[CalibratedDeployment] = []
    for deployment, calibration in _divide_minutes(plan):
        if decided is not None and deployment.target.name not in decided["targets"]:
            continue
        try:
            table, model = latency_model(deployment, plan.space, calibration, console)
            session = _find_session(plan, deployment, run, table, model, console)
        except (CandidateError, TableError) as error:
            if not plan.others or decided is not None:
                raise
            console.remark(f"note: not deployed as {deployment.target.name}: {error}")
            continue
        calibrated.append(CalibratedDeployment(deployment, model.in_session(session.factor, session.log_std), session,
                                               table))
    if not calibrated:
        raise ConfigError(f"no deployment of target={plan.options.target['name']} could be calibrated: each line above "
                          "says why.")
    if plan.others and decided is None:
        names = [each.name for each in calibrated]
        run.write_json(run.deployments, {**DECIDED.header, "asked": asked, "targets": names})
    first, *others = (each.deployment for each in calibrated)
    return replace(plan, deployment=first, others=tuple(others)), tuple(calibrated)


def _measured(plan: Plan, deployment: Deployment, run: RunFolder, console: Console) -> CalibratedDeployment:
    """Return a deployment with what times the networks of a race on it."""
    latency = MeasuredLatency(deployment, plan.space, _of_deployment(run.latencies, plan, deployment),
                              lambda: run.hold("latencies"), plan.options.seed)
    return CalibratedDeployment(deployment, latency, None)


def _tell_failed(plan: Plan, calibrated: Sequence[CalibratedDeployment], console: Console) -> None:
    """Say which known networks of a race could not be timed, and why."""
    for each in calibrated if plan.races else ():
        for name, network in plan.space.known.items():
            if why := each.table.failed.get(replace(network, image_size=max(plan.space.image_sizes)).id):
                console.remark(f"note: {name} does not race as {each.name}: {why}")


def _divide_minutes(plan: Plan) -> Iterator[tuple[Deployment, CalibrationOptions]]:
    """Each deployment, with the options of the calibration that it may need: the first that lacks a table as long as a
    single one, the others together as long again, since they start from its table too, but a wave of networks at least.
    """
    lacking = [deployment for deployment in plan.deployments if not _has_table(deployment, plan.space)]
    whole = plan.options.calibration
    least, others = min(LEAST_CALIBRATION, whole.minutes), len(lacking) - 1
    left_s = 0.0  # for all others
    for deployment in plan.deployments:
        began = time.monotonic()
        if deployment not in lacking[1:]:
            yield deployment, whole
            left_s += time.monotonic() - began if deployment in lacking else 0.0
        else:
            minutes = (left_s / others - CALIBRATION_ENDS_S) / 60
            yield deployment, replace(whole, minutes=min(whole.minutes, max(least, minutes)))
            left_s, others = left_s - (time.monotonic() - began), others - 1


def _has_table(deployment: Deployment, space: SearchSpace) -> bool:
    """Return whether no calibration is needed. Another runtime's table needs none: it is refused where it is used."""
    try:
        table = kept_table(deployment, space)
    except TableError:
        return True
    return table is not None and space.name in table.spaces()


def _find_session(plan: Plan, deployment: Deployment, run: RunFolder, table: LatencyTable, model: LatencyModel,
                  console: Console) -> Session:
    """The session that the run's predictions are of: measured once, by the process that comes first."""
    path = _of_deployment(run.session, plan, deployment)
    with run.hold("session", console.say):
        session = Session.find(path, table)
        if session is None:
            session = measure_session(deployment, table, model, console)
            session.save(path)
        return session


def _of_deployment(path: Path, plan: Plan, deployment: Deployment) -> Path:
    """The file of a run for one of its deployments; `path` itself where there is one alone."""
    return path.with_stem(f"{path.stem}-{deployment.target.name}") if plan.others else path


def _prepare_race(prepared: PreparedSearch, url: str) -> PreparedSearch:
    """Open the study of a race."""
    plan = prepared.plan
    start = " ".join(plan.starts[around].key for around in plan.space.arounds if around in plan.starts)
    recipe = line_recipe(plan, prepared.dataset)
    recipe = replace(recipe, epochs=1, min_steps=0, max_steps=0)  # the race decides the length
    identity = _identity(prepared, f"{RACE} ({recipe.fingerprint} {start})".replace(" )", ")"))
    return replace(prepared, opened=_open_study(plan, url, identity, prepared.model, prepared.options, {}))


def _prepare_estimates(prepared: PreparedSearch, url: str, console: Console) -> PreparedSearch:
    """Open the study of a search by estimates."""
    plan, dataset, model = prepared.plan, prepared.dataset, prepared.model
    estimator, options = prepared.estimator, prepared.options
    assert estimator is not None
    if length := _fitting(plan, estimator, dataset, url, model, prepared.clock, prepared.pace, console):
        plan = replace(plan, accuracy_options={**plan.accuracy_options, **length})
        estimator = _estimator(plan, dataset)
    identity = _identity(prepared, f"{plan.accuracy} ({estimator.fingerprint})")
    study = _open_study(plan, url, identity, model, options, length)
    if plan.reuse is not None:
        n = reuse_trials(study, plan.reuse, plan.space, model.predict, options)
        console.note(f"reused: the accuracies of {n} networks of {plan.reuse}")
    return replace(prepared, plan=plan, estimator=estimator, opened=study)


def _pace(plan: Plan, dataset: Dataset, console: Console) -> Pace:
    """Time how fast this machine makes a network's files and trains the baselines, and another one scores them."""
    device, network = plan.deployment.device, plan.middle
    making = BuildSettings(dataset, plan.recipe, plan.options.seed, plan.deployment.target)
    score = None if device.is_here else partial(scoring_seconds, network=network, dataset=dataset,
                                                target=making.target, device=device)
    where = "time this machine" if score is None else f"time this machine, and {device.host.name} over ssh"
    with console.step(where) as report:
        pace = pace_of(network, making, score, report).with_networks(plan.baselines, making)
    if score is not None:
        console.note(f"{device.host.name} takes {pace.scoring_s:.1f} s to score a network")
    return replace(pace, making_s=plan.files * pace.making_s, scoring_s=plan.files * pace.scoring_s)


def _fitting(plan: Plan, estimator: AccuracyEstimator, dataset: Dataset, url: str, model: Latency | BestOf,
             clock: Clock | None, pace: Pace | None, console: Console) -> dict[str, int]:
    """The options that give the proxy the length that the minutes allow: those of the study that goes on or is reused,
    or new ones. None where the user gave a length, or a new study no minutes."""
    if type(estimator) is not Proxy or plan.accuracy_options.keys() & LENGTH:
        return {}
    held = held_choice(url)
    if held is None and plan.reuse is not None:
        held = held_choice(database_path(plan.reuse))
    if held is not None or clock is None or pace is None:
        return held or {}
    px, n_trials, networks = dataset.image_size, plan.options.n_trials, draw_networks(plan, model)
    making = BuildSettings(dataset, estimator.recipe, plan.options.seed, plan.deployment.target)

    def step_s(size: int) -> float:
        with console.step(f"time trials at {size} px"):
            return mean_step_seconds(networks, making, size, pace)

    length = proxy_length(
        estimator.steps, estimator.validating_steps, trials_s(plan, clock, pace), plan.workers, step_s, px,
        max(SMALLEST_PROXY_PX, px // 4) if len(plan.space.image_sizes) == 1 else px,
        (min(FEW_TRIALS, n_trials or FEW_TRIALS), n_trials or MANY_TRIALS))
    if length:
        console.note(f"a trial trains for {length['max_steps']} steps at {length.get('image_size', px)} px, by the "
                     f"minutes (without them {estimator.steps} at {px} px)")
    return length


def draw_networks(plan: Plan, model: Latency | BestOf) -> list[FoundNetwork]:
    """Some random networks, within the cap where there are such: what a trial trains is cheaper than the reference."""
    codes = plan.space.sample(np.random.default_rng([plan.options.seed, *b"pace"]), 64)
    over_ms = np.maximum(model.predict(codes).mean - (plan.options.budget.latency_ms or np.inf), 0)
    few = codes[np.argsort(over_ms, kind="stable")[:DRAWN]]
    return [plan.network(plan.space.decode(plan.space.to_params(code))) for code in few]


def trials_s(plan: Plan, clock: Clock, pace: Pace) -> float:
    """Seconds for the trials; BudgetError where none are left for a front after them."""
    return trials_seconds(clock, pace, [plan.network(plan.space.reference)] * min(LEAST_FINALISTS, plan.parts),
                          plan.workers)


def search_options(plan: Plan, model: Latency | BestOf) -> SearchOptions:
    """The search's options; BudgetError when no network of the space keeps the cap. A race looks for itself."""
    asked, budget = plan.options, plan.options.budget
    target_ms = plan.objective.target_ms or _slowest_ms(plan, model)
    if budget.latency_ms is not None and not plan.races:
        check_cap(plan.space, model.predict, budget.latency_ms, budget.quantile)
    known = [plan.space.encode(network) for network in plan.space.known.values()]
    return SearchOptions(asked.trials, plan.objective.at(target_ms), seed=asked.seed, max_asks=asked.max_asks,
                         cap_ms=budget.latency_ms, cap_quantile=budget.quantile, enqueue=known)


def _slowest_ms(plan: Plan, model: Latency | BestOf) -> float:
    """Return the latency of the space's reference; in a race, if that cannot be timed, of the slowest known network
    that can. CandidateError if there is none."""
    known = plan.space.known.values() if plan.races else ()
    told_ms = model.predict_architectures([plan.space.reference, *known]).mean
    if not (able := np.isfinite(told_ms)).any():
        raise CandidateError(NOT_ONE)
    return float(told_ms[0] if able[0] else told_ms[able].max())


def _load_data(plan: Plan, console: Console) -> Dataset:
    return read_images(plan.options.dataset, max(plan.space.image_sizes), plan.options.seed, console)


def _estimator(plan: Plan, dataset: Dataset) -> AccuracyEstimator:
    name, options = plan.accuracy, dict(plan.accuracy_options)
    if name in BUILT_IN:
        options = {"threads": plan.options.threads, **plain(plan.options.training), **options}
    return load_estimator(name, dataset=dataset, space=plan.space, config=options)


def _identity(prepared: PreparedSearch, accuracy: str) -> dict[str, str]:
    """Return the facts that the study's trials depend on."""
    plan, tables = prepared.plan, [each.table for each in prepared.calibrated]
    targets = ", ".join(f"{each.name} ({each.table.key})" for each in prepared.calibrated)
    dated = ", ".join(f"{table.key} of {table.created}" for table in tables)
    return {"latency table": dated, **_identity_unmeasured(plan, prepared.dataset), "target": targets,
            "accuracy": accuracy, "objective": str(prepared.options.objective)}


def _identity_unmeasured(plan: Plan, dataset: Dataset) -> dict[str, str]:
    """The part of it that is known before this host is measured."""
    cap_ms = plan.options.budget.latency_ms
    return {
        "space": f"{plan.space.name} ({plan.space.fingerprint})",
        "data set": f"{dataset.name} ({dataset.fingerprint})",
        **({"latency table": "none, as the race times its networks"} if plan.races else {}),
        "host": plan.deployment.host_name, "budget.latency_ms": "none" if cap_ms is None else f"{cap_ms:g} ms",
        "seed": str(plan.options.seed)}


def _open_study(plan: Plan, url: str, identity: dict[str, str], model: Latency | BestOf, options: SearchOptions,
                chosen: Mapping[str, int]) -> optuna.Study:
    context = Context(plan.space, model.predict, options.objective, options.cap_ms, options.cap_quantile)
    beat_s = None if plan.races else HEARTBEAT_S  # lines have claims of their own
    return open_study(url, identity, options.objective, plan.sampler(context), chosen=chosen, heartbeat_s=beat_s)
