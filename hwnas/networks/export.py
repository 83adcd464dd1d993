"""Export torch networks to ONNX, check that the answers are the same, and let an exported graph take pixels."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.data.dataset import normalise
from hwnas.errors import ExportError, ModelError, one_line
from hwnas.lazy import nn, onnx, safetensors, timm, torch
from hwnas.networks.checkpoint import check_tensors
from hwnas.networks.qdq import Graph
from hwnas.networks.quantize import affine_of, calibration_images, drop_unread, fold_norms
from hwnas.networks.running import logits_of
from hwnas.system.paths import write_atomic

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from hwnas.data.dataset import Dataset


OPSET = 17
FUSED_BY = ("reparameterize", "fuse")  # methods by which timm's blocks fuse their branches
INPUT, OUTPUT, BATCH_AXIS = "images", "logits", "batch"
MIN_PARITY_IMAGES = 256
_MAP_AXES, _VECTOR_AXES = 4, 2  # [batch, channels, height, width]; [batch, channels]
RELATIVE_TOLERANCE = 1e-3
MIN_AGREEMENT = 0.995
_PREPARE = "prepare"  # first part of the names of the nodes and values that prepare pixels


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of the parity check over `n` images: the largest difference of a logit, and the share of equal top-1
    answers, 0 to 1."""

    max_abs_error: float
    top1_agreement: float
    n: int


def export_onnx(model: nn.Module, path: str | os.PathLike[str], image_shape: tuple[int, int, int],
                metadata: Mapping[str, str] | None = None) -> None:
    """Write `model` as fp32 ONNX: eval mode, batch norms folded, input `images` [batch,c,h,w], output `logits`.

    Branches that timm can fuse (RepVGG, MobileOne, RepViT) are fused. A batch norm that cannot be folded becomes a
    depthwise convolution of one pixel, or a linear layer. The batch axis is dynamic. Node names keep torch's module
    path. The model keeps its mode. Raises ExportError if torch or the ONNX checker fails, and UserError if the file
    cannot be written.
    """
    if any(hasattr(module, name) and type(module).__module__.startswith("timm.")
           for module in model.modules() for name in FUSED_BY):
        try:
            model = timm.utils.reparameterize_model(model)  # a copy
        except Exception as error:  # each kind of block fuses its branches by code of its own
            raise ExportError(f"the network's branches could not be fused: {one_line(error)}") from error
    # Rewrite what runtimes fold or quantise badly. Each step expects the graph that the step before it leaves.
    proto = _trace(model, image_shape)
    _drop_identities(proto)
    _fold_weights(proto)
    _fold_pads(proto)
    fold_norms(proto)
    _turn_norms(proto)
    unsupported = {node.op_type for node in proto.graph.node} & {"BatchNormalization", "Identity"}
    if unsupported:
        raise ExportError(f"{', '.join(sorted(unsupported))} left in the exported graph: only batch norms of maps and "
                          "vectors can be said by other layers.")
    onnx.helper.set_model_props(proto, dict(metadata or {}))
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise ExportError(f"the exported graph is not valid ONNX: {one_line(error)}") from error
    write_atomic(path, proto.SerializeToString())


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into eval mode, and each module back into its own mode at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _trace(model: nn.Module, image_shape: tuple[int, int, int]) -> ModelProto:
    buffer: Any = io.BytesIO()  # accepted by the TorchScript exporter, though not by its annotation
    try:
        # The TorchScript exporter is deprecated, but it alone keeps modules' paths in names, at a fifth of the time.
        with warnings.catch_warnings(), _tracing(), _evaluating(model):
            warnings.simplefilter("ignore")
            example = torch.zeros(1, *image_shape, device=next(model.parameters()).device)
            torch.onnx.export(model, (example,), buffer, input_names=[INPUT], output_names=[OUTPUT],
                              dynamic_axes={INPUT: {0: BATCH_AXIS}, OUTPUT: {0: BATCH_AXIS}},
                              opset_version=OPSET, dynamo=False)
            with torch.no_grad():
                sides = model(example).shape[1:]
    except Exception as error:  # torch has many kinds of errors, and a network has its own
        raise ExportError(f"torch could not export the network: {one_line(error)}") from error
    proto = onnx.load_from_string(buffer.getvalue())
    for axis, side in zip(proto.graph.output[0].type.tensor_type.shape.dim[1:], sides, strict=True):
        axis.dim_value = side  # torch gives a name to each side of a map that it does not know
    return proto


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Let TensorFlow's "same" padding in timm's layers be traced as numbers for this image size: no runtime folds the
    arithmetic on shapes of maps that would be traced otherwise. And let torch print no graph if it fails."""
    get_same_padding, log = timm.layers.padding.get_same_padding, torch._C._jit_onnx_log
    timm.layers.padding.get_same_padding = lambda size, *rest: get_same_padding(int(size), *rest)
    torch._C._jit_onnx_log = lambda *texts: None
    try:
        yield
    finally:
        timm.layers.padding.get_same_padding, torch._C._jit_onnx_log = get_same_padding, log


def _fold_weights(proto: ModelProto) -> None:
    """Store the weights of convolutions that a network would standardise in each call (timm's ScaledStdConv)."""
    graph = Graph(proto)
    for node in proto.graph.node:
        if node.op_type == "Conv" and graph.kind(node.input[1]) not in ("", "Constant") and (
                weight := graph.constant(node.input[1])) is not None:
            node.input[1] = f"{node.name}_weight"
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(weight, np.float32), node.input[1]))
    drop_unread(proto)


