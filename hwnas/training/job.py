"""A long training: checked before it starts, saved after each epoch, resumed bit for bit.

Its identity names all that decides it. It writes weights, an ONNX file that passed the parity check, the test top-1 of
that file, and a summary.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hwnas.cli.options import Config, read_command
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, Progress, Split, subset
from hwnas.data.loading import inspect_dataset, read_images
from hwnas.errors import ExportError
from hwnas.lazy import nn
from hwnas.networks.baselines import count_macs, count_params
from hwnas.networks.export import check_parity, export_onnx, pack_weights, parity_images
from hwnas.networks.network import FoundNetwork, Network, TimmNetwork
from hwnas.runtimes import runtime as deployed
from hwnas.runtimes.runtime import FP32, load_runtime
from hwnas.system.cores import usable_cores
from hwnas.system.documents import Document, check_identity
from hwnas.system.libraries import version_of
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import Manifest, ModelFolder, RunFolder, WorkFolder
from hwnas.system.tables import finite, table_csv
from hwnas.target import Host
from hwnas.tasks.task import load_task
from hwnas.training.batches import Batches, reseed
from hwnas.training.loop import Training, grade, lay_out, seeded
from hwnas.training.place import CPU, check_precision, resolved
from hwnas.training.recipe import Recipe, recipe_of
from hwnas.training.source import TrainOptions, find_network

SUMMARY = Document("hwnas-training", 1, "the summary of a training", "Remove it to write it again, or choose another "
                   "out=FOLDER.")
_LOG = "log.csv"
_PACKAGES = ("torch", "timm", "onnx", "onnxruntime")  # whose versions the summary names
_INITIAL = 1 << 32  # the seed's key for initial weights: it is the number of no epoch


@dataclass(frozen=True)
class TrainingJob:
    """The network, the data and the recipe of a training. The recipe's `device` and `threads` change rounding only."""

    network: Network
    dataset: Dataset
    train: Split
    validation: Split
    recipe: Recipe
    seed: int
    threads: int
    folder: ModelFolder
    identity: Mapping[str, Any]

    @property
    def checkpoint(self) -> Path:
        """The file of the state after the last whole epoch."""
        return self.folder.path / "checkpoint.safetensors"

    @property
    def summary(self) -> Path:
        """The path of `summary.json`, which is written last."""
        return self.folder.path / "summary.json"

    @property
    def fingerprint(self) -> str:
        """The hash of everything that decides the weights, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(dict(self.identity), sort_keys=True).encode()).hexdigest()[:16]


def make_job(config: Config, console: Console) -> TrainingJob:
    """Read and check every option, load the data and take the output folder. A UserError names what is wrong."""
    options = read_command(TrainOptions, config)
    check_precision(recipe_of(config).precision, resolved(options.device, "device"))
    info = inspect_dataset(options.dataset)
    recipe = replace(recipe_of(config, load_task(info.task).recipe), device=resolved(options.device, "device"))
    network = find_network(options, info)
    out = Path(options.out or Path("runs") / f"train-{network.id}-{info.name}")
    WorkFolder(out, "train").take_up(options.overwrite)
    # Only networks of timm, whole or cut, have pretrained weights.
    can_be_pretrained = isinstance(network, TimmNetwork) or (
        isinstance(network, FoundNetwork) and bool(network.cut_from))
    if can_be_pretrained:
        console.note(f"begins with {network.pretrained or 'random weights; pretrained=true begins with ImageNet ones'}")
        if remark := network.check_start():
            console.remark(f"note: {remark}")
    dataset = read_images(options.dataset, network.shape.image_size, options.split_seed, console)
    train, validation = (
        part.take(subset(part.labels, n, options.split_seed)) if n else part
        for part, n in ((dataset.train, options.train_images), (dataset.validation, options.validation_images)))
    dataset = network.fed(dataset)
    if options.run is not None:  # Compare with the images of the search now, and not after hours of training.
        run = RunFolder(Path(os.path.expanduser(options.run)))
        searched = run.find_environment().get("dataset") or {}
        its_images = searched.get("fingerprint")
        if its_images not in (None, dataset.fingerprint) and searched.get("image_size") == dataset.image_size:
            console.say(f"note: these images are {dataset.fingerprint}, those of {run.path} are {its_images}: other "
                        "files, size or split, so that top-1 does not compare with its front. Give the search's "
                        "dataset options, and its seed as split_seed.")
    start = f" pretrained={network.pretrained.key}" if isinstance(network, FoundNetwork) and network.pretrained else ""
    identity = {
        "network": f"{network}{start}", "dataset": dataset.name, "dataset.fingerprint": dataset.fingerprint,
        "dataset.flip": dataset.flip, "image_size": network.shape.image_size, "train_images": len(train),
        "validation_images": len(validation), "seed": options.seed, **recipe.deciding()}
    return TrainingJob(network, dataset, train, validation, recipe, options.seed,
                       options.threads or len(usable_cores()), ModelFolder(out), identity)


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network on the CPU in eval mode, with the better of two weights on validation: average or last."""

    model: nn.Module
    rows: list[dict[str, Any]]
    averaged: bool


