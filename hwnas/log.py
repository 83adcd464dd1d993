"""Command: tell MLflow of a verified run."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.errors import ConfigError, StudyError, TargetError, UserError, hidden, one_line
from hwnas.front.rows import FrontRow, front_json, load_front
from hwnas.runtimes.runtime import deployed_of
from hwnas.system.paths import make_writable
from hwnas.system.run_folder import Content, Manifest, RunFolder
from hwnas.target import target_named

if TYPE_CHECKING:
    from hwnas.cli.progress import Console

USAGE = """Tells MLflow of a verified run: options, front, pictures, models.

    hwnas log run=runs/x to=mlflow uri=runs/mlflow            # or the address of a server

A run that is there already is not written twice. If it has changed, it is replaced."""
_RUN, _CONTENT, _PARENT = "hwnas.run", "hwnas.content", "mlflow.parentRunId"
_MOST_PARAMS, _MOST_TEXT = 100, 6000  # of one call, and letters of a value
_SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR",
             "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # seven take minutes if no server answers
             "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


@dataclass(frozen=True)
class LogOptions:
    """Options of `conf/log.yaml`."""

    run: str | None
    to: str | None = option(choices=("mlflow",))
    uri: str | None = option()
    experiment: str = option()


def main(config: Config, console: Console) -> None:
    """The command: `run` names the run folder, `uri` the place."""
    options = read_command(LogOptions, config)
    if not options.run or not options.to:
        raise ConfigError("which run, and to what? Add run=DIR and to=mlflow.")
    folder, uri = RunFolder.open(options.run, write=False), options.uri or "runs/mlflow"
    mlflow = _import_mlflow()
    rows = [row for row in load_front(folder) if row.verified]
    if not rows:
        raise StudyError(f"{folder.path}: no network is verified. On the machine it is for: hwnas verify "
                         f"run={folder.path}")
    store, artifacts = _store(uri)
    try:
        client = mlflow.MlflowClient(tracking_uri=store, registry_uri=store)
        held = client.get_experiment_by_name(options.experiment)
        number = held.experiment_id if held else client.create_experiment(options.experiment, artifacts)
        done = _send(client, mlflow.entities, number, folder, rows)
    except Exception as error:  # stores, servers and drivers of databases share no base class
        raise UserError(f"cannot log to {hidden(uri, whole=True)}: {hidden(one_line(error)).rstrip('.')}. Mend that, "
                        "or choose another uri=PLACE.") from None
    console.say(f"{done} of experiment {options.experiment} in {uri}")


def _import_mlflow() -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
        import mlflow.entities
    except ImportError:
        raise TargetError("MLflow is not installed. Install it: pip install 'hwnas[mlflow]'") from None
    return mlflow


def _store(uri: str) -> tuple[str, str | None]:
    """Return the address of the store, and where its artefacts lie; None: the store knows."""
    if re.match(r"[\w+.-]+:", uri):
        return uri, None
    folder = Path(uri).resolve()
    make_writable(folder)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def _send(client: Any, entities: Any, number: str, folder: RunFolder, rows: Sequence[FrontRow]) -> str:
    """Write the run; what it replaces is deleted once the new one is whole. If anything fails, the new one is."""
    pages = [path for path in (folder.front_csv, folder.front_png, folder.report) if _is_inside(path, folder)]
    told = [folder.config, folder.environment, *pages, *(folder.model(row.id).manifest for row in rows)]
    content = hashlib.sha256("".join(str(Content.of(path)) for path in told).encode()).hexdigest()[:16]
    earlier = client.search_runs([number], f"tags.`{_RUN}` = '{folder.path.resolve()}'")
    for run in earlier:
        if run.data.tags.get(_CONTENT) == content and run.info.status == "FINISHED":
            return f"logged already, and unchanged: run {run.info.run_id}"
    made: list[str] = []

    def begin(name: str, tags: Mapping[str, str]) -> str:
        tags = {_RUN: str(folder.path.resolve()), **tags}
        made.append(client.create_run(number, tags=tags, run_name=name).info.run_id)
        return made[-1]

    try:
        whole = begin(folder.path.resolve().name, {_CONTENT: content, "mlflow.note.content": _verdict(folder)})
        _log_params(client, entities, whole, dict(_flat(folder.read_config(), "")))
        for path in pages:
            client.log_artifact(whole, str(path))
        for row in rows:
            _log_network(client, entities, begin(f"{row.label} {row.id}".strip(), {_PARENT: whole}), row, folder)
        client.set_terminated(whole, "FINISHED")  # the last of all: what is FINISHED is whole
    except BaseException:  # Ctrl-C too
        for each in reversed(made):
            with suppress(Exception):
                client.delete_run(each)
        raise
    for run in earlier:
        client.delete_run(run.info.run_id)
    return f"{'replaced' if earlier else 'logged'}: run {whole}"


def _log_network(client: Any, entities: Any, run: str, row: FrontRow, folder: RunFolder) -> None:
    values: Mapping[str, Any] = json.loads(front_json([row]))["rows"][0]
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)
               and not isinstance(value, bool) and math.isfinite(value)}
    _log_params(client, entities, run, {name: str(value) for name, value in values.items()
                                        if name not in numbers and value not in (None, "")})
    client.log_batch(run, metrics=[entities.Metric(name, float(value), 0, 0) for name, value in numbers.items()])
    model, target = folder.model(row.id), target_named(folder.read_environment()["target"], row.target)
    manifest = Manifest.find(model.path) if _is_inside(model.manifest, folder) else None
    for path in dict.fromkeys((model.onnx, deployed_of(model.deployed(target.precision), target.runtime), model.card)):
        if _is_inside(path, folder) and (path == model.card or (manifest is not None and not manifest.fault(path))):
            client.log_artifact(run, str(path), "model")
    client.set_terminated(run, "FINISHED")


def _verdict(folder: RunFolder) -> str:
    return " ".join(str(each.get("sentence")) for each in folder.read_comparisons() if each.get("verdict") == "deploy")


def _is_inside(path: Path, folder: RunFolder) -> bool:
    """Whether there is such a file; a link out of the folder could name any file of this machine."""
    return path.is_file() and path.resolve().is_relative_to(folder.path.resolve())


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield options by dotted key. Passwords are hidden when a run is written, and once more here."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, hidden(value if isinstance(value, str) else json.dumps(value, default=str), whole=True)


def _log_params(client: Any, entities: Any, run: str, values: Mapping[str, str]) -> None:
    params = [entities.Param(re.sub(r"[^\w.-]", "_", name)[:250], value[:_MOST_TEXT]) for name, value in values.items()]
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run, params=params[start : start + _MOST_PARAMS])


command = partial(run_command, main, "log", USAGE, target=False)

if __name__ == "__main__":
    sys.exit(command())
