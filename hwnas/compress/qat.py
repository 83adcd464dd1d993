"""Quantisation-aware fine-tuning: fake quantisers put where the exported file will have them, trained, taken out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from hwnas.cli.progress import Console
from hwnas.compress.job import CompressJob
from hwnas.compress.post_training import Quantisation
from hwnas.compress.step import Step, Steps
from hwnas.data.task import top1
from hwnas.errors import QuantizeError
from hwnas.networks.qdq import Graph, Range, quantised_nodes, quantised_tensors, scale_of
from hwnas.networks.quantize import TunedFor, load_fp32
from hwnas.runtimes.torch import OnnxModule
from hwnas.system.paths import write_atomic
from hwnas.training.batches import Batches
from hwnas.training.loop import Training, lay_out, predict, seeded
from hwnas.training.recipe import Recipe

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


_WEIGHTED = ("Conv", "Gemm")


class FakeQuantised(OnnxModule):
    """The fp32 file at `path`, its weights and biases parameters, rounded in the forward pass as `insert_pairs` does.

    Activations by `ranges`, which stay; weights per output channel by their own extremes at every step. Gradients pass
    straight through what is not clipped (Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, CVPR 2018). Batch norms are folded in the file, so that their statistics stay.
    It computes what the file says; OpenVINO 2026.4 is a little more exact, for it does not round a linear convolution's
    output that it adds to a sum at once.
    """

    def __init__(self, path: str | os.PathLike[str], ranges: Mapping[str, Range], tuned_for: TunedFor) -> None:
        super().__init__(path)
        graph = Graph(load_fp32(path))
        self._pairs = {name: scale_of(*ranges[name]) for name in quantised_tensors(graph, tuned_for)}
        self._quantised = {node.name for node in quantised_nodes(graph)}
        for name in {name for node, _ in self.nodes if node.op_type in _WEIGHTED for name in node.input[1:]}:
            if name in self.weight_names:
                tensor = self.get_buffer(self.weight_names[name])
                delattr(self, self.weight_names[name])
                self.register_parameter(self.weight_names[name], nn.Parameter(tensor))

    def read(self, node: NodeProto, name: str, values: dict[str, Tensor]) -> Tensor:
        if name in self._pairs:
            key = f"{name}_dequantised"
            if key not in values:
                scale, zero_point = self._pairs[name]
                values[key] = torch.fake_quantize_per_tensor_affine(values[name], scale, zero_point, 0, 255)
            return values[key]
        if node.name in self._quantised and name in self.weight_names:
            weight, bias = self._weights(node, values)
            return weight if name == node.input[1] else bias
        return values[name]

    def _weights(self, node: NodeProto, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Rounded weight and bias of a quantised node; scales as the writer of QDQ files chooses them."""
        keys = f"{node.name}/weight_dequantised", f"{node.name}/bias_dequantised"
        if keys[0] not in values:
            weight, input_scale = values[node.input[1]], self._pairs[node.input[0]][0]
            bias = values[node.input[2]] if len(node.input) > 2 else weight.new_zeros(len(weight))
            scale = weight.detach().abs().flatten(1).amax(1) / 127
            scale = torch.maximum(scale, bias.detach().abs() / (input_scale * 2**30)).clamp_min(1e-12)
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            values[keys[0]] = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -127, 127)
            step = scale * input_scale
            values[keys[1]] = bias + ((bias / step).round() * step - bias).detach()
        return values[keys[0]], values[keys[1]]

    def network(self, proto: ModelProto) -> ModelProto:
        """`proto`, the network that this was made from, with the weights as they are now; in place."""
        from onnx import numpy_helper

        for weight in proto.graph.initializer:
            if weight.name in self.weight_names:
                tensor = getattr(self, self.weight_names[weight.name]).detach().contiguous()
                weight.CopyFrom(numpy_helper.from_array(tensor.numpy(), weight.name))
        return proto

NAME = "qat"
QAT = Recipe(NAME, epochs=1, weight_decay=0.0, warmup=0.0, label_smoothing=0.0)  # the rest is `conf/compress.yaml`'s


