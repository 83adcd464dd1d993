"""card.md: its lines run as they stand."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
from deployment_fixtures import tiny_baseline, tiny_making, tiny_network
from front_fixtures import make_row

from hwnas.data.task import Task
from hwnas.front.card import Input, card_text
from hwnas.front.make import make
from hwnas.system.run_folder import ModelFolder
from hwnas.target.target import Target

GIVEN = Input("sides", 1, 16, (0.4,), (0.3,), Task(("left", "right")))
TARGET = Target("xeon_int8", "openvino", "int8")


def card(**changes) -> str:
    return card_text(make_row(**changes), GIVEN, TARGET, date="2026-11-20", runtime="openvino 2026.4.1")


@pytest.mark.parametrize("text", [
    "(pixels / 255 - mean) / std", "mean = [0.4]", "std = [0.3]", "left, right", "intel-xeon-f6m143s8-2c, openvino "
    "2026.4.1, 2026-11-20", "96.50 % (95 %: 94.00 to 98.00) on 360 images", "0.105 ms (90 %: 0.104 to 0.107)",
    "98% of convolutions and matrix products in int8",
    'benchmark_app -m model_int8.onnx -d CPU -api sync -hint none -nstreams 1 -nthreads 1 -infer_precision f32 -shape '
    '"images[1,1,16,16]" -t 10'])
def test_card_says(text: str) -> None:
    assert text in card()


def test_unverified_card_says_how_to_complete_it() -> None:
    text = card(verified=False, latency_ms=None, top1_test=None, reason="parity failed")
    assert "python -m hwnas.verify run=DIR" in text
    assert "parity failed" in text
    assert "latency of one batch" not in text


def test_every_way_to_load_takes_three_lines() -> None:
    for row in ({}, {"is_baseline": True, "name": "resnet10t", "id": "resnet10t-stem1"}):
        blocks = re.findall(r"```python\n(.*?)\n```", card(**row), re.DOTALL)
        assert [len(block.splitlines()) for block in blocks] == [3, 3, 3]


def test_note_when_the_target_is_another_runtime() -> None:
    text = card_text(make_row(), GIVEN, Target("ort_fp32", "onnxruntime", "fp32", threads=0), date="", runtime="")
    assert "The target runs onnxruntime" in text
    assert "model.onnx" in text
    assert "model_int8.onnx" not in text
    assert "-nthreads" not in text


@pytest.mark.parametrize("network", [tiny_network(), tiny_baseline("mobilenetv3_small_050", 1)], ids=["found", "timm"])
def test_code_of_the_card_runs_and_agrees(tmp_path: Path, network) -> None:
    making = tiny_making()
    make(network, ModelFolder(tmp_path), making)
    row = make_row(network.id, name=network.name, is_baseline=network.is_baseline)
    text = card_text(row, GIVEN, Target("ort_int8", "onnxruntime", "int8"), date="", runtime="")
    images = making.dataset.normalise(making.dataset.test.images)
    found = []
    with contextlib.chdir(tmp_path):
        for block in re.findall(r"```python\n(.*?)\n```", text, re.DOTALL):
            scope = {"images": images}
            exec(block, scope)
            if "model" in scope:
                import torch

                with torch.inference_mode():
                    scope["logits"] = scope["model"].eval()(torch.from_numpy(images)).numpy()
            found.append(np.asarray(scope["logits"]).argmax(1))
    assert len(found) == 3
    for answers in found[:2]:
        assert (answers == found[2]).mean() >= 0.9
