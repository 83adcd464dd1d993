"""What the sampler's mix of candidates brings in a space that no table can hold.

    python experiments/sampler_ablation/large.py out=DIR [space=mnasnet] [evals=100] [seeds=8] [table=FILE.json.gz] \\
        [variants=[whole,no_evolution,no_crossings]] [jobs=1]

Latencies are those that the shipped table of `space` predicts (`table`: another); accuracies are made up: a term a
choice, 25 terms a pair of choices, and the logarithm of MACs, drawn anew for each seed: no networks' accuracies. They
show whether candidates reach far enough among 10^13 networks, where a table of a few thousand is soon covered.
Hypervolume is counted from the quarter of accuracy and the 90th percentile of latency of 2,000 random networks, and is
given in units of theirs: above 1 is better than training those 2,000. Writes large.csv, large.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.common import command, save_csv, save_json, text_table
from experiments.sampler_ablation.variants import VARIANTS
from experiments.sampler_contest.options import read_dotlist
from experiments.sampler_contest.scores import mean_and_error
from hwnas.errors import ConfigError, UnknownName
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable
from hwnas.space.search_space import SearchSpace
from hwnas.stats import hypervolume_2d
from hwnas.study.objective import Objective
from hwnas.system.paths import shipped
from hwnas.target import Host

CANDIDATES = ("whole", "no_evolution", "no_crossings")
SHIPPED = shipped("latency_tables") / "amd-epyc-f26m2s1-2c/openvino-int8-t1-b1-128px-c3-k10.json.gz"
MARKS = (25, 50, 100, 200, 400)
RANDOM, PAIRS = 2000, 25


@dataclass(frozen=True)
class MadeUp:
    """An accuracy for every network of a space, drawn from `seed`: per cent, some 40 to 90."""

    space: SearchSpace
    seed: int

    def __call__(self, codes: np.ndarray) -> np.ndarray:
        """Of canonical codes [n, p]: [n]."""
        rng = np.random.default_rng((self.seed, 3))
        n = len(self.space.parameters)
        single = rng.normal(size=(n, 16))
        found = single[np.arange(n), codes].sum(axis=1)
        for _ in range(PAIRS):
            left, right = rng.integers(0, n, 2)
            found = found + 0.6 * rng.normal(size=(16, 16))[codes[:, left], codes[:, right]]
        macs = np.array([self.space.decode(self.space.to_params(row)).macs for row in codes])
        return np.asarray(60 + 6 * np.log10(macs / 1e6) + 0.5 * found)


def main(arguments: list[str] | None = None) -> None:
    """Search with every variant and seed; print and store what each reached."""
    given = read_dotlist(sys.argv[1:] if arguments is None else arguments)
    known = {"out": None, "space": "mnasnet", "evals": 100, "seeds": 8, "table": str(SHIPPED), "jobs": 1,
             "variants": list(CANDIDATES)}
    for name in given:
        if name not in known:
            raise UnknownName("option", name, known)
    options: dict[str, Any] = {**known, **given}
    if options["out"] is None:
        raise ConfigError("out=DIR must be given.")
    if not isinstance(options["variants"], list):
        raise ConfigError("variants must be a list of names, [a,b,…].")
    if not isinstance(options["evals"], int) or options["evals"] < MARKS[0]:
        raise ConfigError(f"evals must be at least {MARKS[0]}, got {options['evals']!r}.")
    for name in options["variants"]:
        if name not in CANDIDATES:
            raise UnknownName("variant", name, CANDIDATES)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    marks = [mark for mark in MARKS if mark <= options["evals"]]
    jobs = [(name, seed) for name in CANDIDATES if name in options["variants"] for seed in range(options["seeds"])]
    play = partial(search, str(options["space"]), str(options["table"]), marks)
    with ProcessPoolExecutor(options["jobs"], mp_context=get_context("spawn")) as pool:
        shares = dict(zip(jobs, pool.map(play, *zip(*jobs, strict=True)), strict=True))
    rows = [{"variant": name, "seed": seed, **{f"hv_{mark}": round(share, 5) for mark, share in found.items()}}
            for (name, seed), found in shares.items()]
    save_csv(Path(options["out"]) / "large.csv", rows)
    save_json(Path(options["out"]) / "large.json", {
        "space": options["space"], "table": Path(options["table"]).name, "evals": options["evals"],
        "seeds": options["seeds"], "accuracies": "made up", "computed_on": Host.detect().name, "runs": rows})
    print(describe(shares, marks))


def search(space_name: str, table_path: str, marks: Sequence[int], name: str, seed: int) -> dict[int, float]:
    """Hypervolumes at the marks, in units of that of random networks."""
    import optuna
    from optuna.distributions import CategoricalDistribution

    from hwnas.samplers.informed import Context, informed

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = LatencyTable.load(Path(table_path))
    space = SearchSpace.load(space_name, channels=table.key.channels, classes=table.key.classes,
                             image_size=max(table.key.sizes))
    predict, accuracy = LatencyModel.fit(table, space).predict, MadeUp(space, seed)
    sampler = informed(Context(space, predict, Objective(target_ms=1.0)), seed, 8, mix=VARIANTS[name].mix)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    distributions = {one.name: CategoricalDistribution(one.choices) for one in space.parameters}
    random = space.canonical_codes(space.sample(np.random.default_rng(5), RANDOM))
    chance = np.column_stack([accuracy(random), np.log2(predict(random).mean)])
    reference = float(np.quantile(chance[:, 0], 0.25)), float(np.quantile(chance[:, 1], 0.9))
    points = []
    for _ in range(max(marks)):
        trial = study.ask(distributions)
        row = space.canonical_codes(space.to_codes(trial.params)[None])
        top1, latency_ms = float(accuracy(row)[0]), float(predict(row).mean[0])
        trial.set_user_attr("top1_proxy", top1)
        study.tell(trial, (top1, latency_ms))
        points.append((top1, np.log2(latency_ms)))
    found = np.array(points)
    unit = hypervolume_2d(chance[:, 0], chance[:, 1], reference)
    return {mark: hypervolume_2d(found[:mark, 0], found[:mark, 1], reference) / unit for mark in marks}


def describe(shares: dict[tuple[str, int], dict[int, float]], marks: Sequence[int]) -> str:
    """Means, and what is lost against the whole sampler, paired by seed."""
    names = list(dict.fromkeys(name for name, _ in shares))
    rows = [["hypervolume, in units of 2,000 random networks'", *map(str, marks)]]
    for name in names:
        seeds = [seed for one, seed in shares if one == name]
        cells = []
        for mark in marks:
            values = np.array([shares[name, seed][mark] for seed in seeds])
            cell = f"{values.mean():.2f}"
            if name != "whole" and "whole" in names:
                lost, error = mean_and_error(np.array([shares["whole", seed][mark] for seed in seeds]) - values)
                cell += f" (lost {lost:+.2f} ± {error or 0:.2f})"
            cells.append(cell)
        rows.append([f"without {VARIANTS[name].what}" if name != "whole" else "the whole sampler", *cells])
    return text_table(rows)


if __name__ == "__main__":
    command(main)
