"""A worker as a process of its own, for tests that kill, stop and race it: python study_worker.py FOLDER N SECONDS ...

It prints `training NUMBER` when a training begins and `told NUMBER OUTCOME` when a trial is acknowledged.
"""

from __future__ import annotations

import sys
from pathlib import Path

from study_fixtures import Scores, TinySpace, opened, searched

from hwnas.errors import UserError
from hwnas.search_loop import SearchEvent


def main(folder: str, n_trials: str, seconds: str, heartbeat_s: str = "1", grace_s: str = "2") -> int:
    def say(event: SearchEvent) -> None:
        word = event.kind if event.kind in ("training", "waiting") else f"told-{event.kind}"
        print(word, event.number, event.id, flush=True)

    try:
        study = opened(Path(folder), heartbeat_s=int(heartbeat_s), grace_s=int(grace_s))
        space = TinySpace()
        ended = searched(study, int(n_trials), space, Scores(float(seconds)), say, enqueue=space.every()[40:41])
    except UserError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    print(f"ended {ended.ended} {ended.n_complete}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