def train(job: TrainingJob, console: Console) -> TrainedNetwork:
    """Train from the last whole epoch, if there is one, to the end.

    The weights are the same as without an interruption (on one machine, with the same threads). Raises StudyError for
    a checkpoint of another training, TrainingError if the loss is not finite or memory runs out.
    """
    with seeded(job.seed, job.threads):
        training = _JobTraining(job)
        training.resume(job.checkpoint, job.identity)
        if training.rows:
            console.note(f"going on after epoch {len(training.rows)} of {training.batches.epochs}")
        if training.step < training.steps:
            with console.step("train") as report:
                training.run(training.report(report))
        last = training.rows[-1]
        averaged = training.average is not None and last["top1_validation_ema"] >= last["top1_validation"]
        model = (training.current if averaged else training.model).to(CPU).eval()
        return TrainedNetwork(model, training.rows, averaged)


class _JobTraining(Training):
    """The training of a job's network. After each epoch the network is validated and a checkpoint is written."""

    less = "Set a smaller batch_size; where an epoch is done already, with another out=FOLDER."

    def __init__(self, job: TrainingJob) -> None:
        self.job, self._loss, self._began = job, 0.0, 0.0
        batches = Batches(job.train, job.dataset, job.recipe, job.seed)
        reseed(job.seed, _INITIAL)
        super().__init__(lay_out(job.network.start(), job.recipe), batches, job.recipe)
        self.advice = (f"The last whole epoch stays in {job.folder.path}; set a smaller lr or clip_norm, or a longer "
                       "warmup, and another out=FOLDER.")

    def run(self, progress: Progress | None = None) -> None:
        """Train all steps that are left. The seconds of an epoch count from its first step."""
        self._began = time.monotonic()
        super().run(progress)

    def after_step(self, loss: float, rate: float) -> None:
        self._loss += loss
        steps = self.batches.steps_of(len(self.rows) + 1)
        if self.step < steps.stop:
            return
        # An epoch is complete: validate the last weights and their average, then write the checkpoint before the log.
        part, models = self.job.validation, (self.model, None if self.average is None else self.average.module)
        last, average = (None if model is None else grade(model, part, self.job.dataset).score for model in models)
        self.rows.append({"epoch": len(self.rows) + 1, "lr": rate, "train_loss": self._loss / len(steps),
                          "top1_validation": last, "top1_validation_ema": average,
                          "seconds": time.monotonic() - self._began})
        self.checkpoint(self.job.identity).save(self.job.checkpoint)
        write_atomic(self.job.folder.path / _LOG, table_csv(self.rows))
        self._loss, self._began = 0.0, time.monotonic()

    def report(self, report: Callable[[float, str], None]) -> Progress:
        """Return a `progress` that calls `report` with the finished share of the steps that are left now, and the
        epoch as text."""
        steps_left = self.steps - self.step

        def report_step(step: int, steps: int) -> None:
            last = self.rows[-1] if self.rows else {}
            best = max(last.get(f"top1_validation{of}") or 0.0 for of in ("", "_ema"))
            report(1 - (steps - step) / steps_left, f"epoch {len(self.rows) + 1} of {self.batches.epochs}"
                   + (f", validation {best:.2%}" if last else ""))

        return report_step


