"""Races without training: lines whose answers are made up, on a space of cuts with made-up latencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
from optuna.trial import TrialState

from hwnas.latency.model import Predictions
from hwnas.networks.around import describe_cuts, space_of_cuts
from hwnas.search.course import Course, KnownNetwork, Latencies, Length, known_networks
from hwnas.search.new_heads import race_of
from hwnas.search.race import FINISH, PIXELS, Add, Choose, Drop, Race, Step, Train
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.candidate import SearchOptions
from hwnas.study.lines import Line, pack
from hwnas.study.objective import Objective

N_IMAGES = 1000
OPTIONS = SearchOptions(100, Objective(target_ms=0.1))


@cache
def cuts() -> SearchSpace:
    return space_of_cuts([describe_cuts("mobilenetv2_035", 3, 10, 64)], 3, 10)


@cache
def cuts_of_two() -> SearchSpace:
    """Cuts of a network of 3.9 million multiply-adds, and of another of 5.9 million."""
    return space_of_cuts([describe_cuts(name, 3, 10, 64) for name in ("mobilenetv2_035", "mobilenetv2_050")], 3, 10)


def predict(networks: Sequence[Architecture]) -> Predictions:
    """Latency follows MACs."""
    mean = 0.02 + np.array([network.macs for network in networks]) / 1e8
    return Predictions(mean, 0.97 * mean, 1.03 * mean)


STEP_S = 0.02  # of every network of a bench on images of 64 px


class Left:
    """A deadline by a made-up clock."""

    def __init__(self, left_s: Callable[[], float]) -> None:
        self._left_s = left_s

    @property
    def left_s(self) -> float:
        return self._left_s()


def changed(course: Course, **values: Any) -> Course:
    """The course with other values of its own or of its length; `left_s` is what a clock says."""
    if "left_s" in values:
        values["until"] = Left(values.pop("left_s"))
    of_length = {each.name: values.pop(each.name) for each in fields(Length) if each.name in values}
    return replace(course, length=replace(course.length, **of_length), **values)


def course_of(seconds: float | None = 200.0, *, cap_ms: float | None = None, k: int = 4,
              objective: Objective = OPTIONS.objective, predictor: Latencies = predict,
              space: SearchSpace | None = None, **more: Any) -> Course:
    """The course of a race with so many seconds, which do not depend on a clock. None: with what `left_s` says."""
    options, space = replace(OPTIONS, cap_ms=cap_ms, objective=objective), space or cuts()
    known = [KnownNetwork(name, network, STEP_S) for name, network in known_networks(space, predict, options).items()]
    length = Length({each.name: STEP_S for each in known}, k, seconds)
    return changed(Course(known, length, space, predictor, options, workers=1), **more)


Skill = Callable[[Architecture, str], float]


def by_size(architecture: Architecture, rung: str) -> float:
    """Top-1 that grows with MACs and falls with nothing else."""
    return float(min(0.97, 0.6 + 0.05 * np.log(architecture.macs / 1e5)))


@dataclass
class Bench:
    """A race whose legs answer as `skill` says; `failing` names networks whose training fails."""

    course: Course
    skill: Skill = by_size
    failing: frozenset[tuple[str, str]] = frozenset()
    lines: list[Line] = field(default_factory=list)
    chosen: list[int] | None = None
    step_s: Callable[[Architecture], float] = lambda architecture: STEP_S * (architecture.image_size / 64) ** PIXELS
    done: list[tuple[str, str, int, str | None]] = field(default_factory=list)  # rung, id, steps, source's id

    @property
    def race(self) -> Race:
        return race_of(self.course, self.lines, self.chosen)

    def run(self, pick: Callable[[Sequence[Step]], Step] = lambda steps: steps[0], most: int = 400) -> Bench:
        """Take a step after another until the race is over."""
        for _ in range(most):
            steps = self.race.steps()
            if not steps:
                return self
            self.take(pick(steps))
        raise AssertionError("the race does not end")

    def take(self, step: Step) -> None:
        if isinstance(step, Drop):
            self._change(step.line, state=TrialState.PRUNED)
        elif isinstance(step, Choose):
            self.chosen = [line.number for line in step.lines]
        elif isinstance(step, Add):
            self.lines.append(Line(len(self.lines), step.architecture, self.course.latency_ms(step.architecture), None,
                                   "", (), "", TrialState.RUNNING, None, None))  # type: ignore[arg-type]
        else:
            self._train(step)

    def _train(self, step: Train) -> None:
        line = step.line
        steps = self.race.leg_steps(step)
        self.done.append((step.rung, line.id, steps, None if step.source is None else step.source.id))
        if (step.rung, line.id) in self.failing:
            self._change(line, state=TrialState.FAIL)
            return
        step_s = self.step_s(line.architecture)
        if self.course.length.total_s is None:  # a leg keeps its seconds
            planned_s = self.race.step_s(line.architecture) / self.course.speed_of(step.threads)
            steps = round(steps * min(1.0, planned_s / self.step_s(line.architecture)))
        leg = {"rung": step.rung, "steps": steps, "start": step.start, "end": step.end,
               "threads": step.threads,
               "seconds": step_s * steps,
               "right": pack(self._right(line.architecture, step.rung))}
        self._change(line, legs=(*line.legs, leg), key=f"{line.key}{step.rung}",
                     source=line.source if step.source is None else step.source.number, move=step.move or line.move,
                     state=TrialState.COMPLETE if step.rung == FINISH else line.state)

    def _right(self, architecture: Architecture, rung: str) -> np.ndarray:
        """Images have a difficulty each, so that a better network is right where a worse one is."""
        return np.random.default_rng(0).permutation(N_IMAGES) < self.skill(architecture, rung) * N_IMAGES

    def _change(self, line: Line, **values: Any) -> None:
        self.lines[line.number] = replace(self.lines[line.number], **values)

    def named(self) -> Mapping[str, str]:
        """Names of the known networks by id."""
        return {known.architecture.id: known.name for known in self.course.known}
