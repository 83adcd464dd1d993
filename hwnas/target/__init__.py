"""Targets: a runtime with precision, threads and batch; and hosts, the fingerprints of machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.target.host import Host as Host
    from hwnas.target.target import Target as Target

__getattr__, __dir__ = face(__name__, {"Host": "host", "Target": "target"})
