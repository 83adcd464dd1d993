"""Weights of networks: safetensors files of ours, and pretrained ones of others, which begin a fine-tuning.

Pretrained weights lie in a folder (`pretrained.folder=`, otherwise $HWNAS_WEIGHTS, then the user's own) as
NAME.safetensors, NAME.pth, or with anything behind NAME and a dot, hyphen or underscore, as timm calls its own files.
Facts that timm's configuration of the network does not know stand in the metadata of the safetensors file, or in a JSON
file of the same name beside it:

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
    """Put a safetensors file's weights into `model`; DataError when it is torn, or of another network or classes."""
    put_weights(model, read_safetensors(path, label), label, classes)


def put_weights(model: nn.Module, tensors: Mapping[str, Tensor], label: str, classes: int) -> None:
    """Put `tensors` into `model`, each into the one of its name; DataError when one is missing, more or of another
    shape."""
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
_IMAGENET_CLASSES = (1000, 1001, 11821, 21841, 21843)  # whose last layer nobody expects to be kept
_SHOWN = 3  # names of tensors in a sentence
_LEARNT = ("weight", "bias", "gamma", "gamma_1", "gamma_2")  # ends of names; other tensors can be counted anew


@dataclass(frozen=True, slots=True)
class PretrainedOptions:
    """The start of a training: `use` asks for pretrained weights, and so does each of the others. `use` false asks for
    random ones if pretrained ones are the rule."""

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
    """The weights that a timm network began with: their file's name and SHA-256, licence, origin, and the mean and std
    (on pixels / 255, per channel of the network's images) that images must be normalised with ever after.

    `path` is where they lie, None once the network is trained and described by a file.
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
        """Names the weights and the normalisation that goes with them: either one changed is another start."""
        return hashlib.sha256(f"{self.sha256}|{self.mean}|{self.std}".encode()).hexdigest()[:12]

    def facts(self) -> dict[str, Any]:
        """Plain values, all but `path`."""
        return {"file": self.file, "sha256": self.sha256, "licence": self.licence, "origin": self.origin,
                "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Pretrained:
        """Inverse of `facts`; KeyError, TypeError or ValueError for values that are none."""
        mean, std = (tuple(float(value) for value in facts[key]) for key in ("mean", "std"))
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError("mean and std")
        file, sha256, licence, origin = (str(facts[key]) for key in ("file", "sha256", "licence", "origin"))
        return cls(file, sha256, licence, origin, mean, std)

    def __str__(self) -> str:
        return (f"`{self.file}`, SHA-256 `{self.sha256}`. Licence: {self.licence}. Origin: {self.origin}.")

    def load(self, model: Any, classes: int, *, with_classifier: bool = False, of_trunk: bool = False) -> str:
        """Put the weights into a timm network, and return what is worth saying of it in one sentence, or nothing.

        The steps: find the network's tensors in the file (`hwnas.networks.checkpoint`); adapt the stem to the images'
        channels, as timm does (sum or repeat); resample a transformer's places; begin the classifier anew, unless the
        file has one of as many classes. It begins with torch's values, which are smaller than those of timm's
        EfficientNets, so that the first steps do not spoil what is known (docs/decisions/around.md).

        Raises:
            DataError: The file is torn, or another network's; the sentence names the first tensor that does not fit.
                Or the classifier would begin anew, and `with_classifier` asks for that of the file.
        """
        if self.path is None:
            raise DataError(f"the pretrained weights {self.file} are not at hand. Add pretrained=true.")
        if hasattr(model, "bare"):  # a head on a timm network, whose weights these are
            with torch.random.fork_rng(devices=[]):
                whole = model.bare(classes)
            told, given = self.load(whole, classes, of_trunk=True), whole.state_dict()
            model.trunk.load_state_dict({name: given[name] for name in model.trunk.state_dict()})
            return told
        label = f"pretrained weights {self.path}"
        own = model.state_dict()
        stored, place = find_tensors(self.path, label, own)
        stored = _named(stored, own)
        tensors, left_out = ({name: tensor for name, tensor in stored.items() if (name in own) == known}
                             for known in (True, False))
        heads = tuple(f"{name}." for name in modules_called(model, "classifier"))
        _refuse_deeper(label, left_out, own, heads)
        said = [f"{place} was taken"] if place else []
        if left_out:
            more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
            said.append(f"left out, as the network has no such tensors: {', '.join([*left_out][:_SHOWN])}{more}")
        for name in (f"{name}.weight" for name in modules_called(model, "first_conv")):
            if name in own and name in tensors and _differs_in_channels(tensors[name], own[name]):
                said.append(f"its stem of {tensors[name].shape[1]} channels was made one of {own[name].shape[1]}")
                tensors[name] = timm.models.adapt_input_conv(own[name].shape[1], tensors[name].float(),
                                                              base_chans=tensors[name].shape[1])
        if POSITIONS in own and POSITIONS in tensors:
            _resample_positions(model, tensors)
        if self.is_assumed:
            mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
            said.append(f"nothing says how its images were normalised, so mean {mean} and std {std} are taken "
                        f"({self.path.stem}.json beside it would say it)")
        for name in own:
            replaced = name.startswith(heads) and (name not in tensors or tensors[name].shape != own[name].shape)
            if replaced and with_classifier:
                raise DataError(f"{label} have no classifier of {classes} classes ({name}). Give the whole network's.")
            if replaced and name.endswith(".weight") and isinstance(
                    layer := model.get_submodule(name.removesuffix(".weight")), torch.nn.Linear):
                layer.reset_parameters()  # in place: `own` holds it
                if name in tensors and not of_trunk and len(tensors[name]) not in (classes, *_IMAGENET_CLASSES):
                    said.append(f"its last layer tells {len(tensors[name])} classes apart, not {classes}, and is made "
                                "anew")
            elif name.startswith(heads) and name.endswith(".weight") and not replaced and not of_trunk:
                said.append(f"its last layer is kept, as it tells {classes} classes apart: they must be those of the "
                            "data, in the same order")
            if replaced or (name.endswith("num_batches_tracked") and name not in tensors):
                tensors[name] = own[name]
        put_weights(model, tensors, label, classes)
        bad = next((name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()), None)
        if bad is not None:
            raise DataError(f"{label}: {bad!r} holds values that are not finite. Give a whole file.")
        return f"{self.file}: {'; '.join(said)}" if said else ""


def _refuse_deeper(label: str, left_out: Iterable[str], own: Iterable[str], heads: tuple[str, ...]) -> None:
    """Raise DataError if a file has more that is learnt inside of what it has in common with the network: the same
    layers with others between them."""
    shared = {name.partition(".")[0] for name in own} - {name.partition(".")[0] for name in heads}
    more = [name for name in left_out if name.partition(".")[0] in shared and name.endswith(_LEARNT)]
    if more:
        raise DataError(f"{label} is of another network: it also has {more[0]!r} ({len(more)} such). Give the "
                        "weights of this network.")


def _resample_positions(model: Any, tensors: dict[str, Tensor]) -> None:
    """Resample what a transformer has learnt for each place of images of another size, [1, t, c], in place.

    Values that are of no square of places stay, and do not fit then.
    """
    with suppress(RuntimeError, ValueError, IndexError, AttributeError):
        grid = model.patch_embed.grid_size
        tensors[POSITIONS] = timm.layers.resample_abs_pos_embed(
            tensors[POSITIONS].float(), [*grid], num_prefix_tokens=model.pos_embed.shape[1] - grid[0] * grid[1])


def import_timm() -> Any:
    """The module `timm`, once it knows the names that hwnas adds; none of its own operators is missing."""
    import_module("hwnas.networks.modules")  # which declares what is missing, and adds the names
    return timm


def find_pretrained(name: str, options: PretrainedOptions, channels: int) -> tuple[Pretrained, str]:
    """The weights of timm's network `name` for images of `channels` (1 or 3), and the padding that they need (empty:
    the network's own).

    MissingWeights when there are none (where was looked, how the file should be called), ConfigError when there are
    several, DataError for a file that says of itself what cannot be.
    """
    _, name = trunk_of(name)
    path = options.file or _in_folders(name, options)
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
    """As `find_pretrained`, for each of timm's networks that has weights; MissingWeights where none of them has."""
    if options.file is not None and len(names) != 1:
        raise ConfigError(f"pretrained.file={options.file} is of one network, and there are {len(names)}. Give "
                          "pretrained.folder=DIR with a file for each.")
    having = [name for name in names if options.file
              or any(_in_folder(trunk_of(name)[1], folder) for folder in _folders(options))
              or (options.download and import_timm().is_model_pretrained(trunk_of(name)[1]))]
    return {name: find_pretrained(name, options, channels) for name in having or names}


