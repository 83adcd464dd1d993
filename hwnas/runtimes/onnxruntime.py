"""ONNX Runtime on the CPU: threads fixed, inputs and outputs bound, executed operators read back."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import FileError, UserError, one_line
from hwnas.runtimes.runtime import (
    INTEGER,
    BoundCall,
    Execution,
    NodeTime,
    check_batch,
    judge,
    nodes_of,
    quantised_in_file,
    quickest_means,
    require,
    run_in_batches,
    threads_of,
)
from hwnas.system.libraries import import_onnxruntime, version_of
from hwnas.system.paths import temporary_folder
from hwnas.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import NodeProto

_INT8 = (*INTEGER, "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
_FLOAT = ("Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")
WEIGHTED = (*_INT8, *_FLOAT)  # convolutions and matrix products, as ONNX Runtime names them
_SUFFIX = "_kernel_time"
_TYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "int8", "int8": "int8"}
_DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}
_TOKEN = re.compile(r"_token_\d+$")  # ONNX Runtime adds it to a name that it uses again
_WARM_UP = 5


class OnnxRuntime:
    """ONNX Runtime's CPU provider: fp32 and int8 (QDQ files)."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    package = "onnxruntime"
    precisions: tuple[str, ...] = ("fp32", "int8")
    device = memory = "cpu"  # of its targets, and of the inputs of its sessions
    timed = "this call is what is timed; `session.run` copies"  # a comment in the code on cards

    def version(self) -> str:
        return f"onnxruntime {version_of('onnxruntime')}"

    def check(self, target: Target) -> None:
        require(target, self.name, self.precisions, self.device)

    def compile(self, onnx_path: str | os.PathLike[str], target: Target, *, refuse: bool = True) -> OnnxRuntimeCompiled:
        """Compile, see `hwnas.runtimes.runtime.Runtime`. A fallback is an error only with `refuse`."""
        self.check(target)
        meant = quantised_in_file(onnx_path)
        # ONNX Runtime writes the graph that it will run: its operators show in which precision.
        with temporary_folder() as folder:
            optimised = Path(folder, "optimised.onnx")
            try:
                session = self.open_session(onnx_path, target, optimised=optimised)
            except FileError as error:
                self.open_session(onnx_path, target)  # the file is to blame if this fails, too
                raise unwritten(folder, error.__cause__ or error) from error
            kinds = [node.op_type for node in nodes_of(optimised)]
        executed = Counter("int8" if kind in _INT8 else "fp32" for kind in kinds if kind in WEIGHTED)
        return OnnxRuntimeCompiled(session, judge(onnx_path, target, executed, meant, refuse), target, onnx_path, self)

    def open_session(self, path: str | os.PathLike[str], target: Target, *, model: bytes | None = None,
                     providers: Sequence[Any] = ("CPUExecutionProvider",), optimised: Path | None = None,
                     profile: Path | None = None, exact: bool = False) -> Any:
        """Return a session of ONNX Runtime on a file, or on the bytes `model`; FileError if it cannot open.

        `providers` are ONNX Runtime's. It writes the graph that it runs to `optimised`, and its profile to a file whose
        name begins with `profile`. An `exact` session sums int8 products in 32 bits on any CPU, more slowly.
        """
        ort = import_onnxruntime()

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads_of(target), 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        options.add_free_dimension_override_by_name("batch", target.batch)
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        try:
            return ort.InferenceSession(model or os.fspath(path), options, providers=list(providers),
                                        enable_fallback=0,  # none to the CPU, which it would also print
                                        disabled_optimizers=self.unwanted(target))
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise FileError(path, f"ONNX Runtime cannot compile it: {one_line(error)}") from error

    def unwanted(self, target: Target) -> list[str]:
        """Return the optimisers to switch off. In int8, MatMulAddFusion would merge a layer of tokens with its bias,
        and the pairs around it would not fit the result."""
        return ["MatMulAddFusion"] if target.precision == "int8" else []

    def usage(self, file: str, target: Target) -> str:
        """Return the code that a card shows."""
        return ("import numpy as np, onnxruntime\n"
                "options = onnxruntime.SessionOptions()\n"
                f"options.intra_op_num_threads, options.inter_op_num_threads = {threads_of(target)}, 1  # as measured\n"
                'options.add_free_dimension_override_by_name("batch", len(images))\n'
                f"{self._session_code(file, target)}\n"
                "given = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(images, np.float32), "
                f'"{self.memory}", 0)\n'
                "binding = session.io_binding()\n"
                'binding.bind_ortvalue_input("images", given)\n'
                'binding.bind_output("logits")\n'
                f"session.run_with_iobinding(binding)  # {self.timed}\n"
                "logits = binding.copy_outputs_to_cpu()[0]")

    def _session_code(self, file: str, target: Target) -> str:
        unwanted = f", disabled_optimizers={self.unwanted(target)}" if self.unwanted(target) else ""
        return (f'session = onnxruntime.InferenceSession("{file}", options, '
                f'providers=["CPUExecutionProvider"]{unwanted})')


def run_once(path: str | os.PathLike[str], images: NDArray[Any]) -> NDArray[np.float32]:
    """Return a network's answer to `images`, whose type is that of its input, without sums that saturate. FileError if
    it cannot be run."""
    target = Target("once", "onnxruntime", "fp32", batch=len(images))
    return run_session(OnnxRuntime().open_session(path, target, exact=True), path, images)


