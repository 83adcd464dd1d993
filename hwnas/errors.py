"""The errors that hwnas raises on purpose: of the user (UserError), a candidate (CandidateError), unfinished work."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence

# A password may hold an @ that should have been written as %40. A number behind the colon may be a port.
_IN_FRONT = {True: re.compile(r"(?<=://)([^:@/\n]*):.*@"),
             False: re.compile(r"(?<=://)([^:@/\n]*):(?!\d+(?:[/?][^\s@]*)?(?:[\s'\"]|$)).*?@(?:\S*@)?")}
_BEHIND = {True: re.compile(r"([?&](?:ssl)?password=)[^&\n]*"),
           False: re.compile(r"([?&](?:ssl)?password=)[^&\s'\"]*?(?=[:.,;]?(?:[&\s'\"]|$))")}


def hidden(text: str, whole: bool = False) -> str:
    """Return a text without the passwords of the URLs in it. With `whole`, a URL fills the rest of its line, even if
    it cannot be parsed.

    All text of options that commands print or store goes through this function.
    """
    return _IN_FRONT[whole].sub(r"\1:***@", _BEHIND[whole].sub(r"\1***", text))


def shown(value: object, most: int = 200) -> str:
    """Return a value as a message shows it: Python's text for it, and of a long one the first `most` letters."""
    try:
        text = repr(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}…"


def kind_of(value: object) -> str:
    """Return the type of a value with its article, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " Did you mean a or b?" with the names that end with .name, or resemble it; empty if none does."""
    names = {full.casefold(): full for full in known}
    near = [full for full in names.values() if full.endswith(f".{name}")] or [
        names[each] for each in difflib.get_close_matches(name.casefold(), names, n=3, cutoff=cutoff)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


class HwnasError(Exception):
    """The root of the tree. The message gives fact, place and next step in one line, and no password."""

    def __str__(self) -> str:
        return hidden(super().__str__())


class WorkerError(HwnasError):
    """Processes beside the main one ended early, for the reasons `early`. Their finished work is kept."""

    def __init__(self, early: Sequence[str]) -> None:
        super().__init__(f"{len(early)} worker{'s' * (len(early) > 1)} ended early, and the work was done without: "
                         f"{'; '.join(dict.fromkeys(early))}. Everything finished is kept. Mend the cause before the "
                         "next run.")


class Unfinished(HwnasError):
    """A command ended before its work was complete; the message says what is missing. `part`: some of it is there.

    With `part` the exit code is 3, otherwise 1.
    """

    def __init__(self, message: str, part: bool) -> None:
        super().__init__(message)
        self.part = part


class UserError(HwnasError):
    """Something the user can mend: commands print it as one line and exit with 2."""


class ConfigError(UserError):
    """An option has a value that breaks its rule: key, rule, value."""


class MissingWeights(ConfigError):
    """The pretrained weights of a network were not found."""


class SpaceError(UserError):
    """A search space or architecture file breaks a rule: file, line or key, rule, value."""


class DataError(UserError):
    """A data set cannot be used as it is: missing, empty, of one class, with an unreadable image."""


class TargetError(UserError):
    """This host cannot run the target: its precision, device or make."""


class DeviceError(UserError):
    """Another machine cannot time networks: it is not reached, not trusted, or lacks a program or a package."""


class TableError(UserError):
    """A latency table cannot be used: torn, foreign, of another version."""


class MissingLatency(TableError):
    """A latency table lacks an entry; the message names the command that measures it."""


class SamplerError(UserError):
    """A sampler cannot search with the given roles or known objectives."""


class StudyError(UserError):
    """A study or its run folder cannot be used: corrupt, foreign, changed, read-only."""


class BudgetError(UserError):
    """No architecture of the space meets the budget; the message names the nearest that does."""


class CandidateError(HwnasError):
    """One candidate failed for an expected reason; it becomes a failed trial or a gap in the report."""


class FileError(CandidateError):
    """A runtime cannot use the model file `path`: the `fact`, and the `remedy`, if there is one."""

    def __init__(self, path: str | os.PathLike[str], fact: str, remedy: str = "") -> None:
        super().__init__(os.fspath(path), fact, remedy)  # these arguments make the same error in another process
        self.path, self.fact, self.remedy = os.fspath(path), fact, remedy

    def __str__(self) -> str:
        return f"{self.path}: {self.fact} {self.remedy}".rstrip()


class ExportError(CandidateError):
    """Export to ONNX or the parity gate failed."""


class QuantizeError(CandidateError):
    """Quantisation failed."""


class TrainingError(CandidateError):
    """Training diverged, or nothing was learnt."""


class MeasurementInvalid(CandidateError):
    """The machine was too restless to time a network."""


class UnknownName(UserError):
    """No `kind` is called `name`; the message lists the near matches, then all."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        names = sorted(known)
        text = name[:200] if isinstance(name, str) else shown(name)
        hint = did_you_mean(text, names)
        super().__init__(f"unknown {kind} {text!r}.{hint} Known: {', '.join(names) or 'none'}.")


class ModelError(UserError):
    """A model file cannot be used as it is."""


def one_line(error: BaseException, most: int = 300) -> str:
    """Return the text of another package's error as one line of at most `most` letters; its class if it has no text."""
    return " ".join(str(error).split())[:most] or type(error).__name__
