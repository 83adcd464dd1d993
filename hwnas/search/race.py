"""The race of a search that trains: who is trained next, for how long, from whose weights, and who is dropped.

A line is a network in training. This file reads as the list of the rungs:

    known     what anybody would try: the whole network and its obvious cuts, each for a moment on the largest images.
              The slower one of two that is surely worse is dropped; of two that are about as fast it suffices that it
              is the likelier worse
    trunk     those left, slowest first: the first goes on, each other one is cut from a trained one before it, where
              it is a part of such a one
    size      each on smaller and smaller images, from the size above; then between two sizes that are far apart
    reference the whole network, where it was dropped: it goes on, so that the others can be held against it
    finish    the best line of each part of the range of latency: its rate falls to zero, at the end with int8's
              rounding where that would cost accuracy

Nothing here trains, measures or writes: all is decided from the lines as the study has them. So any number of processes
come to the same decision, and a killed race goes on where it was. Why it is run so: docs/decisions/race.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hwnas.space.architecture import Architecture
from hwnas.study.lines import THREADS, Line

KNOWN, TRUNK, SIZE, FINISH = "known", "trunk", "size", "finish"
REFERENCE = "reference"
BASELINE = "baselines"  # what is trained behind the race
FINALISTS = "finalists"  # attribute of the study: numbers of the lines that are finished
ENDS = {REFERENCE, FINISH}  # rungs whose legs are a line's last
# Steps at a constant rate, in units, which are the same for all lines. Smaller images get more steps, by as much as
# they are smaller: they are cheaper, and further from what the source has learnt.
UNITS = {TRUNK: 1.3, SIZE: 0.35}
FALL = 2 / 3  # steps of the falling rate, as a share of those at a constant one
# Learning rates, as shares of the recipe's: of weights that are pretrained or random, cut, on smaller images
# (docs/decisions/race.md).
RATES = {KNOWN: 1.0, TRUNK: 0.5, SIZE: 1 / 3}
WARMUP = 40  # steps of a leg that begins with other weights than the line had
LEAST_STEPS = 20  # of any leg
# The last steps of a network, with int8's rounding, where rounding loses more than LOSS: their share, and their seconds
# in those of other steps (docs/decisions/race.md).
ROUNDED, LOSS, ROUNDED_S = 0.25, 0.003, 2.0
REFERENCE_UNITS = 0.7  # of what others are held against: about what each would have if all were trained alike
SURE = 0.95  # how sure it must be that a line twice as fast is better, for a slower one to be dropped
DOUBTFUL = 0.9  # how sure that a faster line is better than its source, for a smaller size not to be tried
FAR = 0.01  # top-1 by which two neighbouring sizes differ at least, for one between them to be tried
DIFFER = 0.8  # and how sure it must be that they differ at all
PIXELS = 1.5  # exponent of the image's side in a step's seconds: between 1 (overhead) and 2 (arithmetic)


@dataclass(frozen=True, slots=True)
class KnownNetwork:
    """A network that is known by name, at the largest image size; seconds of a step, measured before the race."""

    name: str
    architecture: Architecture
    step_s: float


@dataclass(frozen=True)
class Course:
    """The decisions that are made before a race begins.

    Attributes:
        known: the networks that it begins with, slowest first.
        k: parts of the range of latency, and so finalists at most.
        bound_ms: the slow end of the range: the cap, or the latency of the slowest known network.
        n_lines: lines at most.
        workers: processes that train side by side.
        is_int8: whether the networks will be quantised; `narrow`: to weights of 7 bits.
        is_short: whether there are so few minutes that they go into one network first (`short_race.py`).
        known_steps: steps of the first rung.
        unit_steps: steps of a unit; None: as many as fit into `left_s`.
        left_s: seconds that are left for lines and baselines, now.
        making_s: seconds that are kept for each of `k` finalists beside them.
        wholes: ids of the networks that the others are cut from, at the largest image size, by what these are `around`.
        baselines_s: seconds of a step of each baseline that is trained behind the race.
        smaller: a network on smaller images, largest first, in steps of about an eighth of the largest size.
        between: a network on images of every size of the space between those of two that are alike, largest first.
        latency_ms: of a network, as timed; NotTimed if it was not yet.
        is_timed: whether that is known.
        is_allowed: whether it could be timed and keeps the cap, as far as that is known.
        ask: NotTimed if some of these networks were not timed yet: all of them are then timed together.
        is_as_cheap: whether of two networks the first costs no more in what is minimised beside latency.
        choose: the finalists among lines.
    """

    known: Sequence[KnownNetwork]
    k: int
    bound_ms: float
    n_lines: int
    workers: int
    is_int8: bool
    narrow: bool
    is_short: bool
    known_steps: int
    unit_steps: int | None
    left_s: Callable[[], float]
    making_s: float
    wholes: Mapping[str, str]
    baselines_s: Sequence[float]
    smaller: Callable[[Architecture], Sequence[Architecture]]
    between: Callable[[Architecture, Architecture], Sequence[Architecture]]
    latency_ms: Callable[[Architecture], float]
    is_timed: Callable[[Architecture], bool]
    is_allowed: Callable[[Architecture], bool]
    ask: Callable[[Sequence[Architecture]], None]
    is_as_cheap: Callable[[Architecture, Architecture], bool]
    choose: Callable[[Sequence[Line]], Sequence[Line]]


@dataclass(frozen=True, slots=True)
class Train:
    """A leg to train: of an existing `line` or a new one, from the weights of `source` or its own.

    `units` of steps, whose rate goes from `start` to `end`; the last ones, a share of `rounded`, with int8's rounding.
    `move` made the network of its source. `anew`: its own weights are those that it had before its first leg.
    """

    rung: str
    architecture: Architecture
    line: Line | None
    source: Line | None
    move: str
    units: float
    start: float
    end: float
    threads: int = 1
    rounded: float = 0.0
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """A line that ends, and why."""

    line: Line
    reason: str


@dataclass(frozen=True, slots=True)
class Choose:
    """The lines that are to be finished."""

    lines: Sequence[Line]


Step = Train | Drop | Choose


@dataclass(frozen=True, slots=True)
class TrunkLine:
    """A known line as it stands in the trunk, cut from `source`."""

    line: Line
    source: Line | None

    @property
    def is_trained(self) -> bool:
        """Return whether it had its leg in the trunk."""
        return TRUNK in self.line.rungs

    @property
    def has_failed(self) -> bool:
        """Return whether it will have no leg in the trunk."""
        return not self.is_trained and not self.line.live


class Race:
    """The race as it stands: the lines so far, and all that follows from them."""

    def __init__(self, course: Course, lines: Sequence[Line], chosen: Sequence[int] | None = None) -> None:
        self.course, self.lines, self.chosen = course, lines, chosen
        self._by_id = {line.id: line for line in lines}

    def steps(self) -> list[Step]:
        """Everything that can be done now, most wanted first; nothing when the race is over. A rung begins when
        nothing is left of those before it, and what is begun is not dropped."""
        begun = list(self._begun())
        busy = {task.line.number for task in begun if task.line is not None}
        rungs = [self._finish]
        if self.chosen is None:
            is_first = any(task.rung == KNOWN for task in begun)
            rungs = [self._known_rung, *([] if is_first else [self._trunk_and_sizes]), *([] if begun else rungs)]
        for rung in rungs:
            wanted = [step for step in rung() if isinstance(step, Choose) or step.line is None
                      or step.line.number not in busy]
            if wanted:
                return [*begun, *wanted]
        return [*begun]

    def _begun(self) -> Iterator[Train]:
        """Legs that a process is at work on, or was when it died."""
        for line in self.lines:
            if line.live and line.claim is not None and "steps" in line.claim:
                work = line.claim
                source = next((each for each in self.lines if each.number == work["source"]), None)
                yield Train(work["rung"], line.architecture, line, source, work["move"], 0.0, work["start"],
                            work["end"], work["threads"], work.get("rounded", 0.0), work.get("anew", False))

    # The rungs, in order.

    def _known_rung(self) -> Iterator[Train]:
        for known in self.course.known:
            line = self._by_id.get(known.architecture.id)
            if line is None or (line.live and not line.legs):
                yield Train(KNOWN, known.architecture, line, None, "", 0.0, RATES[KNOWN], RATES[KNOWN])

    def _trunk_and_sizes(self) -> Iterator[Step]:
        """The next of the trunk, and beside it the next size of each one before it."""
        yield from self._drops(self._beaten(self._known_lines, KNOWN))
        # Nobody trains at this moment, so all sizes that may race are timed at once, on a quiet machine.
        self.course.ask([each for limb in self.trunk if not limb.has_failed
                         for each in self.course.smaller(limb.line.architecture)])
        trained: list[Line] = []
        for limb in self.trunk:
            if limb.is_trained:
                trained.append(limb.line)
            elif not limb.has_failed:
                rate, move = (RATES[KNOWN], "") if limb.source is None else (RATES[TRUNK], "cut from the trained")
                yield Train(TRUNK, limb.line.architecture, limb.line, limb.source, move, UNITS[TRUNK], rate, rate,
                            self.course.workers)
                break
        beaten = self._beaten(trained, TRUNK)
        yield from self._drops(beaten)
        for line in reversed(trained):  # the fastest first: what it reaches spares the others sizes
            if line.number not in beaten and (task := self._size_task(line)) is not None:
                yield task
            elif line.number not in beaten:
                yield from self._tasks_between(line)

    def _size_task(self, line: Line) -> Step | None:
        """The next smaller size of a line of the trunk, from the last size that was trained."""
        source = line
        for architecture in self.course.smaller(line.architecture):
            smaller = self._by_id.get(architecture.id)
            if smaller is None and not self.course.is_allowed(architecture):
                continue
            wanted = smaller is None or (smaller.live and SIZE not in smaller.rungs)
            may_win = self._may_win(source, architecture)
            if wanted and not (may_win and (smaller is not None or self._may_add)):
                return None
            if wanted:
                return Train(SIZE, architecture, smaller, source, f"{source.px} to {architecture.image_size} px",
                             self.units_of(SIZE, architecture), RATES[SIZE], RATES[SIZE])
            if smaller is not None and SIZE in smaller.rungs:
                source = smaller
        return None

    def _tasks_between(self, line: Line) -> Iterator[Step]:
        """The sizes between two of a line that answer FAR apart: the middle one of those that the space has."""
        chain = [line, *(self._by_id[each.id] for each in self.course.smaller(line.architecture)
                         if each.id in self._by_id and SIZE in self._by_id[each.id].rungs)]
        for upper, lower in pairwise(chain):
            high, low = _answers(upper, SIZE if upper is not line else TRUNK), _answers(lower, SIZE)
            are_far = high.mean() - low.mean() >= FAR and sure_that(high > 0, low) >= DIFFER
            sizes = self.course.between(upper.architecture, lower.architecture) if are_far else ()
            if not sizes:
                continue
            middle = sizes[len(sizes) // 2]
            own = self._by_id.get(middle.id)
            if (own is None and self._may_add and self._may_win(upper, middle)) or (
                    own is not None and own.live and SIZE not in own.rungs):
                yield Train(SIZE, middle, own, upper, f"{upper.px} to {middle.image_size} px",
                            self.units_of(SIZE, middle), RATES[SIZE], RATES[SIZE])

    def _may_win(self, source: Line, network: Architecture) -> bool:
        """Return whether a network that is cut from `source` may be better than every line that is as fast. It will
        hardly be better than its source."""
        right, at_ms = source.right_after(), self.course.latency_ms(network)
        if not self.course.is_allowed(network):
            return False
        rivals = [line for line in self.lines if line.rungs and line.number != source.number
                  and line.latency_ms <= at_ms and self.course.is_as_cheap(line.architecture, network)]
        best = max(rivals, key=lambda line: line.top1, default=None)
        return best is None or right is None or sure_that(_answers(best) > 0, right) < DOUBTFUL

    def _finish(self) -> Iterator[Step]:
        if self.chosen is None:
            beaten = self._beaten(self.rivals)
            yield Choose(self.course.choose([line for line in self.rivals if line.number not in beaten]))
            return
        if (whole := self._left_behind({line.id for line in self.finalists})) is not None:
            yield Train(REFERENCE, whole.architecture, whole, None, "", self._reference_units(whole),
                        float(whole.legs[-1]["end"]), 0.0, rounded=self._rounded)
        for line in self.finalists:
            if line.live and FINISH not in line.rungs:
                yield Train(FINISH, line.architecture, line, None, line.move, FALL * self._units(line),
                            float(line.legs[-1]["end"]), 0.0, rounded=self._rounded)
        for line in self.lines:
            if line.live and line.number not in self.chosen and (line is not self._whole or not line.legs):
                yield Drop(line, "others were chosen")

    # What follows from the lines.

    def _left_behind(self, ids: Container[str]) -> Line | None:
        """The whole network, where it is not among those that go on and others are still to be held against it."""
        whole = self._whole
        return whole if whole is not None and whole.live and whole.legs and whole.id not in ids else None

    @cached_property
    def _whole(self) -> Line | None:
        """The whole network that others are held against: of several the one that the slowest finalist is cut from."""
        slowest = max(self.finalists or self._known_lines, key=lambda line: line.latency_ms, default=None)
        wholes = self.course.wholes
        around = slowest.architecture.around if slowest is not None and len(wholes) > 1 else next(iter(wholes), "")
        return self._by_id.get(wholes.get(around, ""))

    def _reference_units(self, whole: Line) -> float:
        return FALL * self._units(whole) if whole.rungs & {*UNITS} else REFERENCE_UNITS

    @property
    def _may_add(self) -> bool:
        return len(self.lines) < self.course.n_lines

    @cached_property
    def _known_lines(self) -> list[Line]:
        """The lines of the first rung that answered, slowest first."""
        named = {known.architecture.id for known in self.course.known}
        lines = [line for line in self.lines if KNOWN in line.rungs and line.id in named]
        return sorted(lines, key=lambda line: (-line.latency_ms, line.number))

    @cached_property
    def trunk(self) -> list[TrunkLine]:
        """The known lines that no faster one surely beat in the first rung, slowest first, as they stand in the trunk:
        each is cut from the nearest one before it that it is a part of."""
        limbs: list[TrunkLine] = []
        beaten = self._beaten(self._known_lines, KNOWN)
        for known in self._known_lines:
            if known.number in beaten:
                continue
            source = next((limb.line for limb in reversed(limbs) if not limb.has_failed
                           and known.architecture.is_part_of(limb.line.architecture)), None)
            limbs.append(TrunkLine(known, source))
        return limbs

    def _beaten(self, lines: Sequence[Line], rung: str | None = None) -> dict[int, str]:
        """By number those of `lines` that a faster one beats surely enough in what they answered after `rung`, with a
        word on it. None: SURE by what they answer now, before they are finished, which may still change their order."""
        reasons, fastest = {}, sorted(lines, key=lambda line: line.latency_ms)
        for at, line in enumerate(fastest):
            mine = line.right_after(rung)
            for other in fastest[:at]:
                if not self.course.is_as_cheap(other.architecture, line.architecture):
                    continue
                theirs = other.right_after(rung)
                # The nearer both are in latency, the less the front loses with either: down to an even chance.
                nearness = 1.0 if rung is None else min(1.0, math.log2(line.latency_ms / other.latency_ms))
                needed = 0.5 + (SURE - 0.5) * nearness
                if mine is not None and theirs is not None and sure_that(theirs, mine) >= needed:
                    reasons[line.number] = (f"trial {other.number} is {line.latency_ms / other.latency_ms:.2f} times "
                                            f"as fast and answers {int(theirs.sum()) - int(mine.sum())} of "
                                            f"{len(mine)} validation images more")
                    break
        return reasons

    def _drops(self, reasons: Mapping[int, str]) -> Iterator[Drop]:
        """The ends of live lines, but not of whole networks, which others are held against."""
        return (Drop(line, reasons[line.number]) for line in self.lines
                if line.live and line.number in reasons and line.id not in self.course.wholes.values())

    @cached_property
    def rivals(self) -> list[Line]:
        """Every line that was trained behind the first rung and has not been dropped."""
        return [line for line in self.lines if line.rungs & {*UNITS} and line.goes_on]

    @cached_property
    def finalists(self) -> list[Line]:
        """The lines that were chosen to be finished."""
        return [line for line in self.lines if line.number in (self.chosen or ())]

    # How long.

    def leg_steps(self, task: Train) -> int:
        """The steps of a leg that begins now."""
        if task.rung == KNOWN:
            return self.course.known_steps
        return max(LEAST_STEPS, round(task.units * self.unit()))

    def units_of(self, rung: str, architecture: Architecture) -> float:
        """Units of a network's leg in a rung of constant rates."""
        largest = max(known.architecture.image_size for known in self.course.known)
        return UNITS[rung] * (1.0 if rung == TRUNK else largest / architecture.image_size)

    def _units(self, line: Line) -> float:
        """Units that a line had at a constant rate."""
        return max((self.units_of(rung, line.architecture) for rung in line.rungs & {*UNITS}), default=UNITS[SIZE])

    @cached_property
    def _rounded(self) -> float:
        """The share of each last leg that is trained with int8's rounding: by the most that rounding took from any line
        after the trunk. Its cost to one line at that time says little of its later cost to another."""
        lost = max((leg["int8_loss"] for line in self.lines for leg in line.legs if "int8_loss" in leg), default=0.0)
        return ROUNDED if self.course.is_int8 and lost > LOSS else 0.0

    def unit(self) -> float:
        """Steps of a unit: those that are asked for, or as many as the seconds left allow for all that is to come."""
        if self.course.unit_steps is not None:
            return self.course.unit_steps
        cost_s, left_s = sum(self.outlook().values()), self.course.left_s()
        if self.chosen is not None:
            left_s += max(0, self.course.k - len(self.chosen)) * self.course.making_s
        return max(0.0, left_s) / cost_s if cost_s else 0.0

    def outlook(self) -> dict[str, float]:
        """Seconds that each rung will still take where a unit has one step."""
        course, limbs = self.course, self.trunk
        networks = [limb.line.architecture for limb in limbs if not limb.has_failed and (
            not limb.is_trained or limb.line.goes_on)]
        if not self._known_lines:
            networks = [known.architecture for known in course.known]
        done = {limb.line.id for limb in limbs if limb.is_trained}
        trunk, sizes, every = 0.0, 0.0, []  # of the rungs; of each line that may be finished
        for network in networks:
            every.append(UNITS[TRUNK] * self.step_s(network))
            if network.id not in done:
                trunk += every[-1] / course.workers ** THREADS
            source = self._by_id.get(network.id)
            for smaller in filter(course.is_allowed, course.smaller(network)):
                line = self._by_id.get(smaller.id)
                is_done = line is not None and SIZE in line.rungs
                if not is_done and ((line is not None and not line.live) or (
                        source is not None and source.legs and course.is_timed(smaller)
                        and not self._may_win(source, smaller))):
                    break
                every.append(self.units_of(SIZE, smaller) * self.step_s(smaller))
                if is_done:
                    source = line
                else:
                    sizes += every[-1]
        mean_s = float(np.mean(every)) if every else 0.0
        slower = 1 + (ROUNDED_S - 1) * self._rounded
        finish = min(course.k, len(every)) * FALL * mean_s
        if self.chosen is not None:
            trunk, sizes = 0.0, 0.0
            left = [line for line in self.finalists if line.live]
            finish = sum(FALL * self._units(line) * self.step_s(line.architecture) for line in left)
            networks = [line.architecture for line in self.finalists]
        whole = self._left_behind({each.id for each in networks})
        reference = 0.0 if whole is None else slower * self._reference_units(whole) * self.step_s(whole.architecture)
        many = min(course.workers, course.k)
        return {TRUNK: trunk, SIZE: sizes / min(course.workers, max(1, len(networks))),
                FINISH: slower * finish / many, REFERENCE: reference,
                BASELINE: REFERENCE_UNITS * sum(course.baselines_s) / course.workers}

    def step_s(self, architecture: Architecture) -> float:
        """Seconds of a step on one thread: as measured, otherwise by those of the same network on images of the nearest
        size, or else of the network with about as many multiply-adds."""
        own = self._by_id.get(architecture.id)
        if own is not None and own.step_s is not None:
            return own.step_s
        timed = [(line.architecture, line.step_s) for line in self.lines if line.step_s is not None]
        timed += [(known.architecture, known.step_s) for known in self.course.known]
        px = architecture.image_size
        same = [pair for pair in timed if pair[0] == replace(architecture, image_size=pair[0].image_size)]
        near, step_s = min(same or timed, key=lambda pair: abs(math.log(pair[0].macs / architecture.macs)))
        scale = (px / near.image_size) ** PIXELS
        rest = architecture.macs / near.macs / (px / near.image_size) ** 2  # what is not due to the image's size
        return float(step_s * scale * min(2.0, max(0.5, rest)))


