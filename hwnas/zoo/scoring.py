"""Make files of pretrained networks as for a deployment, and score them on images of ImageNet's classes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.progress import Console, Report
from hwnas.data.dataset import CLASSIFICATION, Dataset
from hwnas.data.loading import identify_images, inspect_dataset, list_classes, load_dataset
from hwnas.errors import ConfigError, DataError, HwnasError, one_line
from hwnas.networks.baselines import Baseline
from hwnas.networks.export import export_onnx
from hwnas.networks.network import Shape, TimmNetwork
from hwnas.networks.quantize import calibration_images, needs_narrow_weights, quantize_static, tuning_of
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_pretrained, import_timm, list_having
from hwnas.runtimes.runtime import load_runtime, predict, write_deployed
from hwnas.stats import wilson
from hwnas.system.cores import usable_cores
from hwnas.target import Host, Target
from hwnas.zoo.published import PublishedNetwork
from hwnas.zoo.record import ZooRecord
from hwnas.zoo.result import ZooRow

CLASSES = 1000  # of ImageNet
MOST_SCORED = 5000  # test images, about: with them the interval is ± 1 point
NEAR_FRONT = 3.0  # points of top-1
UNSCORED = "not scored: the minutes were over"
OVER_CAP = "not scored: it is over the cap"
MOST_NAMED = 6
CALIBRATION = 256  # images that int8 ranges are measured on


@dataclass
class Scoring:
    """The means by which networks are scored.

    Attributes:
        dataset: Options of images of some of ImageNet's classes.
        pretrained: The place of weights.
        seed: Of the choice of images.
        folder: For files.
        console: Receives remarks on the images.
        records: Of the targets; scores are stored there.
    """

    dataset: Mapping[str, Any]
    pretrained: PretrainedOptions
    seed: int
    folder: Path
    console: Console
    records: Sequence[ZooRecord]
    identity: str = field(init=False)
    classes: NDArray[np.int64] = field(init=False)
    images: Dataset | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.dataset.get("image_size") is not None:
            raise ConfigError("dataset.image_size: each network is scored on images of its own size. Leave it out.")
        info = inspect_dataset(self.dataset)
        if info.task != CLASSIFICATION:
            raise DataError(f"{info.name} is for {info.task}, and networks of ImageNet give each image one class. Give "
                            "images with one class each.")
        if info.channels != 3:
            raise DataError(f"{info.name}: networks of ImageNet take images of 3 channels. Add dataset.channels=3.")
        self.classes = imagenet_classes(list_classes(self.dataset), info.name)
        self.identity = identify_images(self.dataset, self.seed)
        # The weights of a network by its name, and the padding that they need; each file is read once.
        self._find_start = cache(lambda name: find_pretrained(name, self.pretrained, 3))
        self._records = {record.target: record for record in self.records}

    def score(self, rows: Sequence[ZooRow], cap_ms: float | None, seconds: float, report: Report) -> list[ZooRow]:
        """Score the files of timed rows under the cap until the time is over, the most promising networks first.

        Returns:
            All rows. A scored row has its top-1 and the 95 % interval, in per cent; the others have the reason.
        """
        end, scored, most_s = time.monotonic() + seconds, dict[ZooRow, ZooRow](), 0.0
        timed = [row for row in rows if row.latency and (cap_ms is None or row.ms <= cap_ms)]
        for network in dict.fromkeys(row.network for row in by_promise(timed)):
            own = [row for row in timed if row.network == network]
            scored |= (stored_rows := {row: stored for row in own if (stored := self._kept(row)) is not None})
            own = [row for row in own if row not in stored_rows]
            if not own or time.monotonic() > end:
                continue
            report(max(0.0, 1 - (end - time.monotonic()) / seconds), f"score {network.key}")
            data = self._read(network.image_size)
            # Score a network only if the time suffices for its answers, and for its files as for the slowest so far.
            answering_s, start = sum(row.ms / row.target.batch for row in own) * len(data.test) / 1e3, time.monotonic()
            if start + most_s + answering_s < end:
                scored |= dict(zip(own, self._score_network(network, own, data), strict=True))
                most_s = max(most_s, time.monotonic() - start - answering_s)  # of making its files
        return [row if not row.latency else scored[row] if row in scored else replace(row, reason=(
            UNSCORED if row in timed else OVER_CAP)) for row in rows]

    def _score_network(self, network: PublishedNetwork, rows: Sequence[ZooRow], images: Dataset) -> Iterator[ZooRow]:
        """Yield the rows of a network as they are scored. A failure is the reason of these rows alone."""
        fp32 = self.folder / "model.onnx"
        try:
            start, pad = self._find_start(network.name)
            own = TimmNetwork(Baseline(network.name, pad_type=pad, pretrained=start),
                              Shape(3, network.image_size, CLASSES))
            model = own.build()
            start.load(model, CLASSES, with_classifier=True)
            data = own.fed(images)
            export_onnx(model.eval(), fp32, own.shape.image)
        except (HwnasError, MemoryError, RuntimeError) as error:  # the last is torch's own
            yield from (replace(row, reason=f"not scored: {one_line(error)}") for row in rows)
            return
        for row in rows:
            try:
                answers = predict(load_runtime(row.target.runtime).compile(
                    self._deploy(fp32, row.target, data), row.target), data)
            except (HwnasError, MemoryError, RuntimeError) as error:
                yield replace(row, reason=f"not scored: {one_line(error)}")
                continue
            n_right, n = int((answers == self.classes[data.test.labels]).sum()), len(answers)
            self._records[row.target].keep(scored={f"{network.key} {self.identity}": {
                "weights": f"{start.key}{pad}", "right": n_right, "images": n}})
            yield _scored_row(row, start, n_right, n)

    def _kept(self, row: ZooRow) -> ZooRow | None:
        """Return the row as an earlier call scored it; None if none did on these images, or only with other weights."""
        entry = self._records[row.target].scored.get(f"{row.network.key} {self.identity}")
        if entry is None:
            return None
        try:
            start, pad = self._find_start(row.network.name)
        except HwnasError:  # it is the reason of this row when its turn comes
            return None
        same = f"{start.key}{pad}" == entry["weights"]
        return _scored_row(row, start, entry["right"], entry["images"]) if same else None

    def _deploy(self, fp32: Path, target: Target, data: Dataset) -> Path:
        """Make the file that a target runs, and return its path."""
        if target.precision != "int8":
            return write_deployed(fp32, target)
        int8, host = self.folder / "model_int8.onnx", Host.detect()
        quantize_static(fp32, int8, calibration_images(data, CALIBRATION, self.seed), tuned_for=tuning_of(target),
                        narrow=needs_narrow_weights(target, host.vendor, host.flags), threads=len(usable_cores()))
        return write_deployed(int8, target)

    def _read(self, image_size: int) -> Dataset:
        """Read the images at a size. Networks of one size share them."""
        if self.images is None or self.images.image_size != image_size:
            is_first, self.images = self.images is None, None  # free the images of another size before reading
            most = {"train": max(CALIBRATION, 2 * len(self.classes)), "validation": 1, "test": MOST_SCORED}
            self.images = load_dataset({**self.dataset, "image_size": image_size}, image_size, self.seed, most=most)
            for line in self.images.describe() if is_first else ():
                self.console.note(line)
            for remark in self.images.remarks if is_first else ():
                self.console.remark(f"note: {remark}.")
        return self.images


def _scored_row(row: ZooRow, start: Pretrained, n_right: int, n: int) -> ZooRow:
    """Return a row with its score."""
    low, high = wilson(n_right, n)
    return replace(row, weights=str(start.path), scored=(100 * n_right / n, 100 * low, 100 * high, n))


def networks_with_weights(networks: Sequence[PublishedNetwork], pretrained: PretrainedOptions, console: Console
                          ) -> list[PublishedNetwork]:
    """Return the networks whose weights are on this machine, or all if weights may be fetched.

    Raises:
        MissingWeights: There are no weights of any network of timm.
        ConfigError: There are none of these networks, or several files may hold the weights of one.
    """
    if pretrained.file is not None:
        if len({each.name for each in networks}) > 1:
            raise ConfigError("pretrained.file is of one network. Add names=[NAME], or give pretrained.folder=DIR with "
                              "a file for each.")
        return list(networks)
    having = list_having(pretrained)
    able = [each for each in networks if pretrained.download or each.name in having]
    if not able:
        raise ConfigError(f"there are weights of {', '.join(having[:MOST_NAMED])}, and none of them is among the "
                          f"{len(networks)} networks that are asked for. Give other names, or "
                          "pretrained.download=true.")
    if others := sorted({*having} - {each.name for each in able}):
        console.remark(f"note: not asked for, or without published figures: {', '.join(others[:MOST_NAMED])}"
                       f"{' and more' * (len(others) > MOST_NAMED)}.")
    for name in sorted({each.name for each in able} & {*having}):
        find_pretrained(name, pretrained, 3)
    return able


def imagenet_classes(names: Sequence[str], where: str) -> NDArray[np.int64]:
    """Return each class's place among ImageNet's 1000 classes [n]. Classes are called by WordNet id, such as
    `n01440764`, or all 1000 of them by number.

    Raises:
        DataError: A name is neither.
    """
    import_timm()
    from timm.data import ImageNetInfo

    places = {name: at for at, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    if len(names) == CLASSES and names[0] not in places:  # the digits 0 to 9 are none of its classes
        places = {str(at): at for at in range(CLASSES)}
    if unknown := next((name for name in names if name not in places), None):
        raise DataError(f"{where}: networks of ImageNet are scored on images of its classes, whose folders are called "
                        f"by WordNet id, such as n01440764, or from 0 to 999. {unknown!r} is none of these. Rename the "
                        "folders, or leave dataset out: top-1 is then the published one.")
    return np.array([places[name] for name in names], np.int64)


def by_promise(rows: Sequence[ZooRow]) -> list[ZooRow]:
    """Order rows: first the front of published top-1 and latency, then rows less than NEAR_FRONT points below it, then
    the others. In each group, rows of one image size are together."""
    def order(row: ZooRow) -> tuple[int, int]:
        # Points of top-1 to the best network that is no slower.
        missing = max(other.network.top1 for other in rows if other.ms <= row.ms) - row.network.top1
        return 0 if missing <= 0 else 1 if missing < NEAR_FRONT else 2, row.network.image_size

    return sorted(rows, key=order)
