"""Roofline of a space's blocks: arithmetic intensity against achieved GFLOP/s, under roofs measured on the same host.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009). A block's time is
its share inside whole networks, never that of the block alone. Bytes are what its convolutions read and write one
after the other, plus the weights; a runtime that keeps what lies between them in registers moves fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from hwnas.latency.roofs import Roofs
from hwnas.latency.table import TimedNetwork
from hwnas.space.blocks import KINDS, BlockSpec

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
OVERHEAD_SHARE = 0.1  # of what the roof allows: a block below that is held up by something else than the two roofs
Z95 = 1.645
SOURCES = {"inferred": "inferred from whole networks", "profiled": "profiled inside networks, scaled to their times"}
MEMORY, COMPUTE, OVERHEAD = "memory-bound", "compute-bound", "overhead-bound"


class BlockTimes(Protocol):
    """What knows the times of blocks inside networks: a fitted LatencyModel."""

    def block_ms(self, blocks: Sequence[BlockSpec]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each block's share, in ms."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Time of one batch through a block inside networks, and its standard error; `n`: profiled places behind it."""

    ms: float
    std_ms: float
    n: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A block under the roofs of its precision. `intensity` in FLOP a byte, `share` of what the roof allows."""

    block: BlockSpec
    precision: str
    time: BlockTime
    bytes_moved: int
    intensity: float
    gflops: float
    roof: str
    ridge: float
    attainable_gflops: float

    @property
    def share(self) -> float:
        """Achieved over attainable."""
        return self.gflops / self.attainable_gflops

    @property
    def left_of_ridge(self) -> bool:
        """Whether it is memory, not computing, that its roof is made of."""
        return self.intensity < self.ridge

    @property
    def verdict(self) -> str:
        """What holds it up: overhead below a tenth of its roof, else memory left of the ridge, else computing."""
        if self.share < OVERHEAD_SHARE:
            return OVERHEAD
        return MEMORY if self.left_of_ridge else COMPUTE

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {name: getattr(self, name) for name in (
            "precision", "bytes_moved", "intensity", "gflops", "roof", "ridge", "attainable_gflops", "share",
            "left_of_ridge", "verdict")}
        return {"block": self.block.key, "group": group_of(self.block), **asdict(self.time),
                "macs": self.block.macs, **values}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of a block in the target over that in the other one; `std`: standard error of its logarithm."""

    block: BlockSpec
    ratio: float
    std: float

    @property
    def slower(self) -> bool:
        """Whether the target is slower beyond what its errors explain (95 %, one-sided)."""
        return bool(np.log(self.ratio) > Z95 * self.std)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"block": self.block.key, "ratio": self.ratio, "log_std": self.std, "slower": self.slower}


@dataclass(frozen=True, slots=True)
class Group:
    """Medians of the blocks of one kind, kernel and squeeze-and-excite; `ratio` is None without another target.

    `left_of_ridge` is a share of its blocks, `verdicts` are counts.
    """

    name: str
    kind: str
    n: int
    intensity: float
    gflops: float
    share: float
    left_of_ridge: float
    verdicts: Mapping[str, int]
    ratio: float | None
    n_compared: int
    n_slower: int

    @property
    def verdict(self) -> str:
        """The commonest verdict."""
        return max(self.verdicts, key=lambda name: self.verdicts[name])


def group_of(block: BlockSpec) -> str:
    """`ir k5 se`: kind, kernel and squeeze-and-excite; stem and head are alone."""
    if block.kind in ("stem", "head", "id"):
        return block.kind
    return f"{block.kind} k{block.kernel}{' se' if block.se else ''}"


def bytes_moved(block: BlockSpec, precision: str, batch: int = 1) -> int:
    """Activations read and written for one batch, and the weights once, in elements of `precision`."""
    return (block.activation_elements * batch + block.params) * ELEMENT_BYTES[precision]


def blocks_of(networks: Iterable[TimedNetwork], space_name: str) -> list[BlockSpec]:
    """Every different block of a space's timed networks, in a fixed order."""
    found = {block for one in networks if one.space == space_name for block in one.architecture.blocks()}
    return sorted(found, key=lambda block: (KINDS.index(block.kind), block.key))


