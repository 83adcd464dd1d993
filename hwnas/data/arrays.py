"""Data sets in arrays: digits and Fashion-MNIST as published, and a user's own .npz or .npy files."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.contents import Contents, hash_image
from hwnas.data.dataset import DatasetInfo, DatasetOptions, Images, Labels, Listing, Progress, Selection, resize
from hwnas.data.decoding import Decoder, LazyImage, look
from hwnas.data.folder import ALIASES, open_image
from hwnas.data.forms import number_labels, read_pixels
from hwnas.errors import ConfigError, DataError, did_you_mean, one_line
from hwnas.lazy import PIL
from hwnas.system.documents import read_bytes
from hwnas.system.paths import home
from hwnas.system.tables import map_npy, read_npz

FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
                   "Ankle boot")
_MOST_IDX = 256 << 20  # bytes; MNIST's largest file has 47 MB


def digits(options: DatasetOptions) -> Listing:
    """List scikit-learn's 1,797 handwritten digits, 8x8 grey (UCI, CC BY 4.0), embedded in the package; one part."""
    images, labels = digit_images()
    identity = hashlib.sha256(images.tobytes()).hexdigest()[:12]
    return array_listing(options, tuple(map(str, range(10))), {"train": labels}, lambda part: images, 8, identity,
                         "scikit-learn's digits")


