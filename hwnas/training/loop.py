"""The training loop, seeded: the same seed gives the same weights on one machine. Answers of a network; checkpoints.

A checkpoint holds weights, their average and the optimiser's state in one safetensors file, so that it is whole or
absent; nothing is pickled. The header's only key holds JSON: format, identity (all that decides the training), number
of steps and rows of the log. It also holds the optimiser's state, in which a tensor's name replaces the tensor.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.dataset import Dataset, Images, Progress, Split
from hwnas.errors import StudyError, TrainingError, UserError
from hwnas.lazy import LazyModule, nn, safetensors, timm, torch
from hwnas.networks.checkpoint import check_tensors
from hwnas.system.cores import usable_cores
from hwnas.system.documents import WRONG, Document, check_identity, load_json
from hwnas.system.libraries import kept_memory
from hwnas.system.paths import write_atomic
from hwnas.tasks.task import Grades, load_task
from hwnas.training.batches import Batches, fed
from hwnas.training.place import CPU, PLACES, device_of, repeatable, resolved_precision
from hwnas.training.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    import hwnas.training.mixed_precision as mixed_precision
else:
    mixed_precision = LazyModule("hwnas.training.mixed_precision")

_FUSED = ("adam", "adamw")  # torch's optimisers that can update all tensors of a kind in one call
_BATCH, _GRADED = 256, 1024  # images in a forward pass; images whose outputs are in memory at a time
_LANES = 16  # channels of one of oneDNN's blocks, at most
SAVE_S = 30.0  # seconds between two saves of a training's state; a kill costs no more than these


@contextlib.contextmanager
def seeded(seed: int, threads: int = 0) -> Iterator[None]:
    """Seed every global generator (torch, numpy, Python) inside the block, and let torch use `threads` (0: all cores).

    Freed memory is kept for reuse inside, and a GPU computes repeatably. Afterwards everything is as before.
    """
    threads_before, states = torch.get_num_threads(), (random.getstate(), np.random.get_state())
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), kept_memory(), repeatable():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.set_num_threads(threads or max(1, len(usable_cores())))
        try:
            yield
        finally:
            torch.set_num_threads(threads_before)
            random.setstate(states[0])
            np.random.set_state(states[1])


class Training:
    """A network in training: moving average, optimiser, schedule, and the number of finished steps, `step`.

    Subclasses may override `after_step` and `save`, and fill `rows` if they write a log.
    """

    name = "training"
    advice = "Set a smaller lr."  # if the loss is not finite
    less = "Set a smaller batch_size."  # if memory runs out

    def __init__(self, model: nn.Module, batches: Batches, recipe: Recipe) -> None:
        self.model, self.batches, self.recipe = model, batches, recipe
        batches.layout = layout_of(model, recipe)
        self.precision = resolved_precision(recipe.precision, torch.device(batches.device).type)
        # With timm's warm-up the average is useful after few steps already.
        self.average: Any = timm.utils.ModelEmaV3(model, decay=recipe.ema_decay, use_warmup=True, warmup_power=0.75
                                                  ) if recipe.ema_decay else None
        self.optimizer = make_optimizer(model, recipe)
        self.schedule = make_schedule(self.optimizer, recipe, batches.steps)
        self.first, self.steps = 0, batches.steps  # the number of the first batch, and the number of steps
        self.step, self.rows, self._saved = 0, list[dict[str, Any]](), time.monotonic()

    def in_precision(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which losses are computed: mixed precision if `precision` is bf16."""
        kind = torch.device(self.batches.device).type
        return mixed_precision.mixed_precision(kind) if self.precision == "bf16" else contextlib.nullcontext()

    def after_step(self, loss: float, rate: float) -> None:
        """Save the state, at most once in SAVE_S. Called after each step with its loss and learning rate."""
        if time.monotonic() - self._saved > SAVE_S and self.step < self.steps:
            self.save()
            self._saved = time.monotonic()

    def save(self) -> None:
        """Write the state for a resumption after a kill. Here nothing is written: such a training starts again."""

    @property
    def current(self) -> nn.Module:
        """The network as it would be returned now: the average if there is one."""
        return self.model if self.average is None else self.average.module

    def better(self, part: Split) -> nn.Module:
        """Return the average or the last weights, whichever score better on `part`; the average if both are equal."""
        if self.average is None:
            return self.model
        scores = [grade(model, part, self.batches.dataset).score for model in (self.current, self.model)]
        return self.current if scores[0] >= scores[1] else self.model

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """Raise TrainingError, the failure of a candidate, if memory runs out inside the block."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or re.search("(not enough|out of|can't allocate) memory", str(error)):
                raise TrainingError(f"out of memory while {self.name} at batch {self.batches.batch}, "
                                    f"{self.batches.dataset.image_size} px. {self.less}") from error
            raise

    def run(self, progress: Progress | None = None) -> None:
        """Train all steps that are left. `progress(step, steps)` is called after each, with the number of steps so far.

        Raises TrainingError if the loss is not finite or memory runs out.
        """
        with self.in_memory():
            batches = self.batches.from_step(self.first + self.step)
            self.model.train()
            while self.step < self.steps:
                loss, rate = self.update(*next(batches), self.first + self.step)
                self.step += 1
                if progress is not None:
                    progress(self.step, self.steps)
                self.after_step(loss, rate)

    def set_rate(self, step: int) -> None:
        """Set the learning rate of each group of parameters at a step."""
        self.schedule.step_update(step)

    def update(self, images: Tensor, targets: Tensor, step: int) -> tuple[float, float]:
        """Update the weights, and their average, by one batch; `step` is the number of the batch (from 0).

        Returns:
            The loss, and the highest learning rate, which is the classifier's.

        Raises:
            TrainingError: The loss is not finite; no weight was changed.
        """
        self.set_rate(step)
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        self.optimizer.zero_grad(set_to_none=True)
        with self.in_precision():
            loss = self.batches.task.loss(self.model(images).float(), targets, self.recipe.label_smoothing)
        loss.backward()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrainingError(f"{self.name}: loss is {value} after {step} steps, learning rate {rate:.3g}. "
                                f"{self.advice}")
        if self.recipe.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.model, step + 1)
        return value, rate

    def checkpoint(self, identity: Mapping[str, Any]) -> Checkpoint:
        """Return all that the training needs to go on; `identity` names all that decides it."""
        average = {} if self.average is None else self.average.module.state_dict()
        return Checkpoint(identity, self.step, self.rows, self.model.state_dict(), average,
                          self.optimizer.state_dict())

    def resume(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Continue from the checkpoint at `path`, if there is one. Raises StudyError for that of another training."""
        checkpoint = Checkpoint.load(path)
        if checkpoint is None:
            return
        check_identity(checkpoint.identity, identity, path)
        try:
            self.restore(checkpoint)
        except (*WRONG, RuntimeError) as error:
            raise StudyError(f"{path} does not hold the state of this training ({type(error).__name__}). Put a whole "
                             "copy there, or remove it to begin again.") from error
        self.step, self.rows = checkpoint.step, checkpoint.rows

    def restore(self, state: Checkpoint) -> None:
        """Load a state into this training, without its `step` and `rows`."""
        self.model.load_state_dict(state.model)
        if self.average is not None:
            self.average.module.load_state_dict(state.average)
        self.optimizer.load_state_dict(dict(state.optimizer))
        # Give the moments the memory layout of their parameters, as in training: rounding differs in another one.
        for parameter, moments in self.optimizer.state.items():
            for name, value in moments.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class KeptTraining(Training):
    """A training that continues after a kill. The file `path` holds its state and `name`, which names all that
    decides it."""

    def __init__(self, model: nn.Module, batches: Batches, recipe: Recipe, path: Path, name: str) -> None:
        super().__init__(model, batches, recipe)
        self._path, self._identity = path, {"training": name}
        state = None
        with contextlib.suppress(StudyError):  # a torn file: the training starts again
            state = Checkpoint.load(path)
        if state is not None and state.identity == self._identity:
            stored, own = ({name: tensor.shape for name, tensor in tensors.items()}
                           for tensors in (state.model, self.model.state_dict()))
            if stored == own:  # not so if another version of timm or hwnas built the network
                self.resume(path, self._identity)

    def save(self) -> None:
        """Write the state. A failure is ignored: it matters only if the training is killed later."""
        with contextlib.suppress(OSError, UserError):
            self.checkpoint(self._identity).save(self._path)


