"""What a search optimises: the front of top-1 against known costs, MnasNet's reward, or top-1 under the hard cap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwnas.cli.options import read_value
from hwnas.errors import BudgetError, ConfigError, UnknownName
from hwnas.study.costs import COSTS, LATENCY, KnownObjective, Terms, check_known
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.latency.model import Predictions
    from hwnas.space.architecture import Architecture
    from hwnas.space.search_space import SearchSpace

KINDS = ("pareto", "reward", "cap")
REWARDS: dict[str, tuple[float, float]] = {"soft": (-0.07, -0.07), "hard": (0.0, -1.0)}
CAP_QUANTILE = 0.9  # as conf/search.yaml
CAP_QUANTILES = (0.5, 0.999)  # the range of such quantiles


Predict = Callable[[NDArray[np.int64]], "Predictions"]


def reward(top1: ArrayLike, latency_ms: ArrayLike, target_ms: float, kind: str = "soft") -> Any:
    """Acc * (Lat / T)^w of MnasNet (Tan et al., CVPR 2019): a float, or an array if an argument is one.

    `soft`: w = -0.07 on both sides of T; `hard`: w = 0 up to T and -1 above it.
    """
    if kind not in REWARDS:
        raise UnknownName("reward", kind, REWARDS)
    below, above = REWARDS[kind]
    ratio = np.asarray(latency_ms, dtype=np.float64) / target_ms
    value = np.asarray(top1, dtype=np.float64) * ratio ** np.where(ratio <= 1, below, above)
    return float(value) if value.ndim == 0 else value


def positive_ms(key: str, value: Any) -> float:
    """`value` as a latency in ms; ConfigError naming `key` unless it is a finite number above 0."""
    return float(read_value(value, float, key, above=0, what="a number of milliseconds above 0"))


@dataclass(frozen=True, slots=True)
class Objective:
    """What a search optimises.

    `pareto` raises top-1 and lowers the `known` costs. `reward` raises one number. `cap` raises top-1 alone, among
    networks within the hard cap. `target_ms` is T of the reward (None: not known yet, see `at`). `terms` describe the
    deployment that costs depend on. Every kind records the reward and keeps the hard cap: see `check_cap`.
    """

    target_ms: float | None
    kind: Literal["pareto", "reward", "cap"] | str = "pareto"
    reward_kind: Literal["soft", "hard"] | str = "soft"
    known: tuple[str, ...] = (LATENCY,)
    terms: Terms = field(default_factory=Terms)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("objective", self.kind, KINDS)
        if self.reward_kind not in REWARDS:
            raise UnknownName("reward", self.reward_kind, REWARDS)
        if self.target_ms is not None:
            positive_ms("objective.target_ms", self.target_ms)
        object.__setattr__(self, "known", check_known(self.known, self.terms))

    @property
    def minimised(self) -> tuple[KnownObjective, ...]:
        """The costs that the study minimises, in the order of `values`."""
        return tuple(COSTS[name] for name in self.known) if self.kind == "pareto" else ()

    @property
    def directions(self) -> tuple[Literal["maximize", "minimize"], ...]:
        """Optuna's directions, in the order of `values`."""
        costs: list[Literal["minimize"]] = ["minimize" for _ in self.minimised]
        return "maximize", *costs

    def costs(self, latency_ms: float, network: Architecture | None = None) -> dict[str, float]:
        """The minimised costs by their column in trials.csv; latency and price need no `network`."""
        blocks = network.blocks() if network is not None and any(not cost.of_latency for cost in self.minimised) else ()
        return {cost.predicted: cost.of(latency_ms, blocks, self.terms) for cost in self.minimised}

    def at(self, target_ms: float) -> Objective:
        """The same objective with this T, rounded to a millionth of a millisecond."""
        return replace(self, target_ms=round(float(target_ms), 6))

    def rewards(self, top1: ArrayLike, latency_ms: ArrayLike) -> Any:
        """The reward as a float, or as an array if an argument is one. ValueError while T is not known."""
        if self.target_ms is None:
            raise ValueError("T of the reward is not known yet")
        return reward(top1, latency_ms, self.target_ms, self.reward_kind)

    def reward(self, top1: float, latency_ms: float) -> float:
        """The reward of one network."""
        return float(self.rewards(top1, latency_ms))

    def values(self, top1: float, latency_ms: float, network: Architecture | None = None) -> tuple[float, ...]:
        """The values of one network in the study."""
        if self.kind == "reward":
            return (self.reward(top1, latency_ms),)
        return top1, *self.costs(latency_ms, network).values()

    def __str__(self) -> str:
        """Names the study. Only costs other than the default appear, so that older studies keep their name."""
        costs = [f"price at {self.terms.price_per_hour:g} an hour" if cost.name == "price" else cost.name
                 for cost in self.minimised]
        of = "" if costs in ([], [LATENCY]) else f" of {' and '.join(costs)}"
        return f"{self.kind}{of}, {self.reward_kind} reward at {self.target_ms:.6g} ms"


