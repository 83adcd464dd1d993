"""Finished runs, one line of JSON each under a header, so that the same command goes on after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.sampler.contest.replay import Run
from hwnas.errors import ConfigError, DataError, UserError
from hwnas.system.paths import write_atomic

Key = tuple[str, int]  # sampler, seed


@dataclass
class Store:
    """Runs of one contest, by sampler and seed; those of another `version` of their sampler are counted in `outdated`
    and left alone. ConfigError when the file is of another contest."""

    path: Path
    header: dict[str, Any]
    version: Callable[[str], str]
    runs: dict[Key, Run] = field(default_factory=dict)
    outdated: int = 0

    def __post_init__(self) -> None:
        older = set()
        for run in self._read():
            key = (run.sampler, run.seed)
            if run.version == self.version(run.sampler):
                self.runs[key] = run
            else:
                older.add(key)
        self.outdated = len(older - {*self.runs})

    def add(self, run: Run) -> None:
        """Append one, so that it outlives a kill."""
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(run.to_dict(), separators=(",", ":")) + "\n")
                file.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}. Mend that, then give the same command again."
                            ) from error
        self.runs[run.sampler, run.seed] = run

    def _read(self) -> Iterator[Run]:
        """Runs of the file; a line cut off by a kill is dropped."""
        try:
            lines = self.path.read_text().split("\n")[:-1] if self.path.is_file() else []
            if not lines:
                write_atomic(self.path, json.dumps(self.header) + "\n")
                return
            header = json.loads(lines[0])
            runs = [Run(**json.loads(line)) for line in lines[1:]]
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.path}: no file of runs ({error}). Choose another folder: out=DIR") from error
        if header != self.header:
            raise ConfigError(f"{self.path}: of another contest ({_difference(header, self.header)}). Choose another "
                              "folder: out=DIR")
        write_atomic(self.path, "\n".join(lines) + "\n")
        yield from runs


def _difference(has: Any, wanted: dict[str, Any]) -> str:
    if not isinstance(has, dict):
        return "no header"
    return ", ".join(f"{name} {has.get(name)!r}, asked for {wanted.get(name)!r}"
                     for name in [*wanted, *(has.keys() - wanted.keys())] if has.get(name) != wanted.get(name))
