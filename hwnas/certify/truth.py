"""The ground truth of a certificate: which networks it trains, spread over the space, and their full trainings.

Every network is trained with every seed, as by hwnas.train. Each training has its own folder, lock and checkpoints. So
any number of processes may work on a plan at once, and a killed one loses at most an epoch. All networks are trained
with the first seed, then with the second, and so on.
`hwnas certify.truth FOLDER` is one such process, started by hwnas.certify.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.command import compose
from hwnas.cli.progress import Console, Report
from hwnas.errors import CandidateError, ConfigError, HwnasError, StudyError, UnknownName, UserError
from hwnas.lazy import LazyModule
from hwnas.networks.network import FoundNetwork
from hwnas.space.architecture import Architecture
from hwnas.space.coding import Codes
from hwnas.space.search_space import SearchSpace, macs
from hwnas.space.search_space import spread as spread_rows
from hwnas.system.documents import Document, check_identity
from hwnas.system.paths import write_atomic
from hwnas.system.processes import crew, ended_by_signals, exit_code
from hwnas.system.run_folder import ModelFolder, WorkFolder
from hwnas.training.job import SUMMARY, identity_of, make_job, read_summary, train, write_results
from hwnas.training.loop import Checkpoint
from hwnas.training.recipe import FINE_TUNING, FULL_TRAINING, all_recipe, recipe_of

if TYPE_CHECKING:
    import omegaconf
    from omegaconf import DictConfig

    from hwnas.training.job import TrainingJob
else:
    omegaconf = LazyModule("omegaconf")


SAMPLE = 4096
_STREAM = 0xCE57  # separates these draws from others with the same seed


@dataclass(frozen=True, slots=True)
class Network:
    """One network and its cost: predicted latency in ms, or MACs."""

    architecture: Architecture
    cost: float

    @property
    def id(self) -> str:
        """The architecture's id."""
        return self.architecture.id


def spread(space: SearchSpace, n: int, seed: int, costs: Callable[[Codes], NDArray[np.float64]]) -> list[Network]:
    """Draw `n` different networks over the range of costs, cheapest first.

    SAMPLE settings are sorted by cost and cut into `n` equal parts; one network is drawn from each part. ConfigError
    when the space has fewer networks.
    """
    if space.n_architectures < n:
        raise ConfigError(f"n={n}: space {space.name} has {space.n_architectures} networks. Give a smaller n or a "
                          "larger space.")
    rng = np.random.default_rng([seed, _STREAM])
    codes = _different(space, n, rng)
    cost = np.asarray(costs(codes), np.float64)
    chosen = spread_rows(cost, n, lambda part: int(rng.choice(part)))
    return [Network(space.decode(space.to_params(codes[row])), float(cost[row])) for row in chosen]


def macs_of(space: SearchSpace) -> Callable[[Codes], NDArray[np.float64]]:
    """The function from codes [n, p] to multiply-accumulates [n]."""
    return lambda codes: space.totals(codes, macs)[:, 0]


def _different(space: SearchSpace, n: int, rng: np.random.Generator) -> Codes:
    """Codes of at least `n` different networks. Different codes mean different networks, so the ids differ too."""
    codes = np.unique(space.sample(rng, SAMPLE), axis=0)
    for _ in range(64):
        if len(codes) >= n:
            return codes
        codes = np.unique(np.concatenate([codes, space.sample(rng, SAMPLE)]), axis=0)
    raise ConfigError(f"n={n}: {len(codes)} different networks were found in space {space.name} by drawing settings. "
                      "Give a smaller n.")


_MADE_AGAIN = "Remove it, and what it held is made again; or choose another out=FOLDER."
PLAN = Document("hwnas-certify", 1, "a certificate's plan", _MADE_AGAIN)
_NOT_OURS = ("architecture", "model", "stem_stride", "weights", "out", "overwrite", "seed",
             "split_seed", "dataset")


