"""A run that is told to MLflow, read back by its own client."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hwnas.__main__ import main
from hwnas.front.rows import load_front
from hwnas.system.run_folder import RunFolder

pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in (
    "The ``noload`` loader strategy is deprecated", "For backward compatibility, 'str' dtypes")]  # MLflow's own
SECRET = "geheim"


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A copy of a finished run, whose study lay in a database with a password."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(shutil.copytree(finished, tmp_path / "run"))
    config = folder.read_config()
    folder.write_config({**config, "storage": f"postgresql+psycopg://me:{SECRET}@host/studies"})
    return folder


def log(*more: str) -> int:
    return main(["log", "-q", "run=run", "uri=books", *more])


def client_of(file: str = "books/mlflow.db") -> Any:
    """MLflow's own client; it keeps stores by their address, so that addresses are absolute."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{Path(file).absolute()}"
    return MlflowClient(uri, registry_uri=uri)


def runs_in(client: Any, experiment: str = "hwnas") -> tuple[Any, dict[str, Any]]:
    """The run, and those below it by id of their network."""
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    whole, = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    below = {run.data.params["id"]: run for run in runs if run is not whole}
    assert {run.data.tags["mlflow.parentRunId"] for run in below.values()} == {whole.info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    return whole, below


def files_of(client: Any, run: Any, folder: str | None = None) -> set[str]:
    return {Path(file.path).name for file in client.list_artifacts(run.info.run_id, folder) if not file.is_dir}


def test_mlflow_holds_the_run_and_each_network_but_no_file_that_was_not_made(run: RunFolder, tmp_path: Path) -> None:
    assert log() == 0
    client = client_of()
    whole, below = runs_in(client)
    rows = {row.id: row for row in load_front(run) if row.verified}
    assert set(below) == set(rows)
    for id, each in below.items():
        assert each.data.metrics["top1_test"] == rows[id].top1_test
        assert each.data.metrics["latency_ms"] == rows[id].latency_ms
        assert files_of(client, each, "model") == {"model.onnx", "model_int8.onnx", "card.md"}
        assert Path(client.download_artifacts(each.info.run_id, "model/model_int8.onnx")).read_bytes() == \
            run.model(id).int8.read_bytes()
    assert files_of(client, whole) == {"front.csv", "front.png", "report.html"}
    assert whole.data.params["finalists.recipe.max_steps"] == "4"
    assert whole.data.params["target.name"] == "xeon_int8"
    everything = b"".join(path.read_bytes() for path in sorted(Path("books").rglob("*")) if path.is_file())
    assert SECRET.encode() not in everything
    (tmp_path / "private").write_text(SECRET)
    id = min(rows)
    run.model(id).int8.unlink()
    run.model(id).int8.symlink_to(tmp_path / "private")
    assert log("experiment=other") == 0
    assert files_of(client, runs_in(client, "other")[1][id], "model") == {"model.onnx", "card.md"}


def test_a_run_that_cannot_be_written_whole_leaves_nothing(run: RunFolder, monkeypatch, capsys) -> None:
    from mlflow import MlflowClient

    def fail(*values: object) -> None:
        if values[3:] == ("model",):
            raise OSError("no room for models")

    monkeypatch.setattr(MlflowClient, "log_artifact", fail)
    assert log() == 2
    assert "no room for models" in capsys.readouterr().err
    client = client_of()
    assert not client.search_runs([client.get_experiment_by_name("hwnas").experiment_id])


@pytest.mark.parametrize(("more", "said"), [
    (["uri=nothing://me:geheim@there"], "nothing://"),
    (["run=none"], "none")])
def test_what_cannot_be_logged_is_one_line(more: list[str], said: str, run: RunFolder, capsys) -> None:
    assert log(*more) == 2
    line, = capsys.readouterr().err.splitlines()
    assert said in line
    assert SECRET not in line
