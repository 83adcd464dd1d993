"""The commands that write, on inputs so small that they can be killed a thousand times: how each is given, what it has
acknowledged, and what it must have left at its end."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import sqlite3
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
ANY_MACHINE = TESTS / "any_machine"  # no measurement is INVALID: what is attacked here is what is kept
THIRD_PARTY = TESTS / "third_party"  # accuracy=tabular
sys.path[:0] = [str(ROOT), str(TESTS), str(THIRD_PARTY)]

from tiny_fixtures import write_space  # noqa: E402

from hwnas.space.architecture import Architecture  # noqa: E402

NETWORK = Architecture((("ds_r1_k3_s1_c8",), ("ir_r1_k3_s2_e3_c16_se0.25",), ("ir_r1_k3_s1_e3_c16",)), 8, 1, 32, "relu",
                       8, 1, 10)

TRIALS, EPOCHS, NETWORKS = 16, 12, 30
WORKERS = 4  # of search4; as many evaluations may be under way when the last one that was asked for ends
STAND_IN = "made-up.csv"  # accuracies of all networks, for accuracy=tabular
_SMALL = ["dataset=digits", "threads=1", "dataset.image_size=8"]
_SHORT = ["finalists.k=1", "finalists.recipe.epochs=2", "finalists.recipe.min_steps=4", "finalists.recipe.threads=1",
          "baselines=[]", "controls=0", "verification.seconds=30"]
Acknowledged = dict[str, str]  # what was acknowledged, and its content: neither may change


@dataclass(frozen=True)
class Attacked:
    """A command: its module and options (`{given}` is the folder of inputs, `{out}` that of results).

    `acknowledged` reads what is kept from outside, also while the command runs. `whole` says what is wrong with the
    results of a command that has ended ("": nothing), given those of one that nobody killed. `prepare` fills the folder
    of results before the first start.
    """

    module: str
    options: tuple[str, ...]
    acknowledged: Callable[[Path], Acknowledged]
    whole: Callable[[Path, Path], str]
    prepare: Callable[[Path, Path], None] = lambda given, out: None

    def arguments(self, given: Path, out: Path) -> list[str]:
        """As typed."""
        return ["-q", *(text.format(given=given, out=out) for text in self.options)]


def write_inputs(given: Path) -> None:
    """Write what the commands read: a space, a latency table, accuracies, an architecture."""
    from itertools import product

    import numpy as np
    from table_fixtures import write_table

    from hwnas.space.search_space import SearchSpace

    space_file = write_space(given)
    space = SearchSpace.load(space_file, channels=1, classes=10)
    codes = [np.array(row) for row in product(*(range(len(p.choices)) for p in space.parameters))]
    names = sorted({space.decode(space.to_params(row)).id for row in codes})
    lines = ["arch,top1", *(f"{name},{100 * int(name, 16) / 16**8:.4f}" for name in names)]
    (given / STAND_IN).write_text("\n".join(lines) + "\n")
    write_table(Path(os.environ["HWNAS_HOME"]), "ort_fp32", space_name=str(space_file))
    (given / "architecture.yaml").write_text(NETWORK.to_yaml())


def digest(path: Path) -> str:
    """What names the content of a file, `gone` where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return "gone"


def _files(folder: Path, *patterns: str) -> Acknowledged:
    return {str(path.relative_to(folder)): digest(path) for pattern in patterns for path in folder.rglob(pattern)}


def read_trials(out: Path) -> Acknowledged:
    """Complete trials with network and values, from the database itself; what is not committed is not acknowledged."""
    query = ("select number, group_concat(value), (select value_json from trial_user_attributes a where a.trial_id = "
             "t.trial_id and a.key = 'id') from trials t join trial_values v on v.trial_id = t.trial_id "
             "where t.state = 'COMPLETE' group by t.trial_id")
    if not (out / "study.db").is_file():
        return {}
    with suppress(sqlite3.OperationalError), closing(
            sqlite3.connect(f"file:{out / 'study.db'}?mode=ro", uri=True, timeout=10)) as database:
        return {f"trial {number}": f"{values} {name}" for number, values, name in database.execute(query)}
    return {}


def _search(out: Path) -> Acknowledged:
    return {**read_trials(out), **_files(out, "weights.safetensors")}


def _epochs(folder: Path) -> Acknowledged:
    """Whole epochs: rows of the checkpoint, or of the log once the training is done."""
    try:
        with open(folder / "checkpoint.safetensors", "rb") as file:
            length, = struct.unpack("<Q", file.read(8))
            rows = json.loads(json.loads(file.read(length))["__metadata__"]["hwnas_checkpoint"])["rows"]
    except FileNotFoundError:
        if not (folder / "summary.json").exists():
            return {}
        with (folder / "log.csv").open(newline="") as log:
            rows = list(csv.DictReader(log))
    return {f"{folder.name} epoch {number}": "" for number in range(1, len(rows) + 1)}


