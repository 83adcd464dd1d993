"""Boxes in YOLO's format: beside each image a text file with a line for each object.

A line is the class's number, and centre and size of the box as shares of the image's sides; or the corners of an
outline, whose box counts. `images/train/a.jpg` has `labels/train/a.txt`, `train/images/a.jpg` has `train/labels/a.txt`.
`data.yaml` (or `classes.txt`) names the classes, and the folders of images where they are called otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hwnas.data.boxes import BoxReader, MarkedPicture, check_root
from hwnas.data.dataset import DatasetOptions, Listing
from hwnas.data.folder import ALIASES, image_files
from hwnas.errors import DataError
from hwnas.system.documents import load_yaml, yaml_text

_NAMED_IN = ("data.yaml", "data.yml", "dataset.yaml")
_BOX, _CORNER = 4, 2  # numbers of a box, and of a corner of an outline
_GIVE = "Give dataset.root=FOLDER with images/train/ and labels/train/, and data.yaml that names the classes."


def yolo(options: DatasetOptions) -> Listing:
    """List a folder of pictures with boxes in YOLO's format.

    Raises:
        DataError: The folder, a file or a line is not what the format says.
    """
    root = check_root(options, _GIVE)
    reader = BoxReader(root, options, "centre, width and height in shares of the image's sides")
    names_file = _file_of_names(root)
    said = _read(names_file)
    names, folders = _names(said.get("names"), names_file), _named_folders(root, said, names_file) or _folders(root)
    pictures, files = dict[str, list[MarkedPicture]](), [names_file]
    for part, (images, labels) in folders.items():
        pictures[part] = []
        for entry in sorted(image_files(str(images), 0, reader.left_out), key=lambda entry: entry.path):
            path = Path(entry.path)
            beside = (labels / path.relative_to(images)).with_suffix(".txt")
            boxes = [] if not beside.is_file() else [*_boxes(reader, beside, len(names))]
            files += [beside] if beside.is_file() else []
            pictures[part].append(MarkedPicture(path, 1.0, 1.0, boxes))
    if len(files) == 1:
        folder = folders["train"][1]
        raise DataError(f"{folder}: no text file with boxes is there for any image. {_GIVE}")
    return reader.listing(pictures, names, files)


def _file_of_names(root: Path) -> Path:
    able = [root / name for name in (*_NAMED_IN, "classes.txt") if (root / name).is_file()]
    if not able:
        raise DataError(f"{root}: no data.yaml that names the classes. {_GIVE}")
    return able[0]


def _read(path: Path) -> dict[Any, Any]:
    """Return what data.yaml says, or classes.txt in its words."""
    try:
        text = yaml_text(path)
        return {"names": text.rstrip().splitlines()} if path.suffix == ".txt" else dict(load_yaml(text) or {})
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())[:120]}. Mend it.") from None


def _names(said: Any, path: Path) -> list[str]:
    """Names of the classes, in the order of their numbers."""
    if isinstance(said, dict) and {*said} == {*range(len(said))}:
        said = [said[at] for at in range(len(said))]
    if not isinstance(said, list) or not said or not all(isinstance(each, str | int) for each in said):
        raise DataError(f"{path}: names must be a list of the classes' names, got {str(said)[:80]}. Mend it.")
    names = [str(each).strip() for each in said]
    if len({*names}) < len(names) or "" in names:
        raise DataError(f"{path}: two classes have the same name, or one has none. Give each its own.")
    return names


def _named_folders(root: Path, said: Mapping[Any, Any], file: Path) -> dict[str, tuple[Path, Path]]:
    """The folders of images and labels of each part that data.yaml names; none if it names no folder for training that
    is there, as in files that were made elsewhere.

    DataError if a part has several folders, or images of two parts are the same.
    """
    folders = dict[str, Path]()
    for part in ALIASES:
        place = said.get(part)
        if isinstance(place, list) and len(place) == 1:
            place = place[0]
        if isinstance(place, list):
            raise DataError(f"{file}: {part} has {len(place)} folders of images. Put them into one folder.")
        if isinstance(place, str) and (images := _place_inside(root, place, said.get("path"))) is not None:
            folders[part] = images
    if "train" not in folders:
        return {}
    if "val" in folders and folders["val"] in (folders["train"], folders.get("test")):
        del folders["val"]  # a part of the training images takes its place
    for part, images in folders.items():
        for other, others in folders.items():
            if part != other and images.is_relative_to(others):
                raise DataError(f"{file}: {part} lies in {other}, so that both have the same images. Give each its own "
                                "folder.")
    return {part: (images, _labels_of(images, root)) for part, images in folders.items()}


def _place_inside(root: Path, said: str, base: object) -> Path | None:
    """The folder inside of `root` that an entry of data.yaml means; None if there is none."""
    inner = [part for part in Path(said).parts if part not in ("/", "..")]
    whole = Path(os.path.abspath(root))  # as all paths lie in a relative "."
    for place in (whole / str(base or "") / said, whole / said, whole.joinpath(*inner)):
        path = Path(os.path.normpath(place))
        if path != whole and path.is_relative_to(whole) and os.path.isdir(path):
            return root / path.relative_to(whole)
    return None


def _labels_of(images: Path, root: Path) -> Path:
    """The folder of labels: with `labels` for the last `images` of the path, or else the same."""
    parts = [*images.relative_to(root).parts]
    if "images" not in parts:
        return images
    parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return root.joinpath(*parts)


def _folders(root: Path) -> dict[str, tuple[Path, Path]]:
    """The folders of images and labels of each part, by their names."""
    folders = dict[str, tuple[Path, Path]]()
    for part, aliases in ALIASES.items():
        for alias in aliases:
            for images, labels in ((root / "images" / alias, root / "labels" / alias),
                                   (root / alias / "images", root / alias / "labels")):
                if images.is_dir():
                    folders.setdefault(part, (images, labels))
    if not folders and (root / "images").is_dir():
        folders["train"] = root / "images", root / "labels"
    if "train" not in folders:
        raise DataError(f"{root}: no images of a training part. {_GIVE}")
    return folders


def _boxes(reader: BoxReader, path: Path, n: int) -> Iterator[tuple[int, float, float, float, float]]:
    """Yield the boxes of an image, as shares of its sides."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        where = f"{path}, line {number}"
        try:
            label, values = int(words[0]), [float(word) for word in words[1:]]
        except ValueError:
            raise DataError(f"{where}: a class's number and four shares, got {line[:80]!r}. Mend it.") from None
        if not 0 <= label < n:
            raise DataError(f"{where}: class {label}, and there are 0 to {n - 1}. Mend it, or the names.")
        if len(values) > _BOX and len(values) % _CORNER == 0:  # an outline
            corners: list[float] = [min(values[0::2]), min(values[1::2]), max(values[0::2]), max(values[1::2])]
        elif len(values) == _BOX:
            x, y, width, height = values
            corners = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
        else:
            raise DataError(f"{where}: four shares, or the corners of an outline, got {len(values)} numbers. Mend it.")
        checked = reader.check_box(where, label, corners, 1.0, 1.0)
        if checked is not None:
            yield checked
