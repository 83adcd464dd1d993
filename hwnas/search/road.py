"""The road of a search: plan, prepare, search, finalists, verify, report. `search` shows all of it, in order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.accuracy.certificate import NAME, Certificate, Chosen, choose, look_up
from hwnas.accuracy.estimator import Prepares
from hwnas.cli.command import default_out, kept
from hwnas.cli.options import Config, option, plain, read_command, section
from hwnas.cli.progress import Console, Report
from hwnas.errors import (
    BudgetError,
    ConfigError,
    MissingWeights,
    SamplerError,
    SpaceError,
    StudyError,
    TargetError,
)
from hwnas.latency.deployment import CalibrationOptions, Deployment, error_line, latency_model, open_device
from hwnas.latency.device import DEVICE, DeviceOptions
from hwnas.networks.network import EARLY, EarlyNetwork, FoundNetwork
from hwnas.networks.weights import PretrainedOptions
from hwnas.search.minutes import (
    CALIBRATION,
    DRAWN,
    ENOUGH_STEPS,
    FEW_TRIALS,
    LEAST_TRIALS_S,
    MANY_TRIALS,
    SMALLEST_PROXY_PX,
    Clock,
    Pace,
    early_seconds,
    fitted,
    fitting_too,
    mean_step_seconds,
    pace_of,
    proxy_length,
    timing_reserve_s,
    timing_seconds,
    trials_seconds,
    with_steps,
)
from hwnas.space.search_space import WHOLE
from hwnas.stats import layers
from hwnas.study.objective import CAP_QUANTILES, Objective
from hwnas.system.paths import write_atomic
from hwnas.system.processes import crew
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target
from hwnas.training.place import TrainingOptions, check_precision, processes, resolved, tell_idle

if TYPE_CHECKING:
    import optuna
    from numpy.typing import NDArray

    from hwnas.accuracy.estimator import AccuracyEstimator
    from hwnas.data.dataset import Dataset, DatasetInfo
    from hwnas.front.make import Making
    from hwnas.front.rows import FrontRow
    from hwnas.front.verification import Facts
    from hwnas.latency.model import LatencyModel
    from hwnas.latency.table import LatencyTable
    from hwnas.networks.baselines import Baseline
    from hwnas.networks.network import Shape, TimmNetwork
    from hwnas.networks.weights import Pretrained
    from hwnas.samplers.coding import Settings
    from hwnas.samplers.informed import Context
    from hwnas.samplers.loading import Asking
    from hwnas.search.loop import SearchEvent
    from hwnas.search.trial import SearchOptions
    from hwnas.space.architecture import Architecture
    from hwnas.space.restriction import Variant
    from hwnas.space.search_space import SearchSpace
    from hwnas.training.first import FirstTraining
    from hwnas.training.recipe import Recipe


LEFT_OUT = "left out"  # of a study's identity: variants of blocks that its space does without
UNTIL = "search_until"  # of the study: when its trials end, seconds since 1970
LENGTH = {"epochs", "min_steps", "max_steps", "image_size", "train_images", "seeds"}  # options of the proxy
KEPT_LAYERS = 3  # fronts of trials whose weights are kept for the finalists
MOST_TIMES = 10  # as many steps as the recipe's own a budget of minutes gives at most
LARGEST_PX = 224  # of the images of cut networks, where no size is given
DEFAULT_TRIALS, UNLIMITED = 24, 1_000_000  # the second: the minutes end the search


@dataclass(frozen=True, slots=True)
class FinalistOptions:
    """How many finalists there are, and what differs from full training in their recipe."""

    k: int = option(low=1, high=100)
    recipe: dict[str, Any] = option()


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """The hard cap in ms, the quantile of the predicted latency that must keep it, and the cap of measured p99.

    `minutes` bounds the whole command.
    """

    latency_ms: float | None = option(low=1e-6, as_given=True)
    p99_ms: float | None = option(low=1e-6, as_given=True)
    quantile: float = option(low=CAP_QUANTILES[0], high=CAP_QUANTILES[1])
    minutes: float | None = option(None, low=0.1, high=100_000)  # runs of earlier versions have none


@dataclass(frozen=True, slots=True)
class VerificationOptions:
    """The most seconds of timing finalists and baselines."""

    seconds: float = option(low=1, high=86_400)


@dataclass(frozen=True, slots=True)
class EarlierOptions:
    """The run folder of an earlier search whose accuracies count here too."""

    reuse: str | None


@dataclass(frozen=True)
class PlanOptions(DeviceOptions):
    """Options of `conf/search.yaml`, without those of the estimators. Zero `workers`: one a core, on a GPU a few."""

    target: Target
    host: str | None
    space: str
    dataset: dict[str, Any]
    objective: dict[str, Any]
    out: str | None
    seed: int = option(low=0)
    n_trials: int | None = option(low=1)
    max_asks: int | None = option(low=1)
    workers: int = option(low=0, high=256)
    threads: int = option(low=0, high=4096)
    accuracy: str | None = option()
    sampler: str = option()
    sampler_options: dict[str, Any] = option()
    search: EarlierOptions = option()
    budget: BudgetOptions = option()
    calibration: CalibrationOptions = option()
    storage: str | None = option()
    finalists: FinalistOptions = option()
    baselines: tuple[str, ...] | None = option(what="a list of timm names")
    verification: VerificationOptions = option()
    overwrite: bool = option(False)  # runs of earlier versions have none of these
    training: TrainingOptions = option(TrainingOptions())
    controls: int = option(0, low=0, high=100)
    pretrained: PretrainedOptions = option(PretrainedOptions())
    image_sizes: tuple[int, ...] | None = option(None, low=8, high=1024)
    fallbacks: bool = option(False)
    cuts: bool = option(False)
    around: str | None = option(None)
    zoo: dict[str, Any] | None = option(None)

    @property
    def trials(self) -> int:
        """Architectures to evaluate: `n_trials`, else 24, or as many as the minutes allow."""
        return self.n_trials or (DEFAULT_TRIALS if self.budget.minutes is None else UNLIMITED)


@dataclass(frozen=True)
class Plan:
    """What the options ask for.

    `out` is the run folder, which need not exist yet. `start`: the weights that networks of the space begin with, where
    these are cut from a pretrained one. If the user gave no T, `objective` has none until the latency model is there.
    `sampler` makes the sampler from the Context that ours needs. `left_out` names the variants of blocks that `space`
    does without, once it is prepared, and `left_out_costs` what each of them costs, in words. `yaml` is the
    configuration as it may be kept, `config` as it is, with passwords.
    """

    options: PlanOptions
    deployment: Deployment
    space: SearchSpace
    start: Pretrained | None
    out: Path
    accuracy: str
    accuracy_options: Mapping[str, Any]
    sampler: Callable[[Context | None], Asking]
    objective: Objective
    recipe: Recipe
    baselines: tuple[TimmNetwork, ...]
    workers: int
    reuse: Path | None
    yaml: str
    config: str
    left_out: str = ""
    left_out_costs: tuple[str, ...] = ()

    @property
    def whole(self) -> str:
        """The id of the baseline that is the network which those of the space are cut from; empty: there is none."""
        wanted = f"{self.space.definition.around.partition('+')[0]}-pretrained"
        return next((baseline.id for baseline in self.baselines if baseline.id == wanted), "")

    def network(self, architecture: Architecture) -> FoundNetwork:
        """The network of an architecture of the space, with the weights that it begins with."""
        return FoundNetwork(architecture, self.start)


def make_plan(config: Config, console: Console, trials_only: bool = False) -> Plan:
    """Read all options and check them, as far as this needs no data, measuring or training. Nothing is written.

    `trials_only`: for a worker, which trains no baselines and needs no weights of theirs.
    """
    from omegaconf import OmegaConf

    from hwnas.data.loading import inspect_dataset
    from hwnas.front.make import check_deployable
    from hwnas.samplers.loading import read_sampler
    from hwnas.study.objective import read_objective
    from hwnas.study.storage import parse_url
    from hwnas.training.recipe import FULL_TRAINING, Recipe

    options = read_command(PlanOptions, config)
    options = replace(options, calibration=_calibration(options), dataset=_sized(options), training=_place(options))
    if options.storage is not None:
        parse_url(options.storage)
    sampler = read_sampler(options.sampler, options.seed, options.sampler_options)
    deployment = Deployment.of(options.target, options.host, console, open_device(options, console))
    if deployment.target.device != "cpu" and deployment.at_hand and not trials_only:
        deployment.device.runtime(deployment.target.runtime).check(deployment.target)  # not after the trials
    objective = read_objective(options.objective, deployment.target)
    if objective.kind == "cap" and not options.budget.latency_ms:
        raise ConfigError("objective=cap needs the cap: budget.latency_ms=NUMBER (ms).")
    info = inspect_dataset(options.dataset)
    space, start = _space(options, info, console)
    accuracy = options.accuracy or ("proxy" if start is None else "inherited")
    _check_controls(options, space)
    recipe = Recipe.from_config({"threads": options.threads, **plain(options.training), **options.finalists.recipe},
                                FULL_TRAINING, "finalists.recipe")
    baselines = () if trials_only else _baselines(options, space, start, console)
    if not options.zoo:  # a zoo is timed before any of it is trained
        check_deployable(baselines, deployment.target)
    name = options.space if options.around is None else space.name
    out = Path(options.out) if options.out else default_out(deployment.target.name, name, info.name)
    named: Any = config  # workers time nothing: they know the device by the name of its table
    if not deployment.device.is_here:
        named = OmegaConf.merge(config, {"host": deployment.host_name, **dict.fromkeys(DEVICE)})
    return Plan(options, deployment, space, start, out, accuracy, section(config, accuracy), sampler, objective, recipe,
                baselines, processes(options.workers, options.training.device), _earlier_run(options.search.reuse),
                kept(named), OmegaConf.to_yaml(named, resolve=True))


def _check_controls(options: PlanOptions, space: SearchSpace) -> None:
    if options.controls > space.n_architectures - options.finalists.k:
        raise ConfigError(f"controls={options.controls} and {options.finalists.k} finalists are more than the "
                          f"{space.n_architectures} networks of space {space.name}. Lower controls.")


def _place(options: PlanOptions) -> TrainingOptions:
    """Where networks are trained; TargetError where this machine cannot."""
    asked = options.training
    place = replace(asked, device=resolved(asked.device))
    check_precision(place.precision, place.device, "training.precision")
    return place


def _sized(options: PlanOptions) -> dict[str, Any]:
    """The data set's options: images as large as the largest of `image_sizes`, where nothing else says their size."""
    if options.dataset.get("image_size") is not None or not options.image_sizes:
        return options.dataset
    return {**options.dataset, "image_size": max(options.image_sizes)}


