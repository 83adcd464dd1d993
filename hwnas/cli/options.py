"""The options as dataclasses: fields say type, range, choices and help; one reader checks them, in one sentence.

    @dataclass(frozen=True, slots=True)
    class ProxyOptions:
        epochs: int = option(3, low=1, high=1000, help="passes through the training images")
        score: str = option("naswot", choices=("naswot", "synflow"))

    read_options(ProxyOptions, {"epochs": 0}, "proxy")
    # ConfigError: proxy.epochs must be a whole number from 1 to 1000, got 0.

Types: bool, int, float, str, Path, Any, tuples of these, mappings, other dataclasses of options, and `| None`. A whole
number is a float too, a bool is never a number, and numbers are finite. A text may be empty only if "" is the default.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hwnas.errors import ConfigError, UnknownName, shown
from hwnas.lazy import omegaconf

Options = TypeVar("Options")
Config = Mapping[str, Any]  # options by key: a composed configuration, a section of it, or one read from a file
MANDATORY = "???"  # how OmegaConf writes an option that has no default


@dataclasses.dataclass(frozen=True, slots=True)
class OptionRule:
    """The conditions that a value must meet besides its type.

    Numbers: `low` and `high` belong to the range, `above` and `below` do not; each number of a tuple must be in it.
    `choices`: the only values, or a function that lists them. `check`: a further rule; `what` then says all that the
    value must be ("ascending whole numbers"). `empty`: a text may be empty. `help` is for readers of the code.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Sequence[Any] | Callable[[], Sequence[Any]] = ()
    check: Callable[[Any], bool] | None = None
    what: str = ""
    empty: bool = False
    help: str = ""

    def names(self) -> Sequence[Any]:
        """Return the choices; empty if every value of the type is allowed."""
        return self.choices() if callable(self.choices) else self.choices

    def holds(self, value: float) -> bool:
        """Return whether a number is finite and in the range."""
        return (abs(value) <= sys.float_info.max and (self.low is None or value >= self.low)
                and (self.high is None or value <= self.high) and (self.above is None or value > self.above)
                and (self.below is None or value < self.below))

    @property
    def range(self) -> str:
        """The range in words that follow "a number"; empty if there is none."""
        if self.low is not None and self.high is not None:
            return f" from {_text(self.low)} to {_text(self.high)}"
        most = "of at most" if self.above is None else "at most"
        ends = (("of at least", self.low), ("above", self.above), (most, self.high), ("below", self.below))
        words = [f"{word} {_text(end)}" for word, end in ends if end is not None]
        return f" {' and '.join(words)}" if words else ""


def option(default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """Return a field of options with the `rules` of OptionRule; without `default` the option must be given."""
    rule = OptionRule(**rules, empty=default == "")
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata={"rule": rule})
    return dataclasses.field(default=default, metadata={"rule": rule})


def read_options(cls: type[Options], section: Any, where: str = "", base: Options | None = None,
                 others: Collection[str] = ()) -> Options:
    """Return `section` as an instance of the dataclass `cls`; absent keys come from `base` (None: the defaults).

    `where` is the section's name, for errors. `others` are keys of the section that other code reads. Raises
    UnknownName, with the list, for an unknown key or choice. Raises ConfigError, with key, rule and value, for any
    other fault.
    """
    section_values = _mapping(section, where, names_of(cls))
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # it is a dataclass
    for key in section_values:
        if key not in fields and key not in others:
            raise UnknownName(f"key of {where}" if where else "option", key, [*fields, *others])
    values = {name: getattr(base, name) for name in fields} if base is not None else {}
    # A missing option without a default is read as None: it is allowed, or the error states the rule.
    for name, field in fields.items():
        if name in section_values or (base is None and _default(field) is dataclasses.MISSING):
            at = f"{where}.{name}" if where else name
            rule = field.metadata.get("rule") or OptionRule(empty=field.default == "")
            values[name] = _read(section_values.get(name), hints[name], rule, at)
    return cls(**values)


def read_command(cls: type[Options], config: Mapping[str, Any]) -> Options:
    """Return the options of a command from its whole configuration; keys that are no field of `cls` are read elsewhere.

    Hydra has refused keys that no file of conf/ lists. The files hold the defaults, so that `cls` needs none.
    """
    values, names = given(config), names_of(cls)
    return read_options(cls, {key: value for key, value in values.items() if key in names})