def run_session(session: Any, path: str | os.PathLike[str], images: NDArray[Any]) -> NDArray[np.float32]:
    """Return the answer of a session on `path` to `images`; FileError if it cannot be run."""
    try:
        logits: NDArray[np.float32] = session.run(None, {session.get_inputs()[0].name: images})[0]
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise FileError(path, f"ONNX Runtime cannot run it: {one_line(error)}") from error
    return logits


def unwritten(folder: str, error: BaseException) -> UserError:
    """Return the error for a `folder` of temporary files in which ONNX Runtime could not write; it does not say why."""
    return UserError(f"{folder}: ONNX Runtime cannot write there ({one_line(error)}). Free space, or set TMPDIR to a "
                     "folder on another disk; then give the same command again.")


@dataclass(frozen=True)
class OnnxRuntimeCompiled:
    """A session with a fixed batch."""

    session: Any
    execution: Execution
    target: Target
    path: str | os.PathLike[str]
    runtime: OnnxRuntime

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        return self._bind(self.session, images)

    def _bind(self, session: Any, images: NDArray[np.float32]) -> BoundCall:
        ort = import_onnxruntime()

        check_batch(images, self.target)
        images = np.ascontiguousarray(images, dtype=np.float32)
        input_value = ort.OrtValue.ortvalue_from_numpy(images, self.runtime.memory, 0)
        binding = session.io_binding()
        binding.bind_ortvalue_input(session.get_inputs()[0].name, input_value)
        binding.bind_output(session.get_outputs()[0].name)
        return BoundCall(partial(session.run_with_iobinding, binding), input_value)

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        return run_in_batches(partial(run_session, self.session, self.path), images, self.target.batch)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        with temporary_folder() as folder:
            optimised = Path(folder, "optimised.onnx")
            try:
                session = self.runtime.open_session(self.path, self.target, optimised=optimised,
                                                    profile=Path(folder, "profile"))
            except FileError as error:  # of a file that was compiled before
                raise unwritten(folder, error.__cause__ or error) from error
            run = self._bind(session, images)
            for _ in range(_WARM_UP + repeats):
                run()
            return node_times(read_nodes(session, folder), repeats, name_executed(optimised, self.path))


Events = list[dict[str, Any]]  # as the profile's JSON has them


def read_nodes(session: Any, folder: str) -> Events:
    """End a session's profile in `folder` and return every run of a node; UserError if it was not written."""
    try:
        events = json.loads(Path(session.end_profiling()).read_text())
    except (OSError, ValueError) as error:
        raise unwritten(folder, error) from error
    return [event for event in events if event.get("cat") == "Node" and str(event.get("name", "")).endswith(_SUFFIX)]


def name_executed(optimised: Path, original: str | os.PathLike[str]) -> list[tuple[str, str, str]]:
    """Return the nodes of the optimised graph in the order in which they run: operator, domain, and a name from the
    file. Empty if ONNX Runtime wrote no graph.

    A node that ONNX Runtime made and left without a name is called by the file's tensor in which it ends.
    """
    if not optimised.exists():
        return []
    file, nodes = nodes_of(original), nodes_of(optimised)
    tensors, by_name = {name for node in file for name in node.output}, {node.name: node for node in file}
    reader = {name: node for node in reversed(nodes) for name in node.input}

    def ends_in(node: NodeProto) -> str:
        # Follow the outputs until a tensor is the file's, or its reader is a node that the file names.
        tensor = str(node.output[0])
        for _ in nodes:
            after = reader.get(tensor)
            if tensor in tensors or after is None:
                break
            origin = by_name.get(_TOKEN.sub("", after.name)) if after.name else None
            if origin is not None and len(origin.input) == len(after.input):
                return str(origin.input[list(after.input).index(tensor)])
            tensor = str(after.output[0])
        return tensor

    return [(node.op_type, node.domain, node.name or ends_in(node)) for node in nodes]


def node_times(events: Events, repeats: int, named: Sequence[tuple[str, str, str]]) -> list[NodeTime]:
    """Return the mean time of each node over the last `repeats` runs, by `quickest_means`.

    ONNX Runtime rounds down to whole microseconds: half of one is added. `named` is the result of `name_executed`.
    """
    nodes: dict[tuple[str, str], Events] = defaultdict(list)
    for event in events:
        nodes[event["name"], event["args"]["op_name"]].append(event)
    means = quickest_means([[(event["dur"] + 0.5) / 1e3 for event in own[-repeats:]] for own in nodes.values()])
    last = [own[-1] for own in nodes.values()]
    if [event["args"]["op_name"] for event in last] != [kind for kind, *_ in named]:  # it ran others than it wrote
        named = [("", "", str(event["name"]).removesuffix(_SUFFIX)) for event in last]
    return [NodeTime(name, event["args"]["op_name"], ms, precision_of(event["args"]),
                     ":".join(filter(None, (domain, event["args"]["op_name"]))),
                     _DEVICES.get(event["args"].get("provider", ""), ""))
            for event, ms, (_, domain, name) in zip(last, means, named, strict=True)]


def precision_of(said: Mapping[str, Any]) -> str:
    """Return the executed precision of a profiled node: int8 for ONNX Runtime's int8 operators, else its output's
    type."""
    if said["op_name"] in _INT8 or str(said["op_name"]).startswith("QLinear"):
        return "int8"
    return _TYPES.get(next((kind for shape in said.get("output_type_shape", ()) for kind in shape), ""), "")
