"""The plan of a search: its options, read and checked once, its space and its baselines. Nothing is written here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hwnas.accuracy.estimator import PROXY
from hwnas.cli.command import kept
from hwnas.cli.options import Config, option, plain, read_command, section
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, DatasetInfo
from hwnas.data.loading import inspect_dataset
from hwnas.errors import CandidateError, ConfigError, MissingWeights, SpaceError
from hwnas.front.make import BuildSettings, check_deployable
from hwnas.latency.calibration import CalibrationOptions
from hwnas.latency.deployment import DEVICE, Deployment, DeviceOptions, open_device
from hwnas.latency.target_set import DEPLOYMENTS, read_deployments
from hwnas.lazy import omegaconf
from hwnas.networks.around import around_of, describe_cuts, find_start, load_space, obvious_cuts, space_of_cuts
from hwnas.networks.baselines import MODULE, Baseline, check_names, check_timm, variants
from hwnas.networks.export import export_onnx
from hwnas.networks.network import FoundNetwork, Shape, TimmNetwork, build
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_pretrained, find_some
from hwnas.samplers.informed import Context
from hwnas.samplers.loading import RepeatableSampler, read_sampler
from hwnas.search.auto import AUTO, TrainingCost, choose_around, training_cost
from hwnas.search.deployments import deployments_of
from hwnas.search.minutes import CALIBRATION
from hwnas.space.architecture import WIDTH, Architecture, origin_name
from hwnas.space.cuts import WHOLE
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import CAP_QUANTILES, Objective, read_objective
from hwnas.study.storage import parse_url
from hwnas.system.cores import usable_cores
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import RunFolder
from hwnas.tasks.task import Task, load_task, trunk_of
from hwnas.training.place import CPU, TrainingOptions, check_precision, processes, resolved
from hwnas.training.recipe import FINE_TUNING, FULL_TRAINING, Recipe, all_recipe

RACE = "race"  # value of `accuracy`: networks race, and nothing is estimated
SAMPLER = "hwnas"  # of conf/search.yaml
PARTS, FINALISTS = 10, 4  # if the user gives no finalists.k: of a race, of a search by estimates
LARGEST_PX = 224  # of the images of cut networks, if no size is given
DEFAULT_TRIALS, UNLIMITED = 24, 1_000_000  # the second: the minutes end the search
CONTROLS = 2  # of a search by estimates, if the user gives no number
Start = TypeVar("Start")  # the weights that a network starts from, and perhaps their padding


@dataclass(frozen=True, slots=True)
class FinalistOptions:
    """The number of finalists, and their recipe's differences from full training."""

    k: int | None = option(low=1, high=100)
    recipe: dict[str, Any] = option()


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """The hard cap in ms, the quantile of the predicted latency that must keep it, and the cap of measured p99.

    `minutes` bounds the whole command. The caps are kept in the machine's present session.
    """

    latency_ms: float | None = option(low=1e-6)
    p99_ms: float | None = option(low=1e-6)
    quantile: float = option(low=CAP_QUANTILES[0], high=CAP_QUANTILES[1])
    minutes: float | None = option(None, low=0.1, high=100_000)


@dataclass(frozen=True, slots=True)
class VerificationOptions:
    """The most seconds that timing finalists and baselines may take."""

    seconds: float = option(low=1, high=86_400)


@dataclass(frozen=True, slots=True)
class EarlierOptions:
    """The run folder of an earlier search whose accuracies count here too."""

    reuse: str | None


@dataclass(frozen=True)
class PlanOptions(DeviceOptions):
    """The options of `conf/search.yaml`, except the estimators'. `workers=0` is one a core, on a GPU a few."""

    target: dict[str, Any]
    host: str | None
    space: str
    dataset: dict[str, Any]
    objective: dict[str, Any]
    out: str | None
    task: str | None = option(help="what networks shall do with the images (null: as the data set says)")
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
    overwrite: bool = option(False)
    training: TrainingOptions = option(TrainingOptions())
    controls: int | None = option(None, low=0, high=100)
    pretrained: PretrainedOptions = option(PretrainedOptions())
    image_sizes: tuple[int, ...] | None = option(None, low=8, high=1024)
    cuts: bool = option(False)
    around: Any = option(None, check=lambda value: value is None or bool(_listed(value)),
                         what=f"a timm name, a list of different ones, or {AUTO}")

    @property
    def arounds(self) -> tuple[str, ...]:
        """The names that `around` gives; `auto` is one of them."""
        return _listed(self.around)

    @property
    def n_controls(self) -> int:
        """Controls of a search by estimates; a race has none."""
        return CONTROLS if self.controls is None else self.controls

    @property
    def trials(self) -> int:
        """Architectures to evaluate: `n_trials`, else 24, or as many as the minutes allow."""
        return self.n_trials or (DEFAULT_TRIALS if self.budget.minutes is None else UNLIMITED)


