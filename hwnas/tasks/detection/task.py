"""The task of detection."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import LazyModule, torch
from hwnas.tasks.detection import boxes, graph, picture
from hwnas.tasks.detection.boxes import LEAST, N_SIDES, overlaps, read_objects
from hwnas.tasks.detection.score import BoxGrades
from hwnas.tasks.task import Answer, CardText, Grades, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    import hwnas.tasks.detection.head as head
    import hwnas.tasks.detection.loss as loss
else:
    head, loss = LazyModule("hwnas.tasks.detection.head"), LazyModule("hwnas.tasks.detection.loss")

CONFIDENT = 0.3  # confidence from which an object is an answer, and counts when int8 is compared with fp32
KEPT = 0.3  # share of a box's area that must stay in an image that was moved
MATCH = 0.5  # overlap of boxes that mean the same object


class Detection(Task):
    """The task of pictures in which objects are marked by boxes."""

    name = "detection"
    metric = "mAP"
    needs_trunk = draws = reads_boxes = True
    recipe: Mapping[str, Any] = MappingProxyType(
        {"batch_size": 16, "lr": 2e-3, "zoom": 0.25, "ema_decay": 0.99, "clip_norm": 5.0})

    def put_head(self, trunk: Any, classes: int) -> nn.Module:
        """Return a `Detector`."""
        return head.Detector(trunk, classes)

    def n_outputs(self, classes: int) -> int:
        """Return the number of distances and classes."""
        return N_SIDES + classes

    def move(self, targets: Tensor, moved: Tensor) -> Tensor:
        """Return boxes around the moved corners, cut to the image. A box of which too little is left is dropped."""
        # 1. `moved` leads from new places to old ones: its inverse moves the four corners of each box.
        labels, corners = targets[..., :1], 2 * targets[..., 1:] - 1  # -1 to 1, as torch's grids
        x, y = corners[..., [0, 2, 0, 2]], corners[..., [1, 1, 3, 3]]
        inverse = torch.linalg.inv(moved[:, :, :2].double()).to(targets)
        x, y = x - moved[:, None, 0, 2:].to(targets), y - moved[:, None, 1, 2:].to(targets)
        new_x = inverse[:, None, 0, :1] * x + inverse[:, None, 0, 1:] * y
        new_y = inverse[:, None, 1, :1] * x + inverse[:, None, 1, 1:] * y
        # 2. The box around these, and the part of it that is in the image.
        whole = torch.stack([new_x.amin(-1), new_y.amin(-1), new_x.amax(-1), new_y.amax(-1)], -1)
        inside = whole.clamp(-1, 1)
        areas = [(each[..., 2:] - each[..., :2]).prod(-1, keepdim=True) for each in (inside, whole)]
        is_kept = (labels >= 0) & (areas[0] > KEPT * areas[1])
        return torch.where(is_kept, torch.cat([labels, (inside + 1) / 2], -1), torch.full_like(targets, -1))

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the loss of classes and boxes. Labels are not smoothed."""
        return loss.detection_loss(outputs, targets)

    def answers(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the objects in each image [n, most, 6]."""
        return read_objects(outputs)

    def tell(self, outputs: NDArray[np.float32], names: Sequence[str]) -> list[list[Answer]]:
        """Return the objects with a confidence of CONFIDENT or more."""
        return [[Answer(names[int(label)], float(confidence), (left, top, right, bottom))
                 for label, confidence, left, top, right, bottom in objects.tolist() if label >= 0]
                for objects in read_objects(outputs, CONFIDENT)]

    def card(self, classes: int) -> CardText:
        """Describe the raw outputs, with the code that decodes and suppresses boxes here."""
        names = ("REACH", "LEAST", "OVERLAP", "MOST_LOOKED_AT", "MOST")
        constants = [f"{name} = {getattr(boxes, name)!r}" for name in names]
        code = [inspect.getsource(each) for each in (boxes.overlaps, boxes.decode, boxes.pick, boxes.read_objects)]
        head = "from __future__ import annotations\n\nimport numpy as np\nfrom numpy.typing import NDArray\n"
        return CardText(f"float32 [n, {N_SIDES + classes}, h, w]: of each of h x w cells the distances to the four "
                        "sides of an object, and a logit for each class",
                        "\n\n".join([head + "\n".join(constants), *code]),
                        "# Of the first image, with boxes as shares of its sides.\n"
                        f"for label, confidence, *box in read_objects(logits, {CONFIDENT})[0]:\n"
                        "    if label >= 0:\n        print(classes[int(label)], confidence, box)")

    def finish(self, proto: Any, image_size: int) -> str:
        """Add decoding and suppression as nodes behind the outputs."""
        return graph.add_objects(proto, image_size, CONFIDENT)

    def draw_answers(self, grades: Grades, answers: NDArray[Any], images: NDArray[np.uint8], targets: NDArray[Any],
                     names: Sequence[str]) -> Figure:
        """Draw precision by recall, and the images that were answered worst."""
        assert isinstance(grades, BoxGrades)
        return picture.draw_objects(grades, answers, images, targets, names, CONFIDENT)

    def grade(self, answers: NDArray[Any], targets: NDArray[Any]) -> BoxGrades:
        """Grade by mean average precision."""
        return BoxGrades(answers, targets)

    def agreement(self, wanted: NDArray[Any], got: NDArray[Any]) -> dict[str, float]:
        """Compare the objects of which the networks are sure, as F1: an object agrees if the other network has one of
        the same class in the same place. A half of the rest counts as lost."""
        # 1. Choose the least confidence: a network that is sure of nothing yet is judged by its likeliest objects.
        surest = 1 / (1 + np.exp(-np.asarray(wanted)[:, N_SIDES:].max((1, 2, 3))))
        least = float(np.clip(np.median(surest), LEAST, CONFIDENT))
        objects_of_both = [read_objects(np.asarray(each, np.float32), least) for each in (wanted, got)]
        # 2. Count for each class the objects with a counterpart, and the mean number of both networks' objects.
        counts: dict[int, list[float]] = {}
        for right, objects in zip(*objects_of_both, strict=True):
            for label in np.unique(np.concatenate([right[:, 0], objects[:, 0]])):
                if label < 0:
                    continue
                first, second = (each[each[:, 0] == label] for each in (right, objects))
                matched = overlaps(first[:, 2:], second[:, 2:]) >= MATCH
                own = counts.setdefault(int(label), [0.0, 0.0])
                own[0] += min(matched.any(0).sum(), matched.any(1).sum())
                own[1] += (len(first) + len(second)) / 2
        # 3. F1 of each class, and over all objects.
        shares = [same / of for same, of in counts.values()] or [1.0]
        same, of = (sum(each) for each in zip(*counts.values(), strict=True)) if counts else (1.0, 1.0)
        overall, by_class = float(same / of), float(np.mean(shares))
        return {"agreement": overall, "lost": (1 - overall) / 2, "by_class_agreement": by_class,
                "by_class_lost": (1 - by_class) / 2}

    def class_table(self, grades: Grades, answers: NDArray[Any], targets: NDArray[Any], names: Sequence[str]
                    ) -> tuple[list[str], list[list[str]]]:
        """Return the average precision of each class."""
        counts = np.bincount(targets[..., 0][targets[..., 0] >= 0].astype(int), minlength=len(names))
        by_class = sorted(grades.by_class(names).items(), key=lambda item: item[1])
        return ["class", "average precision (%)", "objects", ""], [
            [name, f"{100 * score:.2f}", str(counts[list(names).index(name)]), ""] for name, score in by_class]
