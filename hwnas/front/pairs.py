"""Pairs of a verified front, in `pairs.csv`: a fast network answers, and an accurate one answers if it is not sure.

Nothing is trained. The threshold is chosen on validation images, and test images show what the pair is worth. Its
latencies are not measured: they are sums of two that were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from hwnas.errors import StudyError, UnknownName
from hwnas.front.comparison import describe, format_signed
from hwnas.front.rows import FrontRow, within_caps
from hwnas.stats import non_dominated, paired_difference, wilson
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder
from hwnas.system.tables import read_table, table_csv, table_text

_LEVEL = 0.9  # confidence of the intervals of latencies
LOSS = 0.0025  # top-1, as a share of all validation images, that a threshold may lose
Z95 = 1.645  # of a one-sided 95 % bound, in standard deviations
UNSEEN = 3.3  # images that count as differing beside the seen ones: if none was seen, three may (the rule of three)


class Scored(NamedTuple):
    """For each image, whether a network answers it rightly, and its confidence from 0 to 1."""

    right: NDArray[np.bool_]
    confidence: NDArray[np.float16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A line of `pairs.csv`, which `docs/run-folder.md` documents: `accurate` answers the images of which `fast` is
    less sure than `threshold`, a `share` of the test images.

    `difference` is the pair's test top-1 minus that of `accurate` alone. Latencies in ms are computed: the mean is that
    of `fast` plus `share` times that of `accurate`; the worst is their sum.
    """

    id: str
    fast: str
    accurate: str
    threshold: float
    share: float
    top1_test: float
    top1_test_low: float
    top1_test_high: float
    difference: float
    difference_low: float
    difference_high: float
    n_test: int
    n_validation: int
    latency_ms_mean: float
    latency_ms_mean_low: float
    latency_ms_mean_high: float
    latency_ms_worst: float
    latency_ms_worst_low: float
    latency_ms_worst_high: float
    times_as_fast: float

    def describe(self, rows: Sequence[FrontRow]) -> str:
        """Return the names of both networks."""
        names = {row.id: describe(row) for row in rows}
        return f"{names.get(self.fast, self.fast)} then {names.get(self.accurate, self.accurate)}"

    def tell(self, rows: Sequence[FrontRow]) -> str:
        """Return a sentence on the pair."""
        return (f"pair {self.describe(rows)}: {100 * self.top1_test:.2f} %, {format_signed(self.difference)} points "
                f"beside the second alone (95 %: {format_signed(self.difference_low)} to "
                f"{format_signed(self.difference_high)}), {self.latency_ms_mean:.3g} ms on average (estimate, "
                f"{self.times_as_fast:.2g} times as fast), {self.latency_ms_worst:.3g} ms at worst; {self.share:.0%} "
                f"go on (hwnas predict run=RUN id={self.id} images=DIR)")


def choose_threshold(fast: Scored, accurate: Scored) -> float:
    """Return the lowest confidence below which images must go on, so that the others lose hardly anything.

    The images that stay may lose at most LOSS of all images against `accurate`, at the one-sided 95 % bound: the lowest
    threshold without a loss on these images is low by chance. With fewer than 1,200 images hardly any threshold passes,
    and all go on. 0: `fast` alone is as good. The threshold is between two float16 values, so that confidences may be
    compared rounded or not.
    """
    if fast.right.sum() >= accurate.right.sum():
        return 0.0
    # From the least sure image on: what would the images after each one lose if they stayed?
    order = np.argsort(fast.confidence, kind="stable")
    confidence = fast.confidence[order]
    apart = accurate.right[order].astype(int) - fast.right[order]
    lost, differ = (each.sum() - np.cumsum(each) for each in (apart, np.abs(apart)))  # in images after each
    is_last = np.append(confidence[1:] > confidence[:-1], True)  # equally confident images go on together
    # The bound is normal: each image on which the two differ adds 1 to the variance of the loss.
    bound = lost + Z95 * np.sqrt(differ + UNSEEN)
    bound[-1] = 0  # nothing is lost if all go on
    last = confidence[np.flatnonzero(is_last & (bound <= LOSS * len(order)))[0]]
    between = (float(last) + float(np.nextafter(last, np.float16(2)))) / 2
    return float(f"{between:.6g}")  # as the file has it


def goes_on(fast: Scored, threshold: float) -> NDArray[np.bool_]:
    """Return for each image whether it goes on."""
    return np.asarray(fast.confidence.astype(np.float64) < threshold)