def _space(options: PlanOptions, info: DatasetInfo, console: Console) -> tuple[SearchSpace, Pretrained | None]:
    """The search space, and the weights that its networks begin with where they are cut from a pretrained network."""
    from hwnas.space.search_space import SearchSpace

    px = options.dataset.get("image_size")
    if options.around is None:
        space = SearchSpace.load(options.space, channels=info.channels, classes=info.classes, image_size=px)
        if not space.definition.around:
            return space, None
        from hwnas.networks.around import check_cuts, find_start

        check_cuts(space)
        return space, _start(space.definition.around, options, console, lambda: (
            find_start(space.definition.around, options.pretrained, info.channels), ""))[0]
    from hwnas.networks.around import around_of, space_content
    from hwnas.networks.baselines import check_timm
    from hwnas.networks.weights import find_pretrained

    name = options.around
    check_timm(name, "around")
    start, pad = _start(name, options, console, lambda: find_pretrained(name, options.pretrained, info.channels))
    content = space_content(around_of(options.around, pad), info.channels, info.classes,
                            px or min(info.native_size, LARGEST_PX), options.image_sizes or ())
    return SearchSpace.of_content(content, f"around_{options.around}", channels=info.channels,
                                  classes=info.classes), start


def _start(name: str, options: PlanOptions, console: Console, find: Callable[[], tuple[Pretrained, str]]
           ) -> tuple[Pretrained | None, str]:
    """The weights of the network that others are cut from, and their padding, as `find` finds them. Where there are
    none, which is an error if they were asked for, the cuts begin with random weights, and a line says so."""
    try:
        return find()
    except MissingWeights as error:
        if options.pretrained.asked:
            raise
        console.say(f"note: cuts of {name} begin with random weights: {error}")
        return None, ""


