"""Writes what is deployed of a network: hwnas export model=runs/x/models/ID format=uint8 out=FILE.onnx

format=uint8 is an ONNX file that takes pixels [n, height, width, channels] and prepares them itself; format=openvino is
the same for a model server, OUT/1/model.xml; format=timm a folder for timm.create_model("local-dir:OUT",
pretrained=True), without hwnas.

hwnas export run=DIR out=COPY copies a run, also while a search works on it, into a new folder, or with
out=COPY.tar a file. The copy holds every finished trial.

What is written is whole or not there.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.options import option, read_command
from hwnas.errors import CandidateError, ConfigError, ModelError, StudyError, UserError
from hwnas.front.card import hub_card
from hwnas.front.rows import deployment_of
from hwnas.networks.network import Shape, load_weights, read_network
from hwnas.networks.pixels import take_pixels
from hwnas.networks.timm_words import write_timm
from hwnas.runtimes.classifier import ModelFile, deployed_file, target_of
from hwnas.runtimes.foreign import load_checked
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.openvino import compile_options, save_ir
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import NAME, Manifest, ModelFolder, RunFolder, kind_of

if TYPE_CHECKING:
    from hwnas.cli.options import Config
    from hwnas.cli.progress import Console
    from hwnas.target import Target

FORMATS = ("uint8", "openvino", "timm")
_SERVED = Path("1", "model.xml")  # below a model's name: the first version


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of `conf/export.yaml`."""

    run: str | None
    out: str | None
    model: str | None
    format: str | None = option(choices=FORMATS)
    image_size: int | None = option(low=1, high=1 << 14)
    memory_mb: int = option(low=1)


def run(config: Config, console: Console) -> None:
    """The command: `run` names a run folder or `model` a network, `out` what is written."""
    options = read_command(ExportOptions, config)
    if bool(options.run) == bool(options.model) or not options.out:
        raise ConfigError("what, and where to? Add run=DIR and out=COPY (a new folder or COPY.tar), or "
                          f"model=DIR (models/ID of a run), format={'|'.join(FORMATS)} and out=NEW.")
    out = Path(options.out).absolute()
    if options.run:
        folder = RunFolder.open(options.run, write=False)
        said = _place(out, folder.path, lambda whole: _copy(folder, whole), packed=out.suffix == ".tar")
    else:
        said = _deploy(Path(str(options.model)), out, options)
    console.say(f"{said[0]}: {out}")
    for line in said[1:]:
        console.say(line)


def _place(out: Path, source: Path, make: Callable[[Path], list[str]], packed: bool = False) -> list[str]:
    """Let `make` write what goes to `out`, with `packed` into one file, so that it is whole or not there; what `make`
    says."""
    is_file = packed or out.suffix == ".onnx"
    if os.path.lexists(out) and not (not is_file and out.is_dir() and not any(out.iterdir())):
        raise StudyError(f"{out} is there already. Choose another out=COPY.")
    if out.resolve().is_relative_to(source.resolve()):
        raise StudyError(f"{out} lies in {source}. Choose another out=COPY.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name[:40]}.", dir=out.parent) as beside:
            whole = Path(beside) / (out.stem if packed else out.name)
            said = make(whole)
            if packed:
                with tarfile.open(pack := Path(beside) / "packed.tar", "w") as tar:
                    tar.add(whole, whole.name)
                whole = pack
            os.replace(whole, out)
    except OSError as error:
        raise UserError(f"cannot copy {source} to {out}: {error.strerror or error}. Give the same command again, "
                        "or another out=COPY.") from None
    return said


def _deploy(model: Path, out: Path, options: ExportOptions) -> list[str]:
    """Write `model` in the format that `options` ask for; what to say of it."""
    if options.format is None:
        raise ConfigError(f"which format of {model}? Add format={', or format='.join(FORMATS)}.")
    if options.format == "timm" and options.image_size is not None:
        raise ConfigError("image_size is of format=uint8 and format=openvino. Leave it out: timm takes images that its "
                          "caller prepares.")
    if (options.format == "uint8") != (out.suffix == ".onnx"):
        raise ConfigError(f"out={out.name} must end in .onnx for format=uint8, and name a new folder otherwise.")
    if (around := next((path for path in out.resolve().parents if kind_of(path)), None)) is not None:
        raise StudyError(f"{out} lies in {around}, the folder of other work. Choose another out=NEW.")
    path = deployed_file(model, "fp32" if options.format == "timm" else "int8")
    target, timed = target_of(path), deployment_of(model)
    if options.format == "openvino":  # what will read the file here tries it in the child
        target = replace(target, runtime="openvino", batch=1)
        if timed is not None and timed.runtime == "openvino":
            target = timed
    file = ModelFile.read(path, target, options.memory_mb)
    if options.format == "timm":
        return _place(out, model, lambda whole: _write_timm(model, file, whole))
    if options.image_size is not None and not file.preparation.pictures:
        raise ConfigError(f"image_size: the images of {model} are arrays of {file.preparation.sizes[0]} px. Leave "
                          "image_size out.")
    return _place(out, model, lambda whole: _write_pixels(file, options, target, whole))


