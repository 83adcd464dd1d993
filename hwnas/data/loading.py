"""A data set is loaded by its name: listed, checked, split into three disjoint sets, and decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.options import Config
from hwnas.cli.progress import Console
from hwnas.data.arrays import array_files, digits, fashion_mnist
from hwnas.data.coco import coco
from hwnas.data.contents import digest, hash_images, name_copies
from hwnas.data.dataset import (
    LEAST,
    Dataset,
    DatasetInfo,
    DatasetOptions,
    Images,
    Listing,
    Preparation,
    Progress,
    Split,
    check_counts,
    split,
    subset,
)
from hwnas.data.folder import image_folder
from hwnas.data.pixels import ALL_16_BITS, TRANSPARENT
from hwnas.data.scenes import digit_scenes
from hwnas.data.timm_readers import PREFIX, timm_reader
from hwnas.data.voc import voc
from hwnas.data.yolo import yolo
from hwnas.errors import DataError
from hwnas.system.libraries import find_offers
from hwnas.system.paths import home
from hwnas.tasks.task import load_task

GROUP = "hwnas.datasets"  # entry points of other packages
_ANYBODYS: dict[str, Callable[[DatasetOptions], Listing]] = {  # readers of any data: a data set has its folder's name
    "arrays": array_files, "coco": coco, "imagefolder": image_folder, "voc": voc, "yolo": yolo}
_BUILT_IN = {**_ANYBODYS, "digit_scenes": digit_scenes, "digits": digits, "fashion_mnist": fashion_mnist}


def inspect_dataset(config: Config) -> DatasetInfo:
    """Return channels, classes and native size, without decoding images.

    Raises DataError as `load_dataset`, but for images that are not looked at, and for classes that are too small only
    without copies.
    """
    options = DatasetOptions.from_config(config)
    listing = _listing(options)
    _split(listing, options, 0)
    return listing.info


def list_classes(config: Config) -> Sequence[str]:
    """Return the names of the classes, in the order of labels, without decoding images."""
    return _listing(DatasetOptions.from_config(config)).class_names


def identify_images(config: Config, seed: int) -> str:
    """Return a name for the images and how they are divided, of any size. No image is decoded."""
    options = DatasetOptions.from_config(config)
    return _fingerprint(_listing(options), options, 0, seed, ())


def read_images(config: Config, image_size: int, seed: int, console: Console) -> Dataset:
    """Run `load_dataset` as a step of a command that prints the facts of the data, and remarks on what is odd."""
    with console.step("read images") as report:
        dataset = load_dataset(config, image_size, seed, lambda done, total: report(done / max(total, 1)))
    for line in dataset.describe():
        console.note(line)
    for remark in dataset.remarks:
        console.remark(f"note: {remark}.")
    return dataset


def load_dataset(config: Config, image_size: int, seed: int, progress: Progress | None = None,
                 most: Mapping[str, int] = MappingProxyType({})) -> Dataset:
    """List, check, split and decode the data set of `config` (the `dataset` group; `config.image_size` wins).

    DataError if it is missing, empty, of one class, has an unreadable image or too few images of a class.
    `progress(done, total)` counts decoded images. `most`: the number of images of a set that are read, if not all.
    """
    options = DatasetOptions.from_config(config)
    listing = _listing(options)
    # 1. Split.
    size, strata = options.image_size or image_size, _strata(listing)
    part_keys = listing.keys() if listing.keys is not None else None
    rows_of_set = _split(listing, options, seed, None if part_keys is None else part_keys["train"])
    names = ("train", "validation", "test")
    for name, n in most.items():
        part, rows = rows_of_set[name]
        rows_of_set[name] = part, rows[subset(listing.parts[part][rows], n, seed)]
    # 2. Decode all sets at once, and check what is left of each; an image may have been dropped.
    decoded_sets = listing.read([rows_of_set[name] for name in names], size, progress)
    sets, split_facts, content = {}, [], {}
    for name, (images, is_decoded) in zip(names, decoded_sets, strict=True):
        part, rows = rows_of_set[name]
        rows = rows[is_decoded]
        labels = listing.parts[part][rows]
        split_facts += [name, part, *(hashlib.sha256(each.tobytes()).hexdigest() for each in (rows, labels))]
        sets[name] = Split(images, labels, None if listing.boxes is None else listing.boxes[part][rows])
        _check_set(sets[name], name, part, listing.where, strata if part == "train" and name not in most else ())
        keys = hash_images(images) if part_keys is None else [part_keys[part][row] for row in rows]
        content[name] = [*zip(keys, labels.tolist(), ((part, int(row)) for row in rows), strict=True)]
    # 3. Describe the images: statistics, kinds, and remarks on what is odd.
    skipped = sum(int((~is_decoded).sum()) for _, is_decoded in decoded_sets)
    mean, std = _statistics(sets["train"].images)
    survey = listing.survey
    survey.check(listing.where)
    kinds = survey.lines(options.upright)
    contrast_remark = ("the training images have hardly any contrast: nearly black, or all alike"
                       if max(std) < 1.01 / 255 else "")
    val_remark = ("the val part holds the test images, as there is no test part; validation images are drawn from train"
                  if rows_of_set["test"][0] == "val" else "")
    remarks = [*listing.remarks, *name_copies(content, listing.name_of),
               *filter(None, [val_remark, survey.remark, contrast_remark])]
    return Dataset(
        **sets, name=options.name, class_names=listing.class_names, channels=listing.info.channels, image_size=size,
        mean=mean, std=std, flip=options.flip, skipped=skipped,
        fingerprint=_fingerprint(listing, options, size, seed, split_facts), left_out=dict(listing.left_out),
        preparation=_preparation(listing, size, options), title=_title(options), remarks=tuple(remarks),
        kinds=tuple(kinds), task=listing.info.task)


def _split(listing: Listing, options: DatasetOptions, seed: int, keys: Sequence[str] | None = None
           ) -> dict[str, tuple[str, NDArray[np.int64]]]:
    """Run `split` on a data set. DataError if it has one class only, too."""
    if len(listing.class_names) < 2 and listing.boxes is None:
        raise DataError(f"{listing.where}: one class only ({', '.join(listing.class_names)}). Nothing can be learnt. "
                        "Give a data set with at least two classes.")
    return split(listing.parts, _strata(listing), options, seed, listing.where, keys)


def _strata(listing: Listing) -> Sequence[str]:
    """Return the names of the classes by which sets are drawn; of images with boxes all count as one."""
    return listing.class_names if listing.boxes is None else ("of any class",)


def _check_set(decoded: Split, name: str, part: str, where: str, classes: Sequence[str]) -> None:
    """Raise DataError if a decoded set lacks images, also of one of these `classes`, or has boxes of no object."""
    if classes:
        check_counts(decoded.labels, classes, LEAST[name], f"{where}: in the {name} set a class needs")
    if not len(decoded):
        raise DataError(f"{where}: no image of {part}/ can be read. Check the files.")
    if decoded.boxes is not None and not (decoded.boxes[..., 0] >= 0).any():
        raise DataError(f"{where}: no image of the {name} set has an object. Give annotations of these images, or "
                        "leave the set out.")


def _title(options: DatasetOptions) -> str:
    """Return the name of the folder or file for `_ANYBODYS` and timm; empty for others and for a program's objects."""
    has_folder_name = options.name in _ANYBODYS or options.name.startswith("timm")
    if not has_folder_name or options.root is None or options.root.parent == home() / "cache":
        return ""
    return options.root.resolve().stem


