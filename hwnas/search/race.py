"""The race around pretrained networks: which is trained next, for how long, from whose weights, and which is dropped.

A line is a network in training. Training steps are scarce, so few networks share them. The lines so
far decide how the seconds are divided. The file has the order of the rungs:

    known      The obvious networks, the whole one and its obvious cuts, get a fitted classifier
               (`training/classifier.py`) and no step. Then so do some of them on smaller images. Networks that a faster
               one beats are dropped.
    first      The slowest network that is left trains in pieces at the full rate, until more pieces would hardly make
               it more accurate.
    finish     Its rate falls to zero. The others train in a single leg each: from trained weights if only the images
               are smaller, otherwise from their own.

Of networks on smaller images that are about as fast, the one that promises the most top-1 is judged. The number of
trained networks follows from the steps that each must have. Nothing here trains, measures or writes: the lines in the
study decide everything. So all processes come to the same decision, and a killed race goes on at the same point. The
reasons are in docs/decisions/race.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

from numpy.typing import NDArray
from optuna.trial import TrialState

from hwnas.search.course import Course, smaller_of
from hwnas.search.spread import guess_ms, spread_over_latency
from hwnas.space.architecture import Architecture
from hwnas.study.lines import Line
from hwnas.study.record import KNOWN

FIRST, FINISH = "first", "finish"
FINALISTS = "finalists"  # attribute of the study: numbers of the lines that are finished
PIECE = 0.14  # of the seconds, for a leg of the first network at the full rate
LEAST_PIECES, MOST_PIECES = 2, 3
FALL = 2 / 3  # steps of the falling rate, as a share of those at the full one
LEARNING = 0.3  # the error falls about as the steps to the power of -0.3 do
TOLERANCE = 0.01  # top-1 that the first network may lose because it does not get all seconds
SHRUNK = 1 / 3  # seconds of a network that was trained on larger images before, as a share of another's
SHRUNK_RATE = 0.5  # at which it starts, as a share of the recipe's
NEARLY = 1.15  # times as long a network may take that is trained in place of one that it beats
FITTED_STEPS = 250  # that a network will have at most, for it to keep the fitted classifier
ENOUGH_STEPS = 60  # of each network after the first: if fewer would be left, there are fewer networks
FEWEST = 3  # networks, with the first
LEAST_JUDGED = 5  # networks on smaller images that are timed and judged, at least
FADING = 0.1  # exponent of the image's side in the top-1 that a network is judged to have
SMALLER = 3 / 4  # of an image's side, at most, is the side of the next smaller images that are judged
WARMUP = 40  # steps of a leg that starts from other weights than the line had
LEAST_STEPS = 20  # of any leg
SURE = 0.95  # probability that a line twice as fast is better, from which on the slower one is dropped
PIXELS = 1.5  # exponent of the image's side in a step's seconds: between 1 (overhead) and 2 (arithmetic)


@dataclass(frozen=True, slots=True)
class Train:
    """A leg of a line to train, from the weights of `source` or its own.

    Its rate goes from `start` to `end`, as shares of the recipe's. `move` made the network of its source. `anew`: it
    starts from the line's weights before its first leg.
    """

    rung: str
    line: Line
    source: Line | None = None
    move: str = ""
    start: float = 1.0
    end: float = 0.0
    threads: int = 1
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Add:
    """A new line, of a network that is to be judged."""

    architecture: Architecture


@dataclass(frozen=True, slots=True)
class Drop:
    """A line that ends, and the reason."""

    line: Line
    reason: str


@dataclass(frozen=True, slots=True)
class Choose:
    """The choice of the finished lines, which ends the race."""

    lines: Sequence[Line]


Step = Train | Add | Drop | Choose


class Race:
    """The race with its present lines, and all that follows from them. `new_heads.py` has the race of new heads."""

    most_pieces = MOST_PIECES  # of the first network
    size_step = SMALLER
    share_of_first = 0.0  # of its steps: with fewer another network is no use

    def __init__(self, course: Course, lines: Sequence[Line], chosen: Sequence[int] | None = None) -> None:
        self.course, self.length, self.lines, self.chosen = course, course.length, lines, chosen
        self._by_id = {line.id: line for line in lines}

    def steps(self) -> list[Step]:
        """Return all that can be done now, most wanted first; nothing when the race is over. Running legs go on."""
        in_progress = [*self._begun()]
        if self.chosen is not None:
            return [*in_progress]
        busy = {task.line.number for task in in_progress}
        others = [task for task in self._tasks() if isinstance(task, Add) or task.line.number not in busy]
        if in_progress or others:
            return [*in_progress, *others]
        # Nothing is left to do: the finished lines are the finalists, all others end.
        left_out = [line for line in self.lines if line.live]
        return [*(Drop(line, "other networks were trained in its place") for line in left_out), Choose(self.finished)]

    def _begun(self) -> Iterator[Train]:
        """Yield the legs that a process works on, or worked on when it died."""
        for line in self.lines:
            if line.live and line.claim is not None and "steps" in line.claim:
                work = line.claim
                source = next((each for each in self.lines if each.number == work["source"]), None)
                yield Train(work["rung"], line, source, work["move"], work["start"], work["end"],
                            work["threads"], work.get("anew", False))

    def _tasks(self) -> Iterator[Train | Add | Drop]:
        """Yield what can be done now, most wanted first."""
        # Rung `known`: first the networks that are known by name, then some on smaller images.
        if known := [*self._judge(known.architecture for known in self.course.known)]:
            yield from known
            return
        if not any(line.rungs - {KNOWN} for line in self.lines) and (smaller := [*self._judge(self._smaller())]):
            yield from smaller
            return
        if self.finished:  # until then the first network may fail, and others take its place
            yield from (Drop(line, self._reasons[line.number]) for line in self.lines
                        if line.live and line.number in self._reasons)
        # Rungs `first` and `finish`: the slowest line, then all that are wanted after it.
        if (first := self._first) is not None:
            if self._may_go_on(first):
                steps = self.most_pieces * (1 + FALL) * PIECE * self.left_s / self.step_s(first.architecture)
                yield Train(FIRST, first, end=1.0, threads=self.course.first_threads,
                            anew=not first.steps and steps > FITTED_STEPS)
            elif FINISH not in first.rungs:
                yield Train(FINISH, first, threads=self.course.first_threads)
            else:
                yield from self._tasks_behind(self._wanted)

    # The rungs, in order.

    def _judge(self, networks: Iterable[Architecture]) -> Iterator[Train | Add]:
        """Yield the judging of the networks that were not judged yet."""
        for each in networks:
            line = self._by_id.get(each.id)
            if line is None:
                yield Add(each)
            elif line.live and not line.legs:
                yield Train(KNOWN, line, end=1.0)

    def _smaller(self) -> Iterator[Architecture]:
        """Return known networks on smaller images, spread over latency by a guess at it: only these are timed. If
        several networks are cut, each has as many; otherwise one with cheap multiply-adds would have all of them."""
        course, known_ids = self.course, {each.architecture.id for each in self.course.known}
        timed = [self._by_id[each.architecture.id] for each in course.known]
        judged = [line for line in self._judged if line.id in known_ids]
        beaten = self._beaten(judged)
        full = [line for line in judged if line.number not in beaten]
        promise = {each: self._promise(line, each) for line in full for each in self._steps_down(line.architecture)
                   if course.is_allowed(each)}
        if not (able := [*promise]):
            return iter(())
        # Guess the latency of all, by the known networks that were timed.
        guessed = guess_ms(able, [line.architecture for line in timed], [line.latency_ms for line in timed])
        guessed_ms = {each.id: float(ms) for each, ms in zip(able, guessed, strict=True)}
        # Divide the number of networks among those that are cut, within the lines that are allowed.
        length, arounds = self.length, {*(each.around for each in able)}
        n = len(arounds) * max(length.parts - 1, LEAST_JUDGED) if length.n_smaller is None else length.n_smaller
        n = min(n, course.n_lines - len(known_ids))
        groups = [[each for each in able if each.around == around] for around in sorted(arounds)]
        if n < 2 * len(groups):  # each group needs a fast network, too
            groups = [able]
        chosen = [network for group in groups for network in spread_over_latency(
            group, lambda each: guessed_ms[each.id], promise.__getitem__, n // len(groups), full[0].latency_ms)]
        course.predict(chosen)  # so that all of them are timed together
        return filter(course.is_allowed, chosen)

    def _promise(self, line: Line, network: Architecture) -> float:
        """Return the value that orders equally fast networks. It is the top-1 that a line's network on smaller images
        would be judged to have, by that of the line. If the weights are random, it is its multiply-adds."""
        right = line.right_after(KNOWN) if self.course.is_pretrained else None
        if right is None:
            return float(network.macs)
        return float(right.mean() * (network.image_size / line.px) ** FADING)

    def _steps_down(self, network: Architecture) -> Iterator[Architecture]:
        """Yield the network on smaller images, each at most `size_step` times the last, and on the smallest."""
        last, able = network.image_size, [*smaller_of(self.course.space, network)]
        for each in able:
            if each.image_size <= self.size_step * last or each is able[-1]:
                yield each
                last = each.image_size

    def _tasks_behind(self, lines: Sequence[Line]) -> Iterator[Train]:
        """Yield the only legs of the lines that are trained after the first."""
        for line in lines:
            if any(_is_smaller(line, other) for other in lines):
                continue  # it is trained after the same network on larger images
            if larger := [other for other in self.finished if _is_smaller(line, other)]:
                source = min(larger, key=lambda line: line.px)
                yield Train(FINISH, line, source, f"{source.px} to {line.px} px", SHRUNK_RATE)
            else:
                yield from self._begin(line, lines)

    def _begin(self, line: Line, among: Sequence[Line]) -> Iterator[Train]:
        """Yield the only leg of a line that does not start from its network on larger images."""
        yield Train(FINISH, line, anew=not line.steps and self._steps_of(line, among) > FITTED_STEPS)

    # What follows from the lines.

    @cached_property
    def finished(self) -> list[Line]:
        """The lines that have had their last leg."""
        return [line for line in self.lines if FINISH in line.rungs and line.goes_on]

    @cached_property
    def _judged(self) -> list[Line]:
        """The lines of the first rung that have not failed, slowest first."""
        lines = [line for line in self.lines if KNOWN in line.rungs and line.state != TrialState.FAIL]
        return sorted(lines, key=lambda line: (-line.latency_ms, line.number))

    @cached_property
    def _reasons(self) -> dict[int, str]:
        """The reason why a faster network beats a judged one, by number. A network whose training failed beats none."""
        return self._beaten(self._judged)

    def _beaten(self, lines: Sequence[Line]) -> dict[int, str]:
        """Return a reason, by number, for each judged line that a faster one surely beats; none with random weights."""
        reasons: dict[int, str] = {}
        fastest = sorted(lines, key=lambda line: line.latency_ms) if self.course.is_pretrained else []
        for at, line in enumerate(fastest):
            mine = line.right_after(KNOWN)
            for other in fastest[:at]:
                theirs = other.right_after(KNOWN)
                # The nearer both are in latency, the less the front loses with either: down to an even chance.
                nearness = min(1.0, math.log2(line.latency_ms / other.latency_ms))
                needed = 0.5 + (SURE - 0.5) * nearness
                if mine is not None and theirs is not None and self.course.is_as_cheap(
                        other.architecture, line.architecture) and sure_that(theirs, mine) >= needed:
                    reasons[line.number] = (f"trial {other.number} is {line.latency_ms / other.latency_ms:.2f} times "
                                            f"as fast and answers {round(float(theirs.sum() - mine.sum()))} of "
                                            f"{len(mine)} validation images more")
                    break
        return reasons

    @cached_property
    def _unbeaten(self) -> list[Line]:
        """The lines that may be trained, slowest first: no faster line beats them, nor one that takes hardly longer."""
        unbeaten, course = list[Line](), self.course
        for line in self._best_first():
            if line.goes_on and line.number not in self._reasons and not any(
                    other.latency_ms <= NEARLY * line.latency_ms and self._is_better(other, line)
                    and course.is_as_cheap(other.architecture, line.architecture) for other in unbeaten):
                unbeaten.append(line)
        return sorted(unbeaten, key=lambda line: -line.latency_ms)

    def _best_first(self) -> Sequence[Line]:
        """Return the judged lines in the order in which they may take each other's place."""
        return self._judged

    def _is_better(self, line: Line, other: Line) -> bool:
        """Return whether one line surely answers better than another after the first rung."""
        mine, theirs = line.right_after(KNOWN), other.right_after(KNOWN)
        return (self.course.is_pretrained and mine is not None and theirs is not None
                and sure_that(mine, theirs) >= SURE)

    @cached_property
    def _first(self) -> Line | None:
        """The line that gets most of the seconds. Once a line has started as the first, it stays that."""
        started = [line for line in self._unbeaten if FIRST in line.rungs]
        return next(iter(started or self._unbeaten), None)

    def _may_go_on(self, line: Line) -> bool:
        """Return whether the first network needs another piece: finished now, it would lose more than TOLERANCE."""
        pieces: int = sum(leg["rung"] == FIRST for leg in line.legs)
        if not pieces or FINISH in line.rungs or pieces >= self.most_pieces:
            return not pieces and FINISH not in line.rungs
        trained_s, spent_s = self._trained_s(line), sum(map(self._seconds_of, self.lines))
        if pieces < LEAST_PIECES:
            return True
        # The share of all seconds that it would have if its rate fell now. With all of them its error would be
        # `share ** LEARNING` times as large.
        share = min(1.0, (1 + FALL) * trained_s / max(1e-9, spent_s + self.left_s))
        return bool((1 - line.top1) * (1 - share ** LEARNING) > TOLERANCE)

    @cached_property
    def _k(self) -> int:
        """The most finalists: as planned, and one more whenever these are done while minutes are left. That happens if
        making their files was timed in a bad moment. The additional one and each baseline must have as many seconds
        as the others had; `_wanted` leaves it out if these are too few steps."""
        length, done, most = self.length, len(self.finished), self.course.most_k
        if length.total_s is not None or most is None or not FEWEST <= length.parts <= done < most:
            return length.parts
        share_s = max(float(line.legs[-1]["seconds"]) for line in self.finished if FIRST not in line.rungs)
        spare_s = self.left_s - (done + 1 - length.parts) * length.making_s
        return done + 1 if spare_s >= (1 + len(length.baselines_s)) * share_s else length.parts

    @cached_property
    def _wanted(self) -> list[Line]:
        """The lines that are still to be trained after the first, slowest first. There are as many as can have enough
        steps. The lines that are nearest to another one in latency are left out."""
        trained = [line for line in self.lines if FINISH in line.rungs]
        candidates = [line for line in self._unbeaten if line is not self._first and line.live]
        enough = max(ENOUGH_STEPS, self.share_of_first * (0 if self._first is None else self._first.steps))

        def gap(line: Line) -> float:
            """Return its distance from the nearest other one in the logarithm of latency, divided by its price."""
            others = trained + [other for other in candidates if other is not line]
            nearest = min(abs(math.log(line.latency_ms / other.latency_ms)) for other in others)
            return nearest / self._price(line, candidates)

        def have_few_steps() -> bool:
            return len(trained) + len(candidates) > FEWEST and any(
                self._steps_of(each, candidates) < enough * self._weight(each, candidates) for each in candidates)

        while candidates and (len(candidates) > max(0, self._k - len(trained)) or have_few_steps()):
            candidates.remove(min(candidates, key=gap))
        return candidates

    def _weight(self, line: Line, among: Sequence[Line]) -> float:
        """Return the line's part of the seconds: SHRUNK if it is trained on larger images before, otherwise 1."""
        return SHRUNK if any(_is_smaller(line, other) for other in (*among, *self.finished)) else 1.0

    _price = _weight  # what a network's distance from others is divided by, if one must go

    # How long.

    @property
    def left_s(self) -> float:
        """Seconds that are left until the deadline, or of `Length.total_s`."""
        if self.length.total_s is None:
            return max(0.0, self.length.left_s)
        return max(0.0, self.length.total_s - sum(map(self._seconds_of, self.lines)))

    def _left_for(self, n: int) -> float:
        """Return the seconds that are left if `n` more lines are trained. Exports that are not needed leave theirs."""
        if self.length.total_s is not None:
            return self.left_s
        return self.left_s + (self.length.parts - len(self.finished) - n) * self.length.making_s

    def _seconds_of(self, line: Line) -> float:
        """Return the seconds that a line's legs took or, if no clock counts, should take in one process."""
        if self.length.total_s is None:
            return sum(float(leg["seconds"]) for leg in line.legs)
        return float(line.steps * self.step_s(line.architecture))

    def _trained_s(self, line: Line) -> float:
        """Return the seconds that a line was trained, without its judging in the first rung."""
        return self._seconds_of(replace(line, legs=tuple(leg for leg in line.legs if leg["rung"] != KNOWN)))

    def leg_steps(self, task: Train) -> int:
        """Return the steps of a leg that starts now."""
        if task.rung == KNOWN:
            return 0
        # Lines after the first: their part of the seconds.
        if task.source is not None or self._first is None or task.line.number != self._first.number:
            return max(LEAST_STEPS, round(self._steps_of(task.line, self._wanted)))
        # The first line: a piece is a share of all its seconds, trained and left; the last leg a share of its steps.
        threads = task.threads if self.length.total_s is None else 1
        step_s = self.step_s(task.line.architecture) / self.course.speed_of(threads)
        if task.rung == FIRST:
            return max(LEAST_STEPS, round(PIECE * (self._trained_s(task.line) + self.left_s) / step_s))
        if not self.length.baselines_s and (self.length.parts == 1 or len(self._unbeaten) == 1):
            return max(LEAST_STEPS, round(self._left_for(1) / step_s))  # nothing else is to be trained
        # If the machine became slower meanwhile, the others get their part all the same.
        return max(LEAST_STEPS, round(min(self.left_s * (1 - PIECE) / step_s, FALL * task.line.steps)))

    def _steps_of(self, line: Line, among: Sequence[Line]) -> float:
        """Return the steps that a line can have in the seconds that are left for the lines `among`, with it. Each has
        as many seconds as the others, on smaller images SHRUNK times as many, but no more steps than the first. If
        nothing else could take the seconds that this leaves, all have more steps."""
        length, workers = self.length, self.course.workers
        most_steps: float = 0 if self._first is None else self._first.steps
        left_s, most_s = self._left_for(len(among)), self.left_s
        if length.total_s is None:  # lines train side by side
            left_s *= min(workers, len(among))
        cost_s = {each.id: self.step_s(each.architecture) for each in among}
        weights = {each.id: self._weight(each, among) for each in among}
        shared = float(sum(weights.values()) + len(length.baselines_s))
        if most_steps and length.total_s is None and not length.baselines_s and not any(
                each.live and each is not self._first and each.id not in cost_s for each in self._unbeaten):
            most_steps = max(most_steps, left_s / sum(cost_s.values()))
        # A line with the most steps leaves the rest of its seconds to the others: the cheapest first.
        for id in sorted(weights, key=lambda id: most_steps * cost_s[id] / weights[id]):
            seconds = min(most_steps * cost_s[id] if most_steps else math.inf, left_s * weights[id] / shared)
            if id == line.id:
                break
            left_s, shared = left_s - seconds, shared - weights[id]
        if length.total_s is None and workers > 1:  # no leg and no leg that waits for it outlasts the seconds
            behind = SHRUNK * sum(_is_smaller(each, line) for each in among)
            behind += math.ceil(len(length.baselines_s) / workers)
            seconds = min(seconds, most_s * weights[line.id] / (weights[line.id] + behind))
        return seconds / cost_s[line.id]

    def step_s(self, architecture: Architecture) -> float:
        """Return the seconds of a step on one thread. If it was not measured, it is scaled: from the same network on
        images of the nearest size, or else from one with about as many multiply-adds."""
        lines = self.lines if self.length.total_s is None else ()
        timed = [(line.architecture, line.step_s) for line in lines if line.step_s is not None]
        if own := next((step_s for network, step_s in timed if network.id == architecture.id), None):
            return own
        timed += [(known.architecture, known.step_s) for known in self.course.known]
        px = architecture.image_size
        same = [pair for pair in timed if pair[0] == replace(architecture, image_size=pair[0].image_size)]
        near, step_s = min(same or timed, key=lambda pair: abs(math.log(pair[0].macs / architecture.macs)))
        # Scale by the image's side, and within 1/2 and 2 by the multiply-adds that are not due to it.
        scale = (px / near.image_size) ** PIXELS
        rest = architecture.macs / near.macs / (px / near.image_size) ** 2
        return float(step_s * scale * min(2.0, max(0.5, rest)))


