"""Processes and signals: children that end with their parent, and Ctrl-C deferred while something must not be torn."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import IO, Any, NoReturn
from weakref import WeakSet

from hwnas.errors import ConfigError, UserError


def _start_ticks(pid: int) -> str:
    """Kernel ticks at which a process started; '' where /proc does not say, or where the process is gone or a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@cache
def machine_name() -> str:
    """Names the process table that a pid belongs to: host, boot and pid namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip()[:8])
        except OSError:
            parts.append("")
    return "/".join(parts)


def worker_name() -> str:
    """This process: machine, pid, start."""
    return f"{machine_name()}/{os.getpid()}/{_start_ticks(os.getpid())}"


def is_dead(worker: str) -> bool:
    """Return whether `worker` ran here and is gone. A worker elsewhere never counts as dead: its heartbeat decides."""
    machine, pid, started = worker.rsplit("/", 2)
    return machine == machine_name() and pid.isdigit() and _start_ticks(int(pid)) != started


GRACE_S = 20.0  # how long a process that was told to end may clean up
_PR_SET_PDEATHSIG = 1
_AGAIN_S = 0.05  # until a signal that was dropped is sent again: the destructor has ended by then
_CHILDREN: WeakSet[subprocess.Popen[Any] | Pool] = WeakSet()


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived: `number`. Everything treats it like Ctrl-C; only the exit code differs."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Terminated`. When a signal ends the block, every child of this process is ended
    too.

    Outside the main thread they keep their meaning, because only the main thread receives signals. A SIGHUP that is
    ignored, as under nohup, stays so.
    """
    here = threading.current_thread() is threading.main_thread()
    ending = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
    earlier = {number: signal.signal(number, _raise_terminated) for number in ending} if here else {}
    hook = sys.unraisablehook

    def keep(dropped: sys.UnraisableHookArgs) -> None:
        # The interpreter drops what is raised in a destructor, or in a callback of a weak reference.
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            hook(dropped)
            return
        later = threading.Timer(_AGAIN_S, send_again, (exit_code(dropped.exc_value) - 128,))
        later.daemon = True
        later.start()

    def send_again(number: int) -> None:
        if sys.unraisablehook is keep:
            os.kill(os.getpid(), number)

    if here:
        sys.unraisablehook = keep
    try:
        yield
    except KeyboardInterrupt:
        end(_CHILDREN)
        raise
    finally:
        if here:
            sys.unraisablehook = hook
            for number, handler in earlier.items():
                signal.signal(number, handler)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code of a command that a signal ended: 128 and the number of the signal, as in a shell."""
    return 128 + (interrupt.number if isinstance(interrupt, Terminated) else signal.SIGINT)


def start(module: str, arguments: Sequence[str] = (), *, unseen: Sequence[str] = (),
          env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Run `python -m module arguments` as a child that ends with this process, however this process ends.

    Arguments arrive as they are given. Those that lists of processes must not show, such as passwords, are `unseen`:
    they go through the child's standard input, and come last. `env`: as of Popen, as are `options`.
    """
    # -P and this package's place first: no other hwnas is taken, and no module of the current folder.
    root, others = str(Path(__file__).parents[2]), (env or os.environ).get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([root, *(place for place in others if place not in ("", root))])
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), module, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env={**(env or os.environ), "PYTHONPATH": path}, **options)
    _CHILDREN.add(child)
    assert child.stdin is not None
    content = json.dumps(list(unseen)).encode()
    with contextlib.suppress(BrokenPipeError), child.stdin:  # it has ended, which its exit code tells
        while content:
            content = content[os.write(child.stdin.fileno(), content):]
    return child


