"""The commands as Python functions, with keywords for their options, and results as objects.

    import hwnas
    run = hwnas.search("xeon_int8", (x, y), minutes=5, out="runs/parts", seed=0)
    run.to_frame()[["id", "top1_test", "latency_ms", "on_front"]]
    run.best(latency_ms=0.3).session().logits(images)

Checks, folders and resuming are the same as in the commands. Errors are `hwnas.HwnasError`s.
"""

from __future__ import annotations

import base64
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from hwnas.cli.command import COMMANDS, GROUPS, compose, names_in, option_keys, reader_of
from hwnas.cli.options import flat_options
from hwnas.cli.progress import open_console
from hwnas.data.objects import list_sources, store_objects
from hwnas.errors import ConfigError, DataError, StudyError, WorkerError, did_you_mean, kind_of
from hwnas.front.comparison import DEPLOY
from hwnas.front.pairs import load_pairs
from hwnas.front.picture import front_figure
from hwnas.front.report import read_report
from hwnas.front.rows import choose_row, column_of, column_types, load_front, metric_of, target_as_timed
from hwnas.lazy import nn
from hwnas.networks.given import register_module
from hwnas.networks.network import Shape, load_weights, read_network
from hwnas.pictures import figure_bytes
from hwnas.runtimes.child import probe_model
from hwnas.runtimes.classifier import Cascade, Classifier, ModelFile
from hwnas.runtimes.runtime import deployed_of, load_runtime
from hwnas.study.objective import COSTS
from hwnas.system.run_folder import TRIALS, Manifest, RunFolder, settle_home
from hwnas.system.tables import read_frame, table_text
from hwnas.target import Target
from hwnas.tasks.task import load_task

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from matplotlib.figure import Figure

    from hwnas.benchmark.report import Benchmark
    from hwnas.front.pairs import Pair
    from hwnas.front.rows import FrontRow
    from hwnas.latency.table import LatencyTable
    from hwnas.runtimes.runtime import Compiled
    from hwnas.tasks.task import Answer

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _checks_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a call with wrong arguments raise a ConfigError that names them, in place of Python's TypeError."""
    signature, name = inspect.signature(function), function.__name__
    own_names = [each for each in signature.parameters if each != "options"]

    @functools.wraps(function)
    def call(*values: _P.args, **arguments: _P.kwargs) -> _R:
        unknown = [key for key in arguments if key not in own_names]
        try:
            signature.bind(*values, **arguments)
        except TypeError as error:
            hint = "".join(did_you_mean(key, own_names, 0.7) for key in unknown)
            raise ConfigError(f"hwnas.{name}: {error}.{hint} It takes {', '.join(own_names)}.") from None
        # A function takes the command's options too. A name that only resembles an argument or an option is refused.
        heads = {key.rstrip("=").partition(".")[0] for key in option_keys(name)} if name in COMMANDS and unknown else {}
        for key in unknown:
            head = key.partition(".")[0]
            if head not in heads and (near := did_you_mean(head, [*own_names, *heads], 0.7)):
                raise ConfigError(f"hwnas.{name} has no argument {key!r}.{near}")
        return function(*values, **arguments)

    return call


