"""Times parts of networks alone, by the protocol that whole networks are timed by; resumable, one line a part."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.latency.peers.parts import Part, build_part
from hwnas.errors import CandidateError, ConfigError
from hwnas.latency.copies import TimedFile, bind_copies, noise
from hwnas.latency.harness import measure
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import image_shape, prepare_network
from hwnas.runtimes.runtime import Runtime, load_runtime
from hwnas.system.cores import usable_cores
from hwnas.target import Host, Target

WAVE = 40


@dataclass
class Isolated:
    """What was timed alone so far: ms and seconds of measuring by name; failures with their reason."""

    path: Path
    header: dict[str, Any]

    def __post_init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        for entry in self._read():
            self._take(entry)

    def add(self, name: str, found: Measurement | None, seconds: float, reason: str = "",
            quiet_ms: float | None = None) -> None:
        """Append one result, at the speed of a reference time if that is given, so that it outlives a kill."""
        entry: dict[str, Any] = {"part": name, "seconds": round(seconds, 3), "reason": reason}
        if found is not None:
            entry |= {"reason": found.reason, "quiet_us": round(found.quiet_ms * 1e3, 2),
                      "latency_us": round(found.at_ms(quiet_ms or found.quiet_ms) * 1e3, 3) if found.valid else None,
                      "half_width": round(found.half_width, 4) if found.valid else None,
                      "turns_us": [round(1e3 * sum(turn.samples_ms) / len(turn.samples_ms), 2) for turn in found.turns],
                      "probe_us": [round(sum(turn.probe_us) / len(turn.probe_us), 2) for turn in found.turns]}
        with open(self.path, "a") as file:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
            file.flush()
        self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["reason"]:
            self.failed[entry["part"]] = entry["reason"]
        else:
            self.failed.pop(entry["part"], None)
            # At the speed of the table's run: runs agree in ratios to the reference.
            self.ms[entry["part"]] = entry["latency_us"] / 1e3 * self.header["quiet_us"] / entry["quiet_us"]
            self.seconds[entry["part"]] = entry["seconds"]

    def _read(self) -> Iterator[dict[str, Any]]:
        """Entries of the file; a line cut off by a kill is dropped."""
        lines = self.path.read_text().split("\n")[:-1] if self.path.is_file() else []
        if not lines:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.header) + "\n")
            return
        if json.loads(lines[0]) != self.header:
            raise ConfigError(f"{self.path}: measured for {lines[0]}, asked for {json.dumps(self.header)}. Choose "
                              "another folder: --out DIR")
        self.path.write_text("\n".join(lines) + "\n")
        yield from (json.loads(line) for line in lines[1:])


def isolated(path: Path, table: LatencyTable) -> Isolated:
    """The file of a table's parts; ConfigError when it is of another host, key or runtime."""
    return Isolated(path, {"host": Host.detect().name, "key": str(table.key),
                           "runtime": load_runtime(table.key.runtime).version(),
                           "quiet_us": round(table.quiet_ms * 1e3, 2)})


def target_of(table: LatencyTable) -> Target:
    """The target that a table is of."""
    key = table.key
    return Target(f"{key.runtime}_{key.precision}", key.runtime, key.precision, key.threads, key.batch)


def time_parts(parts: Sequence[Part], table: LatencyTable, known: Isolated, seconds: float) -> None:
    """Time those not timed yet, in waves, until `seconds` are over; exports go on beside on the other cores."""
    target = target_of(table)
    runtime = load_runtime(target.runtime)
    runtime.check(target)
    open_parts = [part for part in dict.fromkeys(parts) if part.key not in known.ms]
    if not open_parts:
        return
    deadline = time.monotonic() + seconds
    cores = usable_cores()
    spare = cores[: -target.threads] if 0 < target.threads < len(cores) else cores
    with tempfile.TemporaryDirectory(prefix="hwnas-parts-") as folder, ProcessPoolExecutor(
            len(spare), mp_context=get_context("spawn"), initializer=_settle, initargs=(spare,)) as pool:
        path = prepare_network(table.reference, target, Path(folder))
        reference = bind_copies(TimedFile(path, target, image_shape(table.reference)), table.protocol.copies)
        waves = [open_parts[start : start + WAVE] for start in range(0, len(open_parts), WAVE)]
        jobs = _submit(pool, waves[0], target, folder)
        for index, wave in enumerate(waves):
            left = deadline - time.monotonic()
            if left < 0:
                for job in jobs:
                    job.cancel()
                break
            protocol = replace(table.protocol, max_seconds=min(table.protocol.max_seconds,
                                                               max(2 * left / (len(waves) - index), 2.0)))
            later = _submit(pool, waves[index + 1], target, folder) if index + 1 < len(waves) else []
            _time_wave(wave, jobs, target, runtime, reference, table, protocol, known, index)
            print(f"\r{min((index + 1) * WAVE, len(open_parts))} of {len(open_parts)} parts timed", end="", flush=True)
            jobs = later
    print()


def prepare_part(part: Part, target: Target, path: Path) -> Path:
    """Export, with made-up ranges for int8; returns the file to time."""
    import torch

    from hwnas.networks.export import export_onnx, randomise

    torch.set_num_threads(1)
    module = build_part(part)
    inside = target.precision == "int8" and not part.last
    if inside:  # what it hands on is int8 in a network: a flattening behind it makes it an inner map here too
        module = torch.nn.Sequential(module, torch.nn.Flatten())
    randomise(module, 0)
    export_onnx(module, path, part.input_shape)
    return _quantised(path, target, inside) if target.precision == "int8" else path


def _quantised(path: Path, target: Target, inside: bool) -> Path:
    """As hwnas.networks.quantize does with whole networks, and a pair on what the part hands on."""
    import onnx

    from hwnas.networks.qdq import Graph, insert_pairs, quantised_tensors, range_source
    from hwnas.networks.quantize import tuning_of

    graph = Graph(onnx.load(path))
    names = quantised_tensors(graph, tuning_of(target))
    if inside:
        names = list(dict.fromkeys([*names, graph.proto.graph.node[-1].input[0]]))
    insert_pairs(graph, {name: (0.0, 4.0 + index / 10) if graph.non_negative(range_source(graph, name))
                         else (-3.0 - index / 10, 3.5) for index, name in enumerate(names)})
    onnx.checker.check_model(graph.proto)
    path.write_bytes(graph.proto.SerializeToString())
    return path


def _submit(pool: ProcessPoolExecutor, wave: Sequence[Part], target: Target, folder: str) -> list[Future[Path]]:
    return [pool.submit(prepare_part, part, target, Path(folder, f"{abs(hash(part.key))}.onnx")) for part in wave]


def _time_wave(wave: Sequence[Part], jobs: Sequence[Future[Path]], target: Target, runtime: Runtime, reference: Any,
               table: LatencyTable, protocol: Protocol, known: Isolated, seed: int) -> None:
    calls: dict[str, Any] = {}
    start = time.monotonic()
    for part, job in zip(wave, jobs, strict=True):
        images = noise(target.batch, part.input_shape)
        try:
            path = job.result()
            calls[part.key] = [runtime.compile(path, target).bind(images) for _ in range(protocol.copies)]
        except CandidateError as error:
            known.add(part.key, None, 0.0, str(error))
    if not calls:
        return
    found = measure(calls, reference, protocol, seed=seed, threads=target.threads)
    each = (time.monotonic() - start) / len(calls)
    for name, measurement in found.items():
        known.add(name, measurement, each, quiet_ms=table.quiet_ms)


def _settle(cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
