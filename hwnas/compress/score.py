"""Scorer: what a file of a compression answers, and how long it takes, in the target's runtime on this host."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.progress import Console
from hwnas.errors import MeasurementInvalid
from hwnas.front.score import LEAST_ROUNDS
from hwnas.latency.harness import measure
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.runtimes.answers import predict
from hwnas.runtimes.runtime import load_runtime
from hwnas.target.host import Host

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.compress.job import CompressJob
    from hwnas.data.dataset import Split
    from hwnas.runtimes.runtime import Compiled
    from hwnas.target.target import Target


@dataclass(frozen=True)
class Scorer:
    """Files run as the job's target runs them; `precision` fp32 means the same runtime, threads and batch."""

    job: CompressJob

    def target(self, precision: str) -> Target:
        """The job's target in this precision."""
        return replace(self.job.target, precision=precision)

    def compiled(self, path: Path, precision: str) -> Compiled:
        """CandidateError when the runtime does not take it."""
        return load_runtime(self.job.target.runtime).compile(path, self.target(precision))

    def right(self, path: Path, precision: str, split: Split | None = None) -> tuple[NDArray[np.bool_], dict[str, Any]]:
        """Which images of `split` (validation) are answered right, and what was executed."""
        split = self.job.validation if split is None else split
        compiled = self.compiled(path, precision)
        found = predict(compiled, replace(self.job.dataset, test=split))  # `predict` asks about the test set
        execution = asdict(replace(compiled.execution, precisions=dict(compiled.execution.precisions)))
        return found == split.labels, execution

    def logits(self, path: Path, precision: str, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n, classes] of normalised images."""
        return self.compiled(path, precision).logits(images)

    def time(self, files: Mapping[str, tuple[Path, str]], console: Console, copies: int = 4) -> dict[str, Measurement]:
        """Latency of every (file, precision), all in the same interleaved rounds beside the fixed reference network.

        MeasurementInvalid when the machine was too restless, or the time too short, for one of them.
        """
        from hwnas.latency.reference import QuietTimes, reference_file

        job, shape = self.job, self.job.source.shape
        quiet = QuietTimes(Host.detect(), load_runtime(job.target.runtime).version(), job.target)
        protocol = Protocol(copies=copies, min_rounds=LEAST_ROUNDS, max_seconds=job.options.seconds)

        def bound(path: Path, target: Target, shape: tuple[int, ...]) -> list[Callable[[], None]]:
            images = np.random.default_rng(0).standard_normal((target.batch, *shape), dtype=np.float32)
            runtime = load_runtime(target.runtime)
            return [runtime.compile(path, target).bind(images) for _ in range(copies)]

        with tempfile.TemporaryDirectory(prefix="hwnas-") as folder, console.step("time") as report:
            calls = {name: bound(path, self.target(precision), shape) for name, (path, precision) in files.items()}
            target = replace(self.target("int8"), batch=1)
            path = reference_file(target, Path(folder))
            reference = bound(path, target, _image_of(path))
            found = measure(calls, reference, protocol, seed=job.options.seed, quiet_ms=quiet.load(), progress=report,
                            threads=job.target.threads)
        invalid = [f"{name}: {one.reason or 'too few turns for an error'}" for name, one in found.items()
                   if not np.isfinite(one.std_ms)]
        if invalid:
            raise MeasurementInvalid(f"{len(invalid)} of {len(found)} files could not be timed ({invalid[0]}). Stop "
                                     "what else runs here and give the command again, perhaps with more seconds=N: "
                                     "finished steps stay.")
        quiet.store(min(one.quiet_ms for one in found.values()))
        return found


def _image_of(path: Path) -> tuple[int, ...]:
    import onnx

    return tuple(axis.dim_value for axis in onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim[1:])
