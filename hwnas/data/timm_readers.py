"""Data sets that timm's readers read: Hugging Face data sets on disk (Arrow, parquet), and tar files."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from hwnas.data.contents import Contents, digest
from hwnas.data.dataset import DatasetInfo, DatasetOptions, Listing
from hwnas.data.decoding import Decoder, look
from hwnas.data.folder import ALIASES, EXTENSIONS, PART_OF, is_left_behind, open_image
from hwnas.data.forms import number_labels
from hwnas.errors import ConfigError, DataError
from hwnas.lazy import timm
from hwnas.system.paths import home

if TYPE_CHECKING:
    from PIL import Image

PREFIX = "timm:"
OPTIONS = {"input_key": "image", "target_key": "label"}  # of dataset.options: columns of images and labels
KINDS = "timm:hfds (Hugging Face data sets and parquet files in dataset.root), timm:hfds/NAME (with " \
        "dataset.download=true) or timm:tar (dataset.root: a tar file, or a folder of train.tar, val.tar, test.tar)"


class Reader(Protocol):
    """The images of one part: labels in order, numbers by the names of classes, and a text that tells the content."""

    targets: list[Any]
    class_to_idx: dict[str, int]
    mark: str

    def read(self, row: int) -> bytes:
        """The file of the image in this row."""
        ...


@dataclass(frozen=True, slots=True)
class ReaderImage:
    """One image that a reader finds; readers share a file, so only one thread at a time reads from it."""

    reader: Reader
    lock: Lock
    row: int
    name: str

    def open(self) -> Image.Image:
        with self.lock:
            content = self.reader.read(self.row)
        return open_image(io.BytesIO(content))


class TableReader:
    """A split of a Hugging Face data set."""

    def __init__(self, table: Any, input_key: str, target_key: str) -> None:
        import datasets

        if missing := sorted({input_key, target_key} - {*table.column_names}):
            raise KeyError(f"no column {missing[0]}; there are {', '.join(table.column_names)}")
        self._table = table.cast_column(input_key, datasets.Image(decode=False))
        self._input_key, self.targets, self.mark = input_key, list(self._table[target_key]), self._table._fingerprint
        names = getattr(table.features.get(target_key), "names", None) or ()
        self.class_to_idx = {name: number for number, name in enumerate(names)}

    def read(self, row: int) -> bytes:
        """See `Reader`."""
        image = self._table[row][self._input_key]
        if image is None:
            raise OSError("there is no image in this row")
        return bytes(image["bytes"] or Path(image["path"]).read_bytes())


class TarReader:
    """The images that timm finds in a tar file, read in place. (timm's own reader leaves the file open, and knows fewer
    formats.)"""

    def __init__(self, path: Path) -> None:
        reader = timm.data.readers.reader_image_in_tar
        samples, targets, numbers, _ = reader.extract_tarinfos(str(path), cache_tarinfo=False, extensions=EXTENSIONS)
        status = os.stat(path)
        self.path, self.mark = path, f"{path.name}:{status.st_size}:{status.st_mtime_ns}"
        folders = [Path(image.path).parts for image, _, _ in samples]
        parts = sorted({each for above in folders for each in above[:-2] if each.strip().lower() in PART_OF})
        if len({PART_OF[each.strip().lower()] for each in parts}) > 1:
            raise DataError(f"{path}: {' and '.join(f'{each}/' for each in parts)} would be mixed. Unpack it and give "
                            "the folder, or give a folder of train.tar and test.tar.")
        kept = [row for row, above in enumerate(folders) if not any(map(is_left_behind, above))]
        self.targets = [int(targets[row]) for row in kept]
        present = {*self.targets}
        self.class_to_idx = {name: number for name, number in numbers.items() if number in present}
        self._places = [(image.offset_data + (inner.offset_data if inner is not None else 0), image.size)
                        for image, _, inner in samples[kept]]

    def read(self, row: int) -> bytes:
        """See `Reader`."""
        start, size = self._places[row]
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(size)


def timm_reader(options: DatasetOptions) -> Listing:
    """List the data set `timm:KIND`; DataError when it is not there or its labels cannot be told.

    Parts are the splits train, validation and test; without train there is nothing to learn from. Nothing is fetched
    without `download`.
    """
    kind, _, name = options.name.removeprefix(PREFIX).partition("/")
    if unknown := sorted({*options.options} - {*OPTIONS}):
        raise ConfigError(f"no option is called dataset.options.{unknown[0]}; there are: {', '.join(OPTIONS)}.")
    readers: Mapping[str, Reader]
    if kind == "hfds":
        contents = _files_below(options.root)
        readers = _hugging_face(name, options, contents)
    elif kind == "tar" and not name:
        readers = tars = _tar(options)
        paths = [reader.path for reader in tars.values()]
        contents = Contents.of(paths[0].parent, paths)
    else:
        raise ConfigError(f"dataset={options.name}: write {KINDS}.")
    if "train" not in readers:
        raise DataError(f"{_where(options)}: no split is called train; there is {', '.join(readers) or 'none'}.")
    return _listing(readers, options, contents)


def _files_below(root: Path | None) -> Contents | None:
    """What may hold the data set in a folder; None without one: what comes from elsewhere has its maker's name."""
    if root is None or not root.is_dir():
        return None
    return Contents.of(root, sorted(path for path in root.rglob("*") if path.is_file()
                                    and not any(part.startswith(".") for part in path.relative_to(root).parts)))


