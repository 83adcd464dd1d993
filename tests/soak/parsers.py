"""What hwnas reads, as the fuzzer meets it: where a file lies, whole examples of it, how it is made wrong, and who
reads it."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.soak import mutations
from tests.soak.mutations import Mutate

ROOT = Path(__file__).resolve().parents[2]
NETWORK = {"format": "hwnas-architecture/1", "stem": {"width": 8, "stride": 1},
           "stages": [["ds_r1_k3_s1_c8"], ["ir_r1_k3_s2_e3_c16_se0.25", "ir_r1_k3_s1_e3_c16"]], "head": 32,
           "activation": "relu", "input": {"size": 8, "channels": 1}, "classes": 10}
SPACE = """image_size: [8, 16]
stem: {width: [8, 12], stride: 1}
head: 16
activation: [relu, hard_swish]
defaults: {op: [ds, ir_e2, ir_e3_k5], kernel: [3, 5], se: [0, 0.25], skip: true, multipliers: [0.5, 1], repeats: [1, 2]}
stages:
  - {channels: 8, stride: 1}
  - {channels: 16, stride: 2}
known:
  first: {stem.width: 8, activation: relu, op: ds, kernel: [3, 5], se: 0, channels: [8, 16], repeats: 1}
"""
TARGET = b"name: mine\nruntime: onnxruntime\nprecision: fp32\nthreads: 1\nbatch: 1\nprice_per_hour: 0.19\n"
OBJECTIVE = b"name: pareto\nreward: soft\ntarget_ms: 1.5\nknown: [size_mb, price]\nprice_per_hour: 0.5\n"
PAIRS = (b"id,fast,accurate,threshold,share,top1_test,top1_test_low,top1_test_high,difference,difference_low,"
         b"difference_high,n_test,n_validation,latency_ms_mean,latency_ms_mean_low,latency_ms_mean_high,"
         b"latency_ms_worst,latency_ms_worst_low,latency_ms_worst_high,times_as_fast\n"
         b"aaaaaaa0+aaaaaaa1,aaaaaaa0,aaaaaaa1,0.9,0.25,0.95,0.94,0.96,0,-0.01,0.01,360,200,0.08,0.07,0.09,0.15,0.14,"
         b"0.16,1.9\n")
_FACTS = {"runtime": "1.31.1", "created": "2026-11-22T01:31:12+00:00"}
ENVIRONMENT: dict[str, Any] = {
    "format": "hwnas-environment/1", **_FACTS, "searched_for": "this", "verified_here": True,
    "host": {"name": "this", "cores": 2, "memory_gb": 16.0},
    "target": {"name": "ort_fp32", "runtime": "onnxruntime", "precision": "fp32", "threads": 1, "batch": 1,
               "vendor": "", "device": "cpu", "price_per_hour": None},
    "versions": {"python": "3.11"}, "space": "tiny", "cap_ms": 1.5, "cap_p99_ms": None,
    "dataset": {"name": "arrays", "fingerprint": "0", "image_size": 8, "channels": 1, "mean": [0.5], "std": [0.2],
                "skipped": 0, "left_out": {"ending .txt": 2}, "images": {"train": 40, "validation": 10, "test": 10},
                "class_names": [str(number) for number in range(10)]},
    "latency_model": {"networks": 24, "error": 0.03}, "search": {"accuracy": "proxy", "sampler": "hwnas", "seed": 0},
    "remarks": ["no time for a, b."], "session": {"told": "slower"},
    "recipe": {"name": "full", "epochs": 5, "lr": 0.01}, "executed": {"fp32": {"convolutions": 1.0}},
    "measuring": {"seconds": 45, "seed": 0, "quiet_ms": 0.2, "reference": NETWORK}}
CONFIG = b"""target: {name: ort_fp32, runtime: onnxruntime, precision: fp32, threads: 1, batch: 1}
space: tiny
seed: 0
n_trials: 3
workers: 1
accuracy: proxy
sampler: random
sampler_options: {}
dataset: {name: arrays, root: images.npz, image_size: 8, flip: false}
objective: {name: pareto, reward: soft, target_ms: null, known: [latency_ms], price_per_hour: null}
budget: {latency_ms: null, quantile: 0.9}
finalists: {k: 1, recipe: {epochs: 5}}
baselines: []
storage: null
verification: {seconds: 45}
"""


_FACTS = {"file": "w.safetensors", "sha256": "00", "licence": "MIT", "origin": "here", "mean": [0.5], "std": [0.25]}
BEGUN = b"""format: hwnas-baseline/1
timm: test_efficientnet
stem_stride: 0
pad_type: same
image_size: 24
pretrained: {file: w.safetensors, sha256: "00", licence: MIT, origin: here, mean: [0.5, 0.4, 0.3], std: [0.2, 0.2, 0.2]}
"""
_IDENTITY = {"space": "0", "seed": 0}


@dataclass(frozen=True)
class Parser:
    """A kind of file: `place` in a folder, whole `examples` of it, and `read`, which is given the folder.

    `around` writes what else must lie there. `share` is its part of the inputs where those are counted, as reading some
    files takes long. `heavy`: it needs torch, matplotlib or a process each.
    """

    place: str
    examples: Callable[[], list[bytes]]
    mutate: Mutate
    read: Callable[[Path], object]
    around: Callable[[Path], None] = lambda folder: None
    share: float = 1.0
    heavy: bool = field(default=False, kw_only=True)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@cache
def _table() -> dict[str, Any]:
    path = min((ROOT / "latency_tables").rglob("*.json.gz"), key=lambda path: path.stat().st_size)
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    data["networks"] = data["networks"][:13]
    for network in data["networks"]:
        for key in ("reference_us", "steal", "samples_us"):
            network[key] = network[key][:4]
    return data


def _read_table(path: Path) -> None:
    from hwnas.latency.table import LatencyTable
    from hwnas.system.tables import finite

    table = LatencyTable.load(path)
    table.check(table.key, table.host_name, table.runtime_version)
    table.spaces()
    for network in table.networks:
        finite(network.measurement.latency_ms), network.measurement.reason, network.measurement.latency_ms_high


def _read_space(folder: Path) -> None:
    import numpy as np

    from hwnas.networks.around import load_space

    space = load_space(str(folder / "space.yaml"), 3, 10)
    str([space.size, space.reference.id, space.fingerprint])
    codes = space.sample(np.random.default_rng(0), 4)
    if not space.arounds:
        space.segments(codes)
    for row in codes:
        space.decode(space.to_params(row))


def _shape() -> Any:
    from hwnas.networks.network import Shape

    return Shape(1, 8, 10)


@cache
def _cuts() -> tuple[bytes, bytes]:
    """The space of a traced network's cuts, and the file of one of them."""
    import yaml

    from hwnas.networks.around import describe_cuts, space_of_cuts

    content = describe_cuts("test_efficientnet", 1, 10, 32)
    cut = space_of_cuts([content], 1, 10).known["cut_early"]
    return yaml.safe_dump(content).encode(), (cut.to_yaml() + yaml.safe_dump({"pretrained": _FACTS})).encode()


