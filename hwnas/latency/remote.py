"""A device that is reached over ssh: files to time are sent there, and raw samples come back.

The agent (`hwnas.latency.agent`) is sent along, with the parts of hwnas that it needs. A lost connection is made again,
and files that are there are not sent twice. The answers are checked like a file that somebody else has written.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import queue
import re
import time
import weakref
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import numpy as np

from hwnas import errors
from hwnas.cli.options import read_value
from hwnas.errors import (
    CandidateError,
    ConfigError,
    DeviceError,
    FileError,
    HwnasError,
    MeasurementInvalid,
    TargetError,
)
from hwnas.latency.copies import TimedFile
from hwnas.latency.harness import Progress
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.wave import Wave, WaveResult
from hwnas.runtimes.child import error_class, listen
from hwnas.runtimes.runtime import Execution, NodeTime, OwnFormat, load_runtime
from hwnas.system.documents import WRONG, check_shape, load_json
from hwnas.system.paths import temporary_folder, write_atomic
from hwnas.system.ssh import Address, Connection, one_line
from hwnas.target import PLAIN_NAME, Host, Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.cli.progress import Console

# The parts of hwnas that the agent needs; a test runs it in a folder that has nothing else.
_PARTS = """__init__ errors face lazy stats target tasks/__init__ tasks/task cli/__init__ cli/options system/*
    runtimes/* networks/__init__ networks/qdq networks/litert/* latency/__init__ latency/agent latency/copies
    latency/curve latency/harness latency/measurement latency/probes latency/quiet latency/seat latency/turn
    latency/wave"""
_PIECE = 1 << 18  # bytes of a file in one message
_MOST_IMAGES = 32 << 20  # bytes of images in one file
Answer = TypeVar("Answer")
SILENCE_S = 900.0  # the longest silence of a machine that works on a request
IDLE_S = 60.0  # seconds without a request, after which a connection is ended; the agent waits longer
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before each new attempt at a request whose connection was lost
_PATH_THERE = re.compile(r"\S*[0-9a-f]{64}\S*")  # of a file that was sent
# It runs first over there, in any Python 3; the agent needs a newer one. The user sees the message of its exit.
_BOOT = '''
import os, sys
if sys.version_info < (3, 11) or sys.platform != "linux":
    sys.exit("its " + sys.executable + " is Python " + sys.version.split()[0] + " on " + sys.platform)
cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hwnas-agent")
own = os.path.join(cache, "tmp", os.uname().nodename + "-" + str(os.getpid()))
for folder in (os.path.join(cache, "files"), own):
    os.makedirs(folder, mode=0o700, exist_ok=True)
with open(os.path.join(own, "agent.zip"), "wb") as file:
    file.write(content)
os.environ.update(environment, TMPDIR=own, HWNAS_HOME=cache, OPENVINO_TELEMETRY_OPTOUT="1", OMP_WAIT_POLICY="PASSIVE")
sys.path[:] = [file.name] + [part for part in sys.path if part]
back = os.dup(1)
os.dup2(2, 1)
import filelock
from hwnas.latency.agent import main
os.write(back, (marker + "\\n").encode())
main(back, cache, own)
'''


@cache
def agent_zip() -> bytes:
    """Return a zip file of the agent and the parts of hwnas that it needs."""
    root, archive = Path(errors.__file__).parent, io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as file:
        for path in (path for part in _PARTS.split() for path in root.glob(f"{part}.py")):
            file.write(path, f"hwnas/{path.relative_to(root)}")
    return archive.getvalue()


class RemoteDevice:
    """Another machine as a device, like `ThisMachine`. It is connected at once, and again when a request needs it."""

    is_here = False
    host: Host  # its fingerprint at the first connection

    def __init__(self, address: Address, name: str | None, console: Console) -> None:
        if name is not None and not PLAIN_NAME.fullmatch(name):
            raise ConfigError(f"device_name={name!r} is no plain name. Use letters, digits, dots and dashes.")
        self.address, self._console, self._environment = address, console, {"HWNAS_HOST": name} if name else {}
        self._end = ExitStack()
        self.folder = Path(self._end.enter_context(temporary_folder()))  # for files that are made here
        self.close = weakref.finalize(self, self._end.close)  # runs when it is called, or when the device is gone
        self.connection: Connection | None = None
        self.versions: dict[str, str] = {}  # of its runtimes: it may be gone when they are needed
        self._sent: set[str] = set()  # names of files that are known to be there, in this connection
        self._answered_s = -math.inf  # time of the last answer; -inf: the last request has none
        try:
            self._connect()
        except ConnectionError as error:
            raise DeviceError(str(self._drop() or error)) from None
        console.note(f"device {address}: {self.host.cpu}, {self.host.cores} cores, {self.host.memory_gib:g} GiB, as "
                     f"{self.host.name}")

    def for_target(self, target: Target) -> RemoteDevice:
        """Return this device, which is the same for all targets; TargetError for a target on a GPU."""
        if target.device != "cpu":
            raise TargetError(f"target {target.name} runs on a GPU, and GPUs are timed on this machine only. Leave "
                              "device= out, and give the command over there.")
        return self

    def runtime(self, name: str) -> RemoteRuntime:
        """Return one of its runtimes. Errors, such as a missing package, come with the first request to it."""
        return RemoteRuntime(name, self)

    def time(self, wave: Wave, progress: Progress | None = None) -> WaveResult:
        """Time a wave there, in a new process (`hwnas.latency.wave` says why)."""
        def read(values: Any) -> WaveResult:
            check_shape(values, {"measured": {"*": dict}, "failed": {"*": str}})
            failed = {name: _PATH_THERE.sub("the file", values["failed"][name]) for name in values["failed"]}
            measured = {name: Measurement.from_dict(values["measured"][name], wave.protocol, name)
                        for name in wave.files if name not in failed}
            return measured, failed

        self._drop()  # its process ends with the connection; files that were sent stay there
        return self.ask("time", read, progress, reference=self.network(wave.reference), seed=wave.seed,
                        files={name: self.network(file) for name, file in wave.files.items()},
                        reference_id=wave.reference_id, protocol=wave.protocol.to_dict())

    def network(self, file: TimedFile) -> dict[str, Any]:
        """Return a file as a request describes it. If the runtime has a format of its own, the file is converted here,
        because that needs more packages than the other machine has."""
        path, own = file.path, load_runtime(file.target.runtime)
        if isinstance(own, OwnFormat) and path.suffix == ".onnx":
            name = sha256(_content_of(path) + repr(file.target).encode()).hexdigest() + own.suffix
            if not (self.folder / name).exists():
                write_atomic(self.folder / name, own.write(path, file.target))
            path = self.folder / name
        return {"file": path, "target": asdict(file.target), "shape": list(file.shape)}

    def curve(self, file: TimedFile, reference: TimedFile, job: Mapping[str, Any], progress: Progress
              ) -> dict[str, Any]:
        """Time one file there, at several batch sizes and numbers of threads, like `curve.time_curve`.

        Raises:
            ModelError: The file cannot be run; the message says why.
        """
        options = {key: job[key] for key in ("batches", "threads", "seconds", "seed", "memory_mb", "explain")}
        return self.ask("curve", _read_curve, progress, network=self.network(file), reference=self.network(reference),
                        job={**options, "label": "the file"}, memory_mb=job["memory_mb"])

    def ask(self, operation: str, read: Callable[[Any], Answer], progress: Progress | None = None, **values: Any
            ) -> Answer:
        """Have something done there. If a connection is lost, the request is repeated on a new one: all of them can be.

        Args:
            operation: The operation of the agent's worker.
            read: Makes the answer from plain values, and raises an error if they are not valid.
            progress: It is called with the share done and a note.
            values: The worker's arguments: plain values, and paths of files, which are sent.

        Raises:
            DeviceError: No connection can be made, or the answer is not valid.
            HwnasError: The error that the agent raised.
        """
        if time.monotonic() - self._answered_s > IDLE_S or (self.connection and not self.connection.lines.empty()):
            self._drop()  # a line that nobody asked for is the connection's end
        for wait_s in (*WAITS_S, None):
            try:
                if self.connection is None:
                    self._connect()
                return self._request(operation, read, progress, **values)
            except ConnectionError as error:
                why = str(self._drop() or error)
            if wait_s is not None:
                self._console.note(f"{why.partition('. ')[0]}; trying again")
                time.sleep(wait_s)
        raise DeviceError(f"{self.address} has gone, and does not come back: {why}. What was measured is kept, and the "
                          "same command goes on from there.")

    def _connect(self) -> None:
        """Connect, and check that it is the same machine as before. Errors as in `ask`, and ConnectionError."""
        self.connection = Connection(self.address, f"environment = {self._environment}; exec({_BOOT!r})", agent_zip())
        self._end.callback(self.connection.close)
        self._sent.clear()
        try:
            host = self._request("hello", lambda said: Host.from_dict(said, str(self.address)))
            self.host = getattr(self, "host", host)
            if self.host.name != host.name:
                raise DeviceError(f"{self.address} was {self.host.name}, and is {host.name} now. Give the command "
                                  "again.")
        except HwnasError:
            self._drop()
            raise

    def _drop(self) -> ConnectionError | None:
        """End the connection, and return why it had ended; None if there was none."""
        connection, self.connection = self.connection, None
        return None if connection is None else connection.close()

    def _send(self, path: Path) -> str:
        """Send the part of a file that is not there yet, and return its name there."""
        content, n_sent, piece = _content_of(path), 0, ""
        name = sha256(content).hexdigest() + path.suffix
        while name not in self._sent:  # the first, empty piece asks how many bytes are there
            n_sent = self._request("put", partial(read_value, kind=int, at="size", low=0), file=name, offset=n_sent,
                                 size=len(content), piece=piece)
            piece = base64.b64encode(content[n_sent : n_sent + _PIECE]).decode()
            if not piece:
                self._sent.add(name)
        return name

    def _request(self, operation: str, read: Callable[[Any], Answer], progress: Progress | None = None, **values: Any
                 ) -> Answer:
        """Make a request and return its answer. Raises ConnectionError, the agent's own error, the error of `_ended`
        after SILENCE_S, or DeviceError for an answer that is not valid."""
        assert self.connection is not None
        text = json.dumps({"op": operation, **values}, default=self._send)
        self._answered_s = -math.inf
        self.connection.write(text)
        try:
            answer = listen(self.connection.lines, SILENCE_S, progress, lambda line: one_line(load_json(line), None))
            if not answer:
                raise ConnectionError
            self._answered_s = time.monotonic()
            if "result" in answer:
                return read(answer["result"])
        except queue.Empty:
            self._drop()
            fact = f"{self.address}: no word for {SILENCE_S:g} s after {operation} was asked."
            raise _ended(operation, fact) from None
        except (*WRONG, HwnasError) as error:
            self._drop()
            raise DeviceError(f"{self.address} sent what is no answer of an agent ({one_line(str(error))}). Nothing of "
                              f"it was taken. Look at what runs there: {self.address.by_hand}") from None
        raise self._told(operation, answer)

    def _told(self, operation: str, answer: Mapping[str, Any]) -> HwnasError:
        """Return the error of an answer, without the paths of the agent's files."""
        name, message, remedy = (_PATH_THERE.sub("the file", one_line(str(answer.get(key, ""))))
                                 for key in ("error", "message", "remedy"))
        if name == "FileError":
            return FileError("", message, remedy)
        if name == "Crash":
            self._drop()
            return _ended(operation, f"the runtime on {self.address} was {message} while it was asked to {operation}.")
        return error_class(name)(f"{self.address}: {message}")


def _ended(operation: str, said: str) -> CandidateError:
    """Return the error for an operation during which the runtime there ended: MeasurementInvalid for a wave, in which
    one network of several may be the cause."""
    return MeasurementInvalid(said) if operation == "time" else CandidateError(said)


def _content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror}.") from None


def _read_execution(values: Any) -> Execution:
    check_shape(values, {"precision": str, "precisions": {"*": int}, "int8_share": (float, None),
                         "fallback_share": float, "outside": {"*": int}})
    execution = Execution(**values)
    if not 0 <= execution.fallback_share <= 1 or not 0 <= (execution.int8_share or 0.0) <= 1:
        raise ValueError("a share outside 0 to 1")
    return execution


def _read_curve(values: Any) -> dict[str, Any]:
    """Return a curve's plain values, without anything else that came with them."""
    check_shape(values, {"latency": [{"batch": int, "threads": int}], "nodes?": [get_type_hints(NodeTime)]})
    protocol = Protocol.from_dict(values["protocol"])
    latency = [{"batch": row["batch"], "threads": row["threads"],
                "execution": _read_execution(row["execution"]).to_dict(),
                "measurement": Measurement.from_dict(row["measurement"], protocol, "measurement").to_dict()}
               for row in values["latency"]]
    curve = {"protocol": protocol.to_dict(), "latency": latency}
    if "nodes" in values:
        curve["nodes"] = [asdict(NodeTime(**node)) for node in values["nodes"]]
        if any(node["ms"] < 0 for node in values["nodes"]):
            raise ValueError("a time below 0")
    return curve


@dataclass(frozen=True)
class RemoteRuntime:
    """A runtime of another machine, see `hwnas.runtimes.runtime.Runtime`. Its networks can only answer images."""

    name: str
    device: RemoteDevice

    def version(self) -> str:
        return self.device.versions.get(self.name) or self._ask(None)

    def check(self, target: Target) -> None:
        self._ask(asdict(target))

    def _ask(self, target: dict[str, Any] | None) -> str:
        version = self.device.ask("check", partial(read_value, kind=str, at="version"), runtime=self.name,
                                  target=target)
        return self.device.versions.setdefault(self.name, version)

    def compile(self, onnx_path: str | os.PathLike[str], target: Target, memory_mb: int | None = None
                ) -> RemoteCompiled:
        """Compile as `hwnas.runtimes.runtime.Runtime` says. `memory_mb` bounds the memory that this may take there."""
        file = TimedFile(Path(onnx_path), target, ())
        try:
            execution = self.device.ask("compile", _read_execution, memory_mb=memory_mb,
                                        network=self.device.network(file))
        except FileError as error:
            raise FileError(onnx_path, error.fact, error.remedy) from None
        return RemoteCompiled(self.device, file, execution)


@dataclass(frozen=True)
class RemoteCompiled:
    """A file that another machine has compiled; see `hwnas.runtimes.runtime.Answering`."""

    device: RemoteDevice
    file: TimedFile
    execution: Execution

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        def read(text: str) -> NDArray[np.float32]:
            header, _, content = text.partition(":")
            sides = [int(side) for side in header.split(",")]
            if min(sides) < 1:
                raise ValueError("no answers")
            answers = np.frombuffer(base64.b64decode(content, validate=True), "<f4")
            return answers.reshape(len(images), *sides).astype(np.float32)

        step = max(1, _MOST_IMAGES // max(1, images[:1].nbytes))  # images that go in one file
        if len(images) > step:
            return np.concatenate([self.logits(images[at : at + step]) for at in range(0, len(images), step)])
        packed = self.device.folder / "images"
        packed.write_bytes(zlib.compress(np.ascontiguousarray(images, "<f4").tobytes(), level=1))
        return self.device.ask("logits", read, images=packed, shape=images.shape,  # sent once for all networks
                               network=self.device.network(self.file))
