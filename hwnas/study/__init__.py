"""Studies: objectives, trials and the database that is their only record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.study.objective import KnownObjective as KnownObjective
    from hwnas.study.objective import Objective as Objective
    from hwnas.study.study import open_study as open_study

__getattr__, __dir__ = face(__name__, {"KnownObjective": "objective", "Objective": "objective", "open_study": "study"})
