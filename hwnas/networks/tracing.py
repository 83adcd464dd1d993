"""Find what a network is made of and what of it may be cut, by running it once.

A block may be removed if its output has the shape of its input and its container has other blocks of its class. Stages
are the row of modules that changes the shape most often: each reads what the one before it writes. The last stages may
be removed; layers that then read another width get new weights. Torch-Pruning's graph (Fang et al., DepGraph, CVPR
2023) says which channels must be cut together. Of transformers, blocks and the insides of perceptrons may be cut.
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

TRACED_PX = 128  # side of the image: a multiple of all strides, so that the side of a map gives its stride
INNER, STREAM, OUTER = "inner", "stream", "outer"  # kinds of ties: inside a block, between blocks, outside of all
SHARES = {INNER: (1.0, 0.75, 0.5, 0.375, 0.25), STREAM: (1.0, 0.75, 0.5), OUTER: (1.0, 0.5, 0.25)}
MOST_DEPENDENCIES = 2000  # in a group of channels: a DenseNet has 200
LEAST_LAYERS = 2  # of a block that may be removed: a single layer is only a part of a block
ACTIVATIONS = {"ReLU": "relu", "ReLU6": "relu6", "SiLU": "swish", "Swish": "swish", "Hardswish": "hard_swish",
               "HardSwish": "hard_swish", "GELU": "gelu"}  # by the class's name, torch's and timm's
SLOW = ("swish", "hard_swish", "gelu")  # one of these is a network's activation, even if others are more frequent

_PATCHING = Lock()


@lru_cache(maxsize=64)
def trace(around: str, channels: int, classes: int) -> TracedNetwork:
    """Run a timm network once, on zeros.

    Args:
        around: The network, as `Architecture.around` names it.
        channels: The number of channels of its images.
        classes: The number of classes that it predicts.

    Raises:
        ConfigError: The network cannot be run on such images, or has parts that cannot be cut.
    """
    # 1. Run it, and record the shape of every value.
    with torch.random.fork_rng(devices=[]):
        model: Any = original(around, channels, classes, TRACED_PX).eval()
    has_tokens = is_transformer(model)
    try:
        shapes, attends, attention = _record_forward(model, channels, has_tokens)
    except Exception as error:  # each network has errors of its own
        raise ConfigError(f"around={around}: it cannot be run on images of {TRACED_PX} px, which shows what may be cut "
                          f"({one_line(error, 150)}). Give another network.") from None
    _check_layers(around, model, shapes, attends and not has_tokens)
    # 2. Find the parts that may be cut, and the operators.
    runs, blocks = _block_runs(model, shapes)
    readers = _perceptrons(model, shapes) if attends else None
    groups, writers = _groups(model, channels, shapes, blocks, readers)
    stages = _stages(model, shapes)
    operators = list(_operators(model, shapes, stages, blocks, attention))
    order = [each.stage for each in operators]
    strides = tuple(_stride(shapes[stage].writes) for stage in stages)
    operators_behind = [each for each in operators if each.stage > len(stages)]
    counts = Counter(ACTIVATIONS[kind] for module in model.modules() if (kind := type(module).__name__) in ACTIVATIONS)
    activation = max(counts, key=lambda name: (name in SLOW, counts[name]), default="relu")
    # 3. List what each part may keep, the whole first: stages, blocks, shares of channels.
    choices: dict[str, tuple[float, ...]] = {}
    if stages and order == sorted(order):  # otherwise they do not run one after the other
        # Half of the stages stay, and so does each stage whose map is read behind them all, as by a detector's head.
        stages_read_later = [stage for stage, stride in enumerate(strides, 1) if stride < strides[-1] and any(
            each.operator[5] == stride for each in operators_behind)]
        fewest_stages = max([1, len(stages) // 2, *stages_read_later])
        choices[DEPTH] = tuple(range(len(stages), fewest_stages - 1, -1))
    choices |= {run.name: tuple(range(len(run.blocks), -1, -1)) for run in runs}
    # Groups with one tie have one choice; a tie whose shares all give the same widths has none.
    shares = {tie: _different_shares([group for group in groups if group.tie == tie])
              for tie in dict.fromkeys(group.tie for group in groups)}
    choices |= {WIDTH + tie: tie_shares for tie, tie_shares in shares.items() if len(tie_shares) > 1}
    heads = {each.layer for each in operators_behind}
    head = tuple(WIDTH + group.tie for group in groups if heads.intersection(writers[group.name]))
    return TracedNetwork(around, channels, classes, activation, choices, runs, tuple(blocks), tuple(groups),
                         tuple(each.operator for each in operators), stages, strides, head, writers, readers or {},
                         model.patch_embed.patch_size[0] if attends else 0)


def _check_layers(around: str, model: Any, shapes: Mapping[str, _Shape], attends: bool) -> None:
    """Raise ConfigError if a network has parts that cannot be cut."""
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
    """Return the operators that a network runs, in order; it was cut out of a traced one."""
    shapes, _, attention = _record_forward(model, traced.channels, bool(traced.patch))
    return tuple(each.operator for each in _operators(model, shapes, traced.stages, traced.blocks, attention))


def _different_shares(groups: Sequence[ChannelGroup]) -> tuple[float, ...]:
    """Return the shares that give the groups of one tie different widths, the largest first."""
    shares = SHARES[groups[0].tie.rstrip("0123456789")]
    # Of several shares with the same widths the largest stays, as it comes last.
    by_widths = {tuple(group.kept(share) for group in groups): share for share in reversed(shares)}
    return tuple(sorted(by_widths.values(), reverse=True))


def channels_of(module: Any) -> tuple[int, int]:
    """Return how many channels one output of a layer reads, and how many channels the layer writes."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    depthwise = module.groups > 1 and module.groups == module.in_channels
    return module.in_channels // (1 if depthwise else module.groups), module.out_channels


