"""How the network that is to be deployed answers each class, with a few test images that it answers wrongly."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.front.comparison import describe
from hwnas.front.deploy import DEPLOY
from hwnas.front.rows import FrontRow
from hwnas.lazy import PIL
from hwnas.system.run_folder import MOST_PIXELS, RunFolder

MISTAKES = 5
LEAST_PX, MOST_PX = 64, 128  # side at which an image is shown


@dataclass(frozen=True, slots=True)
class Mistake:
    """A test image [c, h, w], the class that it is of, and the answer."""

    image: NDArray[np.uint8]
    label: int
    answer: int

    @property
    def address(self) -> str:
        """The picture as a `data:` address."""
        pixels = self.image[0] if len(self.image) == 1 else self.image.transpose(1, 2, 0)
        picture = PIL.Image.fromarray(np.ascontiguousarray(pixels))
        picture.thumbnail((MOST_PX, MOST_PX))
        times = -(-LEAST_PX // max(picture.size))
        out = io.BytesIO()
        picture.resize((picture.width * times, picture.height * times), PIL.Image.Resampling.NEAREST).save(out, "PNG")
        return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


@dataclass(frozen=True, eq=False)
class Classes:
    """Test images by class and by the answer of one network, `counts` [class, answer]."""

    network: str
    names: tuple[str, ...]
    counts: NDArray[np.int64]
    mistakes: Sequence[Mistake] = field(default=())


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


def can_be_drawn(images: NDArray[Any]) -> bool:
    """Whether a report can show images [n, c, h, w]: grey or colour ones that are not huge."""
    return images.shape[1] in (1, 3) and images[:1].size <= MOST_PIXELS


def choose_mistakes(labels: NDArray[Any], answers: NDArray[Any], n: int = MISTAKES) -> NDArray[np.int64]:
    """Places of up to `n` test images that are answered wrongly: of each class the first, the hardest class first, then
    the second of each."""
    wrong = np.flatnonzero(answers != labels)
    of_class, seen, order = Counter(labels.tolist()), Counter[int](), []
    missed = Counter(labels[wrong].tolist())
    for at in wrong.tolist():
        label = int(labels[at])
        order.append((seen[label], -missed[label] / of_class[label], at))
        seen[label] += 1
    return np.array([at for *_, at in sorted(order)[:n]], np.int64)


def read_classes(run: RunFolder, row: FrontRow | None, names: Sequence[str]) -> Classes | None:
    """What a network answered, as the run folder holds it; None where no answers are kept."""
    if row is None or not names or not run.predictions.exists():
        return None
    answers = run.read_predictions()
    if row.id not in answers or "labels" not in answers:
        return None
    labels, given = (np.clip(answers[key], 0, len(names) - 1) for key in ("labels", row.id))
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (labels, given), 1)
    kept = run.read_mistakes()
    mistakes = [Mistake(image, int(labels[at]), int(given[at]))
                for at, image in zip(kept.get("index", ()), kept.get("images", ()), strict=True)
                if 0 <= at < len(labels) and labels[at] != given[at]]
    return Classes(describe(row), tuple(names), counts, mistakes[:MISTAKES])
