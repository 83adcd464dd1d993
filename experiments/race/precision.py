"""Trainings in fp32 and in bf16 beside each other: top-1 after as many steps, and seconds of a step.

    python -m experiments.race.precision train --root EUROSAT --data eurosat --px 64 --around mobilenetv2_100 \\
        --weights FILE --cuts whole,cut_early_two --steps 200 --out experiments/race/results/precision.csv  # adds rows
    python -m experiments.race.precision speed --out experiments/race/results/precision_speed.csv

`train`: in each seed the same network is trained in both precisions by one cosine, and judged on the test
images. `speed`: forward and backward passes of untrained networks on one core, in turns in fp32, by autocast alone, as
trainings do it in bf16.

Rule, written behind two seeds of the first set: bf16 is the default on a CPU that has it if no mean over three seeds is
lower by half a point, and no network takes longer. TrashNet's first three were, by 1.1 points (503 test images), so six
more were run to tell chance from loss, and the mean of these six decides.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from experiments.race.minutes import fine_tune, options_of
from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.data.loading import read_images
from hwnas.networks.weights import import_timm
from hwnas.search.plan import make_plan
from hwnas.search.race import FITTED_STEPS
from hwnas.system.libraries import kept_memory
from hwnas.target import Host
from hwnas.training.mixed_precision import mixed_precision

PRECISIONS = ("fp32", "bf16")
ROUNDS, CLASSES = 5, 10
WAYS = {"fp32": nullcontext, "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "bf16": lambda: mixed_precision("cpu")}
NETWORKS = {  # by name: image sizes, and images of a step
    "mobilenetv2_100": ((64, 128, 256), 32), "mobilenetv1_100": ((96,), 32), "tf_efficientnet_lite0": ((64, 128), 32),
    "efficientnet_b0": ((96,), 32), "resnet18": ((64,), 32), "convnext_atto": ((64,), 32),
    "regnetx_002": ((64,), 32), "vit_tiny_patch16_224": ((224,), 8)}


def train(given: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each training."""
    rows, quiet = [], Console(quiet=True)
    for seed in given.seeds:
        asked = argparse.Namespace(**vars(given), target="xeon_int8", dataset="imagefolder", flip=1, minutes=5.0,
                                   seed=seed)
        plans = {each: make_plan(compose("search", [*options_of(asked), f"training.precision={each}",
                                                    f"out={given.out.parent / 'none'}"]), quiet)
                 for each in PRECISIONS}
        data = read_images(plans["fp32"].options.dataset, given.px, seed, quiet)
        for name in given.cuts.split(","):
            network = replace(plans["fp32"].space.known[name], image_size=given.px)
            for precision, plan in plans.items():
                answers, _ = fine_tune(plan, data, network, given.steps, is_fitted=given.steps <= FITTED_STEPS)
                rows.append({"host": Host.detect().name, "data": given.data, "px": given.px, "around": given.around,
                             "name": name, "seed": seed, "steps": given.steps, "precision": precision,
                             "top1": float(answers["right"].mean())})
                print(rows[-1], flush=True)
    return rows


def speed() -> list[dict[str, object]]:
    """Return the median seconds of a step of each network in each way."""
    rows = []
    torch.set_num_threads(1)
    for name, (sizes, n) in NETWORKS.items():
        for px in sizes:
            model = import_timm().create_model(name, num_classes=CLASSES).to(memory_format=torch.channels_last).train()
            images = torch.randn(n, 3, px, px).contiguous(memory_format=torch.channels_last)
            targets, seconds = torch.randint(0, CLASSES, (n,)), list[list[float]]()
            with kept_memory():
                for _ in range(ROUNDS + 1):
                    seconds.append([])
                    for way in WAYS.values():
                        start = time.perf_counter()
                        with way():
                            answers = model(images).float()
                        torch.nn.functional.cross_entropy(answers, targets).backward()
                        seconds[-1].append(time.perf_counter() - start)
            medians = np.median(np.array(seconds[1:]), axis=0)
            rows.append({"host": Host.detect().name, "network": name, "px": px, "images": n} | {
                f"{way}_s": round(float(each), 4) for way, each in zip(WAYS, medians, strict=True)})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Train or time, and add rows to a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    trained = parts.add_parser("train")
    for name in ("root", "weights"):
        trained.add_argument(f"--{name}", type=Path, required=True)
    for name in ("data", "around", "cuts"):
        trained.add_argument(f"--{name}", required=True)
    for name in ("px", "steps"):
        trained.add_argument(f"--{name}", type=int, required=True)
    trained.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for part in (trained, parts.add_parser("speed")):
        part.add_argument("--out", type=Path, required=True)
        part.add_argument("--core", type=int, default=0)
    given = parser.parse_args()
    os.sched_setaffinity(0, {given.core})
    rows = train(given) if given.part == "train" else speed()
    pd.DataFrame(rows).to_csv(given.out, mode="a", header=not given.out.exists(), index=False)


if __name__ == "__main__":
    main()
