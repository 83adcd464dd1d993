"""Detection: boxes move with images, outputs are decoded alike in torch and numpy, the score is pycocotools'."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hwnas.errors import ConfigError
from hwnas.networks.around import obvious_cuts
from hwnas.networks.baselines import check_timm, count_macs, original
from hwnas.networks.export import OPSET
from hwnas.networks.network import Shape, build
from hwnas.tasks.detection.boxes import MOST, MOST_LOOKED_AT, decode, overlaps, pick, read_objects
from hwnas.tasks.detection.graph import add_objects
from hwnas.tasks.detection.loss import decode as decode_in_torch
from hwnas.tasks.detection.loss import detection_loss, generalised_overlap, weigh
from hwnas.tasks.detection.score import BoxGrades
from hwnas.tasks.task import load_task, trunk_of

TASK = load_task("detection")
NAME = TASK.network_name("mobilenetv1_025")


def objects_and_targets(n: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Boxes of three classes, and what a fair detector would say: some moved, some missed, some that are not there."""
    rng = np.random.default_rng(seed)
    targets, objects = np.full((n, 6, 5), -1, np.float32), np.full((n, 12, 6), -1, np.float32)
    for image in range(n):
        for at in range(rng.integers(0, 5)):
            low = rng.uniform(0, 0.6, 2)
            box = np.concatenate([low, low + rng.uniform(0.1, 0.4, 2)])
            targets[image, at] = [rng.integers(3), *box]
            if rng.random() < 0.8:
                objects[image, at] = [targets[image, at, 0], rng.uniform(0.3, 1), *(box + rng.normal(0, 0.02, 4))]
        if rng.random() < 0.5:
            objects[image, 8] = [rng.integers(3), rng.uniform(0.02, 0.6), 0.1, 0.1, 0.4, 0.5]
    return objects, targets


@settings(max_examples=40, deadline=None)
@given(mirror=st.booleans(), scale=st.floats(0.7, 1.3), across=st.floats(-0.3, 0.3), down=st.floats(-0.3, 0.3))
def test_boxes_move_with_the_images(mirror: bool, scale: float, across: float, down: float) -> None:
    """A filled box in an image of 64 px stays filled, and the rest empty, to a pixel."""
    image = torch.zeros(1, 1, 64, 64)
    image[..., 16:40, 24:48] = 1
    box = torch.tensor([[[2.0, 24 / 64, 16 / 64, 48 / 64, 40 / 64], [-1.0] * 5]])
    moved = torch.tensor([[[-scale if mirror else scale, 0, across], [0, scale, down]]])
    grid = torch.nn.functional.affine_grid(moved, [1, 1, 64, 64], align_corners=False)
    now = torch.nn.functional.grid_sample(image, grid, padding_mode="zeros", align_corners=False)[0, 0] > 0.5
    kept, gone = TASK.move(box, moved)[0]
    assert (gone == -1).all()
    if kept[0] < 0:
        assert now.float().mean() < (24 * 24 / 64**2) * 0.45 / scale**2
        return
    rows, columns = torch.nonzero(now, as_tuple=True)
    edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert torch.allclose(64 * kept[1:], torch.tensor(edges).float(), atol=1.6)


def test_torch_and_numpy_read_outputs_alike() -> None:
    outputs = torch.randn(2, 7, 5, 9)
    boxes, logits = decode(outputs.numpy())
    of_torch, logits_of_torch, _ = decode_in_torch(outputs)
    assert np.allclose(boxes, of_torch.numpy(), atol=1e-5)
    assert np.allclose(logits, logits_of_torch.numpy())


def test_of_boxes_in_one_place_the_most_confident_of_each_class_stays() -> None:
    boxes = np.array([[0.1, 0.1, 0.5, 0.5], [0.11, 0.1, 0.5, 0.5], [0.6, 0.6, 0.9, 0.9]], np.float32)
    logits = np.array([[2.0, -9], [3.0, -9], [1.0, 0.5]], np.float32)
    objects = pick(boxes, logits)
    assert objects[:, 0].tolist() == [0, 0, 1]
    assert np.allclose(objects[0, 2:], boxes[1])
    assert (np.diff(objects[:, 1]) < 0).all()
    assert read_objects(np.full((1, 6, 3, 3), -9, np.float32))[0, 0, 0] == -1


def test_overlaps_are_those_of_areas() -> None:
    boxes = np.array([[0, 0, 0.5, 1], [0.25, 0, 0.75, 1], [0.9, 0.9, 1, 1]], np.float32)
    assert np.allclose(overlaps(boxes[:1], boxes), [[1, 1 / 3, 0]])
    both = torch.from_numpy(boxes)
    assert torch.allclose(generalised_overlap(both[:1], both)[:2], torch.tensor([1.0, 1 / 3]), atol=1e-4)


def test_the_intervals_are_of_the_same_score() -> None:
    objects, targets = objects_and_targets()
    grades = BoxGrades(objects, targets)
    assert 0.2 < grades.score < grades.score_50 < 1
    assert grades.scores_of(np.ones((1, len(targets))))[0] == pytest.approx(grades.score, abs=1e-9)
    low, high = grades.interval()
    assert low < grades.score < high
    assert {*grades.by_class("abc")} == {*"abc"}
    assert np.mean([*grades.by_class("abc").values()]) == pytest.approx(grades.score)


