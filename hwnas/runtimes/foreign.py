"""Foreign model files: the checks before any runtime reads one, and the input that its network takes.

A small file can describe a huge network: it is read in a child process with limited memory (`hwnas.runtimes.child`).
"""

from __future__ import annotations

import graphlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.errors import ModelError
from hwnas.lazy import onnx
from hwnas.networks.litert.tflite import SUFFIX, is_tflite, read_tflite

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

    from hwnas.runtimes.runtime import Runtime


MAX_NESTING = 16  # graphs inside graphs (bodies of If, Loop, Scan)
MAX_CALLS = 64  # local functions that call each other, one inside the other
MAX_NODES = 1_000_000  # once every local function is written out where it is called
_Key = tuple[str, str, str]  # domain, name and overload of a local function
_IMAGE_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The one input of a network: its name and its axes, batch first (None: not fixed)."""

    name: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ParsedModel:
    """The content of a file: its input, its metadata, and the network if it is an ONNX file."""

    input: ModelInput
    metadata: Mapping[str, str]
    proto: ModelProto | None = None


def read_model(path: str | os.PathLike[str], runtime: Runtime, label: str = "") -> ParsedModel:
    """Read a file for `runtime`: ONNX, or the runtime's own format. ModelError as by `load_checked` and `input_of`, and
    for a file of another format. Messages call the file `label`."""
    where = label or os.fspath(path)
    if not is_tflite(path):
        proto = load_checked(path, where)
        return ParsedModel(input_of(proto, where), {entry.key: entry.value for entry in proto.metadata_props}, proto)
    if getattr(runtime, "suffix", "") != SUFFIX:
        raise ModelError(f"{where} is a TFLite file; {runtime.name} takes ONNX files. Give one, or a target of litert: "
                         "target=edge_int8.")
    written = read_tflite(path)
    _, *axes = written.shape
    image = axes[-1:] + axes[:-1]  # the file has channels last, [h, w, c]
    return ParsedModel(ModelInput(written.name, (None, *image)), written.metadata)  # an interpreter sets the batch


def read_checked(path: str | os.PathLike[str], runtime: Runtime, memory_mb: int, label: str = "", *,
                 batches: Sequence[int] = (), channels: int | None = None, image_size: int | None = None
                 ) -> tuple[ParsedModel, tuple[int, ...]]:
    """Return the network of a file, and the shape of one image for it as by `sized`. ModelError, as by `check_path`,
    `read_model` and `sized`, if it cannot be run as asked."""
    check_path(path, memory_mb)
    model = read_model(path, runtime, label)
    return model, sized(model.input, label or os.fspath(path), channels, image_size, batches)


def check_path(path: str | os.PathLike[str], memory_mb: int) -> None:
    """Raise ModelError unless `path` is a readable file with content that fits into the memory allowed for it."""
    where = os.fspath(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{where} is a directory; give the .onnx file in it.")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{where} is not a regular file; give an .onnx file.")
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        raise ModelError(f"{where}: there is no such file. Give the path of an .onnx file that exists.") from None
    except OSError as error:
        raise ModelError(f"{where} cannot be read: {error.strerror}.") from None
    if not status.st_size:
        raise ModelError(f"{where} is empty. Export it again.")
    if status.st_size > memory_mb << 20:
        raise ModelError(f"{where} is {status.st_size >> 20} MiB large; the memory limit is {memory_mb} MiB. "
                         "Add memory_mb=N to allow more.")


def load_checked(path: str | os.PathLike[str], label: str = "") -> ModelProto:
    """Return the network without its external data, which must exist but is not read. Messages call the file `label`.

    ModelError if the file is not whole ONNX, refers to data outside its folder, or would expand to a huge network.
    """
    where = label or os.fspath(path)
    try:
        proto = onnx.load_model_from_string(Path(path).read_bytes())
    except OSError as error:
        raise ModelError(f"{where} cannot be read: {error.strerror}.") from None
    except MemoryError:
        raise
    except Exception as error:  # protobuf's exceptions depend on its implementation
        if re.search("depth|recursion", str(error), re.IGNORECASE):
            raise ModelError(f"{where} nests graphs deeper than ONNX files may; it is refused.") from None
        if is_tflite(path):
            raise ModelError(f"{where} is a TFLite file, and an ONNX file is needed here. Give the one that it was "
                             "made from.") from None
        raise ModelError(f"{where} is not an ONNX file, or is torn. Export it again.") from None
    if not proto.opset_import or not proto.graph.node or not proto.graph.output:
        raise ModelError(f"{where} is not an ONNX file, or is torn: it holds no network. Export it again.")
    _check_size(proto, where)
    folder = Path(path).parent
    for location in sorted({_location(tensor) for tensor in _tensors(proto) if tensor.data_location}):
        _check_external(location, folder, where)
    return proto


def _check_external(location: str, folder: Path, where: str) -> None:
    """Raise ModelError unless external data is a file in the model's folder, links followed: no other may be read."""
    is_plain = not os.path.isabs(location) and ".." not in re.split(r"[/\\]", location)
    inside = folder.resolve()
    try:
        within = is_plain and (inside / location).resolve().is_relative_to(inside)
        exists = (inside / location).is_file()
    except (OSError, ValueError):  # a name that no file can have
        within, exists = False, False
    if not location or not within:
        raise ModelError(f"{where} refers to external data outside its folder ({location[:200] or 'no name'!r}); it "
                         "is refused. Put the data beside the model and save it with a relative location.")
    if not exists:
        raise ModelError(f"{where} needs its external data {location!r} beside it, and there is no such file.")


