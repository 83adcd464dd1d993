"""Folders that runs are told in: writable, and not in the folder of other work."""

from __future__ import annotations

from pathlib import Path

from hwnas.errors import StudyError
from hwnas.system.paths import make_writable
from hwnas.system.run_folder import kind_of


def make_folder(path: Path) -> Path:
    """Make a folder, unless it is there, and try it.

    Args:
        path: The folder that `uri` names.

    Returns:
        Its absolute path.

    Raises:
        StudyError: It is, or lies in, a folder of hwnas, where files of others have no place.
        UserError: It cannot be written.
    """
    path = path.absolute()
    if (around := next((each for each in (path, *path.resolve().parents) if kind_of(each)), None)) is not None:
        raise StudyError(f"{path} lies in {around}, the folder of other work. Choose another uri=FOLDER.")
    make_writable(path)
    return path
