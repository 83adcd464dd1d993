"""A network in words that timm knows without hwnas: config.json and model.safetensors for `timm.create_model`.

A whole network of timm is its own name. For a cut one, and for an architecture of a space, timm's entry points refuse
other blocks, except MobileNetV5's: that one takes every block of timm's EfficientNet builder as plain values. Its stem
has stride 2. Its head stands behind the pooling, so that an EfficientNet's becomes a last block, and the classifier two
layers that are together the same linear map.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError
from hwnas.lazy import LazyModule
from hwnas.networks.network import Network, TimmNetwork
from hwnas.networks.weights import import_timm, one_line
from hwnas.system.paths import write_atomic

if TYPE_CHECKING:
    import safetensors.torch
    import timm.layers
    import timm.models.efficientnet
    import timm.models.mobilenetv3
    import torch
    from torch import Tensor, nn

    import hwnas.networks.modules as modules
else:
    modules = LazyModule("hwnas.networks.modules")
    safetensors = LazyModule("safetensors")
    timm = LazyModule("timm")
    torch = LazyModule("torch")

_ANY = "mobilenetv5_base"  # the entry point that takes any blocks
_ACTIVATIONS = ("relu", "relu6", "silu", "hard_swish", "gelu")
_EPSILON = 1e-5  # of the norms there
_FAR = 1024.0  # relu6 ends at 6: logits are divided by this before it, and multiplied after
_CLOSE = 1e-3  # of the largest logit: what another order of summation may change


class Unsaid(Exception):
    """What timm has no word for."""


@dataclass(frozen=True, slots=True)
class Words:
    """What `timm.create_model` is told of a network, and the tensors by the names that it then has."""

    architecture: str
    arguments: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]
    split: bool = False  # the classifier is two layers

    def write(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """config.json and model.safetensors; `facts` are those of `pretrained_cfg`."""
        known = {key: self.about[key] for key in ("first_conv", "classifier", "fixed_input_size") if key in self.about}
        cfg = {**facts, **known, "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear",
               "custom_load": False}
        config = {"architecture": self.architecture, "num_classes": facts["num_classes"], "pretrained_cfg": cfg,
                  "model_args": dict(self.arguments)}
        write_atomic(folder / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        write_atomic(folder / "model.safetensors", safetensors.torch.save({name: each.contiguous() for name, each in
                                                                           self.tensors.items()}))


def write_timm(folder: Path, model: nn.Module, network: Network, facts: Mapping[str, Any]) -> Words:
    """Write the folder from which `timm.create_model("local-dir:FOLDER", pretrained=True)` makes `model`, which is
    `network` in evaluation mode; what stands in it.

    `facts` are those of timm's `pretrained_cfg`: `input_size`, `mean`, `std`, `num_classes`, `label_names` and so on.
    What timm loads gives the same logits. ConfigError where timm has no words for the network, with the reason.
    """
    why = ""
    for words in (_named, _as_blocks):
        try:
            said = words(model, network)
        except Unsaid as reason:
            why = str(reason)
            continue
        except AttributeError as error:  # a block of another package, perhaps, that is called like timm's
            why = f"its blocks are not timm's own ({error})"
            continue
        said.write(folder, facts)
        if not (why := _difference(folder, model, facts["input_size"])):
            return said
    raise ConfigError(f"timm without hwnas cannot build {network.id}: {why}. Give format=uint8 or format=openvino, or "
                      "load it in timm with hwnas, as its card.md says.")


def _named(model: nn.Module, network: Network) -> Words:
    """The network under timm's own name."""
    timm = import_timm()
    if not isinstance(network, TimmNetwork) or not timm.model_entrypoint(network.name).__module__.startswith("timm."):
        raise Unsaid("its name is known to hwnas alone")
    pad_type = network.baseline.pad_type
    return Words(network.name, {"pad_type": pad_type} if pad_type else {}, model.state_dict(),
                 dict(getattr(model, "default_cfg", {})))


def _difference(folder: Path, model: nn.Module, image: Sequence[int]) -> str:
    """Why the network that timm loads from a folder is another one; empty where it is not."""
    try:
        theirs = import_timm().create_model(f"local-dir:{folder}", pretrained=True).eval()
        with torch.inference_mode():
            images = torch.randn((4, *image), generator=torch.Generator().manual_seed(0))
            ours, said = model(images), theirs(images)
    except Exception as error:  # timm's networks have errors of their own
        return one_line(error)
    allowed = _CLOSE * max(1.0, float(ours.abs().max()))
    apart = float((ours - said).abs().max())
    return "" if apart <= allowed else f"what it builds of the same blocks answers otherwise (a logit by {apart:.2g})"


