"""The folder of a command and the files of a run (docs/run-folder.md), each of which is written whole or not at all.

A model folder in it has a Manifest: the finished files, by size and SHA-256. It is written last, and whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Self

from hwnas import __version__
from hwnas.errors import StudyError, UserError
from hwnas.lazy import numpy as np
from hwnas.lazy import yaml
from hwnas.system.documents import Document, check_shape, load_yaml, read_json, yaml_text
from hwnas.system.paths import check_locks, find_home, hold, make_writable, unwritten, write_atomic
from hwnas.system.tables import finite, read_npz, read_table, table_csv, table_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = ".hwnas.json"
MARKER = Document("hwnas-folder", 1, "the mark of a folder", "Choose another out=FOLDER.")
_PASSING = re.compile(r"\.hwnas\.json.*|\..+\.lock|\..+\.[0-9a-f]{8}\.tmp")  # names that hwnas itself leaves
_PROBE_BYTES = 1 << 20  # a disk that cannot take 1 MiB cannot take a run
_HEAD = 4096  # bytes in which documents and pictures of hwnas name it


def settle_home(out: str | os.PathLike[str] | None, overwrite: bool, say: Callable[[str], None]) -> None:
    """Keep tables and caches in the folder `out` of a run if the user has no home folder, and say so.

    The run's folder is marked first, so that hwnas does not take it for a folder with strange files later.
    """
    if find_home() is None and out:
        os.environ["HWNAS_HOME"] = os.path.abspath(RunFolder.create(out, overwrite).path / "home")
        say(f"this user has no home folder: latency tables and caches are kept in {os.environ['HWNAS_HOME']}")


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """The folder that `out` names. `kind` is the work done in it: search, train or zoo."""

    path: Path
    kind: str

    def take_up(self, overwrite: bool = False) -> Self:
        """Make the folder and mark it as `kind`'s, or go on with one of this kind; return itself.

        With `overwrite`, a folder with other files is used too: files that the work writes are replaced, the others
        stay. Raises StudyError for a folder with other files, of other work or inside of it, or of a later version.
        Nothing is changed then. Raises UserError if it cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise StudyError(f"{self.path} is a file. Choose another: out=FOLDER.")
        place = Path(os.path.realpath(self.path))  # works for a link to itself, too
        for parent in place.parents:
            if owner := kind_of(parent):
                raise StudyError(f"{self.path} is in {parent}, {_folder_of(owner)}. Choose another out=FOLDER.")
        others = [] if overwrite else _others(self.path)
        if kind_of(self.path) is None:  # last: meanwhile the same command may run in another process
            if others:
                more = f" and {len(others) - 1} more" if others[1:] else ""
                raise StudyError(f"{self.path} has files that hwnas did not make ({others[0]}{more}). Choose another "
                                 "out=FOLDER, or overwrite=true: files with the names of results are replaced.")
            self._mark()
        return self.check()

    def check(self) -> Self:
        """Return itself. Raises StudyError unless it is of this kind, UserError if it is read-only or the disk full."""
        if (owner := kind_of(self.path)) != self.kind:
            raise StudyError(f"{self.path} is {_folder_of(owner)}. Choose another out=FOLDER." if owner else
                             f"{self.path} is not the folder of a {self.kind}.")
        try:  # to fail now, in one line, rather than after hours of training
            with TemporaryFile(dir=self.path) as probe:  # a file without a name: a kill leaves nothing
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
                check_locks(probe.fileno(), self.path)
        except OSError as error:
            raise unwritten(self.path, error) from error
        return self

    def hold(self, work: str, say: Callable[[str], None] | None = None, wait: bool = True
             ) -> AbstractContextManager[bool]:
        """Hold a lock for one kind of `work` in the folder, see `paths.hold`; `say` gets a line if it must wait."""
        waiting = None if say is None else lambda: say(f"another process works in {self.path}; waiting")
        return hold(self.path / f".{work}.lock", waiting, wait=wait)

    def _mark(self) -> None:
        """Write the marker, unless another process was first."""
        temporary = self.path / f"{NAME}.{os.getpid()}"
        try:
            write_atomic(temporary, json.dumps({**MARKER.header, "kind": self.kind, "hwnas": __version__}) + "\n")
            try:  # a link fails if the marker exists, so that exactly one process writes it
                os.link(temporary, self.path / NAME)
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                os.replace(temporary, self.path / NAME)
        except OSError as error:
            raise unwritten(self.path / NAME, error) from error
        finally:
            temporary.unlink(missing_ok=True)


