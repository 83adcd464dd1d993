"""Cuts of a timm network as a search space: what may be left out of it, and what a cut network keeps of its weights.

Stages lose their last blocks, the network its last stages. Blocks get narrower, thinner inside, smaller kernels, no
squeeze-and-excite, or one dense convolution each. Channels are kept by importance: the scale of their batch norms,
times what reads them. A residual stream has one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError, DataError, SpaceError
from hwnas.lazy import LazyModule
from hwnas.networks.baselines import original
from hwnas.networks.build import build, settings_of
from hwnas.networks.cuts import Cut, obvious
from hwnas.networks.parts import single_blocks
from hwnas.networks.tracing import build_member, family_content, trace
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_pretrained
from hwnas.space.architecture import Architecture, BlockDef, Origin
from hwnas.space.blocks.block import ACTIVATIONS, GATES, KINDS, round_to_divisor
from hwnas.space.family import Family, Member
from hwnas.space.reading import ONE_PIXEL
from hwnas.space.search_space import WHOLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    import hwnas.networks.modules as modules
    from hwnas.space.search_space import SearchSpace
else:
    modules = LazyModule("hwnas.networks.modules")
    nn = LazyModule("torch.nn")
    torch = LazyModule("torch")

_KINDS = {"DepthwiseSeparableConv": "ds", "InvertedResidual": "ir", "EdgeResidual": "er", "ConvBnAct": "cn"}
_SEPARABLE = ("ds", "dsa")
_POOLED = "MobileNetV3"  # timm's class whose head stands behind the pooling
_WIDTHS = (1, 0.75, 0.5)  # of stem and stages
_INNER = (1, 2 / 3, 1 / 2, 1 / 3)  # of an expansion
_DENSE = (1 / 2, 1 / 3)  # of an expansion, where a block becomes a dense one
_SQUEEZED = 0.25  # share of channels that MobileNetV3's squeeze-and-excite keeps
_DENSE_MOST = 48  # channels that a dense block may read: more cost more than they are worth
_HEADS = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 0)  # 0: none
_SIZES = tuple(sixteenths / 16 for sixteenths in range(16, 5, -1))  # of the images' size, down to 3/8
_SIZE_STEP = 4  # px
_SMALL = 32  # px up to which a stem of stride 1 is tried as well


def origin_of(around: str, channels: int, classes: int, image_size: int) -> Architecture:
    """The whole network in the words of search spaces. ConfigError says what of it these words cannot say."""
    model: Any = original(around, channels, classes)
    if type(model).__name__ not in ("EfficientNet", _POOLED) or not all(
            hasattr(model, name) for name in ("conv_stem", "bn1", "blocks", "conv_head", "classifier")):
        raise _uncut(around, f"timm builds it as {type(model).__name__}, and EfficientNet and MobileNetV3 are what can "
                             "be cut (EfficientNet and Lite, MobileNetV1 to V3, MnasNet, FBNet-C, TinyNet and kin)")
    norm: Any = model.bn1
    if not isinstance(norm, nn.BatchNorm2d):
        raise _uncut(around, f"its norms are {type(model.bn1).__name__}, and batch norms say which channels matter")
    strange = next((block for stage in model.blocks for block in stage if _kind(block) is None), None)
    if strange is not None:
        raise _uncut(around, f"it has blocks of the kind {type(strange).__name__}")
    activation = _activation(around, getattr(norm, "act", None))
    stages = tuple(tuple(map(str, _stage(around, index, stage, activation)))
                   for index, stage in enumerate(model.blocks))
    if not isinstance(getattr(model, "norm_head", nn.Identity()), nn.Identity):
        raise _uncut(around, "its head has a norm behind the pooling")
    architecture = Architecture(
        stages=stages, stem_width=model.conv_stem.out_channels, stem_stride=model.conv_stem.stride[0],
        head=getattr(model.conv_head, "out_channels", 0), activation=activation,
        image_size=image_size, channels=channels, classes=classes, around=around,
        pooled=type(model).__name__ == _POOLED)
    built: Any = build(architecture)
    mine, its = built.state_dict(), model.state_dict()
    other = next((name for name in its if name not in mine or mine[name].shape != its[name].shape), None)
    if other is not None or len(mine) != len(its):
        raise _uncut(around, f"its {other or 'layers'} cannot be said by kind, kernel, expansion and channels")
    if _layers(model) != _layers(built):
        raise _uncut(around, "it has layers that cannot be said by kind, kernel, expansion and channels")
    if any(block.has_skip != copy.has_skip for stage, copies in zip(model.blocks, built.blocks, strict=True)
           for block, copy in zip(stage, copies, strict=True)):
        raise _uncut(around, "some of its blocks add their input and others of the same shape do not")
    return architecture


def _layers(model: nn.Module) -> Counter[str]:
    """How many modules of each type there are below the network itself."""
    return Counter(type(module).__name__ for name, module in model.named_modules() if name)


def find_start(around: str, options: PretrainedOptions, channels: int) -> Pretrained:
    """The weights of the network that `around` names. MissingWeights, ConfigError, DataError as of `find_pretrained`,
    and DataError where they ask for another padding."""
    name = Origin.parse(around).name
    pretrained, pad = find_pretrained(name, options, channels)
    if around_of(name, pad) != around:
        raise DataError(f"pretrained weights {pretrained.path} ask for another padding than that of {around}, which "
                        "the networks are cut from. Give the weights that they were searched with.")
    return pretrained


def check_cuts(space: SearchSpace) -> None:
    """SpaceError, which names the key, where a space allows what is not in the network that it is cut from."""
    definition = space.definition
    if isinstance(definition, Family):
        traced = trace(definition.around, space.channels, space.classes)
        family = traced.family([run.name for run in definition.runs], definition.shares)
        if (family.runs, family.groups, family.operators) != (definition.runs, definition.groups, definition.operators):
            raise SpaceError(f"{space.source}: runs, groups and operators are not those of {definition.around}. Only "
                             "image_size, shares and known may be others than a search writes.")
        return
    whole = origin_of(definition.around, space.channels, space.classes, max(space.image_sizes))
    wholes = [single_blocks(stage) for stage in whole.block_defs()]
    if definition.pooled != whole.pooled:
        raise SpaceError(f"{space.source}: pooled must be {str(whole.pooled).lower()}, as {definition.around} has it.")
    bounds: list[tuple[str, float, float]] = [
        ("stages", len(definition.stages), len(wholes)), ("head", max(definition.heads), whole.head),
        ("stem.width", max(definition.stem_widths), whole.stem_width)]
    for index, (stage, blocks) in enumerate(zip(definition.stages, wholes, strict=False)):
        rows = [op.of_blocks(min(max(stage.repeats), len(blocks))) for op in stage.ops]
        pairs = [pair for row in rows for pair in zip(row, blocks, strict=False)]
        kinds = {kind for block in blocks for kind in _becomes(block)}
        se, stride = max(block.se for block in blocks), blocks[0].stride
        if any(op.kind not in _becomes(block) or (se and op.has_se and not block.se) for op, block in pairs) \
                or stage.stride != stride or {*stage.ses} - {0, se}  \
                or stage.activation != blocks[0].activation or (se and stage.hard_gate != any(
                    block.hard_gate for block in blocks)):
            raise SpaceError(f"{space.source}: stages[{index}] must have the stride {stride}, operations of the "
                             f"kind {' or '.join(sorted(kinds))} and se 0 or {se:g}, and activation and gate, as "
                             f"{definition.around} has.")
        bounds += [(f"stages[{index}].{key}", value, most) for key, value, most in (
            ("channels", max(stage.channels), blocks[0].channels), ("repeats", max(stage.repeats), len(blocks)),
            *(("kernel", op.kernel or max(stage.kernels), block.kernel) for op, block in pairs),
            *(("op", op.expansion, block.expansion) for op, block in pairs))]
    for key, value, most in bounds:
        if value > most:
            raise SpaceError(f"{space.source}: {key} must not be above {most:g}, which {definition.around} has, got "
                             f"{value:g}.")


def _becomes(block: BlockDef) -> set[str]:
    """The kinds that a block of the original may have in a cut."""
    return {block.kind, *(name for name, rules in KINDS.items() if block.kind in rules.cut_from)}


def around_of(name: str, pad: str) -> str:
    """`Architecture.around` for timm's network `name` whose weights need this padding (empty: the network's own)."""
    return str(Origin(name, pad if pad and settings_of(name)["pad_type"] != pad else ""))


def space_content(around: str, channels: int, classes: int, image_size: int, image_sizes: Sequence[int] = ()
                  ) -> dict[str, Any]:
    """The content of a search space's YAML file: cuts of the network that `around` names, for images of `image_size`
    px and, for a cut, of smaller ones (`image_sizes`; () chooses). ConfigError where it cannot be cut."""
    try:
        whole = origin_of(around, channels, classes, image_size)
    except Unsaid:
        return family_content(around, channels, classes, image_size, image_sizes)
    originals = [single_blocks(stage) for stage in whole.block_defs()]
    blocks = [stage[0] for stage in originals]
    smaller = image_sizes or [round_to_divisor(image_size * share, _SIZE_STEP) for share in _SIZES]
    sizes = sorted({image_size, *(size for size in smaller if size < image_size)})
    strides = {whole.stem_stride, 1} if image_size <= _SMALL else {whole.stem_stride}
    n = len(blocks)
    while max(strides) * _product(blocks[:n]) > ONE_PIXEL * min(sizes):
        if len(sizes) > 1:
            if sizes.pop(0) in image_sizes:
                raise ConfigError(f"image_sizes: {min(image_sizes)} px is too small for {around}, whose stride is "
                                  f"{max(strides) * _product(blocks[:n])}. Give larger sizes.")
        elif max(strides) > 1:
            strides = {1}
        else:
            n -= 1
    blocks = blocks[:n]
    if not blocks:
        raise _uncut(around, f"images of {image_size} px are too small for it")
    cuts = [cut for cut in obvious(original(around)) if len(cut.blocks) <= n]
    heads = sorted({round_to_divisor(whole.head * share) if share else 0 for share in _HEADS} | {whole.head}
                   | {cut.head or whole.head for cut in cuts}, reverse=True) if whole.head else [0]
    stages, before = [], _widths(whole.stem_width, blocks[0], ())
    stem = {"width": before, "stride": sorted(strides, reverse=True)}
    for index, block in enumerate(blocks):
        following = blocks[index + 1] if index + 1 < n else None
        choices = _choices(originals[index], before, following)
        if (following and _joined(block, following)) or (index and _joined(blocks[index - 1], block)):
            choices |= {"op": choices["op"][:1], "kernel": choices["kernel"][:1]}  # or two depths could be one network
        if following and _joined(block, following) and _shapes(originals[index]) & _shapes(originals[index + 1]):
            choices["repeats"] = choices["repeats"][:1]
        stages.append(choices)
        before = stages[-1]["channels"]
    content = {
        "description": f"Cuts of {around}: fewer blocks and stages, narrower ones, smaller images.", "around": around,
        "image_size": sizes[::-1], "stem": stem, "head": heads, "divisor": 1,
        "activation": list(dict.fromkeys([whole.activation, *(
            ["relu6"] if whole.activation in ("swish", "hard_swish") else [])])),
        "depth": list(range(max(1, n // 2), n + 1)), "stages": stages, **({"pooled": True} if whole.pooled else {})}
    known = {WHOLE: Cut(tuple(map(len, originals[:n])))}
    cuts = [Cut(tuple(max(kept, stage["repeats"][-1]) for kept, stage in zip(cut.blocks, stages, strict=False)),
                cut.head) for cut in cuts]
    known |= {f"cut_{cut}": cut for cut in cuts}
    content["known"] = {name: _known(cut, content, whole) for name, cut in known.items()}
    return content


def _joined(block: BlockDef, following: BlockDef) -> bool:
    """Whether the blocks of the next stage could be of this one."""
    return following.stride == 1 and following.channels == block.channels


def _shapes(blocks: Sequence[BlockDef]) -> set[tuple[str, float, int]]:
    return {(block.kind, block.expansion, block.kernel) for block in blocks}


def _product(blocks: Sequence[BlockDef]) -> int:
    total = 1
    for block in blocks:
        total *= block.stride
    return total


def _widths(channels: int, following: BlockDef | None, taken: Sequence[int]) -> list[int]:
    """Choices of a width, its own first. None is one that a stage of stride 1 behind it may have, nor one `taken`
    before it: a residual would come about that the original lacks."""
    barred = set(taken)
    if following is not None and following.stride == 1:
        barred |= {following.channels}
    widths = [channels, *(round_to_divisor(channels * share) for share in _WIDTHS)]
    return [width for width in dict.fromkeys(widths) if width == channels or (width < channels and width not in barred)]


def _choices(blocks: Sequence[BlockDef], before: Sequence[int], following: BlockDef | None) -> dict[str, Any]:
    """The section of a stage: what `blocks`, the original's, may become."""
    first = blocks[0]
    channels = _widths(first.channels, following, before if first.stride == 1 else ())
    rows = [_row(blocks, share, "ir") for share in _INNER]
    if first.kind == "ir" and max(before) <= _DENSE_MOST:
        rows += [_row(blocks, share, "er") for share in _DENSE]
    ops = {row.partition("+")[0]: row for row in reversed(rows)}  # two must not begin with one block
    kernel, se = max(block.kernel for block in blocks), max(block.se for block in blocks)
    return {"op": [ops[start] for start in dict.fromkeys(row.partition("+")[0] for row in rows)],
            "kernel": [kernel, *([3] if kernel > 3 else [])],
            "se": [se, *([0] if se else [])], "skip": first.skip, "channels": channels,
            "repeats": list(range(len(blocks), 0, -1)), "stride": first.stride,
            **({"activation": first.activation} if first.activation else {}),
            **({"gate": GATES[1]} if any(block.hard_gate for block in blocks) else {})}


