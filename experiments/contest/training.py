"""The trainings: child processes of hwnas.train, a few at a time, that end with this one; what is done is not done
again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from experiments.contest.networks import Network, Training, overrides, ready, validation_top1
from experiments.contest.options import Options
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, StudyError
from hwnas.system.paths import hold, write_atomic
from hwnas.system.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
NICE = 15
POLL_S = 0.3


def folder_of(out: Path, training: Training) -> Path:
    """Where hwnas.train works."""
    return out / "train" / training.name


def summary_of(out: Path, training: Training) -> dict[str, Any] | None:
    """What hwnas.train tells of a finished training, None where it is not finished; StudyError when it is torn."""
    path = folder_of(out, training) / "summary.json"
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {path}: {error}. Remove its folder, then give the same command again.") from None


def cpu_seconds(out: Path, training: Training) -> float | None:
    """CPU seconds of all its processes that ended while a contest waited for them; None where none is known."""
    try:
        return float(sum(json.loads(_cost_file(out, training).read_text())["cpu_s"]))
    except (OSError, ValueError, KeyError):
        return None


def claim(options: Options) -> None:
    """Let the folder belong to this data and recipe; ConfigError when it belongs to others."""
    path = options.out / "contest.json"
    if path.is_file():
        try:
            held = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise StudyError(f"cannot read {path}: {error}. Choose another out=DIR.") from None
        held.setdefault("bf16", "")  # folders of before there was a choice
        changed = [f"{key} was {held.get(key)}, now {value}" for key, value in options.identity.items()
                   if held.get(key) != value]
        if changed:
            raise ConfigError(f"{path}: {'; '.join(changed)}. One contest has one recipe: choose another out=DIR.")
    else:
        write_atomic(path, json.dumps(options.identity, indent=1) + "\n")


@dataclass
class _Child:
    training: Training
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float = field(default_factory=time.monotonic)


def train_all(networks: Sequence[Network], options: Options, console: Console) -> list[str]:
    """Train what is not trained yet, `options.jobs` at a time; names of those that failed, whose logs say why."""
    top1: dict[str, float | None] = {}
    started: set[str] = set()
    running: list[_Child] = []
    try:
        while True:
            _fill(networks, options, top1, started, running, console)
            if not running:
                return sorted(name for name, value in top1.items() if value is None)
            for child in list(running):
                if (code := _ended(child, options.out)) is not None:
                    running.remove(child)
                    top1[child.training.name] = _outcome(child, code, options.out, console)
            time.sleep(POLL_S)
    finally:
        for child in running:
            _stop(child)


def _fill(networks: Sequence[Network], options: Options, top1: dict[str, float | None], started: set[str],
          running: list[_Child], console: Console) -> None:
    """Start what may start; a training that is done already only becomes known, which may let others start."""
    while len(running) < options.jobs:
        training = next(ready(networks, options.seeds, top1, started), None)
        if training is None:
            return
        started.add(training.name)
        summary = summary_of(options.out, training)
        if summary is None:
            running.append(_start(training, options))
            console.say(f"{training.name}: training")
        else:
            top1[training.name] = validation_top1(summary)


def _start(training: Training, options: Options) -> _Child:
    path = options.out / "logs" / f"{training.name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = open(path, "ab")  # noqa: SIM115  closed when the child has ended
    process = subprocess.Popen(_command(training, options), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                               env={**os.environ, "PYTHONPATH": paths}, preexec_fn=_modest)
    return _Child(training, process, log)


def _command(training: Training, options: Options) -> list[str]:
    return [sys.executable, "-m", "hwnas.train", "-q",
            *overrides(training, options, folder_of(options.out, training))]


def _modest() -> None:
    """In the child: leave the cores to others where they want them, and end with the parent (Linux)."""
    os.nice(NICE)
    die_with_parent()


def _ended(child: _Child, out: Path) -> int | None:
    """The exit code, None while it runs; wait4 because it alone tells the CPU time of this one child."""
    pid, status, usage = os.wait4(child.process.pid, os.WNOHANG)
    if not pid:
        return None
    child.process.returncode = os.waitstatus_to_exitcode(status)
    child.log.close()
    _add_cost(out, child.training, usage.ru_utime + usage.ru_stime)
    return child.process.returncode


def _add_cost(out: Path, training: Training, cpu_s: float) -> None:
    """Under a lock: the same command may run twice in one folder, and one waits while the other trains."""
    path = _cost_file(out, training)
    held: Mapping[str, Any] = {}
    with hold(path.with_suffix(".lock")):
        with contextlib.suppress(OSError, ValueError):
            held = json.loads(path.read_text())
        write_atomic(path, json.dumps({"cpu_s": [*held.get("cpu_s", ()), round(cpu_s, 2)]}) + "\n")


def _cost_file(out: Path, training: Training) -> Path:
    return out / "logs" / f"{training.name}.json"


def _outcome(child: _Child, code: int, out: Path, console: Console) -> float | None:
    """Validation top-1, None with a line on what is wrong where it failed."""
    name, seconds = child.training.name, time.monotonic() - child.began
    summary = summary_of(out, child.training)
    if code or summary is None:
        said = Path(child.log.name).read_text(errors="replace").strip().splitlines()
        console.say(f"{name}: failed with exit code {code} ({(said or ['no message'])[-1][:300]}); its log: "
                    f"{child.log.name}. The same command tries again.")
        return None
    console.say(f"{name}: validation top-1 {validation_top1(summary):.2%}, test {summary['top1_test']:.2%} (fp32), "
                f"{seconds:.0f} s")
    return validation_top1(summary)


def _stop(child: _Child) -> None:
    """Ctrl-C or an error: what the last whole epoch holds is kept."""
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        child.process.wait()
    child.log.close()
