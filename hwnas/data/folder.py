"""Images in folders, a folder a class: found and checked."""

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
                "__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini"}  # by systems; besides what is hidden
_LEFT_REASON = "hidden or made by a system"
_UP_REASON = "link to a folder that is listed already"
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
PLUGINS = (".avif", ".heic", ".heif")  # read where this Pillow can
ALIASES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
PART_OF = {alias: part for part, aliases in ALIASES.items() for alias in aliases}
_LIKE_PART = re.compile(rf"(?:.*[^a-z])?({'|'.join(PART_OF)})(?:set|data|images)?(?:[^a-z].*)?")
_GIVE_TABLE = ("Give a folder of parquet files, dataset=timm:hfds dataset.root=FOLDER; or in Python a table: "
               "hwnas.search(target, pandas.read_csv(FILE)).")
_GIVE = "Give dataset.root=FOLDER that holds train/ and val/, or one folder per class."


def image_folder(options: DatasetOptions) -> Listing:
    """List a folder in the layout of torchvision's ImageFolder, once or in train/, val/, test/; DataError names what is
    wrong.

    Grey files make one channel. Any colour file among the first ones looked at makes three (`channels` overrides that).
    """
    if options.root is not None and options.root.is_file():
        is_table = options.root.suffix in (".csv", ".tsv", ".parquet")
        raise DataError(f"{options.root}: a file, not a folder of images. {_GIVE_TABLE if is_table else _GIVE}")
    root, left_out = options.find_root(_GIVE), Counter[str]()
    folders = _parts(root, left_out)
    places = {part: _class_folders(folder, left_out) for part, folder in folders.items()}
    names = tuple(places["train"])
    if folders == {"train": root} and (nested := _find_nested(root, names)) is not None:
        raise DataError(f"{root}: the classes are further down. Did you mean dataset.root={nested}?")
    if len(names) == 1 and _folders(below := folders["train"] / places["train"][names[0]], Counter()):
        raise DataError(f"{folders['train']}: the classes are further down, in {below.name}/. Move them up.")
    _refuse_versions(folders["train"], names)
    files, remarks = {}, []
    for part, folder in folders.items():
        if unknown := sorted({*places[part]} - {*names}):
            raise DataError(f"{folder}: {folders['train'].name}/ has no class {_few(unknown)}."
                            f"{did_you_mean(unknown[0], names)} Give it training images, or remove its folder.")
        files[part], empty = _files(folder, [places[part].get(name) for name in names], left_out)
        if empty and (part == "train" or not files[part]):
            place = folder / places[part][names[empty[0]]] if part == "train" else folder
            read = "; ".join(filter(None, (", ".join(EXTENSIONS), left_out_text(left_out))))
            raise DataError(f"{place}: no images ({read}). Add some or remove the folder.")
        if empty:
            remarks.append(f"{folder.name}/ has no image of {_few([names[label] for label in empty])}")
    return list_files(files, names, root, options, left_out, remarks)


