"""The rung below all epochs: what a network's untrained weights promise, told as a top-1.

NASWOT is the score (Mellor et al., Neural Architecture Search without Training, ICML 2021). A few networks of the
space, the anchors, are trained and scored once: they say what a score stands for. Alone it ranks worse than short
training (docs/decisions/lost-estimators.md).
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.accuracy.estimator import Estimate
from hwnas.data.contents import digest
from hwnas.data.dataset import Dataset, resize, subset
from hwnas.errors import CandidateError, ConfigError, DataError, TrainingError
from hwnas.lazy import LazyModule
from hwnas.networks.build import build
from hwnas.space.architecture import Architecture
from hwnas.stats import kendall_tau, log_odds
from hwnas.system.documents import Document
from hwnas.system.libraries import release_memory
from hwnas.system.paths import hold, home, write_atomic
from hwnas.training.loop import no_memory, seeded

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    import hwnas.networks.modules as modules
    from hwnas.cli.progress import Console
    from hwnas.space.search_space import SearchSpace
else:
    modules = LazyModule("hwnas.networks.modules")
    torch = LazyModule("torch")

LEAST_ANCHORS = 4
LEAST_IMAGES = 8  # with fewer, batch norm on maps of 1x1 has nothing to normalise
ANCHORS = Document("hwnas-anchors", 2, "trained anchors", "Delete it, and they are trained again.", DataError)
_DRAWN = 1024  # number of random networks from which the anchors are chosen
_IMAGES = 32
_EDGE = 1e-3  # a top-1 nearer than this to 0 or 1 is moved to this distance
_FARTHEST = 3.0  # a score farther than so many widths from the middle is moved to this distance
_NORMAL = math.sqrt(math.pi / 2)  # standard deviation of a normal variable, divided by its mean absolute deviation
_ALIKE = "naswot is nan for this network: all images look the same to it."


def naswot(network: nn.Module, images: Tensor) -> float:
    """log |det K| (Mellor et al. 2021, their `hook_logdet`).

    K[i, j] counts the units that images i and j both switch on, or both switch off. A unit is on when its input is
    above 0, also for smooth activations (swish, hard swish) and ReLU6. There is no score when K is singular, for
    example with the same image twice: rounding alone would decide the determinant.
    """
    if len(images) < LEAST_IMAGES:
        raise TrainingError(f"naswot: a batch of {len(images)} images tells nothing; it needs {LEAST_IMAGES}.")
    if len(images.flatten(1).unique(dim=0)) < len(images):  # rounding may give equal images different units
        raise TrainingError(_ALIKE)
    kernel = torch.zeros(len(images), len(images), dtype=torch.double)

    def watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        on = (inputs[0] > 0).flatten(1).float()
        both = on @ on.T
        alone = on.sum(1)
        kernel.add_((on.shape[1] - alone[:, None] - alone + 2 * both).double())

    network = copy.deepcopy(network).train()
    watched = [module for module in network.modules() if isinstance(module, modules.activation_layers())]
    if not watched:
        names = ", ".join(layer.__name__ for layer in modules.activation_layers())
        raise TrainingError(f"naswot: the network has no {names} to watch. It has no score.")
    for module in watched:
        module.register_forward_pre_hook(watch)
    with torch.no_grad():
        network(images)
    value = _log_determinant(kernel)
    if not math.isfinite(value):
        raise TrainingError(_ALIKE)
    return value


def _log_determinant(kernel: Tensor) -> float:
    """log |det K| of a positive semi-definite K in double precision; NaN when K is singular.

    K counts as singular when its least eigenvalue is no larger than the rounding error of its largest, as in numpy's
    `matrix_rank`. The determinant itself cannot decide this: its sign and size depend on the processor.
    """
    eigenvalues = torch.linalg.eigvalsh(kernel)
    if eigenvalues[0] <= len(kernel) * torch.finfo(kernel.dtype).eps * eigenvalues[-1]:
        return math.nan
    sign, value = torch.linalg.slogdet(kernel)
    return float(value) if sign > 0 else math.nan


class ScoredImages:
    """The `n` training images, without augmentation, that networks are scored on; `threads` of torch."""

    def __init__(self, dataset: Dataset, n: int, threads: int) -> None:
        self._dataset, self._threads = dataset, threads
        rows = subset(dataset.train.labels, n, 0)
        self._part = dataset.train.take(np.random.default_rng(0).permutation(rows)[:n])
        self._sized: dict[int, Tensor] = {}
        self.fingerprint = digest(dataset.fingerprint, n, 1, 0)

    def score(self, architecture: Architecture, seed: int) -> float:
        """NASWOT with the initial weights of `seed`, on images of the architecture's size; TrainingError."""
        size = architecture.image_size
        if size not in self._sized:
            self._sized[size] = torch.from_numpy(self._dataset.normalise(resize(self._part.images, size)))
        images = self._sized[size]
        with (seeded(seed, self._threads),
              no_memory(f"scoring {len(images)} images (naswot)", "Set a smaller image_size.")):
            value = naswot(build(architecture), images)
        release_memory()
        return value


