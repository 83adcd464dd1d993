"""The road of a search: plan, prepare, search, finalists, verify, report. `search` shows all of it, in order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hwnas.cli.options import Config
from hwnas.cli.progress import Console, Report
from hwnas.errors import BudgetError, SamplerError, StudyError
from hwnas.latency.deployment import error_line
from hwnas.networks.network import FoundNetwork
from hwnas.search.minutes import (
    ENOUGH_STEPS,
    Clock,
    fitted,
    timing_reserve_s,
    timing_seconds,
    with_steps,
)
from hwnas.search.plan import UNLIMITED, Plan, make_plan, making_of
from hwnas.search.prepare import Prepared, prepare, trials_s
from hwnas.search.racing import begin_race, clear_lines, race_lines, race_rows, raced_of, stories_of, whole_of
from hwnas.space.search_space import WHOLE
from hwnas.system.paths import write_atomic
from hwnas.system.processes import crew
from hwnas.system.run_folder import RunFolder
from hwnas.training.place import tell_idle

if TYPE_CHECKING:
    import optuna

    from hwnas.front.make import Making
    from hwnas.front.rows import FrontRow
    from hwnas.front.verification import Facts
    from hwnas.search.loop import SearchEvent


UNTIL = "search_until"  # of the study: when its trials end, seconds since 1970
MOST_TIMES = 10  # as many steps as the recipe's own a budget of minutes gives at most


@dataclass(frozen=True)
class SearchResult:
    """A search that has ended: rows of trials.csv, rows of the front and their comparisons with the baselines.

    `trials` and `rows` are empty where another process verifies the front. `early` has a line for each worker that
    ended early: their trials were evaluated by the others. `at_hand`: the rows were to be verified by this search.
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
    from hwnas.study.record import trial_rows
    from hwnas.study.study import wait_for_others

    began = Clock.start(0.0)
    plan = make_plan(config, console)
    tell_idle(plan.options.training.device, console.say)
    run = RunFolder.create(plan.out, plan.options.overwrite)
    _read_held(run)  # what cannot be read is refused now, not after the trials
    minutes = plan.options.budget.minutes
    if plan.options.around is not None:
        plan.space.source = run.path / "space.yaml"
        if not plan.space.source.exists():  # an earlier one stays if this search is refused
            write_atomic(plan.space.source, plan.space.text)
    prepared = prepare(plan, run, console, replace(began, minutes=minutes) if minutes else None)
    plan = prepared.plan
    run.write_config(plan.yaml)
    if plan.options.around is not None:
        write_atomic(plan.space.source, plan.space.text)
    if plan.races:
        begin_race(prepared, console)
    else:
        _divide(prepared, console)
    ended = searched(prepared, console)
    with run.hold("verify", wait=False) as held:
        if not held:
            console.say(f"another worker verifies the front in {run.path}; nothing left to do here.")
            return SearchResult(run, prepared.study, early=ended)
        wait_for_others(prepared.study, waiting=lambda n: console.note(f"waiting for {n} other trials"))
        trials = trial_rows(prepared.study)
        if not plan.races:
            trials = _estimated(prepared, trials, console)
        run.write_trials(trials)
        with run.hold("results", console.say):
            rows, comparisons = verified(prepared, trials, console)
    return SearchResult(run, prepared.study, trials, rows, comparisons, ended, plan.deployment.at_hand)


def _divide(prepared: Prepared, console: Console) -> None:
    """Print the plan of the minutes, and set the end of the trials, which workers read in the study."""
    from hwnas.study.storage import storage_errors
    from hwnas.study.study import storage_of

    clock, pace, plan, until = prepared.clock, prepared.pace, prepared.plan, None
    if clock is not None and pace is not None:
        seconds = trials_s(plan, clock, pace)
        rest_s, timing_s = clock.left_s - seconds, timing_reserve_s(clock)
        n_known = len({*plan.space.known} - ({WHOLE} if plan.whole else set())) if plan.options.controls else 0
        console.note(f"plan for {clock.minutes:g} min: {clock.spent_s / 60:.1f} to prepare (done), {seconds / 60:.1f} "
                     f"for trials, about {(rest_s - timing_s) / 60:.1f} to train and export {plan.parts} finalists, "
                     f"{plan.options.controls} controls, up to {n_known} known networks and {len(plan.baselines)} "
                     f"baselines, {timing_s / 60:.1f} to score and time them")
        until = time.time() + seconds
    with storage_errors(storage_of(prepared.study).url):
        prepared.study.set_user_attr(UNTIL, until)