def _read_network(folder: Path) -> None:
    from hwnas.networks.network import read_network
    from hwnas.system.run_folder import ModelFolder

    network = read_network(ModelFolder(folder), _shape())
    if network is not None and network.blocks is not None:
        network.id, network.identity, str(network), network.describe(), sum(block.macs for block in network.blocks)


def _write_run(folder: Path) -> None:
    """A run folder with everything that its readers read."""
    from hwnas.front.rows import front_csv

    _write_images(folder)
    (folder / "models" / "aaaaaaa0").mkdir(parents=True)
    for name, content in (("config.yaml", CONFIG), ("environment.json", _json(ENVIRONMENT)),
                          ("front.csv", front_csv(_rows()).encode()), ("trials.csv", _trials()[0]),
                          ("comparisons.json", _comparisons()[0]), (".hwnas.json", _marker()[0]), ("study.db", b""),
                          ("models/aaaaaaa0/architecture.yaml", _json(NETWORK))):
        (folder / name).write_bytes(content)


def _write_images(folder: Path) -> None:
    (folder / "images.npz").write_bytes(_arrays()[0])


def _rows(**changes: Any) -> list[Any]:
    from hwnas.front.rows import Cost, FrontRow, mark_front

    rows = [FrontRow(
        id=f"aaaaaaa{number}", name=f"aaaaaaa{number}", architecture="stem8s1 ds_r1_k3_s1_c8 head0 relu@8",
        is_baseline=number == 2, verified=True, top1_proxy=0.9, top1_test_fp32=0.97, top1_test=0.9 + number / 50,
        top1_test_low=0.88, top1_test_high=0.99, n_test=360, latency_ms_predicted=0.1, latency_ms_predicted_low=0.09,
        latency_ms_predicted_high=0.115, latency_ms=0.05 * 2**number, latency_ms_low=0.04, latency_ms_high=0.9,
        params=12345, macs=678901, reward=0.93, target="ort_fp32", host="this", precision="fp32", int8_share=0.0,
        fallback_share=0.0, reason="", **changes) for number in range(3)]
    more = mark_front(rows)
    return more if changes else [*more, *mark_front(_rows(
        objectives=("latency_ms", "size_mb"), costs=(Cost("size_mb", 1.0, 1.1),)))][:3]


