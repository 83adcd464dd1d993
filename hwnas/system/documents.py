"""Documents: files that state their format and version; and the identity of the work that a folder belongs to."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwnas.errors import ConfigError, StudyError, UserError

_NAMED = 4  # changed keys that an error lists


@dataclass(frozen=True)
class Document:
    """One kind of file, mostly JSON: its format, the newest version that is read, and the remedy for any other file.

    `name` is what such a file is called. A file says `"format": "<format>/<version>"`; with `two_fields` it gives
    `"format"` and `"version"` apart. Every fault is an `error` of one line: file, fault, `remedy`.
    """

    format: str
    version: int
    name: str
    remedy: str
    error: type[UserError] = StudyError
    two_fields: bool = False

    @property
    def header(self) -> dict[str, Any]:
        """What a file of this kind begins with."""
        if self.two_fields:
            return {"format": self.format, "version": self.version}
        return {"format": f"{self.format}/{self.version}"}

    def read(self, path: Path) -> dict[str, Any]:
        """The content of a file (also .gz) of this format and a version up to this one."""
        return self.check(self._json(path), path)

    def check(self, data: object, where: object) -> dict[str, Any]:
        """`data`, which stands at `where`, when it is of this format and a version up to this one."""
        said = data.get("format") if isinstance(data, Mapping) else None
        form, _, version = said.partition("/") if isinstance(said, str) else ("", "", "")
        if not isinstance(data, Mapping) or form != self.format or bool(version) == self.two_fields:
            raise self.error(f"{where}: not {self.name} of hwnas. {self.remedy}")
        number = data.get("version") if self.two_fields else int(version) if version.isdigit() else version
        if not isinstance(number, int) or number > self.version:
            raise self.error(f"{where}: format version {number!r}; this hwnas reads up to {self.version}. Update "
                             "hwnas.")
        return dict(data)

    def find(self, path: Path) -> dict[str, Any] | None:
        """`read`, or None where there is no file."""
        return self.read(path) if path.exists() else None

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Inside, an error about missing or wrong content becomes an `error` that names the file."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = " ".join(str(error).split())[:200]
            raise self.error(f"{path}: not whole ({type(error).__name__}: {said}). {self.remedy}") from None

    def _json(self, path: Path) -> Any:
        try:
            content = path.read_bytes()
            return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        except gzip.BadGzipFile as error:
            fault = f"not gzip ({error})"
        except (EOFError, zlib.error) as error:
            fault = f"torn ({error})"
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        except ValueError as error:
            fault = f"torn, not whole JSON ({error})"
        raise self.error(f"{path}: {fault}. {self.remedy}")


def check_identity(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: Path,
                   step: str = "Give the same options, or another out=FOLDER.", work: str = "training") -> None:
    """StudyError unless both are the same. It names `where`, the `work`, what differs (dotted keys) and the next
    `step`."""
    before, now = json.loads(json.dumps(dict(stored))), json.loads(json.dumps(dict(wanted)))
    changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    if changed:
        text = ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed[:_NAMED])
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise StudyError(f"{where} is of another {work}: {text}{more}. {step}")


_MOST_BYTES = 1 << 20
_MOST_VALUES = 20_000  # the largest file of ours has some hundred
_MOST_DEEP = 60
_MOST_DIGITS = 400


def yaml_text(path: Path) -> str:
    """The text of a YAML file. OSError; ValueError when it is not UTF-8 or larger than any of hwnas."""
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB")
    return content.decode()


def check_yaml(text: str) -> None:
    """ValueError (or yaml.YAMLError) for a text that would take long or much memory: a few lines of aliases stand for
    billions of values."""
    import yaml

    if len(text) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB")
    n, sizes, around = 0, dict[str | None, int](), list[tuple[str | None, int]]()  # sizes of what the anchors stand for
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
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


def load_yaml(text: str) -> Any:
    """YAML as plain values; ValueError, in one line, for a text that is none, or that `check_yaml` refuses."""
    import yaml

    try:
        check_yaml(text)
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def content_of(path: Path) -> str:
    """Twelve hexadecimal digits that name a file's content; ConfigError when it cannot be read."""
    import hashlib

    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
