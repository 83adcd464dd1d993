"""Multi-fidelity: networks climb rungs of epochs while they could enter the front; the first rung is untrained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.estimator import Earlier, Estimate
from hwnas.accuracy.untrained import LEAST_ANCHORS, UntrainedRung
from hwnas.cli.options import Config, option
from hwnas.data.contents import digest
from hwnas.data.dataset import Dataset, Subsets, top1
from hwnas.errors import ConfigError
from hwnas.lazy import LazyModule
from hwnas.networks.build import build
from hwnas.networks.weights import import_timm
from hwnas.space.architecture import Architecture
from hwnas.stats import binomial_std, kendall_tau, log_odds
from hwnas.system.libraries import release_memory
from hwnas.training.loop import predict, seeded, train
from hwnas.training.recipe import Recipe, all_with_recipe, content, read_with_recipe

if TYPE_CHECKING:
    import scipy.stats
    from torch import nn

    from hwnas.cli.progress import Console
    from hwnas.space.search_space import SearchSpace
else:
    scipy = LazyModule("scipy")


# The learning rate falls over the whole length (cosine). In trials, this gave a higher top-1 at the top rung than a
# constant rate with a final decay, and than a restart at each rung.
MULTI_FIDELITY = Recipe("multi_fidelity", epochs=4, shift=0.06)
POOL_EPOCHS = 8  # most epochs that have images of their own: the images of all of them lie in memory
Array = NDArray[np.float64]
NEAREST = 4  # a network is compared with NEAREST * eta networks of similar cost
LENGTHS = ("epochs", "min_steps", "max_steps")  # fields of a Recipe that the rungs replace


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted top-1 at the top rung. `std` says how far networks lie from it, on the same validation images."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Halving:
    """When to stop a training: see `hopeless`. A whole curve has `n_rungs` values."""

    n_rungs: int
    eta: int = 3
    quantile: float = 0.9
    min_history: int = 8


def hopeless(curve: Sequence[float], costs: Sequence[float], earlier: Sequence[Earlier], rule: Halving,
             told: Callable[[Forecast], Forecast] = lambda predicted: predicted) -> Forecast | None:
    """The forecast of a network that may stop after the rungs in `curve`; None if it must train on.

    A network trains on in two cases. First, when it can still reach the front: no network that costs as little and
    was trained to the top beats its forecast at `rule.quantile`. Second, when it is among the best 1/eta of the
    networks of nearest cost at this rung. The second case is asynchronous successive halving (Li et al., MLSys 2020)
    for a front. It decides at once and never waits, as in Klein et al., arXiv 2003.10865.
    `told` turns a forecast into the value that is compared with the others' values: those may differ from the ends
    of their curves.
    """
    if not 0 < len(curve) < rule.n_rungs or among_best(curve, costs, earlier, rule.eta):
        return None
    predicted = forecast(curve, earlier, rule)
    return predicted if predicted is not None and dominated(told(predicted), costs, earlier, rule) else None


def forecast(curve: Sequence[float], earlier: Sequence[Earlier], rule: Halving) -> Forecast | None:
    """Predict the top rung from the last one in `curve`, rung by rung.

    None while fewer than `min_history` networks show one of the steps. Each step learns from all networks that
    reached it. So the selection of the networks that went on does not bias it (regressions in sequence over monotone
    missing data; Little and Rubin 2019, chapter 7).
    """
    mean, variance = float(log_odds(curve[-1])), 0.0
    for rung in range(len(curve), rule.n_rungs):
        pairs = np.array([network.curve[rung - 1:rung + 1] for network in earlier if len(network.curve) > rung], float)
        if len(pairs) < rule.min_history:
            return None
        step = _Step.fit(log_odds(pairs[:, 0]), log_odds(pairs[:, 1]))
        mean, variance = step(mean, variance)
    top1 = 1 / (1 + math.exp(-mean))
    return Forecast(top1, math.sqrt(variance) * top1 * (1 - top1))


def dominated(predicted: Forecast, costs: Sequence[float], earlier: Sequence[Earlier], rule: Halving) -> bool:
    """Whether some network trained to the top costs no more and beats the forecast with certainty `rule.quantile`."""
    z = NormalDist().inv_cdf(rule.quantile)
    return any(network.value - predicted.mean > z * math.hypot(predicted.std, network.std) for network in earlier
               if len(network.curve) == rule.n_rungs and not network.stopped
               and all(theirs <= ours for theirs, ours in zip(network.costs, costs, strict=True)))


def among_best(curve: Sequence[float], costs: Sequence[float], earlier: Sequence[Earlier], eta: int) -> bool:
    """Whether fewer than 1/eta of the `NEAREST * eta` networks of nearest log cost were better at this rung."""
    at = [(math.dist(_logs(network.costs), _logs(costs)), network.curve[len(curve) - 1])
          for network in earlier if len(network.curve) >= len(curve)]
    near = [value for _, value in sorted(at)[:NEAREST * eta]]
    return sum(value > curve[-1] for value in near) < max(1, (len(near) + 1) // eta)


def _logs(costs: Sequence[float]) -> list[float]:
    return [math.log(max(cost, 1e-12)) for cost in costs]


@dataclass(frozen=True, slots=True)
class _Step:
    """A line that predicts the logit at the next rung, with figures of the networks that it was fitted to."""

    slope: float
    at: tuple[float, float]
    residual_std: float
    n: int
    centre: float
    spread: float

    @classmethod
    def fit(cls, lower: Array, upper: Array) -> _Step:
        """Fit Sen's slope (JASA 63, 1968), which leaves no Kendall correlation between `lower` and the residuals.

        The slope shrinks towards 0 by James-Stein's factor when the measured Kendall tau may be chance: a rung that
        does not rank networks says nothing about the next one.
        """
        n = len(lower)
        slope = _share_to_keep(lower, upper) * _sen(lower, upper)
        at = float(np.median(lower)), float(np.median(upper))
        left = upper - at[1] - slope * (lower - at[0])
        std = float(np.sqrt((left**2).sum() / max(1, n - 2)))
        return cls(slope, at, std, n, float(lower.mean()), float(((lower - lower.mean())**2).sum()))

    def __call__(self, mean: float, variance: float) -> tuple[float, float]:
        """Mean and variance of a new network's next rung. The variance grows with its distance from those seen."""
        away = (mean - self.centre)**2 / self.spread if self.slope and self.spread else 0.0
        own = self.residual_std**2 * (1 + 1 / self.n + away)
        return self.at[1] + self.slope * (mean - self.at[0]), self.slope**2 * variance + own


