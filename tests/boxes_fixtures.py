"""Small sets of pictures with boxes, and how they are written in each format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLORS = {"red": (220, 30, 30), "green": (30, 200, 60)}
SIZE = (64, 48)


def shapes(n: int, seed: int = 0) -> list[tuple[np.ndarray, list[tuple[str, int, int, int, int]]]]:
    """Pictures with one or two filled rectangles each, of two colours; the last one has none."""
    rng, pictures = np.random.default_rng(seed), []
    for at in range(n):
        image, boxes = rng.integers(90, 140, (SIZE[1], SIZE[0], 3), np.uint8), []
        for place in range(0 if at == n - 1 else rng.integers(1, 3)):
            name = [*COLORS][rng.integers(2)]
            width, height = rng.integers(14, 26), rng.integers(14, 26)
            left, top = 2 + 32 * place + rng.integers(0, 30 - width), rng.integers(1, SIZE[1] - height)
            image[top:top + height, left:left + width] = COLORS[name]
            boxes.append((name, int(left), int(top), int(left + width), int(top + height)))
        pictures.append((image, boxes))
    return pictures


def write_coco(root: Path, parts: dict[str, int], change: Any = None) -> Path:
    """`train.json` beside `train/` and so on; `change` gets the content of each before it is written."""
    ids = {name: at + 3 for at, name in enumerate(COLORS)}  # which do not begin at 0
    for seed, (part, n) in enumerate(parts.items()):
        (root / part).mkdir(parents=True)
        content: dict[str, Any] = {"images": [], "annotations": [],
                                   "categories": [{"id": id, "name": name} for name, id in ids.items()]}
        for at, (image, boxes) in enumerate(shapes(n, seed)):
            Image.fromarray(image).save(root / part / f"{at}.png")
            content["images"].append({"id": 7 * at, "file_name": f"{at}.png", "width": SIZE[0], "height": SIZE[1]})
            for name, left, top, right, bottom in boxes:
                content["annotations"].append({
                    "id": len(content["annotations"]), "image_id": 7 * at, "category_id": ids[name], "iscrowd": 0,
                    "bbox": [left, top, right - left, bottom - top], "segmentation": [[1.0] * 8]})
        if change is not None:
            change(content)
        (root / f"{part}.json").write_text(json.dumps(content))
    return root


def write_yolo(root: Path, parts: dict[str, int]) -> Path:
    """`images/train`, `labels/train` and so on, and `data.yaml`."""
    names = [*COLORS]
    (root).mkdir(parents=True, exist_ok=True)
    (root / "data.yaml").write_text(f"names: {json.dumps(names)}\n")
    for seed, (part, n) in enumerate(parts.items()):
        images, labels = root / "images" / part, root / "labels" / part
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for at, (image, boxes) in enumerate(shapes(n, seed)):
            Image.fromarray(image).save(images / f"{at}.png")
            lines = [f"{names.index(name)} {(left + right) / 2 / SIZE[0]} {(top + bottom) / 2 / SIZE[1]} "
                     f"{(right - left) / SIZE[0]} {(bottom - top) / SIZE[1]}"
                     for name, left, top, right, bottom in boxes]
            if lines:
                (labels / f"{at}.txt").write_text("\n".join(lines))
    return root


def write_voc(root: Path, parts: dict[str, int]) -> Path:
    """`JPEGImages`, `Annotations`, `ImageSets/Main/train.txt` and so on."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for seed, (part, n) in enumerate(parts.items()):
        stems = []
        for at, (image, boxes) in enumerate(shapes(n, seed)):
            stems.append(f"{part}{at}")
            Image.fromarray(image).save(root / "JPEGImages" / f"{stems[-1]}.png")
            objects = "".join(
                f"<object><name>{name}</name><difficult>0</difficult><bndbox><xmin>{left + 1}</xmin><ymin>{top + 1}"
                f"</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
                for name, left, top, right, bottom in boxes)
            (root / "Annotations" / f"{stems[-1]}.xml").write_text(
                f"<annotation><filename>{stems[-1]}.png</filename><size><width>{SIZE[0]}</width><height>{SIZE[1]}"
                f"</height></size>{objects}</annotation>")
        (root / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(stems))
    return root
