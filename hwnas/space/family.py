"""A family: the networks that can be cut out of any one, by what was seen when that one ran once.

A network that `hwnas.networks.tracing` has run is a list of operators. Each is in a block or in none, reads and writes
channels of groups, and has maps of a share of the image's side. Channels of a group stand and fall together, as those
that a residual adds. So a member of the family is told by two kinds of numbers: how many of the blocks that may go stay
in each run of alike ones, and which share of their channels the groups keep. Groups that are tied keep one share: the
streams between blocks, and the insides of blocks, each at one size of maps. All else follows, without the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hwnas.errors import SpaceError
from hwnas.space.architecture import AROUND, CUT, DOCUMENT, FORMS, KEPT
from hwnas.space.architecture import Architecture as Architecture
from hwnas.space.blocks.block import BlockSpec, round_to_divisor
from hwnas.space.reading import SIZE_RULE, SpaceFile

Codes = NDArray[np.int64]
DIVISOR = 8  # channels of a group that is cut: what kernels of the targets are made for
ROLES = ("stem", "dense", "pointwise", "depthwise", "se", "linear")
KEYS = ("description", "around", "image_size", "runs", "groups", "shares", "operators", "known")
WIDTH = "width."  # opens the name of a tie's parameter; a run's is its own
_MOST = 10_000  # operators, runs or groups of a family
_MOST_CHANNELS = 1 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Channels that are cut together: how many the whole network has, and the `tie` whose share they keep."""

    name: str
    channels: int
    tie: str

    def kept(self, share: float) -> int:
        """How many of its channels stay with a share of the tie: a multiple of DIVISOR, all of those that are fewer."""
        return min(self.channels, round_to_divisor(self.channels * share, DIVISOR))


@dataclass(frozen=True, slots=True)
class TracedOperator:
    """A convolution or matrix product of the whole network.

    Attributes:
        block: The block that it is in; empty: none that may go.
        role: One of ROLES.
        reads: Groups that it reads, with their channels there; "" names channels that never change.
        writes: The same that it writes.
        kernel: Side of its kernel.
        stride_in: Side of the image over that of the map that it reads; 0: a map of one pixel.
        stride_out: The same that it writes.
    """

    block: str
    role: str
    reads: tuple[tuple[str, int], ...]
    writes: tuple[tuple[str, int], ...]
    kernel: int
    stride_in: int
    stride_out: int

    def __str__(self) -> str:
        sides = ("+".join(f"{name}*{n}" if name else str(n) for name, n in side) for side in (self.reads, self.writes))
        return " ".join([self.block or "-", self.role, *sides, *map(str, (self.kernel, self.stride_in,
                                                                          self.stride_out))])


