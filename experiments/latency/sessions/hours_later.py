"""Files of `hwnas.validate` as one table: what was predicted hours after a latency table was made, and measured.

    python -m experiments.latency.sessions.hours_later V1.json V2.json … \\
        --out experiments/latency/results/sessions/hours_later.csv

Each file is of `python -m hwnas.validate … n=200 out=FILE.json`: 200 networks that the table has never seen, half of
them from the predicted front, moved to the session by the table's own networks, timed again (`panel_ms`). When the
files of hours_later.csv.gz were made, `predicted_ms` went on to each wave by the reference network (`reference_ms`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd


def rows_of(path: Path) -> pd.DataFrame:
    """The valid networks of a file."""
    held = json.loads(path.read_text(encoding="utf-8"))
    networks = pd.DataFrame(held["networks"])
    networks = networks[networks.valid]
    return pd.DataFrame({
        "host": held["host"]["name"], "target": held["target"], "table": held["table"]["key"],
        "table_created": held["table"]["created"][:16], "measured_at": held["measured_at"][:16],
        "factor": held["session"]["factor"], "reference_ratio": held["reference"]["ratio"],
        "n_invalid": held["n_invalid"], "group": networks.group,
        "id": networks.id, **{name: networks[column].round(6) for name, column in (
            ("predicted_ms", "predicted_ms"), ("low_ms", "low_ms"), ("high_ms", "high_ms"),
            ("measured_ms", "latency_ms"))},
        "panel_ms": networks.predicted_ms.round(6), "reference_ms": (networks.quiet_us / 1e3).round(5)})


def write_table(rows_of: Callable[[Path], pd.DataFrame], described: str | None) -> None:
    """The command of a module that makes a table of files."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pd.concat(map(rows_of, given.files)).to_csv(given.out, index=False)


if __name__ == "__main__":
    write_table(rows_of, __doc__)
