"""The same networks on several devices: how ranks agree (Kendall tau), which pairs flip, and what they are made of.

    python -m experiments.devices.run latency_tables --out experiments/devices/devices.png

A device here is a host with a runtime, precision, threads and batch. Its times come from latency tables: whole networks
that were measured. Networks are the same where their blocks are.

Format history of the JSON file
    1   first: devices, agreements, flips.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.cli.progress import UNKNOWN, text_table
from hwnas.errors import ConfigError
from hwnas.latency.table import LatencyTable, TableKey
from hwnas.pictures import INK, figure_bytes, new_figure, title
from hwnas.space.architecture import Architecture
from hwnas.stats import draws, kendall_tau, percentiles
from hwnas.system.paths import write_atomic
from hwnas.system.tables import table_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Ratios = NDArray[np.float64]
    Places = NDArray[np.int64]

LEAST = 8  # networks that two devices must have in common for a tau
MACS = "MACs"  # the column that no device measured
_CERTAIN = 2.0  # standard errors by which a pair must differ on both devices to count as flipped
_DRAWS = 200  # of the bootstrap
_FLIPS = 3  # pairs named for two devices
_MOST_NETWORKS = 100  # of those in common, for pairs


@dataclass(frozen=True, slots=True)
class Timed:
    """A network's time on a device with its standard error."""

    ms: float
    std_ms: float
    architecture: Architecture
    macs: float


@dataclass(frozen=True)
class Device:
    """Networks by id as one device times them. `sources`: the files that say so, and how many each."""

    name: str
    networks: dict[str, Timed]
    sources: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two devices rank the networks that both timed: tau with its 90 % bootstrap interval, and the share of pairs
    that are ranked the other way round, of those that differ on both for certain."""

    first: str
    second: str
    n: int
    tau: float
    low: float
    high: float
    flipped: float | None


@dataclass(frozen=True, slots=True)
class Flip:
    """Two networks of which one is faster on the first device and the other on the second. Factors say how much
    slower the second network is on each device; `why` the kind of operator in which their work differs most."""

    first: str
    second: str
    quick: str
    slow: str
    factor_first: float
    factor_second: float
    why: str


def read_devices(sources: Sequence[Path]) -> list[Device]:
    """The devices of latency tables (files, or folders of them), in their order; ConfigError for less than two.
    Images of another size or depth are another device: ranks are compared for the same images."""
    devices: dict[str, Device] = {}
    for file in itertools.chain.from_iterable(map(_files_of, sources)):
        table = LatencyTable.load(file)
        networks = {each.architecture.id: Timed(each.measurement.latency_ms, each.measurement.std_ms, each.architecture,
                                                each.architecture.macs)
                    for each in table.networks if each.measurement.valid}
        if networks:
            name = _name(table.host_name, table.key)
            device = devices.setdefault(name, Device(name, {}))
            device.networks.update(networks)
            device.sources[str(table.path)] = len(networks)
    if len(devices) < 2:
        raise ConfigError(f"{' '.join(devices) or 'no device'} in {', '.join(map(str, sources))}, and two are needed. "
                          "Give latency tables of several targets, or folders of these.")
    return list(devices.values())


def _files_of(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(
        path for path in source.rglob("*.json*") if path.parent.name != "blocks"
        and path.name.endswith((".json", ".json.gz")) and ".partial" not in path.name)


def _name(host: str, key: TableKey) -> str:
    """What decides a network's latency besides the network."""
    many = "" if key.threads == 1 else f" {key.threads or 'all'} threads"
    return (f"{host} {key.runtime} {key.precision}{many}{'' if key.batch == 1 else f' batch {key.batch}'} "
            f"{'-'.join(map(str, key.sizes))} px {key.channels} ch")


def agreements(devices: Sequence[Device], seed: int = 0) -> list[Agreement]:
    """Every pair of devices with enough networks in common, and each device with MACs."""
    rows = []
    for first, second in itertools.combinations([*devices, _by_macs(devices)], 2):
        common = sorted({*first.networks} & {*second.networks})
        if len(common) < LEAST:
            continue
        x, y = (np.array([device.networks[id].ms for id in common]) for device in (first, second))
        drawn = draws(len(common), seed, _DRAWS)
        taus = kendall_tau(x[drawn], y[drawn])
        low, high = percentiles(taus[np.isfinite(taus)])
        there = np.zeros(0) if second.name == MACS else _certain_pairs(first, second, common)[1]
        rows.append(Agreement(first.name, second.name, len(common), float(kendall_tau(x[None], y[None])[0]), low, high,
                              float((there < 0).mean()) if len(there) else None))
    return rows


