"""The processes and signals: children that end with their parent, and Ctrl-C that waits while work must stay whole."""

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
    """Return the kernel ticks at which a process started; '' if /proc does not say, or if the process is gone or a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@cache
def machine_name() -> str:
    """Return the name of the process table that a pid belongs to: host, boot and pid namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip()[:8])
        except OSError:
            parts.append("")
    return "/".join(parts)


def worker_name() -> str:
    """Return the name of this process: machine, pid, start."""
    return f"{machine_name()}/{os.getpid()}/{_start_ticks(os.getpid())}"


def is_dead(worker: str) -> bool:
    """Return whether `worker` ran here and is gone. A worker elsewhere never counts as dead: its heartbeat decides."""
    machine, pid, started = worker.rsplit("/", 2)
    return machine == machine_name() and pid.isdigit() and _start_ticks(int(pid)) != started


GRACE_S = 20.0  # for a process to clean up after SIGTERM
_PR_SET_PDEATHSIG = 1
_AGAIN_S = 0.05  # until a dropped signal is sent again: the destructor has ended by then
_CHILDREN: WeakSet[subprocess.Popen[Any] | Pool] = WeakSet()


class Terminated(KeyboardInterrupt):
    """The arrival of SIGTERM or SIGHUP, `number`. All code treats it like Ctrl-C; only the exit code differs."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP, inside the block. If a signal ends the block, all children of this
    process are ended too.

    Outside the main thread the signals keep their meaning, because only the main thread receives them. A SIGHUP that
    is ignored, as under nohup, stays ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ending = [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]
    earlier = {number: signal.signal(number, _raise_terminated) for number in ending} if is_main else {}
    hook = sys.unraisablehook

    def keep(dropped: sys.UnraisableHookArgs) -> None:
        # The interpreter drops an error that is raised in a destructor, or in a callback of a weak reference. The
        # signal would be lost, so it is sent again.
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            hook(dropped)
            return
        later = threading.Timer(_AGAIN_S, send_again, (exit_code(dropped.exc_value) - 128,))
        later.daemon = True
        later.start()

    def send_again(number: int) -> None:
        if sys.unraisablehook is keep:
            os.kill(os.getpid(), number)

    if is_main:
        sys.unraisablehook = keep
    try:
        yield
    except KeyboardInterrupt:
        end(_CHILDREN)
        raise
    finally:
        if is_main:
            sys.unraisablehook = hook
            for number, handler in earlier.items():
                signal.signal(number, handler)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code of a command that a signal ended: 128 and the number of the signal, as in a shell."""
    return 128 + (interrupt.number if isinstance(interrupt, Terminated) else signal.SIGINT)


def start(module: str, arguments: Sequence[str] = (), *, unseen: Sequence[str] = (),
          env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Run `python -m module arguments` as a child that ends with this process, however this process ends.

    Arguments arrive as they are given. `unseen` are arguments that lists of processes must not show, such as passwords:
    they go through the child's standard input, and come last. `env` and `options` are Popen's.
    """
    # With -P, and this package's folder first, the child takes no other hwnas, and no module of the current folder.
    root, others = str(Path(__file__).parents[2]), (env or os.environ).get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([root, *(place for place in others if place not in ("", root))])
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), module, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env={**(env or os.environ), "PYTHONPATH": path}, **options)
    _CHILDREN.add(child)
    assert child.stdin is not None
    content = json.dumps(list(unseen)).encode()
    with contextlib.suppress(BrokenPipeError), child.stdin:  # its exit code will say why
        while content:  # a write may take only a part
            content = content[os.write(child.stdin.fileno(), content):]
    return child


def _run(parent: str, module: str, *arguments: str) -> None:
    """Run a module as the child's side of `start`. Ctrl-C of a terminal reaches all of its processes; the child leaves
    it to the parent, which ends the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(int(parent))
    sys.argv[1:] = [*arguments, *json.load(sys.stdin)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends. The kernel does not if the parent ended before this call,
    so the parent is compared afterwards."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even while no thread of Python's can
    run."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(children: Iterable[subprocess.Popen[Any] | Pool], grace_s: float = GRACE_S) -> None:
    """End processes and the processes of pools: send SIGTERM, then kill all that still run after `grace_s`.

    An unfinished task of a pool fails.
    """
    running: list[Any] = []
    for child in children:
        running += (child._processes or {}).values() if isinstance(child, Pool) else [child]
    # All get the signal first, so that they clean up in the same time.
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
    finally:  # also if a second signal ends the waiting
        for process in running:
            process.kill()
            if isinstance(process, subprocess.Popen):
                process.wait()


@contextmanager
def crew(n: int, module: str, arguments: Sequence[str], say: Callable[[str], None], unseen: Sequence[str] = ()
         ) -> Iterator[list[str]]:
    """Run `n` processes of `module` beside the block, and wait for them at its end; see `start`.

    Yields a list. After the block it has the last words of each process that ended early; `say` gets them too.
    """
    last_lines: list[str] = []
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(n)]
        workers: list[subprocess.Popen[Any]] = []
        try:
            for log in logs:
                workers.append(start(module, arguments, unseen=unseen, stdout=log, stderr=log))
            yield last_lines
            for worker, log in zip(workers, logs, strict=True):
                if worker.wait() != 0:
                    last_lines.append(last_words(worker.returncode, log))
                    say(f"a worker ended early: {last_lines[-1]}")
        finally:
            end(workers)


def last_words(code: int, log: IO[str]) -> str:
    """Return the last line that a process wrote, if there is one, and how the process ended."""
    log.seek(0)
    lines = log.read().strip().splitlines()
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{lines[-1][:300]} ({how})" if lines else how


class Pool(ProcessPoolExecutor):
    """A pool of `n` fresh processes that do not import the caller's script: it needs no `if __name__ == "__main__"`.

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
        """Submit a task as Executor.submit does, which starts processes; they do not see the main module's path."""
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
    """Set up a process of a pool. It leaves Ctrl-C to the parent, and prints nothing when the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _quit)
    parent: Any = parent_process()
    _end_with(parent.pid)
    if initializer is not None:
        initializer(*initargs)


def _work(fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """Run one task of a pool. After SIGTERM the task cleans up, and the process ends."""
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
    """The signals that Python handles by raising; they wait inside `held`, except inside `allowed`.

    A second signal that would have to wait takes effect at once, because the user insists.
    """

    def __init__(self) -> None:
        self._earlier: dict[int, Handler] = {}
        self._allowed = False
        self._waiting: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let signals wait inside the block. A signal that still waits is raised at its end, but not after an error.

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
        """Let signals take effect at once inside the block. A signal that already waits takes effect before it."""
        self.check()
        try:
            self._allowed = True
            yield
        finally:
            self._allowed = False

    def check(self) -> None:
        """Raise the signal that waits, if there is one."""
        number, self._waiting = self._waiting, None
        if number is not None:
            self._earlier[number](number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._allowed or self._waiting is not None:  # the second signal, too
            self._allowed, self._waiting = False, None
            self._earlier[number](number, frame)
        else:
            self._waiting = number


_SS_DISABLE = 2


class _Stack(ctypes.Structure):
    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


def use_own_stack() -> None:
    """Switch this thread's alternate signal stack off.

    When it looks for AMX, OpenVINO's CPU plugin sets the smallest stack that the kernel takes (11.6 kB with AVX-512).
    Python's signal handlers use the alternate stack and can overflow it. Ctrl-C then ends in a segmentation fault.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).sigaltstack(ctypes.byref(_Stack(None, _SS_DISABLE, 0)), None)


if __name__ == "__main__":
    _run(*sys.argv[1:])