@dataclass(frozen=True, slots=True)
class Anchor:
    """One network: its short training (top-1 as a fraction) and its score. If it failed, `failed` says why."""

    id: str
    top1: float = 0.0
    std: float = 0.0
    seconds: float = 0.0
    score: float = 0.0
    failed: str = ""


def choose_anchors(space: SearchSpace, n: int) -> list[Architecture]:
    """Choose `n` different random networks, one from each n-th of the space's range of MACs, in random order.

    ConfigError when the space has fewer.
    """
    rng = np.random.default_rng(0)
    codes = np.unique(space.sample(rng, max(_DRAWN, 8 * n)), axis=0)
    networks = {network.id: network for network in (space.decode(space.to_params(row)) for row in codes)}
    if len(networks) < n:
        raise ConfigError(f"{n} anchors are wanted, and space {space.name} gave {len(networks)} different networks. "
                          f"Set multi_fidelity.anchors={len(networks)} or less.")
    ranked = sorted(networks.values(), key=lambda network: (network.macs, network.id))
    places = ((np.arange(n) + rng.random(n)) / n * len(ranked)).astype(int)
    for i in range(1, n):  # a network on the border of two parts belongs to both
        places[i] = max(places[i], places[i - 1] + 1)
    return [ranked[place] for place in rng.permutation(places)]


def train_anchors(path: Path, networks: Sequence[Architecture], measure: Callable[[Architecture], Anchor],
                  console: Console) -> list[Anchor]:
    """The result of `measure` for each network; stored results in `path` are read. One process works, others wait."""
    def waiting() -> None:
        console.note(f"another process trains the {len(networks)} anchors; waiting for it")

    with hold(path.with_suffix(".lock"), waiting):
        measured = _read(path, networks)
        if len(measured) == len(networks):
            return measured
        console.note(f"{len(networks)} anchors are trained before the trials: networks over the whole range that say "
                     "what a score of untrained ones is worth. Once for these images and this space; they are kept.")
        with console.step(f"train {len(networks)} anchors") as report:
            for network in networks[len(measured):]:
                measured.append(measure(network))
                rows = [asdict(anchor) for anchor in measured]
                write_atomic(path, json.dumps({**ANCHORS.header, "networks": rows}, indent=1))
                report(len(measured) / len(networks), f"{len(measured)} of {len(networks)} anchors")
    return measured


def _read(path: Path, networks: Sequence[Architecture]) -> list[Anchor]:
    """The stored anchors, in order; DataError for a file of other networks."""
    content = ANCHORS.find(path)
    if content is None:
        return []
    with ANCHORS.reading(path):
        stored = [_anchor(row) for row in content["networks"]]
        if [anchor.id for anchor in stored] != [network.id for network in networks[: len(stored)]]:
            raise ValueError("its networks are others")
    return stored


def _anchor(row: dict[str, Any]) -> Anchor:
    anchor = Anchor(**row)
    numbers = [anchor.top1, anchor.std, anchor.seconds, anchor.score]
    if (not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers)
        or not 0 <= anchor.top1 <= 1):
        raise ValueError(f"anchor {anchor.id}: {row}")
    return anchor


@dataclass(frozen=True, slots=True)
class Scale:
    """Middle and width of logit(top-1) and of the score, over the networks of a space."""

    top1_middle: float
    top1_width: float
    score_middle: float
    score_width: float

    @classmethod
    def of(cls, top1: Sequence[float], scores: Sequence[float]) -> Scale:
        """The scale of networks that were trained and scored. If all scores are equal, each stands for the middle."""
        return cls(*_middle_and_width(log_odds(top1, _EDGE)), *_middle_and_width(scores))

    def drawn(self, top1: float, std: float, score: float | None, weight: float) -> tuple[float, float]:
        """Combine a measured top-1 and an untrained score; returns the combined top-1 and its standard deviation.

        The result is a weighted mean in logits. The training has weight 1, and the score has `weight`. A `score` of
        None stands for the middle. The score counts as exact, so `std` shrinks with the training's share of the mean.
        A top-1 nearer than `std` to 0 or 1 is first moved to that distance.
        """
        away = 0.0 if score is None or not self.score_width else (score - self.score_middle) / self.score_width
        told = self.top1_middle + self.top1_width * min(max(away, -_FARTHEST), _FARTHEST)
        edge = min(max(std, _EDGE), 0.5)
        mean = (float(log_odds(top1, edge)) + weight * told) / (1 + weight)
        value, inside = 1 / (1 + math.exp(-mean)), min(max(top1, edge), 1 - edge)
        return value, std / (inside * (1 - inside)) / (1 + weight) * value * (1 - value)


