"""Steps: each makes an int8 file in its own way, and scores and times it. A killed run keeps the finished ones.

Post-training steps choose ranges by four methods, then correct biases, then give each tensor one scale, then keep
sensitive nodes in fp32. Each node's cost in accuracy and in time is measured; the best bargains come first.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.progress import Console
from hwnas.compress.job import CompressJob
from hwnas.errors import CandidateError, MeasurementInvalid
from hwnas.front.comparison import paired_difference
from hwnas.front.score import LEAST_ROUNDS
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.timing import Reference, reference_network, time_files
from hwnas.networks.qdq import Graph, Range, quantised_nodes
from hwnas.networks.quantize import (
    Method,
    TunedFor,
    activation_ranges,
    copy_network,
    corrected,
    load_fp32,
    quantise_graph,
)
from hwnas.runtimes.runtime import predict
from hwnas.system.documents import Document, content_of
from hwnas.system.paths import temporary_folder, write_atomic
from hwnas.system.run_folder import Content
from hwnas.system.tables import finite

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from hwnas.data.dataset import Split
    from hwnas.runtimes.runtime import Compiled


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
        return points_lost(reference.right, self.right)

    def keeps(self, reference: Step, max_drop: float) -> bool:
        """Whether no more than `max_drop` points are lost."""
        return not self.error and self.drop(reference)[0] <= max_drop + 1e-9


def points_lost(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Points of top-1 between right answers to the same images [n], with the paired 95 % interval."""
    difference, low, high = paired_difference(before, after)
    return 100 * difference, 100 * low, 100 * high