def _as_blocks(model: Any, network: Network) -> Words:
    """An EfficientNet or MobileNetV3 of timm, with whatever blocks, as MobileNetV5; Unsaid where that has no word."""
    if isinstance(model, modules.BlockNet) or not isinstance(
            model, timm.models.efficientnet.EfficientNet | timm.models.mobilenetv3.MobileNetV3):
        raise Unsaid(f"{type(model).__name__} is not made of timm's EfficientNet blocks")
    stem = model.conv_stem
    if stem.stride != (2, 2) or stem.kernel_size != (3, 3):
        raise Unsaid(f"its stem has stride {stem.stride[0]} and kernel {stem.kernel_size[0]}, and timm's only 2 and 3")
    activation = _activation(model.bn1.act)
    stages: Any = [stage for stage in model.blocks if type(stage) is not torch.nn.Identity]  # the others were cut out
    blocks = [[_block(block, activation) for block in stage if type(block) is not torch.nn.Identity]
              for stage in stages]
    tensors = _tensors(model, ("conv_stem", "bn1", "blocks"))
    tensors = {name.replace("conv_stem.", "conv_stem.conv.").replace("bn1.", "conv_stem.bn.")
               if not name.startswith("blocks.") else name: tensor for name, tensor in tensors.items()}
    if isinstance(model, timm.models.mobilenetv3.MobileNetV3):
        head = _tensors(model, ("conv_head", "norm_head", "classifier"))
        head |= _norm(head.pop("conv_head.bias", None), model.conv_head.out_channels) if model.norm_head.__class__ is \
            torch.nn.Identity else {}
        width, last = model.conv_head.out_channels, getattr(model.norm_head, "act", model.act2)
        if _activation(last) != activation:
            raise Unsaid("the activation of its head is not that of its stem")
    else:
        if isinstance(model.conv_head, torch.nn.Conv2d):
            blocks.append([{"block_type": "cn", "kernel_size": 1, "stride": 1, "act_layer": _activation(model.bn2.act),
                            "out_chs": model.conv_head.out_channels, "skip": False}])
            at = f"blocks.{len(blocks) - 1}.0"
            tensors |= {name.replace("conv_head.", f"{at}.conv.").replace("bn2.", f"{at}.bn1."): tensor
                        for name, tensor in _tensors(model, ("conv_head", "bn2")).items()}
        head, width = _linear_head(model.classifier, _FAR if activation == "relu6" else 1.0)
    if model.global_pool.pool_type != "avg":
        raise Unsaid(f"it pools by {model.global_pool.pool_type}")
    scaled = any(hasattr(module, "gamma") for module in model.blocks.modules())
    return Words(_ANY, {
        "block_args": blocks, "stem_size": stem.out_channels, "stem_bias": stem.bias is not None,
        "channel_multiplier": 0.0,  # widths as written, not rounded to multiples of 8
        "num_features": width, "use_msfa": False, "act_layer": activation, "norm_layer": "batchnorm2d",
        "pad_type": "same" if any(type(module).__name__ == "Conv2dSame" for module in model.modules()) else "",
        "layer_scale_init_value": 1e-5 if scaled else None}, {**tensors, **head},
        {"first_conv": "conv_stem.conv", "classifier": "classifier"},
        split=isinstance(model, timm.models.efficientnet.EfficientNet))


def _tensors(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of the modules `names`, with variances that give the same where every norm has timm's usual epsilon."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()
               if name.partition(".")[0] in names}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d) and f"{name}.running_var" in tensors:
            tensors[f"{name}.running_var"] += module.eps - _EPSILON
    return tensors


def _norm(bias: Tensor | None, width: int, weight: float = 1.0) -> dict[str, Tensor]:
    """The head's norm that multiplies by `weight` and adds `bias`."""
    return {"norm_head.weight": torch.full((width,), weight), "norm_head.running_mean": torch.zeros(width),
            "norm_head.bias": torch.zeros(width) if bias is None else bias,
            "norm_head.running_var": torch.full((width,), 1 - _EPSILON),
            "norm_head.num_batches_tracked": torch.tensor(0)}


def _linear_head(linear: nn.Linear, far: float) -> tuple[dict[str, Tensor], int]:
    """A linear layer as two with an activation between: what is above zero, less what is below, and the width.

    Every activation here has act(x) - act(-x) = x, relu6 near zero.
    """
    weight, n = linear.weight.detach(), linear.out_features
    bias = torch.zeros(n) if linear.bias is None else linear.bias.detach()
    both = torch.eye(n) * far
    return {"conv_head.weight": torch.cat([weight, -weight])[:, :, None, None],
            **_norm(torch.cat([bias, -bias]) / far, 2 * n, 1 / far),
            "classifier.weight": torch.cat([both, -both], 1), "classifier.bias": torch.zeros(n)}, 2 * n


