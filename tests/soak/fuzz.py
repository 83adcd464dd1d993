"""Wrong files for every parser: does each end in success or in one line, within 10 s and 1 GiB?

    python -m tests.soak.fuzz --out FOLDER [--minutes M | --inputs N] [--seed S] [--parsers table,space] \\
        [--results FILE]

Whole files (shipped ones, or tiny ones made at the start) are made wrong in their bytes and in their structure
(mutations.py), and given to the function that hwnas reads them with (parsers.py). That runs in a child process forked
from this one, which reads one file after another. A child may not allocate more than 1 GiB beyond what it began with,
nor compute for more than 10 s on one file. Whatever is neither success nor an error of hwnas in one line is a finding:
its file is kept in FOLDER/findings, with a line of JSON that tells parser, seed, number and what was raised. A finding
of a kind that is known already is only counted. The same seed makes the same files.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

from tests.soak.parsers import PARSERS, Parser

MOST_S, MOST_BYTES = 10, 1 << 30  # that one file may take
HANGS_S = 60.0  # of waiting rather than computing
_STATE = struct.Struct("<qqqqd")  # number of the file in work, read whole, refused, most KiB, most seconds
_BROKEN = 70
_SAID = 300  # characters of a message that are kept


@dataclass
class Fuzzed:
    """One parser under attack, and what is known of it by now."""

    name: str
    seed: int
    folder: Path
    inputs: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    state: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _STATE.size))

    @property
    def parser(self) -> Parser:
        """The parser."""
        return PARSERS[self.name]

    def file(self, number: int, examples: list[bytes]) -> bytes:
        """The wrong file of this number."""
        rng = random.Random(f"{self.seed} {self.name} {number}")
        data = rng.choice(examples)
        for _ in range(20):
            with suppress(ValueError, RecursionError, UnicodeError):  # an example that cannot be changed in this way
                return self.parser.mutate(data, rng)
        return data

    def attack(self, until: float, most: int) -> None:
        """Read wrong files until then, or so many in all; a new child follows one that died."""
        begun = time.monotonic()
        self._store(self.inputs, *self._load()[1:])
        while time.monotonic() < until and self.inputs < most:
            pid = os.fork()
            if not pid:
                self._child(until, most)
            self._watch(pid)
        self.seconds += time.monotonic() - begun

    def facts(self) -> dict[str, Any]:
        """A line of results."""
        _, read, refused, kib, seconds = self._load()
        return {"parser": self.name, "inputs": self.inputs, "read": read, "refused": refused,
                "findings": sum(self.kinds.values()), "kinds": dict(self.kinds), "most_mib": round(kib / 1024),
                "most_s": round(seconds, 2), "seconds": round(self.seconds, 1)}

    def _load(self) -> tuple[int, int, int, int, float]:
        return _STATE.unpack(self.state[:])

    def _store(self, *values: float) -> None:
        self.state[:] = _STATE.pack(*values)

    def _watch(self, pid: int) -> None:
        """Wait for a child; its death is a finding of the file it had in work."""
        seen, since = -1, time.monotonic()
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            number = self._load()[0]
            if ended:
                break
            if number != seen:
                seen, since = number, time.monotonic()
            elif time.monotonic() - since > HANGS_S:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        code = os.waitstatus_to_exitcode(status)
        self.inputs = number
        self._take_up()
        if code == _BROKEN:
            raise SystemExit(f"{self.name}: a whole example cannot be read: {self._said.read_text()[-2000:]}")
        if code:
            why = {-signal.SIGPROF: f"more than {MOST_S} s of computing", -signal.SIGKILL: f"hangs for {HANGS_S:g} s"}
            self._note(number, why.get(code, f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"),
                       "", self._content(number))
            self.inputs = number + 1
            self._store(self.inputs, *self._load()[1:])

    def _content(self, number: int) -> bytes:
        with suppress(OSError):
            return (self._work / self.parser.place).read_bytes()
        return self.file(number, self.parser.examples())

    @property
    def _work(self) -> Path:
        return self.folder / f"work-{self.name}"

    @property
    def _said(self) -> Path:
        return self.folder / f"said-{self.name}.txt"

    def _take_up(self) -> None:
        """Findings that the child has told."""
        path = self.folder / f"told-{self.name}.jsonl"
        with suppress(FileNotFoundError):
            self.kinds.update(line.rstrip("\n") for line in path.open())
            path.unlink()

    def _note(self, number: int, what: str, said: str, content: bytes) -> None:
        """Keep a finding; of a kind that is known, only the count."""
        if what not in self.kinds:
            kept = self.folder / "findings"
            kept.mkdir(exist_ok=True)
            suffix = "".join(Path(self.parser.place).suffixes)
            (kept / f"{self.name}-{number}{suffix}").write_bytes(content)
            with (kept / "findings.jsonl").open("a") as file:
                file.write(json.dumps({"parser": self.name, "seed": self.seed, "number": number, "what": what,
                                       "said": said, "bytes": len(content)}) + "\n")
        self.kinds[what] += 1

    def _child(self, until: float, most: int) -> None:
        """Read files in this process, which ends here."""
        code = _BROKEN
        try:
            for stream in (1, 2):  # libtiff tells there of every image that it cannot read
                os.dup2(os.open(self._said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            self._read_all(until, most)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _read_all(self, until: float, most: int) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        path = self._work / self.parser.place
        path.parent.mkdir(parents=True)
        self.parser.around(self._work)
        os.chdir(self._work)
        os.environ.update({"HWNAS_HOME": str(self._work / "home"), "MPLBACKEND": "Agg"})
        examples = self.parser.examples()
        path.parent.mkdir(parents=True, exist_ok=True)
        for example in dict.fromkeys(examples):
            path.write_bytes(example)
            self.parser.read(self._work)  # an example that is not read would fuzz nothing
        told = (self.folder / f"told-{self.name}.jsonl").open("a")
        new = set(self.kinds)
        start_kib = _bound_memory()
        number, read, refused, kib, longest = self._load()
        while number < most and time.monotonic() < until:
            self._store(number, read, refused, kib, longest)
            content = self.file(number, examples)
            path.write_bytes(content)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, MOST_S)
            what, said, whole = self._outcome()
            signal.setitimer(signal.ITIMER_PROF, 0)
            longest = max(longest, time.process_time() - began)
            most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            kib = max(kib, most_kib - start_kib)
            read, refused, number = read + whole, refused + (not whole and not what), number + 1
            if not what and most_kib - start_kib > MOST_BYTES >> 10:
                what = "more than 1 GiB of memory"
            if what:
                kinds, self.kinds = self.kinds, Counter(new)
                self._note(number - 1, what, said, content)
                self.kinds = kinds
                new.add(what)
                told.write(what + "\n")
                told.flush()
            if most_kib - start_kib > MOST_BYTES >> 11:
                break  # the peak cannot be measured again in this process
        self._store(number, read, refused, kib, longest)

    def _outcome(self) -> tuple[str, str, bool]:
        """What is wrong with the reading of the present file ("": nothing), the words, and whether it was read."""
        from hwnas.errors import HwnasError

        try:
            self.parser.read(self._work)
            return "", "", True
        except HwnasError as error:
            said = str(error)
            if _memory(error):
                return f"out of memory: {_place(error)}", said[:_SAID], False
            return "", said[:_SAID], False
        except Exception as error:
            said = " | ".join(traceback.format_exception_only(error))[:_SAID]
            return f"{type(error).__name__}: {_place(error)}", said, False
        finally:
            gc.collect() if gc.get_count()[0] > 500 else None


def _memory(error: BaseException | None) -> bool:
    """Whether an error stands for one about memory."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(error: BaseException) -> str:
    """Where in hwnas an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/hwnas/" in frame.filename] or list(frames)
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"


def _bound_memory() -> int:
    """Allow this process `MOST_BYTES` more than it has; returns the KiB of memory that it has had at most."""
    gc.collect()
    gc.freeze()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def import_libraries() -> None:
    """Import once what several parsers need: their processes are forked from this one."""
    import onnx  # noqa: F401
    import pandas  # noqa: F401
    import scipy.stats  # noqa: F401
    from hydra import compose  # noqa: F401

    import hwnas.api
    import hwnas.front.report
    import hwnas.validate
    import hwnas.verify  # noqa: F401


def main() -> int:
    """Attack, print the counts; 1 when there were findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parsers", default=",".join(PARSERS), help="names, with commas between")
    parser.add_argument("--minutes", type=float, default=None, help="over all parsers (default: 10 each)")
    parser.add_argument("--inputs", type=int, default=None, help="of each parser, fewer of slow ones")
    parser.add_argument("--seed", type=int, default=None, help="of the files (default: a new one, which is printed)")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist, for findings")
    parser.add_argument("--results", type=Path, default=None, help="a file that the lines are added to")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    chosen = given.parsers.split(",")
    if unknown := set(chosen) - set(PARSERS):
        parser.error(f"no parsers: {', '.join(sorted(unknown))}; there are {', '.join(PARSERS)}")
    given.out.mkdir(parents=True)
    out = given.out.resolve()
    tempfile.tempdir = str(out)
    print(f"seed {seed}", flush=True)
    minutes = 10 * len(chosen) if given.minutes is None else given.minutes
    each_s = 60 * minutes / len(chosen)
    if len(chosen) > 1:
        import_libraries()
    lines = []
    for name in chosen:
        fuzzed = Fuzzed(name, seed, out)
        until = 1e12 if given.inputs is not None else time.monotonic() + each_s
        fuzzed.attack(until, 2**40 if given.inputs is None else round(given.inputs * PARSERS[name].share))
        lines.append(fuzzed.facts())
        print(json.dumps(lines[-1]), flush=True)
        shutil.rmtree(out / f"work-{name}", ignore_errors=True)
    if given.results:
        from hwnas.target import Host

        about = {"host": Host.detect().name, "seed": seed, "minutes": round(minutes, 1), "ended": datetime.now(
            UTC).isoformat(timespec="seconds")}
        with given.results.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in [about, *lines])
    found = sum(line["findings"] for line in lines)
    print(f"{sum(line['inputs'] for line in lines)} files for {len(lines)} parsers: {found} findings"
          f"{f', kept in {out}/findings' if found else ''}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
