"""Who takes part: the baselines as stock and with a stride-1 stem, and ours; and which training comes next."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.contest.options import BASELINES, Options

STEM_COST = 4.0  # maps twice as wide and high


@dataclass(frozen=True)
class Network:
    """`family` is timm's name, or of ours its role (fast, balanced, accurate); `architecture` is the file of ours."""

    label: str
    family: str
    stem_stride: int = 0
    architecture: Path | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the search found it."""
        return self.architecture is not None

    @property
    def overrides(self) -> tuple[str, ...]:
        """What hwnas.train must be told of it."""
        if self.architecture is not None:
            return (f"architecture={self.architecture.absolute()}",)
        return f"model=timm:{self.family}", f"stem_stride={self.stem_stride}"


@dataclass(frozen=True)
class Training:
    """One network with one seed."""

    network: Network
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.network.label}-s{self.seed}"


def baselines(names: Sequence[str]) -> list[Network]:
    """Both stems of each, cheapest first."""
    both = [(BASELINES[name] * (STEM_COST if stem else 1.0), Network(name + "-stem1" * stem, name, stem))
            for name in names for stem in (0, 1)]
    return [network for _, network in sorted(both, key=lambda pair: pair[0])]


def ready(networks: Sequence[Network], seeds: int, top1: Mapping[str, float | None], started: Collection[str],
          ) -> Iterator[Training]:
    """What may start now, in this order: seed 0 of every network, then the other seeds of ours and of the better stem.

    Better is the stem with the higher validation top-1 at seed 0, known once both are trained; where they are equal it
    is the stock one. `top1`: validation top-1 by training, None for one that failed. `started`: trainings' names.
    """
    order = [Training(network, 0) for network in networks]
    for seed in range(1, seeds):
        order += [Training(network, seed) for network in networks if network in _go_on(networks, top1)]
    return (one for one in order if one.name not in started)


def _go_on(networks: Sequence[Network], top1: Mapping[str, float | None]) -> list[Network]:
    found = []
    for family in dict.fromkeys(network.family for network in networks):
        able = [network for network in networks if network.family == family]
        if all(Training(network, 0).name in top1 for network in able):
            values = {network: value for network in able
                      if (value := top1[Training(network, 0).name]) is not None}
            if values:
                found.append(max(values, key=lambda one: (values[one], -one.stem_stride)))
    return found


def overrides(training: Training, options: Options, folder: Path) -> list[str]:
    """The arguments of hwnas.train: data, recipe, network, seed, folder."""
    size = () if training.network.is_ours else options.size_override
    recipe = (f"{key}={value}" for key, value in options.recipe.items())
    precision = f"precision={training_precision(training.network, options)}"
    return [*options.dataset, *size, *recipe, precision, *training.network.overrides,
            f"seed={training.seed}", "threads=1", f"out={folder.absolute()}"]


def training_precision(network: Network, options: Options) -> str:
    """What a network is trained in, whatever its deployed files have."""
    return "bf16" if network.family in options.bf16 else "fp32"


def validation_top1(summary: Mapping[str, Any]) -> float:
    """What decides between two stems."""
    return float(summary["top1_validation"])
