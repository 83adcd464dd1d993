"""Searches one after another: how well a table predicts each, alone and refined by what those before it measured.

    python -m experiments.sessions.refined TABLE.json … --out experiments/sessions/refined.csv

Beside each table lies its history (`….history.jsonl`), of a folder HWNAS_HOME that was empty before the first search.
The searches around each network count one by one, in their order; all is predicted anew, by the table as it is now.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd

from experiments.sessions.hours_later import write_table
from hwnas.latency.history import Outcome
from hwnas.latency.model import predict_known
from hwnas.latency.table import LatencyTable


def rows_of(path: Path) -> pd.DataFrame:
    """The measured networks of each search, with both predictions."""
    table, searches = LatencyTable.load(path), read_searches(path.with_suffix(".history.jsonl"))
    rows, before = [], dict[str, list[Outcome]]()
    for run, outcomes in searches.items():
        network = run.rpartition("/")[2].rpartition("-")[0]
        earlier = before.setdefault(network, [])
        space = next(name for name in sorted(table.spaces()) if network in name)
        known = [each.architecture for each in outcomes if each.architecture is not None]
        alone, refined = (predict_known(table, space, known, history) for history in ((), earlier))
        measured = [each.measured_ms for each in outcomes if each.architecture is not None]
        rows.append(pd.DataFrame({
            "host": table.host_name, "table": str(table.key), "network": network, "searches_before":
            len({each.run for each in earlier}), "id": [each.id for each in known], "table_ms": alone,
            "refined_ms": refined, "measured_ms": measured}).round(6))
        earlier += outcomes
    return pd.concat(rows)


def read_searches(path: Path) -> dict[str, list[Outcome]]:
    """The outcomes of a history by run, whatever date their table had then."""
    searches: dict[str, list[Outcome]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        values.pop("table")
        outcome = Outcome.from_dict(values)
        searches.setdefault(outcome.run, []).append(replace(outcome, id=outcome.id.partition("-")[0]))
    return searches


if __name__ == "__main__":
    write_table(rows_of, __doc__)
