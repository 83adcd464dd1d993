"""Say which network of a front to deploy, and what it wins over what anybody would try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hwnas.front.comparison import (
    MARGIN,
    Comparison,
    describe,
    difference_of,
    figures_of,
    format_signed,
    is_usable,
    top1_of,
)
from hwnas.front.rows import FrontRow
from hwnas.tasks.task import Grades

MUCH = 0.01  # top-1 that int8 takes: from there on another precision is named
_OPENVINO = ("xeon_", "epyc_", "openvino_")  # targets that have one of bf16 beside them
WIDE = 0.04  # of the interval of a top-1: from there on it stands beside the figure
DEPLOY: Literal["deploy"] = "deploy"  # name and verdict of the sentence on it


def compare_deployed(rows: Sequence[FrontRow], correct: Mapping[str, Grades], cap_ms: float | None = None
                     ) -> list[Comparison]:
    """Return what to deploy, as the first sentence on a front. Of networks that keep the cap, it is the fastest that is
    at most MARGIN less accurate than the most accurate one (95 % confidence). Empty if none was verified. The sentence
    says how far it stays below `cap_ms`.

    Of n faster networks the fastest is picked, so each interval is widened for n (Bonferroni). The sentence goes on
    with the most accurate obvious cut on full images, if there is one beside the search: at its top-1, how many
    times as fast is the fastest network that is at most MARGIN less accurate?
    """
    able = [row for row in rows if is_usable(row, correct) and row.meets_cap is not False and not row.control_of]
    if not any(row.is_finalist for row in able):
        return []
    best = max(able, key=lambda row: (top1_of(row), -(row.latency_ms or 0.0)))
    row = _fastest_as_good(best, able, correct)
    text = f"Deploy models/{row.id}: {figures_of(row)}"
    if cap_ms is not None and row.latency_ms is not None:
        text += f", {100 * max(0.0, 1 - row.latency_ms / cap_ms):.0f} % below the cap of {cap_ms:g} ms"
    capped = " that keeps the cap" * any(each.meets_cap is not None for each in able)
    low, high = best.top1_test_low or 0.0, best.top1_test_high or 1.0
    within = f" (95 %: {100 * low:.1f} to {100 * high:.1f} %)" if high - low > WIDE else ""
    unknown = [each for each in rows if not each.verified and not each.control_of and each.top1_test is not None]
    of = " of the verified ones" if unknown else ""
    text += (f"{within}: no network{capped}{of} is more accurate" if row.id == best.id else
             f": of the networks{of} that lose at most {100 * MARGIN:.1f} points (95 %) to the most accurate one, "
             f"{figures_of(best)}{within}, it is the fastest")
    if better := [each for each in unknown if top1_of(each) > top1_of(best)]:
        most = max(better, key=top1_of)
        about = "" if most.latency_ms_predicted is None else f", predicted {most.latency_ms_predicted:.3g} ms"
        text += (f", but {describe(most)} may be better: {100 * top1_of(most):.2f} %{about}, and no latency could be "
                 "told of it")
    # A control proves nothing of the search, but it may be the network that one wants.
    if above := [row for row in rows if row.control_of and is_usable(row, correct) and row.meets_cap is not False
                 and top1_of(row) > top1_of(best)]:
        text += f", but {figures_of(max(above, key=top1_of))}, trained as a control"
    if cuts := [row for row in able if row.kind == "obvious cut"]:
        text += _beside(max(cuts, key=top1_of), able, correct)
    lost = (row.top1_test_fp32 or 0.0) - top1_of(row)
    if row.precision == "int8" and lost >= MUCH and row.target.startswith(_OPENVINO):
        text += (f". int8 takes {100 * lost:.1f} points of its {row.metric}: if this CPU has bf16, "
                 "target=openvino_bf16 may take fewer, and more time")
    return [Comparison(row.id, DEPLOY, DEPLOY, f"{text}.", row.id)]


def shown_row(rows: Sequence[FrontRow], comparisons: Sequence[Mapping[str, Any]]) -> FrontRow | None:
    """The network that is to be deployed, otherwise the most accurate one of the verified front; None where there is
    none."""
    deployed = {str(item.get("finalist")) for item in comparisons if item.get("verdict") == DEPLOY}
    front = [row for row in rows if row.on_front and row.verified]
    return next((row for row in rows if row.id in deployed), max(front, key=top1_of, default=None))


def _fastest_as_good(best: FrontRow, rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> FrontRow:
    """The fastest of `rows` that is at most MARGIN less accurate than `best`, which may be itself."""
    faster = sorted((row for row in rows if (row.latency_ms or 0.0) < (best.latency_ms or 0.0)),
                    key=lambda row: row.latency_ms or 0.0)
    for row in faster:
        if difference_of(row, best, correct, len(faster))[1] > -MARGIN:
            return row
    return best


def _beside(cut: FrontRow, rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> str:
    """Say, at a sentence's end, how much faster than the best obvious cut the fastest finalist is that is as good."""
    mine = _fastest_as_good(cut, [row for row in rows if row.is_finalist], correct)
    if mine.id == cut.id:
        return f". No finalist is faster than the best obvious cut, {figures_of(cut)}, and as accurate"
    ends = (mine.latency_ms_low or mine.latency_ms, mine.latency_ms_high or mine.latency_ms,
            cut.latency_ms_low or cut.latency_ms, cut.latency_ms_high or cut.latency_ms)
    low, high, cut_low, cut_high = (end or 1.0 for end in ends)
    ratio = (cut.latency_ms or 0.0) / (mine.latency_ms or 1.0)
    return (f". At the {cut.metric} of the best obvious cut, {figures_of(cut)}, {figures_of(mine)} is {ratio:.2f} "
            f"times as fast ({cut_low / high:.2f} to {cut_high / low:.2f}; "
            f"{format_signed(top1_of(mine) - top1_of(cut))} points)")
