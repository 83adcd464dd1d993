"""Architecture -> torch network: timm's EfficientNet, with the stem stride and channels exactly as written.

Networks with `id` blocks, which timm has no word for, come from `hwnas.networks.macro`. Both name their modules
`conv_stem, bn1, blocks.i.j, conv_head, bn2, classifier`, where `i` is the stage and `j` the block in it.
"""

# ruff: noqa: E402
from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from typing import Any

from hwnas.system.torchvision_ops import declare_missing

declare_missing()  # before the first import of timm

import torch
from timm.layers import get_act_layer
from timm.models import build_model_with_cfg, is_model, register_model
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from torch import nn

from hwnas.errors import ConfigError
from hwnas.networks.macro import MacroNet
from hwnas.space.architecture import Architecture

# timm turns strides beyond this into dilation; ours are meant as written.
_ANY_STRIDE = 1 << 30
_registered: dict[str, Architecture] = {}


class StridedEfficientNet(EfficientNet):
    """timm's EfficientNet with a stem stride of 1 or 2 (timm's is always 2). Train mode."""

    def __init__(self, *args: Any, stem_stride: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if stem_stride not in (1, 2):
            raise ValueError(f"stem stride must be 1 or 2, got {stem_stride}")
        self.conv_stem.stride = (stem_stride, stem_stride)
        for feature in self.feature_info:
            feature["reduction"] = feature["reduction"] * stem_stride // 2


def build(architecture: Architecture, *, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> nn.Module:
    """The network in train mode with timm's initial weights: float32 [n, c, h, w] in, logits [n, classes] out."""
    network: nn.Module = _class_of(architecture)(
        **_arguments(architecture), num_classes=architecture.classes, in_chans=architecture.channels,
        drop_rate=drop_rate, drop_path_rate=drop_path_rate)
    return network.train()


def register(architecture: Architecture, name: str, *, mean: Sequence[float] | None = None,
             std: Sequence[float] | None = None) -> None:
    """Let `timm.create_model(name)` build it, with `num_classes`, `in_chans`, drop rates as for timm's own models.

    `mean` and `std` are the input normalisation that timm's scripts shall use. Registering the same again does
    nothing; ConfigError for a name that is taken or not of lower-case letters, digits and underscores.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"model name {name!r} must be lower-case letters, digits and underscores, a letter first.")
    if _registered.get(name) == architecture:
        return
    if is_model(name):
        raise ConfigError(f"timm already has a model called {name!r}: choose another name.")

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        model: nn.Module = build_model_with_cfg(
            _class_of(architecture), name, pretrained, **{**_arguments(architecture), **kwargs})
        return model

    module = _models_module()
    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module.__name__
    module.default_cfgs[name] = _default_cfg(architecture, mean, std)
    setattr(module, name, entrypoint)
    register_model(entrypoint)
    _registered[name] = architecture


def _class_of(architecture: Architecture) -> type[nn.Module]:
    has_id = any(block.kind == "id" for stage in architecture.block_defs() for block in stage)
    return MacroNet if has_id else StridedEfficientNet


def _arguments(architecture: Architecture) -> dict[str, Any]:
    """Constructor arguments that do not depend on classes, input channels or training."""
    if _class_of(architecture) is MacroNet:
        return {"architecture": architecture}
    return {
        "block_args": decode_arch_def([list(map(str, stage)) for stage in architecture.block_defs()]),
        "stem_size": architecture.stem_width, "stem_stride": architecture.stem_stride,
        "num_features": architecture.head, "act_layer": get_act_layer(architecture.activation),
        "round_chs_fn": int, "output_stride": _ANY_STRIDE,
    }


def _default_cfg(architecture: Architecture, mean: Sequence[float] | None, std: Sequence[float] | None
                 ) -> dict[str, Any]:
    """What timm's data loaders and heads want to know."""
    channels = architecture.channels
    return {
        "url": "", "num_classes": architecture.classes, "first_conv": "conv_stem", "classifier": "classifier",
        "input_size": (channels, architecture.image_size, architecture.image_size), "pool_size": None,
        "crop_pct": 1.0, "interpolation": "bilinear",
        "mean": tuple(mean) if mean is not None else (0.5,) * channels,
        "std": tuple(std) if std is not None else (0.5,) * channels,
    }


def _models_module() -> types.ModuleType:
    """timm looks up a model's module and its `default_cfgs`: one of our own keeps this one clean."""
    name = "hwnas.registered_models"
    if name not in sys.modules:
        module = types.ModuleType(name, "Networks registered with timm by hwnas.")
        module.__dict__["default_cfgs"] = {}
        sys.modules[name] = module
    return sys.modules[name]


def count_parameters(network: nn.Module) -> int:
    """Trainable parameters of a built network."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def count_macs(network: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """Multiply-accumulates of one image of `image_shape` (c, h, w), by torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    was_training = network.training
    network.eval()
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *image_shape))
    network.train(was_training)
    return int(counter.get_total_flops()) // 2
