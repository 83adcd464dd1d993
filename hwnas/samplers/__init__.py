"""Samplers: which network to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.samplers.known import KnownObjectiveSampler as KnownObjectiveSampler
    from hwnas.samplers.loading import load_sampler as load_sampler

__getattr__, __dir__ = face(__name__, {"KnownObjectiveSampler": "known", "load_sampler": "loading"})
