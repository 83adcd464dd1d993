"""Lines of a race. A line is one network in training, in legs: it may pause after each, and go on if it deserves it.

A leg starts from the weights, their moving average and the optimiser's moments at the end of the leg before. A network
that is cut from a trained one, or gets smaller images, starts from the other's average. A line is judged by its
average: at a constant rate that is nearly as good as the end of a falling one (Hägele et al. 2024, arXiv 2405.18392).
So no line is warmed up twice, and no trained weights are thrown away.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.data.dataset import Dataset, Progress
from hwnas.errors import StudyError, UserError
from hwnas.lazy import nn
from hwnas.training.batches import Batches
from hwnas.training.loop import Checkpoint, Training, lay_out, seeded
from hwnas.training.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

SETTLED = 0.1  # share of a leg's seconds after which the speed of the machine is known well enough


@dataclass(frozen=True, slots=True)
class Leg:
    """Steps whose learning rate goes from `start` to `end`, as shares of the recipe's, along half a cosine. It rises
    from zero in the first `warmup` steps."""

    steps: int
    start: float
    end: float
    warmup: int = 0

    def rate(self, step: int) -> float:
        """Return the rate at a step of the leg (from 0), as a share of the recipe's."""
        share = self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return share * min(1.0, (step + 1) / max(1, self.warmup))


def key_of(*parts: object) -> str:
    """Return the name of a line's state: a hash of all that decided it, which is its start and each leg since."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Stretch:
    """One leg of one line.

    Attributes:
        leg: The steps and their learning rates.
        done: Number of steps that the line was trained for before.
        before: Key of the state that the leg starts from; empty if it starts from the weights of `begin`.
        after: Key of the state that it ends with.
        begin: Builds the network, with the weights that a leg without a state before it starts from.
        seconds: Time that the leg may take; None: as long as its steps need.
    """

    leg: Leg
    done: int
    before: str
    after: str
    begin: Callable[[], nn.Module]
    seconds: float | None = None


class LineTraining(Training):
    """The training of one leg. `step` counts within the leg; batches are counted over all legs of the line."""

    less = "Set a smaller finalists.recipe.batch_size."

    def __init__(self, batches: Batches, recipe: Recipe, stretch: Stretch, keep: Callable[[Checkpoint], None]
                 ) -> None:
        super().__init__(lay_out(stretch.begin(), recipe), batches, recipe)
        self.stretch, self.first, self.steps, self._keep = stretch, stretch.done, stretch.leg.steps, keep
        self.trained = 0  # steps of the leg, without those that were left out
        self._began, self._begun_at, self._own, self._left_out = 0.0, 0, 0, 0.0

    def run(self, progress: Progress | None = None) -> None:
        """Train all steps of the leg that are left, or as many as its seconds allow."""
        self._began, self._begun_at = time.monotonic(), self.step
        super().run(progress)

    def after_step(self, loss: float, rate: float) -> None:
        """Leave out steps if the machine is slower than planned. They are spread over the leg, so that it ends within
        its seconds and near its last rate."""
        leg, spent_s = self.stretch.leg, time.monotonic() - self._began
        self.trained, self._own = self.trained + 1, self._own + 1
        if self.stretch.seconds is not None:
            # The part of the leg's seconds for the steps since `run` was called: a killed process did the others.
            seconds = self.stretch.seconds * (leg.steps - self._begun_at) / leg.steps
            if spent_s > SETTLED * seconds:
                # With time for one in k of the steps that are left, k - 1 are left out for each that is trained. The
                # fraction is kept for the next step.
                needed_s = spent_s / self._own * (leg.steps - self.step)
                self._left_out += max(0.0, needed_s / max(seconds - spent_s, 1e-9) - 1)
                skipped = int(min(self._left_out, leg.steps - self.step))
                self.step, self._left_out = self.step + skipped, self._left_out - skipped
        super().after_step(loss, rate)

    def set_rate(self, step: int) -> None:
        """Set the learning rates by the leg, in place of the recipe's schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * self.stretch.leg.rate(step - self.stretch.done) * group.get("lr_scale", 1.0)

    def save(self) -> None:
        """Save the state under the key that the leg ends with, with the number of steps that were trained."""
        self._keep(self.checkpoint({"line": self.stretch.after, "trained": self.trained}))


def train_leg(stretch: Stretch, earlier: Path, path: Path, *, data: Dataset, recipe: Recipe, seed: int, keep: Keeping,
              progress: Progress | None = None) -> tuple[nn.Module, int]:
    """Train one leg: from the state in the file `earlier`, or from the state in `path` if a kill interrupted the leg.

    Returns:
        The line's average, on the device that trained it, in eval mode. And the number of the leg's steps that were
        trained, by killed processes too; steps that were left out do not count.

    Raises:
        StudyError: The state that the leg starts from is gone.
        TrainingError: The loss is not finite, or memory runs out.
    """
    with seeded(seed, recipe.threads):
        state = keep.load(path)
        in_progress = state is not None and state.identity.get("line") == stretch.after
        if not in_progress and stretch.before:
            state = keep.load_line(earlier, stretch.before)
        training = LineTraining(Batches(data.train, data, recipe, seed), recipe, stretch,
                                lambda state: keep.save(path, state))
        if state is not None and (in_progress or stretch.before):
            training.restore(state)
            if in_progress:  # earlier versions did not write how many were trained
                training.step, training.trained = state.step, int(state.identity.get("trained", state.step))
        training.run(progress)
        training.save()
        return training.current.eval(), training.trained


class Keeping:
    """A store of the states of lines: in files, or in memory if a file cannot be written. The race goes on then, and
    `say` is called once to say what a kill would cost."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._held = say, dict[Path, Checkpoint]()

    def save(self, path: Path, state: Checkpoint) -> None:
        """Write a state whole, or keep a copy in memory if it cannot be written."""
        try:
            path.parent.mkdir(exist_ok=True)
            state.save(path)
            self._held.pop(path, None)
        except (OSError, UserError) as error:
            if not self._held:
                self._say(f"note: weights cannot be kept: {error} The race goes on; a kill would end the lines that "
                          "are at work.")
            self._held[path] = deepcopy(state)

    def load(self, path: Path) -> Checkpoint | None:
        """Return the last state for `path`, None if there is none. Raises StudyError if its file is torn."""
        return self._held.get(path) or Checkpoint.load(path)

    def load_line(self, path: Path, key: str) -> Checkpoint:
        """Return the state of a line with this key. Raises StudyError if it is gone."""
        state = self.load(path)
        if state is None or state.identity.get("line") != key:
            raise StudyError(f"{path} does not hold the weights of this line any more")
        return state

    def write_held(self) -> None:
        """Try once more to write the states that are in memory."""
        for path, state in list(self._held.items()):
            self.save(path, state)

    def average(self, path: Path, key: str) -> dict[str, Tensor]:
        """Return the weights that a line is judged by: the average, or the last ones if the state has none. Raises
        StudyError if the state with this key is gone."""
        state = self.load_line(path, key)
        return dict(state.average or state.model)