def list_files(files: Mapping[str, Sequence[Entry]], names: Sequence[str], root: Path, options: DatasetOptions,
               left_out: Counter[str], remarks: Sequence[str], *, annotations: Sequence[Path] = (),
               boxes: Mapping[str, NDArray[np.float32]] | None = None) -> Listing:
    """The data set of image files.

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
    above = str(root / "x")[:-1]

    def place(path: str) -> str:
        return path[len(above):] if path.startswith(above) else os.path.relpath(path, root)

    channels, native_size = look(files["train"], options, str(root))
    contents = Contents(root, {place(entry.name): entry.state for entries in files.values() for entry in entries}
                        | {place(str(path)): state_of(os.stat(path)) for path in annotations})

    def keys() -> dict[str, list[str]]:
        read = {name: content for name, content in contents.digests.items() if content != UNREADABLE}
        return {part: [read.get(place(each.name), each.name) for each in entries] for part, entries in files.items()}

    reader = Decoder(files, channels, options, lambda: contents.identity, left_out, whole=boxes is not None)
    task = CLASSIFICATION if boxes is None else DETECTION
    return Listing(DatasetInfo(options.name, channels, len(names), native_size, task), tuple(names),
                   {part: np.asarray([each.label for each in entries], np.int64) for part, entries in files.items()},
                   "", str(root), reader, contents, left_out, pictures=True, survey=reader.survey, keys=keys,
                   name_of=lambda part, row: place(files[part][row].name), remarks=remarks, boxes=boxes)


def _parts(root: Path, left_out: Counter[str]) -> dict[str, Path]:
    """{part: folder}; the root itself is `train` when it holds the classes. A `train` folder without subfolders is
    a class of that name."""
    folders: dict[str, Path] = {}
    others = []
    for name in _folders(root, beside := Counter[str]()):
        part = PART_OF.get(name.strip().lower())
        if part is None or not _folders(root / name, Counter()):
            others.append(name)
        elif part in folders:
            raise DataError(f"{root}: {folders[part].name}/ and {name}/ mean the same. Keep one of them.")
        else:
            folders[part] = root / name
    if not folders:
        alike = {name: part for name in others if (part := part_like(name)) is not None}
        parts = {part: name for name, part in alike.items()}
        if len(parts) > 1 and ([*alike] == others or all(_folders(root / name, Counter()) for name in alike)):
            raise DataError(f"{root}: {' and '.join(f'{name}/' for name in alike)} are parts, not classes. "
                            f"Give {' and '.join(f'{part}/' for part in parts)} one folder per class each.")
        return {"train": root}
    if "train" not in folders:
        raise DataError(f"{root}: {next(iter(folders.values())).name}/ without train/. Give train/, or one folder per "
                        "class.")
    left_out.update(beside)
    left_out.update(f"folder {name}/ beside {folders['train'].name}/" for name in others)
    return {part: folders[part] for part in ALIASES if part in folders}


def part_like(name: str) -> str | None:
    """Return the part that a folder or file of this name means, such as `train` for Train2017; None if none."""
    known = _LIKE_PART.fullmatch(name.strip().lower())
    return PART_OF[known[1]] if known else None


def _folders(folder: Path, left_out: Counter[str]) -> list[str]:
    """Names of the folders in a folder, without those that systems make and links to folders above."""
    names, above = [], _above(folder)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_left_behind(entry.name):
                    left_out[_LEFT_REASON] += 1
                    continue
                # The listing itself says what a plain file is; only for others the disk is asked.
                status = None if entry.is_file(follow_symlinks=False) else _status(entry)
                if status is None or not stat.S_ISDIR(status.st_mode):
                    left_out.update(["image beside folders"] * is_image(entry.name))
                elif (status.st_dev, status.st_ino) in above:
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
    """Return device and inode of a folder and of all above it, by its path and by what a link in it stands for."""
    paths = {path for each in (Path(os.path.abspath(folder)), folder.resolve()) for path in (each, *each.parents)}
    with suppress(OSError):
        return {(status.st_dev, status.st_ino) for status in map(os.stat, paths)}
    return set()


def _class_folders(folder: Path, left_out: Counter[str]) -> dict[str, str]:
    """{class: name of its folder}, in the order of the folders' names."""
    names = _folders(folder, left_out)
    if not names:
        lying = sum(is_image(entry.name) for entry in os.scandir(folder))
        fact = f"{lying} images and no class folders" if lying else "empty, no class folders"
        raise DataError(f"{folder}: {fact}. {_GIVE}")
    return tell_apart(names, str(folder))


def _find_nested(root: Path, names: Sequence[str]) -> Path | None:
    """The folder below `root` that holds the data set, if `root` cannot; None otherwise. `names`: of its folders."""
    divided = 0
    for name in _folders(root, Counter()):
        below = _folders(root / name, Counter())
        train = [each for each in below if part_like(each) == "train"]
        if any(_folders(root / name / each, Counter()) for each in train):
            return root / name
        divided += len(train) > 0
        if len(names) == 1 and below:
            return root / name if len(below) > 1 else _find_nested(root / name, below) or root / name
    if divided == len(names):
        raise DataError(f"{root}: each class has a train/ of its own. Make it train/CLASS and test/CLASS: parts first.")
    return None


