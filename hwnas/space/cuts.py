"""The networks of a space of cuts: a list of what is known of one network or of several, on each image size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import yaml

from hwnas.errors import SpaceError
from hwnas.space.architecture import Architecture, Origin
from hwnas.space.coding import Codes
from hwnas.space.family import IMAGE_SIZE, Family, Member, read_family, read_known
from hwnas.space.reading import SpaceFile

FAMILIES = "families"  # key of a space's file: the content of a file for each of several networks
KEYS = ("description", FAMILIES)
CUT = "cut"  # the parameter that names one of the known networks
_MOST = 100


class CutList:
    """Known cuts by name, each on every image size of its family. It is to such a space what a coding is to others.

    Attributes:
        families: Those of the networks that they are cut from.
        known: The cuts; of equal networks the first.
        image_sizes: Sides of images that some of them take, largest first.
        fields: Name and choices of the parameters.
    """

    def __init__(self, families: Sequence[Family], known: Mapping[str, Member]) -> None:
        self.families = tuple(families)
        self._sizes = {family.around: family.image_sizes for family in families}
        self.image_sizes = tuple(sorted({px for sizes in self._sizes.values() for px in sizes}, reverse=True))
        unique = dict[str, tuple[str, Member]]()
        for name, cut in known.items():
            unique.setdefault(self._id_of(cut), (name, cut))
        self.known = dict(unique.values())
        self._places = {id: place for place, id in enumerate(unique)}
        self.fields: list[tuple[str, tuple[Any, ...]]] = [(CUT, tuple(self.known)), (IMAGE_SIZE, self.image_sizes)]

    def _id_of(self, network: Architecture) -> str:
        """Return the id that a network has on the largest images."""
        return replace(network, image_size=self.image_sizes[0]).id

    def content(self) -> dict[str, Any]:
        """Return what tells it from other lists beside the known networks."""
        return {"cuts": [*self.known], "image_sizes": self._sizes}

    def canonical(self, full: Codes) -> Codes:
        """Return the codes: no two are of one network."""
        return full

    def architecture(self, full: Codes) -> Architecture:
        """Return the network of one row. SpaceError if its family takes no images of this size."""
        cut, px = [*self.known.values()][int(full[0])], self.image_sizes[int(full[1])]
        if px not in self._sizes[cut.around]:
            raise SpaceError(f"cuts of {cut.around} take no images of {px} px in this space, only of "
                             f"{', '.join(map(str, self._sizes[cut.around]))} px.")
        return replace(cut, image_size=px)

    def match(self, architecture: Architecture) -> Codes:
        """Return the codes [fields] of a network. SpaceError if it is not in the list."""
        place = self._places.get(self._id_of(architecture))
        if place is None or architecture.image_size not in self._sizes[architecture.around]:
            raise SpaceError(f"architecture {architecture.id} is not of this space: it is none of the cuts "
                             f"{', '.join(self.known)} on images of {', '.join(map(str, self.image_sizes))} px.")
        return np.array([place, self.image_sizes.index(architecture.image_size)], dtype=np.int64)


def is_of_cuts(file: SpaceFile) -> bool:
    """Return whether a space's YAML lists cuts of networks."""
    return FAMILIES in file.data or "operators" in file.data


def read_cuts(file: SpaceFile, channels: int, classes: int, image_size: int | None = None) -> CutList:
    """Return the cuts that a space's YAML lists, for images of so many channels and for so many classes.

    Args:
        image_size: Replaces the file's.

    Raises:
        SpaceError: It breaks a rule.
    """
    parts = _parts(file) if FAMILIES in file.data else [file]
    families, known = [read_family(part, image_size) for part in parts], dict[str, Member]()
    names = [Origin.parse(family.around).name for family in families]
    if len({*names}) < len(names):
        file.fail((FAMILIES,), "must be of different networks")
    if len({family.image_sizes[0] for family in families}) > 1:
        file.fail((FAMILIES,), f"must have the same largest {IMAGE_SIZE}")
    for part, family, around in zip(parts, families, names, strict=True):
        known |= {f"{around} {name}" if len(parts) > 1 else name: family.member(kept, channels, classes)
                  for name, kept in read_known(part, family).items()}
    return CutList(families, known)


def _parts(file: SpaceFile) -> list[SpaceFile]:
    """Return the files that the families of one file would be alone."""
    contents = file.section((), file.data, KEYS)[FAMILIES]
    if not isinstance(contents, list) or not 2 <= len(contents) <= _MOST or not all(
            isinstance(content, dict) for content in contents):
        file.fail((FAMILIES,), f"must be a list of 2 to {_MOST} spaces of cuts")
    return [SpaceFile(f"{file.where}: {FAMILIES}[{number}]", yaml.safe_dump(content, sort_keys=False))
            for number, content in enumerate(contents)]


def join_contents(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of a space's file for several families, of the content for each."""
    return {"description": "What can be cut out of several networks.", FAMILIES: [dict(each) for each in contents]}
