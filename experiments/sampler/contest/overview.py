"""Several contests in one picture, and in one table.

    python experiments/sampler/contest/overview.py out=FILE.png DIR [DIR ...]

Each DIR holds what run.py wrote (curves.csv); its name is the panel's title.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.common import command
from experiments.sampler.contest.options import AWARE, NAMES, OURS
from experiments.sampler.contest.picture import COLOURS
from hwnas.errors import ConfigError, DataError
from hwnas.pictures import INK, MUTED, blank_figure, figure_bytes, style
from hwnas.system.paths import write_atomic
from hwnas.system.tables import read_table

COLUMNS = 3
CURVES = {"evals": int, "mean": float, "error": float | None}
MARKS = (25, 50, 100, 200, 250, 400)
WORDS = {"hwnas": "hwnas", "linas": "LINAS-like", "stratified": "random, stratified", "tpe": "TPE",
         "tpe_multivariate": "TPE, multivariate", "nsga2": "NSGA-II (50)", "nsga2_small": "NSGA-II (20)",
         "gp": "Optuna's GP", "random": "random"}

Curve = dict[int, tuple[float, float]]  # evaluations -> mean share and its standard error


@dataclass(frozen=True)
class Contest:
    """One folder: each sampler's mean shares."""

    title: str
    samplers: dict[str, Curve]

    @classmethod
    def read(cls, folder: Path) -> Contest:
        """DataError when the folder holds no contest."""
        try:
            samplers: dict[str, Curve] = {}
            for row in read_table((folder / "curves.csv").read_text(), CURVES):
                curve = samplers.setdefault(row["sampler"], {})
                curve[row["evals"]] = row["mean"], row["error"] or 0.0
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder}: no finished contest ({error}). Run experiments/sampler/contest/run.py "
                            f"out={folder}") from error
        return cls(folder.name.replace("_", " "), samplers)


def main(arguments: list[str] | None = None) -> None:
    """Draw the panels and print a Markdown table."""
    given = sys.argv[1:] if arguments is None else arguments
    outs = [one[4:] for one in given if one.startswith("out=")]
    folders = [Path(one) for one in given if not one.startswith("out=")]
    if len(outs) != 1 or not folders:
        raise ConfigError("give out=FILE.png and the folder of at least one contest.")
    contests = [Contest.read(folder) for folder in folders]
    write_atomic(Path(outs[0]), picture(contests))
    print(table(contests))


def table(contests: Sequence[Contest]) -> str:
    """Means with standard errors in per cent, a row a contest and sampler."""
    lines = ["| | " + " | ".join(map(str, MARKS)) + " |", "|---" * (len(MARKS) + 1) + "|"]
    for one in contests:
        lines.append(f"| **{one.title}** |" + " |" * len(MARKS))
        for name in [name for name in NAMES if name in one.samplers]:
            cells = [_cell(one.samplers[name].get(mark)) for mark in MARKS]
            lines.append(f"| {WORDS[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: tuple[float, float] | None) -> str:
    return "–" if found is None else f"{100 * found[0]:.1f} ± {100 * found[1]:.1f}"


def picture(contests: Sequence[Contest]) -> bytes:
    """A panel a contest: mean share of the true hypervolume against evaluations, ours thick, peers dashed."""
    rows = -(-len(contests) // COLUMNS)
    columns = min(COLUMNS, len(contests))
    height = 1.35 + 2.75 * rows
    figure = blank_figure(3.5 * columns + 0.4, height)
    with style():
        figure.text(0.012, 1 - 0.3 / height, "How few trained networks a sampler needs", fontsize=13, fontweight="bold",
                    color=INK)
        figure.text(0.012, 1 - 0.55 / height, "share of the true front's hypervolume (%), mean over seeds, band: one "
                    "standard error; dashed: peers that know latency too", fontsize=9, color=MUTED)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(contests):]:
            axes.set_visible(False)
        lines = dict[str, Any]()
        for axes, one in zip(grid.flat, contests, strict=False):
            lines |= _panel(axes, one)
        for axes in grid[-1]:
            axes.set_xlabel("networks evaluated (log scale)")
        names = [name for name in NAMES if name in lines]
        figure.legend([lines[name] for name in names], [WORDS[name] for name in names], loc="lower center",
                      ncols=len(names), frameon=False, fontsize=8.5)
        figure.subplots_adjust(left=0.045, right=0.98, top=1 - 0.95 / height, bottom=0.85 / height, hspace=0.36,
                               wspace=0.16)
    return figure_bytes(figure, "png")


def _panel(axes: Any, one: Contest) -> dict[str, Any]:
    lines = {}
    for name in reversed([name for name in NAMES if name in one.samplers]):
        at = sorted(evals for evals in one.samplers[name] if evals >= 10)
        mean, error = 100 * np.array([one.samplers[name][evals] for evals in at]).T
        mine = name == OURS
        axes.fill_between(at, mean - error, mean + error, color=COLOURS[name], alpha=0.15, lw=0, zorder=2)
        lines[name] = axes.plot(at, mean, color=COLOURS[name], lw=2.4 if mine else 1.3, zorder=4 if mine else 3,
                                ls="--" if name in AWARE else "-")[0]
    last = max(evals for curve in one.samplers.values() for evals in curve)
    ticks = [tick for tick in (10, 25, 50, 100, 200, 400) if tick <= last]
    axes.set(xscale="log", xlim=(10, last))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title(one.title, fontsize=9.5, loc="left", color=INK)
    return lines


if __name__ == "__main__":
    command(main)
