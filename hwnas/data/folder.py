"""Images in folders, one folder for each class: they are found and checked."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hwnas.data.contents import UNREADABLE, Contents, state_of
from hwnas.data.dataset import CLASSIFICATION, DETECTION, DatasetInfo, DatasetOptions, Listing, left_out_text
from hwnas.data.decoding import Decoder, look
from hwnas.data.file_kinds import HEAD, WrongKind, kind_of_file
from hwnas.data.forms import tell_apart
from hwnas.errors import DataError, did_you_mean
from hwnas.lazy import PIL

if TYPE_CHECKING:
    from PIL import Image

_LEFT_BEHIND = {"__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found", "system volume information",
                "__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini"}  # made by systems, besides hidden files
_LEFT_REASON = "hidden or made by a system"
_UP_REASON = "link to a folder that is listed already"
_BESIDE_REASON = "image beside folders"
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
PLUGINS = (".avif", ".heic", ".heif")  # read if this Pillow can
ALIASES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
PART_OF = {alias: part for part, aliases in ALIASES.items() for alias in aliases}
_LIKE_PART = re.compile(rf"(?:.*[^a-z])?({'|'.join(PART_OF)})(?:set|data|images)?(?:[^a-z].*)?")
_GIVE_TABLE = ("Give a folder of parquet files, dataset=timm:hfds dataset.root=FOLDER; or in Python a table: "
               "hwnas.search(target, pandas.read_csv(FILE)).")
_GIVE = "Give dataset.root=FOLDER that holds train/ and val/, or one folder per class."


def image_folder(options: DatasetOptions) -> Listing:
    """List a folder in torchvision's layout ImageFolder, once or in train/, val/, test/. DataError names what is wrong.

    Grey files make one channel. One colour file among the samples of `look` makes three (`channels` overrides that).
    """
    if options.root is not None and options.root.is_file():
        is_table = options.root.suffix in (".csv", ".tsv", ".parquet")
        raise DataError(f"{options.root}: a file, not a folder of images. {_GIVE_TABLE if is_table else _GIVE}")
    # 1. Find the folder of each part, and of each class in it.
    root, left_out = options.find_root(_GIVE), Counter[str]()
    folders = _parts(root, left_out)
    places = {part: _class_folders(folder, left_out) for part, folder in folders.items()}
    names = tuple(places["train"])
    # 2. Refuse a root that is too high, or whose folders are no classes.
    if folders == {"train": root} and (nested := _find_nested(root, names)) is not None:
        raise DataError(f"{root}: the classes are further down. Did you mean dataset.root={nested}?")
    if len(names) == 1 and _folders(class_folder := folders["train"] / places["train"][names[0]], Counter()):
        raise DataError(f"{folders['train']}: the classes are further down, in {class_folder.name}/. Move them up.")
    _refuse_versions(folders["train"], names)
    # 3. List the images of each part; other parts may lack classes of the training part, but have no others.
    files, remarks = {}, []
    for part, folder in folders.items():
        if unknown_names := sorted({*places[part]} - {*names}):
            raise DataError(f"{folder}: {folders['train'].name}/ has no class {_few(unknown_names)}."
                            f"{did_you_mean(unknown_names[0], names)} Give it training images, or remove its folder.")
        files[part], empty_labels = _files(folder, [places[part].get(name) for name in names], left_out)
        if empty_labels and (part == "train" or not files[part]):
            place = folder / places[part][names[empty_labels[0]]] if part == "train" else folder
            explanation = "; ".join(filter(None, (", ".join(EXTENSIONS), left_out_text(left_out))))
            raise DataError(f"{place}: no images ({explanation}). Add some or remove the folder.")
        if empty_labels:
            remarks.append(f"{folder.name}/ has no image of {_few([names[label] for label in empty_labels])}")
    return list_files(files, names, root, options, left_out, remarks)


def list_files(files: Mapping[str, Sequence[Entry]], names: Sequence[str], root: Path, options: DatasetOptions,
               left_out: Counter[str], remarks: Sequence[str], *, annotations: Sequence[Path] = (),
               boxes: Mapping[str, NDArray[np.float32]] | None = None) -> Listing:
    """List a data set of image files.

    Args:
        files: The images of each part, below `root`.
        names: The classes, in the order of the labels.
        root: The folder.
        options: Of the data set.
        left_out: Counts files that are no part of it, by reason.
        remarks: Sentences about the parts.
        annotations: Further files that say what the data set is.
        boxes: The objects of each image, as of a `Split`; None if each image has a class.

    Raises:
        DataError: An image that is looked at cannot be read.
    """
    prefix = str(root / "x")[:-1]  # with the separator at its end

    def place(path: str) -> str:
        return path[len(prefix):] if path.startswith(prefix) else os.path.relpath(path, root)

    channels, native_size = look(files["train"], options, str(root))
    contents = Contents(root, {place(entry.name): entry.state for entries in files.values() for entry in entries}
                        | {place(str(path)): state_of(os.stat(path)) for path in annotations})

    def keys() -> dict[str, list[str]]:
        # A file that cannot be read is a copy of no other: its name is its key.
        digests = {name: content for name, content in contents.digests.items() if content != UNREADABLE}
        return {part: [digests.get(place(each.name), each.name) for each in entries] for part, entries in files.items()}

    reader = Decoder(files, channels, options, lambda: contents.identity, left_out, whole=boxes is not None)
    task = CLASSIFICATION if boxes is None else DETECTION
    return Listing(DatasetInfo(options.name, channels, len(names), native_size, task), tuple(names),
                   {part: np.asarray([each.label for each in entries], np.int64) for part, entries in files.items()},
                   "", str(root), reader, contents, left_out, pictures=True, survey=reader.survey, keys=keys,
                   name_of=lambda part, row: place(files[part][row].name), remarks=remarks, boxes=boxes)


def _parts(root: Path, left_out: Counter[str]) -> dict[str, Path]:
    """Return {part: folder}. The root itself is `train` if it holds the classes. A `train` folder without subfolders is
    a class of that name."""
    folders: dict[str, Path] = {}
    other_names = []
    for name in _folders(root, left_out_here := Counter[str]()):
        part = PART_OF.get(name.strip().lower())
        if part is None or not _folders(root / name, Counter()):
            other_names.append(name)
        elif part in folders:
            raise DataError(f"{root}: {folders[part].name}/ and {name}/ mean the same. Keep one of them.")
        else:
            folders[part] = root / name
    # Without train/ and the like, folders are classes, unless they are called like parts, as Train2017/.
    if not folders:
        part_of = {name: part for name in other_names if (part := part_like(name)) is not None}
        parts = {part: name for name, part in part_of.items()}
        if len(parts) > 1 and ([*part_of] == other_names or all(_folders(root / name, Counter()) for name in part_of)):
            raise DataError(f"{root}: {' and '.join(f'{name}/' for name in part_of)} are parts, not classes. "
                            f"Give {' and '.join(f'{part}/' for part in parts)} one folder per class each.")
        return {"train": root}
    if "train" not in folders:
        raise DataError(f"{root}: {next(iter(folders.values())).name}/ without train/. Give train/, or one folder per "
                        "class.")
    left_out.update(left_out_here)
    left_out.update(f"folder {name}/ beside {folders['train'].name}/" for name in other_names)
    return {part: folders[part] for part in ALIASES if part in folders}


def part_like(name: str) -> str | None:
    """Return the part that a folder or file of this name means, such as `train` for Train2017; None if none."""
    match = _LIKE_PART.fullmatch(name.strip().lower())
    return PART_OF[match[1]] if match else None


def _folders(folder: Path, left_out: Counter[str]) -> list[str]:
    """Return the sorted names of the folders in a folder, without system folders and links to folders above."""
    names, ancestors = [], _above(folder)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_left_behind(entry.name):
                    left_out[_LEFT_REASON] += 1
                    continue
                # The listing itself says what a plain file is; others need a call of the system.
                status = None if entry.is_file(follow_symlinks=False) else _status(entry)
                if status is None or not stat.S_ISDIR(status.st_mode):
                    left_out.update([_BESIDE_REASON] * is_image(entry.name))
                elif (status.st_dev, status.st_ino) in ancestors:
                    left_out[_UP_REASON] += 1
                else:
                    names.append(entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}). Make it readable.") from error
    return sorted(names)


def is_left_behind(name: str) -> bool:
    """Return whether a file or folder is hidden or made by a system."""
    return name.startswith(".") or name.lower() in _LEFT_BEHIND


def _above(folder: Path) -> set[tuple[int, int]]:
    """Return device and inode of a folder and of all folders above it, by its path and by its path without links."""
    paths = {path for each in (Path(os.path.abspath(folder)), folder.resolve()) for path in (each, *each.parents)}
    with suppress(OSError):
        return {(status.st_dev, status.st_ino) for status in map(os.stat, paths)}
    return set()


def _class_folders(folder: Path, left_out: Counter[str]) -> dict[str, str]:
    """Return {class: name of its folder}, in the order of the folders' names. DataError if there is none."""
    names = _folders(folder, left_out)
    if not names:
        n_images = sum(is_image(entry.name) for entry in os.scandir(folder))
        fact = f"{n_images} images and no class folders" if n_images else "empty, no class folders"
        raise DataError(f"{folder}: {fact}. {_GIVE}")
    return tell_apart(names, str(folder))


