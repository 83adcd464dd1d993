"""How the weights of a network came about, in words: by a search or by `hwnas train`."""

from __future__ import annotations

from pathlib import Path

from hwnas.system.documents import Document
from hwnas.system.run_folder import kind_of

SUMMARY = Document("hwnas-training", 1, "the summary of a training", "Remove it to write it again, or choose another "
                   "out=FOLDER.")


def describe_training(folder: Path) -> str:
    """How the weights in a model folder were trained.

    Args:
        folder: A folder of `models/` of a run or of `hwnas train`.

    Raises:
        StudyError: The folder's summary cannot be read.
    """
    kind, path = kind_of(folder), folder / "summary.json"
    if kind == "train" and (summary := SUMMARY.find(path)) is not None:
        with SUMMARY.reading(path):
            identity, n = summary["identity"], int(summary["epochs"])
            told = f"trained for {n} epoch{'s' * (n != 1)} in {float(summary['seconds_training']):.0f} s"
            told += " from given weights" if identity.get("weights") else ""
            return told + (" from pretrained weights" if " pretrained=" in str(identity.get("network")) else "")
    return "trained by its search"