def list_having(options: PretrainedOptions) -> list[str]:
    """timm's networks whose weights lie here. MissingWeights where there are none, and none may be fetched."""
    folders = _folders(options)
    having = sorted({name for folder in folders for path in folder.glob("*") if path.suffix in ENDINGS
                     and path.is_file() and (name := _network_of(path.stem))})
    if not having and not options.download:
        raise MissingWeights(f"no pretrained weights in {' or '.join(map(str, folders))}. They are called as timm "
                             "calls networks, such as mobilenetv2_100.safetensors or resnet18.pth. Give "
                             f"pretrained.folder=DIR or {FOLDER}, or let timm fetch them: pretrained.download=true.")
    return having


def find_tag(name: str, options: PretrainedOptions) -> str:
    """The tag of the weights that lie here of timm's network `name`, as their file's name or origin says it; empty
    where neither does. Raises what `find_pretrained` does."""
    path = _in_folders(name, options)
    tagged = _tagged(name, path, _facts(path))
    return str(tagged.tag) if tagged is not None else ""


def _folders(options: PretrainedOptions) -> list[Path]:
    """Return the folders that may hold files: the given one, or else the environment's and the user's own."""
    if options.folder is not None:
        return [options.folder]
    given = os.environ.get(FOLDER)
    return [*([Path(given)] if given else []), home() / "weights"]


