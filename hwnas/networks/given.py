"""Networks that a Python program gives as modules: each gets a name, by which it is built and cut as timm's are.

Layers, weights and the normalisation of images make the name. The weights lie in the user's folder. The module itself
is in this process alone, so that a search in another one asks for it again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError
from hwnas.lazy import LazyModule
from hwnas.networks.baselines import MODULE
from hwnas.networks.tracing import TRACED_PX
from hwnas.networks.weights import IMAGENET, import_timm
from hwnas.system.paths import home, write_atomic

if TYPE_CHECKING:
    import safetensors.torch
    import torch
    from torch import Tensor, nn

    import hwnas.networks.modules as modules
else:
    modules = LazyModule("hwnas.networks.modules")
    nn = LazyModule("torch.nn")
    safetensors = LazyModule("safetensors")
    torch = LazyModule("torch")

_IMAGES = 4  # on which answers are compared
_CLOSE = 1e-3  # of the largest answer: what another order of summation may change


def register_module(module: nn.Module, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> str:
    """Give a network a name that searches in this process take as `around`.

    Args:
        module: Takes float32 [n, c, h, w], and answers with logits [n, classes]. It is copied.
        mean: Of pixels / 255, by which its images are normalised, for each channel; None: what timm's configuration of
            the module says, or ImageNet's.
        std: Likewise.

    Returns:
        The name, `module_` and a hash of layers, weights and normalisation.

    Raises:
        ConfigError: It cannot be cut, built or trained again; which module or value is in the way.
    """
    model = _copied(module)
    channels, head = _try(model)
    said: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    said = said if isinstance(said, dict) else vars(said)
    usual = IMAGENET if channels == len(IMAGENET[0]) else ((0.5,) * channels,) * 2
    norm = [tuple(map(float, given or said.get(key) or values))
            for given, key, values in zip((mean, std), ("mean", "std"), usual, strict=True)]
    if {*map(len, norm)} != {channels} or not min(norm[1]) > 0:
        raise _refused(f"mean and std must be {channels} numbers each, and std above 0, got {norm[0]} and {norm[1]}")
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    content = safetensors.torch.save(tensors)
    name = MODULE + hashlib.sha256(content + f"{model}|{norm}".encode()).hexdigest()[:12]
    write_atomic(home() / "weights" / f"{name}.safetensors", content)
    if not import_timm().is_model(name):
        shape = {"input_size": (channels, TRACED_PX, TRACED_PX), "pool_size": None, "crop_pct": 1.0}
        cfg = {"url": "", "num_classes": _width(model.get_submodule(head)), "first_conv": None, "classifier": head,
               "interpolation": "bilinear", "mean": norm[0], "std": norm[1], **shape}
        modules.register(name, cfg, lambda in_chans=3, num_classes=1000, **_: _built(model, cfg, in_chans, num_classes))
    return name


def _built(given: nn.Module, cfg: dict[str, Any], channels: int, classes: int) -> nn.Module:
    """The network with new weights, for as many classes; ConfigError for images of other channels."""
    if channels != cfg["input_size"][0]:
        raise _refused(f"it reads images of {cfg['input_size'][0]} channels, and these have {channels}")
    model = deepcopy(given)
    parent, _, child = cfg["classifier"].rpartition(".")
    old: Any = model.get_submodule(cfg["classifier"])
    if classes != _width(old):
        has_bias = old.bias is not None
        setattr(model.get_submodule(parent), child, nn.Linear(old.in_features, classes, has_bias)
                if isinstance(old, nn.Linear) else nn.Conv2d(old.in_channels, classes, 1, bias=has_bias))
    for layer in model.modules():
        if callable(begin_anew := getattr(layer, "reset_parameters", None)):
            begin_anew()
    for known in ("default_cfg", "pretrained_cfg"):  # these and `get_classifier` timm's networks have
        vars(model)[known] = {**cfg, "num_classes": classes}
    if not hasattr(model, "get_classifier"):
        kind = type(model)
        model.__class__ = type(kind.__name__, (kind,), {
            "get_classifier": lambda self: self.get_submodule(self.default_cfg["classifier"])})
    return model


def _width(head: Any) -> int:
    return int(head.out_features if isinstance(head, nn.Linear) else head.out_channels)


def _copied(module: Any) -> nn.Module:
    """A copy that nobody else changes, in evaluation mode; ConfigError for what is no plain module."""
    if not isinstance(module, nn.Module):
        raise _refused(f"it is a {type(module).__name__}, and torch.nn.Module or a timm name is what can be searched "
                       "around")
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise _refused("it is compiled: give the module that it was made of")
    owner: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if owner.setdefault(id(parameter), name) != name:
            raise _refused(f"{owner[id(parameter)]} and {name} are one parameter, and layers that share theirs cannot "
                           "be cut")
    try:
        return deepcopy(module).cpu().float().eval()
    except Exception as error:  # a module may hold anything
        raise _refused(f"it cannot be copied ({_one_line(error)})") from None


def _try(model: nn.Module) -> tuple[int, str]:
    """The channels of its images, and the name of the layer that answers; ConfigError where there is none such."""
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is None:
        raise _refused("it has no convolution (torch.nn.Conv2d)")
    ran: list[tuple[str, Tensor]] = []
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    images = torch.randn((2 * _IMAGES, first.in_channels, TRACED_PX, TRACED_PX),
                         generator=torch.Generator().manual_seed(0))
    hooks = [layer.register_forward_hook(lambda _, given, out, name=name: ran.append((name, out)))
             for name, layer in layers]
    try:
        with torch.inference_mode():
            out: Any = model(images)
    except Exception as error:  # each network has errors of its own
        raise _refused(f"it cannot be run on images [{2 * _IMAGES}, {first.in_channels}, {TRACED_PX}, {TRACED_PX}] "
                       f"({_one_line(error)})") from None
    finally:
        for hook in hooks:
            hook.remove()
    if not torch.is_tensor(out) or out.ndim != 2 or len(out) != 2 * _IMAGES:
        got = f"[{', '.join(map(str, out.shape))}]" if torch.is_tensor(out) else f"a {type(out).__name__}"
        raise _refused(f"it must answer with one tensor [n, classes], got {got}")
    name, last = ran[-1]
    if last.numel() != out.numel() or not torch.equal(last.flatten(1), out):
        raise _refused(f"its answers are not what its last layer, {name}, gives: logits are wanted, as they are before "
                       "a softmax")
    if any(ran_name == name for ran_name, _ in ran[:-1]):
        raise _refused(f"its last layer, {name}, runs more than once")
    _check_flow(model, images)
    return first.in_channels, name


def _check_flow(model: nn.Module, images: Tensor) -> None:
    """ConfigError where images decide what is run: a graph says only what one of them ran."""
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            graph: Any = torch.jit.trace(model, (images[:_IMAGES],), check_trace=False)
            pairs = [(model(batch), graph(batch)) for batch in (images[_IMAGES:], 4 * images[_IMAGES:] + 2,
                                                                torch.zeros_like(images[_IMAGES:]))]
    except Exception as error:  # as above
        raise _refused(f"torch cannot trace it ({_one_line(error)})") from None
    if any(ours.shape != its.shape or float((ours - its).abs().max()) > _CLOSE * max(1.0, float(ours.abs().max()))
           for ours, its in pairs):
        raise _refused("its images decide what it runs (by an if, or at random), and a graph has no such choice")


def _refused(why: str) -> ConfigError:
    return ConfigError(f"around: the module cannot be searched around: {why}. Give another module.")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:150] or type(error).__name__
