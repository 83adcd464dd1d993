"""The front as a picture to explore: the networks of a run as data in its page. plotly.js, which is in the page too,
draws them."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from hwnas.front.comparison import describe
from hwnas.front.rows import FrontRow, within_caps
from hwnas.lazy import LazyModule, jinja2
from hwnas.study.objective import COSTS
from hwnas.system.tables import finite

if TYPE_CHECKING:
    import plotly.offline as plotly_offline
    from jinja2 import Template

    from hwnas.front.pairs import Pair
else:
    plotly_offline = LazyModule("plotly.offline")


PAIR = "pair, mean latency (estimate)"
KINDS = {"searched": ("#1f5fbf", "circle"), "obvious cut": ("#c2410c", "triangle-up"),
         "whole network": ("#7c3aed", "star"), "baseline": ("#c2410c", "diamond"), "known network": ("#5b7083", "x"),
         "random network": ("#98a2b3", "square"), PAIR: ("#0e9384", "pentagon")}  # colour and symbol of each kind


def explore_values(rows: Sequence[FrontRow], pairs: Sequence[Pair], environment: Mapping[str, Any], folder: str
                   ) -> dict[str, str]:
    """Return what the template needs for the picture to explore, see `page_values`; empty if no network was measured.

    Args:
        rows: Rows of the front.
        pairs: Pairs of its networks.
        environment: The run's environment, which describes the targets.
        folder: The run's folder, for the command that copies a network's files.
    """
    shown = [row for row in rows if row.verified and all(
        value is not None and 0 <= value < math.inf for value in (row.latency_ms, row.top1_test))]
    if not shown:
        return {}
    by_id = {row.id: row for row in shown}
    points = [_point(row, environment, folder) for row in shown]
    points += [_pair_point(pair, _point(by_id[pair.accurate], environment, folder), rows, folder) for pair in pairs
               if pair.accurate in by_id]
    return page_values(points, KINDS, f"test {shown[0].metric} (%)", "how to copy its files", environment.get("cap_ms"))


def page_values(points: Sequence[Mapping[str, Any]], kinds: Mapping[str, tuple[str, str]], axis: str, button: str,
                cap_ms: float | None) -> dict[str, str]:
    """Return the template's values: `plotly` is the program, `data` is JSON, and `button` the text of the button.

    Args:
        points: A mapping for each network: `id`, `kind`, `runtime`, `precision`, `threads`, `latency_ms`, `top1` (from
            0 to 1) with `_low` and `_high`, `can_be_picked`, and `front`. Points with the same `front` compete. `told`
            has lines of text, and `copy` is the command that the button shows.
        kinds: Colour and symbol of each kind.
        axis: Label of the upright axis.
        button: Its text.
        cap_ms: The place of the slider; None: the slowest network.
    """
    text = json.dumps(finite({"points": points, "kinds": kinds, "axis": axis, "cap_ms": cap_ms}), allow_nan=False)
    # Only "<" could end the script element that holds the data. JSON reads this escape as "<".
    return {"plotly": str(plotly_offline.get_plotlyjs()), "data": text.replace("<", "\\u003c"), "button": button}


@cache
def load_template(name: str) -> Template:
    """Return a template that is beside this file. In templates of pages, text from outside is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hwnas.front", "."), autoescape=name.endswith(".html.j2"), trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    # Markdown makes no HTML, image or link of a name that came through this filter.
    environment.filters["plain"] = lambda name: re.sub(r"([\\`*\[\]<>&|])", r"\\\1", " ".join(name.split()))
    return environment.get_template(name)


def shown_ms(value: float | None) -> str:
    """Return a latency with three digits."""
    return "not known" if value is None else f"{value:#.3g}".rstrip(".") + " ms"


def _point(row: FrontRow, environment: Mapping[str, Any], folder: str) -> dict[str, Any]:
    section, interval = environment.get("target") or {}, ""
    # The row's own target, if the run has several.
    several = [each for each in section.get("targets") or () if isinstance(each, dict)]
    target = next((each for each in several if each.get("name") == row.target), section)
    price = next((cost for cost in row.costs if cost.name == "price"), None)
    runtime, threads = str(target.get("runtime", "unknown")), str(target.get("threads", "unknown"))
    if row.top1_test_low is not None and row.top1_test_high is not None:
        interval = f" (95 %: {100 * row.top1_test_low:.2f} % to {100 * row.top1_test_high:.2f} %)"
    return {
        "id": row.id, "kind": row.kind, "precision": row.precision, "runtime": runtime, "threads": threads,
        "latency_ms": row.latency_ms, "latency_ms_low": row.latency_ms_low, "latency_ms_high": row.latency_ms_high,
        "top1": row.top1_test, "top1_low": row.top1_test_low, "top1_high": row.top1_test_high, "front": "",
        "can_be_picked": not row.control_of and within_caps(row, None, environment.get("cap_p99_ms")) is not False,
        "copy": f"cp -r {shlex.quote(f'{folder}/models/{row.id}')} .",
        "told": [describe(row), f"{runtime}, {row.precision}, threads {'all' if threads == '0' else threads}",
                 f"{row.metric} {100 * (row.top1_test or 0.0):.2f} %{interval}", f"latency {shown_ms(row.latency_ms)}",
                 f"half of all calls within {shown_ms(row.latency_ms_p50)}, 99 of 100 within "
                 f"{shown_ms(row.latency_ms_p99)}", row.kind,
                 *([] if price is None or price.best is None else [f"{COSTS['price'].label} {price.best:.4g}"])]}


def _pair_point(pair: Pair, accurate: Mapping[str, Any], rows: Sequence[FrontRow], folder: str) -> dict[str, Any]:
    """Return the point of a pair, made from that of its second network. The slider's cap is on single calls, so a pair
    is picked only by a click."""
    return {**accurate, "id": pair.id, "kind": PAIR, "latency_ms": pair.latency_ms_mean,
            "latency_ms_low": pair.latency_ms_mean_low, "latency_ms_high": pair.latency_ms_mean_high,
            "top1": pair.top1_test, "top1_low": pair.top1_test_low, "top1_high": pair.top1_test_high,
            "can_be_picked": False, "told": [pair.tell(rows)], "copy": shlex.join(
                ["cp", "-r", *(f"{folder}/models/{id}" for id in (pair.fast, pair.accurate)), "."])}
