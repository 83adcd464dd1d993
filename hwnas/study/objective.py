"""The objective of a search: the front of top-1 against known costs, MnasNet's reward, or top-1 under the hard cap.

A known cost is a cost that is known before a network is trained. A search may minimise it beside its top-1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwnas.cli.options import option, read_options, read_value
from hwnas.errors import BudgetError, ConfigError, UnknownName
from hwnas.space.blocks.block import ATTENTION, BlockSpec, weights_of
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.latency.model import Predictions
    from hwnas.space.architecture import Architecture
    from hwnas.space.search_space import SearchSpace


GROUP = "hwnas.objectives"  # entry points of other packages
LATENCY = "latency_ms"
# Bytes in an ONNX file. These are exact: one fp32 number; bias, scales and zero points of an int8 output channel.
NUMBER, CHANNEL_INT8 = 4, 17
# These are fitted: the bytes of nodes with their names. They are of a residual sum, a convolution, and one of the two
# convolutions of squeeze-and-excite, in fp32 files and in int8 files, which add QDQ pairs. A GELU is five nodes, other
# activations are one. The network's output has no pair.
ADD, CONVOLUTION, GATE, GELU = 186, 436, 762, 1250
ADD_INT8, CONVOLUTION_INT8, GATE_INT8, OUTPUT_INT8 = 828, 2310, 1128, 2384
FP32_FILE = Target("fp32", "onnxruntime", "fp32")  # the default terms of costs
MOST_KNOWN = 2  # the known-objective sampler cannot search with more


@dataclass(frozen=True, slots=True)
class KnownObjective:
    """A cost (smaller is better) that is known before training.

    It is `of_latency` of the latency in ms (a number or an array), or the sum of `of_block` over a network's blocks.
    The `terms` of both are the deployment: its precision, batch and price.
    `unit` and `scale` are for display. `predicted` is its column in trials.csv, and `exact` its column in front.csv.
    The exact value is `of_file` of the deployed file, or `of_latency` of the measured latency. For a cost with neither,
    front.csv has the column `exact` anyway.
    """

    name: str
    label: str
    unit: str
    predicted: str
    exact: str
    of_latency: Callable[[Any, Target], Any] | None = None
    of_block: Callable[[BlockSpec, Target], float] = lambda block, terms: 0.0
    of_file: Callable[[Path], float] | None = None
    scale: float = 1.0

    def of(self, latency_ms: Any, blocks: Iterable[BlockSpec], terms: Target) -> Any:
        """Return the cost of one network."""
        if self.of_latency is not None:
            return self.of_latency(latency_ms, terms)
        return sum(self.of_block(block, terms) for block in blocks)

    def shown(self, value: float | None) -> str:
        """Return a value as text with its unit; empty for None."""
        return "" if value is None else f"{value * self.scale:.3g} {self.unit}".strip()


def file_bytes(block: BlockSpec, terms: Target) -> float:
    """Return the bytes of a block in the deployed ONNX file: an int8 file for int8 targets, fp32 for all others.

    Weights, and bias and scales of each output channel, are counted exactly. Batch norms are folded, and
    squeeze-and-excite stays fp32 in an int8 file. Nodes and their names are counted by constants, fitted to 28 files
    of three spaces (error: 0.1 % of a file). LiteRT's files are smaller by up to 5 %.
    """
    int8 = terms.precision == "int8"
    total = block.rules.file_bytes[int8]
    if block.skip:
        total += ADD_INT8 if int8 else ADD
    if int8 and block.rules.ends:
        total -= OUTPUT_INT8
    if block.activation == "gelu" and block.kernel:
        total += GELU * block.rules.activations
    for role, n_in, n_out, kernel, _, _ in block.convolutions():
        if role == ATTENTION:  # it has no weights
            continue
        weights = weights_of(role, n_in, n_out, kernel)
        if int8 and role not in block.rules.fp32_roles:
            total += weights + CHANNEL_INT8 * n_out + CONVOLUTION_INT8
        else:
            total += NUMBER * (weights + n_out) + (GATE_INT8 if int8 else GATE if role == "se" else CONVOLUTION)
    return total


def _price(latency_ms: Any, terms: Target) -> Any:
    """Return the price of a million images, if the machine only runs one network on one stream. NaN without a price."""
    # A million images take latency / batch * 1e6 ms, and an hour has 3.6e6 ms.
    return latency_ms * ((terms.price_per_hour or math.nan) / terms.batch / 3.6)


_BUILT_IN = (
    KnownObjective(LATENCY, "latency", "ms", "latency_ms_predicted", LATENCY, of_latency=lambda ms, terms: ms),
    KnownObjective("size_mb", "file size", "MB", "size_mb_predicted", "size_mb",
                   of_block=lambda block, terms: file_bytes(block, terms) / 1e6,
                   of_file=lambda path: path.stat().st_size / 1e6),
    KnownObjective("macs", "MACs", "M MACs", "macs", "macs", of_block=lambda block, terms: block.macs, scale=1e-6),
    KnownObjective("price", "price of a million images", "", "price_per_million_predicted", "price_per_million",
                   of_latency=_price),
)


class ObjectiveRegistry(Mapping[str, KnownObjective]):
    """The known objectives by name: our own, then the entry points `hwnas.objectives` of other packages."""

    @cached_property
    def _all(self) -> dict[str, KnownObjective]:
        costs = {cost.name: cost for cost in _BUILT_IN}
        for point in entry_points(group=GROUP):
            cost = point.load()
            if not isinstance(cost, KnownObjective) or cost.name != point.name or cost.name in costs:
                raise ConfigError(f"objective {point.name!r} of {point.value} is no hwnas.study.KnownObjective of that "
                                  "name, or one of ours has it. Update that package or remove it.")
            costs[cost.name] = cost
        return costs

    def __getitem__(self, name: str) -> KnownObjective:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


COSTS = ObjectiveRegistry()


def check_known(names: Sequence[str], terms: Target) -> tuple[str, ...]:
    """Check `objective.known` and return the names in the order of COSTS. Raises ConfigError, UnknownName."""
    for name in names:
        if name not in COSTS:
            raise UnknownName("known objective", name, COSTS)
        if names.count(name) > 1:
            raise ConfigError(f"objective.known names {name} twice. Name each once.")
    if not 1 <= len(names) <= MOST_KNOWN:
        raise ConfigError(f"objective.known must hold one or two of {', '.join(COSTS)}, got {len(names)}.")
    of_latency = [name for name in names if COSTS[name].of_latency]
    if len(of_latency) > 1:
        raise ConfigError(f"objective.known: {' and '.join(of_latency)} are proportional to each other, so the front "
                          "would be that of one of them. Take one of the two.")
    if "price" in names:
        read_value(terms.price_per_hour, float, "objective.price_per_hour", above=0,
                   what="what an hour of the machine costs, for objective.known=[price]: "
                        "objective.price_per_hour=NUMBER, above 0")
    return tuple(name for name in COSTS if name in names)


def known_costs(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the costs of a row of trials.csv that its search minimised, in order; NaN: not known.

    A row without `objectives` comes from a search that minimised latency.
    """
    names = str(row.get("objectives") or LATENCY).split()
    values = (row.get(COSTS[name].predicted) for name in names)
    return tuple(math.nan if value is None else float(value) for value in values)


