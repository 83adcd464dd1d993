"""TrainingJob: a training that takes long, checked before it starts, kept after each epoch, resumed bit for bit.

Its identity names all that decides it. It leaves weights, an ONNX file behind the parity gate, the test top-1 of that
file, and a summary.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, DatasetInfo, Split, subset, top1
from hwnas.data.loading import inspect_dataset, read_images
from hwnas.errors import ConfigError, DataError, ExportError, StudyError, did_you_mean
from hwnas.lazy import nn, safetensors
from hwnas.networks.around import find_start
from hwnas.networks.baselines import TIMM, Baseline, check_timm, count_macs, count_params
from hwnas.networks.export import RECIPE_KEY, Parity, check_parity, export_onnx, parity_images
from hwnas.networks.network import (
    FoundNetwork,
    Network,
    Shape,
    TimmNetwork,
    load_weights,
    read_architecture,
    read_network,
)
from hwnas.networks.origin import SUMMARY as SUMMARY
from hwnas.networks.weights import PretrainedOptions, find_pretrained
from hwnas.runtimes import runtime as deployed
from hwnas.runtimes.runtime import FP32, load_runtime
from hwnas.space.architecture import CUT, Architecture
from hwnas.stats import wilson
from hwnas.system.cores import usable_cores
from hwnas.system.documents import check_identity, content_of, yaml_text
from hwnas.system.libraries import version_of
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import Manifest, ModelFolder, RunFolder, WorkFolder
from hwnas.system.tables import finite, table_csv
from hwnas.target import Host
from hwnas.training.batches import Batches, reseed
from hwnas.training.loop import Training, lay_out, plain, predict, seeded
from hwnas.training.place import CPU, PLACES, check_precision, resolved
from hwnas.training.recipe import Recipe, recipe_of

_LARGEST_PX = 224  # largest size that timm networks are trained at, unless dataset.image_size says otherwise
_INITIAL = 1 << 32  # no epoch: the key of the random numbers that weights are made of


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of `conf/train.yaml` beside the recipe's, which stand at its top level too."""

    architecture: str | None = option()
    run: str | None = option()
    model: str | None = option()
    dataset: dict[str, Any] = option()
    stem_stride: int = option(low=0, high=1)
    weights: Path | None = option(is_file=True)
    pretrained: PretrainedOptions = option()
    out: str | None = option()
    overwrite: bool = option()
    seed: int = option(low=0)
    split_seed: int = option(low=0)
    train_images: int | None = option(low=2)
    validation_images: int | None = option(low=2)
    device: str = option(choices=PLACES)
    threads: int = option(low=0, high=4096)


@dataclass(frozen=True)
class TrainingJob:
    """A network, the data and the recipe. Its `device` and `threads` change rounding only."""

    network: Network
    dataset: Dataset
    train: Split
    validation: Split
    recipe: Recipe
    weights: Path | None
    seed: int
    threads: int
    folder: ModelFolder
    identity: Mapping[str, Any]

    @property
    def device(self) -> str:
        """Where it is trained: `cpu` or `cuda`."""
        return self.recipe.device

    @property
    def checkpoint(self) -> Path:
        """The last whole epoch."""
        return self.folder.path / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """`log.csv`."""
        return self.folder.path / "log.csv"

    @property
    def summary(self) -> Path:
        """`summary.json`, written last."""
        return self.folder.path / "summary.json"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        return self.network.shape.image

    def build(self) -> nn.Module:
        """The network in train mode, with random weights (seed torch first) or those it begins with."""
        if self.weights is None:
            return self.network.start()
        model = self.network.build()
        load_weights(model, self.weights, f"weights {self.weights}", self.network.shape.classes)
        return model