def steps_of(line: Line, lines: Mapping[int, Line], *, ended: bool = True, cut_ended: bool = False) -> int:
    """Return the steps that made a line's weights: its own, with those that are claimed, and of the lines that it was
    cut from those before their last (with `cut_ended`, all). Without `ended`, those before its own last ones."""
    steps = sum(int(leg["steps"]) for leg in line.legs if ended or leg["rung"] not in ENDS)
    if ended and line.claim is not None:
        steps += int(line.claim.get("steps", 0))
    source = lines.get(line.source) if line.source is not None else None
    return steps + (0 if source is None else steps_of(source, lines, ended=cut_ended, cut_ended=cut_ended))


def _answers(line: Line, rung: str | None = None) -> NDArray[np.float64]:
    """1 for each validation image that a trained line answered rightly after `rung` (None: now), otherwise 0 [n]."""
    return np.asarray(line.right_after(rung), float)


def sure_that(right: NDArray[np.bool_], than: NDArray[np.float64] | NDArray[np.bool_]) -> float:
    """Return the probability, from 0 to 1, that one network answers better than another (or a mixture of two). The
    difference image by image counts as normally distributed about its mean."""
    apart = right.astype(float) - than
    spread = float(apart.std())
    if not spread:
        return 0.5
    return NormalDist().cdf(float(apart.mean()) / (spread / math.sqrt(len(apart))))
