"""The goals, decided: each is met or not met, with the numbers, against the rival that is hardest to beat.

Ours take part in the target's own precision alone; a baseline in each of its precisions and with either stem, so that
its best counts. "Equal" and "better" are of the paired bootstrap over test images (95 %, seeds averaged, not corrected
for the number of comparisons).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.contest.entries import Difference, Entry, compared, faster

SPEEDUP, POINTS, BAND = 1.3, 0.015, 0.05
RESNET, RESNET_SPEEDUP, RESNET_POINTS = "resnet50", 8.0, 0.01
DROP = 0.005
PRECISION = "int8"


@dataclass(frozen=True)
class Statement:
    """`met` None: nothing to decide by (no rival, not timed, not scored). `goal` groups what decides one goal."""

    goal: str
    met: bool | None
    text: str

    @property
    def sentence(self) -> str:
        """With the verdict in front."""
        return f"{ {True: 'met', False: 'not met', None: 'undecided'}[self.met]}: {self.text}"


FASTER = f"at least {SPEEDUP} times as fast, at equal accuracy, as the fastest baseline that is as accurate"
REACH = f"at least {SPEEDUP} times as fast as every baseline that is as accurate or more accurate"
BETTER = f"at least {100 * POINTS:g} points better than the best baseline within ±{BAND:.0%} of its latency"
RESNETS = f"at least {RESNET_SPEEDUP:g} times the throughput of ResNet-50 {PRECISION} (its more accurate stem) at " \
          f"{100 * RESNET_POINTS:g} point more"
DROPS = f"{PRECISION} drop of at most {100 * DROP:g} points"


def decide(entries: Sequence[Entry], precision: str = PRECISION) -> list[Statement]:
    """All statements, ours from fast to slow within each goal."""
    ours = sorted((one for one in entries if one.network.is_ours and one.precision == precision and one.latency),
                  key=lambda one: one.latency.ms if one.latency else 0.0)
    rivals = [one for one in entries if not one.network.is_ours and one.latency]
    found = [statement for one in ours for statement in of_speed(one, rivals)]
    found += [of_accuracy(one, rivals) for one in ours] + of_resnet(ours, rivals)
    return found + [of_drop(one, entries) for one in entries if one.network.is_ours and one.precision == precision]


def verdicts(statements: Sequence[Statement]) -> list[str]:
    """A line a goal. The first is met when one network of ours meets either half; drops must all be met. Undecided is
    what no statement decides: nothing of ours, or nothing to compare it with, was timed."""
    def verdict(*goals: str) -> str:
        found = {one.met for one in statements if one.goal in goals}
        return "met" if True in found else "not met" if False in found else "undecided"

    drops = [one.met for one in statements if one.goal == DROPS]
    kept = "not met" if False in drops else "met" if drops and None not in drops else "undecided"
    return [f"A network of ours {FASTER}, or {BETTER}: {verdict(FASTER, BETTER)}.",
            f"Beside it: a network of ours {REACH}: {verdict(REACH)}.",
            f"A network of ours with {RESNETS}: {verdict(RESNETS)}.",
            f"Every network of ours with an {DROPS}, each seed: {kept}."]


def of_speed(one: Entry, rivals: Sequence[Entry]) -> list[Statement]:
    """Against the fastest baseline that is not clearly less accurate; where every baseline is, against the fastest of
    those that are not clearly less accurate than the most accurate one.

    Twice: at equal accuracy, so that ours must not be clearly less accurate than that rival either, and beside it
    whatever the rival has in accuracy.
    """
    if not rivals:
        return [Statement(FASTER, None, f"{one.name} has no timed baseline to be compared with.")]
    gaps = {rival.name: compared(one, rival) for rival in rivals}
    equal = [rival for rival in rivals if gaps[rival.name].low <= 0]
    if equal:
        rival, kind = min(equal, key=_ms), "the fastest baseline that is not clearly less accurate"
    else:
        best = max(rivals, key=lambda other: other.top1)
        rival = min((other for other in rivals if compared(best, other).low <= 0), key=_ms)
        kind = "the fastest of the most accurate baselines, for every baseline is clearly less accurate"
    gap, speed = gaps[rival.name], faster(one, rival)
    fair, fast = gap.high >= 0, speed.mean >= SPEEDUP
    text = f"{_figures(one)} against {_figures(rival)}, {kind}: {_times(speed)} as fast, top-1 {_points(gap)}"
    return [Statement(FASTER, fair and fast, f"{text}{'' if fair else ', which is clearly less accurate'}."),
            Statement(REACH, fast, f"{text}.")]


def of_accuracy(one: Entry, rivals: Sequence[Entry]) -> Statement:
    """Against the most accurate baseline up to the band's end, however much faster it is.

    Where no baseline lies within the band, against the next slower one that is more accurate than all that are faster:
    whoever is better than that is better than anything of equal latency. None where there is none.
    """
    mine = _ms(one)
    able = [rival for rival in rivals if _ms(rival) <= mine * (1 + BAND)]
    best = max((rival.top1 for rival in able), default=0.0)
    if any(_ms(rival) >= mine * (1 - BAND) for rival in able):
        rival, kind = max(able, key=lambda other: (other.top1, -_ms(other))), "the best that is not slower"
    else:
        slower = [rival for rival in rivals if _ms(rival) > mine and rival.top1 > best]
        if not slower:
            return Statement(BETTER, None, f"{_figures(one)} has no baseline within ±{BAND:.0%} of its latency, and no "
                                           "slower one is more accurate than the faster ones.")
        rival, kind = min(slower, key=_ms), f"the next slower one, for none lies within ±{BAND:.0%}"
    gap = compared(one, rival)
    return Statement(BETTER, gap.mean >= POINTS and gap.low > 0, (
        f"{_figures(one)} against {_figures(rival)}, {kind}: {_points(gap)}, {_times(faster(one, rival))} as fast."))


def of_resnet(ours: Sequence[Entry], rivals: Sequence[Entry]) -> list[Statement]:
    """Against the more accurate stem of ResNet-50; the other one is told, and decides nothing."""
    nets = sorted((one for one in rivals if one.network.family == RESNET and one.precision == PRECISION),
                  key=lambda one: -one.top1)
    found = []
    for index, rival in enumerate(nets):
        for one in ours:
            gap, speed = compared(one, rival), faster(one, rival)
            met = speed.mean >= RESNET_SPEEDUP and gap.mean >= RESNET_POINTS and gap.low > 0
            text = f"{_figures(one)} against {_figures(rival)}: {_times(speed)} the throughput, top-1 {_points(gap)}."
            found.append(Statement(RESNETS, met, text) if index == 0 else
                         Statement(f"{RESNETS}, its other stem", met, text))
    who = f"ResNet-50 {PRECISION}" if ours else "no network of ours"
    return found or [Statement(RESNETS, None, f"{who} was {'not ' if ours else ''}trained, scored and timed.")]


def of_drop(one: Entry, entries: Sequence[Entry]) -> Statement:
    """From the fp32 file of the same training; the worst seed decides."""
    whole = next((other for other in entries if other.network == one.network and other.precision == "fp32"), None)
    if whole is None or set(whole.correct) != set(one.correct):
        return Statement(DROPS, None, f"{one.name} has no fp32 file scored beside it.")
    by_seed = {seed: float(whole.correct[seed].mean() - one.correct[seed].mean()) for seed in one.correct}
    drop, worst = compared(whole, one), max(by_seed.values())
    each = ", ".join(f"seed {seed} {100 * value:.2f}" for seed, value in by_seed.items())
    return Statement(DROPS, worst <= DROP + 1e-9,
                     f"{one.name} loses {100 * drop.mean:.2f} points of fp32's top-1 (95 %: {_signed(drop.low)} to "
                     f"{_signed(drop.high)}; {each}).")


def _ms(one: Entry) -> float:
    return one.latency.ms if one.latency else float("inf")


def _figures(one: Entry) -> str:
    return f"{one.name} ({100 * one.top1:.2f} % in {_ms(one):.3g} ms)"


def _times(speed: Difference) -> str:
    return f"{speed.mean:.2f} times ({speed.low:.2f} to {speed.high:.2f})"


def _points(gap: Difference) -> str:
    return f"{_signed(gap.mean)} points (95 %: {_signed(gap.low)} to {_signed(gap.high)})"


def _signed(share: float) -> str:
    return f"{100 * share:+.2f}".replace("-", "−")
