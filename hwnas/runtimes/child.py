"""Work on a foreign model file in a child process, so that a crash is a failed candidate and no more.

A task is a module that calls `serve` when it is run. `run_child` starts it and reads its messages, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hwnas import errors
from hwnas.errors import CandidateError, HwnasError, ModelError
from hwnas.runtimes.foreign import read_checked
from hwnas.runtimes.runtime import inspected, load_runtime
from hwnas.system.cores import usable_cores
from hwnas.system.libraries import import_onnxruntime
from hwnas.system.paths import no_space
from hwnas.system.processes import last_words, start
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.runtimes.runtime import Runtime

Progress = Callable[[float, str], None]
Task = Callable[[Mapping[str, Any], Target, "Runtime", Progress], Any]
WAITING = "waiting"  # a note with this beginning reports that another process measures: the time-out is off
STACK_MB, SESSIONS = 9, 12  # of a thread's stack; networks that are compiled at a time, each with its own threads
# Seconds to compile and run once, on a CPU and on another device, which may try out the kernels of every node.
_PROBED_S, _PROBED_ELSEWHERE_S = 60.0, 900.0
_PROBED_THREADS = 4  # at most: the stacks of a thread for each of many cores would use the memory up


def probe_model(path: str | os.PathLike[str], target: Target, memory_mb: int = 2048, look: bool = False) -> None:
    """Check `path`, compile it for `target` and run it once in a child process. With `look`, no fallback is an error.

    `memory_mb` bounds what the child may allocate beyond the runtime's own libraries (CPU targets on Linux; otherwise
    only the time is bounded). CandidateError says why it failed: refused, crashed, out of memory, timed out.
    TargetError as `Runtime.check`.
    """
    few = replace(target, threads=min(_PROBED_THREADS, target.threads or _PROBED_THREADS))
    try:
        run_child("hwnas.runtimes.child", {"path": os.fspath(path), "look": look}, few,
                  memory_mb=memory_mb, timeout_s=_PROBED_S if target.device == "cpu" else _PROBED_ELSEWHERE_S)
    except ModelError as error:
        raise CandidateError(str(error)) from None


def run_child(module: str, job: Mapping[str, Any], target: Target, *, timeout_s: float, memory_mb: int,
              progress: Progress | None = None) -> Any:
    """Return the result of the task `module` on `job`: plain values, with the model's `path` and perhaps its `label`.

    `timeout_s` is the longest silence: every progress message starts it anew. The task's own errors are raised here,
    ModelError for its MemoryError. CandidateError if it crashed or was silent for longer.
    """
    label = job.get("label", job["path"])
    full = {**job, "target": asdict(target), "memory_mb": memory_mb}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = start(module, [json.dumps(full)], stdout=subprocess.PIPE, stderr=log, text=True, errors="replace",
                        start_new_session=True)
        # A thread reads the pipe: waiting for a queue can time out, waiting for a pipe cannot.
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            answer = listen(lines, timeout_s, progress)
            process.wait(timeout=timeout_s)
        except (queue.Empty, subprocess.TimeoutExpired):
            raise CandidateError(f"{label}: still compiling or running after {timeout_s:g} s.") from None
        finally:
            if process.poll() is None:  # kill what is left of its process group, and reap it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            reader.join(timeout=5)
        if "result" in answer:
            return answer["result"]
        if "error" in answer:
            raise error_class(answer["error"])(answer["message"])
        raise CandidateError(f"{label}: {target.runtime} crashed: {last_words(process.returncode, log)}.")


def error_class(name: str) -> type[HwnasError]:
    """Return the error class called `name`, or its first base that takes a message only; UserError if there is none."""
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, HwnasError):
        return errors.UserError
    return next(base for base in kind.__mro__ if "__init__" not in vars(base))


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def listen(lines: queue.Queue[Any], timeout_s: float, progress: Progress | None,
           load: Callable[[Any], Any] = json.loads) -> dict[str, Any]:
    """Return the other side's last message, or {} if it ended without one. `progress` is called with the others.

    Args:
        lines: Its messages, line by line, and an empty line at its end.
        timeout_s: The longest silence.
        progress: Called with each share and note.
        load: Reads a line; ValueError if it is torn.

    Raises:
        queue.Empty: It was silent for longer.
    """
    patience: float | None = timeout_s
    while line := lines.get(timeout=patience):
        try:
            message = load(line)
        except ValueError:  # torn: it died while it wrote
            break
        if "note" not in message:
            return dict(message)
        patience = None if message["note"].startswith(WAITING) else timeout_s
        if progress:
            progress(message["share"], message["note"])
    return {}


@contextlib.contextmanager
def limited_memory(megabytes: int) -> Iterator[None]:
    """Limit this process in the block to `megabytes` more than it has now. It writes no core file from then on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    earlier = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()  # Linux only: elsewhere there is no limit
        now_kb = int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1])
        resource.setrlimit(resource.RLIMIT_DATA, ((now_kb << 10) + (megabytes << 20), earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, earlier)


def serve(task: Task) -> int:
    """Run `task` on the job of the command line, in the child. The last message is its result or error."""
    job = json.loads(sys.argv[1])
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout

    def send(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        target = Target(**job["target"])
        runtime = load_runtime(target.runtime)
        runtime.check(target)
        import_module("onnx")  # and ONNX Runtime, before the limit, which is for the model alone
        import_onnxruntime()
        most_mb = job["memory_mb"] + stacks_mb(job.get("threads") or [target.threads])
        # CUDA reserves far more address space than it uses, so the limit is for CPUs only.
        with limited_memory(most_mb) if target.device == "cpu" else contextlib.nullcontext():
            send(result=task(job, target, runtime, lambda share, note: send(share=share, note=note)))
    except HwnasError as error:
        send(error=type(error).__name__, message=str(error))
    except OSError as error:
        if (disk_full := no_space(error)) is None:
            raise
        send(error="UserError", message=str(disk_full))
    except MemoryError:
        label = job.get("label", job["path"])
        send(error="ModelError", message=f"{label}: out of memory; the limit is {job['memory_mb']} MiB.")
    return 0


def stacks_mb(threads: Iterable[int]) -> int:
    """Return the MiB for the stacks of more than one thread (0: one for each core), by the largest of some numbers of
    threads. Stacks count as a process' data, and a runtime that gets none for a thread may wait for ever."""
    return STACK_MB * SESSIONS * (max(each or len(usable_cores()) for each in threads) - 1)


def _probe(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> None:
    import numpy as np

    _, shape = read_checked(job["path"], runtime, job["memory_mb"], batches=[target.batch])
    compiled = inspected(runtime, job["path"], target) if job["look"] else runtime.compile(job["path"], target)
    compiled.bind(np.zeros((target.batch, *shape), np.float32))()


if __name__ == "__main__":
    sys.exit(serve(_probe))
