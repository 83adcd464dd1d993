"""Networks that a Python program gives as modules: each gets a name, by which it is built and cut as timm's are.

The name is a hash of the operators, the weights and the normalisation of images. The weights are in the user's folder.
The module itself is in this process only, so that a search in another process asks for it again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from copy import deepcopy
from math import isfinite
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError, kind_of, one_line
from hwnas.lazy import LazyModule, nn, safetensors, torch
from hwnas.networks.baselines import MODULE
from hwnas.networks.tracing import TRACED_PX, channels_of, is_transformer
from hwnas.networks.weights import IMAGENET, import_timm
from hwnas.system.paths import home, write_atomic

if TYPE_CHECKING:
    from torch import Tensor, nn

    import hwnas.networks.modules as modules
else:
    modules = LazyModule("hwnas.networks.modules")

_IMAGES = 4  # number of images on which answers are compared
_CLOSE = 1e-3  # share of the largest answer that another order of summation may change


def register_module(module: nn.Module, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> str:
    """Give a network a name that searches in this process take as `around`.

    Args:
        module: The network. It takes float32 [n, c, h, w] and returns logits [n, classes]. It is copied.
        mean: The mean of pixels / 255 for each channel, by which its images are normalised. None takes the value in
            timm's configuration of the module, or ImageNet's (0.5 if the images do not have 3 channels).
        std: The standard deviation, in the same way; give both or neither.

    Returns:
        The name, `module_` and a hash of operators, weights and normalisation.

    Raises:
        ConfigError: It cannot be cut, built or trained again; the message names the module or value in the way.
    """
    # 1. Copy it, run it, and find its first and last layer.
    model = _copied(module)
    if is_transformer(model):
        raise _refused("a transformer has places for one size of images. Give timm's name of it as around=, and its "
                       "weights as pretrained.file=")
    channels, head, operators = _try(model)
    # 2. Name it after its content. Its configuration lets timm build it.
    norm = _normalisation(model, channels, mean, std)
    try:
        content = safetensors.torch.save({name: tensor.contiguous().clone()
                                          for name, tensor in model.state_dict().items()})
    except Exception as error:  # a state may hold anything
        raise _refused(f"its state_dict() cannot be stored ({one_line(error, 150)})") from None
    name = MODULE + hashlib.sha256(content + f"{operators}|{norm}".encode()).hexdigest()[:12]
    cfg = modules.default_cfg((channels, TRACED_PX, TRACED_PX), channels_of(model.get_submodule(head))[1], *norm,
                              first_conv=None, classifier=head)
    # 3. Build it once for another number of classes, as a search will, before it is stored and registered.
    try:
        with torch.random.fork_rng(devices=[]):
            _built(model, cfg, channels, cfg["num_classes"] + 1)
    except Exception as error:  # each kind of layer resets its weights by code of its own
        raise _refused(f"it cannot be built with new weights for other classes ({one_line(error, 150)})") from None
    write_atomic(home() / "weights" / f"{name}.safetensors", content)
    if not import_timm().is_model(name):
        modules.register(name, cfg, lambda in_chans=3, num_classes=1000, **_: _built(model, cfg, in_chans, num_classes))
    return name


def _normalisation(model: Any, channels: int, mean: Any, std: Any) -> tuple[tuple[float, ...], ...]:
    """Return mean and std: the given ones, otherwise the module's or ImageNet's; ConfigError for invalid values."""
    config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    own = [config.get(key) if isinstance(config, dict) else getattr(config, key, None) for key in ("mean", "std")]
    usual = IMAGENET if channels == len(IMAGENET[0]) else ((0.5,) * channels,) * 2
    chosen: Any = (mean, std) if mean is not None or std is not None else own if None not in own else usual
    try:
        norm = tuple(tuple(float(value) for value in values) for values in chosen)
    except (TypeError, ValueError):
        norm = ()
    if mean is None and std is None and channels == 1:  # averages, as for any pretrained network on grey images
        norm = tuple((sum(values) / len(values),) for values in norm)
    if {*map(len, norm)} != {channels} or not all(map(isfinite, norm[0] + norm[1])) or not min(norm[1]) > 0:
        raise _refused(f"mean and std must be {channels} finite numbers each, and those of std above 0, got {chosen}")
    return norm


def _built(given: nn.Module, cfg: dict[str, Any], channels: int, classes: int) -> nn.Module:
    """Build the network for `classes`, with new weights in all layers that can reset theirs. Raises ConfigError for
    images of another number of channels."""
    if channels != cfg["input_size"][0]:
        raise _refused(f"it reads images of {cfg['input_size'][0]} channels, and these have {channels}")
    # The last layer is replaced if it has another width; then every layer that can do so resets its weights.
    model = deepcopy(given)
    parent, _, child = cfg["classifier"].rpartition(".")
    old: Any = model.get_submodule(cfg["classifier"])
    if classes != channels_of(old)[1]:
        has_bias = old.bias is not None
        setattr(model.get_submodule(parent), child, nn.Linear(old.in_features, classes, has_bias)
                if isinstance(old, nn.Linear) else nn.Conv2d(old.in_channels, classes, 1, bias=has_bias))
    for layer in model.modules():
        if callable(begin_anew := getattr(layer, "reset_parameters", None)):
            begin_anew()
    for attribute in ("default_cfg", "pretrained_cfg"):  # these and `get_classifier` timm's networks have
        vars(model)[attribute] = {**cfg, "num_classes": classes}
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {
        "get_classifier": lambda self: self.get_submodule(self.default_cfg["classifier"])})
    return model


def _copied(module: Any) -> nn.Module:
    """Copy a module, in eval mode, as float32 on the CPU. Raises ConfigError for anything but a plain module."""
    if not isinstance(module, nn.Module):
        raise _refused(f"it is {kind_of(module)}, and torch.nn.Module or a timm name is what can be searched "
                       "around")
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise _refused("it is compiled: give the module that it was made of")
    owner: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if owner.setdefault(id(parameter), name) != name:
            raise _refused(f"{owner[id(parameter)]} and {name} are one parameter, and layers that share theirs cannot "
                           "be cut")
    try:
        copy = deepcopy(module)
    except Exception as error:  # a module may hold anything
        raise _refused(f"it cannot be copied ({one_line(error, 150)})") from None
    return copy.cpu().float().eval().requires_grad_(True)  # the whole network is trained, even parts that were frozen


def _try(model: nn.Module) -> tuple[int, str, str]:
    """Return the channels of its images, the name of its last layer, and what it runs, as text. Raises ConfigError if
    it cannot be run or traced, or if its answers are not the output of its last layer."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    first = [layer.in_channels for _, layer in layers if isinstance(layer, nn.Conv2d)][:1]
    if not first:
        raise _refused("it has no convolution (torch.nn.Conv2d)")
    outputs: list[tuple[str, Tensor]] = []
    hooks = [layer.register_forward_hook(lambda _, given, out, name=name: outputs.append((name, out)))
             for name, layer in layers]
    refusals = []  # errors of the numbers of channels that do not fit; the first one is raised if none fits
    for channels in dict.fromkeys([*first, 3, 1]):  # the first one in the code need not be the first that runs
        outputs.clear()
        images = torch.randn((2 * _IMAGES, channels, TRACED_PX, TRACED_PX), generator=torch.Generator().manual_seed(0))
        try:
            out = _answers(model, images)
            break
        except ConfigError as error:
            refusals.append(error)
    else:
        raise refusals[0]
    # It must also run in training, and each layer must run once only. The last one must give the answers as they are.
    for hook in hooks:
        hook.remove()
    _answers(deepcopy(model).train(), images)
    if len(outputs) != len({name for name, _ in outputs}):
        repeated = next(name for name, _ in outputs if [each for each, _ in outputs].count(name) > 1)
        raise _refused(f"its layer {repeated} runs more than once, and such ones cannot be cut")
    name, last = outputs[-1] if outputs else ("", torch.empty(0))
    if last.numel() != out.numel() or not torch.equal(last.flatten(1), out):
        raise _refused("its answers must be what its last layer (torch.nn.Linear or Conv2d) gives, not what a softmax "
                       f"or pooling behind it makes of that; the last one that ran is {name or 'none'}")
    head: Any = model.get_submodule(name)
    if isinstance(head, nn.Conv2d) and (head.kernel_size != (1, 1) or head.groups > 1):
        raise _refused(f"its last layer, {name}, must have a kernel of one pixel")
    return channels, name, _traced(model, images)


