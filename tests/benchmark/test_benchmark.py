"""The benchmark command: what it prints, stores and draws, and what it refuses."""

from __future__ import annotations

import json
import os
import pickle
import queue
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from hwnas.benchmark import __main__ as command
from hwnas.benchmark import task as benchmarking
from hwnas.benchmark.report import Benchmark, lines
from hwnas.cli.command import as_typed, run_command
from hwnas.errors import CandidateError, FileError, ModelError
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.probes import QuietRuns, identify_reference
from hwnas.latency.quiet import QuietRun
from hwnas.latency.turn import Turn
from hwnas.runtimes import child
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Host, Target

ORT = Target("ort_fp32", "onnxruntime", "fp32")
OPENVINO = Target("xeon_int8", "openvino", "int8")
NULL = Target("null_fp32", "null", "fp32")


def network(folder: Path, shape: tuple[Any, ...] = ("N", 3, "h", "w"), null_ms: float = 0.05, operator: str = "Relu"
            ) -> Path:
    """Convolution, activation, mean: a tiny classifier of 4 classes, without names."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal(size, np.float32), name)
               for name, size in (("w", (4, 3, 3, 3)), ("b", (4,)))]
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["a"], pads=[1, 1, 1, 1]),
             helper.make_node(operator, ["a"], ["r"]), helper.make_node("GlobalAveragePool", ["r"], ["p"]),
             helper.make_node("Flatten", ["p"], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", T.FLOAT, shape)],
                              [helper.make_tensor_value_info("y", T.FLOAT, [shape[0], 4])], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(proto, {"null_ms": str(null_ms)})
    path = folder / "tiny.onnx"
    onnx.save(proto, str(path))
    return path


@pytest.fixture
def tiny_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reference that needs no export."""
    folder = tmp_path / "reference"
    folder.mkdir()
    path = network(folder, ("batch", 3, 16, 16), null_ms=0.1)
    monkeypatch.setattr(command, "prepare_network", lambda network, target, folder: path)
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    return path


def job(path: Path, reference: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(path), "label": "tiny.onnx", "batches": [1], "threads": [1], "seconds": 1.0,
            "seed": 0, "channels": None, "image_size": 16, "explain": False,
            "reference": str(reference), "memory_mb": 1024, **changes}


def run(target: Target, todo: Mapping[str, Any]) -> dict[str, Any]:
    return benchmarking.run(todo, target, load_runtime(target.runtime), lambda share, note: None)


def command_line(*overrides: str) -> int:
    return run_command(command.main, "benchmark", command.USAGE, ["-q", *overrides], lists=command.LISTS)


# What is printed and stored: from programmed samples


def measured(ms: float, turns: int, calls: int, reference_ms: float = 0.1, quiet_ms: float = 0.1) -> dict[str, Any]:
    made = [Turn((ms * (1 + i / 1000),) * calls, (1e3 * reference_ms,)) for i in range(turns)]
    return Measurement(tuple(made), quiet_ms, Protocol()).to_dict()


def found(*latency: tuple[int, dict[str, Any]], threads: tuple[int, ...] = ()) -> Benchmark:
    """With the first network on the first number of threads and so on; on one where none are given."""
    execution = {"precision": "int8", "precisions": {"int8": 9, "fp32": 1}, "int8_share": 0.9, "fallback_share": 0.05}
    raw = {"input": {"name": "x", "image": [3, 16, 16]}, "protocol": Protocol().to_dict(),
           "latency": [{"batch": batch, "threads": of, "execution": execution, "measurement": one}
                       for (batch, one), of in zip(latency, threads or [1] * len(latency), strict=True)]}
    return Benchmark.of(raw, model="m.onnx", target=OPENVINO, host=Host.detect(), runtime="openvino 1", seed=3,
                        made_up=False)


def test_one_batch_prints_everything_beside_its_number() -> None:
    text = "\n".join(lines(found((2, measured(0.5, 8, 10)))))
    for part in ("int8 share 90.0%", "fallback 5.0%", "9 int8", "openvino 1", "1 thread\n",
                 Host.detect().name, "The machine was quiet"):
        assert part in text
    row = next(line.split() for line in lines(found((2, measured(0.5, 8, 10)))) if line.split()[:1] == ["2"])
    assert row[1].startswith("0.501")
    assert row[2].startswith("0.49")
    assert row[5:8:2] == ["0.5017", "–"]  # p50, p99
    assert row[-2] == "valid,"


def test_the_curve_is_a_table_with_a_row_a_batch() -> None:
    one = found((1, measured(0.5, 8, 90)), (4, measured(1.0, 8, 10)), (8, measured(2.0, 8, 10, reference_ms=0.2)))
    rows = [line.split() for line in lines(one)]
    assert next(row for row in rows if row[:1] == ["1"])[-2] == "valid,"
    assert next(row for row in rows if row[:1] == ["4"])[1].startswith("1.00")
    assert "INVALID:" in next(row for row in rows if row[:1] == ["8"])
    assert "–: p99 needs 662 samples" in "\n".join(lines(one))


