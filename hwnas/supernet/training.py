"""Trains a Bank: sandwich steps with in-place distillation, a checkpoint an epoch, resumed as if never interrupted."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hwnas.accuracy.training import seeded
from hwnas.errors import TrainingError
from hwnas.supernet.bank import bank_of, megabytes
from hwnas.supernet.curriculum import Curriculum, Step
from hwnas.training_batches import Batches, own_randomness, reseed
from hwnas.training_checkpoint import Checkpoint, check_identity
from hwnas.training_run import make_average, make_optimizer, make_schedule

if TYPE_CHECKING:
    from hwnas.accuracy.dataset import Dataset, Split
    from hwnas.progress import Console, Report
    from hwnas.space import SearchSpace
    from hwnas.supernet.options import SupernetOptions

_INITIAL, _NETWORKS = 1 << 32, 1 << 33  # no epoch: keys of the random numbers for weights and for sub-networks
_STATES = 5  # copies of the weights in training: themselves, gradient, two moments, average


@dataclass(frozen=True)
class SupernetJob:
    """What a supernet is trained on; `identity` names all that decides its weights, `path` is its checkpoint."""

    space: SearchSpace
    dataset: Dataset
    train: Split
    options: SupernetOptions
    identity: Mapping[str, Any]
    path: Path

    @property
    def epochs(self) -> int:
        """Epochs in all."""
        return self.options.recipe(len(self.train)).epochs


def train(job: SupernetJob, console: Console) -> Checkpoint:
    """The finished checkpoint: trained from the last whole epoch on.

    StudyError for a checkpoint that is torn or of another training, TrainingError when the loss is not finite or memory
    runs out.
    """
    with seeded(job.options.seed, job.options.threads), own_randomness(), _out_of_memory(job):
        state = _State(job)
        if state.epoch < job.epochs:
            console.say(state.forecast())
            with console.step("train supernet") as report:
                state.train(report)
    return state.saved()


@contextlib.contextmanager
def _out_of_memory(job: SupernetJob) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search("(not enough|out of|can't allocate) memory", str(error)):
            raise TrainingError(f"supernet: out of memory while training at batch {job.options.batch_size}, "
                                f"{job.dataset.image_size} px. Set a smaller supernet.batch_size or "
                                "supernet.image_size.") from error
        raise


class _State:
    """Shared weights, average, optimiser and schedule after `epoch` whole epochs."""

    def __init__(self, job: SupernetJob) -> None:
        self.job, self.epoch, self.rows = job, 0, list[dict[str, Any]]()
        self.recipe = job.options.recipe(len(job.train))
        self.batches = Batches(job.train, job.dataset, self.recipe, job.options.seed)
        reseed(job.options.seed, _INITIAL)
        self.bank = bank_of(job.space)
        self.average = make_average(self.bank, self.recipe)
        self.optimizer = make_optimizer(self.bank, self.recipe)
        self.steps = self.recipe.epochs * len(self.batches)
        self.schedule = make_schedule(self.optimizer, self.recipe, self.steps)
        options = job.options
        self.curriculum = Curriculum(job.space, options.n_random, options.sandwich, options.warmup_largest,
                                     options.opening)
        found = Checkpoint.load(job.path)
        if found is not None:
            check_identity(found.identity, job.identity, job.path,
                           "Give the same options, or leave supernet.path out to train another.")
            found.restore(self.bank, None if self.average is None else self.average.module, self.optimizer)
            self.epoch, self.rows = found.epoch, found.rows

    def forecast(self) -> str:
        """Memory and time of what is left, from a few steps that are taken and thrown away."""
        images, labels = next(iter(self.batches.epoch(self.epoch + 1)))
        rng, share = self._rng(0, 0), self.job.options.sandwich
        kinds = self.curriculum.sandwiched(1.0, rng), self.curriculum.mixed(self.curriculum.opened(1.0), rng)
        both, alone = (self._timed(images, labels, step) for step in kinds)
        seconds = share * both + (1 - share) * alone
        self.optimizer.zero_grad(set_to_none=True)
        left = (self.recipe.epochs - self.epoch) * len(self.batches) * seconds / 60
        size, at = megabytes(self.bank), f" from epoch {self.epoch + 1} on" if self.epoch else ""
        return (f"supernet of {self.job.space.name}: {size:.0f} MB of shared weights, {_STATES * size:.0f} MB in "
                f"training besides the images' maps; {self.recipe.epochs} epochs of {len(self.batches)} steps of "
                f"{self.recipe.batch_size} images, about {max(left, 1):.0f} min{at} (estimated from a few steps)")

    def _timed(self, images: Tensor, labels: Tensor, step: Step) -> float:
        """Seconds of the faster of two tries."""
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            self._gradients(images, labels, step)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def train(self, report: Report) -> None:
        """Every epoch that is left."""
        first = self.epoch + 1
        for epoch in range(first, self.recipe.epochs + 1):
            def heard(share: float, epoch: int = epoch) -> None:
                report((epoch - first + share) / (self.recipe.epochs + 1 - first),
                       f"epoch {epoch} of {self.recipe.epochs}")

            start, cpu = time.monotonic(), time.process_time()
            loss = self._epoch(epoch, heard)
            self.epoch = epoch
            self.rows.append({"epoch": epoch, "train_loss": loss, "seconds": time.monotonic() - start,
                              "cpu_seconds": time.process_time() - cpu})
            self.saved().save(self.job.path)

    def _epoch(self, epoch: int, progress: Callable[[float], None]) -> float:
        total, steps = 0.0, len(self.batches)
        for index, (images, labels) in enumerate(self.batches.epoch(epoch)):
            step, rng = (epoch - 1) * steps + index, self._rng(epoch, index)
            self.schedule.step_update(step)
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._gradients(images, labels, self.curriculum.step(step / self.steps, rng))
            if not math.isfinite(loss):
                raise TrainingError(
                    f"supernet: loss is {loss} in epoch {epoch} of {self.recipe.epochs}, learning rate "
                    f"{self.optimizer.param_groups[0]['lr']:.3g}. Set a smaller supernet.lr or supernet.clip_norm.")
            if self.recipe.clip_norm:
                nn.utils.clip_grad_norm_(self.bank.parameters(), self.recipe.clip_norm)
            self.optimizer.step()
            if self.average is not None:
                self.average.update(self.bank, step + 1)
            total += loss
            progress((index + 1) / steps)
        return total / steps

    def _gradients(self, images: Tensor, labels: Tensor, step: Step) -> float:
        """Add the gradients of every network of the step; the first one's loss, or the first that is not finite."""
        taught: Tensor | None = None
        losses = []
        for architecture in step.networks:
            logits = self.bank(images, architecture)
            smoothing = self.recipe.label_smoothing if taught is None else 0.0
            one = cross_entropy(logits, labels if taught is None else taught, label_smoothing=smoothing)
            (one / len(step.networks)).backward()
            losses.append(float(one.detach()))
            if step.distil and taught is None:
                taught = logits.detach().softmax(1)
        return next((loss for loss in losses if not math.isfinite(loss)), losses[0])

    def _rng(self, epoch: int, step: int) -> np.random.Generator:
        return np.random.default_rng([self.job.options.seed, _NETWORKS, epoch, step])

    def saved(self) -> Checkpoint:
        """The state as it is written."""
        average = {} if self.average is None else self.average.module.state_dict()
        return Checkpoint(self.job.identity, self.epoch, self.rows, self.bank.state_dict(), average,
                          self.optimizer.state_dict())
