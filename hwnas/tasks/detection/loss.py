"""The loss of a detector: which cells are to tell which object, and how wrong they are.

Cells are assigned by what the network answers at the moment (SimOTA: Ge et al., YOLOX, arXiv 2107.08430): of the cells
nearest to an object's centre, as many as boxes there overlap with it in sum get it, those first that are wrong least;
a cell that several want gets the smallest, which has no other. Classes are learnt by the varifocal loss (Zhang et al.,
VarifocalNet, CVPR 2021), whose target is the overlap that the box reaches; boxes by the generalised overlap
(Rezatofighi et al., CVPR 2019). Otherwise the many cells of large and frequent objects would drown the one of a small
and rare object, so the cells of each count by the root of how few these are, and a class by the root of its rarity.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hwnas.tasks.detection.boxes import REACH

NEAREST = 9  # cells that may tell an object
OF_BOX, OF_DISTANCE = 3.0, 0.1  # weights in what assigns: of the logarithm of the overlap; of the distance in cells
BOX, NOTHING = 2.0, 0.75  # weights in the loss of the boxes, and of cells without an object
USUAL = 4  # cells of an object that count as one each
LEAST = 0.5  # overlap that a cell with an object is to claim, however wrong its box is as yet
_TINY = 1e-6


def detection_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of raw outputs [n, 4 + classes, h, w] for boxes [n, most, 5] (class, corners as shares; -1: none)."""
    boxes, logits, centre = decode(outputs.float())
    with torch.no_grad():
        place, overlap = assign(boxes, logits, centre, targets, outputs.shape[-1])
    tells = place >= 0
    own = targets.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, 5))
    quality = overlap.gather(2, place.clamp(min=0)[..., None])[..., 0].clamp(LEAST, 1.0) * tells
    wanted = torch.zeros_like(logits)
    wanted.scatter_(2, own[..., :1].long().clamp(min=0), quality[..., None])
    counts = quality * weigh(place, targets, logits.shape[-1])
    weight = torch.where(wanted > 0, counts[..., None], NOTHING * logits.detach().sigmoid().square())
    of_classes = functional.binary_cross_entropy_with_logits(logits, wanted, weight, reduction="sum")
    of_boxes = ((1 - generalised_overlap(boxes, own[..., 1:])) * counts).sum()
    return (of_classes + BOX * of_boxes) / counts.sum().clamp(min=1.0)


def weigh(place: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Weights [n, cells] of cells that are to tell the objects in these places [n, cells] of an image's (-1: none)."""
    tells, at = (place >= 0).float(), place.clamp(min=0)
    cells = torch.zeros_like(targets[..., 0]).scatter_add_(1, at, tells)  # of each object
    labels = targets[..., 0].long()
    objects = torch.bincount(labels[labels >= 0], minlength=classes)
    rarity = objects.sum() / (objects > 0).sum().clamp(min=1) / objects.clamp(min=1)
    weight = rarity[labels.clamp(min=0)] * USUAL / cells.clamp(min=1)  # of each object
    return weight.sqrt().gather(1, at)


def decode(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `boxes.decode`: boxes [n, cells, 4], logits [n, cells, classes], centres [cells, 2]."""
    height, width = outputs.shape[-2:]
    flat = outputs.flatten(2).transpose(1, 2)
    y, x = torch.meshgrid((torch.arange(height, device=outputs.device) + 0.5) / height,
                          (torch.arange(width, device=outputs.device) + 0.5) / width, indexing="ij")
    centre = torch.stack([x.flatten(), y.flatten()], 1)
    cell = torch.tensor([REACH / width, REACH / height] * 2, device=outputs.device)
    distance = functional.softplus(flat[..., :4]) * cell
    return torch.cat([centre - distance[..., :2], centre + distance[..., 2:]], 2), flat[..., 4:], centre


def assign(boxes: Tensor, logits: Tensor, centre: Tensor, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the object that each cell is to tell [n, cells], -1 for none, and the overlap of its box with each
    [n, cells, m]."""
    wanted, is_there = targets[:, None, :, 1:], (targets[:, None, :, 0] >= 0)
    overlap, _ = _overlap(boxes[:, :, None], wanted)
    distance = (centre[None, :, None] - (wanted[..., :2] + wanted[..., 2:]) / 2).norm(dim=-1) * width
    n_near = min(NEAREST, len(centre))
    near = distance.topk(n_near, 1, largest=False)
    inside = ((centre[None, :, None] > wanted[..., :2]) & (centre[None, :, None] < wanted[..., 2:])).all(-1)
    able = torch.zeros_like(inside).scatter_(1, near.indices, True)
    able &= (inside | (distance <= near.values[:, :1] + _TINY)) & is_there  # the nearest cell, if none is inside
    share = logits.sigmoid().gather(2, targets[:, None, :, 0].long().clamp(min=0).expand(-1, len(centre), -1))
    cost = -OF_BOX * (overlap + _TINY).log() - (share + _TINY).log() + OF_DISTANCE * distance
    cost = cost.masked_fill(~able, torch.inf)
    n_of = (overlap * able).topk(n_near, 1).values.sum(1, keepdim=True).round().clamp(min=1)
    is_wanted = cost.isfinite() & (cost.argsort(1).argsort(1) < n_of)
    area = (targets[..., 3:] - targets[..., 1:3]).prod(-1)[:, None].expand_as(cost)
    least = area.masked_fill(~is_wanted, torch.inf).min(2)
    return torch.where(least.values.isfinite(), least.indices, torch.full_like(least.indices, -1)), overlap


def generalised_overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of boxes [..., 4], less the share of their common hull that is in neither."""
    overlap, union = _overlap(boxes, others)
    hull = (torch.maximum(boxes[..., 2:], others[..., 2:]) - torch.minimum(boxes[..., :2], others[..., :2])).prod(-1)
    return overlap - (hull - union) / (hull + _TINY)


def _overlap(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and the union."""
    inside = torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])
    shared = inside.clamp(min=0).prod(-1)
    union = (boxes[..., 2:] - boxes[..., :2]).prod(-1) + (others[..., 2:] - others[..., :2]).prod(-1) - shared
    return shared / (union + _TINY), union
