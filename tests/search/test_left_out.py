"""A search does without the kinds of blocks whose fallback costs too much, says so, and a study keeps what it began."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_fixtures import write_table

from hwnas.accuracy.estimator import Estimate
from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, StudyError
from hwnas.latency import fallbacks
from hwnas.latency.fallbacks import CheckedBlock, left_out, save_blocks
from hwnas.latency.table import TableKey
from hwnas.runtimes.runtime import load_runtime
from hwnas.search import prepare as preparing
from hwnas.search import road
from hwnas.search.plan import make_plan
from hwnas.search.prepare import Prepared
from hwnas.space.architecture import Architecture
from hwnas.space.restriction import Variant
from hwnas.space.search_space import SearchSpace
from hwnas.study.study import database_path, held_identity
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host, Target

FINE = CheckedBlock("ds", False, "relu", "ds/1", "int8", 1.0, 0.0, 0.0, "")
SQUEEZED = replace(FINE, kind="ir", se=True, block="ir/1", fallback_share=0.3, falls="Sigmoid in fp32")
CHEAP = replace(FINE, kind="ir", block="ir/2", fallback_share=0.1, falls="Add in fp32")


class Guess:
    """An estimator that believes in wide networks."""

    fingerprint = "guess"
    setup_seconds = 0.0

    def prepare(self, console: Console) -> None:
        """Nothing to do."""

    def evaluate(self, architecture: Architecture, *_: Any, **__: Any) -> Estimate:
        top1 = 1 - 1 / (1 + architecture.macs / 1e6)
        return Estimate(top1, top1 - 0.01, top1 + 0.01, 0.01, "proxy")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    write_table(tmp_path / "home", "epyc_int8")
    monkeypatch.setattr(preparing, "_estimator", lambda *_: Guess())
    return tmp_path


def keep(*rows: CheckedBlock, space: str = "mnasnet_small") -> Path:
    """Store rows as `hwnas.check` does."""
    target = make_plan(compose("search", ["+target=epyc_int8", "baselines=[]"]), Console(quiet=True)).deployment.target
    return save_blocks(rows, TableKey.of(target, (32,), 1, 10), Host.detect(), load_runtime("openvino").version(),
                       space)


def prepared(folder: Path, *given: str, quiet: bool = False) -> Prepared:
    config = compose("search", ["+target=epyc_int8", f"out={folder}", "baselines=[]", "n_trials=6", "workers=1",
                                "sampler=random", *given])
    folder.mkdir(exist_ok=True)
    return preparing.prepare(make_plan(config, Console(quiet)), RunFolder(folder), Console(quiet))


def variants(space: SearchSpace, n: int = 200) -> set[Variant]:
    drawn = [space.decode(space.to_params(row)) for row in space.sample(np.random.default_rng(0), n)]
    return {Variant.of(block) for network in drawn for stage in network.staged_blocks()[1:-1] for block in stage}


def test_what_costs_too_much_is_never_proposed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(FINE, SQUEEZED, CHEAP)
    made = prepared(home / "run")
    said = capsys.readouterr().err
    assert ("left out of the search, for what it costs: ir with squeeze-and-excite, relu: Sigmoid in fp32, "
            "30% of its time. fallbacks=true keeps it (") in said
    assert "ir, relu: Add in fp32, 10% of its time" in said  # told, and searched
    barred = Variant("ir", "se", "relu")
    space = made.plan.space
    assert barred not in variants(space)
    assert {Variant("ir", "", "relu"), Variant("ds", "se", "relu")} <= variants(space)
    assert barred in variants(space.unrestricted)
    identity = held_identity(database_path(home / "run"))
    assert identity is not None
    assert identity["left out"] == "ir/se/relu"
    assert identity["space"] == f"mnasnet_small ({space.unrestricted.fingerprint})"
    road.work_on(made, Console(quiet=True))
    asked = [space.decode(trial.params) for trial in made.study.get_trials()]
    assert len(asked) >= 6
    assert not any(block.se and block.kind == "ir" for network in asked for block in network.blocks())
    assert {network.id for network in space.known.values()} <= {network.id for network in asked}


def test_predictions_are_those_of_the_whole_space(home: Path) -> None:
    keep(SQUEEZED)
    made, whole = prepared(home / "part"), prepared(home / "whole", "fallbacks=true")
    assert whole.plan.space is whole.plan.space.unrestricted
    assert "left out" not in (held_identity(database_path(home / "whole")) or {})
    space, codes = made.plan.space, made.plan.space.sample(np.random.default_rng(1), 20)
    same = np.array([whole.plan.space.to_codes(whole.plan.space.encode(space.decode(space.to_params(row))))
                     for row in codes])
    assert np.allclose(made.model.predict(codes).mean, whole.model.predict(same).mean)


@pytest.mark.soak
def test_a_new_study_asks_the_target_once(home: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def check(space: SearchSpace, target: Target, *_: Any) -> list[CheckedBlock]:
        asked.append((space.name, target.name, _[-1]))
        return [FINE, SQUEEZED]

    monkeypatch.setattr(fallbacks, "check_blocks", check)
    assert prepared(home / "whole", "fallbacks=true").plan.left_out == ""
    assert asked == []
    assert prepared(home / "run").plan.left_out == "ir/se/relu"
    assert "left out of the search" in capsys.readouterr().err
    assert asked == [("mnasnet_small", "epyc_int8", ["int8"])]
    assert prepared(home / "run").plan.left_out == prepared(home / "other").plan.left_out == "ir/se/relu"
    assert len(asked) == 1  # what was found is kept


def test_a_target_that_does_not_tell_is_searched_whole(home: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """Not every kind is refused there: what would tell of them is missing."""
    monkeypatch.setattr(fallbacks, "check_blocks", lambda *_: [replace(FINE, refused="crashed")] * 2)
    assert prepared(home / "run").plan.left_out == ""
    assert "is not known, and none is left out: target epyc_int8: no kind of block" in capsys.readouterr().err
    assert not list((home / "home" / "latency_tables").rglob("blocks/*"))


def test_a_study_that_began_whole_stays_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(home / "run", "fallbacks=true")
    database, other = home / "run" / "study.db", home / "again"
    other.mkdir()
    shutil.copy(database, other)
    monkeypatch.setattr(fallbacks, "check_blocks", lambda *_: pytest.fail("asked for a study that has begun"))
    assert prepared(other).plan.left_out == ""


@pytest.mark.soak
def test_a_study_keeps_the_space_that_it_began_with(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepared(home / "before").plan.left_out == ""  # nothing falls back
    table = keep(FINE, SQUEEZED)
    assert prepared(home / "before").plan.left_out == ""
    assert prepared(home / "after").plan.left_out == "ir/se/relu"
    table.unlink()
    capsys.readouterr()
    again = prepared(home / "after")
    assert again.plan.left_out == "ir/se/relu"
    assert Variant("ir", "se", "relu") not in variants(again.plan.space)
    assert "for what it costs: ir/se/relu. fallbacks=true" in capsys.readouterr().err
    assert prepared(home / "after", quiet=True).plan.left_out == "ir/se/relu"  # as workers find it
    assert "left out" not in capsys.readouterr().err
    with pytest.raises(StudyError, match="cannot resume, left out was ir/se/relu, now not set"):
        prepared(home / "after", "fallbacks=true")


def test_a_space_of_which_nothing_would_stay_is_one_line(home: Path) -> None:
    keep(*(replace(SQUEEZED, kind=kind, se=se) for kind in ("ds", "cn", "ir") for se in (False, True)))
    with pytest.raises(ConfigError, match=r"nothing of stages\[0\] would stay without what costs much on epyc_int8 "
                                          r"\(ds, relu: .*\)\. Search it all the same: fallbacks=true\. ") as caught:
        prepared(home / "run")
    assert "\n" not in str(caught.value)
    assert prepared(home / "run", "fallbacks=true").plan.left_out == ""


@pytest.mark.soak
def test_accuracies_of_another_target_count_for_the_networks_that_stay(home: Path) -> None:
    whole = prepared(home / "first", "n_trials=12", "fallbacks=true")
    road.work_on(whole, Console(quiet=True))
    done = [trial for trial in whole.study.get_trials() if trial.user_attrs.get("outcome") == "evaluated"]
    keep(SQUEEZED)
    part = prepared(home / "second", f"search.reuse={home / 'first'}")
    space = part.plan.space
    fitting = {network.id for trial in done if space.find(network := whole.plan.space.decode(trial.params)) is not None}
    assert 0 < len(fitting) < len(done)
    assert {space.decode(trial.params).id for trial in part.study.get_trials()} == fitting
    assert all(trial.user_attrs["codes"] == space.to_codes(trial.params).tolist() for trial in part.study.get_trials())
    back = prepared(home / "third", f"search.reuse={home / 'second'}", "fallbacks=true")
    assert {back.plan.space.decode(trial.params).id for trial in back.study.get_trials()} == fitting


def test_leaving_out_needs_a_measured_cost() -> None:
    assert [row.costly for row in (FINE, CHEAP, SQUEEZED)] == [False, False, True]
    assert replace(FINE, weighted_falls=True).costly
    assert replace(FINE, refused="no operator Frob", ms=None).costly
    assert CHEAP.in_fallback  # which is told
    target = Target("edge", "litert", "int8")
    assert left_out([FINE, CHEAP, SQUEEZED, replace(SQUEEZED, kind="ds", precision="fp32")], target) == {
        Variant("ir", "se", "relu"): "ir with squeeze-and-excite, relu: Sigmoid in fp32, 30% of its time"}
    assert left_out([FINE, SQUEEZED], Target("edge", "litert", "fp32")) == {}
