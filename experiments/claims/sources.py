"""Results files of the repository as plain values; each is read once."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.stats import kendall_tau

EXPERIMENTS = Path(__file__).resolve().parents[1]
ROOT = EXPERIMENTS.parent


@functools.cache
def lines(path: str) -> list[dict[str, str]]:
    """Rows of a CSV file below experiments/."""
    with (EXPERIMENTS / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def document(path: str) -> Mapping[str, Any]:
    """A JSON file below experiments/."""
    content: Mapping[str, Any] = json.loads((EXPERIMENTS / path).read_text(encoding="utf-8"))
    return content


def numbers(row: Mapping[str, str], *columns: str, times: float = 1.0) -> list[float]:
    """Cells of a row as numbers."""
    return [times * float(row[column]) for column in columns]


def lost_to_int8(arm: str, bits: str, of: str = "top1_fp32") -> list[float]:
    """Points of top-1 between a column and the deployed answers of weights of so many bits, by network of an arm."""
    return [100 * (float(row[of]) - float(row["top1_deployed"])) for row in lines("saturation/results.csv")
            if (row["arm"], row["weight_bits"]) == (arm, bits)]


def gained_since(column: str) -> list[float]:
    """Points of top-1 in fp32 that networks have more in a column than after twenty minutes."""
    return [100 * (float(row[column]) - float(row["minutes_20"])) for row in lines("hour/results/longer.csv")
            if row[column] and row["minutes_20"]]


class Certificate:
    """A shipped certificate of one data set: the networks' full trainings, costs and what each estimator told."""

    def __init__(self, name: str) -> None:
        self.content = document(f"certificates/results/{name}/certificate.json")
        networks = self.content["networks"]
        self.truth = np.array([network["top1"] for network in networks])
        self.seeds = np.array([[training["top1"] for training in network["trainings"]] for network in networks])
        self.log_cost = np.log([network["cost"] for network in networks])
        self.told = {label: np.array([network["estimates"][label] for network in networks], float)
                     for label in networks[0]["estimates"]}

    def tau(self, told: np.ndarray) -> float:
        """Kendall's tau with the mean of the full trainings."""
        return float(kendall_tau(told, self.truth))

    def tau_given_cost(self, told: np.ndarray) -> float:
        """The same among networks of equal cost."""
        return self.given_cost(told, self.truth)

    def given_cost(self, first: np.ndarray, second: np.ndarray) -> float:
        """Kendall's tau of what a line on log cost leaves over of both."""
        return float(kendall_tau(self._beside_cost(first), self._beside_cost(second)))

    def mixed(self, label: str, other: np.ndarray, weight: float) -> np.ndarray:
        """An estimate's log odds and `weight` times `other`, both in standard deviations."""
        return _standard(log_odds(self.told[label])) + weight * _standard(other)

    def _beside_cost(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values - np.polyval(np.polyfit(self.log_cost, values, 1), self.log_cost))


def log_odds(share: np.ndarray) -> np.ndarray:
    """Of shares in (0, 1)."""
    return np.asarray(np.log(share / (1 - share)))


def _standard(values: np.ndarray) -> np.ndarray:
    return np.asarray((values - values.mean()) / values.std())
