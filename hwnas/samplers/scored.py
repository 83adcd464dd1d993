"""Zero-cost scores as features of the sampler's model: those of any setting, read from those of a pool of networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.zero_cost import judged, label, worthwhile
from hwnas.errors import DataError
from hwnas.samplers.coding import Settings
from hwnas.samplers.informed import Physical
from hwnas.stats.ranking import spearman

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace

Array = NDArray[np.float64]
LEAST = 16  # networks of the pool that must have a score
_FOLDS = 8
_ALPHAS = tuple(np.logspace(-2, 3, 11))


class Scored:
    """Scores [n, k] of settings, by ridge regression on what they choose and their MACs, parameters and depth.

    `codes` [m, p] and `scores` [m, k] are a pool's; nan: that network has none. `spearman` [k]: how settings that were
    left out are ranked. A pure function of the pool: every worker of a search reads the same. DataError when fewer than
    LEAST have a score.
    """

    def __init__(self, space: SearchSpace, codes: NDArray[np.int64], scores: Array) -> None:
        self._physical = Physical(space, None)
        self._choices = [len(parameter.choices) for parameter in space.parameters]
        described = self._raw(codes)
        self._middle, width = described.mean(0), described.std(0)
        self._kept = width > 1e-9
        self._width = width[self._kept]
        self._models: list[Any] = []
        self.spearman: list[float] = []
        for column in scores.T:
            known = np.isfinite(column)
            if known.sum() < LEAST:
                raise DataError(f"{int(known.sum())} of {len(codes)} networks of space {space.name} have this "
                                f"zero-cost score; {LEAST} are needed. Leave it out of sampler_options.zero_cost.")
            self._add(self._scaled(described[known]), column[known])

    def __call__(self, settings: Settings) -> Array:
        """Scores in the pool's standard deviations [n, k]."""
        inputs = self._scaled(self._raw(settings.codes.astype(np.int64)))
        return np.column_stack([model.predict(inputs) for model in self._models])

    def _add(self, inputs: Array, scores: Array) -> None:
        from sklearn.linear_model import RidgeCV
        from sklearn.model_selection import KFold, cross_val_predict

        wanted = (scores - scores.mean()) / max(float(scores.std()), 1e-9)
        model = RidgeCV(_ALPHAS)
        left_out = cross_val_predict(model, inputs, wanted, cv=KFold(_FOLDS, shuffle=True, random_state=0))
        self._models.append(model.fit(inputs, wanted))
        self.spearman.append(float(spearman(left_out, wanted)) if np.ptp(wanted) else 0.0)

    def _raw(self, codes: NDArray[np.int64]) -> Array:
        chosen = [np.eye(size)[codes[:, index]] for index, size in enumerate(self._choices)]
        return np.concatenate([*chosen, self._physical.of(codes)], axis=1)

    def _scaled(self, described: Array) -> Array:
        return np.asarray((described - self._middle)[:, self._kept] / self._width)


def scored(dataset: Dataset, space: SearchSpace, names: Sequence[str], threads: int, console: Console) -> Scored:
    """Score the space's pool with `names`, or find it scored; says in one line what that took and how well others are
    read from it."""
    from hwnas.accuracy.anchors import Pool

    pool = Pool(dataset, space, names, threads=threads)
    found = Scored(space, pool.codes, pool.scores(console))
    read = ", ".join(f"{name} {rho:.2f}" for name, rho in zip(names, found.spearman, strict=True))
    console.note(f"sampler: zero-cost scores of {len(pool.codes)} networks in {pool.seconds:.0f} s; rank correlation "
                 f"of those read for others: {read}")
    return found


def certified(names: Sequence[str], certificate: Mapping[str, Any] | None, console: Console) -> list[str]:
    """Those of `names` that a certificate does not switch off, as one does that judges them and finds them no better
    than the controls; says which."""
    known = judged(certificate) if certificate is not None else []
    off = [name for name in names if name in known and name not in worthwhile(certificate or {})]
    for name in off:
        console.say(f"note: sampler_options.zero_cost: {name} is left out: the certificate's {label(name)} ranks no "
                    "better than parameters or MACs do.")
    return [name for name in names if name not in off]
