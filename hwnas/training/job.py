"""TrainingJob: a training that takes long, checked before it starts, kept after each epoch, resumed bit for bit.

Its identity names all that decides it. It leaves weights, an ONNX file behind the parity gate, the test top-1 of that
file, and a summary.
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
_INITIAL = 1 << 32  # no epoch: the key of the random numbers that weights are made of


@dataclass(frozen=True)
class TrainingJob:
    """A network, the data and the recipe. Its `device` and `threads` change rounding only."""

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
        """The last whole epoch."""
        return self.folder.path / "checkpoint.safetensors"

    @property
    def summary(self) -> Path:
        """`summary.json`, written last."""
        return self.folder.path / "summary.json"

    @property
    def fingerprint(self) -> str:
        """Names everything that decides the weights."""
        return hashlib.sha256(json.dumps(dict(self.identity), sort_keys=True).encode()).hexdigest()[:16]


def make_job(config: Config, console: Console) -> TrainingJob:
    """Read and check every option, load the data, try the folder; a UserError names what is wrong."""
    options = read_command(TrainOptions, config)
    check_precision(recipe_of(config).precision, resolved(options.device, "device"))
    info = inspect_dataset(options.dataset)
    recipe = replace(recipe_of(config, load_task(info.task).recipe), device=resolved(options.device, "device"))
    network = find_network(options, info)
    out = Path(options.out or Path("runs") / f"train-{network.id}-{info.name}")
    WorkFolder(out, "train").take_up(options.overwrite)
    may_begin = isinstance(network, TimmNetwork) or (isinstance(network, FoundNetwork) and bool(network.cut_from))
    if may_begin:
        console.note(f"begins with {network.pretrained or 'random weights; pretrained=true begins with ImageNet ones'}")
        if said := network.check_start():
            console.remark(f"note: {said}")
    dataset = read_images(options.dataset, network.shape.image_size, options.split_seed, console)
    train, validation = (
        part.take(subset(part.labels, n, options.split_seed)) if n else part
        for part, n in ((dataset.train, options.train_images), (dataset.validation, options.validation_images)))
    dataset = network.fed(dataset)
    if options.run is not None:  # said now, not after hours
        run = RunFolder(Path(os.path.expanduser(options.run)))
        held = run.find_environment().get("dataset") or {}
        theirs = held.get("fingerprint")
        if theirs not in (None, dataset.fingerprint) and held.get("image_size") == dataset.image_size:
            console.say(f"note: these images are {dataset.fingerprint}, those of {run.path} are {theirs}: other files, "
                        "size or split, so that top-1 does not compare with its front. Give the search's dataset "
                        "options, and its seed as split_seed.")
    start = f" pretrained={network.pretrained.key}" if isinstance(network, FoundNetwork) and network.pretrained else ""
    identity = {
        "network": f"{network}{start}", "dataset": dataset.name, "dataset.fingerprint": dataset.fingerprint,
        "dataset.flip": dataset.flip, "image_size": network.shape.image_size, "train_images": len(train),
        "validation_images": len(validation), "seed": options.seed, **recipe.deciding()}
    return TrainingJob(network, dataset, train, validation, recipe, options.seed,
                       options.threads or len(usable_cores()), ModelFolder(out), identity)


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network on the CPU in eval mode: the average or the last weights, whichever validates better."""

    model: nn.Module
    rows: list[dict[str, Any]]
    averaged: bool