def _activation(module: object) -> str:
    """timm's name of an activation."""
    name = next((name for name in _ACTIVATIONS if type(module) is timm.layers.get_act_layer(name)), None)
    if name is None:
        raise Unsaid(f"its activation {type(module).__name__} has no name among {', '.join(_ACTIVATIONS)}")
    return name


def _block(block: Any, activation: str) -> dict[str, Any]:
    """A block's arguments for timm's EfficientNet builder."""
    kind = type(block).__name__
    odd = [type(module).__name__ for name, module in block.named_children()
           if "conv" in name and not isinstance(module, torch.nn.Conv2d)]
    if kind not in (*_KINDS, "UniversalInvertedResidual") or odd:
        raise Unsaid(f"its {', '.join([kind, *odd])} is no plain block of timm's")
    said = _sizes(block, *_KINDS[kind]) if kind in _KINDS else _universal(block)
    acts = {_activation(act) for act in _activations(block)}
    if len(acts) > 1:
        raise Unsaid(f"a {kind} has several activations")
    said["act_layer"] = next(iter(acts - {activation}), None)
    if kind != "ConvBnAct":
        said |= {"noskip": not block.has_skip, "se_ratio": _squeezed(block)}
    convs = [conv for conv in _convs(block) if conv.kernel_size != (1, 1)]
    stride = math.prod(conv.stride[0] for conv in _convs(block))
    if any(conv.kernel_size[0] != conv.kernel_size[1] or conv.dilation != (1, 1) for conv in convs):
        raise Unsaid(f"a {kind} has kernels that are no squares, or dilated")
    return {**said, "stride": stride}


def _convs(block: Any) -> Iterator[Any]:
    """A block's convolutions, those of squeeze-and-excite left out."""
    yield from (module for name, module in block.named_modules()
                if isinstance(module, torch.nn.Conv2d) and not name.startswith("se."))


def _activations(block: Any) -> Iterator[object]:
    """A block's activations, those of squeeze-and-excite among them, that do something."""
    acts = [module.act for module in block.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if hasattr(block, "se") and hasattr(block.se, "act1"):
        acts.append(block.se.act1)
    yield from (act for act in acts if not isinstance(act, torch.nn.Identity))


def _squeezed(block: Any) -> float:
    """The share of channels that squeeze-and-excite keeps, 0 without."""
    if isinstance(block.se, torch.nn.Identity):
        return 0.0
    if type(block.se).__name__ != "SqueezeExcite" or not isinstance(block.se.gate, torch.nn.Sigmoid):
        raise Unsaid("its squeeze-and-excite has another gate than the sigmoid")
    reduce = block.se.conv_reduce
    return float(reduce.out_channels / reduce.in_channels)


def _expansion(inner: int, outer: int) -> float:
    if inner % 8:
        raise Unsaid(f"a block of {inner} channels inside, where timm's are multiples of 8")
    return inner / outer


def _sizes(block: Any, word: str, kernels: Mapping[str, str]) -> dict[str, Any]:
    convs: dict[str, Any] = {argument: getattr(block, name) for argument, name in kernels.items()}
    first, last = next(iter(convs.values())), next(reversed(convs.values()))
    grouped = convs.get("dw_kernel_size", first)
    said = {"block_type": word, "out_chs": last.out_channels,
            **{argument: conv.kernel_size[0] for argument, conv in convs.items()},
            "group_size": 0 if grouped.groups == 1 else int(grouped.in_channels // grouped.groups)}
    if "exp_kernel_size" in kernels:
        said["exp_ratio"] = _expansion(first.out_channels, first.in_channels)
    return said | ({"pw_act": block.has_pw_act} if word == "ds" else {"skip": block.has_skip} if word == "cn" else {})


def _universal(block: Any) -> dict[str, Any]:
    kernels = {f"dw_kernel_size_{where}": module.conv.kernel_size[0] if hasattr(module, "conv") else 0
               for where, module in (("start", block.dw_start), ("mid", block.dw_mid), ("end", block.dw_end))}
    inner = block.pw_exp.conv
    return {"block_type": "uir", "out_chs": block.pw_proj.conv.out_channels, **kernels,
            "exp_ratio": _expansion(inner.out_channels, inner.in_channels)}


# timm's blocks: their kind, and the convolutions whose kernels are arguments; the last one writes the output
_KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "DepthwiseSeparableConv": ("ds", {"dw_kernel_size": "conv_dw", "pw_kernel_size": "conv_pw"}),
    "InvertedResidual": ("ir", {"exp_kernel_size": "conv_pw", "dw_kernel_size": "conv_dw",
                                "pw_kernel_size": "conv_pwl"}),
    "EdgeResidual": ("er", {"exp_kernel_size": "conv_exp", "pw_kernel_size": "conv_pwl"}),
    "ConvBnAct": ("cn", {"kernel_size": "conv"})}
