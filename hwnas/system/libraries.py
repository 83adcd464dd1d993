"""Entry points of other packages, and the settings that some need: torchvision, ONNX Runtime, the C library's memory.

At its import, torchvision describes `nms` and `qnms` to torch, even if its compiled library was not loaded. With a CPU
build of torch beside PyPI's CUDA build of torchvision this ends in "operator torchvision::nms does not exist". If the
compiled library cannot be loaded, the two operators are declared here, so that `import timm` works.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from hwnas.errors import UnknownName
from hwnas.lazy import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_kept: list[Any] = []  # torch forgets a declaration when its Library object is collected


def find_offers(group: str, kind: str, name: str, built_in: Iterable[str]) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name. UnknownName unless `name` is one of them, or in `built_in`."""
    offers = {point.name: point for point in entry_points(group=group)}
    if name not in (names := {*built_in, *offers}):
        raise UnknownName(kind, name, names)
    return offers


@cache
def declare_missing() -> None:
    """Declare the two operators unless they load; `import hwnas` has this called before torchvision is imported.

    The declared operators have no kernels. A call of one fails as before, but no classifier calls them.
    """
    if _loads_compiled():
        return
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(schema)
            _kept.append(library)


def _loads_compiled() -> bool:
    """Return whether torchvision's library loads into this torch (twice is harmless); True without torchvision."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for path in sorted(Path(spec.origin).parent.glob("_C*")):
        if path.suffix in (".so", ".pyd", ".dylib"):
            try:
                torch.ops.load_library(str(path))
            except (ImportError, OSError):
                continue
            return True
    return False


_SWITCH = "ORT_DISABLE_TELEMETRY"


@cache
def import_onnxruntime() -> Any:
    """Return the module `onnxruntime`, imported without its telemetry; use this in place of an import.

    A plain import starts a session of telemetry and leaves an identifier in the folder of temporary files. An
    environment variable forbids both; here it is set during the import only.
    """
    earlier_value = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        import onnxruntime
    finally:
        if earlier_value is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = earlier_value
    onnxruntime.disable_telemetry_events()  # if other code had imported it before
    return onnxruntime


_IN_PLACE_OF = {"onnxruntime": "onnxruntime-gpu"}  # both are the module onnxruntime, so only one is installed


def version_of(package: str) -> str:
    """Return the version of a package, or of its substitute. Raises PackageNotFoundError if neither is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        if package not in _IN_PLACE_OF:
            raise
        return version(_IN_PLACE_OF[package])


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of mallopt(3)
_NEVER = -1
# Outside the block: the values that glibc reaches by itself once large blocks have been freed. Any mallopt ends glibc's
# own adaptation, so that the process keeps these values.
_OUTSIDE = {_M_MMAP_MAX: 65_536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
_INSIDE = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER}


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in this process for its next allocation, inside the block; give it back at the end.

    Otherwise blocks of 32 MB and more (activations) go back to the system each time. Their pages are then faulted in
    and cleared again: a fifth of the CPU time of a training step of small networks (benchmarks/bench_training.py).
    Nothing is done if the user's environment says how to allocate, or without glibc.
    """
    is_configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_configured or platform.libc_ver()[0] != "glibc":
        yield
        return
    try:
        _configure(_INSIDE)
        yield
    finally:
        _configure(_OUTSIDE)
        release_memory()


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps it, and hundreds of trials add up. torch also keeps freed
    memory of a GPU, which other processes and runtimes need."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _configure(options: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options.items():
            mallopt(option, value)
