"""Which channels of a trained network should stay: by weights, by norms, or by what the user's images say?

    python -m experiments.importance.run --root DIR --px 64 --out experiments/importance/NAME.csv --seeds 0 1 2

A network with pretrained weights is fine-tuned on the images (the parent), then cut to half of its channels and trained
on. Rows: top-1 on test images before and after that. Arms, all in Torch-Pruning's groups:

    weights   the L2 norm of a channel's weights, over all layers of its group
    norms     the scale of its batch norms
    taylor    what the loss would change without it, to first order (Molchanov et al., CVPR 2019), over eight batches of
              training images in evaluation mode
    random    the control

Written before the runs. **The arm with the best mean top-1 after training becomes the default, if the 95 % interval of
its lead over `weights`, over all pairs of cut and seed of each data set, is above 0 on both data sets; otherwise
`weights`, which needs no images, stays.**
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch_pruning
from torch import nn

from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.networks.around import family_content
from hwnas.networks.cutting import apply_cut, build_member
from hwnas.networks.tracing import INNER, trace
from hwnas.networks.weights import PretrainedOptions, find_pretrained
from hwnas.space.family import WIDTH, Member
from hwnas.space.search_space import WHOLE, SearchSpace
from hwnas.training.batches import fed
from hwnas.training.loop import predict, train
from hwnas.training.recipe import INHERITED

ARMS = ("weights", "norms", "taylor", "random")
BATCHES, BATCH = 8, 64
PARENT_STEPS, STEPS = 300, 120


def importance_of(arm: str, model: nn.Module, data: Dataset, seed: int) -> Any:
    """Torch-Pruning's importance for an arm; `taylor` leaves gradients in the model."""
    if arm == "norms":
        return torch_pruning.importance.BNScaleImportance()
    if arm == "random":
        torch.manual_seed(seed)
        return torch_pruning.importance.RandomImportance()
    if arm == "weights":
        return torch_pruning.importance.GroupMagnitudeImportance(p=2)
    model.eval()
    order = np.random.default_rng(seed).permutation(len(data.train.labels))
    for places in np.array_split(order[:BATCHES * BATCH], BATCHES):
        labels = torch.from_numpy(np.asarray(data.train.labels[places], np.int64))
        nn.functional.cross_entropy(model(fed(data.train.images[places], data, "cpu")), labels).backward()
    return torch_pruning.importance.GroupTaylorImportance()


def top1(model: nn.Module, data: Dataset) -> float:
    """On the test images."""
    return float((predict(model, data.test.images, data).argmax(1) == data.test.labels).mean())


def cuts_of(space: SearchSpace) -> dict[str, Member]:
    """Cuts to half of the channels inside of blocks, of all channels, and of all in one block a stage, by name."""
    whole = space.encode(space.known[WHOLE])
    half = {parameter.name: 0.5 for parameter in space.parameters if 0.5 in parameter.choices}
    short = {parameter.name: 0 for parameter in space.parameters if "." in parameter.name
             and not parameter.name.startswith(WIDTH)}
    inner = {name: share for name, share in half.items() if name.startswith(f"{WIDTH}{INNER}")}
    cuts = {"cut_thin": inner, "cut_narrow": half, "cut_short_narrow": {**half, **short}}
    return {name: space.decode({**whole, **kept}) for name, kept in cuts.items()}  # type: ignore[misc]


def judge(name: str, root: Path, px: int, seed: int) -> list[dict[str, Any]]:
    """A row for each cut and arm, and one for the parent."""
    data = load_dataset({"name": "imagefolder", "root": str(root), "validation_fraction": 0.15,
                         "test_fraction": 0.2, "flip": True}, px, 0)
    pretrained, _ = find_pretrained(name, PretrainedOptions(), 3)
    data = replace(data, mean=pretrained.mean, std=pretrained.std)
    classes = len(data.class_names)
    space = SearchSpace.of_content(family_content(name, 3, classes, px), f"around_{name}", channels=3, classes=classes)
    traced = trace(name, 3, classes)
    torch.manual_seed(seed)
    whole: Any = space.known[WHOLE]
    recipe = replace(INHERITED, min_steps=PARENT_STEPS, max_steps=PARENT_STEPS, threads=1)
    parent = train(build_member(whole, pretrained), data.train, recipe=recipe, dataset=data, seed=seed)
    rows = [{"network": name, "data": root.name, "px": px, "seed": seed, "cut": WHOLE, "arm": "",
             "top1_after": top1(parent, data)}]
    recipe = replace(recipe, min_steps=STEPS, max_steps=STEPS)
    for cut, member in cuts_of(space).items():
        for arm in ARMS:
            model = deepcopy(parent)
            how = importance_of(arm, model, data, seed)
            names = [field for field in dict(member.chosen) if not field.startswith(WIDTH)]
            ties = {field.removeprefix(WIDTH): (1.0,) for field in dict(member.chosen)
                    if field.startswith(WIDTH)}
            apply_cut(model, traced, traced.family(names, ties), dict(member.chosen), 3, how)
            before = top1(model, data)
            model.zero_grad()
            after = top1(train(model, data.train, recipe=recipe, dataset=data, seed=seed), data)
            rows.append({**rows[0], "cut": cut, "arm": arm, "top1_before": before, "top1_after": after})
            print(rows[-1], flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run all seeds; a file that is there is written anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--px", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--around", default="mobilenetv2_100")
    given = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for seed in given.seeds:
        rows += judge(given.around, given.root, given.px, seed)
        pd.DataFrame(rows).to_csv(given.out, index=False, float_format="%.5f")


if __name__ == "__main__":
    main()