def build_graph(model: nn.Module, channels: int) -> Any:
    """Return Torch-Pruning's graph of which layers' channels depend on each other."""
    images = torch.zeros(1, channels, TRACED_PX, TRACED_PX)
    return torch_pruning.DependencyGraph().build_dependency(model, example_inputs=images, verbose=False)


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise OverflowError if a group exceeds MOST_DEPENDENCIES: in some graphs Torch-Pruning adds to one for ever."""
    library = torch_pruning.dependency.graph

    class Bounded(library.Group):  # type: ignore[misc, name-defined]
        def add_dep(self, dep: Any, idxs: Any) -> None:
            if len(self) == MOST_DEPENDENCIES:
                raise OverflowError
            super().add_dep(dep, idxs)

    with _PATCHING:  # one thread at a time; a second one would put the first one's class back, not the library's
        group, library.Group = library.Group, Bounded
        try:
            yield
        finally:
            library.Group = group


def list_groups(graph: Any, model: Any) -> list[Any]:
    """Return Torch-Pruning's groups of channels that must be cut together, except what the head writes."""
    head = model.get_classifier()
    return list(graph.get_all_groups(ignored_layers=[head], root_module_types=[nn.Conv2d, nn.Linear]))


def list_writers(graph: Any, group: Any, names: Mapping[nn.Module, str]) -> list[str]:
    """Return the names of the convolutions and matrix products whose outputs a group cuts."""
    return [names[dependency.target.module] for dependency, _ in group
            if graph.is_out_channel_pruning_fn(dependency.handler)
            and isinstance(dependency.target.module, nn.Conv2d | nn.Linear)]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shapes of a module's input and output: [channels, side] of a map, [channels] of a vector, () of others. A
    module reads what another one writes if its `given` equals the `made` of the other."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    given: int
    made: int


