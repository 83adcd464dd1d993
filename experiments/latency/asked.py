"""Does a race need a latency table? Its networks timed when they are asked for, beside a calibration's predictions.

    python -m experiments.latency.asked tf_efficientnet_lite0 64 xeon_int8 FOLDER

The known networks of a race around a pretrained network are timed in one wave, their smaller images in another, as a
race does it. Then the space is calibrated as a search without a table does it, and the same networks are predicted. The
truth is the geometric mean of two longer timings in processes of their own, the second in the reverse order.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from hwnas.cli.command import compose
from hwnas.cli.options import plain
from hwnas.cli.progress import Console
from hwnas.latency.deployment import CalibrationOptions, Deployment, latency_model
from hwnas.latency.measured import MeasuredLatency, answered
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.timing import HERE, reference_network, time_networks
from hwnas.networks.around import family_content
from hwnas.search.course import smaller_in
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.target import Target

CALIBRATION = CalibrationOptions(networks=96, minutes=1.5, goal_within_5=0.97, seed=20260)
TRUTH_S = 30.0  # of a wave


def networks_of(space: SearchSpace) -> tuple[list[Architecture], list[Architecture]]:
    """The known networks at the largest size, and what they are on the smaller images of a race."""
    known = list({network.id: network for network in space.known.values()}.values())
    smaller = smaller_in(space, is_short=False)
    return known, [each for network in known for each in smaller(network)]


def measure_all(networks: list[Architecture], target: Target, seed: int) -> dict[str, Measurement]:
    """The truth, from processes of their own."""
    px, first = max(network.image_size for network in networks), networks[0]
    return time_networks(networks, target, HERE.runtime(target.runtime), reference_network(
        first.channels, first.classes, px), Protocol(max_seconds=TRUTH_S), seed=seed)


def run(network: str, px: int, target_name: str, folder: Path) -> None:
    """Append a row a network to `asked.csv`, and one to `asked_seconds.csv`."""
    space = SearchSpace.of_content(family_content(network, 3, 10, px, ()), f"around_{network}", channels=3, classes=10)
    console = Console(quiet=True)
    target = Target.from_config(plain(compose("search", [f"target={target_name}"]).target))
    deployment = Deployment.of(target, None, console)
    known, smaller = networks_of(space)
    networks, seconds = [*known, *smaller], []
    with tempfile.TemporaryDirectory() as home:
        os.environ["HWNAS_HOME"] = home
        latency = MeasuredLatency(deployment, space, Path(home) / "latencies.json",
                                  lambda: contextlib.nullcontext(True))
        for asked in (known, smaller):
            began = time.monotonic()
            answered(lambda asked=asked: latency.predict_architectures(asked), console)
            seconds.append(time.monotonic() - began)
        began = time.monotonic()
        _, model = latency_model(deployment, space, CALIBRATION, console)
        seconds.append(time.monotonic() - began)
    timed, predicted = latency.predict_architectures(networks), model.predict_architectures(networks)
    truth = [measure_all(order, target, seed) for seed, order in enumerate((networks, networks[::-1]))]
    rows = []
    for at, each in enumerate(networks):
        both = [measured[each.id].latency_ms for measured in truth]
        rows.append({"host": deployment.host_name, "network": network, "px": px, "target": target_name, "id": each.id,
                     "image_size": each.image_size, "truth_ms": float(np.sqrt(np.prod(both))),
                     "truth_apart": both[0] / both[1] - 1,
                     **{f"{name}_{part}": float(getattr(told, column)[at]) for name, told in (
                         ("timed", timed), ("predicted", predicted)) for part, column in (
                         ("ms", "mean"), ("low_ms", "low"), ("high_ms", "high"))}})
    header = {key: rows[0][key] for key in ("host", "network", "px", "target")}
    told = {**header, "known": len(known), "smaller": len(smaller), "known_s": seconds[0], "smaller_s": seconds[1],
            "calibration_s": seconds[2]}
    for name, table in (("asked.csv", rows), ("asked_seconds.csv", [told])):
        path = folder / name
        pd.DataFrame(table).to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.5g")


if __name__ == "__main__":
    name, side, asked_for, out = sys.argv[1:]
    run(name, int(side), asked_for, Path(out))
