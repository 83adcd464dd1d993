"""Boxes in YOLO's format: beside each image a text file with a line for each object.

A line is the class's number, and centre and size of the box as shares of the image's sides. An outline counts as the
box around it; points behind a box do not count. `images/train/a.jpg` has `labels/train/a.txt`, `train/images/a.jpg` has
`train/labels/a.txt`. `data.yaml` (or `classes.txt`) names the classes, and folders or lists of images.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from hwnas.data.boxes import BoxReader, MarkedPicture
from hwnas.data.dataset import DatasetOptions, Listing
from hwnas.data.folder import ALIASES, PART_OF, image_files, is_image, is_left_behind, part_like
from hwnas.errors import DataError, one_line
from hwnas.system.documents import load_yaml, yaml_text

_NAMED_IN = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "train/classes.txt")
_BOX, _CORNER = 4, 2  # numbers of a box, and of a corner of an outline
_DIGITS = re.compile("[0-9]{1,6}")
_GIVE = "Give dataset.root=FOLDER with images/train/ and labels/train/, and data.yaml that names the classes."


def yolo(options: DatasetOptions) -> Listing:
    """List a folder of pictures with boxes in YOLO's format.

    Raises:
        DataError: The folder, a file or a line is not what the format says.
    """
    root = options.find_root(_GIVE)
    reader = BoxReader(root, options, "centre, width and height in shares of the image's sides")
    names_file = next((path for name in _NAMED_IN if (path := root / name).is_file()), None)
    if names_file is None:
        raise DataError(f"{root}: no data.yaml that names the classes. {_GIVE}")
    settings = _read(names_file)
    names, with_points = _names(settings.get("names"), names_file), "kpt_shape" in settings
    pictures, files, n_missing = dict[str, list[MarkedPicture]](), [names_file], 0
    for part, images in _find_parts(reader, settings, names_file).items():
        pictures[part] = []
        for path in images:
            label_file = _labels_of(path, root)
            boxes = [] if not label_file.is_file() else [*_boxes(reader, label_file, len(names), with_points)]
            files += [label_file] if label_file.is_file() else []
            n_missing += path.is_file() and not label_file.is_file()
            pictures[part].append(MarkedPicture(path, 1.0, 1.0, boxes))
    if len(files) == 1:
        where = _labels_of(pictures["train"][0].path, root).parent if pictures["train"] else root
        raise DataError(f"{where}: no text file with boxes is there for any image. {_GIVE}")
    if n_missing:
        reader.remarks.append(f"{n_missing:,} images have no text file with boxes: they count as images without "
                              "objects")
    return reader.listing(pictures, names, files)


def _read(path: Path) -> dict[Any, Any]:
    """Return the content of data.yaml; classes.txt in the same form."""
    try:
        text = yaml_text(path)
        return {"names": text.rstrip().splitlines()} if path.suffix == ".txt" else dict(load_yaml(text) or {})
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}. Mend it.") from None


def _names(said: Any, path: Path) -> list[str]:
    """Return the names of the classes, in the order of their numbers. `said`: a list, or names by number."""
    if isinstance(said, dict):
        numbered = {int(key) if _DIGITS.fullmatch(str(key)) else key: name for key, name in said.items()}
        if {*numbered} == {*range(len(numbered))}:
            said = [numbered[at] for at in range(len(numbered))]
    if isinstance(said, list) and any(isinstance(each, bool) for each in said):
        raise DataError(f"{path}: YAML reads a name such as yes, no, on or off as true or false. Put the names into "
                        "quotes.")
    if not isinstance(said, list) or not said or not all(isinstance(each, str | int) for each in said):
        raise DataError(f"{path}: names must be a list of the classes' names, got {str(said)[:80]}. Mend it.")
    names = [str(each).strip() for each in said]
    if len({*names}) < len(names) or "" in names:
        raise DataError(f"{path}: two classes have the same name, or one has none. Give each its own.")
    return names


def _find_parts(reader: BoxReader, said: Mapping[Any, Any], file: Path) -> dict[str, list[Path]]:
    """Return the images of each part: as data.yaml says, if the training images that it names are there. In files that
    were made elsewhere they may not be; then lists and folders that are called as the parts count. DataError if a part
    has several folders, or two parts have an image in common."""
    root, named_parts, base = reader.root, dict[str, tuple[str, list[Path] | None]](), str(said.get("path") or "")
    # 1. The parts that data.yaml names: a folder or a list each; None if it is not there.
    for key, place in said.items():
        if isinstance(place, list) and len(place) == 1:
            place = place[0]
        if (part := PART_OF.get(str(key).lower())) is None or not place:
            continue
        if isinstance(place, list):
            raise DataError(f"{file}: {key} has {len(place)} folders of images. Put them into one folder.")
        path = _find_inside(root, str(place), [base, ""])
        if path is not None and path.is_file() and path.suffix != ".txt":
            path = None
        named_parts[part] = f"{key}: {place}", None if path is None else _images_below(reader, path, base)
    # 2. If there are no training images among them, nothing in data.yaml fits this folder: go by names.
    parts = {part: images for part, (_, images) in named_parts.items() if images is not None}
    if "train" not in parts:
        named_parts, places = {}, _places_by_name(root)
        if "train" not in places:
            raise DataError(f"{root}: no images of a training part. {_GIVE}")
        parts = {part: _images_below(reader, place) for part, place in places.items()}
    # 3. Find other parts that are not there by their names, or say so.
    for part, (entry, images) in named_parts.items():
        if images is None and (place := _places_by_name(root).get(part)) is not None:
            parts[part] = _images_below(reader, place)
        elif images is None:
            reader.remarks.append(f"{file.name} has {entry[:80]!r}, which is not there")
    if "val" in parts and parts["val"] in (parts["train"], parts.get("test")):
        del parts["val"]  # a part of the training images takes its place
    for (part, images), (other, others) in combinations(parts.items(), 2):
        if same_images := {*images} & {*others}:
            raise DataError(f"{file}: {part} and {other} have {len(same_images)} images in common. Give each its own.")
    return {part: parts[part] for part in ALIASES if part in parts}


def _images_below(reader: BoxReader, folder: Path, base: str = "") -> list[Path]:
    """Return the images of a folder, or of a list, whose lines may be paths below `base`."""
    root = reader.root
    if folder.is_file():
        lines = [line.strip() for line in _lines_of(folder)]
        bases = [str(folder.parent.relative_to(root)), base, ""]
        return [_find_inside(root, line, bases) or root / Path(line).name for line in lines if line]
    left_out = Counter[str]()
    images = sorted(Path(entry.name) for entry in image_files(str(folder), 0, left_out))
    if images and _labels_of(images[0], root).parent == images[0].parent:
        left_out.pop("ending .txt", None)  # the labels
    reader.left_out.update(left_out)
    return images


def _find_inside(root: Path, said: str, bases: Sequence[str]) -> Path | None:
    """Return the folder or file inside of `root` that a text means: below one of `bases`, or without its first parts,
    as for files that were made elsewhere. None if there is none."""
    parts = [part for part in Path(said.replace("\\", "/")).parts if part not in ("/", "..")]
    whole = Path(os.path.abspath(root))  # absolute, so that a path out of a relative root is noticed
    tails = [parts, *(parts[at:] for at in range(1, len(parts)) if parts[at:] != ["images"])]
    places = [*(whole / base / said for base in bases), *(whole.joinpath(*tail) for tail in tails)]
    for place in places:
        path = Path(os.path.normpath(place))
        if path != whole and path.is_relative_to(whole) and os.path.exists(path):
            return root / path.relative_to(whole)
    return None


def _labels_of(image: Path, root: Path) -> Path:
    """Return the file of labels of an image: below `labels` in place of the last `images` in its path, or beside it."""
    parts = [*image.parent.relative_to(root).parts]
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return root.joinpath(*parts, f"{image.stem}.txt")


def _places_by_name(root: Path) -> dict[str, Path]:
    """Return the list, or else the folder, of each part's images by its name. Without such names all images are for
    training: the images in images/, or in the root with their labels beside them."""
    # 1. Lists such as train.txt, then folders such as images/train, train/images or train.
    lists = {part: path for part, aliases in ALIASES.items() for alias in reversed(aliases)
             if (path := root / f"{alias}.txt").is_file()}
    places = lists if "train" in lists else {}
    root_folders = _folders_in(root)
    folders = [*_folders_in(root / "images"), *(path / "images" for path in root_folders if (path / "images").is_dir()),
               *(path for path in root_folders if path.name not in ("images", "labels") and any(path.glob("*.txt")))]
    names = {path: (path.parent.name if path.name == "images" else path.name).lower() for path in folders}
    for part in ALIASES:
        # 2. A folder that is called exactly as the part comes before one that is called alike, as train2017.
        matches = [path for path in folders if PART_OF.get(names[path]) == part] or [
            path for path in folders if part_like(names[path]) == part]
        if matches and part not in places:
            if rival := next((path for path in matches[1:] if path.parent == matches[0].parent), None):
                raise DataError(f"{matches[0]} and {rival.name}/ mean the same part. Keep one of them, or name one in "
                                "data.yaml.")
            places[part] = matches[0]
    images = root / "images"
    if "train" not in places and images.is_dir() and (not places or _has_images(images)):
        places["train"] = images
    elif not places and _has_images(root):
        places["train"] = root
    return places


def _has_images(folder: Path) -> bool:
    return any(is_image(path.name) for path in folder.iterdir())


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_left_behind(path.name)
                  ) if folder.is_dir() else []


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _boxes(reader: BoxReader, path: Path, n: int, with_points: bool
           ) -> Iterator[tuple[int, float, float, float, float]]:
    """Yield the boxes of an image, as shares of its sides. `with_points`: points follow each box."""
    for number, line in enumerate(_lines_of(path), 1):
        words = line.split()
        if not words:
            continue
        where = f"{path}, line {number}"
        try:
            number_of, values = float(words[0]), [float(word) for word in words[1:]]
            label = int(number_of)
        except (ValueError, OverflowError):
            raise DataError(f"{where}: a class's number and four shares, got {line[:80]!r}. Mend it.") from None
        if label != number_of or not 0 <= label < n:
            raise DataError(f"{where}: class {words[0][:20]}, and there are 0 to {n - 1}. Mend it, or the names.")
        if with_points:  # drop the points
            values = values[:_BOX]
        if len(values) > _BOX and len(values) % _CORNER == 0:  # an outline
            corners: list[float] = [min(values[0::2]), min(values[1::2]), max(values[0::2]), max(values[1::2])]
        elif len(values) == _BOX:
            x, y, width, height = values
            corners = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
        else:
            raise DataError(f"{where}: four shares, or the corners of an outline, got {len(values)} numbers. Mend it.")
        clipped_box = reader.check_box(where, label, corners, 1.0, 1.0)
        if clipped_box is not None:
            yield clipped_box