@_checks_arguments
def search(target: str, data: Any = "digit_scenes", *, minutes: float | None = None,
           out: str | os.PathLike[str] | None = None, quiet: bool = False, **options: Any) -> Run:
    """Search, train, quantise and verify networks, as `hwnas search` does.

    Args:
        target: A name of conf/target, such as `xeon_int8`.
        data: A name of conf/dataset, or the path of a folder of images, an .npz or a .tar file. Or objects: a pair
            (images, labels); two pairs (train, test), as Keras returns; three (train, validation, test). Images are
            arrays or tensors [n, h, w], [n, h, w, c] or [n, c, h, w], or lists of paths or pictures. Arrays are uint8
            or floats from 0 to 1. Labels: see `hwnas.data.forms.number_labels`. Data sets of torch and Hugging Face,
            and frames with a column of paths and one of labels, are taken as they are.
        minutes: The time limit for everything, `budget.minutes`; None: until `n_trials` networks are tried.
        out: The run folder; None: a new one below `runs/`. A search that is already there goes on.
        quiet: Print nothing but results.
        **options: The options of the command: `n_trials=24`, `budget={"latency_ms": 2.5}` or
            `**{"budget.latency_ms": 2.5}`. `around` may be a torch module, too: see `register_module`.

    Returns:
        The finished run.

    Raises:
        HwnasError: The error that the command would print, in its own class. It is `Unfinished` if networks could not
            be verified: `load(out)` has the others.
    """
    from hwnas.front.verification import check_verified
    from hwnas.search.road import search as go
    from hwnas.study.study import storage_of

    if not isinstance(options.get("around", ""), str | list | tuple | None):
        options["around"] = register_module(options["around"])
    console = open_console(quiet)
    settle_home(None if out is None else _path("out", out), bool(options.get("overwrite")), console.note)
    named_options = {"target": target, **_dataset_options(data), **({} if out is None else {"out": _path("out", out)}),
                     **({} if minutes is None else {"budget.minutes": minutes})}
    result = go(_compose("search", named_options, options), console)
    if result.at_hand:
        check_verified(result.rows, result.run)
    if result.early:
        raise WorkerError(result.early)
    return Run(result.run, storage_of(result.study).url)


@_checks_arguments
def load(folder: str | os.PathLike[str], storage: str | None = None) -> Run:
    """Return a run that `search` or the command made.

    Args:
        folder: The run folder, which need not be writable.
        storage: The URL of its study, if the study is outside the folder.

    Returns:
        The run, read only.

    Raises:
        StudyError: The folder is no run folder.
    """
    return Run(RunFolder.open(_path("folder", folder), write=False), storage)


@_checks_arguments
def benchmark(model: str | os.PathLike[str], target: str, *, quiet: bool = True, **options: Any) -> Benchmark:
    """Time one network on this host, as `hwnas benchmark` does.

    Args:
        model: The path of an ONNX file, or `timm:NAME`.
        target: A name of conf/target.
        quiet: Print nothing.
        **options: The options of the command.

    Returns:
        Latencies in ms with their intervals. If the machine was too restless, `invalid` says so.
    """
    from hwnas.benchmark.__main__ import benchmark as go

    config = _compose("benchmark", {"target": target, "model": _path("model", model)}, options)
    return go(config, open_console(quiet))


@_checks_arguments
def profile(target: str, space: str, *, minutes: float | None = None, quiet: bool = True, **options: Any
            ) -> LatencyTable:
    """Measure this host for a target and a space, as `hwnas profile` does.

    Args:
        target: A name of conf/target.
        space: A name of search_spaces/, or the path of a space's YAML file.
        minutes: The time limit in minutes; None: ten.
        quiet: Print nothing.
        **options: The options of the command.

    Returns:
        The table, which is stored in the user's folder too.
    """
    from hwnas.latency.deployment import profile as go

    named_options = {"target": target, "space": space, **({} if minutes is None else {"budget": {"minutes": minutes}})}
    return go(_compose("profile", named_options, options), open_console(quiet))


