"""The last lines of a search and of a verification: each network, the verdicts, and where the report is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwnas.front.deploy import DEPLOY
from hwnas.front.pairs import Pair
from hwnas.front.rows import FrontRow
from hwnas.study.objective import COSTS

TOLD = 2  # pairs, those that win most


def summary_lines(rows: Sequence[FrontRow], comparisons: Sequence[Mapping[str, Any]], pairs: Sequence[Pair],
                  report: Path) -> Iterator[str]:
    """Yield the result in a few lines, the deploy line last but one; nothing if another process verifies."""
    for row in sorted(rows, key=lambda row: row.best_latency_ms or 0.0):
        yield _line(row)
    for pair in sorted(pairs, key=lambda pair: -pair.times_as_fast)[:TOLD]:
        yield pair.tell(rows)
    for comparison in sorted(comparisons, key=lambda comparison: comparison.get("verdict") == DEPLOY):
        yield str(comparison.get("sentence", ""))
    if rows:
        yield f"report: {report}"


def _line(row: FrontRow) -> str:
    mark = "*" if row.on_front else " "
    top1 = "-" if row.best_top1 is None else f"{row.best_top1:.2%}"
    if row.top1_test is None and row.top1_test_fp32 is not None:
        top1 += " in fp32"
    predicted = "-" if row.latency_ms_predicted is None else f"~{row.latency_ms_predicted:.3f} ms predicted"
    latency = f"{row.latency_ms:.3f} ms" if row.verified and row.latency_ms is not None else predicted
    state = "" if row.verified else f"  not verified{': ' if row.reason else ''}{row.reason}"
    costs = "".join(f"  {COSTS[cost.name].shown(cost.best):>10}" for cost in row.costs)
    name = f"  {row.name}" * (not row.id.startswith(row.name) and not row.is_baseline)
    return f"{mark} {row.id:<28} {row.metric} {top1:>7}  {latency:>10}{costs}{name}{state}"
