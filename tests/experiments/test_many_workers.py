"""The experiment with many workers: what it asks for, how it compares, what it keeps of an interrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hwnas.errors import ConfigError, DataError, UnknownName


def result(workers: int, seed: int, share: float, storage: str = "sqlite", **figures: Any) -> Any:
    from experiments.many_workers.race import Race, Result

    given = {"evaluated": 40, "asks": 40, "duplicates": 0, "lost": 0, "seconds": 9.0, "pending": 0.0, **figures}
    return Result(Race(storage, "hwnas", workers, seed, 40, 0.3), share / 2, share, **given)


def test_workers_are_held_against_one_worker_of_the_same_seed() -> None:
    from experiments.many_workers.run import describe, summary

    alone = [result(1, 0, 0.80), result(1, 1, 0.90)]
    rows = summary([*alone, result(4, 0, 0.82, asks=50, duplicates=1), result(4, 1, 0.88, asks=50),
                    result(4, 0, 0.70, "postgresql", asks=50, duplicates=2), result(4, 1, 0.81, "postgresql", lost=3)])
    one, sqlite, server = rows
    assert (one["against_one"], one["share"], one["share_error"]) == (None, 0.85, 0.05)
    assert (sqlite["against_one"], sqlite["against_one_error"]) == (0.0, 0.02)
    assert (sqlite["duplicates"], sqlite["duplicates_share"], sqlite["lost"]) == (1, 0.01, 0)
    assert (server["against_one"], server["against_one_error"], server["lost"]) == (-0.095, 0.005, 3)
    text = describe(rows).splitlines()
    assert text[-2].startswith("4 workers in sqlite: lost nothing; duplicates within 2 %")
    assert text[-2].endswith("like one worker within two standard errors.")
    assert text[-1].startswith("4 workers in postgresql: LOST 3 evaluations; duplicates OVER 2 %")
    assert text[-1].endswith("BEHIND one worker.")


def test_noise_is_not_guessed_from_one_seed() -> None:
    from experiments.many_workers.run import describe, summary

    text = describe(summary([result(1, 0, 0.8), result(4, 0, 0.7)]))
    assert text.endswith("noise is not known from one seed.")
    assert "-10.0" in text


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    from experiments.many_workers.run import _kept

    path, found = tmp_path / "races.jsonl", result(4, 0, 0.7)
    path.write_text(json.dumps(found.to_dict()) + '\n{"race": {"sto')
    assert _kept(path) == [found]
    path.write_text("something else\n")
    with pytest.raises(DataError, match="no file of races"):
        _kept(path)


@pytest.mark.parametrize(("arguments", "error", "match"), [
    (["out=x"], ConfigError, "accuracies=… must be given"),
    (["accuracies=a.csv", "out=x", "workers=0"], ConfigError, "workers must be a whole number from 1 on, got '0'"),
    (["accuracies=a.csv", "out=x", "seconds=-1"], ConfigError, "seconds must be a number from 0 on"),
    (["worker=4"], UnknownName, "Did you mean workers"),
    (["accuracies"], ConfigError, "is no name=value"),
])
def test_options_that_cannot_be_meant(arguments: list[str], error: type[Exception], match: str) -> None:
    from experiments.many_workers.run import parse

    with pytest.raises(error, match=match):
        parse(arguments)


def test_races_take_the_server_where_one_is_named() -> None:
    from experiments.many_workers.run import parse

    given = ["accuracies=a.csv", "out=x", "seeds=2"]
    assert len(parse(given).races) == 6
    races = parse([*given, "storage=postgresql+psycopg://host/name"]).races
    assert [(one.storage, one.sampler, one.workers) for one in races[:4]] == [
        ("sqlite", "hwnas", 1), ("sqlite", "hwnas", 4), ("postgresql", "hwnas", 4), ("sqlite", "random", 1)]
