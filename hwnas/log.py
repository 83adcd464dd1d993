"""Command: tell MLflow of a verified run."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hwnas.cli.command import opened_run, run_command
from hwnas.cli.options import Config, flat_options, option, read_command
from hwnas.cli.progress import Console
from hwnas.errors import StudyError, TargetError, UserError, hidden, one_line
from hwnas.front.rows import FrontRow, front_json, load_front
from hwnas.runtimes.runtime import deployed_of
from hwnas.system.paths import make_writable
from hwnas.system.run_folder import Manifest, RunFolder
from hwnas.target import target_named

USAGE = """Tells MLflow of a verified run: options, front, pictures, models.

    hwnas log run=runs/x uri=runs/mlflow            # or the address of a server"""
_RUN, _PARENT = "hwnas.run", "mlflow.parentRunId"
_MOST_PARAMS, _MOST_TEXT = 100, 6000  # of one call, and letters of a value
_SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR",
             "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # seven take minutes if no server answers
             "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


@dataclass(frozen=True)
class LogOptions:
    """Options of `conf/log.yaml`."""

    run: str | None
    uri: str | None = option()
    experiment: str = option()


def main(config: Config, console: Console) -> None:
    """The command: `run` names the run folder, `uri` the place."""
    options = read_command(LogOptions, config)
    folder, uri = opened_run(config, write=False), options.uri or "runs/mlflow"
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
    except ImportError:
        raise TargetError("MLflow is not installed. Install it: pip install 'hwnas[mlflow]'") from None
    rows = [row for row in load_front(folder) if row.verified]
    if not rows:
        raise StudyError(f"{folder.path}: no network is verified. On its machine: hwnas verify run={folder.path}")
    store, artifacts = _store(uri)
    try:
        client = mlflow.MlflowClient(tracking_uri=store, registry_uri=store)
        held = client.get_experiment_by_name(options.experiment)
        number = held.experiment_id if held else client.create_experiment(options.experiment, artifacts)
        done = _send(client, number, folder, rows)
    except Exception as error:  # stores, servers and drivers of databases share no base class
        raise UserError(f"cannot log to {hidden(uri, whole=True)}: {hidden(one_line(error)).rstrip('.')}. Mend that, "
                        "or choose another uri=PLACE.") from None
    console.say(f"{done} of experiment {options.experiment} in {uri}")


def _store(uri: str) -> tuple[str, str | None]:
    """Return the address of the store, and where its artefacts lie; None: the store knows."""
    if re.match(r"[\w+.-]+:", uri):
        return uri, None
    folder = Path(uri).resolve()
    make_writable(folder)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def _send(client: Any, number: str, folder: RunFolder, rows: Sequence[FrontRow]) -> str:
    """Write the run. If anything fails, it is deleted."""
    pages = [path for path in (folder.front_csv, folder.front_png, folder.report) if _is_inside(path, folder)]
    here = str(folder.path.resolve())
    verdicts = [str(each.get("sentence")) for each in folder.read_comparisons() if each.get("verdict") == "deploy"]
    made: list[str] = []

    def begin(name: str, tags: Mapping[str, str]) -> str:
        made.append(client.create_run(number, tags={_RUN: here, **tags}, run_name=name).info.run_id)
        return made[-1]

    try:
        whole = begin(Path(here).name, {"mlflow.note.content": " ".join(verdicts)})
        _log_values(client, whole, {key: value if isinstance(value, str) else json.dumps(value, default=str)
                                    for key, value in flat_options(folder.read_config())}, {})
        for path in pages:
            client.log_artifact(whole, str(path))
        for row in rows:
            _log_network(client, begin(f"{row.label} {row.id}".strip(), {_PARENT: whole}), row, folder)
        client.set_terminated(whole, "FINISHED")  # the last of all: what is FINISHED is whole
    except BaseException:  # Ctrl-C too
        for each in reversed(made):
            with suppress(Exception):
                client.delete_run(each)
        raise
    return f"logged: run {whole}"


def _log_network(client: Any, run: str, row: FrontRow, folder: RunFolder) -> None:
    values: Mapping[str, Any] = json.loads(front_json([row]))["rows"][0]
    numbers = {name: value for name, value in values.items() if type(value) in (int, float) and math.isfinite(value)}
    _log_values(client, run, {name: str(value) for name, value in values.items()
                              if name not in numbers and value not in (None, "")}, numbers)
    model, target = folder.model(row.id), target_named(folder.read_environment()["target"], row.target)
    manifest = Manifest.find(model.path) if _is_inside(model.manifest, folder) else None
    for path in dict.fromkeys((model.onnx, deployed_of(model.deployed(target.precision), target.runtime), model.card)):
        if _is_inside(path, folder) and (path == model.card or (manifest is not None and not manifest.fault(path))):
            client.log_artifact(run, str(path), "model")
    client.set_terminated(run, "FINISHED")


def _is_inside(path: Path, folder: RunFolder) -> bool:
    """Return whether there is such a file; a link out of the folder could name any file of this machine."""
    return path.is_file() and path.resolve().is_relative_to(folder.path.resolve())


def _log_values(client: Any, run: str, texts: Mapping[str, str], numbers: Mapping[str, float]) -> None:
    from mlflow.entities import Metric, Param

    client.log_batch(run, metrics=[Metric(name, float(value), 0, 0) for name, value in numbers.items()])
    params = [Param(re.sub(r"[^\w.-]", "_", name)[:250], hidden(text, whole=True)[:_MOST_TEXT])
              for name, text in texts.items()]  # passwords were hidden when the run was written, too
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run, params=params[start : start + _MOST_PARAMS])


command = partial(run_command, main, "log", USAGE, target=False)

if __name__ == "__main__":
    sys.exit(command())
