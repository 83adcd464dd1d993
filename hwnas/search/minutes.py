"""`budget.minutes`: the division of the minutes that the whole command may take, and how a search keeps to them.

The machine is timed before anything is planned. Each phase takes its share of the seconds that are left when it starts,
so that the next phase makes good its error. Timing the finalists comes last and takes what remains.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hwnas.data.dataset import Dataset, subset
from hwnas.errors import BudgetError, CandidateError
from hwnas.front.make import DECIDING, BuildSettings, make, steps_left
from hwnas.front.rows import FrontRow
from hwnas.front.score import fp32_grades, validated_share
from hwnas.networks.network import Network
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import ModelFolder
from hwnas.training.loop import train
from hwnas.training.recipe import Recipe

STEPS = "finalists' steps"  # attribute of the study: of each finalist's training, if minutes decide them
CALIBRATION = 0.15  # of the minutes, at most
TRIALS = 0.4  # of what is left after preparing
TIMING = 0.04  # of the minutes, at least LEAST_TIMING_S and at most MOST_TIMING_S: twelve networks took 50 s in all
MOST_TIMING_S = 100.0
LEAST_FINALISTS = 3  # of a front
FEWEST_STEPS = 40  # of a finalist, or the first network of a race: with fewer it is little better than chance
LEAST_SHARE = 0.25  # of the seconds of a race, for its first network
SEVERAL_SHARE = 0.15  # of the seconds of a race of several networks, for judging them and their cuts
ENOUGH_STEPS = 320  # of a finalist's training, four times a trial's: with so many, no baseline or control makes room
LEAST_TIMING_S, LEAST_TRIALS_S = 10.0, 10.0
ENDING_S = 10.0  # pictures, cards and the report; and Python's start, which was before the clock's
MOST_OVERRUN = 1.25  # times the minutes, which a search may take, so that long preparing on a busy machine is not lost
COMPILING_S = 1.5  # of a network, to score and time it here; another machine is measured (`Pace.scoring_s`)
STARTING_S = 8.0  # of a process that trains
BESIDE = 1.15  # times as long a step takes while the other cores train as well
FEW_TRIALS = 16  # with fewer, the model of all trials knows little: the trials become shorter
MANY_TRIALS = 64  # if more would fit, the trials become longer; an estimate that no experiment has tested yet
LEAST_PROXY_STEPS, LONGEST_PROXY = 40, 4  # the second: times the preset's steps
NEARLY = 0.75  # of the preset's steps: with so many, images keep their size
SMALLEST_PROXY_PX = 32
FORWARD = 3  # images that are answered in the time of training on one
LEAST_MAKING_S = 1.0
DRAWN = 4  # random networks whose steps are timed
ASKING_S = 0.5  # of a trial, besides training and validating: the sampler and the database
_FEW_IMAGES, _SOME_IMAGES = 64, 1024  # of a split: if nothing is timed, and by which answering all of them is timed
_PROBED = 4  # steps, of which the first does not count
LONG_LOOK_S = 0.5  # of steps that count; after so long, a training that is only timed is ended


@dataclass(frozen=True)
class Clock:
    """The seconds of a run of `minutes`. Earlier commands took `before_s` of them; this one started at `began`."""

    minutes: float
    began: float  # of time.monotonic
    before_s: float = 0.0

    @classmethod
    def start(cls, minutes: float) -> Clock:
        """Return a clock that starts now."""
        return cls(minutes, time.monotonic())

    @property
    def spent_s(self) -> float:
        """Seconds that this command has taken."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds until the end; below 0 after it."""
        return 60 * self.minutes - self.before_s - self.spent_s


