"""Whether the reference network tells how a machine drifts, by the waves of every shipped table's calibration.

    python -m experiments.sessions.waves --out experiments/sessions/waves.csv

A wave times some networks in a minute, the reference beside each. Its level is the median of what they took over what
the table's model predicts of them. Where the reference tells the drift, levels come closer together once each is
followed by it, as `Session.drift` does, and as it stands (`whole`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from hwnas.latency.prior import model_of
from hwnas.latency.session import Session
from hwnas.latency.table import LatencyTable
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import table_dirs

LEAST_OF_WAVE, LEAST_WAVES = 8, 4  # networks whose median is a level, and levels whose spread is a figure


def judge_table(path: Path) -> dict[str, object]:
    """A row: standard deviations of the logarithms of the waves' levels, of the reference's times, and of what is left
    of the levels; empty figures where the waves are too few."""
    table = LatencyTable.load(path)
    name, = table.spaces()
    space = SearchSpace.load(name, channels=table.key.channels, classes=table.key.classes,
                             image_size=max(table.key.sizes))
    networks = [network for network in table.networks if network.measurement.valid]
    predicted_ms = model_of(table, space, ())[0].predict_architectures([each.architecture for each in networks]).mean
    timed = pd.DataFrame({"reference_ms": [network.measurement.quiet_ms for network in networks],
                          "error": np.log([network.measurement.latency_ms for network in networks] / predicted_ms)})
    waves = timed.groupby("reference_ms").error.agg(["median", "size"])
    waves = waves[waves["size"] >= LEAST_OF_WAVE].reset_index()
    row: dict[str, object] = {"host": table.host_name, "table": str(table.key), "waves": len(waves)}
    if len(waves) < LEAST_WAVES:
        return row
    session = Session(1.0, 0.0, 0, "", "", reference_ms=float(waves.reference_ms.median()))
    whole = np.log(waves.reference_ms / session.reference_ms)
    followed = np.log(session.drift(waves.reference_ms.to_numpy()))
    levels = waves["median"]
    return row | {"levels": levels.std(ddof=0), "reference": whole.std(ddof=0),
                  "followed": (levels - followed).std(ddof=0), "whole": (levels - whole).std(ddof=0),
                  "correlation": float(np.corrcoef(whole, levels)[0, 1])}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    paths = sorted(path for folder in table_dirs() for path in folder.glob("*/*.json.gz"))
    pd.DataFrame(map(judge_table, paths)).round(5).to_csv(parser.parse_args().out, index=False)


if __name__ == "__main__":
    main()