class FineTuning:
    """The step that trains the network of `base`, whose ranges it keeps."""

    def __init__(self, steps: Steps, base: Quantisation, console: Console) -> None:
        self._steps, self._base, self._console, self._job = steps, base, console, steps.job
        self._fp32 = self._job.steps / f"{NAME}_fp32.onnx"

    def step(self) -> Step:
        """Fine-tuned, exported as fp32 and quantised by the same pass as every other file."""
        epochs = self._job.options.epochs
        what = f"{self._base.note}, {epochs} epoch{'' if epochs == 1 else 's'} of fine-tuning with int8's rounding"
        step = self._steps.take(NAME, what, self._made, {"base": self._base.note, **self._job.options.tuning()})
        checkpoint_of(self._job).unlink(missing_ok=True)
        return step

    def tuned(self) -> Quantisation:
        """How the fine-tuned network becomes int8."""
        network = load_fp32(self._fp32)
        return Quantisation(network, network, self._base.ranges, NAME, self._base.tuned_for)

    def _made(self) -> tuple[ModelProto, dict[str, Any]]:
        model, rows = fine_tune(self._job, self._base, self._console)
        write_atomic(self._fp32, model.network(load_fp32(self._job.source.path)).SerializeToString())
        proto = self.tuned().int8()
        return proto, {"epochs": rows, "agreement": self._agreement(model, proto)}

    def _agreement(self, model: FakeQuantised, proto: ModelProto) -> float:
        """Share of calibration images that the trained network and its file answer alike."""
        path = self._job.steps / f"{NAME}.onnx"
        write_atomic(path, proto.SerializeToString())
        images = self._job.calibration
        expected = predict(model, images).argmax(1)
        return float((self._steps.scorer.logits(path, "int8", images).argmax(1) == expected).mean())


def checkpoint_of(job: CompressJob) -> Path:
    """The last whole epoch, until the step is finished."""
    return job.steps / f"{NAME}.checkpoint.safetensors"


def fine_tune(job: CompressJob, base: Quantisation, console: Console) -> tuple[FakeQuantised, list[dict[str, Any]]]:
    """The network after the last epoch, in eval mode, and a row an epoch. Goes on after the last whole epoch, with the
    same weights as without an interruption. TrainingError when the loss is not finite or memory runs out."""
    if len(job.dataset.train) < job.options.batch_size:
        raise QuantizeError(f"not fine-tuned: qat.batch_size is {job.options.batch_size}, but there are "
                            f"{len(job.dataset.train)} images to train on.")
    with seeded(job.options.seed, job.threads), console.step("fine-tune for int8") as report:
        training = _FineTuning(job, base)
        training.run(training.report(report))
        return training.network.eval(), training.rows


class _FineTuning(Training):
    """The fake-quantised network in training beside the fp32 one, whose answers it may learn."""

    name = "fine-tuning for int8"
    advice = "Set a smaller qat.lr."
    less = "Set a smaller qat.batch_size."

    def __init__(self, job: CompressJob, base: Quantisation) -> None:
        self.job, options = job, job.options
        recipe = replace(QAT, epochs=options.epochs, batch_size=options.batch_size, lr=options.lr,
                         shift=options.shift, zoom=options.zoom, rotate=options.rotate)
        self.network = FakeQuantised(job.source.path, base.ranges, base.tuned_for)
        batches = Batches(job.dataset.train, job.dataset, recipe, options.seed)
        super().__init__(lay_out(self.network, recipe), batches, recipe)
        self.teacher = OnnxModule(job.source.path).eval() if options.distil else None
        self.identity = {**job.identity, **options.tuning(), "ranges": base.note}
        self.resume(checkpoint_of(job), self.identity)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """The task's, and the divergence from the fp32 network's answers in its share."""
        logits, share = self.network(images), self.job.options.distil
        loss = self.of_logits(logits, targets)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            taught = log_softmax(self.teacher(images), 1)
        apart = kl_div(log_softmax(logits, 1), taught, reduction="batchmean", log_target=True)
        return (1 - share) * loss + share * apart

    def look(self) -> Mapping[str, Any]:
        part = self.job.validation
        return {"top1_validation": top1(predict(self.network, part.images, self.job.dataset), part.labels)}

    def keep(self) -> None:
        self.checkpoint(self.identity).save(checkpoint_of(self.job))