@dataclass(frozen=True)
class Run:
    """The content of a run folder: its tables, picture, study and networks."""

    folder: RunFolder
    storage: str | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        rows = load_front(self.folder) if self.folder.front_csv.is_file() else []
        return f"Run({str(self.path)!r}, {sum(row.verified for row in rows)} of {len(rows)} networks verified)"

    def _repr_html_(self) -> str:
        """Return the front as picture and table, and the network to deploy, as HTML for notebooks."""
        if not self.folder.front_csv.is_file():
            return f"<p>{escape(repr(self))}</p>"
        picture = base64.b64encode(figure_bytes(self.plot(), "png")).decode()
        score = column_of("top1_test", self.models[0].row.metric)
        rows = self.front[["id", "name", score, "latency_ms", "latency_ms_low", "latency_ms_high", "precision"]]
        advice = [str(item.get("sentence", "")) for item in self.folder.read_comparisons()
                  if item.get("verdict") == DEPLOY]
        return (f'<img alt="front" style="max-width:100%" src="data:image/png;base64,{picture}">'
                f"{rows.to_html(index=False, float_format='{:.4g}'.format)}<p>{escape(' '.join(advice))}</p>")

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def front(self) -> pd.DataFrame:
        """The verified networks that no other is faster and more accurate than, fastest first."""
        rows = self.to_frame()
        return rows[rows["on_front"].fillna(False) & rows["verified"].fillna(False)].sort_values("latency_ms")

    @property
    def report(self) -> Path:
        """The path of the page with all results of the run."""
        return self.folder.report

    def to_frame(self, table: Literal["front", "trials"] = "front") -> pd.DataFrame:
        """Return a table of the run.

        Args:
            table: `front` for front.csv, `trials` for trials.csv.

        Returns:
            A row for each network, a type for each column; an unknown value is NA.

        Raises:
            ConfigError: `table` is another name.
            StudyError: The file is not there yet, or cannot be read.
        """
        if table not in ("front", "trials"):
            raise ConfigError(f"to_frame takes 'front' or 'trials', got {table!r}.")
        path = self.folder.front_csv if table == "front" else self.folder.trials_csv
        if not path.is_file():
            raise StudyError(f"{path}: not there yet. Finish the search first: the same call goes on.")
        columns: dict[str, Any] = {**{cost.predicted: float | None for cost in COSTS.values()}, **TRIALS}
        try:
            text = table_text(path)
            if table == "front":
                columns = column_types(metric_of(text.partition("\n")[0].rstrip("\r").split(",")))
            return read_frame(text, columns)
        except (OSError, ValueError) as error:
            raise StudyError(f"cannot read {path}: {error}") from None

    def plot(self) -> Figure:
        """Return the report's picture as a matplotlib figure."""
        data = read_report(self.folder)
        return front_figure(data.rows, data.info, data.pairs)

    @cached_property
    def study(self) -> optuna.Study:
        """The Optuna study, for reading."""
        from hwnas.study.study import load_study, study_url

        return load_study(study_url(self.path, self.folder.read_config().get("storage"), self.storage))

    @property
    def models(self) -> list[Model]:
        """Finalists and baselines, in the order of front.csv."""
        return [Model(self.folder, row) for row in load_front(self.folder)]

    def recommended(self) -> Model:
        """Return the network that the report recommends for deployment.

        Returns:
            The fastest network that keeps the cap and is at most half a point less accurate than the most accurate
            one, with 95 % confidence.

        Raises:
            StudyError: No finalist is verified and keeps the cap.
        """
        finalists = {item.get("verdict"): str(item.get("finalist")) for item in self.folder.read_comparisons()}
        for model in self.models:
            if model.id == finalists.get(DEPLOY):
                return model
        raise StudyError(f"{self.path}: its report recommends no network: no finalist is verified and keeps the cap. "
                         f"best() takes any; hwnas verify run={self.path} verifies them anew.")

    @property
    def pairs(self) -> list[ModelPair]:
        """The pairs of networks that pay, as `pairs.csv` has them: from fast to slow."""
        rows = load_front(self.folder)
        return [ModelPair(pair, *(Model(self.folder, choose_row(rows, str(self.path), id=id))
                                  for id in (pair.fast, pair.accurate))) for pair in load_pairs(self.folder)]

    @overload
    def best(self, latency_ms: float | None = None) -> Model:
        """Return one network."""

    @overload
    def best(self, latency_ms: float | None = None, *, mean_latency_ms: float) -> Model | ModelPair:
        """Return one network, or a pair."""

    def best(self, latency_ms: float | None = None, mean_latency_ms: float | None = None) -> Model | ModelPair:
        """Return the most accurate verified network, baselines included.

        Args:
            latency_ms: The limit of the measured latency of one batch, in ms; None: any latency.
            mean_latency_ms: The limit of the mean latency, in ms. The result may then be a pair of networks. The worst
                case of the pair, both latencies, is within `latency_ms`.

        Raises:
            BudgetError: No network is so fast; the message names the fastest.
            ConfigError: A limit is no number.
        """
        for name, limit in (("latency_ms", latency_ms), ("mean_latency_ms", mean_latency_ms)):
            if limit is not None and (not isinstance(limit, Real) or math.isnan(limit)):
                raise ConfigError(f"{name} must be a number of ms, got {limit!r}.")
        # A single network must keep both limits. A pair keeps the mean, and its worst case the other limit.
        limits = [each for each in (latency_ms, mean_latency_ms) if each is not None]
        row = choose_row(load_front(self.folder), str(self.path), latency_ms=min(limits, default=None))
        pairs = [] if mean_latency_ms is None else [
            pair for pair in self.pairs if pair.latency_ms <= mean_latency_ms
            and pair.top1_test > (row.top1_test or 0.0)
            and (latency_ms is None or pair.facts.latency_ms_worst <= latency_ms)]
        return max(pairs, key=lambda pair: pair.top1_test, default=Model(self.folder, row))


