"""The results of a benchmark: as a readable block, as a table, and as a JSON file with every raw sample.

Format history of the JSON file
    1   first: model, target, host, runtime, input, reference, protocol, latency and load with raw samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.progress import UNKNOWN, number, text_table
from hwnas.front.picture import BASELINE, FRONT
from hwnas.latency.harness import Throughput
from hwnas.latency.measurement import P90_SAMPLES, P99_SAMPLES, Measurement, Protocol
from hwnas.lazy import LazyModule
from hwnas.pictures import MUTED, new_figure, title
from hwnas.system.documents import Document, now
from hwnas.system.gpu import GpuState
from hwnas.system.paths import write_atomic
from hwnas.target import Host, Target

if TYPE_CHECKING:
    import matplotlib.colors
    import matplotlib.ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    matplotlib = LazyModule("matplotlib")


def curve_figure(benchmark: Benchmark, date: str) -> Figure:
    """Latency of one call and images/s, against what there are several of (batches, or threads and streams); and, of
    several loads, images/s against the p99 that they cost."""
    image = "×".join(map(str, benchmark.image))
    where = f"measured on {benchmark.host.name} · {benchmark.runtime} · input {image} · {date}"
    valid = [latency for latency in benchmark.latency if latency.measurement.valid]
    loads = [load for load in benchmark.load if load.throughput.windows.valid]
    panels = 3 if len(benchmark.load) > 1 else 2
    with new_figure(4.9 * panels + 0.7, 4.6, f"{_short(benchmark.model)} on {benchmark.target.name}: curves", where,
                    left=0.07) as figure:
        axes = figure.subplots(1, panels)
        figure.subplots_adjust(left=0.2 / panels - 0.03, right=0.985, top=0.79, bottom=0.125, wspace=0.2)
        batches = [latency.batch for latency in benchmark.latency]
        _draw_latency(axes[0], valid, batches)
        _draw_throughput(axes[1], valid, loads, batches)
        if panels > 2:
            _draw_cost(axes[2], loads)
    return figure


def _short(model: str) -> str:
    return model if len(model) <= 48 else f"…{model[-47:]}"


def _draw_latency(axes: Axes, valid: Sequence[Latency], batches: Sequence[int]) -> None:
    title(axes, "Latency of one call (bars: 90 % interval)")
    axes.set_ylabel("ms")
    if not valid:
        _nothing(axes)
        return
    by_threads = sorted({latency.threads for latency in valid})
    if len({*batches}) == 1:
        _draw_line(axes, [(latency.threads, latency.measurement.latency_ms, latency.measurement.half_width)
                          for latency in valid], FRONT, "o", f"batch {batches[0]}")
        _log_axis(axes, by_threads, "threads (log scale; 0: all)")
    else:
        first = [latency for latency in valid if latency.threads == by_threads[0]]
        each_ms = first[0].measurement.latency_ms / first[0].batch
        low, high = first[0].batch, max(batches)
        fine = [low * (high / low) ** (step / 100) for step in range(101)]
        axes.plot(fine, [each_ms * batch for batch in fine], color=MUTED, lw=1.0, ls=(0, (4, 3)),
                  label=f"were every image as slow as in batch {low}")
        for threads, color in zip(by_threads, _shades(len(by_threads)), strict=True):
            _draw_line(axes, [(latency.batch, latency.measurement.latency_ms, latency.measurement.half_width)
                              for latency in valid if latency.threads == threads], color, "o",
                       "measured" if len(by_threads) == 1 else _count(threads, "thread"))
        _log_axis(axes, batches, "batch (log scale)")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.legend(loc="best", frameon=False, fontsize=8.5)


def _draw_throughput(axes: Axes, valid: Sequence[Latency], loads: Sequence[Load], batches: Sequence[int]) -> None:
    title(axes, "Throughput")
    axes.set_ylabel("images/s")
    if not valid and not loads:
        _nothing(axes)
        return
    streams = sorted({load.streams for load in loads})
    if len({*batches}) == 1 and len(streams) > 1:
        _draw_line(axes, [(load.streams, load.throughput.images_per_s, load.throughput.half_width) for load in loads],
                   BASELINE, "D", f"under load, batch {batches[0]}")
        _log_axis(axes, streams, "requests in flight (log scale)")
    else:
        threads = min((latency.threads for latency in valid), default=0)
        _draw_line(axes, [(latency.batch, latency.images_per_s, latency.measurement.half_width) for latency in valid
                          if latency.threads == threads], FRONT, "o", "one call after another")
        for number_of, color in zip(streams, _shades(len(streams), BASELINE), strict=True):
            _draw_line(axes, [(load.batch, load.throughput.images_per_s, load.throughput.half_width) for load in loads
                              if load.streams == number_of], color, "D", f"{number_of} in flight")
        _log_axis(axes, batches, "batch (log scale)")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.legend(loc="lower right", frameon=False, fontsize=8.5)


def _draw_cost(axes: Axes, loads: Sequence[Load]) -> None:
    title(axes, "What throughput costs")
    axes.set_xlabel("99 of 100 calls within (ms)")
    axes.set_ylabel("images/s")
    shown = [(p99, load) for load in loads if (p99 := load.throughput.windows.percentile_ms(0.99)) is not None]
    if not shown:
        _nothing(axes)
        return
    full = saturation([load for _, load in shown])
    for p99, load in shown:
        rate = load.throughput.images_per_s
        axes.errorbar([p99], [rate], yerr=[rate * load.throughput.half_width], fmt="D", ms=5, capsize=2.5,
                      color=FRONT if load is full else BASELINE)
        axes.annotate(f"{load.batch}×{load.streams}", (p99, rate), textcoords="offset points", xytext=(5, 4),
                      fontsize=8.5, color=MUTED)
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.plot([], [], "D", ms=5, color=FRONT, label="saturated from here on (batch × in flight)")
    axes.legend(loc="lower right", frameon=False, fontsize=8.5)


def _draw_line(axes: Axes, points: Sequence[tuple[float, float, float]], color: Any, marker: str, label: str) -> None:
    """Points (x, y, half-width as a share of y), joined from left to right."""
    points = sorted(points)
    axes.errorbar([x for x, _, _ in points], [y for _, y, _ in points], yerr=[y * half for _, y, half in points],
                  color=color, marker=marker, ms=5, lw=1.5, elinewidth=1.2, capsize=2.5, label=label)


def _shades(n: int, color: str = FRONT) -> list[Any]:
    """So many shades of a colour, the last one full."""
    return [matplotlib.colors.to_rgba(color, alpha) for alpha in np.linspace(1 if n == 1 else 0.35, 1, max(1, n))][:n]


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no valid measurement", transform=axes.transAxes, ha="center", color=MUTED)


def _log_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    axes.set_xlabel(label)
    if min(values) > 0:
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(values) / 1.15, max(values) * 1.15)
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(sorted({*values})))
    axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())


SATURATED = 0.95  # of the most images/s that were measured


def saturation(loads: Sequence[Load]) -> Load | None:
    """The load from which on the machine gives no more: of those with SATURATED of the most images/s, the one with the
    least p99. None where there are fewer than two to compare."""
    timed = [(load, p99) for load in loads if load.throughput.windows.valid
             and (p99 := load.throughput.windows.percentile_ms(0.99)) is not None]
    if len(timed) < 2:
        return None
    most = max(load.throughput.images_per_s for load, _ in timed)
    return min((pair for pair in timed if pair[0].throughput.images_per_s >= SATURATED * most),
               key=lambda pair: pair[1])[0]


BENCHMARK = Document("hwnas-benchmark", 1, "a benchmark", "Measure again.", two_fields=True)
_NEEDED = {0.5: 1, 0.9: P90_SAMPLES, 0.99: P99_SAMPLES}


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of a batch size on so many threads (0: all): its samples and what was executed."""

    batch: int
    threads: int
    measurement: Measurement
    execution: Mapping[str, Any]

    @property
    def images_per_s(self) -> float:
        """Throughput with one call after another."""
        return self.batch / self.measurement.latency_ms * 1e3


