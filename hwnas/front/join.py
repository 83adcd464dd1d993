"""Networks that join a front after the search: those of `hwnas.train` and `hwnas.compress`, copied into `models/`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from hwnas.errors import DataError, StudyError
from hwnas.front.make import Making
from hwnas.front.rows import FrontRow
from hwnas.front.score import fp32_top1
from hwnas.networks.baselines import count_macs, count_params
from hwnas.networks.network import Network, Shape, read_network
from hwnas.networks.origin import ORIGIN, Origin
from hwnas.networks.quantize import calibration_images, quantize_static, tuning_of
from hwnas.runtimes.child import probe_model
from hwnas.runtimes.runtime import write_deployed
from hwnas.system.paths import sync_folder, unwritten, write_atomic
from hwnas.system.run_folder import Content, Manifest, ModelFolder, RunFolder

ORIGIN_FILE = "origin.json"
_STAGED = ".join-"  # begins the name of a folder that is being filled


@dataclass(frozen=True)
class Joining:
    """A folder whose network may join: its files are whole, and made for the run's images and target."""

    folder: ModelFolder
    network: Network
    origin: Origin
    manifest: Manifest

    def files(self, target_precision: str) -> list[Path]:
        """What is copied: description, weights, fp32 file, and the int8 file of a compression."""
        folder = self.folder
        int8 = [folder.int8] if target_precision == "int8" and self.origin.target is not None else []
        return [folder.path / self.network.file, folder.weights, folder.onnx, *int8]


def join(folders: Sequence[str], run: RunFolder, making: Making, memory_mb: int, say: Callable[[str], None]) -> None:
    """Copy the networks of `folders` into the run's `models/`; those that are there already stay as they are.

    All are checked before the first is copied; StudyError or DataError names what does not fit. Each appears whole, by
    one renaming: after a kill the same call goes on. The caller holds the run's lock for results.
    """
    models = run.path / "models"
    for left in models.glob(f"{_STAGED}*"):
        shutil.rmtree(left)
    for joining in [_checked(Path(os.path.expanduser(folder)), making) for folder in folders]:
        held = next((folder for folder, _ in read_origins(run) if _is_copy(folder, joining, making)), None)
        if held is not None:
            say(f"{joining.folder.path} has joined as {held.path.name} already.")
            continue
        name = f"{joining.network.id}-{joining.origin.by}"
        ids = (name if n == 1 else f"{name}-{n}" for n in count(1))
        id = next(each for each in ids if not (models / each).exists())
        staged = ModelFolder(models / f"{_STAGED}{id}")
        _fill(staged, joining, making, memory_mb)
        try:
            os.replace(staged.path, models / id)
            sync_folder(models)
        except OSError as error:
            raise unwritten(models / id, error) from None
        say(f"{id} joined: {joining.origin.told}.")


def joined_rows(run: RunFolder, making: Making, host: str = "") -> list[FrontRow]:
    """A row, without measurements, of each network that joined; StudyError for one whose files cannot be read."""
    rows = []
    for folder, facts in read_origins(run):
        network = read_network(folder, _shape(making))
        if network is None:
            raise StudyError(f"{folder.path} has neither architecture.yaml nor baseline.yaml. {ORIGIN.remedy}")
        row = FrontRow.of(network, origin=facts["origin"], top1_test_fp32=facts["top1_test_fp32"],
                          n_test=facts["n_test"], target=making.target.name, host=host)
        id = folder.path.name
        rows.append(replace(row, id=id, name=network.name if network.is_baseline else id, params=facts["params"],
                            macs=facts["macs"]))
    return rows


def read_origins(run: RunFolder) -> list[tuple[ModelFolder, dict[str, Any]]]:
    """The folders of networks that joined, each with its `origin.json`; StudyError for one that cannot be read."""
    paths = sorted((run.path / "models").glob(f"[!.]*/{ORIGIN_FILE}"))
    return [(run.model(path.parent.name), ORIGIN.read(path)) for path in paths]


