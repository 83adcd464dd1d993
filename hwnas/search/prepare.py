"""Prepared: what trials and verification work with: data, estimator, latency model, study; and the trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwnas.accuracy.certificate import NAME, Chosen, choose
from hwnas.accuracy.estimator import Prepares
from hwnas.cli.progress import Console, Report
from hwnas.latency.deployment import latency_model
from hwnas.search.plan import Plan, make_plan, search_options

if TYPE_CHECKING:
    import optuna

    from hwnas.accuracy.estimator import AccuracyEstimator
    from hwnas.data.dataset import Dataset
    from hwnas.front.make import Making
    from hwnas.latency.model import LatencyModel
    from hwnas.latency.table import LatencyTable
    from hwnas.samplers.informed import Scored
    from hwnas.search.trial import SearchOptions


@dataclass(frozen=True)
class Prepared:
    """Everything that the trials and the verification work with."""

    plan: Plan
    dataset: Dataset
    chosen: Chosen
    estimator: AccuracyEstimator
    making: Making
    table: LatencyTable
    model: LatencyModel
    options: SearchOptions
    study: optuna.Study


def prepare(config: Any, console: Console) -> Prepared:
    """Check the options, load the data, measure this host where it must be, open the study."""
    from hwnas.study.server import storage_errors
    from hwnas.study.study import check_resumable

    plan = make_plan(config, console)
    dataset = _load_data(plan, console)
    chosen = _chosen(plan, dataset)
    if chosen.why:
        console.note(chosen.why)
    estimator = _estimator(plan, chosen, dataset)
    making = _making(plan, dataset)
    table, model = latency_model(plan.deployment, plan.space, plan.calibration, console)
    options = search_options(plan, model)
    identity = _identity(plan, table, dataset, f"{chosen.accuracy} ({estimator.fingerprint})", options)
    if isinstance(estimator, Prepares):
        check_resumable(_url(plan), identity)
        estimator.prepare(console)
    study = _open_study(plan, identity, model, dataset, options, console)
    setup_s = estimator.setup_seconds if isinstance(estimator, Prepares) else 0.0
    with storage_errors(_url(plan)):
        study.set_user_attr("setup_seconds", setup_s)  # part of what the search cost
    if plan.reuse is not None:
        from hwnas.search.reuse import reuse_trials

        n = reuse_trials(study, plan.reuse, plan.space, model.predict, options)
        console.note(f"reused: the accuracies of {n} networks of {plan.reuse}")
    return Prepared(plan, dataset, chosen, estimator, making, table, model, options, study)


def _load_data(plan: Plan, console: Console) -> Dataset:
    from hwnas.data.loading import load_dataset

    with console.step("load data") as report:
        data = load_dataset(plan.section("dataset"), max(plan.space.image_sizes), plan.seed,
                            lambda done, total: report(done / max(total, 1)))
    console.note(f"{data.name}: {len(data.train)} training, {len(data.validation)} validation, {len(data.test)} test "
                 f"images of {len(data.class_names)} classes at {data.image_size} px"
                 + (f", {data.skipped} unreadable left out" if data.skipped else ""))
    return data


def _chosen(plan: Plan, dataset: Dataset) -> Chosen:
    """The estimator that was asked for, or the one that the certificate favours."""
    name = str(plan.config.accuracy)
    section = plan.section(name) if name in plan.config else {}
    return choose(section, dataset, plan.space, plan.n_trials) if name == NAME else Chosen(name, section)


def _estimator(plan: Plan, chosen: Chosen, dataset: Dataset) -> AccuracyEstimator:
    from hwnas.accuracy.estimator import BUILT_IN, WITHOUT_IMAGES, load_estimator

    name, section = chosen.accuracy, dict(chosen.options)
    if name in BUILT_IN and name not in WITHOUT_IMAGES:
        section = {"threads": plan.threads, **section}
    return load_estimator(name, dataset=dataset, space=plan.space, config=section)


def _making(plan: Plan, dataset: Dataset) -> Making:
    from hwnas.front.make import Making
    from hwnas.training.recipe import FINALIST, Recipe

    given = {"threads": plan.threads, **plan.section("finalists")["recipe"]}
    recipe = Recipe.from_config(given, FINALIST, "finalists.recipe")
    return Making(dataset, recipe, plan.seed, plan.deployment.target)


def _url(plan: Plan) -> str:
    from hwnas.study.study import database_path

    return str(plan.config.storage or database_path(plan.run.path))


def _identity(plan: Plan, table: LatencyTable, dataset: Dataset, accuracy: str, options: SearchOptions
              ) -> dict[str, str]:
    """What the study's trials depend on."""
    deployment, cap = plan.deployment, "none" if plan.cap_ms is None else f"{plan.cap_ms:g} ms"
    return {
        "space": f"{plan.space.name} ({plan.space.fingerprint})", "data set": f"{dataset.name} ({dataset.fingerprint})",
        "target": f"{deployment.target.name} ({table.key})", "host": deployment.host_name,
        "latency table": f"{table.key} of {table.created}",
        "accuracy": accuracy, "objective": str(options.objective),
        "budget.latency_ms": cap, "seed": str(plan.seed)}


def _open_study(plan: Plan, identity: dict[str, str], model: LatencyModel, dataset: Dataset, options: SearchOptions,
                console: Console) -> optuna.Study:
    from hwnas.samplers.informed import Context
    from hwnas.samplers.loading import load_sampler
    from hwnas.study.study import open_study

    wanted, scores = _sampler_options(plan, dataset, console)
    context = Context(plan.space, model.predict, options.objective, options.cap_ms, options.cap_quantile, scores)
    sampler = load_sampler(str(plan.config.sampler), plan.seed, context, **wanted)
    return open_study(_url(plan), identity, options.objective, sampler)


def _sampler_options(plan: Plan, dataset: Dataset, console: Console) -> tuple[dict[str, Any], Scored | None]:
    """The sampler's options, and the zero-cost scores that it is to see: those of `sampler_options.zero_cost` that the
    certificate of this data set and space, where there is one, does not switch off."""
    from hwnas.accuracy.certificate import find_certificate
    from hwnas.samplers.loading import OWN

    options = plan.section("sampler_options")
    if not options.get("zero_cost") or str(plan.config.sampler) != OWN:
        return options, None
    from hwnas.samplers.informed import certified, scored

    certificate = find_certificate(dataset, plan.space)
    names = certified(options["zero_cost"], certificate.content if certificate else None, console)
    scores = scored(dataset, plan.space, names, plan.threads, console) if names else None
    return {**options, "zero_cost": names}, scores


def search_trials(prepared: Prepared, console: Console) -> None:
    """Evaluate architectures until the study is done, as one of its workers."""
    from hwnas.search.loop import run_search

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
               f"{event.counts.evaluated} of {event.n_trials} evaluated, best estimated top-1 {best:.1%}{at}")

    return hear
