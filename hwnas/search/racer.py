"""A process in a race: it claims what is wanted next, trains it, and records what came out.

Any number of them share a race through its study, and the weights through the run folder. What to do next is decided in
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
from optuna.trial import TrialState

from hwnas.data.dataset import Split, subset
from hwnas.errors import CandidateError, StudyError
from hwnas.search.loop import unseen_params
from hwnas.search.race import CHILD, ENDS, FINALISTS, PROPOSED, WARMUP, Ask, Choose, Course, Drop, Look, Race, Train
from hwnas.search.trial import SearchOptions, facts_of
from hwnas.study.lines import (
    Beats,
    Line,
    add_line,
    beat,
    begun,
    claim_line,
    drop_line,
    end_unborn,
    fail_line,
    finish_line,
    read_lines,
    record_leg,
    record_loss,
    release_line,
)
from hwnas.study.objective import upper_ms
from hwnas.study.record import DUPLICATE, INFEASIBLE, LINE
from hwnas.study.storage import HEARTBEAT_S, storage_errors
from hwnas.study.study import storage_of, study_lock
from hwnas.system.libraries import release_memory
from hwnas.system.processes import Interrupts, host_of, worker_name
from hwnas.training.line import Keeping, Leg, Stretch, answers, key_of, mean_loss, set_norms, train_leg

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hwnas.data.dataset import Dataset
    from hwnas.networks.network import FoundNetwork
    from hwnas.samplers.loading import Asking
    from hwnas.space.architecture import Architecture
    from hwnas.space.coding import Codes
    from hwnas.space.search_space import SearchSpace
    from hwnas.study.objective import Predict
    from hwnas.training.recipe import Recipe

EXHAUSTED = "exhausted"  # attribute of the study: the sampler finds no other network
UNPRODUCTIVE = 5  # asks without a new network, after which one is drawn
DECIDING = 2048  # validation images, stratified, that lines are judged by
NORM_IMAGES, LOSS_IMAGES = 512, 1024  # that an untrained child's norms are set with, and that it is looked at on
POLL_S = 0.5
FEW_STEPS = 10  # with fewer since a leg was taken over, its seconds say nothing of a step
MOST_HELD = 1 << 30  # bytes of training images that a process holds in several sizes


@dataclass(frozen=True)
class Setting:
    """What the processes of a race work with.

    Attributes:
        network: the network of an architecture, with the weights that it begins with.
        sampler: of the study.
        recipe: how lines are trained; `seed` decides their batches.
        folder: of the states of lines.
    """

    study: optuna.Study
    space: SearchSpace
    predict: Predict
    dataset: Dataset
    network: Callable[[Architecture], FoundNetwork]
    sampler: Asking
    recipe: Recipe
    seed: int
    folder: Path
    options: SearchOptions
    course: Course


@dataclass(frozen=True, slots=True)
class Event:
    """What a race tells: `kind` is training (a step was taken), trained, looked, dropped or failed."""

    kind: str
    line: Line | None = None
    rung: str = ""
    text: str = ""
    step: int = 0
    steps: int = 0


def state_path(folder: Path, line: Line, rung: str) -> Path:
    """The file of a line's state. The one at the end stands apart, so that others can still be cut from the one before
    it."""
    return folder / f"{line.number}{'-final' if rung in ENDS else ''}.safetensors"


def run_race(setting: Setting, keep: Keeping, tell: Callable[[Event], None] = lambda event: None) -> None:
    """Work on the race until it is over, as one of any number of processes. A line that fails ends, and the race goes
    on; Ctrl-C leaves its leg to the next process that comes."""
    racer = _Racer(setting, keep, tell)
    with storage_errors(storage_of(setting.study).url), racer.interrupts.held():
        end_unborn(setting.study)
        while (work := racer.next_work()) is not None:
            racer.do(*work)


class _Racer:
    def __init__(self, setting: Setting, keep: Keeping, tell: Callable[[Event], None]) -> None:
        self.setting, self.study, self.keep, self.tell = setting, setting.study, keep, tell
        self.interrupts, self.beats = Interrupts(), Beats()
        self._sized: dict[int, Dataset] = {}

    def next_work(self) -> tuple[Train | Look, Line, dict[str, Any]] | None:
        """What this process does next, claimed: with the line and the claim. None when the race is over."""
        while True:
            with study_lock(storage_of(self.study).url):
                while True:
                    race = self._race()
                    for line in race.lines:  # of a process that was killed between the two
                        if line.live and line.legs and line.legs[-1]["end"] == 0:
                            self._finish(line.number)
                    steps = race.steps()
                    if not steps:
                        return None
                    if not self._settle(steps):
                        break
                for step in steps:
                    if isinstance(step, Train | Look) and step.line is not None and not self.beats.is_held(step.line):
                        return step, step.line, self._claim(race, step, step.line)
            with self.interrupts.allowed():
                time.sleep(POLL_S)

    def _race(self) -> Race:
        attrs, course, lines = self.study.user_attrs, self.setting.course, read_lines(self.study, self.setting.space)
        if attrs.get(EXHAUSTED):
            course = replace(course, n_proposed=sum(line.made == PROPOSED for line in lines))
        return Race(course, lines, attrs.get(FINALISTS))

    def _settle(self, steps: Sequence[Any]) -> bool:
        """Write what needs no work; returns whether the race is another one now."""
        changed = False
        for step in steps:
            if isinstance(step, Drop):
                drop_line(self.study, step.line, step.reason)
                self.tell(Event("dropped", step.line, text=step.reason))
            elif isinstance(step, Choose):
                self.study.set_user_attr(FINALISTS, [line.number for line in step.lines])
            elif isinstance(step, Ask):
                self._ask(step)
            elif isinstance(step, Train) and step.line is None:
                self._add(step)
            else:
                continue
            changed = True
            if isinstance(step, Ask):  # the next one must know of this one
                break
        return changed

    def _add(self, step: Train) -> None:
        params = self.setting.space.encode(step.architecture)
        facts, constraints = facts_of(step.architecture, self.setting.space.to_codes(params), self.setting.predict,
                                      self.setting.options)
        add_line(self.study, self.setting.space, params, facts, step.rung, None if step.source is None else
                 step.source.number, step.move, constraints)

    def _ask(self, step: Ask) -> None:
        """Ask the sampler for a child in a part of the range of latency, or for a network that it proposes."""
        if step.proposed:
            self._ask_proposal()
            return
        setting, race = self.setting, self._race()
        part = step.low_ms, step.high_ms
        codes = setting.course.children(part, race.parents(part))
        with setting.sampler.only(setting.space, codes):
            trial = self.study.ask()
            with storage_of(self.study).params_together(trial):
                params = {parameter.name: trial.suggest_categorical(parameter.name, parameter.choices)
                          for parameter in setting.space.parameters}
        architecture = setting.space.decode(params)
        facts, constraints = facts_of(architecture, setting.space.to_codes(params), setting.predict, setting.options)
        source = race.source_of(architecture)
        move = "" if source is None else difference(setting.space, source.architecture, architecture)
        storage_of(self.study).write_attrs(trial, {
            **facts, LINE: begun(CHILD, None if source is None else source.number, move)}, constraints)

    def _ask_proposal(self) -> None:
        """Ask the sampler until it proposes a network that is new and keeps the cap; after some asks draw one."""
        setting, storage = self.setting, storage_of(self.study)
        for attempt in range(2 * UNPRODUCTIVE):
            seen = {line.id for line in read_lines(self.study, setting.space)}
            if attempt >= UNPRODUCTIVE:
                rng = np.random.default_rng([setting.seed, len(seen), attempt])
                if (params := unseen_params(setting.space, seen, self._over_ms, rng)) is None:
                    break
                self.study.enqueue_trial(params)
            trial = self.study.ask()
            with storage.params_together(trial):
                params = {parameter.name: trial.suggest_categorical(parameter.name, parameter.choices)
                          for parameter in setting.space.parameters}
            architecture = setting.space.decode(params)
            facts, constraints = facts_of(architecture, setting.space.to_codes(params), setting.predict,
                                          setting.options)
            over = any(value > 0 for value in constraints.values())
            if architecture.id not in seen and not over:
                storage.write_attrs(trial, {**facts, LINE: begun(PROPOSED, None, "")}, constraints)
                return
            kind = INFEASIBLE if over else DUPLICATE
            storage.write_attrs(trial, {**facts, "outcome": kind}, constraints)
            storage.finish(trial, TrialState.PRUNED)
        # nothing new is left: as many lines as there are suffice
        self.study.set_user_attr(EXHAUSTED, True)

    def _over_ms(self, codes: Codes) -> NDArray[np.float64]:
        options = self.setting.options
        if options.cap_ms is None:
            return np.zeros(len(codes))
        return upper_ms(self.setting.predict(codes), options.cap_quantile) - options.cap_ms

    def _claim(self, race: Race, step: Train | Look, line: Line) -> dict[str, Any]:
        """Claim a line; the claim holds what is done. What a process left unfinished is taken over as it was."""
        work: dict[str, Any] = {"rung": "look", "source": step.source.number if step.source else None}
        if isinstance(step, Train):
            left = line.claim or {}
            steps = int(left["steps"]) if "steps" in left else race.leg_steps(step)
            work |= {"rung": step.rung, "move": step.move, "steps": steps, "start": step.start, "end": step.end,
                     "threads": step.threads}
        work["place"] = sum(each.number < line.number for each in race.lines)  # among lines
        claim_line(self.study, line, work)
        return work

    def do(self, step: Train | Look, line: Line, work: Mapping[str, Any]) -> None:
        """Do what was claimed, and record it."""
        began = time.monotonic()
        try:
            with self.interrupts.allowed():
                if isinstance(step, Look):
                    loss = self._look(step)
                else:
                    key, right, step_s = self._train(step, line, work)
        except (CandidateError, StudyError) as error:
            if isinstance(error, StudyError) and (elsewhere := self._is_elsewhere(step.source or line)):
                release_line(self.study, line)
                raise StudyError(f"{error} It was trained on {elsewhere}: the processes of a race share their run "
                                 "folder (out=).") from None
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
            fail_line(self.study, line, reason)
            self.tell(Event("failed", line, work["rung"], reason))
            return
        seconds = time.monotonic() - began
        if isinstance(step, Look):
            record_loss(self.study, line, loss, seconds)
            self.tell(Event("looked", line, "look", f"loses {loss:.3f} untrained"))
            return
        leg = {**{key: work[key] for key in ("rung", "steps", "start", "end", "threads")},
               "seconds": step_s * work["steps"], "host": host_of(worker_name())}
        if step.source is not None:
            leg["gain"] = float(right.mean()) - step.source.top1
        source = line.source if step.source is None else step.source.number
        values = self.setting.options.objective.values(float(right.mean()), line.latency_ms, line.architecture)
        with study_lock(storage_of(self.study).url):
            record_leg(self.study, line, leg, key, right, source, step.move, values)
            if step.end == 0:
                self._finish(line.number)
        self.tell(Event("trained", line, step.rung, f"{right.mean():.2%} of {len(right)} validation images"))

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

    def _train(self, step: Train, line: Line, work: Mapping[str, Any]) -> tuple[str, NDArray[np.bool_], float]:
        """Train a leg: the key of the state at its end, what the average answers rightly, and a step's seconds."""
        from hwnas.training.loop import seeded

        setting, network = self.setting, self.setting.network(line.architecture)
        data = self._data(network)
        fresh = step.source is not None or not line.legs
        leg = Leg(int(work["steps"]), float(work["start"]), float(work["end"]), WARMUP if fresh else 0)
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

        stretch = Stretch(leg, 0 if fresh else line.steps, before, after, lambda: self._begin(step, network))
        recipe = replace(setting.recipe, threads=max(setting.recipe.threads, step.threads))
        earlier = str(line.legs[-1]["rung"]) if line.legs else ""
        before_at, after_at = (state_path(setting.folder, line, rung) for rung in (earlier, step.rung))
        model = train_leg(stretch, before_at, after_at, data=data, recipe=recipe, seed=setting.seed + work["place"],
                          keep=self.keep, progress=heard)
        with seeded(setting.seed, recipe.threads):
            right = answers(model, data.validation, data)
        del model
        release_memory()
        seconds = time.monotonic() - began
        return after, right, seconds / (trained if trained >= FEW_STEPS else leg.steps)

    def _begin(self, step: Train | Look, network: FoundNetwork) -> nn.Module:
        """The network with what it begins with: its source's average, or its own start."""
        if step.source is None:
            return network.start()
        from hwnas.networks.carry import cut_network

        return cut_network(self._average(step.source), step.source.architecture, network.architecture)

    def _average(self, line: Line) -> dict[str, Tensor]:
        rung = str(line.legs[-1]["rung"]) if line.legs else ""
        return self.keep.average(state_path(self.setting.folder, line, rung), line.key)

    def _look(self, step: Look) -> float:
        """What an untrained child loses on some validation images, its norms set on some training images."""
        from hwnas.training.loop import lay_out, seeded

        network, recipe = self.setting.network(step.line.architecture), self.setting.recipe
        data = self._data(network)
        with seeded(self.setting.seed, recipe.threads):
            model = lay_out(self._begin(step, network), recipe)
            set_norms(model, data.train.take(subset(data.train.labels, NORM_IMAGES, 0)).images, data)
            return mean_loss(model.eval(), data.validation.take(subset(data.validation.labels, LOSS_IMAGES, 0)), data)

    def _data(self, network: FoundNetwork) -> Dataset:
        """The data as a network is fed them, with the validation images that decide and without the test images."""
        px = network.shape.image_size
        if px not in self._sized:
            data = self.setting.dataset
            none = Split(np.empty((0, *data.test.images.shape[1:]), np.uint8), np.empty(0, np.int64))
            part = replace(data, test=none, validation=data.validation.take(subset(data.validation.labels, DECIDING,
                                                                                   0)))
            self._sized[px] = network.fed(part)
            while len(self._sized) > 2 and sum(each.train.images.nbytes for each in self._sized.values()) > MOST_HELD:
                self._sized.pop(next(iter(self._sized)))
        return self._sized[px]


def difference(space: SearchSpace, source: Architecture, target: Architecture) -> str:
    """What makes one network of a space another one, in the words of its parameters."""
    before, after = space.find(source), space.encode(target)
    changed = [(name, (before or {}).get(name), value) for name, value in after.items()
               if (before or {}).get(name) != value]
    return ", ".join(f"{name} {old} to {new}" for name, old, new in changed[:4])