KINDS = ("pareto", "reward", "cap")
REWARDS: dict[str, tuple[float, float]] = {"soft": (-0.07, -0.07), "hard": (0.0, -1.0)}
CAP_QUANTILE = 0.9  # the default, as in conf/search.yaml
CAP_QUANTILES = (0.5, 0.999)  # the lowest and highest quantile that may be chosen


Predict = Callable[[NDArray[np.int64]], "Predictions"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a search.

    `pareto` raises top-1 and lowers the `known` costs. `reward` raises one number. `cap` raises top-1 alone, among
    networks within the hard cap. `target_ms` is T of the reward (None: not known yet, see `at`). `terms` is the
    deployment that costs depend on. Every kind records the reward and respects the hard cap, see `check_cap`.
    """

    target_ms: float | None
    kind: Literal["pareto", "reward", "cap"] | str = "pareto"
    reward_kind: Literal["soft", "hard"] | str = "soft"
    known: tuple[str, ...] = (LATENCY,)
    terms: Target = FP32_FILE

    def __post_init__(self) -> None:
        if self.reward_kind not in REWARDS:
            raise UnknownName("reward", self.reward_kind, REWARDS)
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
        """Return the minimised costs by their column in trials.csv; latency and price need no `network`."""
        blocks = network.blocks() if network is not None and any(not cost.of_latency for cost in self.minimised) else ()
        return {cost.predicted: cost.of(latency_ms, blocks, self.terms) for cost in self.minimised}

    def at(self, target_ms: float) -> Objective:
        """Return the same objective with this T, rounded to a millionth of a millisecond."""
        return replace(self, target_ms=round(float(target_ms), 6))

    def reward(self, top1: ArrayLike, latency_ms: ArrayLike) -> Any:
        """Return MnasNet's Acc * (Lat / T)^w (Tan et al., CVPR 2019): a float, or an array if an argument is one.

        `soft`: w = -0.07 below and above T; `hard`: w = 0 up to T and -1 above. Raises ValueError if T is not known.
        """
        if self.target_ms is None:
            raise ValueError("T of the reward is not known yet")
        below, above = REWARDS[self.reward_kind]
        ratio = np.asarray(latency_ms, dtype=np.float64) / self.target_ms
        value = np.asarray(top1, dtype=np.float64) * ratio ** np.where(ratio <= 1, below, above)
        return float(value) if value.ndim == 0 else value

    def values(self, top1: float, latency_ms: float, network: Architecture | None = None) -> tuple[float, ...]:
        """Return the values of one network in the study, in the order of `directions`."""
        if self.kind == "reward":
            return (self.reward(top1, latency_ms),)
        return top1, *self.costs(latency_ms, network).values()

    @property
    def shown(self) -> str:
        """The objective as text for users: without the reward, unless the search is for it."""
        return str(self) if self.kind == "reward" else str(self).rsplit(", ", 1)[0]

    def __str__(self) -> str:
        """Return the text in a study's identity. Costs are named unless they are the default, as in older studies."""
        costs = [f"price at {self.terms.price_per_hour:g} an hour" if cost.name == "price" else cost.name
                 for cost in self.minimised]
        of = "" if costs in ([], [LATENCY]) else f" of {' and '.join(costs)}"
        return f"{self.kind}{of}, {self.reward_kind} reward at {self.target_ms:.6g} ms"


def upper_ms(predictions: Predictions, quantile: float = CAP_QUANTILE) -> NDArray[np.float64]:
    """Return the upper quantile of predicted latencies in ms, array [n]. A hard cap is compared with it.

    The quantile 0.95 is the upper end of the 90 % interval. Others scale its half-width as in a normal distribution.
    """
    scale = NormalDist().inv_cdf(quantile) / NormalDist().inv_cdf(0.95)
    mean = np.asarray(predictions.mean, dtype=np.float64)
    half = np.subtract(predictions.high, mean, out=np.zeros_like(mean), where=np.isfinite(mean))  # inf: not timed
    return np.asarray(mean + half * scale, dtype=np.float64)


def check_cap(space: SearchSpace, predict: Predict, cap_ms: float, quantile: float = CAP_QUANTILE) -> None:
    """Raise BudgetError, which names the lowest latency that was found, if no network of the space meets the cap.

    The search for the fastest network starts from the best of 4096 random networks. It tries every change of one
    parameter of the best network, until no change helps.
    """
    codes, nearest = space.sample(np.random.default_rng(0), 4096), math.inf
    while (scores := upper_ms(predict(codes), quantile)).min() < nearest:
        best, nearest = codes[scores.argmin()], float(scores.min())
        neighbours = []  # the codes [choices, parameters] with every choice of one parameter, for each parameter
        for column, parameter in enumerate(space.parameters):
            rows = np.repeat(best[None], len(parameter.choices), axis=0)
            rows[:, column] = np.arange(len(parameter.choices))
            neighbours.append(rows)
        codes = np.concatenate(neighbours)
    if nearest > cap_ms:
        enough = math.ceil(nearest * 1000) / 1000  # rounded up, so that a user who follows the advice meets the cap
        raise BudgetError(
            f"budget.latency_ms={cap_ms:g} is below the fastest network of the space: {nearest:.4g} ms "
            f"({nearest / cap_ms - 1:.0%} above the cap, {quantile:.0%} quantile of its prediction). "
            f"Raise it to at least {enough:.3f}, or search a smaller space.")


@dataclass(frozen=True, slots=True)
class ObjectiveOptions:
    """The options of `conf/objective/*.yaml`."""

    name: str = option(choices=KINDS)
    reward: str = option(choices=tuple(REWARDS))
    known: tuple[str, ...] = option((LATENCY,), what="a list of names, e.g. [latency_ms,size_mb]")
    price_per_hour: float | None = option(None, low=0)
    target_ms: float | None = option(None, above=0, what="null or a number of milliseconds above 0")


def read_objective(section: Mapping[str, Any], target: Target) -> Objective:
    """Read the `objective` section of a configuration for a deployment. Raises ConfigError, which names the fault.

    If the section gives no `price_per_hour`, that of the target is used.
    """
    options = read_options(ObjectiveOptions, section, "objective")
    price = target.price_per_hour if options.price_per_hour is None else options.price_per_hour
    return Objective(options.target_ms, options.name, options.reward, options.known,
                     replace(target, price_per_hour=price))