def extra_workers(n: int, plan: Plan, run: RunFolder, console: Console) -> AbstractContextManager[list[str]]:
    """Run `n` workers beside this process during the block. They end with the search, or with this process.

    Yields a list that has a line for each worker that ended early, after the block.
    """
    return crew(n, "hwnas.worker", ["-q", "--as-is", f"run={run.path.absolute()}"], console.say,
                unseen=["--as-is", f"config={plan.config}"])


def searched(prepared: Prepared, console: Console) -> list[str]:
    """Work on the study until it is done, on all workers; a line for each that ended early."""
    plan = prepared.plan
    n = plan.workers if plan.races else min(plan.workers, plan.options.trials)
    with extra_workers(n - 1, plan, prepared.run, console) as early:
        work_on(prepared, console)
    return early


def work_on(prepared: Prepared, console: Console) -> None:
    """Work on the study until it is done, as one of its workers."""
    if prepared.plan.races:
        race_lines(prepared, console)
    else:
        search_trials(prepared, console)


def search_trials(prepared: Prepared, console: Console) -> None:
    """Trials until enough networks are evaluated, as one of the workers."""
    from hwnas.search.loop import run_search

    plan, estimator = prepared.plan, prepared.estimator
    assert estimator is not None
    options = replace(prepared.options, until=prepared.study.user_attrs.get(UNTIL))
    n = f"{options.n_trials} architectures" if options.until is None else \
        f"architectures for {max(0.0, options.until - time.time()) / 60:.1f} min, out"
    console.note(f"search: {n} of {plan.space.n_architectures:.3g} in space "
                 f"{plan.space.name}, {options.objective.shown}, sampler {plan.options.sampler}")
    with console.step("search") as report:
        outcome = run_search(prepared.study, plan.space, prepared.model.predict, estimator, options,
                             _tell(report, options.until))
    console.note(f"search ended: {outcome.reason} ({outcome.n_asks} asks, {outcome.n_pruned} over the cap, "
                 f"{outcome.n_duplicates} duplicates, {outcome.n_failed} failed)")


def verified(prepared: Prepared, trials: Sequence[Mapping[str, Any]], console: Console
             ) -> tuple[Sequence[FrontRow], Sequence[Mapping[str, Any]]]:
    """Make, verify and write finalists, controls and baselines; returns the rows and the comparisons.

    A verified front of the same networks in the run folder is read instead. If the host searched for is not at hand,
    nothing is verified: the rows keep their predictions, and `python -m hwnas.verify run=DIR` on that host completes
    them.
    """
    from hwnas.front.join import joined_rows
    from hwnas.front.make import fault_of, other_start
    from hwnas.front.score import Scores
    from hwnas.front.verification import environment_of, make_rows, results_of, verify_front, write_results

    plan, run, deployment = prepared.plan, prepared.run, prepared.plan.deployment
    making = replace(making_of(plan, prepared.dataset), narrow=_narrow(prepared),
                     raced=raced_of(prepared) if plan.races else {})
    wanted = rows = _race_wanted(prepared) if plan.races else _wanted(prepared, trials, console)
    if prepared.clock is not None and prepared.pace is not None:
        rows, making = _in_time(prepared, rows, making, console)
    joined = joined_rows(run, making, deployment.host_name)
    held = _read_verified(run, [*rows, *joined], [*wanted, *joined], asdict(making.recipe), plan.options.budget.p99_ms)
    names = {row.id for row in held}
    spoilt = next((f"{row.id}: {why}" for row in [*wanted, *joined] if row.id in names and row.network is not None
                   and (why := fault_of(row.network, run.model(row.id), making, console.say, complete=True)
                        or other_start(row.network, run.model(row.id), making))), "")
    if spoilt:
        console.say(f"the front in {run.path} is made and timed again: {spoilt}.")
    elif held:
        console.say(f"the front in {run.path} is verified already; to time it again: "
                    f"python -m hwnas.verify run={run.path}")
        return held, run.read_comparisons()
    elif _read_held(run)[0]:
        console.say(f"the front in {run.path} is of other networks, or trained or capped otherwise: it is made again.")
    rows = [*make_rows(rows, run, making, plan.workers, console), *joined]
    facts, objective = _facts(prepared, trials, len(rows)), prepared.options.objective
    environment = environment_of(making, facts, [row.network for row in rows if row.network is not None])
    if plan.races:
        environment["race"] = stories_of(prepared)
    if deployment.at_hand:
        results = verify_front(rows, run, making, facts.timing, objective, environment, console)
    else:
        results = results_of(Scores(rows), run, making, objective, environment)
        console.say(f"not verified: this is not {deployment.host_name}. Over there: python -m hwnas.verify "
                    f"run={run.path}")
    results = replace(results, environment={**results.environment, "spent_s": dict(console.spent_s)})
    write_results(run, results, making, trials, plan.yaml)
    if plan.races:
        clear_lines(prepared)
    return results.rows, [comparison.to_dict() for comparison in results.comparisons]


