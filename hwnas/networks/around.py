"""The cuts of a timm network: what can be cut out of it, its obvious cuts, their space, and its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.errors import CandidateError, ConfigError, DataError
from hwnas.lazy import torch
from hwnas.networks.baselines import original
from hwnas.networks.cutting import make_cut
from hwnas.networks.traced import DEPTH, TracedNetwork
from hwnas.networks.tracing import INNER, TRACED_PX, trace
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_pretrained
from hwnas.space.architecture import AROUND, WIDTH, Cut, origin_name
from hwnas.space.cuts import FAMILIES, IMAGE_SIZE, WHOLE, CutList, is_of_cuts
from hwnas.space.reading import SIZE_RULE, SpaceFile
from hwnas.space.search_space import SearchSpace, read_space_file

if TYPE_CHECKING:
    from hwnas.networks.network import Shape
    from hwnas.space.architecture import Architecture

SIZES = tuple(sixteenths / 16 for sixteenths in range(16, 5, -1))  # shares of the images' side
SIZE_STEP = 4  # px; the image sizes that are chosen here are multiples of it
ONE_PIXEL = 2  # an image may be half as large as the last stride: the last layer with a stride then reads one pixel
_KEYS = ("description", "around", IMAGE_SIZE, "choices", "known")
_MOST = 100  # largest number of networks in a file


@cache
def around_of(name: str, pad: str) -> str:
    """Return `Architecture.around` for timm's network `name` and the padding of its weights (empty: its own)."""
    if pad:
        with torch.random.fork_rng(devices=[]):
            if any(type(module).__name__ == "Conv2dSame" for module in original(name).modules()):
                pad = ""  # the network has this padding without an option
    return f"{name}+{pad}" if pad else name


def obvious_cuts(around: str, images: Shape, smaller: Sequence[int]) -> dict[str, Architecture]:
    """Return the obvious cuts of a network by name, for images of this shape. Raises ConfigError if it cannot be cut,
    or not for one of the `smaller` image sizes."""
    content = describe_cuts(around, images.channels, images.classes, images.image_size, smaller)
    return {name: cut for name, cut in space_of_cuts([content], images.channels, images.classes).known.items()
            if name != WHOLE}


def find_start(around: str, options: PretrainedOptions, channels: int) -> Pretrained:
    """Return the weights of the network that `around` names. Raises MissingWeights, ConfigError or DataError as
    `find_pretrained` does, and DataError if the weights need another padding."""
    name = origin_name(around)
    pretrained, pad = find_pretrained(name, options, channels)
    if around_of(name, pad) != around:
        raise DataError(f"pretrained weights {pretrained.path} ask for another padding than that of {around}, which "
                        "the networks are cut from. Give the weights that they were searched with.")
    return pretrained


@lru_cache(maxsize=64)
def find_cuts(around: str, channels: int, classes: int) -> tuple[TracedNetwork, dict[str, dict[str, float]]]:
    """Return a network as it was traced, and what its obvious cuts keep, by name: the cuts that run and cost less.

    Raises:
        ConfigError: There are none, or the network cannot be traced.
    """
    traced = trace(around, channels, classes)
    whole_channels = {name: options for name, options in traced.choices.items() if not name.startswith(WIDTH)}
    no_depth = {name: options for name, options in traced.choices.items() if name != DEPTH}
    # If an obvious cut does not run, stages or channels were traced wrongly: try without stages, then without channels.
    for choices in (traced.choices, no_depth, whole_channels):
        traced = replace(traced, choices=choices)
        cuts = {name: kept for name, kept in _obvious(traced) if kept}
        macs = dict[str, int]()
        for name, kept in cuts.items():
            with suppress(CandidateError):
                macs[name] = make_cut(traced, kept, TRACED_PX).macs
        if macs.keys() == cuts.keys():
            break
    # A cut may cost more than the whole: without a stage that halves maps, the maps behind it are larger.
    whole_macs = make_cut(traced, {}, TRACED_PX).macs
    smaller_cuts = {name: cuts[name] for name in macs if macs[name] < whole_macs}
    if not smaller_cuts:
        raise ConfigError(f"around={around}: it has no alike blocks in a row that may go, and no channels that may. "
                          "Give another network.")
    return traced, smaller_cuts


