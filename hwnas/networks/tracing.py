"""Find what a network is made of and what of it may be cut, by running it once.

Blocks that may go have an output of their input's shape, and stand in a container of blocks of their own class. Stages
are the longest row of modules of which each reads what the one before it writes, in other shapes; the last ones may go,
and layers that read another width then begin anew. Torch-Pruning's dependency graph (Fang et al., DepGraph, CVPR 2023)
says which channels stand and fall together. Of transformers blocks may go, and the inside of their perceptrons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isqrt
from threading import Lock
from typing import Any, NamedTuple

from hwnas.errors import ConfigError, one_line
from hwnas.lazy import nn, torch, torch_pruning
from hwnas.networks.baselines import original
from hwnas.networks.traced import DEPTH, DIVISOR, BlockRun, ChannelGroup, TracedNetwork, is_inside
from hwnas.networks.weights import import_timm
from hwnas.space.architecture import WIDTH, Operator
from hwnas.space.blocks.block import ATTENTION

TRACED_PX = 128  # a multiple of all strides: sides of maps tell them
INNER, STREAM, OUTER = "inner", "stream", "outer"  # of ties: inside a block, between blocks, outside of all blocks
SHARES = {INNER: (1.0, 0.75, 0.5, 0.375, 0.25), STREAM: (1.0, 0.75, 0.5), OUTER: (1.0, 0.5, 0.25)}
MOST_DEPENDENCIES = 2000  # in a group of channels: a DenseNet has 200
LEAST_LAYERS = 2  # of a block that may go: one alone is a part of a block
ACTIVATIONS = {"ReLU": "relu", "ReLU6": "relu6", "SiLU": "swish", "Swish": "swish", "Hardswish": "hard_swish",
               "HardSwish": "hard_swish", "GELU": "gelu"}  # by the class's name, torch's and timm's
SLOW = ("swish", "hard_swish", "gelu")  # a network that has some is known by these, however many others it has

_PATCHING = Lock()


@lru_cache(maxsize=64)
def trace(around: str, channels: int, classes: int) -> TracedNetwork:
    """Run a timm network once, on zeros.

    Args:
        around: The network, as `Architecture.around` names it.
        channels: Of its images.
        classes: That it knows.

    Raises:
        ConfigError: It cannot be run so, or is made of what cannot be told.
    """
    with torch.random.fork_rng(devices=[]):
        model: Any = original(around, channels, classes, TRACED_PX).eval()
    has_tokens = is_transformer(model)
    try:
        shapes, attends, attention = _record_forward(model, channels, has_tokens)
    except Exception as error:  # each network has errors of its own
        raise ConfigError(f"around={around}: it cannot be run on images of {TRACED_PX} px, which shows what may be cut "
                          f"({one_line(error, 150)}). Give another network.") from None
    _check_layers(around, model, shapes, attends and not has_tokens)
    runs, blocks = _block_runs(model, shapes)
    readers = _perceptrons(model, shapes) if attends else None
    groups, writers = _groups(model, channels, shapes, blocks, readers)
    stages = _stages(model, shapes)
    operators = list(_operators(model, shapes, stages, blocks, attention))
    order = [each.stage for each in operators]
    strides = tuple(_stride(shapes[stage].writes) for stage in stages)
    behind = [each for each in operators if each.stage > len(stages)]
    counted = Counter(ACTIVATIONS[kind] for module in model.modules() if (kind := type(module).__name__) in ACTIVATIONS)
    activation = max(counted, key=lambda name: (name in SLOW, counted[name]), default="relu")
    choices: dict[str, tuple[float, ...]] = {}
    if stages and order == sorted(order):  # else they are no row after all
        # Half of the stages stay, and those whose maps are read behind them all, as a detector's head does.
        read = [stage for stage, stride in enumerate(strides, 1) if stride < strides[-1] and any(
            each.operator[5] == stride for each in behind)]
        least = max([1, len(stages) // 2, *read])
        choices[DEPTH] = tuple(range(len(stages), least - 1, -1))
    choices |= {run.name: tuple(range(len(run.blocks), -1, -1)) for run in runs}
    shares = {tie: _different_shares([group for group in groups if group.tie == tie])
              for tie in dict.fromkeys(group.tie for group in groups)}
    choices |= {WIDTH + tie: of for tie, of in shares.items() if len(of) > 1}
    heads = {each.layer for each in behind}
    head = tuple(WIDTH + group.tie for group in groups if heads.intersection(writers[group.name]))
    return TracedNetwork(around, channels, classes, activation, choices, runs, tuple(blocks), tuple(groups),
                         tuple(each.operator for each in operators), stages, strides, head, writers, readers or {},
                         model.patch_embed.patch_size[0] if attends else 0)


def _check_layers(around: str, model: Any, shapes: Mapping[str, _Shape], attends: bool) -> None:
    """ConfigError for a network that is made of what cannot be told."""
    for name, shape in shapes.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Conv2d) and len({*module.kernel_size}) > 1:
            raise ConfigError(f"around={around}: the kernel of {name} is not square. Give another network.")
        if isinstance(module, nn.Linear) and not shape.writes:
            raise ConfigError(f"around={around}: {name} reads tokens, and of networks that do only timm's ViT and DeiT "
                              "can be cut yet. Give another network.")
    if attends:
        raise ConfigError(f"around={around}: places of its maps attend to each other, and of transformers only timm's "
                          "ViT and DeiT can be cut yet. Give another network.")


def list_operators(model: nn.Module, traced: TracedNetwork) -> tuple[Operator, ...]:
    """Return the operators that a network runs which was cut out of a traced one."""
    shapes, _, attention = _record_forward(model, traced.channels, bool(traced.patch))
    return tuple(each.operator for each in _operators(model, shapes, traced.stages, traced.blocks, attention))


def _different_shares(groups: Sequence[ChannelGroup]) -> tuple[float, ...]:
    """Return the shares that leave the groups of one tie differently wide."""
    shares = SHARES[groups[0].tie.rstrip("0123456789")]
    by_widths = {tuple(group.kept(share) for group in groups): share for share in reversed(shares)}
    return tuple(sorted(by_widths.values(), reverse=True))


def channels_of(module: Any) -> tuple[int, int]:
    """Channels that an output of a layer reads, and those that the layer writes."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    depthwise = module.groups > 1 and module.groups == module.in_channels
    return module.in_channels // (1 if depthwise else module.groups), module.out_channels


