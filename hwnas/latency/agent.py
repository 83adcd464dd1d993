"""The agent: what times networks on another machine, with numpy and a runtime alone.

Two processes. The keeper hears the caller on standard input, holds the files that came, and ends when the caller is
gone. The worker, its child, compiles and times: a network that crashes its runtime ends the worker alone, and nothing
but the timed calls runs in it. Both speak frames (`hwnas.system.frames`); the caller asks one thing at a time.
What they believe: sizes within limits, names that are checksums, options that are checked like a user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hwnas.errors import DeviceError, FileError, HwnasError, TargetError
from hwnas.latency.copies import TimedFile, compile_copies, noise
from hwnas.latency.curve import time_curve
from hwnas.latency.harness import call_overhead_ms, measure
from hwnas.latency.table import Protocol
from hwnas.runtimes.child import limit_memory
from hwnas.runtimes.runtime import PACKAGES, inspected, load_runtime
from hwnas.system.documents import check_shape
from hwnas.system.frames import MOST_BYTES, Frame, LinkLost, Untrusted, receive, send
from hwnas.system.paths import no_space, unwritten
from hwnas.system.processes import die_with_parent
from hwnas.target import Host, Target, measuring_lock, usable_cores

if TYPE_CHECKING:
    from hwnas.latency.harness import Call
    from hwnas.runtimes.runtime import Compiled, Runtime

MOST_FILE = 2 << 30  # bytes of one file, and of all that are kept
MOST_KEPT = 4 << 30
MOST_COPIES, MOST_NETWORKS, MOST_REPEATS = 64, 10_000, 10_000
MOST_BATCH, MOST_STREAMS = 4096, 1024
KEPT_AGENTS = 4
KEPT_COMPILED = 32  # files, each in its copies, before another is compiled for its answers
SILENCE_S = 120.0  # the caller is heard at least every half minute while it waits
NOTE_EVERY_S = 1.0
WAITING = "waiting"
NAME = re.compile(r"[0-9a-f]{64}(?:\.[a-z0-9]{1,8})?")
_NETWORK = {"file": str, "target": dict, "shape": [int]}
_SHAPES: dict[str, Any] = {  # what each request holds
    "hello": {}, "ping": {}, "overhead": {},
    "have": {"files": [str]}, "put": {"file": str, "offset": int, "size": int},
    "check": {"target": dict, "version": bool, "package": str}, "compile": {**_NETWORK, "copies": int}, "run": _NETWORK,
    "profile": {**_NETWORK, "repeats": int}, "inspect": {**_NETWORK, "repeats": int, "memory_mb": int},
    "logits": {**_NETWORK, "images": str},
    "measure": {"networks": {"*": {**_NETWORK, "copies": int}}, "reference": {**_NETWORK, "copies": int},
                "protocol": dict, "seed": int, "quiet_ms": (float, None), "threads": int},
    "curve": {"network": _NETWORK, "reference": _NETWORK, "job": {
        "batches": [int], "streams": int, "seconds": float, "seed": int, "quiet_ms": (float, None), "memory_mb": int}}}
CURVE = tuple(_SHAPES["curve"]["job"])
Tell = Callable[[float, str], None]


def main(line: int, back: int, cache: str) -> NoReturn:
    """Serve the caller who writes to `line` and reads from `back` until it is gone; files are kept in `cache`."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _end)
    os.environ.setdefault("OPENVINO_TELEMETRY_OPTOUT", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keeper = _Keeper(line, back, Path(cache))
    code = 0
    try:
        keeper.serve()
    except (LinkLost, Untrusted) as error:
        print(f"agent: {error}", file=sys.stderr)
        code = 1
    finally:
        keeper.close()
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


class _Keeper:
    """The process that hears the caller."""

    def __init__(self, line: int, back: int, cache: Path) -> None:
        self.line, self.back = line, back
        self.files, self.own = cache / "files", cache / "tmp" / str(os.getpid())
        self.worker: tuple[int, int, int] | None = None  # process, where it reads, where it writes
        self.busy = self.once = False

    def serve(self) -> None:
        """Hear requests until there are no more."""
        while True:
            poll = select.poll()
            for line in (self.line, *((self.worker[2],) if self.worker else ())):
                poll.register(line, select.POLLIN | select.POLLHUP)
            ready = {line for line, _ in poll.poll(SILENCE_S * 1e3)}
            if not ready:
                raise LinkLost(f"the caller was not heard for {SILENCE_S:g} s")
            if self.worker and self.worker[2] in ready:
                self._pass_on()
            if self.line in ready:
                self._hear()

    def close(self) -> None:
        """End the worker, and leave nothing but the files."""
        self._end_worker()
        shutil.rmtree(self.own, ignore_errors=True)

    def _hear(self) -> None:
        frame = receive(self.line, SILENCE_S)
        operation = frame.values.get("op")
        if operation == "ping":
            return
        if self.busy or operation not in _SHAPES:
            raise Untrusted(f"{str(operation)[:40]!r} was not to be asked now")
        try:
            check_shape(dict(frame.values), _SHAPES[str(operation)])
            own = getattr(self, f"_{operation}", None)
            if own is not None:
                send(self.back, {"result": own(frame)})
                return
            self._ask_worker(frame)
        except ValueError as error:
            raise Untrusted(f"{operation}: {error}") from None
        except (HwnasError, OSError) as error:
            send(self.back, _told(error))

    # what the keeper does itself

    def _hello(self, frame: Frame) -> dict[str, Any]:
        self._tidy()
        host = Host.detect()
        return {"host": host.to_dict(), "python": sys.version.split()[0], "executable": sys.executable}

    def _have(self, frame: Frame) -> dict[str, Any]:
        """How many bytes of each file are here; a whole one is marked as used."""
        sizes = {}
        for name in frame.values["files"]:
            path = self._path(name)
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
            sizes[name] = -1 if path.is_file() else _size(_part(path))
        return {"sizes": sizes}

    def _put(self, frame: Frame) -> dict[str, Any]:
        """Append a piece of a file; the last one makes it whole, if its checksum is its name."""
        path, values = self._path(frame.values["file"]), frame.values
        offset, size = values["offset"], values["size"]
        if not 0 <= offset <= offset + len(frame.content) <= size <= MOST_FILE:
            raise ValueError(f"a piece at {offset} of a file of {size} bytes")
        part = _part(path)
        try:
            self.files.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(part, "ab") as file:
                file.truncate(offset)
                file.write(frame.content)
        except OSError as error:
            raise DeviceError(str(unwritten(self.files, error))) from None
        if _size(part) == size:
            with open(part, "rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            if checksum != path.name.partition(".")[0]:
                part.unlink()
                raise TargetError(f"a file arrived torn ({path.name[:12]}). Give the same command again.")
            os.replace(part, path)
        return {"size": offset + len(frame.content)}

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ValueError("a file's name is no checksum")
        return self.files / name

    def _tidy(self) -> None:
        """Remove what agents left that were killed, old agents, and the files used longest ago where there are too
        many."""
        self.own.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in self.own.parent.iterdir():
            if not (folder.name.isdigit() and Path("/proc", folder.name).exists()):
                shutil.rmtree(folder, ignore_errors=True)
        # zips of a caller that works now are among the newest: each connection writes its own anew
        for path in sorted(self.files.parent.glob("agent-*"), key=lambda path: path.stat().st_mtime)[:-KEPT_AGENTS]:
            path.unlink(missing_ok=True)
        files = sorted((path for path in self.files.glob("*") if path.is_file()), key=lambda path: path.stat().st_mtime)
        total = sum(map(_size, files))
        for path in files:
            if total <= MOST_KEPT:
                break
            total -= _size(path)
            path.unlink(missing_ok=True)

    # the worker

    def _ask_worker(self, frame: Frame) -> None:
        self.once = frame.values["op"] in ("curve", "inspect")
        if self.worker is not None and self.once:  # its memory is limited: nothing else may fill it
            self._end_worker()
        if self.worker is None:
            self.worker = self._start()
        with contextlib.suppress(LinkLost):  # it has ended, which is heard next
            send(self.worker[1], frame.values, frame.content)
        self.busy = True

    def _end_worker(self) -> None:
        if self.worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker[0], signal.SIGKILL)
            self._reap()
            self.worker = None

    def _start(self) -> tuple[int, int, int]:
        theirs, ours = os.pipe()
        back, said = os.pipe()
        process = os.fork()  # this process has no threads, and has loaded no runtime
        if process:
            os.close(theirs)
            os.close(said)
            return process, ours, back
        with contextlib.suppress(BaseException):
            for line in (ours, back, self.line, self.back):
                os.close(line)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent()
            tempfile.tempdir = str(self.own)
            os.environ["TMPDIR"] = str(self.own)
            _Worker(theirs, said, self.files, self.own).serve()
        os._exit(1)

    def _pass_on(self) -> None:
        """An answer of the worker's for the caller; where the worker has ended, what ended it."""
        assert self.worker is not None
        try:
            frame = receive(self.worker[2])
        except LinkLost:
            status = self._reap()
            self.worker = None
            if self.busy:
                self.busy = False
                ended = (f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}")
                send(self.back, {"error": "Crash", "message": ended})
            return
        self.busy = "note" in frame.values
        send(self.back, frame.values, frame.content)
        if self.once and not self.busy:
            self._end_worker()

    def _reap(self) -> int:
        assert self.worker is not None
        process, *lines = self.worker
        for line in lines:
            os.close(line)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _told(error: BaseException) -> dict[str, Any]:
    """An error as plain values."""
    if isinstance(error, FileError):
        return {"error": "FileError", "message": str(error), "fact": error.fact, "remedy": error.remedy}
    if isinstance(error, HwnasError):
        return {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, OSError) and (told := no_space(error)) is not None:
        return {"error": "DeviceError", "message": str(told)}
    if isinstance(error, ImportError):
        return {"error": "TargetError", "message": f"its {sys.executable} cannot load what the runtime needs: {error}"}
    return {"error": "DeviceError", "message": f"{type(error).__name__}: {error}"}


class _Worker:
    """The process that compiles and times."""

    def __init__(self, line: int, back: int, files: Path, folder: Path) -> None:
        self.line, self.back, self.files, self.folder = line, back, files, folder
        self.runtimes: dict[str, Runtime] = {}
        self.compiled: dict[tuple[str, Target], list[Compiled]] = {}
        self.kept: set[tuple[str, Target]] = set()  # the last reference
        self.measured = False
        self.noted = 0.0

    def serve(self) -> None:
        """Answer requests until the keeper is gone."""
        while True:
            frame = receive(self.line)
            try:
                result = getattr(self, f"_{frame.values['op']}")(frame.values)
                content = b""
                if isinstance(result, np.ndarray):
                    content, result = result.tobytes(), {"shape": list(result.shape)}
                send(self.back, {"result": result}, content)
            except LinkLost:
                return
            except MemoryError:
                send(self.back, {"error": "CandidateError", "message": "out of memory there"})
            except Exception as error:  # whatever it is, the caller hears it: a library may be half installed here
                send(self.back, _told(error))

    def tell(self, share: float, note: str) -> None:
        """Pass progress on, now and then: nothing of it happens while a call is timed."""
        if note.startswith(WAITING) or time.monotonic() - self.noted >= NOTE_EVERY_S:
            self.noted = time.monotonic()
            send(self.back, {"note": note, "share": min(max(float(share), 0.0), 1.0)})

    def runtime(self, target: Target, wanted: str = "", check: bool = True) -> Runtime:
        """The runtime of a target, which it can run; TargetError says how to install one that is not here, as `wanted`
        says (package==version)."""
        from importlib.util import find_spec

        package = PACKAGES.get(target.runtime)
        if package is not None and find_spec(package.replace("-", "_")) is None:
            raise TargetError(f"its {sys.executable} has no {package}. Install it there: {sys.executable} -m pip "
                              f"install {wanted or package}")
        if target.runtime not in self.runtimes:
            self.runtimes[target.runtime] = load_runtime(target.runtime)
        if check:
            self.runtimes[target.runtime].check(target)
        return self.runtimes[target.runtime]

    def copies(self, file: str, target: Target, n: int) -> list[Compiled]:
        """A file compiled `n` times; what is compiled already is used again."""
        held = self.compiled.setdefault((file, target), [])
        if len(held) < n:
            held += compile_copies(self.path(file), target, n - len(held), self.folder, self.runtime(target))
        return held[:n]

    def path(self, name: str) -> Path:
        """Where a file lies that the caller has sent."""
        path = self.files / name
        if not NAME.fullmatch(name) or not path.is_file():
            raise ValueError("a file is named that was not sent")
        return path

    def calls(self, network: Mapping[str, Any]) -> list[Call]:
        """The bound calls of a network of a request."""
        file = timed_file(network, self.path(network["file"]))
        if not 0 < network["copies"] <= MOST_COPIES:
            raise ValueError(f"{network['copies']} copies of a network")
        images = noise(file.target.batch, file.shape)
        return [compiled.bind(images) for compiled in self.copies(network["file"], file.target, network["copies"])]

    # what is asked

    def _check(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        runtime = self.runtime(Target.from_config(asked["target"]), asked["package"], not asked["version"])
        return {"version": runtime.version()}

    def _overhead(self, asked: Mapping[str, Any]) -> float:
        return call_overhead_ms(_nothing)

    def _compile(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if self.measured:  # those were of an earlier round
            self.compiled = {key: held for key, held in self.compiled.items() if key in self.kept}
            self.measured = False
        while len(self.compiled) >= KEPT_COMPILED:  # a compression asks one file after another
            self.compiled.pop(next(key for key in self.compiled if key not in self.kept))
        target = Target.from_config(asked["target"])
        execution = self.copies(asked["file"], target, min(max(asked["copies"], 1), MOST_COPIES))[0].execution
        return execution.to_dict()

    def _run(self, asked: Mapping[str, Any]) -> None:
        self.calls({**asked, "copies": 1})[0]()

    def _profile(self, asked: Mapping[str, Any]) -> list[list[Any]]:
        file = timed_file(asked, self.path(asked["file"]))
        compiled = self.copies(asked["file"], file.target, 1)[0]
        nodes = compiled.profile(noise(file.target.batch, file.shape), min(max(asked["repeats"], 1), MOST_REPEATS))
        return [[node.name, node.kind, node.ms] for node in nodes]

    def _inspect(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        file = timed_file(asked, self.path(asked["file"]))
        runtime, repeats = self.runtime(file.target), min(max(asked["repeats"], 1), MOST_REPEATS)
        if file.target.device == "cpu":
            limit_memory(asked["memory_mb"])
        compiled = inspected(runtime, file.path, file.target)
        with measuring_lock(usable_cores()):
            nodes = compiled.profile(noise(file.target.batch, file.shape), repeats)
        return {"execution": compiled.execution.to_dict(), "nodes": [asdict(node) for node in nodes]}

    def _logits(self, asked: Mapping[str, Any]) -> np.ndarray:
        file = timed_file(asked, self.path(asked["file"]))
        shape = asked["shape"]
        size = 4 * int(np.prod(shape, dtype=np.int64))
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"images of {size} bytes")
        content = zlib.decompressobj().decompress(self.path(asked["images"]).read_bytes(), size)
        if len(content) != size:
            raise ValueError("images of another size than was said")
        images = np.frombuffer(content, "<f4").reshape(shape)
        return np.ascontiguousarray(self.copies(asked["file"], file.target, 1)[0].logits(images), dtype="<f4")

    def _curve(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        job, networks = asked["job"], (asked["network"], asked["reference"])
        file, reference = (timed_file(network, self.path(network["file"])) for network in networks)
        if not 0 < len(job["batches"]) <= MOST_COPIES or not 0 <= job["streams"] <= MOST_STREAMS or not all(
                0 < batch <= MOST_BATCH for batch in job["batches"]):
            raise ValueError("too many batches or streams")
        runtime = self.runtime(file.target)
        if file.target.device == "cpu":
            limit_memory(job["memory_mb"])
        return time_curve(file, reference, {**job, "label": "the file"}, runtime, self.folder, self.tell)

    def _measure(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if not 0 < len(asked["networks"]) <= MOST_NETWORKS:
            raise ValueError(f"{len(asked['networks'])} networks at once")
        calls: dict[str, list[Call]] = {}
        for name, network in asked["networks"].items():
            calls[name] = self.calls(network)
            self.tell(0.0, f"compiled {len(calls)} of {len(asked['networks'])}")
        reference = asked["reference"]
        self.kept = {(reference["file"], Target.from_config(reference["target"]))}
        self.measured = True
        measurements = measure(calls, self.calls(reference), Protocol.from_dict(asked["protocol"]), seed=asked["seed"],
                               quiet_ms=asked["quiet_ms"], progress=self.tell, threads=asked["threads"])
        return {name: measurement.to_dict() for name, measurement in measurements.items()}


def timed_file(network: Mapping[str, Any], path: Path) -> TimedFile:
    """A network of a request, checked."""
    target, shape = Target.from_config(network["target"]), tuple(network["shape"])
    if not 1 <= len(shape) <= 4 or not 0 < 4 * target.batch * int(np.prod(shape, dtype=np.int64)) <= MOST_FILE or (
            min(shape) < 1):
        raise ValueError(f"images of shape {shape}")
    return TimedFile(path, target, shape)


def _nothing() -> None:
    """What the harness's own overhead is timed with."""
