"""Command: what a target really executes of a network, or of the blocks of a space."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.benchmark.files import NetworkOptions, noting_waits
from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, show
from hwnas.errors import ConfigError
from hwnas.networks.baselines import TIMM
from hwnas.system.run_folder import check_replaceable

if TYPE_CHECKING:
    from hwnas.check.report import Check
    from hwnas.latency.fallbacks import CheckedBlock

USAGE = """Which operators of a network run where, in which precision, what falls back, and what that costs.

    python -m hwnas.check +target=xeon_int8 model=path/to/model.onnx
    python -m hwnas.check +target=ort_int8 model=timm:mobilenetv3_small_050 image_size=64 out=check.json
    python -m hwnas.check +target=xeon_int8 space=mnasnet"""


@dataclass(frozen=True)
class CheckOptions(NetworkOptions):
    """Options of `conf/check.yaml`. None: the network, the space or the target decides."""

    dataset: dict[str, Any] = option()
    space: str | None = option()
    repeats: int = option(low=1, high=100_000)
    out: str | None = option()


def main(config: Config, console: Console) -> None:
    """Check, print and store."""
    options = read_command(CheckOptions, config)
    if bool(options.model) == bool(options.space):
        raise ConfigError("check which network, or which space? Add model=PATH of an .onnx file, model=timm:NAME or "
                          "space=NAME, and only one of them.")
    out = Path(options.out) if options.out else None
    if out is not None:
        check_replaceable(out.with_suffix(".csv"), out.with_suffix(".json"))
    from hwnas.check.report import block_lines, lines, save_rows

    if options.space:
        rows, kept = checked_blocks(options, console)
        files = save_rows(rows, out, kept) if out is not None else ()
        text = block_lines(rows, options.target)
    else:
        result = checked(options, console)
        files, text = result.save(out) if out is not None else (), lines(result)
        kept = None
    for line in text:
        show(line)
    for file in [*files, *filter(None, [kept])]:
        console.say(f"written: {file}")


def checked(options: CheckOptions, console: Console) -> Check:
    """Make the file, and have it compiled and profiled in a child process."""
    from hwnas.check.report import Check
    from hwnas.latency.deployment import Deployment
    from hwnas.runtimes.child import run_child
    from hwnas.runtimes.executed import Executed
    from hwnas.runtimes.runtime import load_runtime

    deployment, model = Deployment.of(options.target, None, console), options.model or ""
    target, host = deployment.target, deployment.device.host
    runtime = load_runtime(target.runtime)
    runtime.check(target)
    with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:
        file, built = options.network.file(Path(folder)), model.startswith(TIMM)
        job = {"path": str(file), "label": model, "repeats": options.repeats, "seed": options.seed,
               "memory_mb": options.memory_mb, "quantize": options.quantize and not built,
               "channels": None if built else options.channels, "image_size": None if built else options.image_size}
        with console.step("check") as report:
            raw = run_child("hwnas.check.task", job, target, timeout_s=options.timeout, memory_mb=options.memory_mb,
                            progress=noting_waits(report, console))
    made_up = target.precision == "int8" and (built or options.quantize)
    return Check(model, target, host, runtime.version(), made_up, tuple(raw["input"]["image"]), raw["execution"],
                 Executed.from_dict(raw))


def checked_blocks(options: CheckOptions, console: Console) -> tuple[list[CheckedBlock], Path]:
    """Every kind of block of the space, in every precision of the runtime; kept beside the latency tables, in the file
    that is returned."""
    from hwnas.latency.deployment import Deployment, SpaceOptions, key_of
    from hwnas.latency.fallbacks import check_blocks, save_blocks
    from hwnas.runtimes.runtime import load_runtime

    if options.quantize:
        raise ConfigError("quantize goes with model=PATH; the blocks of a space are quantised as a search does it. "
                          "Leave it out.")
    deployment = Deployment.of(options.target, None, console)
    space = SpaceOptions(options.target, None, str(options.space), options.dataset, options.channels, options.classes,
                         options.image_size).search_space()
    runtime = load_runtime(deployment.target.runtime)
    runtime.check(deployment.target)
    with console.step("check") as report:
        rows = check_blocks(space, deployment.target, runtime, options.repeats, report)
    kept = save_blocks(rows, key_of(deployment, space), deployment.device.host, runtime.version(), space.name)
    return rows, kept


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.check`."""
    return run_command(main, "check", USAGE, argv)


if __name__ == "__main__":
    sys.exit(command())