def test_an_invalid_run_gives_no_number(tmp_path: Path) -> None:
    one = found((1, measured(0.5, 8, 10, reference_ms=0.2)))
    text = "\n".join(lines(one))
    assert "INVALID: its latency is known to ± " in text
    assert next(line.split()[1:3] for line in lines(one) if "INVALID" in line) == ["–", "–"]
    one.save(tmp_path / "b.json")
    stored = json.loads((tmp_path / "b.json").read_text())["latency"][0]
    assert (stored["valid"], stored["latency_ms"], stored["images_per_s"]) == (False, None, None)
    assert stored["p50_ms"] == pytest.approx(0.501, abs=0.002)  # what was seen
    assert len(stored["measurement"]["samples_us"]) == 8


def test_several_threads_have_a_row_each() -> None:
    one = found((1, measured(0.5, 8, 90)), (1, measured(0.3, 8, 90)), threads=(1, 2))
    printed = [line.split() for line in lines(one)]
    assert [(row[1], row[2][:4]) for row in printed if row[:1] == ["1"]] == [("1", "0.50"), ("2", "0.30")]
    assert found((1, measured(0.5, 8, 10, reference_ms=0.2)), (2, measured(1.0, 8, 10)),
                 threads=(2, 4)).invalid == ["batch 1 on 2 threads"]


# The command as a user types it


