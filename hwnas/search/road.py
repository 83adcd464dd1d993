"""The road of a search: plan, prepare, search, finalists, verify, report. `search` shows all of it, in order."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import optuna

from hwnas.cli.options import Config
from hwnas.cli.progress import Console
from hwnas.front.make import BuildSettings, fault_of, fingerprint, other_start
from hwnas.front.pairs import load_pairs
from hwnas.front.rows import FrontRow, load_front
from hwnas.front.score import Scores, Timing
from hwnas.front.verification import (
    Results,
    SearchFacts,
    environment_of,
    make_rows,
    results_of,
    verify_front,
    write_results,
)
from hwnas.latency.measured import answered
from hwnas.search.deployments import deploy_rows
from hwnas.search.explorer import Explorer, url_of
from hwnas.search.minutes import (
    ENDING_S,
    ENOUGH_STEPS,
    STEPS,
    Clock,
    affordable,
    fitted,
    timing_reserve_s,
    timing_seconds,
    with_steps,
)
from hwnas.search.plan import RACE, Plan, make_plan
from hwnas.search.racing import ObviousCuts
from hwnas.search.trials import Sampled
from hwnas.study.storage import storage_errors
from hwnas.system.clock import read_spent_s, spending
from hwnas.system.paths import write_atomic
from hwnas.system.processes import crew
from hwnas.system.run_folder import Manifest, RunFolder, settle_home
from hwnas.training.place import tell_idle

REMARKS = "remarks"  # attribute of the study: the report's remarks on what was left out
OVERRUN = 0.05  # share of the minutes that a search may take more, without a word
MOST_TIMES = 10  # as many steps as the recipe's own a budget of minutes gives at most


@dataclass(frozen=True)
class SearchResult:
    """A search that has ended: rows of trials.csv, rows of the front and their comparisons with the baselines.

    `trials` and `rows` are empty if another process verifies the front. `early` has a line for each worker that ended
    early: others evaluated its trials. `at_hand`: the rows were to be verified by this search.
    """

    run: RunFolder
    study: optuna.Study
    trials: Sequence[Mapping[str, Any]] = ()
    rows: Sequence[FrontRow] = ()
    comparisons: Sequence[Mapping[str, Any]] = ()
    early: Sequence[str] = ()
    at_hand: bool = False


def search(config: Config, console: Console) -> SearchResult:
    """Run the whole road. After a kill at any point, the same call continues. Parallel calls share the trials."""
    began = Clock.start(0.0)
    settle_home(config.get("out"), bool(config.get("overwrite")), console.note)
    plan = make_plan(config, console)
    tell_idle(plan.options.training.device, console.say)
    run = RunFolder.create(plan.out, plan.options.overwrite)
    clock = replace(began, minutes=plan.options.budget.minutes or 0.0, before_s=read_spent_s(run.spent))
    with spending(run.spent, began.began):
        return _search(plan, run, clock, console)


def _search(plan: Plan, run: RunFolder, clock: Clock, console: Console) -> SearchResult:
    """Run the road after the plan, in the run's folder."""
    _read_held(run)  # what cannot be read is refused now, not after the trials
    if plan.options.around is not None:
        plan.space.source = run.path / "space.yaml"
        if not plan.space.source.exists():  # an earlier one stays if this search is refused
            write_atomic(plan.space.source, plan.space.text)
    if clock.minutes and clock.before_s >= 1:
        console.note(f"{clock.before_s / 60:.1f} of {clock.minutes:g} min were spent before")
    # Prepare. A search that is refused here leaves the files of an earlier one.
    explorer = explorer_of(plan).prepare(plan, run, console, clock if clock.minutes else None)
    _keep_remarks(explorer, console)
    run.write_config(plan.yaml)
    if plan.options.around is not None:
        write_atomic(plan.space.source, plan.space.text)
    explorer.begin(console)
    _keep_remarks(explorer, console)
    ended = explore(explorer, console)
    # One process verifies the front, after all of them have searched.
    with run.hold("verify", wait=False) as is_verifier:
        if not is_verifier:
            console.say(f"another worker verifies the front in {run.path}; nothing left to do here.")
            return SearchResult(run, explorer.study, early=ended)
        trials = explorer.trials(console)
        run.write_trials(trials)
        with run.hold("results", console.say):
            rows, comparisons = verified(explorer, trials, console)
    if clock.minutes and clock.left_s < -OVERRUN * 60 * clock.minutes:
        console.remark(f"note: the search took {clock.minutes - clock.left_s / 60:.1f} of {clock.minutes:g} min.")
    return SearchResult(run, explorer.study, trials, rows, comparisons, ended, plan.deployment.at_hand)


