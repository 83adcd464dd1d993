"""Data sets that timm's readers read: Hugging Face data sets on disk (Arrow, parquet), and tar files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from hwnas.data.contents import Contents, digest
from hwnas.data.dataset import DatasetInfo, DatasetOptions, Listing
from hwnas.data.decoding import Decoder, LazyImage, look
from hwnas.data.folder import ALIASES, EXTENSIONS, PART_OF, is_left_behind, open_image
from hwnas.data.forms import number_labels
from hwnas.errors import ConfigError, DataError
from hwnas.lazy import PIL, timm
from hwnas.system.paths import home

PREFIX = "timm:"
OPTIONS = {"input_key": "image", "target_key": "label"}  # of dataset.options: columns of images and labels
KINDS = "timm:hfds (Hugging Face data sets and parquet files in dataset.root), timm:hfds/NAME (with " \
        "dataset.download=true) or timm:tar (dataset.root: a tar file, or a folder of train.tar, val.tar, test.tar)"


@dataclass(frozen=True, slots=True)
class Part:
    """The images of one part.

    `labels` are in their order; `class_names` says what the labels 0, 1 … are called, or which names there are. `mark`
    tells the content. `read` gives the file of the image in a row.
    """

    labels: Sequence[Any]
    class_names: Sequence[str]
    mark: str
    read: Callable[[int], bytes]


def _read_table(table: Any, input_key: str, target_key: str) -> Part:
    """A split of a Hugging Face data set."""
    import datasets

    if missing := sorted({input_key, target_key} - {*table.column_names}):
        raise KeyError(f"no column {missing[0]}; there are {', '.join(table.column_names)}")
    images = table.cast_column(input_key, datasets.Image(decode=False))

    def read(row: int) -> bytes:
        image = images[row][input_key]
        if image is None:
            raise OSError("there is no image in this row")
        return bytes(image["bytes"] or Path(image["path"]).read_bytes())

    names = getattr(table.features.get(target_key), "names", None) or ()
    return Part(list(images[target_key]), names, images._fingerprint, read)


def _read_tar(path: Path) -> Part:
    """The images that timm lists in a tar file, read in place. (timm's own reader leaves the file open, and knows fewer
    formats.)"""
    reader = timm.data.readers.reader_image_in_tar
    samples, targets, numbers, _ = reader.extract_tarinfos(str(path), cache_tarinfo=False, extensions=EXTENSIONS)
    status = os.stat(path)
    places = [PurePosixPath("" if inner is None else inner.path, image.path) for image, _, inner in samples]
    parts = sorted({each for place in places for each in place.parts[:-2] if each.strip().lower() in PART_OF})
    if len({PART_OF[each.strip().lower()] for each in parts}) > 1:
        raise DataError(f"{path}: {' and '.join(f'{each}/' for each in parts)} would be mixed. Unpack it and give "
                        "the folder, or give a folder of train.tar and test.tar.")
    kept = [row for row, place in enumerate(places) if not any(map(is_left_behind, place.parts))]
    names, folders = list(numbers), dict[str, PurePosixPath]()
    labels = [names[targets[row]] for row in kept]
    for row, label in zip(kept, labels, strict=True):
        if (first := folders.setdefault(label, places[row].parent)) != places[row].parent:
            raise DataError(f"{path}: {first}/ and {places[row].parent}/ would be one class, as the last folder is a "
                            "file's class. Rename one, or unpack it and give the folder.")
    starts = [image.offset_data + (0 if inner is None else inner.offset_data) for image, _, inner in samples[kept]]

    def read(row: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(starts[row])
            return file.read(samples[kept[row]][0].size)

    return Part(labels, [name for name in names if name in folders],
                f"{path.name}:{status.st_size}:{status.st_mtime_ns}", read)


def timm_reader(options: DatasetOptions) -> Listing:
    """List the data set `timm:KIND`; DataError when it is not there or its labels cannot be told.

    Parts are the splits train, validation and test; without train there is nothing to learn from. Nothing is fetched
    without `download`.
    """
    kind, _, name = options.name.removeprefix(PREFIX).partition("/")
    if unknown := sorted({*options.options} - {*OPTIONS}):
        raise ConfigError(f"no option is called dataset.options.{unknown[0]}; there are: {', '.join(OPTIONS)}.")
    if kind == "hfds":
        contents = _files_below(options.root)
        parts = _hugging_face(name, options, contents)
    elif kind == "tar" and not name:
        files = _tar_files(options.root)
        contents = Contents.of(next(iter(files.values())).parent, files.values())
        parts = _read_tars(files)
    else:
        raise ConfigError(f"dataset={options.name}: write {KINDS}.")
    where = str(options.root or options.name)
    if "train" not in parts:
        raise DataError(f"{where}: no split is called train; there is {', '.join(parts) or 'none'}.")
    names, labels = number_labels({name: part.labels for name, part in parts.items()},
                                  {name: len(part.labels) for name, part in parts.items()}, where,
                                  [*parts["train"].class_names] or None)
    identity = digest(*names, *(f"{name} {part.mark} {labels[name].tobytes().hex()}"
                                for name, part in sorted(parts.items())))
    lock = Lock()
    sources = {name: [LazyImage(f"{where}: {name} image {row}", partial(_open, part, row, lock))
                      for row in range(len(part.labels))] for name, part in parts.items()}
    channels, native_size = look(sources["train"], options, where)
    reader = Decoder(sources, channels, options,
                     lambda: identity if contents is None else digest(identity, contents.identity))
    return Listing(DatasetInfo(options.name, channels, len(names), native_size), names, labels, identity, where,
                   reader, contents, reader.left_out, pictures=True, survey=reader.survey)


def _open(part: Part, row: int, lock: Lock) -> PIL.Image.Image:
    """The image in a row; what reads a table may be used by one thread at a time."""
    with lock:
        content = part.read(row)
    return open_image(io.BytesIO(content))


def _files_below(root: Path | None) -> Contents | None:
    """Return the files in a folder that may hold the data set; None without one: such data have their maker's name."""
    if root is None or not root.is_dir():
        return None
    return Contents.of(root, sorted(path for path in root.rglob("*") if path.is_file()
                                    and not any(part.startswith(".") for part in path.relative_to(root).parts)))