@dataclass(frozen=True)
class Model:
    """A network of a run, with its row of front.csv."""

    folder: RunFolder
    row: FrontRow

    def __repr__(self) -> str:
        top1 = "not scored" if self.row.top1_test is None else f"{self.row.metric} {self.row.top1_test:.2%}"
        latency = "not timed" if self.row.latency_ms is None else f"{self.row.latency_ms:.3g} ms"
        return f"Model({self.id!r}, {top1}, {latency}, {self.row.target or 'no target'})"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return tuple(map(str, self.folder.read_environment()["dataset"]["class_names"]))

    @property
    def id(self) -> str:
        """The name of its folder in `models/`."""
        return self.row.id

    @property
    def latency_ms(self) -> float:
        """The measured latency of one batch in ms; infinite if it was not measured."""
        return float("inf") if self.row.latency_ms is None else self.row.latency_ms

    @property
    def top1_test(self) -> float:
        """The top-1 of the deployed file on the test images, 0 to 1; NaN if it was not scored."""
        return float("nan") if self.row.top1_test is None else self.row.top1_test

    @property
    def card(self) -> str:
        """The text of `card.md`. Raises StudyError if it cannot be read."""
        path = self.folder.model(self.id).card
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise StudyError(f"cannot read {path}: {error.strerror}. To have it made again: hwnas verify "
                             f"run={self.folder.path}") from None

    @property
    def file(self) -> Path:
        """The file that the target runs: ONNX, or its runtime's own format."""
        return deployed_of(self.folder.model(self.id).deployed(self._target.precision), self._target.runtime)

    def session(self) -> Compiled:
        """Return the deployed file, compiled in the target's runtime.

        A child process with limited memory opens it first, because a run folder may come from anywhere.

        Returns:
            An object with `logits(images)`: float32 [n, classes] for images float32 [n, c, h, w], prepared as the card
            says.

        Raises:
            StudyError: The file is not the one that was made.
        """
        self._check(self.file)
        probe_model(self.file, self._target)
        return load_runtime(self._target.runtime).compile(self.file, self._target)

    def predict(self, images: Any) -> list[Any]:
        """Answer images by the deployed file in the target's runtime.

        Args:
            images: A path, a folder, a pattern such as `photos/*.jpg`, a PIL image or an array uint8, [h, w, 3] (RGB)
                or [h, w] (grey). A list of any of these, or an array [n, h, w, c], is several images. They may have any
                size, and are prepared as the card says.

        Returns:
            A list, also for one image, with each image's class and confidence from 0 to 1. A folder's images are in
            the order of their paths. Of a detector, the objects in each image: classes, confidences and boxes.

        Raises:
            DataError: An image cannot be decoded.
            StudyError: The file is not the one that was made.
        """
        sources = list_sources(images)
        answers = [each for each in self._classifier.answers(sources) if each is not None]
        return [each for each, in answers] if load_task(self._classifier.file.task).is_sure else answers

    @cached_property
    def _classifier(self) -> Classifier:
        self._check(self.file)
        return Classifier.compile(ModelFile.read(self.file, self._target), self._target)

    def torch(self) -> nn.Module:
        """Return the trained network in torch, in fp32 and evaluation mode.

        Raises:
            StudyError: A file of it is missing, or is not the one that was made.
        """
        folder, data = self.folder.model(self.id), self.folder.read_environment()["dataset"]
        classes = len(data["class_names"])
        network = read_network(folder, Shape(data["channels"], data["image_size"], classes))
        if network is None:
            raise StudyError(f"{folder.path}: no architecture.yaml or baseline.yaml. Search again, with the same "
                             "options.")
        self._check(folder.weights, folder.path / network.file)
        model = network.build()
        load_weights(model, folder.weights, str(folder.weights), classes)
        return model.eval()

    def _check(self, *paths: Path) -> None:
        """Raise StudyError unless these files of `models/<id>/` are the ones that were made."""
        folder = self.folder.model(self.id)
        manifest = Manifest.find(folder.path)
        if manifest is None:
            raise StudyError(f"{folder.path} has no {folder.manifest.name}, so that its files cannot be checked. "
                             "Search again, with the same options: they are then made again.")
        if faults := manifest.faults(*paths):
            raise StudyError(f"{folder.path}: {'; '.join(faults)}. Search again, with the same options: they are then "
                             "made again.")

    @property
    def _target(self) -> Target:
        return target_as_timed(self.folder.read_environment()["target"], self.row)


