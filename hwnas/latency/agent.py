"""The agent: a program that times networks on another machine. It is sent there, and ends when its caller is gone.

It has two processes. The worker answers the caller; while it times, nothing but the timed calls runs in it. The keeper,
its parent, waits for the end: it ends a worker whose caller is gone, reports how a worker crashed, and removes
temporary files. A message is a line of JSON. The caller's messages are not checked: this program is the caller's own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hwnas.errors import HwnasError, TargetError
from hwnas.latency.copies import TimedFile
from hwnas.latency.curve import time_curve
from hwnas.latency.measurement import Protocol
from hwnas.latency.wave import Wave
from hwnas.runtimes.child import WAITING, limited_memory, stacks_mb
from hwnas.runtimes.runtime import Compiled, load_runtime
from hwnas.system.paths import unwritten
from hwnas.system.processes import die_with_parent
from hwnas.target import Host, Target

MOST_KEPT = 4 << 30  # bytes of all files
KEPT_COMPILED = 32  # networks that stay compiled
NOTE_EVERY_S = 1.0  # between two notes of progress
SILENCE_S = 120  # seconds without a request, after which the agent ends
Network = Mapping[str, Any]  # a file's name, target, and shape of an image


@lru_cache(maxsize=KEPT_COMPILED)
def _compiled(file: TimedFile) -> Compiled:
    """Compile a file for its answers and its executed precisions."""
    return load_runtime(file.target.runtime).compile(file.path, file.target)


def main(back: int, cache: str, own: str) -> NoReturn:
    """Serve the caller who writes to standard input and reads from the file descriptor `back`, until it is gone.

    Args:
        back: The file descriptor of the answers.
        cache: The folder that stays.
        own: The folder in it that is removed at the end.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watched_end, worker_end = os.pipe()  # the first is readable when the worker, which alone has the second, has ended
    process = os.fork()  # this process has no threads, and has loaded no runtime
    if not process:
        with contextlib.suppress(BrokenPipeError):  # the caller is gone
            os.close(watched_end)
            _Worker(back, Path(cache), Path(own)).serve()
        os._exit(0)
    os.close(worker_end)
    # The keeper sleeps until the caller or the worker is gone.
    poll = select.poll()
    poll.register(0, select.POLLRDHUP)  # only its end: the worker reads its lines
    poll.register(watched_end, select.POLLIN)
    ready = dict(poll.poll())
    os.kill(process, signal.SIGKILL)  # no error if it has ended: a process exists until its parent waits for it
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    shutil.rmtree(own, ignore_errors=True)
    if watched_end in ready and code:
        message = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        os.write(back, json.dumps({"error": "Crash", "message": message}).encode() + b"\n")
    sys.exit(0)


