"""Quantisation-aware fine-tuning: train with fake quantisers at the places where the exported file will have pairs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.progress import Console
from hwnas.compress.job import CompressJob
from hwnas.compress.onnx_module import OnnxModule
from hwnas.compress.steps import Quantisation, Step, Steps
from hwnas.data.dataset import top1
from hwnas.errors import QuantizeError
from hwnas.lazy import LazyModule
from hwnas.networks.qdq import (
    Graph,
    Range,
    largest_weight,
    quantised_nodes,
    quantised_tensors,
    scale_of,
    symmetric_scale_of,
)
from hwnas.networks.quantize import TunedFor, load_fp32
from hwnas.system.paths import write_atomic
from hwnas.training.batches import Batches
from hwnas.training.loop import Training, lay_out, predict, seeded
from hwnas.training.place import CPU
from hwnas.training.recipe import Recipe
from hwnas.training.teacher import distilled

if TYPE_CHECKING:
    import onnx.numpy_helper
    import torch
    from onnx import ModelProto, NodeProto
    from torch import Tensor, nn
else:
    onnx = LazyModule("onnx")
    nn = LazyModule("torch.nn")
    torch = LazyModule("torch")


_WEIGHTED = ("Conv", "Gemm")


class FakeQuantised(OnnxModule):
    """The fp32 file at `path` as a trainable module that rounds in the forward pass where `insert_pairs` does.

    Weights and biases are parameters. Activations are rounded by `ranges`, which are constant. Weights are rounded per
    output channel, by their own extremes at every step. Gradients pass straight through values that are not clipped
    (Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, CVPR
    2018). The file has its batch norms folded, so their statistics do not change.
    The module computes what the file says. OpenVINO 2026.4 is slightly more exact: it does not round the output of a
    linear convolution that it adds to a sum at once.
    """

    def __init__(self, path: str | os.PathLike[str], ranges: Mapping[str, Range], tuned_for: TunedFor,
                 narrow: bool = False) -> None:
        super().__init__(path)
        graph = Graph(load_fp32(path))
        self._symmetric, self._largest = tuned_for == "tensorrt", largest_weight(narrow)
        scaled = symmetric_scale_of if self._symmetric else scale_of
        self._levels = (-128, 127) if self._symmetric else (0, 255)
        self._pairs = {name: scaled(*ranges[name]) for name in quantised_tensors(graph, tuned_for)}
        self._quantised = {node.name for node in quantised_nodes(graph)}
        for name in {name for node, _ in self.nodes if node.op_type in _WEIGHTED for name in node.input[1:]}:
            if name in self.weight_names:
                tensor = self.get_buffer(self.weight_names[name])
                delattr(self, self.weight_names[name])
                self.register_parameter(self.weight_names[name], nn.Parameter(tensor))

    def read(self, node: NodeProto, name: str, values: dict[str, Tensor]) -> Tensor:
        """The tensor `name` as `node` reads it: rounded if the exported file has a QDQ pair there."""
        if name in self._pairs:
            key = f"{name}_dequantised"
            if key not in values:
                scale, zero_point = self._pairs[name]
                values[key] = torch.fake_quantize_per_tensor_affine(values[name], scale, zero_point, *self._levels)
            return values[key]
        if node.name in self._quantised and name in self.weight_names:
            weight, bias = self._weights(node, values)
            return weight if name == node.input[1] else bias
        return values[name]

    def _weights(self, node: NodeProto, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Rounded weight and bias of a quantised node, with the scales that a QDQ file would have."""
        keys = f"{node.name}/weight_dequantised", f"{node.name}/bias_dequantised"
        if keys[0] not in values:
            weight, input_scale = values[node.input[1]], self._pairs[node.input[0]][0]
            bias = values[node.input[2]] if len(node.input) > 2 else weight.new_zeros(len(weight))
            scale = weight.detach().abs().flatten(1).amax(1) / self._largest
            if not self._symmetric:
                scale = torch.maximum(scale, bias.detach().abs() / (input_scale * 2**30))
            scale = scale.clamp_min(1e-12)
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            values[keys[0]] = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -self._largest,
                                                                     self._largest)
            step = scale * input_scale
            values[keys[1]] = bias if self._symmetric else bias + ((bias / step).round() * step - bias).detach()
        return values[keys[0]], values[keys[1]]

    def network(self, proto: ModelProto) -> ModelProto:
        """Write the present weights into `proto`, the network that this module was made from; returns it."""
        for weight in proto.graph.initializer:
            if weight.name in self.weight_names:
                tensor = getattr(self, self.weight_names[weight.name]).detach().contiguous()
                weight.CopyFrom(onnx.numpy_helper.from_array(tensor.cpu().numpy(), weight.name))
        return proto


