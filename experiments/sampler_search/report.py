"""The searches in words: a table, who reached whose hypervolume and when, the verified fronts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common import percent, text_table
from experiments.sampler_search.fronts import fronts
from experiments.sampler_search.reading import SearchRun
from experiments.sampler_search.scores import MAIN, WIDE, Race, Reference, Scored, mean_and_error
from hwnas.study.record import DUPLICATE, FAILED


def describe(found: Sequence[Scored], at: Reference, sentences: Sequence[str]) -> str:
    """The table and the sentences."""
    table = [["sampler", "seed", "evaluations", "asks", "duplicates", "failed", "stopped early", "hypervolume", "share",
              "s at work", "s training", "s asking", "s an ask"]]
    table += [_line(one) for one in found]
    return "\n".join([
        text_table(table), f"hypervolume of proxy top-1 and log2 of predicted latency against {MAIN} of all networks "
        f"evaluated ({percent(at[0])}, {2 ** at[1]:.4g} ms); share: of what the searches of a seed found together; at "
        "work: any worker busy, from the first trial on; training and asking: workers together", "", *sentences])


def _line(one: Scored) -> list[str]:
    run, n = one.run, len(one.share)
    asked = max(sum(run.counts.get(name, 0) for name in run.counts), 1)
    return [run.sampler, str(run.seed), str(n), str(run.asks), str(run.counts.get(DUPLICATE, 0)),
            str(run.counts.get(FAILED, 0)), str(int(np.isnan(run.top1[:n]).sum())), f"{one.hypervolume[-1]:.5f}",
            percent(float(one.share[-1])), f"{run.wall_s[n - 1]:.0f}", f"{run.training_s[n - 1]:.0f}",
            f"{run.asking_s[n - 1]:.1f}", f"{run.asking_s[-1] / asked:.2f}"]


def verdict(races: Sequence[Race], wide: Sequence[Race], budget: int) -> list[str]:
    """A sentence an ordered pair of samplers, plain about who did not get there; then what it is worth."""
    lines = [_sentence(race, budget) for race in races]
    other = [text for race, loose in zip(races, wide, strict=True) if (text := _otherwise(race, loose, budget))]
    seeds = len(races[0].ended)
    worth = ("One pair of searches is one draw of each sampler: the figures say what happened here, not what happens "
             "on average." if seeds == 1 else f"{seeds} seeds; ±: one standard error.")
    return [*lines, *other, worth]


def _sentence(race: Race, budget: int) -> str:
    reached = [n for n in race.evaluations if n is not None]
    whose = f"{race.other}'s final hypervolume"
    if len(race.ended) > 1:
        return _of_seeds(race, budget, whose, reached)
    if not reached:
        return (f"{race.sampler} did NOT reach {whose} in {budget} evaluations: it ended at {percent(race.ended[0])} "
                "of it.")
    return (f"{race.sampler} reached {whose} after {reached[0]} of {budget} evaluations, {race.wall_s[0]:.0f} s at "
            f"work ({race.other} itself: {race.others_evaluations[0]} evaluations, {race.others_wall_s[0]:.0f} s), and "
            f"ended at {percent(race.ended[0])} of it.")


def _of_seeds(race: Race, budget: int, whose: str, reached: Sequence[int]) -> str:
    seeds = len(race.ended)
    end = f"it ended at {_with_error(race.ended, 100, ' %', 1)} of it."
    if not reached:
        return f"{race.sampler} did NOT reach {whose} in {budget} evaluations, with none of {seeds} seeds: {end}"
    if len(reached) < seeds:
        return (f"{race.sampler} reached {whose} with {len(reached)} of {seeds} seeds only (after "
                f"{', '.join(map(str, reached))} of {budget} evaluations): {end}")
    seconds = [one for one in race.wall_s if one is not None]
    return (f"{race.sampler} reached {whose} with every seed, after {_with_error(reached)} of {budget} evaluations, "
            f"{_with_error(seconds)} s at work ({race.other} itself: {_with_error(race.others_evaluations)} "
            f"evaluations, {_with_error(race.others_wall_s)} s): {end}")


def _otherwise(race: Race, wide: Race, budget: int) -> str | None:
    """Told where the other reference point changes who got there."""
    if [n is None for n in race.evaluations] == [n is None for n in wide.evaluations]:
        return None
    got = ", ".join("not" if n is None else f"after {n}" for n in wide.evaluations)
    return (f"With {WIDE} as the reference point it is otherwise: {race.sampler} reached {race.other}'s final "
            f"hypervolume {got} (of {budget} evaluations{'' if len(wide.ended) == 1 else ', seed by seed'}).")


def of_fronts(runs: Sequence[SearchRun]) -> list[str]:
    """What finalists came to in deployment, for searches of one seed; nothing where none is verified."""
    found = fronts(runs)
    if len(found) < 2:
        return []
    parts = [f"{one.sampler} {one.area:.4f} ± {one.error:.4f}, {one.joint} of its {one.finalists} finalists on the "
             "joint front" for one in found]
    return [f"Verified fronts, seed {runs[0].seed} (test top-1, log2 of measured latency; ±: test images and timing, "
            f"not training): hypervolume {'; '.join(parts)}."]


def _with_error(values: Sequence[float], scale: float = 1, unit: str = "", digits: int = 0) -> str:
    mean, error = mean_and_error(values)
    spread = "" if error is None else f" ± {scale * error:.1f}"
    return f"{scale * mean:.{max(digits, 1 if error is not None else 0)}f}{spread}{unit}"


def race_to_dict(race: Race) -> dict[str, Any]:
    """Entry of summary.json."""
    return {"sampler": race.sampler, "to_final_of": race.other, "evaluations": list(race.evaluations),
            "others_evaluations": list(race.others_evaluations),
            "seconds": [None if one is None else round(one, 2) for one in race.wall_s],
            "others_seconds": [round(one, 2) for one in race.others_wall_s],
            "ended_at": [round(one, 6) if np.isfinite(one) else None for one in race.ended]}
