"""Which network of a front is to be deployed, and does the search beat random networks of its space and the baselines?
A sentence each, by paired intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from hwnas.front.rows import FrontRow
from hwnas.stats import bootstrap_mean, paired_interval, percentiles
from hwnas.tasks.task import BootstrapGrades, Grades, trunk_of

Verdict = Literal["int8 loses", "deploy", "beats", "faster", "does not beat", "none as fast", "not comparable",
                  "under-trained"]
AS_LONG = 0.95  # of a finalist's training steps, which a control of it must have had
MARGIN = 0.005  # top-1 that may be lost where networks are called equally accurate
EQUAL = 0.05  # share by which latencies may differ that are called equal
FEWER_STEPS = 1 / 3  # a baseline that had fewer than this share of a finalist's steps is not said to be beaten
LEARNT = 0.5  # a baseline below this share of the best finalist's top-1 has hardly been trained: a judgement
CONTROLS, TRAINING = "controls", "training"  # names of the comparison with them, and of the warning on the race
MUCH = 0.01  # top-1 that int8 takes: from there on another precision is named
_OPENVINO = ("xeon_", "epyc_", "openvino_")  # targets that have one of bf16 beside them
WIDE = 0.04  # of the interval of a top-1: from there on it stands beside the figure
DEPLOY: Literal["deploy"] = "deploy"  # name and verdict of the sentence on it


@dataclass(frozen=True, slots=True)
class Comparison:
    """An entry of `comparisons.json`.

    A baseline, a known network of the space, or all random controls, against finalists. `difference` is finalist minus
    rival top-1, `low` and `high` its 95 % interval.

    Against a baseline or a known network, `finalist` is the best one that is not slower. The verdict is `beats` where
    it is more accurate, and `faster` where another one is at most MARGIN less accurate and faster. Bonferroni's
    correction widens the interval, because the best of `n_eligible` finalists was chosen. Against the controls each is
    held against the finalist it was drawn for; the difference is the mean over the `n_eligible` pairs.
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


def compare_deployed(rows: Sequence[FrontRow], correct: Mapping[str, Grades], cap_ms: float | None = None
                     ) -> list[Comparison]:
    """Return what to deploy, as the first sentence on a front. Of networks that keep the cap, it is the fastest that is
    at most MARGIN less accurate than the most accurate one (95 % confidence). Empty if none was verified. The sentence
    says how far it stays below `cap_ms`.

    Of n faster networks the fastest is picked, so each interval is widened for n (Bonferroni). The sentence goes on
    with the most accurate obvious cut on full images, if there is one beside the search: at its top-1, how many
    times as fast is the fastest network that is at most MARGIN less accurate?
    """
    able = [row for row in rows if is_usable(row, correct) and row.meets_cap is not False and not row.control_of]
    if not any(row.is_finalist for row in able):
        return []
    best = max(able, key=lambda row: (top1_of(row), -(row.latency_ms or 0.0)))
    row = _fastest_as_good(best, able, correct)
    text = f"Deploy models/{row.id}: {figures_of(row)}"
    if cap_ms is not None and row.latency_ms is not None:
        text += f", {100 * max(0.0, 1 - row.latency_ms / cap_ms):.0f} % below the cap of {cap_ms:g} ms"
    capped = " that keeps the cap" * any(each.meets_cap is not None for each in able)
    low, high = best.top1_test_low or 0.0, best.top1_test_high or 1.0
    within = f" (95 %: {100 * low:.1f} to {100 * high:.1f} %)" if high - low > WIDE else ""
    unknown = [each for each in rows if not each.verified and not each.control_of and each.top1_test is not None]
    of = " of the verified ones" if unknown else ""
    text += (f"{within}: no network{capped}{of} is more accurate" if row.id == best.id else
             f": of the networks{of} that lose at most {100 * MARGIN:.1f} points (95 %) to the most accurate one, "
             f"{figures_of(best)}{within}, it is the fastest")
    if better := [each for each in unknown if top1_of(each) > top1_of(best)]:
        most = max(better, key=top1_of)
        about = "" if most.latency_ms_predicted is None else f", predicted {most.latency_ms_predicted:.3g} ms"
        text += (f", but {describe(most)} may be better: {100 * top1_of(most):.2f} %{about}, and no latency could be "
                 "told of it")
    # A control proves nothing of the search, but it may be the network that one wants.
    if above := [row for row in rows if row.control_of and is_usable(row, correct) and row.meets_cap is not False
                 and top1_of(row) > top1_of(best)]:
        text += f", but {figures_of(max(above, key=top1_of))}, trained as a control"
    if cuts := [row for row in able if row.kind == "obvious cut"]:
        text += _beside(max(cuts, key=top1_of), able, correct)
    lost = (row.top1_test_fp32 or 0.0) - top1_of(row)
    if row.precision == "int8" and lost >= MUCH and row.target.startswith(_OPENVINO):
        text += (f". int8 takes {100 * lost:.1f} points of its {row.metric}: if this CPU has bf16, "
                 "target=openvino_bf16 may take fewer, and more time")
    return [Comparison(row.id, DEPLOY, DEPLOY, f"{text}.", row.id)]


