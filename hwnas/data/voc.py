"""Boxes in Pascal VOC's format: an XML file for each image.

`JPEGImages/`, `Annotations/` and `ImageSets/Main/train.txt`, or `train/` and `val/` with images and XML files side by
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from hwnas.data.boxes import BoxReader, MarkedPicture, check_root
from hwnas.data.dataset import DatasetOptions, Listing
from hwnas.data.folder import ALIASES, EXTENSIONS
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
    root = check_root(options, _GIVE)
    reader = BoxReader(root, options, "xmin, ymin, xmax and ymax in pixels")
    files = _files(root, reader)
    marked = {part: [_read(path) for path in paths] for part, paths in files.items()}
    names = sorted({name for entries in marked.values() for entry in entries for name, *_ in entry.objects})
    if not names:
        raise DataError(f"{root}: no annotation names an object. {_GIVE}")
    places = {name: at for at, name in enumerate(names)}
    pictures = {part: [entry.picture(reader, root, places) for entry in entries] for part, entries in marked.items()}
    return reader.listing(pictures, names, [path for paths in files.values() for path in paths])


def _files(root: Path, reader: BoxReader) -> dict[str, list[Path]]:
    annotations = root / "Annotations"
    if not annotations.is_dir():
        parts = {part: sorted((root / alias).rglob("*.xml")) for part, aliases in ALIASES.items() for alias in aliases
                 if (root / alias).is_dir()}
        if "train" not in parts:
            raise DataError(f"{root}: no annotations of training images. {_GIVE}")
        return parts
    lists = root / "ImageSets" / "Main"
    named = {part: path for part, names in _PARTS.items() for name in reversed(names)
             if (path := lists / f"{name}.txt").is_file()}
    if not named:
        return {"train": sorted(annotations.rglob("*.xml"))}
    if "train" not in named:
        raise DataError(f"{lists}: no train.txt. {_GIVE}")
    files = dict[str, list[Path]]()
    for part, path in named.items():
        stems = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
                 if line.strip()]
        files[part] = [reader.place_of(annotations, f"{stem}.xml", str(path)) for stem in stems]
        if gone := [each for each in files[part] if not each.is_file()]:
            raise DataError(f"{path} names {gone[0].stem!r}, and {gone[0]} is not there. Mend it.")
    return files


class _Marked:
    """An XML file: the image's name and size, and its objects: name, corners, whether it counts."""

    def __init__(self, path: Path, name: str, sides: tuple[float, float],
                 objects: Sequence[tuple[str, list[float], bool]]) -> None:
        self.path, self.name, self.sides, self.objects = path, name, sides, objects

    def picture(self, reader: BoxReader, root: Path, places: dict[str, int]) -> MarkedPicture:
        boxes = []
        for name, corners, counts in self.objects:
            if not counts:
                reader.odd["that are marked as difficult, left out"] += 1
                continue
            checked = reader.check_box(str(self.path), places[name], corners, *self.sides)
            if checked is not None:
                boxes.append(checked)
        folder = root / "JPEGImages" if (root / "JPEGImages").is_dir() else self.path.parent
        able = [folder / self.name, *(folder / f"{self.path.stem}{ending}" for ending in EXTENSIONS)]
        path = next((each for each in able if each.is_file()), able[0])
        reader.place_of(folder, self.name, str(self.path))
        return MarkedPicture(path, *self.sides, boxes)


def _read(path: Path) -> _Marked:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} has more than {MOST_BYTES >> 20} MiB, which is the most.")
        text = path.read_bytes()
        # What could grow while it is read; in an encoding of two bytes a letter it would not be seen.
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

    size = top.find("size")
    sides = number(size, "width"), number(size, "height")
    if min(sides) <= 0:
        raise DataError(f"{path}: an image of {sides[0]:g} x {sides[1]:g} px. Mend it.")
    objects = []
    for each in top.iter("object"):
        name = (each.findtext("name") or "").strip()
        if not name:
            raise DataError(f"{path}: an object without a name. Mend it.")
        left, top_, right, bottom = (number(each.find("bndbox"), side) for side in _SIDES)
        objects.append((name, [left - 1, top_ - 1, right, bottom], (each.findtext("difficult") or "0").strip() != "1"))
    return _Marked(path, (top.findtext("filename") or path.stem).strip(), sides, objects)
