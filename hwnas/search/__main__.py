"""The main job: find, train, quantise and verify networks for a target: python -m hwnas.search +target=xeon_int8"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.front.rows import load_front
from hwnas.latency.deployment import error_line
from hwnas.search.prepare import Prepared, prepare, search_trials
from hwnas.study.costs import KNOWN

if TYPE_CHECKING:
    import optuna

    from hwnas.front.finalists import Finalist
    from hwnas.front.verification import Facts
    from hwnas.space.architecture import Architecture
    from hwnas.space.search_space import SearchSpace
    from hwnas.system.run_folder import RunFolder

USAGE = """Search, train, quantise and verify networks for a target. Results lie in out=FOLDER
(default runs/<target>-<space>-<dataset>).

    python -m hwnas.search +target=xeon_int8
    python -m hwnas.search +target=xeon_int8 dataset=imagefolder dataset.root=/data/parts space=mnasnet \\
        budget.latency_ms=2.5 n_trials=200

The same command again resumes; in another terminal it joins as a worker. --show-config prints every option."""


def main(config: Any, console: Console) -> None:
    """The whole road: plan, latency model, trials, verified front."""
    from hwnas.search.worker import extra_workers

    prepared = prepare(config, console)
    plan = prepared.plan
    plan.run.write_config(_yaml(config))
    with extra_workers(min(plan.workers, plan.n_trials) - 1, plan.run, console):
        search_trials(prepared, console)
    _verify(prepared, console)


def _verify(prepared: Prepared, console: Console) -> None:
    """Finalists and baselines, by the one worker that holds the lock; others leave it to that one."""
    from hwnas.front.finalists import finalists_of
    from hwnas.front.verification import finish
    from hwnas.study.record import trial_rows
    from hwnas.study.study import acquire_verifier, wait_for_others

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
    rows = load_front(run)
    recipe = (run.read_json(run.environment, default={}) or {}).get("recipe")
    return {row.id for row in rows} == expected and all(row.verified for row in rows) \
        and recipe == asdict(prepared.making.recipe)


def _facts(prepared: Prepared, trials: list[dict[str, Any]]) -> Facts:
    """What the report is told of the search."""
    from hwnas.accuracy.certificate_text import certificate_facts
    from hwnas.front.score import Timing
    from hwnas.front.verification import Facts

    plan, table = prepared.plan, prepared.table
    timing = Timing(table.reference, table.quiet_ms if plan.deployment.here else None, plan.seconds, plan.seed)
    latency = {**table.error[plan.space.name], "line": error_line(table, plan.space), "table": str(table.key),
               "created": table.created, "overhead_ms": table.overhead_ms}
    chosen = prepared.chosen
    certificate = certificate_facts(prepared.dataset, plan.space, chosen.accuracy, chosen.options,
                                    prepared.estimator.fingerprint)
    search = {"accuracy": chosen.accuracy, "sampler": str(plan.config.sampler),
              "objective": str(prepared.options.objective),
              "n_trials": sum(row["outcome"] == "evaluated" for row in trials), "asks": len(trials)}
    return Facts(plan.deployment.host_name, plan.deployment.here, plan.space.name, timing, plan.cap_ms, plan.workers,
                 latency, search, certificate)


def _architectures(study: optuna.Study, space: SearchSpace) -> dict[str, Architecture]:
    """Every network that a trial evaluated, by id."""
    found = (space.decode(trial.params) for trial in study.get_trials(deepcopy=False) if trial.values)
    return {one.id: one for one in found}


def _conclude(run: RunFolder, console: Console) -> None:
    """The result in a few lines."""
    rows = load_front(run)
    for row in sorted(rows, key=lambda row: row.best_latency_ms or 0.0):
        mark = "*" if row.on_front else " "
        top1 = "-" if row.best_top1 is None else f"{row.best_top1:.2%}"
        latency = "-" if row.best_latency_ms is None else f"{row.best_latency_ms:.3f} ms"
        state = "" if row.verified else f"  not verified{': ' if row.reason else ''}{row.reason}"
        costs = "".join(f"  {KNOWN[one.name].shown(one.best):>10}" for one in row.costs)
        console.say(f"{mark} {row.id:<28} top-1 {top1:>7}  {latency:>10}{costs}{state}")
    for comparison in run.read_json(run.comparisons, default=[]):
        console.say(str(comparison.get("sentence", "")))
    console.say(f"report: {run.report}")


def _yaml(config: Any) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config, resolve=True)


if __name__ == "__main__":
    sys.exit(run_command(main, "search", USAGE))