def _row(blocks: Sequence[BlockDef], share: float, residual: str) -> str:
    """What a stage of `blocks` is called with a share of their expansions; inverted residuals are of the kind
    `residual`."""
    kernel, se = max(block.kernel for block in blocks), max(block.se for block in blocks)
    words = []
    for block in blocks:
        word = residual if block.kind == "ir" else block.kind
        if block.rules.expands:
            word += f"_e{_expansion(block.expansion, share):g}"
        words.append(word + (f"_k{block.kernel}" if block.kernel < kernel else "")
                     + ("_se0" if block.rules.takes_se and block.se < se else ""))
    while len(words) > 1 and words[-1] == words[-2]:
        words.pop()
    return "+".join(words)


def _expansion(expansion: float, share: float) -> float:
    """A share of an expansion in halves, not below 1; its own as it is."""
    return expansion if share == 1 else max(1.0, round(2 * expansion * share) / 2)


def _known(cut: Cut, content: dict[str, Any], whole: Architecture) -> dict[str, Any]:
    """A network of the space under `known`: what `cut` leaves, otherwise as the original."""
    stages = content["stages"]
    kept = [*cut.blocks, *(stage["repeats"][-1] for stage in stages[len(cut.blocks):])]
    return {"stem.width": whole.stem_width, "stem.stride": content["stem"]["stride"][0], "depth": len(cut.blocks),
            "head": cut.head or whole.head, "activation": whole.activation, "repeats": kept,
            **{key: [stage[key][0] for stage in stages] for key in ("op", "kernel", "se", "channels")}}


