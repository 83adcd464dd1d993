"""Contract tests for the doors: what a third party's runtime or estimator must pass. Plain assertions, for any test
runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from hwnas.errors import HwnasError

if TYPE_CHECKING:
    from hwnas.accuracy.estimator import AccuracyEstimator
    from hwnas.runtimes.runtime import Runtime
    from hwnas.space.architecture import Architecture
    from hwnas.target.target import Target


def check_runtime(runtime: Runtime, onnx_path: str | os.PathLike[str], target: Target, *,
                  reference: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None = None,
                  relative_error: float = 1e-3) -> None:
    """Assert that `runtime` keeps the `Runtime` and `Compiled` contract for one ONNX file and target.

    The file takes float32 [batch,c,h,w] and gives [batch, classes]. `reference`: logits that are expected for
    `contract_images(onnx_path, len(reference))`, within `relative_error` of the largest.
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
    """`n` normal random images of the shape that the file takes; the first ones are the same for every `n`."""
    import onnx

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
    from hwnas.runtimes.runtime import Compiled

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
    """Assert that `estimator` keeps the `AccuracyEstimator` contract for one architecture it can tell about.

    It is asked three times, so let it be quick.
    """
    from hwnas.accuracy.estimator import Source

    fingerprint = estimator.fingerprint
    assert fingerprint, "fingerprint names what decides the values"
    first, again = (estimator.evaluate(architecture, (), 7) for _ in range(2))
    assert (first.value, first.curve) == (again.value, again.curve), "same architecture, history, seed: same value"
    assert 0 <= first.low <= first.value <= first.high <= 1, "value and interval are fractions, low <= value <= high"
    assert 0 <= first.std < 1, "std is a fraction"
    assert first.seconds >= 0, "seconds are what it cost"
    assert first.source in get_args(Source), "source is one of Estimate's"
    assert all(0 <= top1 <= 1 for top1 in first.curve), "curve holds fractions"
    assert not first.stopped, "nothing is stopped where there is no history"
    history = [(1.0,) * max(1, len(first.curve))] * 50
    later = estimator.evaluate(architecture, history, 7)
    assert 0 <= later.value <= 1, "a history of better trials may stop it, not fail it"
    assert estimator.fingerprint == fingerprint, "evaluating changes no fingerprint"
