"""Score and time exported networks in the deployment runtime: all of them together, on one machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset, subset
from hwnas.errors import CandidateError, TargetError
from hwnas.front.rows import FrontRow
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import P99_SAMPLES, Measurement, Protocol, describe_machine
from hwnas.latency.timing import HERE, Device, time_files
from hwnas.networks.network import Network
from hwnas.runtimes.runtime import FP32, Answers, answer, deployed_of, load_runtime, predict
from hwnas.space.architecture import Architecture
from hwnas.system.cores import usable_cores
from hwnas.system.run_folder import ModelFolder
from hwnas.target import Host, Target
from hwnas.tasks.task import Grades, load_task

LEAST_ROUNDS = 24  # turns of every network, so that published times cover a longer time than a calibration does
GRADING_THREADS = 4  # of an fp32 file: several may be graded at once, and one core may answer as fast by the int8 file
MOST_VALIDATED = 2048  # validation images, at most, that deployed files answer: for pairs, and to check the test set
PAUSED_CALLS = 21  # calls of each network after a pause; the pauses take about half a second in all
LEAST_CALLS = -(-P99_SAMPLES // LEAST_ROUNDS)  # calls of a turn: all turns together suffice for a 99th percentile
# Columns that a verification fills.
_MEASURED = ("top1_test", "top1_test_low", "top1_test_high", "latency_ms", "latency_ms_low", "latency_ms_high",
             "latency_ms_p50", "latency_ms_p90", "latency_ms_p99", "quiet_share", "slowdown", "pause_factor",
             "int8_share", "fallback_share", "threads")


@dataclass(frozen=True)
class Timing:
    """The settings of a timing: the reference network, the most seconds, the seed of the order, and the device, on
    which networks are scored too."""

    reference: Architecture
    seconds: float = 45.0
    seed: int = 0
    device: Device = HERE


@dataclass
class Scores:
    """The results: completed rows and, by row id, answers to test images, their grades, answers to `validated_rows`,
    raw samples, and facts of the executions."""

    rows: list[FrontRow]
    answers: dict[str, Answers] = field(default_factory=dict)
    grades: dict[str, Grades] = field(default_factory=dict)
    validated: dict[str, Answers] = field(default_factory=dict)
    measurements: dict[str, Measurement] = field(default_factory=dict)
    executed: dict[str, dict[str, Any]] = field(default_factory=dict)


def fp32_grades(path: Path, dataset: Dataset) -> Grades:
    """Grade an fp32 ONNX file's answers to the test images, in ONNX Runtime."""
    target = replace(FP32, threads=min(GRADING_THREADS, len(usable_cores())))
    compiled = load_runtime(target.runtime).compile(path, target)
    return load_task(dataset.task).grade(predict(compiled, dataset), dataset.test.targets)


def validated_rows(dataset: Dataset) -> NDArray[np.int64]:
    """Return the indices of the validation images that deployed files answer: about MOST_VALIDATED at most."""
    return subset(dataset.validation.labels, MOST_VALIDATED, 0)


def compare_sets(path: Path, dataset: Dataset) -> str:
    """Return a remark if an fp32 ONNX file's test and validation scores have disjoint 95 % intervals, or an empty text.

    Args:
        path: The file, of a network that was trained on neither set.
        dataset: Images at the size that the file takes.
    """
    validation = dataset.validation.take(validated_rows(dataset))
    of_test, of_validation = (fp32_grades(path, each) for each in (dataset, replace(dataset, test=validation)))
    (low, high), (least, most) = of_test.interval(), of_validation.interval()
    if low <= most and least <= high:
        return ""
    return (f"test images differ from validation images: one network has {of_test.score:.1%} on the test images (95 %: "
            f"{low:.1%} to {high:.1%}) and {of_validation.score:.1%} on the validation images ({least:.1%} to "
            f"{most:.1%})")


def scoring_seconds(folder: ModelFolder, network: Network, dataset: Dataset, target: Target, device: Device) -> float:
    """Return the seconds that `device` takes to score an exported network, and to compile the copies that are timed. It
    is scored twice, and the second time counts: the first one sends the images, once for all networks."""
    path = deployed_of(folder.deployed(target.precision), target.runtime)
    start = time.monotonic()
    compiled = device.runtime(target.runtime).compile(path, target)
    compiling_s, data = time.monotonic() - start, network.fed(dataset, later=True)
    predict(compiled, data)
    start = time.monotonic()
    predict(compiled, data)
    return (time.monotonic() - start) * (1 + validated_share(data)) + (1 + Protocol().copies) * compiling_s


