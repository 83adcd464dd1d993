"""Draw networks.csv: the set's networks by deployment beside the front of the single target, a panel for each seed.

    python -m experiments.deployments.picture --out docs/deployments.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from hwnas.pictures import MUTED, figure_bytes, log_axis, new_figure, percent_axis, title

COLORS = {"openvino_int8": "#1f5fbf", "openvino_bf16": "#7c3aed", "ort_int8": "#067647", "edge_int8": "#c2410c"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, default=Path(__file__).with_name("networks.csv"))
    given = parser.parse_args()
    rows = pd.read_csv(given.rows)
    panels = list(rows.groupby(["data", "seed"]))
    heading = "Which deployment wins where: a set of four beside openvino_int8 alone"
    told = f"cuts of one network, equal minutes · measured on {rows.host.iloc[0]} · filled: on the set's front"
    with new_figure(4.2 * len(panels), 4.9, heading, told, left=0.06) as figure:
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.2, wspace=0.16)
        for axes, ((data, seed), of) in zip(every, panels, strict=True):
            title(axes, f"{data}, seed {seed}")
            single = of[(of.arm == "single") & of.on_front].sort_values("latency_ms")
            axes.plot(single.latency_ms, 100 * single.top1_test, color=MUTED, lw=1.4, drawstyle="steps-post",
                      label="front of openvino_int8 alone")
            for name, color in COLORS.items():
                mine = of[(of.arm == "set") & (of.target == name)]
                for on_front, part in mine.groupby("on_front"):
                    axes.plot(part.latency_ms, 100 * part.top1_test, "o", ms=6, color=color,
                              mfc=color if on_front else "white", label=f"set: {name}" if on_front else None)
            log_axis(axes, of.latency_ms)
            percent_axis(axes)
            axes.set_xlabel("latency of one image (ms, log scale)")
        every[0].set_ylabel("test top-1 (%)")
        named = {text: line for axes in every for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(named.values(), named.keys(), loc="lower left", ncols=5, frameon=False,
                      bbox_to_anchor=(0.05, 0.0))
        given.out.write_bytes(figure_bytes(figure, "png"))


if __name__ == "__main__":
    main()