def _in_folders(name: str, options: PretrainedOptions) -> Path:
    """The network's file in the first folder that has one; fetched where that is allowed."""
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
    """NAME.safetensors or NAME.pth, otherwise the file whose name goes on with a dot, hyphen or underscore; ConfigError
    if several may be it."""
    files = sorted(path for path in folder.glob(f"{name}*") if path.suffix in ENDINGS and path.is_file()
                   and _network_of(path.stem) == name)
    fitting = [path for path in files if path.stem == name] or files
    if len(fitting) > 1:
        raise ConfigError(f"several files in {folder} may be the pretrained weights of {name}: "
                          f"{', '.join(path.name for path in fitting)}. Leave one of them there, or choose: "
                          f"pretrained.file={fitting[0]}")
    return fitting[0] if fitting else None


def _network_of(stem: str) -> str:
    """timm's network whose weights a file of this name has: resnet50_gn.safetensors is not of resnet50. Empty for none.
    """
    return max((name for name in import_timm().list_models() if stem == name
                or stem.startswith((f"{name}.", f"{name}-", f"{name}_"))), key=len, default="")


def _fetch(name: str, folder: Path) -> Path:
    """Let timm load its own weights from its hub, and keep them in `folder` with what it says of them."""
    timm = import_timm()
    talkative = logging.getLogger("huggingface_hub")
    level = talkative.level
    talkative.setLevel(logging.CRITICAL)
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # timm, its hub and the network each have errors of their own
        raise MissingWeights(f"timm cannot fetch pretrained weights of {name}: {one_line(error)}. Check the network "
                             f"connection, or put {name}.safetensors into {folder}.") from None
    finally:
        talkative.setLevel(level)
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
    """Return what a file's metadata and the JSON file beside it say of the weights."""
    facts: dict[str, str] = {}
    if is_safetensors(path):
        try:
            with safetensors.safe_open(check_tensors(path), framework="np") as file:
                facts |= file.metadata() or {}
        except (OSError, safetensors.SafetensorError) as error:
            raise unreadable(path, f"pretrained weights {path}", error) from None
    beside = path.with_suffix(".json")
    if beside.is_file():
        try:
            facts |= dict(read_json(beside))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{beside} cannot be read ({error}): it must hold names and texts. Mend or remove "
                            "it.") from None
    return {str(key): " ".join(str(value).split())[:200] for key, value in facts.items()}


def _normalisation(path: Path, norm: str | None, config: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std: the file's own, otherwise those of timm's configuration of the network."""
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
    """timm's configuration of the very weights, NAME.TAG, that the file is named after or that its origin names; None
    where neither names any."""
    models = import_timm().list_pretrained(f"{name}.*")
    named = re.findall(rf"(?<!\w){re.escape(name)}\.\w+", f"{path.stem} {facts.get('origin', '')}")
    return next((timm.get_pretrained_cfg(model) for model in named if model in models), None)


def _sha256(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_FILE:
            raise DataError(f"pretrained weights {path} have more than {_MOST_FILE >> 30} GiB, which is the most.")
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"pretrained weights {path} cannot be read: {error.strerror}.") from None


def _named(tensors: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` by the network's names.

    Those of another package's network of the same make have other names: they are taken in their order, if each is for
    the same (weight, bias, mean, variance) in the same shape, apart from the classifier's number of classes and the
    channels of the stem.
    """
    if {*tensors} & {*own} or len(tensors) != len(own):
        return tensors
    pairs = list(zip(tensors.items(), own.items(), strict=True))
    alike = all(name.rpartition(".")[2] == mine.rpartition(".")[2]
                and (tensor.shape[1:] == wanted.shape[1:] or _differs_in_channels(tensor, wanted))
                for (name, tensor), (mine, wanted) in pairs)
    return {mine: tensor for (_, tensor), (mine, _) in pairs} if alike else tensors


def _differs_in_channels(tensor: Tensor, wanted: Tensor) -> bool:
    """Return whether a stem's weight is for another number of channels, and the same otherwise."""
    return (wanted.ndim == tensor.ndim == 4 and tensor.shape[1] != wanted.shape[1]
            and tensor.shape[:1] == wanted.shape[:1] and tensor.shape[2:] == wanted.shape[2:])


def modules_called(model: nn.Module, key: str) -> tuple[str, ...]:
    """Names of the modules that timm's configuration calls `first_conv` or `classifier`."""
    names = getattr(model, "default_cfg", {}).get(key) or ()
    return (names,) if isinstance(names, str) else tuple(names)
