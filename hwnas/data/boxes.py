"""Pictures in which objects are marked by boxes. The readers of all formats check and list them here."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hwnas.data.contents import state_of
from hwnas.data.dataset import MULTILABEL, DatasetOptions, Listing
from hwnas.data.folder import Entry, is_image, is_left_behind, list_files
from hwnas.data.pixels import TORN
from hwnas.errors import DataError
from hwnas.lazy import PIL

MOST_BOXES = 1000  # of an image
FEW = 10  # boxes; fewer are not checked for their unit
_ORIENTATION, _LYING = 0x0112, 5  # EXIF's tag, and the first of its values, 1 to 8, that swap width and height
_CLOSE = 0.01  # share of a side by which a box may reach beyond its picture without a remark: annotations are rounded
_NO_AREA, _OUTSIDE, _CLIPPED = "without area", "outside of their image", "that reach beyond their image, clipped"


@dataclass(frozen=True, slots=True)
class MarkedPicture:
    """A picture, its size in pixels, and its objects: class, left, top, right, bottom in pixels. If boxes are shares of
    the sides, the size is 1 by 1."""

    path: Path
    width: float
    height: float
    boxes: Sequence[tuple[int, float, float, float, float]]


@dataclass
class BoxReader:
    """The part that readers of all formats have in common.

    Attributes:
        root: The folder.
        options: The options of the data set.
        form: The unit and order of a box in the format, for error messages.
        odd: Counts odd boxes by what was done with them.
        n_boxes: All boxes that were read.
        left_out: Counts files that are no part of the data set, by reason.
        remarks: Further sentences on what was read.
    """

    root: Path
    options: DatasetOptions
    form: str
    odd: Counter[str] = field(default_factory=Counter)
    n_boxes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def leaves_out(self, mark: str) -> bool:
        """Return whether a box with this mark is left out, and count it. If classes alone are asked for, none is: a
        crowd is in its image, too."""
        if self.options.task == MULTILABEL:
            return False
        self.odd[f"{mark}, left out"] += 1
        return True

    def check_box(self, where: str, label: int, corners: Sequence[object], width: float, height: float
                  ) -> tuple[int, float, float, float, float] | None:
        """Return a box, cut to its picture. None for a box without area or outside, which is counted. DataError, which
        names the place `where`, for numbers that are no box."""
        if len(corners) != 4 or not all(isinstance(each, int | float) and not isinstance(each, bool)
                                        and math.isfinite(each) for each in corners):
            raise DataError(f"{where}: a box has four finite numbers, got {str(list(corners))[:80]}. Mend it.")
        self.n_boxes += 1
        left, top, right, bottom = (float(each) for each in corners)  # type: ignore[arg-type]
        if right < left or bottom < top:
            raise DataError(f"{where}: a box of negative size, {right - left:g} x {bottom - top:g}. Mend it.")
        if right == left or bottom == top:
            self.odd[_NO_AREA] += 1
            return None
        inside = max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height)
        if inside[2] <= inside[0] or inside[3] <= inside[1]:
            self.odd[_OUTSIDE] += 1
            return None
        if max(-left / width, -top / height, right / width - 1, bottom / height - 1) > _CLOSE:
            self.odd[_CLIPPED] += 1
        return (label, *inside)

    def place_of(self, folder: Path, name: object, where: str) -> Path:
        """Return the path of a picture below `folder`. DataError for a name that leads elsewhere."""
        if not isinstance(name, str) or not name or "\0" in name:
            raise DataError(f"{where}: an image needs a file name, got {str(name)[:80]!r}. Mend it.")
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{where}: {name[:80]!r} leads out of {folder}. Give names of files below it.")
        return path

    def size_of(self, path: Path) -> tuple[int, int]:
        """Return width and height of a picture as its annotations mean it, or 1 and 1 if it is not there, which
        `listing` reports. DataError if it cannot be read, or if it may be turned against its boxes."""
        if not path.is_file():
            return 1, 1
        try:
            _, seen, orientation = self._look_at(path)
        except (*TORN, PIL.Image.DecompressionBombError) as error:
            raise DataError(f"{path}: no width and height are said of it, and it cannot be read ({error}).") from None
        self._refuse_turned(path, orientation)
        return seen

    def _look_at(self, path: Path) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Return a picture's size in its file and as `upright` has it, and its EXIF orientation. Nothing is decoded."""
        with PIL.Image.open(path) as image:
            # Pillow turns TIFF files itself.
            value = 1 if image.format == "TIFF" else PIL.Image.Image.getexif(image).get(_ORIENTATION, 1)
            orientation = value if value in range(1, 9) else 1
            is_swapped = orientation >= _LYING and self.options.upright
            return image.size, image.size[::-1] if is_swapped else image.size, orientation

    def _refuse_turned(self, path: Path, orientation: int) -> None:
        """Raise DataError if EXIF turns or mirrors a picture, unless `upright` says that its boxes are of what a person
        sees."""
        if orientation > 1 and not self.options.upright:
            raise DataError(f"{path} is turned by its EXIF orientation, and boxes are mostly of pictures as a person "
                            "sees them. Set dataset.upright=true; if they are not, remove the orientation from the "
                            "files.")

    def listing(self, parts: Mapping[str, Sequence[MarkedPicture]], names: Sequence[str], files: Sequence[Path]
                ) -> Listing:
        """List the data set of these pictures. `files` say what is in them, too. DataError if there are none, or if one
        is missing, has other sizes than its annotation says, or is twice in a part."""
        # 1. Check all that is known without decoding: files, units and sizes.
        pictures_of = {part: self._present(part, pictures) for part, pictures in parts.items()}
        self._check_unit(pictures_of)
        if not pictures_of.get("train"):
            raise DataError(f"{self.root}: no training image is there. Check dataset.root.")
        entries = {part: [Entry(str(each.path), state=state_of(os.stat(each.path))) for each in pictures]
                   for part, pictures in pictures_of.items()}
        all_pictures = [each for pictures in pictures_of.values() for each in pictures]
        self._check_sizes(all_pictures)
        # 2. Count other images in the same folders: nobody has looked for objects in them, so they are not used.
        paths = {each.path for each in all_pictures}
        self.left_out += Counter({"image without annotation": sum(
            is_image(each.name) and not is_left_behind(each.name) and folder / each.name not in paths
            for folder in {path.parent for path in paths} for each in os.scandir(folder))})
        boxes = {part: _as_shares(pictures) for part, pictures in pictures_of.items()}
        return list_files(entries, names, self.root, self.options, self.left_out,
                          [*self.remarks, *self._remarks(boxes, names)],
                          annotations=files, boxes=boxes)

    def _present(self, part: str, pictures: Sequence[MarkedPicture]) -> list[MarkedPicture]:
        if duplicates := [path for path, n in Counter(each.path for each in pictures).items() if n > 1]:
            raise DataError(f"{self.root}: {duplicates[0].name} is twice in {part}. Keep one entry with all boxes.")
        missing_paths = [each.path for each in pictures if not each.path.is_file()]
        if missing_paths and not self.options.skip_unreadable:
            more = f" and {len(missing_paths) - 1:,} more" if len(missing_paths) > 1 else ""
            raise DataError(f"{self.root}: {part} names {missing_paths[0]}{more}, which is not there. Add it, or set "
                            "dataset.skip_unreadable=true.")
        self.left_out += Counter({"not there": len(missing_paths)})
        missing_set = {*missing_paths}
        return [each for each in pictures if each.path not in missing_set]

    def _check_unit(self, parts: Mapping[str, Sequence[MarkedPicture]]) -> None:
        """Raise DataError for another unit: most boxes do not fit their pictures, or none is as large as a pixel."""
        beyond = self.odd[_OUTSIDE] + self.odd[_CLIPPED]
        if self.n_boxes >= FEW and beyond > self.n_boxes / 2:
            raise DataError(f"{self.root}: {beyond:,} of {self.n_boxes:,} boxes do not fit into their images. Check "
                            f"that they are {self.form}.")
        pictures = [each for part in parts.values() for each in part if each.boxes and each.width > 1]
        if pictures and all(max(box[3], box[4]) <= 1 for each in pictures for box in each.boxes):
            raise DataError(f"{self.root}: no box is larger than a pixel. Check that they are {self.form}, and no "
                            "shares of the sides.")

    def _check_sizes(self, pictures: Sequence[MarkedPicture]) -> None:
        """Raise DataError if a picture has another shape than its annotation says, as one that a camera turned. It is
        also raised if a turned picture has the same shape either way, and no other one says which way boxes are."""
        turned: tuple[Path, int] | None = None
        is_said = False
        for each in pictures:
            try:
                size, seen, orientation = self._look_at(each.path)
            except (*TORN, PIL.Image.DecompressionBombError):
                continue  # the decoder says why
            if each.width == each.height == 1:  # boxes as shares
                self._refuse_turned(each.path, orientation)
                continue
            if seen == (round(each.width), round(each.height)):
                if orientation >= _LYING and size[0] != size[1]:
                    is_said = True
                elif orientation > 1:
                    turned = turned or (each.path, orientation)
                continue
            if orientation >= _LYING and seen[::-1] == (round(each.width), round(each.height)):
                raise DataError(f"{each.path}: {seen[0]} x {seen[1]} px, {each.width:g} x {each.height:g} in the "
                                "annotations: its EXIF orientation turns it. Set dataset.upright="
                                f"{str(not self.options.upright).lower()}.")
            raise DataError(f"{each.path}: {size[0]} x {size[1]} px in the file, {each.width:g} x {each.height:g} in "
                            "the annotations. Give the images that were annotated.")
        if turned is not None and not is_said:
            self._refuse_turned(*turned)

    def _remarks(self, boxes: Mapping[str, NDArray[np.float32]], names: Sequence[str]) -> list[str]:
        """Return sentences on odd boxes, classes without any, and images without objects."""
        odd_counts = [f"{n:,} boxes {action}" for action, n in self.odd.items()]
        remarks = [f"{', '.join(odd_counts)} ({_NO_AREA} or outside: left out)"] if odd_counts else []
        counts = np.bincount(boxes["train"][..., 0][boxes["train"][..., 0] >= 0].astype(int), minlength=len(names))
        if empty_classes := [name for name, n in zip(names, counts, strict=True) if not n]:
            remarks.append(f"no training image has a box of {', '.join(map(repr, empty_classes[:3]))}"
                           f"{' and others' if len(empty_classes) > 3 else ''}")
        if not counts.any():
            raise DataError(f"{self.root}: no training image has a box. Check the annotations.")
        if n := sum(int((each[..., 0] < 0).all(1).sum()) for each in boxes.values()):
            remarks.append(f"{n:,} images have no object; they are kept, as images in which nothing is to be found")
        return remarks


def _as_shares(pictures: Sequence[MarkedPicture]) -> NDArray[np.float32]:
    """Return boxes as a `Split` has them, with sides as shares of the picture's."""
    most = max((len(each.boxes) for each in pictures), default=0)
    if most > MOST_BOXES:
        worst = max(pictures, key=lambda each: len(each.boxes))
        raise DataError(f"{worst.path}: {most:,} boxes, more than {MOST_BOXES:,}. Cut the image into smaller ones.")
    # All pictures get as many rows as the picture with most boxes; class -1 marks an empty row.
    shares = np.full((len(pictures), max(1, most), 5), -1, np.float32)
    for at, each in enumerate(pictures):
        if each.boxes:
            sides = [1, *(each.width, each.height) * 2]
            shares[at, :len(each.boxes)] = np.asarray(each.boxes) / sides
    return shares
