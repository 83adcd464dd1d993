"""The result of `hwnas zoo`: rows, sentences, picture and page. Only measured networks are on a front.

Published top-1 is of fp32, and the loss by int8 is known on data only: int8 and floating point have a front each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import BudgetError
from hwnas.front.explore import load_template, page_values, shown_ms
from hwnas.pictures import MUTED, Line, draw_better, log_axis, new_figure, place_labels, title
from hwnas.runtimes.runtime import load_runtime
from hwnas.stats import kendall_tau, non_dominated
from hwnas.target import Target
from hwnas.zoo.published import PublishedNetwork
from hwnas.zoo.waves import YARDSTICK, ZooTiming

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"int8": ("#1f5fbf", "circle"), "floating point": ("#c2410c", "diamond")}  # colour and symbol of each kind
TOP1_LABELS = ("published ImageNet top-1 (%)", "top-1 on test images, as deployed (%)")  # of axes: not scored, scored
MOST_SENTENCES, MOST_NAMED, SURPRISES = 5, 26, 5
UNTIMED = "not timed:"  # the start of the reason of a network that was not tried
NOTE = ("Top-1 is published by timm, of fp32 and its own preparation of images. What int8 loses is known on your data "
        "only: hwnas search or hwnas quantize says it.")
SCORED = ("Top-1 is that of the files as they are deployed, on test images, cut out square at the centre. An image "
          "counts if its class is the first of all 1000.")


@dataclass(frozen=True)
class ZooRow:
    """A network in a deployment. `latency` is in ms with the ends of its 90 % interval, or else `reason` is given.
    `on_front`: of int8, or of floating point. `scored`: the deployed file's top-1 with the ends of its 95 % interval,
    in per cent, and the number of images. `weights`: the file that it was made from."""

    network: PublishedNetwork
    target: Target
    latency: tuple[float, ...] = ()
    on_front: bool = False
    reason: str = ""
    scored: tuple[float, ...] = ()
    weights: str = ""

    @property
    def top1(self) -> float:
        """The top-1 as scored, or else as published, in per cent."""
        return self.scored[0] if self.scored else self.network.top1

    @property
    def told_top1(self) -> str:
        """The top-1 in words."""
        if not self.scored:
            return f"{self.network.top1:.1f} % published"
        top1, low, high, n = self.scored
        return f"{top1:.1f} % ({low:.1f} to {high:.1f}) of {n:,.0f} images"

    @property
    def ms(self) -> float:
        """The latency in ms."""
        return self.latency[0]

    @property
    def kind(self) -> str:
        """The front that it competes for."""
        return "int8" if self.target.precision == "int8" else "floating point"

    @property
    def place(self) -> str:
        """The runtime, precision and threads, in words."""
        runtime, threads = load_runtime(self.target.runtime), self.target.threads
        on = "" if threads == 1 else f" on {threads or 'all'} threads"
        return f"{getattr(runtime, 'title', runtime.name)} {self.target.precision}{on}"

    def __str__(self) -> str:
        return (f"{self.network.name} at {self.network.image_size} px, {self.told_top1}, {shown_ms(self.ms)} in "
                f"{self.place}")

    def values(self) -> dict[str, Any]:
        """Return the row of `zoo.csv`."""
        network, latency, scored = self.network, self.latency or (None,) * 3, self.scored or (None,) * 4
        return {"name": network.model, "image_size": network.image_size, "top1_published": network.top1,
                **dict(zip(("top1", "top1_low", "top1_high", "images"), scored, strict=True)),
                "weights": self.weights,
                "params_m": network.params_m, "gmacs": network.gmacs, "deployment": self.target.name,
                **dict(zip(("latency_ms", "latency_ms_low", "latency_ms_high"), latency, strict=True)),
                "on_front": self.on_front, "reason": self.reason}


def zoo_rows(timing: ZooTiming, complete: bool) -> list[ZooRow]:
    """Return a row for each pair, the measured ones first.

    Args:
        timing: Networks and measurements.
        complete: No other network is expected to be on a front.

    Raises:
        BudgetError: No measured network keeps the cap.
    """
    measured = [pair for pair in timing.pairs if timing.measured(pair) is not None]
    rows = [ZooRow(network, timing.records[place].target, tuple(map(float, latency)))
            for (network, place), latency in zip(measured, timing.latencies_ms(measured), strict=True)]
    within = [row for row in rows if timing.cap_ms is None or row.ms <= timing.cap_ms]
    if rows and not within:
        fastest = min(rows, key=lambda row: row.ms)
        raise BudgetError(f"cap_ms={timing.cap_ms:g}: no measured network is so fast. The fastest is {fastest}. Give a "
                          "larger cap.")
    other = "not expected to be on the front" if complete else "the minutes were over"
    return rows + [ZooRow(pair[0], timing.records[pair[1]].target, reason=timing.reason(pair) or f"{UNTIMED} {other}")
                   for pair in timing.pairs if timing.measured(pair) is None]


def mark_front(rows: Sequence[ZooRow], cap_ms: float | None) -> list[ZooRow]:
    """Mark the fronts under the cap, sorted by latency before all other rows. A row with a reason is on none."""
    front, able = set[ZooRow](), [row for row in rows if row.latency and not row.reason]
    for kind in KINDS:
        own = [row for row in able if row.kind == kind and (cap_ms is None or row.ms <= cap_ms)]
        front |= {own[at] for at in np.flatnonzero(non_dominated([(row.ms, row.top1) for row in own], [True, False]))}
    return sorted((replace(row, on_front=row in front) for row in rows),
                  key=lambda row: (not row.on_front, not row.latency, row.kind, row.latency))


def zoo_sentences(rows: Sequence[ZooRow], cap_ms: float | None) -> list[str]:
    """Say which network to choose under the cap or some round latencies, and add the best-known one to compare."""
    front, chosen = [row for row in rows if row.on_front], dict[frozenset[ZooRow], str]()
    # Without a cap: 1, 2, 5, 10, 20 … ms. Equal choices under several latencies are said once, for the lowest.
    for cap in [cap_ms] if cap_ms else [step * 10.0**power for power in range(-2, 5) for step in (1, 2, 5)]:
        best = {row.kind: row for row in sorted(front, key=lambda row: row.top1) if row.ms <= cap}
        if best:
            text = "; in floating point ".join(str(best[kind]) for kind in KINDS if kind in best)
            chosen.setdefault(frozenset(best.values()), f"Under {cap:g} ms: {text}.")
    # At most MOST_SENTENCES of them, spread from fast to slow.
    places = np.linspace(0, len(chosen) - 1, min(len(chosen), MOST_SENTENCES)).astype(int)
    sentences = [[*chosen.values()][at] for at in places]
    yardsticks = [row for row in rows if row.network.name == YARDSTICK and row.latency]
    return sentences + [f"For comparison: {row}." for row in sorted(yardsticks, key=lambda row: row.ms)[:1]]


def zoo_ranks(rows: Sequence[ZooRow]) -> list[dict[str, Any]]:
    """Return a row for each two deployments: Kendall's tau of their latencies over the networks that were timed in
    both, and the networks whose ranks differ most."""
    times = dict[str, dict[str, float]]()
    for row in rows:
        if row.latency:
            times.setdefault(row.target.name, {})[row.network.key] = row.ms
    ranks = []
    for (name, own), (other, others) in combinations(times.items(), 2):
        keys = sorted(own.keys() & others.keys())
        if len(keys) > 1:
            ms = np.array([(own[key], others[key]) for key in keys])
            places = ms.argsort(0).argsort(0) + 1
            apart = abs(places[:, 0] - places[:, 1])
            surprises = [at for at in np.argsort(-apart, kind="stable")[:SURPRISES] if apart[at]]
            ranks.append({"deployment": name, "other": other, "networks": len(keys), "kendall_tau": kendall_tau(*ms.T),
                          "surprises": "; ".join(f"{keys[at]}: {places[at, 0]} and {places[at, 1]}"
                                                 for at in surprises)})
    return ranks


def zoo_figure(rows: Sequence[ZooRow], heading: str, subtitle: str, cap_ms: float | None) -> Figure:
    """Draw top-1 against measured latency, with a front for int8 and one for floating point."""
    shown, scored = [row for row in rows if row.latency], any(row.scored for row in rows)
    labels, others, lines = list[tuple[float, float, str, str]](), list[tuple[float, float]](), list[Line]()
    with new_figure(9.6, 6.4, heading, subtitle, left=0.075) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.075, right=0.975, top=0.845, bottom=0.1)
        title(axes, "Latency and top-1 are measured, of the files as they are deployed" if scored else
              "Latencies are measured. Top-1 is published, of fp32: what int8 loses is not in it")
        axes.set_ylabel(TOP1_LABELS[scored])
        axes.set_xlabel("latency (ms, log scale)")
        log_axis(axes, [row.ms for row in shown])
        for (kind, (color, _)), marker in zip(KINDS.items(), "oD", strict=True):
            places = {row: (row.ms, row.top1) for row in shown if row.kind == kind}
            if not places:
                continue
            front = [place for row, place in places.items() if row.on_front]
            rest = [place for row, place in places.items() if not row.on_front]
            axes.plot(*np.array(rest).reshape(-1, 2).T, marker, ms=3.5, color=color, alpha=0.3, mec="none", zorder=2)
            axes.plot(*np.array(front).reshape(-1, 2).T, f"{marker}-", ms=6, color=color, mec="white", lw=1.2,
                      drawstyle="steps-post", zorder=3, label=f"front in {kind}")
            others += rest
            lines += [((x, y), (end, y)) for (x, y), (end, _) in pairwise(front)]
            labels += [(*place, f"{row.network.name} {row.network.image_size}", color)
                       for row, place in places.items() if row.on_front]
        if cap_ms is not None:
            axes.axvline(cap_ms, color=MUTED, lw=1.1, ls=(0, (4, 3)), label=f"cap {cap_ms:g} ms")
        axes.legend(loc="lower right", frameon=False)
        draw_better(axes, [place[:2] for place in labels] + others, MUTED)
        # Of many networks only each second, third … has a label.
        every = -(-len(labels) // MOST_NAMED)
        place_labels(axes, [(x, y, text * (at % every == 0), color) for at, (x, y, text, color) in enumerate(labels)],
                     lines, others, 7)
    return figure


def zoo_page(rows: Sequence[ZooRow], heading: str, lead: str, sentences: Sequence[str], cap_ms: float | None) -> str:
    """Return the interactive page, which loads nothing."""
    scored = any(row.scored for row in rows)
    points = [{
        "id": f"{row.network.key} {row.target.name}", "kind": row.kind, "front": row.kind, "can_be_picked": True,
        "runtime": row.target.runtime, "precision": row.target.precision, "threads": str(row.target.threads),
        **row.values(), **dict(zip(("top1", "top1_low", "top1_high"), (
            each / 100 for each in row.scored[:3] or (row.top1,)), strict=False)),
        "copy": f'timm.create_model("{row.network.name}", checkpoint_path={row.weights!r})' if row.weights else
                f'timm.create_model("{row.network.model}", pretrained=True)',
        "told": [f"{Path(row.weights).name or row.network.model} at {row.network.image_size} px", row.place,
                 f"top-1 {row.told_top1}{'' if row.scored else ', of fp32'}", f"latency {shown_ms(row.ms)}"],
    } for row in rows if row.latency]
    explore = page_values(points, KINDS, TOP1_LABELS[scored], "how to load it", cap_ms)
    front = [(row.network.name if scored else row.network.model, row.network.image_size,
              row.told_top1 if scored else f"{row.top1:.1f}", shown_ms(row.ms), row.place)
             for row in rows if row.on_front]
    return load_template("explore_page.html.j2").render(
        title=heading, lead=lead, sentences=sentences, explore=explore, rows=front,
        columns=("network", "px", "top-1" if scored else "published top-1 (%)", "latency", "deployment"))