def _race_wanted(prepared: Prepared) -> list[FrontRow]:
    """The rows of the front as yet without figures: what the race has finished, and baselines. The whole network is
    one of these where it did not come through."""
    from hwnas.front.rows import FrontRow
    from hwnas.study.study import trial_rows

    plan, rows = prepared.plan, race_rows(prepared)
    if not rows:
        reasons = Counter(str(trial["reason"]) for trial in trial_rows(prepared.study) if trial.get("reason"))
        raise StudyError("no network came through the race" + "".join(
            f"; {n} of them: {reason}" for reason, n in reasons.most_common(1)))
    whole = whole_of(prepared)
    raced = whole is not None and any(row.id == whole.id for row in rows)
    return [*rows, *(FrontRow.of(network, target=plan.deployment.target.name, host=plan.deployment.host_name)
                     for network in plan.baselines if not (raced and network.id == plan.whole))]


def _wanted(prepared: Prepared, trials: Sequence[Mapping[str, Any]], console: Console) -> list[FrontRow]:
    """The rows of the front as yet without figures: finalists of the trials, controls and baselines."""
    from hwnas.front.finalists import doubts, draw_controls, finalists_of, known_controls
    from hwnas.front.rows import FrontRow

    plan, predict = prepared.plan, prepared.model.predict
    options, target, host = plan.options, plan.deployment.target.name, plan.deployment.host_name
    whole = plan.space.known.get(WHOLE) if plan.whole else None  # a baseline already
    finalists = finalists_of(trials, _network_of(prepared), plan.parts, target, host,
                             options.budget.latency_ms, whole.id if whole is not None else "")
    for doubt in doubts(trials, finalists, options.budget.latency_ms):
        console.say(f"note: {doubt}")
    controls = draw_controls(finalists, plan.space, predict, options.controls, options.seed, console.say, plan.start)
    if options.controls:
        controls += known_controls(plan.space, predict, [*finalists, *controls], options.budget.latency_ms,
                                   options.budget.quantile, console.say, plan.start,
                                   whole.id if whole is not None else "")
    return [*finalists, *controls, *(FrontRow.of(network, target=target, host=host) for network in plan.baselines)]