def read_summary(job: TrainingJob, console: Console) -> dict[str, Any] | None:
    """Return the summary of this training; None if it is not finished. Raises StudyError for that of another training.
    If a result is damaged, write a note, remove all results and return None: the training is done again."""
    summary = SUMMARY.find(job.summary)
    if summary is None:
        return None
    check_identity(summary["identity"], job.identity, job.summary)
    folder, manifest = job.folder, Manifest.find(job.folder.path)
    faults = [f"no {folder.manifest.name}"] if manifest is None else manifest.faults(
        folder.weights, folder.path / job.network.file, folder.onnx)
    if faults:
        console.say(f"{folder.path}: {'; '.join(faults)}. Trained again.")
        for path in (job.summary, folder.manifest, folder.onnx, folder.weights):
            path.unlink(missing_ok=True)
    return None if faults else summary


def write_results(job: TrainingJob, trained: TrainedNetwork, console: Console) -> dict[str, Any]:
    """Write all results into the folder and return the summary, which is written last. Then remove the checkpoint.

    Raises ExportError if the network cannot be exported; its weights stay in the folder.
    """
    folder, recipe, model, shape = job.folder, job.fingerprint, trained.model, job.network.shape.image
    network_file = folder.path / job.network.file
    write_atomic(network_file, job.network.describe())
    write_atomic(folder.path / _LOG, table_csv(trained.rows))
    mean, std = (",".join(f"{value:.6g}" for value in values) for values in (job.dataset.mean, job.dataset.std))
    write_atomic(folder.weights.with_suffix(".json"), json.dumps({"norm": f"mean {mean} std {std}"}) + "\n")
    write_atomic(folder.weights, pack_weights(model, recipe))
    # Only a file that answers like the torch model is kept. The test images are answered by that file.
    with console.step("export and score on the test set") as report:
        try:
            export_onnx(model, folder.onnx, shape, job.network.metadata(job.dataset, recipe))
            parity = check_parity(model, folder.onnx, parity_images(job.dataset, job.seed))
        except ExportError:
            folder.onnx.unlink(missing_ok=True)
            raise
        report(0.5, "test images")
        test_scores = _score(job)
    summary = finite({
        **SUMMARY.header, "network": str(job.network), "id": job.network.id, "recipe": recipe, **test_scores,
        "top1_validation": trained.rows[-1]["top1_validation_ema" if trained.averaged else "top1_validation"],
        "weights": "average" if trained.averaged else "last", "epochs": len(trained.rows),
        "params": count_params(model), "macs": count_macs(model, shape), "parity_max_abs_error": parity.max_abs_error,
        "parity_top1_agreement": parity.top1_agreement, "seconds_training": sum(row["seconds"] for row in trained.rows),
        "identity": job.identity, "device": job.recipe.device, "threads": job.threads, "host": Host.detect().name,
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}})
    # A summary says that the training is finished, so that everything else must be on the disk before it.
    Manifest.write(folder.path, (folder.weights, network_file, folder.onnx), recipe, asdict(parity))
    write_atomic(job.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    job.checkpoint.unlink(missing_ok=True)
    return dict(summary)


def _score(job: TrainingJob) -> dict[str, Any]:
    """Return the test top-1 of the exported file with its interval. Each answer is written to predictions.npz."""
    targets = job.dataset.test.targets
    predictions = deployed.predict(load_runtime(FP32.runtime).compile(job.folder.onnx, FP32), job.dataset)
    grades = load_task(job.dataset.task).grade(predictions, targets)
    low, high = grades.interval()
    run = RunFolder(job.folder.path)
    run.write_arrays(run.predictions, {job.network.id: predictions, "labels": targets})
    return {"top1_test": grades.score, "top1_test_low": low, "top1_test_high": high, "n_test": len(targets)}
