"""Probes: short work that is always the same, whose time tells how the machine is at the moment it is read.

The core probe is arithmetic on 8 KB. It takes some microseconds, so it can be read after every call that is timed. A
neighbour on the other thread of the same physical core makes it 1.5 to 2 times slower, a lower clock slower in
proportion. The memory probe sums 4 MB, which lie beyond the second cache of most cores: neighbours that fill shared
caches, or move memory, slow it, and most of all networks with many weights. Figures: docs/decisions/machine-in-use.md.
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

CORE_READINGS, MEMORY_READINGS, REFERENCE_READINGS = 3, 2, 3  # of which the least counts: the first finds cold caches
RUNS_KEPT = 40
CORE_SPACING_MS = 0.8  # of calls between two readings of the core probe: the call after one is 6 to 10 µs slower


@dataclass(frozen=True, slots=True)
class Probe:
    """Work that is always the same. `spacing_ms`: of calls between two readings; by default a turn's ends alone have
    one."""

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
    """Return arithmetic in the first cache: it tells a shared physical core, and the clock."""
    x = np.linspace(0.0, 1.0, 512)
    y = np.empty_like(x)
    return Probe(lambda: np.exp(x, y), CORE_READINGS, CORE_SPACING_MS)


def memory_probe() -> Probe:
    """Return a sum beyond the second cache: it tells how busy shared caches and memory are."""
    return Probe(np.ones(1 << 19).sum, MEMORY_READINGS)


def identify_reference(target: Target, runtime_version: str, network: str) -> str:
    """Return what runs share that are compared by their reference: the deployment, and its network."""
    return f"{runtime_version} {target.precision} {target.threads}t {target.device} b{target.batch} {network}"


class QuietRuns:
    """The quiet times that runs on this host recorded beside a reference, the latest RUNS_KEPT of them."""

    def __init__(self, host_name: str, reference_id: str) -> None:
        self.path, self._key = home() / "quiet_runs.json", f"{host_name} {reference_id}"

    def load(self) -> list[QuietRun]:
        """Return the runs, the latest last; empty if there is none.

        Raises:
            TableError: The file holds something else.
        """
        return [QuietRun(*run) for run in self._all().get(self._key, ())]

    def add(self, run: QuietRun) -> None:
        """Keep a run. A home that cannot be written keeps none."""
        known = self._all()
        known[self._key] = [*known.get(self._key, ()), [round(value, 6) for value in run]][-RUNS_KEPT:]
        with suppress(UserError):
            write_atomic(self.path, json.dumps(known, indent=1, sort_keys=True))

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
