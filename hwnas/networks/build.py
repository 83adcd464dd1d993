"""Architecture -> torch network: timm's EfficientNet, with the stem stride and channels exactly as written.

Networks with blocks that timm has no word for are built block by block (`BlockNet`). Both name their modules
`conv_stem, bn1, blocks.i.j, conv_head, bn2, classifier`, where `i` is the stage and `j` the block in it.
"""

# ruff: noqa: E402
from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from hwnas.system.libraries import declare_missing

declare_missing()  # before the first import of timm

import torch
from timm.layers import create_classifier, create_conv2d, get_act_layer, get_norm_act_layer
from timm.models import build_model_with_cfg, is_model, register_model
from timm.models._efficientnet_builder import decode_arch_def, efficientnet_init_weights
from timm.models.efficientnet import EfficientNet, _gen_mobilenet_v1
from timm.models.mobilenetv3 import MobileNetV3
from torch import Tensor, nn

from hwnas.errors import ConfigError
from hwnas.networks.baselines import Baseline, build_timm
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import ACTIVATIONS
from hwnas.space.blocks.mobile import hard_squeeze

# timm turns strides beyond this into dilation; ours are meant as written.
_ANY_STRIDE = 1 << 30
_registered: dict[str, Architecture] = {}


def _set_stem_stride(network: Any, stride: int) -> None:
    if stride not in (1, 2):
        raise ValueError(f"stem stride must be 1 or 2, got {stride}")
    network.conv_stem.stride = (stride, stride)
    for feature in network.feature_info:
        feature["reduction"] = feature["reduction"] * stride // 2


