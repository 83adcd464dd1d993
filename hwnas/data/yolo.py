"""Boxes in YOLO's format: beside each image a text file with a line for each object.

A line is the class's number, and centre and size of the box as shares of the image's sides; or the corners of an
outline, whose box counts. `images/train/a.jpg` has `labels/train/a.txt`, `train/images/a.jpg` has `train/labels/a.txt`.
`data.yaml` (or `classes.txt`) names the classes, and the folders of images where they are called otherwise.
"""

from __future__ import annotations

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
    names, folders = _names(said.get("names"), names_file), _folders(root, said)
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
    if isinstance(said, dict) and sorted(said) == [*range(len(said))]:
        said = [said[at] for at in range(len(said))]
    if not isinstance(said, list) or not said or not all(isinstance(each, str | int) for each in said):
        raise DataError(f"{path}: names must be a list of the classes' names, got {str(said)[:80]}. Mend it.")
    names = [str(each).strip() for each in said]
    if len({*names}) < len(names) or "" in names:
        raise DataError(f"{path}: two classes have the same name, or one has none. Give each its own.")
    return names


def _folders(root: Path, said: Mapping[Any, Any]) -> dict[str, tuple[Path, Path]]:
    """The folders of images and labels of each part: as data.yaml has them, or else by their names."""
    folders = {part: (images, _labels_of(images, root)) for part in ALIASES
               if (images := _named_folder(root, said.get(part), said.get("path"))) is not None}
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


def _named_folder(root: Path, said: object, base: object) -> Path | None:
    """The folder inside of `root` that data.yaml means by its entry for a part. None if it has none, as the paths of
    files that were made elsewhere begin elsewhere."""
    if not isinstance(said, str):
        return None
    inner = [part for part in Path(said).parts if part not in ("/", "..")]
    whole, able = root.resolve(), [root / str(base or "") / said, root / said, root.joinpath(*inner)]
    folders = (each.resolve() for each in able if each.is_dir())
    return next((root / each.relative_to(whole) for each in folders if each.is_relative_to(whole)), None)


def _labels_of(images: Path, root: Path) -> Path:
    """The folder of labels: with `labels` for the last `images` of the path, or else the same."""
    parts = [*images.relative_to(root).parts]
    if "images" not in parts:
        return images
    parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return root.joinpath(*parts)


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