def _location(tensor: TensorProto) -> str:
    name: str | bytes = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    return name if isinstance(name, str) else name.decode(errors="replace")  # bytes: no UTF-8


def _graphs(proto: ModelProto) -> list[Any]:
    training = [graph for info in proto.training_info for graph in (info.initialization, info.algorithm)]
    return [proto.graph, *training]


def _nodes(nodes: Sequence[NodeProto]) -> Iterator[tuple[NodeProto, int]]:
    """Yield every node of a graph and of the graphs inside it, with its depth. It works without recursion."""
    waiting = [(nodes, 0)]
    while waiting:
        part, depth = waiting.pop()
        for node in part:
            yield node, depth
            for attribute in node.attribute:
                inner = [attribute.g] if attribute.HasField("g") else []
                waiting.extend((graph.node, depth + 1) for graph in (*inner, *attribute.graphs))


def _tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor of a file: weights of graphs at any depth, values in attributes, in local functions too."""
    for graph in _graphs(proto):
        yield from _weights(graph)
    for nodes in [*(graph.node for graph in _graphs(proto)), *(function.node for function in proto.functions)]:
        for node, _ in _nodes(nodes):
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)
                for graph in (attribute.g, *attribute.graphs):
                    yield from _weights(graph)


def _weights(graph: Any) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


def _check_size(proto: ModelProto, where: str) -> None:
    """Raise ModelError for graphs nested too deeply, and for local functions that expand to too many nodes or calls."""
    bodies = {_key(function.domain, function.name, function): function.node for function in proto.functions}
    # 1. Count the nodes and list the calls of each local function, and of the main graph (the key of empty names).
    own: dict[_Key, int] = {}
    calls: dict[_Key, list[_Key]] = {}
    for key, nodes in [*bodies.items(), (("", "", ""), [node for graph in _graphs(proto) for node in graph.node])]:
        own[key], calls[key] = 0, []
        for node, depth in _nodes(nodes):
            if depth > MAX_NESTING:
                raise ModelError(f"{where} nests graphs more than {MAX_NESTING} deep; it is refused.")
            own[key] += 1
            callee = _key(node.domain, node.op_type, node)
            if callee in bodies:
                calls[key].append(callee)
    # 2. Sum up, callees first, without writing anything out.
    try:
        order = list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        name = error.args[1][0][1]
        raise ModelError(f"{where} has a local function, {name!r}, that calls itself; it is refused.") from None
    total: dict[_Key, int] = {}
    depths: dict[_Key, int] = {}
    for key in order:
        total[key] = own[key] + sum(total[callee] for callee in calls[key])
        depths[key] = 1 + max((depths[callee] for callee in calls[key]), default=0)
        if total[key] > MAX_NODES or depths[key] > MAX_CALLS:
            raise ModelError(f"{where} blows up when its local functions are written out (over {MAX_NODES} nodes, or "
                             f"calls more than {MAX_CALLS} deep); it is refused.")


def _key(domain: str, name: str, owner: Any) -> _Key:
    return ("" if domain == "ai.onnx" else domain, name, getattr(owner, "overload", ""))


def input_of(proto: ModelProto, where: str) -> ModelInput:
    """Return the network's input; ModelError unless it is exactly one float32 tensor with a batch axis."""
    weights = {weight.name for weight in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in weights]
    if len(inputs) != 1:
        names = ", ".join(value.name for value in inputs[:6]) or "none"
        raise ModelError(f"{where} takes {len(inputs)} inputs ({names}); only networks of one image input can be "
                         "timed.")
    kind = inputs[0].type
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        raise ModelError(f"{where}: input {inputs[0].name!r} is not a tensor with known axes. Export it with a shape.")
    if kind.tensor_type.elem_type != onnx.TensorProto.FLOAT:
        type_names = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}
        name = type_names.get(kind.tensor_type.elem_type, "an unknown type")
        raise ModelError(f"{where}: input {inputs[0].name!r} takes {name}, and hwnas runs networks on float32 "
                         "images. Give one with a float32 input: of hwnas export format=uint8 the file that it took.")
    shape = tuple(axis.dim_value if axis.dim_value > 0 else None for axis in kind.tensor_type.shape.dim)
    if len(shape) < 2:
        raise ModelError(f"{where}: input {inputs[0].name!r} has {len(shape)} axes; [batch, channels, height, width] "
                         "is expected.")
    return ModelInput(inputs[0].name, shape)