class Unsaid(ConfigError):
    """Words cannot say what a network is made of."""


def _uncut(around: str, why: str) -> Unsaid:
    return Unsaid(f"around={around} cannot be cut: {why}. Choose another network, or give it as a baseline with "
                  "cuts=true.")


def _activation(around: str, act: object) -> str:
    layers = zip(ACTIVATIONS, modules.activation_layers(), strict=True)
    name = next((name for name, layer in layers if isinstance(act, layer)),
                None)
    if name is None:
        raise _uncut(around, f"its activation {type(act).__name__} is none of {', '.join(ACTIVATIONS)}")
    return name


def _stage(around: str, index: int, stage: Any, activation: str) -> list[BlockDef]:
    """The arch-def words of a stage of timm's blocks, one for each run of equal blocks."""
    blocks = [_block(around, block, activation) for block in stage]
    blocks = [replace(block, skip=blocks[-1].skip) for block in blocks]
    for values, what in (({block.channels for block in blocks}, "channels"),
                         ({block.activation for block in blocks}, "activation"),
                         ({(block.se, block.hard_gate) for block in blocks if block.se}, "squeeze-and-excite")):
        if len(values) > 1:
            raise _uncut(around, f"the blocks of its stage {index} differ in {what}")
    if any(block.stride != 1 for block in blocks[1:]):
        raise _uncut(around, f"blocks of its stage {index} behind the first have strides")
    runs: list[BlockDef] = []
    for block in blocks:
        if runs and replace(runs[-1], repeats=1, stride=block.stride) == block:
            runs[-1] = replace(runs[-1], repeats=runs[-1].repeats + 1)
        else:
            runs.append(block)
    return runs


