"""A small network to compress, and the commands that do it."""

from __future__ import annotations

from pathlib import Path

from hwnas.cli.command import as_typed, compose, run_command
from hwnas.cli.progress import Console
from hwnas.compress import __main__ as compress
from hwnas.compress.job import CompressJob, make_job
from hwnas.space.architecture import Architecture

QUIET = Console(quiet=True)
NETWORK = Architecture((("ds_r1_k3_s1_c8",), ("ir_r1_k3_s2_e3_c16_se0.25",), ("ir_r1_k3_s1_e3_c16",)), 8, 1, 32, "relu",
                       8, 1, 10)
TINY = ["dataset=digits", "threads=1", "calibration_images=128", "sensitivity.images=64", "sensitivity.nodes=2",
        "qat.epochs=2"]


def overrides_of(model: Path, out: Path, *more: str, target: str = "ort_int8") -> list[str]:
    return as_typed([f"+target={target}", f"model={model}", f"out={out}", *TINY, *more])


def job_of(model: Path, out: Path, *more: str, target: str = "ort_int8") -> CompressJob:
    return make_job(compose("compress", overrides_of(model, out, *more, target=target)), QUIET)


def command(model: Path, out: Path, *more: str, target: str = "ort_int8") -> int:
    return run_command(compress.main, "compress", "usage", ["-q", *overrides_of(model, out, *more, target=target)])
