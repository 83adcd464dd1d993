"""The networks that are timed: the space's own at two sizes, and twelve of timm, as files for four deployments."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hwnas.latency.copies import TimedFile
from hwnas.latency.timing import prepare_network, prepare_untrained
from hwnas.networks.baselines import Baseline
from hwnas.space.search_space import SearchSpace
from hwnas.target import Target

DEPLOYMENTS = {"OpenVINO int8": Target("xeon_int8", "openvino", "int8"),
               "OpenVINO fp32": Target("xeon_fp32", "openvino", "fp32"),
               "ONNX Runtime int8": Target("ort_int8", "onnxruntime", "int8"),
               "ONNX Runtime fp32": Target("ort_fp32", "onnxruntime", "fp32")}
SPACE, SIZES, QUANTILES = "mnasnet_small", (32, 128), (0.03, 0.25, 0.5, 0.75, 0.97)
TIMM = (("mobilenetv3_small_050", 64), ("mobilenetv2_100", 64), ("regnetx_002", 96), ("repvgg_a0", 64),
        ("resnet18", 64), ("convnext_atto", 64), ("mobilenetv2_100", 128), ("tf_efficientnet_lite0", 96),
        ("efficientnet_b0", 96), ("resnet18", 128), ("mobilenetv2_100", 224), ("vit_tiny_patch16_224", 224))
REFERENCE = "reference"


@dataclass(frozen=True)
class BuildResult:
    """A network as a file. `kind`: own (like the reference: of the space, at its size) or other."""

    name: str
    kind: str
    file: TimedFile


def make_networks(target: Target, folder: Path) -> Iterator[BuildResult]:
    """Export, and quantise for int8, each network; the reference comes first."""
    for size in SIZES:
        space = SearchSpace.load(SPACE, channels=3, classes=10, image_size=size)
        drawn = [space.decode(space.to_params(code)) for code in space.sample(np.random.default_rng(5), 200)]
        by_macs = sorted(drawn, key=lambda network: network.macs)
        if size == SIZES[0]:
            path = prepare_network(space.reference, target, folder)
            yield BuildResult(REFERENCE, REFERENCE, TimedFile(path, target, (3, size, size)))
        for quantile in QUANTILES:
            network = by_macs[round(quantile * (len(by_macs) - 1))]
            path = prepare_network(network, target, folder)
            yield BuildResult(f"{SPACE} {network.id} {size} px", "own" if size == SIZES[0] else "other",
                              TimedFile(path, target, (3, size, size)))
    for name, size in TIMM:
        torch.manual_seed(0)
        id = f"{zlib.crc32(f'{name} {size}'.encode()):08x}"
        path = prepare_untrained(Baseline(name).build(3, 10, size), id, (3, size, size), target, folder)
        yield BuildResult(f"{name} {size} px", "other", TimedFile(path, target, (3, size, size)))
