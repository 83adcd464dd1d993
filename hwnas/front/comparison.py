"""Does the search beat a baseline at equal latency? One sentence for each baseline, based on a paired bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hwnas.front.rows import FrontRow
from hwnas.stats.intervals import bootstrap_mean

Verdict = Literal["beats", "does not beat", "none as fast", "not comparable"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A baseline against the best finalist that is not slower. `difference` is finalist minus baseline top-1.

    `low` and `high` are its 95 % interval. Bonferroni's correction widens it, because the best of `n_eligible`
    finalists was chosen.
    """

    baseline: str
    name: str
    verdict: Verdict
    sentence: str
    finalist: str = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    n_eligible: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Entry of `comparisons.json`."""
        return asdict(self)


def paired_bootstrap(first: NDArray[np.bool_], second: NDArray[np.bool_], *, confidence: float = 0.95,
                     seed: int = 0) -> tuple[float, float, float]:
    """Mean of `first - second` over images, with its percentile bootstrap interval: (mean, low, high).

    Both say for each test image whether the answer is right, in the same order. Only the images that exactly one
    network gets right matter.
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) == 0:
        raise ValueError(f"need two vectors over the same images, got {first.shape} and {second.shape}")
    wins, losses = int((first & ~second).sum()), int((second & ~first).sum())
    return bootstrap_mean((1, -1, 0), (wins, losses, len(first) - wins - losses), level=confidence, seed=seed)


def compare(rows: Sequence[FrontRow], correct: Mapping[str, NDArray[np.bool_]], seed: int = 0) -> list[Comparison]:
    """One comparison for each baseline name, in the order of `rows`. The better of a baseline's variants counts.

    The better variant is the one over which the search leads least. If no finalist is as fast as a variant, the other
    variant counts, and its sentence mentions this one.
    """
    names = list(dict.fromkeys(row.name for row in rows if row.is_baseline))
    finalists = [row for row in rows if not row.is_baseline and _usable(row, correct) and row.meets_cap is not False]
    return [_of_name([row for row in rows if row.is_baseline and row.name == name], finalists, correct, seed)
            for name in names]


def _usable(row: FrontRow, correct: Mapping[str, NDArray[np.bool_]]) -> bool:
    return row.verified and row.latency_ms is not None and row.top1_test is not None and row.id in correct


def _of_name(variants: Sequence[FrontRow], finalists: Sequence[FrontRow],
             correct: Mapping[str, NDArray[np.bool_]], seed: int) -> Comparison:
    usable = [row for row in variants if _usable(row, correct)]
    if not usable or not finalists:
        who = "the baseline" if not usable else "no finalist"
        reason = next((row.reason for row in variants if row.reason), "it was not scored and timed on this host")
        text = f"{who} was not verified" if usable else f"the baseline was not verified: {reason.rstrip('.')}"
        name = variants[0].name
        return Comparison(variants[0].id, name, "not comparable", f"The search cannot be compared with {name}: {text}.")
    comparisons = [_against(row, finalists, correct, seed) for row in usable]
    with_rival = [item for item in comparisons if item.difference is not None]
    if not with_rival:
        accuracy = {row.id: row.top1_test or 0.0 for row in usable}
        return max(comparisons, key=lambda item: accuracy[item.baseline])
    chosen = min(with_rival, key=lambda item: item.difference or 0.0)
    others = [item.baseline for item in comparisons if item.difference is None]
    extra = "".join(f" ({_figures(row)} is faster than every finalist.)" for row in usable if row.id in others)
    return Comparison(**{**chosen.to_dict(), "sentence": chosen.sentence + extra})


def _against(baseline: FrontRow, finalists: Sequence[FrontRow],
             correct: Mapping[str, NDArray[np.bool_]], seed: int) -> Comparison:
    limit = baseline.latency_ms_high or baseline.latency_ms or 0.0
    eligible = [row for row in finalists if (row.latency_ms or 0.0) <= limit]
    who = describe(baseline)
    if not eligible:
        fastest = min(finalists, key=lambda row: row.latency_ms or 0.0)
        return Comparison(baseline.id, baseline.name, "none as fast",
                          f"The search does not beat {who} at equal latency: no finalist is as fast "
                          f"(baseline {_figures(baseline, False)}; fastest finalist {_figures(fastest)}).")
    best = max(eligible, key=lambda row: (row.top1_test or 0.0, -(row.latency_ms or 0.0)))
    difference, low, high = paired_bootstrap(
        correct[best.id], correct[baseline.id], confidence=1 - 0.05 / len(eligible), seed=seed)
    beats = low > 0
    by = f"by {_points(difference)} of top-1" if beats else _shortfall(difference)
    bounds = (f"95 % interval {_format_signed(low)} to {_format_signed(high)}"
              + ("" if beats or high < 0 else ", which includes 0"))
    verb = "beats" if beats else "does not beat"
    sentence = (f"The search {verb} {who} at equal latency{'' if beats else ':'} {by} ({bounds}): finalist "
                f"{_figures(best)}; baseline {_figures(baseline, False)}.")
    return Comparison(baseline.id, baseline.name, "beats" if beats else "does not beat", sentence, best.id,
                      difference, low, high, len(eligible))


def describe(row: FrontRow, short: bool = False) -> str:
    """The name of a row in sentences (`short`: in plots): name and variant of a baseline, the id of a finalist."""
    if not row.is_baseline or row.id == row.name:
        return row.id
    return f"{row.name} ({'stem s1' if short else 'stride-1 stem'})"


def _figures(row: FrontRow, named: bool = True) -> str:
    top1, latency = row.top1_test or 0.0, row.latency_ms or 0.0
    return f"{describe(row) + ' ' if named else ''}{100 * top1:.2f} % in {latency:.3g} ms"


def _shortfall(difference: float) -> str:
    if abs(difference) < 5e-7:
        return "both are equally accurate"
    return f"it is {'ahead' if difference > 0 else 'behind'} by {_points(abs(difference))} of top-1"


def _points(difference: float) -> str:
    return f"{100 * difference:.2f} points"


def _format_signed(difference: float) -> str:
    return f"{100 * difference:+.2f}".replace("-", "−")
