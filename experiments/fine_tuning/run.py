"""Trials of the recipe that fine-tunes pretrained networks: three data sets, a whole network and a cut of it.

    python -m experiments.fine_tuning.run --data DATA [--tries "" lr=0.002 lr=0.004,batch_size=32] [--seeds 0 1]
        [--networks cut whole] [--sets eurosat trashnet fashion_mnist] [--test]

A try is the recipe BASE (what FINE_TUNING was before, four epochs) with some fields changed, "" for none. One more
key is no field: `frozen_norms=1` (all norms but the head's keep their statistics). Each training is one row of
trials.csv, with the validation top-1 of the last weights and of their moving average; `--test` asks the test images
too. Rows that are there are not made again. Then prints what each try gains over BASE. DATA holds eurosat/, trashnet/
and fashion_mnist/; weights lie in HWNAS_WEIGHTS.

Written before the first run. Tries are ranked on the cut by one training a data set; the best few and BASE are trained
with both networks and two seeds. A try replaces BASE if its validation top-1, the better of last weights and average,
is higher in the mean over the data sets, networks and seeds by more than two standard errors of the paired
differences, and on no data set lower by more than two of its own. Test images are asked of those two at the end, and
choose nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.common import command, save_csv
from hwnas.data.dataset import Dataset, Split, subset, top1
from hwnas.data.loading import load_dataset
from hwnas.networks.baselines import Baseline
from hwnas.networks.network import Shape, TimmNetwork
from hwnas.networks.weights import PretrainedOptions, find_pretrained
from hwnas.target import Host
from hwnas.training.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

OUT = Path(__file__).parent / "trials.csv"
BASE = Recipe("base", epochs=4, lr=4e-3, warmup=0.3, ema_decay=0.97, threads=1)
NAME = "tf_efficientnet_lite0"
NETWORKS = {"whole": "", "cut": "1111h640"}
FROZEN = "frozen_norms"  # tried without being a field of the recipe
KEY = ["data", "network", "tried", "seed"]


@dataclass(frozen=True)
class Part:
    """A data set at `size` px, so many of its images to learn from, and to choose by."""

    options: dict[str, Any]
    size: int
    train: int
    validation: int


SETS = {
    "eurosat": Part({"name": "imagefolder", "root": "eurosat", "flip": True}, 64, 5000, 1800),
    "trashnet": Part({"name": "imagefolder", "root": "trashnet", "flip": True, "validation_fraction": 0.2}, 96, 2000,
                     500),
    "fashion_mnist": Part({"name": "fashion_mnist", "root": "fashion_mnist", "flip": True}, 32, 3000, 2000),
}


def load(name: str, folder: Path) -> Dataset:
    """The data set with the images that trials see; the test set whole, 3,000 images at most."""
    part = SETS[name]
    data = load_dataset({**part.options, "root": str(folder / part.options["root"])}, part.size, 0)
    return replace(data, train=_some(data.train, part.train), validation=_some(data.validation, part.validation),
                   test=_some(data.test, 3000))


def _some(split: Split, size: int) -> Split:
    return split.take(subset(split.labels, size, 0))


def changes(tried: str) -> dict[str, float]:
    """`lr=0.002,batch_size=32` by key."""
    return {key: float(value) for key, _, value in (item.partition("=") for item in tried.split(",") if item)}


def recipe_of(tried: str) -> Recipe:
    """BASE with the fields that `tried` changes; UnknownName, ConfigError."""
    given = {key: int(value) if isinstance(getattr(BASE, key, 0.0), int) else value
             for key, value in changes(tried).items() if key != FROZEN}
    return Recipe.from_config({"epochs": BASE.epochs, **given}, BASE, "--tries")


def tune(network: TimmNetwork, data: Dataset, tried: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """The last weights and their average after one training."""
    from hwnas.training.batches import Stream
    from hwnas.training.loop import Training, lay_out, seeded

    recipe = recipe_of(tried)
    with seeded(seed, recipe.threads):
        model = lay_out(network.start(), recipe)
        if changes(tried).get(FROZEN):
            freeze(model)
        training = Training(model, Stream(data.train, data, recipe, seed), recipe)
        training.run()
    return training.model.eval(), training.current.eval()


def freeze(model: nn.Module) -> None:
    """Leave the norms' statistics of all but the head as they are, also in training."""
    from torch.nn import BatchNorm2d

    for name, module in model.named_modules():
        if isinstance(module, BatchNorm2d) and name != "bn2":
            module.eval()
            module.train = lambda mode=True, same=module: same  # type: ignore[method-assign, misc]