def _earlier_run(reuse: str | None) -> Path | None:
    """`search.reuse` as a run folder; ConfigError when it holds no study."""
    if not reuse:
        return None
    folder = Path(reuse)
    if not (folder / "study.db").is_file():
        raise ConfigError(f"search.reuse={folder}: no study.db there. Give the run folder of an earlier search; one "
                          "with storage= keeps its study elsewhere and cannot be reused.")
    return folder


def _baselines(options: PlanOptions, space: SearchSpace, start: Pretrained | None, console: Console
               ) -> tuple[TimmNetwork, ...]:
    """The baselines, with a stem of stride 1 as well where images are small, for each of `image_sizes`, and cut by
    depth where asked; those that have pretrained weights begin with them where these are asked for.

    The network that the space's are cut from is the first. Beside it only pretrained ones stand, as it has a `start`;
    and of a zoo, where some have weights, only these.
    """
    from hwnas.front.zoo import published_of
    from hwnas.networks.baselines import Baseline, check_names, cuts_of, variants
    from hwnas.networks.network import Shape, TimmNetwork

    images = Shape(space.channels, max(space.image_sizes), space.classes)
    zoo = published_of(options.zoo) if options.zoo else {}
    names, sizes = check_names([*(options.baselines or ()), *zoo]), dict.fromkeys(options.image_sizes or ())
    if start is not None or zoo:
        first = () if start is None else (space.definition.around.partition("+")[0],)
        names, options = _pretrained_names(first, names, options, space.channels, console)
    if not names:
        if not space.definition.around and (options.pretrained.asked or options.cuts or sizes):
            raise ConfigError("pretrained, cuts and image_sizes are for baselines, and there are none. Name some: "
                              "baselines=[NAME].")
        return ()
    if (largest := max(sizes, default=0)) > images.image_size:
        raise ConfigError(f"image_sizes: {largest} px is larger than the search's images ({images.image_size} px). "
                          f"Give dataset.image_size={largest}, or smaller sizes.")
    baselines = list(map(Baseline, names)) if zoo or start is not None else variants(names, images.image_size)
    cuts = cuts_of(names) if options.cuts else []
    smaller = [px for px in sizes if px < images.image_size]
    small = [replace(each, image_size=px) for each in [*map(Baseline, names), *cuts] for px in smaller]
    if options.cuts and (whole := [name for name in names if name not in {cut.name for cut in cuts}]):
        console.note(f"cannot be cut by depth: {', '.join(whole)}")
    begun = _begun([*baselines, *cuts, *small], options, images, console)
    return tuple(TimmNetwork(baseline, images) for baseline in begun)


def _pretrained_names(first: Sequence[str], names: Sequence[str], options: PlanOptions, channels: int,
                      console: Console) -> tuple[tuple[str, ...], PlanOptions]:
    """`first`, which have pretrained weights, and those of `names` that have some; the options ask for them. Where none
    has, all names, and options as they are."""
    from hwnas.networks.weights import find_some

    if options.pretrained.file is not None and first:
        having = {*first}
    else:
        try:
            having = {*find_some(list(dict.fromkeys([*first, *names])), options.pretrained, channels, console.say)}
        except MissingWeights as error:
            if first or options.pretrained.asked:
                raise
            console.say(f"note: the zoo begins with random weights: {error}")
            return tuple(names), options
    if left := [name for name in names if name not in having]:
        why = f"pretrained.file is of {first[0]}" if options.pretrained.file and first else "no pretrained weights"
        console.note(f"not a baseline beside pretrained networks: {', '.join(left)} ({why})")
    options = replace(options, pretrained=replace(options.pretrained, use=True))
    return tuple(dict.fromkeys([*first, *(name for name in names if name in having)])), options


def _unheard(given: Mapping[str, Any]) -> str:
    """The options of `finalists.recipe` that are full training's own values, so that they change nothing, where
    fine-tuning has others."""
    from hwnas.training.recipe import FINE_TUNING, FULL_TRAINING, all_recipe

    full, fine = all_recipe(FULL_TRAINING), all_recipe(FINE_TUNING)
    return ", ".join(f"{key}={value}" for key, value in sorted(given.items()) if key in fine and value == full[key]
                     and fine[key] != value and key not in ("epochs", "min_steps", "max_steps"))


def _begun(baselines: Sequence[Baseline], options: PlanOptions, images: Shape, console: Console) -> list[Baseline]:
    """`baselines`, those that have pretrained weights with them where these are asked for. ConfigError or DataError for
    weights that do not fit."""
    from hwnas.networks.network import TimmNetwork
    from hwnas.networks.weights import find_some

    if not options.pretrained.asked:
        return list(baselines)
    names = list(dict.fromkeys(baseline.name for baseline in baselines))
    begun = find_some(names, options.pretrained, images.channels)
    if left := [name for name in names if name not in begun]:
        console.note(f"no pretrained weights of {', '.join(left)}: trained from scratch")
    if unheard := _unheard(options.finalists.recipe):
        console.note(f"finalists.recipe: {unheard} is full training's own; networks that begin with pretrained weights "
                     "keep their recipe's")
    changed = [replace(each, pad_type=begun[each.name][1], pretrained=begun[each.name][0]) if each.name in begun
               else each for each in baselines]
    for baseline in {each.name: each for each in reversed(changed) if each.pretrained is not None}.values():
        TimmNetwork(baseline, images).start()  # weights that do not fit are refused now, not after the trials
    return changed


@dataclass(frozen=True)
class Prepared:
    """The objects that the trials and the verification work with."""

    plan: Plan
    run: RunFolder
    dataset: Dataset
    certificate: Certificate | StudyError | None
    chosen: Chosen
    estimator: AccuracyEstimator
    table: LatencyTable
    model: LatencyModel
    options: SearchOptions
    study: optuna.Study
    clock: Clock | None = None
    pace: Pace | None = None
    first: FirstTraining | None = None


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
    trials_s = _divide(prepared, console)
    early = prepared.clock is not None and plan.deployment.at_hand and not _read_held(run)[0]
    if early and not _early_front(prepared, trials_s, console):
        return SearchResult(run, prepared.study, run.read_trials(), _read_held(run)[0], run.read_comparisons(),
                            at_hand=True)
    ended = searched(prepared, console)
    with run.hold("verify", wait=False) as held:
        if not held:
            console.say(f"another worker verifies the front in {run.path}; nothing left to do here.")
            return SearchResult(run, prepared.study, early=ended)
        wait_for_others(prepared.study, waiting=lambda n: console.note(f"waiting for {n} other trials"))
        trials = _estimated(prepared, trial_rows(prepared.study), console)
        run.write_trials(trials)
        with run.hold("results", console.say):
            rows, comparisons = verified(prepared, trials, console)
    return SearchResult(run, prepared.study, trials, rows, comparisons, ended, plan.deployment.at_hand)


