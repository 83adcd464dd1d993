"""Makes many networks deployable at once, one process a core: every network is trained on one thread alike."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.deployable import Made, Making, image_size, make
from hwnas.errors import CandidateError
from hwnas.run_folder import RunFolder
from hwnas.scoring import fp32_top1

if TYPE_CHECKING:
    from hwnas.baselines import Baseline
    from hwnas.finalists import Finalist

_SETS = ("train", "validation", "test")


@dataclass(frozen=True)
class Outcome:
    """What became of one network: made and scored in fp32 on the test set, or the reason why not."""

    made: Made | None
    top1_fp32: float | None
    n_test: int
    reason: str = ""


def make_all(networks: Sequence[Finalist | Baseline], run: RunFolder, making: Making, workers: int,
             report: Callable[[float, str], None]) -> Iterator[tuple[Finalist | Baseline, Outcome]]:
    """`make` and score each network, in order of completion; the last are begun first (baselines take longest)."""
    if workers <= 1 or len(networks) <= 1:
        for index, network in enumerate(networks):
            def heard(step: int, steps: int, at: int = index, name: str = network.id) -> None:
                report((at + step / steps) / len(networks), name)

            yield network, _outcome(network, run, making, heard)
        return
    with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:
        parked = _park(making, Path(folder))
        with ProcessPoolExecutor(min(workers, len(networks)), mp_context=get_context("spawn"),
                                 initializer=_start, initargs=(parked, Path(folder), run)) as pool:
            jobs = {pool.submit(_job, network): network for network in reversed(networks)}
            try:
                for done, job in enumerate(as_completed(jobs), start=1):
                    report(done / len(jobs), f"{done} of {len(jobs)} networks trained and exported")
                    yield jobs[job], job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _outcome(network: Finalist | Baseline, run: RunFolder, making: Making,
             heard: Callable[[int, int], None] | None = None) -> Outcome:
    try:
        made = make(network, run.model(network.id), making, heard)
        data = making.dataset.at_size(image_size(network, making.dataset))
        return Outcome(made, fp32_top1(run.model(network.id).onnx, data), len(data.test))
    except CandidateError as error:
        return Outcome(None, None, len(making.dataset.test), str(error))


def _park(making: Making, folder: Path) -> Making:
    """The images as files that every process maps; what is returned carries none."""
    from hwnas.accuracy.data import Split

    for name in _SETS:
        part = getattr(making.dataset, name)
        np.save(folder / f"{name}-images.npy", part.images)
        np.save(folder / f"{name}-labels.npy", part.labels)
    none = Split(np.empty((0, 1, 1, 1), np.uint8), np.empty(0, np.int64))
    return replace(making, dataset=replace(making.dataset, train=none, validation=none, test=none))


_HERE: dict[str, tuple[Making, RunFolder]] = {}


def _start(parked: Making, folder: Path, run: RunFolder) -> None:
    from hwnas.accuracy.data import Split

    train, validation, test = (Split(np.load(folder / f"{name}-images.npy", mmap_mode="r"),
                                     np.load(folder / f"{name}-labels.npy")) for name in _SETS)
    data = replace(parked.dataset, train=train, validation=validation, test=test)
    _HERE["work"] = replace(parked, dataset=data), run


def _job(network: Finalist | Baseline) -> Outcome:
    making, run = _HERE["work"]
    return _outcome(network, run, making)