def _find_nested(root: Path, names: Sequence[str]) -> Path | None:
    """Return the folder below `root` that holds the data set, if `root` cannot; else None. `names`: its folders."""
    n_divided = 0
    for name in _folders(root, Counter()):
        inner = _folders(root / name, Counter())
        train_names = [each for each in inner if part_like(each) == "train"]
        if any(_folders(root / name / each, Counter()) for each in train_names):
            return root / name  # name/train/CLASS
        n_divided += len(train_names) > 0  # CLASS/train
        if len(names) == 1 and inner:  # a folder in a folder, as archives often have
            return root / name if len(inner) > 1 else _find_nested(root / name, inner) or root / name
    if n_divided == len(names):
        raise DataError(f"{root}: each class has a train/ of its own. Make it train/CLASS and test/CLASS: parts first.")
    return None


def _refuse_versions(folder: Path, names: Sequence[str]) -> None:
    """Raise DataError if the folders of classes are folds, or versions of one data set, as color/ and grayscale/. Then
    all hold the same folders of images and nothing else, or two hold the same, more than there are versions. Also if
    one of them holds folders that are called as other classes."""
    beside = Counter[str]()  # counts images that are in no inner folder
    inner_of = {name: tuple(names_in) for name in names if len(names_in := _folders(folder / name, beside)) > 1}
    are_alike = len(inner_of) == len(names) > 1 == len({*inner_of.values()}) and not beside[_BESIDE_REASON] and all(
        any(image_files(str(folder / name / inner), 0, Counter())) for name in names for inner in inner_of[name])
    for name, folders in inner_of.items():
        twins = [other for other, other_inner in inner_of.items() if other_inner == folders and other != name]
        if twins and (are_alike or len(inner_of) == len(names) < len(folders)):
            raise DataError(f"{folder}: {name}/ and {twins[0]}/ hold the same folders, such as {folders[0]}/. If they "
                            f"are versions of one data set, give one: dataset.root={folder / name}. If they are folds, "
                            "join their folders of one name. If they are classes, move the images of each into one "
                            "folder.")
        if {*folders} <= {*names} - {name}:
            raise DataError(f"{folder}: {name}/ holds folders that are called as the classes beside it, such as "
                            f"{folders[0]}/. Move their images into the classes, or {name}/ away.")


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _files(folder: Path, names: Sequence[str | None], left_out: Counter[str]) -> tuple[list[Entry], list[int]]:
    """Return the images of each class's folder, and the labels of classes without any."""
    files, empty_labels = [], []
    for label, name in enumerate(names):
        entries = [] if name is None else sorted(image_files(str(folder / name), label, left_out),
                                                 key=lambda entry: entry.name)
        if not entries:
            empty_labels.append(label)
        files += entries
    return files, empty_labels