NAME = "qat"
QAT = Recipe(NAME, epochs=1, weight_decay=0.0, warmup=0.0, label_smoothing=0.0)  # `conf/compress.yaml` has the rest


class FineTuning:
    """The step that trains the network of `base` and keeps its ranges."""

    def __init__(self, steps: Steps, base: Quantisation) -> None:
        self._steps, self._base, self._job = steps, base, steps.job
        self._fp32 = self._job.steps / f"{NAME}_fp32.onnx"

    def step(self) -> Step:
        """Fine-tune the network, export it as fp32, and quantise it by the same pass as every other file."""
        epochs = self._job.options.qat.epochs
        what = f"{self._base.note}, {epochs} epoch{'' if epochs == 1 else 's'} of fine-tuning with int8's rounding"
        step = self._steps.take(NAME, what, self._made, {"base": self._base.note, **self._job.options.tuning()},
                                (self._fp32,))
        checkpoint_of(self._job).unlink(missing_ok=True)
        return step

    def tuned(self) -> Quantisation:
        """The quantisation of the fine-tuned network."""
        network = load_fp32(self._fp32)
        return Quantisation(network, network, self._base.ranges, NAME, self._base.tuned_for, self._base.narrow)

    def _made(self) -> tuple[ModelProto, dict[str, Any]]:
        model, rows = fine_tune(self._job, self._base, self._steps.console)
        write_atomic(self._fp32, model.network(load_fp32(self._job.source.path)).SerializeToString())
        proto = self.tuned().int8()
        return proto, {"epochs": rows, "agreement": self._agreement(model, proto)}

    def _agreement(self, model: FakeQuantised, proto: ModelProto) -> float:
        """Share of calibration images with the same answer from the trained network and from its file."""
        path = self._job.steps / f"{NAME}.onnx"
        write_atomic(path, proto.SerializeToString())
        images = self._job.calibration
        expected = predict(model, images).argmax(1)
        return float((self._steps.logits(path, "int8", images).argmax(1) == expected).mean())


def checkpoint_of(job: CompressJob) -> Path:
    """The file of the last whole epoch. It is removed when the step is finished."""
    return job.steps / f"{NAME}.checkpoint.safetensors"


def fine_tune(job: CompressJob, base: Quantisation, console: Console) -> tuple[FakeQuantised, list[dict[str, Any]]]:
    """Train; returns the network after the last epoch, in eval mode, and one row for each epoch.

    A training that was interrupted continues after its last whole epoch, and ends with the same weights. TrainingError
    when the loss is not finite or memory runs out.
    """
    if len(job.dataset.train) < job.options.qat.batch_size:
        raise QuantizeError(f"not fine-tuned: qat.batch_size is {job.options.qat.batch_size}, but there are "
                            f"{len(job.dataset.train)} images to train on.")
    with seeded(job.options.seed, job.threads), console.step("fine-tune for int8") as report:
        training = _FineTuning(job, base)
        training.run(training.report(report))
        return training.network.eval().to(CPU), training.rows


class _FineTuning(Training):
    """The training of the fake-quantised network. It may also learn the fp32 network's answers."""

    name = "fine-tuning for int8"
    advice = "Set a smaller qat.lr."
    less = "Set a smaller qat.batch_size."

    def __init__(self, job: CompressJob, base: Quantisation) -> None:
        self.job, options = job, job.options
        tuning = asdict(options.qat)
        distil = tuning.pop("distil")
        recipe = replace(QAT, **tuning, device=options.training.device)
        self.network = FakeQuantised(job.source.path, base.ranges, base.tuned_for, base.narrow)
        batches = Batches(job.dataset.train, job.dataset, recipe, options.seed)
        super().__init__(lay_out(self.network, recipe), batches, recipe)
        self.teacher = OnnxModule(job.source.path).eval().to(recipe.device) if distil else None
        self.identity = {**job.identity, **options.tuning(), "ranges": base.note}
        self.resume(checkpoint_of(job), self.identity)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """The task's loss, mixed with the divergence from the fp32 network's answers by its share."""
        logits = self.network(images)
        loss = self.of_logits(logits, targets)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            taught = self.teacher(images)
        return distilled(loss, logits, taught, self.job.options.qat.distil)

    def look(self) -> Mapping[str, Any]:
        part = self.job.validation
        return {"top1_validation": top1(predict(self.network, part.images, self.job.dataset), part.labels)}

    def keep(self) -> None:
        self.checkpoint(self.identity).save(checkpoint_of(self.job))
