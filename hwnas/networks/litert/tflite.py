"""Write TFLite files, tensor by tensor and operator by operator, and read the description in a file.

The schema ships with LiteRT: https://github.com/google-ai-edge/LiteRT, tflite/schema/schema.fbs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hwnas.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIX = ".tflite"
_IDENTIFIER = b"TFL3"
_ALIGNMENT = 16  # bytes; kernels read weights as vectors
_METADATA = "hwnas"  # the name of our entry in a file's metadata; its content is JSON
_TYPES = {"float32": "FLOAT32", "int8": "INT8", "int32": "INT32"}


@cache
def schema() -> Any:
    """Return the module with the classes of the file format; raises ConfigError if LiteRT is not installed."""
    if find_spec("ai_edge_litert") is None:
        raise ConfigError("LiteRT is not installed. Install it: pip install 'hwnas[edge]'")
    import ai_edge_litert.schema_py_generated as module

    return module


@dataclass(frozen=True, slots=True)
class Levels:
    """The numbers behind int8 values: (level - zero) * scale, with one scale, or one for each channel along `axis`."""

    scale: NDArray[np.float32]
    zero: int = 0
    axis: int = 0

    def same(self, other: Levels) -> bool:
        """Return whether a level is the same number in both."""
        return self.zero == other.zero and np.array_equal(self.scale, other.scale)


@dataclass(slots=True)
class TfliteFile:
    """A file with one graph under construction. Operators refer to tensors by their index."""

    _tensors: list[Any] = field(default_factory=list)
    _operators: list[Any] = field(default_factory=list)
    _codes: dict[tuple[int, int], int] = field(default_factory=dict)
    _buffers: list[NDArray[np.uint8] | None] = field(default_factory=lambda: [None])
    _constants: dict[tuple[str, tuple[int, ...], bytes], int] = field(default_factory=dict)

    def tensor(self, name: str, shape: Sequence[int], levels: Levels | None = None, kind: str = "",
               data: NDArray[Any] | None = None) -> int:
        """Add a tensor, with `data` if it is a weight; return its index. Type: `kind`, or int8 if it has `levels`, or
        float32."""
        s = schema()
        tensor = s.TensorT()
        tensor.name, tensor.shape = name, list(map(int, shape))
        tensor.type = getattr(s.TensorType, _TYPES[kind or ("int8" if levels else "float32")])
        if levels is not None:
            scale = np.atleast_1d(levels.scale).astype(np.float32)
            tensor.quantization = s.QuantizationParametersT(
                scale=scale, zeroPoint=np.full(len(scale), levels.zero, np.int64), quantizedDimension=levels.axis)
        if data is not None:
            self._buffers.append(np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8))
            tensor.buffer = len(self._buffers) - 1
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def constant(self, name: str, array: NDArray[Any], levels: Levels | None = None) -> int:
        """Return a tensor with the values `array` (float32, int8, int32); equal ones without levels are stored once."""
        key = (str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest())
        if levels is None and key in self._constants:
            return self._constants[key]
        index = self.tensor(name, array.shape, levels, str(array.dtype), array)
        if levels is None:
            self._constants[key] = index
        return index

    def operator(self, kind: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", version: int = 1,
                 **values: Any) -> None:
        """Append the operator `kind` (a name in BuiltinOperator) with `values` for the fields of its `options`."""
        s = schema()
        code = self._codes.setdefault((getattr(s.BuiltinOperator, kind), version), len(self._codes))
        operator = s.OperatorT(code, list(inputs), list(outputs))
        if options:
            operator.builtinOptionsType = getattr(s.BuiltinOptions, options)
            operator.builtinOptions = getattr(s, f"{options}T")()
            for name, value in values.items():
                setattr(operator.builtinOptions, name, value)
        self._operators.append(operator)

    def pack(self, inputs: Mapping[str, int], outputs: Mapping[str, int], metadata: Mapping[str, str]) -> bytes:
        """Return the bytes of the file. `inputs` and `outputs` are the names in its signature, with their tensors."""
        s = schema()
        model, graph = s.ModelT(), s.SubGraphT()
        graph.name, graph.tensors, graph.operators = "main", self._tensors, self._operators
        graph.inputs, graph.outputs = list(inputs.values()), list(outputs.values())
        model.version, model.description, model.subgraphs = 3, "made by hwnas", [graph]
        # The first field of a code has 8 bits, for old readers; larger codes have a placeholder there.
        oldest = s.BuiltinOperator.PLACEHOLDER_FOR_GREATER_OP_CODES
        model.operatorCodes = [s.OperatorCodeT(min(kind, oldest), version=version, builtinCode=kind)
                               for kind, version in self._codes]
        content = np.frombuffer(json.dumps(dict(metadata), ensure_ascii=False).encode(), np.uint8)
        model.buffers = [_buffer(data) for data in [*self._buffers, content]]
        model.metadata = [s.MetadataT(_METADATA, len(self._buffers))]
        ends = ([s.TensorMapT(name, index) for name, index in names.items()] for names in (inputs, outputs))
        model.signatureDefs = [s.SignatureDefT(*ends, "serving_default", 0)]
        return _pack(model)


def _pack(model: Any) -> bytes:
    import flatbuffers

    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())


def _buffer(data: NDArray[np.uint8] | None) -> Any:
    """Return a buffer with aligned bytes, as the schema requires; its Python classes do not align them."""
    s = schema()

    class Aligned(s.BufferT):  # type: ignore[misc, name-defined]
        def Pack(self, builder: Any) -> Any:  # flatbuffers' name
            if data is None:
                return super().Pack(builder)
            # As Builder.CreateNumpyVector, but with an alignment of 16 bytes. A flatbuffer grows from its end.
            builder.StartVector(1, data.size, _ALIGNMENT)
            builder.head -= data.size
            builder.Bytes[builder.head : builder.head + data.size] = data.tobytes()
            vector = builder.EndVector()
            s.BufferStart(builder)
            s.BufferAddData(builder, vector)
            return s.BufferEnd(builder)

    return Aligned()


def is_tflite(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has the mark of TFLite files; False if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(8)[4:] == _IDENTIFIER
    except OSError:
        return False


class SingleOperator(NamedTuple):
    """One operator of a file as a file of its own: its output's name, its kind and its place in the first file."""

    name: str
    kind: str
    place: int
    content: bytes


