"""Samplers on the real road: whole searches with equal budgets, one after the other, and what each has found.

    python experiments/sampler_search/run.py +target=xeon_int8 dataset=fashion_mnist out=DIR \\
        [samplers=[hwnas,nsga2]] [seeds=[0,1,2]] [verify=1] [n_trials=40] [nsga2.population_size=20] [KEY=VALUE ...]

Every other KEY=VALUE is an override of hwnas.search and the same for all; SAMPLER.OPTION=VALUE is for one sampler.
`seed=N` stands for `seeds=[N]`. The searches of the first `verify` seeds train and verify their finalists, the others
end with the last trial. Run folders are DIR/SAMPLER/seedN; a finished one is not run again, so that the same command
goes on, with more seeds if wanted; then the finalists of all searches are timed once more, together, in
DIR/together/seedN. Writes search.csv, summary.json and fronts.png into DIR.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import command, save_csv, save_json
from experiments.sampler_search.fronts import fronts, to_dict
from experiments.sampler_search.options import Options, parse
from experiments.sampler_search.picture import picture
from experiments.sampler_search.reading import SearchRun, read_run
from experiments.sampler_search.report import describe, of_fronts, race_to_dict, verdict
from experiments.sampler_search.scores import MAIN, WIDE, Reference, Scored, mean_and_error, races, rows, scored
from experiments.sampler_search.searching import Search, plan, run_all
from experiments.sampler_search.together import folder_of, verify_together


def main(arguments: list[str] | None = None) -> None:
    """Search what is not searched yet, compare, write, print."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return
    options = parse(given)
    searches = plan(options)
    run_all(searches)
    for seed in options.seeds[:options.verify]:
        verify_together(options.out, [one for one in searches if one.seed == seed])
    report(options, searches, given)


def report(options: Options, searches: Sequence[Search], given: Sequence[str]) -> None:
    """Read the run folders, write the three files, print the table and the verdict."""
    runs = [read_run(one.path, one.sampler, one.seed, folder_of(options.out, one.seed) if one.verify else None)
            for one in searches]
    found, at = scored(runs)
    budget = len(found[0].hypervolume)
    raced, wide = races(found), races(scored(runs, WIDE)[0])
    sentences = verdict(raced, wide, budget)
    lengths = sorted({len(run.ids) for run in runs})
    if len(lengths) > 1:
        sentences.append(f"Searches evaluated {lengths[0]} to {lengths[-1]} networks; compared are the first {budget}.")
    for seed in options.seeds:
        sentences += of_fronts([run for run in runs if run.seed == seed])
    save_csv(options.out / "search.csv", rows(found))
    save_json(options.out / "summary.json", _summary(found, at, given) | {
        "to_equal_hypervolume": {name: [race_to_dict(race) for race in part]
                                 for name, part in ((MAIN, raced), (WIDE, wide))},
        "verified": [_verified([run for run in runs if run.seed == seed]) for seed in options.seeds[:options.verify]],
        "verdict": sentences})
    (options.out / "fronts.png").write_bytes(picture(found, *_headings(found, searches[0])))
    print(describe(found, at, sentences))


def _summary(found: Sequence[Scored], at: Reference, given: Sequence[str]) -> dict[str, Any]:
    from hwnas.target import Host

    names = dict.fromkeys(one.run.sampler for one in found)
    return {
        "overrides": [one for one in given if "/" not in one],  # folders are the user's own
        "computed_on": Host.detect().name, "budget": len(found[0].hypervolume),
        "reference": {"is": MAIN, "top1_proxy": at[0], "latency_ms": 2 ** at[1]},
        "searches": [_search(one) for one in found],
        "samplers": {name: _sampler([one for one in found if one.run.sampler == name]) for name in names}}


def _search(one: Scored) -> dict[str, Any]:
    run, last = one.run, len(one.hypervolume) - 1
    return {"sampler": run.sampler, "seed": run.seed, "asks": run.asks, "trials": dict(run.counts),
            "hypervolume": round(float(one.hypervolume[-1]), 6), "share": _finite(float(one.share[-1])),
            "seconds": round(float(run.wall_s[last]), 2), "training_seconds": round(float(run.training_s[last]), 2),
            "asking_seconds": round(float(run.asking_s[last]), 3), "study": dict(run.identity)}


def _sampler(found: Sequence[Scored]) -> dict[str, Any]:
    mean, error = mean_and_error([float(one.share[-1]) for one in found])
    return {"seeds": len(found), "share": _finite(mean), "share_error": None if error is None else _finite(error)}


def _verified(runs: Sequence[SearchRun]) -> dict[str, Any]:
    by_name = {run.sampler: run for run in runs}
    return {"seed": runs[0].seed, "fronts": [to_dict(one, by_name[one.sampler]) for one in fronts(runs)]}


def _finite(value: float) -> float | None:
    return round(value, 6) if value == value else None


def _headings(found: Sequence[Scored], first: Search) -> tuple[str, str]:
    """Title and subtitle."""
    import yaml

    config = yaml.safe_load(first.config)
    names = " and ".join(dict.fromkeys(one.run.sampler for one in found))
    seeds = len({one.run.seed for one in found})
    hosts = {row.host for one in found for row in one.run.finalists}
    parts = [f"{len(found[0].share)} networks each, {seeds} seed{'s' if seeds > 1 else ''}",
             f"space {config['space']}", *(f"measured on {host}" for host in sorted(hosts))]
    return f"{names} on {config['dataset']['name']}, {config['target']['name']}", " · ".join(parts)


if __name__ == "__main__":
    try:
        command(main)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here.", file=sys.stderr)
        sys.exit(130)