def _train(out: Path) -> Acknowledged:
    return {**_epochs(out), **_files(out, "summary.json")}


def _waves(out: Path) -> Acknowledged:
    """Networks in the table or in what is kept of an unfinished calibration."""
    held: Acknowledged = {}
    for path in out.rglob("onnxruntime-*.json"):
        with suppress(FileNotFoundError):
            for network in json.loads(path.read_text())["networks"]:
                held[json.dumps(network["architecture"])] = _short(network)
    return held


def _short(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def _verify(out: Path) -> Acknowledged:
    return {**read_trials(out), **_files(out, "models/*/*.safetensors", "models/*/*.onnx", "config.yaml", "trials.csv")}


def json_files(out: Path) -> str:
    """What is wrong with any JSON file below `out`."""
    for path in out.rglob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            return f"{path}: {error}"
    return ""


def _whole_search(out: Path, reference: Path) -> str:
    rows = read_rows(out / "trials.csv")
    done = [row["id"] for row in rows if row["outcome"] == "evaluated"]
    front = read_rows(out / "front.csv")
    if not TRIALS <= len(done) < TRIALS + WORKERS:
        return f"{len(done)} evaluated trials of {TRIALS}"
    if len(set(done)) != len(done):
        return "a network was evaluated twice"
    if any(row["state"] == "RUNNING" for row in rows):
        return "a trial is left running"
    if not front or any(row["verified"] != "true" for row in front):
        return f"not verified: {[row['reason'] for row in front]}"
    with closing(sqlite3.connect(out / "study.db")) as database:
        if database.execute("pragma integrity_check").fetchone() != ("ok",):
            return "study.db is torn"
    return json_files(out)


def _whole_train(out: Path, reference: Path) -> str:
    if _files(out, "weights.safetensors") != _files(reference, "weights.safetensors"):
        return "other weights than those of the training that nobody killed"
    return json_files(out)


def _whole_profile(out: Path, reference: Path) -> str:
    from hwnas.latency.table import LatencyTable

    tables = list((out / "latency_tables").rglob("onnxruntime-*.json"))
    if len(tables) != 1:
        return f"tables: {[path.name for path in tables]}"
    names = [network.architecture.id for network in LatencyTable.load(tables[0]).networks]
    return "" if len(names) == len(set(names)) == NETWORKS else f"{len(names)} networks, {len(set(names))} different"


def _quantized(out: Path) -> Acknowledged:
    return _files(out, "*.onnx")


def _whole_quantize(out: Path, reference: Path) -> str:
    wanted = _quantized(reference)
    same = bool(wanted) and _quantized(out) == wanted
    return "" if same else "another int8 file than that of the command that nobody killed"


def _whole_verify(out: Path, reference: Path) -> str:
    return _whole_search(out, reference)


def read_rows(path: Path) -> list[Mapping[str, str]]:
    """Rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _copy_run(given: Path, out: Path) -> None:
    """A run whose front is not yet measured, as one that was made elsewhere."""
    shutil.copytree(given / "run", out)
    for name in ("measurements.json", "predictions.npz", "comparisons.json", "report.html"):
        (out / name).unlink(missing_ok=True)


def _home_of(given: Path, out: Path) -> None:
    out.mkdir()


_SEARCH = ("+target=ort_fp32", "space={given}/tiny.yaml", "out={out}", "accuracy=tabular",
           f"tabular.path={{given}}/{STAND_IN}", "tabular.value_column=top1", "tabular.key=id", f"n_trials={TRIALS}",
           *_SMALL, *_SHORT)
_TRAINING = ("batch_size=64", "train_images=256", "validation_images=64", "device=cpu")
COMMANDS = {
    "search": Attacked("hwnas.search", (*_SEARCH, "workers=1"), _search, _whole_search),
    "search4": Attacked("hwnas.search", (*_SEARCH, f"workers={WORKERS}"), _search, _whole_search),
    "profile": Attacked("hwnas.profile", (
        "+target=ort_fp32", "space={given}/tiny.yaml", f"calibration.networks={NETWORKS}",
        "calibration.minutes=60", "dataset.image_size=8"), _waves, _whole_profile, _home_of),
    "quantize": Attacked("hwnas.quantize", (
        "+target=ort_int8", "dataset=digits", "model={given}/net/model.onnx", "out={out}/model_int8.onnx",
        "images=128", "max_drop=100", "seconds=5"), _quantized, _whole_quantize, _home_of),
    "train": Attacked("hwnas.train", (
        "dataset=digits", "architecture={given}/architecture.yaml", "out={out}", f"epochs={EPOCHS}", "threads=1",
        *_TRAINING), _train, _whole_train),
    "verify": Attacked("hwnas.verify", ("run={out}", "verification.seconds=30"), _verify, _whole_verify, _copy_run),
}
OWN_HOME = ("profile",)  # commands whose results lie in the user's folder
MADE = {"net": ("train", "quantize"), "run": ("search", "verify")}  # inputs: the command that makes it, and for which

if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))
