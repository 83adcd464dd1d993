"""A wave: files that are timed together, in this process or in one of their own.

A process places its networks in memory once, which changes the latencies of like networks alike. A model that is fitted
on the times of one process learns this change as a property of the networks. Its errors on networks of another process
were up to twice its held-out errors in the same one (docs/decisions/sessions.md). So each wave has its own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from hwnas.errors import CandidateError, MeasurementInvalid
from hwnas.latency.copies import TimedFile, bind_copies
from hwnas.latency.harness import Progress, measure
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.probes import identify_reference
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.gpu import read_gpu_state
from hwnas.system.processes import Pool
from hwnas.target import most_threads

REFERENCE_COPIES = 2  # times the protocol's copies: the reference's places in memory shift the whole wave
LISTEN_S = 0.2  # between two checks of whether the process has ended
WaveResult = tuple[dict[str, Measurement], dict[str, str]]  # by name: the measurements, and for other files the error


@dataclass(frozen=True, slots=True)
class Wave:
    """Files that are timed together, all in the same interleaved rounds beside a reference, and the way to do it.

    Attributes:
        files: The files by name; each runs as its own target says.
        reference: The file of the reference network.
        reference_id: The id of that network's architecture.
        protocol: The rules by which they are timed.
        seed: The seed of the order of turns.
    """

    files: Mapping[str, TimedFile]
    reference: TimedFile
    reference_id: str
    protocol: Protocol
    seed: int = 0

    def time(self, progress: Progress | None = None) -> WaveResult:
        """Compile and time the files in this process. `progress` is as for `harness.measure`.

        Raises:
            CandidateError: None of the files can be compiled.
        """
        calls, failed = {}, {}
        for name, file in self.files.items():
            try:
                calls[name] = bind_copies(file, self.protocol.copies)
            except CandidateError as error:
                failed[name] = str(error)
                last_error = CandidateError(f"{name}: {error}")
            if progress:
                progress(0.0, f"compiled {len(calls)} of {len(self.files)}")
        if failed and not calls:
            raise last_error
        target = self.reference.target
        run_id = identify_reference(target, load_runtime(target.runtime).version(), self.reference_id)
        reference = bind_copies(self.reference, REFERENCE_COPIES * self.protocol.copies)
        threads = most_threads([target, *(file.target for file in self.files.values())])
        return measure(calls, reference, self.protocol, seed=self.seed, progress=progress, threads=threads,
                       gpu=read_gpu_state if target.device == "cuda" else None, reference_id=run_id), failed


def time_apart(wave: Wave, progress: Progress | None = None) -> WaveResult:
    """Time a wave on this machine's CPU, in a process of its own; arguments as for `Wave.time`.

    Raises:
        CandidateError: None of the files can be compiled.
        MeasurementInvalid: The process was ended from outside.
    """
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    with receiver, sender, Pool(1, _listen, (sender,)) as pool:
        try:
            job = pool.submit(_time, wave)
            while not job.done():
                if receiver.poll(LISTEN_S):
                    message = receiver.recv()  # also if nobody wants it: the pipe would be full one day
                    if progress is not None:
                        progress(*message)
            timed: WaveResult = job.result()
        except (BrokenProcessPool, EOFError):
            raise ended_early("timed") from None
        return timed


def ended_early(did: str) -> MeasurementInvalid:
    """Return the error for a process that was ended from outside; it `did` ("timed", "exported") networks."""
    return MeasurementInvalid(f"a process that {did} networks was ended (out of memory?). Free memory and give the "
                              "command again; what was measured is kept.")


def _listen(line: Connection) -> None:
    """Start a timing process, which sends its progress through `line`."""
    global _line
    _line = line


def _time(wave: Wave) -> WaveResult:
    """Time a wave inside a timing process."""
    return wave.time(lambda share, note: _line.send((share, note)))


_line: Connection