def _preparation(listing: Listing, size: int, options: DatasetOptions) -> Preparation | None:
    if listing.pictures is None:
        return None
    native = listing.info.native_size
    sizes = (size,) if listing.pictures or native == size else (native, size)
    survey = listing.survey
    return Preparation(listing.pictures, sizes, listing.info.channels, survey.levels, options.upright,
                       tuple(survey.lines(options.upright)[1:]), whole=listing.boxes is not None)


def _fingerprint(listing: Listing, options: DatasetOptions, size: int, seed: int, split_up: Sequence[str]) -> str:
    facts: tuple[object, ...] = (size, seed, options.validation_fraction, options.test_fraction,
                                 options.skip_unreadable, listing.info.channels)
    # Rarer facts are added only if they apply, so that fingerprints of all other data sets stay as they were.
    survey = listing.survey
    if survey.levels not in (None, ALL_16_BITS):
        facts += (f"levels={survey.levels}",)
    if options.upright:
        facts += ("upright",)
    if TRANSPARENT in survey.marks:
        facts += ("on white",)
    if listing.contents is None:
        return digest(listing.identity, *facts)
    columns = [f"{key}={value}" for key, value in sorted(options.options.items())]
    return digest(listing.contents.identity, *facts, *columns, *listing.class_names, *split_up)


def _listing(options: DatasetOptions) -> Listing:
    """Return the data set for the task of the options, or else of its annotations. DataError if these do not fit it."""
    if options.name.startswith(PREFIX):
        listing = timm_reader(options)
    elif options.name in _BUILT_IN:
        listing = _BUILT_IN[options.name](options)
    else:
        offers = find_offers(GROUP, "data set", options.name, [*_BUILT_IN, f"{PREFIX}KIND"])
        listing = offers[options.name].load()(options)
        if not isinstance(listing, Listing):
            raise DataError(f"data set {options.name!r} of another package answers {type(listing).__name__}, not a "
                            "hwnas.data.Listing. Update that package.")
    if options.task is None:
        return listing
    reads_boxes, has_boxes = load_task(options.task).reads_boxes, listing.boxes is not None
    if reads_boxes != has_boxes:
        kinds = "images with one class each", "pictures with boxes"
        raise DataError(f"{listing.where}: task={options.task} needs {kinds[reads_boxes]}, and these are "
                        f"{kinds[has_boxes]}. Leave task out, or give another dataset.")
    return replace(listing, info=replace(listing.info, task=options.task))


def _statistics(images: Images, at_most: int = 4096) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel on 0..1, over `at_most` images evenly spread."""
    rows = np.linspace(0, len(images) - 1, min(len(images), at_most)).round().astype(int)
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        histogram = np.zeros(256)  # of all rows; only a few images are in memory at a time
        for start in range(0, len(rows), 256):
            histogram += np.bincount(images[rows[start:start + 256], channel].ravel(), minlength=256)
        histogram /= histogram.sum()
        mean = float(histogram @ values)
        means.append(round(mean, 6))
        stds.append(round(max(float(histogram @ (values - mean) ** 2) ** 0.5, 1 / 255), 6))
    return tuple(means), tuple(stds)
