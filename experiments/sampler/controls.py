"""Controls: random networks of the space beside the contest's, lest what the space is worth be taken for the search's.

    python experiments/sampler/controls.py out=docs/controls.png

They are those that the certificate of the same data set and recipe trained: one from each sixteenth of the predicted
latencies, two seeds, fp32. Nobody timed them, so that their latency is the table's prediction (of int8).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TABLE = ROOT / "experiments" / "results" / "contest" / "table.csv"
CERTIFICATE = ROOT / "experiments" / "results" / "certificates" / "fashion_mnist.json"
MARGIN = 0.5  # points of top-1 that a rival may lie below: the certificate keeps no answers to pair
LEAST = 84.3  # per cent: where the picture ends below


@dataclass(frozen=True)
class Point:
    """A network in one precision: latency in ms, top-1 and each seed's in per cent."""

    name: str
    precision: str
    ms: float
    top1: float
    seeds: tuple[float, ...]


def random_networks() -> list[Point]:
    """The certificate's networks, fastest first; `ms` is predicted."""
    networks = json.loads(CERTIFICATE.read_text(encoding="utf-8"))["networks"]
    points = [Point(network["id"], "fp32", network["cost"], 100 * network["top1"],
                    tuple(100 * training["top1"] for training in network["trainings"])) for network in networks]
    return sorted(points, key=lambda point: point.ms)


def contest_networks(ours: bool, precision: str = "") -> list[Point]:
    """The searched networks, or the baselines in every precision; fastest first, as they were timed."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["ours"] == "True") == ours]
    points = [Point(row["network"] + (" s1" if row["stem"] == "stride 1" else ""), row["precision"],
                    float(row["latency_ms"]), 100 * float(row["top1"]),
                    tuple(100 * float(top1) for top1 in row["top1_by_seed"].split()))
              for row in rows if precision in ("", row["precision"])]
    return sorted(points, key=lambda point: point.ms)


def rival(point: Point, baselines: Sequence[Point]) -> Point:
    """The contest's rule with a margin in place of its bootstrap: the fastest baseline that is at most MARGIN less
    accurate than `point` or, where `point` is the more accurate, than the most accurate baseline."""
    best = max(baseline.top1 for baseline in baselines)
    return min((baseline for baseline in baselines if baseline.top1 >= min(point.top1, best) - MARGIN),
               key=lambda baseline: baseline.ms)


def times_as_fast(points: Sequence[Point]) -> list[float]:
    """How many times as fast as its rival each of `points` is."""
    baselines = contest_networks(ours=False)
    return [rival(point, baselines).ms / point.ms for point in points]


def picture() -> bytes:
    """As PNG: baselines (int8), the searched networks (int8) and the random ones, by latency and top-1."""
    from hwnas.front.picture import BASELINE, FRONT
    from hwnas.pictures import INK, MUTED, draw_better, figure_bytes, log_axis, new_figure, place_labels

    groups = (("random networks of the space (fp32; latency predicted for int8)", random_networks(), "#0e9384", "D"),
              ("picked by a search (int8)", contest_networks(True, "int8"), FRONT, "o"),
              (f"baselines above {LEAST:g} % (int8; s1: stride-1 stem)", contest_networks(False, "int8"),
               BASELINE, "s"))
    with new_figure(10.0, 4.7, "What the space is worth, and not the search: Fashion-MNIST at 32 px",
                    "one recipe for all: 6 epochs of 10,000 images, from scratch · one thread of amd-epyc-f26m2s1-2c, "
                    "OpenVINO", left=0.07) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.07, right=0.985, top=0.83, bottom=0.115)
        log_axis(axes, [point.ms for _, points, _, _ in groups for point in points])
        axes.set(xlabel="latency of one image (ms, log scale)", ylabel="test top-1 (%)", ylim=(LEAST, 90.2))
        labels = []
        for label, points, colour, marker in groups:
            shown = [point for point in points if point.top1 >= LEAST]
            for point in shown:
                axes.plot([point.ms] * len(point.seeds), point.seeds, color=colour, lw=1.0, alpha=0.45, zorder=2)
            axes.plot([point.ms for point in shown], [point.top1 for point in shown], marker, ms=6.5, color=colour,
                      mec="white", mew=0.8, zorder=3, label=label)
            labels += [(point.ms, point.top1, "" if marker == "D" else point.name.split("-")[0], colour)
                       for point in shown]
        draw_better(axes, [(x, y) for x, y, _, _ in labels], MUTED)
        place_labels(axes, labels, fontsize=7.8,
                     lines=[((point.ms, min(point.seeds)), (point.ms, max(point.seeds)))
                            for _, points, _, _ in groups for point in points if point.top1 >= LEAST])
        axes.legend(loc="upper right", frameon=False, fontsize=8.5, labelcolor=INK, title="line: the two seeds",
                    title_fontsize=8.5, alignment="left")
    return figure_bytes(figure, "png")


def main(out: Path) -> None:
    """Draw, and print each network with its rival."""
    from hwnas.system.paths import write_atomic

    write_atomic(out, picture())
    baselines = contest_networks(ours=False)
    for point in (*random_networks(), *contest_networks(True, "int8")):
        best = rival(point, baselines)
        seeds = ", ".join(f"{top1:.2f}" for top1 in point.seeds)
        print(f"| {point.name} | {point.ms:.4f} | {point.top1:.2f} ({seeds}) | {best.name} "
              f"{best.precision} | {best.ms:.4f} | {best.ms / point.ms:.2f} |")


if __name__ == "__main__":
    main(Path(dict(argument.split("=", 1) for argument in sys.argv[1:])["out"]))
