"""Training: recipes, the loop, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.training.recipe import Recipe as Recipe

__getattr__, __dir__ = face(__name__, {"Recipe": "recipe"})
