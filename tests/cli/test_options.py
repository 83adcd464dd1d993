"""The reader of options: what keeps the rules comes back typed, all else is one sentence with key and value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hwnas.cli.command import compose
from hwnas.cli.options import MANDATORY, defaults, names_of, option, plain, read_options
from hwnas.cli.options import given as given_values
from hwnas.errors import ConfigError, UnknownName
from hwnas.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Inner:
    share: float = option(0.5, above=0, below=1)
    score: str = option("naswot", choices=lambda: ("naswot", "synflow"))


@dataclass(frozen=True, slots=True)
class Outer:
    name: str = option()
    epochs: int = option(3, low=1, high=1000, help="passes through the images")
    lr: float = option(0.01, above=0, high=10)
    channels: int | None = option(None, choices=(1, 3))
    flip: bool = False
    vendor: str = ""
    root: Path | None = None
    rungs: tuple[int, ...] = option((2, 4), low=1, high=100, check=lambda rungs: list(rungs) == sorted(set(rungs)),
                                    what="ascending whole numbers from 1 to 100")
    scores: tuple[str, ...] = option((), choices=("naswot", "synflow"))
    mean: tuple[float, float, float] | None = None
    inner: Inner = Inner()
    more: Mapping[str, Any] = field(default_factory=dict)
    anything: Any = None


def read(**values: Any) -> Outer:
    return read_options(Outer, {"name": "x", **values}, "outer")


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
VALUES = st.recursive(SCALARS, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part,
                                                                                         max_size=3), max_leaves=5)


@settings(deadline=None)
@given(st.integers(-10, 1010), st.floats(allow_nan=True, allow_infinity=True))
def test_ends_of_a_range_belong_to_it_unless_they_are_exclusive(epochs, share):
    for good, values, at, value, rule in (
            (1 <= epochs <= 1000, {"epochs": epochs}, "epochs", epochs, "a whole number from 1 to 1000"),
            (0 < share < 1, {"inner": {"share": share}}, "inner.share", share, "a number above 0 and below 1")):
        if good:
            assert attrgetter(at)(read(**values)) == value
        else:
            with pytest.raises(ConfigError) as error:
                read(**values)
            assert str(error.value) == f"outer.{at} must be {rule}, got {value}."


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_what_is_read_is_shown_and_read_again(value):
    options = read(more={"deep": value}, rungs=[1, 5], root="/data/x", inner={"score": "synflow"}, mean=[1, 2, 3.5])
    shown = plain(options)
    assert read_options(Outer, shown, "outer") == options or value != value or "nan" in repr(value)
    assert shown["rungs"] == [1, 5]
    assert shown["root"] == "/data/x"
    assert shown["inner"] == {"share": 0.5, "score": "synflow"}


@pytest.mark.parametrize("where", ["outer", ""])
def test_what_has_no_default_must_be_given(where):
    with pytest.raises(ConfigError, match=rf"^{f'{where}.' if where else ''}name must be a text, got None\.$"):
        read_options(Outer, {}, where)


def test_whole_numbers_are_floats_too():
    assert repr(read(lr=1).lr) == "1.0"


def test_null_is_an_empty_section_and_paths_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read(inner=None, more=None) == Outer("x")
    assert read_options(Inner, None, "inner") == Inner()
    assert read(root="a/../b").root == tmp_path / "b"
    assert read(root="~/b").root == tmp_path / "b"


@dataclass(frozen=True)
class Filed:
    weights: Path | None = option(None, check=os.path.isfile, what="a file that is there")


def test_a_file_must_be_there(tmp_path):
    (tmp_path / "w").touch()
    assert read_options(Filed, {"weights": str(tmp_path / "w")}).weights == tmp_path / "w"
    assert read_options(Filed, {"weights": None}).weights is None
    with pytest.raises(ConfigError, match=r"^train\.weights must be a file that is there, got '.*/v'\.$"):
        read_options(Filed, {"weights": str(tmp_path / "v")}, "train")


def test_a_preset_stands_for_the_defaults_and_others_read_their_own_keys():
    preset = Outer("preset", epochs=9, lr=0.3)
    assert read_options(Outer, {"epochs": 4}, "outer", preset) == Outer("preset", epochs=4, lr=0.3)
    assert read_options(Inner, {"share": 0.1, "theirs": 3}, "outer", others=("theirs",)) == Inner(0.1)
    with pytest.raises(UnknownName, match="theirs"):
        read_options(Inner, {"their": 3}, "outer", others=("theirs",))


def test_defaults_are_values_of_yaml():
    shown = defaults(Outer)
    assert list(shown) == names_of(Outer) == [one.name for one in fields(Outer)]
    assert shown["name"] == MANDATORY
    assert shown["rungs"] == [2, 4]
    assert shown["inner"] == {"share": 0.5, "score": "naswot"}
    assert OmegaConf.create(shown).inner.score == "naswot"
    assert OmegaConf.is_missing(OmegaConf.create(shown), "name")


def test_sections_of_a_composed_configuration_are_read_resolved():
    config = OmegaConf.create({"n": 5, "outer": {"name": "x", "epochs": "${n}", "rungs": [1, 2], "inner": {}}})
    assert read_options(Outer, config.outer, "outer") == Outer("x", epochs=5, rungs=(1, 2))


COMMANDS = [
    ("search", "hwnas.search.plan:PlanOptions"), ("profile", "hwnas.latency.deployment:ProfileOptions"),
    ("validate", "hwnas.validate:ValidateOptions"),
    ("benchmark", "hwnas.benchmark.__main__:BenchmarkOptions"), ("train", "hwnas.training.source:TrainOptions"),
    ("quantize", "hwnas.quantize:QuantizeOptions"),
    ("verify", "hwnas.verify:VerifyOptions"), ("predict", "hwnas.predict:PredictOptions")]


@pytest.mark.parametrize(("command", "where"), COMMANDS)
def test_every_option_of_a_command_is_shown_and_read(command, where):
    module, _, name = where.partition(":")
    target = command not in ("train", "verify", "predict")
    shown = given_values(compose(command, ["+target=ort_int8"] if target else [], target))
    more = set(names_of(Recipe)) | {"name"} if command == "train" else set()
    more |= {"run"} if command == "verify" else {"proxy"} if command == "search" else set()
    more |= {"budget"} if command in ("profile", "validate") else set()  # calibration.minutes is the same
    read = set(names_of(getattr(import_module(module), name)))
    assert set(shown) - read <= more, "an option that is shown and not read"
    assert read - set(shown) <= {"target", "model", "host"}, "an option that is read and not shown"
