"""timm's networks of at most 30 million parameters, with their published ImageNet top-1: `published.csv`.

The rows are from timm's own results table (github.com/huggingface/pytorch-image-models, `results/`, Apache-2.0). For
each network and image size, the weights of the highest top-1 are listed. 61 rows have no MACs and activations there;
these were counted in the same way.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from hwnas.errors import ConfigError, did_you_mean
from hwnas.lazy import timm


@dataclass(frozen=True, slots=True)
class PublishedNetwork:
    """A network on images of a size, as timm publishes it.

    Attributes:
        model: timm's name with the tag of the weights.
        image_size: Side in px of the images that it was scored on.
        top1: Top-1 of ImageNet's validation images in fp32, per cent.
        params_m, gmacs, macts: Millions of parameters, billions of MACs and millions of activations.
    """

    model: str
    image_size: int
    top1: float
    params_m: float
    gmacs: float
    macts: float

    @property
    def name(self) -> str:
        """timm's name of the architecture."""
        return self.model.partition(".")[0]

    @property
    def key(self) -> str:
        """Architecture and image size, such as `resnet50@224`: what a latency depends on."""
        return f"{self.name}@{self.image_size}"

    @property
    def family(self) -> str:
        """The letters that the name begins with."""
        return (re.match("[a-z]+", self.name) or [self.name])[0]


@cache
def published_networks() -> tuple[PublishedNetwork, ...]:
    """Return all published networks, by name and image size."""
    with files("hwnas.zoo").joinpath("published.csv").open(encoding="utf-8") as file:
        return tuple(PublishedNetwork(row["model"], int(row["image_size"]), *(
            float(row[name]) for name in ("top1", "params_m", "gmacs", "macts"))) for row in csv.DictReader(file))


def default_tag(name: str) -> str:
    """Return the tag of the weights that timm fetches for a network; empty if there are none."""
    default = timm.get_pretrained_cfg(name)
    return str(default.tag) if default is not None and default.tag else ""


def find_published(name: str, tag: str, image_size: int) -> PublishedNetwork | None:
    """Find the published values of a network's weights, with its costs on images of `image_size` px; None without any.
    If the tag is empty or not in the list, timm's default weights count, otherwise the weights that are listed on the
    largest images. Of several image sizes the nearest one counts."""
    rows = sorted((network for network in published_networks() if network.name == name),
                  key=lambda row: (-row.image_size, -row.top1))
    models = [f"{name}.{each}" for each in (tag, default_tag(name)) if each] + [row.model for row in rows[:1]]
    own = next(filter(None, ([row for row in rows if row.model == model] for model in models)), [])
    row = min(own, key=lambda row: abs(row.image_size - image_size), default=None)
    if row is None:
        return None
    growth = (image_size / row.image_size) ** 2  # of pixels, so of MACs and activations
    return replace(row, image_size=image_size, gmacs=growth * row.gmacs, macts=growth * row.macts)


def select_networks(patterns: Sequence[str] | None) -> list[PublishedNetwork]:
    """Select the networks whose names match a pattern such as `resnet*`; all of them without a pattern.

    Raises:
        ConfigError: A pattern matches none.
    """
    networks = published_networks()
    names = {network.name for network in networks}
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            near = did_you_mean(pattern.strip("*"), names | {f"{network.family}*" for network in networks})
            raise ConfigError(f"names: {pattern!r} matches none of the {len(names)} networks whose published top-1 is "
                              f"known here.{near}")
    return [network for network in networks
            if not patterns or any(fnmatchcase(network.name, pattern) for pattern in patterns)]
