"""The contract tests for a third party's runtime, task, estimator, sampler, data set or objective.

They are plain assertions, for any test runner.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from hwnas.accuracy.estimator import Source
from hwnas.data.dataset import Listing
from hwnas.errors import HwnasError
from hwnas.lazy import onnx
from hwnas.runtimes.runtime import Compiled
from hwnas.study.objective import FP32_FILE, KnownObjective

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from hwnas.accuracy.estimator import AccuracyEstimator
    from hwnas.data.dataset import DatasetOptions
    from hwnas.runtimes.runtime import Runtime
    from hwnas.space.architecture import Architecture
    from hwnas.space.blocks.block import BlockSpec
    from hwnas.target import Target
    from hwnas.tasks.task import Task


def check_task(task: Task, outputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], names: Sequence[str]) -> None:
    """Assert that a task keeps the `Task` contract for one network's outputs.

    Args:
        task: The task that the entry point gives.
        outputs: A network's outputs [n, ...], float32, for at least eight images of which some are answered rightly.
        targets: The right answers [n, ...].
        names: The names of the classes.

    Raises:
        AssertionError: The contract is broken; the message is its rule.
    """
    n = len(outputs)
    assert outputs.shape[1] == task.n_outputs(len(names)), "n_outputs is the length of the outputs' second axis"
    answers = task.answers(outputs)
    assert len(answers) == n, "answers has an entry for each image"
    parts = np.concatenate([task.answers(outputs[:3]), task.answers(outputs[3:])])
    assert np.array_equal(parts, answers), "an answer does not depend on the other images"
    assert (task.confidence(outputs) is not None) == task.is_sure, "confidence is there if is_sure says so"
    grades = task.grade(answers, targets)
    assert 0 <= grades.score <= 1, "a score is a share"
    assert len(grades.per_image) == n, "per_image has an entry for each image"
    assert grades.per_image.min() >= 0, "per_image are shares"
    assert grades.per_image.max() <= 1, "per_image are shares"
    low, high = grades.interval()
    assert low <= grades.score <= high, "the interval holds the score"
    assert grades.minus(grades)[0] == 0, "a network is as good as itself"
    assert {*grades.by_class(names)} <= {*names}, "by_class names classes"
    same = task.agreement(outputs, outputs)
    assert (same["agreement"], same["lost"]) == (1.0, 0.0), "outputs agree with themselves"
    assert len(task.tell(outputs, names)) == n, "tell has a list for each image"
    columns, rows = task.class_table(grades, answers, targets, names)
    assert all(len(row) == len(columns) for row in rows), "class_table has a cell for each column"
    outputs_of, code, shown = task.card(len(names))
    assert outputs_of, "a card says what the outputs are"
    exec(f"{code}\n{shown}", {"np": np, "logits": outputs[:2], "classes": list(names)})


def check_runtime(runtime: Runtime, onnx_path: str | os.PathLike[str], target: Target, *,
                  reference: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None = None,
                  relative_error: float = 1e-3) -> None:
    """Assert that a runtime keeps the `Runtime` and `Compiled` contract for one file and target.

    Args:
        runtime: The runtime that the entry point gives.
        onnx_path: A file that takes float32 [batch, c, h, w] and gives [batch, classes].
        target: A target of this runtime.
        reference: The expected logits [n, classes] of `contract_images(onnx_path, n)`.
        relative_error: The largest error of a logit, as a share of the largest logit.

    Raises:
        AssertionError: The contract is broken; the message is its rule.
    """
    _check_refusals(runtime, onnx_path, target)
    runtime.check(target)
    compiled = runtime.compile(onnx_path, target)
    execution = compiled.execution
    assert execution.precision == target.precision, "Execution.precision is what the target asks for"
    assert 0 <= execution.fallback_share <= 1, "fallback_share is a share"
    assert execution.int8_share is None or 0 < execution.int8_share <= 1, "int8_share is a share, or None"
    assert all(count > 0 for count in execution.precisions.values()), "precisions counts nodes"

    batch = target.batch
    for n in (batch, 2 * batch + 1):
        logits = compiled.logits(contract_images(onnx_path, n))
        assert logits.shape[0] == n, "logits answers any number of images"
        assert logits.ndim == 2, "logits is [n, classes]"
        assert logits.dtype == np.float32, "logits is float32"
        assert np.isfinite(logits).all(), "logits is finite"
    if reference is not None:
        got = compiled.logits(contract_images(onnx_path, len(reference)))
        error = float(np.abs(got - reference).max() / np.abs(reference).max())
        assert error <= relative_error, f"logits are {error:.2g} off the reference (relative)"

    _check_bind(compiled, onnx_path, batch)
    nodes = compiled.profile(contract_images(onnx_path, batch), 5)
    assert nodes, "profile names the executed nodes"
    assert all(node.name and node.ms >= 0 for node in nodes), "nodes have a name and a time"


def contract_images(onnx_path: str | os.PathLike[str], n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return `n` random normal images of the file's input shape. Image i is the same for every `n`."""
    shape = [axis.dim_value for axis in onnx.load(os.fspath(onnx_path)).graph.input[0].type.tensor_type.shape.dim[1:]]
    return np.random.default_rng(0).standard_normal((n, *shape), np.float32)