class _Worker:
    """The process that compiles and times."""

    def __init__(self, back: int, cache: Path, own: Path) -> None:
        die_with_parent()
        self.back, self.cache, self.files, self.own = os.fdopen(back, "wb"), cache, cache / "files", own
        self.noted_s = 0.0

    def serve(self) -> None:
        """Answer requests until there are no more."""
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        with open(0, "rb", closefd=False) as requests:
            while True:
                signal.alarm(SILENCE_S)
                line = requests.readline()
                signal.alarm(0)
                if not line:
                    return
                self.say(self.answer(json.loads(line)))

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a request, or its error. Any exception is one: a library may be half installed here."""
        memory_mb, operation = asked.pop("memory_mb", None), getattr(self, f"_{asked.pop('op')}")
        if memory_mb:
            memory_mb += stacks_mb(asked.get("job", {}).get("threads") or [asked["network"]["target"]["threads"]])
        try:
            with limited_memory(memory_mb) if memory_mb else contextlib.nullcontext():
                return {"result": operation(**asked)}
        except HwnasError as error:
            return {"error": type(error).__name__, "message": str(getattr(error, "fact", error)),
                    "remedy": getattr(error, "remedy", "")}
        except MemoryError:
            return {"error": "CandidateError", "message": "out of memory there"}
        except OSError as error:
            return {"error": "DeviceError", "message": str(unwritten(Path(error.filename or self.cache), error))}
        except Exception as error:
            return {"error": "DeviceError", "message": f"{type(error).__name__}: {error}"}

    def say(self, message: Mapping[str, Any]) -> None:
        self.back.write(json.dumps(message).encode() + b"\n")
        self.back.flush()

    def tell(self, share: float, note: str) -> None:
        """Send progress every NOTE_EVERY_S at most, and notes of waiting at once; never while a call is timed."""
        if note.startswith(WAITING) or time.monotonic() - self.noted_s >= NOTE_EVERY_S:
            self.noted_s = time.monotonic()
            self.say({"note": note, "share": share})

    def file(self, network: Network) -> TimedFile:
        return TimedFile(self.files / network["file"], Target.from_config(network["target"]), tuple(network["shape"]))

    # The operations of requests, by their names.

    def _hello(self) -> dict[str, Any]:
        """Return this host. Remove files of killed agents, and the files used longest ago beyond MOST_KEPT bytes."""
        for folder in self.own.parent.iterdir():  # machine-process: other machines may have the same home
            machine, _, process = folder.name.rpartition("-")
            if machine == os.uname().nodename and not Path("/proc", process).exists():
                shutil.rmtree(folder, ignore_errors=True)
        total = 0
        with contextlib.suppress(FileNotFoundError):  # another agent tidies too
            for path in sorted(self.files.iterdir(), key=os.path.getmtime, reverse=True):
                total += path.stat().st_size
                if total > MOST_KEPT:
                    path.unlink()
        return Host.detect().to_dict()

    def _put(self, file: str, offset: int, size: int, piece: str) -> int:
        """Write a piece of a file of `size` bytes and return how many are here. Several agents may write it at once."""
        path, part = self.files / file, self.files / f"{file}.part"
        with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as content:
            if path.is_file():
                part.unlink(missing_ok=True)
                os.utime(path)
                return size
            content.seek(offset)
            content.write(base64.b64decode(piece))
            # A whole file gets its name, the hash of its content, only if the content has this hash.
            n_here = content.seek(0, os.SEEK_END)
            if n_here >= size:
                content.seek(0)
                if hashlib.file_digest(content, "sha256").hexdigest() != file.partition(".")[0]:
                    part.unlink(missing_ok=True)
                    raise TargetError(f"a file arrived torn ({file[:12]}). Give the same command again.")
                with contextlib.suppress(FileNotFoundError):  # another agent was quicker
                    os.replace(part, path)
        return n_here

    def _check(self, runtime: str, target: dict[str, Any] | None) -> str:
        """Return the runtime's version; TargetError if a package is missing, or if it cannot run the target."""
        for package in filter(None, (getattr(load_runtime(runtime), "package", ""), runtime != "litert" and "onnx")):
            if find_spec(package.replace("-", "_")) is None:
                raise TargetError(f"its {sys.executable} has no {package}. Install it there: {sys.executable} -m pip "
                                  f"install {package}")
        if target is not None:
            load_runtime(runtime).check(Target.from_config(target))
        return load_runtime(runtime).version()

    def _compile(self, network: Network) -> dict[str, Any]:
        return _compiled(self.file(network)).execution.to_dict()

    def _logits(self, network: Network, images: str, shape: Sequence[int]) -> str:
        batch = np.frombuffer(zlib.decompress((self.files / images).read_bytes()), "<f4").reshape(shape)
        answers = np.ascontiguousarray(_compiled(self.file(network)).logits(batch), "<f4")
        return f"{','.join(map(str, answers.shape[1:]))}:{base64.b64encode(answers.tobytes()).decode()}"

    def _curve(self, network: Network, reference: Network, job: Mapping[str, Any]) -> dict[str, Any]:
        file = self.file(network)
        return time_curve(file, self.file(reference), job, load_runtime(file.target.runtime), self.tell)

    def _time(self, files: Mapping[str, Network], reference: Network, protocol: Mapping[str, Any], **options: Any
              ) -> dict[str, Any]:
        wave = Wave({name: self.file(network) for name, network in files.items()}, self.file(reference),
                    protocol=Protocol.from_dict(protocol), **options)
        measured, failed = wave.time(self.tell)
        return {"measured": {name: each.to_dict() for name, each in measured.items()}, "failed": failed}