def make_job(config: Config, console: Console, within: Path | None = None) -> TrainingJob:
    """Read and check every option, load the data, try the folder; a UserError names what is wrong.

    `within`: the folder of the work that this training is a part of.
    """
    recipe, options = recipe_of(config), read_command(TrainOptions, config)
    recipe = replace(recipe, device=resolved(options.device, "device"))
    check_precision(recipe.precision, recipe.device)
    info = inspect_dataset(options.dataset)
    source = _begun(_source(options, info), options, info.channels)
    network = _network(source, options.dataset.get("image_size"), info)
    out = Path(options.out or Path("runs") / f"train-{network.id}-{info.name}")
    WorkFolder(out, "train").take_up(options.overwrite, within)
    if options.weights is None and (isinstance(source, Baseline) or source.cut_from):
        console.note(f"begins with {source.pretrained or 'random weights; pretrained=true begins with ImageNet ones'}")
        if source.pretrained is not None and isinstance(source, Baseline) and (said := source.pretrained.load(
                network.build(), network.shape.classes)):
            console.remark(f"note: {said}")
    dataset = read_images(options.dataset, network.shape.image_size, options.split_seed, console)
    train, validation = (
        part.take(subset(part.labels, n, options.split_seed)) if n else part
        for part, n in ((dataset.train, options.train_images), (dataset.validation, options.validation_images)))
    dataset = network.fed(dataset)
    if options.run is not None:
        _note_other_images(RunFolder(Path(os.path.expanduser(options.run))), dataset, console)
    Batches(train, dataset, recipe, options.seed)  # says where there are too few images
    identity = {
        "network": identity_of(network), "dataset": dataset.name, "dataset.fingerprint": dataset.fingerprint,
        "dataset.flip": dataset.flip, "image_size": network.shape.image_size, "train_images": len(train),
        "validation_images": len(validation), "seed": options.seed,
        "weights": options.weights and content_of(options.weights), **recipe.deciding()}
    return TrainingJob(network, dataset, train, validation, recipe, options.weights, options.seed,
                       options.threads or len(usable_cores()), ModelFolder(out), identity)


def _note_other_images(run: RunFolder, dataset: Dataset, console: Console) -> None:
    """Say now, not after hours, that a network trained on these images does not compare with the run's front."""
    theirs = (run.find_environment().get("dataset") or {}).get("fingerprint")
    if theirs not in (None, dataset.fingerprint):
        console.say(f"note: these images are {dataset.fingerprint}, those of {run.path} are {theirs}: other files, "
                    "size or split, so that top-1 does not compare with its front. Give the search's dataset options, "
                    "and its seed as split_seed.")


def identity_of(network: Network) -> str:
    """The network in the identity of a training: its text, and the key of pretrained weights that this does not
    name."""
    begun = network.pretrained is not None and isinstance(network, FoundNetwork)
    return f"{network} pretrained={network.pretrained.key}" if begun and network.pretrained else str(network)


def _begun(source: FoundNetwork | Baseline, options: TrainOptions, channels: int) -> FoundNetwork | Baseline:
    """The network with the pretrained weights that it is to begin with, where they are asked for.

    Otherwise a network that once began with some keeps their normalisation if given weights come from it.
    """
    if options.pretrained.asked:
        name = source.name if isinstance(source, Baseline) else source.cut_from
        if not name or options.weights is not None:
            raise ConfigError("pretrained goes with model=timm:NAME or a network that is cut from one, and without "
                              "weights. Leave it or these out.")
        if not isinstance(source, Baseline):
            return replace(source, pretrained=find_start(source.architecture.around, options.pretrained, channels))
        weights, pad_type = find_pretrained(name, options.pretrained, channels)
        return replace(source, pad_type=pad_type, pretrained=weights)
    return source if options.weights is not None else replace(source, pretrained=None)


def _source(options: TrainOptions, info: DatasetInfo) -> FoundNetwork | Baseline:
    name, given = options.model, options.architecture
    if name is not None and given is None:
        if not name.startswith(TIMM):
            raise ConfigError(f"model must be timm:NAME, got {name!r}; a network of a search is run=FOLDER "
                              "architecture=ID.")
        check_timm(name.removeprefix(TIMM))
        return Baseline(name.removeprefix(TIMM), options.stem_stride)
    if given is None or name is not None:
        raise ConfigError(f"which network? Give architecture=PATH of {_FORMS}, or model=timm:NAME.")
    if options.stem_stride:
        raise ConfigError("stem_stride goes with model=timm:NAME; an architecture says its own. Leave it out.")
    if options.run is not None:
        return _of_run(RunFolder.open(os.path.expanduser(options.run), write=False), given, info)
    path = Path(os.path.expanduser(given))
    if given.startswith(CUT) or (given.startswith(("stem", TIMM)) and not path.exists()):
        return FoundNetwork(Architecture.parse(given, info.channels, info.classes))
    if path.is_dir():
        return _in_folder(ModelFolder(path), info)
    if not path.is_file():
        raise ConfigError(f"architecture: there is no file {given[:200]}. Give the path of {_FORMS}.")
    try:
        return read_architecture(yaml_text(path), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"architecture: {path} cannot be read ({error}).") from None


