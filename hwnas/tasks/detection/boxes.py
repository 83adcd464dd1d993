"""Boxes in numpy: overlaps, and the way from a network's raw outputs to the objects in an image.

Boxes are left, top, right, bottom as shares of the image's sides. Outputs are [n, 4 + classes, h, w]: of each cell the
distances from its centre to the four sides, and the logit of each class.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

N_SIDES = 4  # distances that come before the classes
STRIDE = 8  # pixels of a cell's side
REACH = 2.0  # cells of a distance whose softplus is 1
LEAST = 0.02  # confidence of an object that counts in a score
OVERLAP = 0.6  # of two boxes of one class, above which the less confident one is dropped
MOST_LOOKED_AT, MOST = 400, 100  # boxes of an image before and after that
# A card prints the source of all functions below: they use numpy and these constants alone.


def overlaps(boxes: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
    """Intersection over union [a, b] of boxes [a, 4] and [b, 4]."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    inside = (high - low).clip(0).prod(2)
    areas = [(each[:, 2:] - each[:, :2]).prod(1) for each in (boxes, others)]
    shares: NDArray[np.float32] = inside / np.maximum(areas[0][:, None] + areas[1][None] - inside, 1e-9)
    return shares


def decode(outputs: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Boxes [n, cells, 4] and logits [n, cells, classes]."""
    n, _, height, width = outputs.shape
    flat = outputs.reshape(n, -1, height * width).transpose(0, 2, 1)
    y, x = (each.ravel() + 0.5 for each in np.indices((height, width)))
    centre, cell = np.stack([x / width, y / height], 1), np.array([REACH / width, REACH / height])
    distance = np.logaddexp(0, flat[..., :4]) * np.tile(cell, 2)
    boxes = np.concatenate([centre - distance[..., :2], centre + distance[..., 2:]], 2)
    return boxes.astype(np.float32), flat[..., 4:]


def pick(boxes: NDArray[np.float32], logits: NDArray[np.float32], least: float = LEAST) -> NDArray[np.float32]:
    """The objects of an image [k, 6], the most confident first, down to `least`: class, confidence, box.

    Of boxes of one class that overlap by more than OVERLAP the most confident stays (non-maximum suppression).
    """
    shares = 1 / (1 + np.exp(-logits))
    cells, classes = np.nonzero(shares >= least)
    confidence = shares[cells, classes]
    order = np.argsort(-confidence, kind="stable")[:MOST_LOOKED_AT]
    cells, classes, confidence = cells[order], classes[order], confidence[order]
    chosen = boxes[cells].clip(0, 1)
    hides = (overlaps(chosen, chosen) > OVERLAP) & (classes[:, None] == classes)
    kept, gone = [], np.zeros(len(order), bool)
    for at in range(len(order)):
        if not gone[at]:
            kept.append(at)
            gone |= hides[at]
    kept = kept[:MOST]
    return np.concatenate([classes[kept, None], confidence[kept, None], chosen[kept]], 1).astype(np.float32)


def read_objects(outputs: NDArray[np.float32], least: float = LEAST) -> NDArray[np.float32]:
    """The objects in each image [n, MOST, 6] by `pick`; a class of -1: no more."""
    objects = np.full((len(outputs), MOST, 6), -1, np.float32)
    for row, boxes, logits in zip(objects, *decode(outputs), strict=True):
        picked = pick(boxes, logits, least)
        row[:len(picked)] = picked
    return objects