def _sen(lower: Array, upper: Array) -> float:
    return float(scipy.stats.theilslopes(upper, lower).slope) if np.ptp(lower) else 0.0


def _share_to_keep(lower: Array, upper: Array) -> float:
    """The slope's share to keep: 1 minus the share of tau squared that chance alone would give (Kendall's variance)."""
    if not np.ptp(lower) or not np.ptp(upper):
        return 0.0
    n, tau = len(lower), float(kendall_tau(lower, upper))
    chance = 2 * (2 * n + 5) / (9 * n * (n - 1))
    return max(0.0, 1 - chance / tau**2) if tau > 0 else 0.0


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """Rungs, images and the stopping rule of a multi-fidelity training. The Recipe holds the rest.

    `rungs` are numbers of epochs, ascending. After each of them the network is validated. It may stop at each but the
    last: `hopeless` explains `eta`, `quantile` and `min_history`.
    An epoch trains on `train_images` images (0: all). Each epoch takes new images from a pool of POOL_EPOCHS times as
    many, until the pool is used up. `validation_images` (0: all) is the size of a fixed stratified subset.
    `image_size` 0 means the architecture's own.
    `untrained` is the weight of the untrained network's score; the training's weight is 1. 0 means the training
    alone. `anchors` networks are trained once, to express scores in the training's units (`UntrainedRung`).
    """

    rungs: tuple[int, ...] = option(
        (2, 4), low=1, high=10_000, check=lambda rungs: rungs and list(rungs) == sorted(set(rungs)),
        what="ascending whole numbers of epochs from 1 to 10000, e.g. [1,2,4]", help="epochs after which it may stop")
    eta: int = option(3, low=2, high=100, help="one of so many goes on after a rung")
    quantile: float = option(0.9, low=0.5, high=0.9999, as_given=True, help="certainty that is needed to stop one")
    min_history: int = option(8, low=4, high=10**6, help="networks that reached a rung before it is predicted")
    train_images: int = option(1152, low=0, high=10**9, help="training images of an epoch (0: all)")
    validation_images: int = option(2048, low=0, high=10**9, help="validation images, a stratified subset (0: all)")
    image_size: int = option(0, low=0, high=1024, help="px (0: the architecture's own)")
    untrained: float = option(0.5, low=0, high=100, as_given=True,
                              help="weight of the untrained network's score beside the training's 1 (0: none)")
    anchors: int = option(8, low=LEAST_ANCHORS, high=1000, help="networks trained once, for the score's units")

    @property
    def halving(self) -> Halving:
        """The rule that stops trainings."""
        return Halving(len(self.rungs), self.eta, self.quantile, self.min_history)