def upper_ms(predictions: Predictions, quantile: float = CAP_QUANTILE) -> NDArray[np.float64]:
    """Upper quantile of predicted latencies in ms, array [n]. A hard cap is compared with it.

    0.95 is the upper end of the 90 % interval. Other quantiles scale its half-width like a normal distribution's.
    """
    scale = NormalDist().inv_cdf(quantile) / NormalDist().inv_cdf(0.95)
    mean = np.asarray(predictions.mean, dtype=np.float64)
    return np.asarray(mean + (np.asarray(predictions.high) - mean) * scale, dtype=np.float64)


def check_quantile(value: Any) -> float:
    """`value` as the cap's quantile; ConfigError unless it is from 0.5 to 0.999."""
    return float(read_value(value, float, "budget.quantile", low=CAP_QUANTILES[0], high=CAP_QUANTILES[1]))


def fastest(space: SearchSpace, predict: Predict, quantile: float = CAP_QUANTILE, seed: int = 0
            ) -> tuple[NDArray[np.int64], float]:
    """Find the network with the lowest predicted `quantile`: its codes [p] and its latency in ms.

    The search starts from the best of 4096 random networks. It tries every single-parameter change of the best, until
    none helps.
    """
    def score(codes: NDArray[np.int64]) -> NDArray[np.float64]:
        return upper_ms(predict(codes), quantile)

    codes = space.sample(np.random.default_rng(seed), 4096)
    scores = score(codes)
    best, value = codes[scores.argmin()], float(scores.min())
    while True:
        neighbours = []
        for column, parameter in enumerate(space.parameters):
            rows = np.repeat(best[None], len(parameter.choices), axis=0)
            rows[:, column] = np.arange(len(parameter.choices))
            neighbours.append(rows)
        codes = np.concatenate(neighbours)
        scores = score(codes)
        if not scores.min() < value:
            return best, value
        best, value = codes[scores.argmin()], float(scores.min())


def check_cap(space: SearchSpace, predict: Predict, cap_ms: float, quantile: float = CAP_QUANTILE, seed: int = 0
              ) -> None:
    """BudgetError naming the nearest reachable latency when no network of the space meets the cap."""
    positive_ms("budget.latency_ms", cap_ms)
    _, nearest = fastest(space, predict, check_quantile(quantile), seed)
    if nearest > cap_ms:
        enough = math.ceil(nearest * 1000) / 1000  # rounded up, so that a user who follows the advice meets the cap
        raise BudgetError(
            f"budget.latency_ms={cap_ms:g} is below the fastest network of the space: {nearest:.4g} ms "
            f"({nearest / cap_ms - 1:.0%} above the cap, {quantile:.0%} quantile of its prediction). "
            f"Raise it to at least {enough:.3f}, or search a smaller space.")


def read_objective(section: Mapping[str, Any], target: Target) -> Objective:
    """Read the `objective` section of a configuration for a deployment; ConfigError names what is wrong with it.

    If the section gives no `price_per_hour`, the target's counts. Older sections have no `known`.
    """
    if missing := [key for key in ("name", "reward") if key not in section]:
        raise ConfigError(f"objective.{missing[0]} is missing. Give it, or choose another objective=NAME.")
    price = section.get("price_per_hour")
    terms = Terms(target.precision, target.batch, target.price_per_hour if price is None else price)
    return Objective(section.get("target_ms"), str(section["name"]), str(section["reward"]),
                     section.get("known", (LATENCY,)), terms)
