"""Command: how well each accuracy estimator ranks the networks of a space on a data set, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.certify.results import DEFAULT, check_estimators, estimate_all, judged_before, read_judged, write_certificate
from hwnas.certify.truth import (
    CertifyPlan,
    Network,
    all_training,
    in_full,
    macs_of,
    read_plan,
    spread,
    train_all,
    training_config,
)
from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, plain, read_command, read_options, section
from hwnas.cli.progress import Console
from hwnas.data.loading import inspect_dataset, read_images
from hwnas.errors import ConfigError, WorkerError
from hwnas.latency.deployment import CalibrationOptions, Deployment, latency_model, open_device
from hwnas.latency.device import DeviceOptions
from hwnas.networks.around import check_cuts, find_start
from hwnas.networks.weights import PretrainedOptions
from hwnas.space.search_space import SearchSpace
from hwnas.system.run_folder import WorkFolder
from hwnas.target import Target
from hwnas.training.place import processes, resolved, tell_idle

if TYPE_CHECKING:
    from hwnas.certify.results import Judged
    from hwnas.data.dataset import Dataset

LEAST_NETWORKS = 4

USAGE = """How well does each accuracy estimator rank here, and what does it cost? Trains n networks of a space in full
with several seeds, and holds every estimator against them.

    hwnas certify dataset=fashion_mnist dataset.root=/data space=mnasnet_small n=16 seeds=2 target=xeon_int8
    hwnas certify dataset=imagefolder dataset.root=/data/parts 'estimators=[proxy]' only=estimators

The same command again goes on; in another terminal it helps. --show-config prints every option."""


@dataclass(frozen=True)
class CertifyOptions(DeviceOptions):
    """Options of `conf/certify.yaml`. `target` may be missing: networks are then spread over MACs."""

    target: Target | None
    host: str | None
    space: str
    dataset: dict[str, Any]
    out: str | None
    overwrite: bool
    seed: int = option(low=0)
    n: int = option(low=LEAST_NETWORKS, high=10_000)
    seeds: int = option(low=1, high=100)
    workers: int = option(low=0, high=256)
    only: str | None = option(check=("truth", "estimators").__contains__, what="truth, estimators or null")
    estimators: Any = option()
    estimator_seeds: int = option(low=1, high=100)
    training: dict[str, Any] = option()
    calibration: CalibrationOptions = option()


@dataclass(frozen=True)
class CertifyJob:
    """A plan and the work to do on it. `only` is `truth`, `estimators` or None for both."""

    plan: CertifyPlan
    space: SearchSpace
    judged: list[Judged]
    estimator_seeds: int
    workers: int
    only: str | None


def prepare(config: Config, console: Console) -> CertifyJob:
    """Read every option, choose the networks or take those of the folder's plan, write the plan."""
    options = read_command(CertifyOptions, config)
    if options.device is not None and options.target is None:
        raise ConfigError(f"device={options.device} is asked for latencies only: add target=NAME, or leave it out.")
    data = options.dataset
    info = inspect_dataset(data)
    space = SearchSpace.load(options.space, channels=info.channels, classes=info.classes,
                             image_size=data.get("image_size"))
    given, begun = _begun(options.training, space)
    judged = read_judged(options.estimators, ("inherited",) if begun else DEFAULT)
    training = in_full(given)
    training_config(data, training)
    deployment = _deployment(options, console) if options.device is not None else None
    identity = {
        "space": f"{space.name} ({space.fingerprint})", "n": options.n, "seed": options.seed,
        "target": options.target and f"{options.target.name} on {_where(options, deployment)}",
        **{f"dataset.{key}": value for key, value in data.items() if key not in ("root", "download")},
        **{f"training.{key}": value for key, value in training.items()
           if key not in ("device", "threads", "pretrained")},
        **({"pretrained": begun} if begun else {})}
    out = Path(options.out or Path("runs") / f"certificate-{space.name}-{info.name}")
    with WorkFolder(out, "certify").take_up(options.overwrite).hold("plan"):
        stored = read_plan(out, identity)
        networks, cost, source = ((stored.networks, stored.cost, stored.cost_source) if stored else
                                  _choose(options, deployment, space, console))
        plan = CertifyPlan(out, tuple(networks), cost, source, data, training, options.seed, options.seeds,
                           identity)
        plan.write()
    least, most = plan.networks[0].cost, plan.networks[-1].cost
    console.note(f"{options.n} networks of space {space.name}, spread over {source}: {_format_cost(cost, least)} to "
                 f"{_format_cost(cost, most)}")
    device = resolved(training["device"])
    tell_idle(device, console.say)
    return CertifyJob(plan, space, judged, options.estimator_seeds, processes(options.workers, device), options.only)


