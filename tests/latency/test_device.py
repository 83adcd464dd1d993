"""Another machine as a device, over an `ssh` that runs the agent here: what it needs, loses and believes."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from device_fixtures import NEEDED, ONNX, Board, cut, program, wait_for_agents
from process_fixtures import descendants

from hwnas.errors import CandidateError, ConfigError, DeviceError, FileError, HwnasError, TargetError, UserError
from hwnas.latency import remote
from hwnas.latency.copies import TimedFile, noise
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import prepare_network, reference_network, time_files
from hwnas.latency.wave import Wave
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.documents import WRONG
from hwnas.target import Host, Target

ORT = Target("ort_fp32", "onnxruntime", "fp32")
QUICK = Protocol(max_seconds=0.5, copies=2, min_rounds=2, max_rounds=2)
SHAPE = (1, 32, 32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An fp32 and an int8 network for grey images of 32 px."""
    return {precision: prepare_network(reference_network(), replace(ORT, precision=precision),
                                       tmp_path_factory.mktemp(precision))
            for precision in ("fp32", "int8")}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long pauses between attempts."""
    monkeypatch.setattr(remote, "WAITS_S", (0.01, 0.01, 0.01))


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """No process of an agent outlives its caller, however the test ended."""
    made: list[weakref.ref[remote.RemoteDevice]] = []
    begin = remote.RemoteDevice.__init__

    def noting(self: remote.RemoteDevice, *given: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.RemoteDevice, "__init__", noting)
        yield
    for device in filter(None, (reference() for reference in made)):
        device.close()
    wait_for_agents(tmp_path)


def timed(device: Any, path: Path, target: Target = ORT, protocol: Protocol = QUICK) -> Any:
    named = {"mine": TimedFile(path, target, SHAPE)}
    return time_files(named, target, reference_network(), protocol, device=device)["mine"]


def test_what_is_needed_is_enough_and_the_wall_clock_may_jump(board: Board, files: dict[str, Path]) -> None:
    device = board.bare(*NEEDED, *ONNX, "onnxruntime").device()
    assert device.host.name == "board-2c"
    runtime, here = device.runtime("onnxruntime"), load_runtime("onnxruntime")
    assert runtime.version() == here.version()
    images = np.random.default_rng(0).standard_normal((5, *SHAPE), dtype=np.float32)
    for precision, path in files.items():
        target = replace(ORT, precision=precision)
        compiled, local = runtime.compile(path, target), here.compile(path, target)
        assert compiled.execution == local.execution
        assert (compiled.logits(images) == local.logits(images)).all()
    file = TimedFile(files["fp32"], ORT, SHAPE)
    job = {"batches": [1], "threads": [1], "seconds": 0.5, "seed": 0, "memory_mb": 2048, "explain": True}
    curve = device.curve(file, file, job, lambda share, note: None)
    names, local = {node["name"] for node in curve["nodes"]}, here.compile(files["fp32"], ORT)
    assert len(names & {node.name for node in local.profile(noise(1, SHAPE), 3)}) > 20
    assert curve["latency"][0]["execution"]["precisions"] == local.execution.precisions
    measurement = timed(device, files["fp32"])
    assert len(measurement.turns) >= 1
    device.close()
    left = board.files.parent / f"tmp/{os.uname().nodename}-999999999"  # of an agent that was killed
    working = left.with_name("other-999999999")  # on another machine that has the same home
    left.mkdir()
    working.mkdir()
    board.device().close()
    wait_for_agents(board.folder)  # each removes its own files as it ends
    assert not left.exists()
    assert working.exists()
    left_over = [path for path in (board.folder / "home").rglob("*") if path.is_file()]
    # Files for later, and what is known of the machine when it is quiet, if it was.
    assert {path.parent.name for path in left_over if path.name != "quiet_runs.json"} == {"files"}


@pytest.mark.parametrize(("packages", "why"), [
    ((), r"No module named .* -m pip install numpy filelock onnx"),
    (("filelock",), r"No module named 'numpy'.* -m pip install numpy filelock onnx"),
    (NEEDED, r"has no onnxruntime\. Install it there: .* -m pip install onnxruntime"),
    ((*NEEDED, "onnxruntime"), r"has no onnx\. Install it there: .* -m pip install onnx")])
def test_what_is_missing_there_is_named_with_the_command(board: Board, packages: tuple[str, ...], why: str) -> None:
    bare = board.bare(*packages)
    with pytest.raises((DeviceError, TargetError), match=why) as caught:
        bare.device().runtime("onnxruntime").check(ORT)
    assert "\n" not in str(caught.value)


def test_a_python_that_is_missing_or_old_is_named(board: Board) -> None:
    with pytest.raises(DeviceError, match=r"has no no-such-python .*device_python="):
        Board(board.folder, "no-such-python").device()
    old = program(board.folder / "old", '#!/bin/sh\nread line; echo "its old is Python 3.9.2" >&2; exit 1\n')
    with pytest.raises(DeviceError, match=r"its old is Python 3\.9\.2\. It needs Python 3\.11 .*device_python="):
        Board(board.folder, str(old)).device()
    mac = program(board.folder / "mac", f"#!/bin/sh\nexec {sys.executable} -c "
                  "'import sys; sys.platform = \"darwin\"; exec(sys.stdin.readline())'\n")
    with pytest.raises(DeviceError, match=r" on darwin\. It needs Python 3\.11 or newer on Linux"):
        Board(board.folder, str(mac)).device()
    old.chmod(0o644)  # its "Permission denied" is not about a key
    with pytest.raises(DeviceError, match=rf"has no {old} to run .*denied.*device_python="):
        Board(board.folder, str(old)).device()


def test_a_file_that_cannot_be_compiled_is_told_by_its_name_here(board: Board, tmp_path: Path) -> None:
    torn = tmp_path / "torn.onnx"
    torn.write_bytes(b"nothing of a network")
    runtime = board.device().runtime("onnxruntime")
    with pytest.raises(FileError, match=r"torn\.onnx: ") as caught:
        runtime.compile(torn, ORT)
    assert "hwnas-agent" not in str(caught.value)
    with pytest.raises(FileError, match="cannot be read"):
        runtime.compile(tmp_path / "none.onnx", ORT)
    with pytest.raises(TargetError, match="fp32, int8"):
        runtime.check(replace(ORT, precision="bf16"))


def test_a_runtime_that_crashes_is_one_failed_file(board, files, monkeypatch):
    """The worker is ended as a crash would, at its first word about the work; the next request has a new one."""
    device = board.device()
    runtime = device.runtime("onnxruntime")
    compiled = runtime.compile(files["fp32"], ORT)
    ask, told = device.ask, []

    def crash(share: float, note: str) -> None:
        if not told:
            assert device.connection is not None
            os.kill(descendants(device.connection.process.pid)[-1], signal.SIGSEGV)
        told.append(note)

    monkeypatch.setattr(device, "ask", lambda operation, read, progress=None, **values: ask(
        operation, read, crash if operation == "time" else progress, **values))
    with pytest.raises(CandidateError, match="runtime on me@board was ended by SIGSEGV"):
        timed(device, files["fp32"], protocol=Protocol(max_seconds=60.0, half_width=0.0, max_rounds=10**6))
    assert told
    assert len(compiled.logits(noise(1, SHAPE))) == 1
    assert board.calls == 3


def test_a_format_of_its_own_is_made_here(board, files, monkeypatch):
    """What writes the file may need packages that are not there."""
    own = type("Own", (), {"suffix": ".tflite",
                           "write": lambda self, path, target: path.read_bytes() + b"\x98\x06\x01"})
    monkeypatch.setattr("hwnas.latency.remote.load_runtime", lambda name: own())
    compiled = board.device().runtime("onnxruntime").compile(files["fp32"], ORT)
    assert compiled.execution.precision == "fp32"
    sent, = board.files.iterdir()
    assert sent.suffix == ".tflite"
    assert sent.read_bytes() == files["fp32"].read_bytes() + b"\x98\x06\x01"


# Connections that are lost


def test_a_connection_is_not_kept_while_nothing_is_asked(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = board.device().runtime("onnxruntime")
    runtime.check(ORT)
    assert board.calls == 1
    monkeypatch.setattr(remote, "IDLE_S", 0.0)
    runtime.check(ORT)
    assert board.calls == 2


def test_each_measurement_has_a_process_of_its_own_and_files_are_sent_once(board, files, monkeypatch):
    device, asked = board.device(), []
    request = remote.RemoteDevice._request

    def noting(self: remote.RemoteDevice, operation: str, *given: Any, **values: Any) -> Any:
        answer = request(self, operation, *given, **values)
        asked.append((operation, board.calls, bool(values.get("piece"))))
        return answer

    monkeypatch.setattr(remote.RemoteDevice, "_request", noting)
    file = TimedFile(files["fp32"], ORT, SHAPE)
    for _ in range(2):
        assert device.time(Wave({"mine": file}, file, "x", QUICK))[0]["mine"].turns
    (_, one, _), (_, two, _) = (each for each in asked if each[0] == "time")
    assert one < two
    assert not any(operation == "put" and piece for operation, calls, piece in asked if calls > one)


@pytest.mark.soak
@pytest.mark.usefixtures("any_machine")
@pytest.mark.parametrize("n_bytes", [20, 60, 900, 1800])
def test_a_connection_torn_in_an_answer_is_made_again(board: Board, files: dict[str, Path], n_bytes: int) -> None:
    board.relayed(f"$(( calls < 3 ? {n_bytes} : 1000000000 ))", 65536)
    if n_bytes < 900:  # it never says hello: then there is nothing to go on with
        with pytest.raises(DeviceError, match="cannot be reached"):
            board.device()
        return
    measurement = timed(board.device(), files["fp32"], protocol=replace(QUICK, max_seconds=20.0, min_rounds=6,
                                                                            min_calls=64))
    assert measurement.valid
    assert board.calls == 3


def test_an_upload_goes_on_where_it_was_torn(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = tmp_path / "big.onnx"
    big.write_bytes(np.random.default_rng(0).bytes(20 * remote._PIECE))
    device, pieces = board.device(), []
    request = device._request

    def torn(operation: str, read: Any, progress: Any = None, **values: Any) -> Any:
        if operation == "put" and values["piece"]:
            pieces.append(values["piece"])
            if len(pieces) == 9:
                cut(device)
        return request(operation, read, progress, **values)

    monkeypatch.setattr(device, "_request", torn)
    for _ in range(2):
        with pytest.raises(FileError, match=r"big\.onnx: "):
            device.runtime("onnxruntime").compile(big, ORT)
        sent, = board.files.iterdir()
        assert sent.read_bytes() == big.read_bytes()
        assert len(pieces) in (20, 21)  # the ninth may have arrived
        cut(device)


def test_a_file_that_two_callers_send_at_once_is_whole(board: Board, tmp_path: Path) -> None:
    big = tmp_path / "big.onnx"
    big.write_bytes(np.random.default_rng(0).bytes(20 * remote._PIECE))
    devices = [board.device() for _ in range(2)]
    with ThreadPoolExecutor(2) as callers:
        names = set(callers.map(lambda device: device._send(big), devices))
    sent, = board.files.iterdir()
    assert {sent.name} == names
    assert sent.read_bytes() == big.read_bytes()


def test_a_machine_that_stays_away_is_told_with_the_next_step(board, files):
    device = board.device()
    runtime = device.runtime("onnxruntime")
    board.reached(before="echo 'ssh: connect to host board port 22: No route to host' >&2; exit 255")
    cut(device)
    with pytest.raises(DeviceError, match=r"has gone.* No route to host.*the same command goes on from there"):
        runtime.compile(files["fp32"], ORT)
    assert board.calls == 1 + len(remote.WAITS_S)


def test_another_machine_under_the_same_name_is_refused(board: Board) -> None:
    device = board.device()
    device._environment = {"HWNAS_HOST": "other-4c"}
    cut(device)
    with pytest.raises(DeviceError, match="was board-2c, and is other-4c now"):
        device.runtime("onnxruntime").version()


@pytest.mark.soak
@pytest.mark.usefixtures("any_machine")
def test_a_slow_link_delivers_all(board: Board, files: dict[str, Path]) -> None:
    board.relayed("1000000000", 13)
    assert timed(board.device(), files["int8"], replace(ORT, precision="int8")).valid


@pytest.mark.parametrize(("blocks", "what"), [(8, r"File too large\. It needs .* space in ~/\.cache"),
                                              (200, "cannot write .*hwnas-agent: File too large")])
def test_a_full_disk_there_is_one_line(board: Board, tmp_path: Path, blocks: int, what: str) -> None:
    board.reached(before=f"ulimit -f {blocks}")
    big = tmp_path / "big.onnx"
    big.write_bytes(bytes(1 << 20))
    with pytest.raises(DeviceError, match=what) as caught:
        board.device().runtime("onnxruntime").compile(big, ORT)
    assert "\n" not in str(caught.value)
    assert "me@board" in str(caught.value)


# What it believes

EVIL = """#!{python}
import os, re, sys
if sys.argv[1] == "-G":
    sys.exit(0)
