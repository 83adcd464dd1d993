"""The cuts of a timm network: what can be cut out of it, its obvious cuts, and the weights that it has."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError, DataError, SpaceError
from hwnas.lazy import nn, torch
from hwnas.networks.baselines import original
from hwnas.networks.cutting import apply_cut
from hwnas.networks.tracing import INNER, OUTER, STREAM, TRACED_PX, TracedNetwork, channels_of, trace
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_pretrained
from hwnas.space.architecture import Origin
from hwnas.space.blocks.block import ATTENTION
from hwnas.space.family import DEPTH, WHOLE, WIDTH, ChannelGroup, Family, write_family
from hwnas.space.search_space import SearchSpace

if TYPE_CHECKING:
    from hwnas.networks.network import Shape
    from hwnas.space.architecture import Architecture

SHARES = {INNER: (1.0, 0.75, 0.5, 0.375, 0.25), STREAM: (1.0, 0.75, 0.5), OUTER: (1.0, 0.5, 0.25)}
SIZES = tuple(sixteenths / 16 for sixteenths in range(16, 5, -1))  # of the images' side
SIZE_STEP = 4  # px
ONE_PIXEL = 2  # the last stride of a network that is made for larger images may meet a map of one pixel
TRACING_S = 60.0  # of this thread, for finding out what may be cut; a busy machine takes longer


def around_of(name: str, pad: str) -> str:
    """`Architecture.around` for timm's network `name` whose weights need this padding (empty: the network's own)."""
    return str(Origin(name, pad if pad and not _pads_alike(name) else ""))


@cache
def _pads_alike(name: str) -> bool:
    """Return whether timm's own network has TensorFlow's padding."""
    with torch.random.fork_rng(devices=[]):
        return any(type(module).__name__ == "Conv2dSame" for module in original(name).modules())


def obvious_cuts(around: str, images: Shape, smaller: Sequence[int]) -> dict[str, Architecture]:
    """The obvious cuts of a network by name, for images of this shape. ConfigError where it cannot be cut, or not for
    `smaller` images too."""
    content = family_content(around, images.channels, images.classes, images.image_size, smaller)
    space = SearchSpace.of_content(content, around, channels=images.channels, classes=images.classes)
    return {name: cut for name, cut in space.known.items() if name != WHOLE}


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
    """Raise SpaceError if a space's file says another network than the one that it is cut from."""
    for said in space.families:
        own = trace(said.around, space.channels, space.classes).family(said.choices(), said.shares)
        traced, given = ((each.activation, {*each.runs}, {*each.groups}, each.operators) for each in (own, said))
        if traced != given or not {*said.depths} <= {*own.depths}:
            raise SpaceError(f"{space.source}: it does not say what {said.around} is. Only image_size, shares, choices "
                             "that are fewer, and known may be others than a search writes.")


@lru_cache(maxsize=64)
def find_family(around: str, channels: int, classes: int) -> Family:
    """Return what of a network can be cut: each part was tried alone and with all others, and leaves it running.

    Raises:
        ConfigError: Nothing, or the network cannot be traced.
    """
    began = time.thread_time()
    traced = trace(around, channels, classes)
    with torch.random.fork_rng(devices=[]):
        model = original(around, channels, classes, TRACED_PX).eval()
    groups = traced.whole.groups
    shares = {tie: _different(SHARES[tie.rstrip("0123456789")], [group for group in groups if group.tie == tie])
              for tie in traced.whole.shares}

    def can_be_cut(names: Collection[str], ties: Collection[str]) -> bool:
        if time.thread_time() - began > TRACING_S:
            raise ConfigError(f"around={around}: it takes more than {TRACING_S:.0f} s to find out what may be cut. "
                              "Give another network.")
        return _can_be_cut(model, traced, traced.family(names, {tie: shares[tie] for tie in ties}), channels)

    names = [name for name in traced.whole.choices() if not name.startswith(WIDTH)]
    ties = [tie for tie, of in shares.items() if len(of) > 1]
    if not all(can_be_cut([each for each in part if each in names], [each for each in part if each in shares])
               for part in _parts([*names, *ties])):
        names = [name for name in names if can_be_cut([name], ())]
        ties = [tie for tie in ties if can_be_cut((), [tie])]
    together = ((), names, [name for name in names if name != DEPTH])  # fewer stages hide what the last ones are
    fits = all(can_be_cut(each, ties) for each in together)
    if not fits and ties:
        ties = []
        fits = all(can_be_cut(each, ties) for each in together)
    if not fits or not (names or ties):
        raise ConfigError(f"around={around}: it has no alike blocks in a row that may go, and no channels that may. "
                          "Give another network.")
    return traced.family(names, {tie: shares[tie] for tie in ties})