def _record_forward(model: nn.Module, channels: int, has_tokens: bool
                    ) -> tuple[dict[str, _Shape], bool, dict[str, int]]:
    """Run a network once on zeros; some of its values are tokens [n, t, c] if it `has_tokens`.

    Returns:
        The shapes of all modules that ran, in their order. True if a softmax weighs places of its maps: Torch-Pruning
        takes minutes for such networks. The channels of each attention, by the name of the linear layer before it.
    """
    shapes: dict[str, _Shape] = {}
    inputs: dict[str, int] = {}  # the value that each module read
    live_values: list[Any] = []  # keeps all values in memory, so that each has an id of its own
    attention, last_linear = dict[str, int](), [""]  # last: the linear layer that ran last

    def shape(module: nn.Module, values: Any) -> tuple[int, ...]:
        if has_tokens and torch.is_tensor(values) and values.ndim == 3:  # [n, t, c]: a square of them, and a few more
            return values.shape[2], isqrt(values.shape[1])
        if not torch.is_tensor(values) or values.ndim not in (2, 4):
            return ()
        if isinstance(module, nn.Linear) and values.ndim == 4:  # [n, h, w, c]
            return values.shape[3], values.shape[2]
        return tuple(values.shape[1:3])

    def note_output(module: nn.Module, given: Any, out: Any, name: str) -> None:
        live_values.extend((given, out))
        if isinstance(module, nn.Linear):
            last_linear[:] = [name]
        shapes[name] = _Shape(shape(module, given[0]) if len(given) == 1 else (), shape(module, out), inputs[name],
                              identity(out))

    def identity(value: Any) -> int:
        return hash((id(value), getattr(value, "_version", 0)))  # a change in place gives a new version

    def note_input(module: nn.Module, given: Any, name: str) -> None:
        inputs[name] = identity(given[0]) if given else 0

    class Watch(torch.overrides.TorchFunctionMode):
        attends: bool = False

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
            # A softmax over the last axes, not over the batch or channels, weighs places of a map.
            if name == "softmax":
                dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else -1)
                self.attends = self.attends or not isinstance(dim, int) or dim % out.ndim > 1
            if name == "scaled_dot_product_attention":
                self.attends = True
                if args[0].shape == args[1].shape:
                    attention[last_linear[0]] = args[0].shape[1] * args[0].shape[3]
            return out

    hooks = [hook for name, module in model.named_modules() if name for hook in (
        module.register_forward_pre_hook(partial(note_input, name=name)),
        module.register_forward_hook(partial(note_output, name=name)))]
    with Watch() as watch, torch.no_grad():  # tensors of inference_mode have no version
        model(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    for hook in hooks:
        hook.remove()
    return shapes, bool(watch.attends), attention


def _block_runs(model: nn.Module, shapes: Mapping[str, _Shape]) -> tuple[tuple[BlockRun, ...], list[str]]:
    """Return the runs of blocks that may be removed, outermost first, and all blocks of their containers."""
    runs: list[BlockRun] = []
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{block}.") for block in blocks):  # it is inside of a block that was found
            continue
        children = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
        inner_blocks = [(child, part) for child, part in children if not isinstance(part, nn.Sequential | nn.ModuleList)
                        and sum(isinstance(each, nn.Conv2d | nn.Linear) for each in part.modules()) >= LEAST_LAYERS]
        kinds = [type(part) for _, part in inner_blocks]
        rows, written_values = [list[str]()], set[int]()  # the values that the children so far wrote
        for child, part in children:
            shape = shapes.get(child)
            # A block can be removed if it reads just what a child before it wrote: if the parent adds to that value, or
            # joins it with others, the block reads another value. The first block of a container always stays.
            if (shape is not None and (child, part) in inner_blocks[1:] and kinds.count(type(part)) > 1
                    and shape.reads and (shape.reads == shape.writes and shape.given in written_values)):
                rows[-1].append(child)
            elif (child, part) in inner_blocks:
                rows.append([])
            written_values |= {shape.made} if shape is not None else set()
        rows = [row for row in rows if row]
        runs += [BlockRun((name or "blocks") if len(rows) == 1 else row[0], tuple(row)) for row in rows]
        blocks += [child for child, _ in inner_blocks] if rows else []
    return tuple(runs), blocks


def _stages(model: nn.Module, shapes: Mapping[str, _Shape]) -> tuple[str, ...]:
    """Return the stages: modules of one container, each of which reads what the one before it writes. Of all such rows
    it is the one that changes the shape most often; () if none does so twice."""
    rows: list[list[str]] = []
    for name, module in model.named_modules():
        rows.append([])
        for child, part in module.named_children():
            path = f"{name}.{child}" if name else child
            shape = shapes.get(path)
            # A stage reads and writes maps, has children, and has layers with weights.
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
    """Return whether it is a plain transformer over patches of the image, as timm's ViT and DeiT are: with norms before
    attention and before the perceptron, and a sum behind each."""
    timm = import_timm()
    plain = timm.models.vision_transformer
    return isinstance(model, plain.VisionTransformer) and type(model.patch_embed) is timm.layers.PatchEmbed and all(
        type(block) is plain.Block and isinstance(block.norm1, nn.LayerNorm) for block in model.blocks)


def _perceptrons(model: nn.Module, shapes: Mapping[str, _Shape]) -> dict[str, str]:
    """Return each perceptron, a module whose only layers are two linear ones: the second by the name of the first."""
    pairs = {}
    for name, module in model.named_modules():
        layers = [(part, each) for part, each in module.named_modules() if any(True for _ in each.parameters(False))]
        if name in shapes and shapes[name].reads == shapes[name].writes and [
                isinstance(each, nn.Linear) for _, each in layers] == [True, True]:
            (first, writer), (second, reader) = layers
            if writer.out_features == reader.in_features:
                pairs[f"{name}.{first}"] = f"{name}.{second}"
    return pairs


def _block_of(layer: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if is_inside(layer, [block])), "")