@dataclass(frozen=True, slots=True)
class Load:
    """The throughput of a batch size under load."""

    batch: int
    streams: int
    threads_each: int
    throughput: Throughput


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A run of the command. `made_up`: quantised here, with made-up ranges. `stored_quiet_ms` is from earlier runs."""

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
        """Make it from the plain values that the task returns."""
        protocol = Protocol(**raw["protocol"])
        latency = tuple(Latency(row["batch"], row["threads"], Measurement.from_dict(
            row["measurement"], protocol, "measurement"), row["execution"]) for row in raw["latency"])
        load = tuple(Load(row["batch"], row["streams"], row["threads_each"], Throughput.from_dict(row, protocol))
                     for row in raw["load"])
        return cls(image=tuple(raw["input"]["image"]), overhead_ms=raw["overhead_us"] / 1e3, latency=latency,
                   load=load, raw=raw, **known)

    @property
    def invalid(self) -> list[str]:
        """The reasons why numbers are INVALID; empty if all are valid."""
        several = len({point.threads for point in self.latency}) > 1
        latency = [f"batch {point.batch}{f', {point.threads} threads' * several}: {point.measurement.reason}"
                   for point in self.latency
                   if not point.measurement.valid]
        return latency + [f"batch {point.batch}, {point.streams} in flight: {_load_reason(point.throughput)}"
                          for point in self.load if not point.throughput.windows.valid]

    def save(self, path: Path) -> None:
        """Write the JSON file: statistics to read, and raw samples to compute them again."""
        data = {
            **BENCHMARK.header, "created": now(),
            "model": self.model, "made_up_ranges": self.made_up, "target": asdict(self.target),
            "host": self.host.to_dict(), "runtime": self.runtime, "seed": self.seed, "input": self.raw["input"],
            "call_overhead_us": self.raw["overhead_us"], "protocol": self.raw["protocol"],
            "latency": [{**_statistics(latency.measurement, latency.batch), **raw}
                        for latency, raw in zip(self.latency, self.raw["latency"], strict=True)],
            "load": [{"images_per_s": _number(load.throughput.images_per_s),
                      "half_width": _number(load.throughput.half_width),
                      **_percentiles(load.throughput.windows), "reason": load.throughput.windows.reason, **raw}
                     for load, raw in zip(self.load, self.raw["load"], strict=True)]}
        write_atomic(path, json.dumps(data, allow_nan=False))


def _statistics(measurement: Measurement, batch: int) -> dict[str, Any]:
    return {"valid": measurement.valid, "reason": measurement.reason, "latency_ms": _number(measurement.latency_ms),
            "latency_ms_low": _number(measurement.latency_ms_low),
            "latency_ms_high": _number(measurement.latency_ms_high),
            "half_width": _number(measurement.half_width), **_percentiles(measurement),
            "images_per_s": _number(batch / measurement.latency_ms * 1e3)}


def _percentiles(measurement: Measurement) -> dict[str, float | None]:
    return {f"p{round(100 * q)}_ms": measurement.percentile_ms(q) if measurement.valid else None for q in _NEEDED}


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def lines(benchmark: Benchmark) -> Iterator[str]:
    """The readable block, line by line."""
    for name, text in _facts(benchmark):
        yield f"{name:<14} {text}"
    if len(benchmark.latency) == 1:
        yield from (f"{name:<14} {text}" for name, text in _single(benchmark.latency[0]))
    else:
        yield ""
        yield from _table(benchmark)
    yield from (f"{name:<14} {text}" for load in benchmark.load for name, text in _load(load, benchmark))
    if (full := saturation(benchmark.load)) is not None:
        yield ""
        yield f"{'saturated':<14} {_describe_saturation(full, benchmark.load)}"


def _describe_saturation(full: Load, loads: Sequence[Load]) -> str:
    most = max(load.throughput.images_per_s for load in loads if load.throughput.windows.valid)
    rate, p99 = full.throughput.images_per_s, full.throughput.windows.percentile_ms(0.99)
    largest = full.batch == max(load.batch for load in loads) and full.streams == max(load.streams for load in loads)
    beyond = "; larger loads, which were not measured, may give more" if largest else ""
    return (f"from batch {full.batch} with {full.streams} in flight on: {rate:.4g} images/s, {rate / most:.0%} of the "
            f"most, 99 of 100 calls within {p99:.4g} ms{beyond}")


def _facts(benchmark: Benchmark) -> Iterator[tuple[str, str]]:
    target = benchmark.target
    yield "model", benchmark.model
    yield "input", ("×".join(map(str, benchmark.image)) + " float32"
                    + (", quantised with made-up ranges (right for timing only)" if benchmark.made_up else ""))
    threads = sorted({latency.threads for latency in benchmark.latency})
    on = _count(threads[0], "thread") if len(threads) == 1 else f"threads {', '.join(map(str, threads))}"
    yield "target", f"{target.name}: {target.precision} on {benchmark.runtime}, {on}"
    yield "host", f"{benchmark.host.name} ({benchmark.host.cpu}, {_count(benchmark.host.cores, 'core')} usable)"
    yield "executed", _describe_execution(benchmark.latency[0].execution)
    yield "call overhead", f"{benchmark.overhead_ms * 1e3:.2f} µs (null runtime; contained in every time below)"


def _count(number: int, what: str) -> str:
    return f"every core as a {what}" if number == 0 else f"{number} {what}{'' if number == 1 else 's'}"


def _describe_execution(execution: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(execution["precisions"].items()))
    share = execution["int8_share"]
    int8 = "" if share is None else f", int8 share {share:.1%}"
    return (f"{execution['precision']}{int8}, fallback {execution['fallback_share']:.1%} "
            f"(convolutions and matrix products: {counts or 'none'}){_outside(execution.get('outside') or {})}")


def _outside(nodes: Mapping[str, int]) -> str:
    """What the runtime's fast kernels left to others."""
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(nodes.items()))
    return f"; left to other kernels: {named}" if named else ""


