"""card.md: its code runs as it stands."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from deployment_fixtures import (
    finish,
    measured,
    pictures,
    sides_data,
    tiny_architecture,
    tiny_baseline,
    tiny_making,
    tiny_network,
)
from front_fixtures import make_row
from PIL import Image

from hwnas.data.dataset import Dataset, Preparation
from hwnas.data.loading import load_dataset
from hwnas.front.card import card_text
from hwnas.front.make import make
from hwnas.front.rows import FrontRow
from hwnas.front.score import Timing
from hwnas.front.verification import SearchFacts
from hwnas.networks.network import FoundNetwork
from hwnas.networks.quantize import QuantisedFile
from hwnas.runtimes.openvino import compile_options
from hwnas.system.cores import usable_cores
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.target import Host, Target

GIVEN = sides_data()
TARGET, ORT = Target("xeon_int8", "openvino", "int8"), Target("ort_int8", "onnxruntime", "int8")


def blocks_of(text: str) -> list[str]:
    """The Python of a card: what prepares images, one block a runtime, and the timm network."""
    return re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)


def fed(block: str) -> str:
    """The first block without the line in which a user names images, so that they are those of its scope."""
    return re.sub(r"^(paths|pictures|images) = .*# yours.*$", "", block, flags=re.MULTILINE)


def card(**changes) -> str:
    return card_text(make_row(**changes), GIVEN, TARGET, date="2026-11-20", runtime="openvino 2026.4.1")


def card_of(given: Dataset = GIVEN, target: Target = TARGET, row: FrontRow | None = None, **options) -> str:
    return card_text(row or make_row(), given, target, **{"date": "", "runtime": "", **options})


def test_card_says_how_to_feed_it_what_was_measured_and_of_what_kind_it_is() -> None:
    text = card(latency_ms_p50=0.1, latency_ms_p90=0.1, latency_ms_p99=1.0)
    assert "The known network a1_like of the search's space for" in card(name="a1_like", is_control=True)
    assert "drawn at random, a control of f0," in card(is_control=True, control_of="f0")
    for said in ("(pixels / 255 - mean) / std", "mean = [0.4]", "std = [0.3]", 'classes = ["left", "right"]',
                 "pip install numpy pillow openvino==2026.4.1\n", "pip install numpy pillow onnxruntime\n",
                 "intel-xeon-f6m143s8-2c, openvino 2026.4.1, 2026-11-20",
                 "96.50 % (95 %: 94.00 to 98.00) on 360 images", "0.105 ms (90 %: 0.104 to 0.107)",
                 "| 50, 90, 99 of 100 calls within | 0.1, 0.1, 1 ms, ",
                 "98% of convolutions and matrix products in int8"):
        assert said in text


def test_names_of_classes_are_text_and_neither_markdown_nor_code() -> None:
    names = ("<b onclick=x>", "[here](javascript:alert(1))", "two\nlines", '"]; print("mine")#', "```")
    recall = dict.fromkeys(names, 0.5)
    text = card_of(replace(GIVEN, class_names=names), recall=recall)
    for name in (r"\<b onclick=x\>", r"\[here\](javascript:alert(1))", "two lines", r"\`\`\`"):
        assert f"{name} 50.0 %" in text
    scope: dict[str, list[str]] = {}
    exec(blocks_of(text)[0], scope)
    assert scope["classes"] == list(names)


def test_card_says_how_it_was_quantised_and_names_the_commands_that_write_what_is_deployed() -> None:
    made = QuantisedFile("mse", ("pool", "linear"), 7)
    text = card_of(replace(GIVEN, preparation=Preparation(True, (20, 16), 1)), quantised=made.text)
    assert "Activation ranges: mse, the last 2 layers in fp32, weights of 7 bits." in text
    assert "Quantised" not in card()
    assert "hwnas export model=DIR format=uint8 out=3fa91c20.onnx" in text
    assert "[n, 16, 16, 1]" in text
    assert "hwnas export" not in card(), "without a preparation there is nothing to put into the graph"


def test_unverified_card_says_how_to_complete_it() -> None:
    text = card(verified=False, latency_ms=None, top1_test=None, reason="parity failed")
    assert "hwnas verify run=DIR" in text
    assert "parity failed" in text
    assert "latency of one batch" not in text


def test_each_runtime_says_its_own_latency_or_that_it_was_not_measured() -> None:
    parts = re.split(r"^## ", card(), flags=re.MULTILINE)
    ours, theirs = (next(part for part in parts if part.startswith(name)) for name in ("OpenVINO", "ONNX Runtime"))
    assert "Measured: 0.105 ms (90 %: 0.104 to 0.107) a batch" in ours
    assert "not measured in this runtime. The int8 file was made for openvino" in theirs
    assert "hwnas quantize target=NAME model=model.onnx" in theirs
    assert card(verified=False, latency_ms=None).count("not measured in this runtime") == 2


def test_every_way_to_load_is_short_and_the_runtimes_use_the_cards_threads() -> None:
    for row in ({}, {"is_baseline": True, "name": "resnet10t", "id": "resnet10t-stem1"}):
        _, *blocks = blocks_of(card(**row))
        assert [len(block.splitlines()) for block in blocks] == [16, 12, 4]
        assert '"INFERENCE_NUM_THREADS": "1"' in blocks[0]
        assert "options.intra_op_num_threads, options.inter_op_num_threads = 1, 1" in blocks[1]
    text = card_of(target=Target("ort_fp32", "onnxruntime", "fp32", threads=0))  # its own file and threads
    assert "model.onnx" in text
    assert "model_int8.onnx" not in text
    assert f"inter_op_num_threads = {len(usable_cores())}, 1" in text  # what target.threads=0 stands for is said


@pytest.mark.parametrize("network", [tiny_network(), tiny_baseline("test_efficientnet", 1)], ids=["found", "timm"])
def test_code_of_the_card_runs_and_agrees(tmp_path: Path, network) -> None:
    making = tiny_making()
    make(network, ModelFolder(tmp_path), making)
    row = make_row(network.id, name=network.name, is_baseline=network.is_baseline)
    text = card_of(target=ORT, row=row)
    images = making.dataset.normalise(making.dataset.test.images)
    found = []
    with contextlib.chdir(tmp_path):
        first, *others = blocks_of(text)
        for block in others:
            scope = {"images": images}
            exec(fed(first), scope)
            exec(block, scope)
            if "model" in scope:
                with torch.inference_mode():
                    scope["logits"] = scope["model"].eval()(torch.from_numpy(images)).numpy()
            found.append(np.asarray(scope["logits"]).argmax(1))
    assert len(found) == 3
    for answers in found[:2]:
        assert (answers == found[2]).mean() >= 0.9


@pytest.mark.parametrize("mean", [(), (0.5, 0.5, 0.5)])
@pytest.mark.parametrize("size", [16, 24, 64])
def test_who_follows_the_card_feeds_the_same_images(tmp_path: Path, size: int, mean: tuple[float, ...]) -> None:
    """From JPEG files by the card's own lines: bit by bit, as int8 may answer otherwise by the last one."""
    root = str(pictures(tmp_path, train=3, test=6))
    dataset = load_dataset({"name": "imagefolder", "root": root}, 64, 0).at_size(size)
    dataset = replace(dataset, mean=mean or dataset.mean, std=mean or dataset.std)
    text = card_of(dataset)
    scope = {"paths": sorted((tmp_path / "test").rglob("*.jpg"), key=lambda path: (path.parent.name, path.name))}
    exec(fed(blocks_of(text)[0]), scope)
    np.testing.assert_array_equal(scope["images"], dataset.normalise(dataset.test.images))