def _divide(prepared: Prepared, console: Console) -> float:
    """Print the plan of the minutes, and set the end of the trials, which workers read in the study. Returns their
    seconds, infinite without minutes."""
    clock, pace, plan = prepared.clock, prepared.pace, prepared.plan
    if clock is None or pace is None:
        _set_end(prepared.study, None)
        return math.inf
    trials_s = _trials_s(plan, clock, pace)
    rest_s, timing_s = clock.left_s - trials_s, timing_reserve_s(clock)
    n_known = len({*plan.space.known} - ({WHOLE} if plan.whole else set())) if plan.options.controls else 0
    console.note(f"plan for {clock.minutes:g} min: {clock.spent_s / 60:.1f} to prepare (done), {trials_s / 60:.1f} for "
                 f"trials, about {(rest_s - timing_s) / 60:.1f} to train and export {plan.options.finalists.k} "
                 f"finalists, {plan.options.controls} controls, up to {n_known} known networks and "
                 f"{len(plan.baselines)} baselines, "
                 f"{timing_s / 60:.1f} to score and time them")
    _set_end(prepared.study, time.time() + trials_s)
    return trials_s


def _pace(plan: Plan, dataset: Dataset, console: Console) -> Pace:
    """How fast this machine trains the reference network and the baselines, and another one scores them."""
    from hwnas.front.make import Making
    from hwnas.front.score import scoring_seconds

    device, network = plan.deployment.device, plan.network(plan.space.reference)
    making = Making(dataset, plan.recipe, plan.options.seed, plan.deployment.target)
    score = None if device.is_here else partial(scoring_seconds, network=network, dataset=dataset,
                                                target=making.target, device=device)
    with console.step("time this machine" if score is None else f"time this machine, and {device.host.name} over ssh"):
        pace = pace_of(network, making, score).with_networks(plan.baselines, making)
    if score is not None:
        console.note(f"{device.host.name} takes {pace.scoring_s:.1f} s to score a network")
    return pace