def is_image(name: str) -> bool:
    """Return whether a file of this name is read as an image."""
    return name.lower().endswith((*EXTENSIONS, *_formats()))


def image_files(folder: str, label: int, left_out: Counter[str]) -> Iterator[Entry]:
    """Yield the images below the folder, each folder once. `left_out` counts all others by reason: hidden, of another
    ending, or no regular file, such as a pipe or a link to nothing."""
    folders, visited = [folder], _above(Path(folder))
    while folders:  # no recursion: folders may be deeper than Python's limit of calls
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if is_left_behind(entry.name):
                        left_out[_LEFT_REASON] += 1
                        continue
                    status = _status(entry)
                    if status is not None and stat.S_ISDIR(status.st_mode):
                        if (status.st_dev, status.st_ino) in visited:
                            left_out[_UP_REASON] += 1
                        else:
                            visited.add((status.st_dev, status.st_ino))
                            folders.append(entry.path)
                    elif not is_image(entry.name):
                        ending = os.path.splitext(entry.name)[1].lower()
                        is_word = 1 < len(ending) <= 8 and ending.isprintable()
                        left_out[f"ending {ending}" if is_word else "no image's ending"] += 1
                    elif status is None:
                        left_out["link to nothing"] += 1
                    elif not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
                        left_out["no regular file"] += 1
                    else:
                        yield Entry(entry.path, label, state_of(status))
        except OSError as error:
            raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror}). Make it readable.") \
                from error


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of the file or folder that an entry leads to; None for a link to nothing or to itself."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


