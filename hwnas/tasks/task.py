"""A task: a network's head, its loss, its answers and their score. All that differs between tasks is here.

Third parties register a class without arguments under the entry point group `hwnas.tasks`. Its name is the name that
their data sets give, and it must pass the contract of `hwnas.testing.check_task`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hwnas.errors import ConfigError
from hwnas.stats import percentiles
from hwnas.system.libraries import find_offers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

GROUP = "hwnas.tasks"
_BUILT_IN = {
    "classification": ("hwnas.tasks.classification", "Classification"),
    "detection": ("hwnas.tasks.detection.task", "Detection"),
    "multilabel": ("hwnas.tasks.multilabel", "MultiLabel"),
}
DRAWS = 300  # bootstrap draws of the images, for an interval
_HEAD = "_on_"  # between the name of a task and the name of the network that carries its head


class Grades(ABC):
    """The grades of a network's answers to some images.

    Attributes:
        per_image: [n], bool or float from 0 to 1: how right each answer is, to compare networks by few images.
        score: The task's metric over all images, from 0 to 1.
    """

    per_image: NDArray[Any]
    score: float

    @abstractmethod
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the score, over the images."""

    @abstractmethod
    def minus(self, other: Grades, confidence: float = 0.95) -> tuple[float, float, float]:
        """Return the score minus another network's on the same images, with its paired interval."""

    @abstractmethod
    def by_class(self, names: Sequence[str]) -> dict[str, float]:
        """Return the score, from 0 to 1, of each class that is in some image."""


