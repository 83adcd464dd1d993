"""Ours: three networks of a search's front, by a rule that knows nothing of the contest.

The rule sees what the search saw alone, estimated top-1 and predicted latency, and is applied before any training of
the contest; what it picked is kept in picks.json and not picked again.

    accurate   the highest estimated top-1 (of equals the fastest);
    fast       the lowest predicted latency among those at most FAST_WITHIN below it, and in any case among the
               three most accurate of the front;
    balanced   the knee: of the front between those two the network farthest above the straight line from one to the
               other, estimated top-1 over log latency.

A front of one or two networks gives no more than these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.contest.data import data_info, dataset_config
from experiments.contest.networks import Network
from experiments.contest.options import RECIPE, Options
from hwnas.errors import ConfigError, StudyError
from hwnas.space.architecture import Architecture
from hwnas.system.paths import write_atomic

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace

ROLES = ("fast", "balanced", "accurate")
FAST_WITHIN = 0.03  # of top-1
FORMAT = "hwnas-contest-picks/1"


@dataclass(frozen=True)
class Pick:
    """What the search knew of a network of ours."""

    role: str
    id: str
    top1_estimated: float
    latency_ms_predicted: float

    @property
    def label(self) -> str:
        """Its name in the contest."""
        return f"{self.role}-{self.id}"


@dataclass(frozen=True)
class Picks:
    """`search`: what the search cost and was: seconds of trials (workers together) and of preparation (None: not
    known), trials, and how many accuracies another search had paid for."""

    picks: tuple[Pick, ...]
    search: Mapping[str, Any]
    folder: Path

    def networks(self) -> list[Network]:
        """Those that take part, fastest first."""
        return [Network(one.label, one.role, architecture=self.folder / f"{one.label}.yaml") for one in self.picks]


def picked(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The rule, over rows of trials.csv that form the front: rows by role."""
    front = sorted(rows, key=lambda row: (row["latency_ms_predicted"], -row["top1_proxy"]))
    if not front:
        raise StudyError("the search has no evaluated network to pick from. Let it finish first.")
    accurate = max(front, key=lambda row: row["top1_proxy"])
    third = sorted((row["top1_proxy"] for row in front), reverse=True)[:len(ROLES)][-1]
    least = min(accurate["top1_proxy"] - FAST_WITHIN, third)
    fast = next(row for row in front if row["top1_proxy"] >= least)
    found = {"accurate": accurate}
    if fast is not accurate:
        found["fast"] = fast
        between = front[front.index(fast) + 1 : front.index(accurate)]
        if between:
            found["balanced"] = max(between, key=lambda row: _above(row, fast, accurate))
    return {role: found[role] for role in ROLES if role in found}


def _above(row: Mapping[str, Any], fast: Mapping[str, Any], accurate: Mapping[str, Any]) -> float:
    """How much more top-1 than the straight line between the two others has at its latency."""
    here, low, high = (math.log(one["latency_ms_predicted"]) for one in (row, fast, accurate))
    share = (here - low) / (high - low)
    line = fast["top1_proxy"] + share * (accurate["top1_proxy"] - fast["top1_proxy"])
    return float(row["top1_proxy"] - line)


def picks_of(options: Options) -> Picks | None:
    """What was picked earlier, otherwise picked now from the run folder `options.ours`; None without one."""
    path = options.out / "picks.json"
    if path.is_file():
        return _read(path)
    if options.ours is None:
        return None
    found = _pick(options, options.ours)
    write_atomic(path, json.dumps({"format": FORMAT, "search": found.search,
                                   "picks": [vars(one) for one in found.picks]}, indent=1) + "\n")
    return found


def _read(path: Path) -> Picks:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        picks = tuple(Pick(**one) for one in held["picks"])
        return Picks(picks, held["search"], path.parent / "picks")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"cannot read {path}: {error}. Remove it to pick anew.") from None


def _pick(options: Options, run: Path) -> Picks:
    from hwnas.study.record import REUSED, count, front_rows, trial_rows
    from hwnas.study.study import database_path, identity_of, load_study
    from hwnas.system.run_folder import RunFolder

    config = RunFolder.open(run).read_config()
    if config.get("seed") != RECIPE["split_seed"]:
        raise ConfigError(f"ours={run} was searched with seed={config.get('seed')}, the contest splits the data with "
                          f"seed {RECIPE['split_seed']}: it may have seen test images. Search with "
                          f"seed={RECIPE['split_seed']}.")
    study, space = load_study(database_path(run)), searched_space(options, config)
    check_data(options, config, space, identity_of(study).get("data set"))
    trials = study.get_trials(deepcopy=False)
    rows = trial_rows(study)
    by_role = picked(front_rows([row for row in rows if row["feasible"] is not False and not row["stopped"]]))
    networks = _architectures(space, {row["id"] for row in by_role.values()}, trials, run)
    folder, picks = options.out / "picks", []
    for role, row in by_role.items():
        picks.append(Pick(role, row["id"], float(row["top1_proxy"]), float(row["latency_ms_predicted"])))
        write_atomic(folder / f"{picks[-1].label}.yaml", networks[row["id"]].to_yaml())
    trials_s = sum(float(row["seconds"] or 0.0) for row in rows)
    setup_s = options.setup_seconds if options.setup_seconds is not None else study.user_attrs.get("setup_seconds")
    return Picks(tuple(picks), {
        "trials": count(trials).evaluated, "asks": len(trials), "trials_seconds": round(trials_s, 1),
        "reused": sum(REUSED in one.user_attrs for one in trials), "setup_seconds": setup_s,
        "accuracy": str(config.get("accuracy")), "sampler": str(config.get("sampler")),
        "space": str(config.get("space")), "data set": identity_of(study).get("data set"),
        "target": identity_of(study).get("target"), "fast_within": FAST_WITHIN}, folder)


def searched_space(options: Options, config: Mapping[str, Any]) -> SearchSpace:
    """The one that was searched, as it reads today."""
    from hwnas.space.search_space import SearchSpace

    info = data_info(options)
    return SearchSpace.load(str(config["space"]), channels=config.get("channels") or info.channels,
                            classes=config.get("classes") or info.classes, image_size=_image_size(config))


def _image_size(config: Mapping[str, Any]) -> int | None:
    """What the search was asked for; None: the space's own."""
    return (config.get("dataset") or {}).get("image_size")


def check_data(options: Options, config: Mapping[str, Any], space: SearchSpace, searched: str | None) -> None:
    """ConfigError unless the search (its `config.yaml` and its study's data set) had the contest's images and split."""
    from hwnas.data.loading import load_dataset

    size = _image_size(config) or max(space.image_sizes)
    data = load_dataset(dataset_config(options, f"dataset.image_size={size}"), size, RECIPE["split_seed"])
    here = f"{data.name} ({data.fingerprint})"
    if searched != here:
        raise ConfigError(f"ours={options.ours} was searched on {searched}, the contest's images are {here}: other "
                          "files, or another split, so that it may have seen test images. Search on the same data set "
                          "with the same dataset options.")


def _architectures(space: SearchSpace, wanted: set[str], trials: Sequence[Any], run: Path) -> dict[str, Architecture]:
    """The networks called `wanted`, by id; StudyError when the space is no longer the one that was searched."""
    found = {one.user_attrs["architecture_id"]: space.decode(one.params) for one in trials
             if one.user_attrs.get("architecture_id") in wanted}
    for name in wanted:
        if found[name].id != name:
            raise StudyError(f"{run}: network {name} reads as {found[name].id} in today's space {space.name}. Use the "
                             "version of hwnas that searched it.")
    return found
