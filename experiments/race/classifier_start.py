"""How a new classifier behind pretrained layers begins best, and what it tells of a network that is not trained.

    python -m experiments.race.classifier_start --data NAME --root DIR --px 64 --around NAME --weights FILE --out CSV

Cuts are fine-tuned along one cosine, from torch's values of a linear layer (`torch`), or as a race with few minutes
begins (`fitted`; with no step too). Top-1 is of test images, in older files of validation images, with arms `timm`
(uniform up to one over the root of the classes) and `zero`. What the file holds is not run again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas as pd

from experiments.race.minutes import fine_tune
from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.data.loading import read_images
from hwnas.search.plan import make_plan
from hwnas.target import Host

CUTS = {0: ("whole", "cut_thin", "cut_early_two", "cut_short", "cut_early", "cut_short_narrow"),
        40: ("cut_early_two",), 120: ("cut_early_two",), 360: ("cut_early_two",)}


def judge(given: argparse.Namespace) -> None:
    """Write a row for each seed, cut, image size, length and arm."""
    config = compose("search", ["+target=xeon_int8", "dataset=imagefolder", f"dataset.root={given.root}",
                                f"dataset.image_size={given.px}", f"around={given.around}",
                                f"pretrained.file={given.weights}", "controls=0", "baselines=[]", "workers=1"])
    plan = make_plan(config, Console(quiet=True), trials_only=True)
    data = read_images(plan.options.dataset, given.px, 0, Console(quiet=True))
    rows = pd.read_csv(given.out).to_dict("records") if given.out.exists() else []
    done = {(row["steps"], row["seed"], row["cut"], row["px"], row["arm"]) for row in rows}
    for steps, seed, arm in product(CUTS, given.seeds, ("torch", "fitted")):
        for cut, share in product(CUTS[steps], (1.0,) if steps else (1.0, 0.75, 0.5)):
            px = round(share * given.px)
            if (steps, seed, cut, px, arm) in done or (not steps and arm == "torch"):
                continue
            seeded = replace(plan, options=replace(plan.options, seed=seed, threads=1))
            network = replace(plan.space.known[cut], image_size=px)
            right, _ = fine_tune(seeded, data, network, steps, is_fitted=arm == "fitted")
            rows.append({"data": given.data, "network": given.around, "steps": steps, "seed": seed, "cut": cut,
                         "px": px, "macs": network.macs, "arm": arm, "top1": float(right.mean()), "n": len(right),
                         "host": Host.detect().name})
            print(rows[-1], flush=True)
            pd.DataFrame(rows).to_csv(given.out, index=False, float_format="%.6g")


def main() -> None:
    """Run all of one network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("root", Path), ("weights", Path), ("out", Path), ("data", str), ("around", str), ("px", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    judge(parser.parse_args())


if __name__ == "__main__":
    main()
