"""Costs that are known before a network is trained. A search may minimise them beside its top-1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hwnas.cli.options import read_value
from hwnas.errors import ConfigError, UnknownName
from hwnas.space.blocks.block import BlockSpec, weights_of

GROUP = "hwnas.objectives"  # entry points of other packages
LATENCY = "latency_ms"
# Bytes of an ONNX file. These are exact: one fp32 number; bias, scales and zero points of an int8 output channel.
FP32, CHANNEL_INT8 = 4, 17
# These are fitted: nodes with their names. A residual sum, a convolution, one of squeeze-and-excite's two; in fp32
# files and in int8 files, which add QDQ pairs. A GELU is five nodes, other activations are one. The network's output
# has no pair.
ADD, CONVOLUTION, GATE, GELU = 186, 436, 762, 1250
ADD_INT8, CONVOLUTION_INT8, GATE_INT8, OUTPUT_INT8 = 828, 2310, 1128, 2384
MOST_KNOWN = 2  # the known-objective sampler can search with so many


@dataclass(frozen=True, slots=True)
class Terms:
    """The deployment that costs depend on. `price_per_hour` is the machine's, in any currency (None: not given)."""

    precision: str = "fp32"
    batch: int = 1
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class KnownObjective:
    """A cost (smaller is better) that is known before training.

    It is `of_latency` of the latency in ms (a number or an array), or the sum of `of_block` over a network's blocks.
    `unit` and `scale` are for display. `predicted` is its column in trials.csv, and `exact` its column in front.csv.
    The exact value is `of_file` of the deployed file, or `of_latency` of the measured latency. Otherwise front.csv has
    its column in any case.
    """

    name: str
    label: str
    unit: str
    predicted: str
    exact: str
    of_latency: Callable[[Any, Terms], Any] | None = None
    of_block: Callable[[BlockSpec, Terms], float] = lambda block, terms: 0.0
    of_file: Callable[[Path], float] | None = None
    scale: float = 1.0

    def of(self, latency_ms: Any, blocks: Iterable[BlockSpec], terms: Terms) -> Any:
        """The cost of one network."""
        if self.of_latency is not None:
            return self.of_latency(latency_ms, terms)
        return sum(self.of_block(block, terms) for block in blocks)

    def shown(self, value: float | None) -> str:
        """A value as text; empty when it is not known."""
        return "" if value is None else f"{value * self.scale:.3g} {self.unit}".strip()


def file_bytes(block: BlockSpec, terms: Terms) -> float:
    """A block's share of the deployed ONNX file: int8 targets have an int8 one, all others run the fp32 one.

    Weights, and bias and scales of each output channel, are counted exactly. Batch norms are folded, and
    squeeze-and-excite stays fp32 in an int8 file. Nodes and their names are counted by constants, fitted to 28 files
    of three spaces (error: 0.1 % of a file).
    """
    int8 = terms.precision == "int8"
    total = block.rules.file_bytes(block, int8)
    if block.skip:
        total += ADD_INT8 if int8 else ADD
    if int8 and block.rules.ends:
        total -= OUTPUT_INT8
    if block.activation == "gelu" and block.kernel:
        total += GELU * block.rules.activations
    for role, n_in, n_out, kernel, _, _ in block.convolutions():
        weights = weights_of(role, n_in, n_out, kernel)
        if int8 and role not in block.rules.fp32_roles:
            total += weights + CHANNEL_INT8 * n_out + CONVOLUTION_INT8
        else:
            total += FP32 * (weights + n_out) + (GATE_INT8 if int8 else GATE if role == "se" else CONVOLUTION)
    return total


def _price(latency_ms: Any, terms: Terms) -> Any:
    """Price of a million images, if the machine runs one network on one stream only. 3.6e6 ms are an hour."""
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


class Costs(Mapping[str, KnownObjective]):
    """Known objectives by name: ours, then those of other packages' entry points `hwnas.objectives`."""

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


COSTS = Costs()


def check_known(names: Any, terms: Terms) -> tuple[str, ...]:
    """Check `objective.known`; returns the names in COSTS's order. ConfigError, UnknownName."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"objective.known must be a list of names, e.g. [latency_ms,size_mb], got {names!r}.")
    for name in names:
        if name not in COSTS:
            raise UnknownName("known objective", name, COSTS)
        if names.count(name) > 1:
            raise ConfigError(f"objective.known names {name} twice. Name each once.")
    if not 1 <= len(names) <= MOST_KNOWN:
        raise ConfigError(f"objective.known must hold one or two of {', '.join(COSTS)}, got {len(names)}.")
    timed = [name for name in names if COSTS[name].of_latency]
    if len(timed) > 1:
        raise ConfigError(f"objective.known: {' and '.join(timed)} are proportional to each other, so the front would "
                          "be that of one of them. Take one of the two.")
    if "price" in names:
        read_value(terms.price_per_hour, float, "objective.price_per_hour", above=0,
                   what="what an hour of the machine costs, for objective.known=[price]: "
                        "objective.price_per_hour=NUMBER, above 0")
    return tuple(name for name in COSTS if name in names)


def known_costs(row: Mapping[str, Any]) -> tuple[float, ...]:
    """The costs that the search of a row of trials.csv minimised, in order; NaN: not known.

    A row without `objectives` is of a search for latency.
    """
    names = str(row.get("objectives") or LATENCY).split()
    values = (row.get(COSTS[name].predicted) for name in names)
    return tuple(math.nan if value is None else float(value) for value in values)
