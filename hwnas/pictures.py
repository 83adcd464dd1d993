"""The parts that every picture shares: colours, title block, ticks, labels, and a figure as PNG or SVG bytes.

This module has no word of the domain.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from hwnas.lazy import matplotlib, textalloc

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text


INK, MUTED, GRID = "#1c2430", "#667085", "#e4e7ec"


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """Return the picture as bytes of a `png` or `svg`; equal figures give equal bytes."""
    out = io.BytesIO()
    metadata = {"Date": None, "Creator": "hwnas"} if kind == "svg" else {"Software": "hwnas"}
    with matplotlib.rc_context({"svg.hashsalt": "hwnas", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def style() -> Any:
    """Return the look of every picture, as a context."""
    return matplotlib.rc_context({
        "font.family": "DejaVu Sans", "font.size": 9.5, "axes.edgecolor": "#98a2b3", "axes.labelcolor": INK,
        "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
        "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True})


def blank_figure(width: float, height: float, dpi: int = 150) -> matplotlib.figure.Figure:
    """Return an empty figure, sized in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    figure = matplotlib.figure.Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def new_figure(width: float, height: float, heading: str, subtitle: str, *, left: float) -> Iterator[Figure]:
    """Yield a figure, sized in inches, in the pictures' look, with a title block from `left` (share of the width) on.

    The block takes the upper 0.75 inches.
    """
    figure = blank_figure(width, height, 160)
    with style():
        figure.suptitle(heading, x=left, y=1 - 0.2 / height, ha="left", fontsize=14, fontweight="bold", color=INK)
        below = figure.text(left, 1 - 0.6 / height, subtitle, fontsize=9.5, color=MUTED, ha="left")
        # A long subtitle gets smaller, until it fits.
        room = (0.95 - left) * figure.bbox.width
        below.set_fontsize(9.5 * min(1.0, room / max(1.0, below.get_window_extent().width)))
        yield figure


def title(axes: Axes, text: str) -> None:
    """Write a panel's title, to the left."""
    axes.set_title(text, loc="left", fontsize=10.5, color=INK, pad=7)


def log_axis(axes: Axes, values: Iterable[float]) -> None:
    """Set a log x axis over `values`, and some eight round ticks on the y axis."""
    positive = [value for value in values if value > 0]
    low, high = min(positive) / 1.18, max(positive) * 1.18
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    plain_log_ticks(axes.xaxis, low, high)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, steps=[1, 2, 5, 10]))


def plain_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Set few, plainly written ticks (0.05, 0.1, 0.2, …) on a log axis from `low` to `high`, never powers of ten."""
    ticks: list[float] = []
    # The coarsest steps in each decade that give four ticks.
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
                  tuple(1 + step / 20 for step in range(180))):
        ticks = [step * 10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
                 for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) >= 4:
            break
    shown = ticks[:: math.ceil(len(ticks) / 9)] or [math.sqrt(low * high)]
    axis.set_major_locator(matplotlib.ticker.FixedLocator(shown))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:.4g}"))


Line = tuple[tuple[float, float], tuple[float, float]]


def place_labels(axes: Axes, points: Sequence[tuple[float, float, str, str]], lines: Sequence[Line] = (),
                 marks: Sequence[tuple[float, float]] = (), fontsize: float = 8.2) -> list[Text]:
    """Put a label beside each point by textalloc, with a thin leader, off other points, lines and texts.

    Args:
        axes: The axes, with their final limits.
        points: x, y, text and colour, in data coordinates. A point with an empty text has no label; labels keep off
            it.
        lines: Lines that labels keep off.
        marks: Further points that labels keep off.
        fontsize: The size in points.

    Returns:
        The labels.
    """
    named = [point for point in points if point[2]]
    if not named:
        return []
    xs, ys, texts, colors = (list(values) for values in zip(*named, strict=True))
    obstacles = [(x, y) for x, y, *_ in points] + [*marks]
    to_data = axes.transData.inverted()
    for box in (text.get_window_extent() for text in axes.texts if text.get_text()):
        for across, up in product(range(6), range(3)):  # points in the texts that are in `axes`
            x, y = to_data.transform((box.x0 + across * box.width / 5, box.y0 + up * box.height / 2))
            obstacles.append((float(x), float(y)))
    _, _, labels, _ = textalloc.allocate(
        axes, xs, ys, texts, x_scatter=[x for x, _ in obstacles], y_scatter=[y for _, y in obstacles],
        x_lines=[[start[0], end[0]] for start, end in lines], y_lines=[[start[1], end[1]] for start, end in lines],
        textsize=fontsize, textcolor=colors, linecolor=colors, linewidth=0.6, margin=0.004, min_distance=0.012,
        avoid_label_lines_overlap=True, avoid_crossing_label_lines=True, zorder=5)
    return cast("list[Text]", labels)


def draw_arrow(axes: Axes, point: tuple[float, float], color: str, taken: Sequence[Line]) -> Line:
    """Draw an arrow at the edge of `axes` to a point outside.

    Args:
        axes: The axes, with their final limits.
        point: The point in data coordinates.
        color: The arrow's colour.
        taken: Other arrows. This one moves along the edge until it is clear of them.

    Returns:
        Its ends in data coordinates, the tip second.
    """
    # The direction in axes' coordinates (0 to 1), and the arrow's two ends at the edge.
    x, y = axes.transAxes.inverted().transform(axes.transData.transform(point))
    dx, dy = (float(value > 1) - float(value < 0) for value in (x, y))
    size = math.hypot(dx, dy)
    ahead = (0.035 * dx / size, 0.05 * dy / size)
    start = [min(max(float(value), 0.015), 0.985) - step for value, step in zip((x, y), ahead, strict=True)]
    # Move along the edge, and turn round near its end, until no other arrow starts close by.
    along, step = (1 if dx else 0), 0.06
    to_data = axes.transAxes + axes.transData.inverted()
    begins = [to_data.inverted().transform(other) for other, _ in taken]
    while any(math.dist(start, begin) < 0.05 for begin in begins):
        step = -step if start[along] + step > 0.95 else step
        start[along] += step
    tip = (start[0] + ahead[0], start[1] + ahead[1])
    axes.annotate("", tip, (start[0], start[1]), xycoords="axes fraction", textcoords="axes fraction",
                  arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.3, "mutation_scale": 11, "shrinkA": 0,
                              "shrinkB": 0})
    (x0, y0), (x1, y1) = to_data.transform([start, tip])
    return (float(x0), float(y0)), (float(x1), float(y1))


def draw_better(axes: Axes, points: Sequence[tuple[float, float]], color: str) -> None:
    """Draw an arrow to the upper left, in that corner or as far below it as keeps it off the points."""
    places = [axes.transAxes.inverted().transform(axes.transData.transform(point)) for point in points]
    free = (down for down in (0.0, 0.2, 0.4, 0.6, 0.8)
            if not any(x < 0.16 and 0.8 < y + down < 1.02 for x, y in places))
    down = next(free, 0.0)
    axes.annotate("", (0.015, 0.985 - down), (0.085, 0.885 - down), xycoords="axes fraction",
                  textcoords="axes fraction",
                  arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.6, "mutation_scale": 14})
    axes.text(0.092, 0.872 - down, "better", transform=axes.transAxes, color=color, fontsize=9.5, style="italic",
              va="top", ha="center")
