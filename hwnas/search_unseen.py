"""A random network that the study has not seen, for a sampler that keeps asking for known or unaffordable ones."""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.search_trial import Space

_DRAW = 256
ENUMERABLE = 100_000


def unseen_params(space: Space, seen: Container[str], over_ms: Callable[[NDArray[np.int64]], NDArray[np.float64]],
                  rng: np.random.Generator) -> dict[str, Any] | None:
    """Parameters of a random network whose id is not in `seen`, within the cap where one is found.

    `over_ms(codes)` says how far networks are over the cap. Of 4096 random draws the first that is unseen and within
    the cap; otherwise the unseen one nearest to it. A small space is gone through completely before None is
    returned, which then means that every network of it was seen; in a large one None means that none was found.
    """
    codes = np.asarray(space.sample(rng, 16 * _DRAW), dtype=np.int64)
    found = _first_unseen(space, codes, seen, over_ms)
    if found is None and space.size <= ENUMERABLE:
        everything = np.array(list(product(*(range(len(parameter.choices)) for parameter in space.parameters))))
        found = _first_unseen(space, rng.permutation(everything), seen, over_ms)
    return found


def _first_unseen(space: Space, codes: NDArray[np.int64], seen: Container[str],
                  over_ms: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> dict[str, Any] | None:
    order = np.argsort(np.maximum(over_ms(codes), 0.0), kind="stable")
    for row in codes[order]:
        params = space.to_params(row)
        if space.decode(params).id not in seen:
            return dict(params)
    return None
