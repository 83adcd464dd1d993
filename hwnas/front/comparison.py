"""Say which network of a front to deploy, and whether the search beats random networks of its space and the baselines.
Each answer is a sentence, by paired intervals."""

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
MARGIN = 0.005  # networks are called equally accurate up to this loss of top-1
EQUAL = 0.05  # latencies are called equal up to this share
FEWER_STEPS = 1 / 3  # a baseline with fewer than this share of a finalist's steps is not called beaten
LEARNT = 0.5  # a baseline below this share of the best finalist's top-1 has hardly learnt: a judgement
CONTROLS, TRAINING = "controls", "training"  # names of the comparison with controls, and of the warning on training
MUCH = 0.01  # from this loss of top-1 by int8 on, another precision is recommended
_OPENVINO = ("xeon_", "epyc_", "openvino_")  # prefixes of targets that have a variant in bf16
WIDE = 0.04  # from this width on, the interval of a top-1 is shown
DEPLOY: Literal["deploy"] = "deploy"  # name and verdict of the sentence on what to deploy


@dataclass(frozen=True, slots=True)
class Comparison:
    """An entry of `comparisons.json`.

    A baseline, a known network of the space, or all random controls, against finalists. `difference` is finalist minus
    rival top-1; `low` and `high` are its 95 % interval.

    Against a baseline or a known network, `finalist` is the best one that is not slower. The verdict is `beats` if it
    is more accurate, and `faster` if another one is at most MARGIN less accurate and faster. Bonferroni's correction
    widens the interval, because the best of `n_eligible` finalists was chosen. Each control is compared with the
    finalist that it was drawn for; the difference is the mean over the `n_eligible` pairs.
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
    """Return what to deploy, as the first sentence on a front; empty if no verified finalist keeps the cap. The
    network is the fastest within the cap that is at most MARGIN less accurate than the most accurate one (95 %
    confidence). The sentence says how far it stays below `cap_ms`. The fastest is chosen from n faster networks, so
    each interval is widened for n (Bonferroni). If there are obvious cuts beside the search, the sentence goes on with
    the most accurate one: how many times as fast is the fastest finalist that is at most MARGIN less accurate?"""
    able = [row for row in rows if is_usable(row, correct) and row.meets_cap is not False and not row.control_of]
    if not any(row.is_finalist for row in able):
        return []
    # The network to deploy, with its figures and its place below the cap.
    best = max(able, key=lambda row: (top1_of(row), -(row.latency_ms or 0.0)))
    row = _fastest_as_good(best, able, correct)
    text = f"Deploy models/{row.id}: {figures_of(row)}"
    if cap_ms is not None and row.latency_ms is not None:
        text += f", {100 * max(0.0, 1 - row.latency_ms / cap_ms):.0f} % below the cap of {cap_ms:g} ms"
    capped = " that keeps the cap" * any(each.meets_cap is not None for each in able)
    # Why this one: it is the most accurate one itself, or the fastest that is as good.
    low, high = best.top1_test_low or 0.0, best.top1_test_high or 1.0
    within = f" (95 %: {100 * low:.1f} to {100 * high:.1f} %)" if high - low > WIDE else ""
    unknown = [each for each in rows if not each.verified and not each.control_of and each.top1_test is not None]
    of = " of the verified ones" if unknown else ""
    text += (f"{within}: no network{capped}{of} is more accurate" if row.id == best.id else
             f": of the networks{of} that lose at most {100 * MARGIN:.1f} points (95 %) to the most accurate one, "
             f"{figures_of(best)}{within}, it is the fastest")
    # Networks that could not be timed may be better still.
    if better := [each for each in unknown if top1_of(each) > top1_of(best)]:
        most = max(better, key=top1_of)
        about = "" if most.latency_ms_predicted is None else f", predicted {most.latency_ms_predicted:.3g} ms"
        text += (f", but {describe(most)} may be better: {100 * top1_of(most):.2f} %{about}, and it could not be "
                 "timed")
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
    """Return the network to deploy, otherwise the most accurate one of the verified front; None if there is none."""
    deployed = {str(item.get("finalist")) for item in comparisons if item.get("verdict") == DEPLOY}
    front = [row for row in rows if row.on_front and row.verified]
    return next((row for row in rows if row.id in deployed), max(front, key=top1_of, default=None))


def _fastest_as_good(best: FrontRow, rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> FrontRow:
    """Return the fastest of `rows` that is at most MARGIN less accurate than `best`, or `best` itself."""
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
    # The ratio's interval is the widest one that both intervals of latency allow.
    low, high, cut_low, cut_high = (end or row.latency_ms or 1.0 for row in (mine, cut)
                                    for end in (row.latency_ms_low, row.latency_ms_high))
    ratio = (cut.latency_ms or 0.0) / (mine.latency_ms or 1.0)
    return (f". At the {cut.metric} of the best obvious cut, {figures_of(cut)}, {figures_of(mine)} is {ratio:.2f} "
            f"times as fast ({cut_low / high:.2f} to {cut_high / low:.2f}; "
            f"{format_signed(top1_of(mine) - top1_of(cut))} points)")


def compare(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> list[Comparison]:
    """Return a comparison with the random controls, and one for each whole or known network and each baseline name, in
    the order of `rows`. Baselines that have learnt too little are left out. The better of a baseline's variants counts:
    the one over which the search leads least. If no finalist is as fast as a variant, the other variant counts, and its
    sentence mentions this one."""
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
    """Return a sentence on each network that loses top-1 by its deployment in int8: its fp32 top-1 is above the
    interval of the deployed file. The sentence names the class that it answers worst."""
    comparisons = []
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
        comparisons.append(Comparison(row.id, row.name, "int8 loses", sentence, row.id, -lost))
    return comparisons


def _under_trained(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> tuple[list[Comparison], set[str]]:
    """Return a warning about the worst baseline that had too little time to learn, if any, and the `trained_id` of all
    that get no verdict. A baseline is under-trained if it is clearly less accurate than a smaller one of its family;
    only the largest such gap counts. Each one with less than half of the best finalist's top-1 counts, too. A family is
    what timm calls alike up to the first digit or underscore."""
    baselines = sorted((row for row in rows if row.is_baseline and is_usable(row, correct)), key=lambda row: row.macs)
    best = max((row for row in rows if row.is_finalist and is_usable(row, correct)), default=None, key=top1_of)
    # 1. Baselines far below the best finalist. The warning is about the worst baseline, by its better variant.
    hardly_learnt = [row for row in baselines if best is not None and top1_of(row) < LEARNT * top1_of(best)]
    learnt = {_whole_name(row): row for row in sorted(baselines, key=top1_of)}
    worst, gap, why = min(learnt.values(), default=None, key=top1_of), 0.0, ""
    if best is not None and worst is not None and worst in hardly_learnt:
        why = f"{figures_of(worst)} has hardly learnt anything beside {figures_of(best)}"
    # 2. A larger network that is clearly less accurate than a smaller one of its family; the largest gap counts.
    for smaller, larger in combinations(baselines, 2):
        if _race(smaller) == _race(larger) and smaller.macs < larger.macs:
            difference, low, _ = correct[smaller.id].minus(correct[larger.id])
            if low > 0 and difference > gap:
                worst, gap = larger, difference
                why = f"{figures_of(larger)} is below the smaller {figures_of(smaller)}"
    if worst is None or not why:
        return [], {row.trained_id for row in hardly_learnt}
    warning = (f"These networks are under-trained: {why}. No verdict on {worst.id} is given; those on other baselines "
               "say who learns fast, not who is better. Train longer: finalists.recipe.epochs=, or more budget.minutes "
               "where they bound it.")
    return ([Comparison(worst.id, TRAINING, "under-trained", warning)],
            {row.trained_id for row in [worst, *hardly_learnt]})  # another deployment was not trained longer


def top1_of(row: FrontRow) -> float:
    """Return the top-1 of a row that was scored in the deployment runtime."""
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
    """Return a baseline's name; for an obvious cut, the name of the network that it is cut from."""
    return row.name.removesuffix(f"-{row.network.obvious}") if row.network is not None else row.name