def _by_macs(devices: Sequence[Device]) -> Device:
    return Device(MACS, {id: Timed(float(each.macs), 0.0, each.architecture, each.macs)
                         for device in devices for id, each in device.networks.items()})


def _certain_pairs(first: Device, second: Device, common: Sequence[str]
                   ) -> tuple[Ratios, Ratios, list[tuple[int, int]]]:
    """Log ratios of times on both devices for each pair of `common` that differs on both for certain, positive on the
    first; and the pairs' places in `common`, the quicker one on the first device before the other."""
    names = common[:_MOST_NETWORKS]
    rows, columns = np.triu_indices(len(names), 1)
    here, there = (_certain_ratios(device, names, rows, columns) for device in (first, second))
    kept = (here != 0) & (there != 0)
    turned = here[kept] < 0
    sign = np.where(turned, -1.0, 1.0)
    quick, slow = (np.where(turned, ends[1][kept], ends[0][kept]) for ends in ((rows, columns), (columns, rows)))
    return sign * here[kept], sign * there[kept], list(zip(quick.tolist(), slow.tolist(), strict=True))


def _certain_ratios(device: Device, names: Sequence[str], rows: Places, columns: Places) -> Ratios:
    """Log ratios of the times of the networks at `columns` to those at `rows`, 0 where they are not certain."""
    timed = [device.networks[id] for id in names]
    ms, share = np.array([each.ms for each in timed]), np.array([each.std_ms / each.ms for each in timed])
    ratio = np.log(ms[columns] / ms[rows])
    return np.where(np.abs(ratio) > _CERTAIN * np.hypot(share[rows], share[columns]), ratio, 0.0)


def flips(devices: Sequence[Device]) -> list[Flip]:
    """For each two devices the pairs that flip most: by the smaller of both differences."""
    rows = []
    for first, second in itertools.combinations(devices, 2):
        common = sorted({*first.networks} & {*second.networks})
        here, there, pairs = _certain_pairs(first, second, common)
        for at in np.argsort(-np.minimum(here, -there), kind="stable")[:_FLIPS]:
            if there[at] >= 0:
                break
            quick, slow = (common[place] for place in pairs[at])
            rows.append(Flip(first.name, second.name, quick, slow, float(np.exp(here[at])), float(np.exp(there[at])),
                             _why(first.networks[quick].architecture, first.networks[slow].architecture)))
    return sorted(rows, key=lambda flip: -min(np.log(flip.factor_first), -np.log(flip.factor_second)))


def _why(quick: Architecture, slow: Architecture) -> str:
    """The kind of operator whose share of the MACs differs most between two networks."""
    shares = [_work(network) for network in (quick, slow)]
    most = max({*shares[0], *shares[1]}, key=lambda role: (abs(shares[0][role] - shares[1][role]), role))
    return f"{most}: {shares[0][most]:.0%} and {shares[1][most]:.0%} of the MACs"


def _work(network: Architecture) -> Counter[str]:
    """Share of the MACs by the convolutions' role: dense, pointwise, depthwise (with its kernel), se, linear."""
    work: Counter[str] = Counter()
    for block in network.blocks():
        for role, n_in, n_out, kernel, _, out in block.convolutions():
            name = f"{role} {kernel}x{kernel}" if role in ("depthwise", "dense") else role
            work[name] += (1 if role == "depthwise" else n_in) * n_out * kernel * kernel * out * out
    total = sum(work.values()) or 1
    return Counter({role: macs / total for role, macs in work.items()})


def lines(devices: Sequence[Device], rows: Sequence[Agreement], turned: Sequence[Flip], n: int = 12) -> Iterator[str]:
    """What is printed: where the times are from, the table, and the pairs that flip most."""
    for device in devices:
        yield f"{device.name}: " + ", ".join(f"{count} of {source}" for source, count in device.sources.items())
    yield ""
    head = ("device", "and", "networks", "tau", "90 %", "flipped")
    table = [head, *((row.first, row.second, str(row.n), f"{row.tau:.2f}", f"{row.low:.2f} to {row.high:.2f}",
                      UNKNOWN if row.flipped is None else f"{row.flipped:.1%}")
                     for row in sorted(rows, key=lambda row: row.tau))]
    yield from text_table(table, words=(0, 1))
    yield ""
    yield "flipped: of pairs that differ on both devices for certain, the share that is ranked the other way round"
    for flip in turned[:n]:
        yield (f"{flip.slow} takes {flip.factor_first:.2f} times {flip.quick}'s time on {flip.first}, and "
               f"{flip.factor_second:.2f} times on {flip.second} ({flip.why})")