def _listed(value: Any) -> tuple[str, ...]:
    """Return the names that a value of `around` gives; empty if the value is not allowed."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    are_names = all(isinstance(name, str) and name for name in names)
    return names if are_names and len({*names}) == len(names) and (AUTO not in names or value == AUTO) else ()


@dataclass(frozen=True)
class Plan:
    """A search as the options ask for it.

    `out` is the run folder, which need not exist yet. `starts` has the pretrained weights of the networks that are
    cut, by `Architecture.around`. If the user gave no T, `objective` has none until the latency model
    is there. `sampler` makes the sampler from the Context that ours needs. `yaml` is the configuration as it may be
    kept, `config` the one with passwords. `deployments` are all that a network may be deployed as. If there are
    several, `able` has the ones that can run each baseline, by `trained_id`. `parts` are the finalists at most.
    """

    options: PlanOptions
    deployments: tuple[Deployment, ...]
    space: SearchSpace
    starts: Mapping[str, Pretrained]
    out: Path
    accuracy: str
    accuracy_options: Mapping[str, Any]
    sampler: Callable[[Context | None], RepeatableSampler]
    objective: Objective
    recipe: Recipe
    baselines: tuple[FoundNetwork | TimmNetwork, ...]
    workers: int
    parts: int
    reuse: Path | None
    yaml: str
    config: str
    able: Mapping[str, tuple[str, ...]]

    @property
    def deployment(self) -> Deployment:
        """The first deployment; all of them are on the same machine."""
        return self.deployments[0]

    @property
    def whole(self) -> str:
        """The id of the baseline that all networks of the space are cut from; empty if there is none."""
        ids = [f"{name}-pretrained" for name in names_of_wholes(self.space)] if len(self.space.arounds) == 1 else []
        return next((baseline.id for baseline in self.baselines if baseline.id in ids), "")

    def network(self, architecture: Architecture) -> FoundNetwork:
        """Return the network of an architecture of the space, with the weights that it starts from."""
        return FoundNetwork(architecture, self.starts.get(architecture.around))


def names_of_wholes(space: SearchSpace) -> list[str]:
    """Return timm's names of the networks that the networks of a space are cut from."""
    return [origin_name(around) for around in space.arounds]


def make_plan(config: Config, console: Console, trials_only: bool = False) -> Plan:
    """Read all options and check them, as far as this needs no data, measuring or training. Nothing is written.

    If `around` is `auto`, networks are timed and chosen, unless the run folder names the ones that were chosen before.
    `trials_only` is for a worker, which trains no baselines and needs no weights of theirs.
    """
    config, options = _read_options(config)
    sampler = read_sampler(options.sampler, options.seed, options.sampler_options)
    deployments = read_deployments(options.target, options.host, open_device(options, console), console,
                                   anywhere=trials_only)
    target, device, at_hand = deployments[0].target, deployments[0].device, deployments[0].at_hand
    is_certain = target.device == "cpu" and device.is_here and target.precision in ("fp32", "int8")
    if at_hand and not trials_only and not is_certain:  # loading a runtime takes a second
        device.runtime(target.runtime).check(target)  # not after the images are read
    objective = _read_objective(options, deployments)
    info = inspect_dataset(options.dataset)
    recipe = Recipe.from_config({"threads": options.threads, **plain(options.training), **options.finalists.recipe},
                                FULL_TRAINING, "finalists.recipe")
    if load_task(info.task).reads_boxes:  # not after the trials
        recipe.check_boxes()
    # The networks: chosen if `around` is `auto`, then cut, which gives the space.
    if not trials_only:  # a misspelt name is answered before networks are timed, fetched or traced
        check_names(options.baselines or ())
    if options.around == AUTO:
        _check_no_estimates(config, options, trials_only)
        options = _choose(options, info, deployments, recipe, console)
    space, starts = _space(options, info, console)
    _check_head(space, info)
    if space.arounds and (len(deployments) > 1 or not trials_only):
        deployments = _exportable(space, deployments, console)
    # Networks that are cut from others race; all others are estimated.
    accuracy = RACE if space.arounds else options.accuracy or PROXY
    if accuracy == RACE:
        _check_no_estimates(config, options, trials_only)
        _check_race(options, space, at_hand or trials_only, console)
    else:
        check_controls(options, space)
    baselines = () if trials_only else _baselines(options, space, starts, info, console)
    able = _deployable(baselines, deployments, console)
    out = _out_of(options, options.space if options.around is None else space.name, info)
    # The options of the estimator: a race has none.
    own, parts = ({}, PARTS) if accuracy == RACE else (section(config, accuracy), FINALISTS)
    named = _named(config, options, deployments)
    return Plan(options, deployments, space, starts, out, accuracy, own, sampler, objective, recipe, baselines,
                _workers(options, console), options.finalists.k or parts, _earlier_run(options.search.reuse),
                kept(named), omegaconf.OmegaConf.to_yaml(named, resolve=True), able)


