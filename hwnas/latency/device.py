"""Device: the machine that networks are timed on. What is timed, and by which protocol, is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hwnas.latency.harness import Copies, Progress
    from hwnas.latency.table import Measurement
    from hwnas.latency.table import Protocol as TimingProtocol
    from hwnas.runtimes.runtime import Runtime
    from hwnas.target import Host, Target


class Device(Protocol):
    """A machine that compiles ONNX files and times them: this one, or one that is reached over ssh."""

    @property
    def is_here(self) -> bool:
        """Whether it is the machine that this process runs on."""

    @property
    def host(self) -> Host:
        """Its fingerprint, whose name its tables have."""

    def for_target(self, target: Target) -> Device:
        """This machine as a target sees it: for one on a GPU, this is part of the fingerprint and watched while it
        measures. TargetError where it has none, or cannot be timed there."""

    def runtime(self, name: str) -> Runtime:
        """A runtime of its; UnknownName where hwnas knows none of this name."""

    def measure(self, candidates: Mapping[str, Copies], reference: Copies, protocol: TimingProtocol, *, seed: int = 0,
                quiet_ms: float | None = None, progress: Progress | None = None, threads: int = 1,
                idle: Callable[[], bool] = ...) -> dict[str, Measurement]:
        """Time calls that its runtimes bound, as `harness.measure` says, all in the same rounds."""

    def overhead_ms(self) -> float:
        """What the harness adds to one call there."""


DEVICE = ("device", "device_python", "device_name")  # options


@dataclass(frozen=True)
class DeviceOptions:
    """The options that name the machine to time networks on; None: this one.

    `device`: user@host, reached over ssh. `device_python`: the Python there that has the runtime.
    `device_name`: what its tables are named after, where its CPU does not tell it from others.
    """

    device: str | None
    device_python: str | None
    device_name: str | None
