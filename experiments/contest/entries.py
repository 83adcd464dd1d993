"""One line of the contest: a network in one precision, over its seeds, with what it answered, took and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.contest.networks import Network, Training, training_precision
from experiments.contest.options import Options
from experiments.contest.picks import Picks
from experiments.contest.scoring import PRECISIONS, read_score
from experiments.contest.timing import Latencies, read_latencies
from experiments.contest.training import cpu_seconds, summary_of
from hwnas.errors import StudyError
from hwnas.stats import bootstrap_mean, wilson

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.latency.table import Measurement

_OWN = ("network", "seed", "image_size", "dataset.fingerprint")  # what trainings of one recipe may differ in


@dataclass(frozen=True)
class Difference:
    """Mean over test images and seeds, with its 95 % interval when images are drawn again: not when networks are
    trained again."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Latency:
    """`low` and `high` bound it with 90 %; milliseconds of one batch."""

    ms: float
    low: float
    high: float


@dataclass(frozen=True)
class Entry:
    """`correct` [n test images] by seed; `latency` of seed 0's file, None where it was not timed or is INVALID.

    `facts`: params, macs, seconds and the like, as they go into the table.
    """

    network: Network
    precision: str
    correct: Mapping[int, NDArray[np.bool_]]
    latency: Latency | None = None
    batch_latency_ms: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How sentences call it."""
        stem = " (stride-1 stem)" if self.network.stem_stride else ""
        what = self.network.label if self.network.is_ours else self.network.family + stem
        return f"{what} {self.precision}"

    @property
    def share(self) -> NDArray[np.float64]:
        """[n test images]: of the seeds, how many got it right."""
        return np.mean(list(self.correct.values()), axis=0, dtype=float)

    @property
    def top1(self) -> float:
        """Mean over seeds."""
        return float(self.share.mean())

    @property
    def top1_interval(self) -> tuple[float, float]:
        """95 % by test images: Wilson's with one seed, bootstrap of the mean over seeds with more."""
        if len(self.correct) == 1:
            (one,) = self.correct.values()
            return wilson(int(one.sum()), len(one))
        found = bootstrap(self.share)
        return found.low, found.high


def bootstrap(values: NDArray[np.float64]) -> Difference:
    """Mean of values over images with its percentile interval; with few seeds there are few different values."""
    return Difference(*bootstrap_mean(*np.unique(values, return_counts=True)))


def compared(one: Entry, other: Entry) -> Difference:
    """Top-1 of `one` less that of `other`, image by image, seeds averaged first."""
    return bootstrap(one.share - other.share)


def faster(one: Entry, other: Entry) -> Difference:
    """How many times faster `one` is than `other`, with the bounds that their 90 % intervals leave."""
    assert one.latency is not None
    assert other.latency is not None
    mine, theirs = one.latency, other.latency
    return Difference(theirs.ms / mine.ms, theirs.low / mine.high, theirs.high / mine.low)


def read_entries(networks: Sequence[Network], options: Options, picks: Picks | None) -> list[Entry]:
    """Every network and precision of which something was scored; a latency counts for the file that was scored only.

    StudyError when two were trained with different recipes.
    """
    _check_recipes(networks, options)
    timed, batched = read_latencies(options.out), None
    if options.batch > 1:
        batched = read_latencies(options.out, options.batch)
    return [entry for network in networks for precision in PRECISIONS
            if (entry := _entry(network, precision, options, picks, timed, batched)).correct]


def _check_recipes(networks: Sequence[Network], options: Options) -> None:
    """The folder's recipe names a part of the options; defaults of the rest may have changed between two trainings."""
    first: tuple[str, Mapping[str, Any]] | None = None
    for training in (Training(network, seed) for network in networks for seed in range(options.seeds)):
        summary = summary_of(options.out, training)
        if summary is None:
            continue
        recipe = {key: value for key, value in summary["identity"].items() if key not in _OWN}
        if recipe.pop("precision", "fp32") != (asked := training_precision(training.network, options)):
            raise StudyError(f"{training.name} was not trained in {asked}. Give bf16=… as it was, or remove its folder "
                             f"below {options.out / 'train'} and give the command again.")
        first = first or (training.name, recipe)
        name, wanted = first
        for key in sorted({*recipe, *wanted}):
            if recipe.get(key) != wanted.get(key):
                raise StudyError(f"{training.name} was trained with {key} {recipe.get(key)}, {name} with "
                                 f"{wanted.get(key)}: one contest has one recipe. Remove one's folder below "
                                 f"{options.out / 'train'} and give the command again.")


def _entry(network: Network, precision: str, options: Options, picks: Picks | None, timed: Latencies | None,
           batched: Latencies | None) -> Entry:
    scores = {seed: score for seed in range(options.seeds)
              if (score := read_score(options.out, Training(network, seed), precision))}
    file = str(scores[0].facts["file"]) if 0 in scores else ""
    measured = timed.of(network.label, precision, file) if timed else None
    wide = batched.of(network.label, precision, file) if batched else None
    return Entry(network, precision, {seed: one.correct for seed, one in scores.items()}, _latency(measured),
                 wide.latency_ms if wide else None,
                 _facts(network, options, picks, [dict(one.facts) for one in scores.values()], sorted(scores)))


def _latency(measured: Measurement | None) -> Latency | None:
    if measured is None:
        return None
    return Latency(measured.latency_ms, measured.latency_ms_low, measured.latency_ms_high)


def _facts(network: Network, options: Options, picks: Picks | None, scores: Sequence[Mapping[str, Any]],
           seeds: Sequence[int]) -> dict[str, Any]:
    trained = [(Training(network, seed), summary_of(options.out, Training(network, seed)) or {}) for seed in seeds]
    if not trained:
        return {}
    first, cpu = trained[0][1], [cpu_seconds(options.out, one) for one, _ in trained]
    search = picks.search if picks and network.is_ours else {}
    setup_s = options.setup_seconds if options.setup_seconds is not None else search.get("setup_seconds")
    return {
        "image_size": first["identity"]["image_size"], "params": first["params"], "macs": first["macs"],
        "int8_share": scores[0]["int8_share"],
        "compressed": ", ".join(sorted({one["compressed"] for one in scores} - {""})),
        "training_wall_s": round(sum(one["seconds_training"] for _, one in trained) / len(trained), 1),
        "process_cpu_s": None if None in cpu else round(sum(filter(None, cpu)) / len(cpu), 1),
        "search_s": round(search["trials_seconds"] + setup_s, 1) if search and setup_s is not None else None}
