"""The reference that a machine's quiet is judged by: a small network, and its time when nothing disturbed it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.errors import TableError
from hwnas.system.paths import home, write_atomic
from hwnas.target.target import Target

if TYPE_CHECKING:
    from hwnas.target.host import Host


_NULL_REFERENCE_MS = 0.1


def reference_file(target: Target, folder: Path) -> Path:
    """The fixed network timed beside every model: the reference of `mnasnet_small` for 1 channel, 10 classes."""
    from hwnas.latency.timing import prepare_network
    from hwnas.space.search_space import SearchSpace

    path = prepare_network(SearchSpace.load("mnasnet_small", channels=1, classes=10).reference, target, folder)
    if target.runtime == "null":
        import onnx

        from hwnas.runtimes.null import METADATA_KEY

        proto = onnx.load(str(path))
        onnx.helper.set_model_props(proto, {METADATA_KEY: str(_NULL_REFERENCE_MS)})
        onnx.save(proto, str(path))
    return path


class QuietTimes:
    """The reference's quiet time on this host, kept from run to run: a run at half speed must not look like a number.

    The least of all runs is kept, by host, runtime version, precision and threads.
    """

    def __init__(self, host: Host, runtime_version: str, target: Target) -> None:
        self.path = home() / "reference_times.json"
        key = replace(target, name="", vendor="", batch=1, price_per_hour=None)
        self._key = f"{host.name} {runtime_version} {key.precision} {key.threads}t {key.device}"

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
