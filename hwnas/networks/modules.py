"""The networks of search spaces in torch, and networks that timm lacks. Its import loads torch and timm."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from timm.layers import create_classifier, create_conv2d, get_act_layer, get_norm_act_layer
from timm.models import create_model, get_pretrained_cfg, is_model, register_model
from timm.models._efficientnet_blocks import SqueezeExcite
from timm.models._efficientnet_builder import efficientnet_init_weights
from timm.models.efficientnet import EfficientNet, _gen_mobilenet_v1
from torch import nn

from hwnas.space.architecture import Architecture
from hwnas.tasks.task import load_task, trunk_of


class BlockNet(EfficientNet):
    """A network built block by block, each as its kind says, with the forward pass and the module names of timm's.

    The names are `conv_stem, bn1, blocks.i.j, conv_head, bn2, classifier`: stage i, which may be empty, and block j.
    """

    def __init__(self, architecture: Architecture) -> None:
        nn.Module.__init__(self)  # timm's own __init__ would build its blocks
        self.num_classes = architecture.classes
        self.drop_rate, self.grad_checkpointing = 0.0, False
        _, *stages, head = architecture.staged_blocks()
        norm_act = get_norm_act_layer(nn.BatchNorm2d, get_act_layer(architecture.activation))
        width = architecture.stem_width
        self.conv_stem = create_conv2d(architecture.channels, width, 3, stride=architecture.stem_stride, padding="")
        self.bn1 = norm_act(width, inplace=True)
        if all(block.rules.in_timm for stage in architecture.block_defs() for block in stage):
            SqueezeExcite(8, rd_ratio=1.0)  # as timm's builder does: a seed then gives the weights that timm gives
        self.blocks = nn.Sequential(*(nn.Sequential(*(block.rules.build(block) for block in stage))
                                      for stage in stages))
        self.num_features = self.head_hidden_size = head[0].out_channels
        self.conv_head: nn.Module = nn.Identity()
        self.bn2: nn.Module = nn.Identity()
        if architecture.head:
            self.conv_head = create_conv2d(head[0].in_channels, self.num_features, 1, padding="")
            self.bn2 = norm_act(self.num_features, inplace=True)
        self.global_pool, self.classifier = create_classifier(self.num_features, self.num_classes)
        efficientnet_init_weights(self)


# timm looks up `default_cfgs` in the module of a model's function: an empty module of our own keeps this one clean.
_REGISTERED: Any = types.ModuleType("hwnas.registered_models", "Networks registered with timm by hwnas.")
_REGISTERED.default_cfgs = {}
sys.modules[_REGISTERED.__name__] = _REGISTERED


def register(name: str, cfg: dict[str, Any], build: Callable[..., nn.Module]) -> None:
    """Let timm build a network by this name: `cfg` is its `default_cfg`, `build` takes `create_model`'s options."""
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build(**kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = _REGISTERED.__name__
    _REGISTERED.default_cfgs[name] = cfg
    setattr(_REGISTERED, name, entrypoint)
    register_model(entrypoint)


def default_cfg(shape: tuple[int, int, int], classes: int, mean: Sequence[float], std: Sequence[float], **others: Any
                ) -> dict[str, Any]:
    """Return the settings that timm's data loaders and heads need for images of `shape`; `others` replace parts."""
    return {"url": "", "num_classes": classes, "first_conv": "conv_stem", "classifier": "classifier",
            "input_size": shape, "pool_size": None, "crop_pct": 1.0, "interpolation": "bilinear", "mean": tuple(mean),
            "std": tuple(std), **others}


def register_headed(name: str) -> None:
    """Let timm build a task's head on one of timm's networks by this name; do nothing for any other name."""
    task, trunk = trunk_of(name)
    if not task or is_model(name):
        return
    head, of_trunk = load_task(task), get_pretrained_cfg(trunk)
    norm = (of_trunk.mean, of_trunk.std) if of_trunk is not None else ((0.5,) * 3,) * 2
    first = (of_trunk.first_conv if of_trunk is not None else None) or ()
    stems = [f"trunk.{each}" for each in ((first,) if isinstance(first, str) else first)]
    # The configuration of the whole: the stem is the trunk's, one or several convolutions, and the classifier is ours.
    cfg = default_cfg((3, 224, 224), 1000, *norm, first_conv=stems[0] if len(stems) == 1 else tuple(stems) or None,
                      classifier="predict")

    def build_headed(num_classes: int = 1000, **options: Any) -> nn.Module:
        trunk_options = {key: value for key, value in options.items() if key in ("in_chans", "pad_type", "img_size")}
        model: Any = head.put_head(create_model(trunk, **trunk_options), num_classes)
        model.default_cfg = model.pretrained_cfg = {**cfg, "num_classes": num_classes}
        model.bare = lambda classes: create_model(trunk, num_classes=classes, **trunk_options)
        whole: nn.Module = model
        return whole

    register(name, cfg, build_headed)


for _percent in (75, 50, 25):  # widths in percent for which pretrained weights exist; timm only has 100
    _name = f"mobilenetv1_{_percent:03}"
    if not is_model(_name):
        register(_name, default_cfg((3, 224, 224), 1000, (0.5,) * 3, (0.5,) * 3, pool_size=(7, 7), crop_pct=0.875,
                                    interpolation="bicubic"), partial(_gen_mobilenet_v1, _name, _percent / 100))
