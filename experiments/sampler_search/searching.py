"""The searches: which there are to do, one child process each, one after the other, and which are done already."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.sampler_search.options import Options
from hwnas.errors import UserError
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
SEARCH_ONLY = Path(__file__).with_name("search_only.py")
DONE = "experiment.json"  # in a run folder: the search ended well, with this configuration


@dataclass(frozen=True)
class Search:
    """One search to do: `config` is what its overrides compose to, as YAML text."""

    sampler: str
    seed: int
    verify: bool
    path: Path
    overrides: tuple[str, ...]
    config: str

    @property
    def command(self) -> list[str]:
        """The child that runs it, or resumes it."""
        how = ["-m", "hwnas.search"] if self.verify else [str(SEARCH_ONLY)]
        return [sys.executable, *how, *self.overrides]

    @property
    def done(self) -> bool:
        """Whether a child finished it with this very configuration, verified where that is wanted."""
        run = RunFolder(self.path)
        try:
            held = json.loads((self.path / DONE).read_text())
        except (OSError, ValueError):
            return False
        return (held.get("config") == self.config and (held.get("verified") or not self.verify)
                and run.trials_csv.is_file() and (run.front_csv.is_file() or not self.verify))

    def mark_done(self) -> None:
        """So that the same command need not start it again."""
        write_atomic(self.path / DONE, json.dumps({"verified": self.verify, "config": self.config}, indent=1) + "\n")


def plan(options: Options) -> list[Search]:
    """Every search, seed by seed; ConfigError or UnknownName for what no search could run with, before any does."""
    return [_search(options, sampler, seed, seed in options.seeds[:options.verify])
            for seed in options.seeds for sampler in options.samplers]


def _search(options: Options, sampler: str, seed: int, verify: bool) -> Search:
    from omegaconf import OmegaConf

    from hwnas.cli.command import compose
    from hwnas.samplers.loading import load_sampler

    path = options.out / sampler / f"seed{seed}"
    overrides = (*options.overrides, f"sampler={sampler}", f"seed={seed}", f"out={path}",
                 *options.of_sampler.get(sampler, ()))
    config = compose("search", overrides)
    values: Mapping[str, Any] = OmegaConf.to_container(config.sampler_options)  # type: ignore[assignment]
    load_sampler(sampler, seed, **values)
    return Search(sampler, seed, verify, path, overrides, OmegaConf.to_yaml(config, resolve=True))


def run_all(searches: Sequence[Search]) -> None:
    """Run what is not done, one after the other; a child that fails ends it with a UserError."""
    for index, one in enumerate(searches, 1):
        name = f"{one.sampler}, seed {one.seed}"
        if one.done:
            print(f"[{index} of {len(searches)}] {name}: done already", file=sys.stderr, flush=True)
            continue
        print(f"[{index} of {len(searches)}] {name}: {one.path}", file=sys.stderr, flush=True)
        lend_baselines(one, searches)
        code = start(one.command)
        if code:
            raise UserError(f"the search with sampler {name} ended with exit code {code}; its own words stand above. "
                            "Mend that, then give the same command again: what is done stays done.")
        one.mark_done()


def lend_baselines(one: Search, searches: Sequence[Search]) -> None:
    """Copy the weights of baselines that another search of this seed has trained. hwnas.search takes them where
    recipe, seed and data are its own, and trains anew where they are not."""
    for other in searches:
        if other is one or other.seed != one.seed or not (one.verify and other.verify and other.done):
            continue
        for weights in sorted((other.path / "models").glob("*/weights.safetensors")):
            copy = RunFolder.create(one.path).model(weights.parent.name).weights
            if (weights.parent / "baseline.yaml").is_file() and not copy.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(weights, copy)


def start(command: Sequence[str]) -> int:
    """Run a child to its end and return its exit code. Ctrl-C: the child, which hears it too, puts its study in order
    first."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths})
    try:
        return child.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20)
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            child.wait()
        raise