def _parts(items: Sequence[str]) -> Iterator[list[str]]:
    """All of them, and parts such that of any two items each is in one without the other: so that what can be cut in
    all parts can be cut alone. There are two parts for each binary digit of the items' numbers."""
    yield [*items]
    for digit in range((len(items) - 1).bit_length()):
        for value in (0, 1):
            yield [item for number, item in enumerate(items) if number >> digit & 1 == value]


def _can_be_cut(model: nn.Module, traced: TracedNetwork, family: Family, channels: int) -> bool:
    """Return whether a network runs with the least of everything that may be cut, and is what the family says then."""
    least = {name: min(choices) for name, choices in family.choices().items()}
    try:
        with torch.random.fork_rng(devices=[]):
            cut = apply_cut(deepcopy(model), traced, family, least, channels)
        with torch.inference_mode():
            cut(torch.zeros(1, channels, TRACED_PX, TRACED_PX))
    except Exception:  # a network that is cut wrongly has errors of its own
        return False
    told = Counter((n_in, n_out) for _, role, n_in, n_out, *_ in family.cut(least)
                   if role != ATTENTION)
    return told == Counter(channels_of(module) for module in cut.modules() if isinstance(module, nn.Conv2d | nn.Linear))


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
    patch = trace(around, channels, classes).patch
    step = patch or SIZE_STEP
    smaller = image_sizes or [round(image_size * share / step) * step for share in SIZES]
    last = max(operator.stride_out for operator in family.operators)
    wanted = {image_size, *(px for px in smaller if px < image_size and (image_sizes or ONE_PIXEL * px >= last))}
    sizes = _fitting(around, channels, patch, tuple(sorted(wanted, reverse=True)))
    if refused := [px for px in (image_size, *image_sizes) if px in wanted and px not in sizes]:
        why = f"its images are multiples of {patch} px, and {{}} is none" if patch else "images of {} px are too small"
        raise ConfigError(f"around={around}: {why.format(min(refused))}.")
    family = replace(family, image_sizes=sizes)
    known = dict[str, tuple[str, dict[str, float]]]()  # by id: some cuts are no other networks
    for name, cut in (WHOLE, {}), *_obvious(family):
        known.setdefault(family.member(cut, channels, classes).id, (name, cut))
    return write_family(family, dict(known.values()),
                        f"What can be cut out of {around}: stages, blocks, channels, smaller images.")


def _obvious(family: Family) -> Iterator[tuple[str, dict[str, float]]]:
    """The cuts that anybody would try first, by name: one block a stage, half of a transformer's; one or two without
    the stages of the smallest maps, with half a head; then with half the channels inside of blocks, or of all in one
    block a stage."""
    attends = any(operator.role == ATTENTION for operator in family.operators)
    short = {run.name: float(len(run.blocks) // 2 if attends else 0) for run in family.runs}
    yield "cut_short", short
    if depths := [depth for depth in family.depths if depth < family.n_stages
                  and 2 * family.stride_of(depth) >= max(each.stride_out for each in family.operators)]:
        heads = {group.tie for group in family.groups for each in family.operators
                 if each.stage > family.n_stages and group.name in dict(each.writes)}
        for name, blocks in (("cut_early", 0), ("cut_early_two", 1)):
            runs = {run.name: float(min(blocks, len(run.blocks))) for run in family.runs}
            yield name, {DEPTH: min(depths), **runs, **{WIDTH + tie: 0.5 for tie, shares in family.shares.items()
                                                        if tie in heads and 0.5 in shares}}
    narrow = {WIDTH + tie: 0.5 for tie, shares in family.shares.items() if 0.5 in shares}
    yield "cut_thin", {name: share for name, share in narrow.items() if name.startswith(WIDTH + INNER)}
    yield "cut_short_narrow", {**short, **narrow}


@lru_cache(maxsize=64)
def _fitting(around: str, channels: int, patch: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of images on which a network runs: for one that reads patches, in whole ones."""
    with torch.random.fork_rng(devices=[]):
        model: Any = original(around, channels).eval()

    def takes(px: int) -> bool:
        try:
            if patch:
                model.set_input_size(px)
            with torch.inference_mode():
                model(torch.zeros(1, channels, px, px))
        except Exception:  # networks have errors of their own for images that are too small
            return False
        return True

    return tuple(px for px in sizes if not (patch and px % patch) and takes(px))


def _different(shares: Sequence[float], groups: Sequence[ChannelGroup]) -> tuple[float, ...]:
    """The shares that leave groups differently wide."""
    kept = {share: tuple(group.kept(share) for group in groups) for share in shares}
    return tuple(share for at, share in enumerate(shares) if kept[share] not in [kept[each] for each in shares[:at]])