@dataclass(frozen=True)
class Pace:
    """The speed of this machine: seconds of a training step by network id, and of making a network's files besides.

    `answers` is the time of answering images after a training (validation, test), in steps. `exporting_s` are the
    seconds of making the files of a network that is trained already. `scoring_s` are the seconds of scoring a network
    in the deployment runtime and of compiling it to be timed. `done` has the steps that a trial has trained networks
    for, by `trained_id`.
    """

    step_s: Mapping[str, float]
    making_s: float
    answers: float = 0.0
    exporting_s: float = LEAST_MAKING_S
    scoring_s: float = COMPILING_S
    done: Mapping[str, int] = field(default_factory=dict)

    def with_networks(self, networks: Iterable[Network], making: BuildSettings) -> Pace:
        """Return the same pace with these networks' steps too: each new network is trained for a moment.

        A network that cannot be trained counts as the slowest known one: its row of the front says later why it failed.
        """
        step_times = dict(self.step_s)
        for network in networks:
            if network.id not in step_times:
                try:
                    step_times[network.id] = step_seconds(network, making)
                except CandidateError:
                    step_times[network.id] = max(step_times.values())
        return replace(self, step_s=step_times)

    def seconds(self, networks: Sequence[Network], steps: int, workers: int) -> float:
        """Return the seconds to train and export `networks` with `steps` each, the last one first, on `workers`."""
        workers = min(workers, max(1, len(networks)))
        beside = BESIDE if workers > 1 else 1.0
        # `ends` has the second at which each process is free. The next network goes to the one that is free first.
        ends = [STARTING_S if workers > 1 else 0.0] * workers
        for network in reversed(networks):
            remaining = steps_left(steps, self.done.get(network.trained_id, 0))
            seconds = self.making_s + (remaining + self.answers) * self.step_s[network.id]
            heapq.heapreplace(ends, ends[0] + beside * seconds)
        return max(ends)

    def most_steps(self, networks: Sequence[Network], seconds: float, workers: int, most: int) -> int:
        """Return the most steps, up to `most`, that fit into `seconds`; 0 if none do."""
        # The seconds grow with the steps, but fall when a network starts to go on with a trial's (`steps_left`).
        starts = sorted({1, *(2 * steps for steps in self.done.values() if 0 < 2 * steps <= most)})
        for start, end in reversed([*zip(starts, [*starts[1:], most + 1], strict=True)]):
            if n_fitting := bisect_right(range(start, end), seconds,
                                         key=lambda steps: self.seconds(networks, steps, workers)):
                return start + n_fitting - 1
        return 0


def pace_of(network: Network, making: BuildSettings, score: Callable[[ModelFolder], float] | None = None,
            report: Callable[[float], None] = lambda share: None) -> Pace:
    """Make a network's files for real, with a few steps of training, and time the parts.

    The files are made once before, from few images and untimed: the first time reads libraries, which each process does
    once (STARTING_S). `score` returns the seconds of scoring them, if this is done elsewhere. `report` receives the
    share that is done.
    """
    data, some = making.dataset, _take_few(making.dataset, _SOME_IMAGES, ("validation", "test"))
    few = replace(_short(making), dataset=_take_few(data, _FEW_IMAGES, ("train", "validation", "test")))
    with temporary_folder() as folder:
        make(network, ModelFolder(Path(folder)), few)
    report(0.4)
    clock, stamps = Clock.start(0.0), _Stamps()
    with temporary_folder() as folder:
        make(network, ModelFolder(Path(folder)), replace(_short(making), dataset=some), stamps)
        trained_s, made_s = stamps.at[-1] - clock.began, clock.spent_s
        fp32_grades(ModelFolder(Path(folder)).onnx, some.at_size(network.shape.image_size, True))
        took_s = clock.spent_s
        # The deployed file answers test and validation images, about as fast as fp32 has answered some test images.
        answer_all_s = (took_s - made_s) * len(data.test) / max(1, len(some.test))
        scoring_s = (COMPILING_S + (1 + validated_share(data)) * answer_all_s if score is None else
                     max(COMPILING_S, score(ModelFolder(Path(folder)))))
    # What remains without the training steps and the answers to some images after them.
    step_s, batch = stamps.step_s * making.steps_in_a_step(network), making.recipe.batch_for(len(data.train))
    validating, testing = _answers(some, batch)
    making_s = took_s - (_PROBED + validating + testing) * step_s
    # Of a trained network nothing of its training counts, but its fp32 file answers all test images.
    exporting_s = made_s - trained_s - validating * step_s + answer_all_s
    return Pace({network.id: step_s}, max(LEAST_MAKING_S, making_s), sum(_answers(data, batch)),
                max(LEAST_MAKING_S, exporting_s), scoring_s)


def _answers(data: Dataset, batch: int) -> tuple[float, float]:
    """Return the times of answering validation and test images after a training, in steps of a batch. The last weights
    and their average answer the validation images that decide."""
    return 2 * min(DECIDING, len(data.validation)) / (FORWARD * batch), len(data.test) / (FORWARD * batch)


def _take_few(data: Dataset, n: int, parts: Sequence[str]) -> Dataset:
    """Return a data set with at most about `n` images of some parts."""
    splits = {part: getattr(data, part) for part in parts}
    return replace(data, **{part: split.take(subset(split.labels, n, 0)) for part, split in splits.items()})