def _single(latency: Latency) -> Iterator[tuple[str, str]]:
    measurement = latency.measurement
    yield "", ""
    yield "batch", str(latency.batch)
    if measurement.valid:
        yield "latency", (f"{measurement.latency_ms:.4g} ms, 90 % interval {measurement.latency_ms_low:.4g} to "
                          f"{measurement.latency_ms_high:.4g} (median over turns of each turn's "
                          f"{100 * measurement.protocol.quantile:.0f}th percentile)")
        yield from _spread(measurement)
        yield "throughput", f"{latency.images_per_s:.4g} images/s, one call after another"
    yield "noise", _noise(measurement)
    if states := [turn.gpu for turn in measurement.turns if turn.gpu]:
        yield "GPU", describe_states(states)


def describe_states(states: Sequence[GpuState]) -> str:
    """The condition of a GPU during a measurement, in one line."""
    clocks, held = [state.sm_mhz for state in states], sorted({state.told for state in states if state.told})
    return (f"clock {min(clocks)} to {max(clocks)} MHz, up to {max(state.celsius for state in states)} °C"
            f"{', held down by ' + '; '.join(held) if held else ''}")


def _spread(measurement: Measurement) -> Iterator[tuple[str, str]]:
    for q, needed in _NEEDED.items():
        value = measurement.percentile_ms(q)
        text = f"{UNKNOWN} (needs {needed} samples)" if value is None else f"{value:.4g} ms"
        yield f"p{round(100 * q)}", text


