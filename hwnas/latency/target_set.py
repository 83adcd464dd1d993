"""The deployments of a `target` section: one target, or the targets of a set that a machine can run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hwnas.cli.command import file_in, names_in
from hwnas.cli.options import read_options
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, TargetError, UnknownName
from hwnas.latency.deployment import Deployment
from hwnas.latency.timing import Device
from hwnas.runtimes.runtime import OwnFormat, load_runtime
from hwnas.system.documents import load_yaml, yaml_text
from hwnas.target import PLAIN_NAME, Target, TargetSet

DEPLOYMENTS = "deployments"  # the key by which a target's section is a set


def read_deployments(section: Mapping[str, Any], host: str | None, device: Device, console: Console, *,
                     anywhere: bool = False) -> tuple[Deployment, ...]:
    """Return the one deployment of a `target` section, or all of a set that `device` can run; a line names the others.
    `anywhere`: the host need not have a latency table.

    If the `host` is not at hand, nobody knows what it can run, and only formats that are written here are checked.

    Raises:
        ConfigError: The set cannot be searched: none of it can run, two names are of one deployment, one runs on a GPU,
            or batches differ.
        UnknownName: The set names a target that does not exist.
    """
    if DEPLOYMENTS not in section:
        return (Deployment.of(Target.from_config(section), host, console, device, anywhere=anywhere),)
    targets = _targets_of(read_options(TargetSet, section, "target"))
    first = Deployment.of(targets[0], host, console, device, anywhere=anywhere)
    deployments, reasons = [], {}
    for target in targets:
        try:
            if first.at_hand:
                device.runtime(target.runtime).check(target)
            if isinstance(written := load_runtime(target.runtime), OwnFormat):
                written.check(target)  # its files are written on this machine
        except TargetError as error:
            reasons[target.name] = str(error)
        else:
            deployments.append(replace(first, target=target))
    explanations = " ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if not deployments:
        raise ConfigError(f"no deployment of target={section['name']} can run here. {explanations}")
    if reasons:
        console.remark(f"note: not deployed as {', '.join(reasons)}. {explanations}")
    return tuple(deployments)


def _targets_of(options: TargetSet) -> list[Target]:
    """Return the targets that a set names, with each number of threads of the set; errors as `read_deployments`."""
    targets: dict[Target, str] = {}
    for name, threads in itertools.product(options.deployments, options.threads or (None,)):
        path = file_in("target", name) if PLAIN_NAME.fullmatch(name) else None
        if path is None:
            raise UnknownName("target", name, names_in("target"))
        try:
            target = Target.from_config(load_yaml(yaml_text(path)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}). Mend or remove it.") from None
        if target.device != "cpu":
            raise ConfigError(f"target.deployments: {name} runs on a GPU, and a set is of one CPU. Leave it out.")
        target = replace(target, vendor="", price_per_hour=options.price_per_hour)
        if threads is not None:
            several = len(options.threads or ()) > 1
            target = replace(target, threads=threads, name=f"{name}-t{threads}" if several else name)
        # Two names of one deployment would be searched twice.
        unnamed = replace(target, name="")
        if unnamed in targets:
            raise ConfigError(f"target.deployments: {targets[unnamed]} and {target.name} are one deployment. Name it "
                              "once.")
        if target.name in targets.values() or not PLAIN_NAME.fullmatch(target.name):
            raise ConfigError(f"{path}: files of a set are named after its targets, and {target.name!r} is no plain "
                              "name of one of them alone. Give the target another name.")
        targets[unnamed] = target.name
    if not targets:
        raise ConfigError("target.deployments names no target. Give some.")
    if len({target.batch for target in targets}) > 1:
        raise ConfigError("target.deployments: their batches differ, so that their latencies cannot be compared.")
    return [replace(target, name=name) for target, name in targets.items()]