def _estimated(prepared: Prepared, trials: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    """The rows with what the model of all trials believes of each evaluated one's top-1, where they suffice for it.

    Other samplers search where ours cannot (a cap that almost nothing keeps, costs of another package): then the rows
    keep their own values, and a line says so.
    """
    from hwnas.samplers.informed import Context, beliefs
    from hwnas.system.run_folder import ESTIMATED

    options = prepared.options
    try:
        believed = beliefs(prepared.study, Context(prepared.plan.space, prepared.model.predict, options.objective,
                                                   options.cap_ms, options.cap_quantile))
    except (BudgetError, SamplerError) as error:
        console.say(f"note: finalists are chosen by their trials' own top-1, without a model of all trials: {error}")
        return trials
    for row in trials:
        if (belief := believed.get(row["number"])) is not None:
            row |= zip(ESTIMATED, (belief.mean, belief.low, belief.high), strict=True)
    return trials


def _narrow(prepared: Prepared) -> bool:
    """Whether int8 weights need 7 bits on the host that is searched for, by the CPU that its table names."""
    from hwnas.networks.quantize import needs_narrow_weights

    host = prepared.table.host
    return needs_narrow_weights(prepared.plan.deployment.target, host.get("vendor", ""), host.get("flags", ()))


def _in_time(prepared: Prepared, rows: Sequence[FrontRow], making: Making, console: Console
             ) -> tuple[list[FrontRow], Making]:
    """The rows that the minutes allow, and a recipe with as many steps as fit."""
    clock, pace, plan = prepared.clock, prepared.pace, prepared.plan
    assert clock is not None
    assert pace is not None
    untrained = [row for row in rows if row.id not in making.raced]
    if not untrained:
        return list(rows), making
    pace = pace.with_networks([row.network for row in untrained if row.network is not None], making)
    full = making.recipe.steps_for(len(making.dataset.train))
    n = len(rows) - len(untrained)
    kept, steps = fitted(untrained, clock, pace, plan.workers, (min(full, ENOUGH_STEPS), MOST_TIMES * full),
                         console.say, plan.whole, n * (pace.scoring_s + pace.making_s / min(n + 1, plan.workers)))
    console.note(f"{clock.left_s / 60:.1f} min are left: {len(kept)} networks are trained for {steps} steps each")
    return [row for row in rows if row in kept or row.id in making.raced], replace(making, recipe=with_steps(
        making.recipe, steps))


def _tell(report: Report, until: float | None) -> Callable[[SearchEvent], None]:
    """The function that shows each event in the progress bar."""
    best, began = 0.0, time.time()

    def tell(event: SearchEvent) -> None:
        nonlocal best
        best = max(best, event.top1 or 0.0)
        begun = event.kind == "training" and event.id and event.latency_ms
        at = f"; now {event.id} of {event.latency_ms:.3g} ms" if begun else ""
        done = event.counts.evaluated / event.n_trials
        if until is not None:
            done = max(done, min(1.0, (time.time() - began) / max(1.0, until - began)))
        of = f" of {event.n_trials}" if event.n_trials < UNLIMITED else ""
        so_far = f", best estimated top-1 {best:.1%}" if best else ""  # after a pause it is not known at once
        report(done, f"{event.counts.evaluated}{of} evaluated{so_far}{at}")

    return tell


def _network_of(prepared: Prepared) -> Callable[[Mapping[str, Any]], FoundNetwork]:
    """The function that makes the network of a row of trials.csv."""
    trials = {trial.number: trial for trial in prepared.study.get_trials(deepcopy=False)}
    return lambda row: prepared.plan.network(prepared.plan.space.decode(trials[row["number"]].params))


def _read_verified(run: RunFolder, rows: Sequence[FrontRow], wanted: Sequence[FrontRow], recipe: Mapping[str, Any],
                   p99_ms: float | None) -> list[FrontRow]:
    """The verified front in the run folder, if it has these `rows` and no others than are `wanted`, trained by this
    recipe and judged by this cap of p99; otherwise []."""
    held, environment = _read_held(run)
    if not held:
        return []
    names, earlier = {row.id for row in held}, environment.get("recipe")
    # Fronts of earlier versions have no known networks, and their recipes lack later fields.
    same = {row.id for row in rows if not row.is_known} <= names <= {row.id for row in wanted}
    place = {key: recipe[key] for key in ("device",) if key in recipe}  # where they were trained does not count
    alike = isinstance(earlier, dict) and {**_defaults(recipe, earlier), **earlier, **place} == recipe
    usable = same and alike and environment.get("cap_p99_ms") == p99_ms and all(row.verified for row in held)
    return held if usable else []


def _defaults(recipe: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of those fields of a recipe that an earlier version's lacks."""
    from hwnas.training.recipe import Recipe

    return {field.name: field.default for field in fields(Recipe) if field.name in recipe and field.name not in held}


def _read_held(run: RunFolder) -> tuple[list[FrontRow], dict[str, Any]]:
    """The front that the run folder holds, whole with its report, and its environment; otherwise nothing. StudyError
    for one that cannot be read."""
    from hwnas.front.join import read_origins
    from hwnas.front.rows import load_front

    read_origins(run)
    if not run.front_csv.exists() or not run.report.exists():
        return [], {}
    held, environment = load_front(run), run.find_environment()
    run.read_comparisons()
    return held, environment


def _facts(prepared: Prepared, trials: Sequence[Mapping[str, Any]], n: int) -> Facts:
    """The facts about the search that the report shows."""
    from hwnas.accuracy.certificate import certificate_facts
    from hwnas.front.score import Timing
    from hwnas.front.verification import Facts

    plan, table, chosen = prepared.plan, prepared.table, prepared.chosen
    options = plan.options
    seconds = options.verification.seconds
    if prepared.clock is not None and prepared.pace is not None:
        seconds = timing_seconds(prepared.clock, n, prepared.pace.scoring_s)
    timing = Timing(table.reference, table.quiet_ms if plan.deployment.at_hand else None, seconds, options.seed,
                    plan.deployment.device)
    latency = {**table.error[plan.space.name], "line": error_line(table, plan.space), "table": str(table.key),
               "created": table.created, "overhead_ms": table.overhead_ms}
    certificate = {} if prepared.estimator is None else certificate_facts(
        prepared.certificate, prepared.dataset, plan.space.unrestricted, chosen.accuracy, chosen.options,
        prepared.estimator.fingerprint)
    outcome = {"accuracy": chosen.accuracy, "sampler": options.sampler,
               "objective": prepared.options.objective.shown,
               "left_out": list(plan.left_out_costs),
               "n_trials": sum(row["outcome"] == "evaluated" for row in trials), "asks": len(trials)}
    return Facts(plan.deployment.host_name, plan.space.name, timing, options.budget.latency_ms, options.budget.p99_ms,
                 latency, outcome, certificate)
