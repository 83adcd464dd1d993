"""The picture of the batch curve: latency and images/s against the batch, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hwnas.benchmark.report import Benchmark, Latency, Load
from hwnas.front.picture import BASELINE, FRONT
from hwnas.pictures.style import MUTED, new_figure, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def batch_figure(found: Benchmark, date: str) -> Figure:
    """Left: latency of one batch. Right: images/s, one call after another and, where it was measured, under load."""
    image = "×".join(map(str, found.image))
    with new_figure(10.5, 4.6, f"{_short(found.model)} on {found.target.name}: batch curve",
                    f"measured on {found.host.name} · {found.runtime} · input {image} · {date}", left=0.07) as figure:
        left, right = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.07, right=0.985, top=0.79, bottom=0.125, wspace=0.2)
        valid = [one for one in found.latency if one.measurement.valid]
        _draw_latency(left, valid)
        _draw_throughput(right, valid, [one for one in found.load if one.found.windows.valid])
        for axes in (left, right):
            _batch_axis(axes, [one.batch for one in found.latency])
    return figure


def _short(model: str) -> str:
    return model if len(model) <= 48 else f"…{model[-47:]}"


def _draw_latency(axes: Axes, valid: Sequence[Latency]) -> None:
    title(axes, "Latency of one batch (bars: 90 % interval)")
    axes.set_ylabel("ms")
    if not valid:
        _nothing(axes)
        return
    batches = [one.batch for one in valid]
    ms = [one.measurement.latency_ms for one in valid]
    errors = [one.measurement.latency_ms - one.measurement.latency_ms_low for one in valid]
    fine = [batches[0] * (batches[-1] / batches[0]) ** (step / 100) for step in range(101)]
    axes.plot(fine, [ms[0] * batch / batches[0] for batch in fine], color=MUTED, lw=1.0, ls=(0, (4, 3)),
              label=f"were every image as slow as in batch {batches[0]}")
    axes.errorbar(batches, ms, yerr=errors, color=FRONT, marker="o", ms=5.5, lw=1.5, elinewidth=1.2, capsize=2.5,
                  label="measured")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.legend(loc="upper left", frameon=False, fontsize=8.5)


def _draw_throughput(axes: Axes, valid: Sequence[Latency], loads: Sequence[Load]) -> None:
    title(axes, "Throughput")
    axes.set_ylabel("images/s")
    if not valid and not loads:
        _nothing(axes)
        return
    if valid:
        rates = [one.images_per_s for one in valid]
        axes.errorbar([one.batch for one in valid], rates, color=FRONT, marker="o", ms=5.5, lw=1.5, elinewidth=1.2,
                      yerr=[rate * one.measurement.half_width for rate, one in zip(rates, valid, strict=True)],
                      capsize=2.5, label="one call after another")
    if loads:
        axes.errorbar([one.batch for one in loads], [one.found.images_per_s for one in loads], color=BASELINE,
                      marker="D", ms=5, lw=1.5, elinewidth=1.2, capsize=2.5,
                      yerr=[one.found.images_per_s * one.found.half_width for one in loads],
                      label=f"{loads[0].streams} in flight")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.legend(loc="lower right", frameon=False, fontsize=8.5)


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no valid measurement", transform=axes.transAxes, ha="center", color=MUTED)


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    axes.set_xlabel("batch (log scale)")
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(batches) / 1.15, max(batches) * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(sorted(batches)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
