"""What every picture shares: colours, title block, ticks, labels, and a figure as PNG or SVG bytes.

Labels stand beside points: each is put where it covers least, with a thin leader where it had to move away. Knows no
word of the domain.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from hwnas.lazy import matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


INK, MUTED, GRID = "#1c2430", "#667085", "#e4e7ec"


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """The picture as `png` or `svg`; equal figures give equal bytes."""
    out = io.BytesIO()
    metadata = {"Date": None, "Creator": "hwnas"} if kind == "svg" else {"Software": "hwnas"}
    with matplotlib.rc_context({"svg.hashsalt": "hwnas", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def style() -> Any:
    """The look of every picture, as a context."""
    return matplotlib.rc_context({
        "font.family": "DejaVu Sans", "font.size": 9.5, "axes.edgecolor": "#98a2b3", "axes.labelcolor": INK,
        "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
        "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True})


def blank_figure(width: float, height: float, dpi: int = 150) -> matplotlib.figure.Figure:
    """An empty figure, sized in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    figure = matplotlib.figure.Figure(figsize=(width, height), dpi=dpi, facecolor="white")
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
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, steps=[1, 2, 5, 10]))


def log_axis(axes: Axes, values: Iterable[float]) -> None:
    """Log axis over `values`."""
    positive = [value for value in values if value > 0]
    low, high = min(positive) / 1.18, max(positive) * 1.18
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    plain_log_ticks(axes.xaxis, low, high)


