"""Load on a compiled network, made and judged by MLPerf's LoadGen: the task of a child process.

The server is of the plainest kind. It has one queue, and a thread for each stream with its own instance of the network.
Each thread takes as many images as wait, up to the batch. LoadGen (https://github.com/mlcommons/inference) decides when
a query is due: by a Poisson process (Server) or all at once (Offline). It takes the time from then to the answer, and
calls a run INVALID that was too short for its figures.
"""

from __future__ import annotations

import itertools
import queue
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.errors import ModelError, TargetError, one_line
from hwnas.latency.copies import noise
from hwnas.latency.curve import LoadedModel
from hwnas.latency.harness import Call, Progress
from hwnas.runtimes.foreign import read_checked
from hwnas.runtimes.runtime import Runtime
from hwnas.system.cores import usable_cores
from hwnas.system.paths import temporary_folder
from hwnas.target import Target, measuring_lock

SHARES = (0.05, 0.25, 0.45, 0.65, 0.8, 0.9)  # of saturation: the loads at which a curve is measured
FEWEST = 1000  # queries of a run: LoadGen gives no p99 for fewer than about 700
LEAST = 400  # queries that a run must expect: it is INVALID below 459, however fast all are answered
IMAGES = 64  # different images in memory
_FAR_MS = 60_000.0  # a p99 that is no limit, for the runs of a curve
_WARM_S = 1.0  # of a first run, which does not count
MOST_TIMES = 10  # times as long as asked: the longest run, if FEWEST queries take so long
_TRIES, _MORE = 5, 1.15  # tries to saturate for long enough, and factor by which each offers more queries
_SWITCH_S = 1e-4  # after which Python changes threads: LoadGen's and the streams' take turns


class Server:
    """A server that answers queries from one queue, with an instance of the network for each stream."""

    def __init__(self, calls: Sequence[Call], batch: int, shape: Sequence[int]) -> None:
        self._loadgen = import_loadgen()
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._images = noise(IMAGES, shape)
        self._batch = batch
        self.fault: Exception | None = None  # the first error of a call; later queries are answered without a call
        self._threads = [threading.Thread(target=self._serve, args=(call,), daemon=True) for call in calls]
        for thread in self._threads:
            thread.start()

    def issue(self, samples: Sequence[Any]) -> None:
        """Queue queries that are due now. LoadGen calls this."""
        for sample in samples:
            self._queue.put(sample.id)

    def close(self) -> None:
        """End the threads, as soon as the queue is empty."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, call: Call) -> None:
        space = np.empty((self._batch, *self._images.shape[1:]), np.float32)
        answer = np.zeros(1, np.float32)
        pointer = answer.ctypes.data
        for count in itertools.count():
            first = self._queue.get()
            if first is None:
                return
            # LoadGen judges times alone: a call runs on its own images, and any bytes are an answer. The copies take
            # the time in which a server puts the images of a batch together.
            ids = [first, *self._waiting()]
            for index in range(len(ids)):
                space[index] = self._images[(count + index) % IMAGES]
            try:
                if self.fault is None:
                    call()
            except Exception as error:  # runtimes' exceptions share no base class; LoadGen would wait for ever
                self.fault = error
            self._loadgen.QuerySamplesComplete([self._loadgen.QuerySampleResponse(each, pointer, 4) for each in ids])

    def _waiting(self) -> Iterator[int]:
        """Yield the queries that wait behind the first, as many as the batch has room for."""
        for _ in range(self._batch - 1):
            try:
                other = self._queue.get_nowait()
            except queue.Empty:
                return
            if other is None:  # it ends a thread: put back for the next round
                self._queue.put(None)
                return
            yield other


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of a run by LoadGen: queries a second that were due and that were answered, and times to the answer.

    A run that is not `valid` has a `reason`, and its figures mean nothing.
    """

    rate: float
    served: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    valid: bool
    reason: str = ""


def import_loadgen() -> Any:
    """Import the module of LoadGen; TargetError with the command that installs it."""
    try:
        import mlperf_loadgen
    except ImportError:
        raise TargetError("load is made by MLPerf's LoadGen, which is not installed. Install it: "
                          "pip install 'hwnas[loadgen]'") from None
    return mlperf_loadgen


