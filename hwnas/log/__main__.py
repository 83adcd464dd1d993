"""Command: tell a tool that keeps experiments of a verified run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.errors import ConfigError
from hwnas.log import destinations
from hwnas.log.record import Record
from hwnas.system.run_folder import RunFolder

if TYPE_CHECKING:
    from hwnas.cli.progress import Console

USAGE = """Tells a tool that keeps experiments of a verified run: options, front, picture, trials, models.

    hwnas log run=runs/x to=mlflow uri=runs/mlflow            # or the address of a server
    hwnas log run=runs/x to=tensorboard uri=runs/tensorboard

A run that is there already is not written twice. Where it has changed, it is replaced."""


def destination_names() -> list[str]:
    """Names that `to` accepts: each module in `hwnas/log/destinations` is one."""
    return sorted(module.name for module in iter_modules(destinations.__path__))


@dataclass(frozen=True)
class LogOptions:
    """Options of `conf/log.yaml`."""

    run: str | None
    to: str | None = option(choices=destination_names)
    uri: str | None = option()
    experiment: str = option()


def main(config: Config, console: Console) -> None:
    """The command: `run` names the run folder, `to` the tool, and `uri` the place."""
    options = read_command(LogOptions, config)
    if not options.run or not options.to:
        raise ConfigError(f"which run, and to what? Add run=DIR and to={'|'.join(destination_names())}.")
    send: Callable[[Record, str, str], str] = import_module(f"{destinations.__name__}.{options.to}").send
    record = Record.read(RunFolder.open(options.run, write=False))
    for remark in record.remarks:
        console.remark(remark)
    console.say(send(record, options.uri or f"runs/{options.to}", options.experiment))


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hwnas log`."""
    return run_command(main, "log", USAGE, argv, target=False)


if __name__ == "__main__":
    raise SystemExit(command())
