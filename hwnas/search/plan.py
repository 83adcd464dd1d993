"""Plan: what the options of a search ask for, each read and checked once, before anything is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import default_out
from hwnas.cli.options import number, section
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError
from hwnas.latency.deployment import Deployment, calibration_options
from hwnas.target.host import usable_cores

if TYPE_CHECKING:
    from hwnas.latency.calibrate import CalibrationOptions
    from hwnas.networks.network import Network
    from hwnas.samplers.asking import Asking
    from hwnas.samplers.informed import Context
    from hwnas.space.search_space import SearchSpace
    from hwnas.study.objective import Objective
    from hwnas.training.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """What the options ask for.

    `out`: the run folder, which need not be there. `objective`: its T is not known before the latency model where the
    user gave none. `sampler` gives the sampler once it is told what ours needs to know. `yaml`: the configuration.
    """

    deployment: Deployment
    space: SearchSpace
    dataset: Mapping[str, Any]
    out: Path
    accuracy: str
    accuracy_options: Mapping[str, Any]
    sampler_name: str
    sampler_options: Mapping[str, Any]
    sampler: Callable[[Context | None], Asking]
    objective: Objective
    recipe: Recipe
    baselines: tuple[Network, ...]
    calibration: CalibrationOptions
    n_trials: int
    max_asks: int | None
    seed: int
    threads: int
    workers: int
    k: int
    seconds: float
    cap_ms: float | None
    cap_quantile: float
    storage: str | None
    reuse: Path | None
    yaml: str


def make_plan(config: Any, console: Console) -> Plan:
    """Read and check every option that can be checked without data, measuring or training; nothing is written."""
    from omegaconf import OmegaConf

    from hwnas.data.loading import inspect_dataset
    from hwnas.samplers.loading import read_sampler
    from hwnas.space.search_space import SearchSpace
    from hwnas.study.objective import check_quantile, read_objective
    from hwnas.training.recipe import FULL_TRAINING, Recipe

    n_trials, seed = number(config, "n_trials", 1, whole=True), number(config, "seed", 0, whole=True)
    max_asks = number(config, "max_asks", 1, whole=True, optional=True)
    threads = number(config, "threads", 0, 4096, whole=True)
    workers = number(config, "workers", 0, 256, whole=True) or len(usable_cores())
    k, seconds = number(config, "finalists.k", 1, 100, whole=True), number(config, "verification.seconds", 1, 86_400)
    cap_ms = number(config, "budget.latency_ms", 1e-6, optional=True)
    cap_quantile = check_quantile(config.budget.quantile)
    number(config, "objective.target_ms", 1e-6, optional=True)
    accuracy, sampler_options = str(config.accuracy), section(config, "sampler_options")
    sampler = read_sampler(str(config.sampler), seed, sampler_options)
    deployment = Deployment.from_config(config, console)
    objective = read_objective(section(config, "objective"), deployment.target)
    if objective.kind == "cap" and not cap_ms:
        raise ConfigError("objective=cap needs the cap: budget.latency_ms=NUMBER (ms).")
    dataset = section(config, "dataset")
    info = inspect_dataset(dataset)
    space = SearchSpace.load(str(config.space), channels=info.channels, classes=info.classes,
                             image_size=config.dataset.image_size)
    recipe = Recipe.from_config({"threads": threads, **section(config, "finalists")["recipe"]}, FULL_TRAINING,
                                "finalists.recipe")
    baselines = _baselines(config.baselines, space)
    out = Path(config.out) if config.out else default_out(deployment.target.name, str(config.space), info.name)
    return Plan(
        deployment=deployment, space=space, dataset=dataset, out=out, accuracy=accuracy,
        accuracy_options=section(config, accuracy) if accuracy in config else {}, sampler_name=str(config.sampler),
        sampler_options=sampler_options, sampler=sampler, objective=objective, recipe=recipe, baselines=baselines,
        calibration=calibration_options(config), n_trials=n_trials, max_asks=max_asks, seed=seed, threads=threads,
        workers=workers, k=k, seconds=float(seconds), cap_ms=cap_ms, cap_quantile=cap_quantile,
        storage=str(config.storage) if config.storage else None, reuse=_earlier_run(config.search.reuse),
        yaml=OmegaConf.to_yaml(config, resolve=True))


def _earlier_run(value: Any) -> Path | None:
    """`search.reuse` as a run folder; ConfigError when it holds no study."""
    if value in (None, ""):
        return None
    folder = Path(str(value))
    if not (folder / "study.db").is_file():
        raise ConfigError(f"search.reuse={folder}: no study.db there. Give the run folder of an earlier search; one "
                          "with storage= keeps its study elsewhere and cannot be reused.")
    return folder


def _baselines(names: Any, space: SearchSpace) -> tuple[Network, ...]:
    from hwnas.networks.baselines import check_names, variants
    from hwnas.networks.network import Shape, TimmNetwork

    if isinstance(names, str) or not all(isinstance(name, str) for name in names or []):
        raise ConfigError(f"baselines must be a list of timm names, got {names!r}.")
    if not names:
        return ()
    images = Shape(space.channels, max(space.image_sizes), space.classes)
    return tuple(TimmNetwork(one, images) for one in variants(check_names(list(names)), images.image_size))
