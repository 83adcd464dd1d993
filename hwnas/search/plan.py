"""Plan: what the options of a search ask for, checked before anything long starts."""

from __future__ import annotations

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
    from hwnas.latency.model import LatencyModel
    from hwnas.networks.baselines import Baseline
    from hwnas.search.trial import SearchOptions
    from hwnas.space.search_space import SearchSpace
    from hwnas.system.run_folder import RunFolder



@dataclass(frozen=True)
class Plan:
    """What the options ask for, checked before anything long starts."""

    config: Any
    deployment: Deployment
    space: SearchSpace
    run: RunFolder
    baselines: tuple[Baseline, ...]
    calibration: CalibrationOptions
    n_trials: int
    max_asks: int | None
    seed: int
    threads: int
    workers: int
    k: int
    seconds: float
    cap_ms: float | None
    reuse: Path | None

    def section(self, key: str) -> dict[str, Any]:
        """A section of the configuration as plain values."""
        return section(self.config, key)


def make_plan(config: Any, console: Console) -> Plan:
    """Read and check every option that can be checked without measuring or training."""
    from hwnas.data.loading import inspect_dataset
    from hwnas.samplers.loading import load_sampler
    from hwnas.space.search_space import SearchSpace
    from hwnas.study.objective import read_objective
    from hwnas.system.run_folder import RunFolder

    numbers = {
        "n_trials": number(config, "n_trials", 1, whole=True), "seed": number(config, "seed", 0, whole=True),
        "max_asks": number(config, "max_asks", 1, whole=True, optional=True),
        "threads": number(config, "threads", 0, 4096, whole=True),
        "workers": number(config, "workers", 0, 256, whole=True) or len(usable_cores()),
        "k": number(config, "finalists.k", 1, 100, whole=True),
        "seconds": float(number(config, "verification.seconds", 1, 86_400)),
        "cap_ms": number(config, "budget.latency_ms", 1e-6, optional=True), "calibration": calibration_options(config)}
    number(config, "objective.target_ms", 1e-6, optional=True)
    number(config, "budget.quantile", 0.5, 0.999)
    load_sampler(str(config.sampler), numbers["seed"], **section(config, "sampler_options"))
    deployment = Deployment.from_config(config, console)
    objective = read_objective(section(config, "objective"), deployment.target, 1.0)
    if objective.kind == "cap" and not numbers["cap_ms"]:
        raise ConfigError("objective=cap needs the cap: budget.latency_ms=NUMBER (ms).")
    info = inspect_dataset(section(config, "dataset"))
    space = SearchSpace.load(str(config.space), channels=info.channels, classes=info.classes,
                             image_size=config.dataset.image_size)
    baselines = _baselines(config, space)
    out = Path(config.out) if config.out else default_out(deployment.target.name, str(config.space), info.name)
    earlier = _earlier_run(config.search.reuse)
    return Plan(config, deployment, space, RunFolder.create(out), baselines, **numbers, reuse=earlier)


def _earlier_run(value: Any) -> Path | None:
    """`search.reuse` as a run folder; ConfigError when it holds no study."""
    if value in (None, ""):
        return None
    folder = Path(str(value))
    if not (folder / "study.db").is_file():
        raise ConfigError(f"search.reuse={folder}: no study.db there. Give the run folder of an earlier search; one "
                          "with storage= keeps its study elsewhere and cannot be reused.")
    return folder


def search_options(plan: Plan, model: LatencyModel) -> SearchOptions:
    """The search's options; BudgetError when no network of the space keeps the cap."""
    from hwnas.search.trial import SearchOptions
    from hwnas.study.objective import check_cap, read_objective

    config = plan.config
    target_ms = config.objective.target_ms or float(model.predict_architectures([plan.space.reference]).mean[0])
    objective = read_objective(plan.section("objective"), plan.deployment.target, round(float(target_ms), 6))
    if plan.cap_ms is not None:
        check_cap(plan.space, model.predict, plan.cap_ms, config.budget.quantile)
    known = [plan.space.encode(one) for one in plan.space.known.values()]
    return SearchOptions(plan.n_trials, objective, seed=plan.seed, max_asks=plan.max_asks, cap_ms=plan.cap_ms,
                         cap_quantile=config.budget.quantile, enqueue=known)


def _baselines(config: Any, space: SearchSpace) -> tuple[Baseline, ...]:
    from hwnas.networks.baselines import check_names, variants

    names = config.baselines
    if isinstance(names, str) or not all(isinstance(name, str) for name in names or []):
        raise ConfigError(f"baselines must be a list of timm names, got {names!r}.")
    return tuple(variants(check_names(list(names)), max(space.image_sizes))) if names else ()
