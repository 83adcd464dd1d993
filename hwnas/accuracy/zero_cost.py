"""Accuracy from an untrained network's score: the `zero_cost` estimator."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.dataset import Dataset, digest
from hwnas.accuracy.proxy import Z90, Proxy
from hwnas.accuracy.zero_cost_anchors import Anchor, anchors, chosen
from hwnas.accuracy.zero_cost_batch import Scorer
from hwnas.accuracy.zero_cost_fit import Fit, fit, kendall_tau
from hwnas.accuracy.zero_cost_names import CHOICES, CONTROLS, ENSEMBLE, SCORES
from hwnas.architecture import Architecture
from hwnas.errors import CandidateError, ConfigError, DataError, UnknownName
from hwnas.estimate import Estimate
from hwnas.paths import home

if TYPE_CHECKING:
    from hwnas.progress import Console
    from hwnas.space import SearchSpace

LEAST_ANCHORS = 4


@dataclass(frozen=True, slots=True)
class ZeroCostOptions:
    """`score`: one of CHOICES (`ensemble`: all, each with a weight). `anchors`: networks that are trained once, so that
    a score can be told as a top-1. `images`: of the one batch. `seeds`: initial weights that a score is averaged over.
    `seed`: of batch and anchors. `proxy`: changes to the recipe and options of the anchors' training.
    """

    score: str = "naswot"
    anchors: int = 12
    images: int = 32
    seeds: int = 1
    seed: int = 0
    proxy: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ZeroCostOptions:
        """Read and check; UnknownName, ConfigError (key, rule, value)."""
        known = [one.name for one in fields(cls)]
        ranges = {"anchors": (LEAST_ANCHORS, 1000), "images": (8, 4096), "seeds": (1, 100), "seed": (0, 2**31)}
        for key, value in config.items():
            if key not in known:
                raise UnknownName("key of zero_cost", key, known)
            if key == "score" and value not in CHOICES:
                raise UnknownName("zero_cost.score", value, CHOICES)
            if key == "proxy" and not isinstance(value, Mapping):
                raise ConfigError(f"zero_cost.proxy must be a section of keys and values, got {value!r}.")
            if key in ranges:
                low, high = ranges[key]
                if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                    raise ConfigError(f"zero_cost.{key} must be a whole number from {low} to {high}, got {value!r}.")
        return cls(**config)


class ZeroCost:
    """An AccuracyEstimator that trains `anchors` networks once (`prepare`), and no candidate: a candidate's score is
    told as the top-1 that the proxy's short training would give, by the map fitted to the anchors.

    Its `std` is the error at anchors left out. Same architecture and seed: same value on one machine.
    """

    def __init__(self, dataset: Dataset, space: SearchSpace, options: ZeroCostOptions, proxy: Proxy) -> None:
        self.dataset, self.space, self.options, self.proxy = dataset, space, options, proxy
        self.setup_seconds = 0.0
        self.setup_here = False
        self._n_measured = 0
        self._scorer = Scorer(dataset, options.images, options.seeds, options.seed, proxy.recipe.threads)
        self._names = (*SCORES, *CONTROLS) if options.score == ENSEMBLE else (options.score,)
        self._fit: Fit | None = None

    @property
    def fingerprint(self) -> str:
        """Names all that decides its values, besides the architecture."""
        return digest(self._anchors_fingerprint, self.options.score)

    @property
    def _anchors_fingerprint(self) -> str:
        return digest(self.space.fingerprint, self.options.anchors, self._scorer.fingerprint, self.proxy.fingerprint)

    @property
    def path(self) -> Path:
        """Where the anchors are kept."""
        return home() / "zero_cost" / f"anchors-{self._anchors_fingerprint}.json"

    def prepare(self, console: Console) -> None:
        """Train the anchors, or find them trained, and fit the map; says where parameters or MACs rank as well.

        DataError when fewer than LEAST_ANCHORS could be trained and scored.
        """
        networks = chosen(self.space, self.options.anchors, self.options.seed)
        found = anchors(self.path, networks, self._measure, console)
        self.setup_here = self._n_measured == len(found)
        self.setup_seconds = sum(one.seconds + sum(one.score_seconds.values()) for one in found)
        good = [one for one in found if not one.failed and all(name in one.scores for name in self._names)]
        if len(good) < LEAST_ANCHORS:
            why = next((one.failed for one in found if one.failed), f"no {self.options.score} score")
            raise DataError(f"zero_cost: {len(good)} of {len(found)} anchors could be trained and scored ({why}); "
                            f"{LEAST_ANCHORS} are needed. Set zero_cost.anchors, zero_cost.score or zero_cost.proxy; "
                            f"what is kept lies in {self.path}.")
        top1 = np.array([one.top1 for one in good])
        self._fit = fit(_table(good, self._names), top1)
        self._tell(good, self._fit, console)

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]] = (), seed: int = 0) -> Estimate:
        """The top-1 that its score stands for, with the 90 % interval; TrainingError where it has no score."""
        if self._fit is None:
            raise ValueError("zero_cost: call prepare(console) before evaluate().")
        start = time.perf_counter()
        scores, _ = self._scorer.scores(architecture, self._names, seed)
        value, std = float(self._fit(np.array([[scores[name] for name in self._names]]))[0]), self._fit.std
        return Estimate(value, max(0.0, value - Z90 * std), min(1.0, value + Z90 * std), std, "zero_cost",
                        time.perf_counter() - start)

    def _measure(self, network: Architecture) -> Anchor:
        """Train and score one anchor."""
        self._n_measured += 1
        try:
            trained = self.proxy.evaluate(network, (), self.options.seed)
        except CandidateError as error:
            return Anchor(network.id, failed=str(error))
        scores: dict[str, float] = {}
        seconds: dict[str, float] = {}
        for name in (*SCORES, *CONTROLS):
            try:
                one, cost = self._scorer.scores(network, (name,), self.options.seed)
            except CandidateError:  # this network has no such score: it is no anchor for it
                continue
            scores |= one
            seconds |= cost
        return Anchor(network.id, trained.value, trained.std, trained.seconds, scores, seconds)

    def _tell(self, good: Sequence[Anchor], found: Fit, console: Console) -> None:
        """One line: how the score ranks the anchors, and how parameters and MACs do."""
        top1 = np.array([one.top1 for one in good])
        score = self.options.score
        # An ensemble is judged by what it says of anchors left out: its weights come from them.
        ranked = found.left_out if score == ENSEMBLE else _table(good, (score,))[:, 0]
        tau = kendall_tau(ranked, top1)
        controls = {name: kendall_tau(_table(good, (name,))[:, 0], top1) for name in CONTROLS}
        console.note(f"zero_cost: {score} ranks {len(good)} trained anchors with Kendall tau {tau:.2f} ("
                     + ", ".join(f"{name} {value:.2f}" for name, value in controls.items())
                     + f"); its top-1 is off by {found.std:.1%} (root mean square); cost: {self.setup_seconds:.0f} s")
        best = max(controls, key=lambda name: controls[name])
        if max(tau, controls[best]) <= 0:
            console.say(f"note: neither zero_cost.score={score} nor parameters or MACs order the anchors: they may be "
                        "trained too shortly to differ. Set zero_cost.proxy.epochs, or use another estimator.")
        elif score not in CONTROLS and tau <= controls[best]:
            console.say(f"note: zero_cost.score={score} ranks the anchors no better (tau {tau:.2f}) than {best} "
                        f"(tau {controls[best]:.2f}), which costs nothing: zero_cost.score={best}. They were trained "
                        "shortly; python -m hwnas.certify judges by full training.")


def _table(good: Sequence[Anchor], names: Sequence[str]) -> NDArray[np.float64]:
    """Scores [n, k]."""
    return np.array([[one.scores[name] for name in names] for one in good], float)


def load(config: Mapping[str, Any], dataset: Dataset, space: SearchSpace | None = None) -> ZeroCost:
    """The door of `hwnas.accuracy.load_estimator`. `threads` is the anchors' training threads."""
    if space is None:
        raise ConfigError("accuracy=zero_cost needs a search space: its anchors are networks of it.")
    options = ZeroCostOptions.from_config({key: value for key, value in config.items() if key != "threads"})
    threads = {"threads": config["threads"]} if "threads" in config else {}
    return ZeroCost(dataset, space, options, Proxy.from_config({**threads, **options.proxy}, dataset))
