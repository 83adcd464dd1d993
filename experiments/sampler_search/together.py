"""One verification for the finalists of all searches of a seed: timed apart, fronts differ by the moment as well."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.sampler_search.searching import DONE, Search, start
from hwnas.errors import UserError
from hwnas.front.rows import load_front, save_front
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import ModelFolder, RunFolder


def folder_of(out: Path, seed: int) -> Path:
    """The run folder that holds the finalists of all searches of a seed, in the same interleaved rounds."""
    return out / "together" / f"seed{seed}"


def verify_together(out: Path, searches: Sequence[Search]) -> None:
    """Score and time the exported networks of these searches (of one seed) anew, in one go; UserError when that fails.

    Not done again for the same searches.
    """
    seed = searches[0].seed
    run = RunFolder.create(folder_of(out, seed))
    wanted = {"searches": [one.config for one in searches],
              "networks": [row.id for one in searches for row in load_front(RunFolder(one.path))]}
    if _held(run) == wanted:
        return
    gather(run, [RunFolder(one.path) for one in searches])
    print(f"seed {seed}: the finalists of all searches together: {run.path}", file=sys.stderr, flush=True)
    seconds = sum(float(RunFolder(one.path).read_config()["verification"]["seconds"]) for one in searches)
    code = start([sys.executable, "-m", "hwnas.verify", f"run={run.path}", f"verification.seconds={seconds:g}"])
    if code:
        raise UserError(f"the common verification of seed {seed} ended with exit code {code}; its own words stand "
                        "above. Mend that, then give the same command again: what is done stays done.")
    write_atomic(run.path / DONE, json.dumps(wanted, indent=1) + "\n")


def gather(run: RunFolder, sources: Sequence[RunFolder]) -> None:
    """Copy into `run` what a verification needs: every network of `sources` once, of several the first."""
    rows = {row.id: (row, source) for source in reversed(sources) for row in load_front(source)}
    for name, (_, source) in rows.items():
        _copy(source.model(name), run.model(name))
    run.write_trials([trial for source in sources for trial in source.read_trials()])
    save_front(run, [row for row, _ in rows.values()])
    run.write_config(sources[0].read_config())
    run.write_json(run.environment, sources[0].read_json(sources[0].environment))


def _copy(source: ModelFolder, copy: ModelFolder) -> None:
    copy.path.mkdir(parents=True, exist_ok=True)
    for name in ("architecture", "baseline", "onnx", "int8"):
        path: Path = getattr(source, name)
        getattr(copy, name).unlink(missing_ok=True)
        if path.is_file():
            shutil.copyfile(path, getattr(copy, name))


def _held(run: RunFolder) -> object:
    try:
        return json.loads((run.path / DONE).read_text())
    except (OSError, ValueError):
        return None
