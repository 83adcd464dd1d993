"""What a benchmark found: as a readable block, as a table, and as a JSON file with every raw sample.

Format history of the JSON file
    1   first: model, target, host, runtime, input, reference, protocol, latency and load with raw samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.text import UNKNOWN, number, text_table
from hwnas.front.picture import BASELINE, FRONT
from hwnas.latency.load import Throughput
from hwnas.latency.measurement import P90_SAMPLES, P99_SAMPLES, Measurement, Protocol
from hwnas.pictures.style import MUTED, new_figure, title
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic
from hwnas.target.host import Host
from hwnas.target.target import Target

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

BENCHMARK = Document("hwnas-benchmark", 1, "a benchmark", "Measure again.", two_fields=True)
_NEEDED = {0.5: 1, 0.9: P90_SAMPLES, 0.99: P99_SAMPLES}


@dataclass(frozen=True, slots=True)
class Latency:
    """One batch: its samples and what was executed."""

    batch: int
    measurement: Measurement
    execution: Mapping[str, Any]

    @property
    def images_per_s(self) -> float:
        """One call after another."""
        return self.batch / self.measurement.latency_ms * 1e3


@dataclass(frozen=True, slots=True)
class Load:
    """One batch under load."""

    batch: int
    streams: int
    threads_each: int
    found: Throughput


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One run of the command. `made_up`: quantised here, with made-up ranges. `stored_quiet_ms`: of earlier runs."""

    model: str
    target: Target
    host: Host
    runtime: str
    seed: int
    made_up: bool
    stored_quiet_ms: float | None
    image: tuple[int, ...]
    overhead_ms: float
    latency: tuple[Latency, ...]
    load: tuple[Load, ...]
    raw: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any], **known: Any) -> Benchmark:
        """From the plain values that the task gives."""
        protocol = Protocol(**raw["protocol"])
        latency = tuple(Latency(one["batch"], Measurement.from_dict(one["measurement"], protocol, "measurement"),
                                one["execution"]) for one in raw["latency"])
        load = tuple(Load(one["batch"], one["streams"], one["threads_each"], Throughput.from_dict(one, protocol))
                     for one in raw["load"])
        return cls(image=tuple(raw["input"]["image"]), overhead_ms=raw["overhead_us"] / 1e3, latency=latency,
                   load=load, raw=raw, **known)

    @property
    def invalid(self) -> list[str]:
        """Why any of its numbers is INVALID."""
        latency = [f"batch {one.batch}: {one.measurement.reason}" for one in self.latency if not one.measurement.valid]
        return latency + [f"batch {one.batch}, {one.streams} in flight: {_load_reason(one.found)}"
                          for one in self.load if not one.found.windows.valid]

    def save(self, path: Path) -> None:
        """Write the JSON file: statistics for reading, raw samples to compute them again."""
        data = {
            **BENCHMARK.header, "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.model, "made_up_ranges": self.made_up, "target": asdict(self.target),
            "host": self.host.to_dict(), "runtime": self.runtime, "seed": self.seed, "input": self.raw["input"],
            "call_overhead_us": self.raw["overhead_us"], "protocol": self.raw["protocol"],
            "latency": [{**_statistics(one.measurement, one.batch), **raw}
                        for one, raw in zip(self.latency, self.raw["latency"], strict=True)],
            "load": [{"images_per_s": _number(one.found.images_per_s), "half_width": _number(one.found.half_width),
                      **_percentiles(one.found.windows), "reason": one.found.windows.reason, **raw}
                     for one, raw in zip(self.load, self.raw["load"], strict=True)]}
        write_atomic(path, json.dumps(data, allow_nan=False))


def _statistics(one: Measurement, batch: int) -> dict[str, Any]:
    return {"valid": one.valid, "reason": one.reason, "latency_ms": _number(one.latency_ms),
            "latency_ms_low": _number(one.latency_ms_low), "latency_ms_high": _number(one.latency_ms_high),
            "half_width": _number(one.half_width), **_percentiles(one),
            "images_per_s": _number(batch / one.latency_ms * 1e3)}


def _percentiles(one: Measurement) -> dict[str, float | None]:
    return {f"p{round(100 * q)}_ms": one.percentile_ms(q) if one.valid else None for q in _NEEDED}


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def lines(found: Benchmark) -> Iterator[str]:
    """The readable block, line by line."""
    for name, text in _facts(found):
        yield f"{name:<14} {text}"
    if len(found.latency) == 1:
        yield from (f"{name:<14} {text}" for name, text in _single(found.latency[0]))
    else:
        yield ""
        yield from _table(found)
    yield from (f"{name:<14} {text}" for one in found.load for name, text in _load(one, found))


def _facts(found: Benchmark) -> Iterator[tuple[str, str]]:
    target = found.target
    yield "model", found.model
    yield "input", ("×".join(map(str, found.image)) + " float32"
                    + (", quantised with made-up ranges (right for timing only)" if found.made_up else ""))
    yield "target", f"{target.name}: {target.precision} on {found.runtime}, {_count(target.threads, 'thread')}"
    yield "host", f"{found.host.name} ({found.host.cpu}, {_count(found.host.cores, 'core')} usable)"
    yield "executed", _executed(found.latency[0].execution)
    yield "call overhead", f"{found.overhead_ms * 1e3:.2f} µs (null runtime; contained in every time below)"