def _shape(making: Making) -> Shape:
    data = making.dataset
    return Shape(data.channels, data.image_size, len(data.class_names))


def _checked(path: Path, making: Making) -> Joining:
    """The network in a folder that may join."""
    data, target = making.dataset, making.target
    origin = Origin.find(path) if path.is_dir() else None
    if origin is None:
        raise StudyError(f"add: {path} is not the folder of a python -m hwnas.train or hwnas.compress that has ended. "
                         "Give one, or give its command again.")
    folder = ModelFolder(path)
    network, manifest = read_network(folder, _shape(making)), Manifest.find(path)
    if network is None or manifest is None:
        raise StudyError(f"add: {path} does not say which network it holds (of a bare .onnx file, of an earlier "
                         "version, or without a file that keeps the limit). Where it has one, give its command again.")
    joining = Joining(folder, network, origin, manifest)
    if origin.target not in (None, target.name):
        again = f"Compress it with +target={target.name}, or add" if target.precision == "int8" else "Add"
        raise StudyError(f"add: {path} was compressed for {origin.target}, the front is of {target.name}. {again} the "
                         "training's own folder.")
    if faults := manifest.faults(*joining.files(target.precision)):
        raise StudyError(f"add: {path}: {'; '.join(faults)}. Give the command that made it again.")
    if others := [text for text in origin.fingerprints if text != data.fingerprint]:
        raise DataError(f"add: {path} knows the data set {others[0]}, the front is of {data.fingerprint} ({data.name} "
                        f"at {data.image_size} px, split_seed={making.seed}): other images, size or split, so that "
                        "its top-1 would not compare. Train it with the run's dataset options and that split_seed.")
    if network.shape != _shape(making):
        raise DataError(f"add: {path} is made for {network.shape}, the front for {_shape(making)}. Train one for the "
                        "run's images.")
    return joining


def _is_copy(folder: ModelFolder, joining: Joining, making: Making) -> bool:
    """Whether the files of a network that joined are those of `joining`."""
    held = Manifest.find(folder.path)
    wanted = {path.name: Content.of(path) for path in joining.files(making.target.precision)}
    return held is not None and all(held.files.get(name) == content for name, content in wanted.items())


def _fill(staged: ModelFolder, joining: Joining, making: Making, memory_mb: int) -> None:
    """Copy the files, quantise where that is not done, score the fp32 file, and write what was seen; manifest last."""
    data, target = joining.network.fed(making.dataset), making.target
    for path in joining.files(target.precision):
        write_atomic(staged.path / path.name, path.read_bytes())
    probe_model(staged.onnx, replace(target, precision="fp32"), memory_mb=memory_mb)
    quantised = None
    if target.precision == "int8" and not staged.int8.exists():
        quantised = quantize_static(staged.onnx, staged.int8,
                                    calibration_images(data, making.n_calibration, making.seed),
                                    tuned_for=tuning_of(target), narrow=making.narrow, threads=max(1, making.threads))
    deployed = write_deployed(staged.deployed(target.precision), target)
    model = joining.network.build()
    facts = {**ORIGIN.header, "origin": joining.origin.told, "from": str(joining.folder.path.absolute()),
             "top1_test_fp32": fp32_top1(staged.onnx, data), "n_test": len(data.test), "params": count_params(model),
             "macs": count_macs(model, joining.network.shape.image),
             "summary": json.loads((joining.folder.path / "summary.json").read_text(encoding="utf-8"))}
    write_atomic(staged.path / ORIGIN_FILE, json.dumps(facts, indent=1) + "\n")
    files = [staged.path / joining.network.file, staged.weights, staged.onnx, staged.int8, deployed,
             staged.path / ORIGIN_FILE]
    Manifest.write(staged.path, files, joining.manifest.recipe, joining.manifest.parity,
                   quantised.facts if quantised else None)
