"""The race as a search's explorer: how long it is, its work as one process, its lines as rows of the front."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import dropwhile
from typing import Any

import numpy as np

from hwnas.cli.progress import Console
from hwnas.errors import BudgetError, CandidateError, StudyError
from hwnas.front.make import DECIDING, TrainedWeights
from hwnas.front.rows import FrontRow
from hwnas.latency.measured import MeasuredLatency, answered
from hwnas.search.calibration import file_of
from hwnas.search.course import NOT_ONE, Course, KnownNetwork, Length, known_networks
from hwnas.search.deployments import BestOf, CalibratedDeployment, Latency, model_of_all
from hwnas.search.explorer import Explorer, load_data, measure_pace, open_run_study, search_options
from hwnas.search.minutes import (
    ENDING_S,
    FEWEST_STEPS,
    FORWARD,
    LEAST_SHARE,
    Clock,
    step_seconds,
    timing_reserve_s,
)
from hwnas.search.new_heads import race_of
from hwnas.search.plan import RACE, Plan, line_recipe, making_of, names_of_wholes
from hwnas.search.race import FEWEST, FINALISTS, FINISH, FIRST, LEAST_JUDGED, PIECE, steps_of
from hwnas.search.racer import Event, Racer, RaceSetting, state_path
from hwnas.space.architecture import Architecture, origin_name
from hwnas.space.cuts import WHOLE
from hwnas.space.search_space import SearchSpace
from hwnas.study.lines import Line, read_lines, unpack
from hwnas.study.record import DROPPED, KNOWN
from hwnas.study.storage import shown, storage_errors
from hwnas.study.study import storage_of, study_lock
from hwnas.system.clock import Deadline
from hwnas.system.run_folder import RunFolder
from hwnas.tasks.task import load_task
from hwnas.training.classifier import rows_of
from hwnas.training.line import Keeping

UNTABLED = {"latency table": "none, as the race times its networks"}
LENGTH = "race"  # attribute of the study: the race's Length
EXPORT_SHARE = 0.15  # of the seconds of a race, for exporting and scoring its finalists
JUDGING_SHARE = 0.1  # of the seconds of a race, for judging the known networks, and for timing them on smaller images
FEW_IMAGES = 512  # by which networks are judged, if judging by more takes too long
PAYS = 1.1  # times as fast a step on twice the threads must be
TIMING_S = 1.5  # of a network, at least
TRAININGS = 4  # of the slowest network by its recipe, in which a race ends that no minutes bound


@dataclass(frozen=True)
class ObviousCuts(Explorer):
    """A race of pretrained networks and their obvious cuts.

    Attributes:
        known: the networks that it starts with, slowest first.
        timing_s: about the seconds of timing one of them.
    """

    known: Mapping[str, Architecture]
    timing_s: float

    @classmethod
    def prepare(cls, plan: Plan, run: RunFolder, console: Console, clock: Clock | None = None) -> ObviousCuts:
        """Load the data, time the known networks that no earlier process has timed, open the study."""
        dataset = load_data(plan, run, UNTABLED, console)
        measured = [MeasuredLatency(deployment, plan.space, file_of(plan, deployment, run.latencies),
                                    lambda: run.hold("latencies"), plan.options.seed)
                    for deployment in plan.deployments]
        if plan.options.storage is None and not run.study.exists():  # nothing was decided by them yet
            for each in measured:
                each.forget_invalid()
        calibrated = tuple(CalibratedDeployment(each.deployment, each, None) for each in measured)
        model, space = model_of_all(calibrated), plan.space
        began = time.monotonic()
        try:
            options = search_options(plan, answered(lambda: _slowest_ms(space, model), console))
            known = answered(lambda: known_networks(space, model.predict_architectures, options), console)
        finally:
            _tell_failed(space, calibrated, console)
        n_timed = max(len(space.known), len(measured[0].table.networks))  # under a cap on smaller images, too
        timing_s = max(TIMING_S, (time.monotonic() - began) / n_timed)
        # The network in the middle of the multiply-adds gives the pace of making files.
        by_macs = sorted(space.known.values(), key=lambda network: network.macs)
        middle = plan.network(replace(by_macs[len(by_macs) // 2], image_size=max(space.image_sizes)))
        pace = None if clock is None else measure_pace(plan, dataset, calibrated, console, middle)
        start = " ".join(plan.starts[around].key for around in space.arounds if around in plan.starts)
        recipe = replace(line_recipe(plan, dataset), epochs=1, min_steps=0, max_steps=0)  # the race decides the length
        study = open_run_study(plan, run, dataset, calibrated, options, {
            **UNTABLED, "accuracy": f"{RACE} ({recipe.fingerprint} {start})".replace(" )", ")")})
        return cls(plan, run, dataset, calibrated, model, options, study, clock, pace, known, timing_s)

    @property
    def n_workers(self) -> int:
        """The number of processes: at most one for each network that may be at work."""
        plan = self.plan
        return min(super().n_workers, max(len(plan.space.known), plan.parts))

    def begin(self, console: Console) -> None:
        """Decide how long the race is, unless it has started, and say how the minutes are divided."""
        study, url = self.study, storage_of(self.study).url
        stored_length = study.user_attrs.get(LENGTH)
        if self.plan.options.storage and FINALISTS in study.user_attrs and not self.run.lines.exists():
            raise StudyError(f"{shown(url)} holds a race of another folder, which has its weights. Give that folder as "
                             "out=, or another storage=.")
        if stored_length is not None:
            length = self._go_on(Length.of(stored_length, self.run.path), console)
        else:
            length = self._without_minutes() if self.clock is None else self._new_length(console)
        with storage_errors(url), study_lock(url):
            if stored_length is None and (other := study.user_attrs.get(LENGTH)) is not None:  # of another process
                length = Length.of(other, self.run.path)
            study.set_user_attr(LENGTH, asdict(length))
        self._tell_plan(length, console)

    def work(self, console: Console) -> None:
        """Work on the race until it is over, as one of its processes."""
        plan, study = self.plan, self.study
        if LENGTH not in study.user_attrs:
            raise StudyError(f"the race in {self.run.path} has not started: its first process is still preparing. "
                             "Start this one again in a minute.")
        length = Length.of(study.user_attrs[LENGTH], self.run.path)
        course = self._course(length)
        setting = RaceSetting(study, self.dataset, plan.network, line_recipe(plan, self.dataset),
                              plan.options.seed, self.run.lines, course)
        whole_s = length.left_s if length.total_s is None else None
        with console.step("race", whole_s) as report:
            done = 0.0

            def tell(event: Event) -> None:
                nonlocal done
                name = "" if event.line is None else f"{event.line.id} at {event.line.px} px"
                if event.kind == "training":
                    report(done, f"{event.rung}: {name}, step {event.step} of {event.steps}")
                elif event.kind == "waiting":
                    report(done, f"networks are timed: {event.text}" if event.text else "other processes train or time")
                elif event.line is not None:
                    if whole_s is None:  # without minutes the plan says how much is left
                        race = race_of(course, read_lines(study, plan.space))
                        done = 1 - race.left_s / max(1e-9, length.total_s or 0.0)
                    console.note(f"trial {event.line.number} ({name}, {event.line.latency_ms:.3g} ms): "
                                 f"{event.rung or event.kind}: {event.text}")

            keep = Keeping(console.say)
            Racer(setting, keep, tell).run()
            keep.write_held()

    def front_rows(self, trials: Sequence[Mapping[str, Any]], console: Console) -> list[FrontRow]:
        """Return the rows of the front, without figures yet: finished lines, and baselines. If the whole network was
        not finished, it is a baseline, unless minutes bound the race and it was not trained: a line says so."""
        plan, rows, whole = self.plan, self._line_rows(), self._whole
        if not rows:
            reasons = Counter(str(trial["reason"]) for trial in trials if trial.get("reason"))
            raise StudyError("no network came through the race" + "".join(
                f"; {n} of them: {reason}" for reason, n in reasons.most_common(1)))
        raced = whole is not None and any(row.id == whole.id for row in rows)
        # The trial of the whole network, if the race dropped it before it was trained.
        beaten = None if whole is None or raced else next(
            (trial for trial in trials if trial["id"] == whole.id and trial["rungs"] == KNOWN
             and trial["outcome"] == DROPPED and not trial["steps"]), None)
        if beaten is not None and plan.whole and self.clock is not None:
            raced = True
            console.remark(f"{plan.whole} is no baseline here, as it was left out before it was trained: "
                           f"{beaten['reason']}.")
        return [*rows, *(FrontRow.of(network, target=plan.deployment.target.name, host=plan.deployment.host_name)
                         for network in plan.baselines if not (raced and network.id == plan.whole))]

    def trained(self) -> dict[str, TrainedWeights]:
        """Return the weights of the lines that the race has finished, by network id."""
        lines = read_lines(self.study, self.plan.space)
        return {line.id: TrainedWeights(line.key, state_path(self.run.lines, line, str(line.legs[-1]["rung"])))
                for line in lines if FINISH in line.rungs}

    def report_facts(self) -> dict[str, Any]:
        """Return how the race trained each of its networks, by id, and from which of several these are cut."""
        lines = {line.number: line for line in read_lines(self.study, self.plan.space)}
        ended = [line for line in lines.values() if FINISH in line.rungs]
        return {"race": {line.id: story_of(line, lines) for line in ended},
                "family": _tell_origins(names_of_wholes(self.plan.space), ended)}

    def _go_on(self, begun: Length, console: Console) -> Length:
        """Return the length of a race that has started, in the minutes of this command."""
        plan, length, planned = self.plan, begun, begun.planned or begun.parts
        if self.clock is None:  # its lines were judged by as many images and sizes
            return replace(self._without_minutes(begun.step_s), planned=max(planned, plan.parts),
                           n_images=begun.n_images, n_smaller=begun.n_smaller)
        if begun.total_s is not None:  # it began without minutes
            step_s = self._step_seconds(begun.step_s, console)
            length = replace(begun, total_s=None, step_s=step_s, baselines_s=self._baseline_seconds(step_s))
        if (begun.first_threads or 1 << 30) > max(plan.workers, plan.options.threads):  # or with more cores
            threads, speedup = self._threads_of_first(length.step_s, console)
            length = replace(length, first_threads=threads, speedup=speedup)
        parts = min(planned, plan.parts)  # a lower finalists.k counts until a higher one is given
        n_finished = sum(FINISH in line.rungs for line in read_lines(self.study, plan.space))
        seconds = self._seconds(max(parts, n_finished))
        return replace(length, parts=parts, planned=planned, until=Deadline.after(seconds), making_s=self._export_s())

    def _seconds(self, n_raced: int) -> float:
        """Return the seconds for training, without exporting, scoring and timing the baselines and `n_raced` lines."""
        clock = self.clock
        assert clock is not None
        n_made = n_raced + len(self.plan.baselines)
        return clock.left_s - n_made * self._export_s() - timing_reserve_s(clock) - ENDING_S

    def _export_s(self) -> float:
        """Return the seconds for exporting and scoring each line and each baseline."""
        plan, pace = self.plan, self.pace
        assert pace is not None
        # Files are made by several processes at once, and scored one after another.
        return pace.exporting_s / min(plan.parts + len(plan.baselines), plan.workers) + pace.scoring_s

    def _new_length(self, console: Console) -> Length:
        """Return the length of a new race in minutes, with the known networks that have time for FEWEST_STEPS. Judging
        and timing take a small part of the seconds each, so that steps are left. BudgetError if no network has time."""
        plan, train_split, clock = self.plan, self.dataset.train, self.clock
        assert clock is not None
        step_s = self._step_seconds(self.known, console)
        threads, speedup = self._threads_of_first(step_s, console)
        # 1. The number of finalists follows from the seconds of exporting them.
        seconds, export_s = self._seconds(0), self._export_s()
        parts = min(plan.parts, max(FEWEST, int(EXPORT_SHARE * seconds / export_s)))
        making_s = parts * export_s
        seconds -= making_s
        # 2. The slowest networks are left out, until one has time for FEWEST_STEPS.
        able = dict(dropwhile(lambda item: LEAST_SHARE * seconds * speedup < FEWEST_STEPS * item[1], step_s.items()))
        if not able:
            needed_s = FEWEST_STEPS * [*step_s.values()][-1] / (LEAST_SHARE * speedup)
            enough_s = max(needed_s / (1 - EXPORT_SHARE), needed_s + making_s)  # exports grow with the minutes
            minutes = clock.minutes + (enough_s - seconds - making_s) / 60
            raise BudgetError(f"budget.minutes={clock.minutes:g} is too short for this machine: preparing took "
                              f"{clock.spent_s:.0f} s, and not one of {len(step_s)} networks can be trained for "
                              f"{FEWEST_STEPS} steps. Give budget.minutes={1.05 * minutes:.1f} or more.")
        if gone := [name for name in step_s if name not in able]:
            console.remark(f"no time for {', '.join(gone)}: {'it' if len(gone) == 1 else 'they'} would be trained for "
                           f"fewer than {FEWEST_STEPS} steps.")
        if parts < plan.parts:
            console.note(f"few minutes: {parts} networks are to be trained to the end")
        # 3. The numbers of images and networks that are judged follow from the seconds of judging and timing.
        batch = line_recipe(plan, self.dataset).batch_for(len(train_split))
        image_s = sum(able.values()) / batch / FORWARD  # answered by all of them
        n_fitted = len(rows_of(train_split.labels, len(self.dataset.class_names)))
        n_wanted = max(parts - 1, LEAST_JUDGED) * len({network.around for network in self.known.values()})
        n_images, n_smaller = judged_in(seconds, image_s, self.timing_s, n_wanted, n_fitted)
        return Length(able, parts, None, Deadline.after(seconds), self._baseline_seconds(able), export_s, n_smaller,
                      n_images, threads, speedup)

    def _threads_of_first(self, step_s: Mapping[str, float], console: Console) -> tuple[int, float]:
        """Return the threads for training the slowest network, and how many times as fast as on one its steps are.
        Threads are 2, 4, 8 … up to the workers, as long as that pays. A batch of small images cannot use many."""
        plan, making = self.plan, making_of(self.plan, self.dataset)
        threads = line_recipe(plan, self.dataset).threads
        if plan.workers <= threads:
            return threads, 1.0
        name, alone_s = next(iter(step_s.items()))
        network, fastest = plan.network(self.known[name]), (threads, 1.0)
        with console.step("time its training on several threads"), suppress(CandidateError):  # its line will say why
            while threads < plan.workers:
                threads = min(2 * threads, plan.workers)
                on_these = replace(making, recipe=replace(making.recipe, threads=threads))
                speedup = alone_s * making.steps_in_a_step(network) / min(
                    step_seconds(network, on_these) for _ in range(2))
                if speedup < PAYS * fastest[1]:
                    break
                fastest = threads, speedup
        return fastest

    def _without_minutes(self, names: Container[str] | None = None) -> Length:
        """Return the length of a race without minutes, with the known networks of these `names` (None: with all). The
        seconds of a network's steps are by its multiply-adds, so that the same seed gives the same race."""
        plan = self.plan
        macs = {name: network.macs for name, network in self.known.items() if names is None or name in names}
        steps = line_recipe(plan, self.dataset).steps_for(len(self.dataset.train))
        return Length({name: n / max(macs.values()) for name, n in macs.items()}, plan.parts,
                      total_s=float(TRAININGS * steps))

    def _step_seconds(self, names: Iterable[str], console: Console) -> dict[str, float]:
        """Measure the seconds of a step of the lines of known networks."""
        plan, making = self.plan, making_of(self.plan, self.dataset)
        seconds = dict.fromkeys(names, 1.0)
        with console.step("time this machine's training") as report:
            for at, name in enumerate(seconds):
                report(at / len(seconds), name)
                network = plan.network(self.known[name])
                with suppress(CandidateError):  # its line will say why
                    seconds[name] = step_seconds(network, making) / making.steps_in_a_step(network)
        return seconds

    def _baseline_seconds(self, names: Container[str]) -> list[float]:
        """Return the seconds of a step of each baseline that is trained after a race with the networks of these
        `names`. The whole network is left out if it races on full images."""
        plan, pace = self.plan, self.pace
        assert pace is not None
        making = making_of(plan, self.dataset)
        raced = plan.whole if WHOLE in names and self._whole is not None else ""
        return [pace.step_s[baseline.id] / making.steps_in_a_step(baseline) for baseline in plan.baselines
                if baseline.id != raced]

    @property
    def _whole(self) -> Architecture | None:
        """The network that the others are cut from, on full images; None if there is none or it does not race."""
        racing = self.known.get(WHOLE)
        return racing if racing == self.plan.space.known.get(WHOLE) else None

    def _course(self, length: Length) -> Course:
        """Return the race's course in the space of the plan."""
        plan, task = self.plan, load_task(self.dataset.task)
        known = [KnownNetwork(name, network, length.step_s[name]) for name, network in self.known.items()
                 if name in length.step_s]
        return Course(known, length, plan.space, self.model.predict_architectures, self.options, plan.workers,
                      n_lines=plan.options.n_trials or 1 << 30, most_k=plan.parts,
                      is_pretrained=bool(plan.starts) and not task.needs_trunk, has_new_head=task.needs_trunk)

    def _tell_plan(self, length: Length, console: Console) -> None:
        """Print the plan of the race."""
        course, clock, study = self._course(length), self.clock, self.study
        race = race_of(course, read_lines(study, course.space), study.user_attrs.get(FINALISTS))
        if race.chosen is not None:
            also = " and another storage=" if self.plan.options.storage else ""
            console.note(f"the race is over; for another one, with other minutes, give out=FOLDER{also}")
            return
        names = ", ".join(f"{known.name} ({course.latency_ms(known.architecture):.3g} ms)" for known in course.known)
        console.note(f"race: {names}; {length.parts} are to be trained to the end at most")
        tell_room(course, console)
        if clock is None:
            console.note(f"the race takes as long as {length.total_s:.0f} steps of its slowest network; "
                         "budget.minutes=N bounds the whole command")
            return
        left_s, rest_s = race.left_s, clock.left_s - max(0.0, length.left_s)
        first_s = race.most_pieces * PIECE * left_s
        console.note(f"plan for {clock.minutes:g} min: {clock.spent_s / 60:.1f} to prepare (done), {FIRST} "
                     f"{first_s / 60:.1f}, {FINISH} {(left_s - first_s) / 60:.1f}, {rest_s / 60:.1f} to export, score "
                     "and time")

    def _line_rows(self) -> list[FrontRow]:
        """Return the finalists as rows of the later front."""
        plan, objective = self.plan, self.options.objective
        lines = {line.number: line for line in read_lines(self.study, plan.space)}
        reward = {number: objective.reward(line.top1, line.latency_ms) for number, line in lines.items()
                  if FINISH in line.rungs}
        rows = []
        for number in reward:
            line = lines[number]
            attrs, name = line.trial.user_attrs, known_name(plan.space, line.architecture)
            row = FrontRow.of(
                plan.network(line.architecture), target=plan.deployment.target.name, host=plan.deployment.host_name,
                top1_proxy=line.top1, latency_ms_predicted=line.latency_ms,
                latency_ms_predicted_low=attrs.get("latency_ms_predicted_low"),
                latency_ms_predicted_high=attrs.get("latency_ms_predicted_high"), reward=reward[number],
                steps=steps_of(line, lines), reward_winner=number == max(reward, key=lambda each: reward[each]))
            rows.append(replace(row, name=name) if name else row)
        return rows


