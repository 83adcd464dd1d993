"""Random sequences of what happens to one run folder: commands, kills, changed data and options, copies, deleted and
damaged files. Is anything lost, left behind, changed by a refusal, or refused without a reason?

    python -m tests.soak.sequences --examples 50 --steps 12 --seed 0 --out FOLDER [--minutes M] \\
        [--results FILE] [--only N]

Hypothesis draws the sequences, the same for the same seed; the moments of kills are shares of a time and fall where
they fall. Commands run as in `kills`: forked, with real inputs that are tiny. A model beside the folder keeps what was
acknowledged, what the study was begun for, whose folder it is, and which files were damaged; it says what each command
must do. A line of JSON tells of each sequence, with its steps. What goes wrong ends a sequence and is told; `--only`
gives one sequence again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.soak.commands import STAND_IN, Acknowledged, digest, json_files, read_rows, read_trials
from tests.soak.kills import HANGS_S, Started, start, surround

CLASSES, OF_EACH, SIDE = 10, 6, 8
LASTS_S = 3.0  # of a search, until one was timed
_SAID = 400  # characters of what a command said that a result keeps
_ENDS = {"KILL": signal.SIGKILL, "INT": signal.SIGINT, "TERM": signal.SIGTERM}
_CODES = {"KILL": {-9}, "INT": {130}, "TERM": {143}}
_BESIDE = re.compile(r"\..*\.tmp")  # what is left where a file is not yet whole
_KEPT = re.compile(r"hwnas-measuring-core\d+\.lock|torchinductor_.*")
FIRST = {"report.html", "front.csv", "manifest.json", "environment.json", "study.db", "study.db-wal", "config.yaml",
         ".hwnas.json", "trials.csv", "model.onnx", "weights.safetensors"}  # files that are chosen most often
# what a search looks at before it leaves a verified front alone
_NEEDED = re.compile(r"(\.hwnas\.json|(config\.yaml|(front|trials)\.csv|report\.html|environment\.json|study\.db)"
                     r"|models/\w+/(manifest\.json|(architecture\.yaml|model\.onnx|weights\.safetensors)))")
MOMENT = st.integers(0, 999).map(lambda number: number / 1000)  # hypothesis draws floats from the ends too often


class Enough(KeyboardInterrupt):
    """The time is over."""


class Wrong(AssertionError):
    """A promise is broken."""


@dataclass(frozen=True)
class Told:
    """The options that a search is given. The study depends on `identity`, the finalists' weights on `epochs` too."""

    images: int = 0
    seed: int = 0
    cap_ms: int = 50
    epochs: int = 1
    trials: int = 2

    @property
    def identity(self) -> tuple[int, ...]:
        """What must not change."""
        return self.images, self.seed, self.cap_ms


@dataclass
class Journal:
    """What is common to all sequences: inputs, results, counts, the time that is left."""

    given: Path
    folder: Path
    results: Path
    until: float
    only: int | None
    lasts_s: float = LASTS_S
    example: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    remains: set[Path] = field(default_factory=set)  # temporary files of killed commands

    def tell(self, line: dict[str, Any]) -> None:
        """Add a line to the results."""
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Ended:
    """A command that has ended: how, and what it said."""

    code: int
    words: str

    @property
    def lines(self) -> list[str]:
        """What it said."""
        return self.words.splitlines()


