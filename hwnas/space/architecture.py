"""Architectures: a network as data, in timm's arch-def words or as a cut of another network."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any

from hwnas.errors import SpaceError
from hwnas.lazy import yaml
from hwnas.space.blocks.block import ACTIVATIONS, ATTENTION, KINDS, BlockKind, BlockSpec
from hwnas.system.documents import Document, load_yaml

DOCUMENT = Document("hwnas-architecture", 1, "an architecture", "Give an architecture.yaml.", SpaceError)
_WORDS = {  # of an architecture's text, by index: the form as an error message has it, and the pattern
    0: ("stem<width>s<stride>", re.compile(r"stem(?P<width>[0-9]{1,7})s(?P<stride>[0-9])")),
    -2: ("head<width>", re.compile(r"head(?P<head>[0-9]{1,7})")),
    -1: ("<activation>@<image size>", re.compile(r"(?P<activation>\w+)@(?P<size>[0-9]{1,7})"))}
AROUND = re.compile(r"[a-z][a-z0-9_]{0,80}(?:\+same)?")  # `Architecture.around`
CUT, KEPT = "cut:", "kept"  # a cut's text starts with the first; its document has the second as a key
WIDTH = "width."  # in what a cut keeps, names that start so are shares of channels; others count blocks or stages
ROLES = ("stem", "dense", "pointwise", "depthwise", "se", "linear", ATTENTION)
_MOST, _MOST_CHANNELS = 10_000, 1 << 20  # of a cut: operators; channels, pixels or strides
_TOKEN = re.compile(r"(?P<skip>skip|noskip)|(?P<key>se|[rksec])(?P<value>\d+(?:\.\d+)?)")


def origin_name(around: str) -> str:
    """Return timm's name of the network that `Architecture.around` names; empty for none."""
    return around.partition("+")[0]


@dataclass(frozen=True, slots=True)
class BlockDef:
    """One arch-def string, parsed: `repeats` blocks of one kind, the first with `stride`."""

    kind: str
    repeats: int
    kernel: int
    stride: int
    expansion: float
    channels: int
    se: float
    skip: bool

    @staticmethod
    @lru_cache(maxsize=100_000)
    def parse(text: str) -> BlockDef:
        """Read e.g. `ir_r2_k5_s2_e3_c40_se0.25_noskip`. Raises SpaceError, which names the string and the rule."""
        kind, *tokens = str(text).split("_")
        if kind not in KINDS or not KINDS[kind].words:
            kinds = ", ".join(name for name, rules in KINDS.items() if rules.words)
            raise SpaceError(f"block {text!r}: kind must be one of {kinds}, got {kind!r}.")
        fields: dict[str, float] = {}
        skip = KINDS[kind].adds_input
        for token in tokens:
            match = _TOKEN.fullmatch(token)
            if match is None:
                raise SpaceError(f"block {text!r}: cannot read {token!r}.")
            if match["skip"]:
                skip = match["skip"] == "skip"
            elif match["key"] in fields:
                raise SpaceError(f"block {text!r}: {match['key']!r} is given twice.")
            else:
                fields[match["key"]] = float(match["value"])
        return BlockDef._from_fields(str(text), kind, fields, skip)

    @classmethod
    def _from_fields(cls, text: str, kind: str, fields: Mapping[str, float], skip: bool) -> BlockDef:
        def whole(key: str, default: int | None, low: int, high: int) -> int:
            value = fields.get(key, default)
            if value is None or not low <= value <= high or value != int(value):
                raise SpaceError(f"block {text!r}: {key} must be a whole number from {low} to {high}, got {value}.")
            return int(value)

        # An expansion, kernel or squeeze-and-excite that the kind does not have is ignored.
        rules = KINDS[kind]
        expansion = fields.get("e", 1.0) if rules.expands else 1.0
        se = fields.get("se", 0.0) if rules.takes_se else 0.0
        kernel = whole("k", None, 1, 11) if rules.takes_kernel else 1
        if kernel % 2 == 0:
            raise SpaceError(f"block {text!r}: k must be odd, got {kernel}.")
        if not 1 <= expansion <= 16:
            raise SpaceError(f"block {text!r}: e must be between 1 and 16, got {expansion:g}.")
        if not 0 <= se <= 1:
            raise SpaceError(f"block {text!r}: se must be between 0 and 1, got {se:g}.")
        return cls(kind, whole("r", 1, 1, 64), kernel, whole("s", 1, 1, 2), expansion,
                   whole("c", None, 1, 16384), se, skip)

    @property
    def rules(self) -> BlockKind:
        """The rules of its kind."""
        return KINDS[self.kind]

    def __str__(self) -> str:
        parts = [self.kind, f"r{self.repeats}", f"k{self.kernel}", f"s{self.stride}"]
        if self.rules.expands:
            parts.append(f"e{self.expansion:g}")
        parts.append(f"c{self.channels}")
        if self.se:
            parts.append(f"se{self.se:g}")
        if self.skip != self.rules.adds_input and not self.rules.vanishes:
            parts.append("skip" if self.skip else "noskip")
        return "_".join(parts)

    def blocks(self, in_channels: int, size: int, activation: str) -> Iterator[BlockSpec]:
        """Yield the blocks of this string for an input map. An identity that changes nothing is no block."""
        for index in range(self.repeats):
            stride = self.stride if index == 0 else 1
            same = stride == 1 and in_channels == self.channels
            if not (self.rules.vanishes and same):
                block = BlockSpec(self.kind, in_channels, self.channels, size, self.kernel, stride, self.expansion,
                                  self.se, self.skip and same, activation)
                yield block
                in_channels, size = self.channels, block.out_size


