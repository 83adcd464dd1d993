"""Histories of latency tables as one table: what searches predicted when they verified, and measured.

    python -m experiments.sessions.searches A.history.jsonl … --out experiments/sessions/searches.csv

Each file lies beside a table in the user's folder (`hwnas/latency/history.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from experiments.sessions.hours_later import write_table


def rows_of(path: Path) -> pd.DataFrame:
    """The networks of a file."""
    told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return pd.DataFrame([{"run": "/".join(Path(each["run"]).parts[-2:]), "target": path.name.partition("-t1")[0],
                          "measured_at": each["measured_at"][:16], "id": each["id"], **{
                              name: round(each[name], 6) for name in ("predicted_ms", "low_ms", "high_ms",
                                                                      "measured_ms")}} for each in told])


if __name__ == "__main__":
    write_table(rows_of, __doc__)