class UntrainedRung:
    """Combines the top-1 of a training with the score that the network had before it.

    `measure` runs the training, and `fingerprint` names it. The score is computed at the architecture's own image
    size. `prepare` trains `n_anchors` networks of `space` once, or all of a smaller space; it reuses anchors that are
    stored. The same architecture and seed give the same score on one machine.
    """

    def __init__(self, dataset: Dataset, space: SearchSpace, measure: Callable[[Architecture, int], Estimate],
                 fingerprint: str, n_anchors: int, weight: float, threads: int) -> None:
        self.space, self.measure, self.weight = space, measure, float(weight)
        self.n_anchors = min(n_anchors, space.n_architectures)
        self._images = ScoredImages(dataset, min(_IMAGES, len(dataset.train)), threads)
        self._anchors = digest(space.fingerprint, self.n_anchors, self._images.fingerprint, fingerprint, "naswot")
        self.fingerprint = digest(self._anchors, self.weight)
        self.setup_seconds = 0.0
        self.setup_here = False
        self._n_measured = 0
        self._scale: Scale | None = None

    @property
    def path(self) -> Path:
        """Where the anchors are kept."""
        return home() / "multi_fidelity" / f"scored-{self._anchors}.json"

    def prepare(self, console: Console) -> None:
        """Train the anchors or read the stored ones, then fit the scale.

        ConfigError when the space has fewer than LEAST_ANCHORS networks. DataError when fewer could be trained.
        """
        if self.n_anchors < LEAST_ANCHORS:
            raise ConfigError(f"multi_fidelity: space {self.space.name} has {self.n_anchors} networks, and "
                              f"{LEAST_ANCHORS} must be trained to tell what a score of untrained ones means. Set "
                              "multi_fidelity.untrained=0.")
        measured = train_anchors(self.path, choose_anchors(self.space, self.n_anchors), self._anchor, console)
        self.setup_here = self._n_measured == len(measured)
        self.setup_seconds = sum(anchor.seconds for anchor in measured)
        good = [anchor for anchor in measured if not anchor.failed]
        if len(good) < LEAST_ANCHORS:
            why = next(anchor.failed for anchor in measured if anchor.failed)
            raise DataError(f"multi_fidelity: {len(good)} of {len(measured)} anchors could be scored and trained "
                            f"({why}); {LEAST_ANCHORS} are needed. Set multi_fidelity.untrained=0 or a recipe that "
                            f"they bear; what is kept lies in {self.path}.")
        top1, scores = [anchor.top1 for anchor in good], [anchor.score for anchor in good]
        self._scale = Scale.of(top1, scores)
        console.note(f"multi_fidelity: {len(good)} anchors trained in {self.setup_seconds:.0f} s; their untrained "
                     f"scores rank them with Kendall tau {kendall_tau(np.array(scores), np.array(top1)):.2f}")

    def score(self, architecture: Architecture, seed: int) -> float | None:
        """NASWOT with the initial weights of `seed`; None if the network has no score. ValueError before `prepare`."""
        if self._scale is None:
            raise ValueError("multi_fidelity: call prepare(console) before evaluate().")
        try:
            return self._images.score(architecture, seed)
        except CandidateError:
            return None

    def drawn(self, top1: float, std: float, score: float | None) -> tuple[float, float]:
        """See Scale.drawn; ValueError before `prepare`."""
        if self._scale is None:
            raise ValueError("multi_fidelity: call prepare(console) before evaluate().")
        return self._scale.drawn(top1, std, score, self.weight)

    def _anchor(self, network: Architecture) -> Anchor:
        self._n_measured += 1
        try:
            began = time.perf_counter()
            score, trained = self._images.score(network, 0), self.measure(network, 0)
        except CandidateError as error:
            return Anchor(network.id, failed=str(error))
        return Anchor(network.id, trained.value, trained.std, time.perf_counter() - began, score)


def _middle_and_width(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Median and standard deviation. Mean absolute deviations give the latter: a failed training moves them less."""
    middle = float(np.median(values))
    width = _NORMAL * float(np.mean(np.abs(np.asarray(values, float) - middle)))
    return middle, width if width > 1e-9 * (1 + abs(middle)) else 0.0
