"""Steps: each makes an int8 file in its own way, and scores and times it. A killed run keeps the finished ones."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.progress import Console
from hwnas.compress.job import CompressJob
from hwnas.errors import CandidateError, MeasurementInvalid
from hwnas.front.comparison import paired_bootstrap
from hwnas.front.score import LEAST_ROUNDS
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.timing import Reference, TimedFile, time_files
from hwnas.runtimes.runtime import load_runtime, predict
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import Content
from hwnas.system.tables import finite

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from hwnas.data.dataset import Split
    from hwnas.runtimes.runtime import Compiled
    from hwnas.target import Target


@dataclass(frozen=True)
class Scorer:
    """Scores and times files in the job's target. `precision` fp32 means the same runtime, threads and batch."""

    job: CompressJob

    def target(self, precision: str) -> Target:
        """The job's target in this precision."""
        return replace(self.job.target, precision=precision)

    def compiled(self, path: Path, precision: str) -> Compiled:
        """The file compiled for the target; CandidateError when the runtime refuses it."""
        return load_runtime(self.job.target.runtime).compile(path, self.target(precision))

    def right(self, path: Path, precision: str, split: Split | None = None) -> tuple[NDArray[np.bool_], dict[str, Any]]:
        """Which images of `split` (None: validation) get the right answer [n], and what was executed."""
        split = self.job.validation if split is None else split
        compiled = self.compiled(path, precision)
        answers = predict(compiled, replace(self.job.dataset, test=split))  # `predict` asks about the test set
        execution = asdict(replace(compiled.execution, precisions=dict(compiled.execution.precisions)))
        return answers == split.labels, execution

    def logits(self, path: Path, precision: str, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n, classes] of normalised images."""
        return self.compiled(path, precision).logits(images)

    def time(self, files: Mapping[str, tuple[Path, str]], console: Console, copies: int = 4) -> dict[str, Measurement]:
        """Latency of every (file, precision), all in the same interleaved rounds, beside the fixed reference network.

        MeasurementInvalid when the machine was too restless, or the time was too short, for a file.
        """
        job = self.job
        reference = Reference.of_host(job.target, load_runtime(job.target.runtime).version())
        protocol = Protocol(copies=copies, min_rounds=LEAST_ROUNDS, max_seconds=job.options.seconds)
        timed = {name: TimedFile(path, self.target(precision), job.source.shape)
                 for name, (path, precision) in files.items()}
        with console.step("time") as report:
            measurements = time_files(timed, self.target("int8"), reference, protocol, seed=job.options.seed,
                                      progress=report)
        invalid = [f"{name}: {measurement.reason or 'too few turns for an error'}"
                   for name, measurement in measurements.items() if not np.isfinite(measurement.std_ms)]
        if invalid:
            raise MeasurementInvalid(f"{len(invalid)} of {len(measurements)} files could not be timed ({invalid[0]}). "
                                     "Stop what else runs here and give the command again, perhaps with more "
                                     "seconds=N: finished steps stay.")
        reference.keep(measurements.values())
        return measurements


STEP = Document("hwnas-compress-step", 1, "a step of a compression", "Remove it to take that step again.", shape={
    "settings": dict, "error": str, "files?": {"*": {"size": int, "sha256": str}}, "right": str,
    "validation_images": int, "about": {"kept?": [str]}})
REFERENCE = "fp32"


@dataclass(frozen=True)
class Step:
    """A file and its answers. `right` marks the right answers on validation images; it is empty after an `error`.

    `about` holds further facts: nodes left in fp32, shares executed in int8, seconds.
    """

    name: str
    what: str
    path: Path
    right: NDArray[np.bool_]
    about: dict[str, Any]
    error: str = ""

    @property
    def top1(self) -> float:
        """Validation top-1, 0 to 1; NaN if the step failed."""
        return math.nan if self.error else float(self.right.mean())

    @property
    def kept(self) -> tuple[str, ...]:
        """Nodes left in fp32."""
        return tuple(self.about.get("kept", ()))

    def drop(self, reference: Step) -> tuple[float, float, float]:
        """Points of top-1 lost against `reference`, with the paired 95 % interval."""
        if self.error:
            return math.nan, math.nan, math.nan
        difference, low, high = paired_bootstrap(reference.right, self.right)
        return 100 * difference, 100 * low, 100 * high

    def keeps(self, reference: Step, max_drop: float) -> bool:
        """Whether no more than `max_drop` points are lost."""
        return not self.error and self.drop(reference)[0] <= max_drop + 1e-9


@dataclass(frozen=True)
class Steps:
    """The steps of a job. Finished ones are read from its folder."""

    job: CompressJob
    scorer: Scorer
    console: Console = field(default_factory=lambda: Console(quiet=True))

    @cached_property
    def reference(self) -> Step:
        """The fp32 network in the target's runtime, with its threads and batch."""
        right, executed = self.scorer.right(self.job.source.path, REFERENCE)
        return Step(REFERENCE, "fp32 reference", self.job.source.path, right, executed)

    def take(self, name: str, what: str, make: Callable[[], tuple[ModelProto, dict[str, Any]]],
             settings: Mapping[str, Any] = MappingProxyType({}), also: tuple[Path, ...] = ()) -> Step:
        """The step `name`: make, write and score a QDQ network. If it cannot be made or run, the step says why.

        A step that was finished with the same `settings` is read if its file, and what else `make` writes (`also`), are
        those that were made. The settings are what decides it besides the job.
        """
        path = self.job.steps / f"{name}.onnx"
        step = self._read_stored(name, what, (path, *also), finite(settings))
        if step is not None:
            return step
        path.with_suffix(".json").unlink(missing_ok=True)  # otherwise a kill could leave old answers beside a new file
        start = time.monotonic()
        try:
            proto, about = make()
            write_atomic(path, proto.SerializeToString())
            right, executed = self.scorer.right(path, "int8")
            step = Step(name, what, path, right, {**about, **executed, "seconds": time.monotonic() - start})
        except CandidateError as error:
            step = Step(name, what, path, np.zeros(0, bool), {"seconds": time.monotonic() - start}, str(error))
        self._store(step, settings, (path, *also))
        return step

    def _store(self, step: Step, settings: Mapping[str, Any], files: Sequence[Path]) -> None:
        contents = {path.name: asdict(content) for path in files if (content := Content.of(path)) is not None}
        data = finite({**STEP.header, "name": step.name, "what": step.what, "error": step.error,
                       "settings": settings, "about": step.about, "files": contents,
                       "validation_images": len(step.right), "right": np.packbits(step.right).tobytes().hex()})
        write_atomic(step.path.with_suffix(".json"), json.dumps(data, indent=1) + "\n")

    def _read_stored(self, name: str, what: str, files: Sequence[Path], settings: Mapping[str, Any]) -> Step | None:
        where = files[0].with_suffix(".json")
        data = STEP.find(where)
        if data is None:
            return None
        with STEP.reading(where):
            if data["settings"] != settings:
                return None
            made = {key: Content(entry["size"], entry["sha256"]) for key, entry in data.get("files", {}).items()}
            spoilt = [] if data["error"] else [path for path in files if Content.of(path) != made.get(path.name)]
            if spoilt:
                why = "is not the file that was made" if made else "cannot be checked (of an earlier version)"
                self.console.say(f"{spoilt[0]} {why}: step {name} is taken again.")
                return None
            bits = np.frombuffer(bytes.fromhex(data["right"]), np.uint8)
            right = np.unpackbits(bits, count=data["validation_images"]).astype(bool)
            return Step(name, what, files[0], right, data["about"], data["error"])
