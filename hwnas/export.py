"""Writes what is deployed of a network: hwnas export model=runs/x/models/ID format=uint8 out=FILE.onnx

format=uint8 is an ONNX file that takes pixels [n, height, width, channels] of the network's size and normalises them
itself; format=openvino is the same for a model server, OUT/1/model.xml. With answers=true a detector's file gives
objects.

hwnas export run=DIR out=COPY copies a run, also while a search works on it, into a new folder. The copy holds every
finished trial.

The output is whole or not there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hwnas.cli.command import run_command
from hwnas.cli.options import option, read_command
from hwnas.errors import CandidateError, ConfigError, ModelError, StudyError, UserError
from hwnas.front.rows import deployment_of
from hwnas.networks.export import take_pixels
from hwnas.runtimes.classifier import ModelFile, deployed_file, target_of
from hwnas.runtimes.foreign import load_checked
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.openvino import compile_options, save_ir
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import NAME, RunFolder, kind_of
from hwnas.tasks.task import load_task

if TYPE_CHECKING:
    from hwnas.cli.options import Config
    from hwnas.cli.progress import Console
    from hwnas.target import Target

FORMATS = ("uint8", "openvino")
_SERVED = Path("1", "model.xml")  # below a model's name: the first version


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `conf/export.yaml`."""

    run: str | None
    out: str | None
    model: str | None
    format: str | None = option(choices=FORMATS)
    memory_mb: int = option(low=1)
    answers: bool = option(False)


def run(config: Config, console: Console) -> None:
    """Run the command: `run` names a run folder or `model` a network, `out` the file or folder that is written."""
    options = read_command(ExportOptions, config)
    if bool(options.run) == bool(options.model) or not options.out:
        raise ConfigError("what, and where to? Add run=DIR and out=COPY (a new folder), or "
                          f"model=DIR (models/ID of a run), format={'|'.join(FORMATS)} and out=NEW.")
    if options.run and (options.format or options.answers):
        raise ConfigError("format= and answers= are of one network, and run= copies a whole run. Give model=DIR "
                          "(models/ID of the run) in place of run=.")
    out = Path(options.out).absolute()
    if options.run:
        folder = RunFolder.open(options.run, write=False)
        remarks = _place(out, folder.path, lambda whole: _copy(folder, whole))
    else:
        remarks = _deploy(Path(str(options.model)), out, options)
    console.say(f"{remarks[0]}: {out}")
    for line in remarks[1:]:
        console.say(line)


def _place(out: Path, source: Path, make: Callable[[Path], list[str]]) -> list[str]:
    """Let `make` write the content of `out`, which is then whole or not there; return the lines of `make`."""
    is_file = out.suffix == ".onnx"
    if os.path.lexists(out) and not (not is_file and out.is_dir() and not any(out.iterdir())):
        raise StudyError(f"{out} is there already. Choose another out=COPY.")
    if out.resolve().is_relative_to(source.resolve()):
        raise StudyError(f"{out} is in {source}. Choose another out=COPY.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name[:40]}.", dir=out.parent) as temporary:  # on the same disk as `out`
            whole = Path(temporary) / out.name
            remarks = make(whole)
            os.replace(whole, out)
    except OSError as error:
        raise UserError(f"cannot copy {source} to {out}: {error.strerror or error}. Give the same command again, "
                        "or another out=COPY.") from None
    return remarks


def _deploy(model: Path, out: Path, options: ExportOptions) -> list[str]:
    """Write `model` in the format that `options` ask for; return lines about it for the user."""
    if options.format is None:
        raise ConfigError(f"which format of {model}? Add format={', or format='.join(FORMATS)}.")
    if (options.format == "uint8") != (out.suffix == ".onnx"):
        raise ConfigError(f"out={out.name} must end in .onnx for format=uint8, and name a new folder otherwise.")
    if (parent := next((path for path in out.resolve().parents if kind_of(path)), None)) is not None:
        raise StudyError(f"{out} is in {parent}, the folder of other work. Choose another out=NEW.")
    path = deployed_file(model, "int8")
    target, timed = target_of(path), deployment_of(model)
    if options.format == "openvino":  # so that a child process tries the file in OpenVINO
        # In OpenVINO as it was timed there, or else with the same number of threads.
        threads = target.threads if timed is None else timed.threads
        target = replace(target, runtime="openvino", batch=1, threads=threads)
        if timed is not None and timed.runtime == "openvino":
            target = timed
    file = ModelFile.read(path, target, options.memory_mb)
    remarks = _place(out, model, lambda whole: _write_pixels(file, options, target, whole))
    if options.format == "openvino":
        how = ("compile it with the options that were measured" if target is timed else
               "it was not measured in OpenVINO; options that suit are")
        remarks.append(f"{how}: {_SERVED.parent}/compile_options.json")
    return remarks


def _write_pixels(file: ModelFile, options: ExportOptions, target: Target, whole: Path) -> list[str]:
    """Write the network that takes uint8 pixels, as an ONNX file or for a model server; return a line about it. Raises
    ModelError if it does not run once or cannot be converted."""
    import numpy as np

    proto, preparation = load_checked(file.path), file.preparation
    shape = take_pixels(proto, preparation.channels, preparation.sizes[-1], file.mean, file.std)
    task = load_task(file.task)
    outputs = task.finish(proto, preparation.sizes[-1]) if options.answers else task.card(len(file.classes)).outputs
    onnx = whole if options.format == "uint8" else whole.with_suffix(".onnx")
    write_atomic(onnx, proto.SerializeToString())
    try:
        run_once(onnx, np.zeros([1, preparation.sizes[-1], preparation.sizes[-1], preparation.channels], np.uint8))
        if options.format == "openvino":
            save_ir(onnx, whole / _SERVED, "NHWC", file.classes, compile_options(target))
    except CandidateError as error:
        raise ModelError(str(error)) from None
    return [f"uint8 {json.dumps(shape)} ({'grey' if preparation.channels == 1 else 'RGB'}) to {outputs}"]


def _copy(folder: RunFolder, to: Path) -> list[str]:
    """Copy the files of a run, without locks and files that are just being written; return lines about the copy."""
    from hwnas.study.storage import back_up
    from hwnas.study.study import database_path

    n = 0
    for path in sorted(folder.path.rglob("*")):
        beside_study = path.parent == folder.path and path.name.startswith(folder.study.name) and path != folder.study
        if path.is_symlink() or not path.is_file() or beside_study or (path.name[0] == "." and path.name != NAME):
            continue
        # A search may be writing to the study: SQLite copies it with all that is committed.
        copy = to / path.relative_to(folder.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        back_up(database_path(folder.path), copy) if path == folder.study else shutil.copyfile(path, copy)
        n += 1
    elsewhere = [] if folder.study.is_file() else [
        "its study is not among them: it is in the database that storage= named."]
    return [f"{n} files", *elsewhere]


command = partial(run_command, run, "export", __doc__ or "", target=False)

if __name__ == "__main__":
    sys.exit(command())