marker = re.search("marker = '([^']+)'", sys.stdin.readline())[1]
os.write(1, (marker + "\\n").encode() + open({answers!r}, "rb").read())
while os.read(0, 65536):
    pass
"""
GOOD = {**Host.detect().to_dict(), "name": "evil", "given": "evil"}


def message(values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


@pytest.mark.parametrize("answers", [
    b"HTTP/1.1 200 OK\r\n\r\n", b"true\n", b"[" * 100_000 + b"\n", message([]), message({"note": 3}),
    message({"result": []}), message({"result": {}}), message({"result": {**GOOD, "cpu": 3}}),
    message({"result": {**GOOD, "given": "../../etc"}}), message({"result": {**GOOD, "given": "", "vendor": "../x"}}),
    message({"result": {**GOOD, "cores": "two"}}), message({"error": "SystemExit", "message": "\x1b[2Jgone"}),
    message({"error": ["x"], "message": {}}), message({})])
def test_what_is_no_hello_is_not_believed(board: Board, answers: bytes) -> None:
    (board.folder / "answers").write_bytes(answers)
    evil = EVIL.format(python=shutil.which("python3"), answers=str(board.folder / "answers"))
    program(board.folder / "bin/ssh", evil)
    with pytest.raises(UserError) as caught:
        board.device(None)
    assert "me@board" in str(caught.value)
    assert str(caught.value).isprintable()


EXECUTION = {"precision": "fp32", "precisions": {}, "int8_share": None, "fallback_share": 0.0, "outside": {}}
NODE = {"name": "a", "kind": "b", "ms": 1.0, "precision": "", "implementation": "", "device": "", "reference": False}
TIMES = {"quiet_us": 10.0, "samples_us": [[10.0]], "probe_us": [[10.0]]}
HONEST: dict[str, Any] = {"hello": GOOD, "put": 1 << 30, "compile": EXECUTION, "check": "null 1",
                          "logits": "1:AACAPw==",
                          "time": {"measured": {"mine": TIMES}, "failed": {}}}


class Scripted:
    """A connection to an agent that is honest but for one answer."""

    lies: ClassVar[dict[str, Any]] = {}

    def __init__(self, *given: object) -> None:
        self.lines: queue.Queue[bytes] = queue.Queue()

    def write(self, line: str) -> None:
        self.lines.put(message({"result": {**HONEST, **self.lies}[json.loads(line)["op"]]}))

    def close(self) -> ConnectionError:
        return ConnectionError("closed")


@pytest.mark.parametrize(("operation", "result"), [
    ("compile", {**EXECUTION, "int8_share": 7.0}), ("compile", {"precision": "int8"}), ("logits", [1.0]),
    ("logits", "1:"), ("logits", "1:AAAA"), ("logits", "long!"), ("logits", "-1:AACAPw=="),
    *(("time", {"measured": lie, "failed": {}}) for lie in (
        [], {}, {"mine": {}}, {"mine": {**TIMES, "quiet_us": -1}}, {"mine": {**TIMES, "quiet_us": 1e999}})),
    ("time", {"measured": {}, "failed": {"mine": 3}}), ("check", None),
    ("put", -1)])
def test_an_answer_that_is_none_is_not_believed(board, tmp_path, operation, result, monkeypatch):
    monkeypatch.setattr(remote, "Connection", Scripted)
    monkeypatch.setattr(Scripted, "lies", {operation: result})
    (tmp_path / "m.onnx").write_bytes(b"network")
    device = board.device(None)
    runtime = device.runtime("onnxruntime")

    def ask_all() -> None:
        compiled = runtime.compile(tmp_path / "m.onnx", ORT)
        assert (runtime.version(), compiled.logits(noise(1, SHAPE)).item()) == ("null 1", 1)
        file = TimedFile(tmp_path / "m.onnx", ORT, SHAPE)
        assert device.time(Wave({"mine": file}, file, "x", QUICK))[0]["mine"].turns

    with pytest.raises(DeviceError, match="no answer of an agent"):
        ask_all()
    monkeypatch.setattr(Scripted, "lies", {})
    ask_all()


def test_of_a_curve_nothing_else_is_taken() -> None:
    honest: dict[str, Any] = {
        "protocol": QUICK.to_dict(), "nodes": [NODE],
        "latency": [{"batch": 1, "threads": 1, "execution": EXECUTION, "measurement": TIMES}]}
    assert remote._read_curve(honest) == honest
    more = {**honest, "input": {}, "latency": [{**honest["latency"][0], "latency_ms": 0.0}]}
    assert remote._read_curve(more) == honest
    for wrong in ({"protocol": 3}, {"latency": [{}]}, {"nodes": [["a", "b"]]},
                  *({"nodes": [{**NODE, **lie}]} for lie in (
                      {"ms": -1.0}, {"reference": "no"}, {"name": 3}, {"kind": None}, {"more": 1}))):
        with pytest.raises((*WRONG, HwnasError)):
            remote._read_curve({**honest, **wrong})


def test_a_file_whose_checksum_is_wrong_is_not_kept(board, tmp_path, monkeypatch):
    device = board.device()
    (tmp_path / "x").write_bytes(b"content")
    monkeypatch.setattr(remote, "sha256", lambda content: SimpleNamespace(hexdigest=lambda: "0" * 64))
    with pytest.raises(TargetError, match="arrived torn"):
        device.runtime("onnxruntime").compile(tmp_path / "x", ORT)
    assert not list(board.files.iterdir())


def test_names_are_plain(board: Board) -> None:
    for name in ("../up", "a b", ""):
        with pytest.raises(ConfigError, match="plain name"):
            board.device(name)


def test_the_least_that_is_sent_along_is_complete(tmp_path: Path) -> None:
    content = remote.agent_zip()
    assert len(content) < 250_000
    (tmp_path / "agent.zip").write_bytes(content)
    done = subprocess.run([sys.executable, "-Pc", "import hwnas; assert 'agent.zip' in hwnas.__file__\n"
                           "import hwnas.latency.agent, hwnas.runtimes.litert, hwnas.runtimes.openvino\n"
                           "import hwnas.runtimes.onnxruntime_gpu"], env={"PYTHONPATH": str(tmp_path / "agent.zip")},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
