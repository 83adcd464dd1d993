"""What every picture shares: colours, title block, ticks, and a figure as PNG or SVG bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


INK, MUTED, GRID = "#1c2430", "#667085", "#e4e7ec"


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """The picture as `png` or `svg`; equal figures give equal bytes."""
    import matplotlib

    out = io.BytesIO()
    metadata = {"Date": None, "Creator": "hwnas"} if kind == "svg" else {"Software": "hwnas"}
    with matplotlib.rc_context({"svg.hashsalt": "hwnas", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def style() -> Any:
    """The look of every picture, as a context."""
    import matplotlib

    return matplotlib.rc_context({
        "font.family": "DejaVu Sans", "font.size": 9.5, "axes.edgecolor": "#98a2b3", "axes.labelcolor": INK,
        "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
        "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True})


def blank_figure(width: float, height: float, dpi: int = 150) -> Figure:
    """An empty figure, sized in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def new_figure(width: float, height: float, heading: str, subtitle: str, *, left: float) -> Iterator[Figure]:
    """A figure of so many inches with a title block from `left` (share of the width), drawn in the pictures' look.

    The block takes the upper 0.75 inches.
    """
    figure = blank_figure(width, height, 160)
    with style():
        figure.suptitle(heading, x=left, y=1 - 0.2 / height, ha="left", fontsize=14, fontweight="bold", color=INK)
        figure.text(left, 1 - 0.6 / height, subtitle, fontsize=9.5, color=MUTED, ha="left")
        yield figure


def is_number(value: object) -> bool:
    """Whether `value` is a number that can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value)


def title(axes: Axes, text: str) -> None:
    """A panel's title, to the left."""
    axes.set_title(text, loc="left", fontsize=10.5, color=INK, pad=7)


def percent_axis(axes: Axes) -> None:
    """Some eight round ticks on the y axis."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))


def log_axis(axes: Axes, values: Iterable[float]) -> None:
    """Log axis over `values`."""
    positive = [value for value in values if value > 0]
    low, high = min(positive) / 1.18, max(positive) * 1.18
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    plain_log_ticks(axes.xaxis, low, high)


def plain_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Few, plainly written ticks (0.05, 0.1, 0.2, …) on a log axis from `low` to `high`, never powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
                  tuple(1 + step / 20 for step in range(180))):
        ticks = [step * 10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
                 for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) >= 4:
            break
    axis.set_major_locator(FixedLocator(ticks[:: math.ceil(len(ticks) / 9)] or [math.sqrt(low * high)]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
