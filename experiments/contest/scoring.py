"""The deployed files of every training, and their answers to all test images in the deployment runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.contest.data import Images
from experiments.contest.networks import Network, Training
from experiments.contest.options import RECIPE, Options
from experiments.contest.training import folder_of, summary_of
from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, DataError, StudyError, TargetError
from hwnas.runtimes.runtime import load_runtime
from hwnas.stats import wilson
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.data.dataset import Dataset

PRECISIONS = ("fp32", "bf16", "int8")
N_CALIBRATION = 512
BATCH = 32  # of scoring, which is quicker so; what is timed is another batch


@dataclass(frozen=True)
class DeployedFile:
    """A file as it is deployed; `compressed`: hwnas.compress made it, kept in out/compressed/<training>/."""

    training: Training
    precision: str
    path: Path
    compressed: bool = False


@dataclass(frozen=True)
class Score:
    """`facts` as in score.json (top1, its 95 % interval, what was executed); `correct` [n] by test image."""

    facts: Mapping[str, Any]
    correct: NDArray[np.bool_]


def target_of(options: Options, precision: str, batch: int) -> Target:
    """The contest's target with another precision."""
    from omegaconf import OmegaConf

    from hwnas.cli.command import compose

    config = compose("search", [f"+target={options.target}"]).target
    target = Target.from_config(OmegaConf.to_container(config))  # type: ignore[arg-type]
    return replace(target, precision=precision, batch=batch)


def precisions_here(options: Options, console: Console) -> list[str]:
    """Those of PRECISIONS that this host has; the others are named."""
    found = []
    for precision in PRECISIONS:
        target = target_of(options, precision, 1)
        try:
            load_runtime(target.runtime).check(target)
            found.append(precision)
        except TargetError as error:
            console.say(f"{precision} takes no part: {error}")
    return found


def trainings(networks: Sequence[Network], seeds: int, out: Path) -> Iterator[Training]:
    """The finished ones."""
    for network in networks:
        for seed in range(seeds):
            if summary_of(out, Training(network, seed)):
                yield Training(network, seed)


def file_of(out: Path, training: Training, precision: str) -> DeployedFile:
    """Where the file of this precision lies or will lie; a compressed one, where there is one, is the int8 file."""
    if precision != "int8":
        return DeployedFile(training, precision, ModelFolder(folder_of(out, training)).onnx)
    compressed = ModelFolder(out / "compressed" / training.name).int8
    if compressed.is_file():
        return DeployedFile(training, precision, compressed, True)
    return DeployedFile(training, precision, ModelFolder(out / "deployed" / training.name).int8)


def score_all(networks: Sequence[Network], options: Options, console: Console) -> None:
    """Score what is not scored yet; a file that fails keeps its reason."""
    precisions = precisions_here(options, console)
    todo = [(training, precision) for training in trainings(networks, options.seeds, options.out)
            for precision in precisions if not _is_scored(options, training, precision)]
    images = Images(options)
    with console.step(f"score {len(todo)} files") as report:
        for index, (training, precision) in enumerate(todo):
            report(index / len(todo), f"{training.name} {precision}")
            try:
                _score(options, training, precision, images.of(training.name, summary_of(options.out, training) or {}))
            except (CandidateError, TargetError) as error:
                write_atomic(_folder(options.out, training, precision) / "score.json",
                             json.dumps({"reason": str(error)}) + "\n")
                console.say(f"{training.name} in {precision}: {error}")


def read_score(out: Path, training: Training, precision: str) -> Score | None:
    """None where it was not scored, or could not be."""
    folder = _folder(out, training, precision)
    try:
        facts = json.loads((folder / "score.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if "top1" not in facts:
        return None
    answers = RunFolder(folder).read_predictions()
    return Score(facts, answers["predicted"] == answers["labels"])


def _folder(out: Path, training: Training, precision: str) -> Path:
    return out / "scores" / training.name / precision


def _is_scored(options: Options, training: Training, precision: str) -> bool:
    """Whether this very file was scored by this version of the runtime."""
    from hwnas.system.documents import content_of

    file = file_of(options.out, training, precision)
    try:
        facts = json.loads((_folder(options.out, training, precision) / "score.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if "top1" not in facts or not file.path.is_file():
        return False
    runtime = load_runtime(target_of(options, precision, 1).runtime).version()
    return facts["file"] == content_of(file.path) and facts["runtime"] == runtime


def _score(options: Options, training: Training, precision: str, data: Dataset) -> None:
    """Answers first, then score.json, which says that they are whole."""
    from hwnas.runtimes.runtime import predict
    from hwnas.system.documents import content_of

    file, target = file_of(options.out, training, precision), target_of(options, precision, BATCH)
    step = _step_of(file, options)
    if precision == "int8" and not file.compressed:
        _quantise(options, training, file.path, target, data)
    runtime = load_runtime(target.runtime)
    compiled = runtime.compile(file.path, target)
    predicted, labels = predict(compiled, data), data.test.labels
    folder = _folder(options.out, training, precision)
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).write_predictions(labels, {"predicted": predicted})
    right = int((predicted == labels).sum())
    low, high = wilson(right, len(labels))
    executed = compiled.execution
    write_atomic(folder / "score.json", json.dumps({
        "top1": right / len(labels), "top1_low": low, "top1_high": high, "n": len(labels),
        "file": content_of(file.path), "compressed": step, "runtime": runtime.version(),
        "precisions": dict(executed.precisions), "int8_share": executed.int8_share}, indent=1) + "\n")


def _step_of(file: DeployedFile, options: Options) -> str:
    """The step of hwnas.compress that made the file, empty for another's; DataError when it fine-tuned with more
    images than the networks of the contest are trained with."""
    if not file.compressed:
        return ""
    path = file.path.with_name("summary.json")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        step, n = str(held["step"]), held["identity"].get("train_images")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StudyError(f"cannot read {path}: {error}. Give its python -m hwnas.compress again.") from None
    if step.startswith("qat") and (n is None or n > options.train_images):
        raise DataError(f"{path}: fine-tuned with {n or 'all'} training images, the networks here are trained on "
                        f"{options.train_images}. Compress it again with train_images={options.train_images}.")
    return step


def _quantise(options: Options, training: Training, path: Path, target: Target, data: Dataset) -> None:
    """Ranges come from images that the network was trained on."""
    from hwnas.data.dataset import subset
    from hwnas.networks.quantize import calibration_images, quantize_static, tuning_of

    rows = subset(data.train.labels, options.train_images, RECIPE["split_seed"])
    seen = replace(data, train=data.train.take(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    quantize_static(ModelFolder(folder_of(options.out, training)).onnx, path,
                    calibration_images(seen, N_CALIBRATION, training.seed), tuned_for=tuning_of(target))

