"""Known objectives in a run: read from its options, and told exactly of what was exported and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hwnas.architecture import Architecture
from hwnas.front import Cost, FrontRow, mark_front
from hwnas.objective import Objective
from hwnas.run_folder import ModelFolder, RunFolder
from hwnas.space_costs import LATENCY, KnownObjective, Terms
from hwnas.target import Target


def read_objective(section: Mapping[str, Any], target: Target, target_ms: float) -> Objective:
    """The `objective` section of a configuration, for a deployment; ConfigError names what is wrong with it.

    `price_per_hour` is the target's where the section gives none. Sections of before have no `known`.
    """
    price = section.get("price_per_hour")
    terms = Terms(target.precision, target.batch, target.price_per_hour if price is None else price)
    return Objective(target_ms, str(section["name"]), str(section["reward"]), section.get("known", (LATENCY,)), terms)


def told_exactly(run: RunFolder, rows: Sequence[FrontRow], environment: Mapping[str, Any]) -> list[FrontRow]:
    """Rows of a run's front with what its search minimised beside latency, and the front marked in all of it.

    Exact is what the exported network shows: the deployed file's size on disk, MACs of the model, the price at the
    measured latency. As given where the search minimised latency alone.
    """
    section = run.read_config().get("objective") if run.config.is_file() else None
    if not isinstance(section, dict) or section.get("known") in (None, [LATENCY]):
        return list(rows)
    objective = read_objective(section, Target.from_config(environment["target"]), 1.0)
    names = tuple(one.name for one in objective.minimised)
    costs = [one for one in objective.minimised if one.name != LATENCY]
    found = [replace(row, objectives=names, costs=tuple(
        _cost(one, row, run.model(row.id), objective.terms) for one in costs)) for row in rows]
    return mark_front(found, environment.get("cap_ms"))


def _cost(one: KnownObjective, row: FrontRow, folder: ModelFolder, terms: Terms) -> Cost:
    """What is known of a row: beforehand, and exactly."""
    if one.of_latency is not None:
        predicted, exact = (None if latency_ms is None else float(one.of_latency(latency_ms, terms))
                            for latency_ms in (row.latency_ms_predicted, row.latency_ms))
        return Cost(one.name, predicted, exact)
    file, described = folder.deployed(terms.precision), folder.architecture
    held = next((cost for cost in row.costs if cost.name == one.name), Cost(one.name, None, None))
    predicted, exact = held.predicted, held.exact  # these stay where the files were moved away
    if described.is_file():
        predicted = float(one.of(None, Architecture.from_yaml(described.read_text(), str(described)).blocks(), terms))
    if one.of_file is None:
        exact = float(getattr(row, one.exact))
    elif file.is_file():
        exact = one.of_file(file)
    return Cost(one.name, predicted, exact)
