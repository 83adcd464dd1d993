"""Whether predictions of searches gain by what is timed before and at their verification.

    python -m experiments.sessions.moved RUN … --out experiments/sessions/moved.csv

Each RUN is of a search that calibrated its own table or began by one. `began_ms` is what the session of its beginning
predicts; `moved_ms` what stands beside the measured latency: moved by the panel that was timed anew before the
verification, and on by the reference network (`experiments/sessions/waves.py`) where that ran in the deployment. The
rule, set when four of the runs had ended: the panel is timed anew if that makes the mean error over all networks
smaller. It did not, so that no search has such a panel within the hour any more: the runs are of versions that had.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.sessions.hours_later import write_table
from hwnas.front.rows import load_front
from hwnas.system.documents import load_json
from hwnas.system.run_folder import RunFolder


def rows_of(path: Path) -> pd.DataFrame:
    """The measured networks of a run that were predicted."""
    run = RunFolder.open(path, write=False)
    sessions = run.read_environment()["session"].get("of_deployments")
    rows = [row for row in load_front(run) if row.verified and row.latency_ms_predicted is not None]
    table = []
    for row in rows:
        now = sessions[row.deployment] if sessions else run.read_environment()["session"]
        name = run.session.with_stem(f"session-{row.deployment}") if sessions else run.session
        back = load_json(name.read_bytes())["factor"] / now["factor"]
        table.append({"run": f"{path.parent.name}/{path.name}", "id": row.id, "target": row.target,
                      "moved_by": 1 / back, "began_ms": back * row.latency_ms_predicted,
                      "moved_ms": row.latency_ms_predicted, "measured_ms": row.latency_ms})
    return pd.DataFrame(table).round(6)


if __name__ == "__main__":
    write_table(rows_of, __doc__)
