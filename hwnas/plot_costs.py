"""A third objective in the picture of a front: the size of a mark, the value beside the name, no false staircase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hwnas.front import FrontRow
from hwnas.space_costs import KNOWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST, _MOST = 4.5, 12.0  # diameters of marks in points


def named(name: str, row: FrontRow) -> str:
    """`name` with what the search minimised beside latency; a price, which goes with latency, only where it is all."""
    costs = [one for one in row.costs if not KNOWN[one.name].of_latency] or row.costs
    return " · ".join([name, *(KNOWN[one.name].shown(one.best) for one in costs if one.best is not None)])


def diameters(rows: Iterable[FrontRow]) -> dict[str, float]:
    """Diameters in points by id of rows' marks, growing with the log of their first cost; none where there is none."""
    found = {row.id: math.log(row.costs[0].best) for row in rows if row.costs and row.costs[0].best}
    low, high = min(found.values(), default=0.0), max(found.values(), default=0.0)
    return {name: _LEAST + (_MOST - _LEAST) * (value - low) / (high - low or 1.0) for name, value in found.items()}


def explain(axes: Axes, rows: Sequence[FrontRow], sizes: dict[str, float], color: str) -> None:
    """Legend entries for the smallest and the largest mark."""
    known = sorted((row for row in rows if row.id in sizes), key=lambda row: sizes[row.id])
    for row in known[:1] + known[1:][-1:]:
        one = KNOWN[row.costs[0].name]
        axes.plot([], [], "o", ms=sizes[row.id], mfc="none", mec=color,
                  label=f"{one.label} {one.shown(row.costs[0].best)}")


def staircase(rows: Iterable[FrontRow]) -> list[tuple[float, float]]:
    """Latency and top-1 in % of those rows that are a front in these two alone, fastest first."""
    found: list[tuple[float, float]] = []
    for latency_ms, top1 in sorted((row.best_latency_ms or 0.0, -100 * (row.best_top1 or 0.0)) for row in rows):
        if not found or -top1 > found[-1][1]:
            found.append((latency_ms, -top1))
    return found
