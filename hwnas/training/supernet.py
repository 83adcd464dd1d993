"""Supernet: the training of weights that a whole space shares, stage by stage; and networks that inherit them.

Bank: the shared weights, and how an architecture's network is a view of them. It is the network that
`networks.build.build` makes, with the leading slice of a shared tensor for each parameter. Elastic depth (the first
blocks of a stage), width and expansion (the first channels), and squeeze-and-excite share weights, as in Once-for-All
(Cai et al., ICLR 2020) and BigNAS (Yu et al., ECCV 2020). Kinds of block and kernel sizes are branches with weights of
their own. Batch norm shares scale and shift; its statistics belong to one architecture and are measured for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hwnas.errors import DataError, SpaceError
from hwnas.networks.build import build
from hwnas.networks.network import check_tensors
from hwnas.system.documents import load_json
from hwnas.training.batches import Batches, reseed
from hwnas.training.line import set_norms
from hwnas.training.loop import CHECKPOINT, CHECKPOINT_KEY, Checkpoint, Training, seeded
from hwnas.training.place import CPU
from hwnas.training.recipe import Recipe, SupernetOptions

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.data.dataset import Dataset, Images, Split
    from hwnas.space.architecture import Architecture
    from hwnas.space.blocks.block import BlockSpec
    from hwnas.space.reading import Value
    from hwnas.space.search_space import SearchSpace


ELASTIC = ("channels", "repeats", "kernel", "se", "width", "head")
_MOST_BYTES = 8 << 30


class Bank(nn.Module):
    """The shared tensors by key; `bank_of` makes those of a space."""

    def __init__(self, shared: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.shared = nn.ParameterDict({
            key: nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))
            for key, tensor in shared.items()})

    def forward(self, images: Tensor, architecture: Architecture) -> Tensor:
        """Logits [n, classes] of `architecture` for `images` [n, c, h, w] with the statistics of this batch."""
        skeleton = build(architecture)
        buffers = {name: buffer.to(images.device) for name, buffer in skeleton.named_buffers()}
        logits: Tensor = functional_call(skeleton, {**buffers, **dict(self.slices(skeleton, architecture))}, (images,))
        return logits

    def slices(self, network: nn.Module, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
        """Name and shared view of each parameter of `network`, which `build` made of `architecture`."""
        blocks = _blocks(architecture)
        for name, own in network.named_parameters():
            key = _key(name, own.shape, blocks)
            shared = self.shared.get(key)
            if shared is None or any(n > most for n, most in zip(own.shape, shared.shape, strict=True)):
                raise SpaceError(f"architecture {architecture.id} is of another space than the supernet: it has no "
                                 f"weights for {name}.")
            yield name, shared[tuple(slice(n) for n in own.shape)]


def bank_of(space: SearchSpace) -> Bank:
    """Initial weights for `space`, drawn from torch's global generator.

    SpaceError when two choices of the space cannot share a tensor, or when the tensors would take over 8 GiB.
    """
    widest: dict[str, tuple[Tensor, Architecture]] = {}
    for architecture in covering(space):
        for name, tensor in build(architecture).named_parameters():
            key = key_of(name, tensor.shape, architecture)
            if key not in widest or _fits(widest[key], (tensor, architecture), key, space):
                widest[key] = tensor, architecture
    n_bytes = sum(4 * tensor.numel() for tensor, _ in widest.values())
    if n_bytes > _MOST_BYTES:
        raise SpaceError(f"{space.source}: the shared weights would take {n_bytes / 2**30:.0f} GiB. Give a space of "
                         "smaller channels or repeats, or accuracy=proxy.")
    return Bank({key: tensor for key, (tensor, _) in widest.items()})


def key_of(name: str, shape: torch.Size, architecture: Architecture) -> str:
    """Which shared tensor a network's parameter is a slice of."""
    return _key(name, shape, _blocks(architecture))