def choose_pairs(rows: Sequence[FrontRow], test: Mapping[str, Scored], validation: Mapping[str, Scored],
                 cap_ms: float | None = None, cap_p99_ms: float | None = None) -> list[Pair]:
    """Return the pairs of a verified front that are worth it, from fast to slow.

    Each network is the accurate one of at most one pair: the one of the lowest mean latency that loses hardly anything
    on validation images. A pair is left out if another pair or a network of the front beats it in mean latency and
    test top-1. It is also left out if it is no faster than its second network alone, or if its worst case breaks a cap.

    Args:
        rows: As measured; the ones on the front count.
        test: By id.
        validation: By id.
        cap_ms: The cap of the latency.
        cap_p99_ms: The cap of its 99th percentile. The worst case of a pair is a sum there, too.
    """
    front = sorted((row for row in rows if row.on_front and row.verified and row.id in test and row.id in validation),
                   key=lambda row: row.latency_ms or 0.0)
    pairs = []
    for at, accurate in enumerate(front):
        # Every faster network of the front may be the first one, if a threshold above 0 is found.
        options = [(fast, threshold) for fast in front[:at]
                   if (threshold := choose_threshold(validation[fast.id], validation[accurate.id]))
                   and _keeps(fast, accurate, cap_ms, cap_p99_ms)]
        if options:
            fast, threshold = min(options, key=lambda each: (each[0].latency_ms or 0.0) + (
                accurate.latency_ms or 0.0) * goes_on(validation[each[0].id], each[1]).mean())
            pairs.append(_pair_of(fast, accurate, threshold, test, len(validation[fast.id].right)))
    pairs = [pair for pair in pairs if pair.share and pair.times_as_fast > 1]
    # Pairs compete with the front and with each other.
    points = [*((row.latency_ms or 0.0, row.top1_test or 0.0) for row in front),
              *((pair.latency_ms_mean, pair.top1_test) for pair in pairs)]
    pays = non_dominated(points, [True, False])[len(front):] if pairs else ()
    return sorted((pair for pair, pay in zip(pairs, pays, strict=True) if pay), key=lambda pair: pair.latency_ms_mean)


def _keeps(fast: FrontRow, accurate: FrontRow, cap_ms: float | None, cap_p99_ms: float | None) -> bool:
    """Return whether the worst case breaks no cap."""
    p99_ms = (fast.latency_ms_p99, accurate.latency_ms_p99)
    worst = replace(accurate, latency_ms=(fast.latency_ms or 0.0) + (accurate.latency_ms or 0.0),
                    latency_ms_p99=None if None in p99_ms else sum(each or 0.0 for each in p99_ms))
    return within_caps(worst, cap_ms, cap_p99_ms) is not False


def _pair_of(fast: FrontRow, accurate: FrontRow, threshold: float, test: Mapping[str, Scored], n_validation: int
             ) -> Pair:
    first, second = test[fast.id], test[accurate.id]
    unsure = goes_on(first, threshold)
    right, n = np.where(unsure, second.right, first.right), len(unsure)
    low, high = wilson(int(right.sum()), n)
    difference, least, most = paired_difference(right, second.right)
    share, (share_low, share_high) = float(unsure.mean()), wilson(int(unsure.sum()), n, _LEVEL)
    of_fast, of_accurate = ((row.latency_ms or 0.0, row.latency_ms_low or row.latency_ms or 0.0,
                             row.latency_ms_high or row.latency_ms or 0.0) for row in (fast, accurate))
    # The ends of an interval are sums of both networks' ends, at the same end of the share's interval.
    mean, mean_low, mean_high = (quick + part * slow for quick, slow, part in zip(
        of_fast, of_accurate, (share, share_low, share_high), strict=True))
    worst, worst_low, worst_high = map(sum, zip(of_fast, of_accurate, strict=True))
    return Pair(id=f"{fast.id}+{accurate.id}", fast=fast.id, accurate=accurate.id, threshold=threshold, share=share,
                top1_test=float(right.mean()), top1_test_low=low, top1_test_high=high, difference=difference,
                difference_low=least, difference_high=most, n_test=n, n_validation=n_validation, latency_ms_mean=mean,
                latency_ms_mean_low=mean_low, latency_ms_mean_high=mean_high, latency_ms_worst=worst,
                latency_ms_worst_low=worst_low, latency_ms_worst_high=worst_high,
                times_as_fast=of_accurate[0] / mean)


def save_pairs(run: RunFolder, pairs: Sequence[Pair]) -> None:
    """Write `pairs.csv`."""
    write_atomic(run.pairs_csv, table_csv([asdict(pair) for pair in pairs], [each.name for each in fields(Pair)]))


def load_pairs(run: RunFolder) -> list[Pair]:
    """Return the pairs of a run, none if it has no `pairs.csv`. Raises StudyError for a file that cannot be read."""
    types: dict[str, Any] = get_type_hints(Pair)
    try:
        text = table_text(run.pairs_csv)
        if missing := types.keys() - text.partition("\n")[0].rstrip("\r").split(","):
            raise ValueError(f"no column {min(missing)}.")
        return [Pair(**{name: row[name] for name in types}) for row in read_table(text, types)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {run.pairs_csv}: {error} To have it made again: delete it, then hwnas verify "
                         f"run={run.path}") from None


def find_pair(run: RunFolder, id: str) -> Pair:
    """Return the pair of this id. Raises UnknownName, with a list of all ids, for another one."""
    pairs = {pair.id: pair for pair in load_pairs(run)}
    if id not in pairs:
        raise UnknownName(f"pair in {run.path}", id, list(pairs))
    return pairs[id]