def _fitting(plan: Plan, chosen: Chosen, estimator: AccuracyEstimator, dataset: Dataset, url: str,
             model: LatencyModel, clock: Clock | None, pace: Pace | None, console: Console) -> dict[str, int]:
    """The options that give the proxy the length that the minutes allow: those of the study that goes on or is reused,
    or new ones. None where the user or a certificate gave a length, or a new study no minutes."""
    from hwnas.accuracy.proxy import Proxy
    from hwnas.front.make import Making
    from hwnas.study.study import database_path, held_choice

    if type(estimator) is not Proxy or plan.accuracy == NAME or chosen.options.keys() & LENGTH:
        return {}
    held = held_choice(url)
    if held is None and plan.reuse is not None:
        held = held_choice(database_path(plan.reuse))
    if held is not None or clock is None or pace is None:
        return held or {}
    px, n_trials, networks = dataset.image_size, plan.options.n_trials, _drawn(plan, model)
    making = Making(dataset, estimator.recipe, plan.options.seed, plan.deployment.target)

    def step_s(size: int) -> float:
        with console.step(f"time trials at {size} px"):
            return mean_step_seconds(networks, making, size, pace)

    length = proxy_length(
        estimator.steps, estimator.validating_steps, _trials_s(plan, clock, pace), plan.workers, step_s, px,
        max(SMALLEST_PROXY_PX, px // 4) if len(plan.space.image_sizes) == 1 else px,
        (min(FEW_TRIALS, n_trials or FEW_TRIALS), n_trials or MANY_TRIALS))
    if length:
        console.note(f"a trial trains for {length['max_steps']} steps at {length.get('image_size', px)} px, by the "
                     f"minutes (without them {estimator.steps} at {px} px)")
    return length


def _drawn(plan: Plan, model: LatencyModel) -> list[FoundNetwork]:
    """Some random networks, within the cap where there are such: what a trial trains is cheaper than the reference."""
    codes = plan.space.sample(np.random.default_rng([plan.options.seed, *b"pace"]), 64)
    over_ms = np.maximum(model.predict(codes).mean - (plan.options.budget.latency_ms or np.inf), 0)
    few = codes[np.argsort(over_ms, kind="stable")[:DRAWN]]
    return [plan.network(plan.space.decode(plan.space.to_params(code))) for code in few]


def _trials_s(plan: Plan, clock: Clock, pace: Pace) -> float:
    """Seconds for the trials; BudgetError where none are left for a front after them."""
    return trials_seconds(clock, pace, [plan.network(plan.space.reference)] * min(2, plan.options.finalists.k),
                          plan.workers)


def _early_front(prepared: Prepared, all_trials_s: float, console: Console) -> bool:
    """Make a verified front of one or two of the first networks, trained for a moment, for who stops before the end.

    Its networks have folders of their own, so that it stays whole until the last front takes its place. Afterwards the
    trials go on for what is left of `all_trials_s`. Returns whether there is time for another front.
    """
    from hwnas.front.finalists import usable_trials
    from hwnas.study.record import trial_rows

    plan, clock, pace = prepared.plan, prepared.clock, prepared.pace
    assert clock is not None
    assert pace is not None
    n, reference = min(2, plan.options.finalists.k), plan.network(plan.space.reference)
    parts = early_seconds(clock, pace, [reference] * n)
    if parts is None:
        n, parts = 1, early_seconds(clock, pace, [reference])
    if parts is None:
        console.note("no first front on the way: it would take more than a quarter of the time that is left")
        return True
    trials_s, front_s = parts
    console.note(f"a first front of {n} network{'s' * (n > 1)} comes first: {trials_s:.0f} s of trials, then about "
                 f"{front_s:.0f} s")
    _set_end(prepared.study, time.time() + trials_s)
    searched(prepared, console)
    with prepared.run.hold("verify", wait=False) as held, prepared.run.hold("results", console.say):
        if held and usable_trials(trials := _estimated(prepared, trial_rows(prepared.study), console)):
            asked = replace(plan.options, finalists=replace(plan.options.finalists, k=n), controls=0)
            part = replace(plan, options=asked, baselines=(), workers=1)
            prepared.run.write_trials(trials)
            verified(replace(prepared, plan=part, clock=clock.until(front_s)), trials, console, EarlyNetwork)
    try:
        rest_s = min(_trials_s(plan, clock, pace), max(LEAST_TRIALS_S, all_trials_s - trials_s))
        _set_end(prepared.study, time.time() + rest_s)
    except BudgetError:
        if not _read_held(prepared.run)[0]:
            raise
        console.say("this machine became slower: there is no time for another front, and the first one stays.")
        return False
    return True


def _set_end(study: optuna.Study, until: float | None) -> None:
    """Tell all workers when the trials end; None: with their number."""
    from hwnas.study.storage import storage_errors
    from hwnas.study.study import storage_of

    with storage_errors(storage_of(study).url):
        study.set_user_attr(UNTIL, until)


def prepare(plan: Plan, run: RunFolder, console: Console, clock: Clock | None = None) -> Prepared:
    """Load the data, measure this host if no table fits, open the study. With a `clock` the machine's pace is measured
    too, and a new study's trials get the length that the minutes allow."""
    from hwnas.study.storage import storage_errors
    from hwnas.study.study import check_resumable, database_path

    url = plan.options.storage or database_path(run.path)
    dataset = _load_data(plan, url, run.path, console)
    check_resumable(url, _identity_unmeasured(plan, dataset))
    certificate = look_up(dataset, plan.space)
    chosen = _chosen(plan, dataset, certificate)
    if chosen.why:
        console.note(chosen.why)
    estimator = _estimator(plan, chosen, dataset)
    table, model = latency_model(plan.deployment, plan.space, plan.options.calibration, console)
    plan = _without_fallbacks(plan, table, url, console)
    if plan.left_out:
        model = model.of_part(plan.space)
    if plan.options.zoo and plan.deployment.at_hand:
        plan = replace(plan, baselines=_worth_training(plan, run, table, console))
    pace = _pace(plan, dataset, console) if clock is not None else None
    if length := _fitting(plan, chosen, estimator, dataset, url, model, clock, pace, console):
        chosen = replace(chosen, options={**chosen.options, **length})
        estimator = _estimator(plan, chosen, dataset)
    options = search_options(plan, model)
    identity = _identity(plan, table, dataset, f"{chosen.accuracy} ({estimator.fingerprint})", options)
    setup_s = 0.0
    if isinstance(estimator, Prepares):
        check_resumable(url, identity)
        estimator.prepare(console)
        setup_s = estimator.setup_seconds
    study = _open_study(plan, url, identity, model, dataset, certificate, options, console, length)
    with storage_errors(url):
        study.set_user_attr("setup_seconds", setup_s)  # part of what the search cost
    if plan.reuse is not None:
        from hwnas.search.trial import reuse_trials

        n = reuse_trials(study, plan.reuse, plan.space, model.predict, options, partial(_other_part, plan.reuse, plan))
        console.note(f"reused: the accuracies of {n} networks of {plan.reuse}")
    first = _first_training(plan, run, estimator)
    return Prepared(plan, run, dataset, certificate, chosen, estimator, table, model, options, study, clock, pace,
                    first)


def _first_training(plan: Plan, run: RunFolder, estimator: AccuracyEstimator) -> FirstTraining | None:
    """The training of trials that begin with pretrained weights, from which finalists go on: the estimator keeps what
    its trainings end with. None where trials are judged otherwise."""
    from hwnas.accuracy.proxy import Proxy
    from hwnas.training.first import FirstTraining

    if not isinstance(estimator, Proxy) or plan.start is None:
        return None
    options = estimator.options
    first = FirstTraining(estimator.recipe, options.train_images, options.image_size, plan.options.seed,
                          run.trial_weights, estimator.fingerprint)
    estimator.keep = first.keep
    return first


def _without_fallbacks(plan: Plan, table: LatencyTable, url: str, console: Console) -> Plan:
    """The plan without the variants of blocks that a study began without; a new one without those whose fallback costs
    too much on the target: a machine that is at hand is asked first. Lines say what falls back, and what was left out.

    ConfigError where nothing would be left to search, StudyError for a study that cannot be read.
    """
    from hwnas.latency.fallbacks import find_blocks, left_out, measure_blocks, warning
    from hwnas.study.study import held_identity

    target, everything = plan.deployment.target, plan.options.fallbacks
    rows = find_blocks(table.host_name, table.key, plan.space.name, table.runtime_version)
    held = held_identity(url)
    if rows is None and held is None and plan.deployment.at_hand and not everything:
        try:
            rows = measure_blocks(plan.deployment, plan.space, console, precisions=[target.precision])[0]
        except TargetError as error:  # it may lack what tells of nodes, and run networks all the same
            console.say(f"note: which blocks {target.name} runs in fallback is not known, and none is left out: "
                        f"{error}")
    costs = left_out(rows or (), target)
    if held is not None and not everything:
        left = _read_left_out(held.get(LEFT_OUT, ""), url)
        costs = {variant: costs.get(variant, str(variant)) for variant in left}
    tell = console.say if held is None else console.note  # workers, who are quiet, find a study
    if rows is not None and (line := warning(rows, target)):
        tell(f"note: {line}")
    return plan if everything else _without(plan, costs, tell)


def _other_part(folder: Path, plan: Plan) -> SearchSpace | None:
    """The part of the plan's space that an earlier run searched; None where it is the plan's own."""
    from hwnas.study.study import database_path, held_identity

    url = database_path(folder)
    theirs = plan.space.unrestricted.without(_read_left_out((held_identity(url) or {}).get(LEFT_OUT, ""), url))
    return None if theirs.definition == plan.space.definition else theirs


def _without(plan: Plan, costs: Mapping[Variant, str], tell: Callable[[str], None]) -> Plan:
    """The plan without the variants in `costs`, which says what each of them costs; `tell` hears it."""
    words = "; ".join(costs.values())
    try:
        space = plan.space.without(costs)
    except SpaceError as error:
        raise ConfigError(f"{error} without what {plan.deployment.target.name} runs in fallback ({words}). Search it "
                          "all the same: fallbacks=true. Or choose another space or target.") from None
    if space is plan.space:
        return plan
    _check_controls(plan.options, space)
    tell(f"left out of the search, for what it costs in fallback: {words}. fallbacks=true keeps it "
         f"({space.n_architectures:.3g} of {plan.space.n_architectures:.3g} networks stay).")
    return replace(plan, space=space, left_out=" ".join(sorted(map(str, costs))), left_out_costs=tuple(costs.values()))


def _read_left_out(text: str, url: str) -> list[Variant]:
    """The variants that a study's identity names; StudyError for text that names none."""
    from hwnas.space.restriction import Variant
    from hwnas.study.storage import shown

    try:
        return [Variant.read(word) for word in text.split()]
    except ValueError as error:
        raise StudyError(f"study {shown(url)}: {LEFT_OUT}: {error}. Start another run with out=FOLDER.") from None


def _worth_training(plan: Plan, run: RunFolder, table: LatencyTable, console: Console) -> tuple[TimmNetwork, ...]:
    """The baselines; of a zoo those that can be worth it, by their latency here and their published accuracy."""
    from hwnas.front.score import Timing
    from hwnas.front.zoo import published_of, worth_training

    options, origin = plan.options, plan.space.definition.around.partition("+")[0]
    published = published_of(options.zoo or {})
    published.pop(origin, None)  # the cuts' original stays, whatever is faster
    timing = Timing(table.reference, table.quiet_ms, options.verification.seconds, options.seed,
                    plan.deployment.device)
    return tuple(worth_training(plan.baselines, published, run, plan.deployment.target, timing, console))


def _calibration(options: PlanOptions) -> CalibrationOptions:
    """The options of the calibration, which may take a share of the minutes only."""
    minutes, calibration = options.budget.minutes, options.calibration
    return calibration if minutes is None else replace(calibration, minutes=min(
        calibration.minutes, max(0.05, CALIBRATION * minutes)))


def search_options(plan: Plan, model: LatencyModel) -> SearchOptions:
    """The search's options; BudgetError when no network of the space keeps the cap."""
    from hwnas.search.trial import SearchOptions
    from hwnas.study.objective import check_cap

    asked, budget = plan.options, plan.options.budget
    target_ms = plan.objective.target_ms or float(model.predict_architectures([plan.space.reference]).mean[0])
    if budget.latency_ms is not None:
        check_cap(plan.space, model.predict, budget.latency_ms, budget.quantile)
    return SearchOptions(asked.trials, plan.objective.at(target_ms), seed=asked.seed, max_asks=asked.max_asks,
                         cap_ms=budget.latency_ms, cap_quantile=budget.quantile, enqueue=_tried_first(plan))


def _tried_first(plan: Plan) -> list[dict[str, Any]]:
    """Parameters of the networks that are tried first: those that the space knows, and around a pretrained network the
    obvious cuts on smaller images too, as long as their last map has two pixels a side. The whole network is not: it
    costs as much as several cuts, and stands on the front as a baseline."""
    space, sizes = plan.space, sorted(plan.space.image_sizes)
    known = {name: space.encode(network) for name, network in space.known.items()}
    if plan.start is None:
        return [*known.values()]
    known.pop(WHOLE, None)
    smaller = [{**setting, "image_size": px} for setting in known.values()
               for px in dict.fromkeys((sizes[len(sizes) // 2], sizes[0])) if setting.get("image_size", px) != px]

    def last_map_px(network: Architecture) -> float:
        stride = network.stem_stride * math.prod(stage[0].stride for stage in network.block_defs())
        return network.image_size / stride

    return [*known.values(), *(setting for setting in smaller if last_map_px(space.decode(setting)) >= 2)]


def extra_workers(n: int, plan: Plan, run: RunFolder, console: Console) -> AbstractContextManager[list[str]]:
    """Run `n` workers beside this process during the block. They end with the search, or with this process.

    Yields a list that has a line for each worker that ended early, after the block.
    """
    return crew(n, "hwnas.worker", ["-q", "--as-is", f"run={run.path.absolute()}"], console.say,
                unseen=["--as-is", f"config={plan.config}"])


def searched(prepared: Prepared, console: Console) -> list[str]:
    """Evaluate architectures until the study's trials end, on all workers; a line for each that ended early."""
    plan = prepared.plan
    with extra_workers(min(plan.workers, plan.options.trials) - 1, plan, prepared.run, console) as early:
        search_trials(prepared, console)
    return early


def search_trials(prepared: Prepared, console: Console) -> None:
    """Evaluate architectures until the study is done, as one of its workers."""
    from hwnas.search.loop import run_search
    from hwnas.study.record import EVALUATED

    plan = prepared.plan
    options = replace(prepared.options, until=prepared.study.user_attrs.get(UNTIL))
    n = f"{options.n_trials} architectures" if options.until is None else \
        f"architectures for {max(0.0, options.until - time.time()) / 60:.1f} min, out"
    console.note(f"search: {n} of {plan.space.n_architectures:.3g} in space "
                 f"{plan.space.name}, {options.objective.shown}, sampler {plan.options.sampler}")
    with console.step("search") as report:
        tell = _tell(report, options.until)

        def heard(event: SearchEvent) -> None:
            tell(event)
            if event.kind == EVALUATED:
                _forget_beaten(prepared)

        outcome = run_search(prepared.study, plan.space, prepared.model.predict, prepared.estimator, options, heard)
    console.note(f"search ended: {outcome.reason} ({outcome.n_asks} asks, {outcome.n_pruned} over the cap, "
                 f"{outcome.n_duplicates} duplicates, {outcome.n_failed} failed)")


def _forget_beaten(prepared: Prepared) -> None:
    """Remove the weights of trials that will hardly be finalists: those behind KEPT_LAYERS fronts of better ones."""
    from hwnas.study.record import EVALUATED, outcome

    if prepared.first is None:
        return
    trials = [trial for trial in prepared.study.get_trials(deepcopy=False) if outcome(trial) == EVALUATED]
    points = np.array([[-trial.user_attrs["top1_proxy"], trial.user_attrs["latency_ms_predicted"]] for trial in trials])
    names = [trial.user_attrs["architecture_id"] for trial in trials]
    kept = {names[index] for layer in layers(points, [True, True])[:KEPT_LAYERS] for index in layer}
    prepared.first.keep_only(kept, set(names))


def verified(prepared: Prepared, trials: Sequence[Mapping[str, Any]], console: Console,
             of: type[FoundNetwork] = FoundNetwork) -> tuple[Sequence[FrontRow], Sequence[Mapping[str, Any]]]:
    """Make, verify and write finalists, controls and baselines; returns the rows and the comparisons.

    A verified front of the same networks in the run folder is read instead. If the host searched for is not at hand,
    nothing is verified: the rows keep their predictions, and `python -m hwnas.verify run=DIR` on that host completes
    them. Finalists are networks `of` this kind.
    """
    from hwnas.front.join import joined_rows
    from hwnas.front.make import Making, fault_of, other_start
    from hwnas.front.score import Scores
    from hwnas.front.verification import environment_of, results_of, verify_front, write_results

    plan, run, deployment = prepared.plan, prepared.run, prepared.plan.deployment
    target, host = deployment.target, deployment.host_name
    wanted = rows = _wanted(prepared, trials, console, of)
    making = Making(prepared.dataset, plan.recipe, plan.options.seed, target, narrow=_narrow(prepared),
                    first=prepared.first)
    if prepared.clock is not None and prepared.pace is not None:
        rows, making, pace = _in_time(prepared, rows, making, console)
        prepared = replace(prepared, pace=pace)
    joined = joined_rows(run, making, host)
    held = _read_verified(run, [*rows, *joined], [*wanted, *joined], asdict(making.recipe), plan.options.budget.p99_ms)
    names = {row.id for row in held}
    spoilt = next((f"{row.id}: {why}" for row in [*wanted, *joined] if row.id in names and row.network is not None
                   and (why := fault_of(row.network, run.model(row.id), making, console.say, complete=True)
                        or other_start(row.network, run.model(row.id), making))), "")
    if spoilt:
        console.say(f"the front in {run.path} is made and timed again: {spoilt}.")
    elif held:
        run.remove_models(EARLY)  # a kill may have left them
        comparisons = run.read_comparisons()
        console.say(f"the front in {run.path} is verified already; to time it again: "
                    f"python -m hwnas.verify run={run.path}")
        return held, comparisons
    elif of is FoundNetwork and not all(row.id.endswith(EARLY) for row in _read_held(run)[0]):
        console.say(f"the front in {run.path} is of other networks, or trained or capped otherwise: it is made again.")
    rows = [*_made(prepared, rows, wanted, making, console), *joined]
    facts, objective = _facts(prepared, trials, len(rows)), prepared.options.objective
    environment = environment_of(making, facts, [row.network for row in rows if row.network is not None])
    if deployment.at_hand:
        results = verify_front(rows, run, making, facts.timing, objective, environment, console)
    else:
        results = results_of(Scores(rows), run, making, objective, environment)
        console.say(f"not verified: this is not {host}. Over there: python -m hwnas.verify run={run.path}")
    results = replace(results, environment={**results.environment, "spent_s": dict(console.spent_s)})
    write_results(run, results, making, trials, plan.yaml)
    if of is FoundNetwork:
        run.remove_models(EARLY)
        if prepared.first is not None:
            prepared.first.forget()
    return results.rows, [comparison.to_dict() for comparison in results.comparisons]


def _wanted(prepared: Prepared, trials: Sequence[Mapping[str, Any]], console: Console, of: type[FoundNetwork]
            ) -> list[FrontRow]:
    """The rows of the front as yet without figures: finalists of the trials, controls and baselines."""
    from hwnas.front.finalists import doubts, draw_controls, finalists_of, known_controls
    from hwnas.front.rows import FrontRow

    plan, predict = prepared.plan, prepared.model.predict
    options, target, host = plan.options, plan.deployment.target.name, plan.deployment.host_name
    whole = plan.space.known.get(WHOLE) if plan.whole else None  # a baseline already
    finalists = finalists_of(trials, _network_of(prepared, of), options.finalists.k, target, host,
                             options.budget.latency_ms, whole.id if whole is not None else "")
    for doubt in doubts(trials, finalists, options.budget.latency_ms) if of is FoundNetwork else ():
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
             ) -> tuple[list[FrontRow], Making, Pace]:
    """The rows that the minutes allow, a recipe with as many steps as fit, and the pace of all rows' networks."""
    clock, pace, plan = prepared.clock, prepared.pace, prepared.plan
    assert clock is not None
    assert pace is not None
    pace = pace.with_networks([row.network for row in rows if row.network is not None], making)
    full = making.recipe.steps_for(len(making.dataset.train))
    kept, steps = fitted(rows, clock, pace, plan.workers, (min(full, ENOUGH_STEPS), MOST_TIMES * full), console.say,
                         plan.whole)
    console.note(f"{clock.left_s / 60:.1f} min are left: {len(kept)} networks are trained for {steps} steps each")
    return kept, replace(making, recipe=with_steps(making.recipe, steps)), pace


def _made(prepared: Prepared, rows: Sequence[FrontRow], wanted: Sequence[FrontRow], making: Making, console: Console
          ) -> list[FrontRow]:
    """`rows` as made; with minutes, those others of `wanted` too that fit at the pace which making them showed."""
    from hwnas.front.make import is_trained
    from hwnas.front.verification import make_rows

    clock, pace, workers, run = prepared.clock, prepared.pace, prepared.plan.workers, prepared.run
    spare = [row for row in wanted if row not in rows]
    new = [row.id for row in rows if spare and row.network is not None and not is_trained(row.network, run, making)]
    began = Clock.start(0.0)
    made = make_rows(rows, run, making, workers, console)
    if clock is None or pace is None or not spare:
        return made
    steps = making.recipe.steps_for(len(making.dataset.train))
    # a network that failed may have done so at once, and says nothing about the pace
    ended = [row.network for row in made if row.id in new and row.network is not None and not row.reason]
    pace = pace.corrected(ended, steps, workers, began.spent_s)
    more = fitting_too(spare, made, clock, pace, workers, steps)
    gone = [row.id for row in spare if row not in more]
    told = [f"there is time for {', '.join(row.id for row in more)} after all"] if more else []
    console.say("; ".join(told + ([f"left out for want of time: {', '.join(gone)}"] if gone else [])) + ".")
    return [*made, *make_rows(more, run, making, workers, console)] if more else made


def _load_data(plan: Plan, url: str, folder: Path, console: Console) -> Dataset:
    from hwnas.data.loading import read_images

    data = read_images(plan.options.dataset, max(plan.space.image_sizes), plan.options.seed, console)
    console.note(f"{data.name}: {len(data.train)} training, {len(data.validation)} validation, {len(data.test)} test "
                 f"images of {len(data.class_names)} classes at {data.image_size} px")
    return _as_begun(data, plan, url, folder, console)


def _as_begun(dataset: Dataset, plan: Plan, url: str, folder: Path, console: Console) -> Dataset:
    """The data set under the fingerprint that the study has for it; a new one has that of the run it reuses."""
    from hwnas.study.study import database_path, held_identity, identity_of, load_study

    if not dataset.former:
        return dataset
    held, where = held_identity(url), folder
    if held is None and plan.reuse is not None:
        held, where = identity_of(load_study(database_path(plan.reuse))), plan.reuse
    begun = (held or {}).get("data set", "")
    return dataset.as_in(begun.removeprefix(f"{dataset.name} (").removesuffix(")"), where, console.say)


def _usable(certificate: Certificate | StudyError | None) -> Certificate | None:
    """The certificate, for a caller that depends on it. A certificate that cannot be read is raised as its error."""
    if isinstance(certificate, StudyError):
        raise certificate
    return certificate


def _chosen(plan: Plan, dataset: Dataset, certificate: Certificate | StudyError | None) -> Chosen:
    """The estimator that the user named, or the one that the certificate favours."""
    if plan.accuracy != NAME:
        return Chosen(plan.accuracy, plan.accuracy_options)
    return choose(plan.accuracy_options, _usable(certificate), dataset, plan.space,
                  plan.options.n_trials or DEFAULT_TRIALS)


def _estimator(plan: Plan, chosen: Chosen, dataset: Dataset) -> AccuracyEstimator:
    from hwnas.accuracy.estimator import BUILT_IN, WITHOUT_IMAGES, load_estimator

    name, options = chosen.accuracy, dict(chosen.options)
    if name in BUILT_IN and name not in WITHOUT_IMAGES:
        options = {"threads": plan.options.threads, **plain(plan.options.training), **options}
    if name == "inherited":
        options["pretrained"] = plain(plan.options.pretrained)
    return load_estimator(name, dataset=dataset, space=plan.space.unrestricted, config=options)


def _identity(plan: Plan, table: LatencyTable, dataset: Dataset, accuracy: str, options: SearchOptions
              ) -> dict[str, str]:
    """What the study's trials depend on."""
    return {**_identity_unmeasured(plan, dataset), "target": f"{plan.deployment.target.name} ({table.key})",
            "latency table": f"{table.key} of {table.created}", "accuracy": accuracy,
            "objective": str(options.objective), **({LEFT_OUT: plan.left_out} if plan.left_out else {})}


def _identity_unmeasured(plan: Plan, dataset: Dataset) -> dict[str, str]:
    """The part of it that is known before this host is measured."""
    cap_ms = plan.options.budget.latency_ms
    return {
        "space": f"{plan.space.name} ({plan.space.unrestricted.fingerprint})",
        "data set": f"{dataset.name} ({dataset.fingerprint})",
        "host": plan.deployment.host_name, "budget.latency_ms": "none" if cap_ms is None else f"{cap_ms:g} ms",
        "seed": str(plan.options.seed)}


def _open_study(plan: Plan, url: str, identity: dict[str, str], model: LatencyModel, dataset: Dataset,
                certificate: Certificate | StudyError | None, options: SearchOptions, console: Console,
                chosen: Mapping[str, int]) -> optuna.Study:
    from hwnas.samplers.informed import Context
    from hwnas.study.study import open_study

    scores = _zero_cost(plan, dataset, certificate, console)
    context = Context(plan.space, model.predict, options.objective, options.cap_ms, options.cap_quantile, scores,
                      _tried_first(plan) if plan.start is not None else ())
    return open_study(url, identity, options.objective, plan.sampler(context), chosen=chosen)


def _zero_cost(plan: Plan, dataset: Dataset, certificate: Certificate | StudyError | None, console: Console
               ) -> Callable[[Settings], NDArray[np.float64]] | None:
    """The zero-cost scores for our sampler; None when `sampler_options.zero_cost` names none.

    If there is a certificate of this data set and space, it may switch some of them off.
    """
    from hwnas.samplers.loading import OWN

    if not plan.options.sampler_options.get("zero_cost") or plan.options.sampler != OWN:
        return None
    from hwnas.samplers.informed import certified, scored

    content = _usable(certificate)
    names = certified(plan.options.sampler_options["zero_cost"], content.content if content else None, console)
    if not names:
        return lambda settings: np.empty((len(settings.codes), 0))
    return scored(dataset, plan.space, names, plan.options.threads, console)


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


def _network_of(prepared: Prepared, of: type[FoundNetwork]) -> Callable[[Mapping[str, Any]], FoundNetwork]:
    """The function that makes the network of a row of trials.csv."""
    trials = {trial.number: trial for trial in prepared.study.get_trials(deepcopy=False)}
    return lambda row: of(prepared.plan.space.decode(trials[row["number"]].params), prepared.plan.start)


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
    certificate = certificate_facts(prepared.certificate, prepared.dataset, plan.space.unrestricted,
                                    chosen.accuracy, chosen.options, prepared.estimator.fingerprint)
    outcome = {"accuracy": chosen.accuracy, "sampler": options.sampler,
               "objective": prepared.options.objective.shown,
               "left_out": list(plan.left_out_costs),
               "n_trials": sum(row["outcome"] == "evaluated" for row in trials), "asks": len(trials)}
    return Facts(plan.deployment.host_name, plan.space.name, timing, options.budget.latency_ms, options.budget.p99_ms,
                 latency, outcome, certificate)
