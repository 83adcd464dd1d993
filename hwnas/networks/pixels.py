"""A network's ONNX graph with its preparation in front: uint8 pixels in, logits out.

The resizing is matrix products: a row of weights for each new line and column. Resize with `antialias` would be one
operator, but OpenVINO reads it as if it were plain, and ONNX Runtime's differs from Pillow's by several levels. Values
often lie half way between two levels, where the last bit of a weight decides: so the weights are whole parts of 2**22,
as Pillow's, and every product and sum is a whole number that float32 holds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.dataset import Preparation, is_padded, normalise
from hwnas.errors import ModelError
from hwnas.lazy import LazyModule
from hwnas.networks.export import BATCH_AXIS, INPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx
    import onnx.helper
    import onnx.numpy_helper
    import torch
    import torch.nn.functional
    from onnx import ModelProto
else:
    onnx = LazyModule("onnx")
    torch = LazyModule("torch")

_HERE = "prepare"  # begins the names of nodes and values
_WHOLE, _STEP = 1 << 22, 1 << 11  # Pillow computes in parts of the first, the second is its root


def take_pixels(proto: ModelProto, preparation: Preparation, mean: Sequence[float], std: Sequence[float],
                image_size: int | None = None) -> list[int | str]:
    """Put the preparation in front of a network, in place: `images` becomes uint8 [n, height, width, channels], whose
    shape is returned, names for open axes.

    Pictures may have any height and width, the same for a batch, or with `image_size` are square of that size; arrays
    (see `Preparation`) have the one size that they were given in. The pixels are those of `hwnas.data.decoding.decode`
    and `hwnas.data.dataset.resize`, to the last level. ModelError for a graph of another input.
    """
    graph = _Graph(proto)
    first = preparation.sizes[0]
    given = image_size if preparation.pictures else first
    pixels = graph.add("Cast", graph.add("Transpose", INPUT, perm=[0, 3, 1, 2]), to=onnx.TensorProto.FLOAT)
    if given != first:
        height, width = graph.sides() if given is None else (None, None)
        pixels = graph.resized(pixels, graph.shares(width, height, given, first), False)  # columns first, as Pillow
        pixels = graph.resized(pixels, graph.shares(height, width, given, first), True)
    for before, after in pairwise(preparation.sizes):
        pixels = graph.at_size(pixels, before, after)
    levels = np.repeat(np.arange(256, dtype=np.uint8)[:, None], preparation.channels, 1)
    graph.finish(graph.looked_up(pixels, normalise(levels[:, :, None, None], mean, std)[:, :, 0, 0]))
    shape: list[int | str] = [BATCH_AXIS, given or "height", given or "width", preparation.channels]
    proto.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info(INPUT, onnx.TensorProto.UINT8, shape))
    return shape


def _shares(before: int, after: int) -> NDArray[np.int64]:
    """The parts of 2**22 [after, before] that each pixel of a line has in each new one, as Pillow rounds them: a
    triangle as wide as two new pixels, or two old ones where these are larger."""
    apart = np.abs((2 * np.arange(before) + 1) * after - ((2 * np.arange(after) + 1) * before)[:, None])
    parts = np.maximum(0, 2 * max(before, after) - apart)
    total = parts.sum(1, keepdims=True)
    return np.asarray((2 * _WHOLE * parts + total) // (2 * total))


def _torch_shares(before: int, after: int) -> NDArray[np.float32]:
    """The shares [before, after] that torch gives each pixel of a line in each new one, to its own last bit."""
    lines = torch.eye(before)[None, None]
    resized = torch.nn.functional.interpolate(lines, (before, after), mode="bilinear", antialias=True)
    return np.asarray(resized[0, 0].numpy())


class _Graph:
    """Nodes that are put in front of a network's own."""

    def __init__(self, proto: ModelProto) -> None:
        if len(proto.graph.input) != 1 or proto.graph.input[0].name != INPUT or any(
                node.name.startswith(_HERE) for node in proto.graph.node):
            raise ModelError(f"the network takes its preparation only once, and its input must be {INPUT!r}. Give the "
                             "model.onnx or model_int8.onnx of a model folder.")
        self._proto, self._nodes, self._number = proto, list[Any](), 0

    def _name(self) -> str:
        self._number += 1
        return f"{_HERE}/{self._number}"

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The output of a new node."""
        name = self._name()
        self._nodes.append(onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any) -> str:
        """The name of a value that is stored; numbers become float32."""
        array, name = np.asarray(value), self._name()
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self._proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name

    def sides(self) -> tuple[str, str]:
        """Height and width of the images, int64 [1]."""
        shape = self.add("Shape", INPUT)
        height, width = (self.add("Gather", shape, self.constant(np.array([axis])), axis=0) for axis in (1, 2))
        return height, width

    def shares(self, length: str | None, other: str | None, given: int | None, after: int) -> tuple[str, str]:
        """`_shares` of the middle square along the side `length` (None: it is `given`), in whole steps of 2**11 and
        what is left of them."""
        if length is None or other is None:
            steps, rest = (each.astype(np.float32) for each in np.divmod(_shares(int(given or after), after), _STEP))
            return self.constant(steps), self.constant(rest)
        side, across = (self.add("Cast", name, to=onnx.TensorProto.FLOAT) for name in (length, other))
        square = self.add("Min", side, across)
        zero, step = (self.constant(np.array(number)) for number in (0, 1))
        places = self.add("Cast", self.add("Range", zero, self.add("Squeeze", length), step), to=onnx.TensorProto.FLOAT)
        outside = self.add("Sub", side, square)  # twice what is cut off at the beginning
        at = self.times(self.add("Sub", self.add("Add", self.times(places, 2.0), self.constant([1.0])), outside), after)
        middles = self.add("Mul", self.constant((2.0 * np.arange(after) + 1)[:, None]), square)
        reach = self.times(self.add("Max", square, self.constant([float(after)])), 2.0)
        parts = self.add("Sub", reach, self.add("Abs", self.add("Sub", at, middles)))
        parts = self.add("Max", parts, self.constant([0.0]))
        return self.split(self.divided(parts, self.add("ReduceSum", parts, self.constant(np.array([1])), keepdims=1)))

    def divided(self, parts: str, total: str) -> str:
        """2**22 times `parts` by `total`, rounded. A quotient in float32 may be one too large or too small: what it
        leaves is computed in pieces that float32 holds, and corrects it."""
        quotient = self.whole(self.times(self.add("Div", parts, total), _WHOLE))
        first = self.floor(self.times(quotient, 2.0 ** -14))
        rest = self.add("Sub", quotient, self.times(first, 2.0 ** 14))
        second = self.floor(self.times(rest, 2.0 ** -7))
        third = self.add("Sub", rest, self.times(second, 2.0 ** 7))
        left = self.add("Sub", self.times(parts, 2.0 ** 8), self.add("Mul", first, total))
        left = self.add("Sub", self.times(left, 2.0 ** 7), self.add("Mul", second, total))
        left = self.add("Sub", self.times(left, 2.0 ** 7), self.add("Mul", third, total))
        return self.add("Add", quotient, self.whole(self.add("Div", left, total)))

    def split(self, parts: str) -> tuple[str, str]:
        """Whole steps, and what is left of them."""
        steps = self.floor(self.times(parts, 1 / _STEP))
        return steps, self.add("Sub", parts, self.times(steps, _STEP))

    def resized(self, pixels: str, shares: tuple[str, str], left: bool) -> str:
        """New lines (`left`) or columns of `pixels` [n, c, h, w]: whole levels, halves upwards, as Pillow's."""
        steps, rest = (self.product(matrix, pixels, left) for matrix in shares)
        steps = self.add("Add", steps, self.constant([_STEP / 2]))
        levels = self.floor(self.times(steps, 1 / _STEP))
        rest = self.add("Add", self.times(self.add("Sub", steps, self.times(levels, _STEP)), _STEP), rest)
        return self.add("Add", levels, self.floor(self.times(rest, 1 / _WHOLE)))

    def product(self, matrix: str, pixels: str, left: bool) -> str:
        """New lines (`left`) or columns of `pixels` [n, c, h, w]."""
        return self.add("MatMul", matrix, pixels) if left else \
            self.add("MatMul", pixels, self.add("Transpose", matrix, perm=[1, 0]))

    def times(self, value: str, factor: float) -> str:
        """`value` by a number."""
        return self.add("Mul", value, self.constant([float(factor)]))

    def floor(self, value: str) -> str:
        """The whole number below."""
        return self.add("Floor", value)

    def whole(self, value: str) -> str:
        """The nearest whole number, halves upwards."""
        return self.floor(self.add("Add", value, self.constant([0.5])))

    def at_size(self, pixels: str, before: int, after: int) -> str:
        """As `hwnas.data.dataset.resize`: padded where that adds little, otherwise in fractions of levels until the
        end, halves to even."""
        if is_padded(before, after):
            spare = (after - before) // 2
            return self.add("Pad", pixels, self.constant(np.array([0, 0, spare, spare] * 2)))
        shares = _torch_shares(before, after)
        columns = self.add("MatMul", pixels, self.constant(shares))
        return self.add("Round", self.add("MatMul", self.constant(shares.T.copy()), columns))

    def looked_up(self, pixels: str, table: NDArray[np.float32]) -> str:
        """What each level of each channel becomes, by `table` [256, channels]: to the last bit, as in training."""
        begins = self.constant((256 * np.arange(table.shape[1], dtype=np.int32))[:, None, None])
        places = self.add("Add", self.add("Cast", pixels, to=onnx.TensorProto.INT32), begins)
        return self.add("Gather", self.constant(table.T.reshape(-1).copy()), places)

    def finish(self, prepared: str) -> None:
        """Let the network read `prepared`, behind the new nodes."""
        for node in self._proto.graph.node:
            node.input[:] = [prepared if name == INPUT else name for name in node.input]
        nodes = [*self._nodes, *self._proto.graph.node]
        del self._proto.graph.node[:]
        self._proto.graph.node.extend(nodes)