def _slowest_ms(space: SearchSpace, model: Latency | BestOf) -> float:
    """Return the latency in ms of the first known network; if that cannot be timed, of the slowest one that can.
    Raises CandidateError if there is none."""
    mean_ms = model.predict_architectures([*space.known.values()]).mean
    if not (able := np.isfinite(mean_ms)).any():
        raise CandidateError(NOT_ONE)
    return float(mean_ms[0] if able[0] else mean_ms[able].max())


def _tell_failed(space: SearchSpace, calibrated: Sequence[CalibratedDeployment], console: Console) -> None:
    """Say which known networks could not be timed, and why."""
    for each in calibrated:
        for name, network in space.known.items():
            if why := each.table.failed.get(replace(network, image_size=max(space.image_sizes)).id):
                console.remark(f"note: {name} is left out as {each.name}: {why}")


def judged_in(seconds: float, image_s: float, timing_s: float, wanted: int, n_fitted: int) -> tuple[int, int | None]:
    """Return by how many validation images a race judges its networks, and how many networks on smaller images it times
    and judges (None: as many as are wanted). Both take JUDGING_SHARE of the seconds.

    Args:
        seconds: Of the race, for lines.
        image_s: Of one image, answered by all known networks.
        timing_s: Of timing one network.
        wanted: Networks on smaller images that are to be judged.
        n_fitted: Training images that each classifier is fitted to.
    """
    # Every network answers these images, and the training images to which its classifier is fitted.
    n_images = min(DECIDING, max(FEW_IMAGES, int(JUDGING_SHARE * seconds / image_s) - n_fitted))
    most = max(FEWEST - 1, int(JUDGING_SHARE * seconds / timing_s))
    return n_images, most if most < wanted else None