def shown_row(rows: Sequence[FrontRow], comparisons: Sequence[Mapping[str, Any]]) -> FrontRow | None:
    """The network that is to be deployed, otherwise the most accurate one of the verified front; None where there is
    none."""
    deployed = {str(item.get("finalist")) for item in comparisons if item.get("verdict") == DEPLOY}
    front = [row for row in rows if row.on_front and row.verified]
    return next((row for row in rows if row.id in deployed), max(front, key=top1_of, default=None))


def _fastest_as_good(best: FrontRow, rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> FrontRow:
    """The fastest of `rows` that is at most MARGIN less accurate than `best`, which may be itself."""
    faster = sorted((row for row in rows if (row.latency_ms or 0.0) < (best.latency_ms or 0.0)),
                    key=lambda row: row.latency_ms or 0.0)
    for row in faster:
        if difference_of(row, best, correct, len(faster))[1] > -MARGIN:
            return row
    return best


def _beside(cut: FrontRow, rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> str:
    """Say, at a sentence's end, how much faster than the best obvious cut the fastest finalist is that is as good."""
    mine = _fastest_as_good(cut, [row for row in rows if row.is_finalist], correct)
    if mine.id == cut.id:
        return f". No finalist is faster than the best obvious cut, {figures_of(cut)}, and as accurate"
    low, high, cut_low, cut_high = (end or row.latency_ms or 1.0 for row in (mine, cut)
                                    for end in (row.latency_ms_low, row.latency_ms_high))
    ratio = (cut.latency_ms or 0.0) / (mine.latency_ms or 1.0)
    return (f". At the {cut.metric} of the best obvious cut, {figures_of(cut)}, {figures_of(mine)} is {ratio:.2f} "
            f"times as fast ({cut_low / high:.2f} to {cut_high / low:.2f}; "
            f"{format_signed(top1_of(mine) - top1_of(cut))} points)")


def compare(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> list[Comparison]:
    """One comparison with the random controls, and one for each known network and each baseline name, in the order of
    `rows`. The better of a baseline's variants counts.

    The better variant is the one over which the search leads least.
    If no finalist is as fast as a variant, the other variant counts, and its sentence mentions this one.
    """
    finalists = [row for row in rows if row.is_finalist and not row.is_whole and is_usable(row, correct)
                 and row.meets_cap is not False]
    why_none = _why_none(rows, correct)
    controls = [_with_controls(rows, correct)] if any(row.control_of for row in rows) else []
    warnings, learnt_little = _under_trained(rows, correct)
    rivals: dict[str, list[FrontRow]] = {}
    for row in sorted(rows, key=lambda row: row.is_baseline):
        if row.is_known or row.is_whole or (row.is_baseline and row.trained_id not in learnt_little):
            rivals.setdefault(_whole_name(row) if row.is_baseline else row.trained_id, []).append(row)
    return warnings + controls + [_of_name(variants, finalists, correct, why_none) for variants in rivals.values()]


def compare_precisions(rows: Sequence[FrontRow], grades: Mapping[str, Grades], names: Sequence[str]
                       ) -> list[Comparison]:
    """A sentence on each network that is deployed in int8 and answers worse than in fp32 by more than its interval,
    with the class that it answers worst."""
    said = []
    for row in rows:
        if (row.precision != "int8" or row.id not in grades or row.top1_test is None or row.top1_test_fp32 is None
                or row.top1_test_high is None or row.top1_test_high >= row.top1_test_fp32):
            continue
        shares = grades[row.id].by_class(names)
        worst = min(shares, key=lambda name: shares[name])
        lost = row.top1_test_fp32 - row.top1_test
        sentence = (f"int8 costs {describe(row)} {100 * lost:.2f} points of {row.metric}: "
                    f"{row.top1_test:.2%} deployed (95 %: {row.top1_test_low:.2%} to {row.top1_test_high:.2%}), "
                    f"{row.top1_test_fp32:.2%} in fp32. Its worst class is {worst} ({shares[worst]:.1%}). A "
                    "target in fp32 or bf16 keeps it.")
        said.append(Comparison(row.id, row.name, "int8 loses", sentence, row.id, -lost))
    return said


def _under_trained(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> tuple[list[Comparison], set[str]]:
    """A warning where a network of a family is clearly less accurate than a smaller one of it, or a baseline answers
    less than half as much rightly as the best finalist: it learns more slowly, and was not given the time. A family is
    what timm calls alike up to the first digit or underscore. And the `trained_id` of all on which no verdict is given.
    """
    baselines = sorted((row for row in rows if row.is_baseline and is_usable(row, correct)), key=lambda row: row.macs)
    best = max((row for row in rows if row.is_finalist and is_usable(row, correct)), default=None, key=top1_of)
    hardly_learnt = [row for row in baselines if best is not None and top1_of(row) < LEARNT * top1_of(best)]
    # Of a baseline's variants the better one counts.
    learnt = {_whole_name(row): row for row in sorted(baselines, key=top1_of)}
    worst, least, why = min(learnt.values(), default=None, key=top1_of), 0.0, ""
    if best is not None and worst is not None and worst in hardly_learnt:
        why = f"{figures_of(worst)} has hardly learnt anything beside {figures_of(best)}"
    for smaller, larger in combinations(baselines, 2):
        if _race(smaller) == _race(larger) and smaller.macs < larger.macs:
            difference, low, _ = correct[smaller.id].minus(correct[larger.id])
            if low > 0 and difference > least:
                worst, least = larger, difference
                why = f"{figures_of(larger)} lies below the smaller {figures_of(smaller)}"
    if worst is None or not why:
        return [], {row.trained_id for row in hardly_learnt}
    warning = (f"These networks are under-trained: {why}. No verdict on {worst.id} is given; those on other baselines "
               "say who learns fast, not who is better. Train longer: finalists.recipe.epochs=, or more budget.minutes "
               "where they bound it.")
    return ([Comparison(worst.id, TRAINING, "under-trained", warning)],
            {row.trained_id for row in [worst, *hardly_learnt]})  # another deployment was not trained longer


def top1_of(row: FrontRow) -> float:
    """Top-1 of a row that was scored in the deployment runtime."""
    return row.top1_test or 0.0


def _race(row: FrontRow) -> tuple[str, bool, str, int, str]:
    """Return what two baselines share if they can be compared: the family, a pretrained start, cut and image size, and
    the deployment if there are several."""
    network = row.network
    if network is None or not network.is_baseline:  # a row without its files, or of the search
        return family(row.name), False, "", 0, row.deployment
    return (family(row.name), network.pretrained is not None, network.obvious, network.shape.image_size,
            row.deployment)


def _whole_name(row: FrontRow) -> str:
    """A baseline's name: of an obvious cut that of the network that it is cut from."""
    return row.name.removesuffix(f"-{row.network.obvious}") if row.network is not None else row.name


def family(name: str) -> str:
    """`mobilenetv` of `mobilenetv3_large_100`, whatever head is on it."""
    return re.split(r"[\d_]", trunk_of(name)[1], maxsplit=1)[0]


def _with_controls(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> Comparison:
    """Finalists against the random networks that are predicted to be as fast."""
    by_id = {row.id: row for row in rows if is_usable(row, correct)}
    pairs = [(by_id[row.control_of], row) for row in rows
             if row.is_control and row.id in by_id and row.control_of in by_id]
    fewer = [(mine, theirs) for mine, theirs in pairs if (theirs.steps or 0) < AS_LONG * (mine.steps or 0)]
    pairs = [pair for pair in pairs if pair not in fewer]
    if not pairs:
        why = "no pair of a finalist and its control was verified"
        if fewer:
            why = (f"{fewer[0][1].id} was trained for {fewer[0][1].steps} steps, and {describe(fewer[0][0])}, which "
                   f"it was drawn for, for {fewer[0][0].steps}")
        return Comparison(CONTROLS, CONTROLS, "not comparable", "The search cannot be compared with random networks of "
                          f"its space: {why}.")
    difference, low, high = _mean_difference([(correct[mine.id], correct[theirs.id]) for mine, theirs in pairs])
    ratio = float(np.exp(np.mean([np.log((mine.latency_ms or 1.0) / (theirs.latency_ms or 1.0))
                                  for mine, theirs in pairs])))
    beats = low > 0 and ratio <= 1 + EQUAL
    kind = "random networks of its space" if len(pairs) > 1 else "a random network of its space"
    metric = pairs[0][0].metric
    by = f"by {100 * difference:.2f} points of {metric}" if beats else _shortfall(difference, metric)
    sentence = (f"The search {'beats' if beats else 'does not beat'} {kind}{'' if beats else ':'} {by} "
                f"({_bounds(low, high, low > 0)}): {len(pairs)} pair{'s' * (len(pairs) > 1)} of a finalist and a "
                f"network drawn at its predicted latency; as measured, finalists take {ratio:.2f} of the others' time"
                f"{', too unequal to judge' if low > 0 and not beats else ''}. "
                "The interval is over the test images: other random networks may differ.")
    return Comparison(CONTROLS, CONTROLS, "beats" if beats else "does not beat", sentence, "", difference, low, high,
                      len(pairs))


def _mean_difference(pairs: Sequence[tuple[Grades, Grades]]) -> tuple[float, float, float]:
    """Return how much better the first of each pair is, in the mean over pairs, with the 95 % interval over images."""
    drawn: Any = [mine.drawn - theirs.drawn for mine, theirs in pairs
                  if isinstance(mine, BootstrapGrades) and isinstance(theirs, BootstrapGrades)]
    if drawn:
        return (float(np.mean([mine.score - theirs.score for mine, theirs in pairs])),
                *percentiles(np.mean(drawn, axis=0)))
    apart = np.mean([mine.per_image.astype(float) - theirs.per_image for mine, theirs in pairs], axis=0)
    difference, low, high = bootstrap_mean(*np.unique(apart, return_counts=True))
    # Where few images differ, the bootstrap knows too little: 0 is outside only if the exact test says so.
    exact_low, exact_high = paired_interval(int((apart > 0).sum()), int((apart < 0).sum()), len(apart))
    low = min(low, exact_low) if len(pairs) == 1 or exact_low <= 0 < low else low
    high = max(high, exact_high) if len(pairs) == 1 or high < 0 <= exact_high else high
    return difference, low, high


def is_usable(row: FrontRow, correct: Mapping[str, Grades]) -> bool:
    """Return whether a row can be compared: it was scored and timed, and its answers are known."""
    return row.verified and row.latency_ms is not None and row.top1_test is not None and row.id in correct


def _why_none(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> str:
    """Return why no finalist can be compared, where none can."""
    usable = [row for row in rows if row.is_finalist and is_usable(row, correct)]
    if not usable:
        return "no finalist was verified"
    if all(row.is_whole for row in usable):
        return "the whole network is the only finalist"
    return f"no {'other ' * any(row.is_whole for row in usable)}finalist keeps the cap as measured"


def _of_name(variants: Sequence[FrontRow], finalists: Sequence[FrontRow],
             correct: Mapping[str, Grades], why_none: str) -> Comparison:
    usable = [row for row in variants if is_usable(row, correct)]
    if not usable or not finalists:
        reason = next((row.reason for row in variants if row.reason), "it was not scored and timed on this host")
        text = why_none if usable else f"the {variants[0].kind} was not verified: {reason.rstrip('.')}"
        name = variants[0].name
        return Comparison(variants[0].id, name, "not comparable", f"The search cannot be compared with {name}: {text}.")
    comparisons = {row.id: _against(row, finalists, correct) for row in usable}
    with_rival = [row for row in usable if comparisons[row.id].difference is not None]
    if not with_rival:
        return comparisons[max(usable, key=top1_of).id]
    baseline = min(with_rival, key=lambda row: comparisons[row.id].difference or 0.0)
    chosen = comparisons[baseline.id]
    extra = "".join(f" ({figures_of(row)} is faster than every finalist.)" for row in usable if row not in with_rival)
    rival = next(row for row in finalists if row.id == chosen.finalist)
    if chosen.verdict in ("beats", "faster") and (baseline.steps or math.inf) < FEWER_STEPS * (rival.steps or 0):
        return Comparison(baseline.id, baseline.name, "not comparable", f"No verdict on {describe(baseline)}: it was "
                          f"trained for {baseline.steps:,} steps, and finalist {describe(rival)} for {rival.steps:,}. "
                          f"So far: {_both(rival, baseline)}.{extra}")
    return replace(chosen, sentence=chosen.sentence + extra)


def _against(baseline: FrontRow, finalists: Sequence[FrontRow],
             correct: Mapping[str, Grades]) -> Comparison:
    limit = min(baseline.latency_ms_high or math.inf, (1 + EQUAL) * (baseline.latency_ms or 0.0))
    eligible = [row for row in finalists if (row.latency_ms or 0.0) <= limit]
    who = describe(baseline)
    if not eligible:
        fastest = min(finalists, key=lambda row: row.latency_ms or 0.0)
        return Comparison(baseline.id, baseline.name, "none as fast",
                          f"The search does not beat {who}: no finalist is as fast "
                          f"({baseline.kind} {figures_of(baseline, False)}; fastest finalist {figures_of(fastest)}).")
    best = max(eligible, key=lambda row: (top1_of(row), -(row.latency_ms or 0.0)))
    difference, low, high = difference_of(best, baseline, correct, len(eligible))
    beats = low > 0
    times, bounds = _times(best, baseline), _bounds(low, high, beats)
    if beats:
        sentence = (f"The search beats {who}: {f'{times} as fast and' if times else 'at equal latency,'} "
                    f"{100 * difference:.2f} points of {best.metric} more accurate ({bounds})")
    elif (quick := _quickest(eligible, baseline, correct)) is not None:
        return quick
    else:
        shown = "is not shown to" if difference > 0 else "does not"
        sentence = (f"The search {shown} beat {who}, with a network that is "
                    f"{f'{times} as fast' if times else 'no slower'}: {_shortfall(difference, best.metric)} ({bounds})")
    return Comparison(baseline.id, baseline.name, "beats" if beats else "does not beat",
                      f"{sentence}: {_both(best, baseline)}.", best.id, difference, low, high, len(eligible))


def _quickest(eligible: Sequence[FrontRow], baseline: FrontRow, correct: Mapping[str, Grades]
              ) -> Comparison | None:
    """The fastest finalist that is clearly faster and, within MARGIN, no less accurate; None where there is none."""
    for row in sorted(eligible, key=lambda row: row.latency_ms or 0.0):
        if (row.latency_ms_high or row.latency_ms or 0.0) * (1 + EQUAL) > (baseline.latency_ms_low
                                                                           or baseline.latency_ms or 0.0):
            return None
        difference, low, high = difference_of(row, baseline, correct, len(eligible))
        if low > -MARGIN:
            sentence = (f"The search beats {describe(baseline)} in speed: {_times(row, baseline)} as fast at equal "
                        f"{row.metric} (at most {100 * MARGIN:.1f} points less: {format_signed(difference)} points, "
                        f"{_bounds(low, high, True)}): {_both(row, baseline)}.")
            return Comparison(baseline.id, baseline.name, "faster", sentence, row.id, difference, low, high,
                              len(eligible))
    return None


def difference_of(finalist: FrontRow, baseline: FrontRow, correct: Mapping[str, Grades], chosen_of: int
                  ) -> tuple[float, float, float]:
    """Return how much more accurate one network is than another, with its 95 % interval, widened for having had
    `chosen_of` to choose from."""
    return correct[finalist.id].minus(correct[baseline.id], confidence=1 - 0.05 / chosen_of)


def _bounds(low: float, high: float, excludes_zero: bool) -> str:
    return (f"95 % interval {format_signed(low)} to {format_signed(high)}"
            + ("" if excludes_zero or high < 0 else ", which includes 0"))


def _times(finalist: FrontRow, baseline: FrontRow) -> str:
    """Say how many times as fast a finalist is; empty at equal latency."""
    ratio = (baseline.latency_ms or 0.0) / (finalist.latency_ms or 1.0)
    return "" if ratio < 1 + EQUAL else f"{ratio:.2g} times" if ratio < 10 else f"{ratio:.0f} times"


def _both(finalist: FrontRow, baseline: FrontRow) -> str:
    return f"finalist {figures_of(finalist)}; {baseline.kind} {figures_of(baseline, False)}"


def describe(row: FrontRow) -> str:
    """Return what a row is called in sentences, tables and pictures: a letter that one can say, and a known network's
    name or otherwise the id, or both."""
    name = "" if row.id.startswith(row.name) else row.name
    rest = row.deployment if row.label and name else row.id
    return " ".join(filter(None, (row.label, name, rest)))


def figures_of(row: FrontRow, named: bool = True) -> str:
    """Return what a network is called, its top-1 and its latency, as in `C 2d6ca7d1 96.60 % in 0.078 ms`."""
    return f"{f'{describe(row)} ' * named}{100 * top1_of(row):.2f} % in {row.latency_ms or 0.0:.3g} ms"


def _shortfall(difference: float, metric: str) -> str:
    if abs(difference) < 5e-7:
        return "both are equally accurate"
    return f"it is {'ahead' if difference > 0 else 'behind'} by {100 * abs(difference):.2f} points of {metric}"


def format_signed(difference: float) -> str:
    """A difference in points, with its sign."""
    return f"{100 * difference:+.2f}".replace("-", "−")
