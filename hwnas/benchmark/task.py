"""The benchmark's task, which runs in a child process: check a model file, compile it, time it by the protocol.

The child does all of it, not only a first test of the file. A model that survives one inference may still crash the
runtime in the thousandth. And a process with nothing but the runtime is the better place to measure.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.errors import CandidateError, FileError, ModelError
from hwnas.latency.harness import Call, Copies, Progress, call_overhead_ms, measure, time_calls
from hwnas.latency.table import P99_SAMPLES, Protocol
from hwnas.latency.timing import TimedFile, bind_copies, noise
from hwnas.networks.quantize import name_nodes
from hwnas.runtimes.foreign import Model, check_batches, check_path, read_model, sized
from hwnas.runtimes.runtime import Compiled, Runtime, inspected, one_line, quantised_in_file
from hwnas.target import Target, usable_cores

_OPERATORS = (r"No conversion rule found for operations: ([^\n]+)", r"No Op registered for (\S+)",
              r"(\S+)\(-?\d+\) is not a registered function/op", r"Could not find an implementation for (\w+)\(\d+\)",
              r"does not support the following ONNX operations: ([^\n]+)")
_OUT_OF_MEMORY = re.compile(r"bad_alloc|bad allocation|out of memory|failed to allocate|cannot allocate", re.IGNORECASE)
_NOISE = re.compile(r"Exception from \S+:\d+: |Check '[^']*' failed at \S+:\d*:? |Load model from .*? failed: ?")
_MAX_ROUNDS = 60


def run(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> dict[str, Any]:
    """Time the network of `job` (see `hwnas.benchmark`) at each batch size, and under load if it asks for streams.

    The result holds plain values: input, executed precisions, raw samples. ModelError says what the file lacks.
    """
    label, batches = job["label"], job["batches"]
    check_path(job["path"], job["memory_mb"])
    model = read_model(job["path"], runtime, label)
    model_input = model.input
    check_batches(model_input, label, batches)
    shape = sized(model_input, label, job["channels"], job["image_size"])
    with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:
        progress(0.0, "compiling")
        file = prepare_file(model, shape, job, target, Path(folder))
        can_quantise = model.proto is not None
        del model
        network = Loaded(runtime, file, label, shape, job["memory_mb"], can_quantise)
        compiled = {batch: network.compile(replace(target, batch=batch)) for batch in batches}
        reference = _reference(job["reference"], target, Path(folder))
        overhead_ms = call_overhead_ms(_nothing(batches[0]))
        protocol, timed = _time_batches(network, compiled, target, reference, job, progress)
        loads = [_load(network, replace(target, batch=batch), reference[0], protocol, job, progress)
                 for batch in batches if job["streams"]]
    return {"input": {"name": model_input.name, "image": list(shape)}, "overhead_us": round(overhead_ms * 1e3, 3),
            "protocol": protocol.to_dict(), "latency": timed, "load": loads}


def _nothing(batch: int) -> Call:
    """A call that takes no time: its measured time is the harness's own."""
    from hwnas.runtimes.runtime import NullCompiled

    return NullCompiled(0.0, 1, Target("null", "null", "fp32", batch=batch)).bind(np.zeros((batch, 1), np.float32))


def _reference(path: str, target: Target, folder: Path) -> list[Call]:
    import onnx

    shape = tuple(axis.dim_value for axis in onnx.load(path).graph.input[0].type.tensor_type.shape.dim[1:])
    return bind_copies(TimedFile(Path(path), replace(target, batch=1), shape), Protocol().copies, folder)


def prepare_file(model: Model, shape: Sequence[int], job: Mapping[str, Any], target: Target, folder: Path) -> Path:
    """The file itself, or a copy with fixed axes, the batch axis named as runtimes expect, quantised if needed."""
    import onnx

    proto, model_input = model.proto, model.input
    if proto is None:
        if job["quantize"]:
            raise ModelError(f"{job['label']}: quantize=true takes ONNX files. Give the one that this was made from.")
        return Path(job["path"])
    axes = next(value for value in proto.graph.input if value.name == model_input.name).type.tensor_type.shape.dim
    open_batch = model_input.shape[0] is None and axes[0].dim_param != "batch"
    if not open_batch and None not in model_input.shape[1:] and not job["quantize"]:
        return Path(job["path"])
    if model_input.shape[0] is None:
        axes[0].dim_param = "batch"
    for axis, size in zip(axes[1:], shape, strict=True):
        axis.dim_value = size
    del proto.graph.value_info[:]  # it may contain the open axes; runtimes infer it again
    name_nodes(proto)
    copy = folder / "model.onnx"
    try:
        onnx.load_external_data_for_model(proto, str(Path(job["path"]).parent))
        copy.write_bytes(proto.SerializeToString())
    except (ValueError, OSError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{job['label']} cannot be copied with fixed axes: {one_line(error)}. "
                         "Export it with fixed axes.") from None
    return _quantise(copy, job, target) if job["quantize"] else copy


def _quantise(fp32: Path, job: Mapping[str, Any], target: Target) -> Path:
    from hwnas.networks.quantize import quantize_static, tuning_of

    int8 = fp32.with_name("model_int8.onnx")
    try:
        quantize_static(fp32, int8, None, tuned_for=tuning_of(target), label=job["label"])
    except CandidateError as error:
        raise ModelError(str(error)) from None
    return int8


