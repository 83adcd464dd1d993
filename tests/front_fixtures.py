"""Rows of a front, trials, and a reader of pages, as tests need them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from hwnas.front.pairs import Pair
from hwnas.front.rows import FrontRow, mark_front


def make_row(id: str = "3fa91c20", **changes: Any) -> FrontRow:
    values: dict[str, Any] = {
        "id": id, "name": id, "architecture": "stem16s1 ir_r1_k3_s1_e3_c16 head0 relu@32", "is_baseline": False,
        "verified": True, "top1_proxy": 0.91, "top1_test_fp32": 0.97, "top1_test": 0.965, "top1_test_low": 0.94,
        "top1_test_high": 0.98, "n_test": 360, "latency_ms_predicted": 0.1, "latency_ms_predicted_low": 0.09,
        "latency_ms_predicted_high": 0.115, "latency_ms": 0.105, "latency_ms_low": 0.104, "latency_ms_high": 0.107,
        "params": 12345, "macs": 678901, "reward": 0.93, "reward_winner": False, "on_front": True, "meets_cap": None,
        "dominated_by": "", "target": "xeon_int8", "host": "intel-xeon-f6m143s8-2c", "precision": "int8",
        "int8_share": 0.98, "fallback_share": 0.02, "reason": ""}
    return FrontRow(**{**values, **changes})


def make_pair(**changes: Any) -> Pair:
    values: dict[str, Any] = {
        "fast": "aaaaaaa0", "accurate": "aaaaaaa3", "threshold": 0.9, "share": 0.25, "top1_test": 0.96,
        "top1_test_low": 0.94, "top1_test_high": 0.97, "difference": -0.001, "difference_low": -0.01,
        "difference_high": 0.008, "n_test": 360, "n_validation": 200, "latency_ms_mean": 0.092,
        "latency_ms_mean_low": 0.09, "latency_ms_mean_high": 0.1, "latency_ms_worst": 0.22,
        "latency_ms_worst_low": 0.21, "latency_ms_worst_high": 0.23, "times_as_fast": 1.83, **changes}
    return Pair(id=f"{values['fast']}+{values['accurate']}", **values)


def without_programs(page: str) -> str:
    """A report's page without the programs of the picture to explore, and its data."""
    return re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)


def some_rows(**changes: Any) -> list:
    rows = [make_row(f"aaaaaaa{i}", latency_ms=0.05 * 1.5**i, latency_ms_low=0.05 * 1.5**i, top1_test=0.9 + i / 50,
                     latency_ms_high=0.052 * 1.5**i, top1_test_low=0.88 + i / 50, top1_test_high=0.91 + i / 50,
                     **changes) for i in range(4)]
    rows.append(make_row("resnet10t-stem1", name="resnet10t", is_baseline=True, latency_ms=0.2, latency_ms_low=0.19,
                         latency_ms_high=0.21, top1_test=0.95, latency_ms_predicted=None, top1_proxy=None))
    return mark_front(rows)


def trials(n: int = 20) -> list[dict[str, Any]]:
    return [{"number": i, "latency_ms_predicted": 0.05 + i / 100, "top1_proxy": 0.5 + i / 100} for i in range(n)]


class Balance(HTMLParser):
    """Collects tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br", "img", "path", "use", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("path", "use", "rect"):
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)