@pytest.mark.parametrize(("name", "size"), [("digits", 8), ("digits", 10), ("digits", 32)])
def test_arrays_are_prepared_as_the_card_says(name: str, size: int) -> None:
    dataset = load_dataset({"name": name}, size, 0)
    native = load_dataset({"name": name}, 8, 0)
    scope = {"pictures": list(native.test.images[:50, 0])}
    exec(fed(blocks_of(card_of(dataset))[0]), scope)
    np.testing.assert_array_equal(scope["images"], dataset.normalise(dataset.test.images[:50]))


@pytest.mark.parametrize("target", [TARGET, ORT], ids=lambda made: made.runtime)
def test_each_answer_of_the_front_is_had_from_the_card_alone(tmp_path, monkeypatch, target):
    """With nothing but Pillow, numpy and the runtime, a batch at a time: the runs' own answers, image by image."""
    monkeypatch.setattr("hwnas.latency.wave.measure", lambda calls, *args, **options: {
        name: measured(0.1) for name in calls})
    dataset = load_dataset({"name": "imagefolder", "root": str(pictures(tmp_path / "data", train=20, test=4))}, 16, 0)
    run = RunFolder.create(tmp_path / "run")
    run.write_config("seed: 0\n")
    network = FoundNetwork(replace(tiny_architecture(), channels=3, classes=3))
    (row,) = finish(run, [FrontRow.of(network)], tiny_making(target, dataset=dataset),
                    SearchFacts(Host.detect().name, "tiny", Timing(tiny_architecture(), seconds=1.0)))
    assert row.top1_test > 0.5, row.reason
    blocks = blocks_of(run.model(row.id).card.read_text())
    code = {name: next(block for block in blocks if f"import numpy as np, {name}" in block)
            for name in ("openvino", "onnxruntime")}[target.runtime]
    paths = sorted((tmp_path / "data" / "test").rglob("*.jpg"), key=lambda path: (path.parent.name, path.name))
    scope = {"paths": paths}
    exec(fed(blocks[0]), scope)
    answers = []
    with contextlib.chdir(run.model(row.id).path):
        for image in scope["images"]:
            scope["images"] = image[None]
            exec(code, scope)
            answers.append(int(scope["logits"].argmax()))
    assert answers == run.read_predictions()[row.id].tolist()