def _write_pixels(file: ModelFile, options: ExportOptions, target: Target, whole: Path) -> list[str]:
    """The network that takes uint8 pixels, as an ONNX file or for a model server, once it has run."""
    import numpy as np

    proto, preparation = load_checked(file.path), file.preparation
    shape = take_pixels(proto, preparation, file.mean, file.std, options.image_size)
    onnx = whole if options.format == "uint8" else whole.with_suffix(".onnx")
    write_atomic(onnx, proto.SerializeToString())
    try:
        run_once(onnx, np.zeros([side if isinstance(side, int) else preparation.sizes[0] for side in [1, *shape[1:]]],
                                np.uint8))
        if options.format == "openvino":
            save_ir(onnx, whole / _SERVED, "NHWC", file.classes, compile_options(target))
    except CandidateError as error:
        raise ModelError(str(error)) from None
    said = [f"uint8 {json.dumps(shape)} ({'grey' if preparation.channels == 1 else 'RGB'}) to logits of "
            f"{len(file.classes)} classes"]
    if options.format == "openvino":
        said.append(f"compile it as it was measured: {_SERVED.parent}/compile_options.json says how")
    return said


def _write_timm(model: Path, file: ModelFile, whole: Path) -> list[str]:
    """A folder that timm loads, once it has loaded it."""
    preparation, classes, folder = file.preparation, len(file.classes), ModelFolder(model)
    shape = Shape(preparation.channels, preparation.sizes[-1], classes)
    network = read_network(folder, shape) if model.is_dir() else None
    if network is None or not folder.weights.is_file():
        raise ConfigError(f"model: {model} has no {folder.weights.name} with the description of its network. Give "
                          "models/ID of a run, or the folder of a hwnas.train.")
    manifest = Manifest.find(model)
    if manifest is not None and (faults := manifest.faults(folder.weights, model / network.file)):
        raise StudyError(f"model: {model}: {'; '.join(faults)}. Give the command that made it again.")
    built = network.build()
    load_weights(built, folder.weights, str(folder.weights), classes)
    facts: dict[str, Any] = {"input_size": list(shape.image), "mean": list(file.mean), "std": list(file.std),
                             "num_classes": classes, "label_names": list(file.classes)}
    if network.pretrained is not None:
        facts |= {"license": network.pretrained.licence, "origin_url": network.pretrained.origin}
    words = write_timm(whole, built.eval(), network, facts)
    card = folder.card.read_text(encoding="utf-8", errors="replace") if folder.card.is_file() else ""
    write_atomic(whole / "README.md", hub_card(network.id, file, card, facts.get("license", ""),
                                               facts.get("origin_url", "")))
    said = ["a folder that timm.create_model('local-dir:…', pretrained=True) loads"]
    if words.architecture != network.name:
        said.append(f"timm builds it as a {words.architecture} of these blocks"
                    f"{', its classifier as two layers' * words.split}: the same logits, tensors under other names")
    return said


def _copy(folder: RunFolder, to: Path) -> list[str]:
    """Copy what a run holds, without locks and files that are just being written; what to say of it."""
    from hwnas.study.storage import back_up
    from hwnas.study.study import database_path

    n = 0
    for path in sorted(folder.path.rglob("*")):
        beside_study = path.parent == folder.path and path.name.startswith(folder.study.name) and path != folder.study
        if path.is_symlink() or not path.is_file() or beside_study or (path.name[0] == "." and path.name != NAME):
            continue
        copy = to / path.relative_to(folder.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        back_up(database_path(folder.path), copy) if path == folder.study else shutil.copyfile(path, copy)
        n += 1
    elsewhere = [] if folder.study.is_file() else [
        "its study is not among them: it lies in the database that storage= named."]
    return [f"{n} files", *elsewhere]


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hwnas export`."""
    return run_command(run, "export", __doc__ or "", argv, target=False)


if __name__ == "__main__":
    raise SystemExit(command())
