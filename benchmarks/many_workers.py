"""Up to 1,000 workers on one study: where does the sampler or the database become the limit?

    python benchmarks/many_workers.py measure [postgresql+psycopg://…/EMPTY]   # service times here, else SQLite's
    python benchmarks/many_workers.py check [postgresql+psycopg://…/EMPTY]     # real workers beside the simulation
    python benchmarks/many_workers.py simulate                                 # the table, from what was measured

`measure` runs trials that train nothing on studies of so many finished and running trials, with the real sampler and
storage. `simulate` lets workers pass through stations with those service times and trains for recorded times. Each
worker has cores of its own for the sampler; the database is one machine. A server for PostgreSQL must run here, for
its processor time is read from /proc. Results lie in experiments/many_workers.
"""

from __future__ import annotations

import csv
import functools
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import sqlalchemy
from optuna.distributions import CategoricalDistribution, distribution_to_json
from optuna.storages._rdb import models
from optuna.trial import TrialState

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from hwnas.accuracy.estimator import Estimate  # noqa: E402
from hwnas.latency.model import LatencyModel  # noqa: E402
from hwnas.samplers.informed import Context  # noqa: E402
from hwnas.samplers.loading import load_sampler  # noqa: E402
from hwnas.search.loop import run_search  # noqa: E402
from hwnas.search.trial import SearchOptions, facts_of  # noqa: E402
from hwnas.space.search_space import SearchSpace  # noqa: E402
from hwnas.study.objective import Objective  # noqa: E402
from hwnas.study.storage import study_id_of, this_thread  # noqa: E402
from hwnas.study.study import database_path, open_study, storage_of  # noqa: E402
from hwnas.target import Host  # noqa: E402
from synthetic import synthetic_table  # noqa: E402

OUT = ROOT / "experiments" / "many_workers"
RECORDED = ROOT / "experiments" / "sampler_search" / "results" / "longer_proxy" / "search.csv"
FINISHED, RUNNING = (100, 1000, 5000), (0, 100, 1000)
WORKERS = (1, 2, 4, 8, 16, 32, 64, 125, 250, 500, 1000)
TIMES_AS_LONG = (1, 10, 100)
CORES = 2  # of the database's machine
TRIALS = 6  # timed at each point; the first of a process reads all trials and is left out
MORE = 100
READ = 3  # times that a worker reads a trial of another: twice as it runs, and as it has ended
SPACE = SearchSpace.load("mnasnet_small", channels=1, classes=10)
MODEL = LatencyModel.fit(synthetic_table(SPACE), SPACE)
OBJECTIVE = Objective(target_ms=1.0)


@dataclass(frozen=True)
class Service:
    """What one trial costs, in seconds: the sampler's and the rest of the worker's own time, and the database's.

    `locked_s` passes one trial after the other: SQLite's transactions, or PostgreSQL's that gives a trial its number.
    `server_s` is the processor time of PostgreSQL's processes. `seen_s` and `seen_server_s` are the same two of the
    reading of one more trial, which each worker does READ times for each trial of the others.
    """

    storage: str
    finished: int
    running: int
    sampler_s: float
    own_s: float
    locked_s: float
    server_s: float
    seen_s: float
    seen_server_s: float
    host: str


class Instant:
    """An accuracy estimator that trains for `seconds`, doing nothing: larger networks are said to be better."""

    def __init__(self, seconds: Sequence[float] = (0.0,), seed: int = 0) -> None:
        self.seconds, self.rng = seconds, np.random.default_rng(seed)

    def evaluate(self, architecture: Any, history: Any, seed: int) -> Estimate:
        time.sleep(float(self.rng.choice(self.seconds)))
        value = 1 - 1 / (1 + architecture.macs / 1e6)
        return Estimate(value, value, value, 0.01, "proxy", 0.0, (value / 2, value))


