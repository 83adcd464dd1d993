"""Arrays in .npy and .npz files: read without pickles, and held against the file's size before memory is taken."""

from __future__ import annotations

import math
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_FREE = 512 << 20  # bytes that an archive may unpack to, whatever its size
_MOST_PACKED = 100  # beyond that, how often larger than its file: images and labels shrink to a tenth at best
_MOST_LETTER = 0x10FFFF
Arrays = dict[str, NDArray[Any]]


def read_npz(file: Path | IO[bytes], size: int) -> Arrays:
    """Arrays of an .npz file of `size` bytes, by name. OSError; ValueError for anything that is none, holds objects, or
    claims more than there is."""
    arrays = Arrays()
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            if sum(member.file_size for member in members) > max(_FREE, _MOST_PACKED * size):
                raise ValueError("packed far too small for what it unpacks to")
            for member in members:
                with archive.open(member) as part:
                    _check_header(part, member.file_size)
                with archive.open(member) as part:
                    array = np.lib.format.read_array(part, allow_pickle=False)
                arrays[member.filename.removesuffix(".npy")] = _checked(array)
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for what is no archive
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    return arrays


def map_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file, mapped; raises what `read_npz` does."""
    try:
        with open(path, "rb") as file:
            _check_header(file, path.stat().st_size)
        return _checked(np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError:
        raise
    except Exception as error:  # as above
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _check_header(file: IO[bytes], size: int) -> None:
    """ValueError unless the header's shape and type are those of the `size` bytes."""
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in read:
        raise ValueError(f"version {version} of the format")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a header that Python 2 wrote
        shape, _, kind = read[version](file)
    if kind.hasobject or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != size - file.tell():
        raise ValueError(f"{kind} of shape {shape} is not what the file holds"[:200])


def _checked(array: NDArray[Any]) -> NDArray[Any]:
    """The array, unless it holds letters that there are not."""
    if array.dtype.kind == "U" and array.nbytes:
        codes = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if codes.max() > _MOST_LETTER:
            raise ValueError("letters that there are not")
    return array
