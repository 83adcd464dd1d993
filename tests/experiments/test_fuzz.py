"""Wrong files for every parser: the attack of tests/soak/fuzz.py in short, and what it has found."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hwnas.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tests.soak.parsers import PARSERS  # noqa: E402

LONG = "9" * 5000
HUGE = 10**7


def fuzz(tmp_path: Path, *options: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.soak.fuzz", "--seed", "0", "--out",
                           str(tmp_path / "out"), *options], capture_output=True, text=True, timeout=1500, check=False,
                          cwd=ROOT)
    told = tmp_path / "out" / "findings" / "findings.jsonl"
    assert done.returncode == 0, done.stdout + done.stderr + (told.read_text() if told.exists() else "")


def test_no_parser_ends_in_a_traceback(tmp_path: Path) -> None:
    light = [name for name, parser in PARSERS.items() if not parser.heavy]
    fuzz(tmp_path, "--inputs", "10", "--parsers", ",".join(light))


@pytest.mark.soak
def test_no_parser_ends_in_a_traceback_for_minutes(tmp_path: Path) -> None:
    fuzz(tmp_path, "--minutes", "4")


def edited(**changes: Any) -> Callable[[bytes], bytes]:
    """JSON with other values at these places (`a__0__b`); `...` removes a key."""
    def edit(example: bytes) -> bytes:
        data = json.loads(example)
        for place, value in changes.items():
            *way, last = place.split("__")
            holder = data
            for key in way:
                holder = holder[int(key) if isinstance(holder, list) else key]
            if value is ...:
                del holder[last]
            else:
                holder[int(last) if isinstance(holder, list) else last] = value
        return json.dumps(data).encode()
    return edit


def replaced(old: str, new: str) -> Callable[[bytes], bytes]:
    """The example with a text replaced."""
    def replace(example: bytes) -> bytes:
        assert old.encode() in example
        return example.replace(old.encode(), new.encode())
    return replace


def columned(example: bytes, cells: list[str]) -> bytes:
    """A table with one more column, of which the last rows have no cells."""
    lines = example.decode().splitlines()
    more = [*cells, *[""] * (len(lines) - len(cells))]
    return "".join(f"{line},{cell}\n" for line, cell in zip(lines, more, strict=True)).encode()


def archive(**changes: Any) -> Callable[[bytes], bytes]:
    """An .npz file with other arrays."""
    def change(example: bytes) -> bytes:
        with np.load(io.BytesIO(example)) as file:
            arrays: dict[str, Any] = {**file, **changes}
        out = io.BytesIO()
        np.savez(out, **arrays)
        return out.getvalue()
    return change


def lying(old: str, new: str) -> Callable[[bytes], bytes]:
    """An .npz file in which the header of each array has another text."""
    def change(example: bytes) -> bytes:
        import zipfile

        out = io.BytesIO()
        spare = b" " * (len(new) - len(old))  # the header ends in spaces
        with zipfile.ZipFile(io.BytesIO(example)) as before, zipfile.ZipFile(out, "w") as after:
            for name in before.namelist():
                content = before.read(name)
                if old.encode() in content:
                    content = content.replace(old.encode(), new.encode()).replace(spare + b"\n", b"\n", 1)
                after.writestr(name, content)
        return out.getvalue()
    return change


def network(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    """An ONNX file after a change."""
    def edit(example: bytes) -> bytes:
        proto = onnx.load_model_from_string(example)
        change(proto)
        content: bytes = proto.SerializeToString()
        return content
    return edit


def letters(codes: list[int]) -> np.ndarray:
    """Texts of one letter each."""
    return np.array(codes, np.uint32).view("<U1")


def _apart(proto: Any) -> None:
    weight = proto.graph.initializer[0]
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="y" * 5000)


FOUND: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("table", lambda example: b"[" * 5000, "nested too deep"),
    ("table", lambda example: b"[" * 100 + b"]" * 100, "nested too deep"),
    ("table", edited(protocol__copies="4"), "protocol.copies must be a whole number"),
    ("table", edited(protocol__copies=0), "protocol.copies must be"),
    ("table", edited(host__name=...), "host lacks name"),
    ("table", edited(networks__0__architecture__stages__0=["ds_r1_k3_s1_c" + "9" * 400]), "c must be a whole number"),
    ("packed_table", lambda example: gzip.compress(b" " * (65 << 20), 1), "larger than 64 MiB"),
    ("packed_table", lambda example: gzip.compress(b"[" + b"[]," * 5_000_000 + b"0]", 1), "too many values"),
    ("space", replaced("head: 16", f"head: {LONG}"), "a number too long"),
    ("architecture", edited(stages__0=["ds_r1_k3_s1_c" + "9" * 400]), "c must be a whole number"),
    ("baseline", replaced("resnet18", "!!timestamp resnet18"), "not a baseline"),
    ("config", replaced("seed: 0", "seed: -1"), "lacks dataset, objective or seed"),
    ("environment", edited(dataset=5), "dataset must be a section"),
    ("environment", edited(measuring__seconds=...), "measuring lacks seconds"),
    ("front", replaced(",0.04,0.9,", ",0.04,1e999,"), "latency_ms_high cannot be '1e999'"),
    ("front", lambda example: columned(example, ["objectives", "latency_ms size_mb"]), "of different objectives"),
    ("trials", replaced("\n0,COMPLETE", f"\n{2**70},COMPLETE"), "number cannot be"),
    ("trials", lambda example: b"number\n" + b"1\n" * 500_000, "lines, or as much"),
    ("comparisons", lambda example: b"[1]", "must be a section"),
    ("comparisons", lambda example: b"5", "must be a list"),
    ("marker", replaced("hwnas-folder/1", f"hwnas-folder/{LONG}"), "format version"),
    ("marker", replaced("hwnas-folder/1", "hwnas-folder/²"), "format version"),
    ("manifest", replaced('"size": 3', '"size": 1e999'), "size must be a whole number"),
    ("manifest", replaced("model.onnx", "y" * 300), "no name of a file"),
    ("predictions", lying("'shape': (20,),", "'shape': (9999999999,),"), "not what the file holds"),
    ("predictions", lying("'shape': (20,)", "'shape': ((((20,)"), "cannot read"),
    ("target", lambda example: b"a: " + b"{a: " * 500 + b"}" * 500, "cannot be read"),
    ("target", lambda example: b"# @package a.b\nseed: 1\n", "gives no target"),
    ("prices", lambda example: b"a: " + b"[" * 5000 + b"]" * 5000, "cannot be read"),
    ("arrays", lying("'shape': (60,)", "'shape': (99999999999,)"), "not what the file holds"),
    ("arrays", archive(labels=np.arange(60) + HUGE), "a class needs at least"),
    ("arrays", archive(labels=letters([0x110000 + row % 3 for row in range(60)])), "letters that there are not"),
    ("arrays", archive(labels=letters([0xD800 + row % 3 for row in range(60)])), "is not UTF-8"),
    ("arrays", archive(class_names=np.array("a")), "must be a list of names"),
    ("onnx", network(lambda proto: setattr(proto.graph.input[0].type.tensor_type, "elem_type", 99)), "unknown type"),
    ("onnx", network(_apart), "outside its folder"),
    ("environment", edited(created="\ud800"), "half a character"),
]


@pytest.mark.parametrize(("name", "change", "message"), FOUND,
                         ids=[f"{parser}-{message[:30]}" for parser, _, message in FOUND])
def test_what_the_fuzzer_found_is_told_in_one_line(hwnas_home, tmp_path, monkeypatch, name, change, message):
    parser = PARSERS[name]
    parser.around(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / parser.place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(change(parser.examples()[0]))
    with pytest.raises(UserError, match=message) as told:
        parser.read(tmp_path)
    assert "\n" not in str(told.value)
