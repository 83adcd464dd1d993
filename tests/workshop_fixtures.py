"""A workshop: everything that the commands read, whole and tiny, made once by the commands themselves.

All paths in it are relative, so that it can be copied; who uses it goes there and sets HWNAS_HOME=home.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deployment_fixtures import measured
from PIL import Image
from table_fixtures import write_table
from tiny_fixtures import write_space

from hwnas.__main__ import main
from hwnas.latency.table import LatencyTable
from hwnas.space.search_space import SearchSpace
from hwnas.validate import network_to_dict, save

IMAGES = ["dataset=arrays", "dataset.root=images.npz", "dataset.image_size=8"]
SEARCH = ["search", "-q", "+target=ort_fp32", "space=tiny.yaml", "out=run", *IMAGES, "accuracy=tabular",
          "tabular.path=known.csv", "tabular.value_column=top1", "tabular.key=id", "n_trials=3", "workers=1",
          "sampler=random", "baselines=[]", "controls=0", "finalists.k=1", "finalists.recipe.epochs=1",
          "finalists.recipe.min_steps=1"]
TRAIN = ["train", "-q", "architecture=architecture.yaml", *IMAGES, "epochs=2", "batch_size=16", "threads=1",
         "device=cpu"]
QUANTIZE = ["quantize", "-q", "+target=ort_int8", "model=net/model.onnx", "out=int8.onnx", *IMAGES, "images=32",
            "max_drop=100"]

OWN = {"objective": "name: reward\nreward: hard\ntarget_ms: 5\n",
       "target": "name: ort_fp32\nruntime: onnxruntime\nprecision: fp32\n",
       "dataset": "name: arrays\nroot: images.npz\nimage_size: 8\n"}


class Work(BaseException):
    """A command has read what it reads, and would begin to work."""


def write_images(path: Path) -> None:
    """Sixty images of ten classes."""
    rng = np.random.default_rng(0)
    np.savez(path, images=rng.integers(0, 256, (60, 8, 8, 1)).astype(np.uint8), labels=np.arange(60) % 10)


def write_accuracies(path: Path, space: SearchSpace) -> None:
    """Made-up accuracies of every network of a space."""
    from itertools import product

    codes = (np.array(row) for row in product(*(range(len(p.choices)) for p in space.parameters)))
    names = {space.decode(space.to_params(row)).id for row in codes}
    path.write_text("\n".join(["arch,top1", *(f"{name},{100 * int(name, 16) / 16**8:.4f}" for name in sorted(names))]))


def make_workshop(folder: Path) -> None:
    """Fill a folder; nothing is measured."""
    from hwnas.latency import wave

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HWNAS_HOME", "home")
        patch.setattr(wave, "measure", lambda calls, *args, **options: dict.fromkeys(calls, measured(0.2)))
        space = SearchSpace.load(write_space(Path()), channels=1, classes=10)
        write_images(Path("images.npz"))
        Path("photos").mkdir()
        Image.new("L", (8, 8)).save("photos/one.png")
        write_accuracies(Path("known.csv"), space)
        Path("architecture.yaml").write_text(space.reference.to_yaml())
        for group, text in OWN.items():
            Path(f"home/conf/{group}").mkdir(parents=True)
            Path(f"home/conf/{group}/own.yaml").write_text(text)
        table = write_table(Path("home"), "ort_fp32", space_name="tiny.yaml")
        write_measured(Path("measured.json"), table)
        shutil.copy(table, table.with_suffix(".partial.json"))
        patch.setattr("hwnas.front.verification.probe_model", lambda *args, **options: None)
        for command in (SEARCH, [*TRAIN, "out=net"]):
            assert main(command) == 0
        patch.setattr("hwnas.train.write_results", _stop)
        with pytest.raises(Work):
            main([*TRAIN, "out=begun"])


def write_measured(path: Path, table_file: Path) -> None:
    """A validation of some networks of a table, as if they were others."""
    table = LatencyTable.load(table_file)
    entries = [network_to_dict(replace(one, origin="random"), (0.1, 0.09, 0.11))
               for one in table.networks[:6]]
    save(path, {"host": {"name": table.host_name}, "table": {"key": str(table.key)}, "runtime": table.runtime_version,
                "space": {"name": "tiny"}, "seed": 0, "measured_at": "2026-01-01", "networks": entries,
                "protocol": table.protocol.to_dict()})


def _stop(*values: object, **options: object) -> None:
    raise Work


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder with a hash of what it holds, links and kinds too; no locks and logs of SQLite."""
    kept = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if name.endswith((".lock", "-wal", "-shm")):
                continue
            kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file" if path.is_file() else "?"
            kept[str(path.relative_to(folder))] = (
                hashlib.sha256(path.read_bytes()).hexdigest() if kind == "file" else kind)
    return kept


_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root's right to read what nobody may
_VERSION = 0x20080522


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Inside, permissions count for this thread, also where it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    if os.geteuid() or libc.capget(header, held):
        yield
        return
    effective = held[0]
    held[0] = effective & ~_OVERRIDES
    assert libc.capset(header, held) == 0
    try:
        yield
    finally:
        held[0] = effective
        libc.capset(header, held)


