"""Cut a network, with its weights.

Of a group of channels, the ones with the largest weights over all layers of the group stay. This was the best of four
measures (experiments/results/importance). A layer that then reads another width than it was made for, as a layer behind
removed stages does, gets new weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hwnas.errors import CandidateError, one_line
from hwnas.lazy import nn, torch, torch_pruning
from hwnas.networks.baselines import original
from hwnas.networks.traced import TracedNetwork, is_inside
from hwnas.networks.tracing import TRACED_PX, build_graph, list_groups, list_operators, list_writers, trace
from hwnas.space.architecture import Cut, Operator

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hwnas.networks.weights import Pretrained
    from hwnas.space.architecture import Architecture


# Layer norms with channels in the second axis: timm's and torchvision's for [n, c, h, w].
_NORMS_OF_MAPS = ("LayerNorm2d", "LayerNormAct2d", "LayerNorm2dFp32", "LayerNormAct2dFp32")


def build_cut(architecture: Cut, pretrained: Pretrained | None = None) -> nn.Module:
    """Build a network in train mode, cut out of the whole one: with random weights (seed torch first), or with what
    stays of pretrained ones. Raises DataError for weights that do not fit."""
    model = original(architecture.around, architecture.channels, architecture.classes, architecture.image_size)
    if pretrained is not None:
        pretrained.load(model, architecture.classes)
    return cut_model(model, architecture).train()


def cut_further(weights: Mapping[str, Tensor], whole: Architecture, part: Architecture) -> nn.Module:
    """Return `part` in train mode with what stays of `weights`, the state of `whole`: two cuts of one network. New
    weights are random (seed torch first)."""
    assert isinstance(whole, Cut)
    assert isinstance(part, Cut)
    with torch.random.fork_rng(devices=[]):
        model = build_cut(whole)
    model.load_state_dict(dict(weights))
    return cut_model(model, part).train()


def cut_model(model: Any, architecture: Cut) -> nn.Module:
    """Cut a network, whole or cut less, to what `architecture` keeps, in place; return it.

    Raises:
        CandidateError: It cannot be cut so, or the cut would not run the operators of `architecture`.
    """
    around, chosen = architecture.around, dict(architecture.chosen)
    traced = trace(around, architecture.channels, architecture.classes)
    if not chosen.keys() <= traced.choices.keys() or _find_operators(
            around, architecture.channels, architecture.classes, architecture.chosen) != architecture.operators:
        raise CandidateError(f"{architecture.id} runs otherwise than what is cut out of {around} here (by another "
                             "version of timm?). Search it anew.")
    try:
        if traced.patch:
            model.set_input_size(architecture.image_size)
        return apply_cut(model, traced, chosen)
    except Exception as error:  # a network that is cut wrongly has errors of its own
        raise CandidateError(f"{architecture.id} cannot be cut out of {around}: {one_line(error)}") from error


def make_cut(traced: TracedNetwork, kept: Mapping[str, float], image_size: int) -> Cut:
    """Return the network that keeps what `kept` says, by the names of its choices, and all of every other part.

    It is cut once to find the operators that it runs. Raises CandidateError if it cannot be cut so.
    """
    chosen = tuple(traced.choose(kept).items())
    operators = _find_operators(traced.around, traced.channels, traced.classes, chosen)
    return Cut.of(traced.around, traced.activation, chosen, operators, image_size, traced.channels, traced.classes)


@lru_cache(maxsize=10_000)
def _find_operators(around: str, channels: int, classes: int, chosen: tuple[tuple[str, float], ...]
                    ) -> tuple[Operator, ...]:
    traced = trace(around, channels, classes)
    with torch.random.fork_rng(devices=[]):
        model = original(around, channels, classes, TRACED_PX)
        try:
            return list_operators(apply_cut(model, traced, dict(chosen)).eval(), traced)
        except Exception as error:  # a network that is cut wrongly has errors of its own
            raise CandidateError(f"what keeps {dict(chosen)} cannot be cut out of {around}: "
                                 f"{one_line(error)}") from error


def apply_cut(model: nn.Module, traced: TracedNetwork, chosen: Mapping[str, Any]) -> nn.Module:
    """Cut what is not chosen, in place, and return the model; of channels, the ones with the smallest weights go."""
    removed_modules: list[str] = []
    for name in [*traced.stages_left_out(chosen), *traced.blocks_left_out(chosen)]:
        if not is_inside(name, removed_modules):  # a block of a removed stage is no longer there
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())
            removed_modules.append(name)
    if removed_modules and not traced.patch:  # the stream of a transformer has one width everywhere
        _fit_layers(model, traced.channels)
    # Channels of a transformer are cut between two layers, without the graph, which takes minutes for attention.
    widths = traced.channels_of_groups(chosen)
    if traced.patch:
        _narrow(model, {name: n for name, n in widths.items() if not is_inside(name, removed_modules)}, traced.readers)
        return model
    if not widths:
        return model
    group_of = {layer: name for name in widths for layer in traced.writers[name]}
    graph = build_graph(model.eval(), traced.channels)
    names = {module: name for name, module in model.named_modules()}
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
    # List all groups before the first one is cut; find each again in the graph as it is after the cuts before it.
    for root, prune_channels, group in [(group[0].dep.target.module, group[0].dep.handler, group_of[name])
                                        for group in list_groups(graph, model)
                                        if (name := next(iter(list_writers(graph, group, names)), "")) in group_of]:
        full_group = graph.get_pruning_group(root, prune_channels, list(range(graph.get_out_channels(root))))
        surplus = len(full_group[0].idxs) - widths[group]
        if surplus > 0:
            order = importance(full_group).argsort(stable=True)[:surplus].tolist()
            graph.get_pruning_group(root, prune_channels, order).prune()
    for module in model.modules():
        if hasattr(module, "reparameterize"):
            _tell_branches(module)
    return model


def _narrow(model: Any, wanted: Mapping[str, int], readers: Mapping[str, str]) -> None:
    """Leave the `wanted` number of channels between two layers: the channels with the largest weights in both."""
    for name, n in wanted.items():
        first, second = (model.get_submodule(each) for each in (name, readers[name]))
        norm = first.weight.square().mean(1) + second.weight.square().mean(0)
        surplus = norm.argsort(stable=True)[:len(norm) - n].tolist()
        torch_pruning.prune_linear_out_channels(first, surplus)
        torch_pruning.prune_linear_in_channels(second, surplus)


def _fit_layers(model: nn.Module, channels: int) -> None:
    """Give new weights to layers that read another number of channels than they were made for, and to the norms of what
    such layers write."""
    new_outputs: list[Any] = []  # the outputs of layers with new weights
    norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm

    def fit(layer: Any, given: tuple[Tensor, ...]) -> None:
        is_last = isinstance(layer, nn.Linear) or (
            isinstance(layer, nn.LayerNorm) and type(layer).__name__ not in _NORMS_OF_MAPS)
        n = given[0].shape[-1 if is_last else 1]
        if isinstance(layer, nn.Linear) and n != layer.in_features:
            layer.in_features, layer.weight = n, nn.Parameter(layer.weight.new_empty(layer.out_features, n))
        elif isinstance(layer, nn.Conv2d) and layer.groups == 1 and n != layer.in_channels:
            layer.in_channels = n
            layer.weight = nn.Parameter(layer.weight.new_empty(layer.out_channels, n, *layer.kernel_size))
        elif isinstance(layer, norms) and (
                any(given[0] is each for each in new_outputs)
                or n != (layer.num_features if layer.weight is None else len(layer.weight))):
            _widen_norm(layer, n)
        else:
            return
        layer.reset_parameters()
        if not isinstance(layer, norms):
            hooks.append(layer.register_forward_hook(lambda module, given, out: new_outputs.append(out)))

    # Each layer is fitted just before it runs, when the width of what it reads is known.
    was_training = model.training
    hooks = [module.register_forward_pre_hook(fit) for module in model.modules()
             if isinstance(module, (nn.Linear, nn.Conv2d, *norms))]
    with torch.no_grad():
        model.eval()(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    for hook in hooks:
        hook.remove()
    model.train(was_training)


def _widen_norm(norm: Any, n: int) -> None:
    """Give a norm `n` channels; their values are not set."""
    if isinstance(norm, nn.LayerNorm):
        norm.normalized_shape = (n,)
    else:
        norm.num_features = n
        norm.running_mean, norm.running_var = (norm.running_mean.new_empty(n) for _ in range(2))
    for name in ("weight", "bias"):
        if (values := getattr(norm, name)) is not None:
            setattr(norm, name, nn.Parameter(values.new_empty(n)))


def _tell_branches(block: Any) -> None:
    """Update the widths that a block stores for fusing its branches: it uses its own numbers, not its layers'."""
    conv = next((module for module in block.modules() if isinstance(module, nn.Conv2d)), None)
    if conv is not None:
        for name, value in (("groups", conv.groups), ("in_chs", conv.in_channels), ("out_chs", conv.out_channels)):
            if hasattr(block, name):
                setattr(block, name, value)