def blocks_of(stage: Iterable[BlockDef], channels: int, size: int, activation: str) -> tuple[BlockSpec, ...]:
    """Return the blocks of a stage for its input map."""
    blocks: list[BlockSpec] = []
    for block_def in stage:
        blocks += block_def.blocks(channels, size, activation)
        if blocks:
            channels, size = blocks[-1].out_channels, blocks[-1].out_size
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network as data: stem, stages of arch-def strings, head, activation, input.

    `head` is the width of the last 1x1 convolution (0: none). Two architectures are the same network if their
    `blocks()` are equal. Search spaces return canonical strings, for which `==` is the same test.

    `around` is the timm network that a `Cut` is cut from, empty for others. A `+same` after the name means padding as
    in TensorFlow, for weights that need it on a network that timm pads otherwise.
    """

    stages: tuple[tuple[str, ...], ...]
    stem_width: int
    stem_stride: int
    head: int
    activation: str
    image_size: int
    channels: int
    classes: int
    around: str = ""

    def block_defs(self) -> tuple[tuple[BlockDef, ...], ...]:
        """Return the parsed strings of each stage."""
        return tuple(tuple(BlockDef.parse(str(text)) for text in stage) for stage in self.stages)

    def blocks(self) -> tuple[BlockSpec, ...]:
        """Return all blocks in the order in which a runtime executes them: stem, blocks of the stages, head."""
        return tuple(block for stage in self.staged_blocks() for block in stage)

    def staged_blocks(self) -> tuple[tuple[BlockSpec, ...], ...]:
        """Return `blocks()` in groups: (stem,), a tuple for each stage, (head,)."""
        stem = BlockSpec("stem", self.channels, self.stem_width, self.image_size, 3, self.stem_stride,
                         activation=self.activation)
        groups: list[tuple[BlockSpec, ...]] = [(stem,)]
        channels, size = stem.out_channels, stem.out_size
        for stage in self.block_defs():
            blocks = blocks_of(stage, channels, size, self.activation)
            if blocks:
                channels, size = blocks[-1].out_channels, blocks[-1].out_size
            groups.append(blocks)
        width = self.head or channels
        groups.append((BlockSpec("head", channels, width, size, 1 if self.head else 0,
                                 activation=self.activation, classes=self.classes),))
        return tuple(groups)

    @property
    def total_stride(self) -> int:
        """The side of the image divided by the side of the last map before the pooling."""
        return self.stem_stride * prod(stage[0].stride for stage in self.block_defs())

    # Cached, as `macs` is: a race asks for both of the same few networks at every step.
    @property
    @lru_cache(maxsize=10_000)  # noqa: B019  a network is a small value
    def id(self) -> str:
        """Eight hexadecimal digits that name the network: a hash of its blocks."""
        text = "|".join([*(block.key for block in self.blocks()), *filter(None, [self.around])])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    @lru_cache(maxsize=10_000)  # noqa: B019
    def macs(self) -> int:
        """The multiply-accumulates of one image."""
        return sum(block.macs for block in self.blocks())

    @property
    def params(self) -> int:
        """The number of trainable parameters."""
        return sum(block.params for block in self.blocks())

    def __str__(self) -> str:
        stages = " ".join("+".join(stage) for stage in self.stages)
        return (f"stem{self.stem_width}s{self.stem_stride} {stages} head{self.head} "
                f"{self.activation}@{self.image_size}")

    @classmethod
    def parse(cls, text: str, channels: int, classes: int) -> Architecture:
        """Read the text of `str`, which lacks `channels` and `classes`. Raises SpaceError: it names the wrong word."""
        if text.startswith(CUT):
            return Cut.parse(text, channels, classes)
        words = text.split()
        if len(words) < 4:
            raise SpaceError(f"architecture {text[:200]!r}: {len(words)} words; it must have a stem, a word for each "
                             "stage, a head and the input, such as stem16s1 ds_r1_k3_s1_c16 head64 relu@32.")
        values: dict[str, str] = {}
        for at, (form, pattern) in _WORDS.items():
            match = pattern.fullmatch(words[at])
            if match is None:
                raise SpaceError(f"architecture: word {1 + at % len(words)}, {words[at][:100]!r}, must be {form}.")
            values |= match.groupdict()
        return cls.from_dict({
            **DOCUMENT.header, "stem": {"width": int(values["width"]), "stride": int(values["stride"])},
            "stages": [word.split("+") for word in words[1:-2]], "head": int(values["head"]),
            "activation": values["activation"], "input": {"size": int(values["size"]), "channels": channels},
            "classes": classes})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `architecture.yaml`."""
        return {
            **DOCUMENT.header,
            "stem": {"width": self.stem_width, "stride": self.stem_stride},
            "stages": [list(stage) for stage in self.stages],
            "head": self.head,
            "activation": self.activation,
            "input": {"size": self.image_size, "channels": self.channels},
            "classes": self.classes,
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "architecture") -> Architecture:
        """Read and check the result of `to_dict`. Raises SpaceError with the place, the key, the rule and the value."""
        data = DOCUMENT.check(data, where)
        if KEPT in data:
            return Cut.from_dict(data, where)

        def whole(section: Any, key: str, low: int, high: int = 1 << 20) -> int:
            value = section.get(key) if isinstance(section, Mapping) else None
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise SpaceError(f"{where}: {key} must be a whole number from {low} to {high}, got {value!r}.")
            return value

        stages = data.get("stages")
        if not isinstance(stages, list) or not all(isinstance(s, list) and s for s in stages) or not stages:
            raise SpaceError(f"{where}: stages must be a list of non-empty lists of arch-def strings.")
        if data.get("activation") not in ACTIVATIONS:
            raise SpaceError(
                f"{where}: activation must be one of {', '.join(ACTIVATIONS)}, got {data.get('activation')!r}.")
        if "around" in data:
            raise SpaceError(f"{where}: a network that is cut out of another says what it keeps: {KEPT} is missing. "
                             "Search it anew.")
        stem, source = data.get("stem"), data.get("input")
        architecture = cls(
            stages=tuple(tuple(str(BlockDef.parse(str(text))) for text in stage) for stage in stages),
            stem_width=whole(stem, "width", 1), stem_stride=whole(stem, "stride", 1, 2), head=whole(data, "head", 0),
            activation=str(data["activation"]), image_size=whole(source, "size", 1),
            channels=whole(source, "channels", 1), classes=whole(data, "classes", 2))
        architecture._check(where)
        return architecture

    def _check(self, where: str) -> None:
        """Raise SpaceError for strings from which timm would build another network than they say."""
        for index, stage in enumerate(self.block_defs()):
            for block in stage[1:]:
                if block.stride != 1:
                    raise SpaceError(f"{where}: stages[{index}]: only the first string of a stage may have stride 2, "
                                     f"got {str(block)!r}.")
        for block_spec in self.blocks():
            if block_spec.se and not block_spec.se_channels:
                raise SpaceError(f"{where}: se{block_spec.se:g} leaves no channel in {block_spec.key}.")

    def to_yaml(self) -> str:
        """Return the text of `architecture.yaml`."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=100)

    @classmethod
    def from_yaml(cls, text: str, where: str = "architecture") -> Architecture:
        """Read the text of `architecture.yaml`. Raises SpaceError for any other text."""
        try:
            data = load_yaml(text)
        except ValueError as error:
            raise SpaceError(f"{where}: not YAML: {error}") from None
        return cls.from_dict(data, where)


Operator = tuple[str, str, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Cut(Architecture):
    """A network that is cut out of another one, as data.

    Attributes:
        chosen: The amount that it keeps of each part that may be cut, by name, see `WIDTH`.
        operators: (block, role, in, out, kernel, stride in, stride out) in the order of execution. A stride is the
            side of the image divided by the side of the map; 0: a map of one pixel. The role "se" is
            squeeze-and-excite, "attention" the products of queries, keys and values.
    """

    chosen: tuple[tuple[str, float], ...] = ()
    operators: tuple[Operator, ...] = ()

    @classmethod
    def of(cls, around: str, activation: str, chosen: Iterable[tuple[str, float]], operators: Iterable[Operator],
           image_size: int, channels: int, classes: int) -> Cut:
        """Return a cut. The fields that only networks of arch-def words use are empty."""
        return cls(stages=(), stem_width=0, stem_stride=1, head=0, activation=activation, image_size=image_size,
                   channels=channels, classes=classes, around=around, chosen=tuple(chosen), operators=tuple(operators))

    def staged_blocks(self) -> tuple[tuple[BlockSpec, ...], ...]:
        """Return groups of one block: a group for each traced block, and for each operator that is in no block."""
        def side(stride: int) -> int:
            return -(-self.image_size // stride) if stride else 1

        blocks = []
        # Operators of one block have its name. An operator that is in none is grouped by its index, and so alone.
        for name, each in groupby(enumerate(self.operators), key=lambda placed: placed[1][0] or placed[0]):
            members = tuple((role, n_in, n_out, kernel, side(stride_in), side(stride_out))
                           for _, (_, role, n_in, n_out, kernel, stride_in, stride_out) in each)
            (_, first, _, _, size, _), (role, _, last, _, _, out) = members[0], members[-1]
            blocks.append(BlockSpec(
                "traced", first, last, size, 0, max(1, round(size / out)), activation=self.activation,
                skip=isinstance(name, str) and (first, size) == (last, out),
                classes=self.classes if role == "linear" else 0, operators=members))
        return tuple((block,) for block in blocks)

    @property
    def total_stride(self) -> int:
        return max(stride_out for *_, stride_out in self.operators)

    def __str__(self) -> str:
        chosen = ",".join(f"{name}={value:g}" for name, value in self.chosen)
        return f"{CUT}{self.around}@{self.image_size} {self.activation} {chosen} {','.join(self._operator_texts())}"

    def _operator_texts(self) -> list[str]:
        return ["/".join(map(str, operator)) for operator in self.operators]

    @classmethod
    def parse(cls, text: str, channels: int, classes: int) -> Cut:
        """Read the text of `str`. Raises SpaceError for another text."""
        words = text.removeprefix(CUT).split()
        if len(words) != 4 or words[0].count("@") != 1:
            raise SpaceError(f"architecture {text[:100]!r}: a network that is cut out of another is {CUT}NAME@SIZE, "
                             "then its activation, what is kept of it and what it runs.")
        around, _, size = words[0].partition("@")
        amounts = {name: value for name, _, value in (pair.partition("=") for pair in words[2].split(","))}
        return cls.from_dict({**DOCUMENT.header, "around": around, "activation": words[1], "kept": amounts,
                              "operators": words[3].split(","),
                              "input": {"size": size, "channels": channels}, "classes": classes})

    def to_dict(self) -> dict[str, Any]:
        return {**DOCUMENT.header, "around": self.around, "activation": self.activation, "kept": dict(self.chosen),
                "operators": self._operator_texts(),
                "input": {"size": self.image_size, "channels": self.channels}, "classes": self.classes}

    @classmethod
    def from_dict(cls, data: Any, where: str = "architecture") -> Cut:
        """Read and check the result of `to_dict`. Raises SpaceError with the place and the fault."""
        data = DOCUMENT.check(data, where)
        try:
            # The limits keep a damaged or foreign file from costing much time or memory.
            around, amounts, source = str(data["around"]), data["kept"], data["input"]
            if not AROUND.fullmatch(around) or not 0 < len(amounts) <= _MOST or len(data["operators"]) > _MOST:
                raise ValueError("around, kept or operators")
            sizes = (int(source["size"]), int(source["channels"]), int(data["classes"]))
            if not 0 < min(sizes) <= max(sizes) <= _MOST_CHANNELS:
                raise ValueError("input or classes")
            operators = [_read_operator(str(text)) for text in data["operators"]]
            if not any(stride_out for *_, stride_out in operators):
                raise ValueError("operators: none has a map")
            if data["activation"] not in ACTIVATIONS:
                raise ValueError("activation")
            chosen = [(str(name), _read_kept(str(name), value)) for name, value in amounts.items()]
            return cls.of(around, data["activation"], chosen, operators, *sizes)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SpaceError(f"{where}: no network that is cut out of another one: {type(error).__name__}: {error}. "
                             "Give an architecture.yaml as a search writes it.") from None


def _read_kept(name: str, value: Any) -> float:
    """Return a share of channels as a float, a number of blocks or stages as an int: a cut has one document only."""
    amount = float(value) if name.startswith(WIDTH) else int(value)
    if not 0 <= amount <= _MOST:
        raise ValueError(f"kept: {name} {value!r}")
    return amount


def _read_operator(text: str) -> Operator:
    block, role, *numbers = text.split("/")
    n_in, n_out, kernel, stride_in, stride_out = (int(number) for number in numbers)
    if role not in ROLES or min(n_in, n_out, kernel) < 1 or min(stride_in, stride_out) < 0 or max(
            n_in, n_out, kernel, stride_in, stride_out) > _MOST_CHANNELS:
        raise ValueError(f"operator {text[:80]!r}")
    return block, role, n_in, n_out, kernel, stride_in, stride_out