def _groups(model: nn.Module, channels: int, shapes: Mapping[str, _Shape], blocks: Sequence[str],
            readers: Mapping[str, str] | None) -> tuple[list[ChannelGroup], dict[str, tuple[str, ...]]]:
    """Return the groups of channels that may be cut, and the layers that write each, by the group's name. Of a
    transformer, which has `readers`, these are the channels between the two layers of each perceptron."""
    if readers is not None:
        inner = [ChannelGroup(first, n, f"{INNER}{_stride(shapes[first].writes)}") for first in readers
                 if (n := channels_of(model.get_submodule(first))[1]) > DIVISOR]
        return inner, {group.name: (group.name,) for group in inner}
    try:
        with _bounded():
            graph = build_graph(model, channels)
            pruned_together = list_groups(graph, model)
    except Exception:  # Torch-Pruning cannot follow some graphs: blocks may still be removed
        return [], {}
    names = {module: name for name, module in model.named_modules()}
    groups: list[ChannelGroup] = []
    layers: dict[str, tuple[str, ...]] = {}
    order = {name: place for place, name in enumerate(shapes)}  # the graph's own order differs from process to process
    for group in pruned_together:
        writers = sorted((name for name in list_writers(graph, group, names) if name in order), key=order.__getitem__)
        modules = [dependency.target.module for dependency, _ in group]
        stride = _stride(shapes[writers[0]].writes) if writers else 0
        n = len(group[0].idxs)
        # Not cut: channels of single pixels, groups too small, channels of grouped convolutions that are not depthwise.
        if not stride or n <= DIVISOR or any(isinstance(module, nn.Conv2d) and 1 < module.groups < module.in_channels
                                             for module in modules):
            continue
        # Written inside of one block: INNER. By layers of several blocks, or by several outside: STREAM. Else OUTER.
        inside = {_block_of(writer, blocks) for writer in writers}
        kind = STREAM if len(inside) > 1 else INNER if inside != {""} else OUTER if len(writers) == 1 else STREAM
        groups.append(ChannelGroup(writers[0], n, f"{kind}{stride}"))
        layers[writers[0]] = tuple(writers)
    return groups, layers


class _Placed(NamedTuple):
    """An operator that runs, its layer, and its stage: from 1 on, 0 before all stages, and their number + 1 behind."""

    layer: str
    stage: int
    operator: Operator


def _operators(model: nn.Module, shapes: Mapping[str, _Shape], stages: Sequence[str], blocks: Sequence[str],
               attention: Mapping[str, int]) -> Iterator[_Placed]:
    """Yield the operators that run, in order. Attention comes after the layer that writes its inputs."""
    is_first, stage_behind = True, 0
    for name, shape in shapes.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        kernel = module.kernel_size[0] if isinstance(module, nn.Conv2d) else 1
        strides = _stride(shape.reads), _stride(shape.writes)
        block, stage_module = _block_of(name, blocks), _block_of(name, stages)
        if is_first:
            role = "stem"
        elif not strides[0]:
            # It reads a vector: squeeze-and-excite if it is in a stage or block, otherwise a layer behind the pooling.
            role = "se" if stage_module or (block and not stages) else "linear"
        elif isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
            role = "depthwise"
        else:
            role = "pointwise" if kernel == 1 else "dense"
        is_first = False
        stage = stages.index(stage_module) + 1 if stage_module else stage_behind
        stage_behind = len(stages) + 1 if stage and stages else 0
        yield _Placed(name, stage, (block, role, *channels_of(module), kernel, *strides))
        if n := attention.get(name):
            yield _Placed(name, stage, (block, ATTENTION, n, n, 1, *strides))


def _stride(shape: tuple[int, ...]) -> int:
    """Return the stride of a map, the side of the image over its own; 0 for one pixel, and for what is no map."""
    return round(TRACED_PX / shape[1]) if len(shape) == 2 and shape[1] > 1 else 0
