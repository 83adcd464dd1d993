"""Checkpoints as people have them: reads their tensors, and nothing else, and finds which belong to a network.

The steps: read, without running anything of the file; find the mapping of tensors in it; strip what wrappers put in
front of names; say what was taken and what was left out. Formats: safetensors, and what `torch.save` writes (a zip
archive, or the form before torch 1.6), whatever else a training put beside the tensors.
"""

from __future__ import annotations

import difflib
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile, is_zipfile

from hwnas.data.file_kinds import HEAD, kind_of_file
from hwnas.errors import DataError, one_line
from hwnas.lazy import safetensors, torch

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar")
AVERAGES = ("ema", "average", "averaged", "shadow", "swa")  # words of keys whose weights are preferred to the last ones
FITTING = 0.9  # share of a network's tensors below which a file is another network's
DEEP = 4  # levels of mappings that are looked into
_MOST_HEADER = 8 << 20  # bytes, some 80,000 tensors: reading a header takes thirty times its size
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


def find_tensors(path: Path, label: str, own: Mapping[str, Tensor]) -> FoundTensors:
    """Return the tensors of a file that belong to a network: of several places the one with most of them, and averaged
    ones before the last ones.

    Args:
        path: The file.
        label: What messages call it.
        own: The network's tensors by name.

    Raises:
        DataError: The file is torn, or holds no tensors by name.
    """
    found = [each for place, tensors in _mappings(read_content(path, label))
             for each in _behind_prefixes(place, tensors, own)]
    if not found:
        raise DataError(f"{label} holds no tensors by name. Give a file with a network's state_dict().")
    return max(found, key=lambda each: (sum(name in own for name in each.tensors),
                                        any(word in each.place.lower() for word in AVERAGES)))


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
    """Yield the tensors behind each text that stands in front of half of the network's names, or of most of them.

    Wrappers put `module.`, `model.` or several of these there, trainings `student.` and `teacher.`.
    """
    prefixes: Counter[str] = Counter()
    for name in tensors:
        parts = name.split(".")
        prefixes.update(name[:len(name) - len(end)] for at in range(len(parts))
                        if (end := ".".join(parts[at:])) in own)
    if not prefixes:
        yield FoundTensors(tensors, place, "", ())
        return
    several = [prefix for prefix, count in prefixes.items() if 2 * count >= len(own)]
    for prefix in several or [prefixes.most_common(1)[0][0]]:
        mine = {prefix + name: name for name in own if prefix + name in tensors}
        yield FoundTensors({mine[name]: tensor for name, tensor in tensors.items() if name in mine},
                           ".".join(filter(None, (place, prefix.strip(".")))) if len(several) > 1 else place, prefix,
                           tuple(name for name in tensors if name not in mine))


def read_content(path: Path, label: str) -> Any:
    """Return what a file holds. Torch makes tensors and plain containers alone; anything else becomes nothing.

    Raises:
        DataError: The file is torn, or no file of tensors.
    """
    if is_safetensors(path):
        return read_safetensors(path, label)
    try:
        file = io.BytesIO(path.read_bytes())  # in which no length can be read that is larger than the file
        unknown = _unknown_objects(file, file.getbuffer().nbytes)
        file.seek(0)
        with torch.serialization.safe_globals([(_Nothing, name) for name in unknown]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn file may fail in the archive, the pickle or torch
        inner = error.__context__  # behind it torch explains how to run the code of a file
        raise unreadable(path, label, inner if isinstance(inner, Exception) else error) from None


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
    """Stands for each object in a file that torch does not know: takes any arguments and state, does nothing."""

    def __new__(cls, *values: object, **named: object) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *values: object, **named: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _unknown_objects(file: BinaryIO, size: int) -> list[str]:
    """Return the names of classes and functions in a file of torch that torch does not know by itself.

    Raises:
        ValueError: Its entries would unpack to more than the file's `size`.
    """
    if not is_zipfile(file):  # torch's form before 1.6
        return []
    with ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != ZIP_STORED for entry in entries) or sum(entry.file_size for entry in entries) > size:
        raise ValueError("its entries would unpack to more than the file has")
    file.seek(0)
    return list(torch.serialization.get_unsafe_globals_in_checkpoint(file))
