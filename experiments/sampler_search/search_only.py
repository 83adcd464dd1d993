"""A search without finalists: python experiments/sampler_search/search_only.py +target=xeon_int8 out=DIR …

Takes the options of hwnas.search, evaluates architectures and writes trials.csv; hwnas.search with the same options
verifies the front later.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console


def main(config: Any, console: Console) -> None:
    """As hwnas.search does it, up to the last trial."""
    from hwnas.search.plan import make_plan
    from hwnas.search.prepare import prepare
    from hwnas.search.road import extra_workers, work_on
    from hwnas.study.record import trial_rows
    from hwnas.study.study import wait_for_others
    from hwnas.system.run_folder import RunFolder

    plan = make_plan(config, console)
    run = RunFolder.create(plan.out)
    prepared = prepare(plan, run, console)
    run.write_config(plan.yaml)
    with extra_workers(min(plan.workers, plan.options.trials) - 1, plan, run, console):
        work_on(prepared, console)
    wait_for_others(prepared.study, waiting=lambda n: console.note(f"waiting for {n} other trials"))
    run.write_trials(trial_rows(prepared.study))


if __name__ == "__main__":
    sys.exit(run_command(main, "search", __doc__ or ""))
