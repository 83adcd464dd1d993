"""Read how the network that is to be deployed answers each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.front.comparison import describe
from hwnas.front.deploy import DEPLOY
from hwnas.front.rows import FrontRow
from hwnas.system.run_folder import RunFolder
from hwnas.tasks.classification import confusions
from hwnas.tasks.task import load_task


@dataclass(frozen=True, eq=False)
class Classes:
    """The answers of one network to the test images of each class: `columns`, and `rows` of text, the hardest first;
    and images by class and answer [class, answer], if an image has one."""

    network: str
    names: tuple[str, ...]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    counts: NDArray[np.int64] | None


def shown_row(rows: Sequence[FrontRow], comparisons: Sequence[Mapping[str, Any]]) -> FrontRow | None:
    """The network that is to be deployed, otherwise the most accurate one of the verified front; None where there is
    none."""
    deployed = {str(item.get("finalist")) for item in comparisons if item.get("verdict") == DEPLOY}
    front = [row for row in rows if row.on_front and row.verified]
    return next((row for row in rows if row.id in deployed), max(
        front, key=lambda row: row.top1_test or 0.0, default=None))


def read_classes(run: RunFolder, row: FrontRow | None, names: Sequence[str], task: str) -> Classes | None:
    """Return what a network answered, as the run folder holds it; None if no answers are kept."""
    if row is None or not names or not run.predictions.exists():
        return None
    answers = run.read_predictions()
    if row.id not in answers or "labels" not in answers:
        return None
    right, given = answers["labels"], answers[row.id]
    columns, rows = load_task(task).class_table(given, right, names)
    counts = confusions(given, right, len(names)) if right.ndim == 1 else None
    return Classes(describe(row), tuple(names), columns, rows, counts)