@dataclass(frozen=True)
class CertifyPlan:
    """The plan of a certificate.

    `cost` is `latency_ms` or `macs`, and `cost_source` says where it comes from. `dataset` and `training` are options
    of conf/train.yaml. `identity` must stay the same in a folder; seeds and estimators may be added later.
    """

    out: Path
    networks: tuple[Network, ...]
    cost: str
    cost_source: str
    dataset: Mapping[str, Any]
    training: Mapping[str, Any]
    seed: int
    seeds: int
    identity: Mapping[str, Any]

    def folder(self, network: Network, seed: int) -> Path:
        """The folder of a network's training with a seed."""
        return self.out / "networks" / network.id / f"seed{seed}"

    @property
    def epochs(self) -> int:
        """Epochs of a full training."""
        return int(self.training["epochs"])

    def write(self) -> None:
        """Write `plan.json`, and each network's architecture.yaml beside its trainings."""
        for network in self.networks:
            write_atomic(self.architecture_file(network), network.architecture.to_yaml())
        networks = [{"id": network.id, "cost": network.cost, "architecture": network.architecture.to_dict()}
                    for network in self.networks]
        content = {**PLAN.header, "cost": self.cost, "cost_source": self.cost_source, "seed": self.seed,
                   "seeds": self.seeds, "identity": self.identity, "dataset": self.dataset, "training": self.training,
                   "networks": networks}
        write_atomic(plan_file(self.out), json.dumps(content, indent=1, allow_nan=False) + "\n")

    def architecture_file(self, network: Network) -> Path:
        """The architecture file that `hwnas.train` reads."""
        return self.out / "networks" / network.id / "architecture.yaml"


def plan_file(out: Path) -> Path:
    """The path of `plan.json`."""
    return out / "plan.json"


def read_plan(out: Path, identity: Mapping[str, Any] | None = None) -> CertifyPlan | None:
    """The plan in a folder; None if there is none. StudyError when it is torn or has another identity."""
    path = plan_file(out)
    content = PLAN.find(path)
    if content is None:
        return None
    if identity is not None:
        check_identity(content["identity"], identity, path)
    with PLAN.reading(path):
        networks = tuple(Network(Architecture.from_dict(entry["architecture"], str(path)), float(entry["cost"]))
                         for entry in content["networks"])
        return CertifyPlan(out, networks, content["cost"], content["cost_source"], content["dataset"],
                           content["training"], content["seed"], content["seeds"], content["identity"])


IN_FULL = {"device": "cpu", "threads": 1, "train_images": 10_000, "validation_images": 2000}  # beside the recipe


