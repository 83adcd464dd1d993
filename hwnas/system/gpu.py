"""The GPU that CUDA shows first, by NVIDIA's management library (NVML): its identity and its state.

Source: NVML's reference (clocks' event reasons).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from hwnas.errors import TargetError

# Bits of NVML's reasons for a lower clock. Heat and the power supply disturb a measurement. The others do not: an idle
# GPU, the clocks that the user set, and the power limit, which a long load reaches and stays at.
_DISTURBING = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
_REASONS = {0x4: "power limit", **_DISTURBING}


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a GPU: the clock of its processors, its temperature, and NVML's reasons for a lower clock (0: none).

    A value that the GPU does not report is 0.
    """

    sm_mhz: int = 0
    celsius: int = 0
    reasons: int = 0

    @property
    def slowed(self) -> bool:
        """Return whether heat or the power supply lowers its clock."""
        return any(self.reasons & bit for bit in _DISTURBING)

    @property
    def told(self) -> str:
        """The reasons in words; empty if none of them counts."""
        return ", ".join(word for bit, word in _REASONS.items() if self.reasons & bit)

    def worse(self, other: GpuState) -> GpuState:
        """Return the lower clock, the higher temperature and all reasons of two moments."""
        return GpuState(min(self.sm_mhz, other.sm_mhz), max(self.celsius, other.celsius), self.reasons | other.reasons)


def describe_gpu() -> dict[str, Any]:
    """Return the GPU's name, driver, newest CUDA of this driver, and memory, with the keys of a host's fingerprint.

    Raises TargetError if there is no GPU, or NVML's Python package is missing.
    """
    nvml, gpu = _open_gpu()
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    memory = getattr(_ask("nvmlDeviceGetMemoryInfo"), "total", 0)
    return {"gpu": nvml.nvmlDeviceGetName(gpu), "gpu_driver": nvml.nvmlSystemGetDriverVersion(),
            "gpu_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}", "gpu_memory_gib": round(memory / 2**30, 1)}


def read_gpu_state() -> GpuState:
    """Return the state of the GPU now. Raises TargetError like `describe_gpu`."""
    nvml, _ = _open_gpu()
    reasons = _ask("nvmlDeviceGetCurrentClocksEventReasons") or _ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuState(_ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                    _ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU), reasons)


def _ask(question: str, *arguments: int) -> Any:
    """Return NVML's answer for the GPU; 0 without an answer. A part of a GPU (MIG), a GPU that shares the machine's
    memory, and a driver with an older name for the question give none."""
    nvml, gpu = _open_gpu()
    with contextlib.suppress(nvml.NVMLError):
        return getattr(nvml, question)(gpu, *arguments)
    return 0


@cache
def _open_gpu() -> tuple[Any, Any]:
    """Return NVML and its handle of the GPU. Indices are CUDA's if CUDA_DEVICE_ORDER=PCI_BUS_ID or GPUs are alike."""
    try:
        import pynvml
    except ImportError:
        raise TargetError("the target needs an NVIDIA GPU, and nvidia-ml-py, which finds it, is not installed. "
                          "Install it: pip install 'hwnas[cuda]'") from None
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        pynvml.nvmlInit()
        if shown.isdecimal():
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(shown))
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(shown)
    except pynvml.NVMLError as error:
        raise TargetError(f"the target needs an NVIDIA GPU, and this machine shows no GPU {shown!r} ({error}). See "
                          "that nvidia-smi works and CUDA_VISIBLE_DEVICES names a GPU, or choose another target."
                          ) from None
