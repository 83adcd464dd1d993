"""Two arms of one comparison held against each other over the test images, by thirds of the latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

RESAMPLES, THIRDS = 2000, 3
MARGIN, Z = 0.005, 1.96
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """Networks of an arm: their latencies [n], and which test images each answers rightly [n, images]."""

    latency_ms: Array
    right: NDArray[np.bool_]

    @classmethod
    def of(cls, latency_ms: Mapping[str, float], right: Mapping[str, NDArray[np.bool_]]) -> Arm:
        """The networks with these ids."""
        return cls(np.array([*latency_ms.values()], float), np.array([right[id] for id in latency_ms]))

    @property
    def front(self) -> NDArray[np.intp]:
        """Places of the networks that no other one of it beats, fastest first."""
        top1 = self.right.mean(axis=1)
        order = np.lexsort((-top1, self.latency_ms))
        before = np.concatenate([[0.0], np.maximum.accumulate(top1[order])[:-1]])
        return np.asarray(order[top1[order] > before])


def edges_of(rivals: Arm) -> Array:
    """Ends of the thirds, logarithms of ms: from the fastest network of the rivals' front to their slowest one."""
    return np.linspace(np.log(rivals.latency_ms[rivals.front].min()), np.log(rivals.latency_ms.max()), THIRDS + 1)


def speeds(arm: Arm, rivals: Arm, images: NDArray[np.int64]) -> Array:
    """For each third, how many times as fast the arm is at the networks of the rivals' front, on these test images.

    At each it is the fastest network whose top-1 is surely not lower by MARGIN or more; if there is none, the slowest
    network of both arms. Returns the mean of the logarithm, NaN for a third without a network.
    """
    mine, front = np.argsort(arm.latency_ms, kind="stable"), rivals.front
    right = arm.right[mine][:, images].astype(float)
    ratios = rivals.latency_ms[front] / max(rivals.latency_ms.max(), arm.latency_ms.max())
    for at, rival in enumerate(front):
        apart = right - rivals.right[rival, images]
        low = apart.mean(axis=1) - Z * apart.std(axis=1) / np.sqrt(len(images))
        if (low > -MARGIN).any():
            ratios[at] = rivals.latency_ms[rival] / arm.latency_ms[mine[np.argmax(low > -MARGIN)]]
    third = np.searchsorted(edges_of(rivals), np.log(rivals.latency_ms[front]), side="right") - 1
    third = np.clip(third, 0, THIRDS - 1)
    return np.array([np.log(ratios[third == part]).mean() if (third == part).any() else np.nan
                     for part in range(THIRDS)])


def levels(latency_ms: Array, top1: Array, edges: Array, chance: float) -> Array:
    """The mean, over each part between two `edges` of log latency, of the best top-1 at no more latency."""
    order = np.argsort(latency_ms, kind="stable")
    at, best = np.log(latency_ms[order]), np.maximum.accumulate(np.maximum(top1[order], chance))
    ends, heights = np.append(at, np.inf), np.append(chance, best)  # from each of `at` on the height behind it
    starts = np.append(-np.inf, at)
    means = []
    for low, high in pairwise(edges):
        widths = np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None)
        means.append(float((widths * heights).sum() / (high - low)))
    return np.array(means)


def ahead_of(arm: Arm, rivals: Arm, images: NDArray[np.int64], chance: float) -> Array:
    """Points of top-1 by which the level of an arm is above that of its rivals, in each third, on these images."""
    level = [levels(each.latency_ms, each.right[:, images].mean(axis=1), edges_of(rivals), chance)
             for each in (arm, rivals)]
    return np.asarray(100 * (level[0] - level[1]))


def interval(values: Array) -> dict[str, float | None]:
    """The value of all images, which comes first, and what 95 % of the resamples hold; None for what is not known."""
    if np.isnan(values).any():
        return dict.fromkeys(("value", "low", "high"))
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return {"value": round(float(values[0]), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