def single_operators(content: bytes) -> Iterator[SingleOperator]:
    """Yield each operator of a file, in order. A padding comes with the operator behind it, because the delegate makes
    it a part of that operator."""
    s = schema()
    kinds = {value: name for name, value in vars(s.BuiltinOperator).items() if isinstance(value, int)}
    whole = s.ModelT.InitFromPackedBuf(content)
    codes = [kinds[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in whole.operatorCodes]
    unit: list[Any] = []  # the operators of the next file: one, or a padding and its reader
    for place, operator in enumerate(whole.subgraphs[0].operators):
        if unit and unit[-1].outputs[0] not in operator.inputs:  # a padding that the next operator does not read
            yield _part(whole, unit, codes, place - 1)
            unit = []
        unit.append(operator)
        if codes[operator.opcodeIndex] != "PAD":
            yield _part(whole, unit, codes, place)
            unit = []
    if unit:
        yield _part(whole, unit, codes, place)


def _part(whole: Any, unit: Sequence[Any], codes: Sequence[str], place: int) -> SingleOperator:
    """Return a file of the consecutive operators `unit`, with name, kind and `place` of the last one."""
    # Copy the tensors that the operators use, and give them new indices.
    s, parent = schema(), whole.subgraphs[0]
    used = (int(tensor) for operator in unit for tensor in (*operator.inputs, *operator.outputs))
    places = {tensor: number for number, tensor in enumerate(dict.fromkeys(tensor for tensor in used if tensor >= 0))}
    model, graph = s.ModelT(), s.SubGraphT()
    graph.tensors, graph.operators = [copy(parent.tensors[tensor]) for tensor in places], [copy(each) for each in unit]
    data = [whole.buffers[tensor.buffer].data for tensor in graph.tensors]
    for number, tensor in enumerate(graph.tensors):
        tensor.buffer = number + 1
    for number, operator in enumerate(graph.operators):
        operator.opcodeIndex = number
        operator.inputs = [places.get(int(tensor), -1) for tensor in operator.inputs]
        operator.outputs = [places[int(tensor)] for tensor in operator.outputs]
    # Inputs are the tensors without stored values that no operator of the part writes.
    results = {tensor for operator in graph.operators for tensor in operator.outputs}
    graph.outputs = graph.operators[-1].outputs
    graph.inputs = [number for number in range(len(places)) if data[number] is None and number not in results]
    model.version, model.subgraphs = whole.version, [graph]
    model.operatorCodes = [whole.operatorCodes[operator.opcodeIndex] for operator in unit]
    model.buffers = [_buffer(None), *map(_buffer, data)]
    name = (graph.tensors[graph.outputs[0]].name or b"").decode(errors="replace")
    return SingleOperator(name, codes[unit[-1].opcodeIndex], place, _pack(model))


@dataclass(frozen=True, slots=True)
class FileDescription:
    """The description in a file that hwnas wrote: the name of its input, its shape [batch, h, w, c], its metadata."""

    name: str
    shape: tuple[int, ...]
    metadata: Mapping[str, str]


def read_tflite(path: str | os.PathLike[str]) -> FileDescription:
    """Read the description in a file; raises ModelError if it is torn, no TFLite file, or not written by hwnas."""
    where = os.fspath(path)
    s = schema()
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ModelError(f"{where} cannot be read: {error.strerror}.") from None
    try:
        if content[4:8] != _IDENTIFIER:
            raise ValueError("no network")
        model = s.Model.GetRootAs(content, 0)
        graph = model.Subgraphs(0)
        image, metadata = graph.Tensors(graph.Inputs(0)), _metadata(model)
        description = FileDescription(image.Name().decode(), tuple(map(int, image.ShapeAsNumpy())), metadata)
    except MemoryError:
        raise
    except Exception:  # a torn flatbuffer may fail in struct, numpy or an index
        raise ModelError(f"{where} is not a TFLite file, or is torn. Export it again.") from None
    if not metadata:
        raise ModelError(f"{where} is a TFLite file that hwnas did not write. Give the ONNX file that it was made of.")
    return description


def _metadata(model: Any) -> dict[str, str]:
    for index in range(model.MetadataLength()):
        entry = model.Metadata(index)
        if entry.Name() == _METADATA.encode():
            entries = json.loads(model.Buffers(entry.Buffer()).DataAsNumpy().tobytes())
            return {str(key): str(value) for key, value in entries.items()}
    return {}
