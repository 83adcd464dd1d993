"""Command: what a target really executes of a network, or of the blocks of a space."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.benchmark.files import NetworkOptions, noting_waits
from hwnas.check.report import BLOCKS_BEGIN, NODES_BEGIN, Check, block_lines, lines, save_rows
from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, Report, show
from hwnas.errors import ConfigError, FileError, ModelError
from hwnas.latency.copies import noise
from hwnas.latency.deployment import Deployment, SpaceOptions, open_device
from hwnas.latency.device import DeviceOptions
from hwnas.latency.fallbacks import measure_blocks
from hwnas.latency.remote import RemoteRuntime
from hwnas.runtimes.executed import Executed
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import check_replaceable

if TYPE_CHECKING:
    from hwnas.check.report import Check
    from hwnas.latency.fallbacks import CheckedBlock
    from hwnas.runtimes.runtime import Runtime

USAGE = """Which operators of a network run where, in which precision, what falls back, and what that costs.

    hwnas check target=xeon_int8 model=path/to/model.onnx
    hwnas check target=ort_int8 model=timm:mobilenetv3_small_050 image_size=64 out=check.json
    hwnas check target=xeon_int8 space=mnasnet
    hwnas check target=edge_int8 model=path/to/model.onnx device=pi@raspberry"""


@dataclass(frozen=True)
class CheckOptions(NetworkOptions, DeviceOptions):
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
        check_replaceable(out.with_suffix(".csv"), begin=BLOCKS_BEGIN if options.space else NODES_BEGIN)
        check_replaceable(out.with_suffix(".json"))
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
    """Make the file, and have it compiled and profiled in a child process, here or on another machine."""
    deployment = Deployment.of(options.target, None, console, open_device(options, console))
    target, device = deployment.target, deployment.device
    runtime = device.runtime(target.runtime)
    runtime.check(target)
    with temporary_folder() as folder:
        job = {**options.job(Path(folder)), "batches": [target.batch], "repeats": options.repeats}
        with console.step("check") as report:
            raw = _looked_at(job, options, runtime, Path(folder), noting_waits(report, console))
    return Check(str(options.model), target, device.host, runtime.version(), options.has_made_up_ranges,
                 tuple(raw["input"]["image"]), raw["execution"], Executed.from_dict(raw))


def _looked_at(job: Mapping[str, Any], options: CheckOptions, runtime: Runtime, folder: Path, report: Report
               ) -> dict[str, Any]:
    """What the task returns. For another machine a child here prepares the file, which then goes there, and another
    judges what came back."""
    if not isinstance(runtime, RemoteRuntime):
        return options.run_task("hwnas.check.task", job, options.target, report)
    made, told = options.prepare_to_send(job, folder, report), folder / "told.json"
    try:
        there = runtime.inspect(made["file"], options.target, options.memory_mb)
        nodes = there.profile(noise(options.target.batch, made["input"]["image"]), options.repeats)
    except FileError as error:  # of the copy, which nobody knows
        raise ModelError(f"{options.model}: {error.fact} {error.remedy}".rstrip()) from None
    told.write_text(json.dumps([asdict(node) for node in nodes]))
    job = {**job, "path": made["file"], "told": str(told)}
    judged = options.run_task("hwnas.check.task", job, replace(options.target, runtime="null"), report)
    return {"input": made["input"], "execution": there.execution.to_dict(), **judged}


def checked_blocks(options: CheckOptions, console: Console) -> tuple[list[CheckedBlock], Path]:
    """Every kind of block of the space, in every precision of the runtime; kept beside the latency tables, in the file
    that is returned."""
    if options.quantize:
        raise ConfigError("quantize goes with model=PATH; the blocks of a space are quantised as a search does it. "
                          "Leave it out.")
    deployment = Deployment.of(options.target, None, console, open_device(options, console))
    space = SpaceOptions(options.target, None, str(options.space), options.dataset, options.channels, options.classes,
                         options.image_size).search_space()
    return measure_blocks(deployment, space, console, options.repeats)


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hwnas check`."""
    return run_command(main, "check", USAGE, argv)


if __name__ == "__main__":
    sys.exit(command())