def trial(network: TimmNetwork, data: Dataset, tried: str, seed: int, test: bool) -> dict[str, Any]:
    """Seconds of a training and what it reached; empty for test images that were not asked."""
    from hwnas.training.loop import predict, seeded

    start = time.monotonic()
    models = dict(zip(("last", "average"), tune(network, data, tried, seed), strict=True))
    seconds = round(time.monotonic() - start, 1)

    def reached(model: nn.Module, part: Split) -> float:
        return top1(predict(model, part.images, data), part.labels)

    with seeded(seed, 1):
        row = {f"validation_{name}": reached(model, data.validation) for name, model in models.items()}
        row |= {f"test_{name}": reached(model, data.test) if test else None for name, model in models.items()}
    return {**row, "seconds": seconds, "host": Host.detect().name}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What each try gains over BASE in points of validation top-1, by data set and network; n counts pairs."""
    frame = pd.DataFrame(rows)
    frame["best"] = 100 * frame[["validation_last", "validation_average"]].max(axis=1)
    frame["where"] = frame.data + " " + frame.network
    wide = frame.pivot_table(index=["where", "seed"], columns="tried", values="best")
    means = 100 * frame.groupby("where")[["validation_last", "validation_average"]].mean()
    if "" not in wide:
        return means.round(2).to_string()
    gains = wide.sub(wide[""], axis=0).stack().rename("gain").reset_index()
    table, each = gains.pivot_table(index="tried", columns="where", values="gain"), gains.groupby("tried").gain
    table = table.assign(mean=table.mean(axis=1), error=each.sem(), n=each.count())
    return f"{table.sort_values('mean').round(2).to_string()}\n{means.round(2).to_string()}"


def main() -> None:
    """Every training that is not in the results yet; then the gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--tries", nargs="*", default=[""])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--test", action="store_true")
    given = parser.parse_args()
    rows = pd.read_csv(given.out, keep_default_na=False).to_dict("records") if given.out.exists() else []
    done = {tuple(row[key] for key in KEY) for row in rows if row["test_last"] != "" or not given.test}
    for tried in given.tries:
        recipe_of(tried)
    folder = {"folder": Path(os.environ["HWNAS_WEIGHTS"])} if "HWNAS_WEIGHTS" in os.environ else {"use": True}
    held: dict[str, Dataset] = {}
    for seed, tried, label, name in product(given.seeds, given.tries, given.networks, given.sets):
        if (name, label, tried, seed) in done:
            continue
        data = held[name] = held[name] if name in held else load(name, given.data)
        weights, pad = find_pretrained(NAME, PretrainedOptions(**folder), data.channels)
        network = TimmNetwork(Baseline(NAME, pad_type=pad, pretrained=weights, cut=NETWORKS[label]),
                              Shape(data.channels, data.image_size, len(data.class_names)))
        what = dict(zip(KEY, (name, label, tried, seed), strict=True))
        row = {**what, **trial(network, network.fed(data), tried, seed, given.test)}
        rows = [other for other in rows if any(other[key] != what[key] for key in KEY)] + [row]
        save_csv(given.out, rows)
        print(*row.values(), flush=True)
    print(summary([{key: float(value) if key.startswith("validation") else value for key, value in row.items()}
                   for row in rows]))


if __name__ == "__main__":
    command(main)
