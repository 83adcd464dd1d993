"""Trials on the road of a search: how long they last, their work as one process, what is made of them for the front."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwnas.accuracy.proxy import Proxy
from hwnas.cli.progress import Console, Report
from hwnas.errors import BudgetError, SamplerError
from hwnas.front.finalists import doubts, draw_controls, finalists_of, known_controls
from hwnas.front.rows import FrontRow
from hwnas.latency.deployment import error_line
from hwnas.samplers.informed import Context, beliefs
from hwnas.search.explorer import Explorer
from hwnas.search.loop import SearchEvent, run_search
from hwnas.search.minutes import ASKING_S, BESIDE, STARTING_S, Pace, mean_step_seconds, timing_reserve_s
from hwnas.search.plan import UNLIMITED, making_of
from hwnas.search.prepare import PreparedSearch, draw_networks, trials_s
from hwnas.search.trial import LEAST_EVALUATED
from hwnas.study.record import EVALUATED, outcome, trial_rows
from hwnas.study.storage import storage_errors
from hwnas.study.study import storage_of
from hwnas.system.clock import Deadline
from hwnas.system.run_folder import ESTIMATED

UNTIL = "search_until"  # of the study: when its trials end, a Deadline


@dataclass(frozen=True)
class Sampled(Explorer):
    """Networks of a space that a sampler proposes and an estimator of accuracy judges; finalists are trained anew."""

    @property
    def n_workers(self) -> int:
        """No more than there are trials."""
        return min(super().n_workers, self.prepared.plan.options.trials)

    def begin(self, console: Console) -> None:
        """Print the plan of the minutes, or about how long it takes without them. Set the end of the trials, which
        workers read in the study."""
        prepared = self.prepared
        clock, pace, plan, until = prepared.clock, prepared.pace, prepared.plan, None
        if clock is not None and pace is not None:
            seconds = trials_s(plan, clock, pace)
            rest_s, timing_s = clock.left_s - seconds, timing_reserve_s(clock)
            n_known = len(plan.space.known) if plan.options.controls else 0
            console.note(
                f"plan for {clock.minutes:g} min: {clock.spent_s / 60:.1f} to prepare (done), {seconds / 60:.1f} for "
                f"trials, about {(rest_s - timing_s) / 60:.1f} to train and export {plan.parts} finalists, "
                f"{plan.options.controls} controls, up to {n_known} known networks and {len(plan.baselines)} "
                f"baselines, {timing_s / 60:.1f} to score and time them")
            until = Deadline.after(seconds)
        elif isinstance(prepared.estimator, Proxy):
            evaluated = sum(outcome(trial) == EVALUATED for trial in prepared.study.get_trials(deepcopy=False))
            if (left := prepared.options.n_trials - evaluated) > 0:
                _tell_length(left, prepared, prepared.estimator, console)
        with storage_errors(storage_of(prepared.study).url):
            prepared.study.set_user_attr(UNTIL, until and until.to_dict())

    def work(self, console: Console) -> None:
        """Trials until enough networks are evaluated, as one of the workers."""
        prepared = self.prepared
        plan, estimator = prepared.plan, prepared.estimator
        assert estimator is not None
        options = replace(prepared.options, until=Deadline.of(prepared.study.user_attrs.get(UNTIL)))
        n = f"{options.n_trials} architectures" if options.until is None else \
            f"architectures for {max(0.0, options.until.left_s) / 60:.1f} min, out"
        console.note(f"search: {n} of {plan.space.size:.3g} settings of space {plan.space.name}, "
                     f"{options.objective.shown}, sampler {plan.options.sampler}")
        with console.step("search", options.until.left_s if options.until else None) as report:
            outcome = run_search(prepared.study, plan.space, prepared.model.predict, estimator, options,
                                 _tell(report, options.until))
        console.note(f"search ended: {outcome.reason} ({outcome.n_asks} asks, {outcome.n_pruned} over the cap, "
                     f"{outcome.n_duplicates} duplicates, {outcome.n_failed} failed)")

    def trials(self, console: Console) -> list[dict[str, Any]]:
        """The rows with what the model of all trials believes of each evaluated one's top-1, where they suffice for it.

        Other samplers search where ours cannot (a cap that almost nothing keeps, costs of another package): then the
        rows keep their own values, and a line says so.
        """
        prepared, trials = self.prepared, trial_rows(self.prepared.study)
        options = prepared.options
        try:
            believed = beliefs(prepared.study, Context(prepared.plan.space, prepared.model.predict, options.objective,
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
        """The rows of the front as yet without figures: finalists of the trials, controls and baselines."""
        prepared = self.prepared
        plan, predict = prepared.plan, prepared.model.predict
        options, target, host = plan.options, plan.deployment.target.name, plan.deployment.host_name
        params = {trial.number: trial.params for trial in prepared.study.get_trials(deepcopy=False)}
        finalists = finalists_of(trials, lambda row: plan.network(plan.space.decode(params[row["number"]])), plan.parts,
                                 target, host, options.budget.latency_ms)
        for doubt in doubts(trials, finalists, options.budget.latency_ms):
            console.remark(f"note: {doubt}")
        controls = draw_controls(finalists, plan.space, predict, options.controls, options.seed, console.remark)
        if options.controls:
            controls += known_controls(plan.space, predict, [*finalists, *controls], options.budget.latency_ms,
                                       options.budget.quantile, console.remark)
        return [*finalists, *controls, *(FrontRow.of(network, target=target, host=host) for network in plan.baselines)]

    def clear(self) -> None:
        """Nothing: trials leave no files."""

    def latency_facts(self) -> dict[str, Any]:
        """Return the errors of the latency model, and the tables that it is of."""
        plan, calibrated = self.prepared.plan, self.prepared.calibrated
        lines = [(f"{each.name}: " if plan.others else "") + error_line(each.table, plan.space) for each in calibrated]
        return {**self.prepared.table.error[plan.space.name], "line": "; ".join(lines),
                "table": ", ".join(str(each.table.key) for each in calibrated)}


def _tell_length(n: int, prepared: PreparedSearch, proxy: Proxy, console: Console) -> None:
    """Print about how long `n` trials and the trainings after them take, by steps of some random networks."""
    plan, dataset = prepared.plan, prepared.dataset
    making, networks = making_of(plan, dataset), draw_networks(plan, prepared.model)
    px, n_trained = dataset.image_size, plan.parts + plan.options.controls + len(plan.baselines)
    with console.step("time trials"):
        full_s, short_s = (mean_step_seconds(networks, making, size, Pace({"": 0.0}, 0.0))
                           for size in (px, proxy.options.image_size or px))
    beside, starting_s = (BESIDE / plan.workers, STARTING_S) if plan.workers > 1 else (1.0, 0.0)
    trials_min = (starting_s + n * ((proxy.steps + proxy.validating_steps) * short_s + ASKING_S) * beside) / 60
    training_min = (starting_s + n_trained * plan.recipe.steps_for(len(dataset.train)) * full_s * beside) / 60
    console.note(f"about {trials_min:.1f} min for the trials, then about {training_min:.1f} to train up to {n_trained} "
                 f"networks, by {len(networks)} random ones; budget.minutes= bounds the whole command")


def _tell(report: Report, until: Deadline | None) -> Callable[[SearchEvent], None]:
    """The function that shows each event in the progress bar."""
    best, whole_s = 0.0, until.left_s if until else 0.0

    def tell(event: SearchEvent) -> None:
        nonlocal best
        best = max(best, event.top1 or 0.0)
        begun = event.kind == "training" and event.id and event.latency_ms
        at = f"; now {event.id} of {event.latency_ms:.3g} ms" if begun else ""
        done = event.counts.evaluated / event.n_trials
        if until is not None:
            done = max(done, min(1.0, 1 - until.left_s / max(1.0, whole_s)))
        of = f" of {event.n_trials}" if event.n_trials < UNLIMITED else ""
        so_far = f", best estimated top-1 {best:.1%}" if best else ""  # after a pause it is not known at once
        is_late = until is not None and until.left_s < 0 and event.counts.evaluated < LEAST_EVALUATED
        late = f" after its minutes, as a front needs {LEAST_EVALUATED}" if is_late else ""
        report(done, f"{event.counts.evaluated}{of} evaluated{late}{so_far}{at}")

    return tell
