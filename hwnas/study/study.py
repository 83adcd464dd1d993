"""Create, open and check studies."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import optuna
from optuna.samplers import BaseSampler

from hwnas.errors import ConfigError, StudyError, hidden
from hwnas.study.objective import LATENCY, Objective
from hwnas.study.record import CHOSEN, OBJECTIVES, RECORD
from hwnas.study.storage import (
    BUSY_S,
    Storage,
    can_write,
    open_storage,
    server_lock,
    shown,
    sqlite_path,
    storage_errors,
)
from hwnas.system.documents import Document
from hwnas.system.paths import hold

DOCUMENT = Document("hwnas-study", 1, "a study", "Choose another run folder.", shape={f"{CHOSEN}?": {"*": int}})
NAME = "hwnas"


@contextlib.contextmanager
def study_lock(url: str, most_s: float = BUSY_S) -> Iterator[None]:
    """Lock the study inside the block: one process at a time, over all hosts, opens it or asks for a trial."""
    path = sqlite_path(url)
    if path is None:
        with storage_errors(url), server_lock(url, "study", most_s):
            yield
        return
    if not path.parent.is_dir():
        raise StudyError(f"study {path}: no folder {path.parent}. Check that its folder exists and can be written.")
    with hold(Path(f"{path}.lock"), most_s=most_s):
        yield


def open_study(url: str, identity: Mapping[str, str], objective: Objective, sampler: BaseSampler, *,
               name: str = NAME, chosen: Mapping[str, int] | None = None) -> optuna.Study:
    """Open the study at `url`, or create it, as one of any number of workers.

    `identity` names all that its trials depend on besides the objective (space, data set, target, host, ...), as text
    that messages may show. `chosen` is stored when the study is created, for `held_choice`: plain values that a
    measurement decided.
    Raises StudyError if the study has another identity, and names each change; also if the database is torn, foreign,
    locked or cannot be written. Optuna logs errors only: the caller shows the progress.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with study_lock(url), storage_errors(url):
        storage = open_storage(url)
        study = optuna.create_study(storage=storage, sampler=sampler, pruner=optuna.pruners.NopPruner(),
                                    study_name=name, directions=objective.directions, load_if_exists=True)
        identity = {**identity, "objective": str(objective)}
        if (record := study.user_attrs.get(RECORD)) is not None:  # an earlier run or another worker created it
            _compare(DOCUMENT.check(record, f"study {shown(url)}")["identity"], identity, url)
            return study
        if study.get_trials(deepcopy=False):
            raise StudyError(f"study {shown(url)}: it holds trials of another program. Choose another run folder.")
        names = [cost.name for cost in objective.minimised]
        more = {} if names in ([], [LATENCY]) else {OBJECTIVES: names}
        decided = {CHOSEN: dict(chosen)} if chosen else {}
        first = "reward" if objective.kind == "reward" else "top1"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([first, *names])  # dashboards write them on their axes
        study.set_user_attr(RECORD, {**DOCUMENT.header, "identity": identity, **more, **decided})
    return study


def check_resumable(url: str, identity: Mapping[str, str]) -> None:
    """Raise StudyError if a key of `identity` has another value in the identity of the study at `url`, or if its server
    refuses. Call it before long work.
    """
    if (study := _held(url)) is not None:
        old = identity_of(study)
        _compare({key: value for key, value in old.items() if key in identity}, dict(identity), url)


def held_choice(url: str) -> dict[str, int] | None:
    """Return the values `chosen` when the study at `url` was created; None if there is no study that can be read."""
    study = _held(url)
    return None if study is None else DOCUMENT.check(study.user_attrs[RECORD], f"study {shown(url)}").get(CHOSEN, {})


def _held(url: str) -> optuna.Study | None:
    path = sqlite_path(url)
    if path is not None and not path.is_file():
        return None
    with study_lock(url):
        try:
            return load_study(url)
        except StudyError:
            return None


def _compare(old: dict[str, str], identity: dict[str, str], url: str) -> None:
    changed = [f"{key} was {old.get(key, 'not set')}, now {identity.get(key, 'not set')}"
               for key in [*old, *(key for key in identity if key not in old)] if old.get(key) != identity.get(key)]
    if changed:
        raise StudyError(f"study {shown(url)}: cannot resume, {'; '.join(changed)}. Take the old setting back, or "
                         "begin another run with out=FOLDER, and another storage= if this one has one.")


def load_study(url: str, *, name: str = NAME) -> optuna.Study:
    """Open an existing study to read it, whatever its identity is. File and folder may be read-only.

    Raises StudyError if there is none, or if it is torn or foreign.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = sqlite_path(url)
    if path is not None and not (path.is_file() and path.stat().st_size):
        raise StudyError(f"study {path}: there is none. Search first: hwnas search target=NAME.")
    read_only = path is not None and not can_write(path)
    with storage_errors(url):
        try:
            study = optuna.load_study(study_name=name, storage=open_storage(url, read_only=read_only))
        except KeyError:
            raise StudyError(f"study {shown(url)}: it holds no study named {name!r}. "
                             "Check storage= and the run folder.") from None
        if RECORD not in study.user_attrs:
            raise StudyError(f"study {shown(url)}: it holds trials of another program.")
    return study


def identity_of(study: optuna.Study) -> dict[str, str]:
    """Return the identity that the study was created with, which names all that its trials depend on."""
    return dict(study.user_attrs[RECORD]["identity"])


def database_path(run_folder: Path) -> str:
    """Return the URL of the database in a run folder."""
    return "sqlite:///" + str((run_folder / "study.db").absolute()).replace("%", "%25").replace("?", "%3F")


def study_url(run_folder: Path, stored: object, named: str | None = None) -> str:
    """Return the URL of the study of a run folder; `stored` is the storage in its config.yaml.

    The folder may come from somebody else: a database outside it is used only if the user `named` it, else StudyError.
    """
    if named or stored is None:
        return named or database_path(run_folder)
    with contextlib.suppress(ConfigError, OSError):
        path = sqlite_path(str(stored))
        if path is not None and path.resolve().is_relative_to(run_folder.resolve()):
            return str(stored)
    raise StudyError(f"{run_folder}: its study is elsewhere, in {hidden(str(stored), whole=True)[:200]}. Name the "
                     "database yourself: storage=URL.")


def storage_of(study: optuna.Study) -> Storage:
    """Return the storage behind Optuna's cache. Raises TypeError if `open_storage` did not open it."""
    backend = getattr(study._storage, "_backend", study._storage)
    if not isinstance(backend, Storage):
        raise TypeError("this study was not opened with hwnas.study.open_study")
    return backend
