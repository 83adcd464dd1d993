"""Whether predictions of searches gain by following the reference from a fresh table to the verification.

    python -m experiments.sessions.followed RUN … --out experiments/sessions/followed.csv

Each RUN is of a search whose table was less than an hour old, by a version that did not follow: its predictions are of
the table's own session. `followed_ms` is what the reference beside the verification makes of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.sessions.hours_later import write_table
from hwnas.front.rows import load_front
from hwnas.latency.session import Session
from hwnas.system.documents import load_json
from hwnas.system.run_folder import RunFolder


def rows_of(path: Path) -> pd.DataFrame:
    """The measured networks of a run that were predicted."""
    run = RunFolder.open(path, write=False)
    table_ms = run.read_environment()["measuring"]["quiet_ms"]
    beside_ms = next(iter(load_json(run.measurements.read_bytes())["networks"].values()))["quiet_us"] / 1e3
    pace = Session(1.0, 0.0, 0, "", "", reference_ms=table_ms).drifted(beside_ms).factor
    rows = [row for row in load_front(run) if row.verified and row.latency_ms_predicted is not None]
    predicted_ms = np.array([row.latency_ms_predicted for row in rows], float)
    return pd.DataFrame({"run": path.name, "id": [row.id for row in rows], "reference_in_table_ms": table_ms,
                         "reference_ms": beside_ms, "predicted_ms": predicted_ms, "followed_ms": pace * predicted_ms,
                         "measured_ms": [row.latency_ms for row in rows]}).round(6)


if __name__ == "__main__":
    write_table(rows_of, __doc__)