class Spent:
    """Seconds by `clock` inside named functions, those inside of another counted there alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.inner = [0.0]

    def watch(self, owner: Any, name: str, key: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self.inner.append(0.0)
            began = self.clock()
            try:
                return function(*args, **options)
            finally:
                whole = self.clock() - began
                self.seconds[key] = self.seconds.get(key, 0.0) + whole - self.inner.pop()
                self.inner[-1] += whole

        setattr(owner, name, timed)


def recorded_seconds() -> list[float]:
    """How long the trainings of a recorded search took; its file holds sums over trials in the order of their ends."""
    with RECORDED.open(newline="") as file:
        sums = [float(row["training_seconds"]) for row in csv.DictReader(file) if row["sampler"] == "hwnas"]
    return np.diff([0.0, *sums]).tolist()


def opened(url: str, name: str, seed: int = 0) -> optuna.Study:
    context = Context(SPACE, MODEL.predict, OBJECTIVE)
    return open_study(url, {"space": SPACE.name}, OBJECTIVE, load_sampler("hwnas", seed, context), name=name,
                      grace_s=10**6)


def add_trials(study: optuna.Study, n: int, state: TrialState, seed: int) -> None:
    """Add random networks as trials of a worker elsewhere, straight to the tables: Optuna's way takes minutes."""
    options, estimator, storage = SearchOptions(1, OBJECTIVE), Instant(), storage_of(study)
    first = len(study.get_trials(deepcopy=False))
    now = datetime.now()
    with storage._session() as session:
        for number, row in enumerate(SPACE.sample(np.random.default_rng(seed), n), first):
            architecture = SPACE.decode(SPACE.to_params(row))
            attrs, _ = facts_of(architecture, row, MODEL.predict, options)
            attrs |= {"worker": "elsewhere/0/0/1/1"}
            done = state == TrialState.COMPLETE
            trial = models.TrialModel(study_id=study_id_of(study), number=number, state=state, datetime_start=now,
                                      datetime_complete=now if done else None)
            session.add(trial)
            session.flush()
            if done:
                estimate = estimator.evaluate(architecture, (), 0)
                attrs |= {"outcome": "evaluated", "top1_proxy": estimate.value, "top1_std": estimate.std,
                          "seconds": 0.0, "curve": list(estimate.curve), "stopped": False, "reward": 0.0}
                session.add_all(models.TrialValueModel(
                    trial_id=trial.trial_id, objective=place, value=value,
                    value_type=models.TrialValueModel.TrialValueType.FINITE) for place, value in enumerate(
                        OBJECTIVE.values(estimate.value, attrs["latency_ms_predicted"], architecture)))
            session.add_all(models.TrialParamModel(
                trial_id=trial.trial_id, param_name=parameter.name, param_value=float(code),
                distribution_json=distribution_to_json(CategoricalDistribution(parameter.choices)))
                for parameter, code in zip(SPACE.parameters, row, strict=True))
            session.add_all(models.TrialUserAttributeModel(
                trial_id=trial.trial_id, key=key, value_json=json.dumps(value)) for key, value in attrs.items())


