"""Search spaces: what a sampler may choose, and the architectures that come of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.space.architecture import Architecture as Architecture
    from hwnas.space.blocks import BlockSpec as BlockSpec
    from hwnas.space.search_space import SearchSpace as SearchSpace

__getattr__, __dir__ = face(__name__, {
    "Architecture": "architecture",
    "BlockSpec": "blocks", "SearchSpace": "search_space"})