def in_full(training: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a full training that differ from hwnas.train's: FULL_TRAINING, or FINE_TUNING from pretrained
    weights, changed by `training`."""
    stock, length = _stock(), ("min_steps", "max_steps")
    recipe = FINE_TUNING if training.get("pretrained") else FULL_TRAINING
    own = {key: value for key, value in recipe.to_dict().items()
           if key not in ("name", "threads", "device") and value != stock[key]
           and not ("epochs" in training and key in length)}
    return {**IN_FULL, **own, **training}


def all_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a full training, with its value."""
    return {**{key: value for key, value in _stock().items() if key not in _NOT_OURS}, **in_full(training)}


def _stock() -> dict[str, Any]:
    """What conf/train.yaml says, or its recipe where that says nothing."""
    config = compose("train", [], target=False)
    values = omegaconf.OmegaConf.to_container(config)
    assert isinstance(values, dict)
    return {**values, **all_recipe(recipe_of(config))}


def training_config(dataset: Mapping[str, Any], training: Mapping[str, Any]) -> DictConfig:
    """Compose and check conf/train.yaml with these values; ConfigError, UnknownName."""
    config = compose("train", [], target=False)
    known = [str(key) for key in config if key not in _NOT_OURS]
    for key in training:
        if key not in known:
            raise UnknownName("key of training", key, known)
    omegaconf.OmegaConf.set_struct(config, False)
    for key, value in {**training, "dataset": dict(dataset)}.items():
        omegaconf.OmegaConf.update(config, key, value, merge=key == "teacher")
    try:
        recipe_of(config)
    except UserError as error:
        raise ConfigError(f"training: {error}") from None
    return config


_AGAIN = "Remove it, and that training is made again."
FAILED = Document("hwnas-certify-failure", 1, "a failed training", _AGAIN)
COST = Document("hwnas-certify-cost", 1, "the cost of a training", _AGAIN)


@dataclass(frozen=True, slots=True)
class Training:
    """The result of a full training: test top-1 of the exported file on `n_test` images, or the reason of its failure.

    `cpu_seconds` is the processor time of all epochs. After an interruption it is scaled from the epochs since then.
    None: not known, or a GPU did the work.
    """

    seed: int
    top1: float | None
    n_test: int
    seconds: float
    cpu_seconds: float | None
    dataset: str
    reason: str = ""


def train_all(plan: CertifyPlan, workers: int, console: Console) -> list[str]:
    """Run all open trainings in `workers` processes; this is one of them. Failed trainings are recorded as failed.

    Returns a line for each process that ended early: the others made its trainings.
    """
    left = sum(not is_done(plan.folder(network, seed)) for network, seed in trainings(plan))
    if not left:
        return []
    helpers = crew(min(workers, left) - 1, "hwnas.certify.truth", [str(plan.out.absolute())], console.say)
    with console.step("train in full") as report, helpers as early:
        work(plan, _make_hear(plan, report), wait=False)
        work(plan, _make_hear(plan, report), wait=True)  # other processes' trainings: done by now, or left by a kill
    return early


def trainings(plan: CertifyPlan) -> Iterator[tuple[Network, int]]:
    """Every training of the plan, in the order of work."""
    return ((network, seed) for seed in range(plan.seeds) for network in plan.networks)


def work(plan: CertifyPlan, heard: Callable[[], None], wait: bool) -> None:
    """Run each training that no other process is running. With `wait`, wait for those and run what they left."""
    jobs = Jobs(plan)
    for network, seed in trainings(plan):
        folder = plan.folder(network, seed)
        with WorkFolder(folder, "train").hold("training", wait=wait) as held:
            if held and not is_failed(folder):
                _train(jobs.job(network, seed), heard)


class Jobs:
    """Makes the training jobs of a plan. Images are read once for each image size."""

    def __init__(self, plan: CertifyPlan) -> None:
        self.plan = plan
        self._config: Any = None
        self._first: dict[int, TrainingJob] = {}

    def job(self, network: Network, seed: int) -> TrainingJob:
        """The training of a network with a seed."""
        size = network.architecture.image_size
        if size not in self._first:
            self._first[size] = self._make(network, seed)
        first = self._first[size]
        begun = FoundNetwork(network.architecture, first.network.pretrained)
        identity = {**first.identity, "network": identity_of(begun), "seed": seed}
        return replace(first, network=begun, seed=seed, identity=identity,
                       folder=ModelFolder(self.plan.folder(network, seed)))

    def _make(self, network: Network, seed: int) -> TrainingJob:
        config = training_config(self.plan.dataset, self.plan.training)
        config.architecture = str(self.plan.architecture_file(network))
        config.out = str(self.plan.folder(network, seed))
        config.seed, config.split_seed = seed, self.plan.seed
        return make_job(config, Console(quiet=True), within=self.plan.out)


def _train(job: TrainingJob, heard: Callable[[], None]) -> None:
    """Train, export and score a network, unless all is done."""
    if read_summary(job) is not None:
        return
    console = _Inside(heard)
    checkpoint = Checkpoint.load(job.checkpoint)
    before, begun = (checkpoint.epoch if checkpoint else 0), time.process_time()
    del checkpoint
    try:
        trained = train(job, console)
        epochs = len(trained.rows) - before
        if epochs and job.device == "cpu":
            _write(job.folder.path / "cost.json", COST, {
                "cpu_seconds": (time.process_time() - begun) * len(trained.rows) / epochs, "epochs_timed": epochs})
        write_results(job, trained, console)
    except CandidateError as error:
        _write(job.folder.path / "failed.json", FAILED, {"reason": " ".join(str(error).split())})
    heard()


def is_done(folder: Path) -> bool:
    """Whether the training in this folder is finished or has failed."""
    return (folder / "summary.json").is_file() or is_failed(folder)


def is_failed(folder: Path) -> bool:
    """Whether the training in this folder failed. It is not tried again while failed.json exists."""
    return (folder / "failed.json").is_file()


def read_training(plan: CertifyPlan, network: Network, seed: int) -> Training | None:
    """The result of a training; None while it is not finished. StudyError for a torn or foreign file."""
    folder = plan.folder(network, seed)
    failed = FAILED.find(folder / "failed.json")
    if failed is not None:
        return Training(seed, None, 0, 0.0, None, "", str(failed["reason"]))
    summary = SUMMARY.find(folder / "summary.json")
    if summary is None:
        return None
    cost = COST.find(folder / "cost.json") or {}
    if (summary.get("id"), summary.get("identity", {}).get("seed")) != (network.id, seed):
        raise StudyError(f"{folder / 'summary.json'} is of another training. Choose another out=FOLDER.")
    return Training(seed, float(summary["top1_test"]), int(summary["n_test"]), float(summary["seconds_training"]),
                    cost.get("cpu_seconds"), str(summary["identity"]["dataset.fingerprint"]))


def epochs_done(plan: CertifyPlan) -> int:
    """Epochs of a finished training. They exceed `plan.epochs` if the recipe's least number of steps needs more."""
    summaries = (SUMMARY.find(plan.folder(*training) / "summary.json") for training in trainings(plan))
    return next((int(summary.get("epochs", plan.epochs)) for summary in summaries if summary is not None), plan.epochs)


def _write(path: Path, document: Document, content: dict[str, Any]) -> None:
    write_atomic(path, json.dumps({**document.header, **content}, indent=1) + "\n")


def _make_hear(plan: CertifyPlan, report: Report, every_s: float = 5.0) -> Callable[[], None]:
    """The function that reports the share of epochs that all processes have done, read from their logs."""
    last = 0.0

    def hear() -> None:
        nonlocal last
        if time.monotonic() - last < every_s:
            return
        last = time.monotonic()
        done = sum(is_done(plan.folder(*training)) for training in trainings(plan))
        epochs = sum(_epochs(plan, *training) for training in trainings(plan))
        n = len(plan.networks) * plan.seeds
        report(min(1.0, epochs / (n * plan.epochs)), f"{done} of {n} trainings done")

    return hear


def _epochs(plan: CertifyPlan, network: Network, seed: int) -> int:
    folder = plan.folder(network, seed)
    if is_done(folder):
        return plan.epochs
    try:
        return max(0, (folder / "log.csv").read_text(encoding="utf-8").count("\n") - 1)
    except OSError:
        return 0


class _Inside(Console):
    """A quiet console. Every report of a step calls `heard`, to show that the work goes on."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__(quiet=True)
        self._heard = heard

    @contextmanager
    def step(self, title: str) -> Iterator[Report]:
        """A step whose reports call `heard`."""
        yield lambda share, note="": self._heard()


def main() -> int:
    """Work on a plan's trainings as one more process: run those that no other is running. Errors print one line."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with ended_by_signals():
            plan = read_plan(Path(sys.argv[1]))
            if plan is not None:
                work(plan, lambda: None, wait=False)
    except HwnasError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        return exit_code(interrupt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