def _run(parent: str, module: str, *arguments: str) -> None:
    """The child's side of `start`. Ctrl-C of a terminal reaches all of its processes; it is left to the parent, which
    ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(int(parent))
    sys.argv[1:] = [*arguments, *json.load(sys.stdin)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends. It does not if that ended before it was asked to, so the
    parent is compared afterwards."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even while no thread of Python's can
    run."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(children: Iterable[subprocess.Popen[Any] | Pool], grace_s: float = GRACE_S) -> None:
    """End processes and those of pools: they are told by SIGTERM, and what still runs after `grace_s` is killed.

    A task of a pool that is not done fails.
    """
    running: list[Any] = []
    for child in children:
        running += (child._processes or {}).values() if isinstance(child, Pool) else [child]
    until = time.monotonic() + grace_s
    try:
        for process in running:
            process.terminate()
        for process in running:
            left_s = max(0.0, until - time.monotonic())
            if isinstance(process, subprocess.Popen):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(left_s)
            else:  # its executor reaps a process of a pool, so only the end is awaited
                wait([process.sentinel], left_s)
    finally:  # also where somebody insists by a second signal
        for process in running:
            process.kill()
            if isinstance(process, subprocess.Popen):
                process.wait()


@contextmanager
def crew(n: int, module: str, arguments: Sequence[str], say: Callable[[str], None], unseen: Sequence[str] = ()
         ) -> Iterator[list[str]]:
    """Run `n` processes of `module` beside the block, and wait for them at its end; see `start`.

    Yields a list. After the block it has a line for each process that ended early: its last words, which `say` gets
    too.
    """
    early: list[str] = []
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(n)]
        workers: list[subprocess.Popen[Any]] = []
        try:
            for log in logs:
                workers.append(start(module, arguments, unseen=unseen, stdout=log, stderr=log))
            yield early
            for worker, log in zip(workers, logs, strict=True):
                if worker.wait() != 0:
                    early.append(last_words(worker.returncode, log))
                    say(f"a worker ended early: {early[-1]}")
        finally:
            end(workers)


def last_words(code: int, log: IO[str]) -> str:
    """The last line that a process wrote; where it wrote none, how it ended."""
    log.seek(0)
    lines = log.read().strip().splitlines()
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{lines[-1][:300]} ({how})" if lines else how


class Pool(ProcessPoolExecutor):
    """`n` fresh processes that do not import the caller's script: it needs no `if __name__ == "__main__"`.

    They end with this process, however it ends. An error or signal that ends the pool's block ends them at once.
    """

    def __init__(self, n: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()) -> None:
        if current_process().daemon:
            raise ConfigError("a daemonic process, such as one of multiprocessing.Pool, can start no others. Call this "
                              "from a plain process, or from concurrent.futures.ProcessPoolExecutor.")
        try:
            super().__init__(n, get_context("spawn"), _begin, (initializer, initargs))
        except OSError as error:
            raise UserError(f"processes need semaphores, and none can be made in /dev/shm: {error.strerror or error}. "
                            "Make it writable, with room (docker: --shm-size=1g).") from None
        _CHILDREN.add(self)

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        """As Executor.submit, which starts processes: Python tells each of them where the main module lies."""
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return super().submit(_work, fn, *args, **kwargs)
        finally:
            sys.modules["__main__"] = main

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None:
            end([self])
        self.shutdown(wait=True, cancel_futures=kind is not None)


def _begin(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    """Begin a process of a pool. It leaves Ctrl-C to the parent, and says nothing when the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _quit)
    parent: Any = parent_process()
    _end_with(parent.pid)
    if initializer is not None:
        initializer(*initargs)


def _work(fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """One job of a pool, which cleans up after SIGTERM; then there is no next one."""
    try:
        signal.signal(signal.SIGTERM, _raise_terminated)
        return fn(*args, **kwargs)
    except Terminated:
        _quit(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, _quit)


def _quit(number: int, frame: FrameType | None = None) -> NoReturn:
    os._exit(128 + number)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Signals that Python handles by raising: deferred while `held`, except inside `allowed`.

    A second signal that would have to wait is let through at once, because somebody insists.
    """

    def __init__(self) -> None:
        self._earlier: dict[int, Handler] = {}
        self._allowed = False
        self._waiting: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals inside. A signal that still waits at the end is raised there, unless another error is on its
        way.

        Outside the main thread this does nothing, because only the main thread receives signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._earlier = {number: handler for number, handler in handlers.items() if callable(handler)}
        for number in self._earlier:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in self._earlier.items():
                signal.signal(number, handler)
        self.check()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, signals take effect at once. A signal that waits already takes effect before."""
        self.check()
        try:
            self._allowed = True
            yield
        finally:
            self._allowed = False

    def check(self) -> None:
        """Raise the signal that waits, if one does."""
        number, self._waiting = self._waiting, None
        if number is not None:
            self._earlier[number](number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._allowed or self._waiting is not None:
            self._allowed, self._waiting = False, None
            self._earlier[number](number, frame)
        else:
            self._waiting = number


_SS_DISABLE = 2


class _Stack(ctypes.Structure):
    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


def use_own_stack() -> None:
    """Take this thread's alternate signal stack away.

    OpenVINO's CPU plugin sets a stack of the least size that the kernel takes (11.6 kB with AVX-512) when it looks for
    AMX. Python's signal handlers use the alternate stack and can overflow it. Ctrl-C then ends in a segmentation fault.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).sigaltstack(ctypes.byref(_Stack(None, _SS_DISABLE, 0)), None)


if __name__ == "__main__":
    _run(*sys.argv[1:])
