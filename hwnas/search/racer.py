"""A process in a race: it claims what is wanted next, trains it, and records what came out.

Any number of them share a race through its study, and the weights through the run folder. Each next step is decided in
`race.py`, under the study's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from numpy.typing import NDArray

from hwnas.data.dataset import subset
from hwnas.errors import CandidateError, StudyError
from hwnas.latency.measured import NotTimed
from hwnas.lazy import LazyModule
from hwnas.networks.cutting import cut_further
from hwnas.search.race import FINALISTS, FINISH, FIRST, KNOWN, WARMUP, Choose, Course, Drop, Race, Step, Train
from hwnas.search.trial import SearchOptions, facts_of
from hwnas.study.lines import (
    Line,
    add_line,
    beat,
    claim_line,
    drop_line,
    fail_line,
    finish_line,
    is_held,
    read_lines,
    record_leg,
    release_line,
)
from hwnas.study.storage import HEARTBEAT_S, Beats, storage_errors
from hwnas.study.study import storage_of, study_lock
from hwnas.system.libraries import release_memory
from hwnas.system.processes import Interrupts, host_of, worker_name
from hwnas.training.classifier import fit_classifier
from hwnas.training.line import Keeping, Leg, Stretch, answers, key_of, train_leg
from hwnas.training.loop import lay_out, seeded

if TYPE_CHECKING:
    from torch import nn

    import hwnas.training.rounding as rounding
    from hwnas.data.dataset import Dataset
    from hwnas.networks.network import FoundNetwork
    from hwnas.search.course import Latencies
    from hwnas.space.architecture import Architecture
    from hwnas.space.search_space import SearchSpace
    from hwnas.training.recipe import Recipe
else:
    rounding = LazyModule("hwnas.training.rounding")

DECIDING = 2048  # validation images, stratified, that lines are judged by
POLL_S = 0.5
FEW_STEPS = 10  # with fewer since a leg was taken over, its seconds say nothing of a step
MOST_HELD = 1 << 30  # bytes of training images that a process holds in several sizes


@dataclass(frozen=True)
class RaceSetting:
    """The objects that the processes of a race work with.

    Attributes:
        network: the network of an architecture, with the weights that it begins with.
        recipe: how lines are trained; `seed` decides their batches.
        folder: of the states of lines.
    """

    study: optuna.Study
    space: SearchSpace
    predict: Latencies
    dataset: Dataset
    network: Callable[[Architecture], FoundNetwork]
    recipe: Recipe
    seed: int
    folder: Path
    options: SearchOptions
    course: Course


@dataclass(frozen=True, slots=True)
class Event:
    """An event that a race reports: `kind` is timing (networks are timed), waiting (for other processes), training (a
    step was taken), trained, dropped or failed."""

    kind: str
    line: Line | None = None
    rung: str = ""
    text: str = ""
    step: int = 0
    steps: int = 0


def state_path(folder: Path, line: Line, rung: str) -> Path:
    """The file of a line's state. The one at the end stands apart, so that others can still be cut from the one before
    it."""
    return folder / f"{line.number}{'-final' if rung == FINISH else ''}.safetensors"


def run_race(setting: RaceSetting, keep: Keeping, tell: Callable[[Event], None] = lambda event: None) -> None:
    """Work on the race until it is over, as one of any number of processes. A line that fails ends, and the race goes
    on; Ctrl-C leaves its leg to the next process that comes."""
    racer = _Racer(setting, keep, tell)
    with storage_errors(storage_of(setting.study).url), racer.interrupts.held():
        while (work := racer.next_work()) is not None:
            racer.do(*work)


class _Racer:
    def __init__(self, setting: RaceSetting, keep: Keeping, tell: Callable[[Event], None]) -> None:
        self.setting, self.study, self.keep, self.tell = setting, setting.study, keep, tell
        self.interrupts, self.beats = Interrupts(), Beats()
        self._fed: dict[Any, Dataset] = {}

    def next_work(self) -> tuple[Train, Line, dict[str, Any]] | None:
        """Claim what this process does next; return it with the line and the claim. None when the race is over."""
        while True:
            try:
                with study_lock(storage_of(self.study).url):
                    race, steps = self._settled()
                    for step in steps:
                        if isinstance(step, Train) and step.line is not None and not is_held(step.line, self.beats):
                            return step, step.line, self._claim(race, step, step.line)
            except NotTimed as untimed:  # without the lock: others may go on meanwhile
                with self.interrupts.allowed():
                    untimed.latency.time(untimed.networks, lambda share, note="": self.tell(Event("timing", text=note)))
                continue
            if not steps:
                return None
            self.tell(Event("waiting"))
            with self.interrupts.allowed():
                time.sleep(POLL_S)

    def _settled(self) -> tuple[Race, list[Step]]:
        """The race, and what can be done in it now, once all that needs no work is written."""
        while True:
            race = self._race()
            if ended := [line for line in race.lines if line.live and line.legs and line.legs[-1]["end"] == 0]:
                for line in ended:  # of a process that was killed behind the last leg
                    self._finish(line.number)
                continue
            steps = race.steps()
            if not self._settle(steps):
                return race, steps

    def _race(self) -> Race:
        lines = read_lines(self.study, self.setting.space)
        return Race(self.setting.course, lines, self.study.user_attrs.get(FINALISTS))

    def _settle(self, steps: Sequence[Step]) -> bool:
        """Write what needs no work; returns whether the race is another one now."""
        changed = False
        for step in steps:
            if isinstance(step, Drop):
                drop_line(self.study, step.line, step.reason)
                self.tell(Event("dropped", step.line, text=step.reason))
            elif isinstance(step, Choose):
                self.study.set_user_attr(FINALISTS, [line.number for line in step.lines])
            elif isinstance(step, Train) and step.line is None:
                self._add(step)
            else:
                continue
            changed = True
        return changed

    def _add(self, step: Train) -> None:
        params = self.setting.space.encode(step.architecture)
        assert params is not None, "a race trains what its space lists"
        facts, constraints = facts_of(step.architecture, self.setting.predict([step.architecture]),
                                      self.setting.options)
        add_line(self.study, self.setting.space, params, facts, step.rung, None if step.source is None else
                 step.source.number, step.move, constraints)

    def _claim(self, race: Race, step: Train, line: Line) -> dict[str, Any]:
        """Claim a line; the claim holds what is done. Work that a process left is taken over as it was."""
        left = line.claim or {}
        steps = int(left["steps"]) if "steps" in left else race.leg_steps(step)
        work = {"rung": step.rung, "source": step.source.number if step.source else None, "move": step.move,
                "steps": steps, "start": step.start, "end": step.end, "threads": step.threads, "rounded": step.rounded,
                "anew": step.anew,
                "place": sum(each.number < line.number for each in race.lines),  # among lines
                "claimed": time.time_ns()}
        claim_line(self.study, line, work)
        return work

    def do(self, step: Train, line: Line, work: Mapping[str, Any]) -> None:
        """Do what was claimed, and record it."""
        try:
            with self.interrupts.allowed():
                key, right, told = self._train(step, line, work)
        except (CandidateError, StudyError) as error:
            if isinstance(error, StudyError) and (elsewhere := self._is_elsewhere(step.source or line)):
                release_line(self.study, line)
                raise StudyError(f"{error} It was trained on {elsewhere}: the processes of a race share their run "
                                 "folder (out=).") from None
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
            with study_lock(storage_of(self.study).url):
                if not self._is_mine(line, work):
                    return
                fail_line(self.study, line, reason)
            self.tell(Event("failed", line, work["rung"], reason))
            return
        leg = {**{key: work[key] for key in ("rung", "steps", "start", "end", "threads", "rounded")}, **told,
               "host": host_of(worker_name())}
        if step.source is not None:
            leg["gain"] = float(right.mean()) - step.source.top1
        source = line.source if step.source is None else step.source.number
        with study_lock(storage_of(self.study).url):
            if not self._is_mine(line, work):
                return  # another process took it over, as this one had been silent for too long
            record_leg(self.study, line, leg, key, right, source, step.move)
            if step.end == 0:
                self._finish(line.number)
        text = f"{right.mean():.2%} of {len(right)} validation images" if self._is_judged(step) else "its head is new"
        self.tell(Event("trained", line, step.rung, text))

    def _is_mine(self, line: Line, work: Mapping[str, Any]) -> bool:
        """Return whether this process still holds its claim on a line."""
        claim = next(each.claim for each in read_lines(self.study, self.setting.space) if each.number == line.number)
        return claim is not None and claim.get("claimed") == work["claimed"]

    def _is_elsewhere(self, line: Line) -> str:
        """The other machine that trained a line whose state is not in this folder; empty where it was none."""
        rung = str(line.legs[-1]["rung"]) if line.legs else ""
        host = str(line.legs[-1].get("host", "")) if line.legs else ""
        return "" if host == host_of(worker_name()) or state_path(self.setting.folder, line, rung).exists() else host

    def _finish(self, number: int) -> None:
        """Give a line that had its last leg the study's values."""
        line = next(line for line in read_lines(self.study, self.setting.space) if line.number == number)
        objective = self.setting.options.objective
        finish_line(self.study, line, objective.values(line.top1, line.latency_ms, line.architecture),
                    objective.reward(line.top1, line.latency_ms))

    def _train(self, step: Train, line: Line, work: Mapping[str, Any]
               ) -> tuple[str, NDArray[Any], dict[str, float]]:
        """Train a leg: the key of the state at its end, what the average answers rightly, and what else the leg tells:
        its seconds, and of the first network what int8's rounding takes from the average."""
        setting, network = self.setting, self.setting.network(line.architecture)
        data = self._data(network)
        fresh = step.source is not None or step.anew or not line.legs
        # A short leg must not be all warm-up.
        warmup = min(WARMUP, int(work["steps"]) // 3) if fresh or not line.steps else 0
        leg = Leg(int(work["steps"]), float(work["start"]), float(work["end"]), warmup,
                  round(work["rounded"] * work["steps"]), setting.course.narrow)
        origin = network.identity if step.source is None else step.source.key
        before = "" if fresh else line.key
        after = key_of(before or key_of(network.identity, origin, setting.recipe.fingerprint, setting.seed,
                                        setting.dataset.fingerprint), leg)
        began = last = time.monotonic()
        count = trained = 0

        def heard(at: int, steps: int) -> None:
            nonlocal last, count, trained
            trained += 1
            self.tell(Event("training", line, step.rung, step=at, steps=steps))
            if time.monotonic() - last > HEARTBEAT_S:
                last, count = time.monotonic(), count + 1
                beat(self.study, line, work, count)

        stretch = Stretch(leg, 0 if fresh else line.steps, before, after, lambda: self._begin(step, network, data))
        recipe = replace(setting.recipe, threads=max(setting.recipe.threads, step.threads))
        earlier = str(line.legs[-1]["rung"]) if line.legs else ""
        before_at, after_at = (state_path(setting.folder, line, rung) for rung in (earlier, step.rung))
        model = train_leg(stretch, before_at, after_at, data=data, recipe=recipe, seed=setting.seed + work["place"],
                          keep=self.keep, progress=heard)
        with seeded(setting.seed, recipe.threads):
            right = answers(model, data.validation, data) if self._is_judged(step) else np.zeros(
                len(data.validation), bool)
            seconds = time.monotonic() - began
            if trained >= FEW_STEPS:
                seconds *= leg.steps / trained
            told = {"seconds": seconds}
            if setting.course.is_int8 and step.rung == FIRST:
                with rounding.Rounding(setting.course.narrow):
                    told["int8_loss"] = float(right.mean() - answers(model, data.validation, data).mean())
        del model
        release_memory()
        return after, right, told

    def _is_judged(self, step: Train) -> bool:
        """Return whether a leg ends with answers: not if the network's head has learnt nothing yet."""
        return step.rung != KNOWN or not self.setting.course.has_new_head

    def _begin(self, step: Train, network: FoundNetwork, data: Dataset) -> nn.Module:
        """The network with what it begins with: its source's average, or its own start."""
        if step.source is None:
            model = network.start()
            if step.rung == KNOWN:
                model = lay_out(model, self.setting.recipe)
                fit_classifier(model, data)
            return model.train()
        rung = str(step.source.legs[-1]["rung"]) if step.source.legs else ""
        average = self.keep.average(state_path(self.setting.folder, step.source, rung), step.source.key)
        return cut_further(average, step.source.architecture, network.architecture)

    def _data(self, network: FoundNetwork) -> Dataset:
        """The data as a network is fed them, with the validation images that decide and without the test images."""
        key = network.shape.image_size, network.normalisation
        if key not in self._fed:
            data = self.setting.dataset
            deciding = data.validation.take(subset(data.validation.labels, DECIDING, 0))
            part = replace(data, test=data.test.without_images(), validation=deciding)
            self._fed[key] = network.fed(part)
            while len(self._fed) > 2 and sum(each.train.images.nbytes for each in self._fed.values()) > MOST_HELD:
                self._fed.pop(next(iter(self._fed)))
        return self._fed[key]
