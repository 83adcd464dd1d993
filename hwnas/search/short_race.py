"""A race with few minutes: one network is trained for most of them, and smaller ones are cut from it.

With few steps, steps are what is missing: a network that gets a quarter of them ends many points lower. So few networks
share them, and how the seconds are divided follows from what was learnt so far. The order:

    known     the whole network and its obvious cuts, each for a moment, if that takes 15 % of the seconds at most.
              Those that a faster one beats are left out
    trunk     the slowest one left, in pieces at the full rate, until more of them would hardly make it more accurate
    finish    its rate falls to zero, at the end with int8's rounding if that would cost accuracy. Then the others on
              large and smaller images, spread over the range of latency: each is cut from the nearest trained one, and
              has a single leg at a falling rate. The whole network is one of them if it was beaten

Of networks that are about as fast the one with the most multiply-adds is trained: there is no time to try several.
Their number follows from the steps that each must have. The reasons are in docs/decisions/race.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from hwnas.search.course import LatencyByMacs
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
MOST_PIECES = 3
LEARNING = 0.3  # the error falls about as the steps to the power of -0.3 do
TOLERANCE = 0.01  # top-1 that the first network may lose because it does not get all seconds
SHRUNK = 1 / 3  # seconds of a network on smaller images than it was trained on, in those of one that is cut
NEARLY = 1.15  # times as long takes a network that is trained in place of one that it beats
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
        if self.course.known_steps and (known := [*self._known_rung()]):
            yield from known
            return
        yield from self._drops(self._beaten(self._known_lines, KNOWN))
        if (first := self._first) is not None:
            line = self._by_id.get(first.id)
            if line is None or self._may_go_on(line):
                yield Train(TRUNK, first, line, None, "", 0.0, 1.0, 1.0, self.course.workers)
            elif FINISH not in line.rungs:
                yield Train(FINISH, first, line, None, "", 0.0, 1.0, 0.0, self.course.workers, self._rounded)
            else:
                yield from self._tasks_behind(self._wanted)

    def _tasks_behind(self, networks: Sequence[Architecture]) -> Iterator[Train]:
        """Yield the only legs of the networks behind the first."""
        for each in networks:
            if any(_is_smaller(each, other) for other in networks):
                continue  # it is trained behind the same network on larger images
            line = self._by_id.get(each.id)
            larger = [other for other in self.rivals if _is_smaller(each, other.architecture)]
            if larger:
                source = min(larger, key=lambda line: line.px)
                yield Train(FINISH, each, line, source, f"{source.px} to {each.image_size} px", 0.0, RATES[TRUNK], 0.0,
                            rounded=self._rounded)
            elif (whole := self.source_of(each)) is not None:
                yield Train(FINISH, each, line, whole, "cut from the trained", 0.0, RATES[KNOWN], 0.0,
                            rounded=self._rounded)
            elif line is not None and line.legs:
                yield Train(FINISH, each, line, None, "", 0.0, RATES[KNOWN], 0.0, rounded=self._rounded)

    @cached_property
    def _unbeaten(self) -> list[Architecture]:
        """The known networks that may be trained on, slowest first: with a first rung those that no faster one beats,
        and no one that takes hardly longer."""
        if self.course.known_steps:
            lines = [limb.line for limb in self.trunk if limb.line.goes_on] or [
                line for line in self._known_lines if line.goes_on]  # if all that beat others have failed
            return [line.architecture for line in lines if not any(
                line.latency_ms < other.latency_ms <= NEARLY * line.latency_ms and self._is_better(other, line)
                and self.course.is_as_cheap(other.architecture, line.architecture) for other in lines)]
        return [known.architecture for known in self.course.known
                if (line := self._by_id.get(known.architecture.id)) is None or line.goes_on]

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
        if pieces == 0 or pieces >= MOST_PIECES or FINISH in line.rungs:
            return not pieces
        share = pieces * PIECE * (1 + FALL)
        return bool((1 - line.top1) * (1 - share ** LEARNING) > TOLERANCE)

    @cached_property
    def rivals(self) -> list[Line]:
        """Every line that has had its last leg."""
        return [line for line in self.lines if FINISH in line.rungs and line.goes_on]

    @cached_property
    def _offered(self) -> list[Architecture]:
        """The networks that may be trained behind the first, spread over latency. Only these are timed: who they are is
        decided by a guess at the latency of all, from the known networks."""
        course, first = self.course, self._unbeaten[0]
        timed = [each.architecture for each in course.known]
        guess = LatencyByMacs.of(timed, [*map(course.latency_ms, timed)])
        able = [each for network in self._unbeaten for each in (network, *course.smaller(network))
                if each.id != first.id and course.is_allowed(each)]
        guessed_ms = {each.id: float(ms) for each, ms in zip(able, guess.guess_ms(able), strict=True)} if able else {}
        chosen = spread(able, lambda each: guessed_ms[each.id], course.k - 1, course.latency_ms(first))
        course.ask(chosen)
        return [each for each in chosen if course.is_allowed(each)]

    @cached_property
    def _wanted(self) -> list[Architecture]:
        """The networks that are still to be trained behind the first, slowest first: as many as can have ENOUGH_STEPS,
        without those that lie nearest to another one in latency."""
        course, first = self.course, self._unbeaten[0]
        trained = [line for line in self.lines if FINISH in line.rungs]
        whole = self._by_id.get(course.wholes.get(first.around, ""))
        todo = [whole.architecture] if whole is not None and whole.live and whole.id != first.id else []
        todo += [line.architecture for line in self.lines if line.live and not line.legs]
        new = [each for each in self._offered if each not in todo and (
            self.source_of(each) is not None if (line := self._by_id.get(each.id)) is None else line.live)]
        room = max(0, min(course.k, course.n_lines) - len(trained) - len(todo))

        def gap(network: Architecture) -> float:
            """Return its distance from the nearest other one in the logarithm of latency, by what it costs."""
            others = [line.latency_ms for line in trained] + [
                course.latency_ms(each) for each in [*todo, *new] if each is not network]
            nearest = min(abs(math.log(course.latency_ms(network) / other)) for other in others)
            return nearest / self._weight(network, [*todo, *new])

        def have_few_steps() -> bool:
            every = [*todo, *new]
            return len(trained) + len(every) > FEWEST and any(
                self._steps_of(each, every) < ENOUGH_STEPS * self._weight(each, every) for each in every)

        while new and (len(new) > room or have_few_steps()):
            new.remove(min(new, key=gap))
        return sorted([*todo, *new], key=course.latency_ms, reverse=True)

    def _weight(self, network: Architecture, among: Sequence[Architecture]) -> float:
        """Return the network's part of the seconds: SHRUNK if it is trained on larger images before, otherwise 1."""
        before = [*among, *(line.architecture for line in self.rivals)]
        return SHRUNK if any(_is_smaller(network, other) for other in before) else 1.0

    # How long.

    def leg_steps(self, task: Train) -> int:
        """Return the steps of a leg that begins now."""
        if task.rung == KNOWN:
            return self.course.known_steps
        slower = 1 + (ROUNDED_S - 1) * task.rounded
        if task.source is not None or task.architecture.id not in {each.id for each in self._unbeaten[:1]}:
            return max(LEAST_STEPS, round(self._steps_of(task.architecture, self._wanted) / slower))
        step_s = float(self.step_s(task.architecture) / task.threads ** THREADS)
        legs = [int(leg["steps"]) for leg in task.line.legs if leg["rung"] == TRUNK] if task.line is not None else []
        if not legs:
            return max(LEAST_STEPS, round(PIECE * self._left_s / step_s))
        # If the machine became slower meanwhile, the others get their part all the same.
        most = self._left_s * (1 - PIECE) / (step_s * slower)
        wanted = max(legs[0], PIECE * self._left_s / step_s) if task.rung == TRUNK else FALL * sum(legs) / slower
        return max(LEAST_STEPS, round(min(most, wanted)))

    def _steps_of(self, network: Architecture, among: Sequence[Architecture]) -> float:
        """Return the steps that a network can have in the seconds that are left for those it is `among`. Each gets as
        many seconds as the others, one on smaller images SHRUNK times as many."""
        course = self.course
        weights = {each.id: self._weight(each, among) for each in among}
        exported = sum(FINISH in line.rungs and line.goes_on for line in self.lines) + len(among)
        seconds = max(0.0, course.left_s() + max(0, course.k - exported) * course.making_s)
        share = weights[network.id] / (sum(weights.values()) + len(course.baselines_s))
        return seconds * share * min(course.workers, len(among)) / self.step_s(network)

    def unit(self) -> float:
        """Return 1: what `outlook` says are seconds."""
        return 1.0

    def outlook(self) -> dict[str, float]:
        """Return the seconds of each rung behind the first, if nothing has been trained yet."""
        known_s = self.course.known_steps * sum(known.step_s for known in self.course.known) / self.course.workers
        first_s = MOST_PIECES * PIECE * max(0.0, self._left_s - known_s)
        return {TRUNK: first_s, FINISH: max(0.0, self._left_s - known_s) - first_s}

    @property
    def _left_s(self) -> float:
        return max(0.0, self.course.left_s())


def spread(networks: Sequence[Architecture], latency_ms: Callable[[Architecture], float], n: int, bound_ms: float
           ) -> list[Architecture]:
    """Choose at most `n` networks that are spread over the logarithm of latency, from the fastest to `bound_ms`.

    A network counts if none that is as fast has more multiply-adds. Of each of `n` equal parts of the range the one
    with the most is chosen. Slowest first.
    """
    kept: list[Architecture] = []
    for each in sorted(networks, key=lambda each: (latency_ms(each), -each.macs)):
        if not kept or each.macs > kept[-1].macs:
            kept.append(each)
    if not kept or n < 1:
        return []
    ends = np.geomspace(latency_ms(kept[0]), max(bound_ms, latency_ms(kept[0])) * 1.001, n + 1)[1:]
    parts = {min(n - 1, int(np.searchsorted(ends, latency_ms(each)))): each for each in kept}  # the last one of each
    return [parts[part] for part in sorted(parts, reverse=True)]


def _is_smaller(network: Architecture, other: Architecture) -> bool:
    """Return whether one network is the other on smaller images."""
    return network.image_size < other.image_size and other == replace(network, image_size=other.image_size)