def _noise(measurement: Measurement) -> str:
    if not measurement.valid:
        return f"INVALID: {measurement.reason}"
    goal = measurement.protocol.half_width
    reached = "reached" if measurement.half_width <= goal else "NOT reached within the time"
    return (f"valid: {len(measurement.values_ms)} of {len(measurement.turns)} turns quiet; "
            f"half-width {measurement.half_width:.1%} (goal {goal:.0%}: {reached}); {_describe_drift(measurement)}")


def _describe_drift(measurement: Measurement) -> str:
    beside = [turn.reference_ms for turn in measurement.turns]
    above = max(beside) / measurement.quiet_ms - 1
    return (f"reference beside it {min(beside):.4g} to {max(beside):.4g} ms "
            f"(quiet {measurement.quiet_ms:.4g}, worst {above:+.1%})")


def _table(benchmark: Benchmark) -> Iterator[str]:
    several = len({latency.threads for latency in benchmark.latency}) > 1
    head = ("batch", *("threads",) * several, "latency ms", "90 % interval", "p50", "p90", "p99", "images/s", "int8",
            "noise")
    rows = [head, *(_row(latency, several) for latency in benchmark.latency)]
    yield from text_table(rows, words=[len(head) - 1])
    lacking = [q for q in _NEEDED if any(latency.measurement.valid and latency.measurement.percentile_ms(q) is None
                                         for latency in benchmark.latency)]
    if lacking:
        yield f"{UNKNOWN}: " + ", ".join(f"p{round(100 * q)} needs {_NEEDED[q]} samples" for q in lacking)
    valid = [latency.measurement for latency in benchmark.latency if latency.measurement.valid]
    if valid:
        yield _describe_drift(max(valid, key=lambda measurement: max(turn.reference_ms for turn in measurement.turns)))


