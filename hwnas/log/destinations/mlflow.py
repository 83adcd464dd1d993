"""MLflow: the run as a run of an experiment, each verified network as a run below it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hwnas.errors import ConfigError, TargetError, UserError
from hwnas.log.folder import make_folder
from hwnas.log.record import NetworkRecord, Record
from hwnas.runtimes.runtime import one_line

Item = TypeVar("Item")
_RUN, _CONTENT, _PARENT = "hwnas.run", "hwnas.content", "mlflow.parentRunId"
_MOST_PARAMS, _MOST_METRICS, _MOST_TEXT = 100, 1000, 6000  # of one call, and letters of a value
_SQLITE = "sqlite:///"
_FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"
_SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR",
             "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # seven take minutes where no server answers
             "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


def send(record: Record, uri: str, experiment: str) -> str:
    """Write a run, or what of it has changed.

    The new runs are whole before those that they replace are deleted. Where anything fails, the new ones are deleted.

    Args:
        record: The run.
        uri: A folder, in which lie SQLite's `mlflow.db` and `artifacts`, or an address that MLflow knows.
        experiment: Name of the experiment, which is made where there is none.

    Returns:
        What was done, in a sentence.

    Raises:
        ConfigError: MLflow takes no such place.
        TargetError: MLflow is not installed.
        UserError: The place cannot be written.
    """
    mlflow = _import_mlflow()
    store, artifacts = _store(uri)
    try:
        client = mlflow.MlflowClient(tracking_uri=store, registry_uri=store)
        held = client.get_experiment_by_name(experiment)
        number = held.experiment_id if held else client.create_experiment(experiment, artifact_location=artifacts)
        earlier = client.search_runs([number], f"tags.`{_RUN}` = '{record.id}'")
        for run in earlier:
            if run.data.tags.get(_CONTENT) == record.content and run.info.status == "FINISHED":
                return f"logged already, and unchanged: run {run.info.run_id} of experiment {experiment} in {uri}"
        made = _write(client, mlflow.entities, number, record)
        for run in earlier:
            client.delete_run(run.info.run_id)
    except Exception as error:  # stores, servers and drivers of databases share no base class
        if _FILES_ALLOWED in str(error):
            raise ConfigError(f"{uri}: MLflow writes no plain files any more unless {_FILES_ALLOWED}=true is set. Give "
                              "uri=FOLDER, for SQLite there.") from None
        raise UserError(f"cannot log to {uri}: {one_line(error).rstrip('.')}. Mend that, or choose another "
                        "uri=PLACE.") from None
    return f"{'replaced' if earlier else 'logged'}: run {made} of experiment {experiment} in {uri}"


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
    """The address of the store, and where its artefacts lie; None: the store knows."""
    if not uri.startswith(_SQLITE) and re.match(r"[\w+.-]+:", uri):
        return uri, None
    if "?" in uri and not uri.startswith(_SQLITE):
        raise ConfigError(f"{uri}: what follows ? in a database's address is no part of its file. Choose another "
                          "uri=FOLDER.")
    file = Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else Path(uri, "mlflow.db")
    folder = make_folder(file.parent)
    return f"{_SQLITE}{folder / file.name}", (folder / "artifacts").as_uri()


def _write(client: Any, entities: Any, experiment: str, record: Record) -> str:
    """The id of the new run, once all of it is there."""
    made: list[str] = []
    times: list[int | None] = [round(1e3 * step.time_s) for step in record.steps if step.time_s]
    times = times or [None]

    def begin(name: str, tags: Mapping[str, str]) -> str:
        made.append(client.create_run(experiment, times[0], {_RUN: record.id, **tags}, name).info.run_id)
        return made[-1]

    try:
        run = begin(record.name, {_CONTENT: record.content, "mlflow.note.content": record.summary})
        _log_params(client, entities, run, record.options)
        _log_metrics(client, entities, run, [(name, value, times[-1] or 0, 0) for name, value in record.metrics.items()]
                     + [(f"trial/{name}", value, round(1e3 * step.time_s), step.number) for step in record.steps
                        for name, value in step.values.items()])
        client.log_table(run, {name: [row[name] for row in record.rows] for name in record.rows[0]}, "front_table.json")
        for path in record.files:
            client.log_artifact(run, str(path))
        for network in record.networks:
            _write_network(client, entities, begin(network.name, {_PARENT: run}), network, times[-1])
        client.set_terminated(run, "FINISHED", times[-1])  # the last of all: what is FINISHED is whole
    except BaseException:  # Ctrl-C too
        for each in reversed(made):
            with suppress(Exception):
                client.delete_run(each)
        raise
    return made[0]


def _write_network(client: Any, entities: Any, run: str, network: NetworkRecord, time_ms: int | None) -> None:
    _log_params(client, entities, run, network.facts)
    _log_metrics(client, entities, run, [(name, value, time_ms or 0, 0) for name, value in network.metrics.items()])
    for path in network.files:
        client.log_artifact(run, str(path), "model")
    client.set_terminated(run, "FINISHED", time_ms)


def _log_params(client: Any, entities: Any, run: str, values: Mapping[str, str]) -> None:
    named = {re.sub(r"[^\w.-]", "_", name)[:250]: value[:_MOST_TEXT] for name, value in values.items()}
    for part in _parts([*named.items()], _MOST_PARAMS):
        client.log_batch(run, params=[entities.Param(*pair) for pair in part])


def _log_metrics(client: Any, entities: Any, run: str, values: Sequence[tuple[str, float, int, int]]) -> None:
    for part in _parts(values, _MOST_METRICS):
        client.log_batch(run, metrics=[entities.Metric(*each) for each in part])


def _parts(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), most):
        yield items[start:start + most]
