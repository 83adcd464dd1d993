"""SIGKILL at random moments of every command that writes: is anything acknowledged lost, does anything outlive it, and
does the same command go on to a whole result?

    python -m tests.soak.kills --commands search,search4,profile,quantize,train,verify \\
        --kills 1000 --seed 0 --out FOLDER [--minutes M] [--results FILE]

Inputs are tiny and real: digits at 8 px, a space of 8 px networks, a latency table of made-up times, ONNX Runtime. The
command's process is forked from this one, which has imported its libraries already, and then does what
`python -m hwnas.X` does; a start costs no seconds this way, and all kills fall into its work. Processes that the
command starts itself begin anew. The moment is drawn evenly from 0 to the time that the command takes when nobody kills
it. After each kill the same command is given on the same folder, and perhaps killed again, until it ends; its result is
then checked, and a new folder begun. A line of JSON tells of each kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

from hwnas.system.processes import die_with_parent
from tests.soak.commands import ANY_MACHINE, COMMANDS, MADE, OWN_HOME, ROOT, THIRD_PARTY, Attacked

MARK = "HWNAS_KILLS"  # in the environment of everything that a command starts
GONE_S = 10.0  # how long a process may take to notice that its parent is gone
HANGS_S = 300.0
KEPT = 2000  # characters of what a failed command said


@dataclass
class Started:
    """A running command."""

    pid: int
    mark: str
    said: Path
    began: float = field(default_factory=time.monotonic)

    def ended(self, within_s: float) -> int | None:
        """Its exit code as soon as it ends within so many seconds (of its start), None where it does not."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() - self.began >= within_s:
                return None
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL to its main process alone."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def left(self) -> list[int]:
        """Processes that still run `GONE_S` seconds after the end of the main one; they are killed then."""
        until = time.monotonic() + GONE_S
        while (running := _marked(self.mark, self.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return running


def _marked(mark: str, session: int) -> list[int]:
    """Processes with this mark in their environment or of this session, zombies left out."""
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX" and (int(fields[3]) == session or f"{MARK}={mark}".encode() in (
                    folder / "environ").read_bytes().split(b"\0")):
                pids.append(int(folder.name))
    return pids


def start(module: str, arguments: list[str], said: Path, home: Path | None = None,
          first: Callable[[], None] | None = None) -> Started:
    """Run `python -m module arguments` in a process forked from this one; its words go to the file `said`. It calls
    `first` before all else."""
    mark = os.urandom(8).hex()
    pid = os.fork()
    if pid:
        return Started(pid, mark, said)
    code = 1
    try:
        os.setsid()
        die_with_parent()
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.environ[MARK] = mark
        if home is not None:
            os.environ["HWNAS_HOME"] = str(home)
        if first is not None:
            first()
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@dataclass
class Attack:
    """One command under attack: its present folder, the moments of its kills, and what came of them."""

    name: str
    command: Attacked
    given: Path
    folder: Path
    random: random.Random
    lasts_s: float = 0.0
    kills: int = 0
    runs: int = 0
    pending: dict[str, Any] | None = None  # the last kill, until it is known whether the command went on

    @property
    def out(self) -> Path:
        """The folder of the present run."""
        return self.folder / f"run{self.runs}"

    @property
    def reference(self) -> Path:
        """The folder of a run that nobody killed."""
        return self.folder / "reference"

    def begin(self, out: Path) -> Started:
        """Give the command."""
        home = out if self.name in OWN_HOME else None
        return start(self.command.module, self.command.arguments(self.given, out), self.folder / "said.txt", home)

    def measure(self) -> None:
        """Run it once to its end, which tells how long it takes and what it leaves."""
        self.command.prepare(self.given, self.reference)
        running = self.begin(self.reference)
        code = running.ended(HANGS_S)
        self.lasts_s = time.monotonic() - running.began
        wrong = fault_of(running, code, self.command, self.reference, self.reference)
        if wrong:
            raise SystemExit(f"{self.name}, which nobody killed: {wrong}")
        self.command.prepare(self.given, self.out)

    def strike(self, kill: bool = True) -> list[dict[str, Any]]:
        """Give the command and kill it at a random moment, unless it ends before; returns what is known by then."""
        moment = self.random.uniform(0, self.lasts_s) if kill else HANGS_S
        before = self.command.acknowledged(self.out)
        running = self.begin(self.out)
        code = running.ended(moment)
        if code is None and kill:
            before |= self.command.acknowledged(self.out)
            running.kill()
            left = running.left()
            after = self.command.acknowledged(self.out)
            lost = [key for key, value in before.items() if after.get(key) != value]
            known = self._settle(True)
            self.kills += 1
            self.pending = {
                "command": self.name, "kill": self.kills, "moment_s": round(moment, 3), "of_s": round(self.lasts_s, 3),
                "before": len(before), "after": len(after), "lost": lost, "leftovers": len(left)}
            return known
        if code is None:
            running.kill()
        wrong = fault_of(running, code, self.command, self.out, self.reference)
        known = self._settle(not wrong)
        if wrong:
            known.append({"command": self.name, "run": self.runs, "wrong": wrong})
        else:
            shutil.rmtree(self.out)
        self.runs += 1
        self.command.prepare(self.given, self.out)
        return known

    def _settle(self, resumed: bool) -> list[dict[str, Any]]:
        known = [] if self.pending is None else [{**self.pending, "resumed": resumed}]
        self.pending = None
        return known


