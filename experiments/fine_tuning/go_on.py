"""Is a trial's training lost where its network is trained again, or may a finalist go on from it?

    python -m experiments.fine_tuning.go_on --data DATA --weights DIR [--sets eurosat trashnet fashion_mnist]
        [--cuts 1111h640 1222h512] [--shares 0.5 1] [--seeds 0 1]

Cuts of EfficientNet-Lite0, on images of the set's size and of half of it, are fine-tuned for 400 steps of 32 images
from ImageNet weights; for 400 steps from the weights that a trial of 160 ended with; for 560 steps from ImageNet
weights. A row of go_on.csv holds their top-1 on validation and test images together, which choose nothing here. Data
sets are those of `run`, and lie in DATA.

Written before the runs of go_on.csv, after trials of the same that kept the last weights in place of their average:
going on is worth it if it beats 400 steps by more than two standard errors of the paired differences, and costs nothing
if it is not behind 560 steps by more than two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.common import command, save_csv
from experiments.fine_tuning.run import NAME, SETS, load
from hwnas.data.dataset import Split, top1
from hwnas.networks.around import begin, find_start, space_content
from hwnas.networks.weights import PretrainedOptions
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host
from hwnas.training.first import FirstTraining
from hwnas.training.recipe import FINE_TUNING, INHERITED

OUT = Path(__file__).parent / "go_on.csv"
STEPS = 400


def measure(folder: Path, weights: Path, name: str, cuts: Sequence[str], shares: Sequence[float], seeds: Sequence[int]
            ) -> None:
    """Train what go_on.csv does not hold yet."""
    data = load(name, folder)
    pretrained = find_start(NAME, PretrainedOptions(use=True, folder=weights), data.channels)
    data = replace(data, mean=pretrained.mean, std=pretrained.std)
    space = SearchSpace.of_content(space_content(NAME, data.channels, len(data.class_names), data.image_size), "cuts",
                                   channels=data.channels, classes=len(data.class_names))
    rows: list[dict[str, Any]] = pd.read_csv(OUT).to_dict("records") if OUT.exists() else []
    trial = replace(INHERITED, threads=1)
    for cut, share in product(cuts, shares):
        px = round(share * data.image_size)
        network = space.decode({**space.encode(space.known[f"cut_{cut}"]), "image_size": px})
        sized = data.at_size(px)
        asked = Split(np.concatenate([sized.validation.images, sized.test.images]),
                      np.concatenate([sized.validation.labels, sized.test.labels]))

        def trained(steps: int, seed: int, first: FirstTraining | None = None, architecture: Any = network,
                    fed: Any = sized, split: Split = asked) -> float:
            from hwnas.training.loop import predict, seeded, train

            recipe = replace(FINE_TUNING, epochs=1, min_steps=steps, max_steps=steps, threads=1)
            with seeded(seed, 1):
                model = begin(architecture, pretrained)
                if first is not None:
                    model = first.trained(model, architecture.id, fed)
                model = train(model, fed.train, recipe=recipe, dataset=fed, seed=seed)
                return top1(predict(model, split.images, fed), split.labels)

        for seed in seeds:
            if any((row["data"], row["cut"], row["px"], row["seed"]) == (name, cut, px, seed) for row in rows):
                continue
            first = FirstTraining(trial, 5120, 0, seed, Path("nowhere"))
            rows.append({"data": name, "cut": cut, "px": px, "seed": seed, "host": Host.detect().name,
                         "images": len(asked), "fresh": trained(STEPS, seed),
                         "after_trial": trained(STEPS, seed, first),
                         "as_long": trained(STEPS + trial.max_steps, seed)})
            save_csv(OUT, rows)
            print(rows[-1], flush=True)


def show() -> None:
    table = pd.read_csv(OUT)
    print(table.round(4).to_string(index=False))
    for other in ("fresh", "as_long"):
        gain = 100 * (table["after_trial"] - table[other])
        print(f"after its trial less {other}: {gain.mean():.2f} points (standard error {gain.sem():.2f}, {len(gain)} "
              "pairs)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Going on from a trial's weights.")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), default=["eurosat"])
    parser.add_argument("--cuts", nargs="+", default=["1111h640", "1222h512"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    given = parser.parse_args()
    if given.data is not None and given.weights is not None:
        for name in given.sets:
            measure(given.data, given.weights, name, given.cuts, given.shares, given.seeds)
    show()


if __name__ == "__main__":
    command(main)