def digit_images() -> tuple[Images, Labels]:
    """Return 1,797 images [n, 1, 8, 8] and labels, without importing scikit-learn, which takes longer than a trial."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("digits come with scikit-learn, which is not installed. Give: pip install scikit-learn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    sixteenths, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    return np.rint(sixteenths * (255 / 16)).astype(np.uint8), labels


def fashion_mnist(options: DatasetOptions) -> Listing:
    """List Fashion-MNIST (MIT, Zalando) as torchvision stores it: `root`/FashionMNIST/raw/*-ubyte[.gz]."""
    paths = _find_fashion_mnist(options)
    stems = {"train": "train", "test": "t10k"}
    labels = {part: read_idx(paths[f"{stem}-labels-idx1-ubyte"], 1).astype(np.int64) for part, stem in stems.items()}
    files = [path for _, path in sorted(paths.items())]
    return array_listing(options, FASHION_CLASSES, labels,
                         lambda part: read_idx(paths[f"{stems[part]}-images-idx3-ubyte"], 3)[:, None], 28,
                         "", str(files[0].parent), Contents.of(files[0].parent, files))


def array_listing(options: DatasetOptions, classes: tuple[str, ...], labels: Mapping[str, Labels],
                  images: Callable[[str], Images], native_size: int, identity: str, where: str,
                  contents: Contents | None = None) -> Listing:
    """List a data set of grey arrays. `images(part)` returns uint8 [n, 1, h, w], and is called when they are read."""
    def read(selection: Selection, image_size: int, progress: Progress | None
             ) -> list[tuple[Images, NDArray[np.bool_]]]:
        part_arrays = {part: images(part) for part in {part for part, _ in selection}}
        for part, array in part_arrays.items():
            if len(array) != len(labels[part]):
                raise DataError(f"{where}: {len(array)} images but {len(labels[part])} labels in the {part} part. "
                                "Fetch the files again.")
        return [(resize(part_arrays[part][rows], image_size), np.ones(len(rows), bool)) for part, rows in selection]

    if options.channels not in (None, 1):
        raise ConfigError(f"dataset.channels: {options.name} has 1, got {options.channels}.")
    for part, values in labels.items():
        if values.size == 0 or values.min() < 0 or values.max() >= len(classes):
            raise DataError(f"{where}: labels of the {part} part must be in 0..{len(classes) - 1}. "
                            "Fetch the files again.")
    return Listing(DatasetInfo(options.name, 1, len(classes), native_size), classes, dict(labels), identity, where,
                   read, contents, pictures=False)


def _find_fashion_mnist(options: DatasetOptions) -> dict[str, Path]:
    """Return the files by name, plain or .gz, in the first folder under the root that holds one of them. If there is
    none and the options allow it, torchvision downloads them."""
    names = [f"{stem}-{kind}-ubyte" for stem in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    root = options.root or home() / "data" / options.name
    for folder in (root / "FashionMNIST" / "raw", root / "raw", root):
        paths = {name: path for name in names for end in ("", ".gz") if (path := folder / (name + end)).is_file()}
        if len(paths) == len(names):
            return paths
        if paths:
            missing_name = next(name for name in names if name not in paths)
            raise DataError(f"{folder}: {missing_name} is missing. Fetch the data set again.")
    if options.download:
        from torchvision.datasets import FashionMNIST
        from torchvision.datasets.utils import download_url

        try:
            for name, md5 in FashionMNIST.resources:
                download_url(FashionMNIST.mirrors[0] + name, str(root / "FashionMNIST" / "raw"), name, md5)
        except (OSError, RuntimeError) as error:
            raise DataError(f"cannot download {options.name}: {one_line(error)}. Fetch it elsewhere and give "
                            "dataset.root=FOLDER.") from error
        return _find_fashion_mnist(replace(options, download=False))
    hint = "" if options.root else " (dataset.root is not set)"
    raise DataError(f"no {options.name} in {root}{hint}. Give dataset.root=FOLDER that holds "
                    "FashionMNIST/raw/*-ubyte.gz, or dataset.download=true to fetch it.")


def read_idx(path: Path, dimensions: int) -> Images:
    """Return the array of an IDX file of unsigned bytes (LeCun's MNIST format), gzipped or not; otherwise DataError."""
    try:
        content = read_bytes(path, _MOST_IDX)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Fetch the file again.") from error
    # Four bytes (0, 0, the type, the number of axes), an int32 for each axis, then the values.
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
        raise DataError(f"{path}: not an IDX file of {dimensions} dimensions. Fetch the file again.")
    shape = np.frombuffer(content, ">i4", dimensions, 4).astype(int)
    if len(content) - start != shape.prod():
        raise DataError(f"{path}: {len(content) - start} bytes where {shape.prod()} belong. Fetch the file again.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


LAYOUT = ("images ([n, h, w], [n, h, w, c] or [n, c, h, w]; uint8, or floats from 0 to 1) and labels (numbers or "
          "names, [n]); for sets held apart train_images, train_labels, test_images, test_labels and val_images, "
          "val_labels; class_names if labels are numbers")
_FILES = ("files", "ends", "names")  # in place of images: whole image files end to end, where each ends, its name


def array_files(options: DatasetOptions) -> Listing:
    """List `root`: an .npz file, or a folder of .npy files, with the arrays of LAYOUT. DataError names what is wrong.
    Images are resized in the same way as images in folders: the same data in either form train the same networks."""
    root = options.find_root(f"Give dataset.root=FILE.npz, or a folder of .npy files, that holds {LAYOUT}.",
                         may_be_file=True)
    arrays = read_parts(_load(root), str(root))
    names = tuple(map(str, arrays["class_names"].tolist()))
    labels = {part: arrays[f"{part}_labels"] for part in ALIASES if f"{part}_labels" in arrays}
    contents = {part: list(arrays[f"{part}_images"]) if f"{part}_images" in arrays else
                np.split(arrays[f"{part}_files"], arrays[f"{part}_ends"][:-1]) for part in labels}
    sources = {part: _sources(arrays, part, contents[part], str(root)) for part in labels}
    identity = identity_of(arrays)
    channels, native_size = look(sources["train"], options, str(root))
    reader = Decoder(sources, channels, options, lambda: identity)
    return Listing(DatasetInfo(options.name, channels, len(names), native_size), names, labels, identity, str(root),
                   reader, left_out=reader.left_out, pictures=True, survey=reader.survey,
                   keys=lambda: {part: [hash_image(content.tobytes()) for content in of_part]
                                 for part, of_part in contents.items()})


def _sources(arrays: Mapping[str, NDArray[Any]], part: str, contents: Sequence[Images], where: str) -> list[LazyImage]:
    """Return the images of a part: pixels uint8 [h, w] or [h, w, c], or the bytes of files, which have names."""
    names = arrays[f"{part}_names"].tolist() if f"{part}_names" in arrays else None

    def open_one(content: Images) -> PIL.Image.Image:
        return PIL.Image.fromarray(content) if names is None else open_image(io.BytesIO(content.tobytes()))

    return [LazyImage(f"{where}: {part} image {row}{f' ({name})' if name else ''}", partial(open_one, content))
            for row, (content, name) in enumerate(zip(contents, names or [""] * len(contents), strict=True))]


def _load(root: Path) -> dict[str, NDArray[Any]]:
    """Return arrays by name; arrays of .npy files are mapped, not read. Nothing is unpickled."""
    files = sorted(root.glob("*.npy")) if root.is_dir() else [root]
    arrays: dict[str, NDArray[Any]] = {}
    for path in files:
        try:
            if path.suffix == ".npy":
                arrays[path.stem] = map_npy(path)
            else:
                arrays |= read_npz(path, path.stat().st_size)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as an array ({error}). Save it with numpy.save or numpy.savez, "
                            "without objects.") from None
    return arrays


def read_parts(arrays: Mapping[str, Any], where: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a data set in one form, whatever form they are given in.

    Args:
        arrays: As in LAYOUT; x_train, y_train, x_test, y_test and so on are names of the same.
        where: The place that error messages name.

    Returns:
        `PART_images` uint8 (or the arrays of image files) and `PART_labels` int64 of each part, and `class_names`.

    Raises:
        DataError: Something is missing, or makes no sense.
    """
    # 1. Give each array its name in LAYOUT.
    arrays = name_arrays(arrays, where)
    for name in _CALLED:
        if name in arrays and np.ndim(arrays[name]) == 1 and np.asarray(arrays[name]).dtype.kind in "UO":
            arrays.setdefault("class_names", arrays[name])
    if unknown := [name for name in arrays if name not in _KNOWN and _LIKE_OURS.fullmatch(name.lower())]:
        raise DataError(f"{where}: the array {unknown[0]!r} is not known.{did_you_mean(unknown[0], [*NAMES])} Call it "
                        f"as one of these, or leave it out: {LAYOUT}.")
    # 2. Read the images of each part, which needs labels too; the labels of all parts are numbered together.
    images: dict[str, NDArray[Any]] = {}
    labels, counts = {}, {}
    for part in ALIASES:
        image_names = [name for name in (f"{part}_images", f"{part}_ends") if name in arrays]
        has_labels = f"{part}_labels" in arrays
        if bool(image_names) != has_labels:
            kinds = ("labels", "images") if has_labels else ("images", "labels")
            raise DataError(f"{where}: {part}_{kinds[0]} without {part}_{kinds[1]}. Give both.")
        if not image_names:
            continue
        labels[part] = arrays[f"{part}_labels"]
        if image_names == [f"{part}_images"]:
            images[image_names[0]] = read_pixels(arrays[image_names[0]], f"{where}: {image_names[0]}")
        else:
            file_arrays = [f"{part}_{kind}" for kind in _FILES]
            if missing := [name for name in file_arrays if name not in arrays]:
                raise DataError(f"{where}: {part}_ends without {missing[0]}. Give all of {', '.join(file_arrays)}.")
            images |= {name: arrays[name] for name in file_arrays}
        counts[part] = len(images[image_names[0]])
    if "train" not in labels:
        raise DataError(f"{where}: no images and labels; there is {', '.join(sorted(arrays)) or 'nothing'}. "
                        f"It must hold {LAYOUT}.")
    names, numbers = number_labels(labels, counts, where, arrays.get("class_names"))
    return {**images, **{f"{part}_labels": array for part, array in numbers.items()}, "class_names": np.asarray(names)}


def name_arrays(arrays: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return arrays by their names in LAYOUT. Raises DataError if two of them have the same name there."""
    named: dict[str, Any] = {}
    for name, array in arrays.items():
        ours = NAMES.get(str(name), str(name))
        if ours in named:
            raise DataError(f"{where}: {name!r} is another name of {ours}, which is there already. Give one of them.")
        named[ours] = array
    return named


# Other names of arrays: without a part, as Keras has them, and with other words for validation.
NAMES = {"images": "train_images", "x": "train_images", "X": "train_images", "labels": "train_labels",
         "y": "train_labels"} | {
    pattern.format(alias): f"{part}_{kind}" for part, aliases in ALIASES.items() for alias in aliases
    for kind, patterns in (("images", ("{}_images", "x_{}", "X_{}")), ("labels", ("{}_labels", "y_{}")))
    for pattern in patterns}
_KNOWN = {*NAMES.values(), "class_names", *(f"{part}_{name}" for part in ALIASES for name in _FILES)}
_LIKE_OURS = re.compile("(x|y)_.*|(.*_)?(images?|labels?)")
_CALLED = ("label_names", "classes")  # other names of class_names


def identity_of(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return twelve digits that change with any pixel, label or name of a class."""
    text = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        if name.endswith("_names") and name != "class_names":
            continue  # names of files are for messages only
        text.update(f"{name}{array.shape}{array.dtype}".encode())
        for start in range(0, len(array), 4096):
            text.update(np.ascontiguousarray(array[start:start + 4096]).tobytes())
    return text.hexdigest()[:12]
