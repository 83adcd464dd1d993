"""Boxes in COCO's format: a JSON file for each part, with `images`, `annotations` and `categories`.

The usual layouts are `train.json` beside `train/`; `annotations/instances_train2017.json` beside `train2017/`;
`train/_annotations.coco.json` in the folder of the images; or one such file alone.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwnas.data.boxes import BoxReader, MarkedPicture
from hwnas.data.dataset import DatasetOptions, Listing
from hwnas.data.folder import ALIASES, is_left_behind, part_like
from hwnas.errors import DataError

MOST_BYTES = 1 << 30  # of a file, which is read as a whole
# Files of the data set COCO that have no boxes of all classes.
_OTHERS = ("person_keypoints", "captions", "image_info", "stuff", "panoptic")
_CORNERS = 6  # numbers of the smallest outline
_ANNOTATED = re.compile("instances|annotation")  # in the name of a file beside other JSON files
_EXPORTED = "_annotations.coco.json"
_IDS = ("id", "image_id", "category_id")
_KEPT = {*_IDS, "bbox", "iscrowd", "file_name", "width", "height", "name", "images", "annotations", "categories"}
_GIVE = "Give dataset.root=FOLDER with train.json and train/, and val.json and val/ where images are held out."


def coco(options: DatasetOptions) -> Listing:
    """List a folder of pictures with boxes in COCO's format.

    Raises:
        DataError: The folder, a file or an entry is not what the format says.
    """
    root = options.find_root(_GIVE)
    reader, files = BoxReader(root, options, "left, top, width and height in pixels"), find_parts(root)
    contents = {part: _read(path) for part, path in files.items()}
    names = _categories(contents, files)
    places = {id: place for place, id in enumerate(names)}
    pictures = {part: _pictures(reader, contents[part], files[part], places) for part in files}
    return reader.listing(pictures, list(names.values()), list(files.values()))


def find_parts(root: Path) -> dict[str, Path]:
    """Return the annotation file of each part. DataError if two files could be it, or there is none for training."""
    # 1. By the usual layouts, and by names such as instances_train2017.json.
    files = dict[str, Path]()
    for part, aliases in ALIASES.items():
        candidates = [*dict.fromkeys(path for path in (
            *(root / f"{alias}.json" for alias in aliases), *(root / alias / _EXPORTED for alias in aliases),
            *(path for path in _json_files(root) if part_like(path.stem) == part and (
                path.parent != root or _ANNOTATED.search(path.stem.lower()))))
            if path.is_file() and not path.name.startswith(_OTHERS))]
        candidates = candidates or [  # such as instances_trainval35k
            path for alias in aliases for path in sorted((root / "annotations").glob(f"*_{alias}*.json"))
            if not path.name.startswith(_OTHERS)]
        if len(candidates) > 1:
            raise DataError(f"{root}: {candidates[0]} and {candidates[1]} mean the same part. Keep one of them.")
        files |= {part: candidates[0]} if candidates else {}
    # 2. One file of any name is the training part.
    if not files and (json_files := _json_files(root)):
        if len(json_files) > 1:
            raise DataError(f"{root}: {json_files[0].name} and {json_files[1].name}: which is which? {_GIVE}")
        return {"train": json_files[0]}
    if "train" not in files:
        raise DataError(f"{root}: no annotations of training images in COCO's format. {_GIVE}")
    return files


def _json_files(root: Path) -> list[Path]:
    return sorted(path for path in (*root.glob("*.json"), *root.glob("annotations/*.json"))
                  if not is_left_behind(path.name))


def _read(path: Path) -> dict[str, list[Any]]:
    """Return the three lists of a file. Entries are cut down while they are read, so that outlines take no memory."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise DataError(f"{path} has {size / 1e9:.1f} GB, more than {MOST_BYTES / 1e9:.1f} GB, which is the most. "
                            "Leave out segmentation.")
        data = json.loads(path.read_bytes(), object_hook=_cut_down)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON file: {str(error)[:120]}. Export it again.") from None
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in (
            "images", "annotations", "categories")):
        raise DataError(f"{path}: COCO's format has lists of images, annotations and categories. Export it again.")
    return data


