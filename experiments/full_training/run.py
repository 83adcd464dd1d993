"""Full training by few steps: which weights to keep, over data sets and families.

    python -m experiments.full_training.run --data DATA --out RESULTS.csv [--seeds 0 1] [--rates 0.005]
        [--steps 100 400]

Trains each network on each data set by `FULL_TRAINING` with so many steps and the rate, once, and asks four kinds of
weights about the validation images: the last ones and their moving average, each with the batch norms' statistics as
training left them and with statistics taken anew from 1,024 training images ("set"). A row for each is added to the
results after each training; trainings that are there are not made again. DATA holds eurosat/ and fashion_mnist/; digit
scenes are drawn. Then prints the means.

Written before the first run: the recipe's "average" is replaced by the kind of weights that has the highest mean over
all trainings, if its mean gain over "average" is above 0.5 points, its 95 % interval over trainings lies above zero,
and no data set loses more than 0.5 points in the mean.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.common import command, save_csv
from hwnas.data.dataset import Dataset, subset, top1
from hwnas.data.loading import load_dataset
from hwnas.networks.baselines import Baseline, count_macs
from hwnas.networks.network import FoundNetwork, Network, Shape, TimmNetwork
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host
from hwnas.training.recipe import FULL_TRAINING, Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

KINDS = ("last", "average", "last, set", "average, set")
FAMILIES = ("mobilenetv3_small_050", "mobilenetv3_large_100", "resnet18")
SETS: dict[str, tuple[dict[str, Any], int]] = {
    "fashion_mnist": ({"name": "fashion_mnist", "root": "fashion_mnist", "validation_fraction": 0.1, "flip": True}, 32),
    "eurosat": ({"name": "imagefolder", "root": "eurosat", "validation_fraction": 0.15, "test_fraction": 0.2,
                 "flip": True}, 32),
    "digit_scenes": ({"name": "digit_scenes", "flip": False, "options": {"seed": 0}}, 32),
}
SET_IMAGES, VALIDATION_IMAGES = 1024, 2000


def networks(data: Dataset) -> dict[str, Network]:
    """A small and a large network of mnasnet_small, and three of timm."""
    space = SearchSpace.load("mnasnet_small", channels=data.channels, classes=len(data.class_names),
                             image_size=data.image_size)
    codes = space.sample(np.random.default_rng(0), 64)
    drawn = [FoundNetwork(space.decode(space.to_params(code))) for code in codes]
    macs = [_macs(network) for network in drawn]
    shape = Shape(data.channels, data.image_size, len(data.class_names))
    return {"ours, small": drawn[int(np.argsort(macs)[12])], "ours, large": drawn[int(np.argsort(macs)[51])],
            **{name: TimmNetwork(Baseline(name), shape) for name in FAMILIES}}


def _macs(network: Network) -> int:
    return count_macs(network.build(), network.shape.image)


def of_training(network: Network, data: Dataset, steps: int, rate: float, seed: int) -> dict[str, float]:
    """Validation top-1 of each kind of weights after one training."""
    from torch.optim.swa_utils import update_bn

    from hwnas.training.batches import Stream, fed
    from hwnas.training.loop import _Short, lay_out, predict, seeded

    recipe = _recipe(steps, rate)
    rows = subset(data.validation.labels, VALIDATION_IMAGES, 0)
    some = data.train.images[np.random.default_rng(0).permutation(subset(data.train.labels, SET_IMAGES, 1))]
    with seeded(seed, recipe.threads):
        training = _Short(lay_out(network.build(), recipe), Stream(data.train, data, recipe, seed), recipe, None)
        training.run()
        kinds: dict[str, nn.Module] = {"last": training.model, "average": training.current}
        for name in ("last", "average"):
            kinds[f"{name}, set"] = copy.deepcopy(kinds[name])
            parts = np.array_split(some, SET_IMAGES // 64)
            update_bn([fed(part, data, "cpu") for part in parts], kinds[f"{name}, set"])
        return {kind: top1(predict(model.eval(), data.validation.images[rows], data), data.validation.labels[rows])
                for kind, model in kinds.items()}


def _recipe(steps: int, rate: float) -> Recipe:
    return replace(FULL_TRAINING, min_steps=steps, max_steps=steps, lr=rate, ema_decay=0.99, threads=1)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Mean top-1 of each kind by data set, steps and rate; then the gain over "average" with its interval."""
    frame = pd.DataFrame(rows)
    wide = frame.pivot_table(index=["data", "network", "steps", "rate", "seed"], columns="kind", values="top1")
    lines = [(100 * wide.groupby(["data", "steps", "rate"])[list(KINDS)].mean()).round(2).to_string(),
             (100 * wide.groupby(["network", "steps", "rate"])[list(KINDS)].mean()).round(2).to_string()]
    rng = np.random.default_rng(0)
    for kind in KINDS:
        gains = 100 * (wide[kind] - wide["average"]).to_numpy()
        means = gains[rng.integers(0, len(gains), (2000, len(gains)))].mean(axis=1)
        lines.append(f"{kind}: {gains.mean():+.2f} points ({np.quantile(means, 0.025):+.2f} to "
                     f"{np.quantile(means, 0.975):+.2f}) over {len(gains)} trainings")
    return "\n".join(lines)


def main() -> None:
    """Every training that is not in the results yet; then the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--rates", type=float, nargs="+", default=[FULL_TRAINING.lr])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = pd.read_csv(given.out).to_dict("records") if given.out.exists() else []
    done = {(row["data"], row["network"], row["steps"], row["rate"], row["seed"]) for row in rows}
    for seed, name in product(given.seeds, given.sets):
        options, size = SETS[name]
        root = {"root": str(given.data / options["root"])} if "root" in options else {}
        data = load_dataset({**options, **root}, size, 0)
        for (label, network), steps, rate in product(networks(data).items(), given.steps, given.rates):
            if (name, label, steps, rate, seed) in done:
                continue
            start = time.monotonic()
            reached = of_training(network, data, steps, rate, seed)
            common = {"data": name, "network": label, "steps": steps, "rate": rate, "seed": seed}
            rows += [{**common, "kind": kind, "top1": value, "seconds": round(time.monotonic() - start, 1),
                      "host": Host.detect().name} for kind, value in reached.items()]
            save_csv(given.out, rows)
            print(*common.values(), {kind: round(value, 4) for kind, value in reached.items()},
                  round(time.monotonic() - start), flush=True)
    print(summary(rows))


if __name__ == "__main__":
    command(main)
