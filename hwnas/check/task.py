"""The check's task, which runs in a child process: compile a model file for the target, profile it, name its nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hwnas.benchmark.task import prepare_file, read_checked
from hwnas.errors import ModelError
from hwnas.latency.copies import noise
from hwnas.latency.curve import Loaded
from hwnas.latency.harness import Progress
from hwnas.runtimes.child import WAITING
from hwnas.runtimes.executed import executed
from hwnas.runtimes.runtime import NodeTime, Runtime
from hwnas.system.cores import usable_cores
from hwnas.system.paths import temporary_folder
from hwnas.target import Target, measuring_lock


def run(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> dict[str, Any]:
    """What the target executes of the network of `job` (see `hwnas.check`), as plain values: input, executed
    precisions, nodes, operators of the file. ModelError says what the file lacks.

    With `told`, the path of what another machine told of the nodes, these are judged.
    """
    if told := job.get("told"):
        nodes = [NodeTime(**node) for node in json.loads(Path(told).read_text())]
        return executed(nodes, job["path"], target).to_dict()
    model, shape = read_checked(job, runtime)
    about = {"input": {"name": model.input.name, "image": list(shape)}}
    if model.proto is None:
        raise ModelError(f"{job['label']}: what is executed is told of ONNX files. Give the one that this was made "
                         "from.")
    with temporary_folder() as folder:
        progress(0.0, "compiling")
        file = prepare_file(model, shape, job, target, Path(folder))
        del model
        network = Loaded(runtime, file, job["label"], shape, job["memory_mb"])
        compiled = network.compile(target, look=True)
        network.bind(compiled, target)
        with measuring_lock(usable_cores(), partial(_waiting, progress)):
            progress(0.5, "profiling")
            nodes = compiled.profile(noise(target.batch, shape), job["repeats"])
        result = executed(nodes, file, target)
    return {**about, "execution": compiled.execution.to_dict(), **result.to_dict()}


def _waiting(progress: Progress, who: str) -> None:
    progress(0.5, f"{WAITING} for {who}" if who else WAITING)


if __name__ == "__main__":
    from hwnas.runtimes.child import serve

    sys.exit(serve(run))