def _blocks(architecture: Architecture) -> list[tuple[BlockSpec, ...]]:
    return list(architecture.staged_blocks()[1:-1])


def _key(name: str, shape: torch.Size, blocks: list[tuple[BlockSpec, ...]]) -> str:
    """`blocks.I.J.PARAMETER` gains the block's kind and, where its kernel has an extent, the kernel; no dots, which
    torch does not allow in the name of a parameter."""
    kernel = f"/k{shape[-1]}" if len(shape) == 4 and shape[-1] > 1 else ""
    if name.startswith("blocks."):
        _, stage, block, rest = name.split(".", 3)
        name = f"{stage}/{block}/{blocks[int(stage)][int(block)].kind}/{rest}"
    return name.replace(".", "/") + kernel


def _fits(left: tuple[Tensor, Architecture], right: tuple[Tensor, Architecture], key: str, space: SearchSpace) -> bool:
    """Whether `right` holds `left`; SpaceError when neither holds the other."""
    mine, its = left[0].shape, right[0].shape
    if len(mine) == len(its) and all(a <= b for a, b in zip(mine, its, strict=True)):
        return True
    if len(mine) == len(its) and all(a >= b for a, b in zip(mine, its, strict=True)):
        return False
    raise SpaceError(f"{space.source}: cannot share weights: {key} has shape {list(mine)} in {left[1]} and {list(its)} "
                     f"in {right[1]}. Leave one of these choices out, or give accuracy=proxy.")


def covering(space: SearchSpace) -> Iterator[Architecture]:
    """The largest networks that together have every branch of every stage."""
    yield from map(space.decode, covering_settings(space))


def covering_settings(space: SearchSpace) -> Iterator[dict[str, Value]]:
    """The same networks as settings of the space's parameters."""
    stages = space.definition.stages
    branches = [[(op.text, kernel) for op in stage.ops
                 for kernel in (stage.kernels if op.takes_kernel(max(stage.repeats)) else (0,))]
                for stage in stages]
    for index in range(max(map(len, branches))):
        setting: dict[str, Any] = {}
        for stage, options in enumerate(branches):
            setting[f"stage{stage}.op"], kernel = options[index % len(options)]
            if kernel:
                setting[f"stage{stage}.kernel"] = kernel
        yield extreme(space, {}, max, setting)


def extreme(space: SearchSpace, setting: Mapping[str, Value], pick: Any, fixed: Mapping[str, Value] | None = None
            ) -> dict[str, Value]:
    """`setting` with every elastic parameter at its largest (`pick=max`) or smallest (`min`) value.

    Parameters in `fixed` take its values. Those that are neither elastic nor in `setting` take their first choice.
    """
    params = {}
    for parameter in space.parameters:
        elastic = parameter.name.split(".")[-1] in ELASTIC
        value = pick(parameter.choices) if elastic else setting.get(parameter.name, parameter.choices[0])
        params[parameter.name] = (fixed or {}).get(parameter.name, value)
    return params


def megabytes(bank: nn.Module) -> float:
    """Size of the shared weights in fp32."""
    return math.fsum(4 * tensor.numel() for tensor in bank.parameters()) / 1e6