def step_seconds(network: Network, making: BuildSettings, image_size: int | None = None) -> float:
    """Return the seconds of one step of the recipe's training, or of as many images in the network's own recipe. Images
    have `image_size` px; None: the network's own size."""
    data, stamps = making.dataset, _Stamps(LONG_LOOK_S)
    some = data.train.take(np.arange(min(len(data.train), 8 * making.recipe.batch_size)))  # fewer shrink the batch
    images = some.resize(image_size or network.shape.image_size)
    with contextlib.suppress(_Enough):
        train(network.build(), images, recipe=_short(making).recipe_of(network), dataset=data, seed=making.seed,
              progress=stamps)
    return stamps.step_s * making.steps_in_a_step(network)


def mean_step_seconds(networks: Sequence[Network], making: BuildSettings, image_size: int, pace: Pace) -> float:
    """Return the mean of `step_seconds`. A network that cannot be trained counts as the slowest of `pace`."""
    seconds = []
    for network in networks:
        try:
            seconds.append(step_seconds(network, making, image_size))
        except CandidateError:
            seconds.append(max(pace.step_s.values()))
    return float(np.mean(seconds))


def _short(making: BuildSettings) -> BuildSettings:
    return replace(making, recipe=with_steps(making.recipe, _PROBED))


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with exactly so many steps."""
    return replace(recipe, min_steps=steps, max_steps=steps)


class _Enough(Exception):
    """An exception that ends a training of which enough was seen."""


class _Stamps:
    """The times at which a training's steps ended. Raises _Enough after `most_s` of steps that count."""

    def __init__(self, most_s: float = math.inf) -> None:
        self.at: list[float] = []
        self._most_s = most_s

    def __call__(self, step: int, steps: int) -> None:
        self.at.append(time.monotonic())
        if self.at[-1] - self.at[0] > self._most_s:
            raise _Enough

    @property
    def step_s(self) -> float:
        """Seconds of a step; the first one, which allocates, does not count."""
        return (self.at[-1] - self.at[0]) / max(1, len(self.at) - 1)


def trials_seconds(clock: Clock, pace: Pace, finalists: Sequence[Network], workers: int) -> float:
    """Return the seconds for the trials; 0 if a run goes on and has time for no more than its `finalists`.

    A new run takes up to MOST_OVERRUN times its minutes. If these are too few, BudgetError names the least.
    """
    # Everything after the trials: training, scoring and timing the finalists, and the report.
    rest = (pace.seconds(finalists, FEWEST_STEPS, workers) + len(finalists) * pace.scoring_s + LEAST_TIMING_S
            + ENDING_S)
    if clock.left_s < rest + LEAST_TRIALS_S:
        if clock.before_s:
            return 0.0
        least = (clock.spent_s + rest + LEAST_TRIALS_S) / 60
        if least <= MOST_OVERRUN * clock.minutes:
            return LEAST_TRIALS_S
        raise BudgetError(f"budget.minutes={clock.minutes:g} is too short for this machine: preparing took "
                          f"{clock.spent_s:.0f} s, and a front of {len(finalists)} networks needs {rest:.0f} s more. "
                          f"Give budget.minutes={1.05 * least:.1f} or more.")
    return min(max(TRIALS * clock.left_s, LEAST_TRIALS_S), clock.left_s - rest)


def proxy_length(preset: int, validating: float, seconds: float, workers: int, step_s: Callable[[int], float],
                 image_size: int, least_px: int, trials: tuple[int, int] = (FEW_TRIALS, MANY_TRIALS)) -> dict[str, int]:
    """Return options that fit the proxy's length to `seconds` of trials; none if its `preset` steps suit them.

    `trials` are two numbers, few and many. If few do not fit with NEARLY as many steps, images become smaller, by
    halves down to `least_px`, then trainings shorter. If more than many fit, trainings become longer. `step_s(px)`
    returns the seconds of a step at a size. `validating` is what a trial takes besides training, in steps.
    """
    few, many = trials
    busy_s = max(1.0, seconds - (STARTING_S if workers > 1 else 0.0)) * workers / (BESIDE if workers > 1 else 1.0)
    size, each_s = image_size, step_s(image_size)

    def fit(n: int) -> int:  # steps of each trial, if there are `n` of them
        return math.floor((busy_s / n - ASKING_S) / each_s - validating)

    # Too few steps for few trials: smaller images make steps cheaper.
    while fit(few) < NEARLY * preset and size // 2 >= least_px:
        size //= 2
        each_s = step_s(size)
    if fit(few) < preset:
        steps = max(min(preset, LEAST_PROXY_STEPS), fit(few))
    else:
        steps = max(preset, min(LONGEST_PROXY * preset, fit(many)))
    if (steps, size) == (preset, image_size):
        return {}
    return {"min_steps": steps, "max_steps": steps, **({} if size == image_size else {"image_size": size})}


