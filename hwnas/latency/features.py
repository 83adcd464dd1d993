"""Physical features of blocks: what a latency model sees of them. Additive, so that a network's are its blocks' sum."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hwnas.blocks import BlockSpec

ROLES = ("stem", "dense", "pointwise", "depthwise3", "depthwise5", "se", "linear")
QUANTITIES = ("count", "macs", "elements", "weights")
EXTRAS = ("skip_count", "skip_elements", "swish_elements", "hard_swish_elements", "blocks")
NAMES = (*(f"{role}_{quantity}" for role in ROLES for quantity in QUANTITIES), *EXTRAS)
_SCALE = {"count": 1.0, "macs": 1e-6, "elements": 1e-5, "weights": 1e-5}
_INDEX = {name: index for index, name in enumerate(NAMES)}


def block_features(block: BlockSpec) -> np.ndarray:
    """Counts, MACs (millions), elements moved and weights (hundred thousands) by the role of its convolutions."""
    row = np.zeros(len(NAMES))
    for role, n_in, n_out, kernel, size, out in block.convolutions():
        grouped = 1 if role == "depthwise" else n_in
        weights = grouped * n_out * kernel * kernel
        values = (1, weights * out * out, n_in * size * size + n_out * out * out, weights)
        for quantity, value in zip(QUANTITIES, values, strict=True):
            row[_INDEX[f"{_role(block, role, kernel)}_{quantity}"]] += value * _SCALE[quantity]
        if block.activation in ("swish", "hard_swish") and role in ("dense", "depthwise", "pointwise"):
            row[_INDEX[f"{block.activation}_elements"]] += n_out * out * out * 1e-5
    if block.skip:
        row[_INDEX["skip_count"]] = 1
        row[_INDEX["skip_elements"]] = block.out_channels * block.out_size**2 * 1e-5
    row[_INDEX["blocks"]] = 1
    return row


def _role(block: BlockSpec, role: str, kernel: int) -> str:
    if block.kind == "stem":
        return "stem"
    if role == "depthwise":
        return "depthwise3" if kernel <= 3 else "depthwise5"
    return role


def network_features(blocks: Iterable[BlockSpec]) -> np.ndarray:
    """Sum over blocks: [len(NAMES)]."""
    return np.sum([block_features(block) for block in blocks], axis=0)
