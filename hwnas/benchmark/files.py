"""The file of a network to be inspected: an ONNX file as it is, or a timm network that is exported here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwnas.cli.options import option
from hwnas.cli.progress import Console, Report
from hwnas.errors import ConfigError
from hwnas.latency.timing import prepare_untrained
from hwnas.lazy import timm, torch
from hwnas.networks.baselines import TIMM, Baseline, check_timm
from hwnas.runtimes.child import WAITING, run_child
from hwnas.runtimes.foreign import check_path
from hwnas.target import Target


@dataclass(frozen=True)
class NetworkOptions:
    """The options that describe one network to a command, and the limits of the child process that reads it."""

    target: Target
    model: str | None
    seed: int = option(low=0)
    image_size: int | None = option(low=1, high=65_536)
    channels: int | None = option(low=1, high=4096)
    classes: int | None = option(low=2, high=1_000_000)
    memory_mb: int = option(low=1)
    timeout: float = option(low=1)

    @property
    def is_built(self) -> bool:
        """True for a timm network, which is exported here."""
        return str(self.model).startswith(TIMM)

    def network_job(self, folder: Path) -> dict[str, Any]:
        """Return the network's part of the job of a task in a child process.

        Its file is a checked path, or a timm network that is exported to `folder` (and quantised for int8).
        """
        about = {"label": self.model, "seed": self.seed, "memory_mb": self.memory_mb}
        if self.is_built:  # its file is whole
            path = self._timm_file(str(self.model).removeprefix(TIMM), folder)
            return {**about, "path": str(path), "channels": None, "image_size": None}
        if self.classes is not None:
            raise ConfigError("classes goes with timm: networks only; a file has the classes that it has. Leave it "
                              "out.")
        check_path(str(self.model), self.memory_mb)
        return {**about, "path": os.path.abspath(str(self.model)), "channels": self.channels,
                "image_size": self.image_size}

    def run_task(self, job: Mapping[str, Any], target: Target, report: Report) -> dict[str, Any]:
        """Return the result of the benchmark's task on `job`, in a child process with the user's limits."""
        return dict(run_child("hwnas.benchmark.task", job, target, timeout_s=self.timeout, memory_mb=self.memory_mb,
                              progress=report))

    def prepare_to_send(self, job: Mapping[str, Any], folder: Path, report: Report) -> dict[str, Any]:
        """Return the file to send to another machine, whole in `folder` after a child process has checked it: its path
        (`file`), and the network's input (`input`)."""
        return self.check_here({**job, "keep": tempfile.mkdtemp(dir=folder)}, report)

    def check_here(self, job: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """Return the result of a task that times nothing. This machine may lack the runtime of the file."""
        here = Target("prepare", "onnxruntime", "int8" if self.target.precision == "int8" else "fp32")
        return self.run_task(job, here, report)

    def _timm_file(self, name: str, folder: Path) -> Path:
        check_timm(name)
        own = timm.get_pretrained_cfg(name)
        size = own.input_size if own and own.input_size else (3, 224, 224)
        channels, image_size = self.channels or size[0], self.image_size or size[-1]
        classes = self.classes or (own.num_classes if own else 0) or 1000
        torch.manual_seed(self.seed)
        network = Baseline(name).build(channels, classes, image_size)
        return prepare_untrained(network, f"{self.seed:x}", (channels, image_size, image_size), self.target, folder)


def noting_waits(report: Report, console: Console) -> Report:
    """Return a report that calls `report`, and also shows a note while another process measures."""
    def report_and_note(share: float, note: str = "") -> None:
        if note.startswith(WAITING):
            console.note(note)
        report(share, note)

    return report_and_note
