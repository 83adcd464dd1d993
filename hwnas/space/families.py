"""Several families in one space: each of its networks is a member of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from hwnas.errors import SpaceError
from hwnas.space.architecture import Architecture, Origin
from hwnas.space.coding import Codes
from hwnas.space.family import Family, FamilyCoding, Member, read_family, read_known
from hwnas.space.reading import SpaceFile

FAMILIES = "families"  # key of a space's file: the content of a file for each
AROUND = "around"  # the parameter that says which family a network is of
KEYS = ("description", FAMILIES)
_MOST = 100


@dataclass(frozen=True)
class Families:
    """Families of different networks, two or more."""

    families: tuple[Family, ...]

    @property
    def image_sizes(self) -> tuple[int, ...]:
        """Sides of images that a member of some of them may have, largest first."""
        return tuple(sorted({px for family in self.families for px in family.image_sizes}, reverse=True))


class FamiliesCoding:
    """The tables behind the codes of families: a column for the family, and behind it those of each. The columns of
    another family than a network's own have their last choice."""

    def __init__(self, definition: Families, channels: int, classes: int) -> None:
        self.arounds = tuple(family.around for family in definition.families)
        self._codings = [FamilyCoding(family, channels, classes) for family in definition.families]
        self.fields: list[tuple[str, tuple[Any, ...]]] = [(AROUND, self.arounds)]
        self._columns = list[slice]()
        for around, coding in zip(self.arounds, self._codings, strict=True):
            self._columns.append(slice(len(self.fields), len(self.fields) + len(coding.fields)))
            self.fields += [(f"{Origin.parse(around).name}.{name}", choices) for name, choices in coding.fields]
        self._unused = np.array([len(choices) - 1 for _, choices in self.fields], dtype=np.int64)

    def canonical(self, full: Codes) -> Codes:
        """Codes [n, fields] in which equal networks are equal rows."""
        canonical = np.repeat(self._unused[None], len(full), axis=0)
        canonical[:, 0] = full[:, 0]
        for number, (coding, columns) in enumerate(zip(self._codings, self._columns, strict=True)):
            rows = full[:, 0] == number
            canonical[rows, columns] = coding.canonical(full[rows, columns])
        return canonical

    def architecture(self, full: Codes) -> Member:
        """The network of one row."""
        number = int(full[0])
        return self._codings[number].architecture(full[self._columns[number]])

    def match(self, architecture: Architecture) -> Codes:
        """Codes [fields] of a network; SpaceError if it is of none of the families."""
        if architecture.around not in self.arounds:
            raise SpaceError(f"architecture {architecture.id} is not cut out of {' or '.join(self.arounds)}.")
        number = self.arounds.index(architecture.around)
        full = self._unused.copy()
        full[0], full[self._columns[number]] = number, self._codings[number].match(architecture)
        return full

    def match_part(self, number: int, codes: Sequence[int]) -> Codes:
        """Codes [fields] of the member of a family that has these codes there."""
        full = self._unused.copy()
        full[0], full[self._columns[number]] = number, codes
        return full


def join_contents(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of a space's file for several families, of the content for each."""
    return {"description": "What can be cut out of several networks.", FAMILIES: [dict(each) for each in contents]}


def read_families(file: SpaceFile, image_size: int | None = None) -> tuple[Families, list[dict[str, list[int]]]]:
    """Return the families that a space's YAML describes, and for each the codes of the networks under `known`.

    Raises:
        SpaceError: It breaks a rule.
    """
    contents = file.section((), file.data, KEYS).get(FAMILIES)
    if not isinstance(contents, list) or not 2 <= len(contents) <= _MOST or not all(
            isinstance(content, dict) for content in contents):
        file.fail((FAMILIES,), f"must be a list of 2 to {_MOST} spaces of cuts")
    parts = [SpaceFile(f"{file.where}: {FAMILIES}[{number}]", yaml.safe_dump(content, sort_keys=False))
             for number, content in enumerate(contents)]
    families = tuple(read_family(part, image_size) for part in parts)
    if len({Origin.parse(family.around).name for family in families}) < len(families):
        file.fail((FAMILIES,), "must be of different networks")
    return Families(families), [read_known(part, family) for part, family in zip(parts, families, strict=True)]
