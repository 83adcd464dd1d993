"""Whether a whole small search around each of the networks ends with a verified front of exported int8 networks.

    python -m experiments.race.searches --images DIR --out experiments/race/results/searches.csv

DIR has a folder of images for each class; the first forty of each are taken. Random weights, three trials, a handful of
training steps, so that accuracy says nothing: what is asked is whether every part of the road takes the network.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from experiments.race.any_baseline import NAMES, PX
from hwnas.system.paths import temporary_folder
from hwnas.target import Host

OPTIONS = ("+target=xeon_int8", "dataset=arrays", f"dataset.image_size={PX}", "pretrained.use=false", "n_trials=8",
           "finalists.k=2", "finalists.recipe.min_steps=8", "finalists.recipe.max_steps=8",
           "controls=0", "baselines=[]", "verification.seconds=10")
OF_EACH = 40  # images of a class


def judge(name: str, images: Path, folder: Path) -> dict[str, Any]:
    """A row of a network: how the search ended, seconds, and its front."""
    began = time.monotonic()
    run = folder / name
    told = subprocess.run([sys.executable, "-m", "hwnas.search", *OPTIONS, f"dataset.root={images}", f"around={name}",
                           f"out={run}"], capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"network": name, "exit": told.returncode, "seconds": time.monotonic() - began}
    if told.returncode:
        return {**row, "error": " ".join((told.stderr.strip().splitlines() or [""])[-1].split())}
    front = pd.read_csv(run / "front.csv")
    return {**row, "verified": int(front["verified"].sum()), "networks": len(front),
            "on_front": int(front["on_front"].sum()), "fastest_ms": front["latency_ms"].min(),
            "slowest_ms": front["latency_ms"].max()}


def take_images(folder: Path, file: Path) -> None:
    """Some images of each class as one file of arrays."""
    images, labels = [], []
    for label in sorted(path for path in folder.iterdir() if path.is_dir()):
        for path in sorted(label.iterdir())[:OF_EACH]:
            with Image.open(path) as image:
                images.append(np.asarray(image.convert("RGB").resize((PX, PX))))
            labels.append(label.name)
    np.savez(file, images=np.stack(images), labels=np.array(labels))


def main(argv: Sequence[str] | None = None) -> None:
    """Search around all networks; a file that is there is written anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=NAMES)
    given = parser.parse_args(argv)
    rows = []
    with temporary_folder() as folder:
        take_images(given.images, Path(folder) / "images.npz")
        for name in given.names:
            rows.append({**judge(name, Path(folder) / "images.npz", Path(folder)), "host": Host.detect().name})
            pd.DataFrame(rows).to_csv(given.out, index=False, float_format="%.4f")
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
