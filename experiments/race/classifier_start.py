"""How a new classifier behind pretrained layers begins best.

    python -m experiments.race.classifier_start --root EUROSAT --around NAME --weights FILE --out CSV

The whole network and two cuts by depth are fine-tuned for 60 steps, and two of the three for 240, as a race does in its
first rungs. What the file holds is not run again. The arms differ in the classifier's first values: `timm`, those of
timm's EfficientNets (uniform up to one over the root of the classes); `torch`, those of torch's linear layer (up to one
over the root of its inputs), which hwnas takes; `zero`, in the short trainings only. Three seeds; top-1 is that of
validation images, which chose nothing here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
from torch import nn

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.data.loading import read_images
from hwnas.networks.network import FoundNetwork
from hwnas.search import families
from hwnas.search.plan import make_plan
from hwnas.target import Host

SEEDS = (0, 1, 2)
ARMS: dict[str, Callable[[nn.Linear], Any]] = {
    "timm": lambda layer: (nn.init.uniform_(layer.weight, -1 / math.sqrt(layer.out_features),
                                            1 / math.sqrt(layer.out_features)), nn.init.zeros_(layer.bias)),
    "torch": lambda layer: layer.reset_parameters(),
    "zero": lambda layer: (nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias))}
STEPS = {60: (("whole", "cut_early", "cut_early_two"), tuple(ARMS)),
         240: (("whole", "cut_early_two"), ("timm", "torch"))}


def judge(given: argparse.Namespace) -> None:
    """Write a row for each seed, cut, length and arm."""
    config = compose("search", ["+target=xeon_int8", "dataset=imagefolder", f"dataset.root={given.root}",
                                "dataset.image_size=64", f"around={given.around}", f"pretrained.file={given.weights}",
                                "controls=0", "baselines=[]", "workers=1"])
    plan = make_plan(config, Console(quiet=True), trials_only=True)
    data, start = read_images(plan.options.dataset, 64, 0, Console(quiet=True)), FoundNetwork.start
    rows = pd.read_csv(given.out).to_dict("records") if given.out.exists() else []
    done = {(row["steps"], row["seed"], row["cut"], row["arm"]) for row in rows}
    for steps, (cuts, arms) in STEPS.items():
        for seed, cut, arm in product(SEEDS, cuts, arms):
            if (steps, seed, cut, arm) in done:
                continue

            def begin(network: FoundNetwork, arm: str = arm) -> nn.Module:
                model: Any = start(network)
                ARMS[arm](model.get_classifier())
                return model  # type: ignore[no-any-return]

            seeded = replace(plan, options=replace(plan.options, seed=seed, threads=1))
            with mock.patch.object(FoundNetwork, "start", begin):
                right = families._answers(seeded, data, seeded.network(plan.space.known[cut]), steps)
            rows.append({"network": given.around, "steps": steps, "seed": seed, "cut": cut, "arm": arm,
                         "top1": float(right.mean()), "n": len(right), "host": Host.detect().name})
            print(rows[-1], flush=True)
            pd.DataFrame(rows).to_csv(given.out, index=False, float_format="%.6g")


def main(argv: Sequence[str] | None = None) -> None:
    """Run all of one network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("root", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--around", required=True)
    judge(parser.parse_args(argv))


if __name__ == "__main__":
    main()
