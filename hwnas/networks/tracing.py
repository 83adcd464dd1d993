"""What may be cut out of any convolutional network, found by running it once; and the cutting, with its weights.

Blocks that may go have an output of their input's shape, and stand in a container of blocks of their own class. Which
channels stand and fall together is Torch-Pruning's dependency graph (Fang et al., DepGraph, CVPR 2023). Of a group the
channels stay whose weights are largest, over all layers of the group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError
from hwnas.lazy import LazyModule
from hwnas.networks.baselines import original
from hwnas.space.family import DIVISOR, Family, Group, Member, Run, TracedOperator, write_family
from hwnas.space.search_space import WHOLE

if TYPE_CHECKING:
    import torch
    import torch_pruning
    from torch import Tensor, nn

    from hwnas.networks.weights import Pretrained
else:
    nn = LazyModule("torch.nn")
    torch = LazyModule("torch")
    torch_pruning = LazyModule("torch_pruning")

TRACED_PX = 128  # a multiple of all strides: sides of maps tell them
INNER, STREAM, OUTER = "inner", "stream", "outer"  # of ties: inside a block, between blocks, outside of all blocks
SHARES = {INNER: (1.0, 0.75, 0.5, 0.375, 0.25), STREAM: (1.0, 0.75, 0.5), OUTER: (1.0, 0.5, 0.25)}
SIZES = tuple(sixteenths / 16 for sixteenths in range(16, 5, -1))  # of the images' side
SIZE_STEP = 4  # px
TRACING_S = 180.0  # for finding out which channels may be cut
LEAST_LAYERS = 2  # convolutions of a block that may go: one alone is a part of a block


@dataclass(frozen=True)
class Traced:
    """A network as it was seen to run: the family without image sizes, and the layers that write each group."""

    family: Family
    layers: Mapping[str, tuple[str, ...]]


@lru_cache(maxsize=4)
def trace(around: str, channels: int, classes: int) -> Traced:
    """Run a timm network once, on noise.

    Args:
        around: The network, as `Architecture.around` names it.
        channels: Of its images.
        classes: That it knows.

    Raises:
        ConfigError: Nothing of it can be cut, and why.
    """
    with torch.random.fork_rng(devices=[]):
        model = original(around, channels, classes).eval()
    try:
        shapes = _shapes(model, channels)
    except Exception as error:  # each network has errors of its own
        raise ConfigError(f"around={around}: it cannot be run on images of {TRACED_PX} px, which shows what may be cut "
                          f"({' '.join(str(error).split())[:150]}). Give another network.") from None
    runs, blocks = _runs(model, shapes)
    groups, layers, sides = _groups(model, channels, shapes, blocks)
    shares = {tie: _different(SHARES[tie.rstrip("0123456789")], [group for group in groups if group.tie == tie])
              for tie in dict.fromkeys(group.tie for group in groups)}
    shares = {tie: of for tie, of in shares.items() if len(of) > 1}

    def of_ties(ties: Sequence[str]) -> Traced:
        kept = [group for group in groups if group.tie in ties]
        names = {group.name for group in kept}
        operators = tuple(_operators(model, shapes, blocks, sides, names))
        family = Family(around, (), runs, tuple(kept), {tie: shares[tie] for tie in ties}, operators)
        return Traced(family.in_order(), layers)

    began = time.monotonic()
    able = []
    for tie in shares:
        if time.monotonic() - began > TRACING_S:
            raise ConfigError(f"around={around}: it takes more than {TRACING_S:.0f} s to find out what may be cut. "
                              "Give another network.")
        able += [tie] * _can_be_cut(model, of_ties([tie]), channels)
    traced = of_ties(able if _can_be_cut(model, of_ties(able), channels) else ())
    if not traced.family.runs and not traced.family.groups:
        raise ConfigError(f"around={around}: it has no alike blocks in a row that may go, and no channels that may. "
                          "Give another network.")
    return traced


def _can_be_cut(model: nn.Module, traced: Traced, channels: int) -> bool:
    """Whether a network runs with the least of everything that may be cut, and is what the family says then."""
    least = {name: min(choices) for name, choices in traced.family.fields()[1:]}
    try:
        cut = _cut(deepcopy(model), traced, least, channels)
        with torch.inference_mode():
            cut(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    except Exception:  # a network that is cut wrongly has errors of its own
        return False
    told = Counter((n_in, n_out) for _, _, n_in, n_out, *_ in traced.family.cut(traced.family.operators, least))
    return told == Counter(_channels(module) for module in cut.modules() if isinstance(module, nn.Conv2d | nn.Linear))


def _channels(module: Any) -> tuple[int, int]:
    """Channels that an output of a layer reads, and those that the layer writes."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    depthwise = module.groups > 1 and module.groups == module.in_channels
    return module.in_channels // (1 if depthwise else module.groups), module.out_channels


