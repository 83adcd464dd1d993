"""Copies a run, also while a search works on it: python -m hwnas.export run=DIR out=COPY

The copy is a new folder, or with out=COPY.tar a file. It is whole or not there, and holds every finished trial.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hwnas.errors import ConfigError, StudyError, UserError
from hwnas.system.run_folder import NAME, RunFolder

if TYPE_CHECKING:
    from hwnas.cli.options import Config
    from hwnas.cli.progress import Console


def run(config: Config, console: Console) -> None:
    """The command: `run` names the folder, `out` the copy."""
    if not config.get("run") or not config.get("out"):
        raise ConfigError("which run folder, and where to? Add run=DIR and out=COPY, a new folder or COPY.tar.")
    folder, out = RunFolder.open(str(config["run"]), write=False), Path(str(config["out"])).absolute()
    if os.path.lexists(out) and not (out.suffix != ".tar" and out.is_dir() and not any(out.iterdir())):
        raise StudyError(f"{out} is there already. Choose another out=COPY.")
    if out.resolve().is_relative_to(folder.path.resolve()):
        raise StudyError(f"{out} lies in {folder.path}. Choose another out=COPY.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name[:40]}.", dir=out.parent) as beside:
            whole = Path(beside) / out.stem
            n = _copy(folder, whole)
            if out.suffix == ".tar":
                with tarfile.open(packed := Path(beside) / "packed.tar", "w") as tar:
                    tar.add(whole, whole.name)
                whole = packed
            os.replace(whole, out)
    except OSError as error:
        raise UserError(f"cannot copy {folder.path} to {out}: {error.strerror or error}. Give the same command again, "
                        "or another out=COPY.") from None
    console.say(f"{n} files: {out}")
    if not folder.study.is_file():
        console.say("its study is not among them: it lies in the database that storage= named.")


def _copy(folder: RunFolder, to: Path) -> int:
    """Copy what a run holds, without locks and files that are just being written; how many files there are."""
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
    return n


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.export`."""
    from hwnas.cli.command import run_command

    return run_command(run, "export", __doc__ or "", argv, target=False)


if __name__ == "__main__":
    raise SystemExit(command())
