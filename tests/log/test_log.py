"""A run that is told to MLflow and TensorBoard, read back by their own readers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hwnas.__main__ import main
from hwnas.front.rows import load_front
from hwnas.stats import hypervolume_2d
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


def log(to: str, *more: str) -> int:
    return main(["log", "-q", "run=run", f"to={to}", *more])


def client_of(file: str = "books/mlflow.db") -> Any:
    """MLflow's own client; it keeps stores by their address, so that addresses are absolute."""
    from mlflow import MlflowClient

    uri = file if file.startswith("file:") else f"sqlite:///{Path(file).absolute()}"
    return MlflowClient(uri, registry_uri=uri)


def runs_in(client: Any, experiment: str = "hwnas") -> tuple[Any, dict[str, Any]]:
    """The run, and those below it by id of their network."""
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    whole = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    below = {run.data.params["id"]: run for run in runs if run not in whole}
    assert len(whole) == 1
    assert {run.data.tags["mlflow.parentRunId"] for run in below.values()} == {whole[0].info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    return whole[0], below


def files_of(client: Any, run: Any, folder: str | None = None) -> set[str]:
    return {Path(file.path).name for file in client.list_artifacts(run.info.run_id, folder) if not file.is_dir}


def written(*folders: Path) -> bytes:
    """All that lies in these folders, and what is not packed in it."""
    return b"".join(path.read_bytes() for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize(("uri", "file"), [
    ("books ü=1", "books ü=1/mlflow.db"), ("sqlite:///books/own.db", "books/own.db"),
    ("file:HERE/books", "file:HERE/books")])
def test_mlflow_holds_the_run_and_each_network(uri: str, file: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert log("mlflow", f"uri={uri.replace('HERE', str(Path.cwd()))}") == 0
    assert "logged: run" in capsys.readouterr().err
    client = client_of(file.replace("HERE", str(Path.cwd())))
    whole, below = runs_in(client)
    rows = {row.id: row for row in load_front(run) if row.verified}
    assert set(below) == set(rows)
    for id, each in below.items():
        assert each.data.metrics["top1_test"] == rows[id].top1_test
        assert each.data.metrics["latency_ms_p50"] == rows[id].latency_ms_p50
        int8 = run.model(id).int8
        assert each.data.metrics["size_mb"] == int8.stat().st_size / 1e6
        assert files_of(client, each, "model") == {"model.onnx", "model_int8.onnx", "card.md"}
        assert Path(client.download_artifacts(each.info.run_id, "model/model_int8.onnx")).read_bytes() == \
            int8.read_bytes()
    assert files_of(client, whole) == {"front.csv", "front.png", "report.html", "front_table.json"}
    assert whole.data.params["finalists.recipe.max_steps"] == "4"
    assert whole.data.params["target.name"] == "xeon_int8"
    assert whole.data.tags["mlflow.note.content"].startswith("Deploy ")
    table = json.loads(Path(client.download_artifacts(whole.info.run_id, "front_table.json")).read_text())
    assert [line[table["columns"].index("id")] for line in table["data"]] == [row.id for row in load_front(run)]


def test_metrics_are_those_of_the_run_and_of_each_trial(run: RunFolder) -> None:
    assert log("mlflow", "uri=books") == 0
    client = client_of()
    whole, _ = runs_in(client)
    trials, rows = run.read_trials(), load_front(run)
    for name in ("top1_proxy", "latency_ms_predicted"):
        history = client.get_metric_history(whole.info.run_id, f"trial/{name}")
        assert [(each.step, each.value) for each in history] == [(trial["number"], trial[name]) for trial in trials]
    assert whole.data.metrics["n_trials"] == len(trials)
    assert whole.data.metrics["top1_test_best"] == max(row.top1_test or 0.0 for row in rows)
    front = [row for row in rows if row.on_front]
    reference_ms = whole.data.metrics["hypervolume_reference_ms"]
    assert reference_ms == max(*(row.latency_ms for row in rows), *(trial["latency_ms_predicted"] for trial in trials))
    area = hypervolume_2d([row.top1_test for row in front], [row.latency_ms for row in front], (0.0, reference_ms))
    assert whole.data.metrics["hypervolume_top1_ms_verified"] == pytest.approx(area)


def test_tensorboard_shows_trials_options_front_and_picture(run: RunFolder) -> None:
    assert log("tensorboard", "uri=board") == 0
    [folder] = Path("board/hwnas").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    trials = run.read_trials()
    for name in ("top1_proxy", "latency_ms_predicted"):
        assert [(each.step, each.value) for each in events.Scalars(f"trial/{name}")] == [
            (trial["number"], pytest.approx(trial[name])) for trial in trials]
    areas = [each.value for each in events.Scalars("trial/hypervolume_top1_ms")]
    assert areas == sorted(areas)
    assert areas[-1] > 0
    assert events.Images("front")[0].encoded_image_string == run.front_png.read_bytes()
    options, front = (events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
                      for name in ("options", "front"))
    assert "| target.name | xeon_int8 |" in options
    assert all(f"| {row.id} |" in front for row in load_front(run))


def count_mlflow() -> list[str]:
    whole, below = runs_in(client_of())
    return [run.info.run_id for run in (whole, *below.values())]


def count_tensorboard() -> list[str]:
    assert not [path for path in Path("books").rglob("*") if path.name[0] == "."]
    return [path.name for path in Path("books").rglob("*.tfevents.*")]


def change(run: RunFolder) -> None:
    """Change something of a network that stands in every front: a search may leave out others for want of time."""
    row = load_front(run)[0]
    run.front_csv.write_text(run.front_csv.read_text().replace(f"{row.id},{row.name}", f"{row.id},changed", 1))


@pytest.mark.parametrize(("to", "count"), [("mlflow", count_mlflow), ("tensorboard", count_tensorboard)])
def test_a_run_is_not_there_twice(to: str, count: Callable[[], list[str]], run: RunFolder,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert log(to, "uri=books") == 0
    before = count()
    shutil.copytree(run.path, "copy")  # the same run under another name
    assert main(["log", "-q", "run=copy", f"to={to}", "uri=books"]) == 0
    assert "logged already, and unchanged" in capsys.readouterr().err
    assert count() == before
    change(run)  # as after a verification
    assert log(to, "uri=books") == 0
    assert "replaced: " in capsys.readouterr().err
    after = count()
    assert len(after) == len(before)
    assert not set(after) & set(before)


def test_mlflow_keeps_the_earlier_runs_where_the_new_fail(run: RunFolder, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow import MlflowClient

    assert log("mlflow", "uri=books") == 0
    before = count_mlflow()
    change(run)

    def fail(*values: object) -> None:
        if values[3:] == ("model",):
            raise OSError("no room for models")

    monkeypatch.setattr(MlflowClient, "log_artifact", fail)
    capsys.readouterr()
    assert log("mlflow", "uri=books") == 2
    assert capsys.readouterr().err.splitlines() == [
        "UserError: cannot log to books: no room for models. Mend that, or choose another uri=PLACE."]
    assert count_mlflow() == before


@pytest.mark.parametrize("to", ["mlflow", "tensorboard"])
def test_no_password_is_written(to: str, run: RunFolder) -> None:
    assert log(to, "uri=books") == 0
    everything = written(Path("books"))
    assert b"postgresql+psycopg://me:***@host/studies" in everything
    assert SECRET.encode() not in everything


def test_a_file_that_is_not_the_one_that_was_made_is_left_out(run: RunFolder, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *_ = load_front(run)
    (tmp_path / "private").write_text(SECRET)
    run.model(first.id).int8.unlink()
    run.model(first.id).int8.symlink_to(tmp_path / "private")
    run.model(second.id).onnx.write_bytes(b"another")
    run.report.unlink()
    run.report.symlink_to(tmp_path / "private")
    assert log("mlflow", "uri=books") == 0
    said = capsys.readouterr().err
    assert said.count("left out: ") == 2
    assert "hwnas report" in said
    client = client_of()
    whole, below = runs_in(client)
    assert files_of(client, below[first.id], "model") == {"model.onnx", "card.md"}
    assert files_of(client, below[second.id], "model") == {"model_int8.onnx", "card.md"}
    assert "report.html" not in files_of(client, whole)
    assert SECRET.encode() not in written(Path("books"))


@pytest.mark.parametrize(("to", "module"), [("mlflow", "mlflow"), ("tensorboard", "tensorboard")])
def test_a_missing_extra_is_one_line_with_its_command(to: str, module: str, run: RunFolder) -> None:
    script = (f"import sys; sys.modules['{module}'] = None\n"
              "from hwnas.__main__ import main; sys.exit(main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", script, "log", "run=run", f"to={to}"], capture_output=True, text=True,
                          timeout=300, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.endswith(f"pip install 'hwnas[{to}]'\n")
    assert not Path("runs").exists()


def test_neither_is_imported_before_it_is_asked_for() -> None:
    script = ("import sys, hwnas, hwnas.log.__main__\n"
              "sys.exit(' '.join({'mlflow', 'tensorboard', 'torch'} & {*sys.modules}))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == "\n"


def unverify(run: RunFolder) -> None:
    run.front_csv.write_text("\n".join(line.replace(",true,", ",false,") for line in
                                       run.front_csv.read_text().splitlines()) + "\n")


@pytest.mark.parametrize(("spoil", "options", "said"), [
    (None, ["to=null"], "ConfigError: which run, and to what"),
    (None, ["to=wandb"], "UnknownName: unknown to 'wandb'"),
    (None, ["run=nowhere"], "StudyError: nowhere is not a run folder"),
    (lambda run: run.front_csv.unlink(), [], "StudyError: run has no front.csv yet"),
    (unverify, [], "StudyError: run: no network is verified"),
    (lambda run: run.environment.unlink(), [], "environment.json"),
    (None, ["uri=taken"], "UserError: cannot write"),
    (None, ["uri=run/books"], "the folder of other work"),
    (None, ["uri=what?"], "ConfigError: what?: what follows ?"),
    (None, ["uri=file:/books"], "MLFLOW_ALLOW_FILE_STORE=true"),
    (None, ["uri=nothing://me:geheim@there"], "UserError: cannot log to nothing://me:***@there")])
def test_what_cannot_be_logged_is_one_line(spoil: Callable[[RunFolder], None] | None, options: list[str], said: str,
                                           run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    if spoil is not None:
        spoil(run)
    Path("taken").write_text("")
    assert log("mlflow", "uri=books", *options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert SECRET not in line
    assert not Path("books").exists()


def test_what_tensorboard_cannot_be_told_is_one_line(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("")
    assert log("tensorboard", "uri=taken") == 2
    assert capsys.readouterr().err.startswith("UserError: cannot write")
    run.front_png.write_bytes(b"no picture")
    assert log("tensorboard", "uri=board") == 2
    assert "is no PNG file" in capsys.readouterr().err
    assert not [*Path("board/hwnas").iterdir()]
