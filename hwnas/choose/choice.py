"""The cheapest way to serve: machines and money for each network, deployment, batch and number of streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hwnas.choose.curve import LoadCurve
from hwnas.cli.options import option
from hwnas.cli.progress import count
from hwnas.errors import BudgetError

_SECONDS_AN_HOUR, _A_MILLION = 3600.0, 1e6
Key = tuple[str, str, int, int]  # run, network, batch and streams


@dataclass(frozen=True, slots=True)
class Slo:
    """The section `slo`, the service level: the most p99 in ms from a query to its answer, and the least top-1."""

    p99_ms: float = option(above=0, high=1e7)
    top1: float = option(0.0, low=0, high=1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The section `traffic`: queries a second at the peak, which come independently of each other (Poisson)."""

    rate: float = option(above=0, high=1e9)


@dataclass(frozen=True, slots=True)
class ServedNetwork:
    """A network of a run on a host, served as its load curve says."""

    run: str
    id: str
    name: str
    target: str
    host: str
    top1: float
    curve: LoadCurve

    @property
    def key(self) -> Key:
        """The key that no other network has."""
        return self.run, self.id, self.curve.batch, self.curve.streams

    @property
    def said(self) -> str:
        """A description in a few words."""
        return f"{self.name} on {self.target}, batch {self.curve.batch}, {count(self.curve.streams, 'stream')}"


@dataclass(frozen=True, slots=True)
class Option:
    """The machines and the money that it takes to serve the traffic with one of the networks.

    `capacity`: queries a second of one machine within the service level; `low` and `high` allow for the drift of its
    saturation. `p99_ms` is at the load of each of `machines` at the peak. `per_million` images, in the prices'
    currency.
    """

    served: ServedNetwork
    capacity: float
    capacity_low: float
    capacity_high: float
    machines: int
    machines_low: int
    machines_high: int
    utilisation: float
    p99_ms: float
    per_hour: float
    per_million: float
    per_million_low: float
    per_million_high: float


def weigh(served: ServedNetwork, traffic: Traffic, slo: Slo, price: float, most: float | None = None) -> Option | None:
    """Return machines and money for `served` at a `price` an hour; None if it does not keep the service level.

    `most`: queries a second of one machine to which the capacity is limited, as LoadGen found more to be too many.
    """
    # 1. The capacity of one machine, and its range by the saturation before and after the runs.
    curve = served.curve
    capacity = curve.capacity(slo.p99_ms)
    if most is not None:
        capacity = min(capacity, most)
    if capacity <= 0:
        return None
    low, high = (capacity * end(curve.saturation) / curve.most for end in (min, max))
    high = high if most is None else min(high, most)
    least, fewest, many = (max(1, math.ceil(traffic.rate / each - 1e-9)) for each in (capacity, high, low))
    # 2. The fewest machines whose p99 is low enough at their load. A lower load may be answered later, as calls come
    # after pauses: the numbers of machines for all measured loads are tried.
    more = (max(least, math.ceil(traffic.rate / run.rate - 1e-9)) for run in reversed(curve.runs))
    machines = next((n for n in (least, *more) if curve.p99_ms(traffic.rate / n) <= slo.p99_ms), None)
    if machines is None:
        return None
    # 3. Money an hour, and for a million images at the peak's rate.
    many = max(machines, many)
    load, per_million = traffic.rate / machines, price / (traffic.rate * _SECONDS_AN_HOUR) * _A_MILLION
    return Option(served, capacity, low, high, machines, fewest, many, load / curve.most, curve.p99_ms(load),
                  machines * price, machines * per_million, fewest * per_million, many * per_million)


def choose(candidates: Sequence[tuple[ServedNetwork, float]], traffic: Traffic, slo: Slo,
           limits: Mapping[Key, float]) -> list[Option]:
    """Return all options that keep the service level, the cheapest first, and of equally cheap ones the one with most
    capacity. `limits`: see `weigh`, by key. BudgetError, which names the nearest, if there is none."""
    options = [option for served, price in candidates
               if (option := weigh(served, traffic, slo, price, limits.get(served.key))) is not None]
    if not options:
        nearest, _ = min(candidates, key=lambda each: min(run.p99_ms for run in each[0].curve.runs))
        least = min(run.p99_ms for run in nearest.curve.runs)
        where = "at any load" if least > slo.p99_ms else f"at {traffic.rate:g} queries/s"
        raise BudgetError(f"slo.p99_ms={slo.p99_ms:g}: nothing keeps it {where}. The nearest is {nearest.said}: "
                          f"{least:.3g} ms at its best load. Allow more, or search for a faster network.")
    return sorted(options, key=lambda each: (each.per_hour, -each.capacity))


def tell_changes(ranked: Sequence[Option], candidates: Sequence[tuple[ServedNetwork, float]], traffic: Traffic,
                 slo: Slo, limits: Mapping[Key, float]) -> list[str]:
    """Return sentences on how far the answer holds: to which rate, price and service level."""
    best = ranked[0]
    notes = [f"up to {best.machines * best.capacity:.0f} queries/s at the peak {count(best.machines, 'machine')} will "
             f"do (asked {traffic.rate:g})"]
    other = next((each for each in ranked[1:] if each.served.host != best.served.host), None)
    if other is not None:
        notes.append(f"{other.served.host} is cheaper below {best.per_hour / other.machines:.4g} per hour (now "
                     f"{other.per_hour / other.machines:g})")
    for factor in (0.5, 0.75, 1.5, 2.0):
        # A load that LoadGen found too high may be right for a looser level: limits count for stricter ones only.
        changed = replace(slo, p99_ms=slo.p99_ms * factor)
        try:
            first = choose(candidates, traffic, changed, limits if factor < 1 else {})[0]
        except BudgetError:
            notes.append(f"p99 of {changed.p99_ms:g} ms cannot be kept")
            continue
        if first.served.key != best.served.key or first.machines != best.machines:
            notes.append(f"for a p99 of {changed.p99_ms:g} ms: {first.served.said}, "
                         f"{count(first.machines, 'machine')}, {first.per_million:.3g} per million images")
    return notes
