"""Try a model file that came from elsewhere in a child process, so that a crash is a failed candidate and no more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from hwnas.errors import CandidateError, TargetError
from hwnas.target import Target

_REFUSED, _TARGET = 3, 4


def probe_model(path: str | os.PathLike[str], target: Target, timeout_s: float = 60.0, memory_mb: int = 2048) -> None:
    """Compile `path` for `target` and run it once in a child process.

    `memory_mb` bounds what the child may allocate beyond the runtime's own libraries (Linux; elsewhere only the time
    is bounded). CandidateError says why it failed: refused, crashed, out of memory, timed out. TargetError as
    `Runtime.check`.
    """
    # -P and an explicit path: the child must find this hwnas and must not import modules beside the model.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]),
                                                               *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-P", "-m", "hwnas.runtimes.child", os.fspath(path), json.dumps(asdict(target)),
               str(memory_mb)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True, errors="replace", env=environment, start_new_session=True)
    try:
        _, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise CandidateError(f"{os.fspath(path)}: still compiling or running after {timeout_s:g} s.") from None
    finally:
        _end(process)
    last = said.strip().splitlines()[-1][:300] if said.strip() else "no message"
    if process.returncode == _TARGET:
        raise TargetError(last)
    if process.returncode == _REFUSED:
        raise CandidateError(last)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise CandidateError(f"{os.fspath(path)}: {target.runtime} was ended by {name} ({last}).")
    if process.returncode:
        raise CandidateError(f"{os.fspath(path)}: {target.runtime} ended with exit code {process.returncode} ({last}).")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the child's process group and reap it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.communicate()


def _limit_memory(megabytes: int) -> None:
    """Let this process allocate `megabytes` more than it has now; writes no core file."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()
        now_kb = int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1])
        limit = (now_kb << 10) + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(path: str, target_json: str, memory_mb: str) -> int:
    """The child: exit code 0, or one line on stderr and a code that says who refused."""
    import numpy as np
    import onnx

    from hwnas.runtimes import load_runtime

    target = Target(**json.loads(target_json))
    runtime = load_runtime(target.runtime)
    try:
        runtime.check(target)
        _limit_memory(int(memory_mb))
        compiled = runtime.compile(path, target)
        shape = [axis.dim_value for axis in onnx.load(path).graph.input[0].type.tensor_type.shape.dim[1:]]
        compiled.bind(np.zeros((target.batch, *shape), np.float32))()
    except TargetError as error:
        print(error, file=sys.stderr)
        return _TARGET
    except CandidateError as error:
        print(error, file=sys.stderr)
        return _REFUSED
    except MemoryError:
        print(f"{path}: out of memory; the limit is {memory_mb} MiB.", file=sys.stderr)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
