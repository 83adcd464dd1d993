"""Checkpoints as people have them: reads their tensors, and nothing else, and finds which belong to a network.

The steps: read, without running anything of the file; find the mapping of tensors in it; strip what wrappers put in
front of names; say what was taken and what was left out. Formats: safetensors, and what `torch.save` writes (a zip
archive, or the form before torch 1.6), whatever else a training put beside the tensors.
"""

from __future__ import annotations

import collections
import difflib
import io
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

from hwnas.data.file_kinds import HEAD, kind_of_file
from hwnas.errors import ConfigError, DataError, one_line
from hwnas.lazy import safetensors, torch

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar")
AVERAGES = ("ema", "average", "averaged", "shadow", "swa")  # words of keys whose weights are preferred to the last ones
FITTING = 0.9  # share of a network's tensors below which a file is another network's
DEEP = 4  # levels of mappings that are looked into
_MOST_HEADER = 8 << 20  # bytes, some 80,000 tensors: reading a header takes thirty times its size
_TOP = "its top level"  # a dot as pretrained.key
_SHOWN = 3  # names in a sentence
_LEARNT = ("weight", "bias", "gamma", "gamma_1", "gamma_2")  # ends of names; other tensors can be counted anew
_WRAPPED = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # in front of any part


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """The tensors of a network in a file, by the network's names; and what a person wants to know of the choice.

    Attributes:
        tensors: Those that the network has, and its head's if the file has one by the same names.
        place: The place in the file where they are, such as `state_dict_ema`; empty: at its top.
        prefix: The text in front of their names there.
        left_out: Names of the same mapping that the network does not have.
    """

    tensors: dict[str, Tensor]
    place: str
    prefix: str
    left_out: tuple[str, ...]

    @property
    def said(self) -> str:
        """One sentence, empty if there is nothing to say."""
        parts = [f"{self.place} was taken"] if self.place else []
        if self.left_out:
            more = f" and {len(self.left_out) - _SHOWN} more" if len(self.left_out) > _SHOWN else ""
            parts.append(f"left out, as the network has no such tensors: {', '.join(self.left_out[:_SHOWN])}{more}")
        return "; ".join(parts)


def find_tensors(path: Path, label: str, own: Mapping[str, Tensor], key: str | None = None) -> FoundTensors:
    """Return the tensors of a file that belong to a network.

    Args:
        path: The file.
        label: What messages call it.
        own: The network's tensors by name.
        key: The place in the file to look at, with dots between levels; a dot: its top; None: where most of them are.

    Raises:
        DataError: The file is torn, or holds no tensors by name.
        ConfigError: Several places hold the network equally well, or there is none of this key.
    """
    fits = {each.place: each for place, tensors in _mappings(read_content(path, label))
            for each in _behind_prefixes(place, tensors, own)}
    if not fits:
        raise DataError(f"{label} holds no tensors by name. Give a file with a network's state_dict().")
    if key is not None:
        wanted = key.strip(".")
        if not (chosen := {place: each for place, each in fits.items()
                           if place == wanted or (wanted and place.startswith(f"{wanted}."))}):
            raise ConfigError(f"pretrained.key={key}: {label} has no tensors there, but in "
                              f"{', '.join(filter(None, fits)) or _TOP}. Choose one of these.")
        fits = chosen
    counts = {place: sum(name in own for name in each.tensors) for place, each in fits.items()}
    most = max(counts.values())
    best = [each for place, each in fits.items() if counts[place] == most]
    if len(best) > 1 and most:
        averaged = [each for each in best if any(word in each.place.lower() for word in AVERAGES)]
        if not (len(best) - len(averaged) == 1 and averaged):
            raise ConfigError(f"{label} holds such a network in "
                              f"{' and in '.join(each.place or _TOP for each in best)}. Choose: "
                              f"pretrained.key={best[0].place or '.'}")
        best = averaged
    return best[0]


