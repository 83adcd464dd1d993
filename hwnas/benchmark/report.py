"""The results of a benchmark: as a readable block, as a table, and as a JSON file with every raw sample.

Format history of the JSON file
    1   first: model, target, host, runtime, input, reference, protocol, latency and load with raw samples.
    2   latency is that of the quiet machine, with the conditions of the run; no load (`hwnas choose` measures it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.progress import UNKNOWN, number, text_table
from hwnas.front.picture import FRONT
from hwnas.latency.measurement import P90_SAMPLES, P99_SAMPLES, Measurement, Protocol, describe_machine
from hwnas.pictures import MUTED, new_figure, title
from hwnas.system.documents import Document, now
from hwnas.system.gpu import GpuState
from hwnas.system.paths import write_atomic
from hwnas.target import Host, Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curve_figure(benchmark: Benchmark, date: str) -> Figure:
    """Draw the latency of one call against what there are several of (batches or threads), with 90 % intervals."""
    image = "×".join(map(str, benchmark.image))
    where = f"measured on {benchmark.host.name} · {benchmark.runtime} · input {image} · {date}"
    valid = [latency for latency in benchmark.latency if latency.measurement.valid]
    by_batch = len({latency.batch for latency in benchmark.latency}) > 1
    several = sorted({latency.threads if by_batch else latency.batch for latency in valid})
    with new_figure(7.0, 4.6, f"{benchmark.model[-48:]} on {benchmark.target.name}", where, left=0.1) as figure:
        axes = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.97, "top": 0.79, "bottom": 0.125})
        title(axes, "Latency of one call (bars: 90 % interval)")
        axes.set_ylabel("ms")
        if not valid:
            axes.text(0.5, 0.5, "no valid measurement", transform=axes.transAxes, ha="center", color=MUTED)
            return figure
        for shade, value in enumerate(several, 1):
            points = sorted((latency.batch if by_batch else latency.threads, latency.measurement.latency_ms,
                             latency.measurement.latency_ms * latency.measurement.half_width)
                            for latency in valid if (latency.threads if by_batch else latency.batch) == value)
            x, y, half = zip(*points, strict=True)
            axes.errorbar(x, y, yerr=half, color=FRONT, alpha=0.3 + 0.7 * shade / len(several), marker="o", ms=5,
                          lw=1.5, capsize=2.5, label=_count(value, "thread") if by_batch else f"batch {value}")
        axes.set_xlabel("batch (log scale)" if by_batch else "threads (0: every core)")
        ticks = sorted({latency.batch if by_batch else latency.threads for latency in valid})
        if min(ticks) > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=list(map(str, ticks)))
        axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
        axes.legend(loc="best", frameon=False, fontsize=8.5)
    return figure


BENCHMARK = Document("hwnas-benchmark", 2, "a benchmark", "Measure again.", two_fields=True)
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
class Benchmark:
    """A run of the command. `made_up`: quantised here, with made-up ranges."""

    model: str
    target: Target
    host: Host
    runtime: str
    seed: int
    made_up: bool
    image: tuple[int, ...]
    overhead_ms: float
    latency: tuple[Latency, ...]
    raw: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any], **known: Any) -> Benchmark:
        """Make it from the plain values that the task returns."""
        protocol = Protocol.from_dict(raw["protocol"])
        latency = tuple(Latency(row["batch"], row["threads"], Measurement.from_dict(
            row["measurement"], protocol, "measurement"), row["execution"]) for row in raw["latency"])
        return cls(image=tuple(raw["input"]["image"]), overhead_ms=raw["overhead_us"] / 1e3, latency=latency,
                   raw=raw, **known)

    @property
    def invalid(self) -> list[str]:
        """The reasons why numbers are INVALID; empty if all are valid."""
        several = len({point.threads for point in self.latency}) > 1
        return [f"batch {point.batch}{f', {point.threads} threads' * several}: {point.measurement.reason}"
                for point in self.latency if not point.measurement.valid]

    def save(self, path: Path) -> None:
        """Write the JSON file: statistics to read, and raw samples to compute them again."""
        data = {
            **BENCHMARK.header, "created": now(),
            "model": self.model, "made_up_ranges": self.made_up, "target": asdict(self.target),
            "host": self.host.to_dict(), "runtime": self.runtime, "seed": self.seed, "input": self.raw["input"],
            "call_overhead_us": self.raw["overhead_us"], "protocol": self.raw["protocol"],
            "latency": [{**_statistics(latency.measurement, latency.batch), **raw}
                        for latency, raw in zip(self.latency, self.raw["latency"], strict=True)]}
        write_atomic(path, json.dumps(data, allow_nan=False))


def _statistics(measurement: Measurement, batch: int) -> dict[str, Any]:
    return {"valid": measurement.valid, "reason": measurement.reason, "latency_ms": _number(measurement.latency_ms),
            "latency_ms_low": _number(measurement.latency_ms_low),
            "latency_ms_high": _number(measurement.latency_ms_high),
            "half_width": _number(measurement.half_width), "quiet_share": _number(measurement.quiet_share),
            "slowdown": _number(measurement.slowdown), **_percentiles(measurement),
            "images_per_s": _number(batch / measurement.latency_ms * 1e3)}


def _percentiles(measurement: Measurement) -> dict[str, float | None]:
    return {f"p{round(100 * q)}_ms": measurement.percentile_ms(q) for q in _NEEDED}


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
        yield "latency", (f"{measurement.latency_ms:.4g} ms on the quiet machine, 90 % interval "
                          f"{measurement.latency_ms_low:.4g} to {measurement.latency_ms_high:.4g}")
        yield "throughput", f"{latency.images_per_s:.4g} images/s, one call after another"
    yield from _spread(measurement)
    yield "noise", _noise(measurement)
    yield "machine", describe_machine([measurement])
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
        text = f"{UNKNOWN} (needs {needed} samples)" if value is None else f"{value:.4g} ms, as the machine was"
        yield f"p{round(100 * q)}", text


def _noise(measurement: Measurement) -> str:
    if not measurement.valid:
        return f"INVALID: {measurement.reason}"
    goal = measurement.protocol.half_width
    reached = "reached" if measurement.half_width <= goal else "NOT reached within the time"
    return (f"valid: {measurement.quiet_share:.0%} of {len(measurement.turns)} turns undisturbed; half-width "
            f"{measurement.half_width:.1%} (goal {goal:.0%}: {reached})")


def _table(benchmark: Benchmark) -> Iterator[str]:
    several = len({latency.threads for latency in benchmark.latency}) > 1
    head = ("batch", *("threads",) * several, "latency ms", "90 % interval", "p50", "p90", "p99", "images/s", "int8",
            "noise")
    rows = [head, *(_row(latency, several) for latency in benchmark.latency)]
    yield from text_table(rows, words=[len(head) - 1])
    lacking = [q for q in _NEEDED if any(latency.measurement.percentile_ms(q) is None
                                         for latency in benchmark.latency)]
    if lacking:
        yield f"{UNKNOWN}: " + ", ".join(f"p{round(100 * q)} needs {_NEEDED[q]} samples" for q in lacking)
    yield "p50, p90 and p99 are of all calls, as the machine was."
    yield describe_machine([latency.measurement for latency in benchmark.latency])


def _row(latency: Latency, several: bool) -> tuple[str, ...]:
    first = (str(latency.batch), *(str(latency.threads),) * several)
    measurement, share = latency.measurement, latency.execution["int8_share"]
    int8 = number(share, ".0%")
    spread = [number(measurement.percentile_ms(q), ".4g") for q in _NEEDED]
    if not measurement.valid:
        return (*first, *[UNKNOWN] * 2, *spread, UNKNOWN, int8, f"INVALID: {measurement.reason}")
    goal = measurement.protocol.half_width
    reached = "" if measurement.half_width <= goal else f", goal {goal:.0%} not reached"
    return (*first, f"{measurement.latency_ms:.4g}",
            f"{measurement.latency_ms_low:.4g} to {measurement.latency_ms_high:.4g}", *spread,
            f"{latency.images_per_s:.4g}", int8, f"valid, ±{measurement.half_width:.1%}{reached}")
