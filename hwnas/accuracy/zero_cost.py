"""A score of untrained networks, NASWOT; a fit to a few networks trained once (anchors) turns it into top-1.

SynFlow, gradient norm, ZiCo and all of them together ranked worse, and are gone (docs/decisions/lost-estimators.md).
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.certificate import CHOICES, CONTROLS, SCORE, SCORES
from hwnas.accuracy.estimator import Estimate
from hwnas.accuracy.proxy import Proxy
from hwnas.cli.options import Config, option, plain, read_options
from hwnas.data.contents import digest
from hwnas.data.dataset import Dataset, resize, subset
from hwnas.errors import CandidateError, ConfigError, DataError, TrainingError
from hwnas.lazy import LazyModule
from hwnas.networks.build import build
from hwnas.networks.weights import import_timm
from hwnas.space.architecture import Architecture
from hwnas.stats import Z90, kendall_tau, log_odds
from hwnas.system.documents import Document
from hwnas.system.libraries import release_memory
from hwnas.system.paths import hold, home, write_atomic
from hwnas.training.loop import no_memory, seeded

if TYPE_CHECKING:
    import scipy.optimize
    import scipy.special
    import torch
    from torch import Tensor, nn

    import hwnas.networks.modules as modules
    from hwnas.cli.progress import Console
    from hwnas.space.search_space import SearchSpace
else:
    modules = LazyModule("hwnas.networks.modules")
    scipy = LazyModule("scipy")
    torch = LazyModule("torch")


Score = Callable[["nn.Module", "Tensor", "Tensor"], float]
LEAST_IMAGES = 8  # with fewer, batch norm on maps of 1x1 has nothing to normalise


def naswot(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """log |det K| (Mellor et al. 2021, their `hook_logdet`).

    K[i, j] counts the units that images i and j both switch on, or both switch off. A unit is on when its input is
    above 0, also for smooth activations (swish, hard swish) and ReLU6. There is no score when K is singular, for
    example with the same image twice: rounding alone would decide the determinant.
    """
    del labels
    _need(images, "naswot")
    if len(images.flatten(1).unique(dim=0)) < len(images):  # rounding may give equal images different units
        return _finite("naswot", math.nan)
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
        raise TrainingError(f"naswot: the network has no {names} to watch. Use another score.")
    for module in watched:
        module.register_forward_pre_hook(watch)
    with torch.no_grad():
        network(images)
    return _finite("naswot", _log_determinant(kernel))


SCORE_FUNCTIONS: dict[str, Score] = {"naswot": naswot}


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


def _need(images: Tensor, score: str) -> None:
    if len(images) < LEAST_IMAGES:
        raise TrainingError(f"{score}: a batch of {len(images)} images tells nothing; it needs {LEAST_IMAGES}.")


def _finite(score: str, value: float) -> float:
    if not math.isfinite(value):
        raise TrainingError(f"{score} is {value} for this network: all images look the same to it.")
    return value


_NEXT_SEED = 1_000_003
_CONTROLS = {"params": lambda network: math.log(network.params), "macs": lambda network: math.log(max(network.macs, 1))}


class Scorer:
    """Scores architectures for a data set, on `images` training images without augmentation.

    A score is the mean over `seeds` initial weights. ConfigError when the data set has fewer images.
    """

    def __init__(self, dataset: Dataset, images: int, seeds: int = 1, seed: int = 0, threads: int = 1) -> None:
        if images > len(dataset.train):
            raise ConfigError(f"zero_cost.images={images}, but {dataset.name} has {len(dataset.train)} training "
                              f"images. Set zero_cost.images={len(dataset.train)} or less.")
        self._dataset, self._seeds, self._threads = dataset, seeds, threads
        rows = subset(dataset.train.labels, images, seed)
        self._part = dataset.train.take(np.random.default_rng(seed).permutation(rows)[:images])
        self._sized: dict[int, tuple[Tensor, Tensor]] = {}
        self.fingerprint = digest(dataset.fingerprint, images, seeds, seed)

    def scores(self, architecture: Architecture, names: Sequence[str], seed: int = 0
               ) -> tuple[dict[str, float], dict[str, float]]:
        """Scores by name (of SCORES and CONTROLS), and the seconds of each; TrainingError when there is no score.

        Parameters and MACs are logarithms. `seed` decides the initial weights.
        """
        self._check(architecture)
        values = {name: _CONTROLS[name](architecture) for name in names if name in _CONTROLS}
        seconds = dict.fromkeys(values, 0.0)
        for name in names:
            if name not in _CONTROLS:
                start = time.perf_counter()
                values[name] = self._score(architecture, name, seed)
                seconds[name] = time.perf_counter() - start
        return values, seconds

    def _score(self, architecture: Architecture, name: str, seed: int) -> float:
        images, labels = self._at(architecture.image_size)
        values = []
        for index in range(self._seeds):
            with (seeded(seed + _NEXT_SEED * index, self._threads),
                  no_memory(f"scoring {len(images)} images ({name})", "Set fewer images, or a smaller image_size.")):
                values.append(SCORE_FUNCTIONS[name](build(architecture), images, labels))
        release_memory()
        return float(np.mean(values))

    def _at(self, image_size: int) -> tuple[Tensor, Tensor]:
        if image_size not in self._sized:
            images = self._dataset.normalise(resize(self._part.images, image_size))
            self._sized[image_size] = torch.from_numpy(images), torch.from_numpy(self._part.labels)
        return self._sized[image_size]

    def _check(self, architecture: Architecture) -> None:
        mine = (self._dataset.channels, len(self._dataset.class_names))
        if (architecture.channels, architecture.classes) != mine:
            raise ValueError(f"architecture of {architecture.channels} channels, {architecture.classes} classes, data "
                             f"of {mine[0]} channels, {mine[1]} classes")


ANCHORS = Document("hwnas-anchors", 1, "trained anchors", "Delete it, and they are trained again.", DataError)
_DRAWN = 1024  # number of random networks from which the anchors are chosen


@dataclass(frozen=True, slots=True)
class Anchor:
    """One network: its short training (top-1 as a fraction) and its scores. If it failed, `failed` says why."""

    id: str
    top1: float = 0.0
    std: float = 0.0
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    score_seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""


def chosen(space: SearchSpace, n: int, seed: int, option: str = "zero_cost.anchors") -> list[Architecture]:
    """Choose `n` different random networks, one from each n-th of the space's range of MACs, in random order.

    ConfigError, which names `option`, when the space has fewer.
    """
    rng = np.random.default_rng(seed)
    codes = np.unique(space.sample(rng, max(_DRAWN, 8 * n)), axis=0)
    networks = {network.id: network for network in (space.decode(space.to_params(row)) for row in codes)}
    if len(networks) < n:
        raise ConfigError(f"{n} anchors are wanted, and space {space.name} gave {len(networks)} different networks. "
                          f"Set {option}={len(networks)} or less.")
    ranked = sorted(networks.values(), key=lambda network: (network.macs, network.id))
    places = ((np.arange(n) + rng.random(n)) / n * len(ranked)).astype(int)
    for i in range(1, n):  # a network on the border of two parts belongs to both
        places[i] = max(places[i], places[i - 1] + 1)
    return [ranked[place] for place in rng.permutation(places)]


def anchors(path: Path, networks: Sequence[Architecture], measure: Callable[[Architecture], Anchor], console: Console
            ) -> list[Anchor]:
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
    numbers = [anchor.top1, anchor.std, anchor.seconds, *anchor.scores.values(), *anchor.score_seconds.values()]
    if (not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers)
        or not 0 <= anchor.top1 <= 1):
        raise ValueError(f"anchor {anchor.id}: {row}")
    return anchor


Array = NDArray[np.float64]
_RIDGE = 1.0  # the penalty on squared weights counts like one more network without information
_LEAST_SLOPE = 1e-3  # logits per standard deviation: the map orders networks even if the anchors give no reason to
_EDGE = 2e-3  # an anchor's top-1 nearer than this to 0 or 1 is moved to this distance


@dataclass(frozen=True, eq=False)
class Fit:
    """logit(top-1) = intercept + weights · standardised scores, with no weight below 0.

    `left_out` [n] predicts each anchor from the others. `std` is the root mean square error of these predictions, as a
    fraction of top-1.
    """

    middle: Array
    width: Array
    weights: Array
    intercept: float
    std: float
    left_out: Array

    def __call__(self, scores: Array) -> Array:
        """Top-1 [m], as a fraction, of networks with these scores [m, k]."""
        return np.asarray(scipy.special.expit(self.intercept + (scores - self.middle) / self.width @ self.weights))


def fit(scores: Array, top1: Array) -> Fit:
    """Fit the map to anchors: `scores` [n, k], `top1` [n] as fractions, n at least 3."""
    left_out = np.array([float(_map(np.delete(scores, i, 0), np.delete(top1, i))(scores[i : i + 1])[0])
                         for i in range(len(top1))])
    whole = _map(scores, top1)
    std = float(np.sqrt(np.mean((left_out - top1) ** 2)))
    return Fit(whole.middle, whole.width, whole.weights, whole.intercept, std, left_out)


def _map(scores: Array, top1: Array) -> Fit:
    middle, width = scores.mean(0), scores.std(0)
    width = np.where(width > 1e-9 * (1 + np.abs(middle)), width, 1.0)
    k = scores.shape[1]
    logits = log_odds(top1, _EDGE)
    intercept = float(logits.mean())
    rows = np.concatenate([(scores - middle) / width, np.sqrt(_RIDGE) * np.eye(k)])
    weights, _ = scipy.optimize.nnls(rows, np.concatenate([logits - intercept, np.zeros(k)]))
    return Fit(middle, width, np.maximum(weights, _LEAST_SLOPE), intercept, 0.0, np.zeros(0))


def _tau_of(scores: Array, top1: Array) -> float:
    """Kendall's tau-b; 0 when all are tied."""
    return float(np.nan_to_num(kendall_tau(scores, top1)))