def _block(around: str, block: Any, activation: str) -> BlockDef:
    """The words of one of timm's blocks in a network of this activation."""
    kind = str(_kind(block))
    read, _, wide, last = (getattr(block, name) for name in _PARTS[kind])
    if not isinstance(wide, nn.Conv2d) or not isinstance(read, nn.Conv2d) or len({*wide.kernel_size}) != 1:
        raise _uncut(around, "it has kernels of several sizes side by side")
    reads, mid = read.in_channels, last.in_channels if kind != "cn" else read.in_channels
    own = _activation(around, next(act for act in (getattr(block, name).act for name in ("bn1", "bn2", "bn3")
                                                   if hasattr(block, name)) if not isinstance(act, nn.Identity)))
    se, hard = _squeeze(around, getattr(block, "se", None), reads)
    residual = wide.stride[0] == 1 and reads == last.out_channels
    return BlockDef(kind, 1, wide.kernel_size[0], wide.stride[0], mid / reads if KINDS[kind].expands else 1.0,
                    last.out_channels, se, bool(block.has_skip) if residual else KINDS[kind].adds_input,
                    "" if own == activation else own, hard)


def _squeeze(around: str, se: Any, reads: int) -> tuple[float, bool]:
    """The share that squeeze-and-excite keeps, 0 for none, and whether its gate is hard, as BlockSpec says."""
    reduce = getattr(se, "conv_reduce", None)
    if reduce is None:
        return 0.0, False
    kept, inner = reduce.out_channels, reduce.in_channels
    if isinstance(se.gate, nn.Sigmoid):
        return round(kept / reads, 4), False
    if kept == round_to_divisor(inner * _SQUEEZED):
        return _SQUEEZED, True
    if kept % 8:
        raise _uncut(around, f"its squeeze-and-excite keeps {kept} of {inner} channels, which is no multiple of 8")
    return round(kept / inner, 4), True


