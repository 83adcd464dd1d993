"""The lineage of a race: which network was cut from which, by which move, and what that won or lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hwnas.front.rows import FrontRow, sort_rows
from hwnas.pictures import MUTED, is_number, log_axis, percent_axis, place_labels, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FINISHED, DROPPED, CONTROL = "#1f5fbf", "#98a2b3", "#5b7083"
COLUMNS = ("network", "trial", "cut from trial", "steps", "seconds", "top-1 won (points)", "times as fast",
           "validation top-1 (%)", "predicted (ms)", "made by; what became of it")
_ENDS = {"evaluated": "finished", "dropped": "dropped", "failed": "failed", "lost": "lost"}


def is_race(trials: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these rows of trials.csv are lines of a race."""
    return any(trial.get("rungs") for trial in trials)


def lineage_rows(rows: Sequence[FrontRow], trials: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of COLUMNS for each line that was trained, in the order in which they were made."""
    names = {row.trained_id: row.name for row in rows if row.name not in (row.id, row.trained_id)}
    by_number = {trial["number"]: trial for trial in trials}
    told = []
    for trial in trials:
        if not (trial.get("rungs") and trial.get("steps")):
            continue
        source = by_number.get(trial.get("source"))
        faster = (source["latency_ms_predicted"] / trial["latency_ms_predicted"]
                  if source and is_number(source.get("latency_ms_predicted")) else None)
        gain: Any = trial.get("gain")
        told.append([
            str(names.get(str(trial["id"]), trial["id"])), str(trial["number"]),
            "" if source is None else str(source["number"]), str(trial["steps"]),
            f"{trial['seconds']:.0f}" if is_number(trial.get("seconds")) else "",
            f"{100 * gain:+.2f}".replace("-", "−") if is_number(gain) else "",
            "" if faster is None else f"{faster:.2f}",
            f"{100 * trial['top1_proxy']:.2f}" if is_number(trial.get("top1_proxy")) else "",
            f"{trial['latency_ms_predicted']:.3g}", "; ".join(filter(None, (trial.get("move"), _end(trial))))])
    return told


def _end(trial: Mapping[str, Any]) -> str:
    word = _ENDS.get(str(trial.get("outcome")), str(trial.get("outcome")))
    return f"{word}: {trial['reason']}" if trial.get("reason") else word


def draw_lineage(axes: Axes, rows: Sequence[FrontRow], trials: Sequence[Mapping[str, Any]], cap_ms: float | None
                 ) -> None:
    """Every trained line at its predicted latency and validation top-1, with an edge from what it was cut from."""
    title(axes, "The race: who was cut from whom")
    axes.set_ylabel("validation top-1, as last seen (%)")
    axes.set_xlabel("predicted latency (ms, log scale)")
    seen = {trial["number"]: (float(trial["latency_ms_predicted"]), 100 * float(trial["top1_proxy"]))
            for trial in trials if is_number(trial.get("latency_ms_predicted")) and is_number(trial.get("top1_proxy"))}
    if not seen:
        axes.text(0.5, 0.5, "no network was trained", transform=axes.transAxes, ha="center", color=MUTED)
        return
    controls = {row.trained_id for row in rows if row.is_control}
    kinds = {FINISHED: ("finished", "o"), DROPPED: ("dropped", "o"), CONTROL: ("random networks of the space", "s")}
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for trial in trials:
        if (at := seen.get(trial["number"])) is None:
            continue
        done = trial.get("outcome") == "evaluated"
        color = CONTROL if trial["id"] in controls else FINISHED if done else DROPPED
        points[color].append(at)
        if (begun := seen.get(trial.get("source"))) is not None:
            axes.plot([begun[0], at[0]], [begun[1], at[1]], color=color, lw=0.9, alpha=0.55, zorder=2)
    for color, (label, marker) in kinds.items():
        if points[color]:
            axes.plot(*zip(*points[color], strict=True), marker, ms=5, color=color, mec="white", mew=0.8, ls="",
                      zorder=3, label=f"{label} ({len(points[color])})")
    percent_axis(axes)
    log_axis(axes, [x for x, _ in seen.values()] + ([cap_ms] if cap_ms else []))
    labels: dict[str, list[str]] = {}
    for row in sort_rows(rows):
        if row.is_finalist or row.is_baseline:
            labels.setdefault(row.trained_id, []).append(row.label or row.name)
    names = {name: ", ".join(dict.fromkeys(told)) for name, told in labels.items()}
    place_labels(axes, [(*seen[trial["number"]], names[trial["id"]], FINISHED) for trial in trials
                        if trial["number"] in seen and trial["id"] in names and trial.get("outcome") == "evaluated"])
