"""What the commands share: Hydra overrides in, one line and exit code 2 for errors that the user can mend."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, HwnasError, UnknownName, UserError
from hwnas.system.paths import config_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig


GROUPS = {"dataset": "data set", "objective": "objective"}  # groups of files in conf/ that have a default
OPEN = ("proxy.", "multi_fidelity.", "supernet.", "zero_cost.", "tabular.", "finalists.recipe.", "sampler_options.",
        "dataset.options.", "training.")
Main = Callable[["DictConfig", Console], None]


def run_command(main: Main, config_name: str, usage: str, argv: Sequence[str] | None = None,
                target: bool = True) -> int:
    """Compose `conf/<config_name>.yaml` with the command line's overrides and call `main`; returns the exit code.

    0 done, 1 failed for a reason the user cannot mend by options, 2 bad input (one line on stderr), 130 interrupted.
    """
    os.environ.setdefault("OPENVINO_TELEMETRY_OPTOUT", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost training ten times on a busy machine
    parser = argparse.ArgumentParser(prog=f"python -m hwnas.{config_name}", description=usage,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-q", "--quiet", action="store_true", help="print results and warnings only")
    parser.add_argument("--show-config", action="store_true", help="print the composed configuration and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of the configuration")
    if target:
        parser.epilog = f"targets: {', '.join(names_in('target'))}"
    options = parser.parse_args(argv)
    console = Console(quiet=options.quiet)
    try:
        config = compose(config_name, options.overrides, target)
        if options.show_config:
            from omegaconf import OmegaConf

            print(OmegaConf.to_yaml(config), end="")
            return 0
        main(config, console)
        return 0
    except UserError as error:
        return _fail(error, 2)
    except HwnasError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def names_in(group: str) -> list[str]:
    """Names of the YAML files in a config group."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def compose(config_name: str, overrides: Sequence[str], target: bool = True) -> DictConfig:
    """The configuration, checked: nothing in it may name code, and a target must be chosen."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _check_overrides(overrides, target)
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3", job_name=config_name):
            config = hydra_compose(config_name, overrides=[_opened(text) for text in overrides])
        values = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_hydra_message(error, overrides)) from None
    refuse_code(values, "")
    return config


def _opened(override: str) -> str:
    """Keys of the open sections need no plus, though the configuration does not list them."""
    return f"++{override}" if override.startswith(OPEN) else override


def _check_overrides(overrides: Sequence[str], target: bool) -> None:
    chosen = None
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals and not text.startswith("~"):
            raise ConfigError(f"{text!r} is not an override. Write key=value; --show-config prints all there are.")
        name = key.lstrip("+")
        if name == "target":
            chosen = value
            if key == "target":
                raise ConfigError(f"write +target={value} (with the plus): targets: {', '.join(names_in('target'))}.")
        if name in GROUPS and value not in names_in(name):
            raise UnknownName(GROUPS[name], value, names_in(name))
    if chosen is None and not target:
        return
    if chosen is None:
        raise ConfigError(f"no target chosen. Add +target=NAME: {', '.join(names_in('target'))}.")
    if chosen not in names_in("target"):
        raise UnknownName("target", chosen, names_in("target"))


def _hydra_message(error: Exception, overrides: Sequence[str]) -> str:
    text = " ".join(str(error).split())
    found = re.search(r"Could not override '([^']+)'", text)
    if found:
        return f"no option is called {found[1]!r}. --show-config prints all there are."
    return f"{text} (in: {' '.join(overrides)})"


def refuse_code(values: Any, where: str) -> None:
    """A configuration must not run code: Hydra's instantiation keys are refused wherever they stand."""
    if isinstance(values, dict):
        for key, value in values.items():
            if str(key) in ("_target_", "_partial_", "_args_", "_convert_", "_recursive_"):
                raise ConfigError(f"{where}{key}: configurations cannot name code to run; remove the key.")
            refuse_code(value, f"{where}{key}.")
    elif isinstance(values, list):
        for index, value in enumerate(values):
            refuse_code(value, f"{where}{index}.")


def _fail(error: Exception, code: int) -> int:
    print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def default_out(target: str, space: str, dataset: str) -> Path:
    """`runs/<target>-<space>-<dataset>` below the current folder."""
    return Path("runs") / f"{target}-{Path(space).stem}-{dataset}"