@dataclass(frozen=True, slots=True)
class Run:
    """Alike blocks one behind the other, of which the last ones may go: `blocks` names those that may, in order."""

    name: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """What a network was seen to be, and what of it may be cut.

    Attributes:
        around: The network, as `Architecture.around` names it.
        image_sizes: Sides of images that may be chosen, largest first.
        runs: Runs of blocks; a parameter each, the number of blocks that stay.
        groups: Groups of channels.
        shares: Of each tie, the shares that its groups may keep, the whole one first.
        operators: In the order in which they run.
    """

    around: str
    image_sizes: tuple[int, ...]
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    shares: Mapping[str, tuple[float, ...]]
    operators: tuple[TracedOperator, ...]

    def fields(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Name and choices of every parameter."""
        return [("image_size", self.image_sizes),
                *((run.name, tuple(range(len(run.blocks), -1, -1))) for run in self.runs),
                *((WIDTH + tie, shares) for tie, shares in self.shares.items())]

    def in_order(self) -> Family:
        """The same family with runs, groups and ties as operators meet them, in whatever order a file has them."""
        met = list(dict.fromkeys(name for each in self.operators for name, _ in each.reads + each.writes if name))
        groups = sorted(self.groups, key=lambda group: met.index(group.name) if group.name in met else len(met))
        blocks = list(dict.fromkeys(each.block for each in self.operators))
        runs = sorted(self.runs, key=lambda run: min((blocks.index(block) for block in run.blocks if block in blocks),
                                                     default=len(blocks)))
        ties = dict.fromkeys([*(group.tie for group in groups), *sorted(self.shares)])
        return replace(self, runs=tuple(runs), groups=tuple(groups), shares={tie: self.shares[tie] for tie in ties})

    def channels(self, chosen: Mapping[str, Any]) -> dict[str, int]:
        """Channels that each group keeps, for the groups whose shares are chosen."""
        return {group.name: group.kept(chosen[name]) for group in self.groups
                if (name := WIDTH + group.tie) in chosen}

    def blocks_left_out(self, chosen: Mapping[str, Any]) -> set[str]:
        """The blocks that go, of the runs whose depths are chosen."""
        return {block for run in self.runs if run.name in chosen for block in run.blocks[int(chosen[run.name]):]}

    def cut(self, operators: Sequence[TracedOperator], chosen: Mapping[str, Any]
            ) -> Iterator[tuple[str, str, int, int, int, int, int]]:
        """What is left of operators, as a `Member` lists them."""
        whole = {group.name: group.channels for group in self.groups}
        kept, gone = self.channels(chosen), self.blocks_left_out(chosen)
        for each in operators:
            if each.block not in gone:
                n_in, n_out = (sum(n * kept[name] // whole[name] if name else n for name, n in side)
                               for side in (each.reads, each.writes))
                yield each.block, each.role, n_in, n_out, each.kernel, each.stride_in, each.stride_out


@dataclass(frozen=True, slots=True)
class Member(Architecture):
    """A network of a family, as data.

    Attributes:
        chosen: Values of the family's parameters but the image size, by name.
        operators: What it runs: (block, role, in, out, kernel, stride in, stride out), in order; strides as in
            `TracedOperator`.
    """

    chosen: tuple[tuple[str, float], ...] = ()
    operators: tuple[tuple[str, str, int, int, int, int, int], ...] = ()

    def block_defs(self) -> NoReturn:
        """None: it is not made of words."""
        raise SpaceError(f"{self.around} is cut by what it runs, and has no arch-def words.")

    def staged_blocks(self) -> tuple[tuple[BlockSpec, ...], ...]:
        """Its blocks, each alone."""
        return tuple((block,) for block in blocks_of_operators(self.operators, self.image_size, self.classes))

    def is_part_of(self, whole: Architecture) -> bool:
        """Whether it can be cut out of another member of its family: it keeps no block, channel or pixel more."""
        kept = dict(whole.chosen) if isinstance(whole, Member) else {}
        return ((self.around, self.channels, self.classes) == (whole.around, whole.channels, whole.classes)
                and self.image_size <= whole.image_size and kept.keys() == dict(self.chosen).keys()
                and all(value <= kept[name] for name, value in self.chosen))

    @property
    def last_map_px(self) -> int:
        """Side of the last map before the pooling."""
        return -(-self.image_size // max(stride_out for *_, stride_out in self.operators))

    def __str__(self) -> str:
        chosen = ",".join(f"{name}={value:g}" for name, value in self.chosen)
        operators = ",".join("/".join(map(str, operator)) for operator in self.operators)
        return f"{CUT}{self.around}@{self.image_size} {chosen} {operators}"

    @classmethod
    def parse(cls, text: str, channels: int, classes: int) -> Member:
        """Inverse of `str`; SpaceError for another text."""
        words = text.removeprefix(CUT).split()
        if len(words) != 3 or words[0].count("@") != 1:
            raise SpaceError(f"architecture {text[:100]!r}: a network that is cut out of another is {CUT}NAME@SIZE, "
                             "then what is kept of it and what it runs.")
        around, _, size = words[0].partition("@")
        kept = {name: value for name, _, value in (pair.partition("=") for pair in words[1].split(","))}
        return cls.from_dict({**DOCUMENT.header, "around": around, "kept": kept, "operators": words[2].split(","),
                              "input": {"size": size, "channels": channels}, "classes": classes})

    def to_dict(self) -> dict[str, Any]:
        """The content of `architecture.yaml`."""
        return {**DOCUMENT.header, "around": self.around, "kept": dict(self.chosen),
                "operators": ["/".join(map(str, operator)) for operator in self.operators],
                "input": {"size": self.image_size, "channels": self.channels}, "classes": self.classes}

    @classmethod
    def from_dict(cls, data: Any, where: str = "architecture") -> Member:
        """Inverse of `to_dict`, checked: SpaceError names `where` and what is wrong."""
        data = DOCUMENT.check(data, where)
        try:
            around, kept, source = str(data["around"]), data["kept"], data["input"]
            if not AROUND.fullmatch(around) or not 0 < len(kept) <= _MOST or len(data["operators"]) > _MOST:
                raise ValueError("around, kept or operators")
            values = (int(source["size"]), int(source["channels"]), int(data["classes"]))
            if not 0 < min(values) <= max(values) <= _MOST_CHANNELS or values[2] < 2:
                raise ValueError("input or classes")
            operators = tuple(_operator(str(text)) for text in data["operators"])
            if not any(stride_out for *_, stride_out in operators):
                raise ValueError("operators: none has a map")
            return cls(stages=(), stem_width=0, stem_stride=1, head=0, activation="relu", image_size=values[0],
                       channels=values[1], classes=values[2], around=around,
                       chosen=tuple((str(name), _kept(str(name), value)) for name, value in kept.items()),
                       operators=operators)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpaceError(f"{where}: no network that is cut out of another one: {type(error).__name__}: {error}. "
                             "Give an architecture.yaml as a search writes it.") from None


FORMS[CUT], FORMS[KEPT] = Member.parse, Member.from_dict


def _kept(name: str, value: Any) -> float:
    """A share of a tie, or a number of blocks: as the family has it, so that a network has one document."""
    kept = float(value) if name.startswith(WIDTH) else int(value)
    if not 0 <= kept <= _MOST:
        raise ValueError(f"kept: {name} {value!r}")
    return kept


def _operator(text: str) -> tuple[str, str, int, int, int, int, int]:
    block, role, *numbers = text.split("/")
    n_in, n_out, kernel, stride_in, stride_out = (int(number) for number in numbers)
    if role not in ROLES or min(n_in, n_out, kernel) < 1 or min(stride_in, stride_out) < 0 or max(
            n_in, n_out, kernel, stride_in, stride_out) > _MOST_CHANNELS:
        raise ValueError(f"operator {text[:80]!r}")
    return block, role, n_in, n_out, kernel, stride_in, stride_out


def blocks_of_operators(operators: Sequence[tuple[str, str, int, int, int, int, int]], px: int, classes: int
                        ) -> Iterator[BlockSpec]:
    """What a runtime executes on images of `px` pixels: a block for the operators of each one, or for one in none."""
    for (name, _), each in groupby(enumerate(operators), key=_unit):
        listed = tuple((role, n_in, n_out, kernel, _side(px, stride_in), _side(px, stride_out))
                       for _, (_, role, n_in, n_out, kernel, stride_in, stride_out) in each)
        (_, first, _, _, size, _), (_, _, last, _, _, out) = listed[0], listed[-1]
        yield BlockSpec("traced", first, last, size, 0, max(1, round(size / out)), skip=bool(name) and (
            first, size) == (last, out), classes=classes if listed[-1][0] == "linear" else 0, operators=listed)


def _unit(placed: tuple[int, Any]) -> tuple[str, int]:
    """What operators of one block have in common: its name; one that is in no block is alone, by its place."""
    place, operator = placed
    block = operator.block if isinstance(operator, TracedOperator) else operator[0]
    return (block, 0) if block else ("", place)


def _side(px: int, stride: int) -> int:
    return -(-px // stride) if stride else 1


def read_family(file: SpaceFile, image_size: int | None = None) -> Family:
    """The family that a space's YAML describes, checked; `image_size` replaces the file's. SpaceError names the key."""
    top = file.section((), file.data, KEYS)
    for key in ("around", "groups", "operators", "shares"):
        if key not in top:
            file.fail((), f"lacks the key {key!r}")
    sizes = file.choices(("image_size",), image_size or top.get("image_size"), SIZE_RULE)
    try:
        groups = tuple(Group(str(name), int(channels), str(tie)) for name, (channels, tie) in top["groups"].items())
        family = Family(
            str(top["around"]), tuple(sorted(sizes, reverse=True)),
            tuple(Run(str(name), tuple(map(str, blocks))) for name, blocks in top.get("runs", {}).items()), groups,
            {str(tie): tuple(float(share) for share in shares) for tie, shares in top["shares"].items()},
            tuple(map(_read_traced, top["operators"])))
    except (TypeError, ValueError, AttributeError) as error:
        file.fail((), f"is no family of networks ({type(error).__name__}: {str(error)[:120]})")
    names = {group.name for group in groups}
    for problem, wrong in (
            ("around must be the name of a timm network", not AROUND.fullmatch(family.around)),
            ("operators read or write groups that are not among the groups", not names >= {
                name for each in family.operators for name, _ in each.reads + each.writes if name}),
            ("groups are tied to what has no shares", not set(family.shares) >= {group.tie for group in groups}),
            ("shares lie above 0, up to 1, and begin with 1", any(
                shares[:1] != (1.0,) or not 0 < min(shares) <= max(shares) <= 1 for shares in family.shares.values())),
            ("channels must be above 0", any(group.channels < 1 for group in groups)),
            ("operators, runs or groups are missing, or too many", not 0 < len(family.operators) <= _MOST)):
        if wrong:
            file.fail((), problem)
    return family.in_order()


def write_family(family: Family, known: Mapping[str, Mapping[str, Any]], description: str) -> dict[str, Any]:
    """The content of a space's YAML; inverse of `read_family`. `known`: what networks by name keep."""
    return {"description": description, "around": family.around, "image_size": list(family.image_sizes),
            "runs": {run.name: list(run.blocks) for run in family.runs},
            "groups": {group.name: [group.channels, group.tie] for group in family.groups},
            "shares": {tie: list(shares) for tie, shares in family.shares.items()},
            "operators": list(map(str, family.operators)), "known": {name: dict(kept) for name, kept in known.items()}}


def read_known(file: SpaceFile, family: Family) -> dict[str, list[int]]:
    """Codes, in the order of the parameters, of the networks under `known`; what is not said is the whole one's."""
    known, networks = {}, file.data.get("known", {})
    if not isinstance(networks, dict):
        file.fail(("known",), f"must be a mapping of names to networks, got {networks!r}")
    for name, raw in networks.items():
        given = file.section(("known", name), raw, tuple(field for field, _ in family.fields()))
        for field, choices in family.fields():
            if given.get(field, choices[0]) not in choices:
                file.fail(("known", name, field), f"must be one of {', '.join(map(str, choices))}")
        known[name] = [choices.index(given.get(field, choices[0])) for field, choices in family.fields()]
    return known


def _read_traced(text: str) -> TracedOperator:
    """Inverse of `str` of a traced operator."""
    block, role, reads, writes, *numbers = str(text).split(" ")
    kernel, stride_in, stride_out = (int(number) for number in numbers)
    if role not in ROLES or kernel < 1 or min(stride_in, stride_out) < 0:
        raise ValueError(f"operator {text[:80]!r}")
    return TracedOperator("" if block == "-" else block, role, _read_side(reads), _read_side(writes), kernel,
                          stride_in, stride_out)


def _read_side(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (part.rpartition("*") for part in text.split("+"))
    side = tuple((name, int(n)) for name, _, n in pairs)
    if min(n for _, n in side) < 1:
        raise ValueError(f"channels {text[:80]!r}")
    return side


class FamilyCoding:
    """The tables behind the codes of a family: a column for each parameter, all of them active."""

    def __init__(self, family: Family, channels: int, classes: int) -> None:
        self.family, self.channels_in, self.classes = family, channels, classes
        self._fields = family.fields()
        self._column = {name: index for index, (name, _) in enumerate(self._fields)}
        self._run_of = {block: run.name for run in family.runs for block in run.blocks}
        self._tie_of = {group.name: WIDTH + group.tie for group in family.groups}

    @cached_property
    def _units(self) -> list[tuple[tuple[TracedOperator, ...], list[int]]]:
        """Operators between which nothing is chosen but what their columns say: those of a run, and those between."""
        blocks = [tuple(each) for _, each in groupby(enumerate(self.family.operators), key=_unit)]
        listed = []
        for block in blocks:
            operators = tuple(operator for _, operator in block)
            names = {"image_size", *(self._run_of[each.block] for each in operators if each.block in self._run_of),
                     *(self._tie_of[name] for each in operators for name, _ in each.reads + each.writes if name)}
            listed.append((sorted(self._column[name] for name in names), operators))
        return [(tuple(operator for _, operators in each for operator in operators), columns)
                for columns, each in groupby(listed, key=lambda pair: pair[0])]

    @cached_property
    def _radices(self) -> list[list[int]]:
        return [[len(self._fields[column][1]) for column in columns] for _, columns in self._units]

    @cached_property
    def offsets(self) -> Codes:
        """First segment id of each unit."""
        return np.concatenate([[0], np.cumsum([prod(radix) for radix in self._radices])]).astype(np.int64)

    @property
    def n_segments(self) -> int:
        """Segment ids are 0 .. n_segments - 1."""
        return int(self.offsets[-1])

    @property
    def n_networks(self) -> int:
        """Different networks."""
        return prod(len(choices) for _, choices in self._fields)

    def canonical(self, full: Codes) -> Codes:
        """The codes themselves: each choice changes the network."""
        return full

    def architecture(self, full: Codes) -> Member:
        """The network of one row."""
        chosen = {name: choices[int(code)] for (name, choices), code in zip(self._fields, full, strict=True)}
        px = int(chosen.pop("image_size"))
        return Member(stages=(), stem_width=0, stem_stride=1, head=0, activation="relu", image_size=px,
                      channels=self.channels_in, classes=self.classes, around=self.family.around,
                      chosen=tuple(chosen.items()), operators=tuple(self.family.cut(self.family.operators, chosen)))

    def match(self, architecture: Architecture) -> Codes:
        """Codes [fields] of a network; SpaceError where it is not of this family."""
        if not isinstance(architecture, Member) or architecture.around != self.family.around:
            raise SpaceError(f"architecture {architecture.id} is not cut out of {self.family.around}.")
        chosen = {"image_size": architecture.image_size, **dict(architecture.chosen)}
        for name, choices in self._fields:
            if chosen.get(name) not in choices:
                raise SpaceError(f"architecture {architecture.id} is not of this space: {name} is {chosen.get(name)}, "
                                 f"not {' or '.join(map(str, choices))}.")
        return np.array([choices.index(chosen[name]) for name, choices in self._fields], dtype=np.int64)

    def segments(self, full: Codes) -> Codes:
        """Segment ids [n, units]."""
        return np.stack([self.offsets[unit] + np.ravel_multi_index(tuple(full[:, columns].T), radix)
                         for unit, ((_, columns), radix) in enumerate(zip(self._units, self._radices, strict=True))],
                        axis=1)

    def segment_blocks(self, segment: int) -> tuple[BlockSpec, ...]:
        """The blocks of one segment id; IndexError outside 0 .. n_segments - 1."""
        if not 0 <= segment < self.n_segments:
            raise IndexError(f"segment {segment} is not in 0 .. {self.n_segments - 1}")
        unit = int(np.searchsorted(self.offsets, segment, side="right")) - 1
        operators, columns = self._units[unit]
        digits = np.unravel_index(segment - int(self.offsets[unit]), self._radices[unit])
        chosen = {self._fields[column][0]: self._fields[column][1][int(digit)]
                  for column, digit in zip(columns, digits, strict=True)}
        return tuple(blocks_of_operators([*self.family.cut(operators, chosen)], int(chosen["image_size"]),
                                         self.classes))