def _read_options(config: Config) -> tuple[Config, PlanOptions]:
    """Return the configuration and its options, completed with values that follow from others: the device of trainings,
    the size of images, the length of a calibration."""
    if config.get("task") is not None:  # workers and later commands read it there
        merged: Any = omegaconf.OmegaConf.merge(config, {"dataset": {"task": config["task"]}})
        config = merged
    options = read_command(PlanOptions, config)
    if options.storage is not None:
        parse_url(options.storage)
    training = replace(options.training, device=resolved(options.training.device))
    check_precision(training.precision, training.device, "training.precision")
    dataset, calibration, minutes = options.dataset, options.calibration, options.budget.minutes
    if dataset.get("image_size") is None and options.image_sizes and options.around is not None:
        dataset = {**dataset, "image_size": max(options.image_sizes)}  # neither it nor a space says another size
    if minutes is not None:
        calibration = replace(calibration, minutes=min(calibration.minutes, max(0.05, CALIBRATION * minutes)))
    return config, replace(options, training=training, dataset=dataset, calibration=calibration)


def _read_objective(options: PlanOptions, deployments: Sequence[Deployment]) -> Objective:
    """Return the objective. Raises ConfigError for what it lacks, or what several deployments cannot do."""
    objective = read_objective(options.objective, deployments[0].target)
    if len(deployments) > 1 and any(cost.of_file for cost in objective.minimised):
        raise ConfigError(f"target={options.target['name']} is a set, and the size of a file depends on the "
                          "deployment. Give one target, or objective.known without size_mb.")
    if objective.kind == "cap" and not options.budget.latency_ms:
        raise ConfigError("objective=cap needs the cap: budget.latency_ms=NUMBER (ms).")
    return objective


def _deployable(baselines: Sequence[FoundNetwork | TimmNetwork], deployments: Sequence[Deployment], console: Console
                ) -> dict[str, tuple[str, ...]]:
    """Return which deployments of a set can run each baseline, by `trained_id`. ConfigError if none can run one."""
    if len(deployments) == 1:
        check_deployable(baselines, deployments[0].target)
        return {}
    return {baseline.trained_id: tuple(each.target.name for each in deployments_of(baseline, deployments, console))
            for baseline in baselines}


def _named(config: Config, options: PlanOptions, deployments: Sequence[Deployment]) -> Any:
    """Return the configuration for workers and later commands, which choose and time nothing. It names the networks
    that were chosen, and a device by its table."""
    named: Any = config
    if config.get("around") == AUTO:
        named = omegaconf.OmegaConf.merge(named, {"around": [*options.arounds]})
    if not deployments[0].device.is_here:
        named = omegaconf.OmegaConf.merge(named, {"host": deployments[0].host_name, **dict.fromkeys(DEVICE)})
        if len(deployments) > 1:  # they cannot ask the device which ones it can run
            names = [name for name in options.target[DEPLOYMENTS]
                     if any(each.target.name in (name, f"{name}-t{each.target.threads}") for each in deployments)]
            named = omegaconf.OmegaConf.merge(named, {"target": {DEPLOYMENTS: names}})
    return named