@dataclass(frozen=True, slots=True)
class Entry:
    """An image file: its path, its class, and its state, a text that changes with the content."""

    name: str
    label: int = 0
    state: str = ""

    def open(self) -> Image.Image:
        return open_image(self.name)


def open_image(file: str | BinaryIO) -> PIL.Image.Image:
    """Open an image of a listed format, whatever its file is called. Pillow would run another program for some other
    formats (PostScript). WrongKind for a file of another kind, and for one that Pillow reads wrongly."""
    try:
        image = PIL.Image.open(file, formats=[*dict.fromkeys(_formats().values())])
    except PIL.UnidentifiedImageError:
        with open(file, "rb") if isinstance(file, str) else nullcontext(file) as stream:
            stream.seek(0)
            kind, step = kind_of_file(stream.read(HEAD))
        if not kind or is_image(f"x.{kind}"):  # a torn file of a kind that this Pillow reads
            raise
        raise WrongKind(kind, step) from None
    if kind := _misread_kind(getattr(image, "tag_v2", {})):
        image.close()
        raise WrongKind(kind, "Convert it")
    return image


def _misread_kind(tags: Mapping[int, Any]) -> str:
    """Return the kind of a TIFF file if Pillow reads other pixels than it holds; empty for all other files."""
    # Tags: 258 bits, 339 sign, 277 colours of a pixel, 284 (2: each colour by itself).
    bits, is_signed = tags.get(258, (1,))[0], tags.get(339, (1,))[0] == 2
    if bits == 16 and tags.get(277, 1) > 1 and tags.get(284) == 2:
        return "a TIFF of 16 bits a colour, each colour by itself"
    return "a TIFF of signed bytes" if bits == 8 and is_signed else ""


@cache
def _formats() -> dict[str, str]:
    """Return Pillow's format for each ending that it reads, HEIC too if pillow-heif is installed."""
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    format_of = PIL.Image.registered_extensions()
    return {ending: format_of[ending] for ending in (*EXTENSIONS, *PLUGINS) if ending in format_of}