def _fold_pads(proto: ModelProto) -> None:
    """Move every Pad with a fixed value and fixed amounts into the convolutions or poolings, if only these read it.
    This saves operators, and int8 passes through (a max pooling's padding of -inf has no range). Other Pads stay."""
    graph = Graph(proto)
    for node in [node for node in proto.graph.node if node.op_type == "Pad"]:
        readers = graph.consumers.get(node.output[0], [])
        amounts, value = (graph.constant(name) if name else np.array(0.0) for name in [*node.input[1:3], ""][:2])
        if amounts is None or value is None or any(each.name == "mode" and each.s != b"constant"
                                                   for each in node.attribute):
            continue
        begin, end = np.split(amounts, 2)  # per axis; batch and channels must not be padded
        if any(begin[:2]) or any(end[:2]) or not readers or not all(
                _pads_with(reader, float(value)) for reader in readers):
            continue
        for reader in readers:
            old = next((each for each in reader.attribute if each.name == "pads"), None)
            pads = np.array([*begin[2:], *end[2:]]) + (np.array(old.ints) if old else 0)
            if old is not None:
                reader.attribute.remove(old)
            reader.attribute.append(onnx.helper.make_attribute("pads", pads.tolist()))
            reader.input[0] = node.input[0]
    drop_unread(proto)


def _pads_with(node: NodeProto, value: float) -> bool:
    """Return whether `node` itself pads with `value`, and its attributes set no automatic padding."""
    attributes = {each.name: each for each in node.attribute}
    if "auto_pad" in attributes and attributes["auto_pad"].s not in (b"", b"NOTSET"):
        return False
    if node.op_type == "AveragePool":
        return value == 0 and "count_include_pad" in attributes and attributes["count_include_pad"].i == 1
    return {"Conv": 0.0, "MaxPool": -np.inf}.get(node.op_type) == value


def _turn_norms(proto: ModelProto) -> None:
    """Turn each batch norm of maps into a depthwise convolution of one pixel, which is quantised like the others. Turn
    each batch norm of vectors into a linear layer."""
    graph = Graph(proto)
    norms = [node for node in proto.graph.node if node.op_type == "BatchNormalization"]
    if not norms:
        return
    # Only its number of axes shows whether a norm is of maps or of vectors.
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    axes = {value.name: len(value.type.tensor_type.shape.dim) for value in (*inferred.value_info, *inferred.output)}
    for norm in norms:
        if (n_axes := axes.get(norm.output[0])) not in (_MAP_AXES, _VECTOR_AXES):
            continue
        (factor, offset), of_map = affine_of(graph, norm), n_axes == _MAP_AXES
        norm.op_type = "Conv" if of_map else "Gemm"
        del norm.input[1:], norm.output[1:], norm.attribute[:]
        attributes = {"group": len(factor), "kernel_shape": [1, 1]} if of_map else {"transB": 1}
        norm.attribute.extend(onnx.helper.make_attribute(*each) for each in attributes.items())
        for kind, array in (("weight", factor[:, None, None, None] if of_map else np.diag(factor)), ("bias", offset)):
            norm.input.append(f"{norm.output[0]}_{kind}")
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), norm.input[-1]))
    drop_unread(proto)


def _drop_identities(proto: ModelProto) -> None:
    """Remove Identity nodes: torch writes one for every initializer that equals another."""
    outputs = {value.name for value in proto.graph.output}
    source: dict[str, str] = {}
    nodes = []
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = source.get(name, name)
        if node.op_type == "Identity" and node.output[0] not in outputs:
            source[node.output[0]] = node.input[0]
        else:
            nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    drop_unread(proto)


