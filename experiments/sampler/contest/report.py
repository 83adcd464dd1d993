"""The contest in words: a table, and a verdict against the marks that were set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.common import percent, text_table
from experiments.sampler.contest.options import AWARE, OPTUNA, OURS
from experiments.sampler.contest.scores import LEVELS, MARKS, Scores

GOALS = ((100, 250, "first step"), (100, 400, "goal"), (50, 200, "goal"))  # ours after, Optuna's best after


WIDE = "The same runs, hypervolume counted from the worst accuracy and the largest latency:"


def describe(found: Sequence[Scores], wide: Sequence[Scores]) -> str:
    """Both ways to count, the narrow one with seconds and all."""
    return "\n".join([_described(found), "", WIDE, _described(wide)])


def _described(found: Sequence[Scores]) -> str:
    """Mean hypervolume shares with standard errors, evaluations to levels, seconds an ask; then the verdict."""
    rows = [["hypervolume share after", *map(str, MARKS), *(f"to {level:.0%}" for level in LEVELS), "s an ask",
             "seeds", "drawn"]]
    for one in found:
        summary = one.summary()
        rows.append([one.sampler, *(_share(one.at(mark)) for mark in MARKS),
                     *(_needed(one, level) for level in LEVELS), f"{summary['seconds_an_ask']:.4f}",
                     str(len(one.runs)), str(summary["drawn"])])
    return "\n".join([text_table(rows), "to …: mean evaluations of the seeds that reached it (how many did); drawn: at "
                      "random, for a sampler that asked for nothing new", "", *verdict(found)])


def verdict(found: Sequence[Scores]) -> list[str]:
    """One line a goal and a latency-aware peer, plain about where ours is not ahead."""
    by_name = {one.sampler: one for one in found}
    ours = by_name.get(OURS)
    if ours is None:
        return [f"No verdict: {OURS} did not run."]
    optuna = [by_name[name] for name in OPTUNA if name in by_name]
    aware = [by_name[name] for name in AWARE if name in by_name]
    return [*(_against_optuna(ours, optuna, *goal) for goal in GOALS), *(_against_peer(ours, peer) for peer in aware)]


def _against_optuna(ours: Scores, others: Sequence[Scores], after: int, theirs: int, name: str) -> str:
    question = f"{name}: {OURS} after {after} at least Optuna's best after {theirs}"
    mine = ours.at(after)
    there = [(at[0], one.sampler) for one in others if (at := one.at(theirs)) is not None]
    if mine is None or not there:
        return f"{question}: cannot be told, {'evaluations are too few' if others else 'none of Optuna’s ran'}"
    best, sampler = max(there)
    short = [one.sampler for one in others if one.at(theirs) is None]
    remark = f"; without {', '.join(short)}, which ended before" if short else ""
    return (f"{question}: {'yes' if mine[0] >= best else 'NO'} ({percent(mine[0])} against {percent(best)}, {sampler}"
            f"{remark})")


def _against_peer(ours: Scores, peer: Scores) -> str:
    question = f"ahead of {peer.sampler} beyond one standard error of the difference"
    ahead, behind = [], []
    for mark in MARKS:
        mine, theirs = ours.at(mark), peer.at(mark)
        if mine is None or theirs is None:
            continue
        if mine[1] is None or theirs[1] is None:
            return f"{question}: cannot be told from a single seed"
        if mine[0] - theirs[0] > np.hypot(mine[1], theirs[1]):
            ahead.append(str(mark))
        else:
            behind.append(f"{mark} ({_share(mine)} against {_share(theirs)})")
    if not ahead and not behind:
        return f"{question}: cannot be told, evaluations are too few"
    if not behind:
        return f"{question}: yes, at every mark ({', '.join(ahead)})"
    return f"{question}: NOT at {', '.join(behind)}; at {', '.join(ahead) or 'no mark'}"


def _share(found: tuple[float, float | None] | None) -> str:
    if found is None:
        return "–"
    return percent(found[0]) + ("" if found[1] is None else f" ± {100 * found[1]:.1f}")


def _needed(one: Scores, level: float) -> str:
    needed = one.needed(level)
    return f"{np.mean(needed):.0f} ({len(needed)})" if needed else "– (0)"