def _refuse_versions(folder: Path, names: Sequence[str]) -> None:
    """DataError if folders that would be classes hold the same folders, more than they are, as color/ and grayscale/ of
    one data set do, or folders that are called as the classes beside them."""
    below = {name: tuple(inner) for name in names if len(inner := _folders(folder / name, Counter())) > 1}
    for name, within in below.items():
        same = [other for other, others in below.items() if others == within and other != name]
        if same and len(below) == len(names) < len(within):
            raise DataError(f"{folder}: {name}/ and {same[0]}/ hold the same folders, such as {within[0]}/. If they "
                            f"are versions of one data set, give one: dataset.root={folder / name}.")
        if {*within} <= {*names} - {name}:
            raise DataError(f"{folder}: {name}/ holds folders that are called as the classes beside it, such as "
                            f"{within[0]}/. Move their images into the classes, or {name}/ away.")


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _files(folder: Path, names: Sequence[str | None], left_out: Counter[str]) -> tuple[list[Entry], list[int]]:
    """The images of each class's folder, and the labels of classes without any."""
    files, empty = [], []
    for label, name in enumerate(names):
        entries = [] if name is None else sorted(image_files(str(folder / name), label, left_out),
                                                 key=lambda entry: entry.name)
        if not entries:
            empty.append(label)
        files += entries
    return files, empty


def is_image(name: str) -> bool:
    """Return whether a file of this name is read as an image."""
    return name.lower().endswith((*EXTENSIONS, *_formats()))


def image_files(folder: str, label: int, left_out: Counter[str]) -> Iterator[Entry]:
    """Images below the folder, each folder once. `left_out` counts all else by the reason: what is hidden, has another
    ending or is no file, such as a pipe or a link to nothing."""
    folders, listed = [folder], _above(Path(folder))
    while folders:  # not by recursion: folders may lie deeper than Python calls
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if is_left_behind(entry.name):
                        left_out[_LEFT_REASON] += 1
                        continue
                    status = _status(entry)
                    if status is not None and stat.S_ISDIR(status.st_mode):
                        if (status.st_dev, status.st_ino) in listed:
                            left_out[_UP_REASON] += 1
                        else:
                            listed.add((status.st_dev, status.st_ino))
                            folders.append(entry.path)
                    elif not is_image(entry.name):
                        ending = os.path.splitext(entry.name)[1].lower()
                        is_word = 1 < len(ending) <= 8 and ending.isprintable()
                        left_out[f"ending {ending}" if is_word else "no image's ending"] += 1
                    elif status is None:
                        left_out["link to nothing"] += 1
                    elif not stat.S_ISREG(status.st_mode):  # who opens a pipe waits for ever
                        left_out["no regular file"] += 1
                    else:
                        yield Entry(entry.path, label, state_of(status))
        except OSError as error:
            raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror}). Make it readable.") \
                from error


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of what a name stands for; None for a link to nothing or to itself."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


@dataclass(frozen=True, slots=True)
class Entry:
    """An image file: its path, its class, and its state, which another content changes."""

    name: str
    label: int = 0
    state: str = ""

    def open(self) -> Image.Image:
        return open_image(self.name)


def open_image(file: str | BinaryIO) -> PIL.Image.Image:
    """Open an image of a format whose ending is listed, whatever the file is called: Pillow runs another program for
    some others (PostScript). WrongKind for a file whose first bytes say what else it is."""
    try:
        image = PIL.Image.open(file, formats=[*dict.fromkeys(_formats().values())])
    except PIL.UnidentifiedImageError:
        with open(file, "rb") if isinstance(file, str) else nullcontext(file) as opened:
            opened.seek(0)
            kind, step = kind_of_file(opened.read(HEAD))
        if not kind or is_image(f"x.{kind}"):  # a torn file of a kind that this Pillow reads
            raise
        raise WrongKind(kind, step) from None
    if kind := _misread_kind(getattr(image, "tag_v2", {})):
        image.close()
        raise WrongKind(kind, "Convert it")
    return image


def _misread_kind(tags: Mapping[int, Any]) -> str:
    """Return the kind of a TIFF file if Pillow reads other pixels than it holds; empty for all other files."""
    bits, is_signed = tags.get(258, (1,))[0], tags.get(339, (1,))[0] == 2
    if bits == 16 and tags.get(277, 1) > 1 and tags.get(284) == 2:
        return "a TIFF of 16 bits a colour, each colour by itself"
    return "a TIFF of signed bytes" if bits == 8 and is_signed else ""


@cache
def _formats() -> dict[str, str]:
    """Pillow's name of the format of each ending that it reads, HEIC too if pillow-heif is installed."""
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    known = PIL.Image.registered_extensions()
    return {ending: known[ending] for ending in (*EXTENSIONS, *PLUGINS) if ending in known}
