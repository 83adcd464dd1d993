"""A race with few minutes: the obvious cuts are judged before they are trained, and few of them share the seconds.

With few steps, steps are what is missing: a network that gets a quarter of them ends many points lower. So few networks
share them, and how the seconds are divided follows from what was learnt so far. The order:

    known     the whole network and its obvious cuts get a fitted classifier (`training/classifier.py`) and no step, and
              then some of those that are left on smaller images. Those that a faster one beats are left out, the whole
              network too
    trunk     the slowest one left, in pieces at the full rate, until more of them would hardly make it more accurate
    finish    its rate falls to zero, at the end with int8's rounding if that would cost accuracy. So do those of the
              others, in a single leg: from the trained weights if only the images are smaller, otherwise from its own

Of networks that are about as fast the one with the most multiply-adds is trained: there is no time to try several.
Their number follows from the steps that each must have. The reasons are in docs/decisions/race.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from optuna.trial import TrialState

from hwnas.search.race import (
    FALL,
    FINISH,
    KNOWN,
    LEAST_STEPS,
    RATES,
    ROUNDED_S,
    SURE,
    TRUNK,
    Choose,
    Course,
    Drop,
    Race,
    Step,
    Train,
    sure_that,
)
from hwnas.space.architecture import Architecture
from hwnas.study.lines import THREADS, Line

PIECE = 0.14  # of the seconds, for a leg of the first network at the full rate
LEAST_PIECES, MOST_PIECES = 2, 3
LEARNING = 0.3  # the error falls about as the steps to the power of -0.3 do
TOLERANCE = 0.01  # top-1 that the first network may lose because it does not get all seconds
LEAST_JUDGED = 5  # networks on smaller images that are timed and judged, at least
SHRUNK = 1 / 3  # seconds of a network on smaller images than it was trained on, in those of one that is cut
NEARLY = 1.15  # times as long takes a network that is trained in place of one that it beats
FITTED_STEPS = 250  # that a network will have at most, for it to keep the fitted classifier
ENOUGH_STEPS = 60  # of each network behind the first: where fewer would be left, there are fewer networks
FEWEST = 3  # networks, with the first


def race_of(course: Course, lines: Sequence[Line], chosen: Sequence[int] | None = None) -> Race:
    """Return the race of this course as it stands."""
    is_short = course.is_short and course.unit_steps is None  # it may go on without minutes
    return (ShortRace if is_short else Race)(course, lines, chosen)


class ShortRace(Race):
    """The race as it stands: the lines so far, and all that follows from them."""

    def steps(self) -> list[Step]:
        """Return everything that can be done now, most wanted first; nothing when the race is over."""
        begun = list(self._begun())
        if self.chosen is not None:
            return [*begun]
        busy = {task.line.number for task in begun if task.line is not None}
        wanted = [task for task in self._tasks() if task.line is None or task.line.number not in busy]
        if begun or wanted:
            return [*begun, *wanted]
        done = [line for line in self.lines if FINISH in line.rungs and line.goes_on]
        return [*(Drop(line, "there was no time for it") for line in self.lines if line.live), Choose(done)]

    def _tasks(self) -> Iterator[Train | Drop]:
        """Yield what can be done now, most wanted first."""
        if known := [*self._known_rung()]:
            yield from known
            return
        if not any(line.rungs - {KNOWN} for line in self.lines) and (smaller := [*self._smaller_rung()]):
            yield from smaller
            return
        if any(TRUNK in line.rungs for line in self.lines):  # until then it may fail, and others take its place
            yield from (Drop(line, self._reasons[line.number]) for line in self.lines
                        if line.live and line.number in self._reasons)
        if (first := self._first) is not None:
            line = self._by_id[first.id]
            if self._may_go_on(line):
                steps = MOST_PIECES * (1 + FALL) * PIECE * self._left_s / self.step_s(first)
                yield Train(TRUNK, first, line, None, "", 0.0, 1.0, 1.0, self.course.workers,
                            anew=not line.steps and steps > FITTED_STEPS)
            elif FINISH not in line.rungs:
                yield Train(FINISH, first, line, None, "", 0.0, 1.0, 0.0, self.course.workers, self._rounded)
            else:
                yield from self._tasks_behind(self._wanted)

    def _smaller_rung(self) -> Iterator[Train]:
        """Yield the judging of known networks on smaller images, spread over latency. Only these are timed: who they
        are is decided by a guess at the latency of all."""
        course, known = self.course, {each.architecture.id for each in self.course.known}
        beaten = self._beaten([line for line in self._judged if line.id in known], KNOWN)
        full = [line.architecture for line in self._judged if line.id in known and line.number not in beaten]
        able = [each for network in full for each in course.smaller(network) if course.is_allowed(each)]
        if not able:
            return
        timed = [each.architecture for each in course.known]
        guessed = guess_ms(able, timed, [*map(course.latency_ms, timed)])
        guessed_ms = {each.id: float(ms) for each, ms in zip(able, guessed, strict=True)}
        n = min(max(course.k - 1, LEAST_JUDGED), course.n_lines - len(known))
        chosen = spread(able, lambda each: guessed_ms[each.id], n, course.latency_ms(full[0]))
        course.ask(chosen)
        for each in filter(course.is_allowed, chosen):
            line = self._by_id.get(each.id)
            if line is None or (line.live and not line.legs):
                yield Train(KNOWN, each, line, None, "", 0.0, RATES[KNOWN], RATES[KNOWN])

    def _tasks_behind(self, networks: Sequence[Architecture]) -> Iterator[Train]:
        """Yield the only legs of the networks behind the first."""
        for each in networks:
            if any(_is_smaller(each, other) for other in networks):
                continue  # it is trained behind the same network on larger images
            line = self._by_id[each.id]
            larger = [other for other in self.rivals if _is_smaller(each, other.architecture)]
            if larger:
                source = min(larger, key=lambda line: line.px)
                yield Train(FINISH, each, line, source, f"{source.px} to {each.image_size} px", 0.0, RATES[TRUNK], 0.0,
                            rounded=self._rounded)
            else:
                yield Train(FINISH, each, line, None, "", 0.0, RATES[KNOWN], 0.0, rounded=self._rounded,
                            anew=self._steps_of(each, networks) > FITTED_STEPS)

    @cached_property
    def _reasons(self) -> dict[int, str]:
        """A word on each judged network that a faster one beats, by number; one whose training failed beats none."""
        return self._beaten(self._judged, KNOWN)

    @cached_property
    def _judged(self) -> list[Line]:
        """The lines of the first rung that have not failed, slowest first."""
        lines = [line for line in self.lines if KNOWN in line.rungs and line.state != TrialState.FAIL]
        return sorted(lines, key=lambda line: (-line.latency_ms, line.number))

    @cached_property
    def _unbeaten(self) -> list[Architecture]:
        """The networks that may be trained, slowest first: those that no faster one beats, and no one that takes hardly
        longer."""
        kept: list[Line] = []
        for line in self._judged:
            if line.goes_on and line.number not in self._reasons and not any(
                    other.latency_ms <= NEARLY * line.latency_ms and self._is_better(other, line)
                    and self.course.is_as_cheap(other.architecture, line.architecture) for other in kept):
                kept.append(line)
        return [line.architecture for line in kept]

    @staticmethod
    def _is_better(line: Line, other: Line) -> bool:
        """Return whether one line surely answers better than another after the first rung."""
        mine, theirs = line.right_after(KNOWN), other.right_after(KNOWN)
        return mine is not None and theirs is not None and sure_that(mine, theirs) >= SURE

    @property
    def _first(self) -> Architecture | None:
        """The network that gets most of the seconds."""
        return next(iter(self._unbeaten), None)

    def _may_go_on(self, line: Line) -> bool:
        """Return whether the first network would lose more than TOLERANCE, against having all seconds, if it were
        finished now."""
        pieces: int = sum(leg["rung"] == TRUNK for leg in line.legs)
        if pieces < LEAST_PIECES or pieces >= MOST_PIECES or FINISH in line.rungs:
            return pieces < LEAST_PIECES
        spent_s = sum(float(leg["seconds"]) for each in self.lines for leg in each.legs)
        own_s = (1 + FALL) * sum(float(leg["seconds"]) for leg in line.legs)
        share = min(1.0, own_s / max(1e-9, spent_s + self._left_s))
        return bool((1 - line.top1) * (1 - share ** LEARNING) > TOLERANCE)

    @cached_property
    def rivals(self) -> list[Line]:
        """Every line that has had its last leg."""
        return [line for line in self.lines if FINISH in line.rungs and line.goes_on]

    @cached_property
    def _wanted(self) -> list[Architecture]:
        """The networks that are still to be trained behind the first, slowest first: as many as can have ENOUGH_STEPS,
        without those that lie nearest to another one in latency."""
        course = self.course
        trained = [line for line in self.lines if FINISH in line.rungs]
        wanted = [each for each in self._unbeaten[1:] if self._by_id[each.id].live]

        def gap(network: Architecture) -> float:
            """Return its distance from the nearest other one in the logarithm of latency, by what it costs."""
            others = [line.latency_ms for line in trained] + [
                course.latency_ms(each) for each in wanted if each is not network]
            nearest = min(abs(math.log(course.latency_ms(network) / other)) for other in others)
            return nearest / self._weight(network, wanted)

        def have_few_steps() -> bool:
            return len(trained) + len(wanted) > FEWEST and any(
                self._steps_of(each, wanted) < ENOUGH_STEPS * self._weight(each, wanted) for each in wanted)

        while wanted and (len(wanted) > max(0, course.k - len(trained)) or have_few_steps()):
            wanted.remove(min(wanted, key=gap))
        return wanted

    def _weight(self, network: Architecture, among: Sequence[Architecture]) -> float:
        """Return the network's part of the seconds: SHRUNK if it is trained on larger images before, otherwise 1."""
        before = [*among, *(line.architecture for line in self.rivals)]
        return SHRUNK if any(_is_smaller(network, other) for other in before) else 1.0

    # How long.

    def leg_steps(self, task: Train) -> int:
        """Return the steps of a leg that begins now."""
        if task.rung == KNOWN:
            return 0
        slower = 1 + (ROUNDED_S - 1) * task.rounded
        if task.source is not None or task.architecture.id not in {each.id for each in self._unbeaten[:1]}:
            return max(LEAST_STEPS, round(self._steps_of(task.architecture, self._wanted) / slower))
        step_s = float(self.step_s(task.architecture) / task.threads ** THREADS)
        legs = [(str(leg["rung"]), int(leg["steps"])) for leg in task.line.legs] if task.line is not None else []
        pieces = [steps for rung, steps in legs if rung == TRUNK]
        if not pieces:
            return max(LEAST_STEPS, round(PIECE * self._left_s / step_s))
        # If the machine became slower meanwhile, the others get their part all the same.
        most = self._left_s * (1 - PIECE) / (step_s * slower)
        wanted = max(pieces[0], PIECE * self._left_s / step_s) if task.rung == TRUNK else (
            FALL * sum(steps for _, steps in legs) / slower)
        return max(LEAST_STEPS, round(min(most, wanted)))

    def _steps_of(self, network: Architecture, among: Sequence[Architecture]) -> float:
        """Return the steps that a network can have in the seconds that are left for those it is `among`. Each gets as
        many seconds as the others, one on smaller images SHRUNK times as many, but no more steps than the first."""
        course = self.course
        first = self._by_id[self._unbeaten[0].id]
        exported = sum(FINISH in line.rungs and line.goes_on for line in self.lines) + len(among)
        left_s = max(0.0, course.left_s() + max(0, course.k - exported) * course.making_s)
        left_s *= min(course.workers, len(among))
        weights = {each.id: self._weight(each, among) for each in among}
        most_s = {each.id: first.steps * self.step_s(each) for each in among}
        shared = float(sum(weights.values()) + len(course.baselines_s))
        # Those that are done with the first's steps leave the rest of their seconds to the others: the cheapest first.
        for id in sorted(weights, key=lambda id: most_s[id] / weights[id]):
            seconds = min(most_s[id] if first.steps else math.inf, left_s * weights[id] / shared)
            if id == network.id:
                break
            left_s, shared = left_s - seconds, shared - weights[id]
        return seconds / self.step_s(network)

    def unit(self) -> float:
        """Return 1: what `outlook` says are seconds."""
        return 1.0

    def outlook(self) -> dict[str, float]:
        """Return the seconds of each rung behind the first, if nothing has been trained yet."""
        first_s = MOST_PIECES * PIECE * self._left_s
        return {TRUNK: first_s, FINISH: self._left_s - first_s}

    @property
    def _left_s(self) -> float:
        return max(0.0, self.course.left_s())


