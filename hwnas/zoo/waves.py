"""Time networks in waves, each prepared and timed in child processes with limited memory, and store the results."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from hwnas.cli.progress import Report
from hwnas.errors import CandidateError, UserError
from hwnas.latency.measurement import Measurement
from hwnas.latency.timing import reference_network
from hwnas.runtimes.child import run_child
from hwnas.system.cores import free_memory_mb, usable_cores
from hwnas.zoo.order import CandidatePairs, choose_opening, choose_wave
from hwnas.zoo.published import PublishedNetwork
from hwnas.zoo.record import PROTOCOL, ZooRecord
from hwnas.zoo.task import JOURNAL

_PASSING = re.compile("SIGKILL|memory|still compiling", re.IGNORECASE)  # failures that another call may not have
OPENING, WAVE = 9, 12  # networks to start with (fewer in several deployments), and most pairs in a wave
YARDSTICK = "resnet50"  # timed with them, because everybody knows it
LONGEST_S = 120.0  # longest silence of a process that prepares or times
EACH_S = 1.5  # for timing a file, at most, beside its least rounds
LEAST_S = 25.0  # least time in which a wave can have results
START_S = 6.0  # time that a process takes to start
PREPARING = 0.6  # share of the remaining time that a wave may spend on preparing files
LEAST_FREE = 64 << 20  # bytes on the disk: with less, files may fail for lack of space
QUIET = 0.2  # quantile of the reference's times that counts as the undisturbed machine

Note = Callable[[str], None]  # receives a line on the work at hand
Pair = tuple[PublishedNetwork, int]  # a network, and the place of its deployment


class ZooTiming:
    """The networks and deployments that a command times.

    Args:
        networks: All networks that may be timed.
        records: The stored results of each deployment.
        folder: For the files of a wave.
        memory_mb: The most memory for preparing a network.
        cap_ms: Slower networks are not looked for.
        seed: Of the order of turns.
    """

    def __init__(self, networks: Sequence[PublishedNetwork], records: Sequence[ZooRecord], folder: Path, memory_mb: int,
                 cap_ms: float | None, seed: int) -> None:
        self.networks, self.records, self.folder, self.memory_mb = networks, records, folder, memory_mb
        self.cap_ms, self.seed, self.reference = cap_ms, seed, folder / f"{reference_network().id}.onnx"
        self.restless: dict[tuple[str, int], str] = {}  # pairs whose measurement was INVALID, and why
        self.pairs: list[Pair] = [(network, place) for network in networks for place in range(len(records))]
        families = sorted({network.family for network in networks})
        own, places = [network for network, _ in self.pairs], np.array([place for _, place in self.pairs])
        self.facts = CandidatePairs(
            np.array([each.top1 for each in own]),
            np.log([[each.gmacs, each.macts, each.params_m, each.image_size] for each in own]),
            np.array([families.index(each.family) for each in own]), np.arange(len(own)) // len(records), places,
            np.array([record.target.precision == "int8" for record in records])[places].astype(int))

    def measured(self, pair: Pair) -> Measurement | None:
        """Return the measurement of a pair; None if it was not timed."""
        return self.records[pair[1]].timed.get(pair[0].key)

    def reason(self, pair: Pair) -> str:
        """Return why a pair could not be timed; empty if it was not tried."""
        return self.records[pair[1]].failed.get(pair[0].key, "") or self.restless.get((pair[0].key, pair[1]), "")

    def latencies_ms(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return latencies [n, 3] of timed pairs in ms, with the ends of their 90 % intervals. The reference, on as
        many threads, converts all to one speed of the machine: that of a quiet run."""
        quiet_ms: dict[int, list[float]] = {}
        for record in self.records:
            quiet_ms.setdefault(record.target.threads, []).extend(each.quiet_ms for each in record.timed.values())
        speed = {threads: float(np.quantile(times, QUIET)) for threads, times in quiet_ms.items() if times}
        rows = []
        for network, place in pairs:
            each = self.records[place].timed[network.key]
            factor = speed[self.records[place].target.threads] / each.quiet_ms
            rows.append([factor * each.latency_ms, factor * each.latency_ms_low, factor * each.latency_ms_high])
        return np.array(rows).reshape(-1, 3)

    def run(self, seconds: float, report: Report) -> bool:
        """Time waves until the time is over. Return whether no other network is expected to be on the front."""
        end = time.monotonic() + seconds

        def note(text: str) -> None:
            timed = sum(self.measured(pair) is not None for pair in self.pairs)
            report(max(0.0, 1 - (end - time.monotonic()) / seconds), f"{timed} timed; {text}")

        while wave := self._choose():
            if (left_s := end - time.monotonic()) < LEAST_S:
                return False
            files = self._prepare(wave, left_s * PREPARING, note)
            # Files with as many threads are timed together. Each group gets its share of the time.
            for threads in {self.records[place].target.threads for _, place in files}:
                own = {pair: file for pair, file in files.items() if self.records[pair[1]].target.threads == threads}
                self._time(own, (end - time.monotonic()) * len(own) / len(files) - START_S, note)
            for path in self.folder.iterdir():
                if path != self.reference and not path.name.startswith("."):
                    path.unlink()
            self.seed += 1
        return True

    def _choose(self) -> list[Pair]:
        """Return the pairs of the next wave; none if no other is expected to be on the front."""
        at, is_timed = np.arange(len(self.pairs)), np.array([self.measured(pair) is not None for pair in self.pairs])
        waiting = at[~is_timed & np.array([not self.reason(pair) for pair in self.pairs])]
        # First come networks of all sizes and the yardstick, which teach the model. Then the model chooses.
        opening = choose_opening(self.facts, at if is_timed.any() else waiting,
                                 max(OPENING - len(self.records), OPENING // 2))
        chosen: Sequence[int] = [each for each in waiting if self.facts.network[each] in opening
                                 or self.pairs[each][0].name == YARDSTICK][:WAVE]
        if not chosen and is_timed.any():
            log_ms = np.log(self.latencies_ms([self.pairs[each] for each in at[is_timed]])[:, 0])
            chosen = choose_wave(self.facts, at[is_timed], log_ms, waiting, WAVE, self.cap_ms)
        return sorted((self.pairs[each] for each in chosen), key=lambda pair: (pair[0].key, pair[1]))

    def _prepare(self, wave: Sequence[Pair], seconds: float, note: Note) -> dict[Pair, dict[str, Any]]:
        """Make the files of a wave, as many as the time allows, in a process on each core. One process has all pairs of
        a network. Return what is to be timed, and store the reasons of failures."""
        networks = list(dict.fromkeys(network for network, _ in wave))
        n = min(len(usable_cores()), len(networks), max(1, free_memory_mb() // self.memory_mb))
        parts = [[pair for pair in wave if pair[0] in networks[at::n]] for at in range(n)]
        pool, ended = ThreadPoolExecutor(max(1, n)), Event()
        try:
            jobs = [pool.submit(self._prepare_part, part, seconds, note, self.folder / f"{at}-{JOURNAL}", ended)
                    for at, part in enumerate(parts)]
            lines = {pair: line for job in jobs for pair, line in job.result().items()}
        finally:  # after Ctrl-C, wait for nothing and start no process
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
        self._keep({pair: line["reason"] for pair, line in lines.items() if "reason" in line})
        return {pair: lines[pair] for pair in wave if pair in lines and "reason" not in lines[pair]}

    def _prepare_part(self, wave: Sequence[Pair], seconds: float, note: Note, journal: Path, is_over: Event
                      ) -> dict[Pair, dict[str, Any]]:
        """Make the files of some pairs in one process. Return a line for each, with the reason if there is no file."""
        end, remaining, lines = time.monotonic() + seconds, list(wave), dict[Pair, dict[str, Any]]()
        while remaining and (left_s := end - time.monotonic()) > 0 and not is_over.is_set():
            end_reason, pending = "", remaining
            job = {"seconds": left_s, "journal": str(journal),
                   "pairs": [(each.name, each.image_size, place) for each, place in pending]}
            try:
                self._child(job, pending[0], min(LONGEST_S, left_s + START_S), note)
            except CandidateError as error:
                end_reason = str(error)
            # The journal has a line for each finished pair. A process that was ended may leave half a line at the end.
            written = journal.read_text(encoding="utf-8") if journal.exists() else ""
            journal.unlink(missing_ok=True)
            lines |= {pending[line["at"]]: line for line in map(json.loads, written.rpartition("\n")[0].splitlines())}
            remaining = [pair for pair in pending if pair not in lines]
            if not end_reason:
                break
            if remaining and time.monotonic() < end:
                lines[remaining.pop(0)] = {"reason": end_reason}  # the first pair without a line was at work
        return lines

    def _time(self, files: Mapping[Pair, Mapping[str, Any]], most_s: float, note: Note) -> None:
        """Time prepared files in a process, and store the results. If it is ended, each half of them is timed alone."""
        if most_s <= 1:
            return
        turns = PROTOCOL.min_rounds * (PROTOCOL.min_calls + 1)
        needed_s = sum(EACH_S + turns * line["ms"] / 1e3 for line in files.values())
        protocol, pairs = replace(PROTOCOL, max_seconds=min(needed_s, most_s)), [*files]
        job = {"seed": self.seed, "protocol": protocol.to_dict(),
               "files": [{**line, "id": str(at)} for at, line in enumerate(files.values())]}
        try:
            raw = self._child(job, pairs[0], LONGEST_S, note)
        except CandidateError as error:
            if len(pairs) == 1:
                self._keep({pairs[0]: str(error)})
                return
            for part in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
                self._time({pair: files[pair] for pair in part}, most_s / 2, note)
            return
        self._keep({pairs[int(id)]: Measurement.from_dict(each, protocol, id) for id, each in raw.items()})

    def _child(self, job: Mapping[str, Any], first: Pair, timeout_s: float, note: Note) -> Any:
        job = {**job, "path": str(self.reference), "label": "a network",
               "targets": [asdict(record.target) for record in self.records]}
        return run_child("hwnas.zoo.task", job, self.records[first[1]].target, timeout_s=timeout_s,
                         memory_mb=self.memory_mb * (2 if "files" in job else 1), progress=lambda _, text: note(text))

    def _keep(self, came_out: Mapping[Pair, Measurement | str]) -> None:
        """Store measurements, and reasons why there is none. An INVALID measurement is left to another call, and so is
        a network that had too little memory or time."""
        for place, record in enumerate(self.records):
            own = {pair[0].key: each for pair, each in came_out.items() if pair[1] == place}
            timed = {key: each for key, each in own.items() if isinstance(each, Measurement) and each.valid}
            failed = {key: each for key, each in own.items() if isinstance(each, str) and not _PASSING.search(each)}
            self.restless |= {(key, place): each if isinstance(each, str) else each.reason
                              for key, each in own.items() if key not in timed and key not in failed}
            if failed and shutil.disk_usage(self.folder).free < LEAST_FREE:  # it says nothing of the networks
                raise UserError(f"{self.folder}: no space left on the disk. Free space there, or set TMPDIR to a "
                                "folder on another disk; then give the same command again.")
            if timed or failed:
                record.keep(timed, failed)
