"""What a training leaves: weights, ONNX file behind the parity gate, test top-1 of that file, summary."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.progress import Console
from hwnas.errors import ExportError
from hwnas.networks.baselines import count_macs, count_params
from hwnas.networks.export import RECIPE_KEY, Parity, check_parity, export_onnx, parity_images, stored_fingerprint
from hwnas.networks.network import load_weights
from hwnas.runtimes.runtime import FP32, load_runtime, predict
from hwnas.stats import wilson
from hwnas.system.documents import Document, check_identity
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import Manifest, RunFolder
from hwnas.system.tables import finite, table_csv
from hwnas.target import Host
from hwnas.training.job import Trained, TrainingJob
from hwnas.training.loop import plain

if TYPE_CHECKING:
    from torch import nn

SUMMARY = Document("hwnas-training", 1, "the summary of a training", "Remove it to write it again, or choose another "
                   "out=FOLDER.")
_PACKAGES = ("torch", "timm", "onnx", "onnxruntime")


def read_summary(job: TrainingJob) -> dict[str, Any] | None:
    """The summary of this very training; None where it is not finished. StudyError for the summary of another
    training."""
    summary = SUMMARY.find(job.summary)
    if summary is None:
        return None
    check_identity(summary["identity"], job.identity, job.summary)
    return summary


def whole_summary(job: TrainingJob, console: Console) -> dict[str, Any] | None:
    """`read_summary` of a folder whose files are those that were made; None where the training must be done again.

    Files that can be made of whole weights are made again, and a line says so. Weights of an earlier version, without a
    manifest, count as whole when their header names this training.
    """
    summary = read_summary(job)
    if summary is None:
        return None
    folder, manifest, recipe = job.folder, Manifest.find(job.folder.path), _fingerprint(job)
    described = folder.path / job.network.file
    if manifest is None:
        faults = [f"no {folder.manifest.name} (of an earlier version)"]
        spoilt = stored_fingerprint(folder.weights) != recipe
    else:
        faults = manifest.faults(folder.weights, described, folder.onnx)
        spoilt = bool(manifest.fault(folder.weights))
    if not faults:
        return summary
    console.say(f"{folder.path}: {'; '.join(faults)}. {'Trained' if spoilt else 'Exported'} again.")
    if spoilt:
        for path in (job.summary, folder.manifest, folder.onnx, folder.weights):
            path.unlink(missing_ok=True)
        return None
    model = job.network.build()
    load_weights(model, folder.weights, str(folder.weights), job.network.shape.classes)
    write_atomic(described, job.network.describe())
    _list_files(job, _export(job, model.eval()))
    return summary


def _list_files(job: TrainingJob, parity: Parity) -> None:
    folder = job.folder
    Manifest.write(folder.path, (folder.weights, folder.path / job.network.file, folder.onnx), _fingerprint(job),
                   asdict(parity))


def write_results(job: TrainingJob, trained: Trained, console: Console) -> dict[str, Any]:
    """Fill the folder; the summary comes last, and then the checkpoint is no longer needed.

    ExportError when the network cannot be exported as it is; its weights stay.
    """
    write_atomic(job.folder.path / job.network.file, job.network.describe())
    write_atomic(job.log, table_csv(trained.rows))
    write_atomic(job.folder.weights, _weights(job, trained))
    macs = count_macs(trained.model, job.shape)
    with console.step("export and score on the test set") as report:
        parity = _export(job, trained.model)
        report(0.5, "test images")
        scored = _score(job)
    summary = finite({
        **SUMMARY.header, "network": str(job.network), "id": job.network.id, "recipe": _fingerprint(job), **scored,
        "top1_validation": trained.rows[-1]["top1_validation_ema" if trained.averaged else "top1_validation"],
        "weights": "average" if trained.averaged else "last", "epochs": len(trained.rows),
        "params": count_params(trained.model), "macs": macs, "parity_max_abs_error": parity.max_abs_error,
        "parity_top1_agreement": parity.top1_agreement, "seconds_training": sum(row["seconds"] for row in trained.rows),
        "identity": job.identity, "device": job.device, "threads": job.threads, "host": Host.detect().name,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}})
    _list_files(job, parity)
    write_atomic(job.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    job.checkpoint.unlink(missing_ok=True)
    return dict(summary)


def sentence(summary: dict[str, Any], folder: Path) -> str:
    """The result in one line."""
    return (f"{summary['network']}: test top-1 {summary['top1_test']:.2%} (95 %: {summary['top1_test_low']:.2%} to "
            f"{summary['top1_test_high']:.2%}) on {summary['n_test']} images, validation "
            f"{summary['top1_validation']:.2%}, {summary['epochs']} epochs in {summary['seconds_training']:.0f} s: "
            f"{folder}")


def _weights(job: TrainingJob, trained: Trained) -> bytes:
    from safetensors.torch import save

    tensors = {name: plain(tensor) for name, tensor in trained.model.state_dict().items()}
    return save(tensors, {RECIPE_KEY: _fingerprint(job)})  # one key: their order in the file is random


def _export(job: TrainingJob, model: nn.Module) -> Parity:
    try:
        export_onnx(model, job.folder.onnx, job.shape, _metadata(job))
        return check_parity(model, job.folder.onnx, parity_images(job.dataset, job.seed))
    except ExportError:
        job.folder.onnx.unlink(missing_ok=True)
        raise


def _score(job: TrainingJob) -> dict[str, Any]:
    """Test top-1 of the exported file with Wilson's interval; each answer goes to predictions.npz."""
    labels = job.dataset.test.labels
    predictions = predict(load_runtime(FP32.runtime).compile(job.folder.onnx, FP32), job.dataset)
    right = int((predictions == labels).sum())
    low, high = wilson(right, len(labels))
    RunFolder(job.folder.path).write_predictions(labels, {job.network.id: predictions})
    return {"top1_test": right / len(labels), "top1_test_low": low, "top1_test_high": high, "n_test": len(labels)}


def _fingerprint(job: TrainingJob) -> str:
    """Names everything that decides the weights."""
    return hashlib.sha256(json.dumps(dict(job.identity), sort_keys=True).encode()).hexdigest()[:16]


def _metadata(job: TrainingJob) -> dict[str, str]:
    """`metadata_props` of the ONNX file, as finalists have them (hwnas.front.make.metadata)."""
    from hwnas import __version__

    data = job.dataset
    return {
        "hwnas_version": __version__, "hwnas_id": job.network.id, "architecture": str(job.network),
        "dataset": data.name, "dataset_fingerprint": data.fingerprint, "recipe": _fingerprint(job),
        "input": f"float32 [n, {data.channels}, {data.image_size}, {data.image_size}], (pixels / 255 - mean) / std",
        **({"preparation": json.dumps(data.preparation.facts())} if data.preparation else {}),
        "mean": json.dumps(list(data.mean)), "std": json.dumps(list(data.std)),
        "class_names": json.dumps(list(data.class_names), ensure_ascii=False),
    }