def _answers(model: nn.Module, images: Tensor) -> Tensor:
    """Return the answers of a network to `images`; ConfigError if they are not one finite tensor [n, classes]."""
    try:
        with torch.inference_mode():
            out: Any = model(images)
    except Exception as error:  # each network has errors of its own
        raise _refused(f"it cannot be run on images {list(images.shape)} ({one_line(error, 150)})") from None
    if not torch.is_tensor(out) or out.ndim != 2 or len(out) != len(images):
        answer = str(list(out.shape)) if torch.is_tensor(out) else kind_of(out)
        raise _refused(f"it must answer with one tensor [n, classes]{' in training' * model.training}, got {answer}")
    if not out.isfinite().all():
        raise _refused("its answers are not finite")
    return out


def _traced(model: nn.Module, images: Tensor) -> str:
    """Return the operators that run, and their constants, as text; ConfigError if they depend on the images."""
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            # Trace it on half of the images, and compare answers on the others, on larger values, and on zeros.
            traced: Any = torch.jit.trace(model, (images[:_IMAGES],), check_trace=False)
            pairs = [(model(batch), traced(batch)) for batch in (images[_IMAGES:], 4 * images[_IMAGES:] + 2,
                                                                 torch.zeros_like(images[_IMAGES:]))]
    except Exception as error:  # each network has errors of its own
        raise _refused(f"torch cannot trace it ({one_line(error, 150)})") from None
    if any(ours.shape != its.shape or float((ours - its).abs().max()) > _CLOSE * max(1.0, float(ours.abs().max()))
           for ours, its in pairs):
        raise _refused("its images decide what it runs (by an if, or at random), and a graph has no such choice")
    nodes = [(node.kind(), node.output().toIValue() if node.kind() == "prim::Constant" else None)
             for node in traced.inlined_graph.nodes()]
    return str([(kind, value if isinstance(value, bool | int | float | str) else None) for kind, value in nodes])


def _refused(why: str) -> ConfigError:
    return ConfigError(f"around: the module cannot be searched around: {why}. Give another module.")
