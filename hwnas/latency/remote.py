"""A device that is reached over ssh: what is timed goes there as files, raw samples come back.

The agent (`hwnas.latency.agent`) is sent along, so that nothing need be installed there but numpy and the runtime. A
connection that is lost is made again; files that are there are not sent twice. What comes back is checked like a file
of somebody else's.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import tempfile
import time
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas import errors
from hwnas.errors import CandidateError, ConfigError, DeviceError, FileError, HwnasError, TargetError
from hwnas.latency.agent import CURVE, WAITING
from hwnas.latency.copies import TimedFile
from hwnas.latency.harness import Copies, Progress, Throughput
from hwnas.latency.table import Measurement, Protocol
from hwnas.runtimes.runtime import PACKAGES, Execution, NodeTime, load_runtime
from hwnas.system.documents import WRONG, check_shape
from hwnas.system.frames import Frame, LinkLost, Silent, Untrusted, readable, receive, send, write_all
from hwnas.system.paths import temporary_folder
from hwnas.system.ssh import REFUSED, Address, Connection, Refused, connect, one_line
from hwnas.target import PLAIN_NAME, Host, Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.cli.progress import Console

# What the agent needs of hwnas; a test runs it where there is nothing else.
_PARTS = ("__init__.py", "errors.py", "face.py", "lazy.py", "stats.py", "target.py", "cli/__init__.py",
          "cli/options.py", "system/*.py", "space/__init__.py", "space/architecture.py", "space/blocks/*.py",
          "runtimes/*.py", "networks/__init__.py", "networks/qdq.py", "networks/lowering.py", "networks/tflite.py",
          "latency/__init__.py", "latency/agent.py", "latency/copies.py", "latency/curve.py", "latency/harness.py",
          "latency/table.py")
_HERE_ONLY = ("runtimes/onnxruntime_gpu.py",)  # GPUs are timed on this machine only
_PIECE = 1 << 20  # bytes of a file in one frame
_MOST_IMAGES = 32 << 20  # bytes of images in one file
_MOST_COUNTS = 100
_MOST_NAMES = 100_000  # letters of what one node was made of
PING_S, SILENCE_S = 20.0, 900.0  # the second: of a machine that works on one request without a word
IDLE_S = 60.0  # without a request, after which a connection is ended
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before each new attempt to connect
MOST_LOST = 40  # connections lost in the middle of one request
_ERRORS = ("TargetError", "CandidateError", "MeasurementInvalid", "ModelError", "UserError")
_PATH_THERE = re.compile(r"\S*[0-9a-f]{64}\S*")  # of a file that was sent
_EXECUTION: dict[str, Any] = {
    "precision": str, "precisions": {"*": int}, "int8_share": (float, None), "fallback_share": float,
    "outside": {"*": int}}
_ROW = {"batch": int, "execution": _EXECUTION, "measurement": dict}
_ANSWERS: dict[str, Any] = {  # what each answer holds
    "hello": {"host": dict, "python": str, "executable": str}, "have": {"sizes": {"*": int}}, "put": {"size": int},
    "check": {"version": str}, "logits": {"shape": [int]}, "overhead": float,
    "run": None, "profile": [list], "inspect": {"execution": _EXECUTION, "nodes": [{
        "name": str, "kind": str, "ms": float, "precision": str, "implementation": str, "device": str,
        "reference": bool}]},
    "curve": {"overhead_us": float, "protocol": dict, "latency": [_ROW], "load": [
        {"batch": int, "streams": int, "threads_each": int, "images_per_s_windows": [float], "windows": dict}]},
    "compile": _EXECUTION}
# Runs first over there, in any Python 3: the rest is for a newer one and needs numpy. {code} is what `ssh` tells apart.
_BOOT = '''
import os, sys
def refuse(text):
    sys.stderr.write(text + "\\n")
    sys.stderr.flush()
    os._exit({code})
def take(n):
    parts = []
    while n:
        part = os.read(0, min(n, 65536))
        if not part:
            os._exit(1)
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
if sys.version_info < (3, 11):
    refuse("its " + sys.executable + " is Python " + sys.version.split()[0] + ". Install Python 3.11 or newer there, "
           "or name one: device_python=/path/to/python")
back = os.dup(1)
os.dup2(2, 1)
sys.path[:] = [part for part in sys.path if part]
os.environ.update(environment)
cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hwnas-agent")
os.write(back, (marker + "\\n").encode())
content = take(size)
path = os.path.join(cache, "agent-" + name + ".zip")
try:
    os.makedirs(cache, mode=0o700, exist_ok=True)
    with open(path + "." + str(os.getpid()), "wb") as file:
        file.write(content)
    os.replace(path + "." + str(os.getpid()), path)
except OSError as error:
    try:
        os.unlink(path + "." + str(os.getpid()))
    except OSError:
        pass
    refuse("cannot write " + path + ": " + str(error.strerror) + ". Free space there, then give the same command "
           "again.")
from importlib.util import find_spec
if find_spec("numpy") is None:
    refuse("its " + sys.executable + " has no numpy. Install it there: " + sys.executable + " -m pip install numpy")
sys.path.insert(0, path)
from hwnas.latency.agent import main
main(0, back, cache)
'''

@cache
def agent_zip() -> bytes:
    """The agent and what it needs of hwnas; the same bytes for the same code."""
    root, made = Path(errors.__file__).parent, io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        paths = {path for part in _PARTS for path in root.glob(part)} - {root / part for part in _HERE_ONLY}
        for path in sorted(paths):
            entry = zipfile.ZipInfo(f"hwnas/{path.relative_to(root).as_posix()}", (2026, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, path.read_bytes())
    return made.getvalue()


def _program(name: str | None) -> str:
    """The one line of Python that makes the agent's process over there an agent."""
    content = agent_zip()
    known = {"environment": {} if name is None else {"HWNAS_HOST": name}, "size": len(content),
             "name": hashlib.sha256(content).hexdigest()[:16]}
    begin = "; ".join(f"{key} = {value!r}" for key, value in known.items())
    return f"{begin}; exec({_BOOT.replace('{code}', str(REFUSED))!r})"


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file that the other machine has or gets: its name there, and where it lies here."""

    name: str
    path: Path

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> SentFile:
        """By its content; FileError where it cannot be read."""
        try:
            with open(path, "rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise FileError(path, f"cannot be read: {error.strerror}.") from None
        return cls(checksum + (Path(path).suffix if Path(path).suffix in (".onnx", ".tflite") else ""), Path(path))


class RemoteDevice:
    """Another machine as a device; see `hwnas.latency.device.Device`. It is connected at once, and when it is asked."""

    is_here = False

    def __init__(self, address: Address, name: str | None, console: Console) -> None:
        if name is not None and not PLAIN_NAME.fullmatch(name):
            raise ConfigError(f"device_name={name!r} is no plain name. Use letters, digits, dots and dashes.")
        self.address, self._name, self._console = address, name, console
        self._open: list[Connection] = []  # at most one; a list, so that the end of this object can close it
        end = ExitStack()
        self.folder = Path(end.enter_context(temporary_folder()))  # for `written`
        self.close = weakref.finalize(self, _close, self._open, end)  # what its end does may happen earlier
        self._sent: set[str] = set()  # names of files that are there, since this connection
        self._used = 0.0  # when it was heard last
        self._host: Host | None = None
        self.versions: dict[tuple[str, Target | None], str] = {}  # of runtimes that were asked for
        self.executions: dict[tuple[str, Target], Execution] = {}  # of files that were compiled
        self.written: dict[tuple[str, Target], SentFile] = {}  # of ONNX files in a runtime's own format
        try:
            self._connect()
        except LinkLost as error:
            raise self._gone(error) from None
        console.note(f"device {address}: {self.host.cpu}, {self.host.cores} cores, {self.host.memory_gib:g} GiB, as "
                     f"{self.host.name}")

    @property
    def host(self) -> Host:
        """Its fingerprint, as it said when it was connected first."""
        assert self._host is not None
        return self._host

    def for_target(self, target: Target) -> RemoteDevice:
        if target.device != "cpu":
            raise TargetError(f"target {target.name} runs on a GPU, and GPUs are timed on this machine only. Leave "
                              "device= out, and give the command over there.")
        return self

    def runtime(self, name: str) -> RemoteRuntime:
        return RemoteRuntime(name, self)

    def measure(self, candidates: Mapping[str, Copies], reference: Copies, protocol: Protocol, *, seed: int = 0,
                quiet_ms: float | None = None, progress: Progress | None = None, threads: int = 1,
                idle: Callable[[], bool] = lambda: False) -> dict[str, Measurement]:
        """As `harness.measure`, there. `idle` is not asked: what is idle here is not idle there."""
        calls = [*map(_remote, candidates.values()), _remote(reference)]
        *networks, beside = ({**copies[0].asked, "copies": len(copies)} for copies in calls)
        numbers = list(map(str, range(len(networks))))  # the names are nobody's business there
        values = self.ask("measure", {
            "networks": dict(zip(numbers, networks, strict=True)), "reference": beside, "protocol": protocol.to_dict(),
            "seed": seed, "quiet_ms": quiet_ms, "threads": threads},
            [copies[0].compiled.file for copies in calls], progress).values["result"]
        with self.believed():
            return {name: Measurement.from_dict(values[number], protocol, name)
                    for name, number in zip(candidates, numbers, strict=True)}

    def curve(self, file: TimedFile, reference: TimedFile, job: Mapping[str, Any], progress: Progress
              ) -> dict[str, Any]:
        """One file at several batch sizes and under load, as `curve.time_curve` says, in a process of its own there.

        ModelError says what the file lacks.
        """
        files = [RemoteRuntime(each.target.runtime, self).sent(each.path, each.target) for each in (file, reference)]
        networks = [{"file": sent.name, "target": asdict(each.target), "shape": list(each.shape)}
                    for sent, each in zip(files, (file, reference), strict=True)]
        asked = {key: job[key] for key in CURVE if key != "label"}
        values = self.ask("curve", {"network": networks[0], "reference": networks[1], "job": asked}, files,
                          progress).values["result"]
        with self.believed():
            return _curve(values)

    def overhead_ms(self) -> float:
        values = self.ask("overhead", {}).values["result"]
        with self.believed():
            return _positive(values)

    @contextmanager
    def believed(self) -> Iterator[None]:
        """Inside, an answer that is not what it must be becomes a DeviceError."""
        try:
            yield
        except (*WRONG, HwnasError) as error:
            raise self._untrusted(error) from None

    def ask(self, operation: str, values: Mapping[str, Any], files: Iterable[SentFile] = (),
            progress: Progress | None = None) -> Frame:
        """The answer to a request, whose `files` are sent before it where they are not there.

        What is lost with a connection is asked again, on a new one: every request can be. DeviceError where none can be
        had, or nothing comes that can be believed; the agent's own errors as they are raised here.
        """
        named, lost = {file.name: file for file in files}, 0
        if self._open and time.monotonic() - self._used > IDLE_S:
            self._drop()  # the agent ends when it is not heard, so that none is left by a caller that has gone
        while True:
            try:
                if not self._open:
                    self._connect()
                self._send_files(named)
                answer = self._request(self._open[0], operation, values, progress)
                self._used = time.monotonic()
                return answer
            except Untrusted as error:
                self._drop()
                raise self._untrusted(error) from None
            except LinkLost as error:
                why, lost = self._drop() or error, lost + 1
                if lost > MOST_LOST or isinstance(why, Refused):
                    raise self._gone(why) from None
                self._reconnect(why)
            except HwnasError:
                raise  # an answer
            except BaseException:
                self._drop()  # what comes next would be the answer to this request
                raise

    # the connection

    def _connect(self) -> None:
        connection = connect(self.address, _program(self._name))
        try:
            write_all(connection.to, agent_zip())
            host = self._hello(connection)
        except LinkLost:
            raise connection.lost() from None
        except BaseException:
            connection.close(grace_s=0)
            raise
        if self._host is not None and self._host.name != host.name:
            connection.close()
            raise DeviceError(f"{self.address} was {self._host.name}, and is {host.name} now. Give the command again.")
        self._host = self._host or host
        self._open[:], self._sent, self._used = [connection], set(), time.monotonic()

    def _hello(self, connection: Connection) -> Host:
        try:
            said = self._request(connection, "hello", {}, None).values["result"]
        except Untrusted as error:
            raise self._untrusted(error) from None
        with self.believed():
            return Host.from_dict(said["host"], str(self.address))

    def _reconnect(self, why: LinkLost) -> None:
        """Connect again, after pauses that grow; DeviceError in the end."""
        self._console.note(f"{self.address}: the connection was lost ({str(why).partition('. ')[0]}); trying again")
        for wait_s in WAITS_S:
            time.sleep(wait_s)
            try:
                return self._connect()
            except Refused as error:
                raise self._gone(error) from None
            except LinkLost as error:
                why = error
        raise self._gone(why)

    def _drop(self) -> LinkLost | None:
        """End the connection; why it had ended, where there was one."""
        return self._open.pop().lost() if self._open else None

    def _gone(self, error: LinkLost) -> DeviceError:
        if self._host is None:
            return DeviceError(str(error) if isinstance(error, Refused) else
                               f"{self.address} cannot be reached: {error}")
        return DeviceError(f"{self.address} has gone, and does not come back: {error}. What was measured is kept, and "
                           "the same command goes on from there.")

    def _untrusted(self, error: BaseException) -> DeviceError:
        return DeviceError(f"{self.address} sent what is no answer of an agent ({one_line(str(error))}), and nothing "
                           f"of it was taken. Look at what runs there: {self.address.by_hand}")

    # frames

    def _request(self, connection: Connection, operation: str, values: Mapping[str, Any], progress: Progress | None,
                 content: bytes = b"") -> Frame:
        """One answer; LinkLost, Untrusted, or the agent's own error. CandidateError after too long a silence."""
        send(connection.to, {"op": operation, **values}, content)
        heard, patience_s = time.monotonic(), SILENCE_S
        while True:
            while not readable(connection.back, PING_S):
                if time.monotonic() - heard > patience_s:
                    self._drop()
                    raise CandidateError(f"{self.address}: no word for {patience_s:g} s after {operation} was asked.")
                send(connection.to, {"op": "ping"})
            try:
                frame = receive(connection.back, SILENCE_S)
            except Silent:
                raise LinkLost("it stopped in the middle of a message") from None
            heard = time.monotonic()
            if "note" not in frame.values:
                return self._checked(operation, frame)
            note, share = one_line(str(frame.values["note"])), frame.values.get("share")
            patience_s = math.inf if note.startswith(WAITING) else SILENCE_S
            if progress is not None:
                progress(min(max(share, 0.0), 1.0) if isinstance(share, int | float) else 0.0, note)

    def _checked(self, operation: str, frame: Frame) -> Frame:
        """A frame with a result; the error that it holds instead is raised."""
        values = frame.values
        if "result" in values:
            try:
                check_shape(values["result"], _ANSWERS.get(operation, dict))
            except ValueError as error:
                raise Untrusted(f"{operation}: {error}") from None
            return frame
        message, name = _told(values.get("message")), values.get("error")
        if name == "Crash":
            raise CandidateError(f"the runtime on {self.address} was {message} while it was asked to {operation}.")
        if name == "FileError":
            raise FileError("", _told(values.get("fact")), _told(values.get("remedy")))
        kind: type[HwnasError] = getattr(errors, str(name)) if name in _ERRORS else DeviceError
        raise kind(f"{self.address}: {message}")

    def _send_files(self, files: Mapping[str, SentFile]) -> None:
        """Send what is not there; a file that was sent in part goes on where it ended."""
        new = [name for name in files if name not in self._sent]
        if not new:
            return
        held = self._request(self._open[0], "have", {"files": new}, None).values["result"]["sizes"]
        for name in new:
            if (offset := held.get(name, 0)) >= 0:
                self._send_file(files[name], offset)
            self._sent.add(name)

    def _send_file(self, file: SentFile, offset: int) -> None:
        with open(file.path, "rb") as content:
            size = os.fstat(content.fileno()).st_size
            offset = offset if offset < size else 0
            content.seek(offset)
            while piece := content.read(_PIECE):
                asked = {"file": file.name, "offset": offset, "size": size}
                self._request(self._open[0], "put", asked, None, piece)
                offset += len(piece)


