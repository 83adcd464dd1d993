"""The n-th write of a command fails because the disk is full, for all n: does it end by one line, is anything
acknowledged lost, is anything left behind, and does the same command go on when there is space?

    python -m tests.soak.full_disk --commands search,train,quantize,profile,verify --out FOLDER \\
        [--modes full,once] [--writes W] [--seed 0] [--minutes M] [--results FILE]

Commands and inputs are those of `kills`. A run without faults is counted first. Then the disk is full from the n-th
write on (`full`), or at that one write (`once`: somebody makes space at the same moment), for n = 1, 2, … or for W of
them, spread evenly, each in a new folder; then the same command is given with space. What a command writes in its
folder, the user's and that of temporary files counts: bytes written or reserved, files and folders made or renamed, and
files brought to the disk. See `fullness` on how a write is refused. A line of JSON tells of each.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.commands import COMMANDS, OWN_HOME, Acknowledged, Attacked
from tests.soak.fullness import FullDisk, missing
from tests.soak.kills import (
    GONE_S,
    HANGS_S,
    KEPT,
    Started,
    fault_of,
    header,
    make_inputs,
    start,
    surround,
    write,
)

MODES = ("full", "once")
_ENDS = (0, 1, 2, 3)
_SPACE = re.compile(r"free space|make space", re.IGNORECASE)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp|\.hwnas\.json\..+|\.writable|.*-journal")


@dataclass
class Run:
    """One command in a new folder, which is the disk: its results, the user's folder and that of temporary files."""

    name: str
    command: Attacked
    given: Path
    disk: Path

    @property
    def out(self) -> Path:
        """The folder of results."""
        return self.disk / "out"

    @property
    def home(self) -> Path:
        """The user's folder."""
        return self.out if self.name in OWN_HOME else self.disk / "home"

    def prepare(self) -> None:
        """Fill the disk with what is there before the command."""
        (self.disk / "tmp").mkdir(parents=True)
        self.command.prepare(self.given, self.out)
        if self.name not in OWN_HOME:
            shutil.copytree(os.environ["HWNAS_HOME"], self.home)

    def give(self, full: FullDisk | None = None) -> tuple[Started, int | None]:
        """Give the command, on a full disk or not; and its exit code, None where it hangs."""
        def enter() -> None:
            os.environ["TMPDIR"], tempfile.tempdir = str(self.disk / "tmp"), None
            if full is not None:
                full.enter()

        running = start(self.command.module, self.command.arguments(self.given, self.out), self.disk.parent /
                        "said.txt", self.home, enter)
        if full is None:
            return running, running.ended(HANGS_S)
        code, until = None, time.monotonic() + HANGS_S
        on_disk = True
        while code is None and time.monotonic() < until:
            on_disk = full.answer(0.01)
            code = running.ended(0)
        until = time.monotonic() + GONE_S
        while on_disk and time.monotonic() < until:
            on_disk = full.answer(0.01)
        if code is None:
            running.kill()
        return running, code

    def acknowledged(self) -> Acknowledged:
        """What is kept."""
        return self.command.acknowledged(self.out)

    def leftovers(self, reference: Run | None) -> list[str]:
        """Temporary files, beside those that the command leaves when nothing fails."""
        usual = set(os.listdir(reference.disk / "tmp")) if reference else set()
        names = [str(path.relative_to(self.disk)) for path in self.disk.rglob("*") if _TEMPORARY.fullmatch(path.name)]
        return sorted({*names, *(f"tmp/{name}" for name in os.listdir(self.disk / "tmp") if name not in usual)})


