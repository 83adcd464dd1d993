"""Trials as a search's explorer: how long they last, their work as one process, their results for the front."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hwnas.accuracy.estimator import PROXY, AccuracyEstimator, load_estimator
from hwnas.accuracy.proxy import Proxy
from hwnas.cli.options import plain
from hwnas.cli.progress import Console, Report
from hwnas.data.dataset import Dataset
from hwnas.errors import BudgetError, SamplerError
from hwnas.front.finalists import doubts, draw_controls, finalists_of, known_controls
from hwnas.front.make import BuildSettings, TrainedWeights
from hwnas.front.rows import FrontRow
from hwnas.latency.deployment import error_line
from hwnas.networks.network import FoundNetwork
from hwnas.samplers.informed import Context, beliefs
from hwnas.search.calibration import calibrate, has_table
from hwnas.search.deployments import BestOf, Latency, model_of_all
from hwnas.search.explorer import Explorer, load_data, measure_pace, open_run_study, search_options, url_of
from hwnas.search.minutes import (
    ASKING_S,
    BESIDE,
    DRAWN,
    FEW_TRIALS,
    LEAST_FINALISTS,
    MANY_TRIALS,
    SMALLEST_PROXY_PX,
    STARTING_S,
    STEPS,
    Clock,
    Pace,
    mean_step_seconds,
    proxy_length,
    timing_reserve_s,
    trials_seconds,
)
from hwnas.search.plan import UNLIMITED, Plan, making_of
from hwnas.search.reuse import reuse_trials
from hwnas.search.sampling import LEAST_EVALUATED, SamplingWorker, SearchEvent
from hwnas.search.trial_weights import find_weights
from hwnas.study.objective import check_cap
from hwnas.study.record import EVALUATED, outcome, trial_rows
from hwnas.study.storage import storage_errors
from hwnas.study.study import database_path, held_choice, storage_of
from hwnas.system.clock import Deadline
from hwnas.system.paths import check_home
from hwnas.system.run_folder import ESTIMATED, RunFolder

LENGTH = {"epochs", "min_steps", "max_steps", "image_size", "train_images"}  # options of the proxy
UNTIL = "search_until"  # attribute of the study: the Deadline of its trials


@dataclass(frozen=True)
class Sampled(Explorer):
    """Networks of a space that a sampler proposes and an estimator of accuracy judges; finalists are trained anew."""

    estimator: AccuracyEstimator

    @classmethod
    def prepare(cls, plan: Plan, run: RunFolder, console: Console, clock: Clock | None = None) -> Sampled:
        """Load data and estimator, measure this host if no table fits, open the study. With a `clock`, a new study's
        trials have the length that the minutes allow."""
        if not all(has_table(deployment, plan.space) for deployment in plan.deployments):
            check_home()
        dataset = load_data(plan, run, {}, console)
        estimator = _load_estimator(plan, dataset)
        calibrated = calibrate(plan, run, console)
        model, budget = model_of_all(calibrated), plan.options.budget
        pace = None if clock is None else measure_pace(plan, dataset, calibrated, console,
                                                       plan.network(plan.space.reference))
        options = search_options(plan, float(model.predict_architectures([plan.space.reference]).mean[0]))
        if budget.latency_ms is not None:
            check_cap(plan.space, model.predict, budget.latency_ms, budget.quantile)
        making = making_of(plan, dataset, [calibrated[0].deployment])
        # The minutes may give the proxy another length, which makes it another estimator.
        length = _proxy_length(plan, estimator, making, url_of(plan, run), model, clock, pace, console)
        if length:
            estimator = _load_estimator(plan, dataset, length)
        dated = ", ".join(f"{each.table.key} of {each.table.created}" for each in calibrated)
        study = open_run_study(
            plan, run, dataset, calibrated, options,
            {"latency table": dated, "accuracy": f"{plan.accuracy} ({estimator.fingerprint})"}, chosen=length)
        if plan.reuse is not None:
            n = reuse_trials(study, plan.reuse, plan.space, model.predict, options)
            console.note(f"reused: the accuracies of {n} networks of {plan.reuse}")
        return cls(plan, run, dataset, calibrated, model, options, study, clock, pace, estimator)

    @property
    def n_workers(self) -> int:
        """The number of processes: no more than there are trials."""
        return min(super().n_workers, self.plan.options.trials)

    def begin(self, console: Console) -> None:
        """Print the plan of the minutes, or about how long it takes without them. Set the end of the trials, which
        workers read in the study."""
        clock, pace, plan, until = self.clock, self.pace, self.plan, None
        if clock is not None and pace is not None:
            # If a killed command was training finalists, new trials would choose others, and waste their steps.
            in_training = STEPS in self.study.user_attrs and not self.run.report.exists()
            seconds = 0.0 if in_training else _trials_s(plan, clock, pace)
            rest_s, timing_s = clock.left_s - seconds, timing_reserve_s(clock)
            n_known = len(plan.space.known) if plan.options.n_controls else 0
            console.note(
                f"plan for {clock.minutes:g} min: {clock.spent_s / 60:.1f} to prepare (done), {seconds / 60:.1f} for "
                f"trials, about {(rest_s - timing_s) / 60:.1f} to train and export {plan.parts} finalists, "
                f"{plan.options.n_controls} controls, up to {n_known} known networks and {len(plan.baselines)} "
                f"baselines, {timing_s / 60:.1f} to score and time them")
            until = Deadline.after(seconds)
        elif isinstance(self.estimator, Proxy):
            evaluated = sum(outcome(trial) == EVALUATED for trial in self.study.get_trials(deepcopy=False))
            if (left := self.options.n_trials - evaluated) > 0:
                self._tell_length(left, self.estimator, console)
        with storage_errors(storage_of(self.study).url):
            self.study.set_user_attr(UNTIL, until and asdict(until))

    def work(self, console: Console) -> None:
        """Run trials until enough networks are evaluated, as one of the workers."""
        plan = self.plan
        options, until = self.options, Deadline.of(self.study.user_attrs.get(UNTIL))
        n = f"{options.n_trials} architectures" if until is None else \
            f"architectures for {max(0.0, until.left_s) / 60:.1f} min, out"
        console.note(f"search: {n} of {plan.space.size:.3g} settings of space {plan.space.name}, "
                     f"{options.objective.shown}, sampler {plan.options.sampler}")
        with console.step("search", until.left_s if until else None) as report:
            worker = SamplingWorker(self.study, plan.space, self.model.predict, self.estimator, options, until,
                                    _tell(report, until), self.run.lines)
            ended = worker.search([*plan.space.known_params.values()])
        counts = ended.counts
        console.note(f"search ended: {ended.reason} ({counts.asks} asks, {counts.infeasible} over the cap, "
                     f"{counts.duplicates} duplicates, {counts.failed} failed)")

    def trials(self, console: Console) -> list[dict[str, Any]]:
        """Return the rows of trials, with the top-1 that the model of all trials estimates for each evaluated network.

        Other samplers can search if our model cannot (a cap that almost nothing keeps, costs of another package).
        Then the rows keep their own values, and a line says so.
        """
        trials, options = trial_rows(self.study), self.options
        try:
            believed = beliefs(self.study, Context(self.plan.space, self.model.predict, options.objective,
                                                       options.cap_ms, options.cap_quantile))
        except (BudgetError, SamplerError) as error:
            console.remark("note: finalists are chosen by their trials' own top-1, without a model of all trials: "
                           f"{error}")
            return trials
        for row in trials:
            if (belief := believed.get(row["number"])) is not None:
                row |= zip(ESTIMATED, (belief.mean, belief.low, belief.high), strict=True)
        return trials

    def front_rows(self, trials: Sequence[Mapping[str, Any]], console: Console) -> list[FrontRow]:
        """Return the rows of the front, without figures yet: finalists of the trials, controls and baselines."""
        plan, predict = self.plan, self.model.predict
        options, target, host = plan.options, self.deployment.target.name, self.deployment.host_name
        params = {trial.number: trial.params for trial in self.study.get_trials(deepcopy=False)}
        finalists = finalists_of(trials, lambda row: plan.network(plan.space.decode(params[row["number"]])), plan.parts,
                                 target, host, options.budget.latency_ms, self.options.objective.kind == "reward")
        for doubt in doubts(trials, finalists, options.budget.latency_ms):
            console.remark(f"note: {doubt}")
        controls = draw_controls(finalists, plan.space, predict, options.n_controls, options.seed, console.remark)
        if options.n_controls:
            controls += known_controls(plan.space, predict, [*finalists, *controls], options.budget.latency_ms,
                                       options.budget.quantile, console.remark)
        return [*finalists, *controls, *(FrontRow.of(network, target=target, host=host) for network in plan.baselines)]

    def begun(self) -> dict[str, TrainedWeights]:
        """Return the weights that evaluated networks had after their trials."""
        return find_weights(self.run.lines, self.study.get_trials(deepcopy=False))

    def report_facts(self) -> dict[str, Any]:
        """Return the steps that networks had in their trials, by id."""
        return {"begun": {id: weights.steps for id, weights in self.begun().items()}}

    def latency_facts(self) -> dict[str, Any]:
        """Return the errors of the latency model, and the tables that it is made of."""
        space, calibrated = self.plan.space, self.calibrated
        lines = [(f"{each.name}: " if len(calibrated) > 1 else "") + error_line(each.table, space)
                 for each in calibrated]
        return {**self.table.error[space.name], "line": "; ".join(lines),
                "table": ", ".join(str(each.table.key) for each in calibrated)}

    def _tell_length(self, n: int, proxy: Proxy, console: Console) -> None:
        """Print about how long `n` trials and the trainings after them take, by the steps of some random networks."""
        plan, dataset = self.plan, self.dataset
        making, networks = self.making, _draw_networks(plan, self.model)
        px, n_trained = dataset.image_size, plan.parts + plan.options.n_controls + len(plan.baselines)
        with console.step("time trials"):
            full_s, short_s = (mean_step_seconds(networks, making, size, Pace({"": 0.0}, 0.0))
                               for size in (px, proxy.options.image_size or px))
        beside, starting_s = (BESIDE / plan.workers, STARTING_S) if plan.workers > 1 else (1.0, 0.0)
        trials_min = (starting_s + n * ((proxy.steps + proxy.validating_steps) * short_s + ASKING_S) * beside) / 60
        training_min = (starting_s + n_trained * plan.recipe.steps_for(len(dataset.train)) * full_s * beside) / 60
        console.note(f"about {trials_min:.1f} min for the trials, then about {training_min:.1f} to train up to "
                     f"{n_trained} networks, by {len(networks)} random ones; budget.minutes= bounds the whole command")


def _load_estimator(plan: Plan, dataset: Dataset, length: Mapping[str, int] | None = None) -> AccuracyEstimator:
    """Return the plan's estimator. `length` has options of the proxy that the minutes decide."""
    options = {**plan.accuracy_options, **(length or {})}
    if plan.accuracy == PROXY:
        options = {"threads": plan.options.threads, **plain(plan.options.training), **options}
    return load_estimator(plan.accuracy, dataset=dataset, space=plan.space, config=options)