def devices_figure(devices: Sequence[Device], rows: Sequence[Agreement]) -> Figure:
    """Left: tau between every two devices and MACs. Right: ranks of the networks that most devices have in common."""
    names = [*(device.name for device in devices), MACS]
    with new_figure(15.0, 2.6 + 0.42 * len(names), "The same networks on every device",
                    "Kendall tau over networks that both timed; ranks of those that the most devices share",
                    left=0.02) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
        figure.subplots_adjust(left=0.235, right=0.985, top=1 - 1.15 / (2.6 + 0.42 * len(names)), bottom=0.07,
                               wspace=0.12)
        _draw_taus(left, names, rows)
        _draw_ranks(right, devices)
    return figure


def _draw_taus(axes: Axes, names: Sequence[str], rows: Sequence[Agreement]) -> None:
    taus = np.full((len(names), len(names)), np.nan)
    for row in rows:
        at = names.index(row.first), names.index(row.second)
        taus[at] = taus[at[::-1]] = row.tau
    title(axes, "Kendall tau (empty: too few networks in common)")
    axes.imshow(taus, cmap="YlGnBu", vmin=0.2, vmax=1.0, aspect="auto")
    for (i, j), tau in np.ndenumerate(taus):
        if np.isfinite(tau):
            axes.text(j, i, f"{tau:.2f}", ha="center", va="center", fontsize=7, color="white" if tau > 0.6 else INK)
    axes.set_yticks(range(len(names)), [f"{index + 1}  {name}" for index, name in enumerate(names)], fontsize=7.5)
    axes.set_xticks(range(len(names)), [str(index + 1) for index in range(len(names))], fontsize=7.5)
    axes.grid(visible=False)


def _draw_ranks(axes: Axes, devices: Sequence[Device]) -> None:
    """Lines of ranks over the devices of the largest group that shares networks, colour by rank on the first."""
    group, common = largest_group(devices)
    title(axes, f"Ranks of {len(common)} networks on {len(group)} devices (numbers as left)")
    if len(common) < 2:
        return
    order = [device.name for device in devices]
    ranks = np.array([np.argsort(np.argsort([device.networks[id].ms for id in common])) + 1 for device in group])
    import matplotlib

    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(common)))
    for index in range(len(common)):
        axes.plot(range(len(group)), ranks[:, index], color=colours[int(ranks[0, index]) - 1], lw=1.0, alpha=0.8)
    axes.set_xticks(range(len(group)), [str(order.index(device.name) + 1) for device in group], fontsize=8)
    axes.set_ylabel("rank (1: fastest)")
    axes.set_ylim(len(common) + 1, 0)


def largest_group(devices: Sequence[Device]) -> tuple[list[Device], list[str]]:
    """The devices that share at least LEAST networks with the first of them and all others, grown greedily from each
    device; the group of most devices, then of most networks."""
    groups = []
    for start in devices:
        group, common = [start], {*start.networks}
        for other in sorted(devices, key=lambda device: -len({*device.networks} & {*start.networks})):
            if other is not start and len(common & {*other.networks}) >= LEAST:
                group, common = [*group, other], common & {*other.networks}
        groups.append(([device for device in devices if device in group], sorted(common)))
    return max(groups, key=lambda entry: (len(entry[0]), len(entry[1])))


def compare(sources: Sequence[Path], out: Path) -> list[str]:
    """Compare the devices of `sources`; write `out` (.png), and beside it .csv (every pair of devices) and .json.
    Returns the lines to print."""
    devices = read_devices(sources)
    rows, turned = agreements(devices), flips(devices)
    data = {"format": "hwnas-devices", "version": 1, "devices": [
                {"name": device.name, "networks": len(device.networks), "sources": device.sources}
                for device in devices],
            "agreements": [asdict(row) for row in rows], "flips": [asdict(flip) for flip in turned]}
    write_atomic(out.with_suffix(".csv"), table_csv([asdict(row) for row in rows]))
    write_atomic(out.with_suffix(".json"), json.dumps(data, indent=1))
    write_atomic(out, figure_bytes(devices_figure(devices, rows), "png"))
    return list(lines(devices, rows, turned))


def main() -> None:
    """Compare the devices of the tables that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("experiments/devices/devices.png"))
    given = parser.parse_args()
    print("\n".join(compare(given.tables, given.out)))


if __name__ == "__main__":
    main()