def sized(model_input: ModelInput, where: str, channels: int | None, image_size: int | None,
          batches: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the axes of one image [c, h, w] (or [h, w, c], or as the network has them), all fixed.

    Open axes are taken from `channels` and `image_size`. ModelError if one stays open or a fixed one differs, and if
    the batch axis is fixed to another number than one of `batches`.
    """
    batch, *shape = model_input.shape
    if (other := next((each for each in batches if batch not in (None, each)), None)) is not None:
        raise ModelError(f"{where}: the batch axis of input {model_input.name!r} is fixed to {batch}; batch={other} "
                         f"cannot be run. Give batch={batch}, or export it with a dynamic batch axis.")
    channels_last = len(shape) == 3 and shape[2] in _IMAGE_CHANNELS and shape[0] not in _IMAGE_CHANNELS
    keys: dict[int, tuple[str, int | None]] = {}
    if len(shape) == 3:
        square, channel = ((0, 1), 2) if channels_last else ((1, 2), 0)
        keys = {channel: ("channels", channels), **dict.fromkeys(square, ("image_size", image_size))}
    full = []
    for axis, size in enumerate(shape):
        key, asked_size = keys.get(axis, ("", None))
        if size is None and asked_size is None:
            how = f"Add {key}=N" if key else "Export it with that axis fixed"
            raise ModelError(f"{where}: axis {axis + 1} of input {model_input.name!r} has no fixed size. {how}.")
        if None not in (size, asked_size) and size != asked_size:
            raise ModelError(f"{where}: axis {axis + 1} of input {model_input.name!r} is fixed to {size}, but "
                             f"{key}={asked_size}. Leave {key} out, or export it again.")
        full.append(int(size or asked_size or 0))
    return tuple(full)
