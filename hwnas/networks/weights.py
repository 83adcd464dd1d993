"""Weights of networks: safetensors files of ours, and pretrained weights of others, from which a fine-tuning starts.

Pretrained weights are in a folder (`pretrained.folder=`, otherwise $HWNAS_WEIGHTS, then the user's own) as
NAME.safetensors or NAME.pth. More text may follow NAME and a dot, hyphen or underscore, as in timm's own file names.
Facts that timm's configuration lacks are in the metadata of the safetensors file, or in a JSON file of the same name
beside it:

    norm     "imagenet", or "mean 0.5,0.5,0.5 std 0.5,0.5,0.5" on pixels / 255
    pad      "same": trained with TensorFlow's padding
    licence, origin
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.options import option
from hwnas.errors import ConfigError, DataError, MissingWeights, one_line
from hwnas.lazy import safetensors, timm, torch
from hwnas.networks.checkpoint import (
    ENDINGS,
    check_tensors,
    find_tensors,
    is_safetensors,
    read_safetensors,
    unreadable,
)
from hwnas.system.documents import read_json
from hwnas.system.paths import home, write_atomic
from hwnas.tasks.task import trunk_of

if TYPE_CHECKING:
    from torch import Tensor, nn


def load_weights(model: nn.Module, path: Path, label: str, classes: int) -> None:
    """Put a safetensors file's weights into `model`; DataError if it is torn, or of another network or classes."""
    put_weights(model, read_safetensors(path, label), label, classes)


