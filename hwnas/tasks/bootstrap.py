"""Grades whose intervals are percentiles of a bootstrap over the images, with the same draws for all networks."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hwnas.stats import percentiles
from hwnas.tasks.task import Grades

DRAWS = 300  # of the images


class BootstrapGrades(Grades):
    """Grades that can be computed anew for images that count several times. Subclasses give `scores_of`."""

    n_images: int

    def scores_of(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The scores [draws] if each image is there so many times [draws, n]; NaN if no class is."""
        raise NotImplementedError

    @cached_property
    def drawn(self) -> NDArray[np.float64]:
        """The scores of DRAWS draws of the images."""
        n = self.n_images
        return self.scores_of(np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), DRAWS).astype(float))

    def interval(self) -> tuple[float, float]:
        """Of the draws."""
        return percentiles(self.drawn)

    def minus(self, other: Grades, confidence: float = 0.95) -> tuple[float, float, float]:
        """Of the same draws for both."""
        assert isinstance(other, BootstrapGrades)
        return (self.score - other.score, *percentiles(self.drawn - other.drawn, confidence))