def describe_cuts(around: str, channels: int, classes: int, image_size: int, image_sizes: Sequence[int] = ()
                  ) -> dict[str, Any]:
    """Return the content of a search space's YAML: what can be cut out of a network, and its obvious cuts.

    Args:
        around: A timm network.
        channels: The number of channels of its images.
        classes: The number of classes that it shall predict.
        image_size: The side of the images, px.
        image_sizes: Smaller sides that a cut may take; () chooses some.

    Raises:
        ConfigError: The network cannot be traced or cut, or not for such images.
    """
    # Sides that were not asked for are left out if the network's last map would vanish, or if it does not run on them.
    traced, cuts = find_cuts(around, channels, classes)
    step = traced.patch or SIZE_STEP
    smaller = image_sizes or [round(image_size * share / step) * step for share in SIZES]
    last = max(stride_out for *_, stride_out in traced.operators)
    sizes_to_try = {image_size, *(px for px in smaller if px < image_size and (image_sizes or ONE_PIXEL * px >= last))}
    sizes = _fitting(around, channels, traced.patch, tuple(sorted(sizes_to_try, reverse=True)))
    if refused := [px for px in (image_size, *image_sizes) if px in sizes_to_try and px not in sizes]:
        why = (f"its images are multiples of {traced.patch} px, and {{}} is none" if traced.patch
               else f"images of {{}} px are too small, or their side must be a multiple of {last}")
        raise ConfigError(f"around={around}: {why.format(min(refused))}.")
    return {"description": f"What can be cut out of {around}: `known` are the networks of this space, and `choices` "
                           "what each of them may keep.",
            "around": around, IMAGE_SIZE: list(sizes), "choices": {name: list(options) for name, options in
                                                                   traced.choices.items()},
            "known": {WHOLE: {}, **cuts}}


def _obvious(traced: TracedNetwork) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the cuts that anybody would try first: name, and what it keeps.

    Short: one block per stage, or half of a transformer's blocks. Early: without the stages of the smallest maps, with
    half a head, and one or two blocks per stage. Thin: half the channels inside of blocks. Short and narrow: short,
    with half of all channels.
    """
    runs = {run.name: len(run.blocks) for run in traced.runs if run.name in traced.choices}
    short: dict[str, float] = {name: n // 2 if traced.patch else 0 for name, n in runs.items()}
    narrow = {name: 0.5 for name, shares in traced.choices.items() if name.startswith(WIDTH) and 0.5 in shares}
    yield "cut_short", short
    # The fewest stages after which the map is at most twice as wide as the last one.
    last = max(stride_out for *_, stride_out in traced.operators)
    if depths := [int(depth) for depth in traced.choices.get(DEPTH, ()) if depth < len(traced.stages)
                  and 2 * traced.strides[int(depth) - 1] >= last]:
        for name, blocks in (("cut_early", 0), ("cut_early_two", 1)):
            yield name, {DEPTH: min(depths), **{run: min(blocks, n) for run, n in runs.items()},
                         **{tie: share for tie, share in narrow.items() if tie in traced.head}}
    yield "cut_thin", {name: share for name, share in narrow.items() if name.startswith(WIDTH + INNER)}
    yield "cut_short_narrow", {**short, **narrow}


@lru_cache(maxsize=64)
def _fitting(around: str, channels: int, patch: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the image sizes, px, at which a network runs and can be exported; for one that reads patches, multiples of
    a patch."""
    with torch.random.fork_rng(devices=[]):
        model: Any = original(around, channels).eval()

    class ExportablePooling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            # ONNX has no pooling to a fixed size that does not divide a map's, as VGG's to 7 x 7.
            if function is torch.nn.functional.adaptive_avg_pool2d and any(
                    side % side_out for side, side_out in zip(args[0].shape[-2:], out.shape[-2:], strict=True)):
                raise ValueError("pooling that cannot be exported")
            return out

    def runs_on(px: int) -> bool:
        try:
            if patch:
                model.set_input_size(px)
            with torch.inference_mode(), ExportablePooling():
                model(torch.zeros(1, channels, px, px))
        except Exception:  # networks have errors of their own for images that are too small
            return False
        return True

    return tuple(px for px in sizes if not (patch and px % patch) and runs_on(px))