def _fronts() -> list[bytes]:
    from hwnas.front.rows import Cost, front_csv

    costs = _rows(objectives=("latency_ms", "size_mb"), costs=(Cost("size_mb", 1.0, 1.1),))
    return [front_csv(_rows()).encode(), front_csv(costs).encode()]


def _trials() -> list[bytes]:
    from hwnas.system.run_folder import OF_EVERY_TRIAL
    from hwnas.system.tables import table_csv

    row = {"number": 0, "state": "COMPLETE", "id": "aaaaaaa0", "architecture": "stem8s1",
           "top1_proxy": 0.9, "top1_std": 0.01, "latency_ms_predicted": 0.1, "seconds": 1.5,
           "feasible": True, "reason": None, "started": "2026-11-22T01:31:12",
           "size_mb_predicted": 1.1}
    rows = [{**row, "number": number, "reason": "loss, not finite" if number else None,
             "outcome": "failed" if number else "complete"} for number in range(4)]
    return [table_csv(rows, OF_EVERY_TRIAL).encode()]


def _comparisons() -> list[bytes]:
    return [_json([{"baseline": "resnet10t", "name": "resnet10t", "verdict": "beats", "sentence": "It does.",
                    "finalist": "aaaaaaa0", "difference": 0.01, "low": 0.001, "high": 0.02, "n_eligible": 2}])]


def _marker() -> list[bytes]:
    return [_json({"format": "hwnas-folder/1", "kind": "search", "hwnas": "0.1.0"})]


def _manifest() -> list[bytes]:
    file = {"size": 3, "sha256": "0" * 64}
    return [_json({"format": "hwnas-model/1", "recipe": "0" * 12, "parity": {"max_abs_error": 1e-6},
                   "files": {"model.onnx": file, "weights.safetensors": file}})]


def _report(folder: Path) -> Any:
    from hwnas.front.report import read_report, report_html
    from hwnas.system.run_folder import RunFolder

    data = read_report(RunFolder.open(folder, write=False))
    report_html(data)
    return data


def _drawn(folder: Path) -> None:
    from hwnas.front.report import write_report
    from hwnas.system.run_folder import RunFolder

    write_report(RunFolder(folder), _report(folder))


def _read_front(folder: Path) -> None:
    from hwnas.api import load
    from hwnas.front.rows import load_front, mark_front, with_networks
    from hwnas.system.run_folder import RunFolder

    run = RunFolder(folder)
    rows = load_front(run)
    mark_front(rows, 1.0, 2.0)
    load(folder).to_frame()
    _report(folder)
    load(folder).best()
    with_networks(rows, run, _shape())


def _read_pairs(folder: Path) -> None:
    from hwnas.api import load

    _report(folder)
    load(folder).best(mean_latency_ms=0.2)


