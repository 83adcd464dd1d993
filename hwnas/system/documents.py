"""Documents: files that state their format and version; and the identity of the work that a folder belongs to."""

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

WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # what content of another form raises
MOST_JSON = 64 << 20  # bytes; the largest table has 7 MB
_MOST_DEEP = 60  # values in values
_MOST_MEMORY = 600 << 20  # bytes, by an estimate
_NAMED = 4  # changed keys that an error lists
_VERSION = re.compile(r"[0-9]{1,9}")


def now() -> str:
    """The present time as documents say it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Document:
    """One kind of file, mostly JSON: its format, the newest version that is read, and the remedy for any other file.

    `name` is what such a file is called. A file says `"format": "<format>/<version>"`; with `two_fields` it gives
    `"format"` and `"version"` apart. `shape` is what else it holds, see `check_shape`, `rule` raises ValueError where
    parts of it do not fit each other, and `most` is its size in bytes.
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
        """The content of a file (also .gz) of this format and a version up to this one."""
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
        """`data`, which stands at `where`, when it is of this format and a version up to this one."""
        said = data.get("format") if isinstance(data, Mapping) else None
        form, _, version = said.partition("/") if isinstance(said, str) else ("", "", "")
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
        """`read`, or None where there is no file."""
        return self.read(path) if path.exists() else None

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Inside, an error about missing or wrong content becomes an `error` that names the file."""
        try:
            yield
        except WRONG as error:
            said = f"{type(error).__name__}: {one_line(error, 200)}"
            raise self.error(f"{path}: not whole ({said}). {self.remedy}") from None


def check_identity(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: Path) -> None:
    """StudyError unless both are of the same training. It names `where` and what differs (dotted keys)."""
    before, now = json.loads(json.dumps(dict(stored))), json.loads(json.dumps(dict(wanted)))
    changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    if changed:
        text = ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed[:_NAMED])
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise StudyError(f"{where} is of another training: {text}{more}. Give the same options, or another "
                         "out=FOLDER.")


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file, unpacked where it ends in .gz. OSError, EOFError or zlib.error; ValueError when it has
    more than `most` bytes, of which no more are read."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"larger than {most >> 20} MiB")
    return content


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Plain values of a JSON file; raises what `read_bytes` and `load_json` do."""
    return load_json(read_bytes(path, most))


def load_json(content: str | bytes) -> Any:
    """JSON as plain values; ValueError for what is none, is nested too deep, would take far more memory than its text
    (a list of three letters takes sixty bytes) or holds half a character, which no file could take up again."""
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    if sum(raw.count(mark) * size for mark, size in ((b"{", 256), (b"[", 96), (b",", 48), (b'"', 8))) > _MOST_MEMORY:
        raise ValueError("too many values")
    try:
        value = json.loads(raw)
        if b"\\ud" in raw.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("half a character (a surrogate) that is no text") from None
    level = [value]
    for _ in range(_MOST_DEEP):
        level = [part for whole in level if isinstance(whole, dict | list)
                 for part in (whole.values() if isinstance(whole, dict) else whole) if isinstance(part, dict | list)]
        if not level:
            return value
    raise ValueError("nested too deep")


def check_shape(value: Any, shape: Any, at: str = "") -> None:
    """ValueError, which names the key below `at`, unless plain values have a shape.

    A shape is a type (`float`: a finite number; `int`: a whole one), None, a tuple of shapes of which one fits, a list
    of the shape of all entries, or a mapping of shapes by key. "key?" may be absent, and "*" is every other key.
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
    """Return whether a value is of the kind of a shape, whatever it holds."""
    if isinstance(shape, Mapping | list):
        return isinstance(value, type(shape))
    if shape in (int, float):
        return isinstance(value, int if shape is int else int | float) and not isinstance(value, bool) and (
            abs(value) < _HUGE)
    return value is None if shape is None else isinstance(value, shape)


def _kind(shape: Any) -> str:
    return _KINDS.get(shape if isinstance(shape, type) else type(shape), "null")


_HUGE = 1e300  # no number of ours is so large; larger whole ones cannot become floats
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section",
          list: "a list"}
_MOST_BYTES = 1 << 20
_MOST_VALUES = 20_000  # the largest file of ours has some hundred
_MOST_DIGITS = 400


def yaml_text(path: Path) -> str:
    """The text of a YAML file. OSError; ValueError when it is not UTF-8 or larger than any of hwnas."""
    try:
        return read_bytes(path, _MOST_BYTES).decode()
    except (EOFError, zlib.error) as error:  # its name ends in .gz
        raise ValueError(f"torn ({error})") from None


def check_yaml(text: str, loader: type[Any]) -> None:
    """ValueError (or yaml.YAMLError) for a text that would take long or much memory: a few lines of aliases stand for
    billions of values."""
    if len(text) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB")
    n, sizes, around = 0, dict[str | None, int](), list[tuple[str | None, int]]()  # sizes of what the anchors stand for
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            n += sizes.get(event.anchor, _MOST_VALUES)  # unknown: it stands for what it is a part of
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = around.pop()
            sizes |= {anchor: n - before} if anchor else {}
        elif isinstance(event, yaml.NodeEvent):
            anchor, n = event.anchor, n + 1
            if isinstance(event, yaml.ScalarEvent):
                sizes |= {anchor: 1} if anchor else {}
                if not event.style and len(event.value) > _MOST_DIGITS and event.value[0] in "+-0123456789":
                    raise ValueError("a number too long")
            else:
                around.append((anchor, n - 1))
        if n > _MOST_VALUES or len(around) > _MOST_DEEP:
            raise ValueError(f"more than {_MOST_VALUES} values, or more than {_MOST_DEEP} one in another")


def _check_keys(node: Any) -> None:
    """ValueError for a key that a section has twice: of its values YAML would take the last in silence."""
    if isinstance(node, yaml.MappingNode):
        keys = Counter((key.tag, key.value) for key, _ in node.value
                       if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge")
        if twice := next((value for (_, value), n in keys.items() if n > 1), None):
            raise ValueError(f"{twice!r} stands twice in the section from line {node.start_mark.line + 1} on")
        for _, value in node.value:
            _check_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value)


def load_yaml(text: str) -> Any:
    """YAML as plain values; ValueError, in one line, for a text that is none, that gives a key twice, or that
    `check_yaml` refuses."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        check_yaml(text, loader)
        _check_keys(yaml.compose(text, Loader=loader))
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, *WRONG, RecursionError) as error:
        raise ValueError(one_line(error)) from None


def content_of(path: Path) -> str:
    """Twelve hexadecimal digits that name a file's content; ConfigError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
