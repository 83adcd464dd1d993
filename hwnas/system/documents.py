"""The files that state their format and version, the safe reading of JSON and YAML, and the identity of a training."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hwnas.errors import ConfigError, StudyError, UserError, one_line, shown
from hwnas.lazy import yaml

WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # errors for content of another form
MOST_JSON = 64 << 20  # bytes; the largest table has 7 MB
_MOST_DEEP = 60  # levels of values in values
_MOST_MEMORY = 600 << 20  # bytes, by an estimate
_NAMED = 4  # changed keys that an error lists
_VERSION = re.compile(r"[0-9]{1,9}")


def now() -> str:
    """Return the present time in the form of documents: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Document:
    """A kind of file, mostly JSON: its format, the newest version that is read, and the remedy for any other file.

    Messages call such a file `name`. A file says `"format": "<format>/<version>"`; with `two_fields` it gives
    `"format"` and `"version"` apart. `shape` is the rest of its content, see `check_shape`. `rule` raises ValueError if
    parts of the content do not fit each other. `most` is its largest size in bytes.
    Every fault is an `error` of one line: file, fault, `remedy`.
    """

    format: str
    version: int
    name: str
    remedy: str
    error: type[UserError] = StudyError
    two_fields: bool = False
    shape: Any = field(default=None, compare=False)
    rule: Callable[[Mapping[str, Any]], None] | None = field(default=None, compare=False)
    most: int = MOST_JSON

    @property
    def header(self) -> dict[str, Any]:
        """The fields that a file of this kind begins with."""
        if self.two_fields:
            return {"format": self.format, "version": self.version}
        return {"format": f"{self.format}/{self.version}"}

    def read(self, path: Path) -> dict[str, Any]:
        """Return the content of a file (also .gz). Raises `error` for another format, a later version or any fault."""
        try:
            return self.check(read_json(path, self.most), path)
        except gzip.BadGzipFile as error:
            fault = f"not gzip ({error})"
        except (EOFError, zlib.error) as error:
            fault = f"torn ({error})"
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        except ValueError as error:
            fault = f"torn, not whole JSON ({error})"
        raise self.error(f"{path}: {fault}. {self.remedy}")

    def check(self, data: object, where: object) -> dict[str, Any]:
        """Return `data`. Raises `error`, with the place, for another format, a later version or any other fault."""
        # The version is behind the slash, or with `two_fields` in a field of its own and not behind a slash.
        header = data.get("format") if isinstance(data, Mapping) else None
        form, _, version = header.partition("/") if isinstance(header, str) else ("", "", "")
        if not isinstance(data, Mapping) or form != self.format or bool(version) == self.two_fields:
            raise self.error(f"{where}: not {self.name} of hwnas. {self.remedy}")
        number = data.get("version") if self.two_fields else int(version) if _VERSION.fullmatch(version) else version
        if not isinstance(number, int) or number > self.version:
            raise self.error(f"{where}: format version {number!r}; this hwnas reads up to {self.version}. Update "
                             "hwnas.")
        try:
            check_shape(dict(data), self.shape or {})
            if self.rule is not None:
                self.rule(data)
        except ValueError as error:
            raise self.error(f"{where}: {error}. {self.remedy}") from None
        return dict(data)

    def find(self, path: Path) -> dict[str, Any] | None:
        """Return what `read` returns, or None if there is no file."""
        return self.read(path) if path.exists() else None

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Turn errors about missing or wrong content, inside the block, into an `error` that names the file."""
        try:
            yield
        except WRONG as error:
            fault = f"{type(error).__name__}: {one_line(error, 200)}"
            raise self.error(f"{path}: not whole ({fault}). {self.remedy}") from None


def check_identity(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: Path) -> None:
    """Raise StudyError unless both are of the same training. The message names the place and the keys that differ."""
    before, after = json.loads(json.dumps(dict(stored))), json.loads(json.dumps(dict(wanted)))
    changed = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    if changed:
        text = ", ".join(f"{key} was {before.get(key)}, is {after.get(key)}" for key in changed[:_NAMED])
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise StudyError(f"{where} is of another training: {text}{more}. Give the same options, or another "
                         "out=FOLDER.")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz. Raises OSError, EOFError, zlib.error, or
    ValueError if it has more than `most` bytes; the rest is not read."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"larger than {most >> 20} MiB")
    return content


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Return the plain values of a JSON file. Raises the errors of `read_bytes` and `load_json`."""
    return load_json(read_bytes(path, most))


def load_json(content: str | bytes) -> Any:
    """Return JSON as plain values. Raises ValueError for a text that is no JSON, is nested too deep, or needs far more
    memory than its own size. It also does so for half a character, which no file can store."""
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    # An estimate of the bytes in memory, by the signs in the text: a list of three letters takes sixty bytes.
    if sum(raw.count(mark) * size for mark, size in ((b"{", 256), (b"[", 96), (b",", 48), (b'"', 8))) > _MOST_MEMORY:
        raise ValueError("too many values")
    try:
        value = json.loads(raw)
        if b"\\ud" in raw.lower():  # perhaps half a character, which UTF-8 cannot encode
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("half a character (a surrogate) that is no text") from None
    level = [value]
    for _ in range(_MOST_DEEP):  # each time to the sections and lists one level deeper
        level = [part for whole in level if isinstance(whole, dict | list)
                 for part in (whole.values() if isinstance(whole, dict) else whole) if isinstance(part, dict | list)]
        if not level:
            return value
    raise ValueError("nested too deep")