def _read_trials(folder: Path) -> None:
    from hwnas.api import load

    load(folder).to_frame("trials")
    _report(folder)


def _read_marker(folder: Path) -> None:
    from hwnas.system.run_folder import RunFolder

    RunFolder.open(folder, write=False)


def _verified(folder: Path) -> None:
    """What `hwnas.verify` reads before it measures."""
    from hwnas.front.rows import load_front, with_networks
    from hwnas.latency.timing import HERE
    from hwnas.study.objective import read_objective
    from hwnas.system.run_folder import RunFolder
    from hwnas.target import Host
    from hwnas.verify import check_host, making_of, timing_of

    run = RunFolder.open(folder, write=False)
    rows, environment = load_front(run), run.read_environment()
    search = run.read_config()
    environment = {**environment, "dataset": {**environment["dataset"], "fingerprint": _fingerprint(folder)}}
    making = making_of(run, search, environment, {})
    timing_of(environment, None, HERE)
    read_objective(search["objective"], making.target)
    with_networks(rows[:1], run, _shape())
    check_host(environment, Host.detect().name, Host.detect().name)


@cache
def _fingerprint(folder: Path) -> str:
    from hwnas.data.loading import load_dataset

    return load_dataset({"name": "arrays", "root": str(folder / "images.npz"), "image_size": 8}, 8, 0).fingerprint


def _read_environment(folder: Path) -> None:
    from hwnas.errors import UserError
    from hwnas.system.run_folder import RunFolder

    run = RunFolder(folder)
    errors = []
    for read in (_report, _verified, lambda _: run.read_environment(), lambda _: run.find_environment()):
        try:
            read(folder)
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _read_config(folder: Path) -> None:
    from omegaconf import OmegaConf

    from hwnas.cli.command import as_data, refuse_code, unresolved
    from hwnas.study.study import study_url
    from hwnas.system.run_folder import RunFolder

    run = RunFolder.open(folder, write=False)
    values = run.read_config()
    run.config_text()
    study_url(folder, values.get("storage"))
    list(unresolved(values, ""))
    refuse_code(values, "")
    _verified(folder)
    OmegaConf.create(as_data(values))


def _read_manifest(folder: Path) -> None:
    from hwnas.system.run_folder import Manifest

    (folder / "model.onnx").write_bytes(b"abc")
    manifest = Manifest.find(folder)
    assert manifest is not None
    manifest.faults(folder / "model.onnx")


def _predictions() -> list[bytes]:
    import numpy as np

    out = io.BytesIO()
    labels = np.arange(20, dtype=np.int32) % 3
    np.savez_compressed(out, labels=labels, aaaaaaa0=(labels + 1) % 3)
    return [out.getvalue()]


def _read_answers(folder: Path) -> None:
    from hwnas.front.report import read_answers
    from hwnas.front.rows import FrontRow
    from hwnas.system.run_folder import RunFolder

    run = RunFolder(folder)
    if not run.predictions.exists():
        run.predictions.write_bytes(_predictions()[0])
    str(read_answers(run, FrontRow(id="aaaaaaa0", name="net", architecture="", is_baseline=False),
                     {"class_names": ["a", "b", "c"], "task": "classification"}, {}))


def _read_target(folder: Path) -> None:
    from hwnas.cli.command import compose
    from hwnas.target import Target

    os.environ["HWNAS_HOME"] = str(folder)
    Target.from_config(compose("search", ["+target=mine"])["target"])


def _read_objective(folder: Path) -> None:
    from hwnas.cli.command import compose
    from hwnas.study.objective import read_objective
    from hwnas.target import Target

    os.environ["HWNAS_HOME"] = str(folder)
    config = compose("search", ["+target=ort_fp32", "objective=mine"])
    str(read_objective(config["objective"], Target.from_config(config["target"])).at(1.5))


@cache
def _image(kind: str, mode: str, **options: Any) -> bytes:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, **options)
    return out.getvalue()


