"""Search spaces, read from YAML: they decode, encode, sample and mutate networks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from hwnas.errors import SpaceError, UnknownName
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec
from hwnas.space.coding import BlockCoding, Codes
from hwnas.space.cuts import WHOLE, CutList, is_of_cuts
from hwnas.space.reading import SpaceFile, Value, known_settings, read_space
from hwnas.system.documents import load_yaml, yaml_text
from hwnas.system.paths import data_dirs

Figure = Callable[[Sequence[BlockSpec]], float]
Picked = TypeVar("Picked")


def macs(blocks: Sequence[BlockSpec]) -> float:
    """Return the multiply-accumulates of one image."""
    return sum(block.macs for block in blocks)


def params(blocks: Sequence[BlockSpec]) -> float:
    """Return the number of trainable parameters."""
    return sum(block.params for block in blocks)


def spread(costs: Sequence[float] | NDArray[np.float64], n: int, pick: Callable[[NDArray[np.int64]], Picked | None]
           ) -> list[Picked]:
    """Divide the rows of `costs` into `n` equal parts, cheapest first, and return what `pick` chooses from the rows of
    each part. A part for which it returns None is left out."""
    parts = np.array_split(np.argsort(np.asarray(costs), kind="stable"), n)
    return [picked for part in parts if (picked := pick(part)) is not None]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One decision of a space, with two choices or more."""

    name: str
    choices: tuple[Value, ...]