def _workers(options: PlanOptions, console: Console) -> int:
    """Return the number of processes that train side by side: 1 if a network's module is in this process alone."""
    if any(name.startswith(MODULE) for name in options.arounds):
        return 1
    n, cores = processes(options.workers, options.training.device), len(usable_cores())
    if not options.workers and options.training.device == CPU and n < cores:
        console.note(f"{n} of {cores} cores train, as memory holds no more processes; workers=N decides otherwise")
    return n


def _check_head(space: SearchSpace, info: DatasetInfo) -> None:
    """Raise ConfigError for a space whose networks have no head for the data set's task."""
    heads = {trunk_of(name)[0] for name in names_of_wholes(space)} or {""}
    if heads != {info.task if load_task(info.task).needs_trunk else ""}:
        raise ConfigError(f"space={space.name}: its networks have no head for {info.task}, which {info.name} is for. "
                          "Give around=NAME, such as around=mobilenetv2_100.")


def _check_race(options: PlanOptions, space: SearchSpace, can_time: bool, console: Console) -> None:
    """Raise ConfigError for what a race cannot do. A remark names the options that do not count in it."""
    race_options = {"warmup", "lr_end", *(("epochs", "min_steps", "max_steps") if options.budget.minutes else ())}
    if unused := sorted(race_options & options.finalists.recipe.keys()):
        console.remark(f"note: finalists.recipe: {', '.join(unused)} count for baselines alone, as a race decides how "
                       "long its networks are trained and at which rate.")
    if not space.arounds:
        raise ConfigError(f"accuracy=race: space {space.name} is cut from no network, and a race begins with one and "
                          "its obvious cuts. Add around=NAME, or leave accuracy out.")
    if options.n_trials is not None and options.n_trials < len(space.known):
        names = ", ".join([*space.known][:6]) + ", …" * (len(space.known) > 6)
        raise ConfigError(f"n_trials={options.n_trials}: a race begins with the {len(space.known)} networks that are "
                          f"known by name ({names}). Give as many or more.")
    if not can_time:
        raise ConfigError(f"host={options.host}: a race times its networks, and that machine is not at hand. Reach it "
                          "over ssh: device=user@host; or run the search over there.")


def _check_no_estimates(config: Config, options: PlanOptions, trials_only: bool) -> None:
    """Raise ConfigError for options of a search by estimates. A worker is not refused what its search was given."""
    if config.get(PROXY) and not trials_only:
        raise ConfigError(f"{PROXY}.{next(iter(config[PROXY]))}: a race estimates nothing. Leave {PROXY} out; "
                          "finalists.recipe has the options of its trainings.")
    if options.max_asks is not None and not trials_only:
        raise ConfigError(f"max_asks={options.max_asks}: a race asks no sampler. Leave max_asks out.")
    if options.accuracy not in (None, RACE):
        raise ConfigError(f"accuracy={options.accuracy}: cuts of a network race, and a race estimates nothing. Leave "
                          "accuracy out.")
    if options.search.reuse:
        raise ConfigError(f"search.reuse={options.search.reuse} takes over what trials estimated, and a race estimates "
                          "nothing. Leave it out.")
    if options.sampler != SAMPLER or options.sampler_options:
        raise ConfigError(f"sampler={options.sampler}: a race asks no sampler. Leave sampler and sampler_options out.")
    if options.controls:
        raise ConfigError(f"controls={options.controls}: a race draws no random networks, as the obvious cuts are what "
                          "it is held against. Leave controls out.")


def check_controls(options: PlanOptions, space: SearchSpace) -> None:
    """Raise ConfigError if the space has too few networks for finalists and controls."""
    k = options.finalists.k or FINALISTS
    if options.n_controls > max(0, space.size - k):
        raise ConfigError(f"controls={options.n_controls} and {k} finalists are more than the {space.size} settings of "
                          f"space {space.name}. Lower controls.")