def _images() -> list[bytes]:
    return [_image("PNG", "RGB"), _image("PNG", "L"), _image("PNG", "P"), _image("JPEG", "RGB"), _image("JPEG", "L"),
            _image("JPEG", "RGB", progressive=True), _image("GIF", "P"), _image("BMP", "RGB"), _image("PPM", "RGB"),
            _image("TIFF", "RGB"), _image("TIFF", "L", compression="tiff_lzw"),
            _image("TIFF", "RGB", compression="tiff_adobe_deflate"), _image("WEBP", "RGB"),
            _image("WEBP", "RGB", lossless=True)]


def _read_image(folder: Path) -> None:
    """One image, by its header and decoded, as data sets do it."""
    import numpy as np

    from hwnas.data.dataset import DatasetOptions
    from hwnas.data.decoding import Decoder, look
    from hwnas.data.folder import Entry

    options = DatasetOptions.from_config({"name": "imagefolder"})
    entry = Entry(str(folder / "image.png"))
    channels, _ = look([entry], options, "here")
    Decoder({"train": [entry]}, channels, options, lambda: "")([("train", np.array([0]))], 8, None)


def _arrays() -> list[bytes]:
    import numpy as np

    rng, files = np.random.default_rng(0), []
    for channels, names in ((1, False), (3, True)):
        labels: Any = np.arange(60) % 10
        out = io.BytesIO()
        np.savez(out, images=rng.integers(0, 256, (60, 8, 8, channels)).astype(np.uint8),
                 labels=np.array(list("abcdefghij"))[labels] if names else labels)
        files.append(out.getvalue())
    return files


def _array() -> list[bytes]:
    import numpy as np

    out = io.BytesIO()
    np.save(out, np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1)).astype(np.uint8))
    return [out.getvalue()]


def _around_array(folder: Path) -> None:
    import numpy as np

    (folder / "arrays").mkdir(exist_ok=True)
    np.save(folder / "arrays" / "labels.npy", np.arange(60) % 10)


def _read_arrays(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from hwnas.data.loading import load_dataset

        load_dataset({"name": "arrays", "root": str(folder / name)}, 8, 0)
    return read


def _idx() -> list[bytes]:
    return [gzip.compress(bytes((0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0, 4)) + bytes(range(80)))]


def _read_idx(folder: Path) -> None:
    from hwnas.data.arrays import read_idx

    read_idx(folder / "images.gz", 3)


@cache
def _onnx() -> list[bytes]:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def model(dynamic: bool) -> Any:
        weights = numpy_helper.from_array(np.ones((4, 1, 3, 3), np.float32), "w")
        dense = numpy_helper.from_array(np.ones((4, 10), np.float32), "d")
        nodes = [helper.make_node("Conv", ["input", "w"], ["a"], name="conv", pads=[1, 1, 1, 1]),
                 helper.make_node("Relu", ["a"], ["b"]), helper.make_node("GlobalAveragePool", ["b"], ["c"]),
                 helper.make_node("Flatten", ["c"], ["e"]), helper.make_node("MatMul", ["e", "d"], ["logits"])]
        graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info(
            "input", TensorProto.FLOAT, ["n" if dynamic else 1, 1, 8, 8])], [helper.make_tensor_value_info(
                "logits", TensorProto.FLOAT, ["n" if dynamic else 1, 10])], [weights, dense])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    calls = model(True)
    calls.functions.append(helper.make_function(
        "own", "twice", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], [helper.make_opsetid("", 17)]))
    calls.opset_import.append(helper.make_opsetid("own", 1))
    calls.graph.node[1].op_type, calls.graph.node[1].domain = "twice", "own"
    apart = model(True)
    onnx.external_data_helper.set_external_data(apart.graph.initializer[0], "data.bin", 0, 144)
    apart.graph.initializer[0].ClearField("raw_data")
    apart.graph.initializer[0].data_location = TensorProto.EXTERNAL
    return [proto.SerializeToString() for proto in (model(True), model(False), calls, apart)]


def _around_onnx(folder: Path) -> None:
    import numpy as np

    (folder / "data.bin").write_bytes(np.ones((4, 1, 3, 3), np.float32).tobytes())