def check_parity(model: nn.Module, onnx_path: str | os.PathLike[str], images: NDArray[np.float32]) -> Parity:
    """Compare torch with ONNX Runtime (fp32) on at least 256 normalised images [n,c,h,w].

    Raises ExportError unless every logit is finite and none differs by more than 0.1 % of the largest logit (at least
    of 1). Also, 99.5 % of the top-1 answers must be equal. The tolerances allow for another order of summation.
    """
    if len(images) < MIN_PARITY_IMAGES:
        raise ValueError(f"parity needs at least {MIN_PARITY_IMAGES} images, got {len(images)}")
    device = next(model.parameters()).device
    # Both run the same images, torch in batches of 64.
    with _evaluating(model), torch.inference_mode():
        expected = np.concatenate([model(torch.from_numpy(np.ascontiguousarray(images[start : start + 64])).to(device)
                                         ).cpu().numpy() for start in range(0, len(images), 64)]).astype(np.float32)
    try:
        answers = logits_of(onnx.load(os.fspath(onnx_path)), images, threads=1).astype(np.float32)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise ExportError(f"ONNX Runtime cannot run {os.fspath(onnx_path)}: {one_line(error)}") from error
    if answers.shape != expected.shape or not (np.isfinite(answers).all() and np.isfinite(expected).all()):
        raise ExportError(f"parity of {os.fspath(onnx_path)}: logits are not finite or differ in shape "
                          f"(torch {expected.shape}, ONNX {answers.shape}).")
    difference = float(np.abs(answers - expected).max())
    agreement = float((answers.argmax(1) == expected.argmax(1)).mean())
    allowed = RELATIVE_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if difference > allowed or agreement < MIN_AGREEMENT:
        raise ExportError(f"parity of {os.fspath(onnx_path)} failed over {len(images)} images: largest logit "
                          f"difference {difference:.2g} (allowed {allowed:.2g}), top-1 agreement {agreement:.4f} "
                          f"(at least {MIN_AGREEMENT}).")
    return Parity(difference, agreement, len(images))


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give an untrained network norms and biases like a trained one's, in place; return it.

    Fresh networks have zero biases (and zero gains in some residual branches). Runtimes optimise these away, and would
    then time another network.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm | torch.nn.LayerNorm):
                for name, low in (("weight", 0.5), ("bias", -0.5), ("running_mean", -0.5), ("running_var", 0.5)):
                    if (tensor := getattr(module, name, None)) is not None:
                        tensor.uniform_(low, low + 1, generator=generator)
            elif isinstance(module, torch.nn.Conv2d | torch.nn.Linear) and module.bias is not None:
                module.bias.uniform_(-0.5, 0.5, generator=generator)
    return model


_RECIPE_KEY = "hwnas_recipe"


def pack_weights(model: nn.Module, fingerprint: str) -> bytes:
    """Return the `weights.safetensors` of a network, with the fingerprint of all that decided it in the header."""
    tensors = {name: tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format).clone()
               for name, tensor in model.state_dict().items()}
    # Only one key, because the order of keys in the file is random.
    return safetensors.torch.save(tensors, {_RECIPE_KEY: fingerprint})


def stored_fingerprint(weights: Path) -> str | None:
    """Return the fingerprint in the header of a `weights.safetensors`; None if the file is missing or torn."""
    try:
        with safetensors.safe_open(check_tensors(weights), framework="np") as file:
            return (file.metadata() or {}).get(_RECIPE_KEY)
    except (OSError, safetensors.SafetensorError):
        return None


def parity_images(data: Dataset, seed: int) -> NDArray[np.float32]:
    """Return 256 normalised inputs: training images, and seeded noise if the set has fewer."""
    images = calibration_images(data, MIN_PARITY_IMAGES, seed)
    missing = MIN_PARITY_IMAGES - len(images)
    noise = np.random.default_rng(seed).standard_normal((missing, *images.shape[1:]), dtype=np.float32)
    return np.concatenate([images, noise])


def take_pixels(proto: ModelProto, channels: int, image_size: int, mean: Sequence[float], std: Sequence[float]
                ) -> list[int | str]:
    """Let a network take pixels, in place: `images` becomes uint8 [n, height, width, channels].

    A table has the normalised value of each level of each channel, so that answers are the same to the last bit.

    Returns:
        The shape of its input, with a name for the batch axis.

    Raises:
        ModelError: The graph takes pixels already, or its input has another name.
    """
    graph = proto.graph
    if len(graph.input) != 1 or graph.input[0].name != INPUT or any(
            node.name.startswith(_PREPARE) for node in graph.node):
        raise ModelError(f"the network takes its preparation only once, and its input must be {INPUT!r}. Give the "
                         "model.onnx or model_int8.onnx of a model folder.")
    # The table of one channel after the other: a level's place is 256 × its channel + the level.
    levels = np.repeat(np.arange(256, dtype=np.uint8)[:, None], channels, 1)
    table = normalise(levels[:, :, None, None], mean, std)[:, :, 0, 0].T.reshape(-1).astype(np.float32)
    begins = (256 * np.arange(channels, dtype=np.int32))[:, None, None]
    for name, array in (("table", table), ("begins", begins)):
        graph.initializer.append(onnx.numpy_helper.from_array(array.copy(), f"{_PREPARE}/{name}"))
    # Channels first, then a place in the table for each level, then the table's value.
    ours = [_node("Transpose", [INPUT], "planes", perm=[0, 3, 1, 2]),
            _node("Cast", [f"{_PREPARE}/planes"], "levels", to=onnx.TensorProto.INT32),
            _node("Add", [f"{_PREPARE}/levels", f"{_PREPARE}/begins"], "places"),
            _node("Gather", [f"{_PREPARE}/table", f"{_PREPARE}/places"], "images")]
    for node in graph.node:
        node.input[:] = [f"{_PREPARE}/images" if name == INPUT else name for name in node.input]
    nodes = [*ours, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    shape: list[int | str] = [BATCH_AXIS, image_size, image_size, channels]
    graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info(INPUT, onnx.TensorProto.UINT8, shape))
    return shape


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs, [f"{_PREPARE}/{output}"], name=f"{_PREPARE}/{output}", **attributes)
