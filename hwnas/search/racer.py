"""A process of a race: it trains the legs that `race.py` wants next.

The processes share the weights through the run folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from hwnas.data.dataset import subset
from hwnas.errors import StudyError, TrainingError
from hwnas.networks.cutting import cut_further
from hwnas.search.new_heads import race_of
from hwnas.search.race import FINALISTS, FINISH, WARMUP, Add, Choose, Drop, Race, Step, Train
from hwnas.search.worker import Record, Worker
from hwnas.study.candidate import Candidate
from hwnas.study.claims import end_trial, write_claim
from hwnas.study.lines import Line, add_line, read_lines, record_leg
from hwnas.study.record import DROPPED, EVALUATED, FAILED, KNOWN
from hwnas.system.libraries import release_memory
from hwnas.training.classifier import fit_classifier, rows_of
from hwnas.training.line import Keeping, Leg, Stretch, key_of, train_leg
from hwnas.training.loop import Checkpoint, grade, lay_out, seeded

if TYPE_CHECKING:
    from torch import nn

    from hwnas.data.dataset import Dataset
    from hwnas.networks.network import FoundNetwork
    from hwnas.search.course import Course
    from hwnas.space.architecture import Architecture
    from hwnas.training.recipe import Recipe

FEW_STEPS = 10  # of a leg that was taken over: the seconds of fewer say nothing about a step
MOST_HELD = 1 << 30  # bytes of training images that a process holds in several sizes


@dataclass(frozen=True)
class RaceSetting:
    """The objects that the processes of a race work with.

    Attributes:
        network: returns the network of an architecture, with the weights that it starts from.
        recipe: how lines are trained; `seed` decides their batches.
        folder: of the states of lines.
    """

    study: optuna.Study
    dataset: Dataset
    network: Callable[[Architecture], FoundNetwork]
    recipe: Recipe
    seed: int
    folder: Path
    course: Course


@dataclass(frozen=True, slots=True)
class Event:
    """An event that a race reports. `kind` is waiting (until networks are timed, as `text` says, or for other
    processes), training (a step was taken), trained, dropped or failed."""

    kind: str
    line: Line | None = None
    rung: str = ""
    text: str = ""
    step: int = 0
    steps: int = 0


def state_path(folder: Path, line: Line, rung: str) -> Path:
    """Return the file of a line's state. The last leg has its own, so that others can be cut from the one before."""
    return folder / f"{line.number}{'-final' if rung == FINISH else ''}.safetensors"


