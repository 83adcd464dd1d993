"""`budget.minutes`: how a search divides the minutes that the whole command may take, and keeps to them.

The machine is timed before anything is planned. Each phase takes its share of what is left when it begins, so that an
error of one phase is made good by the next; timing the finalists comes last and takes what remains.
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

from hwnas.data.dataset import subset
from hwnas.errors import BudgetError, CandidateError
from hwnas.front.make import DECIDING, BuildSettings, make, steps_left
from hwnas.front.rows import FrontRow
from hwnas.front.score import fp32_grades, validated_share
from hwnas.networks.network import Network
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import ModelFolder
from hwnas.training.loop import train
from hwnas.training.recipe import Recipe

STEPS = "finalists' steps"  # of a study: of each training of finalists, where minutes decide them
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
MOST_OVERRUN = 1.25  # times the minutes: preparing that a busy machine made long is not thrown away for less
COMPILING_S = 1.5  # of a network, to score and time it here; another machine is asked (`Pace.scoring_s`)
STARTING_S = 8.0  # of a process that trains
BESIDE = 1.15  # times as long takes a step while the other cores train as well
FEW_TRIALS = 16  # with fewer, the model of all trials knows little: the trials become shorter
MANY_TRIALS = 64  # where more would fit, the trials become longer; a judgement, which no experiment has held yet
LEAST_PROXY_STEPS, LONGEST_PROXY = 40, 4  # the second: times the preset's steps
NEARLY = 0.75  # of the preset's steps: with so many, images keep their size
SMALLEST_PROXY_PX = 32
FORWARD = 3  # images answered in the time in which one is trained on
LEAST_MAKING_S = 1.0
DRAWN = 4  # random networks whose steps are timed
ASKING_S = 0.5  # of a trial, besides training and validating: the sampler and the database
_FEW_IMAGES = 64  # of a split, where nothing is timed
_PROBED = 4  # steps, of which the first does not count
LONG_LOOK_S = 0.5  # of steps that count: where they take so long, one of them is enough


@dataclass(frozen=True)
class Clock:
    """The seconds of a run that may take `minutes` in all: earlier commands took `before_s` of them, and this one goes
    on since `began` (time.monotonic)."""

    minutes: float
    began: float
    before_s: float = 0.0

    @classmethod
    def start(cls, minutes: float) -> Clock:
        """A clock that starts now."""
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

    `answers`: the images that a network answers after its training (validation, test), in steps. `scoring_s`: seconds
    of scoring a network in the deployment runtime, and of compiling it to be timed. `done`: the steps that a trial has
    trained some networks for, by `trained_id`.
    """

    step_s: Mapping[str, float]
    making_s: float
    answers: float = 0.0
    scoring_s: float = COMPILING_S
    done: Mapping[str, int] = field(default_factory=dict)

    def with_networks(self, networks: Iterable[Network], making: BuildSettings) -> Pace:
        """The same, which knows these networks' steps too: each new one is trained for a moment.

        One that cannot be trained counts as the slowest known: its row of the front says later why it failed.
        """
        known = dict(self.step_s)
        for network in networks:
            if network.id not in known:
                try:
                    known[network.id] = step_seconds(network, making)
                except CandidateError:
                    known[network.id] = max(known.values())
        return replace(self, step_s=known)

    def seconds(self, networks: Sequence[Network], steps: int, workers: int) -> float:
        """Seconds to train and export `networks` with `steps` each, the last one first, on so many processes."""
        workers = min(workers, max(1, len(networks)))
        beside = BESIDE if workers > 1 else 1.0
        ends = [STARTING_S if workers > 1 else 0.0] * workers
        for network in reversed(networks):
            left = steps_left(steps, self.done.get(network.trained_id, 0))
            seconds = self.making_s + (left + self.answers) * self.step_s[network.id]
            heapq.heapreplace(ends, ends[0] + beside * seconds)
        return max(ends)

    def most_steps(self, networks: Sequence[Network], seconds: float, workers: int, most: int) -> int:
        """The most steps, up to `most`, that fit into `seconds`; 0 where none does."""
        return bisect_right(range(1, most + 1), seconds, key=lambda steps: self.seconds(networks, steps, workers))