def _space(options: PlanOptions, info: DatasetInfo, console: Console) -> tuple[SearchSpace, dict[str, Pretrained]]:
    """Return the search space, and the pretrained weights that its networks start from, by `Architecture.around`."""
    # A space of the user's or of this package, whose networks may be cut from others.
    px = options.dataset.get("image_size")
    if options.around is None:
        space = load_space(options.space, info.channels, info.classes, px)
        optional = {around: _start(around, options, console,
                                   partial(find_start, around, options.pretrained, info.channels))
                    for around in space.arounds}
        return space, {around: start for around, start in optional.items() if start is not None}
    if options.pretrained.file is not None and len(options.arounds) > 1:
        raise ConfigError(f"pretrained.file={options.pretrained.file} is of one network, and around names several. "
                          "Give pretrained.folder=DIR with a file for each.")
    names = options.arounds
    for name in names:
        check_timm(name, "around")
        if name.startswith(MODULE) and options.workers > 1:
            raise ConfigError(f"workers={options.workers}: {name} is in this process alone. Give workers=1.")
    # The cuts of each network are described, then joined to one space.
    contents, starts = list[dict[str, Any]](), dict[str, Pretrained]()
    for name in names:
        content, start = _cut(name, options, info, console)
        contents.append(content)
        starts |= {} if start is None else {content["around"]: start}
    space = space_of_cuts(contents, info.channels, info.classes)
    if fixed := [origin_name(content["around"]) for content in contents
                 if not any(name.startswith(WIDTH) for name in content["choices"])]:
        console.remark(f"note: channels of {' and '.join(fixed)} cannot be cut: only stages, blocks and images are.")
    return space, starts


def _out_of(options: PlanOptions, space: str, info: DatasetInfo) -> Path:
    """Return the run folder that the user gives, or `runs/<target>-<space>-<dataset>`."""
    return Path(options.out) if options.out else Path("runs") / (
        f"{options.target['name']}-{Path(space).stem}-{info.name}")


def _choose(options: PlanOptions, info: DatasetInfo, deployments: Sequence[Deployment], recipe: Recipe,
            console: Console) -> PlanOptions:
    """Return the options with names for `around=auto`: the networks of the run folder, or newly chosen ones."""
    out = _out_of(options, f"around_{AUTO}", info)
    # A search that goes on keeps its networks.
    names = _listed(RunFolder(out).read_config().get("around")) if RunFolder(out).config.is_file() else ()
    if names:
        console.note(f"around={AUTO}: the search in {out} goes on with {' and '.join(names)}.")
        return replace(options, around=names, out=str(out))
    pretrained, minutes = options.pretrained, options.budget.minutes
    if pretrained.file is not None or pretrained.use is False:
        raise ConfigError(f"around={AUTO} chooses among networks by the top-1 of their pretrained weights. Give "
                          "pretrained.folder=DIR, or name a network: around=NAME.")
    if not all(each.at_hand and each.device.is_here and each.target.device == "cpu" for each in deployments):
        raise ConfigError(f"around={AUTO} times networks on this machine's CPU, and these are for another device. Name "
                          "them: around=[NAME,NAME].")

    def cost(name: str) -> TrainingCost:
        content, start = _cut(name, options, info, console)
        space = space_of_cuts([content], info.channels, info.classes)
        _exportable(space, deployments, console)
        FoundNetwork(space.known[WHOLE], start).check_start()
        return TrainingCost() if minutes is None else training_cost(space, start, recipe, deployments[0].target,
                                                                    options.seed)

    # Seconds of all processes that are left for the race after timing the networks.
    race_s = None if minutes is None else 60 * minutes * (1 - CALIBRATION) * processes(
        options.workers, options.training.device)
    names = choose_around(
        pretrained, _largest_px(options, info), [each.target for each in deployments], cost, console,
        cap_ms=options.budget.latency_ms, timing_s=60 * options.calibration.minutes, training_s=race_s,
        seed=options.seed)
    return replace(options, around=names, out=str(out))


def _largest_px(options: PlanOptions, info: DatasetInfo) -> int:
    """Return the side in px of the images on which whole networks race."""
    return options.dataset.get("image_size") or min(info.native_size, LARGEST_PX)


def _cut(name: str, options: PlanOptions, info: DatasetInfo, console: Console
         ) -> tuple[dict[str, Any], Pretrained | None]:
    """Return the cuts of one of timm's networks, as a space's file has them, and the weights of the network."""
    name = load_task(info.task).network_name(name)
    content = partial(describe_cuts, channels=info.channels, classes=info.classes,
                      image_size=_largest_px(options, info), image_sizes=options.image_sizes or ())
    content(name)  # what cannot be cut is refused before its weights are looked for
    find = partial(find_pretrained, name, options.pretrained, info.channels)
    start, pad = _start(name, options, console, find) or (None, "")
    return content(around_of(name, pad)), start