def steps_of(line: Line, lines: Mapping[int, Line]) -> int:
    """Return the steps that made a line's weights: its own, claimed ones, and its source's."""
    steps = line.steps + (int(line.claim.get("steps", 0)) if line.claim is not None else 0)
    source = lines.get(line.source) if line.source is not None else None
    return steps + (0 if source is None else steps_of(source, lines))


def sure_that(right: NDArray[Any], than: NDArray[Any]) -> float:
    """Return the probability, from 0 to 1, that one network answers better than another. The difference, image by
    image, counts as normally distributed about its mean."""
    apart = right.astype(float) - than
    spread = float(apart.std())
    if not spread:
        return 0.5
    return NormalDist().cdf(float(apart.mean()) / (spread / math.sqrt(len(apart))))


def is_cut_of(network: Architecture, other: Architecture) -> bool:
    """Return whether one network is a cut of the same network and no larger than the other, in choices and images."""
    own, whole = dict(getattr(network, "chosen", ())), dict(getattr(other, "chosen", ()))
    return network.around == other.around and network.image_size <= other.image_size and all(
        value <= whole[name] for name, value in own.items())


def _is_smaller(line: Line, other: Line) -> bool:
    """Return whether a line's network is the other's on smaller images."""
    return line.px < other.px and other.architecture == replace(line.architecture, image_size=other.px)