class Racer(Worker[Train]):
    """A process of a race. `tell` receives its events; `keep` stores the states of lines."""

    most_tries = 20  # a leg goes on where a killed one was

    def __init__(self, setting: RaceSetting, keep: Keeping, tell: Callable[[Event], None] = lambda event: None) -> None:
        super().__init__(setting.study)
        self.setting, self.keep, self.tell = setting, keep, tell
        self._fed: dict[Any, Dataset] = {}
        self._now: Race | None = None  # as it was when this process looked last

    def wanted(self) -> list[Train] | None:
        """Return the legs that are to be trained now; None if something was written that needs no work."""
        study, course = self.study, self.setting.course
        self._now = race_of(course, read_lines(study, course.space), study.user_attrs.get(FINALISTS))
        ended = [line for line in self._now.lines if line.live and line.legs and line.legs[-1]["end"] == 0]
        for line in ended:  # of a process that was killed after the last leg
            self._finish(line.number)
        steps = [] if ended else self._now.steps()
        legs = [step for step in steps if isinstance(step, Train)]
        if not ended and len(legs) == len(steps):
            return legs
        for step in steps:
            self._settle(step)
        return None

    def trial_of(self, job: Train) -> FrozenTrial:
        """Return the trial of the leg's line."""
        return job.line.trial

    def tell_waiting(self, timing: str = "") -> None:
        """Say that other processes train or time, or how far the `timing` of networks is."""
        self.tell(Event("waiting", text=timing))

    def fail(self, job: Train, reason: str) -> None:
        """Record that the training of a line failed, which ends the line."""
        end_trial(self.study, job.line.trial, TrialState.FAIL, {"outcome": FAILED, "reason": reason})
        self._tell_later(Event("failed", job.line, job.rung, reason))

    def _tell_later(self, event: Event) -> None:
        self.later.append(partial(self.tell, event))

    def _settle(self, step: Step) -> None:
        """Write a step that needs no work: a line that ends, a new one, the finished lines."""
        if isinstance(step, Drop):
            end_trial(self.study, step.line.trial, TrialState.PRUNED, {"outcome": DROPPED, "reason": step.reason})
            self._tell_later(Event("dropped", step.line, text=step.reason))
        elif isinstance(step, Choose):
            self.study.set_user_attr(FINALISTS, [line.number for line in step.lines])
        elif isinstance(step, Add):
            course = self.setting.course
            candidate = Candidate(step.architecture, course.predict([step.architecture]))
            add_line(self.study, course.space, candidate, course.options)

    def describe(self, job: Train) -> dict[str, Any]:
        """Return the content of a claim on a leg. A leg that another process left keeps its steps."""
        line, race = job.line, self._now
        assert race is not None
        left_claim = line.claim or {}
        steps = int(left_claim["steps"]) if "steps" in left_claim else race.leg_steps(job)
        return {"rung": job.rung, "source": job.source.number if job.source else None, "move": job.move,
                "steps": steps, "start": job.start, "end": job.end, "threads": job.threads,
                "speedup": self.setting.course.speed_of(job.threads),
                "anew": job.anew, "place": sum(each.number < line.number for each in race.lines)}  # among lines

    def perform(self, job: Train, claimed: Mapping[str, Any]) -> Record:
        """Train a leg. Raises TrainingError if the state before it is gone, StudyError if it is on another machine."""
        line = job.line
        try:
            key, right, facts = self._train(job, claimed)
        except StudyError as error:
            # The state is on another machine: give the leg back, and say what the processes must share.
            if elsewhere := self._is_elsewhere(job.source or line):
                write_claim(self.study, line.trial, None)
                raise StudyError(f"{error} It was trained on {elsewhere}: the processes of a race share their run "
                                 "folder (out=).") from None
            raise TrainingError(str(error)) from None
        kept = ("rung", "steps", "start", "end", "threads", "speedup")
        leg = {**{key: claimed[key] for key in kept if key in claimed}, **facts, "host": gethostname()}
        if job.source is not None:
            leg["gain"] = float(right.mean()) - job.source.top1
        return partial(self._record, job, leg, key, right)

    def _record(self, job: Train, leg: Mapping[str, Any], key: str, right: NDArray[Any]) -> None:
        line = job.line
        record_leg(self.study, line, leg, key, right, line.source if job.source is None else job.source.number,
                   job.move)
        if job.end == 0:
            self._finish(line.number)
        text = f"{right.mean():.2%} of {len(right)} validation images" if self._is_judged(job) else "its head is new"
        self._tell_later(Event("trained", line, job.rung, text))

    def _is_elsewhere(self, line: Line) -> str:
        """Return the other machine that trained a line whose state is not in this folder; empty if there is none."""
        rung = str(line.legs[-1]["rung"]) if line.legs else ""
        host = str(line.legs[-1].get("host", "")) if line.legs else ""
        return "" if host == gethostname() or state_path(self.setting.folder, line, rung).exists() else host

    def _finish(self, number: int) -> None:
        """End a line that had its last leg, with the study's values."""
        course = self.setting.course
        line = next(line for line in read_lines(self.study, course.space) if line.number == number)
        objective = course.options.objective
        end_trial(self.study, line.trial, TrialState.COMPLETE,
                  {"outcome": EVALUATED, "reward": objective.reward(line.top1, line.latency_ms)},
                  objective.values(line.top1, line.latency_ms, line.architecture))

    def _train(self, step: Train, work: Mapping[str, Any]) -> tuple[str, NDArray[Any], dict[str, float]]:
        """Train a leg. Returns the key of the state at its end, what the average answers rightly, and facts about the
        leg: its steps and seconds."""
        setting, course, line = self.setting, self.setting.course, step.line
        network = setting.network(line.architecture)
        data = self._data(network, step.rung == KNOWN)
        stretch = self._stretch(step, work, network, data)
        recipe = replace(setting.recipe, threads=max(setting.recipe.threads, step.threads))
        earlier = str(line.legs[-1]["rung"]) if line.legs else ""
        before_at, after_at = (state_path(setting.folder, line, rung) for rung in (earlier, step.rung))
        began, own = time.monotonic(), 0

        def count_step(at: int, steps: int) -> None:
            nonlocal own
            own += 1
            self.tell(Event("training", line, step.rung, step=at, steps=steps))

        model, steps = train_leg(stretch, before_at, after_at, data=data, recipe=recipe,
                                 seed=setting.seed + work["place"], keep=self.keep, progress=count_step)
        train_s, began = time.monotonic() - began, time.monotonic()
        # A killed process trained some of the steps: estimate their seconds.
        if steps > own and course.length.total_s is None:
            train_s = train_s * steps / own if own >= FEW_STEPS else steps * self._step_s(step)
        after, facts = stretch.after, dict[str, float]()
        with seeded(setting.seed, recipe.threads):
            right = grade(model, data.validation, data).per_image if self._is_judged(step) else np.zeros(
                len(data.validation), bool)
            # A line that answered better before its training ends as it was then.
            untrained = line.right_after(KNOWN) if step.end == 0 and course.is_pretrained else None
            if untrained is not None and len(untrained) == len(right) and untrained.mean() > right.mean():
                facts["undone"], right, after = 1.0, untrained, key_of(after, "undone")  # so few steps did harm
                model = self._go_back(network, data, after_at, after)
            facts |= {"steps": steps, "seconds": train_s + time.monotonic() - began}
        del model
        release_memory()
        return after, right, facts

    def _step_s(self, step: Train) -> float:
        """Return the seconds of a step of a leg, as the race expects them."""
        assert self._now is not None
        return self._now.step_s(step.line.architecture) / self.setting.course.speed_of(step.threads)

    def _stretch(self, step: Train, work: Mapping[str, Any], network: FoundNetwork, data: Dataset) -> Stretch:
        """Return what is trained in a leg, with the keys of the states before and after it."""
        setting, line = self.setting, step.line
        fresh = step.source is not None or step.anew or not line.legs
        # A short leg must not be all warm-up.
        warmup = min(WARMUP, int(work["steps"]) // 3) if fresh or not line.steps else 0
        leg = Leg(int(work["steps"]), float(work["start"]), float(work["end"]), warmup)
        origin = network.identity if step.source is None else step.source.key
        before = "" if fresh else line.key
        after = key_of(before or key_of(network.identity, origin, setting.recipe.fingerprint, setting.seed,
                                        setting.dataset.fingerprint), leg)
        planned_s = leg.steps * self._step_s(step) if setting.course.length.total_s is None else None
        return Stretch(leg, 0 if fresh else line.steps, before, after, lambda: self._begin(step, network, data),
                       planned_s)

    def _go_back(self, network: FoundNetwork, data: Dataset, path: Path, key: str) -> nn.Module:
        """End a line with its untrained weights. The state has another key, so that no leg goes on with it."""
        model = lay_out(network.start(), self.setting.recipe)
        fit_classifier(model, data)
        self.keep.save(path, Checkpoint({"line": key}, 0, [], model.state_dict(), {}, {}))
        return model

    def _is_judged(self, step: Train) -> bool:
        """Return whether a leg ends with answers. It does not if the network's head has learnt nothing yet."""
        return step.rung != KNOWN or not self.setting.course.has_new_head

    def _begin(self, step: Train, network: FoundNetwork, data: Dataset) -> nn.Module:
        """Return the network with the weights that it starts from: its source's average, or its own."""
        if step.source is None:
            model = network.start()
            if step.rung == KNOWN:
                model = lay_out(model, self.setting.recipe)
                fit_classifier(model, data)
            return model.train()
        rung = str(step.source.legs[-1]["rung"]) if step.source.legs else ""
        average = self.keep.average(state_path(self.setting.folder, step.source, rung), step.source.key)
        return cut_further(average, step.source.architecture, network.architecture)

    def _data(self, network: FoundNetwork, is_judged: bool) -> Dataset:
        """Return the data as a network receives them, with the validation images that decide and without test images.
        A network that `is_judged` untrained has only the few training images that its classifier is fitted to."""
        key = network.shape.image_size, network.normalisation, is_judged
        if key not in self._fed:
            data = self.setting.dataset
            deciding = data.validation.take(subset(data.validation.labels, self.setting.course.length.n_images, 0))
            part = replace(data, test=data.test.take(np.arange(0)), validation=deciding)
            if is_judged:
                part = replace(part, train=data.train.take(rows_of(data.train.labels, network.shape.classes)))
            while len(self._fed) > 1 and sum(each.train.images.nbytes for each in self._fed.values()) > MOST_HELD:
                self._fed.pop(next(iter(self._fed)))
            self._fed[key] = network.fed(part)
        return self._fed[key]