def _exportable(space: SearchSpace, deployments: Sequence[Deployment], console: Console) -> tuple[Deployment, ...]:
    """Return the deployments that cuts of a traced network can be written for. Raises ConfigError if there is none, or
    if the cuts cannot be exported."""
    able = tuple(deployments)
    for around in space.arounds:
        # One known cut of each network is exported as a sample of all.
        name, network = [(name, each) for name, each in space.known.items() if each.around == around][-1]
        able = deployments_of(FoundNetwork(network, None, name), able, console)
        try:
            with temporary_folder() as folder:
                export_onnx(build(network), Path(folder) / "cut.onnx",
                            Shape(network.channels, network.image_size, 2).image)
        except CandidateError as error:
            raise ConfigError(f"around={around}: its cuts cannot be exported ({error}) Give another network."
                              ) from None
    return able


def _start(name: str, options: PlanOptions, console: Console, find: Callable[[], Start]) -> Start | None:
    """Return the weights of the network that others are cut from, by `find`. None, with a remark, if the user asks for
    random ones. Raises MissingWeights if there are none."""
    if options.pretrained.use is False:
        console.remark(f"note: cuts of {name} begin with random weights, as pretrained.use=false asks for.")
        return None
    try:
        return find()
    except MissingWeights as error:
        raise MissingWeights(f"{error} For random weights ask: pretrained.use=false.") from None


def _earlier_run(reuse: str | None) -> Path | None:
    """Return `search.reuse` as a run folder, None if it is not given. Raises ConfigError if it holds no study."""
    if not reuse:
        return None
    folder = Path(reuse)
    if not (folder / "study.db").is_file():
        raise ConfigError(f"search.reuse={folder}: no study.db there. Give the run folder of an earlier search; one "
                          "with storage= keeps its study elsewhere and cannot be reused.")
    return folder


def _baselines(options: PlanOptions, space: SearchSpace, starts: Mapping[str, Pretrained], info: DatasetInfo,
               console: Console) -> tuple[FoundNetwork | TimmNetwork, ...]:
    """Return the baselines, also on smaller `image_sizes`, and their obvious cuts if these are asked for.

    Baselines have pretrained weights if these are there and asked for. If all networks of the space are cut from one
    network, that is the first. Beside pretrained cuts all are pretrained; otherwise small images add stems of stride 1.
    """
    images = Shape(space.channels, max(space.image_sizes), space.classes)
    task, sizes = load_task(info.task), dict.fromkeys(options.image_sizes or ())
    names = check_names([task.network_name(name) for name in check_names(options.baselines or ())])
    if starts:
        names, options = _pretrained_names(names_of_wholes(space), names, options, space.channels, console)
    if len(starts) > 1:  # otherwise the network of the only one is a baseline
        _check_starts([FoundNetwork(next(cut for cut in space.known.values() if cut.around == around), start)
                       for around, start in starts.items()], console)
    if not names:
        if not space.arounds and (options.pretrained.asked or options.cuts or sizes):
            raise ConfigError("pretrained, cuts and image_sizes are for baselines, and there are none. Name some: "
                              "baselines=[NAME].")
        return ()
    if (largest := max(sizes, default=0)) > images.image_size:
        raise ConfigError(f"image_sizes: {largest} px is larger than the search's images ({images.image_size} px). "
                          f"Give dataset.image_size={largest}, or smaller sizes.")
    baselines = list(map(Baseline, names)) if starts else variants(names, images.image_size)
    # On smaller images there are the same names again, and their cuts.
    smaller = [px for px in sizes if px < images.image_size]
    small = [Baseline(name, image_size=px) for name in names for px in smaller]
    all_baselines = _begun([*baselines, *small], options, images, task, console)
    cuts = _cuts([each for each in all_baselines if not (each.image_size or each.stem_stride)], images, smaller, console
                 ) if options.cuts else []
    return (*(TimmNetwork(baseline, images) for baseline in all_baselines), *cuts)


