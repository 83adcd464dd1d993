"""A roofline as a whole: the content of its file, and its words: roofs, block kinds, where a precision does not pay.

Format history of the file
    1   first: host, runtimes, targets, roofs (each with how it was measured), groups, ratios, points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hwnas.latency.roofline import OVERHEAD_SHARE, SOURCES, Group, Point, Ratio, groups_of
from hwnas.latency.roofs import Roofs

FORMAT, VERSION = "hwnas-roofline", 1


@dataclass(frozen=True)
class Roofline:
    """What the picture shows and the file holds: `names` are the targets, the second empty without another one."""

    space: str
    names: tuple[str, str]
    runtimes: tuple[str, str]
    source: str
    host: Mapping[str, Any]
    created: str
    roofs: Roofs
    points: Sequence[Point]
    others: Sequence[Point] = ()
    ratios: Sequence[Ratio] = ()

    @property
    def groups(self) -> list[Group]:
        """The target's points, grouped."""
        return groups_of(self.points, self.ratios)

    @property
    def other_groups(self) -> list[Group]:
        """The other target's."""
        return groups_of(self.others)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file beside the picture."""
        groups = {name: [{**asdict(one), "verdict": one.verdict} for one in found]
                  for name, found in zip(self.names, (self.groups, self.other_groups), strict=True) if name}
        data = {"format": FORMAT, "version": VERSION, "created": self.created, "space": self.space,
                "targets": list(filter(None, self.names)), "runtimes": list(filter(None, self.runtimes)),
                "times": SOURCES[self.source], "host": dict(self.host), "roofs": self.roofs.to_dict(),
                "groups": groups, "ratios": [one.to_dict() for one in self.ratios],
                "points": [one.to_dict() for one in (*self.points, *self.others)]}
        return _plain(data)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """For JSON: floats to six digits, null for those that are no number."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value


def describe(found: Roofline) -> list[str]:
    """Lines to print; the figures are medians over the blocks of a row."""
    lines = [f"{found.names[0]}, space {found.space}, on {found.host['name']}; times {SOURCES[found.source]}",
             *(f"  peak {one.precision}: {one.gflops:.0f} GFLOP/s ({one.how}, {one.runtime})"
               for one in found.roofs.peaks),
             *(f"  {one.level}: {one.gb_per_s:.1f} GB/s ({one.how})"
               for one in (found.roofs.cache, found.roofs.memory)),
             "", *_table(found), "",
             "left of ridge: where memory or cache bounds the roof. "
             f"overhead-bound: below {OVERHEAD_SHARE:.0%} of what the roofs allow: calls, small maps, kernels such as "
             "depthwise ones"]
    return [*lines, *_above(found), *_not_paying(found)]


def precisions_of(found: Roofline) -> tuple[str, str]:
    """What runs in the two targets: precisions, or the targets' names where those are equal."""
    pair = tuple(one[0].precision if one else "" for one in (found.points, found.others))
    return (pair[0], pair[1]) if pair[0] != pair[1] else found.names


def _table(found: Roofline) -> list[str]:
    this, other = precisions_of(found)
    ratio = f"  time {this}/{other}  longer for certain" if other else ""
    lines = [f"{_head(this)}{ratio}".rstrip(), *(_row(one, this, other) for one in found.groups)]
    return [*lines, "", _head(other).rstrip(), *map(_row, found.other_groups)] if other else lines


def _head(precision: str) -> str:
    return (f"{precision:<10}{'blocks':>8}{'FLOP/byte':>11}{'GFLOP/s':>9}{'of roof':>9}{'left of ridge':>15}  "
            f"{'verdict':<23}")


def _row(one: Group, this: str = "", other: str = "") -> str:
    share = one.verdicts[one.verdict] / one.n
    verdict = one.verdict if share == 1 else f"{one.verdict} ({share:.0%})"
    text = (f"{one.name:<10}{one.n:>8}{one.intensity:>11.1f}{one.gflops:>9.1f}{one.share:>9.1%}"
            f"{one.left_of_ridge:>15.0%}  {verdict:<23}")
    if one.ratio is not None:
        text += f"{one.ratio:>{len(f'  time {this}/{other}')}.2f}{f'{one.n_slower} of {one.n_compared}':>20}"
    return text.rstrip()


def _above(found: Roofline) -> list[str]:
    """Blocks quicker than their roof: said, because no block can be."""
    every = [*found.points, *found.others]
    above = sum(point.share > 1 for point in every)
    return [f"{above} of {len(every)} points stand above their roof: the runtime moves fewer bytes than are counted, "
            "or the block's time is too short by its error"] if above else []


def _not_paying(found: Roofline) -> list[str]:
    """Where the target is no quicker than the other one."""
    if not found.ratios:
        return []
    this, other = precisions_of(found)
    slower = [one for one in found.ratios if one.slower]
    larger = sum(one.ratio > 1 for one in found.ratios)
    line = (f"{this} takes longer than {other} in {larger} of {len(found.ratios)} blocks, in {len(slower)} beyond what "
            "the errors of their times explain (95 %); no gain in the median:")
    return [f"{line} {_names([one for one in found.groups if one.ratio is not None and one.ratio >= 1])}"]


def _names(groups: Sequence[Group]) -> str:
    return ", ".join(f"{one.name} ({one.ratio:.2f})" for one in groups) or "no kind of block"