def put_weights(model: nn.Module, tensors: Mapping[str, Tensor], label: str, classes: int) -> None:
    """Put each of `tensors` into the tensor of its name in `model`. Raises DataError if one is missing, unknown, packed
    or of another shape."""
    own = model.state_dict()
    missing = [name for name in own if name not in tensors] + [name for name in tensors if name not in own]
    if missing:
        raise DataError(f"{label} is of another network: {missing[0]!r} is in only one of them ({len(missing)} such). "
                        "Give the weights of this network.")
    other = [name for name in own if own[name].shape != tensors[name].shape]
    if other and all(own[name].ndim == tensors[name].ndim and (classes, *tensors[name].shape[1:]) == own[name].shape
                     for name in other):
        raise DataError(f"{label} knows {tensors[other[0]].shape[0]} classes, the data set has {classes}. Give weights "
                        "that were trained on these classes.")
    if other:
        raise DataError(f"{label} is of another network: {other[0]!r} has shape {list(tensors[other[0]].shape)} there, "
                        f"{list(own[other[0]].shape)} here ({len(other)} such). Give the weights of this network.")
    packed = [name for name in own if own[name].is_floating_point() and str(tensors[name].dtype) not in _FLOATS]
    if packed:  # their scales would be left out
        raise DataError(f"{label} cannot be taken: {packed[0]!r} holds {tensors[packed[0]].dtype} ({len(packed)} "
                        "such). Give weights in floating point of 16 bits or more.")
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:  # numbers that cannot be converted, such as packed ones
        raise DataError(f"{label} cannot be taken ({one_line(error, 120)}). Give weights in floating "
                        "point.") from None


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_NUMBERS = r"(\d*\.?\d+(?:,\d*\.?\d+){0,2})"
_MOST_FILE = 4 << 30  # bytes
_UNKNOWN = "unknown"
_FLOATS = tuple(f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64"))
FOLDER = "HWNAS_WEIGHTS"
POSITIONS = "pos_embed"  # what a transformer has learnt for each place of an image
_MOST_SHOWN = 6  # names of files in an error
_IMAGENET_CLASSES = (1000, 1001, 11821, 21841, 21843)  # a last layer of so many classes is replaced without a remark
_SHOWN = 3  # names of tensors in a sentence
_LEARNT = ("weight", "bias", "gamma", "gamma_1", "gamma_2")  # ends of names; other tensors can be computed again


@dataclass(frozen=True, slots=True)
class PretrainedOptions:
    """The start of a training: `use` asks for pretrained weights, and so does each other option. `use` false asks for
    random weights if pretrained ones are the rule."""

    use: bool | None = option(None, help="begin with pretrained weights (null: around a pretrained network only)")
    file: Path | None = option(None, check=os.path.isfile, what="the path of a file that is there", help="their file")
    folder: Path | None = option(None, help="where files are by the networks' names")
    download: bool = option(False, help="let timm fetch what is not there")

    @property
    def asked(self) -> bool:
        """Return whether pretrained weights are asked for."""
        return bool(self.use) or self.download or self.file is not None or self.folder is not None


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The weights that a timm network started with: their file's name and SHA-256, licence, origin, mean and std.

    Its images must always be normalised with this mean and std, on pixels / 255, for each channel of the network's
    images. `path` is the file, or None once the network is trained and described by a file.
    """

    file: str
    sha256: str
    licence: str
    origin: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    path: Path | None = field(default=None, compare=False, repr=False)
    is_assumed: bool = field(default=False, compare=False)  # mean and std are timm's for networks of this name

    @property
    def key(self) -> str:
        """The key of the weights and their normalisation: if either changes, the start is another one."""
        return hashlib.sha256(f"{self.sha256}|{self.mean}|{self.std}".encode()).hexdigest()[:12]

    def facts(self) -> dict[str, Any]:
        """Return the plain values that are stored: all but `path` and `is_assumed`."""
        return {"file": self.file, "sha256": self.sha256, "licence": self.licence, "origin": self.origin,
                "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Pretrained:
        """Read back what `facts` returned; raises KeyError, TypeError or ValueError for any other values."""
        mean, std = (tuple(float(value) for value in facts[key]) for key in ("mean", "std"))
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError("mean and std")
        file, sha256, licence, origin = (str(facts[key]) for key in ("file", "sha256", "licence", "origin"))
        return cls(file, sha256, licence, origin, mean, std)

    def __str__(self) -> str:
        return (f"`{self.file}`, SHA-256 `{self.sha256}`. Licence: {self.licence}. Origin: {self.origin}.")

    def load(self, model: Any, classes: int, *, with_classifier: bool = False, of_trunk: bool = False) -> str:
        """Put the weights into a timm network, and return a sentence about it that the user should read, or nothing.

        A classifier of as many classes stays. Any other one, a linear layer or a convolution, gets torch's initial
        values. They are smaller than timm's for EfficientNets, so the first steps do not spoil what is learnt
        (docs/decisions/around.md).

        Raises:
            DataError: The file is torn, or of another network; the message names the first tensor that does not fit.
                Or it has no classifier of as many classes, which `with_classifier` asks for.
        """
        if self.path is None:
            raise DataError(f"the pretrained weights {self.file} are not at hand. Add pretrained=true.")
        if hasattr(model, "bare"):  # a head on a timm network, whose weights these are
            with torch.random.fork_rng(devices=[]):
                whole = model.bare(classes)
            remark, state = self.load(whole, classes, of_trunk=True), whole.state_dict()
            model.trunk.load_state_dict({name: state[name] for name in model.trunk.state_dict()})
            return remark
        # 1. Find the network's tensors in the file.
        label = f"pretrained weights {self.path}"
        own = model.state_dict()
        stored, key = find_tensors(self.path, label, own)
        stored = _named(stored, own)
        tensors, left_out = ({name: tensor for name, tensor in stored.items() if (name in own) == is_own}
                             for is_own in (True, False))
        heads = tuple(f"{name}." for name in modules_called(model, "classifier"))
        _refuse_deeper(label, left_out, own, heads)
        notes = [f"{key} was taken"] if key else []
        if left_out:
            more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
            notes.append(f"left out, as the network has no such tensors: {', '.join([*left_out][:_SHOWN])}{more}")
        # 2. Adapt the stem to the images' channels, as timm does (sum or repeat).
        notes += _adapt_stem(model, tensors, own, len(self.mean))
        # 3. Resample what a transformer has learnt for each place of the image.
        if POSITIONS in own and POSITIONS in tensors:
            _resample_positions(model, tensors)
        if self.is_assumed:
            mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
            notes.append(f"nothing says how its images were normalised, so mean {mean} and std {std} are taken "
                         f"({self.path.stem}.json beside it would say it)")
        architecture = getattr(model, "default_cfg", {}).get("architecture")
        if architecture and (named := _network_of(self.path.stem)) not in ("", architecture):
            notes.append(f"its name is that of {named}, whose layers may pad or norm otherwise than {architecture}'s")
        # 4. Replace a classifier of other classes, and add counters of batches, which some files lack.
        last = [name for name in own if name.startswith(heads)]
        replaced = [name for name in last if name not in tensors or tensors[name].shape != own[name].shape]
        if replaced and with_classifier:
            raise DataError(f"{label} have no classifier of {classes} classes ({replaced[0]}). Give the whole "
                            "network's.")
        remarks = _reset_classifier(model, replaced, tensors, classes)
        if any(name.endswith(".weight") and name not in replaced for name in last):
            remarks.append(f"its last layer is kept, as it has {classes} classes: they must be those of the data, in "
                           "the same order")
        notes += [] if of_trunk else remarks
        counters = [name for name in own if name.endswith("num_batches_tracked") and name not in tensors]
        tensors |= {name: own[name] for name in (*replaced, *counters)}
        # 5. Load all of them. Values that are not finite would only be seen after a long training.
        put_weights(model, tensors, label, classes)
        bad = next((name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()), None)
        if bad is not None:
            raise DataError(f"{label}: {bad!r} holds values that are not finite. Give a whole file.")
        return f"{self.file}: {'; '.join(notes)}" if notes else ""


def _refuse_deeper(label: str, left_out: Iterable[str], own: Iterable[str], heads: tuple[str, ...]) -> None:
    """Raise DataError if a file is of a deeper network: it has more learnt tensors in modules of this network, apart
    from the classifier."""
    shared = {name.partition(".")[0] for name in own} - {name.partition(".")[0] for name in heads}
    more = [name for name in left_out if name.partition(".")[0] in shared and name.endswith(_LEARNT)]
    if more:
        raise DataError(f"{label} is of another network: it also has {more[0]!r} ({len(more)} such). Give the "
                        "weights of this network.")


def _adapt_stem(model: Any, tensors: dict[str, Tensor], own: Mapping[str, Tensor], channels: int) -> list[str]:
    """Adapt a stem of other channels to the network's, in place, as timm does. Return a remark on it. `channels`: of
    images. A stem may read a group of pixels at once (TResNet's), with the channels of one pixel after the other."""
    remarks = []
    for name in (f"{name}.weight" for name in modules_called(model, "first_conv")):
        if name in own and name in tensors and _differs_in_channels(tensors[name], own[name]):
            stored, wanted = tensors[name].shape[1], own[name].shape[1]
            remarks.append(f"its stem of {stored} channels was made one of {wanted}")
            pixels = gcd(wanted // channels or 1, stored)
            by_pixel = tensors[name].float().reshape(-1, stored // pixels, *tensors[name].shape[2:])
            tensors[name] = timm.models.adapt_input_conv(wanted // pixels, by_pixel, base_chans=stored // pixels
                                                         ).reshape(own[name].shape)
    return remarks


def _reset_classifier(model: Any, replaced: Iterable[str], tensors: Mapping[str, Tensor], classes: int) -> list[str]:
    """Give linear layers and convolutions, by the names of their tensors, torch's initial values. Return remarks on
    those that a file has for a number of classes that is not ImageNet's."""
    remarks = []
    for name in (name for name in replaced if name.endswith(".weight")):
        layer = model.get_submodule(name.removesuffix(".weight"))
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            layer.reset_parameters()  # in place, so that `state_dict` has the new values, too
            if name in tensors and len(tensors[name]) not in (classes, *_IMAGENET_CLASSES):
                remarks.append(f"its last layer has {len(tensors[name])} classes, not {classes}, and is made anew")
    return remarks


def _resample_positions(model: Any, tensors: dict[str, Tensor]) -> None:
    """Resample what a transformer has learnt for each place, [1, t, c], to the network's image size, in place. Values
    that do not belong to a square of places stay unchanged, and then do not fit."""
    with suppress(RuntimeError, ValueError, IndexError, AttributeError):
        grid = model.patch_embed.grid_size
        tensors[POSITIONS] = timm.layers.resample_abs_pos_embed(
            tensors[POSITIONS].float(), [*grid], num_prefix_tokens=model.pos_embed.shape[1] - grid[0] * grid[1])


def import_timm() -> Any:
    """Return the module `timm`, after the names that hwnas adds are registered with it."""
    import_module("hwnas.networks.modules")  # registers the names
    return timm


def find_pretrained(name: str, options: PretrainedOptions, channels: int) -> tuple[Pretrained, str]:
    """Return the weights of timm's network `name` for images of `channels` (1 or 3), and the padding that they need
    (empty: the network's own).

    Raises MissingWeights if there are none; it says which folders were searched and which name the file should have.
    Raises ConfigError if there are several files, and DataError if the facts in a file are wrong.
    """
    _, name = trunk_of(name)
    path = options.file or _in_folders(name, options)
    # The file's own facts come first, then timm's configuration of these very weights, then that of the network.
    facts = _facts(path)
    tag = _tagged(name, path, facts)
    mean, std = _normalisation(path, facts.get("norm"), tag or timm.get_pretrained_cfg(name))
    if channels == 1:
        mean, std = ((sum(values) / len(values),) for values in (mean, std))
    elif channels != len(mean):
        raise MissingWeights(f"pretrained weights are made for images of 3 channels (or 1, the sum), the data set has "
                             f"{channels}. Leave pretrained out.")
    licence = facts.get("licence") or facts.get("license") or (tag and tag.license) or _UNKNOWN
    origin = facts.get("origin") or (tag and (tag.origin_url or tag.hf_hub_id)) or _UNKNOWN
    pad = facts.get("pad", "")
    if pad not in ("", "same"):
        raise DataError(f"pretrained weights {path}: pad must be same, or not be there, got {pad[:40]!r}.")
    return Pretrained(path.name, _sha256(path), licence, origin, mean, std, path.absolute(),
                      tag is None and "norm" not in facts), pad


def find_some(names: Sequence[str], options: PretrainedOptions, channels: int) -> dict[str, tuple[Pretrained, str]]:
    """Find the weights of each network that has some, as `find_pretrained` does; MissingWeights if none of them has."""
    if options.file is not None and len(names) != 1:
        raise ConfigError(f"pretrained.file={options.file} is of one network, and there are {len(names)}. Give "
                          "pretrained.folder=DIR with a file for each.")
    networks = [name for name in names if options.file
                or any(_in_folder(trunk_of(name)[1], folder) for folder in _folders(options))
                or (options.download and import_timm().is_model_pretrained(trunk_of(name)[1]))]
    return {name: find_pretrained(name, options, channels) for name in networks or names}


def list_having(options: PretrainedOptions) -> list[str]:
    """Return timm's networks whose weights are here; MissingWeights if there are none, and none may be downloaded."""
    folders = _folders(options)
    names = sorted({name for folder in folders for path in folder.glob("*") if path.suffix in ENDINGS
                    and path.is_file() and (name := _network_of(path.stem))})
    if not names and not options.download:
        raise MissingWeights(f"no pretrained weights in {' or '.join(map(str, folders))}. They are called as timm "
                             "calls networks, such as mobilenetv2_100.safetensors or resnet18.pth. Give "
                             f"pretrained.folder=DIR or {FOLDER}, or let timm fetch them: pretrained.download=true.")
    return names


def find_tag(name: str, options: PretrainedOptions) -> str:
    """Return the tag of the local weights of timm's network `name`, from their file's name or origin; empty if neither
    names it. Raises errors as `find_pretrained` does."""
    path = _in_folders(name, options)
    tagged = _tagged(name, path, _facts(path))
    return str(tagged.tag) if tagged is not None else ""


def _folders(options: PretrainedOptions) -> list[Path]:
    """Return the folders that may have files: the given one, otherwise the environment's and the user's own."""
    if options.folder is not None:
        return [options.folder]
    env_folder = os.environ.get(FOLDER)
    return [*([Path(env_folder)] if env_folder else []), home() / "weights"]


def _in_folders(name: str, options: PretrainedOptions) -> Path:
    """Return the network's file in the first folder that has one, or download it if that is allowed."""
    folders = _folders(options)
    for folder in folders:
        if (path := _in_folder(name, folder)) is not None:
            return path
    if options.download:
        return _fetch(name, folders[-1])
    raise MissingWeights(f"there are no pretrained weights of {name} in "
                         f"{' or '.join(f'{folder} ({_shown_files(folder)})' for folder in folders)}. They are called "
                         f"{name}.safetensors or {name}.pth, perhaps with more behind the name. Give "
                         f"pretrained.folder=DIR, {FOLDER} or pretrained.file=FILE, or let timm fetch them: "
                         "pretrained.download=true.")


def _shown_files(folder: Path) -> str:
    """Name the files in a folder that may hold weights, or say that there are none."""
    names = sorted(path.name for path in folder.glob("*") if path.suffix in ENDINGS)
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more if names else "which has none" if folder.is_dir() else "not there"


def _in_folder(name: str, folder: Path) -> Path | None:
    """Return NAME.safetensors or NAME.pth, otherwise the file whose name goes on with a dot, hyphen or underscore; None
    if there is none. Raises ConfigError if there are several."""
    files = sorted(path for path in folder.glob(f"{name}*") if path.suffix in ENDINGS and path.is_file()
                   and _network_of(path.stem) == name)
    matches = [path for path in files if path.stem == name] or files
    if len(matches) > 1:
        raise ConfigError(f"several files in {folder} may be the pretrained weights of {name}: "
                          f"{', '.join(path.name for path in matches)}. Leave one of them there, or choose: "
                          f"pretrained.file={matches[0]}")
    return matches[0] if matches else None


def _network_of(stem: str) -> str:
    """Return timm's network that a file is named after, the longest that fits (resnet50_gn, not resnet50), or empty."""
    return max((name for name in import_timm().list_models() if stem == name
                or stem.startswith((f"{name}.", f"{name}-", f"{name}_"))), key=len, default="")


def _fetch(name: str, folder: Path) -> Path:
    """Let timm download its own weights, and store them in `folder` with the facts from timm's configuration."""
    timm = import_timm()
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # timm, its hub and the network each have errors of their own
        raise MissingWeights(f"timm cannot fetch pretrained weights of {name}: {one_line(error)}. Check the network "
                             f"connection, or put {name}.safetensors into {folder}.") from None
    finally:
        logger.setLevel(level)
    about: Any = model.pretrained_cfg
    path = folder / f"{name}.{about.get('tag') or 'timm'}.safetensors"
    text = [",".join(map(str, about[key])) for key in ("mean", "std")]
    facts = {"norm": f"mean {text[0]} std {text[1]}", "licence": about.get("license") or _UNKNOWN,
             "origin": about.get("origin_url") or about.get("hf_hub_id") or about.get("url") or _UNKNOWN}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_atomic(path, safetensors.torch.save(tensors))
    return path


def _facts(path: Path) -> dict[str, str]:
    """Return the facts about the weights in a file's metadata and in the JSON file beside it, which has precedence."""
    facts: dict[str, str] = {}
    if is_safetensors(path):
        try:
            with safetensors.safe_open(check_tensors(path), framework="np") as file:
                facts |= file.metadata() or {}
        except (OSError, safetensors.SafetensorError) as error:
            raise unreadable(path, f"pretrained weights {path}", error) from None
    json_path = path.with_suffix(".json")
    if json_path.is_file():
        try:
            facts |= dict(read_json(json_path))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{json_path} cannot be read ({error}): it must hold names and texts. Mend or remove "
                            "it.") from None
    return {str(key): " ".join(str(value).split())[:200] for key, value in facts.items()}


def _normalisation(path: Path, norm: str | None, config: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std from the file's `norm`, otherwise from timm's configuration, otherwise ImageNet's."""
    if norm is None:
        return (tuple(config.mean), tuple(config.std)) if config is not None else IMAGENET
    if norm == "imagenet":
        return IMAGENET
    numbers = re.fullmatch(rf"mean {_NUMBERS} std {_NUMBERS}", norm)
    mean, std = (tuple(map(float, text.split(","))) for text in numbers.groups()) if numbers else ((), ())
    if len(mean) not in (1, 3) or len(mean) != len(std) or not all(std):
        raise DataError(f"pretrained weights {path}: norm must be imagenet, or e.g. mean 0.5,0.5,0.5 std 0.5,0.5,0.5, "
                        f"got {norm[:80]!r}.")
    return (mean, std) if len(mean) == 3 else (mean * 3, std * 3)


def _tagged(name: str, path: Path, facts: Mapping[str, str]) -> Any:
    """Return timm's configuration of the weights NAME.TAG, which the file's name or its origin names; None if neither
    does."""
    models = import_timm().list_pretrained(f"{name}.*")
    tagged_names = re.findall(rf"(?<!\w){re.escape(name)}\.\w+", f"{path.stem} {facts.get('origin', '')}")
    return next((timm.get_pretrained_cfg(model) for model in tagged_names if model in models), None)


def _sha256(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_FILE:
            raise DataError(f"pretrained weights {path} have more than {_MOST_FILE >> 30} GiB, which is the most.")
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"pretrained weights {path} cannot be read: {error.strerror}.") from None


def _named(tensors: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` by the network's names. Another package may have other names for all: its tensors are taken
    in their order, if each has the same kind (weight, bias, mean, variance) and shape. Numbers of outputs, and the
    stem's channels, may differ."""
    if {*tensors} & {*own} or len(tensors) != len(own):
        return tensors
    pairs = list(zip(tensors.items(), own.items(), strict=True))
    alike = all(name.rpartition(".")[2] == own_name.rpartition(".")[2]
                and (tensor.shape[1:] == own_tensor.shape[1:] or _differs_in_channels(tensor, own_tensor))
                for (name, tensor), (own_name, own_tensor) in pairs)
    return {own_name: tensor for (_, tensor), (own_name, _) in pairs} if alike else tensors


def _differs_in_channels(tensor: Tensor, wanted: Tensor) -> bool:
    """Return whether a stem's weight is for another number of channels, and the same otherwise."""
    return (wanted.ndim == tensor.ndim == 4 and tensor.shape[1] != wanted.shape[1]
            and tensor.shape[:1] == wanted.shape[:1] and tensor.shape[2:] == wanted.shape[2:])


def modules_called(model: nn.Module, key: str) -> tuple[str, ...]:
    """Return the names of the modules that timm's configuration has under `key`: `first_conv` or `classifier`."""
    names = getattr(model, "default_cfg", {}).get(key) or ()
    return (names,) if isinstance(names, str) else tuple(names)
