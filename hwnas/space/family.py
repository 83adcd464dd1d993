"""A family: the networks that can be cut out of any one, by what was seen when that one ran once.

A network that `hwnas.networks.tracing` has run is a list of operators. Each is in a stage and a block or in none, reads
and writes channels of groups, and has maps of a share of the image's side. Channels of a group stand and fall together,
as those that a residual adds. So numbers say what a member of the family keeps: of stages, of the blocks that may go in
each run of alike ones, and of their channels the share of the groups. Groups that are tied keep one share: the streams
between blocks, and the insides of blocks, each at one size of maps. All else follows, without the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NoReturn

from hwnas.errors import SpaceError
from hwnas.space.architecture import AROUND, CUT, DOCUMENT, FORMS, KEPT
from hwnas.space.architecture import Architecture as Architecture
from hwnas.space.blocks.block import ACTIVATIONS, ATTENTION, BlockSpec, round_to_divisor
from hwnas.space.reading import SIZE_RULE, SpaceFile

DIVISOR = 8  # channels of a group that is cut: what kernels of the targets are made for
ROLES = ("stem", "dense", "pointwise", "depthwise", "se", "linear", ATTENTION)
WHOLE = "whole"  # name of the known network that the others of a family are cut from
WIDTH = "width."  # opens the name of a tie's share, in what a network keeps; a run's is its own
DEPTH = "depth"  # name of the number of stages that stay
IMAGE_SIZE = "image_size"
KEYS = ("description", "around", "activation", IMAGE_SIZE, DEPTH, "runs", "groups", "shares", "operators", "known")
_MOST = 10_000  # operators, runs or groups of a family
_MOST_CHANNELS = 1 << 20


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """Channels that are cut together: how many the whole network has, and the `tie` whose share they keep."""

    name: str
    channels: int
    tie: str

    def kept(self, share: float) -> int:
        """Return the number of channels that stay with a share of the tie: a multiple of DIVISOR, or all if fewer."""
        return min(self.channels, round_to_divisor(self.channels * share, DIVISOR))


@dataclass(frozen=True, slots=True)
class TracedOperator:
    """A convolution or matrix product of the whole network.

    Attributes:
        stage: The stage that it is in, from 1 on; 0: before all stages; one more than there are: behind them.
        block: The block that it is in; empty: none that may go.
        role: One of ROLES; "se" is squeeze-and-excite, "attention" the products of queries, keys and values.
        reads: Groups that it reads, with their channels there; "" names channels that never change.
        writes: The same that it writes.
        kernel: Side of its kernel.
        stride_in: Side of the image over that of the map that it reads; 0: a map of one pixel.
        stride_out: The same that it writes.
    """

    stage: int
    block: str
    role: str
    reads: tuple[tuple[str, int], ...]
    writes: tuple[tuple[str, int], ...]
    kernel: int
    stride_in: int
    stride_out: int

    def __str__(self) -> str:
        sides = ("+".join(f"{name}*{n}" if name else str(n) for name, n in side) for side in (self.reads, self.writes))
        return " ".join([str(self.stage), self.block or "-", self.role, *sides,
                         *map(str, (self.kernel, self.stride_in, self.stride_out))])


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Alike blocks one behind the other, of which the last ones may go: `blocks` names those that may, in order."""

    name: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """A network as it was traced, and what of it may be cut.

    Attributes:
        around: The network, as `Architecture.around` names it.
        activation: That of its blocks.
        image_sizes: Sides of images that its members take, largest first.
        depths: Numbers of stages that may stay, all of them first; empty: none may go.
        runs: Runs of blocks.
        groups: Groups of channels.
        shares: Of each tie, the shares that its groups may keep, the whole one first.
        operators: In the order in which they run.
    """

    around: str
    activation: str
    image_sizes: tuple[int, ...]
    depths: tuple[int, ...]
    runs: tuple[BlockRun, ...]
    groups: tuple[ChannelGroup, ...]
    shares: Mapping[str, tuple[float, ...]]
    operators: tuple[TracedOperator, ...]

    def choices(self) -> dict[str, tuple[float, ...]]:
        """Return what may be kept of all that may be cut, by name, the whole first."""
        return {**({DEPTH: self.depths} if self.depths else {}),
                **{run.name: tuple(range(len(run.blocks), -1, -1)) for run in self.runs},
                **{WIDTH + tie: shares for tie, shares in self.shares.items()}}

    def member(self, kept: Mapping[str, float], channels: int, classes: int) -> Member:
        """Return the network of which so much is `kept`, by the names of `choices` and IMAGE_SIZE; of all else, the
        whole. A part that changes nothing, as the blocks of a stage that is gone, is the least: so that a network is
        said in one way."""
        chosen = {name: of[of.index(kept.get(name, of[0]))] for name, of in self.choices().items()}
        operators = tuple(self.cut(chosen))
        for name, of in self.choices().items():
            if tuple(self.cut(least := {**chosen, name: of[-1]})) == operators:
                chosen = least
        return Member(stages=(), stem_width=0, stem_stride=1, head=0, activation=self.activation,
                      image_size=int(kept.get(IMAGE_SIZE, self.image_sizes[0])), channels=channels, classes=classes,
                      around=self.around, chosen=tuple(chosen.items()), operators=operators)

    def channels(self, chosen: Mapping[str, Any]) -> dict[str, int]:
        """Channels that each group keeps, for the groups whose shares are chosen."""
        return {group.name: group.kept(chosen[name]) for group in self.groups
                if (name := WIDTH + group.tie) in chosen}

    def blocks_left_out(self, chosen: Mapping[str, Any]) -> set[str]:
        """The blocks that go, of the runs whose depths are chosen."""
        return {block for run in self.runs if run.name in chosen for block in run.blocks[int(chosen[run.name]):]}

    @cached_property
    def n_stages(self) -> int:
        """Stages of the whole network."""
        return max(self.operators[-1].stage - 1, 0)

    @cached_property
    def readers(self) -> dict[int, TracedOperator]:
        """The first operator of each stage: it reads what the stage before it writes."""
        return {each.stage: each for each in reversed(self.operators)}

    def stride_of(self, stage: int) -> int:
        """Side of the image over that of the map that a stage writes, if it is not the last one."""
        return self.readers[stage + 1].stride_in

    @cached_property
    def outputs(self) -> dict[str, tuple[BlockRun, tuple[str, ...]]]:
        """Of each group that a block of a run writes, where no path leads around that block: the run, and the groups
        that are written by what stands before its blocks and by each of these. Without the block its readers read what
        the last one that is left writes."""
        last = {each.block: each for each in self.operators}
        before = {each.block: earlier for earlier, each in reversed([*pairwise(self.operators)])}  # of its first one
        groups = dict[str, tuple[BlockRun, tuple[str, ...]]]()
        for run in self.runs:
            if not run.blocks or run.blocks[0] not in before or not last.keys() >= {*run.blocks}:
                continue
            written = [each.writes[0][0] for each in (before[run.blocks[0]], *(last[block] for block in run.blocks))]
            if len({*written}) > 1 and all(written):
                groups |= {name: (run, tuple(written)) for name in written[1:]}
        return groups

    def _left(self, side: Sequence[tuple[str, int]], chosen: Mapping[str, Any]) -> Sequence[tuple[str, int]]:
        """A side of an operator, with the groups that are there once blocks have gone."""
        named = []
        for name, n in side:
            run, written = self.outputs.get(name, (None, ()))
            kept = int(chosen.get(run.name, len(run.blocks))) if run else 0
            named.append((written[kept] if run and written.index(name) > kept else name, n))
        return named

    def cut(self, chosen: Mapping[str, Any]) -> Iterator[tuple[str, str, int, int, int, int, int]]:
        """Yield what is left of the operators, as a `Member` lists them."""
        whole = {group.name: group.channels for group in self.groups}
        kept, gone = self.channels(chosen), self.blocks_left_out(chosen)
        depth = int(chosen.get(DEPTH, self.n_stages))
        for each in self.operators:
            if each.block in gone or depth < each.stage <= self.n_stages:
                continue
            reads, strides = each.reads, [each.stride_in, each.stride_out]
            if each.stage > self.n_stages > depth:  # behind the stages, it reads what the last one that is left writes
                last, left = self.readers[each.stage], self.readers[depth + 1]
                reads = left.reads if reads == last.reads else reads
                if last.stride_in:  # maps that the stages before made stay as they are
                    strides = [stride * left.stride_in // last.stride_in if stride >= last.stride_in else stride
                               for stride in strides]
            n_in, n_out = (sum(n * kept[name] // whole[name] if name else n for name, n in self._left(side, chosen))
                           for side in (reads, each.writes))
            yield each.block, each.role, n_in, n_out, each.kernel, strides[0], strides[1]


@dataclass(frozen=True, slots=True)
class Member(Architecture):
    """A network of a family, as data.

    Attributes:
        chosen: The part that it keeps of all that may be cut in its family, by name.
        operators: Those that it runs: (block, role, in, out, kernel, stride in, stride out), in order; strides as in
            `TracedOperator`.
    """

    chosen: tuple[tuple[str, float], ...] = ()
    operators: tuple[tuple[str, str, int, int, int, int, int], ...] = ()

    def block_defs(self) -> NoReturn:
        """None: it is not made of words."""
        raise SpaceError(f"{self.around} is cut by what it runs, and has no arch-def words.")

    def staged_blocks(self) -> tuple[tuple[BlockSpec, ...], ...]:
        """Its blocks, each alone."""
        return tuple((block,) for block in blocks_of_operators(self.operators, self.image_size, self.classes,
                                                               self.activation))

    @property
    def total_stride(self) -> int:
        """Side of the image over that of the last map before the pooling."""
        return max(stride_out for *_, stride_out in self.operators)

    def __str__(self) -> str:
        chosen = ",".join(f"{name}={value:g}" for name, value in self.chosen)
        operators = ",".join("/".join(map(str, operator)) for operator in self.operators)
        return f"{CUT}{self.around}@{self.image_size} {self.activation} {chosen} {operators}"

    @classmethod
    def parse(cls, text: str, channels: int, classes: int) -> Member:
        """Inverse of `str`; SpaceError for another text."""
        words = text.removeprefix(CUT).split()
        if len(words) != 4 or words[0].count("@") != 1:
            raise SpaceError(f"architecture {text[:100]!r}: a network that is cut out of another is {CUT}NAME@SIZE, "
                             "then its activation, what is kept of it and what it runs.")
        around, _, size = words[0].partition("@")
        kept = {name: value for name, _, value in (pair.partition("=") for pair in words[2].split(","))}
        return cls.from_dict({**DOCUMENT.header, "around": around, "activation": words[1], "kept": kept,
                              "operators": words[3].split(","),
                              "input": {"size": size, "channels": channels}, "classes": classes})

    def to_dict(self) -> dict[str, Any]:
        """The content of `architecture.yaml`."""
        return {**DOCUMENT.header, "around": self.around, "activation": self.activation, "kept": dict(self.chosen),
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
            if not 0 < min(values) <= max(values) <= _MOST_CHANNELS:
                raise ValueError("input or classes")
            operators = tuple(_operator(str(text)) for text in data["operators"])
            if not any(stride_out for *_, stride_out in operators):
                raise ValueError("operators: none has a map")
            if data["activation"] not in ACTIVATIONS:
                raise ValueError("activation")
            return cls(stages=(), stem_width=0, stem_stride=1, head=0, activation=data["activation"],
                       image_size=values[0], channels=values[1], classes=values[2], around=around,
                       chosen=tuple((str(name), _kept(str(name), value)) for name, value in kept.items()),
                       operators=operators)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
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


def blocks_of_operators(operators: Sequence[tuple[str, str, int, int, int, int, int]], px: int, classes: int,
                        activation: str) -> Iterator[BlockSpec]:
    """Yield what a runtime executes on images of `px` pixels: a block for the operators of each, or for one in none."""
    for name, each in groupby(enumerate(operators), key=lambda placed: placed[1][0] or placed[0]):
        listed = tuple((role, n_in, n_out, kernel, _side(px, stride_in), _side(px, stride_out))
                       for _, (_, role, n_in, n_out, kernel, stride_in, stride_out) in each)
        (_, first, _, _, size, _), (_, _, last, _, _, out) = listed[0], listed[-1]
        yield BlockSpec("traced", first, last, size, 0, max(1, round(size / out)), skip=isinstance(name, str) and (
            first, size) == (last, out), activation=activation, classes=classes if listed[-1][0] == "linear" else 0,
            operators=listed)


def _side(px: int, stride: int) -> int:
    return -(-px // stride) if stride else 1


def read_family(file: SpaceFile, image_size: int | None = None) -> Family:
    """The family that a space's YAML describes, checked; `image_size` replaces the file's. SpaceError names the key."""
    top = file.section((), file.data, KEYS)
    for key in ("around", "groups", "operators", "shares"):
        if key not in top:
            file.fail((), f"lacks the key {key!r}")
    sizes = file.choices((IMAGE_SIZE,), image_size or top.get(IMAGE_SIZE), SIZE_RULE)
    try:
        groups = tuple(ChannelGroup(str(name), int(channels), str(tie))
                       for name, (channels, tie) in top["groups"].items())
        family = Family(
            str(top["around"]), str(top.get("activation", "relu")), tuple(sorted(sizes, reverse=True)),
            tuple(map(int, top.get(DEPTH, ()))),
            tuple(BlockRun(str(name), tuple(map(str, blocks))) for name, blocks in top.get("runs", {}).items()), groups,
            {str(tie): tuple(float(share) for share in shares) for tie, shares in top["shares"].items()},
            tuple(map(_read_traced, top["operators"])))
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        file.fail((), f"is no family of networks ({type(error).__name__}: {str(error)[:120]})")
    if not 0 < len(family.operators) <= _MOST:
        file.fail(("operators",), f"must be 1 to {_MOST}")
    names = {group.name for group in groups}
    for problem, wrong in (
            ("around must be the name of a timm network", not AROUND.fullmatch(family.around)),
            (f"activation must be one of {', '.join(ACTIVATIONS)}", family.activation not in ACTIVATIONS),
            (f"{DEPTH} needs different whole numbers, the largest first",
             list(family.depths) != sorted({*family.depths}, reverse=True)),
            ("stages of operators must begin with 0 or 1 and never fall", [each.stage for each in family.operators]
             != sorted(each.stage for each in family.operators) or family.operators[0].stage not in (0, 1)),
            (f"{DEPTH} must begin with all stages and leave one or more, each with operators", bool(family.depths)
             and (family.depths[0] != family.n_stages or family.depths[-1] < 1
                  or {each.stage for each in family.operators} | {0} != {*range(family.n_stages + 2)})),
            ("operators read or write groups that are not among the groups", not names >= {
                name for each in family.operators for name, _ in each.reads + each.writes if name}),
            ("groups are tied to what has no shares", not set(family.shares) >= {group.tie for group in groups}),
            ("shares lie above 0, up to 1, and begin with 1", any(
                shares[:1] != (1.0,) or not all(0 < share <= 1 for share in shares)  # as nan is not
                for shares in family.shares.values())),
            ("channels must be above 0", any(group.channels < 1 for group in groups))):
        if wrong:
            file.fail((), problem)
    return family


def write_family(family: Family, known: Mapping[str, Mapping[str, Any]], description: str) -> dict[str, Any]:
    """The content of a space's YAML; inverse of `read_family`. `known`: what networks by name keep."""
    return {"description": description, "around": family.around, "activation": family.activation,
            IMAGE_SIZE: list(family.image_sizes), **({DEPTH: list(family.depths)} if family.depths else {}),
            "runs": {run.name: list(run.blocks) for run in family.runs},
            "groups": {group.name: [group.channels, group.tie] for group in family.groups},
            "shares": {tie: list(shares) for tie, shares in family.shares.items()},
            "operators": list(map(str, family.operators)), "known": {name: dict(kept) for name, kept in known.items()}}


def read_known(file: SpaceFile, family: Family) -> dict[str, dict[str, Any]]:
    """Return the parts that the networks under `known` keep, by name, checked. If there are none, it is the whole."""
    choices = {IMAGE_SIZE: family.image_sizes, **family.choices()}
    known = dict(file.known(tuple(choices)))
    for name, kept in known.items():
        for part, value in kept.items():
            if value not in choices[part]:
                file.fail(("known", name, part), f"must be one of {', '.join(map(str, choices[part]))}")
    return known or {WHOLE: {}}


def _read_traced(text: str) -> TracedOperator:
    """Inverse of `str` of a traced operator."""
    stage, block, role, reads, writes, *numbers = str(text).split(" ")
    kernel, stride_in, stride_out = (int(number) for number in numbers)
    if role not in ROLES or kernel < 1 or min(stride_in, stride_out, int(stage)) < 0 or int(stage) > _MOST:
        raise ValueError(f"operator {text[:80]!r}")
    return TracedOperator(int(stage), "" if block == "-" else block, role, _read_side(reads), _read_side(writes),
                          kernel, stride_in, stride_out)


def _read_side(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (part.rpartition("*") for part in text.split("+"))
    side = tuple((name, int(n)) for name, _, n in pairs)
    if min(n for _, n in side) < 1:
        raise ValueError(f"channels {text[:80]!r}")
    return side