_FORMS = ("an architecture.yaml or of a folder models/ID, the text of a network as in trials.csv, or an id of "
          "trials.csv with run=FOLDER")


def _in_folder(folder: ModelFolder, info: DatasetInfo) -> FoundNetwork | Baseline:
    """The network of a folder of models/, or of an earlier training."""
    network = read_network(folder, Shape(info.channels, info.native_size, info.classes))
    if not isinstance(network, FoundNetwork | TimmNetwork):
        raise ConfigError(f"architecture: {folder.path} has neither architecture.yaml nor baseline.yaml. Give the path "
                          f"of {_FORMS}.")
    return network if isinstance(network, FoundNetwork) else network.baseline


def _of_run(run: RunFolder, id: str, info: DatasetInfo) -> FoundNetwork | Baseline:
    """The network that a search calls `id`: a trial, or a control or baseline in models/."""
    texts = {row["id"]: row["architecture"] for row in run.read_trials() if row.get("id") and row.get("architecture")}
    models = {path.name: path for path in sorted((run.path / "models").glob("*")) if path.is_dir()}
    if id in texts and not (id in models and ModelFolder(models[id]).architecture.is_file()):
        return FoundNetwork(Architecture.parse(texts[id], info.channels, info.classes))
    if id in models:
        return _in_folder(ModelFolder(models[id]), info)
    if not texts:
        raise StudyError(f"{run.path} has no networks in trials.csv yet. Finish its search first.")
    raise ConfigError(f"architecture: {run.path} has no network {id[:100]!r}."
                      f"{did_you_mean(id, [*texts, *models], 0.4)} {run.trials_csv} lists the {len(texts)} that it "
                      "tried.")


def _network(source: FoundNetwork | Baseline, asked: int | None, info: DatasetInfo) -> Network:
    """The network for a data set's images; DataError when an architecture was made for others."""
    if isinstance(source, Baseline):
        size = asked or source.image_size or min(info.native_size, _LARGEST_PX)
        return TimmNetwork(replace(source, image_size=0), Shape(info.channels, size, info.classes))
    shape = source.shape
    for what, its, wanted in (("channels", info.channels, shape.channels), ("classes", info.classes, shape.classes)):
        if its != wanted:
            raise DataError(f"the architecture was made for {wanted} {what}, the data set {info.name} has {its}. "
                            "Give the data set that it was searched on.")
    if asked not in (None, shape.image_size):
        raise DataError(f"the architecture was made for {shape.image_size} px, dataset.image_size is {asked}. "
                        "Leave dataset.image_size out.")
    return source


@dataclass(frozen=True)
class Trained:
    """A trained network on the CPU in eval mode: the average or the last weights, whichever validates better."""

    model: nn.Module
    rows: list[dict[str, Any]]
    averaged: bool


def train(job: TrainingJob, console: Console) -> Trained:
    """Train from the last whole epoch to the end.

    The weights are the same as without an interruption (on one machine, with the same threads). StudyError for a
    checkpoint of another training, TrainingError when the loss is not finite or memory runs out.
    """
    with seeded(job.seed, job.threads):
        training = _JobTraining(job)
        training.resume(job.checkpoint, job.identity)
        if training.epoch:
            console.note(f"going on after epoch {training.epoch} of {training.batches.epochs}")
        if training.epoch < training.batches.epochs:
            with console.step("train") as report:
                training.run(training.report(report))
        return training.result()