def _keep_remarks(explorer: Explorer, console: Console) -> list[str]:
    """Keep in the study and return all remarks so far: after a kill nobody says them again."""
    url = url_of(explorer.plan, explorer.run)
    with storage_errors(url):
        remarks = list(dict.fromkeys([*explorer.study.user_attrs.get(REMARKS, []), *console.remarks]))
        explorer.study.set_user_attr(REMARKS, remarks)
    return remarks


def explorer_of(plan: Plan) -> type[Explorer]:
    """Return the class that decides which networks are tried next."""
    return ObviousCuts if plan.accuracy == RACE else Sampled


def explore(explorer: Explorer, console: Console) -> list[str]:
    """Work on the study until it is done, on all workers. Returns a line for each that ended early."""
    with crew(explorer.n_workers - 1, "hwnas.worker", ["-q", "--as-is", f"run={explorer.run.path.absolute()}"],
              console.say, unseen=["--as-is", f"config={explorer.plan.config}"]) as early:
        explorer.work(console)
    return early


def verified(explorer: Explorer, trials: Sequence[Mapping[str, Any]], console: Console
             ) -> tuple[Sequence[FrontRow], Sequence[Mapping[str, Any]]]:
    """Make, verify and write finalists, controls and baselines. Returns the rows and the comparisons.

    If the run folder has a verified front of the same networks, it is read instead. If the host of the search is not at
    hand, nothing is verified: the rows keep their predictions, and `hwnas verify run=DIR` on that host completes them.
    """
    plan, run = explorer.plan, explorer.run
    making = replace(explorer.making, raced=explorer.trained(), begun=explorer.begun())
    # 1. The rows: of each network, then of each network in its deployments.
    network_rows = explorer.front_rows(trials, console)
    deployed = answered(lambda: deploy_rows(network_rows, explorer.calibrated, plan.able, explorer.options,
                                            plan.space.reference, console.remark), console)
    able = {row.trained_id for row in deployed}
    rows = [row for row in network_rows if row.trained_id in able]
    # 2. The networks and steps for which there is time.
    if explorer.clock is not None and explorer.pace is not None:
        rows, making = _in_time(explorer, rows, deployed, making, console)
    kept_ids = {row.id for row in rows}
    if earlier := _held_front(explorer, making, deployed, kept_ids, console):
        return earlier, run.read_comparisons()
    # 3. The files, the verification, the results. Weights that are not needed any more go last.
    rows = make_rows([row for row in deployed if row.trained_id in kept_ids], run, making, plan.workers, console)
    results = _verified_rows(explorer, rows, making, trials, console)
    results = replace(results, environment={
        **results.environment, "spent_s": dict(console.spent_s), "remarks": _keep_remarks(explorer, console)})
    write_results(run, results, making)
    explorer.clear()
    return results.rows, [asdict(comparison) for comparison in results.comparisons]