def check_replaceable(*paths: Path, begin: str = "hwnas") -> None:
    """Raise StudyError for a file that hwnas did not write, because a command replaces only its own results. Raise
    UserError if a file cannot be written, before the work and not after it; nothing is made.

    Every document and picture of hwnas names hwnas near its beginning. A CSV table cannot: it begins with `begin`.
    """
    for path in paths:
        make_writable(next(folder for folder in path.absolute().parents if os.path.lexists(folder)))
        if path.is_dir():
            raise StudyError(f"{path} is a folder. Name a file in it.")
        if not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if head and not (begin.encode() in head if begin == "hwnas" else head.startswith(begin.encode())):
            raise StudyError(f"{path}: hwnas did not write this file, and would replace it. Move it, or name another.")


def kind_of(folder: Path) -> str | None:
    """Return the kind of work that a folder belongs to; None for a folder that hwnas did not make. Raises StudyError
    for a marker of a later version."""
    return str(MARKER.read(folder / NAME).get("kind")) if os.path.lexists(folder / NAME) else None


def _others(path: Path) -> list[str]:
    """Return the names in a folder that hwnas does not leave itself."""
    try:
        return sorted(name for name in os.listdir(path) if not _PASSING.fullmatch(name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Choose another out=FOLDER.") from None


def _folder_of(kind: str) -> str:
    return f"the folder of a python -m hwnas.{kind}"


MANIFEST = "manifest.json"
_MOST_NAME = 255  # bytes
MANIFESTS = Document("hwnas-model", 1, "the manifest of a model folder", "Remove it, and give the command again: the "
                     "files beside it are then checked, or made again.",
                     shape={"recipe": str, "parity": {"*": float}, "files": {"*": {"size": int, "sha256": str}},
                            "quantisation?": {"text": str}, "exports?": str})


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file: its bytes, counted and by SHA-256 (hexadecimal)."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Content | None:
        """Return the content of a file; None without a regular file. Raises UserError if it cannot be read."""
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return None
            with open(path, "rb") as file:
                return cls(status.st_size, hashlib.file_digest(file, "sha256").hexdigest())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}. Make it readable.") from None


@dataclass(frozen=True)
class Manifest:
    """The files of one model folder by name, the fingerprint of what decides the weights, and the figures of parity.

    `parity` is empty if no export was checked. `quantisation` says how the int8 file was made; it is empty without such
    a file, or if an earlier version made it. `exports` names what decides the files that are made of the weights. A
    manifest shows damage and mix-ups, not intent: a person who can write the folder can write the manifest, too.
    """

    recipe: str
    files: Mapping[str, Content]
    parity: Mapping[str, float]
    quantisation: Mapping[str, Any] = field(default_factory=dict)
    exports: str = ""

    @classmethod
    def find(cls, folder: Path) -> Manifest | None:
        """Return the manifest in `folder`, or None. Raises StudyError if it is torn or of a later version."""
        path = folder / MANIFEST
        data = MANIFESTS.find(path)
        if data is None:
            return None
        with MANIFESTS.reading(path):
            if wrong := next((name for name in data["files"] if len(os.fsencode(name)) > _MOST_NAME), None):
                raise ValueError(f"{wrong[:40]}… is no name of a file")
            files = {name: Content(entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
            return cls(data["recipe"], files, data["parity"], data.get("quantisation", {}),
                       data.get("exports", ""))

    @classmethod
    def write(cls, folder: Path, paths: Iterable[Path], recipe: str, parity: Mapping[str, float] | None = None,
              quantisation: Mapping[str, Any] | None = None, exports: str = "") -> None:
        """Write in `folder` that all files among `paths` are finished."""
        files = {path.name: asdict(content) for path in paths if (content := Content.of(path)) is not None}
        data = {**MANIFESTS.header, "recipe": recipe, "parity": dict(parity or {}), "files": files,
                **({"quantisation": dict(quantisation)} if quantisation else {}),
                **({"exports": exports} if exports else {})}
        write_atomic(folder / MANIFEST, json.dumps(data, indent=1) + "\n")

    def fault(self, path: Path) -> str:
        """Return why `path` is not the file that was made, as a sentence without a full stop; empty if it is."""
        recorded, current = self.files.get(path.name), Content.of(path)
        if recorded is None:
            return f"{path.name} is not in {MANIFEST}: its making did not come to an end"
        if current == recorded:
            return ""
        if current is None:
            return f"{path.name} is missing"
        how = f"{current.size} bytes, was {recorded.size}" if current.size != recorded.size else \
            f"SHA-256 {current.sha256[:12]}…, was {recorded.sha256[:12]}…"
        return f"{path.name} is not the file that was made: {how}"

    def faults(self, *needed: Path) -> list[str]:
        """Return each `fault` of the `needed` files, and of the other listed files that are in the same folder."""
        folder = needed[0].parent
        # A name with a path in it, which somebody else may have written, is not followed.
        others = [folder / name for name in self.files if (folder / name).name == name and (folder / name).exists()]
        return [text for path in dict.fromkeys([*needed, *others]) if (text := self.fault(path))]


_NAMED = ({"name?": str}, None)
_OPTIONAL = {  # what is read from any run, also an unfinished one
    "target?": ({"name?": str, "targets?": [{"name?": str}]}, None), "host?": _NAMED, "created?": str, "runtime?": str,
    "searched_for?": str,
    "verified_here?": bool, "verified_from?": str,
    "space?": (str, None), "cap_ms?": (float, None), "cap_p99_ms?": (float, None),
    "dataset?": ({"name?": str, "title?": str, "image_size?": int, "class_names?": [str],
                  "left_out?": ({"*": int}, None),
                  "constant_answer?": {"class": str, "top1": float}}, None), "latency_model?": (dict, None),
    "search?": ({"accuracy?": str, "objective?": str}, None), "training?": {"steps?": int}, "measuring?": (dict, None),
    "spent_s?": {"*": float}, "family?": str, "remarks?": [str],
    "session?": ({"told?": str}, None)}
_WHOLE = {"dataset": {"fingerprint": str, "image_size": int, "channels": int, "class_names": [str]}, "target": dict,
          "recipe": dict, "measuring": {"seconds": float, "seed": int, "reference": dict}}


ENVIRONMENT = Document("hwnas-environment", 1, "the environment of a search", "Search again, with the same options.",
                       shape=_OPTIONAL)
_COMPARISONS = [{"verdict?": str, "sentence": str}]
_NUMBER, _COUNT, _FLAG, _TEXT = float | None, int | None, bool | None, str | None
OF_EVERY_TRIAL: dict[str, Any] = {
    "number": int, "state": _TEXT, "outcome": _TEXT, "id": _TEXT, "architecture": _TEXT, "top1_proxy": _NUMBER,
    "top1_std": _NUMBER, "latency_ms_predicted": _NUMBER, "latency_ms_predicted_low": _NUMBER,
    "latency_ms_predicted_high": _NUMBER, "reward": _NUMBER, "seconds": _NUMBER,
    "feasible": _FLAG, "duplicate_of": _COUNT, "reason": _TEXT, "seed": _COUNT,
    "started": _TEXT, "finished": _TEXT, "rungs": _TEXT, "source": _COUNT, "move": _TEXT, "gain": _NUMBER,
    "steps": _COUNT}
ESTIMATED = ("top1_estimated", "top1_estimated_low", "top1_estimated_high")  # by the model of all trials
TRIALS = OF_EVERY_TRIAL | dict.fromkeys(
    (*ESTIMATED, "size_mb_predicted", "macs", "price_per_million_predicted"), _NUMBER)
_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class _Inside:
    """A file's name. As an attribute of a folder it gives the path of the file in it."""

    name: str

    def __get__(self, folder: ModelFolder | RunFolder, kind: type[Any]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The folder `models/<id>/`: one network and the files that were made of it."""

    path: Path

    architecture = _Inside("architecture.yaml")  # of a finalist
    baseline = _Inside("baseline.yaml")  # timm's name and the stem's stride, of a baseline
    weights = _Inside("weights.safetensors")  # its header carries the recipe's fingerprint
    training = _Inside("training.safetensors")  # the state of a training, until it ends
    onnx = _Inside("model.onnx")  # fp32, parity-checked
    int8 = _Inside("model_int8.onnx")  # static QDQ
    card = _Inside("card.md")
    manifest = _Inside(MANIFEST)  # size and SHA-256 of the files above but the card's, written last

    def deployed(self, precision: str) -> Path:
        """Return the file that a target of this precision runs."""
        return self.int8 if precision == "int8" else self.onnx


@dataclass(frozen=True, slots=True)
class RunFolder(WorkFolder):
    """The files of one run. Make it with `create` (a run that writes) or `open` (a run that must exist)."""

    kind: str = "search"

    config = _Inside("config.yaml")
    study = _Inside("study.db")  # the only record of the search
    trials_csv = _Inside("trials.csv")
    front_csv = _Inside("front.csv")
    front_json = _Inside("front.json")
    comparisons = _Inside("comparisons.json")
    spent = _Inside("spent.json")  # seconds that all commands of the run have taken, for budget.minutes
    session = _Inside("session.json")  # the machine's speed against its latency table, at the start of the search
    latencies = _Inside("latencies.json")  # a latency table: networks that a race has timed
    deployments = _Inside("deployments.json")  # the targets of a set that the search uses
    measurements = _Inside("measurements.json")  # raw samples of the verification
    predictions = _Inside("predictions.npz")  # each network's answer to each test image
    confidences = _Inside("confidences.npz")  # each network's answers to validation images, and how sure it was
    pairs_csv = _Inside("pairs.csv")
    environment = _Inside("environment.json")
    examples = _Inside("examples.png")  # how the network to deploy answers, of tasks that have such a picture
    report = _Inside("report.html")
    front_png = _Inside("front.png")
    front_svg = _Inside("front.svg")
    lines = _Inside("lines")  # folder of weights that a search trains; the finalists' weights stay

    @classmethod
    def create(cls, path: str | os.PathLike[str], overwrite: bool = False) -> RunFolder:
        """Make the folder, or go on with an existing one, see `WorkFolder.take_up`."""
        return cls(Path(path)).take_up(overwrite)

    @classmethod
    def open(cls, path: str | os.PathLike[str], write: bool = True) -> RunFolder:
        """Return the folder of an existing run. Raises StudyError if it is none and, with `write`, UserError if it
        cannot be written."""
        run = cls(Path(path))
        if run.config.is_file() and run.environment.is_file() and kind_of(run.path) is None:
            raise StudyError(f"{path} has the files of a run, but {NAME} is missing, which a copy by * leaves out. "
                             "Copy it, too; hwnas export run=DIR out=COPY makes whole copies.")
        if not run.config.is_file() or kind_of(run.path) != run.kind:
            raise StudyError(f"{path} is not a run folder (no config.yaml of a search). Make one: "
                             f"hwnas search target=NAME out={path}")
        return run.check() if write else run

    def model(self, id: str) -> ModelFolder:
        """Return the folder `models/<id>/`. Raises StudyError for an id that is no plain name."""
        if not _SAFE_ID.fullmatch(id):
            raise StudyError(f"{self.path}: network id {id!r} is not a plain name.")
        return ModelFolder(self.path / "models" / id)

    def write_trials(self, trials: Iterable[Mapping[str, Any]]) -> None:
        """Write `trials.csv`: one line for each trial, columns in the order in which they first appear."""
        write_atomic(self.trials_csv, table_csv(list(trials)))

    def read_trials(self) -> list[dict[str, Any]]:
        """Return the rows of `trials.csv` with the types of TRIALS; no rows if there is no file.

        Raises StudyError with the line and column of a cell that cannot be read.
        """
        if not self.trials_csv.exists():
            return []
        try:
            return read_table(table_text(self.trials_csv), TRIALS)
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.trials_csv}, {error} Finish the search again to have it written anew.") from None

    def write_arrays(self, path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write any of the `.npz` files; whole numbers become int32."""
        out = io.BytesIO()
        stored: dict[str, Any] = {name: values.astype(np.int32) if values.dtype.kind in "iu" else values
                                  for name, values in arrays.items()}
        np.savez_compressed(out, **stored)
        write_atomic(path, out.getvalue())

    def read_predictions(self) -> dict[str, NDArray[Any]]:
        """Return `predictions.npz`: `labels` and an array for each network id, in the order of the test set.

        An array has classes [n] as int32, or confidences [n, classes] or objects [n, most, k] as float32. Raises
        StudyError if the file cannot be read.
        """
        try:
            arrays = read_npz(self.predictions, self.predictions.stat().st_size)
        except (OSError, ValueError) as error:
            raise StudyError(f"cannot read {self.predictions}: {error}.") from None
        kinds = {(str(array.dtype), array.ndim) for array in arrays.values()}
        are_answers = kinds <= {("int32", 1)} or kinds <= {("float32", 2), ("float32", 3)}
        if not are_answers or len({len(array) for array in arrays.values()}) > 1:
            raise StudyError(f"cannot read {self.predictions}: it holds no answers to the same images.")
        return arrays

    def write_json(self, path: Path, data: Any) -> None:
        """Write any of the `.json` files; NaN becomes null, so that every JSON reader takes it.

        The many raw samples of measurements.json are written without spaces.
        """
        form: dict[str, Any] = {"separators": (",", ":")} if path == self.measurements else {"indent": 1}
        write_atomic(path, json.dumps(finite(data), allow_nan=False, **form) + "\n")

    def read_environment(self) -> dict[str, Any]:
        """Return `environment.json`. Raises StudyError if it is missing, torn, incomplete or of a later version."""
        content = ENVIRONMENT.read(self.environment)
        with ENVIRONMENT.reading(self.environment):
            check_shape(content, _WHOLE)
            return content

    def find_environment(self) -> dict[str, Any]:
        """Return `environment.json`, also of an unfinished run, which may lack any key; {} if there is none."""
        return ENVIRONMENT.find(self.environment) or {}

    def read_comparisons(self) -> list[dict[str, Any]]:
        """Return `comparisons.json`; empty if there is none. Raises StudyError if it cannot be read."""
        try:
            content = read_json(self.comparisons) if self.comparisons.exists() else []
            check_shape(content, _COMPARISONS)
        except (OSError, ValueError) as error:
            raise StudyError(f"cannot read {self.comparisons}: {error}. {ENVIRONMENT.remedy}") from None
        return list(content)

    def read_config(self) -> dict[str, Any]:
        """Return `config.yaml` as plain values. Raises StudyError if it is no mapping."""
        try:
            config = load_yaml(self.config_text())
        except ValueError as error:
            raise StudyError(f"cannot read {self.config}: {error}.") from None
        if not isinstance(config, dict):
            raise StudyError(f"{self.config} must be a mapping.")
        return config

    def config_text(self) -> str:
        """Return the text of `config.yaml`. Raises StudyError if it cannot be read."""
        try:
            return yaml_text(self.config)
        except (OSError, ValueError) as error:
            raise StudyError(f"cannot read {self.config}: {error}.") from None

    def write_config(self, config: Mapping[str, Any] | str) -> None:
        """Write `config.yaml`: the composed configuration, as values or as YAML text."""
        text = config if isinstance(config, str) else yaml.safe_dump(dict(config), sort_keys=False, width=110)
        write_atomic(self.config, text)
