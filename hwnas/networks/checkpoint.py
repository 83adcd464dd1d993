"""Read the tensors of checkpoints as people have them, and nothing else, and find which belong to a network.

Formats: safetensors, and what `torch.save` writes (a zip archive, or the form before torch 1.6). The content is a
`state_dict()`, or what timm, torchvision and Lightning save in a training, whatever they put beside the tensors.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile, is_zipfile

from hwnas.data.file_kinds import HEAD, kind_of_file
from hwnas.errors import DataError, one_line
from hwnas.lazy import safetensors, torch

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar")
# Keys under which a file may hold its tensors: in timm's order, then the names of torch's tutorials and others.
PLACES = ("state_dict_ema", "model_ema", "params_ema", "ema", "state_dict", "model_state_dict", "model", "net",
          "network", "weights", "params", "module")
_COMPILED = re.compile(r"\b_orig_mod\.")  # torch.compile puts it in front of any part of a name
_MOST_HEADER = 8 << 20  # bytes, some 80,000 tensors: reading a header takes thirty times its size


def find_tensors(path: Path, label: str, own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file by a network's names, and the key of PLACES that holds them (empty: the top level).

    Args:
        path: The file.
        label: The name of the file in error messages.
        own: The network's tensors by name.

    Raises:
        DataError: The file is torn, or holds no tensors by name.
    """
    content = read_content(path, label)
    content = content if isinstance(content, Mapping) else {}
    place = next((key for key in PLACES if isinstance(content.get(key), Mapping)
                  and any(map(_is_plain, content[key].values()))), "")
    tensors = {_COMPILED.sub("", name): value for name, value in (content[place] if place else content).items()
               if isinstance(name, str) and _is_plain(value)}
    if not tensors:
        raise DataError(f"{label} holds no tensors by name. Give a file with a network's state_dict().")
    # Wrappers put `module.` or `model.` in front of all names. Remove the prefix that gives most of the right names.
    first = next(iter(own))
    prefixes = [name.removesuffix(first) for name in tensors if f".{name}".endswith(f".{first}")]
    prefix = max(prefixes, key=lambda prefix: sum(prefix + name in tensors for name in own), default="")
    return {name.removeprefix(prefix): value for name, value in tensors.items()}, place


def _is_plain(value: Any) -> bool:
    """Return whether a value is a plain tensor that stores all its values: a torn file may repeat a single one."""
    return (isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
            and value.numel() * value.element_size() <= value.untyped_storage().nbytes())


def read_content(path: Path, label: str) -> Any:
    """Return the content of a file: tensors in plain containers. An object of any other class becomes an empty one.

    Raises:
        DataError: The file is torn, or is no file of tensors.
    """
    if is_safetensors(path):
        return read_safetensors(path, label)
    try:
        file = io.BytesIO(path.read_bytes())  # in memory: a wrong length in it cannot read beyond the file
        unknown = _unknown_objects(file, file.getbuffer().nbytes)
        file.seek(0)
        with torch.serialization.safe_globals([(_Nothing, name) for name in unknown]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn file may fail in the archive, the pickle or torch
        inner = error.__context__  # torch wraps the cause in advice on how to run the code of a file
        raise unreadable(path, label, inner if isinstance(inner, Exception) else error) from None


class _Nothing:
    """A placeholder for each object in a file that torch does not know: takes any arguments and state, does nothing."""

    def __new__(cls, *values: object, **named: object) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *values: object, **named: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _unknown_objects(file: BinaryIO, size: int) -> list[str]:
    """Return the names of the classes and functions in a file of torch that torch does not load by itself.

    Raises:
        ValueError: Its entries are compressed, or would unpack to more than the file's `size`.
    """
    if not is_zipfile(file):  # torch's form before 1.6
        return []
    with ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != ZIP_STORED for entry in entries) or sum(entry.file_size for entry in entries) > size:
        raise ValueError("its entries would unpack to more than the file has")
    file.seek(0)
    return list(torch.serialization.get_unsafe_globals_in_checkpoint(file))


def is_safetensors(path: Path) -> bool:
    """Return whether a file is a safetensors file, by its first bytes whatever its name, or, if torn, by its name."""
    head = _head(path)
    return head[8:9] == b"{" or (path.suffix == ".safetensors" and not head.startswith((b"PK", b"\x80")))


def unreadable(path: Path, label: str, error: Exception) -> DataError:
    """Return the error for a file that is torn or holds no tensors. It says what the file is, if that is known."""
    head = _head(path)
    if (kind := kind_of_file(head)[0]) and not head.startswith(b"PK"):  # torch.save writes zip archives, too
        return DataError(f"{label} is {kind}, and no file of tensors. Give what torch.save or safetensors wrote of a "
                         "network's state_dict().")
    reason = type(error).__name__ if isinstance(error, KeyError) else one_line(error, 120)
    return DataError(f"{label} cannot be read ({reason}): it is torn or no file of tensors. Give a whole one of "
                     "a network's state_dict().")


def _head(path: Path) -> bytes:
    """Return the first bytes of a file; no bytes if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""


def check_tensors(path: Path) -> Path:
    """Return `path`, a safetensors file with a header of moderate size; raises SafetensorError or OSError otherwise.

    The library itself compares every tensor's place with the file's size, but reads headers of up to 100 MB.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _MOST_HEADER:
        raise safetensors.SafetensorError(f"its header would have {header} bytes, {_MOST_HEADER} are read at most")
    return path


def read_safetensors(path: Path, label: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; raises DataError if it is torn."""
    try:
        return safetensors.torch.load_file(check_tensors(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise unreadable(path, label, error) from None
