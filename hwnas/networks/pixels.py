"""A network's ONNX graph with its preparation in front: uint8 pixels in, logits out.

The resizing is matrix products: a row of weights for each new line and column. Resize with `antialias` would be one
operator, but OpenVINO reads it as if it were plain, and ONNX Runtime's differs from Pillow's by several levels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.dataset import Preparation, is_padded
from hwnas.errors import ModelError
from hwnas.networks.export import BATCH_AXIS, INPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnx import ModelProto

_HERE = "prepare"  # begins the names of nodes and values


def take_pixels(proto: ModelProto, preparation: Preparation, mean: Sequence[float], std: Sequence[float],
                image_size: int | None = None) -> list[int | str]:
    """Put the preparation in front of a network, in place: `images` becomes uint8 [n, height, width, channels], whose
    shape is returned, names for open axes.

    Pictures may have any height and width, the same for a batch, or with `image_size` are square of that size; arrays
    (see `Preparation`) have the one size that they were given in. What is computed is what Pillow and
    `hwnas.data.dataset.resize` do, to a level of rounding where a value lies half way. ModelError for a graph of
    another input.
    """
    from onnx import TensorProto, helper

    graph = _Graph(proto)
    first = preparation.sizes[0]
    given = image_size if preparation.pictures else first
    pixels = graph.add("Cast", graph.add("Transpose", INPUT, perm=[0, 3, 1, 2]), to=TensorProto.FLOAT)
    if given != first:
        height, width = graph.sides() if given is None else (None, None)
        for matrix, left in ((graph.weights(width, height, given, first), False),
                             (graph.weights(height, width, given, first), True)):  # columns first, as Pillow
            pixels = graph.whole(graph.product(matrix, pixels, left))
    for before, after in pairwise(preparation.sizes):
        pixels = graph.at_size(pixels, before, after)
    scale = 1 / (255 * np.asarray(std, np.float64))
    shift = np.asarray(mean, np.float64) / np.asarray(std, np.float64)
    pixels = graph.add("Mul", pixels, graph.constant(scale.astype(np.float32)[:, None, None]))
    graph.finish(graph.add("Sub", pixels, graph.constant(shift.astype(np.float32)[:, None, None])))
    shape: list[int | str] = [BATCH_AXIS, given or "height", given or "width", preparation.channels]
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info(INPUT, TensorProto.UINT8, shape))
    return shape


def shrink_matrix(before: int, after: int) -> NDArray[np.float32]:
    """The share [after, before] that each pixel of a line has in each new one: a triangle as wide as two new pixels."""
    scale = before / after
    middles = (np.arange(after) + 0.5)[:, None] * scale
    shares = np.maximum(0, 1 - np.abs(np.arange(before) + 0.5 - middles) / max(scale, 1.0))
    return np.asarray(shares / shares.sum(1, keepdims=True), np.float32)


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
        from onnx import helper

        name = self._name()
        self._nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any) -> str:
        """The name of a value that is stored; numbers become float32."""
        from onnx import numpy_helper

        array, name = np.asarray(value), self._name()
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self._proto.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def sides(self) -> tuple[str, str]:
        """Height and width of the images, int64 [1]."""
        shape = self.add("Shape", INPUT)
        height, width = (self.add("Gather", shape, self.constant(np.array([axis])), axis=0) for axis in (1, 2))
        return height, width

    def weights(self, side: str | None, other: str | None, given: int | None, after: int) -> str:
        """`shrink_matrix` of the middle square along `side`; `other` is the other side (None: both are `given`)."""
        if side is None or other is None:
            return self.constant(shrink_matrix(int(given or after), after))
        from onnx import TensorProto

        length, across = (self.add("Cast", name, to=TensorProto.FLOAT) for name in (side, other))
        square = self.add("Min", length, across)
        scale = self.add("Div", square, self.constant([float(after)]))
        begin = self.add("Div", self.add("Sub", length, square), self.constant([2.0]))
        middles = self.add("Add", self.add("Mul", self.constant((np.arange(after) + 0.5)[:, None]), scale), begin)
        zero, step = (self.constant(np.array(number)) for number in (0, 1))
        every = self.add("Range", zero, self.add("Squeeze", side), step)
        places = self.add("Add", self.add("Cast", every, to=TensorProto.FLOAT), self.constant([0.5]))
        apart = self.add("Abs", self.add("Sub", places, middles))
        reach = self.add("Max", scale, self.constant([1.0]))
        shares = self.add("Sub", self.constant([1.0]), self.add("Div", apart, reach))
        shares = self.add("Max", shares, self.constant([0.0]))
        return self.add("Div", shares, self.add("ReduceSum", shares, self.constant(np.array([1])), keepdims=1))

    def product(self, matrix: str, pixels: str, left: bool) -> str:
        """New lines (`left`) or columns of `pixels` [n, c, h, w]."""
        return self.add("MatMul", matrix, pixels) if left else \
            self.add("MatMul", pixels, self.add("Transpose", matrix, perm=[1, 0]))

    def whole(self, pixels: str) -> str:
        """Whole levels, halves upwards, as Pillow leaves them after each direction."""
        return self.add("Floor", self.add("Add", pixels, self.constant([0.5])))

    def at_size(self, pixels: str, before: int, after: int) -> str:
        """As `hwnas.data.dataset.resize`: padded where that adds little, otherwise in fractions of levels until the
        end, halves to even."""
        if is_padded(before, after):
            spare = (after - before) // 2
            return self.add("Pad", pixels, self.constant(np.array([0, 0, spare, spare] * 2)))
        matrix = self.constant(shrink_matrix(before, after))
        return self.add("Round", self.product(matrix, self.product(matrix, pixels, False), True))

    def finish(self, prepared: str) -> None:
        """Let the network read `prepared`, behind the new nodes."""
        for node in self._proto.graph.node:
            node.input[:] = [prepared if name == INPUT else name for name in node.input]
        nodes = [*self._nodes, *self._proto.graph.node]
        del self._proto.graph.node[:]
        self._proto.graph.node.extend(nodes)