def _proxy_length(plan: Plan, estimator: AccuracyEstimator, making: BuildSettings, url: str, model: Latency | BestOf,
                  clock: Clock | None, pace: Pace | None, console: Console) -> dict[str, int]:
    """Return options for the proxy's length that the minutes allow: the ones of the study that goes on or is reused, or
    new ones. They are empty if the user gave a length, or if a new study has no minutes."""
    if type(estimator) is not Proxy or plan.accuracy_options.keys() & LENGTH:
        return {}
    # The accuracies of a study depend on the length, so it keeps its own.
    stored_length = held_choice(url)
    if stored_length is None and plan.reuse is not None:
        stored_length = held_choice(database_path(plan.reuse))
    if stored_length is not None or clock is None or pace is None:
        return stored_length or {}
    px, n_trials, networks = making.dataset.image_size, plan.options.n_trials, _draw_networks(plan, model)
    making = replace(making, recipe=estimator.recipe)

    def step_s(size: int) -> float:
        with console.step(f"time trials at {size} px"):
            return mean_step_seconds(networks, making, size, pace)

    # Images become smaller only if the space does not search their size.
    length = proxy_length(
        estimator.steps, estimator.validating_steps, _trials_s(plan, clock, pace), plan.workers, step_s, px,
        max(SMALLEST_PROXY_PX, px // 4) if len(plan.space.image_sizes) == 1 else px,
        (min(FEW_TRIALS, n_trials or FEW_TRIALS), n_trials or MANY_TRIALS))
    if length:
        console.note(f"a trial trains for {length['max_steps']} steps at {length.get('image_size', px)} px, by the "
                     f"minutes (without them {estimator.steps} at {px} px)")
    return length


def _draw_networks(plan: Plan, model: Latency | BestOf) -> list[FoundNetwork]:
    """Return some random networks, within the cap if there are such: trials train cheaper ones than the reference."""
    codes = plan.space.sample(np.random.default_rng([plan.options.seed, *b"pace"]), 64)
    over_ms = np.maximum(model.predict(codes).mean - (plan.options.budget.latency_ms or np.inf), 0)
    few = codes[np.argsort(over_ms, kind="stable")[:DRAWN]]
    return [plan.network(plan.space.decode(plan.space.to_params(code))) for code in few]


def _trials_s(plan: Plan, clock: Clock, pace: Pace) -> float:
    """Return the seconds for the trials. Raises BudgetError if none are left for a front after them."""
    return trials_seconds(clock, pace, [plan.network(plan.space.reference)] * min(LEAST_FINALISTS, plan.parts),
                          plan.workers)


def _tell(report: Report, until: Deadline | None) -> Callable[[SearchEvent], None]:
    """Return the function that shows each event in the progress bar."""
    best, whole_s = 0.0, until.left_s if until else 0.0

    def tell(event: SearchEvent) -> None:
        nonlocal best
        best = max(best, event.top1 or 0.0)
        has_network = event.kind == "training" and event.id and event.latency_ms
        at = f"; now {event.id} of {event.latency_ms:.3g} ms" if has_network else ""
        done = event.counts.evaluated / event.n_trials
        if until is not None:
            done = max(done, min(1.0, 1 - until.left_s / max(1.0, whole_s)))
        of = f" of {event.n_trials}" if event.n_trials < UNLIMITED else ""
        so_far = f", best estimated top-1 {best:.1%}" if best else ""  # after a pause it is not known at once
        is_late = until is not None and until.left_s < 0 and event.counts.evaluated < LEAST_EVALUATED
        late = f" after its minutes, as a front needs {LEAST_EVALUATED}" if is_late else ""
        report(done, f"{event.counts.evaluated}{of} evaluated{late}{so_far}{at}")

    return tell