def _tar_files(root: Path | None) -> dict[str, Path]:
    """One tar file, or train.tar, val.tar and test.tar in a folder."""
    if root is None or not root.exists():
        fact = "dataset.root is not set" if root is None else f"{root}: not found"
        raise DataError(f"{fact}. Give dataset.root=FILE.tar, or a folder that holds train.tar.")
    files = {"train": root} if root.is_file() else {
        part: path for part, names in ALIASES.items() for name in names if (path := root / f"{name}.tar").is_file()}
    if not files:
        raise DataError(f"{root}: no train.tar. Give dataset.root=FILE.tar or a folder that holds train.tar.")
    return files


def _read_tars(files: Mapping[str, Path]) -> dict[str, Part]:
    """The parts in tar files, in which folders are classes."""
    parts = {}
    for name, path in files.items():
        try:
            parts[name] = _read_tar(path)
        except (OSError, ValueError, AssertionError, EOFError) as error:
            raise DataError(f"{path}: cannot be read as tar of images ({' '.join(str(error).split())}). Give a whole "
                            "one with images in folders of classes.") from None
    for name, part in parts.items():
        if "train" in parts and (unknown := sorted({*part.labels} - {*parts["train"].class_names})):
            raise DataError(f"{files[name]}: {files['train'].name} has no class {unknown[0]!r}. Give it training "
                            "images, or remove them.")
    return parts


def _hugging_face(name: str, options: DatasetOptions, contents: Contents | None) -> dict[str, Part]:
    """A Hugging Face data set's splits: saved on disk, parquet files in a folder, or NAME by download."""
    root = options.root
    if root is None and not (name and options.download):
        raise DataError(f"dataset={options.name}: nothing is fetched without dataset.download=true. Give "
                        "dataset.root=FOLDER that holds a saved data set or parquet files.")
    if root is not None and not root.is_dir():
        raise DataError(f"{root}: no such folder. Give dataset.root=FOLDER that holds a saved data set or parquet "
                        "files.")
    if root is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import datasets
    except ImportError:
        raise DataError("timm:hfds needs the package datasets. Install it: pip install 'hwnas[datasets]'.") from None
    datasets.disable_progress_bars()
    try:
        saved = _load_saved(root, datasets)
        place = name if root is None else str(root)
        splits = list(saved) if saved else datasets.get_dataset_split_names(place)
        parts = {part: split for part, aliases in ALIASES.items() for split in splits if split in aliases}
        # The package converts files, and knows them by their age. So each content gets a folder of its own.
        converted = str(home() / "cache" / "datasets" / (contents.identity if contents and not saved else ""))
        keys = [str(options.options.get(name, default)) for name, default in OPTIONS.items()]
        return {part: _read_table(saved[split] if saved else datasets.load_dataset(place, split=split,
                                                                                   cache_dir=converted), *keys)
                for part, split in parts.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{root or options.name}: cannot be read as a data set ({reason}).") from None


def _load_saved(root: Path | None, datasets: Any) -> dict[str, Any]:
    """Splits of a data set that `save_to_disk` wrote; empty where it is something else."""
    if root is None or not ((root / "dataset_dict.json").is_file() or (root / "state.json").is_file()):
        return {}
    loaded = datasets.load_from_disk(str(root))
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