def _close(connections: list[Connection], end: ExitStack) -> None:
    while connections:
        connections.pop().close()
    end.close()


def _told(text: object) -> str:
    """What the agent says, without the places where it keeps files."""
    return _PATH_THERE.sub("the file", one_line(text if isinstance(text, str) else ""))


def _positive(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{one_line(str(value))} is no time")
    return float(value)


def _curve(values: Mapping[str, Any]) -> dict[str, Any]:
    """A curve's plain values, and nothing else that came with them; ValueError or TableError where they are none."""
    protocol = Protocol.from_dict(values["protocol"])
    latency = [{"batch": row["batch"], "execution": asdict(_execution(row["execution"])), "measurement":
                Measurement.from_dict(row["measurement"], protocol, "measurement").to_dict()}
               for row in values["latency"]]
    load = [{key: row[key] for key in ("batch", "streams", "threads_each")} | Throughput.from_dict(
        row, protocol).to_dict() for row in values["load"]]
    return {"overhead_us": _positive(values["overhead_us"]), "protocol": protocol.to_dict(), "latency": latency,
            "load": load}


class RemoteRuntime:
    """A runtime of another machine; see `hwnas.runtimes.runtime.Runtime`."""

    def __init__(self, name: str, device: RemoteDevice) -> None:
        self._name, self._device = name, device

    @property
    def name(self) -> str:
        return self._name

    def version(self) -> str:
        return self._checked(Target("version", self._name, "fp32"), version=True)

    def check(self, target: Target) -> None:
        self._checked(target)

    def _checked(self, target: Target, version: bool = False) -> str:
        """The version, where the runtime is there; TargetError where it is not, or unless `version` lacks the
        precision."""
        held = self._device.versions.get((self._name, None if version else target))
        if held is None:
            values = self._device.ask("check", {"target": asdict(target), "version": version, "package": _pinned(
                PACKAGES.get(self._name, ""))}).values["result"]
            held = one_line(values["version"])
            self._device.versions[self._name, None if version else target] = held
        return held

    def compile(self, onnx_path: str | os.PathLike[str], target: Target) -> RemoteCompiled:
        file = self.sent(Path(onnx_path), target)
        execution = self._device.executions.get((file.name, target))
        if execution is None:
            asked = {"file": file.name, "target": asdict(target), "shape": [1], "copies": 1}
            try:
                values = self._device.ask("compile", asked, [file]).values["result"]
            except FileError as error:
                raise FileError(onnx_path, error.fact, error.remedy) from None
            with self._device.believed():
                execution = _execution(values)
            self._device.executions[file.name, target] = execution
        return RemoteCompiled(self._device, file, target, execution)

    def inspect(self, onnx_path: str | os.PathLike[str], target: Target, memory_mb: int = 4096) -> RemoteInspected:
        """See `hwnas.runtimes.runtime.inspected`; `memory_mb` bounds what that may take there."""
        return RemoteInspected(self._device, self.sent(Path(onnx_path), target), target, Path(onnx_path), memory_mb)

    def sent(self, path: Path, target: Target) -> SentFile:
        """The file to send: in the runtime's own format where it has one, made here, as that takes more than there is
        there."""
        given, own = SentFile.of(path), load_runtime(self._name)
        write = getattr(own, "write", None)
        if write is None or path.suffix != ".onnx":
            return given
        held = self._device.written.get((given.name, target))
        if held is None:
            made = Path(self._device.folder, f"{len(self._device.written)}{getattr(own, 'suffix', '')}")
            made.write_bytes(write(path, target))
            held = self._device.written[given.name, target] = SentFile.of(made)
        return held


def _pinned(package: str) -> str:
    """A package with the version that is here, for the command that installs it there."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{package}=={version(package)}"
    except (PackageNotFoundError, ValueError):
        return package


def _execution(values: Mapping[str, Any]) -> Execution:
    share, fallback = values["int8_share"], values["fallback_share"]
    counts = values["precisions"], values["outside"]
    if not all(0 <= part <= 1 for part in (share or 0.0, fallback)) or max(map(len, counts)) > _MOST_COUNTS:
        raise ValueError("shares outside 0 to 1, or too many precisions")
    precisions, outside = ({one_line(name): int(count) for name, count in part.items()} for part in counts)
    return Execution(one_line(values["precision"]), precisions, share, float(fallback), outside)


@dataclass(frozen=True)
class RemoteCompiled:
    """A file that another machine has compiled; see `hwnas.runtimes.runtime.Compiled`."""

    device: RemoteDevice
    file: SentFile
    target: Target
    execution: Execution

    def bind(self, images: NDArray[np.float32]) -> RemoteCall:
        """A call for images of this shape. What is timed is fed noise, which is made over there."""
        if len(images) != self.target.batch:
            raise ValueError(f"bind takes one batch of {self.target.batch} images, got {len(images)}")
        return RemoteCall(self, images.shape[1:])

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        parts = np.split(images, range(_step(images), len(images), _step(images)))
        return np.concatenate([self._logits(np.ascontiguousarray(part, "<f4")) for part in parts])

    def _logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        with tempfile.NamedTemporaryFile(prefix="hwnas-") as packed:
            packed.write(zlib.compress(images.tobytes(), level=1))
            packed.flush()
            given = SentFile.of(packed.name)  # sent once: the next network is asked the same
            asked = {**self.asked(images.shape), "images": given.name}
            answer = self.device.ask("logits", asked, [self.file, given])
        with self.device.believed():
            shape = answer.values["result"]["shape"]
            if len(shape) != 2 or shape[0] != len(images) or 4 * math.prod(shape) != len(answer.content):
                raise ValueError(f"answers of shape {shape}")
            return np.frombuffer(answer.content, "<f4").reshape(shape)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        asked = {**self.asked(images.shape[1:]), "repeats": repeats}
        values = self.device.ask("profile", asked, [self.file]).values["result"]
        with self.device.believed():
            return [NodeTime(one_line(name), one_line(kind), _positive(ms)) for name, kind, ms in values]

    def asked(self, shape: Sequence[int]) -> dict[str, Any]:
        """What a request says of it."""
        return {"file": self.file.name, "target": asdict(self.target), "shape": list(shape)}


@dataclass(frozen=True)
class RemoteInspected:
    """A file that another machine looks at: compiled there, whatever falls back, and profiled in one request."""

    device: RemoteDevice
    file: SentFile
    target: Target
    path: Path
    memory_mb: int

    def inspected(self, shape: Sequence[int], repeats: int) -> tuple[Execution, list[NodeTime]]:
        """What is executed, and its nodes, for images [batch, *shape]."""
        asked = {"file": self.file.name, "target": asdict(self.target), "shape": list(shape), "repeats": repeats,
                 "memory_mb": self.memory_mb}
        try:
            values = self.device.ask("inspect", asked, [self.file]).values["result"]
        except FileError as error:
            raise FileError(self.path, error.fact, error.remedy) from None
        with self.device.believed():
            return _execution(values["execution"]), [_node(node) for node in values["nodes"]]

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        """See `hwnas.runtimes.runtime.Compiled`; other kinds of nodes are told than by `RemoteCompiled`."""
        return self.inspected(images.shape[1:], repeats)[1]


def _node(values: Mapping[str, Any]) -> NodeTime:
    kind, precision, kernel, device = (one_line(values[key]) for key in ("kind", "precision", "implementation",
                                                                         "device"))
    name = "".join(filter(str.isprintable, values["name"][:_MOST_NAMES]))  # of all that was fused: longer than a line
    return NodeTime(name, kind, _positive(values["ms"]), precision, kernel, device, values["reference"])


def _step(images: NDArray[np.float32]) -> int:
    """Images that go in one file."""
    return max(1, _MOST_IMAGES // max(1, images[:1].nbytes))


@dataclass(frozen=True)
class RemoteCall:
    """A bound call over there. `RemoteDevice.measure` times it there; a call from here runs it once."""

    compiled: RemoteCompiled
    shape: tuple[int, ...]

    @property
    def asked(self) -> dict[str, Any]:
        """What a request says of it."""
        return self.compiled.asked(self.shape)

    def __call__(self) -> None:
        self.compiled.device.ask("run", self.asked, [self.compiled.file])


def _remote(copies: Copies) -> list[RemoteCall]:
    """Calls that this machine's runtimes did not bind; TypeError for others, which cannot be timed over there."""
    calls = [copies] if callable(copies) else list(copies)
    if not calls or not all(isinstance(call, RemoteCall) for call in calls):
        raise TypeError("only calls that a device bound can be timed on it")
    return [call for call in calls if isinstance(call, RemoteCall)]
