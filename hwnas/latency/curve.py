"""One network at several batch sizes and on several numbers of threads, in a process that has nothing but a runtime."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.errors import CandidateError, FileError, ModelError, one_line
from hwnas.latency.copies import TimedFile, bind_copies, noise
from hwnas.latency.harness import Call, FileCalls, Progress, measure, time_calls
from hwnas.latency.measurement import P99_SAMPLES, Protocol
from hwnas.latency.probes import identify_reference
from hwnas.networks.litert.tflite import is_tflite
from hwnas.runtimes.runtime import Compiled, Runtime, inspected, quantised_in_file
from hwnas.system.cores import allowed_cores
from hwnas.system.gpu import read_gpu_state
from hwnas.target import Target, measuring_lock, most_threads

_OPERATORS = (r"No conversion rule found for operations: ([^\n]+)", r"No Op registered for (\S+)",
              r"(\S+)\(-?\d+\) is not a registered function/op", r"Could not find an implementation for (\w+)\(\d+\)",
              r"does not support the following ONNX operations: ([^\n]+)")
_OUT_OF_MEMORY = re.compile(r"bad_alloc|bad allocation|out of memory|failed to allocate|cannot allocate", re.IGNORECASE)
_NOISE = re.compile(r"Exception from \S+:\d+: |Check '[^']*' failed at \S+:\d*:? |Load model from .*? failed: ?")
_MAX_ROUNDS = 60
REPEATS = 100  # inferences over which the times of nodes are averaged


def time_curve(file: TimedFile, reference: TimedFile, job: Mapping[str, Any], runtime: Runtime, progress: Progress
               ) -> dict[str, Any]:
    """Time a file at each batch size and number of threads of `job`, all in the same rounds beside a reference.

    `job`: `label`, `batches`, `threads`, `seconds`, `seed`, `memory_mb`, `explain`. The result has plain values only:
    executed precisions, raw samples, and with `explain` the profiled nodes. ModelError says why a file cannot run.
    """
    target = file.target
    targets = [replace(target, batch=batch, threads=threads) for threads in job["threads"] for batch in job["batches"]]
    network = LoadedModel(runtime, file.path, job["label"], file.shape, job["memory_mb"])
    compiled = {each: network.compile(each, look=job["explain"]) for each in targets}
    reference_calls = bind_copies(reference, Protocol().copies)
    calls = {f"{each.batch} {each.threads}": FileCalls([network.bind(model, each)], file.path)
             for each, model in compiled.items()}
    protocol = _protocol([call for call, in calls.values()], job["seconds"])
    measurements = measure(
        calls, reference_calls, protocol, seed=job["seed"], threads=most_threads(compiled), progress=progress,
        gpu=read_gpu_state if target.device == "cuda" else None,
        reference_id=identify_reference(reference.target, runtime.version(), "x".join(map(str, reference.shape))))
    timed = [{"batch": each.batch, "threads": each.threads, "execution": model.execution.to_dict(),
              "measurement": measurements[name].to_dict()}
             for name, (each, model) in zip(calls, compiled.items(), strict=True)]
    answer = {"protocol": protocol.to_dict(), "latency": timed}
    if job["explain"]:
        with measuring_lock(allowed_cores(), progress):
            nodes = network.compile(targets[0], look=True).profile(noise(targets[0].batch, file.shape), REPEATS)
        answer["nodes"] = [asdict(node) for node in nodes]
    return answer


@dataclass(frozen=True)
class LoadedModel:
    """A model file that is compiled for several batch sizes. It translates runtimes' errors into the user's terms."""

    runtime: Runtime
    file: Path
    label: str
    shape: Sequence[int]
    memory_mb: int

    def compile(self, target: Target, look: bool = False) -> Compiled:
        """Compile for `target`. With `look`, a fall-back from its precision is no error (see `runtime.inspected`).
        ModelError names the operators that the runtime lacks, or another fault."""
        try:
            return inspected(self.runtime, self.file, target) if look else self.runtime.compile(self.file, target)
        except CandidateError as error:
            raise ModelError(self._explain(error, target)) from None

    def bind(self, compiled: Compiled, target: Target) -> Call:
        """Return a bound call that has run once; ModelError if the runtime cannot run this batch size."""
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
        missing = sorted({name.strip(" .") for pattern in _OPERATORS for group in re.findall(pattern, whole)
                          for name in group.split(",")})
        if missing:
            return (f"{self.label}: {self.runtime.name} has no operator {', '.join(missing)[:300]}. Export it with "
                    "standard operators, or choose a target of another runtime.")
        if not isinstance(error, FileError):  # of a runtime of another package
            return f"{self.label}: {_NOISE.sub('', str(error))}"
        remedy = error.remedy
        if target.precision == "int8" and not is_tflite(self.file) and not quantised_in_file(self.file):
            remedy = f"Quantise it first: hwnas quantize model={self.label} dataset=NAME"
        return f"{self.label}: {_NOISE.sub('', error.fact)} {remedy}".rstrip()

    def _check_memory(self, text: str) -> None:
        if _OUT_OF_MEMORY.search(text):
            raise ModelError(f"{self.label}: out of memory; the limit is {self.memory_mb} MiB. "
                             "Add memory_mb=N to allow more.")


def _protocol(calls: Sequence[Callable[[], None]], seconds: float) -> Protocol:
    """Return the usual protocol, with enough rounds for a p99 if half of the time allows it. Each network is compiled
    once, whatever its size; the interval includes the difference between compilations."""
    protocol = Protocol(max_seconds=seconds, copies=1)
    typical = [float(np.median(time_calls(call, 3))) for call in calls]
    turn_calls = [int(np.clip(protocol.round_ms / ms, protocol.min_calls, protocol.max_calls)) for ms in typical]
    needed_rounds = -(-5 * P99_SAMPLES // (4 * min(turn_calls)))  # some turns will not be quiet
    affordable_rounds = int(seconds * 500 / sum(ms * calls for ms, calls in zip(typical, turn_calls, strict=True)))
    return replace(protocol, min_rounds=max(protocol.min_rounds, min(needed_rounds, affordable_rounds, _MAX_ROUNDS)))
