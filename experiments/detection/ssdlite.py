"""The well-known alternative: SSDLite on the whole MobileNetV2 (Sandler et al., CVPR 2018), of torchvision's parts.

    python -m experiments.detection.ssdlite RUN         # of `race.minutes search`: ssdlite.json

Same images, batches, augmentation, optimiser, seconds and pretrained weights as `minutes alone`. Scored in fp32; its
latency is that of the int8 network without decoding and suppression, timed beside the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.detection.minutes import PROBED
from experiments.race.minutes import OVERHEAD_S, WARMUP, read_run
from hwnas.data.dataset import Dataset
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import prepare_untrained, reference_network, time_files
from hwnas.lazy import LazyModule, timm
from hwnas.networks.weights import Pretrained
from hwnas.search.plan import line_recipe
from hwnas.tasks.detection.boxes import MOST, pick
from hwnas.tasks.detection.score import BoxGrades
from hwnas.tasks.detection.task import Detection
from hwnas.training.batches import Batches, fed
from hwnas.training.line import Leg, LineTraining, Stretch
from hwnas.training.loop import seeded
from hwnas.training.recipe import Recipe

torchvision = LazyModule("torchvision")  # which can be imported once hwnas was
LEVELS = 6  # maps, of which four are the head's own


class SSDLite(nn.Module):
    """float32 [n, 3, px, px] -> the raw outputs of all anchors [n, anchors, classes + 1 + 4]; class 0 is none."""

    def __init__(self, trunk: nn.Module, classes: int, px: int) -> None:
        super().__init__()
        models = torchvision.models
        features = models.mobilenet_v2(weights=None).features
        # Both name the layers in the order in which they run.
        weights = [value for key, value in trunk.state_dict().items() if not key.startswith("classifier")]
        features.load_state_dict(dict(zip(features.state_dict(), weights, strict=True)))
        last = max(at for at, block in enumerate(features) if getattr(block, "_is_cn", False))
        features[last].block = features[last].conv
        layers = models.detection.ssdlite
        backbone = layers.SSDLiteFeatureExtractorMobileNet(features, last, nn.BatchNorm2d)
        anchors = models.detection.anchor_utils.DefaultBoxGenerator([[2, 3] for _ in range(LEVELS)], min_ratio=0.2,
                                                                    max_ratio=0.95)
        widths = models.detection._utils.retrieve_out_channels(backbone, (px, px))
        head = layers.SSDLiteHead(widths, anchors.num_anchors_per_location(), classes + 1, nn.BatchNorm2d)
        self.ssd = models.detection.ssd.SSD(backbone, anchors, (px, px), classes + 1, head=head)
        self.classes, self.px = classes, px
        with torch.no_grad():  # the anchors follow from their sizes
            self.maps = [*backbone.eval()(torch.zeros(1, 3, px, px)).values()]
        self.pretrained_cfg = {"classifier": "ssd.head"}  # by which timm tells the layers' share of the rate

    def forward(self, images: Tensor) -> Tensor:
        """The raw outputs."""
        outputs = self.ssd.head([*self.ssd.backbone(images).values()])
        return torch.cat([outputs["cls_logits"], outputs["bbox_regression"]], 2)

    def _parts(self, outputs: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The outputs as torchvision has them, and the anchors of each image in pixels."""
        told = {"cls_logits": outputs[..., :self.classes + 1], "bbox_regression": outputs[..., self.classes + 1:]}
        pixels = torch.zeros(len(outputs), 3, self.px, self.px)
        images = torchvision.models.detection.image_list.ImageList(pixels, [(self.px, self.px)] * len(outputs))
        return told, self.ssd.anchor_generator(images, self.maps)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """torchvision's loss for boxes [n, most, 5]."""
        told, anchors = self._parts(outputs)
        wanted, matched = [], []
        for own, places in zip(targets, anchors, strict=True):
            there = own[own[:, 0] >= 0]
            wanted.append({"boxes": there[:, 1:] * self.px, "labels": there[:, 0].long() + 1})
            matched.append(self.ssd.proposal_matcher(torchvision.ops.box_iou(wanted[-1]["boxes"], places))
                           if len(there) else torch.full((len(places),), -1))
        losses = self.ssd.compute_loss(wanted, told, anchors, matched)
        total: Tensor = losses["bbox_regression"] + losses["classification"]
        return total

    def objects(self, outputs: Tensor) -> np.ndarray:
        """The objects in each image [n, MOST, 6], as of `boxes.read_objects`."""
        told, anchors = self._parts(outputs)
        found = np.full((len(outputs), MOST, 6), -1, np.float32)
        for row, moved, logits, places in zip(found, told["bbox_regression"], told["cls_logits"], anchors, strict=True):
            boxes = self.ssd.box_coder.decode_single(moved, places) / self.px
            shares = logits.softmax(1)[:, 1:].clamp(1e-6, 1 - 1e-6)
            picked = pick(boxes.numpy(), shares.logit().numpy())
            row[:len(picked)] = picked
        return found


class SSDDetection(Detection):
    """Detection by the loss of a model."""

    def __init__(self, model: SSDLite) -> None:
        self.model = model

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """The model's."""
        return self.model.loss(outputs, targets)


def train_detector(data: Dataset, start: Pretrained, recipe: Recipe, seed: int, steps: int) -> tuple[SSDLite, float]:
    """Train for so many steps by one cosine; return the average, and the median seconds of a step."""
    trunk, ends = timm.create_model("mobilenetv2_100", num_classes=2), list[float]()
    start.load(trunk, 2)
    with seeded(seed, recipe.threads):
        model = SSDLite(trunk, len(data.class_names), data.image_size)
        batches = Batches(data.train, data, recipe, seed)
        batches.task = SSDDetection(model)
        stretch = Stretch(Leg(steps, 1.0, 0.0, min(WARMUP, steps // 3)), 0, "", "ssdlite", model.train)
        training = LineTraining(batches, recipe, stretch, lambda state: None)
        training.run(lambda step, of: ends.append(time.monotonic()))
    average: Any = training.current.eval()
    return average, float(np.median(np.diff(ends)))


def main() -> None:
    """Train, score, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--core", type=int, default=0)
    given = parser.parse_args()
    os.sched_setaffinity(0, {given.core})
    asked, plan, data = read_run(given.run)
    start, = plan.starts.values()
    data, target = replace(data, mean=start.mean, std=start.std), plan.deployments[0].target
    recipe = line_recipe(plan, data)
    step_s = train_detector(data, start, recipe, asked.seed, PROBED)[1]
    steps = round((60 * asked.minutes - OVERHEAD_S) / step_s)
    model, _ = train_detector(data, start, recipe, asked.seed, steps)
    with torch.no_grad():
        objects = np.concatenate([model.objects(model(fed(data.test.images[at:at + 16], data, "cpu")))
                                  for at in range(0, len(data.test), 16)])
    own, half = BoxGrades(objects, data.test.targets), BoxGrades(objects, data.test.targets, overlap=0.5)
    with TemporaryDirectory() as folder:
        path = prepare_untrained(model, "0" * 8, (3, data.image_size, data.image_size), target, Path(folder))
        timed = time_files({"ssdlite": TimedFile(path, target, (3, data.image_size, data.image_size))}, target,
                           reference_network(), Protocol(max_seconds=30.0))["ssdlite"]
    told: dict[str, Any] = {"steps": steps, "mAP": own.score, "AP50": half.score, "latency_ms": timed.latency_ms}
    (given.run / "ssdlite.json").write_text(json.dumps(told) + "\n")
    print(told)


if __name__ == "__main__":
    main()
