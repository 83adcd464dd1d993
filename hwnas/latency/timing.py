"""Timing of networks and files: they are compiled several times and run in turns on a machine that others use too."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from hwnas.errors import CandidateError, MeasurementInvalid
from hwnas.latency.copies import TimedFile
from hwnas.latency.harness import Progress
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.wave import Wave, WaveResult, ended_early, time_apart
from hwnas.lazy import nn, torch
from hwnas.networks.baselines import MODULE
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.network import build
from hwnas.networks.quantize import quantize_static, tuning_of
from hwnas.runtimes.runtime import load_runtime
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.cores import choose_cores, free_memory_mb, usable_cores
from hwnas.system.gpu import describe_gpu
from hwnas.system.paths import temporary_folder
from hwnas.system.processes import Pool, end
from hwnas.target import Host, Target
from hwnas.tasks.task import trunk_of

if TYPE_CHECKING:
    from hwnas.latency.remote import RemoteDevice
    from hwnas.runtimes.runtime import Runtime


_SPACE = "mnasnet_small"
_LEAST_SIZE = 8  # pixels: smaller images do not survive that space's strides


@cache
def reference_network(channels: int = 1, classes: int = 10, image_size: int = 32) -> Architecture:
    """Return the reference network, which is that of `mnasnet_small`, for images of the given kind and `classes`."""
    return SearchSpace.load(_SPACE, channels=channels, classes=classes,
                            image_size=max(_LEAST_SIZE, image_size)).reference


@dataclass(frozen=True)
class ThisMachine:
    """The machine that this process runs on, as a device: its CPU, or its GPU too."""

    on_gpu: bool = False
    is_here: ClassVar[bool] = True

    @property
    def host(self) -> Host:
        """Its fingerprint now (a process may get fewer cores later); its tables have the fingerprint's name."""
        host = Host.detect()
        return replace(host, **describe_gpu()) if self.on_gpu else host

    def for_target(self, target: Target) -> ThisMachine:
        """Return this machine for a target: for a target on a GPU, the GPU is part of the fingerprint. If there is no
        GPU, `host` raises TargetError."""
        return ThisMachine(on_gpu=True) if target.device == "cuda" else HERE

    def runtime(self, name: str) -> Runtime:
        """Return one of its runtimes; UnknownName if hwnas knows none of this name."""
        return load_runtime(name)

    def time(self, wave: Wave, progress: Progress | None = None) -> WaveResult:
        """Time a wave in this process, as `Wave.time` says."""
        return wave.time(progress)


HERE = ThisMachine()
Device: TypeAlias = "ThisMachine | RemoteDevice"  # the machine that networks are timed on, by the same protocol


def time_files(files: Mapping[str, TimedFile], target: Target, reference: Architecture, protocol: Protocol, *,
               seed: int = 0, progress: Progress | None = None, device: Device | None = None
               ) -> dict[str, Measurement]:
    """Time files, all in the same interleaved rounds beside `reference`; INVALID ones are returned with their reason.

    Each runs as its own target says, in `protocol.copies` compilations, and the reference as `target` says. They run on
    this machine unless another `device` is given. CandidateError for a file that cannot be compiled.
    """
    device = (device or HERE).for_target(target)
    with temporary_folder() as folder:
        file = TimedFile(prepare_network(reference, target, Path(folder)), target, image_shape(reference))
        measurements, failed = device.time(Wave(files, file, reference.id, protocol, seed), progress)
    if failed:
        raise CandidateError(next(iter(failed.values())))
    return measurements


def image_shape(architecture: Architecture) -> tuple[int, int, int]:
    """Return [channels, height, width] of the images that it takes."""
    return architecture.channels, architecture.image_size, architecture.image_size


def prepare_network(architecture: Architecture, target: Target, folder: Path) -> Path:
    """Build a network with weights seeded by its id, export it, quantise it for int8, and return the file to time."""
    # One thread: many exports run at the same time, beside a measurement.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return prepare_untrained(build(architecture), architecture.id, image_shape(architecture), target, folder)
    finally:
        torch.set_num_threads(threads)


def prepare_untrained(network: nn.Module, id: str, shape: tuple[int, int, int], target: Target, folder: Path) -> Path:
    """Export an untrained network for images of `shape`, quantise it for int8, and return the file to time.

    Its weights are random, seeded by its `id`, eight hexadecimal digits. Fresh weights would not do, because runtimes
    optimise their zero biases away. Synthetic quantisation ranges give the same graph as real ones.
    """
    fp32 = folder / f"{id}.onnx"
    export_onnx(randomise(network.eval(), int(id, 16)), fp32, shape)
    if target.precision != "int8":
        return fp32
    int8 = folder / f"{id}_int8.onnx"
    quantize_static(fp32, int8, None, tuned_for=tuning_of(target))
    fp32.unlink()
    return int8


def _prepare(architecture: Architecture, target: Target, folder: Path, compiles: bool) -> TimedFile:
    """Prepare a network to time. If `compiles`, also save the compiled network beside it, if the runtime can."""
    path = prepare_network(architecture, target, folder)
    save = getattr(load_runtime(target.runtime), "save_compiled", None) if compiles else None
    compiled = None if save is None else save(path, target, path.with_suffix(".blob"))
    return TimedFile(path, target, image_shape(architecture), compiled)


WAVE = 24  # networks that are timed together
EXPORT_MB = 400  # of memory that a process takes to export and quantise networks
OnTimed = Callable[[Architecture, Measurement], None]
_Export = Future[TimedFile]
_Wave = list[tuple[Architecture, _Export]]


