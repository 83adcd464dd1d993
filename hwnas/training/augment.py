"""Random changes of a batch, all by one generator, so that a seed decides them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from hwnas.training.recipe import Recipe


def augment(images: Tensor, recipe: Recipe, flip: bool, generator: torch.Generator) -> Tensor:
    """Float images [n, c, h, w] shifted, mirrored, zoomed, rotated and erased at random as `recipe` says.

    Shifts and mirrorings alone move whole pixels (edges repeated); zoom and rotation sample bilinearly.
    """
    n, _, height, width = images.shape
    if recipe.zoom or recipe.rotate:
        images = _affine(images, recipe, flip, generator)
    elif recipe.shift or flip:
        rows = _offsets(n, recipe.shift * height, generator) + torch.arange(height)
        columns = torch.arange(width).expand(n, width)
        if flip:
            mirrored = torch.rand(n, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        columns = columns + _offsets(n, recipe.shift * width, generator)
        rows, columns = rows.clamp_(0, height - 1), columns.clamp_(0, width - 1)
        picked = images.permute(0, 2, 3, 1)[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
        images = picked.permute(0, 3, 1, 2)
    return _erase(images, recipe.erase, generator) if recipe.erase else images


def _offsets(n: int, most: float, generator: torch.Generator) -> Tensor:
    bound = round(most)
    return torch.randint(-bound, bound + 1, (n, 1), generator=generator)


def _affine(images: Tensor, recipe: Recipe, flip: bool, generator: torch.Generator) -> Tensor:
    n = len(images)

    def uniform() -> Tensor:
        return torch.rand(n, generator=generator) * 2 - 1

    angle = uniform() * math.radians(recipe.rotate)
    scale = 1 + uniform() * recipe.zoom
    mirror = torch.where(uniform() < 0, -1.0, 1.0) if flip else torch.ones(n)
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    theta = torch.stack([
        torch.stack([cosine * mirror, -sine, 2 * recipe.shift * uniform()], 1),
        torch.stack([sine * mirror, cosine, 2 * recipe.shift * uniform()], 1)], 1)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _erase(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Zero (the mean, after normalisation) in a rectangle of 2 to 20 % of the area (Zhong et al., 2020)."""
    n, _, height, width = images.shape
    chosen, area, shape, y, x = torch.rand(5, n, 1, generator=generator)
    area, ratio = 0.02 + 0.18 * area, torch.exp((shape * 2 - 1) * math.log(3.0))
    tall, wide = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    rows, columns = (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width
    in_rows = ((rows >= y * (1 - tall)) & (rows < y * (1 - tall) + tall)).unsqueeze(2)
    in_columns = ((columns >= x * (1 - wide)) & (columns < x * (1 - wide) + wide)).unsqueeze(1)
    hidden = in_rows & in_columns & (chosen < probability).unsqueeze(2)
    return images.masked_fill(hidden.unsqueeze(1), 0.0)
