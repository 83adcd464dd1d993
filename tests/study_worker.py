"""A worker as a process of its own, for tests that kill, stop and race it:

    python study_worker.py PLACE N SECONDS [BEAT_S GRACE_S [SEEDS]]

PLACE is a folder, for a study in SQLite, or a database's URL. It prints `training NUMBER ID` when a training begins and
`told-OUTCOME NUMBER ID` when a trial is acknowledged. With SEEDS (0,1,2) it searches a real space with our sampler,
seed by seed, each in a study of its own, and prints `seed SEED` before each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from study_fixtures import IDENTITY, OBJECTIVE, Scores, TinySpace, load_sampler, searched, url

from hwnas.errors import UserError
from hwnas.search.sampling import SearchEvent, SearchOutcome
from hwnas.study import claims
from hwnas.study.study import open_study


def say(event: SearchEvent) -> None:
    word = event.kind if event.kind in ("training", "waiting") else f"told-{event.kind}"
    print(word, event.number, event.id, flush=True)


def tiny(place: str, n_trials: int, seconds: float) -> SearchOutcome:
    study = open_study(place, IDENTITY, OBJECTIVE, load_sampler("random", 0))
    space = TinySpace()
    return searched(study, n_trials, space, Scores(seconds), say, first=space.every()[40:41])


def informed(place: str, n_trials: int, seconds: float, seeds: str) -> SearchOutcome:
    from race_fixtures import named, opened, search

    for seed in map(int, seeds.split(",")):
        print("seed", seed, flush=True)
        study = opened(place, seed=seed, name=named(seed))
        ended = search(study, n_trials, seconds, progress=say)
    return ended


def main(place: str, n_trials: str, seconds: str, beat_s: str = "1", grace_s: str = "2", seeds: str = "") -> int:
    place = place if "://" in place else url(Path(place))
    try:
        claims.BEAT_S, claims.GRACE_S = float(beat_s), float(grace_s)
        arguments = place, int(n_trials), float(seconds)
        ended = informed(*arguments, seeds) if seeds else tiny(*arguments)
    except UserError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    print(f"ended {ended.ended} {ended.counts.evaluated}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