class BootstrapGrades(Grades):
    """Grades whose intervals are percentiles of a bootstrap over the images, with the same draws for all networks.
    Subclasses define `scores_of`, the score if images count several times.

    Attributes:
        n_images: The number of all images.
        classes: The classes that some image has.
        class_scores: The score of each of them.
    """

    n_images: int
    classes: Sequence[int]
    class_scores: NDArray[np.float64]

    def scores_of(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the scores [draws] if images count `weights` [draws, n] times; NaN for a draw without any class."""
        raise NotImplementedError

    @cached_property
    def drawn(self) -> NDArray[np.float64]:
        """The scores of DRAWS draws of the images."""
        n = self.n_images
        return self.scores_of(np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), DRAWS).astype(float))

    def by_class(self, names: Sequence[str]) -> dict[str, float]:
        """Return `class_scores` by name."""
        return {names[label]: float(score) for label, score in zip(self.classes, self.class_scores, strict=True)}

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the draws."""
        return percentiles(self.drawn)

    def minus(self, other: Grades, confidence: float = 0.95) -> tuple[float, float, float]:
        """Return the difference of the scores, with the interval over the same draws for both."""
        assert isinstance(other, BootstrapGrades)
        return (self.score - other.score, *percentiles(self.drawn - other.drawn, confidence))


@dataclass(frozen=True, slots=True)
class Answer:
    """A class in an image, and the network's confidence in it from 0 to 1. `box` is its place as left, top, right and
    bottom in shares of the image's sides; None means the image as a whole."""

    label: str
    confidence: float
    box: tuple[float, float, float, float] | None = None


class CardText(NamedTuple):
    """The text of a card about a network's outputs.

    Attributes:
        outputs: Their type and shape, in a sentence.
        code: Python that defines what `shown` calls.
        shown: A line of Python that prints the answers that are in `logits`; `classes` has the names.
    """

    outputs: str
    code: str
    shown: str


class Task(ABC):
    """The work that a network shall do with images.

    Attributes:
        name: As data sets give it.
        metric: The name of its score in sentences.
        recipe: Fields of a training's recipe that differ from a classifier's.
        reads_boxes: True if its right answers are boxes of objects, otherwise each image has one class.
        is_sure: True if networks say how sure they are of an answer, so that two can share the work.
        draws: True if `draw_answers` draws a picture.
        needs_trunk: True if its head is on another network, so that no space of its own is searched.
    """

    name: str
    metric: str
    recipe: Mapping[str, Any] = {}
    reads_boxes = False
    is_sure = False
    needs_trunk = False
    draws = False

    def network_name(self, trunk: str) -> str:
        """Return the name of a timm network with this task's head: timm's own name if the task needs no other head."""
        return f"{self.name}{_HEAD}{trunk}" if self.needs_trunk else trunk

    def put_head(self, trunk: Any, classes: int) -> nn.Module:
        """Return a timm network in train mode with this task's head on it. ConfigError if the head does not fit."""
        raise NotImplementedError

    def n_outputs(self, classes: int) -> int:
        """Return the length of the second axis of a network's outputs."""
        return classes

    def move(self, targets: Tensor, moved: Tensor) -> Tensor:
        """Return the right answers to images that were moved.

        Args:
            targets: The right answers to the images as they were.
            moved: [n, 2, 3], for each place of an image the place that it came from, as torch's `affine_grid` has it.
        """
        return targets

    def wanted_logits(self, targets: NDArray[Any], classes: int) -> NDArray[np.float64] | None:
        """Return logits [n, classes], up to a factor, for fitting a linear last layer before training; else None."""
        return None

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the loss of a batch. `smoothing`: the share of each label that is spread over all classes."""

    @abstractmethod
    def answers(self, outputs: NDArray[np.float32]) -> NDArray[Any]:
        """Return a network's answers [n, ...] by its outputs [n, ...]."""

    def confidence(self, outputs: NDArray[np.float32]) -> NDArray[np.float16] | None:
        """Return the confidence in each answer, from 0 to 1; None if the task has none."""
        return None

    @abstractmethod
    def grade(self, answers: NDArray[Any], targets: NDArray[Any]) -> Grades:
        """Compare answers with the right ones."""

    @abstractmethod
    def agreement(self, wanted: NDArray[Any], got: NDArray[Any]) -> dict[str, float]:
        """Compare outputs of an int8 network with the fp32 network's, which are `wanted`. Return `agreement`, `lost`,
        `by_class_agreement` and `by_class_lost` of a `QuantisedFile`."""

    @abstractmethod
    def tell(self, outputs: NDArray[np.float32], names: Sequence[str]) -> list[list[Answer]]:
        """Return a network's answers to each image, in words."""

    @abstractmethod
    def card(self, classes: int) -> CardText:
        """Describe the outputs for a card, with Python that reads them and needs numpy alone."""

    def finish(self, proto: Any, image_size: int) -> str:
        """Let an ONNX file, in place, give answers instead of raw outputs for images of this side. Return a description
        of them. ConfigError if there is nothing to do."""
        raise ConfigError(f"answers=true: the outputs of a network for {self.name} need no more work. Leave it out.")

    def draw_answers(self, grades: Grades, answers: NDArray[Any], images: NDArray[np.uint8], targets: NDArray[Any],
                     names: Sequence[str]) -> Figure | None:
        """Draw how images were answered, the worst first; None if numbers say enough. `grades`: of the answers."""
        return None

    @abstractmethod
    def class_table(self, grades: Grades, answers: NDArray[Any], targets: NDArray[Any], names: Sequence[str]
                    ) -> tuple[list[str], list[list[str]]]:
        """Return heads of columns, and a row of text for each class, the hardest first. `grades`: of the answers."""


def load_task(name: str) -> Task:
    """Return the task called `name`: built in, or registered by another package. UnknownName lists all tasks."""
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        return cast(Task, getattr(importlib.import_module(module), attribute)())
    return cast(Task, find_offers(GROUP, "task", name, _BUILT_IN)[name].load()())


@cache
def trunk_of(name: str) -> tuple[str, str]:
    """Return the task whose head a network of this name has (empty: none), and the timm network below the head."""
    task, head, trunk = name.partition(_HEAD)
    is_known = task in _BUILT_IN or (head and entry_points(group=GROUP, name=task))
    return (task, trunk) if trunk and is_known else ("", name)