@dataclass(frozen=True)
class ModelPair:
    """A pair of networks of a run, with its line of pairs.csv. The second answers if the first is not sure."""

    facts: Pair
    fast: Model
    accurate: Model

    def __repr__(self) -> str:
        return f"ModelPair({self.id!r}, top-1 {self.top1_test:.2%}, {self.latency_ms:.3g} ms on average)"

    @property
    def id(self) -> str:
        """The ids of both."""
        return self.facts.id

    @property
    def latency_ms(self) -> float:
        """The mean latency of one batch in ms: arithmetic from two measured latencies, see `facts` for the rest."""
        return self.facts.latency_ms_mean

    @property
    def top1_test(self) -> float:
        """The top-1 of the pair on the test images, 0 to 1."""
        return self.facts.top1_test

    def predict(self, images: Any) -> list[Answer]:
        """Classify images by the pair, see `Model.predict`."""
        sources = list_sources(images)
        cascade = Cascade(self.fast._classifier, self.accurate._classifier, self.facts.threshold)
        return [answer[0] for answer in cascade.answers(sources) if answer is not None]


def _compose(command: str, given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return the configuration of a command with `given` and `options`, checked like the command's own."""
    if not isinstance(given["target"], str):
        raise ConfigError(f"target must be a name, such as 'xeon_int8', got {given['target']!r}. There are: "
                          f"{', '.join(names_in('target'))}.")
    pairs = [(key, value) for key, value in (*flat_options(given), *flat_options(options))
             if not isinstance(value, Mapping)]  # an empty section says nothing
    repeated_keys = sorted({key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1})
    if repeated_keys:
        also = " as data=" if repeated_keys[0].partition(".")[0] == "dataset" else ""
        raise ConfigError(f"{repeated_keys[0]} is given twice{', once as data=' if also else ''}. Give it once{also}.")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # like the commands, for their child processes
    os.environ["OMP_PROC_BIND"] = "false"
    chosen = [f"{key}={value}" for key, value in pairs if key in GROUPS]
    return compose(command, chosen, values={key: _plain(value, key) for key, value in pairs if key not in GROUPS})


def _path(name: str, value: object) -> str:
    """Return the text of a path. Raises ConfigError if the value of the argument `name` is no path."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} must be a path, got {value!r}.")
    return os.fspath(value)


def _plain(value: Any, key: str) -> Any:
    """Return an option's value as YAML has it, a NumPy number as a number. Raises ConfigError for another type."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(each, key) for each in value]
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str | bool | int | float | None):
        raise ConfigError(f"{key} must be text, a number, True, False, None or a list of these, got "
                          f"{kind_of(value)}.")
    return value


def _dataset_options(data: Any) -> dict[str, Any]:
    """Return the options that choose `data`; a data set of objects is stored below the user's folder."""
    if isinstance(data, str) and data.partition(":")[0] in names_in("dataset"):
        if Path(data).is_dir():
            raise DataError(f"data={data!r} is a data set, and a folder here. Write './{data}' for the folder, or run "
                            "this in another one.")
        return {"dataset": data}
    if not isinstance(data, str | os.PathLike):
        return {"dataset": "arrays", "dataset.root": str(store_objects(data))}
    path = Path(data).expanduser()
    if not path.exists():
        names = names_in("dataset")
        raise DataError(f"data={os.fspath(data)!r} is neither a data set ({', '.join(names)}) nor a folder or file "
                        f"that is there.{did_you_mean(os.fspath(data), names)} Write the path of a folder of images.")
    return {"dataset": reader_of(path), "dataset.root": str(path.resolve())}
