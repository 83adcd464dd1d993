"""Writes the pictures and the report of a run folder again, from its own files: `python -m hwnas.report run=DIR`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError
from hwnas.paths import write_atomic
from hwnas.plots import PlotInfo, figure_bytes, front_figure
from hwnas.report_html import ReportData, report_html
from hwnas.run_folder import RunFolder

if TYPE_CHECKING:
    from hwnas.progress import Console


def write_report(run: RunFolder) -> None:
    """`front.png`, `front.svg` and `report.html`, from front.csv, trials.csv, comparisons.json and environment.json."""
    rows, trials = run.read_front(), run.read_trials()
    environment: Mapping[str, Any] = run.read_json(run.environment, default={})
    info = plot_info(environment)
    figure = front_figure(rows, trials, info)
    svg = figure_bytes(figure, "svg")
    write_atomic(run.front_png, figure_bytes(figure, "png"))
    write_atomic(run.front_svg, svg)
    config = run.config.read_text(encoding="utf-8") if run.config.is_file() else ""
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
                    str(environment.get("space") or ""), None if cap is None else float(cap))


def run(config: Mapping[str, Any], console: Console) -> None:
    """The command: `run` names the folder."""
    if not config.get("run"):
        raise ConfigError("which run folder? Add run=DIR.")
    folder = RunFolder.open(str(config["run"]))
    write_report(folder)
    console.say(f"report: {folder.report}")


def main() -> int:
    """Entry point of `python -m hwnas.report`."""
    from hwnas.command import run_command

    return run_command(run, "report", __doc__ or "", target=False)


if __name__ == "__main__":
    raise SystemExit(main())
