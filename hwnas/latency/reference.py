"""Reference: the small network that every timing is held against, and its quiet time, when nothing disturbed it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from hwnas.errors import TableError
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import home, write_atomic
from hwnas.target.host import Host
from hwnas.target.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hwnas.latency.measurement import Measurement
    from hwnas.latency.table import LatencyTable

_SPACE = "mnasnet_small"
_LEAST_SIZE = 8  # pixels: smaller images do not survive that space's strides


@cache
def reference_network(channels: int = 1, classes: int = 10, image_size: int = 32) -> Architecture:
    """The one reference network: that of `mnasnet_small`, for the images of what is timed beside it."""
    return SearchSpace.load(_SPACE, channels=channels, classes=classes,
                            image_size=max(_LEAST_SIZE, image_size)).reference


@dataclass(frozen=True)
class Reference:
    """The network of a timing, its images in a call, and its quiet time in ms where known.

    `quiet_times`: where a quiet time is kept for later runs; None where a latency table or a run states its own.
    """

    network: Architecture
    quiet_ms: float | None = None
    batch: int = 1
    quiet_times: QuietTimes | None = None

    @classmethod
    def of_host(cls, target: Target, runtime_version: str, network: Architecture | None = None) -> Reference:
        """The reference network (or `network`) on this host, with the least time that it took here so far."""
        network = network or reference_network()
        times = QuietTimes(Host.detect(), runtime_version, target, network)
        return cls(network, times.load(), quiet_times=times)

    @classmethod
    def of_table(cls, table: LatencyTable) -> Reference:
        """What a latency table was measured beside, at its quiet time then: a later run is compared with that one."""
        return cls(table.reference, table.quiet_ms or None, table.key.batch)

    def keep(self, measurements: Iterable[Measurement]) -> None:
        """Remember the quiet time of these, where it is this host's to remember."""
        if self.quiet_times is not None:
            self.quiet_times.store(min(found.quiet_ms for found in measurements))


class QuietTimes:
    """The one store of a reference's quiet time on this host: a run at half speed must not look like a number.

    The least of all runs is kept, by host, runtime version, precision, threads, network and batch.
    """

    def __init__(self, host: Host, runtime_version: str, target: Target, network: Architecture | None = None,
                 batch: int = 1) -> None:
        self.path = home() / "reference_times.json"
        key = replace(target, name="", vendor="", batch=1, price_per_hour=None)
        self._key = f"{host.name} {runtime_version} {key.precision} {key.threads}t {key.device}"
        if batch != 1 or network not in (None, reference_network()):
            self._key += f" {(network or reference_network()).id} b{batch}"

    def load(self) -> float | None:
        """Milliseconds, or None where no run was stored; TableError when the file is broken."""
        found = self._all().get(self._key)
        return None if found is None else found / 1e3

    def store(self, quiet_ms: float) -> None:
        """Keep `quiet_ms` if it is the least so far."""
        known = self._all()
        known[self._key] = min(round(quiet_ms * 1e3, 2), known.get(self._key, float("inf")))
        write_atomic(self.path, json.dumps(known, indent=1, sort_keys=True))

    def _all(self) -> dict[str, float]:
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(us, int | float) and us > 0 for us in found.values()):
            raise TableError(f"{self.path} cannot be read as reference times in µs. Remove it; they are measured anew.")
        return found