class SearchSpace:
    """The networks that a YAML file allows, for one number of image channels and classes.

    Codes are integer arrays [n, len(parameters)] of choice indices. In canonical codes, parameters without effect are
    0. Equal networks have one id.

    Attributes:
        known: The networks under `known` in the file, by name.
        known_params: The settings of these networks, by name.
    """

    def __init__(self, coding: BlockCoding | CutList, known: Mapping[str, Sequence[int]], file: SpaceFile, *,
                 source: Path, channels: int, classes: int) -> None:
        """Create a space; `known` has the codes of known networks, for all fields of `coding`."""
        self.coding, self.content = coding, file.data
        self.name, self.source, self.channels, self.classes = source.stem, source, channels, classes
        # A field with one choice is no parameter: `_columns` are the columns of the parameters among the fields.
        all_fields = coding.fields
        self._columns = [index for index, (_, choices) in enumerate(all_fields) if len(choices) > 1]
        self._n_fields = len(all_fields)
        self.parameters = tuple(Parameter(*all_fields[index]) for index in self._columns)
        self._n_choices = np.array([len(parameter.choices) for parameter in self.parameters], dtype=np.int64)
        self._codes_of = [{_plain(c): i for i, c in enumerate(p.choices)} for p in self.parameters]
        self._figures: dict[tuple[Figure, ...], tuple[NDArray[np.bool_], NDArray[np.float64]]] = {}
        rows = {name: coding.canonical(np.array([codes], dtype=np.int64))[0] for name, codes in known.items()}
        self.known = {name: coding.architecture(row) for name, row in rows.items()}
        self.known_params = {name: self.to_params(row[self._columns]) for name, row in rows.items()}

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str], *, channels: int, classes: int,
             image_size: int | None = None) -> SearchSpace:
        """Read a space of blocks by name (from the user's folder, then the shipped ones) or by the path of a .yaml
        file. `hwnas.networks.around.load_space` reads spaces of cuts too.

        `image_size` replaces the file's. Raises UnknownName for an unknown name, SpaceError for a wrong file.
        """
        return cls.of_file(*read_space_file(name_or_path), channels, classes, image_size)

    @classmethod
    def of_file(cls, file: SpaceFile, source: Path, channels: int, classes: int, image_size: int | None = None
                ) -> SearchSpace:
        """Return the space of blocks of a file. Raises SpaceError if the file breaks a rule."""
        if is_of_cuts(file):
            raise SpaceError(f"{source}: its networks are cut from others, and a race times each of them when it asks "
                             "for it. Nothing is to be measured before, or predicted.")
        definition = read_space(file, image_size)
        space = cls(BlockCoding(definition, channels, classes), known_settings(file, definition), file, source=source,
                    channels=channels, classes=classes)
        if not space.parameters:
            raise SpaceError(f"{source}: has no parameter. Give at least one field a list of two values that matter.")
        return space

    @property
    def arounds(self) -> tuple[str, ...]:
        """The names of the networks that its own are cut from, as `Architecture.around`; () in a space of blocks."""
        return tuple(self.coding.sizes) if isinstance(self.coding, CutList) else ()

    @property
    def wholes(self) -> dict[str, Architecture]:
        """The uncut network for each of `arounds`, at the largest image size."""
        return {network.around: network for name, network in self.known.items() if name.split(" ")[-1] == WHOLE}

    @property
    def text(self) -> str:
        """The text of a file of this space."""
        return yaml.safe_dump(self.content, sort_keys=False, default_flow_style=None, width=120)

    @property
    def size(self) -> int:
        """The number of settings; several may be one network."""
        return prod(len(parameter.choices) for parameter in self.parameters)

    @property
    def image_sizes(self) -> tuple[int, ...]:
        """The image sizes that may be chosen."""
        return self.coding.image_sizes

    @property
    def reference(self) -> Architecture:
        """The first known network (MobileNetV2-like), otherwise the network of all first choices."""
        if self.known:
            return next(iter(self.known.values()))
        return self.coding.architecture(np.zeros(self._n_fields, dtype=np.int64))

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change if the networks or the known ones change."""
        content = {**self.coding.content(), "channels": self.channels, "classes": self.classes,
                   "known": {name: network.to_dict() for name, network in self.known.items()}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def decode(self, params: Mapping[str, Any]) -> Architecture:
        """Return the network of a full setting. Raises SpaceError for a missing, unknown or illegal value."""
        return self.coding.architecture(self._full(self.to_codes(params)[None])[0])

    def encode(self, cut: Architecture) -> dict[str, Value] | None:
        """Return the setting of a cut; None if this space does not list it."""
        codes = self.coding.find(cut) if isinstance(self.coding, CutList) else None
        return None if codes is None else self.to_params(codes[self._columns])

    def to_codes(self, params: Mapping[str, Any]) -> Codes:
        """Return the codes [p] of a full setting as they are, not canonical. Raises SpaceError as `decode` does."""
        names = [parameter.name for parameter in self.parameters]
        for name in params:
            if name not in names:
                raise SpaceError(f"space {self.name}: {UnknownName('parameter', name, names)}")
        codes = []
        for parameter, code_of in zip(self.parameters, self._codes_of, strict=True):
            if parameter.name not in params:
                raise SpaceError(f"space {self.name}: parameter {parameter.name} is missing.")
            value = params[parameter.name]
            key = _plain(value)
            if key not in code_of:
                raise SpaceError(f"space {self.name}: {parameter.name} must be one of "
                                 f"{', '.join(map(str, parameter.choices))}, got {value!r}.")
            codes.append(code_of[key])
        return np.array(codes, dtype=np.int64)

    def to_params(self, codes: Codes) -> dict[str, Value]:
        """Return the setting of one row of codes."""
        return {p.name: p.choices[int(code)] for p, code in zip(self.parameters, codes, strict=True)}

    def canonical_codes(self, codes: Codes) -> Codes:
        """Return codes [n, p] of the same networks in which parameters without effect are 0."""
        canonical: Codes = self.coding.canonical(self._full(codes))[:, self._columns]
        return canonical

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """Draw settings uniformly and return their canonical codes [n, p]."""
        codes = rng.integers(0, self._n_choices, size=(n, len(self.parameters)), dtype=np.int64)
        return self.canonical_codes(codes)

    def mutate(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Draw up to two parameters of each row of `codes` again, and return the canonical codes [n, p]."""
        mutants = np.array(codes)
        for _ in range(2):
            column = rng.integers(0, mutants.shape[1], len(mutants))
            mutants[np.arange(len(mutants)), column] = rng.integers(0, self._n_choices[column])
        return self.canonical_codes(mutants)

    def segments(self, codes: Codes) -> Codes:
        """Return the segment ids [n, m] of codes [n, p]: stem, each stage in its context, head."""
        return self._of_blocks.segments(self.coding.canonical(self._full(codes)))

    @property
    def _of_blocks(self) -> BlockCoding:
        """The coding of a space of blocks. Raises SpaceError in a space of cuts, which has no segments."""
        if not isinstance(self.coding, BlockCoding):
            raise SpaceError(f"space {self.name} is of cuts, which have no segments.")
        return self.coding

    @property
    def n_segments(self) -> int:
        """The number of segment ids, which are 0 .. n_segments - 1; some are of no network."""
        return self._of_blocks.n_segments

    def segment_blocks(self, segment_id: int) -> tuple[BlockSpec, ...]:
        """Return the blocks of one segment. A network consists of the blocks of its segments in order."""
        return self._of_blocks.segment_blocks(int(segment_id))

    def parts(self, codes: Codes, *figures: Figure) -> NDArray[np.float64]:
        """Return `figures` of each segment of codes [n, p]: [n, segments, figures]. Each segment is computed once."""
        if figures not in self._figures:
            self._figures[figures] = np.zeros(self.n_segments, bool), np.zeros((self.n_segments, len(figures)))
        is_computed, values = self._figures[figures]
        segments = self.segments(codes)
        for segment in np.unique(segments[~is_computed[segments]]):
            blocks = self.segment_blocks(int(segment))
            values[segment] = [figure(blocks) for figure in figures]
            is_computed[segment] = True
        return values[segments]

    def totals(self, codes: Codes, *figures: Figure) -> NDArray[np.float64]:
        """Return `figures` of the networks of codes [n, p], summed over their segments: [n, figures]."""
        total: NDArray[np.float64] = self.parts(codes, *figures).sum(axis=1)
        return total

    def _full(self, codes: Codes) -> Codes:
        full = np.zeros((len(codes), self._n_fields), dtype=np.int64)
        full[:, self._columns] = codes
        return full


def read_space_file(name_or_path: str | os.PathLike[str]) -> tuple[SpaceFile, Path]:
    """Return the file of a space, and its path. Raises UnknownName or SpaceError if it cannot be read."""
    source = find_space(name_or_path)
    try:
        return SpaceFile(str(source), load_yaml(yaml_text(source))), source
    except (OSError, ValueError) as error:
        raise SpaceError(f"{source}: cannot be read: {error}. Give a name or the path of a YAML file.") from None


def find_space(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the path of a space's file. A path that ends in .yaml or .yml is taken as it is, a name is looked up.
    Raises UnknownName if there is no space of this name."""
    text = os.fspath(name_or_path)
    if text.endswith((".yaml", ".yml")):
        return Path(text).expanduser().absolute()
    files: dict[str, Path] = {}  # the user's folder comes last, so that its files replace shipped ones
    for folder in reversed(data_dirs("search_spaces")):
        files.update({path.stem: path for path in sorted(folder.glob("*.yaml"))})
    if text not in files:
        raise UnknownName("search space", text, files)
    return files[text]


def _plain(value: Any) -> tuple[bool, str | float] | None:
    """Return a key that is equal for 1, 1.0 and numpy's 1, but different for True; None for other types."""
    if isinstance(value, np.generic):
        value = value.item()
    return (isinstance(value, bool), value) if isinstance(value, str | int | float) else None