def _row(latency: Latency, several: bool) -> tuple[str, ...]:
    first = (str(latency.batch), *(str(latency.threads),) * several)
    measurement, share = latency.measurement, latency.execution["int8_share"]
    int8 = number(share, ".0%")
    if not measurement.valid:
        return (*first, *[UNKNOWN] * 6, int8, f"INVALID: {measurement.reason}")
    spread = [number(measurement.percentile_ms(q), ".4g") for q in _NEEDED]
    goal = measurement.protocol.half_width
    reached = "" if measurement.half_width <= goal else f", goal {goal:.0%} not reached"
    return (*first, f"{measurement.latency_ms:.4g}",
            f"{measurement.latency_ms_low:.4g} to {measurement.latency_ms_high:.4g}", *spread,
            f"{latency.images_per_s:.4g}", int8, f"valid, ±{measurement.half_width:.1%}{reached}")


def _load(load: Load, benchmark: Benchmark) -> Iterator[tuple[str, str]]:
    throughput, windows = load.throughput, load.throughput.windows
    yield "", ""
    yield "in flight", (f"{_count(load.streams, 'request')}, batch {load.batch}: {_count(load.streams, 'instance')} of "
                        f"the network with {_count(load.threads_each, 'thread')} each on "
                        f"{_count(benchmark.host.cores, 'usable core')}")
    if windows.valid:
        width = throughput.half_width * throughput.images_per_s
        yield "throughput", (f"{throughput.images_per_s:.4g} images/s, "
                             f"90 % interval {throughput.images_per_s - width:.4g} to "
                             f"{throughput.images_per_s + width:.4g} (median over windows)")
        yield from ((f"{name} in flight", text) for name, text in _spread(windows))
    yield "noise", _load_noise(throughput)


def _load_reason(throughput: Throughput) -> str:
    return throughput.windows.reason_in("windows", "cores taken by others")


def _load_noise(throughput: Throughput) -> str:
    windows = throughput.windows
    if not windows.valid:
        return f"INVALID: {_load_reason(throughput)}"
    goal = windows.protocol.half_width
    reached = "reached" if throughput.half_width <= goal else "NOT reached within the time"
    return (f"valid: {len(throughput.values)} of {len(windows.turns)} windows quiet; "
            f"half-width {throughput.half_width:.1%} (goal {goal:.0%}: {reached}); {_describe_drift(windows)}")