class StridedEfficientNet(EfficientNet):
    """timm's EfficientNet with a stem stride of 1 or 2 (timm's is always 2). Train mode."""

    def __init__(self, *args: Any, stem_stride: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_stem_stride(self, stem_stride)


class StridedMobileNetV3(MobileNetV3):
    """The same of timm's MobileNetV3, whose head stands behind the pooling. Train mode."""

    def __init__(self, *args: Any, stem_stride: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_stem_stride(self, stem_stride)


class BlockNet(nn.Module):
    """A network built block by block, each as its kind says: float32 [n, c, h, w] -> logits.

    Stem, `blocks.i.j` (stage i, block j; a stage may be empty), head. `in_chans` and `num_classes` replace the
    architecture's, as timm's models allow.
    """

    def __init__(self, architecture: Architecture, *, num_classes: int | None = None, in_chans: int | None = None,
                 drop_rate: float = 0.0, drop_path_rate: float = 0.0, global_pool: str = "avg") -> None:
        super().__init__()
        self.num_classes = architecture.classes if num_classes is None else num_classes
        self.drop_rate, self.grad_checkpointing = drop_rate, False
        _, *stages, head = architecture.staged_blocks()
        norm_act = get_norm_act_layer(nn.BatchNorm2d, get_act_layer(architecture.activation))
        width = architecture.stem_width
        self.conv_stem = create_conv2d(in_chans or architecture.channels, width, 3, stride=architecture.stem_stride,
                                       padding="")
        self.bn1 = norm_act(width, inplace=True)
        depth, total, built = 0, sum(map(len, stages)), []
        for stage in stages:
            built.append(nn.Sequential(*(
                block.rules.build(block, drop_path_rate * (depth + index) / total)
                for index, block in enumerate(stage))))
            depth += len(stage)
        self.blocks = nn.Sequential(*built)
        self.num_features = self.head_hidden_size = head[0].out_channels
        self.conv_head: nn.Module = nn.Identity()
        self.bn2: nn.Module = nn.Identity()
        if architecture.head:
            self.conv_head = create_conv2d(head[0].in_channels, self.num_features, 1, padding="")
            self.bn2 = norm_act(self.num_features, inplace=True)
        self.global_pool, self.classifier = create_classifier(
            self.num_features, self.num_classes, pool_type=global_pool)
        efficientnet_init_weights(self)

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        classifier: nn.Module = self.classifier
        return classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer."""
        self.num_classes = num_classes
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        self.global_pool, self.classifier = create_classifier(self.num_features, num_classes, pool_type=pool)

    def forward_features(self, x: Tensor) -> Tensor:
        """Maps before pooling."""
        x = self.bn1(self.conv_stem(x))
        x = self.blocks(x)
        maps: Tensor = self.bn2(self.conv_head(x))
        return maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooled features, or logits."""
        x = self.global_pool(x)
        if self.drop_rate > 0.0:
            x = torch.nn.functional.dropout(x, p=self.drop_rate, training=self.training)
        if not pre_logits:
            x = self.classifier(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes]."""
        return self.forward_head(self.forward_features(x))


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


def _register_narrow() -> None:
    """Let timm build the narrow MobileNets v1, for which pretrained weights are about; it has width 1 alone."""
    for percent in (75, 50, 25):
        name = f"mobilenetv1_{percent:03}"

        def entrypoint(pretrained: bool = False, *, name: str = name, percent: int = percent, **kwargs: Any
                       ) -> nn.Module:
            model: nn.Module = _gen_mobilenet_v1(name, percent / 100, pretrained=pretrained, **kwargs)
            return model

        if not is_model(name):
            module = _models_module()
            entrypoint.__name__ = entrypoint.__qualname__ = name
            entrypoint.__module__ = module.__name__
            module.default_cfgs[name] = {
                "url": "", "num_classes": 1000, "first_conv": "conv_stem", "classifier": "classifier",
                "input_size": (3, 224, 224), "pool_size": (7, 7), "crop_pct": 0.875, "interpolation": "bicubic",
                "mean": (0.5,) * 3, "std": (0.5,) * 3}
            setattr(module, name, entrypoint)
            register_model(entrypoint)


def _class_of(architecture: Architecture) -> type[nn.Module]:
    in_timm = all(block.rules.in_timm for stage in architecture.block_defs() for block in stage)
    return (StridedMobileNetV3 if architecture.pooled else StridedEfficientNet) if in_timm else BlockNet


def _arguments(architecture: Architecture) -> dict[str, Any]:
    """Constructor arguments that do not depend on classes, input channels or training."""
    if _class_of(architecture) is BlockNet:
        return {"architecture": architecture}
    settings = settings_of(architecture.around) if architecture.around else {}
    return {
        **settings, "block_args": _block_arguments(architecture),
        "stem_size": architecture.stem_width, "stem_stride": architecture.stem_stride,
        "num_features": architecture.head, "act_layer": get_act_layer(architecture.activation),
        "round_chs_fn": int, **({} if architecture.pooled else {"output_stride": _ANY_STRIDE}),
    }


def _block_arguments(architecture: Architecture) -> list[list[dict[str, Any]]]:
    """timm's arguments of every block, by its own reading of the words, and what timm has no words for."""
    stages: list[list[dict[str, Any]]] = decode_arch_def(
        [list(map(str, stage)) for stage in architecture.block_defs()])
    for arguments, stage in zip(stages, architecture.staged_blocks()[1:-1], strict=True):
        for said, block in zip(arguments, stage, strict=True):
            if "noskip" in said:
                said["noskip"] = not block.skip
            if block.hard_gate:
                said |= {"se_ratio": None, "se_layer": hard_squeeze(block)}
    return stages


def original(around: str, channels: int = 3, classes: int = 1000) -> nn.Module:
    """The timm network that `Architecture.around` names, with random weights; ConfigError for one that timm lacks."""
    name, _, pad = around.partition("+")
    return build_timm(Baseline(name, pad_type=pad), channels, classes, 224, "around")


@cache
def settings_of(around: str) -> dict[str, Any]:
    """What the networks cut from a timm network have in common with it: padding and batch norm."""
    with torch.random.fork_rng(devices=[]):  # the first cut of a process gets the weights that any later one gets
        model: Any = original(around)
    norm = next((module for module in model.modules() if isinstance(module, nn.BatchNorm2d)), nn.BatchNorm2d(1))
    padded = any(type(module).__name__ == "Conv2dSame" for module in model.modules())
    return {"pad_type": "same" if padded else "",
            "norm_layer": partial(nn.BatchNorm2d, eps=norm.eps, momentum=norm.momentum)}


def activation_layers() -> tuple[type[nn.Module], ...]:
    """The modules that a network's activations may be."""
    return tuple(get_act_layer(name) for name in ACTIVATIONS)


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


_register_narrow()
