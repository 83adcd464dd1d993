"""How well a family's latency model, learnt from 30 timed cuts, knows the next 30.

    python -m experiments.any_baseline.family_model --out experiments/any_baseline/family_model.csv [NAME ...]

Of each network 64 cuts are timed as a search calibrates, in OpenVINO int8, in a folder of its own. The first 30 in the
order of timing are fitted as a search fits its table, and the next 30 predicted. Beside it stands a line through the
logarithms of MACs and milliseconds of the same 30. `held_out`: all 64, each predicted from others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.any_baseline.run import CLASSES, PX, TARGET, write_rows
from hwnas.cli.progress import Console
from hwnas.latency.deployment import CalibrationOptions, calibrate
from hwnas.latency.prior import learnt_model, nearest_prior
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import HERE
from hwnas.networks.around import family_content
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import temporary_folder

NAMES = ("resnet18", "mobilenetv2_100", "efficientnet_b0", "convnext_atto", "vit_tiny_patch16_224")
FEW, TIMED = 30, 64


def judge(name: str) -> list[dict[str, Any]]:
    """A row for each of the later cuts of a network, of which some are timed first."""
    space = SearchSpace.of_content(family_content(name, 3, CLASSES, PX), f"around_{name}", channels=3, classes=CLASSES)
    with temporary_folder() as home:
        os.environ["HWNAS_HOME"] = str(home)
        table = calibrate(TARGET, space, HERE.runtime(TARGET.runtime), CalibrationOptions(TIMED, 10.0), Console(True))
    return [*rows_of(table, space, name)]


def rows_of(table: LatencyTable, space: SearchSpace, name: str) -> Iterator[dict[str, Any]]:
    """A row for each of the later cuts of a table."""
    valid = [network for network in table.networks if network.measurement.valid]
    few, later = valid[:FEW], valid[FEW:2 * FEW]
    prior, _ = nearest_prior(table.host_name, table.key, space)
    model, _ = learnt_model(replace(table, networks=few, learnt={}), space, prior)
    predicted = model.predict_architectures([network.architecture for network in later])
    macs, ms = (np.log([value(network) for network in few]) for value in (
        lambda network: network.architecture.macs, lambda network: network.measurement.latency_ms))
    line, whole = np.polyfit(macs, ms, 1), learnt_model(replace(table, learnt={}), space, prior)[0].error
    for network, mean, low, high in zip(later, predicted.mean, predicted.low, predicted.high, strict=True):
        yield {"host": table.host_name, "network": name, "created": table.created, "id": network.architecture.id,
               "seconds_each": sum(table.spent_s.values()) / len(valid), "macs": network.architecture.macs,
               "measured_ms": network.measurement.latency_ms, "predicted_ms": mean, "low_ms": low, "high_ms": high,
               "held_out_mean": whole["mean_error"], "held_out_within_5": whole["within_5"],
               "by_macs_ms": np.exp(np.polyval(line, np.log(network.architecture.macs)))}


def main(argv: Sequence[str] | None = None) -> None:
    """Judge all networks; a file that is there is written anew."""
    write_rows(__doc__, judge, argv, names=NAMES, digits="%.5f")


if __name__ == "__main__":
    main()