def plain_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Few, plainly written ticks (0.05, 0.1, 0.2, …) on a log axis from `low` to `high`, never powers of ten."""
    ticks: list[float] = []
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


_ANGLES = (35, 145, -35, -145, 90, -90, 0, 180, 60, 120, -60, -120, 15, 165, -15, -165)
_RADII = (9, 15, 24, 36, 50, 68, 90)  # points


Line = tuple[tuple[float, float], tuple[float, float]]


class Box(NamedTuple):
    """A rectangle in pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: Box) -> float:
        """Shared area in square pixels."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        return width * height if width > 0 and height > 0 else 0.0

    @property
    def area(self) -> float:
        """Its size in square pixels."""
        return (self.x1 - self.x0) * (self.y1 - self.y0)


def place_labels(axes: Axes, points: Sequence[tuple[float, float, str, str]], lines: Sequence[Line] = (),
                 marks: Sequence[tuple[float, float]] = (), fontsize: float = 8.2) -> list[Box]:
    """Annotate (x, y, text, color) points of `axes`, off `lines` and `marks` without a label (data coordinates).

    The most crowded point comes first. Each label takes the nearest of 112 places that covers no point, text, line of
    the legend or border. Where every place covers something, the label takes the place that covers least. A label that
    is far from its point, or near another one too, gets a thin leader.

    Returns:
        Boxes of the labels in pixels.
    """
    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    scale = figure.dpi / 72
    pixels = [_pixel(axes, (x, y)) for x, y, _, _ in points]
    all_pixels = pixels + [_pixel(axes, mark) for mark in marks]
    taken = [Box(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in all_pixels]
    taken += [Box(*item.get_window_extent(renderer).extents) for item in (axes.get_legend(), *axes.texts) if item]
    inside = Box(*axes.get_window_extent(renderer).extents)
    crossed = [(_pixel(axes, start), _pixel(axes, end)) for start, end in lines]
    placed: dict[int, Box] = {}
    for index in _crowded_first(pixels):
        _, _, text, color = points[index]
        width, height = _extent(axes, text, fontsize)
        spots = list(_spots(pixels[index], width, height, scale))
        obstacles = [*taken, *placed.values()]
        others = [other for other in all_pixels if other != pixels[index]]
        at, box = min(spots, key=lambda spot: (
            _cost(spot[1], obstacles, inside, crossed) + _leader_cost(pixels[index], spot[0], crossed)
            + 40 * scale * _is_ambiguous(spot[1], pixels[index], others, scale)))
        placed[index] = box
        far = math.dist(at, pixels[index]) > 18 * scale or _is_ambiguous(box, pixels[index], others, scale)
        if far:
            crossed.append((pixels[index], at))
        offset = ((box.x0 - pixels[index][0]) / scale, (box.y0 - pixels[index][1]) / scale)
        axes.annotate(text, points[index][:2], offset, textcoords="offset points", color=color, fontsize=fontsize,
                      ha="left", va="bottom", zorder=5, annotation_clip=False)
        if far:
            axes.annotate("", points[index][:2], ((at[0] - pixels[index][0]) / scale,
                          (at[1] - pixels[index][1]) / scale), textcoords="offset points", zorder=1.5,
                          arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.6,
                                      "shrinkA": 0, "shrinkB": 3})
    return [placed[index] for index in range(len(points))]


def _pixel(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    x, y = axes.transData.transform(point)
    return float(x), float(y)


def _crowded_first(pixels: Sequence[tuple[float, float]]) -> list[int]:
    def room(index: int) -> float:
        others = sorted(math.dist(pixels[index], other) for at, other in enumerate(pixels) if at != index)
        return sum(others[:3])

    return sorted(range(len(pixels)), key=room)


def _extent(axes: Axes, text: str, fontsize: float) -> tuple[float, float]:
    """Width and height of a text in pixels."""
    figure = axes.figure
    item = figure.text(0, 0, text, fontsize=fontsize)
    box = item.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    item.remove()
    return float(box.width), float(box.height)


def _spots(point: tuple[float, float], width: float, height: float,
           scale: float) -> Iterator[tuple[tuple[float, float], Box]]:
    """Places around a point, nearest first: (end of the leader, box of the text)."""
    for radius in _RADII:
        for angle in _ANGLES:
            dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            x, y = point[0] + radius * scale * dx, point[1] + radius * scale * dy
            left = x if dx > 0.2 else x - width if dx < -0.2 else x - width / 2
            bottom = y if dy > 0.6 else y - height if dy < -0.6 else y - height / 2
            yield (x, y), Box(left, bottom, left + width, bottom + height)


def _cost(box: Box, taken: Sequence[Box], inside: Box, lines: Sequence[Line]) -> float:
    """Square pixels that a label covers. What lies outside the axes counts triple; a line through the text counts
    its length there."""
    wide = Box(box.x0 - 2, box.y0 - 2, box.x1 + 2, box.y1 + 2)
    cost = sum(wide.overlap(other) for other in taken) + 3 * (box.area - box.overlap(inside))
    return cost + sum(20 + 4 * _length_inside(line, wide) for line in lines if _length_inside(line, wide))


def _is_ambiguous(box: Box, own: tuple[float, float], others: Sequence[tuple[float, float]], scale: float) -> bool:
    """Whether a label is about as near to another point as to its own."""
    def apart(point: tuple[float, float]) -> float:
        x, y = point
        return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))

    return any(apart(other) < 1.3 * apart(own) + 5 * scale for other in others)


def _leader_cost(point: tuple[float, float], end: tuple[float, float], lines: Sequence[Line]) -> float:
    """A far label costs more than a near one. A leader that crosses lines or other leaders costs more still."""
    reach = Box(min(point[0], end[0]), min(point[1], end[1]), max(point[0], end[0]), max(point[1], end[1]))
    return 1.2 * math.dist(point, end) + sum(25 for line in lines if point not in line and _length_inside(line, reach))


def _length_inside(line: Line, box: Box) -> float:
    """How much of a line lies in a box (Liang and Barsky's clipping)."""
    (x0, y0), (x1, y1) = line
    enter, leave = 0.0, 1.0
    for step, low, high, start in ((x1 - x0, box.x0, box.x1, x0), (y1 - y0, box.y0, box.y1, y0)):
        if step == 0:
            if not low < start < high:
                return 0.0
            continue
        first, last = sorted(((low - start) / step, (high - start) / step))
        enter, leave = max(enter, first), min(leave, last)
    return max(0.0, leave - enter) * math.dist(*line)


def draw_arrow(axes: Axes, point: tuple[float, float], color: str, taken: Sequence[tuple[float, float]]
               ) -> tuple[float, float]:
    """Draw an arrow at the edge of `axes` to a point outside of them.

    Args:
        axes: With their final limits.
        point: In data coordinates.
        color: Of the arrow.
        taken: Tips of the arrows that are there. This one moves along the edge until it is clear of them.

    Returns:
        Its tip, as shares of the axes.
    """
    x, y = axes.transAxes.inverted().transform(axes.transData.transform(point))
    dx, dy = (float(value > 1) - float(value < 0) for value in (x, y))
    tip = [min(max(float(value), 0.015), 0.985) for value in (x, y)]
    along = 1 if dx else 0
    step = 0.06
    while any(math.dist(tip, other) < 0.05 for other in taken):
        step = -step if tip[along] + step > 1 else step
        tip[along] += step
    size = math.hypot(dx, dy)
    end = (tip[0], tip[1])
    axes.annotate("", end, (tip[0] - 0.035 * dx / size, tip[1] - 0.05 * dy / size), xycoords="axes fraction",
                  textcoords="axes fraction",
                  arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.3, "mutation_scale": 11, "shrinkA": 0,
                              "shrinkB": 0})
    return end


def draw_better(axes: Axes, points: Sequence[tuple[float, float]], color: str) -> None:
    """An arrow to the upper left. It stands in that corner, or as far below it as keeps it off the points."""
    places = [axes.transAxes.inverted().transform(axes.transData.transform(point)) for point in points]
    free = (down for down in (0.0, 0.2, 0.4, 0.6, 0.8)
            if not any(x < 0.16 and 0.8 < y + down < 1.02 for x, y in places))
    down = next(free, 0.0)
    axes.annotate("", (0.015, 0.985 - down), (0.085, 0.885 - down), xycoords="axes fraction",
                  textcoords="axes fraction",
                  arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.6, "mutation_scale": 14})
    axes.text(0.092, 0.872 - down, "better", transform=axes.transAxes, color=color, fontsize=9.5, style="italic",
              va="top", ha="center")
