"""ONNX Runtime without its telemetry."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

_SWITCH = "ORT_DISABLE_TELEMETRY"


@cache
def import_onnxruntime() -> Any:
    """The module `onnxruntime`; use this in place of an import.

    While it is imported it begins a session of its telemetry, and leaves an identifier in the folder of temporary
    files, unless the environment forbids it.
    """
    given = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        import onnxruntime
    finally:
        if given is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = given
    onnxruntime.disable_telemetry_events()  # where others had imported it before
    return onnxruntime