def test_a_better_network_is_told_by_paired_images() -> None:
    objects, targets = objects_and_targets(120)
    worse = objects.copy()
    worse[::3, :, 0] = -1  # misses every object of every third image
    better, other = BoxGrades(objects, targets), BoxGrades(worse, targets)
    difference, low, high = better.minus(other)
    assert difference == pytest.approx(better.score - other.score)
    assert 0 < low < difference < high
    assert better.minus(better) == (0, 0, 0)
    assert better.per_image.mean() > other.per_image.mean()


def test_right_answers_score_one_and_none_score_nothing() -> None:
    _, targets = objects_and_targets()
    perfect = np.insert(targets, 1, np.where(targets[..., 0] >= 0, 0.9, -1), axis=2)
    assert BoxGrades(perfect, targets).score == pytest.approx(1)
    nothing = BoxGrades(np.full((len(targets), 3, 6), -1, np.float32), targets)
    assert nothing.score == 0
    assert np.array_equal(nothing.per_image, (targets[..., 0] < 0).all(1).astype(np.float32))
    doubtful = np.full((2, 3, 6), -1, np.float32)
    doubtful[0, 0] = 0, 0.03, 0.1, 0.1, 0.5, 0.5  # where nothing is
    assert BoxGrades(doubtful, np.stack([np.full_like(targets[0], -1), targets[0]])).per_image == pytest.approx(
        [0.97, 0])


def test_a_detector_learns_where_things_are() -> None:
    torch.manual_seed(0)
    check_timm(NAME)
    model = original(NAME, classes=2, image_size=64).train()
    images, targets = torch.randn(8, 3, 64, 64) * 0.1, torch.full((8, 2, 5), -1.0)
    for at in range(8):
        label, left, top = at % 2, 0.1 + 0.05 * at, 0.5 - 0.04 * at
        images[at, label, int(64 * top):int(64 * top) + 26, int(64 * left):int(64 * left) + 26] += 2
        targets[at, 0] = torch.tensor([label, left, top, left + 0.4, top + 0.4])
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for _ in range(60):
        loss = detection_loss(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        grades = TASK.grade(TASK.answers(model(images).numpy()), targets.numpy())
    assert grades.score > 0.3


def test_small_and_rare_objects_count_as_much_as_others() -> None:
    """Two objects of class 0 with four cells each, one of class 1 with a single cell, in an image of ten cells."""
    targets = torch.full((1, 4, 5), -1.0)
    targets[0, :3, 0] = torch.tensor([0.0, 0.0, 1.0])
    place = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2, -1]])
    weight = weigh(place, targets, 3)[0]
    assert torch.allclose(weight[:8], torch.tensor(1.5 / 2).sqrt())
    assert torch.allclose(weight[8], torch.tensor(1.5 * 4).sqrt())


def test_images_without_objects_have_a_finite_loss() -> None:
    outputs = torch.randn(2, 7, 4, 4, requires_grad=True)
    loss = detection_loss(outputs, torch.full((2, 1, 5), -1.0))
    loss.backward()
    assert loss.isfinite()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


def test_the_obvious_cuts_of_a_detector_are_what_is_said_of_them() -> None:
    cuts = obvious_cuts(NAME, Shape(3, 96, 2), ())
    assert {"cut_short", "cut_early", "cut_thin"} <= {*cuts}
    for cut in cuts.values():
        model = build(cut).eval()
        assert cut.macs == count_macs(model, (3, 96, 96))
        with torch.no_grad():
            assert model(torch.zeros(1, 3, 96, 96)).shape == (1, 6, 12, 12)


def test_a_trunk_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no map of stride 8"):
        obvious_cuts(TASK.network_name("vit_tiny_patch16_224"), Shape(3, 224, 2), ())


def test_a_network_says_on_what_its_head_is() -> None:
    assert trunk_of(NAME) == ("detection", "mobilenetv1_025")
    assert trunk_of("mobilenetv1_025") == ("", "mobilenetv1_025")


def test_int8_is_held_against_the_objects_of_fp32() -> None:
    outputs = np.random.default_rng(0).normal(-6, 1, (4, 6, 6, 6)).astype(np.float32)
    outputs[:, 4, 2, 2] = 4
    same, moved = TASK.agreement(outputs, outputs), outputs.copy()
    moved[:2, 4, 2, 2] = -9
    assert same == {"agreement": 1.0, "lost": 0.0, "by_class_agreement": 1.0, "by_class_lost": 0.0}
    assert 0.5 < TASK.agreement(outputs, moved)["agreement"] < 0.8


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), n=st.integers(1, 3), classes=st.integers(1, 4), side=st.integers(1, 9))
def test_a_file_finds_the_objects_that_numpy_finds(seed: int, n: int, classes: int, side: int) -> None:
    outputs = np.random.default_rng(seed).normal(-0.5, 1.5, (n, 4 + classes, side, side)).astype(np.float32)
    shape = ["n", 4 + classes, side, side]
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("raw", "logits")]
    node = onnx.helper.make_node("Identity", ["raw"], ["logits"])
    graph = onnx.helper.make_graph([node], "g", tensors[:1], tensors[1:])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=8)
    assert "[k, 7]" in add_objects(proto, 8 * side, 0.3)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"raw": outputs})[0]
    assert classes * side**2 <= MOST_LOOKED_AT  # numpy looks at all of them
    for image, objects in enumerate(read_objects(outputs, 0.3)):
        wanted = objects[objects[:, 0] >= 0]
        own = found[found[:, 0] == image, 1:]
        order = np.lexsort((own[:, 0], -own[:, 1]))
        assert np.allclose(own[order][:MOST], wanted[np.lexsort((wanted[:, 0], -wanted[:, 1]))], atol=1e-4)
