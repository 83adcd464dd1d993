"""A line: one network in training, for as long as it deserves, in legs between which it may pause.

A leg goes on with the weights, their moving average and the optimiser's moments that the leg before left. A network
that is cut from a trained one, or gets smaller images, begins with the other's average. By its average a line is
judged: at a constant rate that is nearly as good as the end of a falling one (Hägele et al. 2024, arXiv 2405.18392). So
no line is warmed up twice, and nothing that was trained is thrown away.
"""

from __future__ import annotations

import contextlib
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
from hwnas.lazy import LazyModule, nn
from hwnas.training.batches import Batches
from hwnas.training.loop import Checkpoint, Training, lay_out, seeded
from hwnas.training.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    import hwnas.training.rounding as rounding
else:
    rounding = LazyModule("hwnas.training.rounding")

ROUNDED_S = 2.5  # seconds of a step with int8's rounding, in those of another
SETTLED = 0.1  # of a leg's seconds, after which it is seen how fast the machine trains


@dataclass(frozen=True, slots=True)
class Leg:
    """So many steps whose learning rate goes from `start` to `end`, as shares of the recipe's, along half a cosine,
    and rises from zero in the first `warmup` of them; the last `rounded` ones see int8's rounding, of weights of 7 bits
    where they are `narrow`."""

    steps: int
    start: float
    end: float
    warmup: int = 0
    rounded: int = 0
    narrow: bool = False

    def rate(self, step: int) -> float:
        """The share of the recipe's rate at a step of the leg (from 0)."""
        share = self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return share * min(1.0, (step + 1) / max(1, self.warmup))

    def cost_from(self, step: int) -> float:
        """Return the seconds of all steps from this one on, in those of a step without rounding."""
        left = self.steps - step
        return left + (ROUNDED_S - 1) * min(left, self.rounded)


def key_of(*parts: object) -> str:
    """Names a line's state by everything that decided it: what it began with, and each leg since."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Stretch:
    """One leg of one line.

    Attributes:
        leg: what is trained.
        done: steps that the line was trained for before.
        before: key of the state that the leg begins with; empty for a leg that begins with other weights.
        after: key of the state that it ends with.
        begin: builds the network, with the weights that a leg without a state before it begins with.
        seconds: that the leg may take; None: as many as its steps need.
    """

    leg: Leg
    done: int
    before: str
    after: str
    begin: Callable[[], nn.Module]
    seconds: float | None = None


class LineTraining(Training):
    """A line in training, whose steps are counted over all its legs."""

    less = "Set a smaller finalists.recipe.batch_size."

    def __init__(self, batches: Batches, recipe: Recipe, stretch: Stretch, keep: Callable[[Checkpoint], None]
                 ) -> None:
        super().__init__(lay_out(stretch.begin(), recipe), batches, recipe)
        self.stretch, self.first, self.steps, self._keep = stretch, stretch.done, stretch.leg.steps, keep
        self._began, self._begun_at, self._trained, self._left_out = 0.0, 0, 0.0, 0.0

    def run(self, progress: Progress | None = None) -> None:
        """Every step of the leg that is left, or as many as its seconds allow."""
        self._began, self._begun_at = time.monotonic(), self.step
        super().run(progress)

    def after_step(self, loss: float, rate: float) -> None:
        """On a machine that is slower than was planned steps are left out all along the leg, so that it ends in its
        seconds, with its last rate."""
        leg, spent_s = self.stretch.leg, time.monotonic() - self._began
        self._trained += leg.cost_from(self.step - 1) - leg.cost_from(self.step)
        if self.stretch.seconds is not None:
            seconds = self.stretch.seconds * leg.cost_from(self._begun_at) / leg.cost_from(0)
            if spent_s > SETTLED * seconds:
                needed_s = spent_s / self._trained * leg.cost_from(self.step)
                self._left_out += max(0.0, needed_s / max(seconds - spent_s, 1e-9) - 1)  # for each step that is trained
                skipped = int(min(self._left_out, leg.steps - self.step))
                self.step, self._left_out = self.step + skipped, self._left_out - skipped
        super().after_step(loss, rate)

    def set_rate(self, step: int) -> None:
        """As the leg has it, in place of the recipe's schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * self.stretch.leg.rate(step - self.stretch.done) * group.get("lr_scale", 1.0)

    def in_precision(self) -> contextlib.AbstractContextManager[object]:
        """In the last steps of the leg int8's rounding, which bf16 would blur; otherwise what the recipe asks for."""
        leg = self.stretch.leg
        return rounding.Rounding(leg.narrow) if self.step >= leg.steps - leg.rounded else super().in_precision()

    def save(self) -> None:
        """Keep all that the line needs to go on."""
        self._keep(self.checkpoint({"line": self.stretch.after, "done": self.stretch.done + self.step}))


def train_leg(stretch: Stretch, earlier: Path, path: Path, *, data: Dataset, recipe: Recipe, seed: int, keep: Keeping,
              progress: Progress | None = None) -> nn.Module:
    """Train one leg from the state in the file `earlier`, or from where a killed one left it in `path`.

    Returns:
        The line's average, where it was trained and in eval mode.

    Raises:
        StudyError: the state that the leg begins with is gone.
        TrainingError: the loss is not finite, or memory runs out.
    """
    with seeded(seed, recipe.threads):
        state = keep.load(path)
        begun = state is not None and state.identity.get("line") == stretch.after
        if not begun and stretch.before:
            state = keep.load_line(earlier, stretch.before)
        training = LineTraining(Batches(data.train, data, recipe, seed), recipe, stretch,
                                lambda state: keep.save(path, state))
        if state is not None and (begun or stretch.before):
            training.restore(state)
            training.step = state.step if begun else 0
        training.run(progress)
        training.save()
        return training.current.eval()


class Keeping:
    """The states of lines in files; those that no disk took, in memory. Then the race goes on, and `say` hears once
    what a kill would cost."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._held = say, dict[Path, Checkpoint]()

    def save(self, path: Path, state: Checkpoint) -> None:
        """Write a state whole, or hold it where the disk takes nothing."""
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
        """The last state kept for `path`; None where there is none. StudyError for one that is torn."""
        return self._held.get(path) or Checkpoint.load(path)

    def load_line(self, path: Path, key: str) -> Checkpoint:
        """The state of a line with this key; StudyError where it is gone."""
        state = self.load(path)
        if state is None or state.identity.get("line") != key:
            raise StudyError(f"{path} does not hold the weights of this line any more")
        return state

    def write_held(self) -> None:
        """Try once more to write what no disk took."""
        for path, state in list(self._held.items()):
            self.save(path, state)

    def average(self, path: Path, key: str) -> dict[str, Tensor]:
        """The weights that a line is judged by, of its state with this key; StudyError where that is gone."""
        state = self.load_line(path, key)
        return dict(state.average or state.model)
