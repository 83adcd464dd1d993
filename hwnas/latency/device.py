"""The options that name a machine to time networks on."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE = ("device", "device_python", "device_name")


@dataclass(frozen=True)
class DeviceOptions:
    """The options that name the machine to time networks on; None: this one.

    `device`: user@host, reached over ssh. `device_python`: the Python there that has the runtime.
    `device_name`: what its tables are named after, where its CPU does not tell it from others.
    """

    device: str | None
    device_python: str | None
    device_name: str | None
