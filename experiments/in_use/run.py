"""How well is the quiet latency told on a machine in use? Records all states of all deployments, and judges them.

    python -m experiments.in_use.run [seconds=100] [turns=FOLDER]

Some fifty minutes on two cores. `turns` is where raw turns are kept; states that are there are not recorded again.
Writes rows.csv, in which the rows of other hosts stay, and table.csv beside this file.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.common import arguments_of, command, table_lines
from experiments.in_use.estimates import Recording, judge
from experiments.in_use.networks import DEPLOYMENTS
from experiments.in_use.states import STATES

HERE = Path(__file__).parent
METHODS = {"estimate_ms": "the model", "low_quantile_ms": "low quantile", "ratio_ms": "ratio to the reference",
           "today_ms": "the rule before"}


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors, coverage and widths by host, state and kind of network, in per cent."""
    lines = []
    for (host, state, kind), part in rows.groupby(["host", "state", "kind"], sort=False, observed=True):
        line = {"host": host, "state": state, "networks": kind, "n": len(part),
                "turns slower": round(part.slowdown.median(), 2)}
        told = part[~part.invalid]
        for method, title in METHODS.items():
            values = (told if method == "estimate_ms" else part)[method].dropna()
            error = 100 * (values / part.truth_ms[values.index] - 1).abs()
            line[f"{title}: median error"] = round(error.median(), 1)
            line[f"{title}: largest"] = round(error.max(), 1)
        off = np.abs(np.log(told.estimate_ms / told.truth_ms))
        line["covers"] = round(100 * float((off <= np.log1p(told.half)).mean()), 0)
        line["half-width, median"] = round(100 * told.half.median(), 1)
        line["INVALID"] = round(100 * float(part.invalid.mean()), 0)
        line["the rule before: refused"] = round(100 * float(part.today_ms.isna().mean()), 0)
        lines.append(line)
    return pd.DataFrame(lines)


def main(given: Sequence[str] | None = None) -> None:
    values = arguments_of(given, ("seconds", "turns"), __doc__)
    folder = Path(values.get("turns", "runs/in_use"))
    for deployment in DEPLOYMENTS:
        missing = [state for state in STATES if not (folder / f"{deployment}, {state}.json.gz").is_file()]
        if missing:
            subprocess.run([sys.executable, "-m", "experiments.in_use.record", f"deployment={deployment}",
                            f"states={','.join(missing)}", f"seconds={values.get('seconds', '100')}", f"out={folder}"],
                           check=True)
    rows = pd.DataFrame([row for path in sorted(folder.glob("*.json.gz")) for row in judge(Recording.load(path))])
    before = pd.read_csv(HERE / "rows.csv")
    rows = pd.concat([before[~before.host.isin(rows.host)], rows])
    rows = rows.assign(state=pd.Categorical(rows.state, [*STATES])).sort_values(
        ["host", "state", "kind", "deployment", "network"])
    rows.to_csv(HERE / "rows.csv", index=False, float_format="%.5g")
    table = table_of(rows)
    table.to_csv(HERE / "table.csv", index=False)
    print("\n".join(table_lines([list(table.columns), *table.astype(str).values.tolist()], words=(0, 1, 2))))


if __name__ == "__main__":
    command(main)
