"""Command: time one network on this host by the protocol of the latency tables."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.options import flag, number, read_value
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, MeasurementInvalid

if TYPE_CHECKING:
    from hwnas.benchmark.report import Benchmark
    from hwnas.target.target import Target

USAGE = """Time one network on this host: an ONNX file, or a timm network by name.

    python -m hwnas.benchmark +target=xeon_int8 model=path/to/model.onnx
    python -m hwnas.benchmark +target=xeon_int8 model=timm:mobilenetv3_small_050 image_size=64 batch=1,2,4,8,16
    python -m hwnas.benchmark +target=ort_fp32 model=model.onnx streams=2 out=b.json"""


def main(config: Any, console: Console) -> None:
    """Time, print and store. If the machine was too restless, MeasurementInvalid follows after that."""
    from hwnas.benchmark.report import lines

    if not config.get("model"):
        raise ConfigError("which network? Add model=PATH of an .onnx file, or model=timm:NAME.")
    plot = _picture_path(config)
    result = benchmark(config, console)
    for line in lines(result):
        print(line.rstrip())
    if config.out:
        result.save(Path(config.out))
        console.say(f"raw samples: {config.out}")
    if plot is not None:
        _draw(result, plot)
        console.say(f"picture: {plot}")
    if result.invalid:
        slow = _slower_than_ever(result)
        raise MeasurementInvalid(f"{'; '.join(result.invalid)}. Stop what else runs here and give the command again."
                                 f"{slow}")


def benchmark(config: Any, console: Console) -> Benchmark:
    """Check options, make the files, time them in a child process."""
    from hwnas.benchmark.model import ModelOptions, model_file
    from hwnas.benchmark.report import Benchmark
    from hwnas.latency.deployment import Deployment
    from hwnas.latency.timing import QuietTimes, reference_file
    from hwnas.networks.baselines import TIMM
    from hwnas.runtimes.child import WAITING, run_child
    from hwnas.runtimes.runtime import load_runtime
    from hwnas.target.host import Host

    target = Deployment.from_config(config, console).target
    job = _job(config, target)
    options = ModelOptions(job["channels"], job["image_size"], number(config, "classes", 2, 1_000_000, whole=True,
                                                                      optional=True), job["quantize"])
    runtime, host = load_runtime(target.runtime), Host.detect()
    runtime.check(target)
    quiet = QuietTimes(host, runtime.version(), target)
    job["quiet_ms"] = quiet.load()
    with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:
        file = model_file(str(config.model), target, options, Path(folder), job["memory_mb"], job["seed"])
        built = file.label.startswith(TIMM)
        if built:
            job |= {"channels": None, "image_size": None, "quantize": False}
        job |= {"path": str(file.path), "label": file.label, "reference": str(reference_file(target, Path(folder)))}
        with console.step("time") as report:
            def heard(share: float, note: str) -> None:
                if note.startswith(WAITING):
                    console.note(note)
                report(share, note)

            raw = run_child("hwnas.benchmark.task", job, target, timeout_s=float(number(config, "timeout", 1)),
                            memory_mb=job["memory_mb"], progress=heard)
    made_up = target.precision == "int8" and (built or job["quantize"])
    result = Benchmark.of(raw, model=file.label, target=target, host=host, runtime=runtime.version(), seed=job["seed"],
                          made_up=made_up, stored_quiet_ms=job["quiet_ms"])
    if not result.invalid:
        quiet.store(min(latency.measurement.quiet_ms for latency in result.latency))
    return result


def _job(config: Any, target: Target) -> dict[str, Any]:
    return {"batches": _batches(config.batch, target), "quantize": flag(config, "quantize"),
            "streams": number(config, "streams", 1, 1024, whole=True, optional=True) or 0,
            "seconds": float(number(config, "seconds", 1, 86_400)), "seed": number(config, "seed", 0, whole=True),
            "channels": number(config, "channels", 1, 4096, whole=True, optional=True),
            "image_size": number(config, "image_size", 1, 65_536, whole=True, optional=True),
            "memory_mb": number(config, "memory_mb", 1, whole=True)}


def _batches(batch: Any, target: Target) -> list[int]:
    """Batches in rising order; ConfigError unless they are different whole numbers from 1 to 4096."""
    from omegaconf import ListConfig

    given = [target.batch] if batch is None else list(batch) if isinstance(batch, ListConfig) else [batch]
    read: tuple[int, ...] = read_value(given, tuple[int, ...], "batch", low=1, high=4096, check=_differ, what=(
        "one or several different whole numbers from 1 to 4096, e.g. batch=1,2,4"))
    return sorted(read)


def _differ(batches: tuple[int, ...]) -> bool:
    return 0 < len(batches) == len({*batches})


def _picture_path(config: Any) -> Path | None:
    """The path of the batch curve; None if there is no curve."""
    from omegaconf import ListConfig

    curve = isinstance(config.batch, ListConfig) and len(config.batch) > 1
    if config.plot:
        path = Path(str(config.plot))
        if path.suffix not in (".png", ".svg"):
            raise ConfigError(f"plot must end in .png or .svg, got {path}.")
        if not curve:
            raise ConfigError("plot draws the batch curve: give several batches, e.g. batch=1,2,4,8,16.")
        return path
    if not curve:
        return None
    if config.out:
        return Path(str(config.out)).with_suffix(".png")
    name = re.sub(r"[^\w.-]+", "-", Path(str(config.model)).name.removesuffix(".onnx"))
    return Path("runs") / f"benchmark-{config.target.name}-{name}.png"


def _draw(result: Benchmark, path: Path) -> None:
    from hwnas.benchmark.report import batch_figure
    from hwnas.pictures.style import figure_bytes
    from hwnas.system.paths import write_atomic

    write_atomic(path, figure_bytes(batch_figure(result, date.today().isoformat()), path.suffix[1:]))


def _slower_than_ever(result: Benchmark) -> str:
    """Advice for a run that was slow as a whole. The host may also have become slower for good."""
    from hwnas.system.paths import home

    if result.stored_quiet_ms is None or result.latency[0].measurement.quiet_ms != result.stored_quiet_ms:
        return ""
    return (f" (The reference never came near the {result.stored_quiet_ms:.4g} ms of earlier runs; if this host is "
            f"slower for good, remove {home() / 'reference_times.json'}.)")


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.benchmark`."""
    return run_command(main, "benchmark", USAGE, argv, lists=("batch",))


if __name__ == "__main__":
    sys.exit(command())
