"""Architecture -> torch network: timm's EfficientNet, with the stem stride and channels exactly as written.

Networks with blocks that timm has no word for are built block by block (`modules.BlockNet`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError
from hwnas.lazy import LazyModule, nn, timm
from hwnas.networks.cutting import build_member
from hwnas.networks.weights import import_timm
from hwnas.space.architecture import Architecture
from hwnas.space.family import Member

if TYPE_CHECKING:
    import hwnas.networks.modules as modules
else:
    modules = LazyModule("hwnas.networks.modules")

# timm turns strides beyond this into dilation; ours are meant as written.
_ANY_STRIDE = 1 << 30
_registered: dict[str, Architecture] = {}


def build(architecture: Architecture, *, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> nn.Module:
    """The network in train mode with timm's initial weights: float32 [n, c, h, w] in, logits [n, classes] out."""
    if isinstance(architecture, Member):
        return build_member(architecture)
    make, arguments = _parts(architecture)
    network: nn.Module = make(**arguments, num_classes=architecture.classes, in_chans=architecture.channels,
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
    if import_timm().is_model(name):
        raise ConfigError(f"timm already has a model called {name!r}: choose another name.")

    def build_one(**kwargs: Any) -> nn.Module:
        make, arguments = _parts(architecture)
        model: nn.Module = timm.models.build_model_with_cfg(make, name, False, **{**arguments, **kwargs})
        return model

    px, usual = architecture.image_size, (0.5,) * architecture.channels
    modules.register(name, modules.default_cfg(
        (architecture.channels, px, px), architecture.classes, usual if mean is None else mean,
        usual if std is None else std), build_one)
    _registered[name] = architecture


def _parts(architecture: Architecture) -> tuple[type[nn.Module], dict[str, Any]]:
    """Its class, and the arguments that do not depend on classes, input channels or training."""
    if not all(block.rules.in_timm for stage in architecture.block_defs() for block in stage):
        return modules.BlockNet, {"architecture": architecture}
    return modules.StridedEfficientNet, {
        "block_args": _block_arguments(architecture),
        "stem_size": architecture.stem_width, "stem_stride": architecture.stem_stride,
        "num_features": architecture.head, "act_layer": timm.layers.get_act_layer(architecture.activation),
        "round_chs_fn": int, "output_stride": _ANY_STRIDE,
    }


def _block_arguments(architecture: Architecture) -> list[list[dict[str, Any]]]:
    """timm's arguments of every block, by its own reading of the words, and what timm has no words for."""
    stages: list[list[dict[str, Any]]] = timm.models._efficientnet_builder.decode_arch_def(
        [list(map(str, stage)) for stage in architecture.block_defs()])
    for arguments, stage in zip(stages, architecture.staged_blocks()[1:-1], strict=True):
        for said, block in zip(arguments, stage, strict=True):
            if "noskip" in said:
                said["noskip"] = not block.skip
    return stages
