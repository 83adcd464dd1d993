"""Boxes in an ONNX file: decoding and non-maximum suppression are added behind a detector's outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from hwnas.lazy import onnx
from hwnas.tasks.detection.boxes import MOST, N_SIDES, OVERLAP, REACH, STRIDE

OBJECTS = "objects"  # name of the output, and prefix of the names of nodes and values


def add_objects(proto: Any, image_size: int, confidence: float) -> str:
    """Let a detector's file answer with objects, in place: as `boxes.pick` finds them, but at most MOST of each class.

    Args:
        proto: An ONNX graph with one output, which `boxes.decode` could read.
        image_size: The side of the network's images, in pixels.
        confidence: Objects of a higher confidence are kept. `pick` also keeps those of just this one.

    Returns:
        A description of the output.
    """
    graph = proto.graph
    raw = graph.output[0]
    side = -(-image_size // STRIDE)
    x, y = np.meshgrid(*2 * [(np.arange(side) + 0.5) / side])
    signed = REACH / side * np.array([-1, -1, 1, 1], np.float32)[:, None, None]
    constants = {
        "centres": np.stack([x, y, x, y]).astype(np.float32), "reach": signed.astype(np.float32), "zero": np.float32(0),
        "one": np.float32(1), "from": np.array([0]), "sides": np.array([N_SIDES]), "end": np.array([1 << 31]),
        "axis": np.array([1]), "flat": np.array([0, 0, -1]), "most": np.array([MOST]), "overlap": np.float32(OVERLAP),
        "confidence": np.float32(confidence), "image_cell": np.array([0, 2]), "image_class": np.array([0, 1])}
    for name, value in constants.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), f"{OBJECTS}/{name}"))

    def add(kind: str, output: str, *inputs: str, **attributes: Any) -> None:
        names = [name if name == raw.name else f"{OBJECTS}/{name}" for name in inputs]
        graph.node.append(onnx.helper.make_node(kind, names, [f"{OBJECTS}/{output}"], name=f"{OBJECTS}/{output}",
                                                **attributes))

    # 1. From distances to boxes in shares of the image's sides: [n, 4, cells].
    add("Slice", "distances", raw.name, "from", "sides", "axis")
    add("Softplus", "positive", "distances")
    add("Mul", "offsets", "positive", "reach")
    add("Add", "corners", "offsets", "centres")
    add("Clip", "inside", "corners", "zero", "one")
    add("Reshape", "columns", "inside", "flat")
    add("Transpose", "boxes", "columns", perm=[0, 2, 1])
    # 2. The confidence in each class: [n, classes, cells].
    add("Slice", "class_logits", raw.name, "sides", "end", "axis")
    add("Sigmoid", "shares", "class_logits")
    add("Reshape", "scores", "shares", "flat")
    # 3. The objects that stay: image, class and cell of each object, with its confidence and box.
    add("NonMaxSuppression", "kept", "boxes", "scores", "most", "overlap", "confidence")
    add("Gather", "box_places", "kept", "image_cell", axis=1)
    add("GatherND", "kept_boxes", "boxes", "box_places")
    add("GatherND", "kept_scores", "scores", "kept")
    add("Unsqueeze", "score_column", "kept_scores", "axis")
    add("Gather", "of", "kept", "image_class", axis=1)
    add("Cast", "named", "of", to=onnx.TensorProto.FLOAT)
    graph.node.append(onnx.helper.make_node(
        "Concat", [f"{OBJECTS}/{name}" for name in ("named", "score_column", "kept_boxes")], [OBJECTS], name=OBJECTS,
        axis=1))
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info(OBJECTS, onnx.TensorProto.FLOAT, ["k", 7]))
    return f"{OBJECTS} [k, 7] of a confidence of at least {confidence:g}: image, class, confidence, and the box in " \
           "shares of the image's sides"