def profiled_times(networks: Iterable[TimedNetwork], space_name: str) -> dict[BlockSpec, BlockTime]:
    """Median time of each block over the places where it was profiled.

    The standard error comes from one relative spread, pooled over every block that was met twice or more (NaN where
    none was): most are met too seldom for one of their own.
    """
    met: dict[BlockSpec, list[float]] = {}
    for one in networks:
        if one.space == space_name and one.block_ms and one.measurement.valid:
            for block, ms in zip(one.architecture.blocks(), one.block_ms, strict=True):
                met.setdefault(block, []).append(ms)
    medians = {block: float(np.median(values)) for block, values in met.items()}
    spread = _pooled_spread(met, medians)
    return {block: BlockTime(ms, spread * ms / len(met[block]) ** 0.5, len(met[block]))
            for block, ms in medians.items()}


def _pooled_spread(met: Mapping[BlockSpec, Sequence[float]], medians: Mapping[BlockSpec, float]) -> float:
    """Relative standard deviation about the medians, over blocks met at least twice."""
    squares, freedom = 0.0, 0
    for block, values in met.items():
        if len(values) > 1 and medians[block] > 0:
            squares += float(np.sum((np.array(values) / medians[block] - 1) ** 2))
            freedom += len(values) - 1
    return float(np.sqrt(squares / freedom)) if freedom else float("nan")


def inferred_times(model: BlockTimes, blocks: Sequence[BlockSpec]) -> dict[BlockSpec, BlockTime]:
    """The model's table entries."""
    mean, std = model.block_ms(blocks)
    return {block: BlockTime(float(ms), float(error)) for block, ms, error in zip(blocks, mean, std, strict=True)}


def points_of(times: Mapping[BlockSpec, BlockTime], precision: str, roofs: Roofs, batch: int = 1) -> list[Point]:
    """A point for each block whose time is told from 0 (by its own standard error, where it has one)."""
    return [_point(block, time, precision, roofs, batch) for block, time in times.items() if is_resolved(time)]


def is_resolved(time: BlockTime) -> bool:
    """Whether a time is above its own standard error: otherwise GFLOP/s could be anything."""
    return time.ms > 0 and not time.std_ms >= time.ms


def _point(block: BlockSpec, time: BlockTime, precision: str, roofs: Roofs, batch: int) -> Point:
    moved, flops = bytes_moved(block, precision, batch), 2.0 * block.macs * batch
    bandwidth, peak = roofs.bandwidth(moved), roofs.peak(precision).gflops
    intensity = flops / moved
    return Point(block, precision, time, moved, intensity, flops / time.ms / 1e6, bandwidth.level,
                 peak / bandwidth.gb_per_s, min(peak, intensity * bandwidth.gb_per_s))


def ratios_of(points: Sequence[Point], others: Sequence[Point]) -> list[Ratio]:
    """Times of `points` over those of the same blocks in `others`; blocks that only one side has are left out."""
    other = {point.block: point.time for point in others}
    return [_ratio(point.block, point.time, other[point.block]) for point in points if point.block in other]


def _ratio(block: BlockSpec, time: BlockTime, other: BlockTime) -> Ratio:
    return Ratio(block, time.ms / other.ms, float(np.hypot(time.std_ms / time.ms, other.std_ms / other.ms)))


def groups_of(points: Sequence[Point], ratios: Sequence[Ratio] = ()) -> list[Group]:
    """Points of one precision grouped by kind, kernel and squeeze-and-excite, in the order of the kinds."""
    members: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (KINDS.index(point.block.kind), group_of(point.block))):
        members.setdefault(group_of(point.block), []).append(point)
    compared: dict[str, list[Ratio]] = {}
    for ratio in ratios:
        compared.setdefault(group_of(ratio.block), []).append(ratio)
    return [_group(name, found, compared.get(name, [])) for name, found in members.items()]


def _group(name: str, points: Sequence[Point], ratios: Sequence[Ratio]) -> Group:
    verdicts = [point.verdict for point in points]
    return Group(
        name, points[0].block.kind, len(points), float(np.median([point.intensity for point in points])),
        float(np.median([point.gflops for point in points])), float(np.median([point.share for point in points])),
        float(np.mean([point.left_of_ridge for point in points])),
        {verdict: verdicts.count(verdict) for verdict in (MEMORY, COMPUTE, OVERHEAD) if verdict in verdicts},
        float(np.median([ratio.ratio for ratio in ratios])) if ratios else None, len(ratios),
        sum(ratio.slower for ratio in ratios))