class Loaded:
    """The model file, compiled for several batch sizes. Runtimes' errors are translated into the user's terms."""

    def __init__(self, runtime: Runtime, file: Path, label: str, shape: Sequence[int], memory_mb: int,
                 can_quantise: bool) -> None:
        self.runtime, self.file, self.label, self.shape, self.memory_mb = runtime, file, label, shape, memory_mb
        self.can_quantise = can_quantise

    def compile(self, target: Target) -> Compiled:
        """Compiled for `target`; ModelError names the operators that the runtime lacks, or what else is wrong."""
        return self._compiled(self.runtime.compile, target)

    def inspect(self, target: Target) -> Compiled:
        """The same, to be looked at: what falls back is no error. See `hwnas.runtimes.runtime.inspected`."""
        return self._compiled(partial(inspected, self.runtime), target)

    def _compiled(self, how: Callable[[Path, Target], Compiled], target: Target) -> Compiled:
        try:
            return how(self.file, target)
        except CandidateError as error:
            raise ModelError(self._explain(error, target)) from None

    def bind(self, compiled: Compiled, target: Target) -> Call:
        """A bound call that has run once."""
        try:
            call = compiled.bind(noise(target.batch, self.shape))
            call()
        except MemoryError:
            raise
        except Exception as error:  # runtimes' exceptions share no base class
            self._check_memory(str(error))
            raise ModelError(f"{self.label}: {self.runtime.name} cannot run a batch of {target.batch}: "
                             f"{_NOISE.sub('', one_line(error))}") from None
        return call

    def _explain(self, error: CandidateError, target: Target) -> str:
        whole = str(error.__cause__ or error)
        self._check_memory(whole)
        lacking = sorted({name.strip(" .") for pattern in _OPERATORS for group in re.findall(pattern, whole)
                          for name in group.split(",")})
        if lacking:
            return (f"{self.label}: {self.runtime.name} has no operator {', '.join(lacking)[:300]}. Export it with "
                    "standard operators, or choose a target of another runtime.")
        if not isinstance(error, FileError):  # of a runtime of another package
            return f"{self.label}: {_NOISE.sub('', str(error))}"
        remedy = error.remedy
        if target.precision == "int8" and self.can_quantise and not quantised_in_file(self.file):
            remedy = ("Add quantize=true to have it quantised with made-up ranges: right for timing, useless for "
                      "answers.")
        return f"{self.label}: {_NOISE.sub('', error.fact)} {remedy}".rstrip()

    def _check_memory(self, text: str) -> None:
        if _OUT_OF_MEMORY.search(text):
            raise ModelError(f"{self.label}: out of memory; the limit is {self.memory_mb} MiB. "
                             "Add memory_mb=N to allow more.")


def _time_batches(network: Loaded, compiled: Mapping[int, Compiled], target: Target, reference: Copies,
                  job: Mapping[str, Any], progress: Progress) -> tuple[Protocol, list[dict[str, Any]]]:
    """Measure the latency at every batch size, all in the same rounds."""
    calls = {str(batch): network.bind(model, replace(target, batch=batch)) for batch, model in compiled.items()}
    protocol = _protocol(list(calls.values()), job["seconds"])
    measurements = measure(calls, reference, protocol, seed=job["seed"], quiet_ms=job["quiet_ms"],
                           threads=target.threads, progress=progress)
    return protocol, [{"batch": batch, "execution": _plain(model), "measurement": measurements[str(batch)].to_dict()}
                      for batch, model in compiled.items()]


def _plain(compiled: Compiled) -> dict[str, Any]:
    return {**asdict(compiled.execution), "precisions": dict(compiled.execution.precisions)}


def _protocol(calls: Sequence[Callable[[], None]], seconds: float) -> Protocol:
    """The usual protocol, with enough rounds for a p99 if half of the time allows it."""
    protocol = Protocol(max_seconds=seconds)
    typical = [float(np.median(time_calls(call, 3))) for call in calls]
    turns = [int(np.clip(protocol.round_ms / ms, protocol.min_calls, protocol.max_calls)) for ms in typical]
    wanted = -(-5 * P99_SAMPLES // (4 * min(turns)))  # some turns will not be quiet
    affordable = int(seconds * 500 / sum(ms * calls for ms, calls in zip(typical, turns, strict=True)))
    return replace(protocol, min_rounds=max(protocol.min_rounds, min(wanted, affordable, _MAX_ROUNDS)))


def _load(network: Loaded, target: Target, reference: Call, protocol: Protocol, job: Mapping[str, Any],
          progress: Progress) -> dict[str, Any]:
    """Throughput with one instance of the network for each stream. A runtime needs only `compile` and `bind` for it.

    Each instance has threads of its own, like a runtime's own streams, and its own copy of the weights.
    """
    from hwnas.latency.harness import measure_load

    streams, cores = job["streams"], len(usable_cores())
    each = replace(target, threads=target.threads or max(1, cores // streams))
    calls = [network.bind(network.compile(each), each) for _ in range(streams)]
    throughput = measure_load(calls, target.batch, min(cores, streams * each.threads), reference,
                              replace(protocol, min_rounds=3), quiet_ms=job["quiet_ms"], progress=progress)
    return {"batch": target.batch, "streams": streams, "threads_each": each.threads, **throughput.to_dict()}


if __name__ == "__main__":
    from hwnas.runtimes.child import serve

    sys.exit(serve(run))
