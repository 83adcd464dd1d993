"""How well the latencies of smaller images are guessed by those of the known networks, beside the guess before.

    python -m experiments.race.guesses RUN … --out experiments/race/results/guesses.csv

RUN is a folder of `minutes.py`. The guess before: a power of multiply-adds times one of the image's side. What the new
one counts (`hwnas/search/spread.py`) was chosen on the runs with `chosen` in the file, before the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from hwnas.search.spread import guess_ms
from hwnas.space.architecture import Architecture
from hwnas.study.study import database_path, load_study

CHOSEN = {"n1/lite2", "n1/mob", "f1/0", "ls/lng"}  # folders


def rows_of(run: Path) -> pd.DataFrame:
    """Return each network on smaller images that a race timed, with what is guessed by those on full images."""
    attrs = [trial.user_attrs for trial in load_study(database_path(run / "race")).get_trials(deepcopy=False)]
    timed = {Architecture.parse(each["architecture"], 3, 10): float(each["latency_ms_predicted"]) for each in attrs}
    full = [each for each in timed if each.image_size == max(network.image_size for network in timed)]
    smaller = [each for each in timed if each not in full]

    def logs(of: list[Architecture]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.array([[1.0, np.log(each.macs), np.log(each.image_size / full[0].image_size)] for each in of])

    powers = np.linalg.lstsq(logs(full), np.log([timed[each] for each in full]), rcond=None)[0]
    name = f"{run.parent.name}/{run.name}"
    return pd.DataFrame({"run": name, "chosen": name in CHOSEN, "around": [each.around for each in smaller],
                         "id": [each.id for each in smaller], "px": [each.image_size for each in smaller],
                         "timed_ms": [timed[each] for each in smaller],
                         "guessed_ms": guess_ms(smaller, full, [timed[each] for each in full]),
                         "guessed_before_ms": np.exp(logs(smaller) @ powers)})


def main() -> None:
    """Write the file, and print errors by run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = pd.concat([rows_of(run) for run in given.runs])
    rows.to_csv(given.out, index=False)
    for column in ("guessed_ms", "guessed_before_ms"):
        errors = (np.log(rows[column] / rows.timed_ms)).abs()
        print(errors.groupby([rows.chosen, rows.run]).agg(["count", "median", "max"]).round(3).assign(guess=column))
        print(errors.groupby(rows.chosen).agg(["count", "median", "max"]).round(3))


if __name__ == "__main__":
    main()