@pytest.mark.usefixtures("tiny_reference")
def test_a_file_is_timed_in_a_child(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = network(tmp_path), tmp_path / "b.json"
    code = command_line("+target=ort_fp32", f"model={path}", "image_size=16", "batch=1,2",
                        "threads=1,2", "seconds=1", f"out={out}")
    printed = capsys.readouterr()
    assert code in (0, 1), printed.err  # 1: the machine was restless
    data = json.loads(out.read_text())
    assert (data["format"], data["version"], data["model"], data["runtime"].split()[0]) == (
        "hwnas-benchmark", 2, str(path), "onnxruntime")
    assert [(one["batch"], one["threads"]) for one in data["latency"]] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert all(one["execution"]["precisions"] == {"fp32": 1} for one in data["latency"])
    assert data["input"]["image"] == [3, 16, 16]
    protocol = Protocol(**data["protocol"])
    again = Measurement.from_dict(data["latency"][0]["measurement"], protocol, "b.json")
    assert again.valid == data["latency"][0]["valid"]
    assert protocol.copies == 1  # so the interval has what compilations differ by
    assert str(path) in printed.out


UNREAD = """
import pickle, sys
from pathlib import Path
from hwnas.benchmark import __main__ as benchmark
results = iter(pickle.loads(Path(sys.argv[1]).read_bytes()))
benchmark.measured = lambda options, console: next(results)
codes = [benchmark.command(["+target=xeon_int8", "model=m.onnx", f"out={out}"]) for out in sys.argv[2:]]
sys.exit(10 * codes[0] + codes[1])
"""


def test_a_measurement_outlives_its_reader(tmp_path: Path) -> None:
    """As with `| head -1`: neither output has a reader. What is INVALID does not pass for valid by that."""
    valid, invalid = (found((1, measured(0.5, 8, 10, reference_ms))) for reference_ms in (0.1, 0.5))
    (tmp_path / "measured").write_bytes(pickle.dumps([valid, invalid]))
    reader, writer = os.pipe()
    os.close(reader)
    outs = [tmp_path / "valid.json", tmp_path / "invalid.json"]
    done = subprocess.run([sys.executable, "-c", UNREAD, tmp_path / "measured", *outs], stdout=writer, stderr=writer,
                          timeout=300, check=False)
    os.close(writer)
    assert done.returncode == 1  # 0 for the valid one
    assert all(json.loads(out.read_text())["latency"][0]["batch"] == 1 for out in outs)


def test_a_measurement_is_kept_before_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measured", lambda *given: found((1, measured(0.5, 8, 10))))
    monkeypatch.setattr(command, "show", ended)
    assert command.command(["-q", "+target=xeon_int8", "model=m.onnx", f"out={tmp_path / 'b.json'}"]) == 130
    assert (tmp_path / "b.json").is_file()


def test_a_run_far_slower_than_earlier_ones_says_so(tmp_path: Path, tiny_reference: Path, monkeypatch) -> None:
    runs = QuietRuns(Host.detect().name, identify_reference(NULL, load_runtime("null").version(), "3x16x16"))
    runs.add(QuietRun(0.01, 0.1))  # no core is so fast
    raw = run(NULL, job(network(tmp_path), tiny_reference))
    one = Benchmark.of(raw, model="m.onnx", target=NULL, host=Host.detect(), runtime="null 1", seed=3, made_up=False)
    assert one.latency[0].measurement.half_width > 0.1
    assert len(runs.load()) == 1


@pytest.mark.usefixtures("tiny_reference")
@pytest.mark.parametrize(("overrides", "why"), [
    (["+target=ort_fp32", "model=absent.onnx"], "no such file"),
    (["+target=ort_fp32", "model=."], "is a directory"),
    (["+target=ort_fp32", "model=timm:mobilenetv3_smal_050"], "Did you mean mobilenetv3_small_050"),
    (["+target=ort_fp32", "model=PATH", "classes=10"], "timm: networks only"),
    (["+target=ort_fp32", "model=PATH", "batch=0,1"], "batch must be"),
    (["+target=ort_fp32", "model=PATH", "batch=2,2"], "batch must be"),
    (["+target=ort_fp32"], "which network"),
    (["+target=ort_fp32", "model=PATH"], "Add image_size=N"),
    (["+target=xeon_int8", "model=PATH", "image_size=16"], "not quantised.*Quantise it first: hwnas quantize model="),
])
def test_what_the_user_can_mend_is_one_line(overrides: list[str], why: str, tmp_path: Path, capsys) -> None:
    path = str(network(tmp_path))
    assert command_line(*(text.replace("PATH", path) for text in overrides)) == 2
    said = capsys.readouterr().err.strip()
    assert sum(not line.startswith("note: ") for line in said.splitlines()) == 1  # a note tells of another make's host
    assert re.search(why, said), said


def test_lists_are_taken_as_typed() -> None:
    overrides = ["batch=1,2,4", "model=a (1),b.onnx", "batch=[1]", "seed=3", "out=null"]
    assert as_typed(overrides, ("batch",)) == [
        "batch=[1,2,4]", "model=a (1),b.onnx", "batch=[1]", "seed=3", "out=null"]


# The task in the child


def test_unsupported_operators_are_named_with_the_runtime(tmp_path: Path) -> None:
    path = network(tmp_path, operator="Frobnicate")
    for target in (ORT, Target("xeon_fp32", "openvino", "fp32")):
        with pytest.raises(ModelError, match=rf"tiny\.onnx: {target.runtime} has no operator Frobnicate"):
            run(target, job(path, path))


def test_an_error_of_a_runtime_names_the_file_as_it_was_given(tmp_path: Path) -> None:
    path = network(tmp_path)
    with pytest.raises(ModelError) as caught:
        run(OPENVINO, {**job(path, path), "label": "mine.onnx"})
    assert re.fullmatch(r"mine\.onnx: it is not quantised, .* in int8\. Quantise it first: .*", str(caught.value))
    error = FileError("a.onnx", "it is torn.", "Export it again.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a.onnx: it is torn. Export it again."


def test_a_network_that_holds_one_image_only(tmp_path: Path) -> None:
    path = network(tmp_path, (1, 3, 16, 16))
    with pytest.raises(ModelError, match=r"fixed to 1; batch=2 cannot be run"):
        run(ORT, job(path, path, batches=[1, 2]))


def test_the_null_runtime_gives_enough_samples_for_a_p99(tmp_path, tiny_reference, virtual_clock):
    virtual_clock.reading_ns = 1000
    raw = run(NULL, job(network(tmp_path), tiny_reference, seconds=4.0))
    samples = [ms for turn in raw["latency"][0]["measurement"]["samples_us"] for ms in turn]
    assert len(samples) >= 662
    assert samples == pytest.approx([51.0] * len(samples), abs=2)  # the programmed 50 µs and looks at the clock


# Messages of the child


def test_silence_is_a_time_out_but_waiting_is_not() -> None:
    lines_: queue.Queue[str] = queue.Queue()
    with pytest.raises(queue.Empty):
        child.listen(lines_, 0.01, None)
    lines_.put('{"share": 0.0, "note": "waiting for another measurement"}\n')
    heard: list[str] = []

    def later(share: float, note: str) -> None:
        heard.append(note)
        import threading

        threading.Timer(0.1, lines_.put, ['{"result": 3}\n']).start()

    assert child.listen(lines_, 0.01, later) == {"result": 3}
    assert heard == ["waiting for another measurement"]


def test_a_child_out_of_memory_says_so(tmp_path: Path, tiny_reference: Path) -> None:
    todo = job(network(tmp_path), tiny_reference)
    with pytest.raises((ModelError, CandidateError), match="memory"):
        child.run_child("hwnas.benchmark.task", {**todo, "memory_mb": None}, ORT, timeout_s=60, memory_mb=1)