def build_graph(model: nn.Module, channels: int) -> Any:
    """Torch-Pruning's graph of which layers' channels depend on which."""
    images = torch.zeros(1, channels, TRACED_PX, TRACED_PX)
    return torch_pruning.DependencyGraph().build_dependency(model, example_inputs=images, verbose=False)


@contextmanager
def _bounded() -> Iterator[None]:
    """Let no group of channels grow beyond MOST_DEPENDENCIES: in some graphs Torch-Pruning adds to one without end."""
    library = torch_pruning.dependency.graph

    class Bounded(library.Group):  # type: ignore[misc, name-defined]
        def add_dep(self, dep: Any, idxs: Any) -> None:
            if len(self) == MOST_DEPENDENCIES:
                raise OverflowError
            super().add_dep(dep, idxs)

    with _PATCHING:  # one thread at a time, so that the library's own class is put back
        group, library.Group = library.Group, Bounded
        try:
            yield
        finally:
            library.Group = group


def list_groups(graph: Any, model: Any) -> list[Any]:
    """Torch-Pruning's groups of channels that stand and fall together, but for those that the head writes."""
    head = model.get_classifier()
    return list(graph.get_all_groups(ignored_layers=[head], root_module_types=[nn.Conv2d, nn.Linear]))


def list_writers(graph: Any, group: Any, names: Mapping[nn.Module, str]) -> list[str]:
    """Convolutions and matrix products whose outputs a group cuts."""
    return [names[dependency.target.module] for dependency, _ in group
            if graph.is_out_channel_pruning_fn(dependency.handler)
            and isinstance(dependency.target.module, nn.Conv2d | nn.Linear)]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a module's input and output, [channels, side]; () where that is no map or vector. `given` and `made` are the
    same number where one module reads what another one writes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    given: int
    made: int


