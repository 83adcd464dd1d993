"""Read and check a search space's YAML file. An error names key, rule and value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, TypeAlias

from hwnas.errors import SpaceError, UnknownName
from hwnas.space.blocks.block import ACTIVATIONS, KINDS, BlockKind, round_to_divisor

Path = tuple[str | int, ...]
Value: TypeAlias = str | int | float | bool
GLOBALS = ("image_size", "stem.width", "stem.stride", "activation", "head")
FIELDS = ("op", "kernel", "se", "skip", "channels", "repeats")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a stage; `kernel` is None if it takes the kernel of the stage."""

    text: str = field(compare=False)
    kind: str
    expansion: float
    kernel: int | None

    @property
    def rules(self) -> BlockKind:
        """The rules of its kind."""
        return KINDS[self.kind]


@dataclass(frozen=True, slots=True)
class StageDef:
    """The choices of one stage; every tuple has at least one value, and no value twice."""

    ops: tuple[Op, ...]
    kernels: tuple[int, ...]
    ses: tuple[float, ...]
    skips: tuple[bool, ...]
    channels: tuple[int, ...]
    repeats: tuple[int, ...]
    stride: int


@dataclass(frozen=True, slots=True)
class SpaceDef:
    """The choices of a space."""

    image_sizes: tuple[int, ...]
    stem_widths: tuple[int, ...]
    stem_strides: tuple[int, ...]
    activations: tuple[str, ...]
    heads: tuple[int, ...]
    stages: tuple[StageDef, ...]


def fields(space: SpaceDef) -> list[tuple[str, tuple[Value, ...]]]:
    """Return name and choices of every field: first of the whole network, then of each stage."""
    values: list[tuple[Value, ...]] = [space.image_sizes, space.stem_widths, space.stem_strides, space.activations,
                                       space.heads]
    pairs = list(zip(GLOBALS, values, strict=True))
    for index, stage in enumerate(space.stages):
        values = [tuple(op.text for op in stage.ops), stage.kernels, stage.ses, stage.skips, stage.channels,
                  stage.repeats]
        pairs += [(f"stage{index}.{name}", choices) for name, choices in zip(FIELDS, values, strict=True)]
    return pairs


def without_dead_choices(space: SpaceDef) -> SpaceDef:
    """Return the space with one value, the first, for each field that no network can use: it is then no parameter."""
    stages = []
    before: tuple[int, ...] = space.stem_widths
    for stage in space.stages:
        # Kernels need an operation without its own, and repeats need one that is never nothing. A residual needs a
        # block that keeps the shape: a repeated one, or a first one of equal width and stride 1.
        shapes_meet = stage.stride == 1 and bool({*before} & {*stage.channels})
        repeated = any(not op.rules.vanishes for op in stage.ops)
        stages.append(replace(
            stage,
            kernels=stage.kernels if any(op.kernel is None for op in stage.ops) else stage.kernels[:1],
            ses=stage.ses if any(op.rules.takes_se for op in stage.ops) else stage.ses[:1],
            skips=stage.skips if repeated and (max(stage.repeats) > 1 or shapes_meet) else stage.skips[:1],
            repeats=stage.repeats if repeated else stage.repeats[:1]))
        before = stage.channels
    return replace(space, stages=tuple(stages))


def _check_sizes(file: SpaceFile, space: SpaceDef) -> None:
    """Raise SpaceError if images are too small for the strides, or channels too few for squeeze-and-excite."""
    stride = max(space.stem_strides)
    for stage in space.stages:
        stride *= stage.stride
    if min(space.image_sizes) < stride:
        file.fail(("image_size",), f"{min(space.image_sizes)} is too small for the total stride of {stride}: the "
                                   f"smallest size of this space is {stride} px")
    before = space.stem_widths
    for index, stage in enumerate(space.stages):
        narrowest = min(*before, *stage.channels)
        for se in stage.ses if any(op.rules.takes_se for op in stage.ops) else ():
            if se and 0.9 * se * narrowest < 0.6:
                file.fail(("stages", index, "se"), f"{se:g} leaves no channel of {narrowest}")
        before = stage.channels


class Rule(NamedTuple):
    """A rule for a value: in words, and as a function that returns the value or raises ValueError."""

    text: str
    read: Callable[[Any], Any]


