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


@dataclass(frozen=True, eq=False)
class Classes:
    """Test images by class and by the answer of one network, `counts` [class, answer]."""

    network: str
    names: tuple[str, ...]
    counts: NDArray[np.int64]


def recall_by_class(answers: NDArray[np.int64], labels: NDArray[np.integer[Any]], names: Sequence[str]
                    ) -> dict[str, float]:
    """Return the share of the images of each class that is answered rightly, 0 to 1; of classes that have images."""
    return {names[int(label)]: float((answers[labels == label] == label).mean()) for label in np.unique(labels)}


def shown_row(rows: Sequence[FrontRow], comparisons: Sequence[Mapping[str, Any]]) -> FrontRow | None:
    """The network that is to be deployed, otherwise the most accurate one of the verified front; None where there is
    none."""
    deployed = {str(item.get("finalist")) for item in comparisons if item.get("verdict") == DEPLOY}
    front = [row for row in rows if row.on_front and row.verified]
    return next((row for row in rows if row.id in deployed), max(
        front, key=lambda row: row.top1_test or 0.0, default=None))


def read_classes(run: RunFolder, row: FrontRow | None, names: Sequence[str]) -> Classes | None:
    """Return what a network answered, as the run folder holds it; None if no answers are kept."""
    if row is None or not names or not run.predictions.exists():
        return None
    answers = run.read_predictions()
    if row.id not in answers or "labels" not in answers:
        return None
    labels, given = (np.clip(answers[key], 0, len(names) - 1) for key in ("labels", row.id))
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (labels, given), 1)
    return Classes(describe(row), tuple(names), counts)