def _read_onnx(folder: Path) -> None:
    """All that is done before a runtime sees the file. In a child process, which has its own limit of memory."""
    from hwnas.runtimes.foreign import check_path, input_of, load_checked, sized

    path = str(folder / "model.onnx")
    check_path(path, 1024)
    given = input_of(load_checked(path), path)
    sized(given, path, None, None, [1])


def _run_onnx(folder: Path) -> None:
    from hwnas.runtimes.child import probe_model
    from hwnas.target import Target

    probe_model(folder / "model.onnx", Target("ort_fp32", "onnxruntime", "fp32"), memory_mb=512)


@cache
def _small_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))


@cache
def _weights() -> list[bytes]:
    from safetensors.torch import save

    return [save(dict(_small_model().state_dict()), {"hwnas_recipe": "0" * 16})]


@cache
def _checkpoints() -> list[bytes]:
    import tempfile

    import torch

    from hwnas.training.loop import Checkpoint

    model = _small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        Checkpoint(_IDENTITY, 1, [{"epoch": 1, "loss": 0.5}], model.state_dict(), model.state_dict(),
                   optimizer.state_dict()).save(path := Path(folder, "c"))
        return [path.read_bytes()]


@cache
def _begun() -> Any:
    import torch

    from hwnas.networks.baselines import Baseline

    torch.manual_seed(0)
    return Baseline("test_efficientnet").build(3, 4, 32)


@cache
def _pretrained() -> list[bytes]:
    from safetensors.torch import save

    return [save(dict(_begun().state_dict()), {"norm": "mean 0.5 std 0.25", "pad": "same", "licence": "MIT"})]


@cache
def _pickled() -> list[bytes]:
    import torch

    files = [io.BytesIO(), io.BytesIO()]
    for file, zipped in zip(files, (True, False), strict=True):
        torch.save(_begun().state_dict(), file, _use_new_zipfile_serialization=zipped)
    return [file.getvalue() for file in files]


def _around_facts(folder: Path) -> None:
    (folder / "test_efficientnet.safetensors").write_bytes(_pretrained()[0])


def _read_pretrained(folder: Path) -> None:
    from hwnas.networks.weights import PretrainedOptions, find_pretrained

    weights, _ = find_pretrained("test_efficientnet", PretrainedOptions(folder=folder), 3)
    weights.load(_begun(), 4)
    assert str(weights)


def _read_weights(folder: Path) -> None:
    from hwnas.networks.export import stored_fingerprint
    from hwnas.networks.network import load_weights

    path = folder / "weights.safetensors"
    stored_fingerprint(path)
    load_weights(_small_model(), path, str(path), 4)


def _read_checkpoint(folder: Path) -> None:
    import torch

    from hwnas.training.loop import Training

    model = _small_model()
    training: Any = SimpleNamespace(model=model, average=SimpleNamespace(module=model),
                                    optimizer=torch.optim.AdamW(model.parameters()))
    training.restore = lambda state: Training.restore(training, state)
    Training.resume(training, folder / "checkpoint.safetensors", _IDENTITY)


def _validation() -> list[bytes]:
    table = _table()
    networks = [{**entry, "group": "random"} for entry in table["networks"][:3]]
    return [_json({"format": "hwnas-validation", "version": 1, "protocol": table["protocol"], "networks": networks,
                   "host": {"name": "this"}, "table": {"key": "k"}, "runtime": "1",
                   "space": {"name": "tiny"}, "seed": 0, "measured_at": "2026"})]


def _read_validation(folder: Path) -> None:
    from experiments.common import load_validation

    for network in load_validation(folder / "measured.json").networks:
        str([network.measurement.latency_ms, network.measurement.reason])


def _run_part(place: str, examples: Callable[[], list[bytes]], mutate: Mutate, read: Callable[[Path], object],
              share: float = 0.5, heavy: bool = False) -> Parser:
    return Parser(place, examples, mutate, read, _write_run, share, heavy=heavy)


