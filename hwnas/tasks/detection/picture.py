"""The picture of a detector: precision by recall, and the images that it answers worst, with boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import matplotlib
from hwnas.pictures import blank_figure, style, title
from hwnas.tasks.detection.score import RECALLS, BoxGrades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORST = 5  # images that are shown
RIGHT, TOLD = "#0e9384", "#c2410c"  # colours of the right boxes, and of the network's
_MOST_CURVES = 8  # classes whose curves are named in the legend


def draw_objects(grades: BoxGrades, objects: NDArray[Any], images: NDArray[np.uint8], targets: NDArray[Any],
                 names: Sequence[str], least: float) -> Figure:
    """Draw precision by recall of each class at an overlap of .5, and the WORST images with their objects. The
    network's objects are drawn from a confidence of `least` on."""
    order = np.argsort(grades.per_image, kind="stable")[:WORST]
    figure = blank_figure(12, 7)
    with style():
        grid = figure.add_gridspec(2, 3, left=0.06, right=0.99, top=0.94, bottom=0.05, wspace=0.12, hspace=0.3)
        _draw_curves(figure.add_subplot(grid[0]), grades, names)
        for place, image in enumerate(order, 1):
            axes = figure.add_subplot(grid[place])
            _draw_image(axes, images[image], targets[image], objects[image], names, least)
            title(axes, f"test image {image}: mAP {100 * grades.per_image[image]:.0f} %")
    return figure


def _draw_curves(axes: Axes, grades: BoxGrades, names: Sequence[str]) -> None:
    for at, (label, precision) in enumerate(grades.curves.items()):
        axes.plot(100 * RECALLS, 100 * precision, lw=1.4, label=names[label] if at < _MOST_CURVES else None)
    axes.set_xlabel("recall (%)")
    axes.set_ylabel("precision (%)")
    axes.set_xlim(0, 101)
    axes.set_ylim(0, 102)
    title(axes, f"Precision by recall at an overlap of .5: AP50 {100 * grades.score_50:.1f} %")
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_image(axes: Axes, image: NDArray[np.uint8], targets: NDArray[Any], objects: NDArray[Any],
                names: Sequence[str], least: float) -> None:
    """Draw the image, its objects (solid), and the network's objects (dashed, with its confidence)."""
    pixels = np.asarray(image).transpose(1, 2, 0)
    side = pixels.shape[0]
    axes.imshow(pixels.squeeze(), cmap="grey", vmin=0, vmax=255)
    axes.set_axis_off()
    for label, *box in targets:
        if label >= 0:
            _draw_box(axes, box, side, RIGHT, "-", "")
    for label, confidence, *box in objects:
        if label >= 0 and confidence >= least:
            _draw_box(axes, box, side, TOLD, "--", f"{names[int(label)]} {confidence:.2f}")


def _draw_box(axes: Axes, box: Sequence[float], side: int, color: str, dashes: str, text: str) -> None:
    left, top, right, bottom = (side * float(each) for each in box)
    axes.add_patch(matplotlib.patches.Rectangle((left, top), right - left, bottom - top, fill=False, ec=color, lw=1.5,
                                                ls=dashes))
    if text:
        axes.text(left, max(0.0, top), text, fontsize=7, color="white", va="bottom",
                  bbox={"facecolor": color, "edgecolor": "none", "pad": 1, "alpha": 0.85})