@dataclass(frozen=True)
class Steps:
    """The steps of a job, finished ones read from its folder; and what scores and times files in the job's target, on
    its device. `precision` fp32 means the same runtime, threads and batch."""

    job: CompressJob
    console: Console = field(default_factory=lambda: Console(quiet=True))

    @cached_property
    def reference(self) -> Step:
        """The fp32 network in the target's runtime, with its threads and batch."""
        right, executed = self.right(self.job.source.path, REFERENCE)
        return Step(REFERENCE, "fp32 reference", self.job.source.path, right, executed)

    def right(self, path: Path, precision: str, split: Split | None = None) -> tuple[NDArray[np.bool_], dict[str, Any]]:
        """Which images of `split` (None: validation) get the right answer [n], and what was executed."""
        split = self.job.validation if split is None else split
        compiled = self._compiled(path, precision)
        answers = predict(compiled, replace(self.job.dataset, test=split))  # `predict` asks about the test set
        return answers == split.labels, compiled.execution.to_dict()

    def logits(self, path: Path, precision: str, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n, classes] of normalised images."""
        return self._compiled(path, precision).logits(images)

    def _compiled(self, path: Path, precision: str) -> Compiled:
        return self.job.runtime.compile(path, replace(self.job.target, precision=precision))

    def time(self, files: Mapping[str, tuple[Path, str]], copies: int = 4) -> dict[str, Measurement]:
        """Latency of every (file, precision), all in the same interleaved rounds, beside the fixed reference network.

        MeasurementInvalid when the machine was too restless, or the time was too short, for a file.
        """
        job = self.job
        reference = Reference(reference_network())
        protocol = Protocol(copies=copies, min_rounds=LEAST_ROUNDS, max_seconds=job.options.seconds)
        timed = {name: TimedFile(path, replace(job.target, precision=precision), job.source.shape)
                 for name, (path, precision) in files.items()}
        with self.console.step("time") as report:
            measurements = time_files(timed, job.target, reference, protocol, seed=job.options.seed, progress=report,
                                      device=job.device)
        invalid = [f"{name}: {measurement.reason or 'too few turns for an error'}"
                   for name, measurement in measurements.items() if not np.isfinite(measurement.std_ms)]
        if invalid:
            raise MeasurementInvalid(f"{len(invalid)} of {len(measurements)} files could not be timed ({invalid[0]}). "
                                     "Stop what else runs here and give the command again, perhaps with more "
                                     "seconds=N: finished steps stay.")
        return measurements

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
            right, executed = self.right(path, "int8")
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
                self.console.say(f"{spoilt[0]} is not the file that was made: step {name} is taken again.")
                return None
            bits = np.frombuffer(bytes.fromhex(data["right"]), np.uint8)
            right = np.unpackbits(bits, count=data["validation_images"]).astype(bool)
            return Step(name, what, files[0], right, data["about"], data["error"])


_METHODS: dict[Method, str] = {"mse": "smallest squared error", "minmax": "extremes",
                               "percentile": "all but 0.01 % on each side", "entropy": "smallest divergence"}
_BIAS_IMAGES = 256


@dataclass(frozen=True)
class Quantisation:
    """How a network becomes int8: `network` (fp32, perhaps with corrected biases), `original` (without)."""

    network: ModelProto
    original: ModelProto
    ranges: Mapping[str, Range]
    note: str
    tuned_for: TunedFor
    narrow: bool
    per_channel: bool = True

    def int8(self, kept: Collection[str] = ()) -> ModelProto:
        """The QDQ network; the nodes of `kept` stay in fp32."""
        network = copy_network(self.network)
        before = {node.name: node for node in self.original.graph.node}
        for node in network.graph.node:
            if node.name in kept:
                node.CopyFrom(before[node.name])
        note = f"{self.note}, fp32: {' '.join(sorted(kept))}" if kept else self.note
        quantise_graph(network, self.ranges, note=note, tuned_for=self.tuned_for, kept=kept,
                       per_channel=self.per_channel, narrow=self.narrow)
        return network


class PostTraining:
    """The steps that need no training, cheapest first; `best` is what later steps build on."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._job = steps, steps.job
        self._original = load_fp32(self._job.source.path)
        self._found: dict[str, Step] = {}
        self._ranges, self._corrected = cache(self._calibrate), cache(self._correct_bias)

    def steps(self) -> Iterator[Step]:
        """The steps, each as soon as it is finished."""
        for method, text in _METHODS.items():
            yield self._take(method, f"weights per channel, ranges by {method} ({text})")
        yield self._take(f"{self.best_method}_bias", f"{self.best_method}, biases corrected layer by layer")
        yield self._take(f"{self.best_method}_per_tensor", f"{self.best_method}, one weight scale a tensor")

    @property
    def best_method(self) -> Method:
        """The method whose plain file is right most often on validation images; the first of equals."""
        name = _best({name: step for name, step in self._found.items() if name in _METHODS})
        return next(method for method in _METHODS if method == name)

    def best(self) -> Quantisation:
        """The quantisation of the per-channel step with most right answers."""
        return self.quantisation(_best({name: step for name, step in self._found.items() if "tensor" not in name}))

    def quantisation(self, name: str) -> Quantisation:
        """The quantisation of the step `name`."""
        method = next(method for method in _METHODS if name.startswith(method))
        plain = Quantisation(self._original, self._original, self._ranges()[method], name, self._job.tuned_for,
                             self._job.narrow)
        if name.endswith("_per_tensor"):
            return replace(plain, per_channel=False)
        return replace(plain, network=self._corrected(method)) if name.endswith("_bias") else plain

    def _take(self, name: str, what: str) -> Step:
        self._found[name] = self._steps.take(name, what, lambda: (self.quantisation(name).int8(), {}))
        return self._found[name]

    def _calibrate(self) -> Mapping[Method, Mapping[str, Range]]:
        job = self._job
        with self._steps.console.step("calibrate"):
            return activation_ranges(self._original, job.calibration, list(_METHODS), tuned_for=job.tuned_for,
                                     threads=job.threads)

    def _correct_bias(self, method: Method) -> ModelProto:
        job, images = self._job, spread(len(self._job.calibration), _BIAS_IMAGES)
        with self._steps.console.step("correct biases") as report:
            return corrected(self._original, self._ranges()[method], job.calibration[images], tuned_for=job.tuned_for,
                             narrow=job.narrow, threads=job.threads, progress=report)


def _best(steps: Mapping[str, Step]) -> str:
    return max(steps, key=lambda name: (not steps[name].error, steps[name].right.sum()))


