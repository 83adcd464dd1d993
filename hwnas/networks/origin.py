"""Origin: how a network came about that a command trained or compressed beside a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwnas.system.documents import Document
from hwnas.system.run_folder import kind_of

SUMMARY = Document("hwnas-training", 1, "the summary of a training", "Remove it to write it again, or choose another "
                   "out=FOLDER.")
COMPRESSION = Document("hwnas-compression", 1, "the summary of a compression", "Give the command again.")
ORIGIN = Document("hwnas-origin", 1, "the origin of a network that joined a front", "Remove its folder, and add the "
                  "network again.", shape={"origin": str, "top1_test_fp32": float, "n_test": int, "params": int,
                                           "macs": int})
_OF_KIND = {"train": SUMMARY, "compress": COMPRESSION}


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a network. `by` is the command, `told` the recipe in words, `fingerprints` are those of the images that
    it was trained and judged on, `target` is the one that it was quantised for (None: it is not int8 yet)."""

    by: str
    told: str
    fingerprints: tuple[str, ...]
    target: str | None = None

    @classmethod
    def find(cls, folder: Path) -> Origin | None:
        """Of the folder of a `hwnas.train` or `hwnas.compress` that has ended, otherwise None; StudyError for a summary
        that cannot be read."""
        kind, path = kind_of(folder), folder / "summary.json"
        if kind not in _OF_KIND or (summary := _OF_KIND[kind].find(path)) is None:
            return None
        with _OF_KIND[kind].reading(path):
            return _trained(summary) if kind == "train" else _compressed(summary)


def told_of(folder: Path) -> str:
    """How the weights in a model folder were trained, in words."""
    if (joined := ORIGIN.find(folder / "origin.json")) is not None:
        return str(joined["origin"])
    origin = Origin.find(folder)
    return origin.told if origin else "trained by its search"


def _trained(summary: dict[str, Any]) -> Origin:
    identity, n = summary["identity"], int(summary["epochs"])
    told = f"trained for {n} epoch{'s' * (n != 1)} in {float(summary['seconds_training']):.0f} s"
    told += " with a teacher" if identity.get("teacher.model") else ""
    told += " from given weights" if identity.get("weights") else ""
    told += " from pretrained weights" if " pretrained=" in str(identity.get("network")) else ""
    return Origin("train", told, (str(identity["dataset.fingerprint"]),))


def _compressed(summary: dict[str, Any]) -> Origin:
    prints = (summary["identity"]["dataset.fingerprint"], summary.get("trained_on"))
    trained = summary.get("trained")
    told = f"{f'{trained}; ' if trained else ''}int8 by compress ({summary['what']})"
    return Origin("compress", told, tuple(str(text) for text in prints if text), str(summary["target"]))
