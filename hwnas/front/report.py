"""Writes the pictures and the report of a run folder, from its own files alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwnas.front.picture import PlotInfo, front_figure
from hwnas.front.report_page import ReportData, report_html
from hwnas.front.rows import load_front
from hwnas.pictures.style import figure_bytes
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder


def write_report(run: RunFolder) -> None:
    """`front.png`, `front.svg` and `report.html`, from front.csv, trials.csv, comparisons.json and environment.json."""
    from hwnas.study.server import hidden

    rows, trials = load_front(run), run.read_trials()
    environment: Mapping[str, Any] = run.read_json(run.environment, default={})
    info = plot_info(environment)
    figure = front_figure(rows, trials, info)
    svg = figure_bytes(figure, "svg")
    write_atomic(run.front_png, figure_bytes(figure, "png"))
    write_atomic(run.front_svg, svg)
    # storage= may hold a password
    config = hidden(run.config.read_text(encoding="utf-8")) if run.config.is_file() else ""
    comparisons = run.read_json(run.comparisons, default=[])
    data = ReportData(info, rows, trials, comparisons, environment, svg.decode(), config)
    write_atomic(run.report, report_html(data))


def plot_info(environment: Mapping[str, Any]) -> PlotInfo:
    """What titles say, from `environment.json`."""
    def text(section: str, key: str) -> str:
        return str((environment.get(section) or {}).get(key) or "")

    cap = environment.get("cap_ms")
    host = text("host", "name") if environment.get("verified_here", True) else str(environment.get("searched_for", ""))
    return PlotInfo(text("target", "name"), host, text("dataset", "name"), str(environment.get("created", ""))[:10],
                    str(environment.get("space") or ""), None if cap is None else float(cap),
                    text("search", "accuracy") or "proxy")