@pytest.mark.parametrize("preparation", [Preparation(True, (20, 16), 1), Preparation(False, (16,), 1), None],
                         ids=["pictures", "arrays", "unknown"])
def test_the_whole_page_runs_in_a_process_of_its_own(tmp_path: Path, preparation: Preparation | None) -> None:
    """In a folder that has the card's files and an image: each block as it stands, one after another."""
    making = tiny_making()
    make(tiny_network(), ModelFolder(tmp_path / "made"), making)
    text = card_of(replace(GIVEN, preparation=preparation), ORT, runtime="onnxruntime 1.2")
    folder = tmp_path / "empty"
    folder.mkdir()
    shutil.copy(tmp_path / "made" / "model_int8.onnx", folder)
    Image.new("RGB", (30, 40)).save(folder / "image.jpg")
    code = "\n".join(blocks_of(text)[:3])
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert text.index("onnxruntime==1.2") < text.index("## OpenVINO")  # the target's own runtime comes first
    first, second = done.stdout.splitlines()
    assert first == second
    assert first in ("['left']", "['right']")


def test_it_says_the_options_and_threads_that_were_used_a_call_after_a_pause_and_how_the_machine_was() -> None:
    options = compile_options(replace(TARGET, threads=3))
    text = card_of(target=replace(TARGET, threads=0), row=make_row(threads=3, pause_factor=2.46, slowdown=1.5),
                   machine="The machine was in use.", recall={"left": 0.5, "right": 1.0})
    for key, value in options.items():
        assert f'"{key}": "{value}"' in text
    assert options["ENABLE_CPU_PINNING"] == "NO"  # two processes would be pinned to one core
    assert "3 threads" in text
    assert "options.intra_op_num_threads, options.inter_op_num_threads = 3, 1" in text
    assert "2.5 times" in text
    assert "The machine was in use." in text
    assert re.search(r"left[^\n]*50", text)
