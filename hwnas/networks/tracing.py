"""What may be cut out of any convolutional network, found by running it once; and the cutting, with its weights.

Blocks that may go have an output of their input's shape, and stand in a container of blocks of their own class. Which
channels stand and fall together is Torch-Pruning's dependency graph (Fang et al., DepGraph, CVPR 2023). Of a group the
channels stay whose weights are largest, over all layers of the group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from hwnas.errors import CandidateError, ConfigError
from hwnas.lazy import LazyModule
from hwnas.networks.baselines import original
from hwnas.space.family import DIVISOR, WIDTH, Family, Group, Member, Run, TracedOperator, write_family
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
TRACING_S = 60.0  # of this thread, for finding out which channels may be cut; a busy machine takes longer
LEAST_LAYERS = 2  # of a block that may go: one alone is a part of a block


@dataclass(frozen=True)
class Layer:
    """A convolution or matrix product that ran: its operator, and which groups it reads and writes, with channels."""

    block: str
    role: str
    n_in: int
    n_out: int
    kernel: int
    stride_in: int
    stride_out: int
    reads: tuple[tuple[str, int], ...]
    writes: tuple[tuple[str, int], ...]

    def operator(self, groups: Collection[str]) -> TracedOperator:
        """It, where only these groups may be cut."""
        reads, writes = (_rest([pair for pair in side if pair[0] in groups], n)
                         for side, n in ((self.reads, self.n_in), (self.writes, self.n_out)))
        return TracedOperator(self.block, self.role, reads, writes, self.kernel, self.stride_in, self.stride_out)


@dataclass(frozen=True)
class Traced:
    """A network as it was seen to run.

    Attributes:
        layers: In the order in which they ran.
        runs: Of blocks that have an output of their input's shape.
        groups: Of channels that stand and fall together.
        writers: The layers that write each group, by its name.
    """

    around: str
    layers: tuple[Layer, ...]
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    writers: Mapping[str, tuple[str, ...]]

    def family(self, runs: Collection[str], shares: Mapping[str, tuple[float, ...]]) -> Family:
        """The family in which these runs and ties may be cut."""
        groups = tuple(group for group in self.groups if group.tie in shares)
        names = {group.name for group in groups}
        return Family(self.around, (), tuple(run for run in self.runs if run.name in runs), groups, shares,
                      tuple(layer.operator(names) for layer in self.layers)).in_order()


@lru_cache(maxsize=4)
def trace(around: str, channels: int, classes: int) -> Traced:
    """Run a timm network once, on noise.

    Args:
        around: The network, as `Architecture.around` names it.
        channels: Of its images.
        classes: That it knows.

    Raises:
        ConfigError: It cannot be run so, or is made of what cannot be told.
    """
    with torch.random.fork_rng(devices=[]):
        model = original(around, channels, classes).eval()
    try:
        shapes = _shapes(model, channels)
    except Exception as error:  # each network has errors of its own
        raise ConfigError(f"around={around}: it cannot be run on images of {TRACED_PX} px, which shows what may be cut "
                          f"({' '.join(str(error).split())[:150]}). Give another network.") from None
    for name, shape in shapes.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Conv2d) and len({*module.kernel_size}) > 1:
            raise ConfigError(f"around={around}: the kernel of {name} is not square. Give another network.")
        if isinstance(module, nn.Linear) and not shape.writes:
            raise ConfigError(f"around={around}: {name} reads tokens, and transformers cannot be cut yet. Give another "
                              "network.")
    if _attends(model, channels):
        raise ConfigError(f"around={around}: places of its maps attend to each other, and transformers cannot be cut "
                          "yet. Give another network.")
    runs, blocks = _runs(model, shapes)
    groups, writers, sides = _groups(model, channels, shapes, blocks)
    return Traced(around, tuple(_layers(model, shapes, blocks, sides)), runs, tuple(groups), writers)


def _attends(model: nn.Module, channels: int) -> bool:
    """Whether a network weighs places of its maps by a softmax over them: for such ones the graph of dependencies takes
    minutes, and channels that are read so cannot be told."""
    class Watch(torch.overrides.TorchFunctionMode):
        met: bool = False

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
            if name == "softmax":
                dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else -1)
                self.met = self.met or not isinstance(dim, int) or dim % out.ndim > 1
            self.met = self.met or name == "scaled_dot_product_attention"
            return out

    with Watch() as watch, torch.inference_mode():
        model(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    return bool(watch.met)


@lru_cache(maxsize=4)
def find_family(around: str, channels: int, classes: int) -> Family:
    """What of a network can be cut: what was tried, alone and all at once, and leaves it running.

    Raises:
        ConfigError: Nothing, or the network cannot be traced.
    """
    began = time.thread_time()
    traced = trace(around, channels, classes)
    with torch.random.fork_rng(devices=[]):
        model = original(around, channels, classes).eval()
    shares = {tie: _different(SHARES[tie.rstrip("0123456789")], [group for group in traced.groups if group.tie == tie])
              for tie in dict.fromkeys(group.tie for group in traced.groups)}

    def can_be_cut(runs: Collection[str], ties: Collection[str]) -> bool:
        if time.thread_time() - began > TRACING_S:
            raise ConfigError(f"around={around}: it takes more than {TRACING_S:.0f} s to find out what may be cut. "
                              "Give another network.")
        return _can_be_cut(model, traced, traced.family(runs, {tie: shares[tie] for tie in ties}), channels)

    runs = [run.name for run in traced.runs if can_be_cut([run.name], ())]
    ties = [tie for tie, of in shares.items() if len(of) > 1 and can_be_cut((), [tie])]
    if not (can_be_cut((), ties) and can_be_cut(runs, ties)):
        ties = []
    if (not runs and not ties) or not can_be_cut(runs, ties):
        raise ConfigError(f"around={around}: it has no alike blocks in a row that may go, and no channels that may. "
                          "Give another network.")
    return traced.family(runs, {tie: shares[tie] for tie in ties})


def _can_be_cut(model: nn.Module, traced: Traced, family: Family, channels: int) -> bool:
    """Whether a network runs with the least of everything that may be cut, and is what the family says then."""
    least = {name: min(choices) for name, choices in family.fields()[1:]}
    try:
        cut = _cut(deepcopy(model), traced, family, least, channels)
        with torch.inference_mode():
            cut(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    except Exception:  # a network that is cut wrongly has errors of its own
        return False
    told = Counter((n_in, n_out) for _, _, n_in, n_out, *_ in family.cut(family.operators, least))
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
        ConfigError: The network cannot be traced or cut, or not for such images.
    """
    family = find_family(around, channels, classes)
    smaller = image_sizes or [round(image_size * share / SIZE_STEP) * SIZE_STEP for share in SIZES]
    last = max(operator.stride_out for operator in family.operators)
    wanted = {image_size, *(px for px in smaller if px < image_size and (image_sizes or px >= last))}
    sizes = [px for px in sorted(wanted, reverse=True) if _takes(around, channels, px)]
    if refused := [px for px in (image_size, *image_sizes) if px in wanted and px not in sizes]:
        raise ConfigError(f"around={around}: images of {min(refused)} px are too small for it.")
    family = replace(family, image_sizes=tuple(sizes))
    short = {run.name: 0 for run in family.runs}
    thin = {WIDTH + tie: 0.5 for tie, shares in family.shares.items() if 0.5 in shares and tie.startswith(INNER)}
    narrow = {WIDTH + tie: 0.5 for tie, shares in family.shares.items() if 0.5 in shares}
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
        CandidateError: It cannot be cut so, or not to what `architecture` says that it runs.
    """
    around, chosen = architecture.around, dict(architecture.chosen)
    traced = trace(around, architecture.channels, architecture.classes)
    family = traced.family([name for name in chosen if not name.startswith(WIDTH)], {
        name.removeprefix(WIDTH): (1.0,) for name in chosen if name.startswith(WIDTH)})
    known = {*(run.name for run in traced.runs), *(WIDTH + group.tie for group in traced.groups)}
    if not chosen.keys() <= known or tuple(family.cut(family.operators, chosen)) != architecture.operators:
        raise CandidateError(f"{architecture.id} runs otherwise than what is cut out of {around} here (by another "
                             "version of timm?). Search it anew.")
    try:
        return _cut(model, traced, family, chosen, architecture.channels)
    except Exception as error:  # a network that is cut wrongly has errors of its own
        raise CandidateError(f"{architecture.id} cannot be cut out of {around}: {' '.join(str(error).split())[:200]}"
                             ) from error


def _cut(model: nn.Module, traced: Traced, family: Family, chosen: Mapping[str, Any], channels: int,
         importance: Any = None) -> nn.Module:
    """Cut what is not chosen. `importance` is one of Torch-Pruning's; None: the norm of a channel's weights."""
    for name in family.blocks_left_out(chosen):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
    wanted = family.channels(chosen)
    if not wanted:
        return model
    group_of = {layer: name for name in wanted for layer in traced.writers[name]}
    graph = _graph(model.eval(), channels)
    names = {module: name for name, module in model.named_modules()}
    importance = importance or torch_pruning.importance.GroupMagnitudeImportance(p=2)
    for root, cut, group in [(group[0].dep.target.module, group[0].dep.handler, group_of[name])
                             for group in _all_groups(graph, model)
                             if (name := _first_writer(graph, group, names)) in group_of]:
        whole = graph.get_pruning_group(root, cut, list(range(graph.get_out_channels(root))))
        surplus = len(whole[0].idxs) - wanted[group]
        if surplus > 0:
            order = importance(whole).argsort(stable=True)[:surplus].tolist()
            graph.get_pruning_group(root, cut, order).prune()
    for module in model.modules():
        if hasattr(module, "reparameterize"):
            _tell_branches(module)
    return model


def _tell_branches(block: Any) -> None:
    """Tell a block that fuses its branches how wide they are now: it keeps numbers of its own."""
    conv = next((module for module in block.modules() if isinstance(module, nn.Conv2d)), None)
    if conv is not None:
        for name, value in (("groups", conv.groups), ("in_chs", conv.in_channels), ("out_chs", conv.out_channels)):
            if hasattr(block, name):
                setattr(block, name, value)


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

    def shape(module: nn.Module, values: Any) -> tuple[int, ...]:
        if not torch.is_tensor(values) or values.ndim not in (2, 4):
            return ()
        if isinstance(module, nn.Linear) and values.ndim == 4:  # [n, h, w, c]
            return values.shape[3], values.shape[2]
        return tuple(values.shape[1:3])

    def note(module: nn.Module, given: Any, out: Any, name: str) -> None:
        shapes[name] = _Shape(shape(module, given[0]) if len(given) == 1 else (), shape(module, out))

    hooks = [module.register_forward_hook(partial(note, name=name)) for name, module in model.named_modules() if name]
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
                 and sum(isinstance(each, nn.Conv2d | nn.Linear) for each in part.modules()) >= LEAST_LAYERS]
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
    ran = {name: place for place, name in enumerate(shapes)}  # the graph's own order differs from process to process
    for group in _all_groups(graph, model):
        writers = sorted((name for name in _writers(graph, group, names) if name in ran), key=ran.__getitem__)
        modules = [dependency.target.module for dependency, _ in group]
        stride = _stride(shapes[writers[0]].writes) if writers else 0
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
    for reads, writes in sides.values():
        reads.sort(key=lambda pair: ran[pair[0]])
        writes.sort(key=lambda pair: ran[pair[0]])
    return groups, layers, sides


def _layers(model: nn.Module, shapes: Mapping[str, _Shape], blocks: Sequence[str], sides: Sides) -> Iterator[Layer]:
    """What the network runs, in its order."""
    is_first = True
    for name, shape in shapes.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        kernel = module.kernel_size[0] if isinstance(module, nn.Conv2d) else 1
        strides = _stride(shape.reads), _stride(shape.writes)
        if isinstance(module, nn.Linear) and not strides[0]:
            role = "linear"
        elif is_first or not strides[0]:
            role = "stem" if is_first else "se"
        elif isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
            role = "depthwise"
        else:
            role = "pointwise" if kernel == 1 else "dense"
        is_first = False
        reads, writes = sides.get(name, ([], []))
        yield Layer(_block_of(name, blocks), role, *_channels(module), kernel, *strides, tuple(reads), tuple(writes))


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