# The options that decide a training. Fingerprints in use depend on this order.
_NAMED = ("rungs", "eta", "quantile", "min_history", "train_images", "validation_images", "image_size", "untrained",
          "anchors")


@dataclass(eq=False)
class MultiFidelity:
    """An AccuracyEstimator that EvaluatesAmong: it trains a network up the rungs while it could enter the front.

    A stopped network gets a predicted top-1 of the top rung, with the prediction's standard deviation. The earlier
    networks give the prediction. With `untrained`, the untrained network's score is combined with both figures.
    The network in training stays in memory, so a worker that dies trains it again.
    The same architecture, earlier networks and seed give the same value on one machine. `build` makes the network
    (default `hwnas.networks.build.build`).
    """

    dataset: Dataset
    recipe: Recipe = MULTI_FIDELITY
    options: FidelityOptions = FidelityOptions()
    build: Callable[[Architecture], nn.Module] = build
    space: SearchSpace | None = None
    untrained: UntrainedRung | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.recipe = replace(self.recipe, epochs=self.options.rungs[-1], min_steps=0, max_steps=0)
        options = self.options
        self._subsets = Subsets(self.dataset, options.train_images * min(options.rungs[-1], POOL_EPOCHS),
                                options.validation_images)
        if options.untrained:
            if self.space is None:
                raise ConfigError("accuracy=multi_fidelity needs a search space, whose networks its anchors are. Give "
                                  "one, or set multi_fidelity.untrained=0.")
            whole = digest(self.dataset.fingerprint, self.recipe.fingerprint, options.rungs[-1], options.train_images,
                           options.validation_images, options.image_size)
            self.untrained = UntrainedRung(self.dataset, self.space, self._measure_whole, whole, options.anchors,
                                           options.untrained, self.recipe.threads)

    @property
    def fingerprint(self) -> str:
        """Names everything that decides the values, except the architecture and the networks before it."""
        trained = content(replace(self.options, untrained=0, anchors=0), _NAMED, separator=", ")
        return digest(self.dataset.fingerprint, self.recipe.fingerprint, f"FidelityOptions({trained})",
                      *([self.untrained.fingerprint] if self.untrained else []))

    @property
    def setup_seconds(self) -> float:
        """What training the anchors has cost."""
        return self.untrained.setup_seconds if self.untrained else 0.0

    @property
    def setup_here(self) -> bool:
        """Whether this process trained them all."""
        return self.untrained is None or self.untrained.setup_here

    def prepare(self, console: Console) -> None:
        """Train the anchors, or read the stored ones. DataError when too few can be trained."""
        if self.untrained:
            self.untrained.prepare(console)

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]] = (), seed: int = 0) -> Estimate:
        """The same as `evaluate_among` without other networks: nothing is stopped. TrainingError."""
        return self.evaluate_among(architecture, (), (), seed)

    def evaluate_among(self, architecture: Architecture, costs: Sequence[float], earlier: Sequence[Earlier],
                       seed: int) -> Estimate:
        """Validation top-1 of the top rung, measured or predicted, with its 90 % interval and the rungs' curve.

        With `untrained`, the untrained network's score is part of it. `std` combines the prediction's error and the
        validation set's. TrainingError when the loss is not finite.
        """
        self._subsets.check(architecture)  # before it is scored, too
        start = time.perf_counter()
        if self.untrained is None:
            return self._train(architecture, costs, earlier, seed)
        drawn = partial(self.untrained.drawn, score=self.untrained.score(architecture, seed))
        trained = self._train(architecture, costs, earlier, seed, drawn)
        value, std = drawn(trained.value, trained.std)
        return Estimate.of_top1(value, std, trained.source, seconds=time.perf_counter() - start, curve=trained.curve,
                                stopped=trained.stopped, curve_epochs=trained.curve_epochs,
                                extrapolated=trained.extrapolated)

    def _measure_whole(self, architecture: Architecture, seed: int) -> Estimate:
        """The result of the whole training, without the untrained score."""
        return self._train(architecture, (), (), seed)

    def _train(self, architecture: Architecture, costs: Sequence[float], earlier: Sequence[Earlier], seed: int,
               drawn: Callable[[float, float], tuple[float, float]] = lambda top1, std: (top1, std)) -> Estimate:
        """Train up the rungs; `drawn` combines a top-1 and its standard deviation with the untrained score."""
        self._subsets.check(architecture)
        start = time.perf_counter()
        curve: list[float] = []
        predicted: Forecast | None = None
        images, validation = self._subsets.at(self.options.image_size or architecture.image_size)

        def after(epoch: int, network: nn.Module) -> bool:
            nonlocal predicted
            if epoch in self.options.rungs:
                curve.append(top1(predict(network, validation.images, self.dataset), validation.labels))
                predicted = hopeless(curve, costs, earlier, self.options.halving,
                                     lambda forecast: Forecast(*drawn(forecast.mean, forecast.std)))
            return predicted is not None

        with seeded(seed, self.recipe.threads):
            train(self.build(architecture), images, recipe=self.recipe, dataset=self.dataset, seed=seed, on_epoch=after,
                  epoch_images=self.options.train_images)
        release_memory()
        value = curve[-1] if predicted is None else predicted.mean
        # All networks share the validation images, so the prediction's error does not contain the chance in these.
        std = (binomial_std(value, len(validation))**2 + (predicted.std**2 if predicted else 0.0))**0.5
        stopped = predicted is not None
        return Estimate.of_top1(value, std, "proxy", seconds=time.perf_counter() - start, curve=tuple(curve),
                                stopped=stopped, curve_epochs=self.options.rungs[:len(curve)], extrapolated=stopped)


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, for `--show-config`."""
    options = all_with_recipe(FidelityOptions, given, MULTI_FIDELITY, "multi_fidelity")
    return {key: value for key, value in options.items() if key not in LENGTHS}


def load(config: Config, dataset: Dataset, space: SearchSpace | None = None) -> MultiFidelity:
    """The door of `hwnas.accuracy.load_estimator`. `config`: fields of FidelityOptions, and of Recipe except its
    length. UnknownName, ConfigError."""
    for key in LENGTHS:
        if key in config:
            raise ConfigError(f"multi_fidelity.{key} is decided by the rungs. Give epochs as "
                              "multi_fidelity.rungs=[1,2,4].")
    import_timm()  # no network's seconds hold its import
    options, recipe = read_with_recipe(FidelityOptions, config, MULTI_FIDELITY, "multi_fidelity")
    return MultiFidelity(dataset, recipe, options, space=space)
