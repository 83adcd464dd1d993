"""Data sets in other files than images: Hugging Face data sets on disk, parquet files, and tar files of images."""

from __future__ import annotations

import io
import os
import tarfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

import numpy as np

from hwnas.data.contents import Contents, digest, hash_image
from hwnas.data.dataset import DatasetInfo, DatasetOptions, Listing
from hwnas.data.decoding import Decoder, LazyImage, look
from hwnas.data.folder import ALIASES, PART_OF, is_image, is_left_behind, open_image
from hwnas.data.forms import number_labels
from hwnas.errors import ConfigError, DataError, one_line
from hwnas.lazy import PIL
from hwnas.system.paths import home

PREFIX = "timm:"
_GIVE_TAR = "Give dataset.root=FILE.tar, or a folder that holds train.tar."
OPTIONS = {"input_key": "image", "target_key": "label"}  # of dataset.options: columns of images and labels
KINDS = "timm:hfds (a saved Hugging Face data set, or parquet files, in dataset.root) or timm:tar (dataset.root: a " \
        "tar file, or a folder of train.tar, val.tar, test.tar)"


@dataclass(frozen=True, slots=True)
class Part:
    """The images of one part, each with its label. `class_names` has the names of the labels 0, 1 …, or the labels
    themselves if they are names. `read` returns the file of the image in a row."""

    labels: Sequence[Any]
    class_names: Sequence[str]
    read: Callable[[int], bytes]


def timm_reader(options: DatasetOptions) -> Listing:
    """List the data set `timm:KIND`. DataError if it is not there, or its labels are unclear. Parts are the splits
    train, validation and test; without train there is nothing to learn from."""
    kind = options.name.removeprefix(PREFIX)
    if unknown := sorted({*options.options} - {*OPTIONS}):
        raise ConfigError(f"no option is called dataset.options.{unknown[0]}; there are: {', '.join(OPTIONS)}.")
    if kind not in ("hfds", "tar"):
        raise ConfigError(f"dataset={options.name}: write {KINDS}.")
    contents, parts = (_read_tables if kind == "hfds" else _read_tars)(options)
    where = str(options.root)
    if "train" not in parts:
        raise DataError(f"{where}: no split is called train; there is {', '.join(parts) or 'none'}.")
    # 1. Leave out parts without labels, such as test parts of contests; they have None or -1.
    unlabelled_parts = [name for name, part in parts.items() if name != "train" and all(
        label is None or (type(label) is int and label == -1) for label in part.labels)]
    parts = {name: part for name, part in parts.items() if name not in unlabelled_parts}
    # 2. Number the classes that occur: a filtered data set still names all of its classes.
    names, labels = number_labels({name: _labels_of(part, parts, where) for name, part in parts.items()},
                                  {name: len(part.labels) for name, part in parts.items()}, where,
                                  [*parts["train"].class_names] or None)
    used_labels = np.unique(np.concatenate([*labels.values()]))
    names, labels = tuple(names[at] for at in used_labels), {
        name: np.searchsorted(used_labels, own) for name, own in labels.items()}
    sources = {name: [LazyImage(f"{where}: {name} image {row}", partial(_open, part, row))
                      for row in range(len(part.labels))] for name, part in parts.items()}
    channels, native_size = look(sources["train"], options, where)
    reader = Decoder(sources, channels, options, lambda: digest(contents.identity, *sorted(options.options.items())))
    return Listing(DatasetInfo(options.name, channels, len(names), native_size), names, labels, "", where,
                   reader, contents, reader.left_out, pictures=True, survey=reader.survey, keys=lambda: {
                       name: [_key_of(part, row) for row in range(len(part.labels))] for name, part in parts.items()},
                   remarks=[f"the {name} part has no labels and is left out" for name in unlabelled_parts])


def _labels_of(part: Part, parts: Mapping[str, Part], where: str) -> Sequence[Any]:
    """Return the labels of a part: names in place of numbers if the parts count their classes differently."""
    names = part.class_names or parts["train"].class_names
    if len({tuple(each.class_names) for each in parts.values()}) == 1 or not names or not all(
            type(label) is int for label in part.labels):
        return part.labels
    if wrong := [label for label in part.labels if not 0 <= label < len(names)]:
        raise DataError(f"{where}: label {wrong[0]}, and there are {len(names)} classes. Leave it out.")
    return [names[label] for label in part.labels]


def _open(part: Part, row: int) -> PIL.Image.Image:
    return open_image(io.BytesIO(part.read(row)))


def _key_of(part: Part, row: int) -> str:
    """Name the content of the image in a row; an image that cannot be read is like no other."""
    try:
        return hash_image(part.read(row))
    except OSError:
        return f"row {row}"