def load_space(name_or_path: str, channels: int, classes: int, image_size: int | None = None) -> SearchSpace:
    """Read a space of blocks or of cuts, as `SearchSpace.load` reads one of blocks. Raises ConfigError for a network
    that cannot be cut."""
    file, source = read_space_file(name_or_path)
    reader = _read_cuts if is_of_cuts(file) else SearchSpace.of_file
    return reader(file, source, channels, classes, image_size)


def space_of_cuts(contents: Sequence[Mapping[str, Any]], channels: int, classes: int) -> SearchSpace:
    """Return the space of the cuts of one network or of several, from the content of a space's file for each."""
    content = contents[0] if len(contents) == 1 else {
        "description": "What can be cut out of several networks.", FAMILIES: [dict(each) for each in contents]}
    return _read_cuts(SpaceFile(contents[0]["around"], content), Path("space.yaml"), channels, classes)


def _read_cuts(file: SpaceFile, source: Path, channels: int, classes: int, image_size: int | None = None
               ) -> SearchSpace:
    """Return the space of the cuts that a file lists; `image_size` replaces the file's. SpaceErrors name the key."""
    named_cuts, sizes = dict[str, Cut](), dict[str, tuple[int, ...]]()
    parts = _parts(file)
    for part in parts:
        content = part.section((), part.data, _KEYS)
        around = str(content.get("around"))
        if not AROUND.fullmatch(around):
            part.fail(("around",), "must be the name of a timm network")
        traced, _ = find_cuts(around, channels, classes)
        image_sizes = part.choices((IMAGE_SIZE,), image_size or content.get(IMAGE_SIZE), SIZE_RULE)
        sizes[around] = tuple(sorted(image_sizes, reverse=True))
        # Cuts of several networks have the network's name in front of their own.
        prefix = f"{origin_name(around)} " if len(parts) > 1 else ""
        for name, kept in _read_known(part, traced).items():
            try:
                named_cuts[prefix + name] = make_cut(traced, kept, sizes[around][0])
            except CandidateError as error:
                part.fail(("known", name), f"is no network: {error}")
    if len({origin_name(around) for around in sizes}) < len(parts):
        file.fail((FAMILIES,), "must be of different networks")
    if len({each[0] for each in sizes.values()}) > 1:
        file.fail((FAMILIES,), f"must have the same largest {IMAGE_SIZE}")
    cuts = CutList(named_cuts, sizes)
    space = SearchSpace(cuts, {name: (place, 0) for place, name in enumerate(cuts.known)}, file, source=source,
                        channels=channels, classes=classes)
    names = "_".join(origin_name(around) for around in space.arounds)
    space.name = f"around_{names[:80]}_{space.fingerprint[:6]}"  # the files of all such spaces have the same name
    return space


def _parts(file: SpaceFile) -> list[SpaceFile]:
    """Return a file for each network in a file. SpaceError if `families` is no list, or is too short or too long."""
    if FAMILIES not in file.data:
        return [file]
    contents = file.section((), file.data, ("description", FAMILIES))[FAMILIES]
    if not isinstance(contents, list) or not 2 <= len(contents) <= _MOST:
        file.fail((FAMILIES,), f"must be a list of 2 to {_MOST} spaces of cuts")
    return [SpaceFile(f"{file.where}: {FAMILIES}[{number}]", content) for number, content in enumerate(contents)]


def _read_known(file: SpaceFile, traced: TracedNetwork) -> dict[str, dict[str, Any]]:
    """Return what each network under `known` keeps, by name, checked; the whole network if there is none."""
    networks = dict(file.known(tuple(traced.choices)))
    for name, kept in networks.items():
        for part, value in kept.items():
            if value not in traced.choices[part]:
                file.fail(("known", name, part), f"must be one of {', '.join(map(str, traced.choices[part]))}")
    return networks or {WHOLE: {}}
