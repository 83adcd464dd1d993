"""Deployment runtimes: a file compiled for a target, run, and asked what it executed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.runtimes.runtime import Compiled as Compiled
    from hwnas.runtimes.runtime import Execution as Execution
    from hwnas.runtimes.runtime import Runtime as Runtime
    from hwnas.runtimes.runtime import load_runtime as load_runtime

__getattr__, __dir__ = face(__name__, {
    "Compiled": "runtime", "Execution": "runtime", "Runtime": "runtime", "load_runtime": "runtime"})