def spread(n: int, wanted: int) -> Sequence[int]:
    """At most `wanted` row numbers, evenly spread over `n`."""
    return [index * n // min(n, wanted) for index in range(min(n, wanted))]


SENSITIVITY = Document("hwnas-sensitivity", 1, "what single nodes cost", "Remove it to measure again.")
_COPIES = 2  # copies of each network in the timing of single nodes: there are many nodes
_LEAST_COST = 0.005  # share of the whole latency below which a node's cost is noise
_ALL_INT8 = ""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The effect on the int8 network when one node stays in fp32.

    `recovered`: how much error power of the logits it removes, as a share of the fp32 logits' power. `sqnr_db`: the
    signal-to-noise ratio after that. `cost_ms`: the milliseconds it adds. `bargain`: recovered per millisecond.
    """

    node: str
    recovered: float
    sqnr_db: float
    cost_ms: float
    bargain: float


class KeptNodes:
    """Steps that leave more and more nodes of a quantised network in fp32. `prefix` begins their names."""

    def __init__(self, steps: Steps, base: Quantisation, prefix: str) -> None:
        self._steps, self._base, self._prefix, self._job = steps, base, prefix, steps.job
        options = self._job.options.sensitivity
        self._settings = {"base": content_of(self._job.steps / f"{base.note}.onnx"), **asdict(options)}
        self._images = self._job.calibration[spread(len(self._job.calibration), options.images)]

    def steps(self) -> Iterator[Step]:
        """The steps: each keeps one more node in fp32, and has a smaller error than the one before."""
        kept: tuple[str, ...] = ()
        with temporary_folder() as folder:
            scratch = Path(folder) / "int8.onnx"
            sensitivities = self._sensitivities(scratch)
            least = self._error(scratch, kept)
            for sensitivity in sensitivities:
                error = self._error(scratch, (*kept, sensitivity.node))
                if error >= least:
                    continue
                kept, least = (*kept, sensitivity.node), error
                yield self._take(kept, sensitivities)

    def _take(self, kept: tuple[str, ...], sensitivities: list[Sensitivity]) -> Step:
        why = [asdict(sensitivity) for sensitivity in sensitivities if sensitivity.node in kept]
        what = f"{self._base.note}, {len(kept)} node{'' if len(kept) == 1 else 's'} in fp32"
        return self._steps.take(f"{self._prefix}_kept{len(kept)}", what,
                                lambda: (self._base.int8(kept), {"kept": list(kept), "why": why}),
                                {"base": self._settings["base"], "kept": list(kept)})

    def _sensitivities(self, scratch: Path) -> list[Sensitivity]:
        """The most sensitive nodes, by what they recover per millisecond, the best first; later runs reuse them."""
        path = self._job.steps / f"{self._prefix}_sensitivity.json"
        stored = SENSITIVITY.find(path)
        if stored is None or stored.get("settings") != self._settings:
            stored = {**SENSITIVITY.header, "settings": self._settings}
        if "chosen" not in stored:
            errors = self._errors(path, stored, scratch)
            stored["chosen"] = [asdict(sensitivity) for sensitivity in self._time(errors)]
            _write(path, stored)
        return [Sensitivity(**row) for row in stored["chosen"]]

    def _errors(self, path: Path, stored: dict[str, Any], scratch: Path) -> dict[str, float]:
        """Error power with each node in fp32, and with none. Each result is stored at once."""
        errors: dict[str, Any] = stored.setdefault("errors", {})
        names = [_ALL_INT8, *(node.name for node in quantised_nodes(Graph(self._base.original)))]
        with self._steps.console.step("sensitivity of each node") as report:
            for index, name in enumerate(names):
                if name not in errors:
                    errors[name] = self._error(scratch, (name,) if name else ())
                    _write(path, stored)
                report((index + 1) / len(names), name)
        return {name: math.inf if error is None else error for name, error in errors.items()}

    def _error(self, scratch: Path, kept: tuple[str, ...]) -> float:
        """Squared error of the int8 logits over the power of the fp32 ones; infinite if the network cannot run."""
        try:
            scratch.write_bytes(self._base.int8(kept).SerializeToString())
            got = self._steps.logits(scratch, "int8", self._images)
        except CandidateError:
            return math.inf
        return float(np.square(got - self._wanted).sum() / max(float(np.square(self._wanted).sum()), 1e-12))

    @cached_property
    def _wanted(self) -> NDArray[np.float32]:
        """Logits of the network before it was quantised."""
        with temporary_folder() as folder:
            path = Path(folder) / "fp32.onnx"
            path.write_bytes(self._base.original.SerializeToString())
            return self._steps.logits(path, "fp32", self._images)

    def _time(self, errors: dict[str, float]) -> list[Sensitivity]:
        """Time the nodes that remove most of the error; sorted by what they remove per millisecond, the best first."""
        all_int8 = errors[_ALL_INT8]
        recovered = {name: all_int8 - error for name, error in errors.items() if name and error < all_int8}
        names = sorted(recovered, key=lambda name: -recovered[name])[: self._job.options.sensitivity.nodes]
        if not names:
            return []
        with temporary_folder() as folder:
            files = {}
            for index, name in enumerate([_ALL_INT8, *names]):
                path = Path(folder) / f"{index}.onnx"
                path.write_bytes(self._base.int8((name,) if name else ()).SerializeToString())
                files[name] = (path, "int8")
            measurements = self._steps.time(files, _COPIES)
        base_ms = measurements[_ALL_INT8].latency_ms
        timed = []
        for name in names:
            cost_ms = measurements[name].latency_ms - base_ms
            bargain = recovered[name] / max(cost_ms, _LEAST_COST * base_ms)
            timed.append(Sensitivity(name, recovered[name], -10 * float(np.log10(errors[name])), cost_ms, bargain))
        return sorted(timed, key=lambda sensitivity: -sensitivity.bargain)


def _write(path: Path, data: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(finite(data), indent=1) + "\n")