def server_seconds(study: optuna.Study) -> float:
    """Processor time of the PostgreSQL server behind `study`, which runs on this machine; 0 for SQLite."""
    if storage_of(study).engine.name == "sqlite":
        return 0.0
    with storage_of(study).engine.connect() as connection:
        backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    server, ticks = _fields_of(backend)[1], 0
    for path in Path("/proc").glob("[0-9]*"):
        fields = _fields_of(path.name)
        if fields and (path.name == server or fields[1] == server):
            ticks += sum(map(int, fields[11:15] if path.name == server else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _fields_of(pid: object) -> list[str]:
    """What stands in /proc/PID/stat behind the name: state, parent …; nothing where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def watched(study: optuna.Study) -> tuple[Spent, Spent]:
    """Watch the sampler by processor time, and what passes one trial after the other: of a server by the clock."""
    spent, storage, sampler = Spent(time.process_time), storage_of(study), study.sampler
    for name in ("infer_relative_search_space", "sample_relative", "sample_independent", "before_trial", "after_trial"):
        spent.watch(sampler, name, "sampler")
    spent.watch(study._storage, "get_all_trials", "reading")
    if storage.engine.name != "sqlite":
        waited = Spent(time.perf_counter)
        waited.watch(storage, "_create_new_trial", "locked")
        return spent, waited
    began = [0.0]
    sqlalchemy.event.listen(storage.engine, "begin", lambda _: began.__setitem__(
        0, 0.0 if this_thread.reads else time.process_time()))  # who only reads holds no lock
    for name in ("do_commit", "do_rollback"):
        ended = getattr(storage.engine.dialect, name)

        def timed(connection: Any, ended: Callable[[Any], None] = ended) -> None:
            ended(connection)
            if began[0]:
                held_s = time.process_time() - began[0]
                spent.seconds["locked"] = spent.seconds.get("locked", 0.0) + held_s
                spent.inner[-1] += held_s
                began[0] = 0.0

        setattr(storage.engine.dialect, name, timed)
    return spent, spent


def work(study: optuna.Study, asks: int, seconds: Sequence[float] = (0.0,), seed: int = 0) -> None:
    """Work until the study holds so many trials."""
    run_search(study, SPACE, MODEL.predict, Instant(seconds, seed), SearchOptions(10**6, OBJECTIVE, max_asks=asks))


def measured(url: str, finished: int, running: int) -> Service:
    """Time trials on a study that holds so many, and the reading of trials that somebody else has finished."""
    name = f"{finished} finished, {running} running"
    study, other = opened(url, name), opened(url, name)
    add_trials(other, finished, TrialState.COMPLETE, 1)
    add_trials(other, running, TrialState.RUNNING, 2)
    work(study, finished + running + 1)
    (spent, waited), server, began = watched(study), server_seconds(study), time.process_time()
    work(study, finished + running + 1 + TRIALS)
    whole, server = (time.process_time() - began) / TRIALS, (server_seconds(study) - server) / TRIALS
    sampler, locked = spent.seconds["sampler"] / TRIALS, waited.seconds["locked"] / TRIALS
    own = whole - sampler - (locked if waited is spent else 0.0)
    add_trials(other, MORE, TrialState.COMPLETE, 3)
    read = [_read(study), _read(study)]
    seen, seen_server = (max(one - two, 0.0) / MORE for one, two in zip(*read, strict=True))
    storage = storage_of(study).engine.name
    for each in (study, other):
        storage_of(each).engine.dispose()
    return Service(storage, finished, running, sampler, own, locked, server, seen, seen_server, Host.detect().name)


def _read(study: optuna.Study) -> tuple[float, float]:
    server, began = server_seconds(study), time.process_time()
    study.get_trials(deepcopy=False)
    return time.process_time() - began, server_seconds(study) - server


def measure(place: str) -> None:
    """Write the rows of a database in services.csv."""
    rows = []
    for finished, running in product(FINISHED, RUNNING):
        rows.append(measured(place, finished, running))
        print(rows[-1], flush=True)
    write("services.csv", [*(row for row in read_services() if row.storage != rows[0].storage), *rows])


@dataclass(frozen=True)
class Point:
    """What a simulated number of workers comes to: trials an hour, and where a worker's time goes.

    `reading_share` is its own work on what the study says of other workers. Where the training has less than half of
    its time, `limit` names what has most of the rest.
    """

    storage: str
    times_as_long: float
    finished: int
    workers: int
    trials_per_hour: float
    training_share: float
    sampler_share: float
    reading_share: float
    database_share: float
    limit: str


def simulated(service: Service, workers: int, training: Sequence[float], cores: int, shared: bool = False
              ) -> tuple[float, dict[str, float]]:
    """Trials an hour, and the shares of a worker's time.

    Workers pass stations in turn: the lock (one at a time), the database's cores, their own processor for the sampler
    and for reading (with `shared` all on the database's cores), and the training. The first and the last quarter of all
    trials are left out of the rate.
    """
    rng = np.random.default_rng(workers)
    free: dict[str | None, list[float]] = {"lock": [0.0], "cores": [0.0] * cores}
    own, others = "cores" if shared else None, workers - 1
    read_s = others * READ * service.seen_s
    stations = [("lock", service.locked_s, "database"),
                ("cores", service.server_s + others * READ * service.seen_server_s, "database"),
                (own, service.sampler_s, "sampler"), (own, service.own_s + read_s, "reading")]
    spent = dict.fromkeys(("training", "sampler", "reading", "database"), 0.0)
    ends: list[float] = []
    trials = max(12 * workers, 400)  # in all
    waiting = [(float(rng.choice(training)) * float(rng.random()), worker, 0) for worker in range(workers)]
    heapq.heapify(waiting)
    while len(ends) < trials:
        now, worker, step = heapq.heappop(waiting)
        if step == len(stations):
            kind, end = "training", now + float(rng.choice(training))
            ends.append(end)
        else:
            name, takes, kind = stations[step]
            end = takes + (now if name is None else max(now, heapq.heappop(free[name])))
            if name is not None:
                heapq.heappush(free[name], end)
        spent[kind] += end - now
        heapq.heappush(waiting, (end, worker, (step + 1) % (len(stations) + 1)))
    ends.sort()
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return 3600 * (last - first) / (ends[last] - ends[first]), {
        kind: seconds / sum(spent.values()) for kind, seconds in spent.items()}


def at_workers(services: Sequence[Service], workers: int) -> Service:
    """The service with so many trials running, between the two measured beside it.

    What one more finished trial costs is taken where none runs: it is a difference, lost among many running ones.
    """
    values = {key: float(np.interp(workers - 1, [one.running for one in services],
                                   [getattr(one, key) for one in services]))
              for key in ("sampler_s", "own_s", "locked_s", "server_s")}
    return Service(**{**asdict(services[0]), "running": workers - 1, **values})


def simulate() -> None:
    """Write simulated.csv from services.csv."""
    services, points = read_services(), []
    for storage, finished in sorted({(one.storage, one.finished) for one in services}):
        line = [one for one in services if (one.storage, one.finished) == (storage, finished)]
        for times in TIMES_AS_LONG:
            training = [times * one for one in recorded_seconds()]
            for workers in WORKERS:
                rate, shares = simulated(at_workers(line, workers), workers, training, CORES)
                most = max(shares.keys() - {"training"}, key=lambda kind: shares[kind])
                points.append(Point(storage, times, finished, workers, rate, **{
                    f"{kind}_share": share for kind, share in shares.items()}, limit=most * (shares["training"] < 0.5)))
    write("simulated.csv", points)


@dataclass(frozen=True)
class Checked:
    """Trials an hour of real workers on this machine, and of as many simulated ones on its cores."""

    storage: str
    workers: int
    cores: int
    finished: int
    trial_s: float
    real_per_hour: float
    simulated_per_hour: float
    host: str


CHECK_S, CHECK_TRIALS = 5.0, 6  # each worker sleeps for so long, so many times


def check(place: str) -> None:
    """Write the rows of a database in checked.csv: real processes that sleep instead of training."""
    host, rows, held = Host.detect(), [], FINISHED[0]
    for workers in (8, 16):
        study = opened(place, f"{workers} workers")
        add_trials(study, held, TrialState.COMPLETE, 1)
        crew = [subprocess.Popen([sys.executable, __file__, "sleep", place, f"{workers} workers", str(seed),
                                  str(held + workers * CHECK_TRIALS)]) for seed in range(workers)]
        assert [worker.wait() for worker in crew] == [0] * workers
        ends = sorted(trial.datetime_complete.timestamp() for trial in study.get_trials(deepcopy=False)[held:]
                      if trial.datetime_complete)
        first, last = len(ends) // 4, 3 * len(ends) // 4
        storage = storage_of(study).engine.name
        line = [one for one in read_services() if (one.storage, one.finished) == (storage, held)]
        real = 3600 * (last - first) / (ends[last] - ends[first])
        there = simulated(at_workers(line, workers), workers, [CHECK_S], host.cores, shared=True)[0]
        rows.append(Checked(storage, workers, host.cores, held, CHECK_S, real, there, host.name))
        print(rows[-1], flush=True)
    write("checked.csv", [*(row for row in read("checked.csv", Checked) if row.storage != rows[0].storage), *rows])


def sleep(place: str, name: str, seed: str, asks: str) -> None:
    """One real worker of `check`."""
    work(opened(place, name, int(seed)), int(asks), (CHECK_S,), int(seed))


def read(name: str, kind: Callable[..., Any]) -> list[Any]:
    """Rows of a CSV file of ours; none where there is no file."""
    if not (OUT / name).is_file():
        return []
    kinds = {one.name: {"str": str, "int": int, "float": float}[str(one.type)] for one in fields(kind)}
    with (OUT / name).open(newline="") as file:
        return [kind(**{key: kinds[key](value) for key, value in row.items()}) for row in csv.DictReader(file)]


def read_services() -> list[Service]:
    return read("services.csv", Service)


def write(name: str, rows: Sequence[Any]) -> None:
    def lines() -> Iterator[list[object]]:
        for row in rows:
            yield [f"{value:.6g}" if isinstance(value, float) else value for value in astuple(row)]

    OUT.mkdir(exist_ok=True)
    with (OUT / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([one.name for one in fields(rows[0])])
        writer.writerows(lines())


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    what, *arguments = sys.argv[1:] or ["simulate"]
    if what == "simulate":
        simulate()
    elif what == "sleep":
        sleep(*arguments)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            {"measure": measure, "check": check}[what](arguments[0] if arguments else database_path(Path(temporary)))
