"""A YAML file whose every key has a line number, so that a complaint can say where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import yaml

from hwnas.errors import SpaceError, UnknownName

Path = tuple[str | int, ...]
_MAX_NODES = 20_000


class Rule(NamedTuple):
    """What a value must be, in words and as a reader that raises ValueError."""

    text: str
    read: Callable[[Any], Any]


class SpaceFile:
    """The parsed content of one file and the line of every key, for complaints."""

    def __init__(self, where: str, text: str) -> None:
        self.where = where
        self._lines: dict[Path, int] = {}
        self._nodes = 0
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            data = self._plain(node, ()) if node is not None else None
        except yaml.MarkedYAMLError as error:
            line = f"{error.problem_mark.line + 1}:" if error.problem_mark else ""
            raise SpaceError(f"{where}:{line} is not YAML: {error.problem or error.context}.") from None
        except yaml.YAMLError as error:
            raise SpaceError(f"{where}: is not YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise SpaceError(f"{where}: nested too deeply to be a search space.") from None
        if not isinstance(data, dict):
            raise SpaceError(f"{where}: is not a mapping of keys to values; is this a search space?")
        self.data: dict[str, Any] = data

    def _plain(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        self._lines.setdefault(path, node.start_mark.line + 1)
        if self._nodes > _MAX_NODES:
            self.fail(path, f"is too large: the file holds more than {_MAX_NODES} values")
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, index)) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return yaml.SafeLoader("").construct_object(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            self._lines[(*path, key)] = key_node.start_mark.line + 1
            if key in found:
                self.fail((*path, key), "is given twice")
            found[key] = self._plain(value_node, (*path, key))
        return found

    def fail(self, path: Path, message: str) -> NoReturn:
        """Raise SpaceError: file, line, key, message."""
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        line = next((self._lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._lines), None)
        raise SpaceError(f"{self.where}:{f'{line}:' if line else ''} {name or 'the file'} {message}.")

    def section(self, path: Path, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        """`value` as a mapping that has no keys but `known`."""
        if not isinstance(value, dict):
            self.fail(path, f"must be a mapping with keys out of {', '.join(known)}, got {value!r}")
        for key in value:
            if key not in known:
                self.fail((*path, key), f"is an {UnknownName('key', key, known)}".rstrip("."))
        return dict(value)

    def choices(self, path: Path, value: Any, rule: Rule, most: int = 64) -> tuple[Any, ...]:
        """The values of one field: one scalar, or a list of `most` at most without repetition."""
        items = value if isinstance(value, list) else [value]
        if not items:
            self.fail(path, "is an empty list")
        if len(items) > most:
            self.fail(path, f"takes {f'at most {most} values' if most > 1 else 'one value'}, got {len(items)}")
        found = []
        for item in items:
            try:
                read = rule.read(item)
            except (ValueError, TypeError):
                self.fail(path, f"{rule.text}, got {item!r}")
            if read in found:
                self.fail(path, f"lists {item!r} twice")
            found.append(read)
        return tuple(found)
