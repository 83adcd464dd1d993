"""Many workers on one study: do four find what one finds, and is nothing lost or asked for twice?

    python experiments/many_workers/run.py accuracies=nas_bench_macro.csv out=DIR [storage=postgresql+psycopg://…] \\
        [latencies=TABLE.json.gz] [workers=4] [evals=48] [seeds=5] [seconds=0.3]

Searches NAS-Bench-Macro (its accuracies from the file, latencies as a shipped table predicts them) with one worker and
with several, these in SQLite and, where `storage` names a database, there too. An evaluation is a look-up that takes
`seconds` in the mean, so that several are pending whenever a worker asks. Random search with one worker stands beside
them. Races that are over are kept in DIR/races.jsonl, the same command goes on from there. Writes workers.csv,
workers.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.common import command, save_csv, save_json, text_table
from experiments.many_workers.race import Race, Result, crew, load_problem, run
from hwnas.errors import ConfigError, DataError, UnknownName, UserError
from hwnas.study.storage import parse_url
from hwnas.system.paths import shipped
from hwnas.target import Host

SHIPPED = "amd-epyc-f26m2s1-2c/openvino-int8-t1-b1-32px-c3-k10.json.gz"
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Options:
    """What the command is asked for."""

    accuracies: Path
    out: Path
    storage: str = ""
    latencies: Path = shipped("latency_tables") / SHIPPED
    workers: int = 4
    evals: int = 48
    seeds: int = 5
    seconds: float = 0.3

    @property
    def races(self) -> list[Race]:
        """Seed by seed: one worker (in SQLite: where its study lies changes nothing), several, random search."""
        settings = [("sqlite", "hwnas", 1, self.seconds), ("sqlite", "hwnas", self.workers, self.seconds),
                    ("sqlite", "random", 1, 0.0)]
        if self.storage:
            settings.insert(2, (parse_url(self.storage).get_backend_name(), "hwnas", self.workers, self.seconds))
        return [Race(storage, sampler, workers, seed, self.evals, seconds)
                for seed in range(self.seeds) for storage, sampler, workers, seconds in dict.fromkeys(settings)]


def parse(arguments: Sequence[str]) -> Options:
    """ConfigError or UnknownName, in one line, for what cannot be meant."""
    known = {field.name: str(field.type) for field in fields(Options)}
    found: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no name=value.")
        if name not in known:
            raise UnknownName("option", name, known)
        found[name] = _read(name, known[name], value)
    for name in ("accuracies", "out"):
        if name not in found:
            raise ConfigError(f"{name}=… must be given.")
    return Options(**found)


def _read(name: str, kind: str, value: str) -> Any:
    if kind not in ("int", "float"):
        return Path(value) if kind == "Path" else value
    try:
        number = int(value) if kind == "int" else float(value)
    except ValueError:
        number = -1
    if not (1 if kind == "int" else 0) <= number < float("inf"):
        raise ConfigError(f"{name} must be {'a whole number from 1 on' if kind == 'int' else 'a number from 0 on'}, "
                          f"got {value!r}.")
    return number


def main(arguments: list[str] | None = None) -> None:
    """Race what is not over, write the results, print them."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return
    options = parse(given)
    path = options.out / "races.jsonl"
    done = {one.race: one for one in _kept(path)}
    left = [one for one in options.races if one not in done]
    if left:
        done.update({one.race: one for one in _race(left, options, path)})
    rows = summary([done[one] for one in options.races])
    save_csv(options.out / "workers.csv", rows)
    save_json(options.out / "workers.json", {
        "accuracies": options.accuracies.name, "latencies": options.latencies.name, "computed_on": Host.detect().name,
        "cores": os.cpu_count(), "evals": options.evals, "seconds_an_evaluation": options.seconds, "settings": rows,
        "races": [done[one].to_dict() for one in options.races]})
    print(describe(rows))


