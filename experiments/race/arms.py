"""Searches held against each other: what each found, intervals over the test images, files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwnas.system.run_folder import RunFolder

RESAMPLES = 2000


@dataclass(frozen=True)
class Arm:
    """One search: its rows, and by network id which test images it answers rightly."""

    name: str
    rows: pd.DataFrame
    right: dict[str, NDArray[np.bool_]]
    environment: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str, column: str = "arm") -> Arm:
        """The run in `folder`/`name`; `column` of the rows says the name."""
        run = RunFolder(folder / name)
        rows, answers = pd.read_csv(run.front_csv), run.read_predictions()
        rows["kind"] = np.where(rows.is_control, "control", np.where(rows.is_baseline, "baseline", "finalist"))
        labels = answers.pop("labels")
        return cls(name, rows.assign(**{column: name}), {key: labels == given for key, given in answers.items()},
                   run.read_environment())

    @property
    def timed(self) -> pd.DataFrame:
        """Rows with a measured latency."""
        return self.rows[self.rows.verified]


def interval(values: NDArray[np.float64]) -> dict[str, float]:
    """The value of all images, which comes first, and what 95 % of the drawings hold."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return {"value": round(float(values[0]), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def write_results(results: Path, rows: pd.DataFrame, columns: Sequence[str], facts: Mapping[str, Any]) -> None:
    """networks.csv and summary.json, which is printed too."""
    results.mkdir(parents=True, exist_ok=True)
    rows[[name for name in columns if name in rows]].to_csv(results / "networks.csv", index=False)
    text = json.dumps(facts, indent=1)
    (results / "summary.json").write_text(text + "\n")
    print(text)
