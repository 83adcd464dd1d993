"""The loss of a detector: the objects that cells shall answer with, and how wrong the cells are.

Cells are assigned by what the network answers at the moment (SimOTA: Ge et al., YOLOX, arXiv 2107.08430). Candidates
are the cells nearest to an object's centre. The overlaps of their boxes with the object are summed: as many cells get
it, the least wrong first. A cell that several objects want gets the smallest, which has no other cell.

Classes are learnt by the varifocal loss (Zhang et al., VarifocalNet, CVPR 2021), whose target is the overlap that the
box reaches. Boxes are learnt by the generalised overlap (Rezatofighi et al., CVPR 2019). The many cells of large and
frequent objects would drown the single cell of a small and rare one. So the cells of an object count more if it has
few, and more if its class is rare, both by the square root.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hwnas.tasks.detection.boxes import REACH

NEAREST = 9  # cells that are candidates for an object
OF_BOX, OF_DISTANCE = 3.0, 0.1  # weights in the cost of a cell: of the overlap's logarithm; of the distance in cells
BOX, NOTHING = 2.0, 0.75  # weights in the loss of the boxes, and of cells without an object
USUAL = 4  # cells of an object whose weight is 1 each
LEAST = 0.5  # least target of a cell with an object, however wrong its box is as yet
_TINY = 1e-6


def detection_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of raw outputs [n, 4 + classes, h, w] for boxes [n, most, 5] (class, corners; class -1: none)."""
    # 1. Give objects to cells; `quality` is the class target of a cell, 0 without an object.
    boxes, logits, centre = decode(outputs.float())
    with torch.no_grad():
        place, overlap = assign(boxes, logits, centre, targets, outputs.shape[-1])
    has_object = place >= 0
    own = targets.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, 5))
    quality = overlap.gather(2, place.clamp(min=0)[..., None])[..., 0].clamp(LEAST, 1.0) * has_object
    class_targets = torch.zeros_like(logits)
    class_targets.scatter_(2, own[..., :1].long().clamp(min=0), quality[..., None])
    # 2. Weigh cells with an object; without one, cells count by how wrong their confidence is (varifocal).
    counts = quality * weigh(place, targets, logits.shape[-1])
    weight = torch.where(class_targets > 0, counts[..., None], NOTHING * logits.detach().sigmoid().square())
    of_classes = functional.binary_cross_entropy_with_logits(logits, class_targets, weight, reduction="sum")
    of_boxes = ((1 - generalised_overlap(boxes, own[..., 1:])) * counts).sum()
    return (of_classes + BOX * of_boxes) / counts.sum().clamp(min=1.0)


def weigh(place: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Return weights [n, cells], by the row `place` [n, cells] of each cell's object among its image's (-1: none)."""
    has_object, at = (place >= 0).float(), place.clamp(min=0)
    cells = torch.zeros_like(targets[..., 0]).scatter_add_(1, at, has_object)  # of each object
    labels = targets[..., 0].long()
    objects = torch.bincount(labels[labels >= 0], minlength=classes)
    rarity = objects.sum() / (objects > 0).sum().clamp(min=1) / objects.clamp(min=1)  # 1: as many as on average
    weight = rarity[labels.clamp(min=0)] * USUAL / cells.clamp(min=1)  # of each object
    return weight.sqrt().gather(1, at)


def decode(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes [n, cells, 4] and logits [n, cells, classes] as `boxes.decode`, and centres [cells, 2]."""
    height, width = outputs.shape[-2:]
    flat = outputs.flatten(2).transpose(1, 2)
    y, x = torch.meshgrid((torch.arange(height, device=outputs.device) + 0.5) / height,
                          (torch.arange(width, device=outputs.device) + 0.5) / width, indexing="ij")
    centre = torch.stack([x.flatten(), y.flatten()], 1)
    cell = torch.tensor([REACH / width, REACH / height] * 2, device=outputs.device)
    distance = functional.softplus(flat[..., :4]) * cell
    return torch.cat([centre - distance[..., :2], centre + distance[..., 2:]], 2), flat[..., 4:], centre


def assign(boxes: Tensor, logits: Tensor, centre: Tensor, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the row of each cell's object [n, cells], -1: none, and overlaps of cells with objects [n, cells, m]."""
    # 1. Candidates of an object: the NEAREST cells if they are inside of it, and in any case the nearest one.
    target_boxes, is_there = targets[:, None, :, 1:], (targets[:, None, :, 0] >= 0)
    overlap, _ = _overlap(boxes[:, :, None], target_boxes)
    distance = (centre[None, :, None] - (target_boxes[..., :2] + target_boxes[..., 2:]) / 2).norm(dim=-1) * width
    n_near = min(NEAREST, len(centre))
    near = distance.topk(n_near, 1, largest=False)
    inside = ((centre[None, :, None] > target_boxes[..., :2]) & (centre[None, :, None] < target_boxes[..., 2:])).all(-1)
    is_candidate = torch.zeros_like(inside).scatter_(1, near.indices, True)
    is_candidate &= (inside | (distance <= near.values[:, :1] + _TINY)) & is_there
    # 2. The cost of a cell for an object: by overlap, confidence and distance.
    share = logits.sigmoid().gather(2, targets[:, None, :, 0].long().clamp(min=0).expand(-1, len(centre), -1))
    cost = -OF_BOX * (overlap + _TINY).log() - (share + _TINY).log() + OF_DISTANCE * distance
    cost = cost.masked_fill(~is_candidate, torch.inf)
    # 3. Each object gets as many cells as its candidates overlap in sum, at least one: the cheapest.
    n_of = (overlap * is_candidate).topk(n_near, 1).values.sum(1, keepdim=True).round().clamp(min=1)
    is_assigned = cost.isfinite() & (cost.argsort(1).argsort(1) < n_of)
    # 4. A cell that several objects get keeps the smallest.
    area = (targets[..., 3:] - targets[..., 1:3]).prod(-1)[:, None].expand_as(cost)
    smallest = area.masked_fill(~is_assigned, torch.inf).min(2)
    return torch.where(smallest.values.isfinite(), smallest.indices, torch.full_like(smallest.indices, -1)), overlap


def generalised_overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of boxes [..., 4], less the share of their common hull that is in neither."""
    overlap, union = _overlap(boxes, others)
    hull = (torch.maximum(boxes[..., 2:], others[..., 2:]) - torch.minimum(boxes[..., :2], others[..., :2])).prod(-1)
    return overlap - (hull - union) / (hull + _TINY)


def _overlap(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the intersection over union, and the union."""
    inside = torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])
    shared = inside.clamp(min=0).prod(-1)
    union = (boxes[..., 2:] - boxes[..., :2]).prod(-1) + (others[..., 2:] - others[..., :2]).prod(-1) - shared
    return shared / (union + _TINY), union