def _kept(path: Path) -> list[Result]:
    """Races of the file; a line cut off by a kill is dropped."""
    try:
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [Result.from_dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: no file of races ({error}). Choose another folder: out=DIR") from error


def _race(races: Sequence[Race], options: Options, path: Path) -> list[Result]:
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))  # read by the workers, which start after this
    files = (options.accuracies, options.latencies)
    load_problem(*files)  # an error in a file is told before anything starts
    path.parent.mkdir(parents=True, exist_ok=True)
    found = []
    try:
        with crew(options.workers, files) as pool, tempfile.TemporaryDirectory() as folder, open(path, "a") as file:
            for number, one in enumerate(races, 1):
                url = f"sqlite:///{folder}/{number}.db" if one.storage == "sqlite" else options.storage
                found.append(run(one, url, pool, files))
                file.write(json.dumps(found[-1].to_dict()) + "\n")
                file.flush()
                print(f"\r{number} of {len(races)} races", end="", file=sys.stderr, flush=True)
    except BrokenProcessPool as error:
        raise UserError("a worker was killed, perhaps for want of memory. Races that are over are kept: give the same "
                        "command again.") from error
    print(file=sys.stderr)
    return found


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row for each storage, sampler and number of workers: means over seeds with standard errors; `against_one` is
    the difference from one worker with the same sampler and seed."""
    groups: dict[tuple[str, str, int], dict[int, Result]] = {}
    for one in results:
        groups.setdefault((one.race.storage, one.race.sampler, one.race.workers), {})[one.race.seed] = one
    rows = []
    for (storage, sampler, workers), by_seed in groups.items():
        found = list(by_seed.values())
        alone = groups.get(("sqlite", sampler, 1), {})
        against = [one.share - alone[seed].share for seed, one in by_seed.items() if seed in alone and workers > 1]
        asks, duplicates = (sum(getattr(one, name) for one in found) for name in ("asks", "duplicates"))
        rows.append({"storage": storage, "sampler": sampler, "workers": workers, "seeds": len(found),
                     **_mean("half", [one.half for one in found]), **_mean("share", [one.share for one in found]),
                     **_mean("against_one", against), "asks": asks, "duplicates": duplicates,
                     "duplicates_share": round(duplicates / asks, 5), "lost": sum(one.lost for one in found),
                     "pending": round(float(np.mean([one.pending for one in found])), 2),
                     "seconds": round(float(np.mean([one.seconds for one in found])), 2)})
    return rows


def _mean(name: str, values: Sequence[float]) -> dict[str, float | None]:
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return {name: round(float(np.mean(values)), 5) if values else None,
            f"{name}_error": None if error is None else round(error, 5)}


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and in words whether the workers kept what the project promises."""
    lines = [["", "share at half", "share", "against one worker", "duplicates", "lost", "pending", "wall s"]]
    for row in rows:
        name = f"{row['sampler']}, {row['storage']}, {row['workers']} worker{'s' * (row['workers'] > 1)}"
        lines.append([name, _percent(row, "half"), _percent(row, "share"), _percent(row, "against_one", "+"),
                      f"{row['duplicates_share']:.2%}", str(row["lost"]), f"{row['pending']:.1f}",
                      f"{row['seconds']:.1f}"])
    return f"{text_table(lines)}\n" + "\n".join(_verdict(row) for row in rows if row["workers"] > 1)


def _percent(row: dict[str, Any], name: str, sign: str = "") -> str:
    if row[name] is None:
        return "–"
    error = row[f"{name}_error"]
    return f"{100 * row[name]:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _verdict(row: dict[str, Any]) -> str:
    where = f"{row['workers']} workers in {row['storage']}"
    kept = "lost nothing" if not row["lost"] else f"LOST {row['lost']} evaluations"
    twice = "within" if row["duplicates_share"] <= 0.02 else "OVER"
    error = row["against_one_error"]
    if error is None:
        like = "noise is not known from one seed"
    else:
        like = ("like one worker within two standard errors" if abs(row["against_one"]) <= 2 * error else
                "AHEAD of one worker" if row["against_one"] > 0 else "BEHIND one worker")
    return f"{where}: {kept}; duplicates {twice} 2 %; hypervolume at equal evaluations {like}."


if __name__ == "__main__":
    command(main)