def offer(server: Server, folder: Path, seconds: float, *, rate: float | None = None, expected: float = 100.0,
          p99_ms: float = _FAR_MS, seed: int = 0) -> LoadFigures:
    """Let LoadGen send queries for `seconds`: at a Poisson `rate` a second (Server), or, without one, all at once
    (Offline). Offline it sends as many as take so long at the `expected` rate. A run over `p99_ms` is INVALID."""
    loadgen = import_loadgen()
    settings = loadgen.TestSettings()
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms, settings.min_query_count = int(seconds * 1e3), 1
    settings.schedule_rng_seed = settings.sample_index_rng_seed = settings.qsl_rng_seed = seed + 1
    if rate is None:
        settings.scenario, settings.offline_expected_qps = loadgen.TestScenario.Offline, expected
    else:
        settings.scenario, settings.server_target_qps = loadgen.TestScenario.Server, rate
        settings.server_target_latency_ns, settings.server_target_latency_percentile = int(p99_ms * 1e6), 0.99
    log = loadgen.LogSettings()
    output = loadgen.LogOutputSettings()
    output.outdir, output.copy_summary_to_stdout = str(folder), False
    log.log_output, log.enable_trace = output, False
    sut = loadgen.ConstructSUT(server.issue, lambda: None)
    images = loadgen.ConstructQSL(IMAGES, IMAGES, lambda _: None, lambda _: None)
    try:
        loadgen.StartTestWithLogSettings(sut, images, settings, log, "")
    finally:
        loadgen.DestroyQSL(images)
        loadgen.DestroySUT(sut)
    if server.fault is not None:
        raise ModelError(f"a call failed under load: {one_line(server.fault)}")
    return read_summary((folder / "mlperf_log_summary.txt").read_text(encoding="utf-8"), rate)


def read_summary(text: str, rate: float | None) -> LoadFigures:
    """Read LoadGen's `mlperf_log_summary.txt` of a run at `rate`, or of a run Offline if `rate` is None."""
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    served = float(entries.get("Samples per second") or entries.get("Completed samples per second") or "nan")
    valid = entries.get("Result is") == "VALID"
    unmet = [key.removesuffix(" satisfied") for key, value in entries.items() if key.endswith("satisfied")
             and value == "NO"]
    advice = re.findall(r"^ \* (.+)$", text, re.MULTILINE)
    p50, p90, p99 = (float(entries.get(f"{each} percentile latency (ns)", "nan")) / 1e6
                     for each in ("50.00", "90.00", "99.00"))
    return LoadFigures(served if rate is None else rate, served, p50, p90, p99, valid,
                       "" if valid else f"not met: {', '.join(unmet).lower()} ({' '.join(advice)})")


def run(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> dict[str, Any]:
    """Measure the network of `job` on `target`, whose batch is the server's; return plain values. A job with a `rate`
    is one run at it, checked against `p99_ms`. For a job without one, see `measure_curve`."""
    path, label = job["path"], job["label"]
    _, shape = read_checked(path, runtime, job["memory_mb"], label)
    network = LoadedModel(runtime, Path(path), label, shape, job["memory_mb"])
    import_loadgen()
    sys.setswitchinterval(_SWITCH_S)

    with temporary_folder() as folder, measuring_lock(usable_cores(), progress):
        server = Server([network.bind(network.compile(target), target) for _ in range(job["streams"])], target.batch,
                        shape)
        if job.get("rate"):
            offer(server, Path(folder), _WARM_S)
            progress(0.1, f"{job['rate']:.0f} queries/s for {job['seconds']:.0f} s")
            figures = offer(server, Path(folder), job["seconds"], rate=job["rate"], p99_ms=job["p99_ms"],
                            seed=job["seed"])
            server.close()
            return asdict(figures)
        return measure_curve(server, job["seconds"], Path(folder), progress, job["seed"])


def curve_seconds(most: float, seconds: float) -> float:
    """Return about how long `measure_curve` takes on a server that answers `most` queries a second at saturation."""
    return _WARM_S + 4 / 3 * seconds + sum(_run_seconds(share * most, seconds) for share in SHARES)


def _run_seconds(rate: float, seconds: float) -> float:
    """Return the length of a run at `rate` queries a second."""
    return min(max(seconds / 2, FEWEST / rate), MOST_TIMES * seconds)


def measure_curve(server: Server, seconds: float, folder: Path, progress: Progress, seed: int) -> dict[str, Any]:
    """Measure saturation, runs at SHARES of it, and saturation again.

    Returns:
        Plain values of `hwnas.choose.curve.LoadCurve`.
    """
    def saturate(long: float, expected: float) -> LoadFigures:
        """Offer all queries at once, until they last as long as asked or _TRIES are over: more each time."""
        for tries in range(1, _TRIES + 1):  # a machine that other processes leave meanwhile answers more each time
            full = offer(server, folder, long, expected=_MORE**tries * expected)
            expected = full.served
            if full.valid:
                break
        return full

    progress(0.0, "as much as it takes")
    full = saturate(seconds, saturate(_WARM_S, 100.0).served)  # a short run says how many queries the long one takes
    runs = []
    for index, share in enumerate(SHARES, 1):
        progress(index / (len(SHARES) + 2), f"{share:.0%} of {full.served:.0f} queries/s")
        rate = share * full.served
        runs.append(offer(server, folder, _run_seconds(rate, seconds), rate=rate, seed=seed))
    progress(1 - 1 / (len(SHARES) + 2), "saturation again")
    again = saturate(seconds / 3, full.served)
    server.close()
    fault = next((f"at saturation: {each.reason}" for each in (full, again) if not each.valid), "")
    return {"saturation": [full.served, again.served], "fault": fault, "runs": [asdict(each) for each in runs]}


if __name__ == "__main__":
    from hwnas.runtimes.child import serve

    sys.exit(serve(run))