def _read_tars(options: DatasetOptions) -> tuple[Contents, dict[str, Part]]:
    """Read one tar file, or train.tar, val.tar and test.tar in a folder; inside them, folders are classes."""
    root = options.find_root(_GIVE_TAR, may_be_file=True)
    files = {"train": root} if root.is_file() else {
        part: path for part, names in ALIASES.items() for name in names if (path := root / f"{name}.tar").is_file()}
    if not files:
        raise DataError(f"{root}: no train.tar. {_GIVE_TAR}")
    parts = {}
    for name, path in files.items():
        try:
            parts[name] = _read_tar(path)
        except (OSError, ValueError, EOFError, tarfile.TarError) as error:
            raise DataError(f"{path}: cannot be read as tar of images ({one_line(error)}). Give a whole one with "
                            "images in folders of classes.") from None
    for name, part in parts.items():
        if "train" in parts and (unknown := sorted({*part.labels} - {*parts["train"].class_names})):
            raise DataError(f"{files[name]}: {files['train'].name} has no class {unknown[0]!r}. Give it training "
                            "images, or remove them.")
    return Contents.of(next(iter(files.values())).parent, files.values()), parts


def _read_tar(path: Path) -> Part:
    """Return the images in a tar file by name, read in place. The folder of an image is its class."""
    # 1. The place of each image in the file; a compressed file has none.
    with tarfile.open(path, "r:") as tar:
        files = [member for member in tar if member.isreg()]
    images = {PurePosixPath(member.name): (member.offset_data, member.size) for member in files
              if is_image(member.name)}
    is_web = any(member.name.endswith(".cls") for member in files)
    places = sorted(place for place in images if not any(map(is_left_behind, place.parts)))
    if not places:
        raise ValueError("it has none")
    # 2. Refuse files whose folders are no classes: none at all, parts, two of one name, or one inside of another.
    if is_web or all(len(place.parts) == 1 for place in places):
        raise DataError(f"{path}: its images are in no folders, which are the classes (a WebDataset, whose labels are "
                        "files, is not read). Unpack it into a folder for each class.")
    part_names = sorted({each for place in places for each in place.parts[:-2] if each.strip().lower() in PART_OF})
    if len({PART_OF[each.strip().lower()] for each in part_names}) > 1:
        raise DataError(f"{path}: {' and '.join(f'{each}/' for each in part_names)} would be mixed. Unpack it and give "
                        "the folder, or give a folder of train.tar and test.tar.")
    folders = defaultdict[str, set[PurePosixPath]](set)
    for place in places:
        folders[place.parent.name].add(place.parent)
    if twins := next((sorted(each) for each in folders.values() if len(each) > 1), None):
        raise DataError(f"{path}: {twins[0]}/ and {twins[1]}/ would be one class, as the last folder is a file's "
                        "class. Rename one, or unpack it and give the folder.")
    parents = {place.parent for place in places}
    if inner := next((each for each in sorted(parents) if parents & {*each.parents}), None):
        outer = next(each for each in inner.parents if each in parents)
        raise DataError(f"{path}: {outer}/ and {inner}/ in it both hold images, and would be two classes. Move the "
                        "images of one, or unpack it and give the folder.")

    def read(row: int) -> bytes:
        start, size = images[places[row]]
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)

    return Part([place.parent.name for place in places], sorted(folders), read)


def _read_tables(options: DatasetOptions) -> tuple[Contents, dict[str, Part]]:
    """Read a Hugging Face data set's splits: saved on disk, or parquet files in a folder."""
    root = options.find_root("Give dataset.root=FOLDER that holds a saved data set or parquet files.")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import datasets
    except ImportError:
        raise DataError("timm:hfds needs the package datasets. Install it: pip install 'hwnas[datasets]'.") from None
    datasets.disable_progress_bars()
    contents = Contents.of(root, sorted(path for path in root.rglob("*") if path.is_file() and not any(
        part.startswith(".") for part in path.relative_to(root).parts)))
    keys = [str(options.options.get(name, default)) for name, default in OPTIONS.items()]
    try:
        if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():  # save_to_disk wrote it
            saved = datasets.load_from_disk(str(root))
            tables = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        else:  # The package caches files by their age: so each content gets a folder of its own.
            tables = datasets.load_dataset(
                str(root), cache_dir=str(home() / "cache" / "datasets" / contents.identity))
        parts: dict[str, Part] = {}
        for split, table in tables.items():
            if (name := PART_OF.get(split.lower())) is None or name in parts:
                fault = "is none of train, validation and test" if name is None else "means the same as another one"
                raise DataError(f"{root}: split {split!r} {fault}. Rename it, or leave it out.")
            parts[name] = _read_table(table.with_format(None), str(root), *keys)  # plain values
        return contents, parts
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{root}: cannot be read as a data set ({one_line(error)}).") from None


def _read_table(table: Any, where: str, input_key: str, target_key: str) -> Part:
    import datasets

    if missing_columns := sorted({input_key, target_key} - {*table.column_names}):
        raise DataError(f"{where}: no column {missing_columns[0]!r} among {', '.join(table.column_names)}. Give "
                        "dataset.options.input_key=IMAGES dataset.options.target_key=LABELS with their names.")
    # Without its other columns, as the package would decode all that are in a row: masks, sounds.
    images, lock = table.select_columns([input_key]).cast_column(input_key, datasets.Image(decode=False)), Lock()

    def read(row: int) -> bytes:
        with lock:  # a table may be read by one thread at a time
            image = images[row][input_key]
        if image is None:
            raise OSError("there is no image in this row")
        return bytes(image["bytes"] or Path(image["path"]).read_bytes())

    names = getattr(table.features.get(target_key), "names", None) or ()
    return Part(list(table[target_key]), names, read)