def _held_front(explorer: Explorer, making: BuildSettings, wanted: Sequence[FrontRow], kept: Container[str],
                console: Console) -> list[FrontRow]:
    """Return the verified front in the run folder if it has all `kept` networks, only `wanted` ones and no spoilt file;
    otherwise nothing, and a line says why."""
    plan, run = explorer.plan, explorer.run
    rows = [row for row in wanted if row.trained_id in kept]
    earlier = _read_verified(run, rows, wanted, asdict(making.recipe), plan.options.budget.p99_ms)
    names = {row.id for row in earlier}
    spoilt = next((f"{row.id}: {why}" for row in wanted if row.id in names and row.network is not None
                   and (why := fault_of(row.network, run.model(row.id), making, complete=True)
                        or other_start(row.network, run.model(row.id), making))), "")
    if spoilt:
        console.say(f"the front in {run.path} is made and timed again: {spoilt}.")
    elif earlier:
        console.say(f"the front in {run.path} is verified already; to time it again: hwnas verify run={run.path}")
        return earlier
    elif _read_held(run)[0]:
        console.say(f"the front in {run.path} is of other networks, or trained or capped otherwise: it is made again.")
    return []


def _verified_rows(explorer: Explorer, rows: Sequence[FrontRow], making: BuildSettings,
                   trials: Sequence[Mapping[str, Any]], console: Console) -> Results:
    """Score and time the rows' files, if the host that they are for is at hand."""
    run, deployment = explorer.run, explorer.deployment
    facts, objective = _facts(explorer, trials, len(rows)), explorer.options.objective
    environment = environment_of(making, facts, [row.network for row in rows if row.network is not None])
    environment |= explorer.report_facts()
    several = len(explorer.calibrated) > 1
    if texts := [(f"{each.name}: " if several else "") + each.session.told for each in explorer.calibrated
                 if each.session is not None]:
        environment["session"] = {"told": "; ".join(texts)}
    if deployment.at_hand:
        return verify_front(rows, run, making, facts.timing, objective, environment, console)
    console.say(f"not verified: this is not {deployment.host_name}. Over there: hwnas verify run={run.path}")
    return results_of(Scores([*rows]), run, making, objective, environment)


def _in_time(explorer: Explorer, rows: Sequence[FrontRow], deployed: Sequence[FrontRow], making: BuildSettings,
             console: Console) -> tuple[list[FrontRow], BuildSettings]:
    """Return the rows that the minutes allow, and the settings with as many steps as fit. `deployed` has the rows in
    their deployments, which have the files.

    The first command that comes here decides the steps: a later one with other steps would train all networks anew.
    """
    clock, pace, plan = explorer.clock, explorer.pace, explorer.plan
    assert clock is not None
    assert pace is not None
    untrained = [row for row in rows if row.id not in making.raced]
    trained = [row for row in rows if row.id in making.raced]
    stored_steps, reserve_s = explorer.study.user_attrs.get(STEPS), timing_reserve_s(clock) + ENDING_S

    def affordable_of(rows: Sequence[FrontRow], each_s: float, left_s: float) -> list[FrontRow]:
        return affordable(rows, partial(_is_made, deployed, explorer.run, making), each_s, left_s, console.remark)

    if untrained:
        pace = pace.with_networks([row.network for row in untrained if row.network is not None],
                                  replace(making, begun={}))
        pace = replace(pace, done={id: start.steps for id, start in making.begun.items()})
    # Trained networks come first: they only need to be exported.
    each_s = pace.scoring_s + pace.exporting_s / min(max(1, len(trained)), plan.workers)
    more_s = OVERRUN * 60 * clock.minutes  # a trained network is worth more than the seconds of its export
    trained = affordable_of(trained, each_s, clock.left_s + more_s - reserve_s)
    if not untrained:
        return trained, making
    # An earlier command decided the steps: only the number of networks can follow the minutes.
    if isinstance(stored_steps, int):
        console.note(f"networks are trained for {stored_steps} steps, as the first command decided; for others give "
                     "out=FOLDER")
        making = replace(making, recipe=with_steps(making.recipe, stored_steps))
        longest_s = max(pace.step_s[row.network.id] for row in untrained if row.network is not None)
        each_s = pace.scoring_s + (pace.making_s + stored_steps * longest_s) / min(len(untrained), plan.workers)
        selected = affordable_of(untrained, each_s, clock.left_s - reserve_s)
        return [row for row in rows if row in selected or row in trained], making
    # This command decides the steps of all that are not trained yet.
    full = making.recipe.steps_for(len(making.dataset.train))
    selected, steps = fitted(untrained, clock, pace, plan.workers, (min(full, ENOUGH_STEPS), MOST_TIMES * full),
                             console.remark, plan.whole, len(trained) * each_s)
    if selected:
        _keep_steps(explorer, clock, len(selected), steps, console)
        making = replace(making, recipe=with_steps(making.recipe, steps))
    return [row for row in rows if row in selected or row in trained], making


