"""What the options of `python -m hwnas.certify` ask for, checked before anything long starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.certify.estimates import Judged, read_judged
from hwnas.certify.plan import CertifyPlan, Network, in_full, macs_of, read_plan, spread, training_config
from hwnas.cli.options import number, section
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError
from hwnas.system.locks import hold
from hwnas.system.run_folder import RunFolder
from hwnas.target.host import usable_cores

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace

LEAST_NETWORKS = 4


@dataclass(frozen=True)
class CertifyJob:
    """A plan and what is done with it. `only`: `truth`, `estimators` or None for both."""

    plan: CertifyPlan
    space: SearchSpace
    judged: list[Judged]
    estimator_seeds: int
    workers: int
    only: str | None


def prepare(config: Any, console: Console) -> CertifyJob:
    """Read every option, choose the networks or take those that the folder's plan has, write the plan."""
    from hwnas.data.loading import inspect_dataset
    from hwnas.space.search_space import SearchSpace

    n, seeds = number(config, "n", LEAST_NETWORKS, 10_000, whole=True), number(config, "seeds", 1, 100, whole=True)
    seed = number(config, "seed", 0, whole=True)
    workers = number(config, "workers", 0, 256, whole=True) or len(usable_cores())
    if config.only not in (None, "truth", "estimators"):
        raise ConfigError(f"only must be truth, estimators or null, got {config.only!r}.")
    judged = read_judged(_plain(config.estimators))
    estimator_seeds = number(config, "estimator_seeds", 1, 100, whole=True)
    data, training = section(config, "dataset"), in_full(section(config, "training"))
    training_config(data, training)
    info = inspect_dataset(data)
    space = SearchSpace.load(str(config.space), channels=info.channels, classes=info.classes,
                             image_size=config.dataset.image_size)
    identity = {
        "space": f"{space.name} ({space.fingerprint})", "n": n, "seed": seed, "target": _target(config),
        **{f"dataset.{key}": value for key, value in data.items() if key not in ("root", "download")},
        **{f"training.{key}": value for key, value in training.items() if key not in ("device", "threads")}}
    out = RunFolder.create(config.out or Path("runs") / f"certificate-{space.name}-{info.name}").path
    with hold(out / ".plan.lock"):
        found = read_plan(out, identity)
        networks, cost, source = ((found.networks, found.cost, found.cost_source) if found else
                                  _choose(config, space, n, seed, console))
        plan = CertifyPlan(out, tuple(networks), cost, source, data, training, seed, seeds, identity)
        plan.write()
    least, most = plan.networks[0].cost, plan.networks[-1].cost
    console.note(f"{n} networks of space {space.name}, spread over {source}: {_shown(cost, least)} to "
                 f"{_shown(cost, most)}")
    return CertifyJob(plan, space, judged, estimator_seeds, workers, config.only)


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _target(config: Any) -> str | None:
    return None if config.get("target") is None else f"{config.target.name} on {config.get('host') or 'this host'}"


def _choose(config: Any, space: SearchSpace, n: int, seed: int, console: Console
            ) -> tuple[list[Network], str, str]:
    """The networks, what their cost is, and where it is from."""
    if config.get("target") is None:
        return spread(space, n, seed, macs_of(space)), "macs", "MACs (no target was given)"
    from hwnas.latency.deployment import Deployment, calibration_options, latency_model

    deployment = Deployment.from_config(config, console)
    table, model = latency_model(deployment, space, calibration_options(config), console)
    source = f"latency predicted for {deployment.target.name} on {deployment.host_name} (table of {table.created})"
    return spread(space, n, seed, lambda codes: model.predict(codes).mean), "latency_ms", source


def _shown(cost: str, value: float) -> str:
    return f"{value / 1e6:.3g} M" if cost == "macs" else f"{value:.3g} ms"