def _kind(block: Any) -> str | None:
    """The kind of one of timm's blocks; None for one that no word stands for."""
    kind = _KINDS.get(type(block).__name__)
    return "dsa" if kind == "ds" and block.has_pw_act else kind


# Of each kind: the convolution that reads, the norm that the inner channels pass last, the wide convolution, the last.
_PARTS = {**dict.fromkeys(_SEPARABLE, ("conv_dw", "bn1", "conv_dw", "conv_pw")),
          "ir": ("conv_pw", "bn2", "conv_dw", "conv_pwl"), "er": ("conv_exp", "bn1", "conv_exp", "conv_pwl"),
          "cn": ("conv", "bn1", "conv", "conv")}
_LAST_NORM = {**dict.fromkeys(_SEPARABLE, "bn2"), "ir": "bn3", "er": "bn2", "cn": "bn1"}


def begin(architecture: Architecture, pretrained: Pretrained | None) -> nn.Module:
    """The network in train mode with what it keeps of the weights of the network that it is cut from; all else, such
    as the classifier, random (seed torch first). Without `pretrained` as `build`. DataError for weights that do not
    fit."""
    if pretrained is None:
        return build(architecture)
    if isinstance(architecture, Member):
        return build_member(architecture, pretrained)
    model = build(architecture)
    source = _source(architecture.around, architecture.channels, pretrained, str(pretrained.path))
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in select_weights(source, model, classifier=False).items():
            own[name].copy_(tensor)
    return model.train()


