"""Draw networks.csv: the set's networks by deployment beside the fronts of single targets, a panel for each seed.

    python -m experiments.latency.deployments.picture --out docs/deployments.png
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import pandas as pd

from hwnas.pictures import figure_bytes, log_axis, new_figure, title

ALONE = ("edge_int8", "openvino_bf16")
COLORS = {"openvino_int8": "#1f5fbf", "openvino_bf16": "#7c3aed", "ort_int8": "#067647", "edge_int8": "#c2410c"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, default=Path(__file__).parents[1] / "results/deployments/networks.csv")
    given = parser.parse_args()
    rows = pd.read_csv(given.rows)
    sets, seeds = rows.data.unique(), rows.seed.unique()
    heading = "Which deployment wins where: a set of four beside its best targets alone"
    told = f"cuts of one network, equal minutes · measured on {rows.host.iloc[0]} · filled: on the set's front"
    with new_figure(4.2 * len(seeds), 1.3 + 3.6 * len(sets), heading, told, left=0.06) as figure:
        every = figure.subplots(len(sets), len(seeds), squeeze=False)
        figure.subplots_adjust(left=0.06, right=0.985, top=0.86, bottom=0.12, wspace=0.16, hspace=0.42)
        for (row, data), (column, seed) in product(enumerate(sets), enumerate(seeds)):
            axes, of = every[row][column], rows[(rows.data == data) & (rows.seed == seed)]
            title(axes, f"{data}, seed {seed}")
            for arm in ALONE:
                front = of[(of.arm == arm) & of.on_front].sort_values("latency_ms")
                axes.plot(front.latency_ms, 100 * front.top1_test, color=COLORS[arm], lw=1.2, alpha=0.6,
                          drawstyle="steps-post", label=f"front of {arm} alone")
            for name, color in COLORS.items():
                mine = of[(of.arm == "set") & (of.target == name)]
                for on_front, part in mine.groupby("on_front"):
                    axes.plot(part.latency_ms, 100 * part.top1_test, "o", ms=5.5, color=color,
                              mfc=color if on_front else "white", label=f"set: {name}" if on_front else None)
            log_axis(axes, of.latency_ms)
            if row == len(sets) - 1:
                axes.set_xlabel("latency of one image (ms, log scale)")
            if not column:
                axes.set_ylabel("test top-1 (%)")
        named = {text: line for axes in every.flat
                 for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(named.values(), named.keys(), loc="lower left", ncols=5, frameon=False,
                      bbox_to_anchor=(0.05, 0.0))
        given.out.write_bytes(figure_bytes(figure, "png"))


if __name__ == "__main__":
    main()