PARSERS: Mapping[str, Parser] = {
    "table": Parser("table.json", lambda: [_json(_table())], mutations.of_json,
                    lambda folder: _read_table(folder / "table.json")),
    "packed_table": Parser("table.json.gz", lambda: [gzip.compress(_json(_table()))],
                           mutations.of_gzip(mutations.of_json), lambda folder: _read_table(folder / "table.json.gz")),
    "space": Parser("space.yaml", lambda: [SPACE.encode()] * 12 + [_cuts()[0]] * 12 + [
        path.read_bytes() for path in sorted((ROOT / "search_spaces").glob("*small.yaml"))], mutations.of_yaml,
        _read_space, share=0.2),
    "architecture": Parser("architecture.yaml", lambda: [_json(NETWORK), _cuts()[1]], mutations.of_yaml,
                           _read_network),
    "baseline": Parser("baseline.yaml", lambda: [b"format: hwnas-baseline/1\ntimm: resnet18\nstem_stride: 1\n", BEGUN],
                       mutations.of_yaml, _read_network),
    "config": _run_part("config.yaml", lambda: [CONFIG], mutations.of_yaml, _read_config, 0.15),
    "environment": _run_part("environment.json", lambda: [_json(ENVIRONMENT)], mutations.of_json, _read_environment,
                              0.2),
    "front": _run_part("front.csv", _fronts, mutations.of_csv, _read_front),
    "trials": _run_part("trials.csv", _trials, mutations.of_csv, _read_trials),
    "comparisons": _run_part("comparisons.json", _comparisons, mutations.of_json, _report),
    "pairs": _run_part("pairs.csv", lambda: [PAIRS], mutations.of_csv, _read_pairs),
    "marker": _run_part(".hwnas.json", _marker, mutations.of_json, _read_marker),
    "manifest": Parser("manifest.json", _manifest, mutations.of_json, _read_manifest),
    "predictions": Parser("predictions.npz", _predictions, mutations.of_zip(mutations.of_npy), _read_answers),
    "target": Parser("conf/target/mine.yaml", lambda: [b"# @package target\n" + TARGET], mutations.of_yaml,
                     _read_target, share=0.05),
    "prices": Parser("conf/objective/mine.yaml", lambda: [OBJECTIVE], mutations.of_yaml, _read_objective,
                     share=0.05),
    "image": Parser("image.png", _images, mutations.of_png, _read_image),
    "arrays": Parser("images.npz", _arrays, mutations.of_zip(mutations.of_npy), _read_arrays("images.npz")),
    "array": Parser("arrays/images.npy", _array, mutations.of_npy, _read_arrays("arrays"), _around_array),
    "idx": Parser("images.gz", _idx, mutations.of_gzip(mutations.of_bytes), _read_idx),
    "onnx": Parser("model.onnx", _onnx, mutations.of_onnx, _read_onnx, _around_onnx),
    "onnx_run": Parser("model.onnx", _onnx, mutations.of_onnx, _run_onnx, _around_onnx, heavy=True),
    "safetensors": Parser("weights.safetensors", _weights, mutations.of_safetensors, _read_weights, heavy=True),
    "pretrained": Parser("test_efficientnet.safetensors", _pretrained, mutations.of_safetensors, _read_pretrained,
                         share=0.2, heavy=True),
    "pickled": Parser("test_efficientnet.pth", _pickled, mutations.of_bytes, _read_pretrained, share=0.2, heavy=True),
    "pretrained_facts": Parser("test_efficientnet.json",
                               lambda: [_json({"norm": "mean 0.5 std 0.25", "pad": "same", "licence": "MIT",
                                               "origin": "here"})],
                               mutations.of_json, _read_pretrained, _around_facts, share=0.2, heavy=True),
    "checkpoint": Parser("checkpoint.safetensors", _checkpoints, mutations.of_safetensors, _read_checkpoint,
                         heavy=True),
    "validation": Parser("measured.json", _validation, mutations.of_json, _read_validation),
    "drawn_front": _run_part("front.csv", _fronts, mutations.of_csv, _drawn, heavy=True),
    "drawn_environment": _run_part("environment.json", lambda: [_json(ENVIRONMENT)], mutations.of_json, _drawn,
                                   heavy=True),
}