def _begun(training: Mapping[str, Any], space: SearchSpace) -> tuple[dict[str, Any], str]:
    """The options `training`, with pretrained weights where the networks of the space are cut from a network that has
    some, and the key of these weights; ConfigError where there are none. Networks of other spaces have none."""
    asked = read_options(PretrainedOptions, training.get("pretrained") or {}, "training.pretrained")
    if not space.definition.around:
        if asked.asked:
            raise ConfigError(f"training.pretrained: the networks of space {space.name} are cut from none. Leave it "
                              "out.")
        return {key: value for key, value in training.items() if key != "pretrained"}, ""
    check_cuts(space)
    pretrained = find_start(space.definition.around, asked, space.channels)
    return {**training, "pretrained": plain(replace(asked, use=True))}, pretrained.key


def _deployment(options: CertifyOptions, console: Console) -> Deployment:
    assert options.target is not None
    return Deployment.of(options.target, options.host, console, open_device(options, console))


def _where(options: CertifyOptions, deployment: Deployment | None) -> str:
    return options.host or "this host" if deployment is None else deployment.host_name


def _choose(options: CertifyOptions, deployment: Deployment | None, space: SearchSpace, console: Console
            ) -> tuple[list[Network], str, str]:
    """The networks, the kind of their cost, and its source."""
    if options.target is None:
        return spread(space, options.n, options.seed, macs_of(space)), "macs", "MACs (no target was given)"
    deployment = deployment or _deployment(options, console)
    table, model = latency_model(deployment, space, options.calibration, console)
    source = f"latency predicted for {deployment.target.name} on {deployment.host_name} (table of {table.created})"
    return spread(space, options.n, options.seed, lambda codes: model.predict(codes).mean), "latency_ms", source


def _format_cost(cost: str, value: float) -> str:
    return f"{value / 1e6:.3g} M" if cost == "macs" else f"{value:.3g} ms"


def main(config: Config, console: Console) -> None:
    """Choose networks, train them, ask the estimators, write the certificate. Then WorkerError, if a process that
    trained ended early."""
    job = prepare(config, console)
    if job.only is None:  # a wrong option is reported now, hours before the estimators start
        check_estimators(job.plan, job.judged, _images(job, console), job.space)
    early = train_all(job.plan, job.workers, console) if job.only != "estimators" else []
    if job.only != "truth":
        judge(job, console)
    if early:
        raise WorkerError(early)


def all_options(config: Config) -> dict[str, dict[str, Any]]:
    """Every option of the sections that hold only the given ones."""
    return {"training": all_training(section(config, "training"))}


def judge(job: CertifyJob, console: Console) -> None:
    """Ask every estimator, and write the certificate with these and with those that were asked before."""
    dataset = _images(job, console)
    estimate_all(job.plan, job.judged, job.estimator_seeds, dataset, job.space, console)
    judged = [*job.judged, *judged_before(job.plan, job.judged, dataset, job.space, console)]
    write_certificate(job.plan, judged, dataset, job.space, console)


def _images(job: CertifyJob, console: Console) -> Dataset:
    return read_images(job.plan.dataset, max(job.space.image_sizes), job.plan.seed, console)


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hwnas certify`."""
    return run_command(main, "certify", USAGE, argv, target=False, apart=("space", "dataset"),
                       sections=all_options)


if __name__ == "__main__":
    sys.exit(command())