def select_weights(source: Any, model: Any, classifier: bool = True) -> dict[str, Tensor]:
    """What `model`, a cut, keeps of `source`, the network that it is cut from: values of its parameters and of its
    norms' statistics by name. What is not among them begins anew.

    `classifier`: also of the last layer, where it reads the same features and knows as many classes.
    """
    fill = _Selection(model)
    read = _stem(source, model, fill)
    for its, mine in zip(source.blocks, model.blocks, strict=False):
        read = _stage_from(its, mine, read, fill)
    if len(model.blocks) == len(source.blocks):
        heads = [isinstance(network.conv_head, nn.Conv2d) for network in (source, model)]
        if all(heads):
            read = _head_from(source, model, read, fill)
        if classifier and heads[0] == heads[1] and model.num_classes == source.num_classes:
            fill.layer(model.classifier, source.classifier.weight[:, read], source.classifier.bias)
    return fill.values


class _Selection:
    """The values of a cut's parameters and statistics by name, as they are selected layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Tensor] = {}
        self._names = {id(module): name for name, module in model.named_modules()}

    def layer(self, layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
        """Note what a layer of the cut has."""
        self._put(layer, "weight", weight)
        if bias is not None:
            self._put(layer, "bias", bias)

    def norm(self, its: nn.Module, mine: nn.Module, rows: Tensor) -> None:
        """Note what the cut's norm `mine` has of the whole network's: these `rows`."""
        for name in ("weight", "bias", "running_mean", "running_var"):
            self._put(mine, name, getattr(its, name)[rows])

    def _put(self, layer: nn.Module, name: str, value: Tensor) -> None:
        self.values[f"{self._names[id(layer)]}.{name}"] = value


@lru_cache(maxsize=2)
def _source(around: str, channels: int, pretrained: Pretrained, path: str) -> nn.Module:
    """The whole network with its weights: read once, cut often."""
    with torch.random.fork_rng(devices=[]):
        model = original(around, channels)
    pretrained.load(model, 1000)
    return model.eval()


def _best(importance: Tensor, n: int) -> Tensor:
    """Indices of the `n` most important channels, in their order."""
    importance = importance.detach()
    if n > len(importance):
        raise ConfigError(f"a cut network cannot have {n} channels where the original has {len(importance)}.")
    return importance.argsort(descending=True, stable=True)[:n].sort().values


def _stem(source: Any, model: Any, fill: _Selection) -> Tensor:
    """Fill the stem; the channels that it keeps."""
    rows = _best(source.bn1.weight.abs(), model.conv_stem.out_channels)
    fill.layer(model.conv_stem, source.conv_stem.weight[rows])
    fill.norm(source.bn1, model.bn1, rows)
    return rows


def _stage_from(its: Any, mine: Any, read: Tensor, fill: _Selection) -> Tensor:
    """Fill a stage from the original's blocks in their order; the channels that it hands on."""
    scales = [getattr(block, _LAST_NORM[str(_kind(block))]).weight.abs() for block in its]
    kind = str(_kind(mine[0]))
    rows = _best(torch.stack(scales[:len(mine)]).sum(0), getattr(mine[0], _PARTS[kind][3]).out_channels)
    for source, block in zip(its, mine, strict=False):
        _fill(source, block, read, rows, fill)
        read = rows
    return rows


