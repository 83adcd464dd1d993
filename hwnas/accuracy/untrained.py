"""The rung below all training: what an untrained network's NASWOT score says of the top-1 that its training shows.

A short training is told apart from a longer one by noise of its own, and so is a score of untrained weights; the two
err in different ways, so their mean ranks better than either (White et al., NeurIPS 2021, combine them as well). To
take a mean, the score is put in the units of the training: a score one deviation above the space's middle stands for a
logit of top-1 one deviation above its middle, both known from a few networks that are trained once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.accuracy.anchors import Anchor, anchors, chosen
from hwnas.accuracy.estimator import Estimate
from hwnas.accuracy.scores import Scorer
from hwnas.data.dataset import Dataset, digest
from hwnas.errors import CandidateError, ConfigError, DataError
from hwnas.space.architecture import Architecture
from hwnas.stats.intervals import log_odds
from hwnas.stats.ranking import kendall_tau
from hwnas.system.paths import home

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.space.search_space import SearchSpace

SCORE = "naswot"
LEAST_ANCHORS = 4
_IMAGES = 32
_EDGE = 1e-3  # nearest to 0 and to 1 that a top-1 counts
_FARTHEST = 3.0  # widths from the middle that a score counts
_NORMAL = math.sqrt(math.pi / 2)  # a normal deviate's standard deviation over its mean absolute one


@dataclass(frozen=True, slots=True)
class Scale:
    """Middle and width of logit(top-1) and of the score, over the networks of a space."""

    top1_middle: float
    top1_width: float
    score_middle: float
    score_width: float

    @classmethod
    def of(cls, top1: Sequence[float], scores: Sequence[float]) -> Scale:
        """From networks trained and scored; scores that are all equal stand for the middle."""
        return cls(*_spread(log_odds(top1, _EDGE)), *_spread(scores))

    def drawn(self, top1: float, std: float, score: float | None, weight: float) -> tuple[float, float]:
        """Top-1 and its standard deviation, drawn towards what the score stands for (None: the middle): their mean in
        logits, in which the score counts `weight` and the training 1. The score is taken as exact: `std` shrinks as the
        training's share does. A top-1 nearer than `std` to 0 or 1 counts as that far."""
        away = 0.0 if score is None or not self.score_width else (score - self.score_middle) / self.score_width
        told = self.top1_middle + self.top1_width * min(max(away, -_FARTHEST), _FARTHEST)
        edge = min(max(std, _EDGE), 0.5)
        mean = (float(log_odds(top1, edge)) + weight * told) / (1 + weight)
        value, inside = 1 / (1 + math.exp(-mean)), min(max(top1, edge), 1 - edge)
        return value, std / (inside * (1 - inside)) / (1 + weight) * value * (1 - value)


class UntrainedRung:
    """Draws top-1 after a training (`measure`, named by `fingerprint`) towards the untrained network's score, taken at
    the architecture's own image size.

    `prepare` trains `n_anchors` networks of `space` once (all, where it has fewer), or finds them trained. Same
    architecture and seed: same score on one machine.
    """

    def __init__(self, dataset: Dataset, space: SearchSpace, measure: Callable[[Architecture, int], Estimate],
                 fingerprint: str, n_anchors: int, weight: float, threads: int) -> None:
        self.space, self.measure, self.weight = space, measure, float(weight)
        self.n_anchors = min(n_anchors, space.n_architectures)
        self._scorer = Scorer(dataset, min(_IMAGES, len(dataset.train)), threads=threads)
        self._anchors = digest(space.fingerprint, self.n_anchors, self._scorer.fingerprint, fingerprint, SCORE)
        self.fingerprint = digest(self._anchors, self.weight)
        self.setup_seconds = 0.0
        self.setup_here = False
        self._n_measured = 0
        self._scale: Scale | None = None

    @property
    def path(self) -> Path:
        """Where the anchors are kept."""
        return home() / "multi_fidelity" / f"anchors-{self._anchors}.json"

    def prepare(self, console: Console) -> None:
        """ConfigError, DataError when there are fewer than LEAST_ANCHORS networks, or fewer could be trained."""
        if self.n_anchors < LEAST_ANCHORS:
            raise ConfigError(f"multi_fidelity: space {self.space.name} has {self.n_anchors} networks, and "
                              f"{LEAST_ANCHORS} must be trained to tell what a score of untrained ones means. Set "
                              "multi_fidelity.untrained=0.")
        found = anchors(self.path, chosen(self.space, self.n_anchors, 0, "multi_fidelity.anchors"), self._anchor,
                        console)
        self.setup_here = self._n_measured == len(found)
        self.setup_seconds = sum(one.seconds + sum(one.score_seconds.values()) for one in found)
        good = [one for one in found if not one.failed]
        if len(good) < LEAST_ANCHORS:
            why = next(one.failed for one in found if one.failed)
            raise DataError(f"multi_fidelity: {len(good)} of {len(found)} anchors could be scored and trained ({why}); "
                            f"{LEAST_ANCHORS} are needed. Set multi_fidelity.untrained=0 or a recipe that they bear; "
                            f"what is kept lies in {self.path}.")
        top1, scores = [one.top1 for one in good], [one.scores[SCORE] for one in good]
        self._scale = Scale.of(top1, scores)
        console.note(f"multi_fidelity: {len(good)} anchors trained in {self.setup_seconds:.0f} s; their untrained "
                     f"scores rank them with Kendall tau {kendall_tau(np.array(scores), np.array(top1)):.2f}")

    def score(self, architecture: Architecture, seed: int) -> float | None:
        """NASWOT with the initial weights of `seed`, None where there is none; ValueError before `prepare`."""
        if self._scale is None:
            raise ValueError("multi_fidelity: call prepare(console) before evaluate().")
        try:
            return self._scorer.scores(architecture, (SCORE,), seed)[0][SCORE]
        except CandidateError:
            return None

    def drawn(self, top1: float, std: float, score: float | None) -> tuple[float, float]:
        """See Scale.drawn; ValueError before `prepare`."""
        if self._scale is None:
            raise ValueError("multi_fidelity: call prepare(console) before evaluate().")
        return self._scale.drawn(top1, std, score, self.weight)

    def _anchor(self, network: Architecture) -> Anchor:
        self._n_measured += 1
        try:
            scores, seconds = self._scorer.scores(network, (SCORE,), 0)
            trained = self.measure(network, 0)
        except CandidateError as error:
            return Anchor(network.id, failed=str(error))
        return Anchor(network.id, trained.value, trained.std, trained.seconds, scores, seconds)


def _spread(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Median and standard deviation, the latter by mean absolute deviations, which one failed training moves less."""
    middle = float(np.median(values))
    width = _NORMAL * float(np.mean(np.abs(np.asarray(values, float) - middle)))
    return middle, width if width > 1e-9 * (1 + abs(middle)) else 0.0
