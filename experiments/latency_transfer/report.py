"""What the draws say: means with standard errors, cases of harm, a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from experiments.common import percent, text_table
from experiments.latency_transfer.study import ANY, CONTROL
from hwnas.pictures import INK, MUTED, blank_figure, figure_bytes, style

WAYS = ("scratch", "ungated", "gated")
NOISE = 2.0  # standard errors that a loss must exceed to count
PLAIN_LOSS = 0.005  # and half a point of error: less is of no use to anybody
SOURCES = ("#1f5fbf", "#c2410c", "#0e9384", "#7a5af8", "#e9a23b", "#d444f1", "#667085", "#8fb3e6")
METRICS = ("mean_error", "within_10", "spearman")


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a destination, source and n: mean and standard error of each figure, how often taken, harm."""
    def case(row: Mapping[str, Any]) -> tuple[str, str, int]:
        return row["destination"], row["source"], row["n"]

    return [_summary(key, list(group)) for key, group in groupby(sorted(rows, key=case), key=case)]


def _summary(key: tuple[str, str, int], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = dict(zip(("destination", "source", "n"), key, strict=True))
    entry["draws"] = len(rows)
    for way in WAYS:
        for name in METRICS:
            values = np.array([row[f"{name}_{way}"] for row in rows if row[f"{name}_{way}"] is not None], float)
            entry[f"{name}_{way}"] = round(float(values.mean()), 5) if len(values) else None
            entry[f"{name}_{way}_se"] = (round(float(values.std(ddof=1) / np.sqrt(len(values))), 5)
                                         if len(values) > 1 else None)
    change = np.array([row["mean_error_gated"] - row["mean_error_scratch"] for row in rows])
    entry["change"] = round(float(change.mean()), 5)
    entry["change_se"] = round(float(change.std(ddof=1) / np.sqrt(len(change))), 5) if len(change) > 1 else None
    entry["taken"] = sum(bool(row["taken"]) for row in rows)
    entry["worse"] = sum(row["loss"] > max(NOISE * row["loss_noise"], PLAIN_LOSS) for row in rows)
    entry["better"] = sum(-row["loss"] > max(NOISE * row["loss_noise"], PLAIN_LOSS) for row in rows)
    return entry


def describe(found: Sequence[Mapping[str, Any]]) -> str:
    """The table, and how often transfer did harm."""
    rows = [["destination <- source", "n", "scratch", "ungated", "gated", "within 10 %", "gated", "Spearman", "gated",
             "taken", "better", "worse"]]
    for one in found:
        rows.append([f"{short(one['destination'])} <- {short(one['source'])}", str(one["n"]),
                     *(_with_error(one, f"mean_error_{way}") for way in WAYS),
                     percent(one["within_10_scratch"]), percent(one["within_10_gated"]),
                     f"{one['spearman_scratch']:.3f}", f"{one['spearman_gated']:.3f}",
                     f"{one['taken']}/{one['draws']}", str(one["better"]), str(one["worse"])])
    return f"{text_table(rows)}\n\n{verdict(found)}"


def verdict(found: Sequence[Mapping[str, Any]]) -> str:
    """In words: the cases of harm among all draws, and in the mean."""
    lines = []
    for title, of in (("one source", lambda source: source not in (ANY, CONTROL)),
                      ("the best of all sources", lambda source: source == ANY),
                      ("random entries (control)", lambda source: source == CONTROL)):
        part = [one for one in found if of(one["source"])]
        if not part:
            continue
        draws, worse, better = (sum(one[name] for one in part) for name in ("draws", "worse", "better"))
        means = sum((one["change"] or 0) > NOISE * (one["change_se"] or 0) and one["change"] > 0 for one in part)
        lines.append(f"{title}: gated transfer is better in {better} and worse in {worse} of {draws} draws (by more "
                     f"than {NOISE:g} standard errors and {PLAIN_LOSS:.1%} of latency); over the draws of a case it is "
                     f"worse by more than {NOISE:g} standard errors in {means} of {len(part)} cases")
    return "\n".join(lines)


def _with_error(one: Mapping[str, Any], name: str) -> str:
    value, error = one[name], one[f"{name}_se"]
    return "–" if value is None else f"{value:.1%}" + ("" if error is None else f" ± {error:.1%}")


def picture(found: Sequence[Mapping[str, Any]], space: str, seeds: int) -> bytes:
    """One panel a destination: mean error against measurements, from scratch and from each source."""
    destinations = sorted({one["destination"] for one in found})
    columns = min(len(destinations), 2)
    rows = -(-len(destinations) // columns)
    figure = blank_figure(6.0 * columns, 3.9 * rows + 0.8)
    with style():
        panels = np.array(figure.subplots(rows, columns, sharey=False)).reshape(-1)
        for axes, destination in zip(panels, destinations, strict=False):
            _panel(axes, [one for one in found if one["destination"] == destination], destination)
        for axes in panels[len(destinations):]:
            axes.set_visible(False)
        top = 1 - 0.72 / (3.9 * rows + 0.8)
        figure.tight_layout(rect=(0, 0, 1, top))
        figure.text(0.012, 1 - 0.3 / (3.9 * rows + 0.8), f"A new target with few measurements on {space}",
                    fontsize=13, fontweight="bold", color=INK, ha="left")
        figure.text(0.012, 1 - 0.58 / (3.9 * rows + 0.8), f"mean error on networks not drawn, {seeds} draws, bars: "
                    "standard error; dashed: always with the prior; solid: where cross-validation takes it",
                    fontsize=9, color=MUTED, ha="left")
    return figure_bytes(figure, "png")


def short(name: str) -> str:
    """A table's name without what most tables share."""
    return name.replace("-t1-b1-", " ").replace("-c1-k10", "").replace("-c3-k10", "")


def _panel(axes: Any, found: Sequence[Mapping[str, Any]], destination: str) -> None:
    axes.set_title(f"to {short(destination)}", loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel("networks measured (log scale)")
    axes.set_ylabel("mean error (%)")
    sources = sorted({one["source"] for one in found} - {ANY, CONTROL})
    first = [one for one in found if one["source"] == sources[0]]
    _line(axes, first, "scratch", INK, "o-", "from scratch", 1.0)
    for index, source in enumerate(sources):
        part = [one for one in found if one["source"] == source]
        colour = SOURCES[index % len(SOURCES)]
        spread = 1.03 ** (index + 1)
        _line(axes, part, "ungated", colour, "--", None, spread)
        _line(axes, part, "gated", colour, "s-", f"from {short(source)}", spread)
    sizes = sorted({one["n"] for one in found})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _line(axes: Any, part: Sequence[Mapping[str, Any]], way: str, colour: str, form: str, label: str | None,
          spread: float) -> None:
    part = sorted(part, key=lambda one: int(one["n"]))
    values = [100 * one[f"mean_error_{way}"] for one in part]
    errors = [100 * (one[f"mean_error_{way}_se"] or 0) for one in part]
    dashed = form == "--"
    axes.errorbar([one["n"] * spread for one in part], values, None if dashed else errors, fmt=form, color=colour,
                  lw=1.0 if dashed else 1.5, ms=4, alpha=0.6 if dashed else 1.0, elinewidth=0.8, label=label)
