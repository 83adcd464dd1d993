"""Which kinds of block the worst predicted networks share: where to look when a latency model errs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hwnas.architecture import Architecture
from hwnas.blocks import BlockSpec

WORST_SHARE, LEAST_WORST = 0.1, 5
CHANCE = 0.05  # a kind is reported where so many of the worst would have it by chance with this probability at most


@dataclass(frozen=True, slots=True)
class KindShare:
    """How often the worst networks have a kind of block at a place, against all networks that were measured.

    `mean_error` is signed (above 0: predicted too slow), over all networks that have it; `chance` is the probability
    that as many of the worst have it when which are worst is drawn by lot.
    """

    place: str
    kind: str
    n_worst: int
    n_all: int
    lift: float
    mean_error: float
    mean_error_without: float | None
    chance: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def worst(errors: np.ndarray) -> np.ndarray:
    """Indices of the tenth of the networks with the largest errors, largest first; at least five of them."""
    n = min(len(errors), max(LEAST_WORST, round(WORST_SHARE * len(errors))))
    return np.argsort(-np.abs(errors), kind="stable")[:n]


def kind_of(block: BlockSpec) -> str:
    """Kind, kernel, stride and squeeze-and-excite, e.g. `ir k5 s2 se`."""
    return " ".join([block.kind, f"k{block.kernel}", f"s{block.stride}", *(["se"] if block.se else [])])


def kinds_of(architecture: Architecture) -> set[tuple[str, str]]:
    """(place, kind) of all its blocks but stem and head; each counts at its stage and as `any stage`."""
    found = set()
    for index, blocks in enumerate(architecture.staged_blocks()[1:-1]):
        for block in blocks:
            found |= {(f"stage {index + 1}", kind_of(block)), ("any stage", kind_of(block))}
    return found


def shared_kinds(architectures: Sequence[Architecture], errors: np.ndarray) -> list[KindShare]:
    """Kinds that are too frequent among the worst to be chance, most striking first. `errors` [n] are signed."""
    if len(architectures) < 2 * LEAST_WORST:
        return []
    chosen = worst(errors)
    kinds = [kinds_of(one) for one in architectures]
    found = []
    for place, kind in sorted(set().union(*kinds)):
        has = np.array([(place, kind) in one for one in kinds])
        share = _share(place, kind, has, chosen, errors)
        if share.lift > 1 and share.n_worst >= 3 and share.chance <= CHANCE:
            found.append(share)
    return sorted(found, key=lambda share: (share.chance, share.place, share.kind))


def _share(place: str, kind: str, has: np.ndarray, chosen: np.ndarray, errors: np.ndarray) -> KindShare:
    from scipy.stats import hypergeom

    n, n_all, n_worst = len(has), int(has.sum()), int(has[chosen].sum())
    return KindShare(place, kind, n_worst, n_all, (n_worst / len(chosen)) / (n_all / n), float(errors[has].mean()),
                     float(errors[~has].mean()) if n_all < n else None,
                     float(hypergeom.sf(n_worst - 1, n, n_all, len(chosen))))