def check_shape(value: Any, shape: Any, at: str = "") -> None:
    """Raise ValueError, which names the key below `at`, unless plain values have a shape.

    A shape is None, a type (`float`: a finite number; `int`: a whole one), or a tuple of shapes of which one must fit.
    It can also be a list with the shape of all entries, or a mapping of shapes by key. "key?" may be absent, and "*"
    is every other key.
    """
    place = at or "it"
    if isinstance(shape, tuple):
        if (fitting := next((part for part in shape if _is(value, part)), shape)) is shape:
            raise ValueError(f"{place} must be {' or '.join(map(_kind, shape))}, got {shown(value)}")
        check_shape(value, fitting, at)
    elif not _is(value, shape):
        raise ValueError(f"{place} must be {_kind(shape)}, got {shown(value)}")
    elif isinstance(shape, list):
        for index, part in enumerate(value):
            check_shape(part, shape[0], f"{at}[{index}]")
    elif isinstance(shape, Mapping):
        for name, part in shape.items():
            key = name.removesuffix("?")
            if name == "*":
                for other in value.keys() - shape.keys():
                    check_shape(value[other], part, f"{at}.{str(other)[:40]!r}")
            elif key in value:
                check_shape(value[key], part, f"{at}.{key}".lstrip("."))
            elif key == name:
                raise ValueError(f"{place} lacks {key}")


def _is(value: Any, shape: Any) -> bool:
    """Return whether a value has the type of a shape, whatever its content is."""
    if isinstance(shape, Mapping | list):
        return isinstance(value, type(shape))
    if shape in (int, float):
        return isinstance(value, int if shape is int else int | float) and not isinstance(value, bool) and (
            abs(value) < _HUGE)
    return value is None if shape is None else isinstance(value, shape)


def _kind(shape: Any) -> str:
    return _KINDS.get(shape if isinstance(shape, type) else type(shape), "null")


_HUGE = 1e300  # no number of hwnas is so large; larger whole numbers cannot become floats
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section",
          list: "a list"}
_MOST_BYTES = 1 << 20
_MOST_VALUES = 20_000  # the largest file of hwnas has some hundred
_MOST_DIGITS = 400


def yaml_text(path: Path) -> str:
    """Return the text of a YAML file. Raises OSError, or ValueError if it is not UTF-8 or larger than _MOST_BYTES."""
    try:
        return read_bytes(path, _MOST_BYTES).decode()
    except (EOFError, zlib.error) as error:  # its name ends in .gz
        raise ValueError(f"torn ({error})") from None


def check_yaml(text: str, loader: type[Any]) -> None:
    """Raise ValueError (or yaml.YAMLError) for a text that would take long or much memory: a few lines of aliases can
    mean billions of values."""
    if len(text) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB")
    # `n` counts values; `sizes` has the count of each anchor; `open_parts` has sections that are open, and `n` before.
    n, sizes, open_parts = 0, dict[str | None, int](), list[tuple[str | None, int]]()
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            n += sizes.get(event.anchor, _MOST_VALUES)  # unknown: the alias is inside its own anchor
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_parts.pop()
            sizes |= {anchor: n - before} if anchor else {}
        elif isinstance(event, yaml.NodeEvent):
            anchor, n = event.anchor, n + 1
            if isinstance(event, yaml.ScalarEvent):
                sizes |= {anchor: 1} if anchor else {}
                if not event.style and len(event.value) > _MOST_DIGITS and event.value[0] in "+-0123456789":
                    raise ValueError("a number too long")
            else:
                open_parts.append((anchor, n - 1))
        if n > _MOST_VALUES or len(open_parts) > _MOST_DEEP:
            raise ValueError(f"more than {_MOST_VALUES} values, or more than {_MOST_DEEP} one in another")


def _check_keys(node: Any) -> None:
    """Raise ValueError for a key that a section has twice: YAML would silently take the last of its values."""
    if isinstance(node, yaml.MappingNode):
        keys = Counter((key.tag, key.value) for key, _ in node.value
                       if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge")
        if repeated_key := next((value for (_, value), n in keys.items() if n > 1), None):
            raise ValueError(f"{repeated_key!r} is twice in the section from line {node.start_mark.line + 1} on")
        for _, value in node.value:
            _check_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value)


def load_yaml(text: str) -> Any:
    """Return YAML as plain values. Raises ValueError, in one line, for a text that is no YAML, that gives a key twice,
    or that `check_yaml` refuses."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        check_yaml(text, loader)
        _check_keys(yaml.compose(text, Loader=loader))
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, *WRONG, RecursionError) as error:
        raise ValueError(one_line(error)) from None


def content_of(path: Path) -> str:
    """Return twelve hexadecimal digits that name a file's content. Raises ConfigError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
