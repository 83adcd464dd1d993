"""Files of `hwnas.validate` on tables of ten networks as one table, beside what the same ten say from scratch.

    HWNAS_HOME=HOME python -m experiments.latency.transfer.measured V1.json V2.json … \
        --out experiments/latency/results/transfer/measured.csv

HOME has the tables that `hwnas.profile … calibration.networks=10` made there. `scratch_ms` is the prediction of a fit
on the same networks that starts from nothing, moved by the same panel.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.latency.sessions import hours_later
from hwnas.latency.model import Fit, timed_networks
from hwnas.latency.table import find_table
from hwnas.space.architecture import Architecture
from hwnas.system.documents import read_json


def rows_of(path: Path) -> pd.DataFrame:
    """The valid networks of a file."""
    held, rows = read_json(path), hours_later.rows_of(path)
    table = find_table(held["host"]["name"], held["table"]["key"])
    assert table is not None, "set HWNAS_HOME"
    assert table.created == held["table"]["created"], "another table"
    networks = [network for network in table.networks if network.measurement.valid]
    blocks = [Architecture.from_dict(each["architecture"]).blocks() for each in held["networks"] if each["valid"]]
    scratch_ms = Fit.of(timed_networks(networks, table.quiet_ms)).networks(blocks)[0]
    return rows.assign(scratch_ms=(scratch_ms * rows.factor).round(6), calibration_s=sum(table.spent_s.values()),
                       n_timed=len(networks))


if __name__ == "__main__":
    hours_later.write_table(rows_of, __doc__)
