"""The main job: find, train, quantise and verify networks for a target: python -m hwnas.search +target=xeon_int8"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hwnas.command import run_command
from hwnas.deployment import error_line, latency_model
from hwnas.plan import Plan, make_plan, search_options
from hwnas.progress import Console, Report

if TYPE_CHECKING:
    import optuna

    from hwnas.accuracy import AccuracyEstimator
    from hwnas.accuracy.data import Dataset
    from hwnas.architecture import Architecture
    from hwnas.deployable import Making
    from hwnas.finalists import Finalist
    from hwnas.latency.model import LatencyModel
    from hwnas.latency.table import LatencyTable
    from hwnas.run_folder import RunFolder
    from hwnas.search_trial import SearchOptions
    from hwnas.space import SearchSpace
    from hwnas.verification import Facts

USAGE = """Search, train, quantise and verify networks for a target. Results lie in out=FOLDER
(default runs/<target>-<space>-<dataset>).

    python -m hwnas.search +target=xeon_int8
    python -m hwnas.search +target=xeon_int8 dataset=imagefolder dataset.root=/data/parts space=mnasnet \\
        budget.latency_ms=2.5 n_trials=200

The same command again resumes; in another terminal it joins as a worker. --show-config prints every option."""


@dataclass(frozen=True)
class Prepared:
    """Everything that the trials and the verification work with."""

    plan: Plan
    dataset: Dataset
    estimator: AccuracyEstimator
    making: Making
    table: LatencyTable
    model: LatencyModel
    options: SearchOptions
    study: optuna.Study


def main(config: Any, console: Console) -> None:
    """The whole road: plan, latency model, trials, verified front."""
    from hwnas.worker import extra_workers

    prepared = prepare(config, console)
    plan = prepared.plan
    plan.run.write_config(_yaml(config))
    with extra_workers(min(plan.workers, plan.n_trials) - 1, plan.run, console):
        search_trials(prepared, console)
    _verify(prepared, console)


def prepare(config: Any, console: Console) -> Prepared:
    """Check the options, load the data, measure this host where it must be, open the study."""
    plan = make_plan(config, console)
    dataset = _load_data(plan, console)
    estimator = _estimator(plan, dataset)
    making = _making(plan, dataset)
    table, model = latency_model(plan.deployment, plan.space, plan.calibration, console)
    options = search_options(plan, model)
    study = _open_study(plan, table, dataset, estimator, options)
    return Prepared(plan, dataset, estimator, making, table, model, options, study)


def _load_data(plan: Plan, console: Console) -> Dataset:
    from hwnas.accuracy.data import load_dataset

    with console.step("load data") as report:
        data = load_dataset(plan.section("dataset"), max(plan.space.image_sizes), plan.seed,
                            lambda done, total: report(done / max(total, 1)))
    console.note(f"{data.name}: {len(data.train)} training, {len(data.validation)} validation, {len(data.test)} test "
                 f"images of {len(data.class_names)} classes at {data.image_size} px"
                 + (f", {data.skipped} unreadable left out" if data.skipped else ""))
    return data


def _estimator(plan: Plan, dataset: Dataset) -> AccuracyEstimator:
    from hwnas.accuracy import load_estimator

    name = str(plan.config.accuracy)
    section = plan.section(name) if name in plan.config else {}
    if name == "proxy":
        section = {"threads": plan.threads, **section}
    return load_estimator(name, dataset=dataset, space=plan.space, config=section)


def _making(plan: Plan, dataset: Dataset) -> Making:
    from hwnas.accuracy.recipe import FINALIST, Recipe
    from hwnas.deployable import Making

    given = {"threads": plan.threads, **plan.section("finalists")["recipe"]}
    recipe = Recipe.from_config(given, FINALIST, "finalists.recipe")
    return Making(dataset, recipe, plan.seed, plan.deployment.target)


def _open_study(plan: Plan, table: LatencyTable, dataset: Dataset, estimator: AccuracyEstimator,
                options: SearchOptions) -> optuna.Study:
    from hwnas.samplers import load_sampler
    from hwnas.study import database_path, open_study

    deployment, cap = plan.deployment, "none" if plan.cap_ms is None else f"{plan.cap_ms:g} ms"
    identity = {
        "space": f"{plan.space.name} ({plan.space.fingerprint})", "data set": f"{dataset.name} ({dataset.fingerprint})",
        "target": f"{deployment.target.name} ({table.key})", "host": deployment.host_name,
        "latency table": f"{table.key} of {table.created}",
        "accuracy": f"{plan.config.accuracy} ({estimator.fingerprint})", "objective": str(options.objective),
        "budget.latency_ms": cap, "seed": str(plan.seed)}
    sampler = load_sampler(str(plan.config.sampler), plan.seed, **plan.section("sampler_options"))
    return open_study(plan.config.storage or database_path(plan.run.path), identity, options.objective, sampler)


def search_trials(prepared: Prepared, console: Console) -> None:
    """Evaluate architectures until the study is done, as one of its workers."""
    from hwnas.search_loop import run_search

    plan, options = prepared.plan, prepared.options
    console.note(f"search: {options.n_trials} architectures of {plan.space.n_architectures:.3g} in space "
                 f"{plan.space.name}, {options.objective}, sampler {plan.config.sampler}")
    with console.step("search") as report:
        outcome = run_search(prepared.study, plan.space, prepared.model.predict, prepared.estimator, options,
                             _heard(report))
    console.note(f"search ended: {outcome.reason} ({outcome.n_asks} asks, {outcome.n_pruned} over the cap, "
                 f"{outcome.n_duplicates} duplicates, {outcome.n_failed} failed)")


def _heard(report: Report) -> Any:
    best = 0.0

    def hear(event: Any) -> None:
        nonlocal best
        if event.top1 is not None:
            best = max(best, event.top1)
        at = f", {event.id} at {event.latency_ms:.3g} ms" if event.id and event.latency_ms else ""
        report(event.counts.evaluated / event.n_trials,
               f"{event.counts.evaluated} of {event.n_trials} evaluated, best proxy top-1 {best:.1%}{at}")

    return hear


def _verify(prepared: Prepared, console: Console) -> None:
    """Finalists and baselines, by the one worker that holds the lock; others leave it to that one."""
    from hwnas.finalists import finalists_of
    from hwnas.study import acquire_verifier, trial_rows, wait_for_others
    from hwnas.verification import finish

    plan, study = prepared.plan, prepared.study
    lock = acquire_verifier(plan.run.path)
    if lock is None:
        console.say(f"another worker verifies the front in {plan.run.path}; nothing left to do here.")
        return
    with lock:
        wait_for_others(study, waiting=lambda n: console.note(f"waiting for {n} other trials"))
        trials = trial_rows(study)
        plan.run.write_trials(trials)
        finalists = finalists_of(trials, _architectures(study, plan.space), plan.k)
        facts = _facts(prepared, trials)
        if _is_verified(prepared, finalists):
            console.say(f"the front in {plan.run.path} is verified already; to time it again: "
                        f"python -m hwnas.verify run={plan.run.path}")
            _conclude(plan.run, console)
            return
        finish(plan.run, finalists, plan.baselines, prepared.making, facts, console)
        _conclude(plan.run, console)


def _is_verified(prepared: Prepared, finalists: list[Finalist]) -> bool:
    """Whether the run folder holds a verified front of just these networks, trained by this recipe."""
    run = prepared.plan.run
    expected = {one.id for one in finalists} | {one.id for one in prepared.plan.baselines}
    if not run.front_csv.is_file() or not run.report.is_file():
        return False
    rows = run.read_front()
    recipe = (run.read_json(run.environment, default={}) or {}).get("recipe")
    return {row.id for row in rows} == expected and all(row.verified for row in rows) \
        and recipe == asdict(prepared.making.recipe)


def _facts(prepared: Prepared, trials: list[dict[str, Any]]) -> Facts:
    """What the report is told of the search."""
    from hwnas.scoring import Timing
    from hwnas.verification import Facts

    plan, table = prepared.plan, prepared.table
    timing = Timing(table.reference, table.quiet_ms if plan.deployment.here else None, plan.seconds, plan.seed)
    latency = {**table.error[plan.space.name], "line": error_line(table, plan.space), "table": str(table.key),
               "created": table.created, "overhead_ms": table.overhead_ms}
    search = {"sampler": str(plan.config.sampler), "objective": str(prepared.options.objective),
              "n_trials": sum(row["outcome"] == "evaluated" for row in trials), "asks": len(trials)}
    return Facts(plan.deployment.host_name, plan.deployment.here, plan.space.name, timing, plan.cap_ms, plan.workers,
                 latency, search)


def _architectures(study: optuna.Study, space: SearchSpace) -> dict[str, Architecture]:
    """Every network that a trial evaluated, by id."""
    found = (space.decode(trial.params) for trial in study.get_trials(deepcopy=False) if trial.values)
    return {one.id: one for one in found}


def _conclude(run: RunFolder, console: Console) -> None:
    """The result in a few lines."""
    rows = run.read_front()
    for row in sorted(rows, key=lambda row: row.best_latency_ms or 0.0):
        mark = "*" if row.on_front else " "
        top1 = "-" if row.best_top1 is None else f"{row.best_top1:.2%}"
        latency = "-" if row.best_latency_ms is None else f"{row.best_latency_ms:.3f} ms"
        console.say(f"{mark} {row.id:<28} top-1 {top1:>7}  {latency:>10}  {'' if row.verified else 'not verified'}"
                    f"{row.reason}")
    for comparison in run.read_json(run.comparisons, default=[]):
        console.say(str(comparison.get("sentence", "")))
    console.say(f"report: {run.report}")


def _yaml(config: Any) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config, resolve=True)


if __name__ == "__main__":
    sys.exit(run_command(main, "search", USAGE))