def pace_of(network: Network, making: BuildSettings, score: Callable[[ModelFolder], float] | None = None,
            report: Callable[[float], None] = lambda share: None) -> Pace:
    """Make a network's files for real, with a few steps of training, and see what takes how long.

    Once before, of few images and without looking: the first time reads libraries, which each process does once
    (STARTING_S). `score` says how many seconds scoring them takes, where that is not done here. `report` hears the
    share that is done.
    """
    _make_of_few(network, making)
    report(0.4)
    clock, heard = Clock.start(0.0), _Stamps()
    with temporary_folder() as folder:
        make(network, ModelFolder(Path(folder)), _short(making), heard)
        made_s = clock.spent_s
        fp32_grades(ModelFolder(Path(folder)).onnx, making.dataset.at_size(network.shape.image_size, True))
        took_s = clock.spent_s
        scoring_s = (COMPILING_S + validated_share(making.dataset) * (took_s - made_s) if score is None else
                     max(COMPILING_S, score(ModelFolder(Path(folder)))))
    data, batch = making.dataset, making.recipe.batch_for(len(making.dataset.train))
    deciding = 2 * min(DECIDING, len(data.validation))  # by the last weights and by their average
    answers = (deciding + len(data.test)) / (FORWARD * batch)
    step_s = heard.step_s * making.steps_in_a_step(network)
    making_s = took_s - (_PROBED + answers) * step_s
    return Pace({network.id: step_s}, max(LEAST_MAKING_S, making_s), answers, scoring_s=scoring_s)


def step_seconds(network: Network, making: BuildSettings, image_size: int | None = None) -> float:
    """Seconds of one step of the recipe's training, or of as many images in the network's own recipe, on images of
    `image_size` px in place of the network's own."""
    data, heard = making.dataset, _Stamps(LONG_LOOK_S)
    some = data.train.take(np.arange(min(len(data.train), 8 * making.recipe.batch_size)))  # fewer shrink the batch
    images = some.resize(image_size or network.shape.image_size)
    with contextlib.suppress(_Enough):
        train(network.build(), images, recipe=_short(making).recipe_of(network), dataset=data, seed=making.seed,
              progress=heard)
    return heard.step_s * making.steps_in_a_step(network)


def mean_step_seconds(networks: Sequence[Network], making: BuildSettings, image_size: int, pace: Pace) -> float:
    """The mean of `step_seconds` over networks; of those that cannot be trained, the slowest that `pace` knows."""
    seconds = []
    for network in networks:
        try:
            seconds.append(step_seconds(network, making, image_size))
        except CandidateError:
            seconds.append(max(pace.step_s.values()))
    return float(np.mean(seconds))


def _make_of_few(network: Network, making: BuildSettings) -> None:
    data = making.dataset
    train_images, validation, test = (split.take(subset(split.labels, _FEW_IMAGES, 0))
                                      for split in (data.train, data.validation, data.test))
    few = replace(data, train=train_images, validation=validation, test=test)
    with temporary_folder() as folder:
        make(network, ModelFolder(Path(folder)), replace(_short(making), dataset=few))