def refuse_other(label: str, tensors: Mapping[str, Tensor], left_out: Iterable[str], own: Mapping[str, Tensor],
                 heads: tuple[str, ...]) -> None:
    """Raise DataError if less than FITTING of the network's tensors, without its head, are in the file, or if the file
    has more that is learnt inside what they have in common: the same layers with others between them.

    `left_out` are names of the file as the network would call them.
    """
    wanted = [name for name in own if not name.startswith(heads) and not name.endswith("num_batches_tracked")]
    fitting = [name for name in wanted if name in tensors]
    if len(fitting) < FITTING * len(wanted):
        lacking = next(name for name in wanted if name not in tensors)
        near = difflib.get_close_matches(lacking, [*tensors, *left_out], n=2, cutoff=0.0)
        raise DataError(f"{label} is of another network: it has {len(fitting)} of {len(wanted)} tensors. {lacking!r} "
                        f"is not in it as a plain tensor; the nearest names there are "
                        f"{' and '.join(map(repr, near)) or 'none'}. Give the weights of this network.")
    shared = {name.partition(".")[0] for name in own} - {name.partition(".")[0] for name in heads}
    more = [name for name in left_out if name.partition(".")[0] in shared and name.endswith(_LEARNT)]
    if more:
        raise DataError(f"{label} is of another network: it also has {more[0]!r} ({len(more)} such). Give the "
                        "weights of this network.")


def _mappings(content: Any, place: str = "", level: int = 0) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every mapping that holds tensors by name, with its place."""
    if not isinstance(content, Mapping) or level > DEEP:
        return
    tensors = {_WRAPPED.sub("", name): value for name, value in content.items()
               if isinstance(name, str) and _is_plain(value)}
    if tensors:
        yield place, tensors
    for name, value in content.items():
        if isinstance(name, str):
            yield from _mappings(value, f"{place}.{name}" if place else name, level + 1)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that holds all of its values: a torn one may repeat a single one for ever."""
    return (isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
            and value.numel() * value.element_size() <= value.untyped_storage().nbytes())