def given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a whole configuration, without mandatory options that were not given."""
    return {key: value for key, value in _mapping(config, "").items() if value != MANDATORY}


def read_value(value: Any, kind: Any, at: str, **rules: Any) -> Any:
    """Return one value as a type of options (`float | None`), by the rules of `option`; `at` is its key, for errors."""
    return _read(value, kind, OptionRule(**rules), at)


def names_of(cls: type[Any]) -> list[str]:
    """Return the names of the options of a dataclass, in order."""
    return [field.name for field in dataclasses.fields(cls)]


def defaults(cls: type[Any]) -> dict[str, Any]:
    """Return every option with its default as plain values of YAML; MANDATORY: it has none."""
    values = {field.name: _default(field) for field in dataclasses.fields(cls)}
    return {name: MANDATORY if value is dataclasses.MISSING else plain(value) for name, value in values.items()}


def plain(value: Any) -> Any:
    """Return options as values that YAML has: sections for dataclasses, lists for tuples, texts for paths."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in names_of(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _mapping(value: Any, where: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return a section as plain values; null is an empty section. A ConfigError names the `keys` that it may have."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        is_config = omegaconf.OmegaConf.is_config(value)
        value = omegaconf.OmegaConf.to_container(value, resolve=True) if is_config else dict(value)
    if value is not None and not isinstance(value, dict):
        which = f"with a key of {', '.join(keys)}" if keys else "with a key that --show-config prints"
        raise ConfigError(f"{where} must be a section of keys and values, got {shown(value)}. Write {where}.KEY=VALUE "
                          f"{which}.")
    return {str(key): part for key, part in (value or {}).items()}


def _read(value: Any, hint: Any, rule: OptionRule, at: str) -> Any:
    """Return `value` as the type `hint`. Raises ConfigError or UnknownName if it breaks the rule."""
    kind, nullable = _without_none(hint)
    if value is None and nullable:
        return None
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return read_options(kind, value, at)
    if get_origin(kind) in (dict, Mapping) or kind in (dict, Mapping):
        return _mapping(value, at)
    result = _tuple(value, kind, rule, at) if get_origin(kind) is tuple else _single(value, kind, rule, at)
    if result is _WRONG or (rule.check is not None and not rule.check(result)):
        raise ConfigError(f"{at} must be {rule.what or _words(kind, rule, nullable)}, got {shown(value)}.")
    return result


_WRONG: Any = object()  # in place of a value that breaks its type or its rule


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if len(kinds) != 1:
        raise TypeError(f"an option has one type, and | None: {hint}")
    return kinds[0], True


def _tuple(value: Any, kind: Any, rule: OptionRule, at: str) -> Any:
    parts = get_args(kind)
    if not isinstance(value, list | tuple) or (parts[-1] is not Ellipsis and len(value) != len(parts)):
        return _WRONG
    hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
    items = tuple(_single(part, hint, rule, at) for part, hint in zip(value, hints, strict=True))
    return _WRONG if any(part is _WRONG for part in items) else items


def _single(value: Any, kind: Any, rule: OptionRule, at: str) -> Any:
    """Return `value` as a bool, number, text, path or anything; _WRONG if it breaks its type or its rule."""
    if kind is Any:
        return value
    names = rule.names()
    if kind is str:
        if len(names) and (not isinstance(value, str) or value not in names):
            raise UnknownName(at, value, [str(name) for name in names])
        return value if isinstance(value, str) and (rule.empty or value.strip()) else _WRONG
    if kind is Path:
        text = str(value) if isinstance(value, str | Path) else ""
        return Path(os.path.abspath(os.path.expanduser(text))) if text.strip() else _WRONG
    if kind is bool:
        return value if isinstance(value, bool) else _WRONG
    if kind not in (int, float):
        raise TypeError(f"{at}: options of type {kind} cannot be read")
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return _WRONG
    if not rule.holds(value) or (len(names) and value not in names):
        return _WRONG
    return kind(value)


def _words(kind: Any, rule: OptionRule, nullable: bool) -> str:
    """Return in words what a value must be."""
    null = "null or " * nullable
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        many = "" if parts[-1] is Ellipsis else f"{len(parts)} "
        return f"{null}a list of {many}{_KINDS[parts[0]][1]}{rule.range}"
    if kind in (int, float) and len(rule.names()):
        *most, last = [*map(str, rule.names()), *["null"] * nullable]
        return f"{', '.join(most)} or {last}" if most else last
    return null + _KINDS[kind][0] + (rule.range if kind in (int, float) else "")


_KINDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"), int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"), str: ("a text", "texts"), Path: ("a path", "paths")}


def _text(value: float | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return section `key` of a configuration as plain values. Raises ConfigError if it is something else."""
    return _mapping(config.get(key), key)


def flat_options(options: Mapping[str, Any], head: str = "") -> list[tuple[str, Any]]:
    """Return the values of options and of their sections by dotted key; an empty section is a value."""
    pairs: list[tuple[str, Any]] = []
    for key, value in options.items():
        inner = flat_options(value, f"{head}{key}.") if isinstance(value, Mapping) else []
        pairs += inner or [(f"{head}{key}", value)]
    return pairs