def tell_room(course: Course, console: Console) -> None:
    """Say how large images would use the cap, if every network takes less than half of it."""
    slowest, cap_ms = course.known[0].architecture, course.options.cap_ms
    slowest_ms, px = course.latency_ms(slowest), slowest.image_size
    if cap_ms is not None and 2 * slowest_ms < cap_ms:
        larger = min(1024, int(px * math.sqrt(cap_ms / slowest_ms)) // 8 * 8)  # latency grows about as the pixels do
        console.remark(f"note: the slowest network takes {slowest_ms:.3g} of the cap's {cap_ms:g} ms, on images of "
                       f"{px} px. Where the files are larger, try dataset.image_size={larger}.")


def known_name(space: SearchSpace, network: Architecture) -> str:
    """Return a network's name in the space, with its image size: timm's name of a whole one, empty if it has none."""
    whole, px = space.wholes.get(network.around), network.image_size
    if whole is not None and replace(whole, image_size=px) == network:
        name = origin_name(network.around)
    else:
        name = next((name for name, known in space.known.items() if replace(known, image_size=px) == network), "")
    return name if network == whole or not name else f"{name} at {px} px"


def _tell_origins(names: Sequence[str], ended: Sequence[Line]) -> str:
    """Return a line on which of several networks the finished ones are cut from; empty if there was one."""
    if len(names) < 2:
        return ""
    numbers = Counter(origin_name(line.architecture.around) for line in ended)
    shares = ", ".join(f"{n} of {name}" for name, n in numbers.most_common())
    return f"{', '.join(names)} and their obvious cuts raced; trained to the end: {shares}."


def story_of(line: Line, lines: Mapping[int, Line]) -> str:
    """Return a text about a line's legs, and about the legs of the line that it was cut from."""
    undone = ", all undone, as it answered better untrained"
    own = ", ".join(f"{leg['steps']} steps ({leg['rung']}){undone if leg.get('undone') else ''}" if leg["steps"]
                    else "judged untrained" for leg in line.legs if leg["steps"] or unpack(leg["right"]).any())
    source = None if line.source is None else lines.get(line.source)
    if source is None:
        return own
    return f"{own} behind trial {source.number} ({line.move or 'cut from it'}; {source.id} at {source.px} px, " \
           f"{story_of(source, lines)})"