def _short(making: BuildSettings) -> BuildSettings:
    return replace(making, recipe=with_steps(making.recipe, _PROBED))


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with exactly so many steps."""
    return replace(recipe, min_steps=steps, max_steps=steps)


class _Enough(Exception):
    """Ends a training of which enough was seen."""


class _Stamps:
    """Hears a training's progress, and notes when each step ended. After `most_s` of steps that count it has Enough."""

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
    """Seconds for the trials; 0 where a run goes on whose minutes are over.

    A new one that has no time for its `finalists` takes up to MOST_OVERRUN times its minutes. BudgetError, with the
    least minutes that suffice, where it needs more."""
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

    `trials`: few and many. If few would not fit with NEARLY as many steps, images become smaller, by halves down to
    `least_px`, then the trainings shorter. If more than many would, trainings become longer. `step_s(px)` are
    seconds of a step at a size, and `validating` is what a trial takes besides, in steps.
    """
    few, many = trials
    busy_s = max(1.0, seconds - (STARTING_S if workers > 1 else 0.0)) * workers / (BESIDE if workers > 1 else 1.0)
    size, each_s = image_size, step_s(image_size)

    def fit(n: int) -> int:
        return math.floor((busy_s / n - ASKING_S) / each_s - validating)

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
    """Seconds that are kept free for scoring and timing what was trained."""
    return min(MOST_TIMING_S, max(LEAST_TIMING_S, TIMING * 60 * clock.minutes))


def timing_seconds(clock: Clock, n: int, scoring_s: float = COMPILING_S) -> float:
    """Seconds for timing `n` networks that are about to be compiled, and scored in `scoring_s` each."""
    return max(LEAST_TIMING_S, clock.left_s - n * scoring_s - ENDING_S)


def fitted(rows: Sequence[FrontRow], clock: Clock, pace: Pace, workers: int, steps: tuple[int, int],
           say: Callable[[str], None], whole: str = "", others_s: float = 0.0) -> tuple[list[FrontRow], int]:
    """The rows that there is time for, and the steps of each network's training; `others_s` are kept for exporting and
    scoring networks that are trained already.

    `steps`: those that are enough, and the most that are given. If the first do not fit, all controls but one and
    all baselines but one are left out, the dearest first. If FEWEST_STEPS do not fit, the others go too, and finalists
    down to LEAST_FINALISTS. `whole` is the id of the network that the others are cut from: of baselines it is the last
    to go. `say` gets the message.
    """
    kept = list(rows)
    while True:
        left_s = clock.left_s - timing_reserve_s(clock) - len(kept) * pace.scoring_s - ENDING_S - others_s
        networks = [row.network for row in kept if row.network is not None]
        fit = pace.most_steps(networks, left_s, workers, steps[1])
        dropped = _least_wanted(kept, pace, fit < FEWEST_STEPS, whole)
        if fit >= steps[0] or dropped is None:
            break
        kept.remove(dropped)
    if len(kept) < len(rows):
        gone = [row.id for row in rows if row not in kept]
        say(f"no time for {len(gone)} of {len(rows)} networks: {', '.join(gone)}.")
    return kept, max(fit, FEWEST_STEPS)


def affordable(rows: Sequence[FrontRow], is_made: Callable[[FrontRow], bool], each_s: float, left_s: float,
               say: Callable[[str], None]) -> list[FrontRow]:
    """Return the rows whose files are made already, and of the others as many as can be exported in `left_s`, `each_s`
    each; at least one row in all. Finalists come before baselines, and these before controls. If only some of a kind
    fit, they are spread over latency, with the slowest, which mostly is the most accurate. `say` hears of those left
    out."""
    made = [row for row in rows if is_made(row)]
    n = max(math.floor(left_s / max(each_s, 1e-9)), 0 if made else 1)
    kept = {row.id for row in made}
    for kind in range(3):
        alike = sorted((row for row in rows if row not in made and row.is_baseline + 2 * row.is_control == kind),
                       key=lambda row: -(row.latency_ms_predicted or 0.0))
        fitting = min(n, len(alike))
        kept |= {alike[round(at)].id for at in np.linspace(0, len(alike) - 1, fitting)}
        n -= fitting
    if gone := sorted(row.id for row in rows if row.id not in kept):
        say(f"no time to export {len(gone)} of {len(rows)} networks: {', '.join(gone)}.")
    return [row for row in rows if row.id in kept]


def _least_wanted(rows: Sequence[FrontRow], pace: Pace, few_steps: bool, whole: str) -> FrontRow | None:
    """The row to leave out next: the dearest of all controls and baselines but one each, of controls those first that
    the space knows, of baselines never the `whole` network; where there are `few_steps` then, these too, and finalists
    down to LEAST_FINALISTS. None where there is no other."""
    controls, baselines = [row for row in rows if row.is_control], [row for row in rows if row.is_baseline]
    spare = ([row for row in controls if row.is_known] or controls) if len(controls) > 1 else []
    spare += [row for row in baselines if row.id != whole] if len(baselines) > 1 else []
    if spare:
        return max(spare, key=lambda row: 0.0 if row.network is None else pace.step_s[row.network.id])
    if not few_steps:
        return None
    last = next((group[-1] for group in (controls, baselines) if group), None)
    return last or (rows[len(rows) // 2] if len(rows) > LEAST_FINALISTS else None)
