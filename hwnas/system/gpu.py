"""The GPU that CUDA shows first, by NVIDIA's management library: what it is, and in which condition.

Source: NVML's reference (clocks' event reasons, nvmlDeviceGetCurrentClocksEventReasons).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from hwnas.errors import TargetError

# Bits of NVML's reasons for a lower clock: heat and the power supply. The others are no disturbance: an idle GPU, the
# clocks that the user set, and the power limit, which a long load reaches and stays at.
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
_REASONS = {0x4: "power limit", 0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)",
            0x80: "power brake"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its name, its driver's version, the newest CUDA that the driver knows, and its memory."""

    name: str
    driver: str
    cuda: str
    memory_gib: float


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU at a moment: clock of its processors, temperature, and NVML's reasons for a lower clock (0: none).

    What a GPU does not tell is 0.
    """

    sm_mhz: int = 0
    celsius: int = 0
    reasons: int = 0

    @property
    def slowed(self) -> bool:
        """Whether heat or the power supply holds its clock down."""
        return bool(self.reasons & _SLOWED)

    @property
    def told(self) -> str:
        """The reasons in words; empty where there is none that counts."""
        return ", ".join(word for bit, word in _REASONS.items() if self.reasons & bit)

    def worse(self, other: GpuState) -> GpuState:
        """The lower clock, the higher temperature and all reasons of two moments."""
        return GpuState(min(self.sm_mhz, other.sm_mhz), max(self.celsius, other.celsius), self.reasons | other.reasons)


def first_gpu() -> Gpu:
    """The GPU; TargetError where there is none, or NVML's Python package is missing."""
    nvml, handle = _opened()
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return Gpu(_text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlSystemGetDriverVersion()),
               f"{cuda // 1000}.{cuda % 1000 // 10}",
               round(_asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total) / 2**30, 1))


def gpu_state() -> GpuState:
    """How the GPU is now; TargetError as `first_gpu`."""
    nvml, handle = _opened()
    return GpuState(_asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                    _asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                    _asked(*(partial(getattr(nvml, name), handle) for name in _REASON_CALLS if hasattr(nvml, name))))


# What asks for the reasons of a low clock: drivers and packages before 535 know it by the second name only.
_REASON_CALLS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


def _asked(*calls: Callable[[], int]) -> int:
    """The first answer that one of `calls` gives; 0 where there is none: a part of a GPU (MIG), or one that shares the
    machine's memory, does not tell all."""
    nvml, _ = _opened()
    for call in calls:
        with contextlib.suppress(nvml.NVMLError):
            return int(call())
    return 0


@cache
def _opened() -> tuple[Any, Any]:
    """NVML and the handle of the GPU."""
    try:
        import pynvml
    except ImportError:
        raise TargetError("the target needs an NVIDIA GPU, and what tells of one (nvidia-ml-py) is not installed. "
                          "Install it: pip install 'hwnas[cuda]'") from None
    try:
        pynvml.nvmlInit()
        name = first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if name == "":
            raise TargetError("the target needs an NVIDIA GPU, and CUDA_VISIBLE_DEVICES is empty, which hides all. "
                              "Unset it, or name one.")
        return pynvml, (pynvml.nvmlDeviceGetHandleByIndex(name) if isinstance(name, int)
                        else pynvml.nvmlDeviceGetHandleByUUID(name))
    except pynvml.NVMLError as error:
        raise TargetError(f"the target needs an NVIDIA GPU, and this machine shows none ({error}). Choose another "
                          "target, or see that nvidia-smi works.") from None


def first_visible(shown: str | None) -> int | str:
    """Index or UUID of the GPU that programs get first where CUDA_VISIBLE_DEVICES is `shown`; empty text where it hides
    all. Indices are NVML's where CUDA_DEVICE_ORDER=PCI_BUS_ID, or all GPUs are alike."""
    first = (shown or "").split(",")[0].strip()
    return int(first) if re.fullmatch(r"\d+", first) else first if shown is not None else 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