def family_content(around: str, channels: int, classes: int, image_size: int, image_sizes: Sequence[int] = ()
                   ) -> dict[str, Any]:
    """The content of a search space's YAML: what can be cut out of the network that `around` names.

    Args:
        around: A timm network.
        channels: Of its images.
        classes: That it shall know.
        image_size: Of the images, in pixels.
        image_sizes: Smaller ones that a cut may take; () chooses.

    Raises:
        ConfigError: The network cannot be traced or cut.
    """
    traced = trace(around, channels, classes)
    smaller = image_sizes or [round(image_size * share / SIZE_STEP) * SIZE_STEP for share in SIZES]
    last = max(operator.stride_out for operator in traced.family.operators)
    wanted = {image_size, *(px for px in smaller if last // 2 <= px < image_size)}
    sizes = [px for px in sorted(wanted, reverse=True) if px in image_sizes or _takes(around, channels, px)]
    if image_size not in sizes:
        raise ConfigError(f"around={around}: images of {image_size} px are too small for it.")
    family = replace(traced.family, image_sizes=tuple(sizes))
    short = {run.name: 0 for run in family.runs}
    thin = {f"width.{tie}": 0.5 for tie, shares in family.shares.items() if 0.5 in shares and tie.startswith(INNER)}
    narrow = {f"width.{tie}": 0.5 for tie, shares in family.shares.items() if 0.5 in shares}
    cuts: dict[str, dict[str, Any]] = {"cut_short": short, "cut_thin": thin, "cut_narrow": narrow,
                                       "cut_short_narrow": {**short, **narrow}}
    known: dict[str, dict[str, Any]] = {WHOLE: {}}
    for name, cut in cuts.items():
        if cut and cut not in known.values():
            known[name] = cut
    return write_family(family, known, f"What can be cut out of {around}: blocks, channels, smaller images.")


@lru_cache(maxsize=256)
def _takes(around: str, channels: int, px: int) -> bool:
    """Whether a network runs on images of this size."""
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            original(around, channels).eval()(torch.zeros(1, channels, px, px))
    except Exception:  # networks have errors of their own for images that are too small
        return False
    return True


def build_member(architecture: Member, pretrained: Pretrained | None = None) -> nn.Module:
    """The network in train mode, cut out of the whole one: with random weights (seed torch first), or with what stays
    of pretrained ones. DataError for weights that do not fit."""
    model = original(architecture.around, architecture.channels, architecture.classes)
    if pretrained is not None:
        pretrained.load(model, architecture.classes)
    return cut_model(model, architecture).train()


def cut_member(weights: Mapping[str, Tensor], whole: Member, part: Member) -> nn.Module:
    """`part` in train mode with what stays of `weights`, the state of `whole`."""
    with torch.random.fork_rng(devices=[]):
        model = build_member(whole)
    model.load_state_dict(dict(weights))
    return cut_model(model, part).train()


def cut_model(model: nn.Module, architecture: Member) -> nn.Module:
    """Cut a network, whole or cut less, to what `architecture` keeps, in place; returns it.

    Raises:
        ConfigError: Its channels cannot be cut so.
    """
    traced = trace(architecture.around, architecture.channels, architecture.classes)
    return _cut(model, traced, dict(architecture.chosen), architecture.channels)


def _cut(model: nn.Module, traced: Traced, chosen: Mapping[str, Any], channels: int) -> nn.Module:
    for name in traced.family.blocks_left_out(chosen):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
    wanted = traced.family.channels(chosen)
    group_of = {layer: name for name, written in traced.layers.items() for layer in written}
    if not wanted:
        return model
    graph = _graph(model.eval(), channels)
    names = {module: name for name, module in model.named_modules()}
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
    for root, cut, group in [(group[0].dep.target.module, group[0].dep.handler, group_of[name])
                             for group in _all_groups(graph, model) if (name := _first_writer(graph, group, names))
                             in group_of and group_of[name] in wanted]:
        whole = graph.get_pruning_group(root, cut, list(range(graph.get_out_channels(root))))
        surplus = len(whole[0].idxs) - wanted[group]
        if surplus <= 0:
            continue
        order = importance(whole).argsort(stable=True)[:surplus].tolist()
        graph.get_pruning_group(root, cut, order).prune()
    return model


def _graph(model: nn.Module, channels: int) -> Any:
    """Torch-Pruning's graph of which layers' channels depend on which."""
    images = torch.zeros(1, channels, TRACED_PX, TRACED_PX)
    return torch_pruning.DependencyGraph().build_dependency(model, example_inputs=images, verbose=False)


def _all_groups(graph: Any, model: Any) -> list[Any]:
    head = model.get_classifier()
    return list(graph.get_all_groups(ignored_layers=[head], root_module_types=[nn.Conv2d, nn.Linear]))


def _writers(graph: Any, group: Any, names: Mapping[nn.Module, str]) -> list[str]:
    """Convolutions and matrix products whose outputs a group cuts."""
    return [names[dependency.target.module] for dependency, _ in group
            if graph.is_out_channel_pruning_fn(dependency.handler)
            and isinstance(dependency.target.module, nn.Conv2d | nn.Linear)]


def _first_writer(graph: Any, group: Any, names: Mapping[nn.Module, str]) -> str:
    return next(iter(_writers(graph, group, names)), "")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a module's input and output, [channels, side]; () where that is no map or vector."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def _shapes(model: nn.Module, channels: int) -> dict[str, _Shape]:
    """Shapes of all modules that ran, in their order."""
    shapes: dict[str, _Shape] = {}

    def shape(values: Any) -> tuple[int, ...]:
        return tuple(values.shape[1:3]) if torch.is_tensor(values) and values.ndim in (2, 4) else ()

    hooks = [module.register_forward_hook(lambda _, given, out, name=name: shapes.update(
        {name: _Shape(shape(given[0]) if len(given) == 1 else (), shape(out))})) for name, module in
        model.named_modules() if name]
    with torch.inference_mode():
        model(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    for hook in hooks:
        hook.remove()
    return shapes


def _runs(model: nn.Module, shapes: Mapping[str, _Shape]) -> tuple[tuple[Run, ...], list[str]]:
    """Runs of blocks that may go, outermost first, and all blocks of their containers."""
    runs: list[Run] = []
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{block}.") for block in blocks):
            continue
        children = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
        alike = [(child, part) for child, part in children if not isinstance(part, nn.Sequential | nn.ModuleList)
                 and sum(isinstance(each, nn.Conv2d) for each in part.modules()) >= LEAST_LAYERS]
        kinds = [type(part) for _, part in alike]
        may_go = tuple(child for index, (child, part) in enumerate(alike) if index and kinds.count(type(part)) > 1
                       and child in shapes and shapes[child].reads and shapes[child].reads == shapes[child].writes)
        if may_go:
            runs.append(Run(name or "blocks", may_go))
            blocks += [child for child, _ in alike]
    return tuple(runs), blocks


def _block_of(layer: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if layer == block or layer.startswith(f"{block}.")), "")


Sides = dict[str, tuple[list[tuple[str, int]], list[tuple[str, int]]]]  # of layers: groups that they read and write


def _groups(model: nn.Module, channels: int, shapes: Mapping[str, _Shape], blocks: Sequence[str]
            ) -> tuple[list[Group], dict[str, tuple[str, ...]], Sides]:
    """Groups of channels that may be cut, the layers that write each, and what layers read and write of them."""
    graph = _graph(model, channels)
    names = {module: name for name, module in model.named_modules()}
    groups: list[Group] = []
    layers: dict[str, tuple[str, ...]] = {}
    sides: Sides = {}
    for group in _all_groups(graph, model):
        writers = _writers(graph, group, names)
        modules = [dependency.target.module for dependency, _ in group]
        stride = _stride(shapes[writers[0]].writes) if writers and writers[0] in shapes else 0
        n = len(group[0].idxs)
        if not stride or n <= DIVISOR or any(isinstance(module, nn.Conv2d) and 1 < module.groups < module.in_channels
                                             for module in modules):
            continue
        inside = {_block_of(writer, blocks) for writer in writers}
        kind = STREAM if len(inside) > 1 else INNER if inside != {""} else OUTER if len(writers) == 1 else STREAM
        name = writers[0]
        groups.append(Group(name, n, f"{kind}{stride}"))
        layers[name] = tuple(writers)
        for dependency, idxs in group:
            module = dependency.target.module
            if not isinstance(module, nn.Conv2d | nn.Linear):
                continue
            reads, writes = sides.setdefault(names[module], ([], []))
            depthwise = isinstance(module, nn.Conv2d) and module.groups > 1
            if graph.is_out_channel_pruning_fn(dependency.handler):
                writes.append((name, len(idxs)))
                reads += [(name, len(idxs))] * depthwise
            elif not depthwise:
                reads.append((name, len(idxs)))
    return groups, layers, sides


def _operators(model: nn.Module, shapes: Mapping[str, _Shape], blocks: Sequence[str], sides: Sides,
               groups: Collection[str]) -> list[TracedOperator]:
    """What the network runs, in its order, with the channels that are in `groups`."""
    operators: list[TracedOperator] = []
    for name, shape in shapes.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        n_in, n_out = _channels(module)
        kernel = module.kernel_size[0] if isinstance(module, nn.Conv2d) else 1
        strides = _stride(shape.reads), _stride(shape.writes)
        if isinstance(module, nn.Linear):
            role = "linear"
        elif not operators or not strides[0]:
            role = "se" if operators else "stem"
        else:
            role = "depthwise" if module.groups == module.in_channels > 1 else "pointwise" if kernel == 1 else "dense"
        reads, writes = ([pair for pair in side if pair[0] in groups] for side in sides.get(name, ([], [])))
        operators.append(TracedOperator(
            _block_of(name, blocks), role, _rest(reads, n_in), _rest(writes, n_out), kernel, *strides))
    return operators


def _rest(side: Sequence[tuple[str, int]], channels: int) -> tuple[tuple[str, int], ...]:
    """The groups of a side, and how many more channels it has that are in none."""
    rest = channels - sum(n for _, n in side)
    return (*side, *([("", rest)] if rest > 0 else []))


def _stride(shape: tuple[int, ...]) -> int:
    """Side of the image over that of a map; 0 for one pixel."""
    return round(TRACED_PX / shape[1]) if len(shape) == 2 and shape[1] > 1 else 0


def _different(shares: Sequence[float], groups: Sequence[Group]) -> tuple[float, ...]:
    """The shares that leave groups differently wide."""
    kept = {share: tuple(group.kept(share) for group in groups) for share in shares}
    return tuple(share for at, share in enumerate(shares) if kept[share] not in [kept[each] for each in shares[:at]])