def _keep_steps(explorer: Explorer, clock: Clock, n: int, steps: int, console: Console) -> None:
    """Store the steps of each of `n` trainings for later commands, and say them."""
    left = f"{clock.left_s / 60:.1f} min are left" if clock.left_s > 0 else "the minutes are over"
    console.note(f"{left}: {n} networks are trained for {steps} steps each")
    with storage_errors(url_of(explorer.plan, explorer.run)):
        explorer.study.set_user_attr(STEPS, steps)


def _is_made(deployed: Sequence[FrontRow], run: RunFolder, making: BuildSettings, row: FrontRow) -> bool:
    """Return whether the files of a row's network are there for all of its deployments, trained as `making` says."""
    networks = [each.network for each in deployed if each.trained_id == row.trained_id]
    return all(network is not None and (manifest := Manifest.find(run.model(network.id).path)) is not None
               and manifest.recipe == fingerprint(network, making)
               and not fault_of(network, run.model(network.id), making) for network in networks)


def _read_verified(run: RunFolder, rows: Sequence[FrontRow], wanted: Sequence[FrontRow], recipe: Mapping[str, Any],
                   p99_ms: float | None) -> list[FrontRow]:
    """Return the verified front in the run folder; [] if it lacks `rows`, or differs in networks, recipe or p99 cap."""
    earlier_rows, environment = _read_held(run)
    if not earlier_rows:
        return []
    names, earlier = {row.id for row in earlier_rows}, environment.get("recipe")
    same = {row.id for row in rows} <= names <= {row.id for row in wanted}
    place = {key: recipe[key] for key in ("device",) if key in recipe}  # the device of the training does not count
    alike = isinstance(earlier, dict) and {**earlier, **place} == recipe
    usable = same and alike and environment.get("cap_p99_ms") == p99_ms and all(row.verified for row in earlier_rows)
    return earlier_rows if usable else []


def _read_held(run: RunFolder) -> tuple[list[FrontRow], dict[str, Any]]:
    """Return the front in the run folder, if it has a report, and its environment. StudyError if it cannot be read."""
    if not run.front_csv.exists() or not run.report.exists():
        return [], {}
    rows, environment = load_front(run), run.find_environment()
    run.read_comparisons()
    load_pairs(run)
    return rows, environment


def _facts(explorer: Explorer, trials: Sequence[Mapping[str, Any]], n: int) -> SearchFacts:
    """Return the facts about the search that the report shows."""
    plan, table, options = explorer.plan, explorer.table, explorer.plan.options
    seconds = explorer.files * options.verification.seconds
    if explorer.clock is not None and explorer.pace is not None:
        seconds = timing_seconds(explorer.clock, n, explorer.pace.scoring_s / explorer.files)
    timing = Timing(table.reference, seconds, options.seed, plan.deployment.device)
    latency = {"created": table.created, **explorer.latency_facts()}
    outcome = {"accuracy": plan.accuracy, "sampler": "none" if plan.accuracy == RACE else options.sampler,
               "objective": explorer.options.objective.shown,
               "n_trials": sum(row["outcome"] == "evaluated" for row in trials), "asks": len(trials)}
    return SearchFacts(plan.deployment.host_name, plan.space.name, timing, options.target["name"],
                       options.budget.latency_ms, options.budget.p99_ms, latency, outcome)
