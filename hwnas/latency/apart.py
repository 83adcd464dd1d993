"""Times a wave of networks in a process of its own.

A process places its networks in memory once, and what that does to their latencies is alike for like networks: a model
fitted on one process's times learns it as if it belonged to the networks. Networks of another process were then
predicted up to twice as badly as held-out ones of the same (docs/decisions/sessions.md). So each wave has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.errors import CandidateError, MeasurementInvalid
from hwnas.latency.copies import noise
from hwnas.latency.harness import FileCalls, Progress, measure
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.probes import identify_reference
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.processes import Pool
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.runtimes.runtime import Runtime

REFERENCE_COPIES = 2  # times the protocol's copies: where the reference lands shifts the whole wave
LISTEN_S = 0.2


@dataclass(frozen=True, slots=True)
class ExportedNetwork:
    """A network as a file to time: fed images of `shape` [channels, height, width]; `compiled` is what its runtime has
    kept of it, where it can."""

    id: str
    path: Path
    compiled: Path | None
    shape: tuple[int, int, int]

    def bind(self, runtime: Runtime, target: Target, copies: int) -> FileCalls:
        """Calls of so many compilations, each with another place in memory."""
        load = getattr(runtime, "load_compiled", None)
        images = noise(target.batch, self.shape)
        if self.compiled is not None and load is not None:
            return FileCalls((load(self.compiled, self.path, target).bind(images) for _ in range(copies)), self.path)
        return FileCalls((runtime.compile(self.path, target).bind(images) for _ in range(copies)), self.path)


@dataclass(frozen=True, slots=True)
class Wave:
    """Networks that are timed together beside a reference, and how."""

    networks: Sequence[ExportedNetwork]
    reference: ExportedNetwork
    target: Target
    protocol: Protocol
    seed: int

    def bind(self, runtime: Runtime) -> tuple[dict[str, FileCalls], dict[str, str]]:
        """The calls of each network, and why others cannot be compiled; CandidateError where none can."""
        calls, failed = {}, {}
        for network in self.networks:
            try:
                calls[network.id] = network.bind(runtime, self.target, self.protocol.copies)
            except CandidateError as error:
                failed[network.id] = str(error)
                last = CandidateError(f"{network.id}: {error}")
        if failed and not calls:
            raise last
        return calls, failed

    def reference_id(self, runtime: Runtime) -> str:
        """Return the id by which other runs know the reference."""
        return identify_reference(self.target, runtime.version(), self.reference.id)

    def bind_reference(self, runtime: Runtime) -> FileCalls:
        """The calls of the reference."""
        return self.reference.bind(runtime, self.target, REFERENCE_COPIES * self.protocol.copies)


Told = tuple[dict[str, Measurement], dict[str, str]]  # by id: what was measured, and why others were not


def time_apart(wave: Wave, progress: Progress | None, idle: Callable[[], bool]) -> Told:
    """Time a wave on this machine's CPU, in a process of its own; arguments as of `harness.measure`.

    Raises:
        CandidateError: None of the networks can be compiled.
        MeasurementInvalid: The process was ended by somebody.
    """
    here, there = get_context("spawn").Pipe()
    with here, there, Pool(1, _listen, (there,)) as pool:
        try:
            job = pool.submit(_time, wave)
            busy = False
            while not job.done():
                if here.poll(LISTEN_S):
                    told = here.recv()  # also where nobody listens: the line would be full one day
                    if progress is not None:
                        progress(*told)
                if not busy and not idle():
                    here.send(busy := True)
            timed: Told = job.result()
        except (BrokenProcessPool, EOFError, BrokenPipeError):
            raise ended_early("timed") from None
        return timed


def ended_early(did: str) -> MeasurementInvalid:
    """The error of a process that `did` something with networks and was ended by somebody."""
    return MeasurementInvalid(f"a process that {did} networks was ended (out of memory?). Free memory and give the "
                              "command again; what was measured is kept.")


def _listen(line: Connection) -> None:
    """Begin a timing process, which tells its progress through `line` and hears there when it is to come to an end."""
    global _line
    _line = line


def _time(wave: Wave) -> Told:
    """The work of a timing process."""
    runtime = load_runtime(wave.target.runtime)
    calls, failed = wave.bind(runtime)
    return measure(calls, wave.bind_reference(runtime), wave.protocol, seed=wave.seed,
                   reference_id=wave.reference_id(runtime),
                   progress=lambda share, note: _line.send((share, note)), threads=wave.target.threads,
                   idle=lambda: not _line.poll()), failed


_line: Connection
