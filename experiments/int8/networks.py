"""The families of timm networks, each trained briefly and exported once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from hwnas.data.dataset import Dataset
from hwnas.networks.baselines import Baseline
from hwnas.training.recipe import FULL_TRAINING

FAMILIES = ("efficientnet_b0", "mobilenetv3_large_100", "semnasnet_100", "resnet18", "mobilenetv2_100", "regnety_002",
            "mobilenetv3_small_050", "efficientnet_lite0", "ghostnet_100", "mobilenetv1_100", "lcnet_050",
            "convnext_atto")


def trained(name: str, folder: Path, data: Dataset, steps: int) -> Path:
    """The fp32 ONNX file of a network, trained for `steps` unless it lies there already."""
    from hwnas.networks.export import export_onnx
    from hwnas.training.loop import seeded, train

    path = folder / f"{name}.onnx"
    if path.exists():
        return path
    recipe = replace(FULL_TRAINING, name="int8_ranges", min_steps=steps, max_steps=steps, epochs=1, threads=1)
    with seeded(0, 1):
        start = time.monotonic()
        model = Baseline(name).build(data.channels, len(data.class_names), data.image_size)
        model = train(model, data.train, recipe=recipe, dataset=data, seed=0)
        print(f"{name}: {steps} steps in {time.monotonic() - start:.0f} s", flush=True)
        export_onnx(model.eval(), path, (data.channels, data.image_size, data.image_size))
    return path