def _count(number: int, what: str) -> str:
    return f"every core as a {what}" if number == 0 else f"{number} {what}{'' if number == 1 else 's'}"


def _executed(execution: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(execution["precisions"].items()))
    share = execution["int8_share"]
    int8 = "" if share is None else f", int8 share {share:.1%}"
    return (f"{execution['precision']}{int8}, fallback {execution['fallback_share']:.1%} "
            f"(convolutions and matrix products: {counts or 'none'})")


def _single(one: Latency) -> Iterator[tuple[str, str]]:
    found = one.measurement
    yield "", ""
    yield "batch", str(one.batch)
    if found.valid:
        yield "latency", (f"{found.latency_ms:.4g} ms, 90 % interval {found.latency_ms_low:.4g} to "
                          f"{found.latency_ms_high:.4g} (median over turns of each turn's "
                          f"{100 * found.protocol.quantile:.0f}th percentile)")
        yield from _spread(found)
        yield "throughput", f"{one.images_per_s:.4g} images/s, one call after another"
    yield "noise", _noise(found)


def _spread(found: Measurement) -> Iterator[tuple[str, str]]:
    for q, needed in _NEEDED.items():
        value = found.percentile_ms(q)
        text = f"{UNKNOWN} (needs {needed} samples)" if value is None else f"{value:.4g} ms"
        yield f"p{round(100 * q)}", text


def _noise(found: Measurement) -> str:
    if not found.valid:
        return f"INVALID: {found.reason}"
    goal = found.protocol.half_width
    reached = "reached" if found.half_width <= goal else "NOT reached within the time"
    return (f"valid: {len(found.values_ms)} of {len(found.turns)} turns quiet; half-width {found.half_width:.1%} "
            f"(goal {goal:.0%}: {reached}); {_wandered(found)}")


def _wandered(found: Measurement) -> str:
    beside = [turn.reference_ms for turn in found.turns]
    above = max(beside) / found.quiet_ms - 1
    return (f"reference beside it {min(beside):.4g} to {max(beside):.4g} ms "
            f"(quiet {found.quiet_ms:.4g}, worst {above:+.1%})")


def _table(found: Benchmark) -> Iterator[str]:
    head = ("batch", "latency ms", "90 % interval", "p50", "p90", "p99", "images/s", "int8", "noise")
    rows = [head, *(_row(one) for one in found.latency)]
    yield from text_table(rows, words=[len(head) - 1])
    lacking = [q for q in _NEEDED if any(one.measurement.valid and one.measurement.percentile_ms(q) is None
                                         for one in found.latency)]
    if lacking:
        yield f"{UNKNOWN}: " + ", ".join(f"p{round(100 * q)} needs {_NEEDED[q]} samples" for q in lacking)
    valid = [one.measurement for one in found.latency if one.measurement.valid]
    if valid:
        yield _wandered(max(valid, key=lambda one: max(turn.reference_ms for turn in one.turns)))


def _row(one: Latency) -> tuple[str, ...]:
    found, share = one.measurement, one.execution["int8_share"]
    int8 = number(share, ".0%")
    if not found.valid:
        return (str(one.batch), *[UNKNOWN] * 6, int8, f"INVALID: {found.reason}")
    spread = [number(found.percentile_ms(q), ".4g") for q in _NEEDED]
    goal = found.protocol.half_width
    reached = "" if found.half_width <= goal else f", goal {goal:.0%} not reached"
    return (str(one.batch), f"{found.latency_ms:.4g}", f"{found.latency_ms_low:.4g} to {found.latency_ms_high:.4g}",
            *spread, f"{one.images_per_s:.4g}", int8, f"valid, ±{found.half_width:.1%}{reached}")


def _load(one: Load, benchmark: Benchmark) -> Iterator[tuple[str, str]]:
    found, windows = one.found, one.found.windows
    yield "", ""
    yield "in flight", (f"{_count(one.streams, 'request')}, batch {one.batch}: {_count(one.streams, 'instance')} of "
                        f"the network with {_count(one.threads_each, 'thread')} each on "
                        f"{_count(benchmark.host.cores, 'usable core')}")
    if windows.valid:
        width = found.half_width * found.images_per_s
        yield "throughput", (f"{found.images_per_s:.4g} images/s, 90 % interval {found.images_per_s - width:.4g} to "
                             f"{found.images_per_s + width:.4g} (median over windows)")
        yield from ((f"{name} in flight", text) for name, text in _spread(windows))
    yield "noise", _load_noise(found)


def _load_reason(found: Throughput) -> str:
    return found.windows.reason_in("windows", "cores taken by others")


def _load_noise(found: Throughput) -> str:
    windows = found.windows
    if not windows.valid:
        return f"INVALID: {_load_reason(found)}"
    goal = windows.protocol.half_width
    reached = "reached" if found.half_width <= goal else "NOT reached within the time"
    return (f"valid: {len(found.values)} of {len(windows.turns)} windows quiet; half-width {found.half_width:.1%} "
            f"(goal {goal:.0%}: {reached}); {_wandered(windows)}")
