"""The results of a benchmark: a table, and a JSON file with every raw sample."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hwnas.cli.progress import UNKNOWN, number, text_table
from hwnas.latency.measurement import P90_SAMPLES, P99_SAMPLES, Measurement, Protocol, describe_machine
from hwnas.system.documents import Document, now
from hwnas.system.gpu import GpuState
from hwnas.system.paths import write_atomic
from hwnas.target import Host, Target

BENCHMARK = Document("hwnas-benchmark", 2, "a benchmark", "Measure again.", two_fields=True)
_NEEDED = {0.5: 1, 0.9: P90_SAMPLES, 0.99: P99_SAMPLES}


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of a batch size on so many threads (0: all): its samples, and the executed precisions."""

    batch: int
    threads: int
    measurement: Measurement
    execution: Mapping[str, Any]

    @property
    def images_per_s(self) -> float:
        """The throughput with one call after another."""
        return self.batch / self.measurement.latency_ms * 1e3


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The result of a benchmark. `made_up`: the file was quantised here, with made-up ranges."""

    model: str
    target: Target
    host: Host
    runtime: str
    seed: int
    made_up: bool
    image: tuple[int, ...]
    latency: tuple[Latency, ...]
    raw: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any], **known: Any) -> Benchmark:
        """Return the result made from the plain values that the task returns."""
        protocol = Protocol.from_dict(raw["protocol"])
        latency = tuple(Latency(row["batch"], row["threads"], Measurement.from_dict(
            row["measurement"], protocol, "measurement"), row["execution"]) for row in raw["latency"])
        return cls(image=tuple(raw["input"]["image"]), latency=latency, raw=raw, **known)

    @property
    def invalid(self) -> list[str]:
        """The batch sizes that were timed without a valid number; empty if all are valid."""
        several = len({point.threads for point in self.latency}) > 1
        return [f"batch {point.batch}{f' on {point.threads} threads' * several}" for point in self.latency
                if not point.measurement.valid]

    def save(self, path: Path) -> None:
        """Write the JSON file: statistics to read, and raw samples from which they can be computed again."""
        data = {
            **BENCHMARK.header, "created": now(),
            "model": self.model, "made_up_ranges": self.made_up, "target": asdict(self.target),
            "host": self.host.to_dict(), "runtime": self.runtime, "seed": self.seed, "input": self.raw["input"],
            "protocol": self.raw["protocol"],
            "latency": [{**_statistics(latency), **raw}
                        for latency, raw in zip(self.latency, self.raw["latency"], strict=True)]}
        write_atomic(path, json.dumps(data, allow_nan=False))


def _statistics(latency: Latency) -> dict[str, Any]:
    measurement = latency.measurement
    numbers = {"latency_ms": measurement.latency_ms, "latency_ms_low": measurement.latency_ms_low,
               "latency_ms_high": measurement.latency_ms_high, "half_width": measurement.half_width,
               "quiet_share": measurement.quiet_share, "slowdown": measurement.slowdown,
               "images_per_s": latency.images_per_s}
    return {"valid": measurement.valid, "reason": measurement.reason,
            **{name: float(f"{value:.6g}") if math.isfinite(value) else None for name, value in numbers.items()},
            **{f"p{round(100 * q)}_ms": measurement.percentile_ms(q) for q in _NEEDED}}


def lines(benchmark: Benchmark) -> Iterator[str]:
    """Yield the facts of the run, and a table with a row for each batch size and number of threads."""
    yield from (f"{name:<14} {text}" for name, text in _facts(benchmark))
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
    if states := [turn.gpu for latency in benchmark.latency for turn in latency.measurement.turns if turn.gpu]:
        yield "GPU", describe_states(states)


def _count(number: int, what: str) -> str:
    return f"every core as a {what}" if number == 0 else f"{number} {what}{'' if number == 1 else 's'}"


def _describe_execution(execution: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(execution["precisions"].items()))
    outside = ", ".join(f"{count} {kind}" for kind, count in sorted((execution.get("outside") or {}).items()))
    share = execution["int8_share"]
    return (f"{execution['precision']}{'' if share is None else f', int8 share {share:.1%}'}, "
            f"fallback {execution['fallback_share']:.1%} (convolutions and matrix products: {counts or 'none'})"
            + (f"; left to other kernels: {outside}" if outside else ""))


def describe_states(states: Sequence[GpuState]) -> str:
    """Return the condition of a GPU during a measurement, in one line."""
    clocks, slowed_by = [state.sm_mhz for state in states], sorted({state.told for state in states if state.told})
    return (f"clock {min(clocks)} to {max(clocks)} MHz, up to {max(state.celsius for state in states)} °C"
            f"{', held down by ' + '; '.join(slowed_by) if slowed_by else ''}")


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
    measurement, goal = latency.measurement, latency.measurement.protocol.half_width
    quiet = (f"{measurement.latency_ms:.4g}", f"{measurement.latency_ms_low:.4g} to {measurement.latency_ms_high:.4g}")
    reached = "" if measurement.half_width <= goal else f", goal {goal:.0%} not reached"
    noise = f"valid, ±{measurement.half_width:.1%}{reached}" if measurement.valid else f"INVALID: {measurement.reason}"
    return (str(latency.batch), *(str(latency.threads),) * several, *(quiet if measurement.valid else [UNKNOWN] * 2),
            *(number(measurement.percentile_ms(q), ".4g") for q in _NEEDED),
            f"{latency.images_per_s:.4g}" if measurement.valid else UNKNOWN,
            number(latency.execution["int8_share"], ".0%"), noise)