def _cuts(baselines: Sequence[Baseline], images: Shape, smaller: Sequence[int], console: Console
          ) -> Iterator[FoundNetwork]:
    """Yield the obvious cuts of each baseline that can be cut, on images of each size, with the baseline's weights."""
    for baseline in baselines:
        try:
            cuts = obvious_cuts(around_of(baseline.name, baseline.pad_type), images, smaller)
        except (ConfigError, SpaceError) as error:
            console.note(f"no obvious cuts of {baseline.name}: {error}")
            continue
        for px in (images.image_size, *smaller):
            for name, cut in cuts.items():
                yield FoundNetwork(replace(cut, image_size=px), baseline.pretrained, name)


def _pretrained_names(wholes: Sequence[str], names: Sequence[str], options: PlanOptions, channels: int,
                      console: Console) -> tuple[tuple[str, ...], PlanOptions]:
    """Return the `names` that have pretrained weights, and options that ask for these. The `wholes` are left out, as
    their cuts race; but a single one is the first name."""
    own = tuple(wholes[:1]) if len(wholes) == 1 else ()
    if racing := [name for name in names if name in wholes and name not in own]:
        console.note(f"no baselines beside the race, as they are in it: {', '.join(racing)}")
    names = [name for name in names if name not in wholes]
    having = () if options.pretrained.file else find_some([*wholes, *names], options.pretrained, channels)
    if missing := [name for name in names if name not in having]:
        why = f"pretrained.file is of {wholes[0]}" if options.pretrained.file else "no pretrained weights"
        console.note(f"not a baseline beside pretrained networks: {', '.join(missing)} ({why})")
    options = replace(options, pretrained=replace(options.pretrained, use=True))
    return (*own, *(name for name in names if name in having)), options


def _unheard(given: Mapping[str, Any], of_task: Mapping[str, Any]) -> str:
    """Return the options of `finalists.recipe` that change nothing: full training's values, not fine-tuning's."""
    full, fine = all_recipe(FULL_TRAINING), {**all_recipe(FINE_TUNING), **of_task}
    return ", ".join(f"{key}={value}" for key, value in sorted(given.items()) if key in fine and value == full[key]
                     and fine[key] != value and key not in ("epochs", "min_steps", "max_steps"))


def _begun(baselines: Sequence[Baseline], options: PlanOptions, images: Shape, task: Task, console: Console
           ) -> list[Baseline]:
    """Return `baselines`, with pretrained weights if these are there and asked for. Raises ConfigError or DataError for
    weights that do not fit."""
    if not options.pretrained.asked:
        return list(baselines)
    names = list(dict.fromkeys(baseline.name for baseline in baselines))
    starts = find_some(names, options.pretrained, images.channels)
    if missing := [name for name in names if name not in starts]:
        console.note(f"no pretrained weights of {', '.join(missing)}: trained from scratch")
    if unused := _unheard(options.finalists.recipe, task.recipe):
        console.note(f"finalists.recipe: {unused} does not count for networks with pretrained weights, which keep "
                     "their own recipe's")
    changed = [replace(each, pad_type=starts[each.name][1], pretrained=starts[each.name][0]) if each.name in starts
               else each for each in baselines]
    _check_starts([TimmNetwork(each, images) for each in {each.name: each for each in reversed(changed)}.values()],
                  console)
    return changed


def _check_starts(networks: Iterable[FoundNetwork | TimmNetwork], console: Console) -> None:
    """Remark on the weights that networks start from. Weights that do not fit are refused now, not after the trials: by
    DataError."""
    for network in networks:
        if remark := network.check_start():
            console.remark(f"note: {remark}")


def making_of(plan: Plan, dataset: Dataset, deployments: Sequence[Deployment] = ()) -> BuildSettings:
    """Return the settings by which finalists and baselines are made, for these deployments or else for all."""
    targets = tuple(deployment.target for deployment in deployments or plan.deployments)
    return BuildSettings(dataset, plan.recipe, plan.options.seed, targets[0],
                         targets=targets if len(targets) > 1 else ())


def line_recipe(plan: Plan, dataset: Dataset) -> Recipe:
    """Return the recipe of a race's lines: that of finalists in this space. The race decides rate and length."""
    recipe = making_of(plan, dataset).recipe_of(plan.network(plan.space.reference))
    return replace(recipe, threads=plan.options.threads or len(usable_cores()))
