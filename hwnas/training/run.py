"""The training loop of `python -m hwnas.train`: epoch by epoch, a checkpoint after each, resumed bit for bit.

Beside `hwnas.training.loop`, which trains hundreds of candidates for seconds each and keeps nothing, this one
trains a network for hours: timm's schedulers and augmentation, a teacher, bf16, CUDA.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hwnas.cli.progress import Console, Report
from hwnas.errors import TrainingError
from hwnas.system.paths import write_atomic
from hwnas.system.tables import table_csv
from hwnas.training.batches import Batches, own_randomness, reseed
from hwnas.training.checkpoint import Checkpoint, check_identity
from hwnas.training.job import TrainingJob
from hwnas.training.loop import predict, seeded, top1
from hwnas.training.options import TrainingOptions
from hwnas.training.teacher import Teacher, distilled, teacher_of

_INITIAL = 1 << 32  # no epoch: the key of the random numbers that weights are made of


@dataclass(frozen=True)
class Trained:
    """A trained network on the CPU in eval mode: the average or the last weights, whichever validates better."""

    model: nn.Module
    rows: list[dict[str, Any]]
    averaged: bool


def train(job: TrainingJob, console: Console) -> Trained:
    """Train from the last whole epoch to the end; the same weights as without an interruption (on one machine, with
    the same threads). Of several processes the first alone validates, and has rows.

    StudyError for a checkpoint of another training, TrainingError when the loss is not finite or memory runs out.
    """
    with seeded(job.seed, job.threads), own_randomness(), deterministic(job.device), contextlib.ExitStack() as held:
        state = _State(job)
        state.resume(console)
        if state.epoch < job.options.epochs:
            teacher = held.enter_context(_teacher(job))
            with console.step("train") as report:
                state.train(teacher, report)
        return state.result()


@contextlib.contextmanager
def _teacher(job: TrainingJob) -> Iterator[Teacher | None]:
    if job.teacher is None:
        yield None
        return
    with teacher_of(job.teacher, job.dataset, job.options.batch_size, job.threads, job.device) as teacher:
        yield teacher


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """cuDNN's deterministic kernels inside; nothing to do on a CPU."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    if device == "cuda":
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