def validated_share(dataset: Dataset) -> float:
    """Return the number of validation images that a deployed file answers for each test image, for a task of pairs."""
    n = min(MOST_VALIDATED, len(dataset.validation)) if load_task(dataset.task).is_sure else 0
    return n / max(1, len(dataset.test))


def verify_rows(rows: Sequence[FrontRow], files: Mapping[str, tuple[Path, Target]], dataset: Dataset, target: Target,
                timing: Timing, console: Console, refused: Mapping[str, str]) -> Scores:
    """Compile, score and time every row that has an exported file; the others keep their reason. `files` has each row's
    file and its target, by id. `target` runs the reference network that is timed beside them. `refused` has, by id, the
    reason why a file is not opened. A row is verified if it was scored and its timing is valid. Raises TargetError if
    the device cannot run a target."""
    for each in dict.fromkeys([target, *(own_target for _, own_target in files.values())]):
        timing.device.runtime(each.runtime).check(each)
    scores, task, timed = Scores([]), load_task(dataset.task), dict[str, TimedFile]()
    with console.step("score on the test set") as report:
        for index, row in enumerate(rows):
            def report_share(share: float, at: int = index) -> None:
                report((at + share) / len(rows), rows[at].id)

            (path, own_target), network = files[row.id], row.network
            # A row that failed in an earlier verification is tried again, if its file is there.
            reason = refused.get(row.id, "") if path.is_file() else row.reason or "its exported file is missing"
            if path.is_file() and network is None:
                reason = f"{path.parent} does not describe the network (no architecture.yaml or baseline.yaml)"
            if network is not None and not reason:
                try:
                    compiled = timing.device.runtime(own_target.runtime).compile(path, own_target)
                    data = network.fed(dataset, later=True)
                    # Pairs of networks need a confidence for each answer, also on validation images.
                    if len(data.validation) and task.is_sure:
                        part = data.validation.take(validated_rows(data))
                        scores.validated[row.id] = answer(compiled, data, part)
                    answers = answer(compiled, data, data.test, report_share)
                    scores.grades[row.id] = task.grade(answers.values, data.test.targets)
                    scores.answers[row.id], scores.executed[row.id] = answers, compiled.execution.to_dict()
                    timed[row.id] = TimedFile(path, own_target, network.shape.image)
                except (CandidateError, TargetError) as error:
                    reason = str(error)
            scores.rows.append(replace(row, reason=reason))
            report_share(1.0)
    # All scored files are timed in the same rounds, so that disturbances meet all of them alike.
    scores.measurements = _time(timed, target, timing, console)
    scores.rows = [_fill(row, scores, dataset, files[row.id][1], timing.device.host) for row in scores.rows]
    return scores


def _time(files: Mapping[str, TimedFile], target: Target, timing: Timing, console: Console) -> dict[str, Measurement]:
    if not files:
        return {}
    protocol = Protocol(min_rounds=LEAST_ROUNDS, min_calls=LEAST_CALLS, max_seconds=timing.seconds,
                        paused_calls=PAUSED_CALLS)
    with console.step("time networks", timing.seconds) as report:
        measurements = time_files(files, target, timing.reference, protocol,
                                  seed=timing.seed, progress=report, device=timing.device)
    console.say(describe_machine(measurements.values()))
    return measurements


def _fill(row: FrontRow, scores: Scores, dataset: Dataset, target: Target, host: Host) -> FrontRow:
    """Return the row with its results. Figures of an earlier verification are removed."""
    unmeasured: dict[str, Any] = {"verified": False, "precision": "", **dict.fromkeys(_MEASURED)}
    row = replace(row, target=target.name, **unmeasured)
    if row.id not in scores.answers:
        return row
    low, high = scores.grades[row.id].interval()
    execution = scores.executed[row.id]
    row = replace(row, top1_test=scores.grades[row.id].score, top1_test_low=low, top1_test_high=high,
                  n_test=len(dataset.test), precision=execution["precision"], int8_share=execution["int8_share"],
                  fallback_share=execution["fallback_share"], host=host.name, threads=target.threads or host.cores)
    measurement = scores.measurements[row.id]
    if measurement.turns:
        row = replace(row, latency_ms_p50=measurement.percentile_ms(0.5), latency_ms_p90=measurement.percentile_ms(0.9),
                      latency_ms_p99=measurement.percentile_ms(0.99), quiet_share=measurement.quiet_share,
                      slowdown=measurement.slowdown, pause_factor=measurement.pause_factor)
    if not measurement.valid:
        return replace(row, reason=f"timing INVALID: {measurement.reason}")
    return replace(row, verified=True, latency_ms=measurement.latency_ms, latency_ms_low=measurement.latency_ms_low,
                   latency_ms_high=measurement.latency_ms_high)