LEAST_ANCHORS = 4
_OF_ANCHORS = ("threads", "device", "precision")  # options of their training that the whole search has


@dataclass(frozen=True, slots=True)
class ZeroCostOptions:
    """Which score to compute, and the anchors that turn it into a top-1.

    `score` is one of CHOICES. `anchors` is the number of networks that
    are trained once. `images` is the size of the one batch. A score is the mean over `seeds` initial weights. `seed`
    decides batch and anchors. `proxy` changes the recipe and options of the anchors' training.
    """

    score: str = option(SCORE, choices=CHOICES, help="of untrained networks")
    anchors: int = option(12, low=LEAST_ANCHORS, high=1000, help="networks trained once, for the score's units")
    images: int = option(32, low=8, high=4096, help="images of the one batch")
    seeds: int = option(1, low=1, high=100, help="initial weights that a score is averaged over")
    seed: int = option(0, low=0, high=2**31, help="of batch and anchors")
    proxy: Mapping[str, Any] = option({}, help="changes to the recipe and options of the anchors' training")


class ZeroCost:
    """An AccuracyEstimator that trains `anchors` networks once (`prepare`), and no candidate.

    A map fitted to the anchors turns a candidate's score into the top-1 that the proxy's short training would give.
    `std` is the error at anchors that were left out of the fit. The same architecture and seed give the same value on
    one machine.
    """

    def __init__(self, dataset: Dataset, space: SearchSpace, options: ZeroCostOptions, proxy: Proxy) -> None:
        self.dataset, self.space, self.options, self.proxy = dataset, space, options, proxy
        self.setup_seconds = 0.0
        self.setup_here = False
        self._n_measured = 0
        self._scorer = Scorer(dataset, options.images, options.seeds, options.seed, proxy.recipe.threads)
        self._names = (options.score,)
        self._fit: Fit | None = None

    @property
    def fingerprint(self) -> str:
        """Names everything that decides the values, except the architecture."""
        return digest(self._anchors_fingerprint, self.options.score)

    @property
    def _anchors_fingerprint(self) -> str:
        return digest(self.space.fingerprint, self.options.anchors, self._scorer.fingerprint, self.proxy.fingerprint)

    @property
    def path(self) -> Path:
        """Where the anchors are kept."""
        return home() / "zero_cost" / f"anchors-{self._anchors_fingerprint}.json"

    def prepare(self, console: Console) -> None:
        """Train the anchors, or read the stored ones, and fit the map.

        A note says how the score, the parameters and the MACs rank the anchors. DataError when fewer than
        LEAST_ANCHORS could be trained and scored.
        """
        networks = chosen(self.space, self.options.anchors, self.options.seed)
        measured = anchors(self.path, networks, self._measure, console)
        self.setup_here = self._n_measured == len(measured)
        self.setup_seconds = sum(anchor.seconds + sum(anchor.score_seconds.values()) for anchor in measured)
        good = [anchor for anchor in measured
                if not anchor.failed and all(name in anchor.scores for name in self._names)]
        if len(good) < LEAST_ANCHORS:
            why = next((anchor.failed for anchor in measured if anchor.failed), f"no {self.options.score} score")
            raise DataError(f"zero_cost: {len(good)} of {len(measured)} anchors could be trained and scored ({why}); "
                            f"{LEAST_ANCHORS} are needed. Set zero_cost.anchors, zero_cost.score or zero_cost.proxy; "
                            f"what is kept lies in {self.path}.")
        top1 = np.array([anchor.top1 for anchor in good])
        self._fit = fit(_table(good, self._names), top1)
        self._tell(good, self._fit, console)

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]] = (), seed: int = 0) -> Estimate:
        """The top-1 that the architecture's score stands for, with its 90 % interval; TrainingError without a score."""
        if self._fit is None:
            raise ValueError("zero_cost: call prepare(console) before evaluate().")
        start = time.perf_counter()
        scores, _ = self._scorer.scores(architecture, self._names, seed)
        value, std = float(self._fit(np.array([[scores[name] for name in self._names]]))[0]), self._fit.std
        return Estimate(value, max(0.0, value - Z90 * std), min(1.0, value + Z90 * std), std, "zero_cost",
                        time.perf_counter() - start)

    def _measure(self, network: Architecture) -> Anchor:
        """Train and score one anchor."""
        self._n_measured += 1
        try:
            trained = self.proxy.evaluate(network, (), self.options.seed)
        except CandidateError as error:
            return Anchor(network.id, failed=str(error))
        scores: dict[str, float] = {}
        seconds: dict[str, float] = {}
        for name in (*SCORES, *CONTROLS):
            try:
                score, cost = self._scorer.scores(network, (name,), self.options.seed)
            except CandidateError:  # a network without this score cannot be an anchor for it
                continue
            scores |= score
            seconds |= cost
        return Anchor(network.id, trained.value, trained.std, trained.seconds, scores, seconds)

    def _tell(self, good: Sequence[Anchor], fitted: Fit, console: Console) -> None:
        """One line: how the score ranks the anchors, and how parameters and MACs do."""
        top1 = np.array([anchor.top1 for anchor in good])
        score = self.options.score
        tau = _tau_of(_table(good, (score,))[:, 0], top1)
        controls = {name: _tau_of(_table(good, (name,))[:, 0], top1) for name in CONTROLS}
        console.note(f"zero_cost: {score} ranks {len(good)} trained anchors with Kendall tau {tau:.2f} ("
                     + ", ".join(f"{name} {value:.2f}" for name, value in controls.items())
                     + f"); its top-1 is off by {fitted.std:.1%} (root mean square); cost: {self.setup_seconds:.0f} s")
        best = max(controls, key=lambda name: controls[name])
        if max(tau, controls[best]) <= 0:
            console.remark(f"note: neither zero_cost.score={score} nor parameters or MACs order the anchors: they may "
                           "be trained too shortly to differ. Set zero_cost.proxy.epochs, or use another estimator.")
        elif score not in CONTROLS and tau <= controls[best]:
            console.remark(f"note: zero_cost.score={score} ranks the anchors no better (tau {tau:.2f}) than {best} "
                           f"(tau {controls[best]:.2f}), which costs nothing: zero_cost.score={best}. They were "
                           "trained shortly; python -m hwnas.certify judges by full training.")


def _table(good: Sequence[Anchor], names: Sequence[str]) -> NDArray[np.float64]:
    """Scores [n, k]."""
    return np.array([[anchor.scores[name] for name in names] for anchor in good], float)


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, for `--show-config`."""
    return {**plain(read_options(ZeroCostOptions, given, "zero_cost", others=_OF_ANCHORS)), "threads": 0}


def load(config: Config, dataset: Dataset, space: SearchSpace | None = None) -> ZeroCost:
    """The door of `hwnas.accuracy.load_estimator`. `threads`, `device` and `precision` are of the anchors' training;
    untrained networks are scored on the CPU."""
    import_timm()  # no network's seconds hold its import
    if space is None:
        raise ConfigError("accuracy=zero_cost needs a search space: its anchors are networks of it.")
    options = read_options(ZeroCostOptions, config, "zero_cost", others=_OF_ANCHORS)
    given = {key: config[key] for key in _OF_ANCHORS if key in config}
    return ZeroCost(dataset, space, options, Proxy.from_config({**given, **options.proxy}, dataset))
