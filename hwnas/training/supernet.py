"""Supernet training: options, the stages that open one after another, and the job that survives a kill."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hwnas.cli.options import option, read_options
from hwnas.errors import TrainingError
from hwnas.networks.shared_weights import bank_of, covering_settings, extreme, megabytes
from hwnas.training.batches import Batches, own_randomness, reseed
from hwnas.training.checkpoint import Checkpoint, check_identity
from hwnas.training.loop import seeded
from hwnas.training.options import TrainingOptions
from hwnas.training.run import make_average, make_optimizer, make_schedule

if TYPE_CHECKING:
    from hwnas.cli.progress import Console, Report
    from hwnas.data.dataset import Dataset, Split
    from hwnas.space.architecture import Architecture
    from hwnas.space.definition import Value
    from hwnas.space.search_space import SearchSpace


_SCORING = ("validation_images", "recalibration_images", "threads", "training_threads", "path")


@dataclass(frozen=True, slots=True)
class SupernetOptions:
    """Each step trains `n_random` random sub-networks; a share `sandwich` of the steps the largest and smallest too,
    all but the largest on the largest's answers (1: the sandwich rule as published). For the first `warmup_largest` of
    all steps the largest's operations are trained alone; for the next `opening` random networks take operations of
    their own in more and more stages (hwnas.training.supernet).

    `epochs` are raised until `min_steps` are done. `train_images`, `validation_images`: stratified subsets (0: all).
    `image_size` 0 is the space's; a smaller one is cheaper and ranks the same networks. `path`: a trained supernet's
    folder to use (null: the user's data folder, by fingerprint). `threads` score a network,
    `training_threads` train the supernet (0: every core).
    """

    epochs: int = option(20, low=1, high=100_000, help="raised until min_steps are done")
    min_steps: int = option(2000, low=0, high=10**8, help="least steps")
    train_images: int = option(10_000, low=0, high=10**9, help="training images, a stratified subset (0: all)")
    validation_images: int = option(2000, low=0, high=10**9, help="validation images (0: all)")
    recalibration_images: int = option(512, low=16, high=10**6, help="images that a sub-network's norms are set with")
    image_size: int = option(0, low=0, high=1024, help="px (0: the space's)")
    batch_size: int = option(64, low=2, high=8192, help="images a step")
    lr: float = option(5e-3, low=1e-6, high=10, help="highest learning rate")
    weight_decay: float = option(0.05, low=0, high=1, help="not of norms and biases")
    warmup: float = option(0.05, low=0, high=0.9, help="share of all steps in which the learning rate rises")
    warmup_largest: float = option(0.1, low=0, high=0.5, help="share of all steps for the largest network alone")
    opening: float = option(0.4, low=0, high=0.5, help="share of all steps in which stages open one after another")
    sandwich: float = option(0.25, low=0, high=1, help="share of the steps with the largest and smallest too")
    n_random: int = option(2, low=1, high=16, help="random sub-networks a step")
    ema_decay: float = option(0.995, low=0, high=0.99999, help="moving average of the weights (0: none)")
    label_smoothing: float = option(0.0, low=0, high=0.9, help="share of each label that is spread over all")
    clip_norm: float = option(1.0, low=0, high=1000, help="0: gradients are not clipped")
    shift: float = option(0.06, low=0, high=0.5, help="share of the side")
    seed: int = option(0, low=0, high=2**31, help="of the training")
    threads: int = option(0, low=0, high=4096, help="that score a network (0: every core)")
    training_threads: int = option(0, low=0, high=4096, help="that train the supernet (0: every core)")
    path: Path | None = option(None, what="the folder of a trained supernet", help="null: the user's data folder")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SupernetOptions:
        """Read and check; UnknownName, ConfigError."""
        return read_options(cls, config, "supernet")

    @property
    def training(self) -> str:
        """Everything that decides the shared weights, besides space and data."""
        return ";".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in _SCORING)

    def recipe(self, n_images: int) -> TrainingOptions:
        """The same as a recipe for `n_images` training images."""
        steps = max(1, n_images // self.batch_size)
        epochs = max(self.epochs, -(-self.min_steps // steps))
        return TrainingOptions(
            epochs=epochs, batch_size=min(self.batch_size, max(2, n_images)), optimizer="adamw", lr=self.lr,
            weight_decay=self.weight_decay, clip_norm=self.clip_norm, schedule="cosine", warmup=self.warmup,
            lr_end=min(1e-5, self.lr), decay_rate=0.1, decay_every=0.3, ema_decay=self.ema_decay,
            label_smoothing=self.label_smoothing, shift=self.shift, zoom=0.0, rotate=0.0, rand_augment=0,
            rand_layers=2, mixup=0.0, cutmix=0.0, mix_prob=1.0, erase=0.0, erase_mode="pixel", precision="fp32",
            channels_last=True)


@dataclass(frozen=True)
class Step:
    """The networks of one step; with `distil`, all but the first learn the first one's answers."""

    networks: list[Architecture]
    distil: bool = False


class Curriculum:
    """The steps of a training of `space`. `operations` are those of its largest network, by parameter."""

    def __init__(self, space: SearchSpace, n_random: int, sandwich: float, warmup: float, opening: float) -> None:
        self.space, self.n_random, self.sandwich = space, n_random, sandwich
        self.warmup, self.opening = warmup, opening
        self.largest = max(covering_settings(space), key=lambda setting: space.decode(setting).macs)
        self.operations = {name: value for name, value in self.largest.items() if name.endswith(".op")}

    def step(self, done: float, rng: np.random.Generator) -> Step:
        """The networks of a step when a share `done` of all steps is over."""
        if done < self.warmup:
            return self.warming(rng)
        return self.mixed(self.opened(done), rng) if rng.random() >= self.sandwich else self.sandwiched(done, rng)

    def opened(self, done: float) -> int:
        """In how many stages random networks have operations of their own."""
        n = len(self.space.definition.stages)
        share = (done - self.warmup) / self.opening if self.opening else 1.0
        return min(n, 1 + int(n * share))

    def warming(self, rng: np.random.Generator) -> Step:
        """The largest network, then a random one of its operations, so that its first channels matter most."""
        return Step([self.space.decode(self.largest), self._random(0, rng)], distil=True)

    def mixed(self, n_open: int, rng: np.random.Generator) -> Step:
        """Random networks that keep the largest's operations in all but `n_open` stages."""
        return Step([self._random(n_open, rng) for _ in range(self.n_random)])

    def sandwiched(self, done: float, rng: np.random.Generator) -> Step:
        """The largest network, the smallest of its operations and random ones, all of which learn its answers."""
        smallest = self.space.decode(extreme(self.space, self.largest, min))
        return Step([self.space.decode(self.largest), smallest, *self.mixed(self.opened(done), rng).networks],
                    distil=True)

    def _random(self, n_open: int, rng: np.random.Generator) -> Architecture:
        setting: Mapping[str, Value] = self.space.to_params(self.space.sample(rng, 1)[0])
        n = len(self.space.definition.stages)
        closed = {f"stage{stage}.op" for stage in rng.permutation(n)[n_open:]}
        kept = {name: value for name, value in self.operations.items() if name in closed}
        return self.space.decode({**setting, **kept})

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
            one = self.job.dataset.task.loss(logits, labels if taught is None else taught, smoothing)
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
