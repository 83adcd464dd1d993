"""Fronts: make finalists, score and time them in the deployment runtime, compare and report them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.front.finalists import choose_finalists as choose_finalists
    from hwnas.front.rows import FrontRow as FrontRow

__getattr__, __dir__ = face(__name__, {"FrontRow": "rows", "choose_finalists": "finalists"})
