"""Boxes in Pascal VOC's format: an XML file for each image.

The usual layouts are `JPEGImages/` (or `images/`), `Annotations/` and `ImageSets/Main/train.txt`, or images beside
their XML files, in `train/` and `val/` or all in one folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from hwnas.data.boxes import BoxReader, MarkedPicture
from hwnas.data.dataset import DatasetOptions, Listing
from hwnas.data.folder import ALIASES, EXTENSIONS, is_left_behind
from hwnas.errors import DataError

MOST_BYTES = 4 << 20  # of an XML file
_PARTS = {"train": ("train", "trainval", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_GIVE = "Give dataset.root=FOLDER with JPEGImages/ and Annotations/, or with train/ and val/ of images and XML files."


def voc(options: DatasetOptions) -> Listing:
    """List a folder of pictures with boxes in Pascal VOC's format.

    Raises:
        DataError: The folder, a file or an entry is not what the format says.
    """
    root = options.find_root(_GIVE)
    reader = BoxReader(root, options, "xmin, ymin, xmax and ymax in pixels")
    files = _files(root, reader)
    entries_of = {part: [_read(path) for path in paths] for part, paths in files.items()}
    names = sorted({name for entries in entries_of.values() for entry in entries for name, *_ in entry.objects})
    if not names:
        raise DataError(f"{root}: no annotation names an object. {_GIVE}")
    labels = {name: at for at, name in enumerate(names)}
    folder = next((each for name in ("jpegimages", "images") if _folder_called("annotations", root) is not None and (
        each := _folder_called(name, root)) is not None), None)
    pictures = {part: [entry.picture(reader, folder, labels) for entry in entries]
                for part, entries in entries_of.items()}
    return reader.listing(pictures, names, [path for paths in files.values() for path in paths])


def _files(root: Path, reader: BoxReader) -> dict[str, list[Path]]:
    # 1. Without Annotations/, XML files are in the folders of the parts, or all in the root.
    annotations = _folder_called("annotations", root)
    if annotations is None or not _xml_files(annotations):
        parts = {part: files for part, aliases in ALIASES.items() for alias in aliases
                 if (folder := _folder_called(alias, root)) is not None and (files := _xml_files(folder))}
        if not parts and (files := [path for path in _xml_files(root) if path.parent == root]):
            parts = {"train": files}  # as LabelImg leaves them
        if "train" not in parts:
            raise DataError(f"{root}: no annotations of training images. {_GIVE}")
        return parts
    # 2. With it, lists of names divide the files; without lists all are for training.
    lists = root / "ImageSets" / "Main"
    paths = {path.stem.lower(): path for path in sorted(lists.glob("*.txt"))} if lists.is_dir() else {}
    list_of = {part: paths[name] for part, names in _PARTS.items() for name in reversed(names) if name in paths}
    if not list_of:
        if others := [path.name for name, path in paths.items() if name != "default"]:
            raise DataError(f"{lists}: {others[0]} is no list of a part. Call them train.txt, val.txt and test.txt.")
        return {"train": _xml_files(annotations)}
    if "train" not in list_of:
        raise DataError(f"{lists}: no train.txt. {_GIVE}")
    files_of = dict[str, list[Path]]()
    for part, path in list_of.items():
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
        stems = [_stem_of(line.strip(), annotations) for line in lines if line.strip()]
        files_of[part] = [reader.place_of(annotations, f"{stem}.xml", str(path)) for stem in stems]
        if missing_files := [each for each in files_of[part] if not each.is_file()]:
            raise DataError(f"{path} names {missing_files[0].stem!r}, and {missing_files[0]} is not there. Mend it.")
    return files_of


def _stem_of(line: str, annotations: Path) -> str:
    """Return the name of the file that a line means. It may end as an image does, and a column may follow it."""
    if (annotations / f"{line}.xml").is_file():
        return line
    name = Path(line.split()[0])
    return str(name.with_suffix("")) if name.suffix.lower() in EXTENSIONS else str(name)


def _folder_called(name: str, root: Path) -> Path | None:
    """Return the folder of this name below the root, in upper or lower case; None if there is none."""
    return next((path for path in sorted(root.iterdir()) if path.name.lower() == name and path.is_dir()), None)


def _xml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.xml") if not is_left_behind(path.name))


class _Marked(NamedTuple):
    """An XML file: the image's name and size (0: not given), and its objects: name, corners, and whether it counts."""

    path: Path
    name: str
    sides: tuple[float, float]
    objects: list[tuple[str, list[float], bool]]

    def picture(self, reader: BoxReader, folder: Path | None, places: dict[str, int]) -> MarkedPicture:
        """Return its picture in `folder` or beside it, by the XML file's name first: the name in it may be outdated."""
        folder, boxes = folder or self.path.parent, []
        paths = [folder / f"{self.path.stem}{case(ending)}" for ending in EXTENSIONS for case in (str.lower, str.upper)]
        path = next((each for each in paths if each.is_file()), None) or reader.place_of(
            folder, self.name, str(self.path))
        width, height = self.sides if any(self.sides) else reader.size_of(path)
        for name, corners, counts in self.objects:
            if not counts and reader.leaves_out("that are marked as difficult"):
                continue
            clipped_box = reader.check_box(str(self.path), places[name], corners, width, height)
            if clipped_box is not None:
                boxes.append(clipped_box)
        return MarkedPicture(path, width, height, boxes)


def _read(path: Path) -> _Marked:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} has more than {MOST_BYTES >> 20} MiB, which is the most.")
        text = path.read_bytes()
        # Entities could grow without bound while they are read. In UTF-16, with its zeros, they would not be seen.
        if b"<!DOCTYPE" in text or b"<!ENTITY" in text or b"\0" in text:
            raise DataError(f"{path} defines entities of its own, or is no UTF-8. Export it again.")
        top = ElementTree.fromstring(text)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the last two of an unknown encoding
        raise DataError(f"{path} is no XML file: {error}. Export it again.") from None

    def number(element: ElementTree.Element | None, what: str) -> float:
        try:
            return float((element.findtext(what) if element is not None else None) or "")
        except ValueError:
            raise DataError(f"{path}: {what} is missing, or no number. Mend it.") from None

    # A size of 0 by 0 counts as none: the picture's own is taken.
    size = top.find("size")
    side_texts = {(size.findtext(side) or "0").strip() for side in ("width", "height")} if size is not None else {"0"}
    sides = (0.0, 0.0) if side_texts == {"0"} else (number(size, "width"), number(size, "height"))
    if min(sides) <= 0 and any(sides):
        raise DataError(f"{path}: an image of {sides[0]:g} x {sides[1]:g} px. Mend it.")
    objects = []
    for each in top.iter("object"):
        name = (each.findtext("name") or "").strip()
        if not name:
            raise DataError(f"{path}: an object without a name. Mend it.")
        left, top_, right, bottom = (number(each.find("bndbox"), side) for side in _SIDES)
        # VOC counts pixels from 1 to the last, which is inside: so left and top move, and right and bottom do not.
        objects.append((name, [left - 1, top_ - 1, right, bottom], (each.findtext("difficult") or "0").strip() != "1"))
    return _Marked(path, (top.findtext("filename") or path.stem).strip(), sides, objects)