def train(model: nn.Module, split: Split, *, recipe: Recipe, dataset: Dataset, seed: int,
          progress: Progress | None = None, validation: Split | None = None, kept: tuple[Path, str] | None = None
          ) -> nn.Module:
    """Train `model` in place on `split`; return it, or its average if the recipe has one, on the CPU in eval mode.

    `dataset` gives the normalisation and `flip`. `progress(step, steps)` counts steps. With `validation` images, the
    last weights are returned if they score better than the average, as they do after few steps. `kept` is a file for
    the state, and a name of all that decides the training, which then continues after a kill.
    Raises TrainingError if the loss is not finite or memory runs out.
    """
    with seeded(seed, recipe.threads):
        training = short_training(model, split, recipe, dataset, seed, kept)
        training.run(progress)
        with training.in_memory():
            return (training.current if validation is None else training.better(validation)).eval().to(CPU)


def short_training(model: nn.Module, split: Split, recipe: Recipe, dataset: Dataset, seed: int,
                   kept: tuple[Path, str] | None = None) -> Training:
    """Return a training that starts again after an interruption, unless `kept` is given, see `train`."""
    parts = lay_out(model, recipe), Batches(split, dataset, recipe, seed), recipe
    training = Training(*parts) if kept is None else KeptTraining(*parts, *kept)
    training.name = f"training by recipe {recipe.name}"
    return training