class RunFolderMachine(RuleBasedStateMachine):
    """One sequence."""

    journal: ClassVar[Journal]

    def __init__(self) -> None:
        super().__init__()
        journal = self.journal
        journal.example += 1
        self.skipped = journal.only not in (None, journal.example)
        self.place = journal.folder / f"sequence{journal.example}"
        self.out, self.n_folders = self.place / "run0", 1
        self.told, self.steps = Told(), list[str]()
        self.begun: tuple[int, ...] | None = None  # what the study in the folder was begun for
        self.maker: str | None = None  # the command whose folder it is
        self.touched: dict[str, str] = {}  # files deleted or damaged from outside: what they hold since
        self.trained: dict[str, tuple[int, int]] = {}  # weights: images and epochs that they were trained with
        self.whole = False  # a search ended well, and nothing has happened since
        self.kept: Acknowledged = {}

    @initialize(first=st.sampled_from(["search", "search", "search", "search", "search", "KILL", "KILL", "train", ""]),
                moment=MOMENT)
    def begin(self, first: str, moment: float) -> None:
        """Write the images, and mostly begin a search."""
        if self.skipped:
            return
        self._write_images()
        if first == "train":
            self._do(self._second, "train")
        elif first:
            self._do(self._search, 0, first.replace("search", ""), moment, False)

    def _write_images(self) -> None:
        rng = random.Random(0)
        for label in range(CLASSES):
            folder = self.place / "images" / str(label)
            folder.mkdir(parents=True)
            for number in range(OF_EACH):
                pixels = bytes(min(255, 25 * label + rng.randrange(20)) for _ in range(SIDE * SIDE))
                (folder / f"{number}.pgm").write_bytes(b"P5 %d %d 255\n" % (SIDE, SIDE) + pixels)

    def teardown(self) -> None:
        """Tell of the sequence, and remove it."""
        if not self.skipped:
            self.journal.tell({"sequence": self.journal.example, "steps": self.steps})
            shutil.rmtree(self.place, ignore_errors=True)

    # what happens

    @rule(more=st.integers(0, 1), end=st.sampled_from(["", "", "KILL", "KILL", "KILL", "INT", "TERM"]), moment=MOMENT,
          overwrite=st.sampled_from([False, False, False, True]))
    def search(self, more: int, end: str, moment: float, overwrite: bool) -> None:
        """Search, perhaps for more networks, and perhaps be killed."""
        self._do(self._search, more, end, moment, overwrite)

    @rule(end=st.sampled_from(["", "KILL"]), moment=MOMENT)
    def verify(self, end: str, moment: float) -> None:
        """Measure the front again."""
        self._do(self._verify, end, moment)

    @rule(command=st.sampled_from(["train", "space", "report", "worker"]))
    def second(self, command: str) -> None:
        """Give another command on the folder."""
        self._do(self._second, command)

    @rule(command=st.sampled_from(["search", "export", "verify", "train"]), moment=MOMENT)
    def together(self, command: str, moment: float) -> None:
        """Give another command while a search runs."""
        self._do(self._together, command, moment)

    @rule(what=st.sampled_from(["images", "seed", "cap_ms", "epochs"]), twice=st.booleans())
    def change(self, what: str, twice: bool) -> None:
        """Change an image or an option, or take it back; search with it at once, and then take it back, if `twice`."""
        self._do(self._change, what, twice)

    @rule(how=st.sampled_from(["cp", "export"]), stay=st.booleans())
    def copy(self, how: str, stay: bool) -> None:
        """Copy the folder, and go on in the copy unless `stay`."""
        self._do(self._copy, how, stay)

    @rule(which=MOMENT, moment=MOMENT, how=st.sampled_from(["delete", "delete", "cut", "empty", "overwrite"]),
          then=st.sampled_from(["", "search", "verify", "worker", "report"]), mend=st.booleans())
    def spoil(self, which: float, moment: float, how: str, then: str, mend: bool) -> None:
        """Delete or damage a file, and give a command; perhaps delete the damaged files then, and search as the study
        was begun: it must end well."""
        self._do(self._spoil, which, moment, how)
        if then == "search":
            self._do(self._search, 0, "", 0.0, False)
        elif then == "verify":
            self._do(self._verify, "", 0.0)
        elif then:
            self._do(self._second, then)
        if mend:
            self._do(self._mend)

    # how it is done, and what must be true then

    def _do(self, act: Any, *given: Any) -> None:
        if self.skipped or self.steps[-1:] == ["ended"]:
            return
        if time.monotonic() > self.journal.until:
            raise Enough
        self.steps.append(f"{act.__name__[1:]} {' '.join(map(_shown, given))}".strip())
        self.journal.counts[act.__name__[1:]] += 1
        try:
            act(*given)
            self._check()
        except (Wrong, OSError, ValueError, KeyError) as wrong:
            self.journal.wrong.append(f"sequence {self.journal.example}: {'; '.join(self.steps)}: {wrong}")
            self.journal.tell({"sequence": self.journal.example, "steps": self.steps, "wrong": repr(wrong)})
            print(self.journal.wrong[-1], flush=True)
            if self.journal.only:
                shutil.copytree(self.place, self.journal.folder / "wrong", symlinks=True)
            self.steps.append("ended")

    def _search(self, more: int, end: str, moment: float, overwrite: bool) -> None:
        self.told = Told(**{**vars(self.told), "trials": self.told.trials + more})
        must, may = self._refusals(overwrite)
        began = time.monotonic()
        ended = self._run("search", [*self._options(), *["overwrite=true"] * overwrite], end, moment)
        self.steps[-1] += f" -> {ended.code}"
        if ended.code == 2:
            if not may:
                raise Wrong(f"refused for no reason: {ended.words}")
            return
        self._note_maker("search")
        self._note()
        self._forget_made()
        if ended.code not in _CODES.get(end, ()):
            if must:
                raise Wrong(f"not refused, though {must}: exit code {ended.code} {ended.words}")
            self._check_front(ended, all_verified=True, searched=True)
            ids = {row["id"] for row in read_rows(self.out / "front.csv")}
            self.whole = not any(_NEEDED.fullmatch(name) and (name[:7] != "models/" or name.split("/")[1] in ids)
                                 for name in self.touched)
            if not end:
                self.journal.lasts_s = max(1.0, time.monotonic() - began)

    def _verify(self, end: str, moment: float) -> None:
        was_whole, changed = self.whole, self.begun is not None and self.begun[0] != self.told.images
        ended = self._run("verify", [f"run={self.out}", "verification.seconds=30"], end, moment)
        self.steps[-1] += f" -> {ended.code}"
        if was_whole and not changed and ended.code not in {0} | _CODES.get(end, set()):
            raise Wrong(f"exit code {ended.code} of a front that was whole: {ended.words}")
        if was_whole and changed and ended.code not in {2} | _CODES.get(end, set()):
            raise Wrong(f"not refused, though the images changed: {ended.words}")
        if ended.code in (0, 1, 3):
            self._check_front(ended, all_verified=ended.code == 0)
        self.whole = was_whole and ended.code in (0, 2)

    def _second(self, command: str) -> None:
        taken = self._is_taken()
        options = {
            "train": self._training(), "worker": [f"run={self.out}"], "report": [f"run={self.out}"],
            "space": [text.replace("tiny.yaml", "other.yaml") for text in self._options()]}[command]
        if command == "space" and (self.maker != "search" or not self.begun):
            return
        study_intact = "study.db" not in self.touched and self.begun is not None
        was_whole = self.whole
        ended = self._run({"space": "search"}.get(command, command), options)
        self.steps[-1] += f" -> {ended.code}"
        if (command == "space" and ended.code != 2) or (
                command == "train" and taken and self.maker != "train" and ended.code != 2):
            raise Wrong(f"not refused in the folder of a {self.maker}: exit code {ended.code} {ended.words}")
        if command == "worker" and study_intact and self.begun and self.begun[0] != self.told.images and (
                ended.code != 2):
            raise Wrong(f"not refused, though the images changed: exit code {ended.code} {ended.words}")
        if command == "train" and ended.code == 0:
            self._note_maker("train")
        if command in ("worker", "report") and was_whole and ended.code not in (0, 2 if command == "worker" else 0):
            raise Wrong(f"exit code {ended.code} in a folder that was whole: {ended.words}")
        self._note()
        self.whole = was_whole

    def _together(self, command: str, moment: float) -> None:
        must, may = self._refusals(False)
        copy = self.place / f"beside{len(self.steps)}"
        options = {"search": self._options(), "export": [f"run={self.out}", f"out={copy}"], "train": self._training(),
                   "verify": [f"run={self.out}", "verification.seconds=30"]}[command]
        begun = self.begun is not None or self.out.exists()
        first = self._start("search", self._options(), "first")
        early = first.ended(moment * self.journal.lasts_s)
        taken = self._is_taken()
        other = self._finish(self._start(command, options, "other"), "other")
        ended = self._finish(first, "first", code=early)
        self.steps[-1] += f" -> {ended.code} {other.code}"
        for one in (ended, other):
            self._check_end(one, "")
        if ended.code == 2 and not may:
            raise Wrong(f"refused for no reason: {ended.words}")
        if ended.code != 2 and must:
            raise Wrong(f"not refused, though {must}: {ended.words}")
        if command == "train" and taken and self.maker != "train" and other.code != 2:
            raise Wrong(f"not refused in the folder of a search: exit code {other.code} {other.words}")
        if command == "train" and other.code == 0 and self.maker is None and not taken:
            self.maker = "train"
        self._note_maker("search")
        self._note()
        if ended.code == 0 and self.maker == "search":
            if command == "search" and other.code:
                raise Wrong(f"exit code {other.code} beside a search that ended well: {other.words}")
            self._check_front(ended, all_verified=True, searched=True)
        if other.code == 0 and command == "export":
            if begun and self._trials_in(copy) is None:
                raise Wrong("the copy's study is torn")
            if self._left(copy):
                raise Wrong(f"the copy has {self._left(copy)}")
        self.whole = False

    def _change(self, what: str, twice: bool) -> None:
        before = self.told
        value = {"images": 1 - before.images, "seed": 1 - before.seed, "cap_ms": 110 - before.cap_ms,
                 "epochs": 3 - before.epochs}[what]
        self._tell(Told(**{**vars(before), what: value}))
        if twice:
            self._search(0, "", 0.0, False)
            self._check()
            self._tell(Told(**{**vars(self.told), what: getattr(before, what)}))

    def _tell(self, told: Told) -> None:
        if told.images != self.told.images:
            path = self.place / "images" / "3" / "2.pgm"
            status, content = path.stat(), bytearray(path.read_bytes())
            content[-1] ^= 255
            path.write_bytes(content)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copying program does
        self.told = told
        self.whole = False

    def _copy(self, how: str, stay: bool) -> None:
        if not self.out.exists():
            return
        copy = self.place / f"run{self.n_folders}"
        self.n_folders += 1
        if how == "cp":
            shutil.copytree(self.out, copy, symlinks=True)
            self.journal.remains |= {copy / path.relative_to(self.out) for path in self.journal.remains
                                     if path.is_relative_to(self.out)}
        else:
            ended = self._run("export", [f"run={self.out}", f"out={copy}"])
            self.steps[-1] += f" -> {ended.code}"
            if ended.code:
                if self.whole or copy.exists():
                    raise Wrong(f"export: exit code {ended.code}: {ended.words}")
                return
            if (trials := self._trials_in(copy)) != self.kept and "study.db" not in self.touched:
                raise Wrong(f"the copy has {trials}, the folder {self.kept}")
            if self._left(copy) or list(copy.rglob("*.lock")):
                raise Wrong(f"the copy has {self._left(copy)} and locks")
        if stay:
            shutil.rmtree(copy)
        else:
            self.out = copy

    def _spoil(self, which: float, moment: float, how: str) -> None:
        files = [path for path in sorted(self.out.rglob("*")) if path.is_file()]
        files = sorted(files, key=lambda path: path.name not in FIRST)
        if not files:
            return
        path = files[min(int(which**1.5 * len(files)), len(files) - 1)]
        content = path.read_bytes()
        if how == "delete":
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[: int(moment * len(content))])
        elif how == "empty":
            path.write_bytes(b"")
        else:
            path.write_bytes(b"\0" * min(64, len(content)) + content[64:])
        name = str(path.relative_to(self.out))
        self.steps[-1] += f" {name}"
        self.touched[name] = digest(path)
        self.whole = False
        if name.startswith("study.db"):
            self.touched["study.db"] = digest(self.out / "study.db")
            self.kept = self._trials_in(self.out) or {}
            self._note_study()

    def _mend(self) -> None:
        if not self.touched and self.begun in (None, self.told.identity):
            self.steps.pop()  # nothing to mend
            self.journal.counts["mend"] -= 1
            return
        for name, content in list(self.touched.items()):
            if content != "gone" and digest(self.out / name) == content:
                if name == "study.db":
                    for path in self.out.glob("study.db*"):
                        path.unlink()
                else:
                    (self.out / name).unlink()
                self.touched[name] = "gone"
        self.kept = self._trials_in(self.out) or {}
        self._note_study()
        if self.begun is not None:
            images, seed_, cap_ms = self.begun
            self._tell(Told(images, seed_, cap_ms, self.told.epochs, self.told.trials))
        if self.maker == "train" and self._is_taken():
            return
        self._search(0, "", 0.0, True)
        if not self.whole:
            raise Wrong("after all damaged files were deleted, the same search with overwrite=true does not end well: "
                        f"{self.touched}")

    def _options(self) -> list[str]:
        given, told = self.journal.given, self.told
        return [
            "+target=ort_fp32", f"space={given}/tiny.yaml", f"out={self.out}", *self._images(), "accuracy=tabular",
            f"tabular.path={given}/{STAND_IN}", "tabular.value_column=top1", "tabular.key=id", "threads=1", "workers=1",
            "finalists.k=1", f"finalists.recipe.epochs={told.epochs}", "finalists.recipe.min_steps=1",
            "finalists.recipe.threads=1", "baselines=[]", "controls=0", "verification.seconds=30",
            f"n_trials={told.trials}", f"seed={told.seed}", f"budget.latency_ms={told.cap_ms}"]

    def _images(self) -> list[str]:
        return ["dataset=imagefolder", f"dataset.root={self.place}/images", f"dataset.image_size={SIDE}"]

    def _training(self) -> list[str]:
        return [f"architecture={self.journal.given}/architecture.yaml", f"out={self.out}", *self._images(), "epochs=2",
                "batch_size=16", "threads=1", "device=cpu"]

    def _start(self, command: str, options: list[str], label: str = "said") -> Started:
        (self.place / f"{label}.txt").unlink(missing_ok=True)
        return start(f"hwnas.{command}", ["-q", *options],
                     self.place / f"{label}.txt")

    def _finish(self, running: Started, label: str, code: int | None = None) -> Ended:
        code = running.ended(HANGS_S) if code is None else code
        if code is None:
            running.kill()
        left = running.left()
        said = self.place / f"{label}.txt"
        words = said.read_text(errors="replace") if said.exists() else ""
        if code is None:
            raise Wrong(f"it hangs: {words}")
        if left:
            raise Wrong(f"{len(left)} processes are left")
        return Ended(code, words)

    def _run(self, command: str, options: list[str], end: str = "", moment: float = 0.0) -> Ended:
        """Give a command, and end it at that share of a search's time, unless it has ended by itself."""
        before = self._snapshot()
        running = self._start(command, options)
        code = running.ended(moment * self.journal.lasts_s) if end else None
        if code is None and end:
            self.journal.counts[end] += 1
            os.kill(running.pid, _ENDS[end])
        else:
            end = ""
        ended = self._finish(running, "said", code)
        if end and ended.code in (-15, 1) and self._snapshot() == before:
            return Ended(_ended_early(end), ended.words)  # while it read its modules
        self._check_end(ended, end)
        if ended.code == 2:
            self._check_refusal(ended, before)
        return ended

    def _check_end(self, ended: Ended, end: str) -> None:
        if ended.code not in {0, 1, 2, 3} | _CODES.get(end, set()) or "Traceback" in ended.words:
            raise Wrong(f"exit code {ended.code}: {ended.words}")
        left = self._left(self.out)
        if end == "KILL":
            self.journal.remains |= {Path(path) for path in left}
            self.journal.counts["files left by kills"] += len(left)
        elif left:
            raise Wrong(f"temporary files are left: {left}")

    def _check_refusal(self, ended: Ended, before: dict[str, str]) -> None:
        said = [line for line in ended.lines if not line.startswith("note: ")]
        if len(said) != 1 or not re.match(r"\w+Error: |\w*Name: |MissingLatency: ", said[0]):
            raise Wrong(f"not one line: {ended.words}")
        after = self._snapshot()
        changed = sorted(key for key in before | after if before.get(key) != after.get(key)
                         and Path(key).name != "spent.json")  # a refused command's seconds are spent too
        if changed:
            raise Wrong(f"refused, and {', '.join(changed)} changed: {ended.words}")

    def _refusals(self, overwrite: bool) -> tuple[str, bool]:
        """Why a search with the present options must be refused, and whether it may be."""
        marked = (self.out / ".hwnas.json").is_file() and ".hwnas.json" not in self.touched
        if self.maker == "train" and self._is_taken():
            return "the folder is of a training" if marked else "", True
        known = self.begun is not None and "study.db" not in self.touched
        if known and self.begun != self.told.identity and (marked or overwrite):
            return f"the study was begun for {self.begun}, and this is {self.told.identity}", True
        damaged = any(content != "gone" for content in self.touched.values())
        unmarked = not marked and not overwrite and self._is_taken() and bool(self.touched)
        return "", damaged or unmarked or self.begun not in (None, self.told.identity)

    def _is_taken(self) -> bool:
        """Whether the folder holds anything that a user sees, or a marker."""
        return (self.out / ".hwnas.json").exists() or any(
            path.name[0] != "." for path in self.out.rglob("*") if path.is_file())

    def _check(self) -> None:
        """What must be true at any time."""
        now = self._trials_in(self.out)
        if now is None and "study.db" not in self.touched:
            raise Wrong("study.db is torn")
        if now is not None:
            lost = [key for key, value in self.kept.items() if now.get(key) != value]
            if lost:
                raise Wrong(f"lost: {lost}")
            self.kept = now
        for path in self.out.rglob("*.lock"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise Wrong(f"{path.name} is held") from None
        self._forget_made()
        self._note_study()
        for manifest in self.out.glob("models/*/manifest.json"):
            self._check_manifest(manifest)

    def _check_manifest(self, path: Path) -> None:
        if str(path.relative_to(self.out)) in self.touched:
            return
        for name, content in json.loads(path.read_text())["files"].items():
            place = path.with_name(name)
            if str(place.relative_to(self.out)) not in self.touched and _sha256(place) != content["sha256"]:
                raise Wrong(f"{place.relative_to(self.out)} is not what {path.name} says")

    def _check_front(self, ended: Ended, all_verified: bool, searched: bool = False) -> None:
        """Of a search or a verification that has ended by itself."""
        rows = read_rows(self.out / "front.csv")
        if not rows:
            raise Wrong("front.csv has no rows")
        for row in rows:
            folder = self.out / "models" / row["id"]
            if row["verified"] != "true":
                if all_verified or not row["reason"]:
                    raise Wrong(f"exit code {ended.code}, {row['id']} is not verified: {row['reason']} {ended.words}")
                continue
            files = json.loads((folder / "manifest.json").read_text())["files"]
            for name in files if searched else ["model.onnx"]:
                if _sha256(folder / name) != files[name]["sha256"]:
                    raise Wrong(f"{row['id']} is verified, and its {name} is not the file that was made")
            environment = json.loads((self.out / "environment.json").read_text())
            trained = self.trained.get(_sha256(folder / "weights.safetensors"))
            if trained is not None and trained != (self.told.images, environment["recipe"]["epochs"]):
                said = self.told.images, environment["recipe"]["epochs"]
                raise Wrong(f"{row['id']} is verified as trained on images {said}, and was on {trained}")
        if all_verified and ended.code not in (0,):
            raise Wrong(f"exit code {ended.code}: {ended.words}")
        if searched and len(read_rows(self.out / "trials.csv")) < len(self.kept):
            raise Wrong("trials.csv has fewer rows than the study")
        torn = json_files(self.out)
        if torn and not self.touched:
            raise Wrong(torn)

    def _note_maker(self, command: str) -> None:
        """Keep in mind whose folder it is; a command that was killed while it began has none yet."""
        if self._is_taken():
            self.maker = self.maker or command

    def _forget_made(self) -> None:
        """Forget damage that was made good."""
        self.touched = {name: content for name, content in self.touched.items() if digest(self.out / name) == content}

    def _note(self) -> None:
        """Keep in mind what new weights were trained with."""
        self._note_study()
        for path in self.out.glob("models/*/weights.safetensors"):
            if str(path.relative_to(self.out)) not in self.touched:
                self.trained.setdefault(_sha256(path), (self.told.images, self.told.epochs))

    def _note_study(self) -> None:
        identity = self._ask(self.out, "select value_json from study_user_attributes where key = 'hwnas'")
        if not identity:
            self.begun = None if identity is not None or not (self.out / "study.db").exists() else self.begun
        elif self.begun is None:
            self.begun = self.told.identity

    def _snapshot(self) -> dict[str, str]:
        """What is in the folder, and in the user's latency tables: of the study, what it holds, not its bytes."""
        kept = {str(path.relative_to(self.place)): digest(path) for path in self.out.rglob("*")
                if path.is_file() and not path.name.endswith((".lock", "-wal", "-shm")) and path.name != "study.db"}
        tables = Path(os.environ["HWNAS_HOME"]) / "latency_tables"
        kept |= {str(path): digest(path) for path in tables.rglob("*.json")}
        return {**kept, "study": self._content(self.out)}

    def _content(self, out: Path) -> str:
        with closing(sqlite3.connect(self._taken_out(out))) as database:
            try:
                return hashlib.sha256("\n".join(database.iterdump()).encode()).hexdigest()
            except sqlite3.DatabaseError:
                return digest(out / "study.db")

    def _ask(self, out: Path, query: str) -> list[Any] | None:
        with closing(sqlite3.connect(self._taken_out(out))) as database:
            try:
                return database.execute(query).fetchall()
            except sqlite3.OperationalError:
                return []
            except sqlite3.DatabaseError:
                return None

    def _trials_in(self, out: Path) -> Acknowledged | None:
        """Trials by the database itself; None where it is torn."""
        path = self._taken_out(out)
        try:
            return read_trials(path.parent)
        except sqlite3.DatabaseError:
            return None

    def _taken_out(self, out: Path) -> Path:
        """A copy of the study: to read one in its place may change the files beside it."""
        folder = self.place / "study"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in out.glob("study.db*"):
            if path.name in ("study.db", "study.db-wal"):
                shutil.copyfile(path, folder / path.name)
        return folder / "study.db"

    def _left(self, folder: Path) -> list[str]:
        """Temporary files, but for those of commands that were killed, for locks, which all commands of a machine
        share, and for the folder that torch keeps for its compiler."""
        temporary = Path(os.environ["TMPDIR"])
        files = {path for path in folder.rglob("*") if _BESIDE.fullmatch(path.name) or path.name == ".writable"}
        files |= {path for path in temporary.iterdir() if not _KEPT.fullmatch(path.name)}
        return sorted(map(str, files - self.journal.remains))


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _ended_early(end: str) -> int:
    return min(_CODES[end])


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"


def main() -> int:
    """Draw sequences, print the counts; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20, help="sequences")
    parser.add_argument("--steps", type=int, default=12, help="of each")
    parser.add_argument("--seed", type=int, default=None, help="of the sequences (default: a new one, printed)")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist, for inputs and runs")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no step after that")
    parser.add_argument("--results", type=Path, default=None, help="a file that the lines are added to")
    parser.add_argument("--only", type=int, default=None, help="one sequence; its folder is kept, if wrong")
    given = parser.parse_args()
    chosen = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {chosen}", flush=True)
    out = surround(given.out)
    inputs = out / "given"
    inputs.mkdir()
    if start("tests.soak.commands", [str(inputs)], out / "said.txt").ended(HANGS_S) != 0:
        raise SystemExit(f"the inputs could not be made: {(out / 'said.txt').read_text()}")
    (inputs / "other.yaml").write_text((inputs / "tiny.yaml").read_text().replace("head: 16", "head: 24"))
    from hwnas.target import Host

    journal = Journal(inputs, out, given.results or out / "results.jsonl", time.monotonic() + 60 * given.minutes,
                      given.only)
    journal.results.parent.mkdir(parents=True, exist_ok=True)
    journal.tell({"host": Host.detect().name, "cores": os.cpu_count(), "seed": chosen, "steps": given.steps,
                  "began": datetime.now(UTC).isoformat(timespec="seconds")})
    RunFolderMachine.journal = journal
    try:
        run_state_machine_as_test(seed(chosen)(RunFolderMachine), settings=settings(
            max_examples=given.examples, stateful_step_count=given.steps, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck)))
    except Enough:
        print("the time is over")
    counts = ", ".join(f"{name} {n}" for name, n in sorted(journal.counts.items()))
    print(f"{journal.example} sequences ({counts}): {len(journal.wrong)} wrong")
    return 1 if journal.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
