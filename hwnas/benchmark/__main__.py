"""The command that times one network on this host by the protocol of the latency tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.benchmark.explain import explanation_lines
from hwnas.benchmark.files import NetworkOptions, noting_waits
from hwnas.benchmark.report import Benchmark, lines
from hwnas.benchmark.task import first_of, reference_of
from hwnas.cli.command import run_command
from hwnas.cli.options import Config, given, option, read_command
from hwnas.cli.progress import Console, Report, show
from hwnas.errors import ConfigError, MeasurementInvalid
from hwnas.latency.copies import TimedFile
from hwnas.latency.deployment import Deployment, DeviceOptions, open_device
from hwnas.latency.remote import RemoteDevice
from hwnas.latency.timing import prepare_network, reference_network
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import check_replaceable

if TYPE_CHECKING:
    from hwnas.latency.timing import Device

USAGE = """Time one network on this host: an ONNX file, or a timm network by name.

    hwnas benchmark target=xeon_int8 model=path/to/model.onnx
    hwnas benchmark target=xeon_int8 model=timm:mobilenetv3_small_050 image_size=64 batch=1,2,4,8,16
    hwnas benchmark target=ort_fp32 model=model.onnx batch=1,4,16 threads=1,2 out=b.json
    hwnas benchmark target=ort_int8 model=model.onnx explain=true   # precision and time of each operator"""
LISTS = ("batch", "threads")  # options that take several numbers


def _differ(batches: tuple[int, ...]) -> bool:
    return 0 < len(batches) == len({*batches})


@dataclass(frozen=True)
class BenchmarkOptions(NetworkOptions, DeviceOptions):
    """The options of `conf/benchmark.yaml`. None: the network or the target decides."""

    batch: tuple[int, ...] | None = option(low=1, high=4096, check=_differ, what=(
        "one or several different whole numbers from 1 to 4096, e.g. batch=1,2,4"))
    threads: tuple[int, ...] | None = option(low=0, high=4096, check=_differ, what=(
        "one or several different whole numbers from 0 to 4096, e.g. threads=1,2 (0: every core)"))
    seconds: float = option(low=1, high=86_400)
    explain: bool = option()
    out: str | None = option()

    @classmethod
    def from_config(cls, config: Config) -> BenchmarkOptions:
        """Read `conf/benchmark.yaml`; each of LISTS is a number or a list of them."""
        values = given(config)
        several = {name: value if isinstance(value, list) else [value] for name in LISTS
                   if (value := values[name]) is not None}
        return read_command(cls, {**values, **several})


def main(config: Config, console: Console) -> None:
    """Time the network, print and store the result. MeasurementInvalid at the end if a number could not be measured."""
    options = BenchmarkOptions.from_config(config)
    if options.out:
        check_replaceable(Path(options.out))
    result = measured(options, console)
    if options.out:  # before anything is printed: its reader may be gone
        result.save(Path(options.out))
    printed = [*lines(result)]
    if explanation := result.raw.get("explanation"):
        printed += ["", *explanation_lines(explanation, result.target)]
    for line in printed:
        show(line.rstrip())
    if options.out:
        console.say(f"raw samples: {options.out}")
    if result.invalid:
        raise MeasurementInvalid(f"not known: the latency of {', '.join(result.invalid)}, as said above. Give it more "
                                 "time (seconds=), or stop what else runs here.")


def benchmark(config: Config, console: Console) -> Benchmark:
    """Do what `conf/benchmark.yaml` asks, and return the result."""
    return measured(BenchmarkOptions.from_config(config), console)


def measured(options: BenchmarkOptions, console: Console) -> Benchmark:
    """Make the files and time them, in a child process here or on another machine."""
    if not options.model:
        raise ConfigError("which network? Add model=PATH of an .onnx file, or model=timm:NAME.")
    target, most = options.target, max(options.threads or (options.target.threads,))
    device = Deployment.of(replace(target, threads=most), None, console, open_device(options, console)).device
    host = device.host
    runtime = device.runtime(target.runtime)
    runtime.check(target)
    with temporary_folder() as folder:
        reference = prepare_network(reference_network(), target, Path(folder))  # timed beside the file
        job = {**options.network_job(Path(folder)), "seconds": options.seconds, "explain": options.explain,
               "batches": options.batch or [target.batch], "threads": options.threads or [target.threads],
               "reference": str(reference)}
        with console.step("time", options.seconds) as report:
            raw = _timed(job, options, device, Path(folder), noting_waits(report, console))
    return Benchmark.of(raw, model=options.model, target=target, host=host, runtime=runtime.version(),
                        seed=options.seed,
                        made_up=target.precision == "int8" and options.is_built)


def _timed(job: Mapping[str, Any], options: BenchmarkOptions, device: Device, folder: Path, report: Report
           ) -> dict[str, Any]:
    """Return the result of the task. For another machine, the child checks and prepares the file that is sent there."""
    if not isinstance(device, RemoteDevice):
        return options.run_task(job, options.target, report)
    prepared = options.prepare_to_send(job, folder, report)
    file = TimedFile(Path(prepared["file"]), options.target, tuple(prepared["input"]["image"]))
    timed = device.curve(file, reference_of(job["reference"], options.target), job, report)
    if nodes := timed.pop("nodes", None):
        # Nodes are compared with the file here: the other machine may lack the onnx package.
        profile = folder / "told.json"
        profile.write_text(json.dumps({"target": asdict(first_of(job, options.target)), "nodes": nodes}))
        timed["explanation"] = options.check_here({**job, "path": prepared["file"], "there": str(profile)}, report)
    return {"input": prepared["input"], **timed}


command = partial(run_command, main, "benchmark", USAGE, lists=LISTS)


if __name__ == "__main__":
    sys.exit(command())