class SpaceFile:
    """The content of one file, and the name of the file in error messages."""

    def __init__(self, where: str, content: Any) -> None:
        if not isinstance(content, dict):
            raise SpaceError(f"{where}: is not a mapping of keys to values; is this a search space?")
        self.where, self.data = where, {str(key): value for key, value in content.items()}

    def fail(self, path: Path, message: str) -> NoReturn:
        """Raise SpaceError with the file, the key at `path` and the message."""
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        raise SpaceError(f"{self.where}: {name or 'the file'} {message}.")

    def section(self, path: Path, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        """Return `value`, checked to be a mapping without other keys than `known`."""
        if not isinstance(value, dict):
            self.fail(path, f"must be a mapping with keys out of {', '.join(known)}, got {value!r}")
        for key in map(str, value):
            if key not in known:
                self.fail((*path, key), f"is an {UnknownName('key', key, known)}".rstrip("."))
        return {str(key): each for key, each in value.items()}

    def known(self, keys: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and settings of each network under `known`. Its keys must be among `keys`."""
        networks = self.data.get("known", {})
        if not isinstance(networks, dict):
            self.fail(("known",), f"must be a mapping of names to networks, got {networks!r}")
        for name, raw in networks.items():
            yield str(name), self.section(("known", str(name)), raw, keys)

    def choices(self, path: Path, value: Any, rule: Rule, most: int = 64) -> tuple[Any, ...]:
        """Return the values of one field: a scalar, or a list of at most `most` different values."""
        items = value if isinstance(value, list) else [value]
        if not items:
            self.fail(path, "is an empty list")
        if len(items) > most:
            self.fail(path, f"takes {f'at most {most} values' if most > 1 else 'one value'}, got {len(items)}")
        values = []
        for item in items:
            try:
                choice = rule.read(item)
            except (ValueError, TypeError):
                self.fail(path, f"{rule.text}, got {item!r}")
            if choice in values:
                self.fail(path, f"lists {item!r} twice")
            values.append(choice)
        return tuple(values)


_KINDS = {word: kind for kind in KINDS.values() for word in kind.words}
_OP = re.compile(r"(?P<kind>[a-z]+)(?:_e(?P<e>\d+(?:\.\d+)?))?(?:_k(?P<k>\d+))?")


def _number(kind: type[int] | type[float], low: float, high: float, odd: bool = False) -> Rule:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value <= high or (
                odd and value % 2 == 0):
            raise ValueError
        return kind(value)

    what = "a number" if kind is float else "an odd number" if odd else "a whole number"
    return Rule(f"must be {what} from {low:g} to {high:g}", read)


def _one_of(text: str, values: tuple[Any, ...]) -> Rule:
    def read(value: Any) -> Any:
        if type(value) is not type(values[0]) or value not in values:
            raise ValueError
        return value

    return Rule(text, read)


def read_op(value: Any) -> Op:
    """Return the operation of a text such as `ir_e3_k5`. Raises ValueError if the text is none."""
    match = _OP.fullmatch(str(value))
    kind = _KINDS.get(match["kind"]) if match else None
    if match is None or kind is None or kind.expands != bool(match["e"]) or (
            match["k"] and not kind.takes_kernel):
        raise ValueError
    expansion, kernel = float(match["e"] or 1), int(match["k"]) if match["k"] else None
    if not 1 <= expansion <= 16 or (kernel is not None and (kernel % 2 == 0 or kernel > 11)):
        raise ValueError
    return Op(str(value), kind.name, expansion, kernel if kind.takes_kernel else 1)


_TOP: dict[str, Rule] = {
    "image_size": _number(int, 1, 4096), "head": _number(int, 0, 16384),
    "activation": _one_of(f"must be one of {', '.join(ACTIVATIONS)}", ACTIVATIONS)}
SIZE_RULE = _TOP["image_size"]
_FREE, _FIXED = ([kind.words[0] + ("_e<expansion>" if kind.expands else "") for kind in KINDS.values()
                  if kind.words and kind.takes_kernel == takes] for takes in (True, False))
_OPS = f"must be {', '.join(_FREE)} (_k<kernel>: a kernel of its own) or {' or '.join(_FIXED)}"
_STEM: dict[str, Rule] = {"width": _number(int, 1, 4096), "stride": _number(int, 1, 2)}
_STAGE: dict[str, Rule] = {
    "op": Rule(_OPS, read_op), "kernel": _number(int, 1, 11, odd=True), "se": _number(float, 0, 1),
    "skip": _one_of("must be true or false", (True, False)), "channels": _number(int, 1, 8192),
    "multipliers": _number(float, 0.05, 8), "repeats": _number(int, 1, 64), "stride": _number(int, 1, 2)}
_STAGE_DEFAULTS: dict[str, Any] = {"kernel": 3, "se": 0, "skip": True, "multipliers": 1, "repeats": 1, "stride": 1}
_TOP_KEYS = ("description", *_TOP, "stem", "defaults", "stages", "known")


def read_space(file: SpaceFile, image_size: int | None = None) -> SpaceDef:
    """Check the whole file and return its choices. `image_size` replaces the file's."""
    top = file.section((), file.data, _TOP_KEYS)
    for key in ("image_size", "stem", "head", "stages"):
        if key not in top and not (key == "image_size" and image_size):
            file.fail((), f"lacks the key {key!r}")
    if image_size is not None:
        top["image_size"] = image_size
    stem = file.section(("stem",), top["stem"], tuple(_STEM))
    stem = {"stride": 2, **stem}
    if "width" not in stem:
        file.fail(("stem",), "lacks the key 'width'")
    # Of these keys only the activation may be missing.
    choices = {key: file.choices((key,), top.get(key, "relu"), rule) for key, rule in _TOP.items()}
    stem_widths = file.choices(("stem", "width"), stem["width"], _STEM["width"])
    space = SpaceDef(
        image_sizes=choices["image_size"], stem_widths=_merge_channels(stem_widths, (1.0,)),
        activations=choices["activation"], heads=choices["head"],
        stem_strides=file.choices(("stem", "stride"), stem["stride"], _STEM["stride"]), stages=_read_stages(file, top))
    space = without_dead_choices(space)
    _check_sizes(file, space)
    return space


def _merge_channels(channels: tuple[int, ...], multipliers: tuple[float, ...]) -> tuple[int, ...]:
    """Return the channel counts to choose from, ascending; counts that are equal after rounding are one."""
    return tuple(sorted({round_to_divisor(c * m) for c in channels for m in multipliers}))


def _read_stages(file: SpaceFile, top: Mapping[str, Any]) -> tuple[StageDef, ...]:
    defaults = file.section(("defaults",), top.get("defaults", {}), tuple(_STAGE))
    entries = top["stages"]
    if not isinstance(entries, list) or not 1 <= len(entries) <= 64:
        file.fail(("stages",), f"must be a list of 1 to 64 stages, got {entries!r}")
    stages = []
    for index, raw in enumerate(entries):
        own = file.section(("stages", index), raw, tuple(_STAGE))
        choices: dict[str, tuple[Any, ...]] = {}
        for key, rule in _STAGE.items():
            # An error names the place in the file that the value is from.
            path: Path = ("stages", index, key) if key in own or key not in defaults else ("defaults", key)
            merged = {**_STAGE_DEFAULTS, **defaults, **own}
            if key not in merged:
                file.fail(("stages", index), f"lacks the key {key!r}")
            choices[key] = file.choices(path, merged[key], rule, most=1 if key == "stride" else 64)
        stages.append(StageDef(
            choices["op"], choices["kernel"], choices["se"], choices["skip"],
            _merge_channels(choices["channels"], choices["multipliers"]), choices["repeats"], choices["stride"][0]))
    return tuple(stages)


def known_settings(file: SpaceFile, space: SpaceDef) -> dict[str, list[int]]:
    """Return the codes, in the order of `fields(space)`, of each network under `known`.

    A known network gives each field of the stages as one value for all stages, or as a list with a value for each. The
    value may be null or missing if the field is no parameter. Fields of the whole network have their own names
    (`image_size`, `stem.width`, `stem.stride`, `activation`, `head`).
    """
    return {name: [_known_code(file, ("known", name), given, field, choices, len(space.stages))
                   for field, choices in fields(space)] for name, given in file.known((*GLOBALS, *FIELDS))}


def _known_code(file: SpaceFile, path: Path, given: Mapping[str, Any], field: str, choices: tuple[Any, ...],
                n_stages: int) -> int:
    """Return the code of one field of a known network."""
    key, value = field, given.get(field)
    if field.startswith("stage") and "." in field:
        stage, key = field.removeprefix("stage").split(".")
        value = given.get(key)
        if isinstance(value, list):
            if len(value) != n_stages:
                file.fail((*path, key), f"must list {n_stages} values, one a stage, got {len(value)}")
            value = value[int(stage)]
    # A known network is meant for any image size: an option may have replaced the sizes of the file.
    if value is None or field == "image_size":
        if len(choices) > 1 and field != "image_size":
            file.fail(path, f"lacks {field}: one of {', '.join(map(str, choices))}")
        return choices.index(value) if value in choices else 0
    if value not in choices:
        file.fail((*path, key), f"gives {field} as {value!r}: it must be one of {', '.join(map(str, choices))}")
    return choices.index(value)