def train(job: TrainingJob, console: Console) -> TrainedNetwork:
    """Train from the last whole epoch to the end.

    The weights are the same as without an interruption (on one machine, with the same threads). StudyError for a
    checkpoint of another training, TrainingError when the loss is not finite or memory runs out.
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
    """A job's network in training; validated and kept after each epoch."""

    less = "Set a smaller batch_size; where an epoch is done already, with another out=FOLDER."

    def __init__(self, job: TrainingJob) -> None:
        self.job, self._loss, self._began = job, 0.0, 0.0
        batches = Batches(job.train, job.dataset, job.recipe, job.seed)
        reseed(job.seed, _INITIAL)
        super().__init__(lay_out(job.network.start(), job.recipe), batches, job.recipe)
        self.advice = (f"The last whole epoch stays in {job.folder.path}; set a smaller lr or clip_norm, or a longer "
                       "warmup, and another out=FOLDER.")

    def run(self, progress: Progress | None = None) -> None:
        """Every step that is left; the seconds of an epoch count from its first."""
        self._began = time.monotonic()
        super().run(progress)

    def after_step(self, loss: float, rate: float) -> None:
        self._loss += loss
        steps = self.batches.steps_of(len(self.rows) + 1)
        if self.step < steps.stop:
            return
        part, models = self.job.validation, (self.model, None if self.average is None else self.average.module)
        last, average = (None if model is None else grade(model, part, self.job.dataset).score for model in models)
        self.rows.append({"epoch": len(self.rows) + 1, "lr": rate, "train_loss": self._loss / len(steps),
                          "top1_validation": last, "top1_validation_ema": average,
                          "seconds": time.monotonic() - self._began})
        self.checkpoint(self.job.identity).save(self.job.checkpoint)
        write_atomic(self.job.folder.path / _LOG, table_csv(self.rows))
        self._loss, self._began = 0.0, time.monotonic()

    def report(self, report: Callable[[float, str], None]) -> Progress:
        """A `progress` that tells `report` the share of what was left when this was called, and the epoch."""
        left = self.steps - self.step

        def tell(step: int, steps: int) -> None:
            last = self.rows[-1] if self.rows else {}
            best = max(last.get(f"top1_validation{of}") or 0.0 for of in ("", "_ema"))
            report(1 - (steps - step) / left, f"epoch {len(self.rows) + 1} of {self.batches.epochs}"
                   + (f", validation {best:.2%}" if last else ""))

        return tell


def read_summary(job: TrainingJob, console: Console) -> dict[str, Any] | None:
    """Return the summary of this very training; None if it is not finished, or must be done again as files of it are
    damaged, which a line says. StudyError for the summary of another training."""
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
    """Fill the folder; the summary comes last, and then the checkpoint is no longer needed.

    ExportError when the network cannot be exported as it is; its weights stay.
    """
    folder, recipe, model, shape = job.folder, job.fingerprint, trained.model, job.network.shape.image
    described = folder.path / job.network.file
    write_atomic(described, job.network.describe())
    write_atomic(folder.path / _LOG, table_csv(trained.rows))
    mean, std = (",".join(f"{value:.6g}" for value in values) for values in (job.dataset.mean, job.dataset.std))
    write_atomic(folder.weights.with_suffix(".json"), json.dumps({"norm": f"mean {mean} std {std}"}) + "\n")
    write_atomic(folder.weights, pack_weights(model, recipe))
    with console.step("export and score on the test set") as report:
        try:
            export_onnx(model, folder.onnx, shape, job.network.metadata(job.dataset, recipe))
            parity = check_parity(model, folder.onnx, parity_images(job.dataset, job.seed))
        except ExportError:
            folder.onnx.unlink(missing_ok=True)
            raise
        report(0.5, "test images")
        scored = _score(job)
    summary = finite({
        **SUMMARY.header, "network": str(job.network), "id": job.network.id, "recipe": recipe, **scored,
        "top1_validation": trained.rows[-1]["top1_validation_ema" if trained.averaged else "top1_validation"],
        "weights": "average" if trained.averaged else "last", "epochs": len(trained.rows),
        "params": count_params(model), "macs": count_macs(model, shape), "parity_max_abs_error": parity.max_abs_error,
        "parity_top1_agreement": parity.top1_agreement, "seconds_training": sum(row["seconds"] for row in trained.rows),
        "identity": job.identity, "device": job.recipe.device, "threads": job.threads, "host": Host.detect().name,
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}})
    Manifest.write(folder.path, (folder.weights, described, folder.onnx), recipe, asdict(parity))
    write_atomic(job.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    job.checkpoint.unlink(missing_ok=True)
    return dict(summary)


def _score(job: TrainingJob) -> dict[str, Any]:
    """Test top-1 of the exported file with Wilson's interval; each answer goes to predictions.npz."""
    targets = job.dataset.test.targets
    predictions = deployed.predict(load_runtime(FP32.runtime).compile(job.folder.onnx, FP32), job.dataset)
    grades = load_task(job.dataset.task).grade(predictions, targets)
    low, high = grades.interval()
    run = RunFolder(job.folder.path)
    run.write_arrays(run.predictions, {job.network.id: predictions, "labels": targets})
    return {"top1_test": grades.score, "top1_test_low": low, "top1_test_high": high, "n_test": len(targets)}