class _JobTraining(Training):
    """A job's network in training; validated and kept after each epoch."""

    less = "Set a smaller batch_size; where an epoch is done already, with another out=FOLDER."

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        batches = Batches(job.train, job.dataset, job.recipe, job.seed)
        reseed(job.seed, _INITIAL)
        super().__init__(lay_out(job.build(), job.recipe), batches, job.recipe)
        self.advice = (f"The last whole epoch stays in {job.folder.path}; set a smaller lr or clip_norm, or a longer "
                       "warmup, and another out=FOLDER.")

    def look(self) -> Mapping[str, Any]:
        average = None if self.average is None else self._top1(self.average.module)
        return {"top1_validation": self._top1(self.model), "top1_validation_ema": average}

    def _top1(self, model: nn.Module) -> float:
        part = self.job.validation
        return top1(predict(model, part.images, self.job.dataset), part.labels)

    def keep(self) -> None:
        self.checkpoint(self.job.identity).save(self.job.checkpoint)
        write_atomic(self.job.log, table_csv(self.rows))

    def result(self) -> Trained:
        """The better of the two on validation images, the average where both are as good."""
        last = self.rows[-1]
        averaged = self.average is not None and last["top1_validation_ema"] >= last["top1_validation"]
        return Trained((self.current if averaged else self.model).to(CPU).eval(), self.rows, averaged)


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
    """Return `read_summary` of a folder whose files are those that were made; None if it must be trained again, which
    a line says."""
    summary = read_summary(job)
    if summary is None:
        return None
    folder, manifest = job.folder, Manifest.find(job.folder.path)
    faults = [f"no {folder.manifest.name}"] if manifest is None else manifest.faults(
        folder.weights, folder.path / job.network.file, folder.onnx)
    if faults:
        console.say(f"{folder.path}: {'; '.join(faults)}. Trained again.")
        for path in (job.summary, folder.manifest, folder.onnx, folder.weights):
            path.unlink(missing_ok=True)
    return None if faults else summary


def write_results(job: TrainingJob, trained: Trained, console: Console) -> dict[str, Any]:
    """Fill the folder; the summary comes last, and then the checkpoint is no longer needed.

    ExportError when the network cannot be exported as it is; its weights stay.
    """
    write_atomic(job.folder.path / job.network.file, job.network.describe())
    write_atomic(job.log, table_csv(trained.rows))
    mean, std = (",".join(f"{value:.6g}" for value in values) for values in (job.dataset.mean, job.dataset.std))
    write_atomic(job.folder.weights.with_suffix(".json"), json.dumps({"norm": f"mean {mean} std {std}"}) + "\n")
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
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}})
    Manifest.write(job.folder.path, (job.folder.weights, job.folder.path / job.network.file, job.folder.onnx),
                   _fingerprint(job), asdict(parity))
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
    tensors = {name: plain(tensor) for name, tensor in trained.model.state_dict().items()}
    # One key, because the order of keys in the file is random.
    return safetensors.torch.save(tensors, {RECIPE_KEY: _fingerprint(job)})


def _export(job: TrainingJob, model: nn.Module) -> Parity:
    try:
        export_onnx(model, job.folder.onnx, job.shape, job.network.metadata(job.dataset, _fingerprint(job)))
        return check_parity(model, job.folder.onnx, parity_images(job.dataset, job.seed))
    except ExportError:
        job.folder.onnx.unlink(missing_ok=True)
        raise


def _score(job: TrainingJob) -> dict[str, Any]:
    """Test top-1 of the exported file with Wilson's interval; each answer goes to predictions.npz."""
    labels = job.dataset.test.labels
    predictions = deployed.predict(load_runtime(FP32.runtime).compile(job.folder.onnx, FP32), job.dataset)
    right = int((predictions == labels).sum())
    low, high = wilson(right, len(labels))
    RunFolder(job.folder.path).write_predictions(labels, {job.network.id: predictions})
    return {"top1_test": right / len(labels), "top1_test_low": low, "top1_test_high": high, "n_test": len(labels)}


def _fingerprint(job: TrainingJob) -> str:
    """Names everything that decides the weights."""
    return hashlib.sha256(json.dumps(dict(job.identity), sort_keys=True).encode()).hexdigest()[:16]