def _cut_down(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with the keys that count. An outline alone counts as its box, and an id of 4.0 as 4."""
    outlines, box = entry.get("segmentation"), entry.get("bbox")
    if not box and isinstance(outlines, list) and (points := [
            value for each in outlines if isinstance(each, list) for value in each]) and len(
            points) >= _CORNERS and all(isinstance(value, int | float) for value in points):
        left, top = min(points[0::2]), min(points[1::2])
        entry["bbox"] = [left, top, max(points[0::2]) - left, max(points[1::2]) - top]
    return {key: int(value) if key in _IDS and isinstance(value, float) and value.is_integer() else value
            for key, value in entry.items() if key in _KEPT}


def _categories(contents: Mapping[str, Mapping[str, list[Any]]], files: Mapping[str, Path]) -> dict[int, str]:
    """Return names by id, ascending, of categories that annotations use. An id means the same in all parts."""
    names = dict[int, str]()
    for part, content in contents.items():
        for entry in content["categories"]:
            id, name = (entry.get(key) if isinstance(entry, dict) else None for key in ("id", "name"))
            if type(id) is not int or not isinstance(name, str) or not name.strip():
                raise DataError(f"{files[part]}: a category needs a whole number as id, and a name, got "
                                f"{str(entry)[:80]}. Mend it.")
            if names.setdefault(id, name) != name:
                raise DataError(f"{files[part]}: category {id} is {name!r} here and {names[id]!r} elsewhere. Give each "
                                "id one name.")
    # Some exporters add a category that all others belong to: leave out what no annotation has.
    used_ids = {id for content in contents.values() for entry in content["annotations"]
                if isinstance(entry, dict) and type(id := entry.get("category_id")) is int}
    used_names = {id: names[id] for id in sorted(names) if id in used_ids}
    if duplicates := [name for name, n in Counter(used_names.values()).items() if n > 1]:
        raise DataError(f"{files['train']}: two categories are called {duplicates[0]!r}. Give each its own name.")
    if not used_names:
        raise DataError(f"{files['train']}: no annotation is of a category. Export it again.")
    return used_names


def _pictures(reader: BoxReader, content: Mapping[str, list[Any]], path: Path, places: Mapping[int, int]
              ) -> list[MarkedPicture]:
    """Return the pictures of a part, in the order of the file."""
    # 1. Images by id, with their sizes; a size that the file lacks is read from the picture.
    images = dict[Any, dict[str, Any]]()
    for entry in content["images"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), int | str):
            raise DataError(f"{path}: an image needs an id, got {str(entry)[:80]}. Mend it.")
        sides = entry.get("width"), entry.get("height")
        if sides in ((None, None), (0, 0)):
            sides = entry["width"], entry["height"] = reader.size_of(_place_of(reader, path, entry))
        if not all(isinstance(side, int | float) and math.isfinite(side) and side > 0 for side in sides):
            raise DataError(f"{path}: image {entry['id']} needs width and height in pixels, got {sides[0]!r} and "
                            f"{sides[1]!r}. Mend it.")
        if entry["id"] in images:
            raise DataError(f"{path}: two images have the id {entry['id']}. Give each its own.")
        images[entry["id"]] = entry
    # 2. Add the boxes to their images; a crowd is no single object.
    boxes: dict[Any, list[tuple[int, float, float, float, float]]] = {id: [] for id in images}
    seen_ids = set[Any]()
    for entry in content["annotations"]:
        where = f"{path}: annotation {entry.get('id') if isinstance(entry, dict) else str(entry)[:80]}"
        if not isinstance(entry, dict) or not isinstance(entry.get("bbox"), list):
            raise DataError(f"{where} has no bbox. Mend it.")
        ids: list[Any] = [entry.get(key) for key in _IDS]
        if not all(isinstance(each, int | str | None) for each in ids):
            raise DataError(f"{where}: id, image_id and category_id are numbers, got {str(ids)[:80]}. Mend it.")
        if ids[0] is not None and ids[0] in seen_ids:
            raise DataError(f"{where} is there twice. Give each its own id.")
        seen_ids.add(ids[0])
        image, label = images.get(ids[1]), places.get(ids[2])
        if image is None or label is None:
            field = "image_id" if image is None else "category_id"
            raise DataError(f"{where} is of {field} {entry.get(field)!r}, which the file does not have. Mend it.")
        if entry.get("iscrowd") not in (None, 0, "0", "") and reader.leaves_out("of a crowd"):
            continue
        box = entry["bbox"]
        corners = [*box[:2], box[0] + box[2], box[1] + box[3]] if len(box) == 4 and all(
            isinstance(each, int | float) for each in box) else box
        clipped_box = reader.check_box(where, label, corners, image["width"], image["height"])
        if clipped_box is not None:
            boxes[image["id"]].append(clipped_box)
    return [MarkedPicture(_place_of(reader, path, image), image["width"], image["height"], boxes[id])
            for id, image in images.items()]


def _place_of(reader: BoxReader, path: Path, image: Mapping[str, Any]) -> Path:
    """Return the file of an image that an annotation file names: in the first of the usual folders that has it."""
    name, root, stem = image.get("file_name"), path.parent, path.stem.rpartition("_")[2]
    data_folder = root.parent if root.name == "annotations" else root
    aliases = [data_folder / alias for alias in ALIASES.get(part_like(path.stem) or "", ())]
    folders = [root / path.stem, data_folder / stem, data_folder / "images" / stem, root / "images", root,
               data_folder / "images", data_folder, *aliases]
    names = [name, name.replace("\\", "/")] if isinstance(name, str) and "\\" in name else [name]
    places = [reader.place_of(folder, each, str(path)) for each in names for folder in folders]
    return next((place for place in places if place.is_file()), places[1])