def _record_forward(model: nn.Module, channels: int, has_tokens: bool
                    ) -> tuple[dict[str, _Shape], bool, dict[str, int]]:
    """Run a network once on zeros; some of its values are tokens [n, t, c] if it `has_tokens`.

    Returns:
        The shapes of all modules that ran, in their order. Whether the network weighs places of its maps by a softmax
        over them: Torch-Pruning takes minutes for such ones. The layers behind which tokens attend to each other, with
        the number of their channels.
    """
    shapes: dict[str, _Shape] = {}
    begun: dict[str, int] = {}  # what each module read
    held: list[Any] = []  # so that no other value gets its place in memory
    attention, last = dict[str, int](), [""]  # last: the layer that ran last

    def shape(module: nn.Module, values: Any) -> tuple[int, ...]:
        if has_tokens and torch.is_tensor(values) and values.ndim == 3:  # [n, t, c]: a square of them, and a few more
            return values.shape[2], isqrt(values.shape[1])
        if not torch.is_tensor(values) or values.ndim not in (2, 4):
            return ()
        if isinstance(module, nn.Linear) and values.ndim == 4:  # [n, h, w, c]
            return values.shape[3], values.shape[2]
        return tuple(values.shape[1:3])

    def note(module: nn.Module, given: Any, out: Any, name: str) -> None:
        held.extend((given, out))
        if isinstance(module, nn.Linear):
            last[:] = [name]
        shapes[name] = _Shape(shape(module, given[0]) if len(given) == 1 else (), shape(module, out), begun[name],
                              place(out))

    def place(value: Any) -> int:
        return hash((id(value), getattr(value, "_version", 0)))  # what is added in place has a version of its own

    def begin(module: nn.Module, given: Any, name: str) -> None:
        begun[name] = place(given[0]) if given else 0

    class Watch(torch.overrides.TorchFunctionMode):
        attends: bool = False

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
            if name == "softmax":
                dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else -1)
                self.attends = self.attends or not isinstance(dim, int) or dim % out.ndim > 1
            if name == "scaled_dot_product_attention":
                self.attends = True
                if args[0].shape == args[1].shape:
                    attention[last[0]] = args[0].shape[1] * args[0].shape[3]
            return out

    hooks = [hook for name, module in model.named_modules() if name for hook in (
        module.register_forward_pre_hook(partial(begin, name=name)),
        module.register_forward_hook(partial(note, name=name)))]
    with Watch() as watch, torch.no_grad():  # tensors of inference_mode have no version
        model(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    for hook in hooks:
        hook.remove()
    return shapes, bool(watch.attends), attention


def _block_runs(model: nn.Module, shapes: Mapping[str, _Shape]) -> tuple[tuple[BlockRun, ...], list[str]]:
    """Runs of blocks that may go, outermost first, and all blocks of their containers."""
    runs: list[BlockRun] = []
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{block}.") for block in blocks):
            continue
        children = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
        alike = [(child, part) for child, part in children if not isinstance(part, nn.Sequential | nn.ModuleList)
                 and sum(isinstance(each, nn.Conv2d | nn.Linear) for each in part.modules()) >= LEAST_LAYERS]
        kinds = [type(part) for _, part in alike]
        rows, made = [list[str]()], set[int]()  # made: what the children so far wrote
        for child, part in children:
            shape = shapes.get(child)
            # What a parent adds to a block's input, or joins with others, is not what the next one reads.
            if shape is not None and (child, part) in alike[1:] and kinds.count(type(part)) > 1 and shape.reads and (
                    shape.reads == shape.writes and shape.given in made):
                rows[-1].append(child)
            elif (child, part) in alike:
                rows.append([])
            made |= {shape.made} if shape is not None else set()
        rows = [row for row in rows if row]
        runs += [BlockRun((name or "blocks") if len(rows) == 1 else row[0], tuple(row)) for row in rows]
        blocks += [child for child, _ in alike] if rows else []
    return tuple(runs), blocks


def _stages(model: nn.Module, shapes: Mapping[str, _Shape]) -> tuple[str, ...]:
    """The longest row of modules of one container of which each reads what the one before it writes; of rows those that
    change the shape most often."""
    rows: list[list[str]] = []
    for name, module in model.named_modules():
        rows.append([])
        for child, part in module.named_children():
            path = f"{name}.{child}" if name else child
            shape = shapes.get(path)
            if shape is None or len(shape.reads) != 2 or len(shape.writes) != 2 or shape.writes[1] < 2 or not any(
                    part.children()) or not any(isinstance(each, nn.Conv2d | nn.Linear) for each in part.modules()):
                continue
            if rows[-1] and shapes[rows[-1][-1]].made != shape.given:
                rows.append([])
            rows[-1].append(path)

    def changes(row: Sequence[str]) -> int:
        return sum(shapes[stage].reads != shapes[stage].writes for stage in row)

    best = max(rows, key=changes)
    return tuple(best) if changes(best) > 1 else ()


def is_transformer(model: nn.Module) -> bool:
    """Return whether it is a plain transformer over patches of the image, as timm's ViT and DeiT: norms before
    attention and before the perceptron, and a sum behind each."""
    timm = import_timm()
    plain = timm.models.vision_transformer
    return isinstance(model, plain.VisionTransformer) and type(model.patch_embed) is timm.layers.PatchEmbed and all(
        type(block) is plain.Block and isinstance(block.norm1, nn.LayerNorm) for block in model.blocks)


def _perceptrons(model: nn.Module, shapes: Mapping[str, _Shape]) -> dict[str, str]:
    """Of each module that is two layers with nothing that learns between them, the first layer and the second."""
    pairs = {}
    for name, module in model.named_modules():
        learning = [(part, each) for part, each in module.named_modules() if any(True for _ in each.parameters(False))]
        if name in shapes and shapes[name].reads == shapes[name].writes and [
                isinstance(each, nn.Linear) for _, each in learning] == [True, True]:
            (first, writer), (second, reader) = learning
            if writer.out_features == reader.in_features:
                pairs[f"{name}.{first}"] = f"{name}.{second}"
    return pairs


def _block_of(layer: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if is_inside(layer, [block])), "")


