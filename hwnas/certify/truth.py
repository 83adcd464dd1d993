"""The ground truth of a certificate: full trainings of every network with every seed, run like hwnas.train.

Each training has its own folder, lock and checkpoints. So any number of processes may work on a plan at once, and a
killed one loses at most an epoch. All networks are trained with the first seed, then with the second, and so on.
`python -m hwnas.certify.truth FOLDER` is one such process, started by hwnas.certify.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.certify.plan import CertifyPlan, Network, read_plan, training_config
from hwnas.cli.progress import Console, Report
from hwnas.errors import CandidateError, HwnasError, StudyError
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic
from hwnas.system.processes import crew, ended_by_signals, exit_code
from hwnas.system.work_folder import WorkFolder

if TYPE_CHECKING:
    from hwnas.training.job import TrainingJob

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
        from hwnas.networks.network import FoundNetwork
        from hwnas.system.run_folder import ModelFolder

        size = network.architecture.image_size
        if size not in self._first:
            self._first[size] = self._make(network, seed)
        first = self._first[size]
        identity = {**first.identity, "network": str(network.architecture), "seed": seed}
        return replace(first, network=FoundNetwork(network.architecture), seed=seed, identity=identity,
                       folder=ModelFolder(self.plan.folder(network, seed)))

    def _make(self, network: Network, seed: int) -> TrainingJob:
        from hwnas.training.job import make_job

        config = training_config(self.plan.dataset, self.plan.training)
        config.architecture = str(self.plan.architecture_file(network))
        config.out = str(self.plan.folder(network, seed))
        config.seed, config.split_seed = seed, self.plan.seed
        return make_job(config, Console(quiet=True), within=self.plan.out)


def _train(job: TrainingJob, heard: Callable[[], None]) -> None:
    """Train, export and score a network, unless all is done."""
    from hwnas.training.checkpoint import Checkpoint
    from hwnas.training.job import train
    from hwnas.training.results import read_summary, write_results

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
    from hwnas.training.results import SUMMARY

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


def trained_on(plan: CertifyPlan) -> set[str]:
    """The fingerprints of the images that finished trainings had, at the size of the plan's data set."""
    done = (read_training(plan, network, seed) for network, seed in trainings(plan))
    return {training.dataset for training in done if training is not None}


def epochs_done(plan: CertifyPlan) -> int:
    """Epochs of a finished training. They exceed `plan.epochs` if the recipe's least number of steps needs more."""
    from hwnas.training.results import SUMMARY

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
