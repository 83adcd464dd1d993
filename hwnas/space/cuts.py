"""The networks of a space of cuts: a list of known cuts of one network or several, at each image size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hwnas.errors import SpaceError
from hwnas.space.architecture import Architecture, Cut
from hwnas.space.coding import Codes
from hwnas.space.reading import SpaceFile

FAMILIES = "families"  # key of a space's file: for each of several networks, the content of a file for it alone
CUT, IMAGE_SIZE = "cut", "image_size"  # the parameters: the name of a known network, and the side of its images
WHOLE = "whole"  # name of the known network that the others are cut from


def is_of_cuts(file: SpaceFile) -> bool:
    """Return whether a space's YAML lists cuts of networks."""
    return FAMILIES in file.data or "around" in file.data


class CutList:
    """Known cuts by name, each at every image size of its network. A space of cuts uses it in place of a coding.

    Attributes:
        sizes: Image sizes that the cuts of each network take, by `Architecture.around`, largest first.
        known: The cuts by name; only the first of equal networks.
        image_sizes: All sizes of any network, largest first.
        fields: Name and choices of each parameter.
    """

    def __init__(self, known: Mapping[str, Cut], sizes: Mapping[str, Sequence[int]]) -> None:
        self.sizes = dict(sizes)
        self.image_sizes = tuple(sorted({px for each in sizes.values() for px in each}, reverse=True))
        unique = dict[str, tuple[str, Cut]]()
        for name, cut in known.items():
            unique.setdefault(self._id_of(cut), (name, cut))
        self.known = dict(unique.values())
        self._places = {id: place for place, id in enumerate(unique)}
        self.fields: list[tuple[str, tuple[Any, ...]]] = [(CUT, tuple(self.known)), (IMAGE_SIZE, self.image_sizes)]

    def _id_of(self, network: Architecture) -> str:
        """Return the id of a network for the largest images."""
        return replace(network, image_size=self.image_sizes[0]).id

    def content(self) -> dict[str, Any]:
        """Return the content that a space's fingerprint is made of, beside the known networks."""
        return {"cuts": [*self.known], "image_sizes": self.sizes}

    def canonical(self, full: Codes) -> Codes:
        """Return the codes as they are: different codes are always different networks."""
        return full

    def architecture(self, full: Codes) -> Architecture:
        """Return the network of one row. Raises SpaceError if cuts of this origin do not take images of this size."""
        cut, px = [*self.known.values()][int(full[0])], self.image_sizes[int(full[1])]
        if px not in self.sizes[cut.around]:
            raise SpaceError(f"cuts of {cut.around} take no images of {px} px in this space, only of "
                             f"{', '.join(map(str, self.sizes[cut.around]))} px.")
        return replace(cut, image_size=px)

    def find(self, architecture: Architecture) -> Codes | None:
        """Return the codes [fields] of a network; None if it is not in the list."""
        place = self._places.get(self._id_of(architecture))
        if place is None or architecture.image_size not in self.sizes[architecture.around]:
            return None
        return np.array([place, self.image_sizes.index(architecture.image_size)], dtype=np.int64)
