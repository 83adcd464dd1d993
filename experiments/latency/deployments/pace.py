"""What a set of deployments costs a search: seconds of its calibrations, and trials per minute, beside one deployment.

    HWNAS_HOST=new python -m experiments.latency.deployments.pace --turns 3 \\
        --out experiments/latency/results/deployments/pace.csv

`HWNAS_HOST` is a name that no table has, as of a new machine. Each turn calibrates in a home of its own and then
evaluates trials of digits at 32 px, with one deployment and with four, in an order that changes.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import optuna
import pandas as pd

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.search.plan import make_plan
from hwnas.search.road import explore
from hwnas.search.trials import Sampled
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import RunFolder

ARMS = {"one": ["openvino_int8"], "four": ["openvino_int8", "openvino_fp32", "ort_int8", "ort_fp32"]}


def run_arm(deployments: list[str], seed: int, n_trials: int, folder: Path) -> dict[str, float]:
    """Seconds from nothing to the first trial, seconds of the trials, and how many there were."""
    os.environ["HWNAS_HOME"] = str(folder / "home")
    console = Console(quiet=True)
    began = time.monotonic()
    plan = make_plan(compose("search", [
        "+target=cpu", f"target.deployments=[{','.join(deployments)}]", "space=mnasnet_small", "dataset=digits",
        "accuracy=proxy", f"n_trials={n_trials}", f"seed={seed}", "controls=0", f"out={folder / 'run'}"]), console)
    run = RunFolder.create(plan.out, False)
    explorer = Sampled.prepare(plan, run, console)
    ready_s = time.monotonic() - began
    run.write_config(plan.yaml)
    explorer.begin(console)
    explore(explorer, console)
    done = explorer.study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    return {"ready_s": ready_s, "trials_s": time.monotonic() - began - ready_s, "n_trials": len(done)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for turn in range(given.turns):
        for arm in list(ARMS)[:: 1 if turn % 2 else -1]:
            with temporary_folder() as folder:
                rows.append({"turn": turn, "arm": arm, **run_arm(ARMS[arm], turn, given.trials, Path(folder))})
            pd.DataFrame(rows).round(1).to_csv(given.out, index=False)
    print(pd.DataFrame(rows).groupby("arm")[["ready_s", "trials_s", "n_trials"]].mean())


if __name__ == "__main__":
    main()