def family(name: str) -> str:
    """Return the family of a timm network, with any task's head: `mobilenetv` of `mobilenetv3_large_100`."""
    return re.split(r"[\d_]", trunk_of(name)[1], maxsplit=1)[0]


def _with_controls(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> Comparison:
    """Compare finalists with the random networks that are predicted to be as fast."""
    by_id = {row.id: row for row in rows if is_usable(row, correct)}
    pairs = [(by_id[row.control_of], row) for row in rows
             if row.is_control and row.id in by_id and row.control_of in by_id]
    # Only pairs with equally long training are fair.
    fewer = [(mine, theirs) for mine, theirs in pairs if (theirs.steps or 0) < AS_LONG * (mine.steps or 0)]
    pairs = [pair for pair in pairs if pair not in fewer]
    if not pairs:
        why = "no pair of a finalist and its control was verified"
        if fewer:
            why = (f"{fewer[0][1].id} was trained for {fewer[0][1].steps} steps, and {describe(fewer[0][0])}, which "
                   f"it was drawn for, for {fewer[0][0].steps}")
        return Comparison(CONTROLS, CONTROLS, "not comparable", "The search cannot be compared with random networks of "
                          f"its space: {why}.")
    # The search beats them if it is more accurate on average, and not slower as measured.
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
    """Return how much better the first of each pair is, on average over pairs, with the 95 % interval over images."""
    drawn: Any = [mine.drawn - theirs.drawn for mine, theirs in pairs
                  if isinstance(mine, BootstrapGrades) and isinstance(theirs, BootstrapGrades)]
    if drawn:
        return (float(np.mean([mine.score - theirs.score for mine, theirs in pairs])),
                *percentiles(np.mean(drawn, axis=0)))
    apart = np.mean([mine.per_image.astype(float) - theirs.per_image for mine, theirs in pairs], axis=0)
    difference, low, high = bootstrap_mean(*np.unique(apart, return_counts=True))
    # If few images differ, the bootstrap knows too little: 0 is outside only if the exact test says so.
    exact_low, exact_high = paired_interval(int((apart > 0).sum()), int((apart < 0).sum()), len(apart))
    low = min(low, exact_low) if len(pairs) == 1 or exact_low <= 0 < low else low
    high = max(high, exact_high) if len(pairs) == 1 or high < 0 <= exact_high else high
    return difference, low, high


def is_usable(row: FrontRow, correct: Mapping[str, Grades]) -> bool:
    """Return whether a row can be compared: it was scored and timed, and its answers are known."""
    return row.verified and row.latency_ms is not None and row.top1_test is not None and row.id in correct


def _why_none(rows: Sequence[FrontRow], correct: Mapping[str, Grades]) -> str:
    """Return why no finalist can be compared, if none can."""
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
    # The variant counts over which the search leads least. If every one is faster than all finalists, the best counts.
    comparisons = {row.id: _against(row, finalists, correct) for row in usable}
    with_rival = [row for row in usable if comparisons[row.id].difference is not None]
    if not with_rival:
        return comparisons[max(usable, key=top1_of).id]
    baseline = min(with_rival, key=lambda row: comparisons[row.id].difference or 0.0)
    chosen = comparisons[baseline.id]
    extra = "".join(f" ({figures_of(row)} is faster than every finalist.)" for row in usable if row not in with_rival)
    rival = next(row for row in finalists if row.id == chosen.finalist)
    # A win over a baseline that was trained far less proves nothing.
    if chosen.verdict in ("beats", "faster") and (baseline.steps or math.inf) < FEWER_STEPS * (rival.steps or 0):
        return Comparison(baseline.id, baseline.name, "not comparable", f"No verdict on {describe(baseline)}: it was "
                          f"trained for {baseline.steps:,} steps, and finalist {describe(rival)} for {rival.steps:,}. "
                          f"So far: {_both(rival, baseline)}.{extra}")
    return replace(chosen, sentence=chosen.sentence + extra)


def _against(baseline: FrontRow, finalists: Sequence[FrontRow],
             correct: Mapping[str, Grades]) -> Comparison:
    # No slower: within the baseline's interval and within EQUAL of its latency.
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
    """Compare the fastest finalist that is clearly faster and at most MARGIN less accurate; None if there is none."""
    for row in sorted(eligible, key=lambda row: row.latency_ms or 0.0):
        # Clearly faster: the intervals are apart by EQUAL.
        if (row.latency_ms_high or row.latency_ms or 0.0) * (1 + EQUAL) > (baseline.latency_ms_low
                                                                           or baseline.latency_ms or 0.0):
            continue
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
    """Return how much more accurate one network is than another, with its 95 % interval. The interval is widened
    because the network was chosen from `chosen_of`."""
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
    """Return the name of a row in sentences, tables and pictures: a finalist's letter, and the id. A known network has
    its name too, or instead of the id."""
    name = "" if row.id.startswith(row.name) else row.name
    rest = row.deployment if row.label and name else row.id
    return " ".join(filter(None, (row.label, name, rest)))


def figures_of(row: FrontRow, named: bool = True) -> str:
    """Return a network's name, top-1 and latency, as in `C 2d6ca7d1 96.60 % in 0.078 ms`."""
    return f"{f'{describe(row)} ' * named}{100 * top1_of(row):.2f} % in {row.latency_ms or 0.0:.3g} ms"


def _shortfall(difference: float, metric: str) -> str:
    if abs(difference) < 5e-7:
        return "both are equally accurate"
    return f"it is {'ahead' if difference > 0 else 'behind'} by {100 * abs(difference):.2f} points of {metric}"


def format_signed(difference: float) -> str:
    """Return a difference in points, with its sign."""
    return f"{100 * difference:+.2f}".replace("-", "−")