def _behind_prefixes(place: str, tensors: dict[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[FoundTensors]:
    """Yield the tensors behind what stands in front of most of the network's names: once for each network of several.

    Wrappers put `module.`, `model.` or several of these there, trainings `student.` and `teacher.`.
    """
    prefixes: Counter[str] = Counter()
    for name in tensors:
        parts = name.split(".")
        prefixes.update(name[:len(name) - len(end)] for at in range(len(parts))
                        if (end := ".".join(parts[at:])) in own)
    ranked = prefixes.most_common()
    if not ranked:
        yield FoundTensors(tensors, place, "", ())
        return
    several = [prefix for prefix, count in ranked if count == ranked[0][1] and 2 * count >= len(own)]
    places = {tuple(tensors[prefix + name].data_ptr() for name in own if prefix + name in tensors): prefix
              for prefix in reversed(several or [ranked[0][0]])}  # a module and what was compiled of it are one
    for prefix in reversed(places.values()):
        mine = {prefix + name: name for name in own if prefix + name in tensors}
        yield FoundTensors({mine[name]: tensor for name, tensor in tensors.items() if name in mine},
                           ".".join(filter(None, (place, prefix.strip(".")))) if len(places) > 1 else place, prefix,
                           tuple(name for name in tensors if name not in mine))


def read_content(path: Path, label: str) -> Any:
    """Return what a file holds. Only tensors and plain containers are made; anything else becomes nothing.

    Raises:
        DataError: The file is torn, or no file of tensors.
    """
    if is_safetensors(path):
        return read_safetensors(path, label)
    try:
        file = io.BytesIO(path.read_bytes())  # in which no length can be read that is larger than the file
        _check_entries(file)
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=_Limited)
    except Exception as error:  # a torn file may fail in the archive, the pickle or torch
        raise unreadable(path, label, error) from None


def is_safetensors(path: Path) -> bool:
    """Return whether a file is a safetensors file by its first bytes, whatever its name; a torn one by its name."""
    head = _head(path)
    return head[8:9] == b"{" or (path.suffix == ".safetensors" and not head.startswith((b"PK", b"\x80")))


def unreadable(path: Path, label: str, error: Exception) -> DataError:
    """Return the error of a file that is torn, or holds no tensors: what it is, where that is known."""
    head = _head(path)
    if (kind := kind_of_file(head)[0]) and not head.startswith(b"PK"):  # which torch.save writes, too
        return DataError(f"{label} is {kind}, and no file of tensors. Give what torch.save or safetensors wrote of a "
                         "network's state_dict().")
    said = type(error).__name__ if isinstance(error, KeyError) else one_line(error, 120)
    return DataError(f"{label} cannot be read ({said}): it is torn or no file of tensors. Give a whole one of "
                     "a network's state_dict().")


def _head(path: Path) -> bytes:
    """The first bytes of a file; none where it cannot be opened."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""


def check_tensors(path: Path) -> Path:
    """Return `path`, a safetensors file whose header can be read at small cost; SafetensorError or OSError otherwise.

    The library itself holds every tensor's place against the file's size, but reads headers of up to 100 MB.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _MOST_HEADER:
        raise safetensors.SafetensorError(f"its header would have {header} bytes, {_MOST_HEADER} are read at most")
    return path


def read_safetensors(path: Path, label: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; DataError if it is torn."""
    try:
        return safetensors.torch.load_file(check_tensors(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise unreadable(path, label, error) from None


class _Nothing:
    """Stands for everything that a pickle makes and that is no tensor: takes any call, item and state, does nothing."""

    def __new__(cls, *values: object, **named: object) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *values: object, **named: object) -> None: ...

    def __call__(self, *values: object, **named: object) -> _Nothing:
        return self

    def __setitem__(self, key: object, value: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    append = extend = add = update = __call__


def _known(module: str, name: str) -> Any:
    """Return what a pickle may call: how torch makes tensors, and plain containers. None for anything else."""
    if module == "collections" and name in ("OrderedDict", "defaultdict"):
        return collections.OrderedDict if name == "OrderedDict" else lambda *_: {}
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        return getattr(torch._utils, name)
    if module == "torch" and (name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)):
        return getattr(torch, name)
    if (module, name) in (("torch", "Size"), ("torch", "device"), ("torch.storage", "UntypedStorage")):
        return torch.Size if name == "Size" else torch.device if name == "device" else torch.UntypedStorage
    return None


class _Limited:
    """Stands in for the module `pickle` when torch reads a file: no class or function of others is found.

    By Python's own unpickler: the one in C makes room for as many memos as a file names.
    """

    class Unpickler(pickle._Unpickler):
        """Finds what `_known` lists, and nothing else."""

        def find_class(self, module: str, name: str) -> Any:
            return _known(module, name) or _Nothing

    @classmethod
    def load(cls, file: BinaryIO, **options: Any) -> Any:
        """As `pickle.load`."""
        return cls.Unpickler(file, **options).load()


def _check_entries(file: io.BytesIO) -> None:
    """Raise ValueError unless the tensors of a file of torch are in it as they are: others may unpack to any size."""
    size = file.getbuffer().nbytes
    if file.read(4) != b"PK\3\4":  # torch's form before 1.6
        file.seek(0)
        if _values(file) > size:
            raise ValueError("its tensors are larger than the file")
        file.seek(0)
        return
    with ZipFile(file) as archive:
        entries = archive.infolist()
    names = [entry.filename.partition("/")[2] for entry in entries]
    if "constants.pkl" in names or "data.pkl" not in names:
        raise ValueError("it is a program of TorchScript" if "constants.pkl" in names else
                         "it is a zip archive that torch.save did not write")
    if any(entry.compress_type != ZIP_STORED for entry in entries):
        raise ValueError("it is packed, as torch writes none")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("its entries are larger than the file")
    file.seek(0)


def _values(file: BinaryIO) -> int:
    """Return the number of values in all storages that a file of torch's first form says it has. Nothing of it runs."""
    sizes: dict[object, int] = {}

    class Reader(pickle._Unpickler):
        def find_class(self, module: str, name: str) -> type[_Nothing]:
            return _Nothing

        def persistent_load(self, pid: Any) -> _Nothing:
            if isinstance(pid, tuple) and len(pid) > 4 and isinstance(pid[4], int):
                sizes[pid[2]] = max(pid[4], sizes.get(pid[2], 0))
            return _Nothing()

    try:
        first = Reader(file).load()
    except Exception:  # of other bytes the unpickler may raise anything
        first = None
    if first != torch.serialization.MAGIC_NUMBER:
        raise ValueError("neither torch.save nor safetensors wrote it")
    for _ in range(3):  # the version, the system, the object
        Reader(file).load()
    return sum(sizes.values())