def fault_of(running: Started, code: int | None, command: Attacked, out: Path, reference: Path) -> str:
    """What is wrong with a command that ended by itself with this code, and with its results; "" where nothing is."""
    words = running.said.read_text(errors="replace")
    if code is None:
        return f"it hangs: {words[-KEPT:]}"
    if code or "Traceback" in words:
        return f"exit code {code}: {words[-KEPT:]}"
    if left := running.left():
        return f"{len(left)} processes are left"
    try:
        return command.whole(out, reference)
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def surround(folder: Path) -> Path:
    """Make a folder in which commands find a home and temporary files of their own; its absolute path. Here and in the
    processes that are started from here, no measurement is INVALID, and all libraries are there."""
    folder.mkdir(parents=True)
    out = folder.resolve()
    (out / "tmp").mkdir()
    os.environ.update({"TMPDIR": str(out / "tmp"), "HWNAS_HOME": str(out / "home"), "HWNAS_OWN_TABLES": "1",
                       "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1",
                       "PYTHONPATH": os.pathsep.join([str(ANY_MACHINE), str(ROOT), str(THIRD_PARTY)])})
    runpy.run_path(str(ANY_MACHINE / "sitecustomize.py"))
    _import_libraries()
    warnings.filterwarnings("ignore", "'hwnas.* found in sys.modules")  # runpy runs what is imported already
    return out


def _import_libraries() -> None:
    """Import what the commands do, without starting a thread of theirs: processes are forked from this one."""
    import matplotlib.pyplot  # noqa: F401
    import onnx  # noqa: F401
    import sklearn.datasets  # noqa: F401

    from hwnas.networks.weights import import_timm

    import_timm()
    import timm.optim
    import timm.scheduler
    import timm.utils

    import hwnas.front.verification
    import hwnas.latency.deployment
    import hwnas.networks.modules
    import hwnas.quantize
    import hwnas.samplers.informed
    import hwnas.search.__main__
    import hwnas.search.sampling
    import hwnas.study.study
    import hwnas.train
    import hwnas.training.job
    import hwnas.training.mixed_precision
    import hwnas.verify  # noqa: F401
    from hwnas.cli.command import compose
    from hwnas.system.libraries import import_onnxruntime

    import_onnxruntime()
    import timm  # noqa: F401

    compose("search", ["+target=ort_fp32"])


def main() -> int:
    """Attack, print the counts; 1 when anything was lost, left or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", default=",".join(COMMANDS), help="names, with commas between")
    parser.add_argument("--kills", type=int, default=70, help="over all commands")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: a new one, which is printed)")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist, for inputs and runs")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no kill after that")
    parser.add_argument("--results", type=Path, default=None, help="a file that the lines are added to")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    results = given.results or given.out / "results.jsonl"
    chosen = given.commands.split(",")
    if unknown := set(chosen) - set(COMMANDS):
        parser.error(f"no commands: {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    out = surround(given.out)
    print(f"seed {seed}", flush=True)
    inputs = make_inputs(out, chosen)
    lines: list[dict[str, Any]] = []

    def tell(known: list[dict[str, Any]]) -> None:
        lines.extend(known)
        write(results, known)

    write(results, [header(seed, chosen)])
    until = time.monotonic() + 60 * given.minutes
    attacks = []
    for name in chosen:
        folder = out / name
        folder.mkdir()
        attack = Attack(name, COMMANDS[name], inputs, folder, random.Random(f"{seed} {name}"))
        attack.measure()
        print(f"{name}: {attack.lasts_s:.1f} s when nobody kills it", flush=True)
        attacks.append(attack)
    with suppress(KeyboardInterrupt):
        while sum(attack.kills for attack in attacks) < given.kills and time.monotonic() < until:
            tell(min(attacks, key=lambda attack: attack.kills * attack.lasts_s**0.5).strike())
    for attack in attacks:
        if attack.pending:
            tell(attack.strike(kill=False))
    return _report(lines)


def make_inputs(out: Path, chosen: Iterable[str]) -> Path:
    """The folder of what the `chosen` commands are given: files, a network trained and a run made by the commands
    themselves."""
    inputs, said = out / "given", out / "said.txt"
    inputs.mkdir()
    steps = [("tests.soak.commands", [str(inputs)])]
    steps += [(COMMANDS[name].module, COMMANDS[name].arguments(inputs, inputs / made))
              for made, (name, user) in MADE.items() if user in chosen]
    for module, arguments in steps:
        if start(module, arguments, said).ended(HANGS_S) != 0:
            raise SystemExit(f"the inputs could not be made by {module}: {said.read_text()[-KEPT:]}")
    return inputs


def header(seed: int, chosen: Sequence[str]) -> dict[str, Any]:
    """The first line of the results of a run."""
    from hwnas.target import Host

    return {"host": Host.detect().name, "cores": os.cpu_count(), "seed": seed, "commands": list(chosen),
            "began": datetime.now(UTC).isoformat(timespec="seconds")}


def write(results: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add lines of JSON to a file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _report(lines: list[dict[str, Any]]) -> int:
    """Print the counts."""
    kills = [line for line in lines if "kill" in line]
    by_name = Counter(line["command"] for line in kills)
    lost, left = sum(len(line["lost"]) for line in kills), sum(line["leftovers"] for line in kills)
    stuck = sum(not line["resumed"] for line in kills)
    wrong = [line for line in lines if "wrong" in line]
    print(f"{len(kills)} kills ({', '.join(f'{name} {n}' for name, n in by_name.items())}): {lost} acknowledged lost, "
          f"{left} processes left, {stuck} not resumed, {len(wrong)} results wrong")
    for line in wrong:
        print(f"{line['command']}: {line['wrong']}")
    return 1 if lost or left or stuck or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
