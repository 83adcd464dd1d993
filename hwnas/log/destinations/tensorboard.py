"""TensorBoard: a folder of event files for each run, written by torch."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hwnas.errors import StudyError, TargetError
from hwnas.log.folder import make_folder
from hwnas.log.record import Record
from hwnas.system.documents import Document
from hwnas.system.paths import unwritten, write_atomic

_MARK = Document("hwnas-log", 1, "the mark of a logged run", "Remove its folder.", shape={"run": str, "content": str})
_MARK_FILE = "hwnas-log.json"
_COLUMNS = ("label", "id", "name", "on_front", "verified", "top1_test", "latency_ms", "latency_ms_p99", "params",
            "macs")


def send(record: Record, uri: str, experiment: str) -> str:
    """Write a run, or what of it has changed: whole, or not at all.

    Args:
        record: The run.
        uri: The folder that `tensorboard --logdir` is given.
        experiment: A folder in it.

    Returns:
        What was done, in a sentence.

    Raises:
        TargetError: TensorBoard is not installed.
        StudyError: Another folder has the run's name there.
        UserError: The place cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TargetError("TensorBoard is not installed. Install it: pip install 'hwnas[tensorboard]'") from None
    folder = make_folder(Path(uri, _plain(experiment)))
    earlier = next((path for path in folder.glob(f"*-{record.id}") if path.is_dir()), None)
    place = earlier or folder / f"{_plain(record.name)}-{record.id}"
    if earlier is not None:
        if (mark := _MARK.find(place / _MARK_FILE)) is None:
            raise StudyError(f"{place} is there already, and hwnas did not write it. Choose another uri=FOLDER.")
        if mark["content"] == record.content:
            return f"logged already, and unchanged: {place}"
    try:
        with TemporaryDirectory(prefix=".", dir=folder) as beside:
            whole = Path(beside, "whole")
            # What was shown of an earlier state ends at step 0, also in a TensorBoard that is open.
            with SummaryWriter(str(whole), purge_step=0) as writer:
                _write(writer, record)
            write_atomic(whole / _MARK_FILE, json.dumps(
                {**_MARK.header, "run": record.id, "content": record.content}) + "\n")
            if earlier is not None:
                os.replace(place, Path(beside, "earlier"))
            os.replace(whole, place)
    except OSError as error:
        raise unwritten(place, error) from error
    return f"{'replaced' if earlier else 'logged'}: {place}"


def _plain(name: str) -> str:
    """A name that is a folder's in every system."""
    return re.sub(r"[^\w-]+", "-", name)[:100]


def _write(writer: Any, record: Record) -> None:
    end_s = max((step.time_s for step in record.steps), default=0.0)
    for step in record.steps:
        for name, value in step.values.items():
            writer.add_scalar(f"trial/{name}", value, step.number, walltime=step.time_s)
    for name, value in record.metrics.items():
        writer.add_scalar(f"run/{name}", value, 0, walltime=end_s)
    writer.add_text("summary", record.summary, 0, end_s)
    writer.add_text("options", _table(("option", "value"), record.options.items()), 0, end_s)
    writer.add_text("front", _table(_COLUMNS, ([row.get(name) for name in _COLUMNS] for row in record.rows)), 0, end_s)
    if record.picture is not None:
        writer.file_writer.add_summary(_picture(record.picture), 0, end_s)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; text from outside ends no cell."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _picture(path: Path) -> Any:
    """The PNG file as it is; its header tells width and height, and nothing unpacks it here."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = path.read_bytes()
    if len(content) < 24 or content[12:16] != b"IHDR":
        raise StudyError(f"{path} is no PNG file. Write it again: hwnas report run={path.parent}")
    width, height = struct.unpack(">II", content[16:24])
    image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=content)
    return Summary(value=[Summary.Value(tag="front", image=image)])