class NetworkTimer(AbstractContextManager["NetworkTimer"]):
    """A timer of waves of networks beside one reference; a context manager, because it has processes and files.

    `prepare` starts the export of a wave. `time_next` compiles and measures the wave that was prepared first, on a CPU
    in a process of its own. If measuring needs every core, it waits for all exports first. With another `device` than
    this machine, the exports may use all cores.
    """

    def __init__(self, target: Target, reference: Architecture, protocol: Protocol, *, device: Device | None = None
                 ) -> None:
        self.target, self.reference, self.protocol = target, reference, protocol
        self.device = (device or HERE).for_target(target)
        self.failed: dict[str, str] = {}
        self.waves: deque[_Wave] = deque()  # prepared and not yet timed
        self._end = ExitStack()
        self._folder = Path(self._end.enter_context(temporary_folder()))
        # Exports run on the cores that a measurement leaves free, as many at a time as memory allows.
        cores = usable_cores()
        seat = choose_cores(target.threads, {}, cores) if self.device.is_here else []
        self._spare = [core for core in cores if core not in seat]
        n = min(len(self._spare or cores), max(1, free_memory_mb() // EXPORT_MB))
        self._pool = Pool(n, _settle, (self._spare or cores,))
        self._reference_export = self._start_export(reference, self._folder / "reference")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None:
            end([self._pool])
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._end.close()

    def prepare(self, architectures: Sequence[Architecture]) -> None:
        """Start to export a wave."""
        folder = self._folder
        self.waves.append([(architecture, self._start_export(architecture, folder)) for architecture in architectures])

    def wait_exported(self) -> None:
        """Wait until the exports of the next wave have ended, with or without an error."""
        for _, job in self.waves[0]:
            job.exception()

    def time_next(self, *, seed: int = 0, progress: Progress | None = None) -> dict[str, Measurement]:
        """Measure the wave that was prepared first; return it by architecture id, INVALID ones with their reason.

        A network that cannot be exported or compiled is left out, and its error is in `failed`. If all of them fail,
        the last error is raised.
        """
        wave = self.waves.popleft()
        files, reference = self._exported(wave), _result_of(self._reference_export)
        if not self._spare:  # no core is free for exports: let them end before anything is timed
            for later in self.waves:
                for _, job in later:
                    job.exception()
        timed_wave = Wave(files, reference, self.reference.id, self.protocol, seed)
        if self.target.device == "cpu" and self.device.is_here:
            measurements, failed = time_apart(timed_wave, progress)
        else:
            measurements, failed = self.device.time(timed_wave, progress)
        self.failed |= failed
        for _, job in wave:
            for path in (job.result().path, job.result().compiled) if job.exception() is None else ():
                if path is not None:
                    path.unlink(missing_ok=True)
        return measurements

    def _start_export(self, architecture: Architecture, folder: Path) -> _Export:
        arguments = architecture, self.target, folder, self.device.is_here  # another machine compiles files itself
        if trunk_of(architecture.around)[1].startswith(MODULE):  # no other process can import it
            finished: _Export = Future()
            try:
                finished.set_result(_prepare(*arguments))
            except Exception as error:  # raised when the wave is timed, as from another process
                finished.set_exception(error)
            return finished
        try:
            return self._pool.submit(_prepare, *arguments)
        except BrokenProcessPool:
            raise ended_early("exported") from None

    def _exported(self, wave: _Wave) -> dict[str, TimedFile]:
        """Return the files of a wave by architecture id; CandidateError if none of its networks can be exported."""
        files: dict[str, TimedFile] = {}
        for architecture, job in wave:
            try:
                files[architecture.id] = _result_of(job)
            except MeasurementInvalid:
                raise
            except CandidateError as error:
                self.failed[architecture.id] = str(error)
                last_error = CandidateError(f"{architecture.id}: {error}")
        if wave and not files:
            raise last_error
        return files


def _result_of(job: _Export) -> TimedFile:
    try:
        return job.result()
    except BrokenProcessPool:
        raise ended_early("exported") from None


def time_networks(architectures: Sequence[Architecture], target: Target, reference: Architecture, protocol: Protocol,
                  *, seed: int = 0, progress: Progress | None = None, timed: OnTimed | None = None,
                  device: Device | None = None, failed: dict[str, str] | None = None) -> dict[str, Measurement]:
    """Measure all of `architectures` in waves, as `NetworkTimer.time_next`; `protocol.max_seconds` caps each wave.
    `timed` is called with each measured network, and `failed` gets the timer's `failed`."""
    measurements: dict[str, Measurement] = {}
    waves = [architectures[start : start + WAVE] for start in range(0, len(architectures), WAVE)]
    with NetworkTimer(target, reference, protocol, device=device) as timer:
        for index, wave in enumerate(waves):
            if index == 0:  # each wave is exported while the one before it is timed
                timer.prepare(wave)
            if index + 1 < len(waves):
                timer.prepare(waves[index + 1])
            measured = timer.time_next(seed=seed + index, progress=_part(progress, index, len(waves)))
            measurements |= measured
            if timed is not None:
                for architecture in (each for each in wave if each.id in measured):
                    timed(architecture, measured[architecture.id])
            if failed is not None:
                failed |= timer.failed
    return measurements


def _part(progress: Progress | None, index: int, parts: int) -> Progress | None:
    if progress is None:
        return None
    return lambda share, note: progress((index + share) / parts, f"wave {index + 1} of {parts}, {note}")


def _settle(cores: Sequence[int]) -> None:
    """Keep an exporting process to `cores`, so that it never delays a measurement."""
    os.sched_setaffinity(0, cores)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
