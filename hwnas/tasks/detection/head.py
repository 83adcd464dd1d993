"""The detector: a timm network whose maps of three sizes are brought together on the finest, and a light head on that.

Each cell of one level, without anchors, gives the distances to the four sides of an object, and its class. So there is
one map to compute and little to decode, and images of 96 px still have 144 cells. The depthwise layers of five pixels
follow PP-PicoDet (Yu et al., arXiv 2111.00902), one level of several strides YOLOF (Chen et al., CVPR 2021).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hwnas.errors import ConfigError
from hwnas.tasks.detection.boxes import N_SIDES, STRIDE

STRIDES = (32, 16, STRIDE)  # of the maps that are brought together, deepest first; the head is on the last
WIDTH, LAYERS, KERNEL = 96, 2, 5  # channels of the head, its layers, and the side of their depthwise kernels
PRIOR = 0.02  # confidence in each class at first: most cells have no object


class Detector(nn.Module):
    """A network from float32 [n, c, h, w] to [n, N_SIDES + classes, h / 8, w / 8], see `boxes.decode`.

    Args:
        trunk: A convolutional network of timm. Its layers behind the maps are removed.
        classes: The number of classes of objects.

    Raises:
        ConfigError: The trunk has no maps of these sizes.
    """

    def __init__(self, trunk: Any, classes: int) -> None:
        super().__init__()
        maps = {each["reduction"]: at for at, each in enumerate(getattr(trunk, "feature_info", ()))}  # the last of each
        strides = [stride for stride in STRIDES if stride in maps]
        if STRIDE not in strides or not hasattr(trunk, "forward_intermediates"):
            raise ConfigError(f"{type(trunk).__name__} has no map of stride {STRIDE}, which a detector's head is on. "
                              "Give a convolutional network, such as mobilenetv2_100.")
        self.places = [maps[stride] for stride in strides]
        widths = [int(trunk.feature_info[at]["num_chs"]) for at in self.places]
        trunk.prune_intermediate_layers(sorted(self.places), prune_norm=True, prune_head=True)
        self.trunk = trunk
        self.sides = nn.ModuleList(_layer(width, WIDTH) for width in widths)
        self.mix = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (
            _layer(WIDTH, WIDTH, KERNEL, WIDTH), _layer(WIDTH, WIDTH))))
        self.predict = nn.Conv2d(WIDTH, N_SIDES + classes, 1)
        self.num_classes = classes
        self.reset_classifier()

    def reset_classifier(self) -> None:
        """Initialise the last layer anew."""
        nn.init.normal_(self.predict.weight, std=0.01)
        bias: Any = self.predict.bias
        nn.init.zeros_(bias)
        with torch.no_grad():  # by the sigmoid of the bias, the confidence in each class is PRIOR
            bias[N_SIDES:] = math.log(PRIOR / (1 - PRIOR))

    def get_classifier(self) -> nn.Module:
        """Return the last layer, as timm's networks do."""
        return self.predict

    def forward(self, images: Tensor) -> Tensor:
        """Return the raw outputs."""
        maps = self.trunk.forward_intermediates(images, indices=sorted(self.places), intermediates_only=True)
        by_place = dict(zip(sorted(self.places), maps, strict=True))
        # Plain numbers become constants of an exported file, whose divisions would round differently.
        side = tuple(-(-int(length) // STRIDE) for length in images.shape[-2:])
        total: Any = 0
        for place, layer in zip(self.places, self.sides, strict=True):  # deepest first: it follows the last stage
            own = layer(by_place[place])
            if tuple(map(int, own.shape[-2:])) != side:
                own = functional.interpolate(own, side, mode="nearest")
            total = own + total if isinstance(total, Tensor) else own
        outputs: Tensor = self.predict(self.mix(total))
        return outputs


def _layer(n_in: int, n_out: int, kernel: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, kernel, padding=kernel // 2, groups=groups, bias=False),
                         nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))