def _where(options: DatasetOptions) -> str:
    return str(options.root or options.name)


def _listing(readers: Mapping[str, Reader], options: DatasetOptions, contents: Contents | None) -> Listing:
    where = _where(options)
    named = {number: name for name, number in readers["train"].class_to_idx.items()}
    names, labels = number_labels({part: reader.targets for part, reader in readers.items()},
                                  {part: len(reader.targets) for part, reader in readers.items()}, where,
                                  [named[number] for number in sorted(named)] or None)
    identity = digest(*names, *(f"{part} {reader.mark} {labels[part].tobytes().hex()}"
                                for part, reader in sorted(readers.items())))
    lock = Lock()
    sources = {part: [ReaderImage(reader, lock, row, f"{where}: {part} image {row}")
                      for row in range(len(labels[part]))] for part, reader in readers.items()}
    channels, native_size = look(sources["train"], options, where)
    reader = Decoder(sources, channels, options,
                     lambda: identity if contents is None else digest(identity, contents.identity))
    return Listing(DatasetInfo(options.name, channels, len(names), native_size), names, labels, identity, where,
                   reader, contents, reader.left_out, pictures=True, survey=reader.survey)


def _tar(options: DatasetOptions) -> dict[str, TarReader]:
    """Readers of one tar file, or of train.tar, val.tar and test.tar in a folder; folders in them are classes."""
    root = options.root
    if root is None or not root.exists():
        fact = "dataset.root is not set" if root is None else f"{root}: not found"
        raise DataError(f"{fact}. Give dataset.root=FILE.tar, or a folder that holds train.tar.")
    files = {"train": root} if root.is_file() else {
        part: path for part, names in ALIASES.items() for name in names if (path := root / f"{name}.tar").is_file()}
    if not files:
        raise DataError(f"{root}: no train.tar. Give dataset.root=FILE.tar or a folder that holds train.tar.")
    try:
        readers = {part: TarReader(path) for part, path in files.items()}
    except (OSError, ValueError, AssertionError, EOFError) as error:
        raise DataError(f"{root}: cannot be read as tar of images ({' '.join(str(error).split())}). Give a whole one "
                        "with images in folders of classes.") from None
    numbers = readers["train"].class_to_idx if "train" in readers else {}
    for part, reader in readers.items():
        if unknown := sorted({*reader.class_to_idx} - {*numbers} if numbers else ()):
            raise DataError(f"{files[part]}: {files['train'].name} has no class {unknown[0]!r}. Give it training "
                            "images, or remove them.")
        by_number = {number: numbers.get(name, number) for name, number in reader.class_to_idx.items()}
        reader.targets = [by_number[target] for target in reader.targets]
    return readers


def _hugging_face(name: str, options: DatasetOptions, contents: Contents | None) -> dict[str, TableReader]:
    """Readers of a Hugging Face data set's splits: saved on disk, parquet files in a folder, or NAME by download."""
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
        return {part: TableReader(saved[split] if saved else datasets.load_dataset(place, split=split,
                                                                                   cache_dir=converted), *keys)
                for part, split in parts.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{_where(options)}: cannot be read as a data set ({reason}).") from None


def _load_saved(root: Path | None, datasets: Any) -> dict[str, Any]:
    """Splits of a data set that `save_to_disk` wrote; empty where it is something else."""
    if root is None or not ((root / "dataset_dict.json").is_file() or (root / "state.json").is_file()):
        return {}
    loaded = datasets.load_from_disk(str(root))
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
