"""Probes: short work that is always the same, whose time shows the state of the machine at the moment of a reading.

The core probe is arithmetic on 8 KB. It takes some microseconds, so it can be read after every call that is timed. A
neighbour on the other thread of the same physical core makes it 1.5 to 2 times slower. A lower clock makes it slower in
proportion. The memory probe sums 4 MB, more than the second cache of most cores holds. Neighbours that fill shared
caches or move memory slow it down, and networks with many weights most. Figures: docs/decisions/machine-in-use.md.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hwnas.errors import TableError, UserError
from hwnas.latency.quiet import QuietRun
from hwnas.system.documents import check_shape, read_json
from hwnas.system.paths import home, write_atomic
from hwnas.target import Target

CORE_READINGS, MEMORY_READINGS, REFERENCE_READINGS = 3, 2, 3  # the least one counts: the first finds cold caches
RUNS_KEPT = 40
CORE_SPACING_MS = 0.8  # ms of calls between two readings of the core probe: each slows the next call by 6 to 10 µs


@dataclass(frozen=True, slots=True)
class Probe:
    """Work that is always the same. `spacing_ms`: milliseconds of calls between two readings. By default it is read
    only at both ends of a turn."""

    work: Callable[[], object]
    readings: int
    spacing_ms: float = math.inf

    def read(self) -> float:
        """Return how long the work takes now, in µs."""
        clock, work, least = time.perf_counter_ns, self.work, math.inf
        for _ in range(self.readings):
            start = clock()
            work()
            least = min(least, clock() - start)
        return max(least, 1) / 1e3


def core_probe() -> Probe:
    """Return arithmetic in the first cache: its time shows a shared physical core, and the clock."""
    x = np.linspace(0.0, 1.0, 512)
    y = np.empty_like(x)
    return Probe(lambda: np.exp(x, y), CORE_READINGS, CORE_SPACING_MS)


def memory_probe() -> Probe:
    """Return a sum beyond the second cache: its time shows how busy shared caches and memory are."""
    return Probe(np.ones(1 << 19).sum, MEMORY_READINGS)


def identify_reference(target: Target, runtime_version: str, network: str) -> str:
    """Return a name of the deployment and its reference network: runs of one name are compared by the reference."""
    return f"{runtime_version} {target.precision} {target.threads}t {target.device} b{target.batch} {network}"


class QuietRuns:
    """The quiet times that the latest RUNS_KEPT runs beside one reference on one host have stored."""

    def __init__(self, host_name: str, reference_id: str) -> None:
        self.path, self._key = home() / "quiet_runs.json", f"{host_name} {reference_id}"

    def load(self) -> list[QuietRun]:
        """Return the runs, the latest last; empty if there is none.

        Raises:
            TableError: The file cannot be read, or has something else in it.
        """
        return [QuietRun(*run) for run in self._all().get(self._key, ())]

    def add(self, run: QuietRun) -> None:
        """Store a run. If the home folder cannot be written, nothing is stored."""
        runs = self._all()
        runs[self._key] = [*runs.get(self._key, ()), [round(value, 6) for value in run]][-RUNS_KEPT:]
        with suppress(UserError):
            write_atomic(self.path, json.dumps(runs, indent=1, sort_keys=True))

    def _all(self) -> dict[str, list[list[float]]]:
        try:
            content: dict[str, list[list[float]]] = read_json(self.path)
            check_shape(content, {"*": [[float]]})
            for probe_us, reference_ms, memory_us in chain.from_iterable(content.values()):
                if min(probe_us, reference_ms) <= 0 or memory_us < 0:
                    raise ValueError("a time below 0")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise TableError(f"cannot read {self.path}: {error.strerror or error}. Make it readable, or set HWNAS_HOME "
                             "to a folder of yours.") from None
        except ValueError:
            raise TableError(f"{self.path} does not hold quiet runs. Remove it; they are measured again.") from None
        return content
