"""Training by a Recipe, and asking a network: seeded, so that the same seed gives the same weights on one machine."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hwnas.data.dataset import Dataset, Images, Progress, Split
from hwnas.data.task import top1 as top1
from hwnas.errors import TrainingError
from hwnas.system.memory import kept_memory
from hwnas.target.host import usable_cores
from hwnas.training.augment import augment
from hwnas.training.recipe import Recipe

OnEpoch = Callable[[int, nn.Module], "bool | None"]


@contextlib.contextmanager
def seeded(seed: int, threads: int = 0) -> Iterator[None]:
    """torch's global generator seeded and its threads set inside, both as before afterwards; what is freed is kept."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), kept_memory():
        torch.manual_seed(seed)
        torch.set_num_threads(threads or max(1, len(usable_cores())))
        try:
            yield
        finally:
            torch.set_num_threads(before)


def train(model: nn.Module, split: Split, *, recipe: Recipe, dataset: Dataset, seed: int,
          on_epoch: OnEpoch | None = None, progress: Progress | None = None, epoch_images: int = 0) -> nn.Module:
    """Train `model` in place on `split` (of `dataset`, whose normalisation and `flip` count); its average if asked.

    An epoch is `epoch_images` of the split (0: all), each epoch going on where the last one ended.

    `on_epoch(epoch, network)` is called after each epoch (from 1) with the network as it would be returned then;
    returning True ends the training. `progress(step, steps)` counts steps. The result is in eval mode. TrainingError
    when the loss is not finite or memory runs out.
    """
    doing = f"training at batch {recipe.batch_size}, {dataset.image_size} px"
    with seeded(seed, recipe.threads), no_memory(doing, "Set a smaller batch_size."):
        batches = _Batches(split, recipe, dataset, seed, epoch_images)
        return _train(model, batches, recipe, on_epoch, progress).eval()


@contextlib.contextmanager
def no_memory(doing: str, advice: str) -> Iterator[None]:
    """TrainingError, a failed candidate, when memory runs out inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search("(not enough|out of|can't allocate) memory", str(error)):
            raise TrainingError(f"out of memory while {doing}. {advice}") from error
        raise


def _train(model: nn.Module, batches: _Batches, recipe: Recipe, on_epoch: OnEpoch | None, progress: Progress | None
           ) -> nn.Module:
    steps = batches.steps
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer, scheduler = _optimizer(model, recipe, steps)
    average = _average(model, recipe)
    current = model if average is None else average.module
    model.train()
    for step, (epoch, last, images, labels) in enumerate(batches, 1):
        loss = batches.task.loss(model(images), labels, recipe.label_smoothing)
        if not math.isfinite(value := float(loss.detach())):
            rate = float(optimizer.param_groups[0]["lr"])
            raise TrainingError(f"loss is {value} in epoch {epoch}, step {step} of {steps}, at learning rate "
                                f"{rate:.3g}, recipe {recipe.name}. Set a smaller lr.")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if recipe.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        scheduler.step_update(step)
        if average is not None:
            average.update(model, step)
        if progress is not None:
            progress(step, steps)
        if last and on_epoch is not None:
            if on_epoch(epoch, current):
                break
            model.train()
    return current


class _Batches:
    """Iterates over (epoch from 1, whether it ends here, images, labels) of a training: a new order each pass over the
    split, what makes no batch left out."""

    def __init__(self, split: Split, recipe: Recipe, dataset: Dataset, seed: int, epoch_images: int = 0) -> None:
        self._split, self._recipe, self._dataset, self._seed = split, recipe, dataset, seed
        self.task = dataset.task
        n_images = min(epoch_images or len(split), len(split))
        self.batch, self.steps = recipe.batch_for(n_images), recipe.steps_for(n_images)
        self._per_epoch, self._per_pass = (max(1, n // self.batch) for n in (n_images, len(split)))

    def __iter__(self) -> Iterator[tuple[int, bool, torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        layout = torch.channels_last if self._recipe.channels_last else torch.contiguous_format
        for step in range(self.steps):
            position = step % self._per_pass
            if position == 0:
                order = torch.randperm(len(self._split), generator=generator).numpy()
            rows = np.sort(order[position * self.batch:(position + 1) * self.batch])
            images = augment(torch.from_numpy(self._dataset.normalise(self._split.images[rows])), self._recipe,
                             self._dataset.flip, generator)
            last = (step + 1) % self._per_epoch == 0 or step + 1 == self.steps
            yield (step // self._per_epoch + 1, last, images.contiguous(memory_format=layout),
                   torch.from_numpy(self._split.labels[rows]))


def _optimizer(model: nn.Module, recipe: Recipe, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """timm's optimiser (no decay on norms and biases) and its cosine; OneCycle is torch's behind the same call."""
    from hwnas.system.torchvision_ops import declare_missing

    declare_missing()
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    optimizer = create_optimizer_v2(model, recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay)
    if recipe.schedule == "cosine":
        warmup = round(recipe.warmup * steps)
        return optimizer, CosineLRScheduler(optimizer, max(2, steps - warmup), warmup_t=warmup, t_in_epochs=False,
                                            warmup_lr_init=recipe.lr / 25, warmup_prefix=True)
    return optimizer, _OneCycle(optimizer, recipe, steps)


class _OneCycle:
    """torch's OneCycleLR with timm's `step_update`; the last step keeps the last rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int) -> None:
        self._steps = max(steps + 1, 5)  # below, torch divides by the length of an empty phase
        self._inner = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, recipe.lr, total_steps=self._steps, pct_start=max(recipe.warmup, 2 / self._steps),
            final_div_factor=1e3)

    def step_update(self, step: int) -> None:
        if step < self._steps:
            self._inner.step()


def _average(model: nn.Module, recipe: Recipe) -> Any:
    """timm's moving average with a warm-up that suits few steps, or None."""
    if not recipe.ema_decay:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=recipe.ema_decay, use_warmup=True, warmup_power=0.75)


@torch.inference_mode()
def predict(model: nn.Module, images: Images | NDArray[np.float32], dataset: Dataset | None = None,
            batch_size: int = 256) -> NDArray[np.float32]:
    """Logits float32 [n, classes] in eval mode; uint8 images are normalised by `dataset` first, batch by batch."""
    was_training = model.training
    model.eval()
    found = []
    for start in range(0, len(images), batch_size):
        part = images[start:start + batch_size]
        if part.dtype == np.uint8:
            if dataset is None:
                raise TypeError("predict: uint8 images need the data set that normalises them")
            part = dataset.normalise(np.asarray(part, np.uint8))
        batch = torch.from_numpy(np.ascontiguousarray(part, np.float32)).contiguous(memory_format=torch.channels_last)
        found.append(model(batch).float().numpy())
    model.train(was_training)
    return np.concatenate(found)