def timing_reserve_s(clock: Clock) -> float:
    """Return the seconds that are kept free for scoring and timing the trained networks."""
    return min(MOST_TIMING_S, max(LEAST_TIMING_S, TIMING * 60 * clock.minutes))


def timing_seconds(clock: Clock, n: int, scoring_s: float = COMPILING_S) -> float:
    """Return the seconds for timing `n` networks that are yet to be compiled, and scored in `scoring_s` each."""
    return max(LEAST_TIMING_S, clock.left_s - n * scoring_s - ENDING_S)


def fitted(rows: Sequence[FrontRow], clock: Clock, pace: Pace, workers: int, steps: tuple[int, int],
           say: Callable[[str], None], whole: str = "", others_s: float = 0.0) -> tuple[list[FrontRow], int]:
    """Return the rows for which there is time, and the steps of each network's training. `others_s` are kept for
    exporting and scoring networks that are trained already.

    `steps` has the steps that are enough, and the most that are given. If the first do not fit, all controls but one
    and all baselines but one are left out, the most expensive first. If FEWEST_STEPS do not fit, these go too, and
    finalists down to LEAST_FINALISTS. `whole` is the id of the network that the others are cut from: it is the last
    baseline to go. `say` receives the message.
    """
    remaining = list(rows)
    while True:
        left_s = clock.left_s - timing_reserve_s(clock) - len(remaining) * pace.scoring_s - ENDING_S - others_s
        networks = [row.network for row in remaining if row.network is not None]
        fit = pace.most_steps(networks, left_s, workers, steps[1])
        dropped = _least_wanted(remaining, pace, fit < FEWEST_STEPS, whole)
        if fit >= steps[0] or dropped is None:
            break
        remaining.remove(dropped)
    if len(remaining) < len(rows):
        left_out = [row.id for row in rows if row not in remaining]
        say(f"no time for {len(left_out)} of {len(rows)} networks: {', '.join(left_out)}.")
    return remaining, max(fit, FEWEST_STEPS)


def affordable(rows: Sequence[FrontRow], is_made: Callable[[FrontRow], bool], each_s: float, left_s: float,
               say: Callable[[str], None]) -> list[FrontRow]:
    """Return the rows whose files are made already, and as many others as can be exported in `left_s`, `each_s` each.
    At least one row is returned. Finalists come before baselines, baselines before controls. If only some of a kind
    fit, they are spread over latency, with the slowest, mostly the most accurate. `say` names the others."""
    made_rows = [row for row in rows if is_made(row)]
    n = max(math.floor(left_s / max(each_s, 1e-9)), 0 if made_rows else 1)
    selected_ids = {row.id for row in made_rows}
    for kind in range(3):  # finalists, baselines, controls
        alike = sorted((row for row in rows if row not in made_rows and row.is_baseline + 2 * row.is_control == kind),
                       key=lambda row: -(row.latency_ms_predicted or 0.0))
        fitting = min(n, len(alike))
        selected_ids |= {alike[round(at)].id for at in np.linspace(0, len(alike) - 1, fitting)}
        n -= fitting
    if gone := sorted(row.id for row in rows if row.id not in selected_ids):
        say(f"no time to export {len(gone)} of {len(rows)} networks: {', '.join(gone)}.")
    return [row for row in rows if row.id in selected_ids]


def _least_wanted(rows: Sequence[FrontRow], pace: Pace, few_steps: bool, whole: str) -> FrontRow | None:
    """Return the row to leave out next; None if there is no other. It is the most expensive control or baseline, but
    one of each stays. Controls that the space knows go before others, and the `whole` network stays. With `few_steps`
    the last ones go too, then finalists down to LEAST_FINALISTS."""
    controls, baselines = [row for row in rows if row.is_control], [row for row in rows if row.is_baseline]
    spare = ([row for row in controls if row.is_known] or controls) if len(controls) > 1 else []
    spare += [row for row in baselines if row.id != whole] if len(baselines) > 1 else []
    if spare:
        return max(spare, key=lambda row: 0.0 if row.network is None else pace.step_s[row.network.id])
    if not few_steps:
        return None
    last = next((group[-1] for group in (controls, baselines) if group), None)
    return last or (rows[len(rows) // 2] if len(rows) > LEAST_FINALISTS else None)