def _groups(model: nn.Module, channels: int, shapes: Mapping[str, _Shape], blocks: Sequence[str],
            readers: Mapping[str, str] | None) -> tuple[list[ChannelGroup], dict[str, tuple[str, ...]]]:
    """Groups of channels that may be cut, and the layers that write each. Of a transformer, which has `readers`, those
    between two layers."""
    if readers is not None:
        inner = [ChannelGroup(first, n, f"{INNER}{_stride(shapes[first].writes)}") for first in readers
                 if (n := channels_of(model.get_submodule(first))[1]) > DIVISOR]
        return inner, {group.name: (group.name,) for group in inner}
    try:
        with _bounded():
            graph = build_graph(model, channels)
            pruned_together = list_groups(graph, model)
    except Exception:  # it cannot follow every graph, and has errors of its own: blocks may go all the same
        return [], {}
    names = {module: name for name, module in model.named_modules()}
    groups: list[ChannelGroup] = []
    layers: dict[str, tuple[str, ...]] = {}
    ran = {name: place for place, name in enumerate(shapes)}  # the graph's own order differs from process to process
    for group in pruned_together:
        writers = sorted((name for name in list_writers(graph, group, names) if name in ran), key=ran.__getitem__)
        modules = [dependency.target.module for dependency, _ in group]
        stride = _stride(shapes[writers[0]].writes) if writers else 0
        n = len(group[0].idxs)
        if not stride or n <= DIVISOR or any(isinstance(module, nn.Conv2d) and 1 < module.groups < module.in_channels
                                             for module in modules):
            continue
        inside = {_block_of(writer, blocks) for writer in writers}
        kind = STREAM if len(inside) > 1 else INNER if inside != {""} else OUTER if len(writers) == 1 else STREAM
        groups.append(ChannelGroup(writers[0], n, f"{kind}{stride}"))
        layers[writers[0]] = tuple(writers)
    return groups, layers


class _Placed(NamedTuple):
    """An operator that runs: the layer, and the stage that it is in, from 1 on (0: before all stages; one more than
    there are: behind them)."""

    layer: str
    stage: int
    operator: Operator


def _operators(model: nn.Module, shapes: Mapping[str, _Shape], stages: Sequence[str], blocks: Sequence[str],
               attention: Mapping[str, int]) -> Iterator[_Placed]:
    """Yield the operators that run, in order. Attention stands behind the layer that makes what attends."""
    is_first, behind = True, 0
    for name, shape in shapes.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        kernel = module.kernel_size[0] if isinstance(module, nn.Conv2d) else 1
        strides = _stride(shape.reads), _stride(shape.writes)
        block, within = _block_of(name, blocks), _block_of(name, stages)
        if is_first:
            role = "stem"
        elif not strides[0]:
            role = "se" if within or (block and not stages) else "linear"  # also a convolution behind the pooling
        elif isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
            role = "depthwise"
        else:
            role = "pointwise" if kernel == 1 else "dense"
        is_first = False
        stage = stages.index(within) + 1 if within else behind
        behind = len(stages) + 1 if stage and stages else 0
        yield _Placed(name, stage, (block, role, *channels_of(module), kernel, *strides))
        if n := attention.get(name):
            yield _Placed(name, stage, (block, ATTENTION, n, n, 1, *strides))


def _stride(shape: tuple[int, ...]) -> int:
    """Side of the image over that of a map; 0 for one pixel."""
    return round(TRACED_PX / shape[1]) if len(shape) == 2 and shape[1] > 1 else 0