def _check_refusals(runtime: Runtime, onnx_path: str | os.PathLike[str], target: Target) -> None:
    assert runtime.name == target.runtime, "the target names this runtime"
    assert runtime.version().startswith(f"{runtime.name} "), "version() is `name version`"
    _check_refused(lambda: runtime.check(replace(target, device="no such device")), "check(), of an unknown device")
    _check_refused(lambda: runtime.compile(f"{os.fspath(onnx_path)}.absent", target), "compile(), of an absent file")


def _check_refused(call: Callable[[], object], what: str) -> None:
    message = None
    try:
        call()
    except HwnasError as error:
        message = str(error)
    assert message is not None, f"{what}: raises an HwnasError"
    assert message, f"{what}: says why"
    assert "\n" not in message, f"{what}: in one line"


def _check_bind(compiled: object, onnx_path: str | os.PathLike[str], batch: int) -> None:
    assert isinstance(compiled, Compiled), "compile() returns a Compiled"
    first = compiled.bind(contract_images(onnx_path, batch))
    second = compiled.bind(contract_images(onnx_path, batch) + 1)
    for run in (first, second, first):
        run()
    try:
        compiled.bind(contract_images(onnx_path, batch + 1))
    except ValueError:
        return
    raise AssertionError("bind() refuses another batch than the target's")


def check_estimator(estimator: AccuracyEstimator, architecture: Architecture) -> None:
    """Assert that an estimator keeps the `AccuracyEstimator` contract.

    Args:
        estimator: The estimator that the entry point gives. It evaluates twice, so it should be quick.
        architecture: An architecture that it can judge.

    Raises:
        AssertionError: The contract is broken; the message is its rule.
    """
    fingerprint = estimator.fingerprint
    assert fingerprint, "fingerprint names what decides the values"
    first, again = (estimator.evaluate(architecture, 7) for _ in range(2))
    assert first.value == again.value, "same architecture and seed: same value"
    assert 0 <= first.low <= first.value <= first.high <= 1, "value and interval are fractions, low <= value <= high"
    assert 0 <= first.std < 1, "std is a fraction"
    assert first.seconds >= 0, "seconds are what it cost"
    assert first.source in get_args(Source), "source is one of Estimate's"
    assert estimator.fingerprint == fingerprint, "evaluating changes no fingerprint"


def check_sampler(make: Callable[..., BaseSampler], n_trials: int = 12) -> None:
    """Assert that `make(seed=…)`, the entry point of a sampler, makes one that a search can use and repeat."""
    import optuna

    def asked(seed: int) -> list[dict[str, Any]]:
        sampler = make(seed=seed)
        assert isinstance(sampler, optuna.samplers.BaseSampler), "make(seed=) gives an Optuna BaseSampler"
        study = optuna.create_study(sampler=sampler, directions=["maximize", "minimize"])
        for _ in range(n_trials):
            trial = study.ask()
            depth, kernel = trial.suggest_int("depth", 0, 9), trial.suggest_categorical("kernel", (3, 5))
            study.tell(trial, (depth / 10, float(depth + kernel)))
        return [trial.params for trial in study.trials]

    first = asked(3)
    assert first == asked(3), "the same seed asks for the same networks"
    assert len({tuple(params.values()) for params in first}) > 1, "it asks for different networks"


def check_dataset(listing_of: Callable[[DatasetOptions], Listing], options: DatasetOptions) -> None:
    """Assert that `listing_of`, the entry point of a data set, keeps the `Listing` contract for these options."""
    listing, again = listing_of(options), listing_of(options)
    assert isinstance(listing, Listing), "the entry point returns a Listing"
    assert listing.identity, "identity names the content"
    assert listing.identity == again.identity, "the same content has the same identity"
    assert listing.info.classes == len(listing.class_names) >= 2, "class_names name every class, two at least"
    assert "train" in listing.parts, "parts hold train"
    assert {*listing.parts} <= {"train", "val", "test"}, "parts are train, val and test"
    for part, labels in listing.parts.items():
        assert labels.dtype == np.int64, f"{part}: labels are int64"
        assert labels.min() >= 0, f"{part}: labels count from 0"
        assert labels.max() < listing.info.classes, f"{part}: labels are below the number of classes"
        rows = np.arange(0, len(labels), max(1, len(labels) // 8))
        (images, kept), = listing.read([(part, rows)], 16, None)
        assert images.dtype == np.uint8, "images are uint8"
        assert images.shape == (int(kept.sum()), listing.info.channels, 16, 16), "images are [kept, c, size, size]"
        assert kept.shape == rows.shape, "kept says of each row whether it could be read"
        (other, _), = listing.read([(part, rows)], 16, None)
        assert np.array_equal(images, other), "the same rows give the same images"


def check_cost(cost: KnownObjective, blocks: Sequence[BlockSpec], terms: Target | None = None) -> None:
    """Assert that a known objective can be computed from a network's `blocks` before a training."""
    assert isinstance(cost, KnownObjective), "the entry point is a KnownObjective"
    assert cost.predicted != cost.exact or cost.of_file is None, "what is measured has a column of its own"
    terms = terms or FP32_FILE
    value = float(cost.of(1.0, blocks, terms))
    assert np.isfinite(value), "a cost is a number"
    assert value == float(cost.of(1.0, blocks, terms)), "the same network has the same cost"
    assert cost.shown(value), "a cost can be shown"
    assert cost.shown(None) == "", "a cost that is not known is shown as nothing"
