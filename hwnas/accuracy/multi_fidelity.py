"""Accuracy by trainings of several lengths: the `multi_fidelity` estimator."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hwnas.accuracy.fidelity_rungs import Forecast, Halving, hopeless
from hwnas.accuracy.memory import release_memory
from hwnas.accuracy.proxy import Z90, binomial_std
from hwnas.accuracy.recipe import Recipe
from hwnas.accuracy.subsets import Subsets
from hwnas.accuracy.training import predict, seeded, top1, train
from hwnas.architecture import Architecture
from hwnas.errors import ConfigError
from hwnas.estimate import Earlier, Estimate

if TYPE_CHECKING:
    from torch import nn

    from hwnas.accuracy.dataset import Dataset

# The rate falls over the whole length (cosine): at the top that came out above a constant rate with a decay in the end,
# and above restarts at each rung. What a rung shows in between is the average of the weights over the last steps.
MULTI_FIDELITY = Recipe("multi_fidelity", epochs=4, lr=5e-3, schedule="cosine", warmup=0.1, ema_decay=0.95,
                        shift=0.06)
LENGTHS = ("epochs", "min_steps", "max_steps")  # of a Recipe: here the rungs say how long


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What is trained and looked at, besides the Recipe, and when a training ends.

    After each number of epochs in `rungs` (ascending) a network is validated and, before the last, may be stopped: see
    `hwnas.accuracy.fidelity_rungs.hopeless` for `eta`, `quantile` and `min_history` (networks that reached a rung
    before it is predicted). `train_images`, `validation_images`: fixed stratified subsets (0: all); `image_size` 0 is
    the architecture's own.
    """

    rungs: tuple[int, ...] = (1, 2, 4)
    eta: int = 3
    quantile: float = 0.9
    min_history: int = 8
    train_images: int = 1280
    validation_images: int = 2048
    image_size: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FidelityOptions:
        """Read and check; ConfigError names key, rule and value."""
        values: dict[str, Any] = {
            key: _rungs(value) if key == "rungs" else _number(key, value) for key, value in config.items()}
        return cls(**values)

    @property
    def halving(self) -> Halving:
        """The rule by which trainings are stopped."""
        return Halving(len(self.rungs), self.eta, self.quantile, self.min_history)


def _rungs(value: Any) -> tuple[int, ...]:
    rungs = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    whole = all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= 10_000 for one in rungs)
    if not rungs or not whole or list(rungs) != sorted(set(rungs)):
        raise ConfigError("multi_fidelity.rungs must be ascending whole numbers of epochs from 1 to 10000, e.g. "
                          f"[1,2,4], got {value!r}.")
    return rungs


def _number(key: str, value: Any) -> Any:
    low, high = {"eta": (2, 100), "quantile": (0.5, 0.9999), "min_history": (4, 10**6), "image_size": (0, 1024)}.get(
        key, (0, 10**9))
    kind: Any = int | float if key == "quantile" else int
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
        rule = f"{'a number' if key == 'quantile' else 'a whole number'} from {low} to {high}"
        raise ConfigError(f"multi_fidelity.{key} must be {rule}, got {value!r}.")
    return value


@dataclass(eq=False)
class MultiFidelity:
    """An AccuracyEstimator that EvaluatesAmong: trains a network up the rungs as far as it could enter the front.

    One that is stopped gets the top-1 that the top rung would have shown, predicted from the earlier networks, and
    that prediction's standard deviation. What is trained stays in memory: a worker that dies trains its network again.
    Same architecture, earlier networks and seed: same value on one machine. `build` makes the network (default
    `hwnas.network.build`).
    """

    dataset: Dataset
    recipe: Recipe = MULTI_FIDELITY
    options: FidelityOptions = FidelityOptions()
    build: Callable[[Architecture], nn.Module] | None = None

    def __post_init__(self) -> None:
        self.recipe = replace(self.recipe, epochs=self.options.rungs[-1], min_steps=0, max_steps=0)
        self._subsets = Subsets(self.dataset, self.options.train_images, self.options.validation_images)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dataset: Dataset) -> MultiFidelity:
        """`config` holds fields of FidelityOptions and of Recipe but its length; UnknownName, ConfigError."""
        for key in LENGTHS:
            if key in config:
                raise ConfigError(f"multi_fidelity.{key} is decided by the rungs. Give epochs as "
                                  "multi_fidelity.rungs=[1,2,4].")
        mine = {f.name for f in fields(FidelityOptions)}
        recipe = Recipe.from_config({k: v for k, v in config.items() if k not in mine}, MULTI_FIDELITY,
                                    "multi_fidelity")
        return cls(dataset, recipe, FidelityOptions.from_config({k: v for k, v in config.items() if k in mine}))

    @property
    def fingerprint(self) -> str:
        """Names all that decides its values, besides the architecture and the networks before it."""
        content = f"{self.dataset.fingerprint}|{self.recipe.fingerprint}|{self.options}"
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]] = (), seed: int = 0) -> Estimate:
        """Validation top-1 at the top rung: without the others' costs nothing is stopped. TrainingError."""
        return self.evaluate_among(architecture, (), (), seed)

    def evaluate_among(self, architecture: Architecture, costs: Sequence[float], earlier: Sequence[Earlier],
                       seed: int) -> Estimate:
        """Validation top-1, measured at the top rung or predicted, with its 90 % interval and the rungs' curve;
        TrainingError when the loss is not finite. `std` joins the prediction's error and the validation set's."""
        self._subsets.check(architecture)
        start = time.perf_counter()
        curve: list[float] = []
        predicted: Forecast | None = None
        images, validation = self._subsets.at(self.options.image_size or architecture.image_size)

        def after(epoch: int, network: nn.Module) -> bool:
            nonlocal predicted
            if epoch in self.options.rungs:
                curve.append(top1(predict(network, validation.images, self.dataset), validation.labels))
                predicted = hopeless(curve, costs, earlier, self.options.halving)
            return predicted is not None

        with seeded(seed, self.recipe.threads):
            model = self._network(architecture)
            train(model, images, recipe=self.recipe, dataset=self.dataset, seed=seed, on_epoch=after)
        del model
        release_memory()
        return self._estimate(curve, predicted, len(validation), time.perf_counter() - start)

    def _network(self, architecture: Architecture) -> nn.Module:
        if self.build is not None:
            return self.build(architecture)
        from hwnas.network import build

        return build(architecture)

    def _estimate(self, curve: Sequence[float], predicted: Forecast | None, n_images: int, seconds: float) -> Estimate:
        value = curve[-1] if predicted is None else predicted.mean
        # The validation images are the same for all, so what they are by chance is not in the prediction's error.
        std = (binomial_std(value, n_images)**2 + (predicted.std**2 if predicted else 0.0))**0.5
        stopped = predicted is not None
        return Estimate(value, max(0.0, value - Z90 * std), min(1.0, value + Z90 * std), std, "proxy", seconds,
                        tuple(curve), stopped, self.options.rungs[:len(curve)], extrapolated=stopped)


def load(config: Mapping[str, Any], dataset: Dataset, space: object = None) -> MultiFidelity:
    """The door of `hwnas.accuracy.load_estimator`."""
    return MultiFidelity.from_config(config, dataset)
