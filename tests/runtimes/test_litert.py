"""LiteRT keeps the contract of runtimes, tells what it executed and where, and refuses in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ai_edge_litert")

from hwnas.errors import CandidateError, ConfigError, FileError, ModelError, TargetError
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.litert import tflite
from hwnas.networks.litert.lowering import write_tflite
from hwnas.networks.litert.tflite import read_tflite, schema, single_operators
from hwnas.networks.network import build
from hwnas.networks.quantize import quantize_static
from hwnas.runtimes import litert
from hwnas.runtimes.child import probe_model
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.runtime import load_runtime
from hwnas.space.architecture import Architecture
from hwnas.target import Target
from hwnas.testing import check_runtime, contract_images

ARCHITECTURE = Architecture((("ir_r1_k3_s2_e3_c12_se0.25",), ("ds_r1_k3_s1_c16",)), 8, 2, 32, "hard_swish", 16, 1, 5)
RUNTIME = load_runtime("litert")


def target(precision: str, **changes: int) -> Target:
    return Target("edge", "litert", precision, **{"threads": 1, **changes})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One network as ONNX and TFLite files of both precisions."""
    folder = tmp_path_factory.mktemp("files")
    paths = {name: folder / f"{name}.onnx" for name in ("fp32", "int8")}
    torch.manual_seed(0)  # other weights may have ranges that are left in fp32
    export_onnx(randomise(build(ARCHITECTURE).eval(), 0), paths["fp32"], (1, 16, 16))
    quantize_static(paths["fp32"], paths["int8"], contract_images(paths["fp32"], 32), tuned_for="litert")
    for name in ("fp32", "int8"):
        paths[f"{name}.tflite"] = folder / f"{name}.tflite"
        paths[f"{name}.tflite"].write_bytes(write_tflite(paths[name]))
    return paths


@pytest.mark.parametrize(("precision", "batch", "error"), [("fp32", 1, 1e-4), ("fp32", 3, 1e-4), ("int8", 1, 0.03),
                                                           ("int8", 2, 0.03)])
def test_contract(files: dict[str, Path], precision: str, batch: int, error: float) -> None:
    path = files[precision]
    reference = run_once(path, contract_images(path, 9))
    check_runtime(RUNTIME, path, target(precision, batch=batch), reference=reference, relative_error=error)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_written_file_is_what_runs(files: dict[str, Path], precision: str) -> None:
    given = contract_images(files[precision], 5)
    told = [RUNTIME.compile(files[name], target(precision, batch=batch)).logits(given)
            for name, batch in ((precision, 1), (f"{precision}.tflite", 1), (f"{precision}.tflite", 4))]
    assert np.array_equal(told[0], told[1])
    assert np.allclose(told[0], told[2], atol=1e-5)


def test_precisions_are_read_back_and_nothing_leaves_the_delegate(files: dict[str, Path]) -> None:
    fp32, int8 = (RUNTIME.compile(files[f"{name}.tflite"], target(name)).execution for name in ("fp32", "int8"))
    convolutions = sum(len(block.convolutions()) for block in ARCHITECTURE.blocks())
    assert (fp32.precisions, fp32.int8_share) == ({"fp32": convolutions}, None)
    assert int8.precisions == {"int8": convolutions - 2, "fp32": 2}  # the gate's
    assert (int8.fallback_share, int8.outside, fp32.outside) == (0, {}, {})


def test_a_file_of_the_wrong_kind_is_refused(files: dict[str, Path]) -> None:
    for name in ("fp32", "fp32.tflite"):
        with pytest.raises(CandidateError, match="not quantised"):
            RUNTIME.compile(files[name], target("int8"))
    with pytest.raises(FileError, match="it is quantised; target edge runs fp32"):
        RUNTIME.compile(files["int8.tflite"], target("fp32"))
    with pytest.raises(TargetError, match=r"cannot run bf16 .* it can run fp32, int8"):
        RUNTIME.check(target("bf16"))


@pytest.mark.parametrize("damage", ["cut", "zeros", "lies"])
def test_a_torn_file_is_one_line_in_the_child(files: dict[str, Path], tmp_path: Path, damage: str) -> None:
    content = bytearray(files["int8.tflite"].read_bytes())
    if damage == "cut":
        del content[len(content) // 3:]
    elif damage == "zeros":
        content[8:] = bytes(len(content) - 8)
    else:
        content[:4] = (len(content) - 2).to_bytes(4, "little")
    path = tmp_path / "torn.tflite"
    path.write_bytes(content)
    with pytest.raises(CandidateError, match=r"torn\.tflite"):
        probe_model(path, target("int8"))
    with pytest.raises(ModelError, match=r"torn\.tflite is not a TFLite file, or is torn"):
        read_tflite(path)


def test_without_the_extra_one_line_names_the_command(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    monkeypatch.setattr(litert, "find_spec", lambda name: None)
    monkeypatch.setattr(tflite, "find_spec", lambda name: None)
    schema.cache_clear()
    for call in (lambda: RUNTIME.check(target("int8")), RUNTIME.version):
        with pytest.raises(TargetError, match=r"LiteRT is not installed\. Install it: pip install 'hwnas\[edge\]'$"):
            call()
    with pytest.raises(ConfigError, match=r"pip install 'hwnas\[edge\]'"):
        write_tflite(files["fp32"])


def test_a_profile_names_blocks_and_every_operator(files: dict[str, Path]) -> None:
    compiled = RUNTIME.compile(files["int8"], target("int8"))
    nodes = compiled.profile(contract_images(files["int8"], 1), 3)
    names = " ".join(node.name for node in nodes)
    assert {node.precision for node in nodes if node.kind == "HARD_SWISH"} == {"fp32"}
    assert {node.precision for node in nodes if node.kind == "DEPTHWISE_CONV_2D"} == {"int8"}
    assert sum(node.precision == "fp32" for node in nodes if node.kind == "CONV_2D") == 2  # the gate's
    assert all(module in names for module in ("/conv_stem/", "/blocks.0.0/", "/blocks.1.0/", "/classifier/"))
    operators = [node["op_name"] for node in compiled.interpreter.nodes if node["op_name"] != "DELEGATE"]
    paddings = operators.count("PAD")
    assert paddings
    assert len(nodes) == len(operators) - paddings
    parts = list(single_operators(files["int8.tflite"].read_bytes()))
    assert [operators[part.place] for part in parts] == [part.kind for part in parts]
    assert sum(len(part.content) for part in parts) < 6 * files["int8.tflite"].stat().st_size


def test_nothing_is_printed(files: dict[str, Path]) -> None:
    script = ("import sys\nfrom hwnas.runtimes.runtime import load_runtime\nfrom hwnas.target import Target\n"
              "load_runtime('litert').compile(sys.argv[1], Target('t', 'litert', 'int8', threads=2))\n")
    done = subprocess.run([sys.executable, "-c", script, str(files["int8"])], capture_output=True, text=True,
                          timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("", "")