def lay_out(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Move `model` to the device of `recipe`, in the memory layout for it."""
    model = model.to(recipe.device)
    return model.to(memory_format=layout_of(model, recipe))  # type: ignore[call-overload,no-any-return]


def layout_of(model: nn.Module, recipe: Recipe) -> torch.memory_format:
    """Return the memory layout that `recipe` asks for, or the plain one if gradients are wrong with channels last.

    This is so on a CPU for a strided 1x1 convolution that reads a few channels (RepVGG's stem): oneDNN writes beyond
    its workspace (its issue 6035), and then answers wrongly or crashes.
    """
    overruns = recipe.device == CPU and any(
        isinstance(module, torch.nn.Conv2d) and module.kernel_size == (1, 1) and max(module.stride) > 1
        and 1 < module.in_channels < _LANES for module in model.modules())
    return torch.channels_last if recipe.channels_last and not overruns else torch.contiguous_format


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return timm's optimiser, without weight decay of norms and biases. With `layer_decay`, each group of parameters
    has an `lr_scale`, by which timm's schedules multiply every rate that they set."""
    groups = model if recipe.layer_decay == 1 else timm.optim.param_groups_layer_decay(
        model, recipe.weight_decay, layer_decay=recipe.layer_decay)
    fused: dict[str, Any] = {"fused": True} if recipe.optimizer in _FUSED and recipe.device in PLACES else {}
    optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(groups, recipe.optimizer, lr=recipe.lr,
                                                                      weight_decay=recipe.weight_decay, **fused)
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int) -> Any:
    """Return timm's schedule, counted in steps. `step_update(step)` sets the rates, which depend on the step alone."""
    # timm counts epochs: here one epoch is one step.
    warmup = min(round(recipe.warmup * steps), steps - 1)
    schedule, _ = timm.scheduler.create_scheduler_v2(
        optimizer, recipe.schedule, num_epochs=max(2, steps - warmup), warmup_epochs=warmup, warmup_prefix=True,
        warmup_lr=recipe.lr / 25, min_lr=recipe.lr_end, step_on_epochs=False, updates_per_epoch=1)
    return schedule


def grade(model: nn.Module, part: Split, dataset: Dataset) -> Grades:
    """Grade a network's answers to the images of `part`, which `dataset` normalises."""
    task, answers = load_task(dataset.task), []
    for start in range(0, len(part), _GRADED):
        rows = slice(start, start + _GRADED)
        answers.append(task.answers(predict(model, part.images[rows], dataset)))
    return task.grade(np.concatenate(answers), part.targets)


def predict(model: nn.Module, images: Images, dataset: Dataset) -> NDArray[np.float32]:
    """Return outputs float32 [n, ...] for images that `dataset` normalises, computed on the model's device in eval
    mode."""
    was_training, device = model.training, str(device_of(model))
    model.eval()
    parts = []
    with torch.inference_mode():
        for start in range(0, len(images), _BATCH):
            batch = fed(np.asarray(images[start:start + _BATCH]), dataset, device)
            parts.append(model(batch.contiguous(memory_format=torch.channels_last)).float().cpu().numpy())
    model.train(was_training)
    return np.concatenate(parts)


CHECKPOINT = Document("hwnas-checkpoint", 1, "a checkpoint", "Choose another out=FOLDER.", shape={
    "identity": dict, "step": int, "rows": [dict], "optimizer": dict})
CHECKPOINT_KEY = "hwnas_checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after `step` steps."""

    identity: Mapping[str, Any]
    step: int
    rows: list[dict[str, Any]]
    model: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write it whole. Raises UserError if that fails; the old file is then unchanged."""
        tensors: dict[str, Tensor] = {}
        for part, state in (("model", self.model), ("average", self.average)):
            tensors |= {f"{part}.{name}": plain(tensor) for name, tensor in state.items()}
        about = {**CHECKPOINT.header, "identity": dict(self.identity), "step": self.step, "rows": self.rows,
                 "optimizer": _pack(self.optimizer, "optimizer", tensors)}
        write_atomic(path, safetensors.torch.save(tensors, {CHECKPOINT_KEY: json.dumps(about)}))

    @classmethod
    def load(cls, path: Path) -> Checkpoint | None:
        """Return the checkpoint at `path`, None if there is no file. Raises StudyError if it is torn or foreign."""
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(check_tensors(path), framework="pt") as file:
                about = load_json((file.metadata() or {}).get(CHECKPOINT_KEY, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError, ValueError) as error:
            raise StudyError(f"{path} is torn or no checkpoint ({' '.join(str(error).split())[:120]}). Put a whole "
                             "copy there, or remove it to begin again.") from None
        about = CHECKPOINT.check(about, path)
        try:
            optimizer = _unpack(about["optimizer"], tensors)
            return cls(about["identity"], int(about["step"]), list(about["rows"]), _part(tensors, "model."),
                       _part(tensors, "average."), optimizer)
        except WRONG:
            raise StudyError(f"{path} is no whole checkpoint: tensors are missing. Put a whole copy there, or remove "
                             "it to begin again.") from None


def plain(tensor: Tensor) -> Tensor:
    """Return a copy in main memory, in plain layout, that shares no memory with `tensor`."""
    return tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format).clone()


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON, and put its tensors into `tensors`, by names that start with `name`."""
    if isinstance(value, torch.Tensor):
        tensors[name] = plain(value)
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}: cannot store a {type(value).__name__} without pickling it")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