def _head_from(source: Any, model: Any, read: Tensor, fill: _Selection) -> Tensor:
    """Fill the head's convolution, which reads the channels `read`, and its norm, if it has one; the channels that it
    hands on."""
    its, mine, norm = source.conv_head, model.conv_head, getattr(source, "bn2", None)
    rows = _best(its.weight.flatten(1).norm(dim=1) if norm is None else norm.weight.abs(), mine.out_channels)
    fill.layer(mine, its.weight[rows][:, read], None if mine.bias is None else its.bias[rows])
    if norm is not None:
        fill.norm(norm, model.bn2, rows)
    return rows


def _fill(its: Any, mine: Any, read: Tensor, write: Tensor, fill: _Selection) -> None:
    """Fill one block that reads the channels `read` and writes `write`."""
    old, new = (str(_kind(block)) for block in (its, mine))
    if new == "cn":
        fill.layer(mine.conv, _cropped(its.conv.weight[write][:, read], mine.conv))
        fill.norm(its.bn1, mine.bn1, write)
        return
    if new in _SEPARABLE:
        inner = read
        fill.layer(mine.conv_dw, _cropped(its.conv_dw.weight[inner], mine.conv_dw))
        fill.norm(its.bn1, mine.bn1, inner)
    else:
        norm, last = getattr(its, _PARTS[old][1]), its.conv_pwl.weight
        inner = _best(norm.weight.abs() * last[write].flatten(2).norm(dim=(0, 2)), mine.conv_pwl.in_channels)
        if new == "ir":
            fill.layer(mine.conv_pw, its.conv_pw.weight[inner][:, read])
            fill.norm(its.bn1, mine.bn1, inner)
            fill.layer(mine.conv_dw, _cropped(its.conv_dw.weight[inner], mine.conv_dw))
        else:
            dense = its.conv_exp.weight[inner][:, read] if old == "er" else _dense(its, inner, read)
            fill.layer(mine.conv_exp, _cropped(dense, mine.conv_exp))
        fill.norm(norm, getattr(mine, _PARTS[new][1]), inner)
    if hasattr(getattr(mine, "se", None), "conv_reduce"):
        _fill_squeeze(its.se, mine.se, inner, fill)
    last_name = _PARTS[new][3]
    fill.layer(getattr(mine, last_name), getattr(its, _PARTS[old][3]).weight[write][:, inner])
    fill.norm(getattr(its, _LAST_NORM[old]), getattr(mine, _LAST_NORM[new]), write)


def _cropped(weight: Tensor, layer: Any) -> Tensor:
    """The middle of a kernel, as large as the layer's."""
    off = (weight.shape[-1] - layer.kernel_size[0]) // 2
    end = off + layer.kernel_size[0]
    return weight[..., off:end, off:end]


def _dense(its: Any, inner: Tensor, read: Tensor) -> Tensor:
    """One dense kernel for an expansion and the depthwise convolution behind it, as if nothing but a scale lay between:
    norm statistics come with the training."""
    scale = its.bn1.weight / (its.bn1.running_var + its.bn1.eps).sqrt()
    point = (its.conv_pw.weight * scale[:, None, None, None])[inner][:, read]
    kernel: Tensor = point * its.conv_dw.weight[inner]
    return kernel


def _fill_squeeze(its: Any, mine: Any, inner: Tensor, fill: _Selection) -> None:
    rows = _best(its.conv_reduce.weight.flatten(1).norm(dim=1), mine.conv_reduce.out_channels)
    fill.layer(mine.conv_reduce, its.conv_reduce.weight[rows][:, inner], its.conv_reduce.bias[rows])
    fill.layer(mine.conv_expand, its.conv_expand.weight[inner][:, rows], its.conv_expand.bias[inner])