class _State:
    """Network, average, optimiser, schedule and log, after `epoch` whole epochs."""

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.epoch, self.rows = job, 0, list[dict[str, Any]]()
        self.batches = Batches(job.train, job.dataset, job.options, job.seed, job.device, job.ranks)
        reseed(job.seed, _INITIAL)
        self.model = job.build().to(job.device)
        if job.options.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = make_average(self.model, job.options)
        self.optimizer = make_optimizer(self.model, job.options)
        self.schedule = make_schedule(self.optimizer, job.options, job.options.epochs * len(self.batches))
        self.parallel = job.ranks.wrapped(self.model)

    def resume(self, console: Console) -> None:
        """Take up the checkpoint, where there is one."""
        found = Checkpoint.load(self.job.checkpoint)
        if found is None:
            return
        check_identity(found.identity, self.job.identity, self.job.checkpoint)
        found.restore(self.model, None if self.average is None else self.average.module, self.optimizer)
        self.epoch, self.rows = found.epoch, found.rows
        console.note(f"going on after epoch {self.epoch} of {self.job.options.epochs}")

    def train(self, teacher: Teacher | None, report: Report) -> None:
        """Every epoch that is left."""
        left = range(self.epoch + 1, self.job.options.epochs + 1)
        for done, epoch in enumerate(left):
            def heard(share: float, done: int = done, epoch: int = epoch) -> None:
                report((done + share) / len(left), self._note(epoch))

            start = time.monotonic()
            loss, rate = self._epoch(epoch, teacher, heard)
            self.epoch = epoch
            if self.job.ranks.first:
                self._note_epoch(loss, rate, start)
                self._save()

    def _note_epoch(self, loss: float, rate: float, start: float) -> None:
        average = None if self.average is None else self._top1(self.average.module)
        self.rows.append({"epoch": self.epoch, "lr": rate, "train_loss": loss,
                          "top1_validation": self._top1(self.model), "top1_validation_ema": average,
                          "seconds": time.monotonic() - start})

    def _epoch(self, epoch: int, teacher: Teacher | None, progress: Callable[[float], None]) -> tuple[float, float]:
        """Mean loss of an epoch (from 1) and the learning rate of its last step."""
        total, steps = 0.0, len(self.batches)
        self.model.train()
        for index, (images, targets) in enumerate(self.batches.epoch(epoch)):
            step = (epoch - 1) * steps + index
            self.schedule.step_update(step)
            rate = float(self.optimizer.param_groups[0]["lr"])
            where = f"epoch {epoch} of {self.job.options.epochs}, step {index + 1} of {steps}, learning rate {rate:.3g}"
            total += self._step(images, targets, teacher, where)
            if self.average is not None:
                self.average.update(self.model, step + 1)
            progress((index + 1) / steps)
        return total / steps, rate

    def _step(self, images: Tensor, targets: Tensor, teacher: Teacher | None, where: str) -> float:
        options = self.job.options
        with _out_of_memory(options, images), torch.autocast(self.job.device, torch.bfloat16,
                                                             enabled=options.precision == "bf16"):
            loss = self._loss(images, targets, teacher)
        value = self.job.ranks.mean(float(loss.detach()), self.job.device)
        if not math.isfinite(value):
            raise TrainingError(f"loss is {value} in {where}. The last whole epoch stays in {self.job.folder.path}; "
                                "set a smaller lr or clip_norm, or a longer warmup, and another out=FOLDER.")
        self.optimizer.zero_grad(set_to_none=True)
        with _out_of_memory(options, images):
            loss.backward()
            if options.clip_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
            self.optimizer.step()
        return value

    def _loss(self, images: Tensor, targets: Tensor, teacher: Teacher | None) -> Tensor:
        logits = self.parallel(images).float()
        mixed = targets.ndim == 2  # then timm has smoothed them
        loss = self.job.dataset.task.loss(logits, targets, 0.0 if mixed else self.job.options.label_smoothing)
        if teacher is None or self.job.teacher is None:
            return loss
        with torch.no_grad():
            taught = teacher(images)
        return distilled(loss, logits, taught, self.job.teacher)

    def _top1(self, model: nn.Module) -> float:
        found = self.job.validation
        return top1(predict(_FromCpu(model, self.job.device), found.images, self.job.dataset), found.labels)

    def _note(self, epoch: int) -> str:
        last = f", validation {self._best(self.rows[-1]):.2%}" if self.rows else ""
        return f"epoch {epoch} of {self.job.options.epochs}{last}"

    @staticmethod
    def _best(row: dict[str, Any]) -> float:
        return float(max(row["top1_validation"], row["top1_validation_ema"] or 0.0))

    def _save(self) -> None:
        average = {} if self.average is None else self.average.module.state_dict()
        Checkpoint(self.job.identity, self.epoch, self.rows, self.model.state_dict(), average,
                   self.optimizer.state_dict()).save(self.job.checkpoint)
        write_atomic(self.job.log, table_csv(self.rows))

    def result(self) -> Trained:
        """The better of the two on validation images, the average where both are as good."""
        if not self.job.ranks.first:
            return Trained(self.model.cpu().eval(), [], False)
        last = self.rows[-1]
        averaged = self.average is not None and last["top1_validation_ema"] >= last["top1_validation"]
        model = self.average.module if averaged else self.model
        return Trained(model.cpu().eval(), self.rows, averaged)


class _FromCpu(nn.Module):
    """A network on `device` for images and answers in main memory."""

    def __init__(self, network: nn.Module, device: str) -> None:
        super().__init__()
        self.network, self._device = network, device
        self.training = network.training

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.to(self._device)).float().cpu()
        return logits


@contextlib.contextmanager
def _out_of_memory(options: TrainingOptions, images: Tensor) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search("(not enough|out of|can't allocate) memory", str(error)):
            raise TrainingError(f"out of memory while training at batch {options.batch_size}, {images.shape[-1]} px. "
                                "Set a smaller batch_size; where an epoch is done already, with another "
                                "out=FOLDER.") from error
        raise


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """timm's, without weight decay of norms and biases."""
    from timm.optim import create_optimizer_v2

    found: torch.optim.Optimizer = create_optimizer_v2(model, options.optimizer, lr=options.lr,
                                                       weight_decay=options.weight_decay)
    return found


def make_schedule(optimizer: torch.optim.Optimizer, options: TrainingOptions, steps: int) -> Any:
    """timm's, with a step for its unit; `step_update(step)` sets what the step alone decides."""
    from timm.scheduler import create_scheduler_v2

    warmup = min(round(options.warmup * steps), steps - 1)
    found, _ = create_scheduler_v2(
        optimizer, options.schedule, num_epochs=steps - warmup, warmup_epochs=warmup, warmup_prefix=True,
        warmup_lr=options.lr / 25, min_lr=options.lr_end, decay_rate=options.decay_rate,
        decay_epochs=max(1, round(options.decay_every * steps)), step_on_epochs=False, updates_per_epoch=1)
    return found


def make_average(model: nn.Module, options: TrainingOptions) -> Any:
    """timm's moving average with a warm-up, or None."""
    if not options.ema_decay:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=options.ema_decay, use_warmup=True, warmup_power=0.75)