@dataclass(frozen=True)
class SupernetStep:
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

    def step(self, done: float, rng: np.random.Generator) -> SupernetStep:
        """The networks of a step when a share `done` of all steps is over."""
        if done < self.warmup:
            return self.warming(rng)
        return self.mixed(self.opened(done), rng) if rng.random() >= self.sandwich else self.sandwiched(done, rng)

    def opened(self, done: float) -> int:
        """The number of stages in which random networks have operations of their own."""
        n = len(self.space.definition.stages)
        share = (done - self.warmup) / self.opening if self.opening else 1.0
        return min(n, 1 + int(n * share))

    def warming(self, rng: np.random.Generator) -> SupernetStep:
        """The largest network, then a random network of its operations, so that its first channels matter most."""
        return SupernetStep([self.space.decode(self.largest), self._random(0, rng)], distil=True)

    def mixed(self, n_open: int, rng: np.random.Generator) -> SupernetStep:
        """Random networks that keep the largest's operations in all but `n_open` stages."""
        return SupernetStep([self._random(n_open, rng) for _ in range(self.n_random)])

    def sandwiched(self, done: float, rng: np.random.Generator) -> SupernetStep:
        """The largest network, the smallest of its operations, and random ones. All learn the largest's answers."""
        smallest = self.space.decode(extreme(self.space, self.largest, min))
        return SupernetStep([self.space.decode(self.largest), smallest, *self.mixed(self.opened(done), rng).networks],
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
    recipe: Recipe
    identity: Mapping[str, Any]
    path: Path


def train(job: SupernetJob, console: Console) -> Checkpoint:
    """The finished checkpoint: trained from the last whole epoch on.

    StudyError for a checkpoint that is torn or of another training, TrainingError when the loss is not finite or memory
    runs out.
    """
    with seeded(job.options.seed, job.options.threads):
        training = SupernetTraining(job)
        training.resume(job.path, job.identity, "Give the same options, or leave supernet.path out to train another.")
        if training.epoch < training.batches.epochs:
            with training.in_memory():
                console.say(training.forecast())
            with console.step("train supernet") as report:
                training.run(training.report(report))
        return training.checkpoint(job.identity)


class SupernetTraining(Training):
    """The shared weights in training; kept after each epoch."""

    name = "training the supernet"
    advice = "Set a smaller supernet.lr or supernet.clip_norm."
    less = "Set a smaller supernet.batch_size or supernet.image_size."

    def __init__(self, job: SupernetJob) -> None:
        self.job = job
        batches = Batches(job.train, job.dataset, job.recipe, job.options.seed)
        reseed(job.options.seed, _INITIAL)
        self.bank = bank_of(job.space).to(job.recipe.device)
        super().__init__(self.bank, batches, job.recipe)
        options = job.options
        self.curriculum = Curriculum(job.space, options.n_random, options.sandwich, options.warmup_largest,
                                     options.opening)

    def forecast(self) -> str:
        """Memory and time of what is left, estimated from a few steps that are taken and thrown away."""
        images, labels = next(iter(self.batches.epoch(self.epoch + 1)))
        rng, share = self._rng(0, 0), self.job.options.sandwich
        kinds = self.curriculum.sandwiched(1.0, rng), self.curriculum.mixed(self.curriculum.opened(1.0), rng)
        both, alone = (self._time_step(images, labels, step) for step in kinds)
        seconds = share * both + (1 - share) * alone
        self.optimizer.zero_grad(set_to_none=True)
        epochs, steps = self.batches.epochs, self.batches.per_epoch
        left = (epochs - self.epoch) * steps * seconds / 60
        size, at = megabytes(self.bank), f" from epoch {self.epoch + 1} on" if self.epoch else ""
        return (f"supernet of {self.job.space.name}: {size:.0f} MB of shared weights, {_STATES * size:.0f} MB in "
                f"training besides the images' maps; {epochs} epochs of {steps} steps of "
                f"{self.batches.batch} images, about {max(left, 1):.0f} min{at} (estimated from a few steps)")

    def _time_step(self, images: Tensor, labels: Tensor, step: SupernetStep) -> float:
        """Seconds of the faster of two tries."""
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            self.gradients(images, labels, step)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def learn(self, images: Tensor, targets: Tensor, step: int) -> float:
        rng = self._rng(self.epoch + 1, step % self.batches.per_epoch)
        return self.gradients(images, targets, self.curriculum.step(step / self.batches.steps, rng))

    def gradients(self, images: Tensor, labels: Tensor, step: SupernetStep) -> float:
        """Add the gradients of every network of the step.

        Returns the first network's loss, or the first loss that is not finite.
        """
        taught: Tensor | None = None
        losses = []
        for architecture in step.networks:
            with self.in_precision():
                logits = self.bank(images, architecture).float()
                loss = self.of_logits(logits, labels if taught is None else taught)
            (loss / len(step.networks)).backward()
            losses.append(float(loss.detach()))
            if step.distil and taught is None:
                taught = logits.detach().softmax(1)
        return next((loss for loss in losses if not math.isfinite(loss)), losses[0])

    def _rng(self, epoch: int, step: int) -> np.random.Generator:
        return np.random.default_rng([self.job.options.seed, _NETWORKS, epoch, step])

    def keep(self) -> None:
        self.checkpoint(self.job.identity).save(self.job.path)


_BATCH = 128  # images of one pass to measure batch norm


def inherit(bank: Bank, architecture: Architecture, images: Images, dataset: Dataset, device: str = CPU) -> nn.Module:
    """The network on `device` in eval mode with copies of the shared weights and the batch norm statistics of `images`.

    Sub-networks see other statistics than the supernet did; without their own they score near chance (Yu and Huang,
    2019).
    """
    network = build(architecture)
    copy_weights(bank, architecture, network)
    network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    set_norms(network, images, dataset)
    return network.eval()


@torch.no_grad()
def copy_weights(bank: Bank, architecture: Architecture, network: nn.Module) -> None:
    """Put the shared weights into `network`, which `build` made of `architecture`; SpaceError where it has others."""
    own = dict(network.named_parameters())
    for name, shared in bank.slices(network, architecture):
        own[name].copy_(shared)


def bank_in(checkpoint: Checkpoint) -> Bank:
    """The weights of a trained supernet, on the CPU: the average where there is one."""
    tensors = checkpoint.average or checkpoint.model
    return Bank({name.removeprefix("shared."): tensor.cpu() for name, tensor in tensors.items()}).requires_grad_(False)


def load_inherited(network: nn.Module, architecture: Architecture, path: Path) -> bool:
    """Put the weights of the supernet at `path` into `network`; False where that file is no supernet.

    StudyError for a torn one, DataError for one of other classes or channels, SpaceError for one of another space.
    """
    if not is_supernet(path):
        return False
    checkpoint = Checkpoint.load(path)
    assert checkpoint is not None
    with CHECKPOINT.reading(path):
        for what, its, wanted in (("classes", len(checkpoint.identity["classes"]), architecture.classes),
                                  ("channels", checkpoint.identity["channels"], architecture.channels)):
            if its != wanted:
                raise DataError(f"weights {path}: the supernet knows {its} {what}, the architecture has {wanted}. Give "
                                "one that was trained on this data.")
        copy_weights(bank_in(checkpoint), architecture, network)
    return True


def is_supernet(path: Path) -> bool:
    """Whether the file's header is a supernet's; False for what is no safetensors file."""
    return bool(_identity(path))


def note_other_split(path: Path, dataset: Dataset, console: Console) -> None:
    """Say so where the supernet at `path` learnt from another split of `dataset`: it may have seen the test images."""
    its = _identity(path)
    same = (its.get("dataset"), its.get("image_size")) == (dataset.name, dataset.image_size)
    if same and its.get("dataset.fingerprint") not in (dataset.fingerprint, dataset.former):
        console.say(f"note: the supernet {path} was trained on other images or another split of {dataset.name} "
                    f"({its.get('dataset.fingerprint')}, here {dataset.fingerprint}): test images may be among those "
                    "that it learnt from. Give the seed of its search as split_seed.")


def _identity(path: Path) -> dict[str, Any]:
    """What the supernet at `path` was trained on; empty for another file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(check_tensors(path), framework="pt") as file:
            about = load_json((file.metadata() or {}).get(CHECKPOINT_KEY, "null"))
    except (OSError, SafetensorError, ValueError):
        return {}
    identity = about.get("identity") if isinstance(about, dict) else None
    return identity if isinstance(identity, dict) and "space" in identity else {}