def guess_ms(networks: Sequence[Architecture], timed: Sequence[Architecture], timed_ms: Sequence[float]
             ) -> NDArray[np.float64]:
    """Guess latencies [n] by networks that were timed: a power of multiply-adds and of the images' side.

    The powers are the least squares of the logarithms; if the timed ones do not tell them, the smallest.
    """
    largest_px = max(network.image_size for network in timed)

    def rows(of: Sequence[Architecture]) -> NDArray[np.float64]:
        return np.array([[1.0, math.log(each.macs), math.log(each.image_size / largest_px)] for each in of])

    powers = np.linalg.lstsq(rows(timed), np.log(timed_ms), rcond=None)[0]
    return np.asarray(np.exp(rows(networks) @ powers), np.float64)


def spread(networks: Sequence[Architecture], latency_ms: Callable[[Architecture], float], n: int, bound_ms: float
           ) -> list[Architecture]:
    """Choose at most `n` networks that are spread over the logarithm of latency, from the fastest to `bound_ms`.

    A network counts if none that is as fast has more multiply-adds. Of each of `n` equal parts of the range the one
    with the most is chosen, of the first part the fastest one: nothing else keeps a tight cap. Slowest first.
    """
    kept: list[Architecture] = []
    for each in sorted(networks, key=lambda each: (latency_ms(each), -each.macs)):
        if not kept or each.macs > kept[-1].macs:
            kept.append(each)
    if not kept or n < 1:
        return []
    ends = np.geomspace(latency_ms(kept[0]), max(bound_ms, latency_ms(kept[0])) * 1.001, n + 1)[1:]
    parts = {min(n - 1, int(np.searchsorted(ends, latency_ms(each)))): each for each in kept}  # the last one of each
    if len(parts) > 1:
        parts[min(parts)] = kept[0]
    return [parts[part] for part in sorted(parts, reverse=True)]


def _is_smaller(network: Architecture, other: Architecture) -> bool:
    """Return whether one network is the other on smaller images."""
    return network.image_size < other.image_size and other == replace(network, image_size=other.image_size)
