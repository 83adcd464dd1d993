"""Is a network that goes on with what its trial learnt as good as one that is trained anew for as many steps in all?

    python -m experiments.sampler.trained_on --data eurosat --root DIR --n 5 --out DIR

Random networks of `mnasnet_small` at 32 px, spread over multiply-adds, one seed: TRIAL steps of the proxy and MORE of
full training behind them, against MORE and TRIAL + MORE of full training. Top-1 on the test images, which choose
nothing. Rule, written behind the first network: finalists go on, if at equal steps they are not worse by a point in the
mean.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hwnas.cli.progress import Console
from hwnas.data.dataset import Subsets
from hwnas.data.loading import read_images
from hwnas.networks.network import build
from hwnas.networks.weights import import_timm
from hwnas.space.search_space import SearchSpace
from hwnas.training.loop import predict, seeded, short_training
from hwnas.training.recipe import FULL_TRAINING, PROXY, Recipe

TRIAL, MORE, PX, SEED = 80, 320, 32, 0
SPREAD = 8  # places among the lower four fifths of the multiply-adds, of which the first `--n` are taken


def main() -> None:
    """Train the networks three times each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("data", str), ("root", Path), ("n", int), ("out", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args()
    import_timm()
    options = {"name": "imagefolder" if given.data == "eurosat" else given.data, "root": str(given.root)}
    data = read_images(options, PX, SEED, Console(quiet=True))
    space = SearchSpace.load("mnasnet_small", channels=data.channels, classes=len(data.class_names), image_size=PX)
    codes = space.sample(np.random.default_rng([SEED, 7]), 4000)
    networks = sorted((space.decode(space.to_params(row)) for row in codes), key=lambda network: network.macs)
    places = np.linspace(0, 0.8 * len(networks), SPREAD).astype(int)[:given.n]
    few, _ = Subsets(data, 5120, 2048).at(PX)

    def train(model: Any, images: Any, recipe: Recipe, steps: int) -> Any:
        with seeded(SEED, 1):
            exact = replace(recipe, epochs=1, min_steps=steps, max_steps=steps, threads=1)
            training = short_training(copy.deepcopy(model), images, exact, data, SEED)
            training.run()
        return training.current.eval()

    rows = []
    for network in (networks[place] for place in places):
        with seeded(SEED, 1):
            new = build(network)
        trained = {"goes_on": train(train(new, few, PROXY, TRIAL), data.train, FULL_TRAINING, MORE), **{
            f"anew_{steps}": train(new, data.train, FULL_TRAINING, steps) for steps in (MORE, TRIAL + MORE)}}
        rows.append({"data": given.data, "id": network.id, "macs": network.macs, **{
            name: float((predict(model, data.test.images, data).argmax(1) == data.test.labels).mean())
            for name, model in trained.items()}})
        pd.DataFrame(rows).to_csv(given.out / f"{given.data}.csv", index=False)


if __name__ == "__main__":
    main()