@dataclass
class Attack:
    """A command, and how often it writes when nothing fails."""

    reference: Run
    writes: int
    lasts_s: float

    @classmethod
    def measure(cls, name: str, given: Path, folder: Path) -> Attack:
        """Run it once to its end."""
        run = Run(name, COMMANDS[name], given, folder / "reference")
        run.prepare()
        disk, began = FullDisk(run.disk, 0), time.monotonic()
        running, code = run.give(disk)
        disk.close()
        if wrong := fault_of(running, code, run.command, run.out, run.out):
            raise SystemExit(f"{name}, of which nothing failed: {wrong}")
        return cls(run, disk.writes, time.monotonic() - began)

    def strike(self, at: int, mode: str) -> dict[str, Any]:
        """Refuse write number `at`, look, give the command again with space, look; what was seen."""
        run = Run(self.reference.name, self.reference.command, self.reference.given,
                  self.reference.disk.with_name(f"{mode}{at}"))
        run.prepare()
        seen: Acknowledged = {}
        disk = FullDisk(run.disk, at, mode == "once", lambda: seen.update(run.acknowledged()))
        running, code = run.give(disk)
        disk.close()
        words = running.said.read_text(errors="replace")
        processes, kept, leftovers = running.left(), run.acknowledged(), run.leftovers(self.reference)
        wrong = self._fault(running, code, words, run)
        again, code_again = run.give()
        stuck = fault_of(again, code_again, run.command, run.out, self.reference.out)
        after = run.acknowledged()
        line = {"command": run.name, "mode": mode, "at": at, "of": self.writes, "refused": disk.refused, "code": code,
                "said": words.strip().splitlines()[-1:], "acknowledged": len(kept), "lost": _lost(seen, kept),
                "lost_later": _lost(kept, after), "leftovers": leftovers, "processes": len(processes),
                "wrong": wrong, "not_resumed": stuck}
        if not bad(line):
            shutil.rmtree(run.disk)
        return line

    def _fault(self, running: Started, code: int | None, words: str, run: Run) -> str:
        """What is wrong with the end of a command on a full disk."""
        if code == 0:  # what could not be written was not needed
            return fault_of(running, code, run.command, run.out, self.reference.out)
        if code not in _ENDS or "Traceback" in words:
            return f"exit code {code}: {words[-KEPT:]}"
        lines = words.strip().splitlines()
        if not lines or not _SPACE.search(lines[-1]):
            return f"its last line does not ask for space: {words[-KEPT:]}"
        return "" if len(lines) == 1 else f"{len(lines)} lines: {words[-KEPT:]}"


def _lost(before: Acknowledged, after: Acknowledged) -> list[str]:
    return [key for key, value in before.items() if after.get(key) != value]


def bad(line: dict[str, Any]) -> bool:
    """Whether a promise was broken."""
    return any(line[key] for key in ("lost", "lost_later", "leftovers", "processes", "wrong", "not_resumed"))


def main() -> int:
    """Attack, print the counts; 1 when anything was lost, left or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", default=",".join(COMMANDS), help="names, with commas between")
    parser.add_argument("--modes", default=",".join(MODES), help="names, with commas between")
    parser.add_argument("--writes", type=int, default=0, help="of each command, spread evenly (default: all)")
    parser.add_argument("--seed", type=int, default=None, help="of the order (default: a new one, which is printed)")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist, for inputs and runs")
    parser.add_argument("--minutes", type=float, default=1e6, help="refuse no write after that")
    parser.add_argument("--results", type=Path, default=None, help="a file that the lines are added to")
    given = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    chosen, modes = given.commands.split(","), given.modes.split(",")
    if unknown := {*chosen, *modes} - {*COMMANDS, *MODES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join((*COMMANDS, *MODES))}")
    out = surround(given.out)
    print(f"seed {seed}", flush=True)
    inputs = make_inputs(out, chosen)
    results = given.results or out / "results.jsonl"
    write(results, [header(seed, chosen)])
    until, todo = time.monotonic() + 60 * given.minutes, []
    for name in chosen:
        (out / name).mkdir()
        attack = Attack.measure(name, inputs, out / name)
        print(f"{name}: {attack.writes} writes in {attack.lasts_s:.1f} s when nothing fails", flush=True)
        n = min(given.writes or attack.writes, attack.writes)
        todo += [(attack, 1 + index * attack.writes // n, mode) for index in range(n) for mode in modes]
    if given.minutes < 1e6:  # what time is left for is spread evenly
        random.Random(seed).shuffle(todo)
    lines = []
    with suppress(KeyboardInterrupt):
        for attack, at, mode in todo:
            if time.monotonic() > until:
                break
            lines.append(attack.strike(at, mode))
            write(results, lines[-1:])
    return _report(lines)


def _report(lines: list[dict[str, Any]]) -> int:
    """Print the counts."""
    names = Counter(line["command"] for line in lines)
    count = {key: sum(bool(line[key]) for line in lines) for key in ("lost", "lost_later", "wrong", "not_resumed",
                                                                     "leftovers", "processes")}
    print(f"{len(lines)} writes refused ({', '.join(f'{name} {n}' for name, n in names.items())}): "
          f"{count['lost'] + count['lost_later']} with something acknowledged lost, {count['wrong']} without a line "
          f"and code, {count['not_resumed']} not resumed, {count['leftovers']} with files left, {count['processes']} "
          "with processes left")
    for line in filter(bad, lines):
        print({key: value for key, value in line.items() if value})
    return 1 if any(map(bad, lines)) else 0


if __name__ == "__main__":
    sys.exit(main())
