"""The front as a picture to explore: the networks of a run as data in its page, drawn by plotly.js, which is in the
page too."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from hwnas.front.comparison import describe
from hwnas.front.rows import FrontRow
from hwnas.lazy import LazyModule
from hwnas.study.objective import COSTS
from hwnas.system.tables import finite

if TYPE_CHECKING:
    import plotly.offline as plotly_offline
else:
    plotly_offline = LazyModule("plotly.offline")


def explore_values(rows: Sequence[FrontRow], environment: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Return what the template needs for the picture to explore: `plotly` and `script`, the programs, and `data`, JSON.

    Empty if no network was measured.

    Args:
        rows: Of the front.
        environment: Of the run; it describes the targets.
        folder: Of the run, for the command that copies a network's files.
    """
    shown = [row for row in rows if row.verified and _can_be_drawn(row.latency_ms) and _can_be_drawn(row.top1_test)]
    if not shown:
        return {}
    data = {"points": [_point(row, environment, folder) for row in shown], "cap_ms": environment.get("cap_ms")}
    text = json.dumps(finite(data), allow_nan=False)
    # Inside a script element only "<" could end it, and as this escape it stands for itself in JSON.
    return {"plotly": _plotly(), "script": _script(), "data": text.replace("<", "\\u003c")}


def _can_be_drawn(value: float | None) -> bool:
    return value is not None and 0 <= value < math.inf


def _point(row: FrontRow, environment: Mapping[str, Any], folder: str) -> dict[str, Any]:
    target = _target_of(row, environment)
    price = next((cost for cost in row.costs if cost.name == "price"), None)
    return {
        "id": row.id, "name": describe(row), "kind": _kind(row), "precision": row.precision,
        "runtime": str(target.get("runtime", "unknown")),
        "threads": str(target.get("threads", "unknown")), "latency_ms": row.latency_ms,
        "latency_ms_low": row.latency_ms_low, "latency_ms_high": row.latency_ms_high, "p50_ms": row.latency_ms_p50,
        "p99_ms": row.latency_ms_p99, "top1": row.top1_test, "top1_low": row.top1_test_low,
        "top1_high": row.top1_test_high, "can_be_picked": not row.control_of,
        "price": None if price is None or price.best is None else f"{COSTS['price'].label} {price.best:.4g}",
        "copy": f"cp -r {shlex.quote(f'{folder}/models/{row.id}')} ."}


def _target_of(row: FrontRow, environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the run says of a row's target; empty if it says nothing."""
    section = environment.get("target") or {}
    several = [each for each in section.get("targets") or () if isinstance(each, dict)]
    return next((each for each in several if each.get("name") == row.target), section)


def _kind(row: FrontRow) -> str:
    if row.is_obvious_cut:
        return "obvious cut"
    if row.is_whole or row.is_raced:
        return "whole network"
    if row.is_baseline:
        return "baseline"
    if row.is_known:
        return "known network"
    return "random network" if row.is_control else "searched"


@cache
def _plotly() -> str:
    return str(plotly_offline.get_plotlyjs())


@cache
def _script() -> str:
    return files("hwnas.front").joinpath("explore.js").read_text(encoding="utf-8")
