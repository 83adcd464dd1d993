"""The reader of options: what keeps the rules comes back typed, all else is one sentence with key and value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hwnas.accuracy.estimator import BUILT_IN
from hwnas.cli.command import compose
from hwnas.cli.options import MANDATORY, Rule, defaults, names_of, option, plain, read_options
from hwnas.cli.options import given as given_values
from hwnas.errors import ConfigError, UnknownName, UserError
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
    kept: float = option(0, low=0, as_given=True)
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


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([one.name for one in fields(Outer)]), VALUES))
def test_any_value_is_read_as_its_type_or_refused_in_one_sentence(values):
    try:
        options = read_options(Outer, values, "outer")
    except UserError as error:
        text = str(error)
        assert text.startswith(("outer.", "unknown outer.", "unknown key of outer"))
        assert "must be" in text or "unknown" in text
        return
    for name, kind in {"epochs": int, "lr": float, "flip": bool, "vendor": str, "rungs": tuple, "inner": Inner}.items():
        assert type(getattr(options, name)) is kind
    assert 1 <= options.epochs <= 1000
    assert 0 < options.lr <= 10
    assert math.isfinite(options.kept)
    assert not isinstance(options.kept, bool)
    assert options.channels in (None, 1, 3)
    assert list(options.rungs) == sorted(set(options.rungs))
    assert set(options.scores) <= {"naswot", "synflow"}
    assert 0 < options.inner.share < 1


@settings(deadline=None)
@given(st.integers(-10, 1010))
def test_ends_of_a_range_belong_to_it(value):
    if 1 <= value <= 1000:
        assert read(epochs=value).epochs == value
    else:
        with pytest.raises(ConfigError) as error:
            read(epochs=value)
        assert str(error.value) == f"outer.epochs must be a whole number from 1 to 1000, got {value}."


@settings(deadline=None)
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_exclusive_ends_do_not(value):
    if 0 < value < 1:
        assert read(inner={"share": value}).inner.share == value
    else:
        with pytest.raises(ConfigError, match=r"outer\.inner\.share must be a number above 0 and below 1, got"):
            read(inner={"share": value})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_what_is_read_is_shown_and_read_again(value):
    options = read(more={"deep": value}, rungs=[1, 5], root="/data/x", inner={"score": "synflow"}, mean=[1, 2, 3.5])
    shown = plain(options)
    assert read_options(Outer, shown, "outer") == options or value != value or "nan" in repr(value)
    assert shown["rungs"] == [1, 5]
    assert shown["root"] == "/data/x"
    assert shown["inner"] == {"share": 0.5, "score": "synflow"}


@pytest.mark.parametrize(("values", "message"), [
    ({"epochs": True}, "outer.epochs must be a whole number from 1 to 1000, got True."),
    ({"epochs": 2.0}, "outer.epochs must be a whole number from 1 to 1000, got 2.0."),
    ({"epochs": "3"}, "outer.epochs must be a whole number from 1 to 1000, got '3'."),
    ({"epochs": None}, "outer.epochs must be a whole number from 1 to 1000, got None."),
    ({"lr": False}, "outer.lr must be a number above 0 and at most 10, got False."),
    ({"lr": math.nan}, "outer.lr must be a number above 0 and at most 10, got nan."),
    ({"kept": 10**400}, f"outer.kept must be a number of at least 0, got {10**400}."),
    ({"kept": math.inf}, "outer.kept must be a number of at least 0, got inf."),
    ({"channels": 2}, "outer.channels must be 1, 3 or null, got 2."),
    ({"channels": True}, "outer.channels must be 1, 3 or null, got True."),
    ({"flip": 1}, "outer.flip must be true or false, got 1."),
    ({"flip": "yes"}, "outer.flip must be true or false, got 'yes'."),
    ({"name": ""}, "outer.name must be a text, got ''."),
    ({"name": 3}, "outer.name must be a text, got 3."),
    ({"name": None}, "outer.name must be a text, got None."),
    ({"vendor": 3}, "outer.vendor must be a text, got 3."),
    ({"root": " "}, "outer.root must be null or a path, got ' '."),
    ({"root": 3}, "outer.root must be null or a path, got 3."),
    ({"rungs": [4, 2]}, "outer.rungs must be ascending whole numbers from 1 to 100, got [4, 2]."),
    ({"rungs": [1, True]}, "outer.rungs must be ascending whole numbers from 1 to 100, got [1, True]."),
    ({"rungs": "12"}, "outer.rungs must be ascending whole numbers from 1 to 100, got '12'."),
    ({"mean": [1, 2]}, "outer.mean must be null or a list of 3 numbers, got [1, 2]."),
    ({"inner": 3}, "outer.inner must be a section of keys and values, got 3."),
    ({"more": [3]}, "outer.more must be a section of keys and values, got [3]."),
])
def test_the_sentence_names_key_rule_and_value(values, message):
    with pytest.raises(ConfigError) as error:
        read(**values)
    assert str(error.value) == message


@pytest.mark.parametrize(("values", "message"), [
    ({"epoch": 3}, "unknown key of outer 'epoch'. Did you mean epochs"),
    ({"inner": {"shares": 0.1}}, "unknown key of outer.inner 'shares'. Did you mean share"),
    ({"inner": {"score": "naswott"}}, "unknown outer.inner.score 'naswott'. Did you mean naswot"),
    ({"inner": {"score": 3}}, "unknown outer.inner.score '3'."),
    ({"scores": ["naswot", "x"]}, "unknown outer.scores 'x'."),
])
def test_unknown_keys_and_choices_are_told_with_the_list(values, message):
    with pytest.raises(UnknownName, match="Known: ") as error:
        read(**values)
    assert str(error.value).startswith(message)


def test_what_has_no_default_must_be_given():
    with pytest.raises(ConfigError, match=r"^outer\.name must be a text, got None\.$"):
        read_options(Outer, {}, "outer")
    with pytest.raises(ConfigError, match=r"^name must be a text, got None\.$"):
        read_options(Outer, {})


def test_whole_numbers_are_floats_and_stay_whole_where_a_fingerprint_needs_them():
    assert repr(read(lr=1).lr) == "1.0"
    assert repr(read(kept=1).kept) == "1"
    assert repr(read(kept=1.0).kept) == "1.0"


def test_null_is_an_empty_section_and_paths_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read(inner=None, more=None) == Outer("x")
    assert read_options(Inner, None, "inner") == Inner()
    assert read(root="a/../b").root == tmp_path / "b"
    assert read(root="~/b").root == tmp_path / "b"


def test_a_file_must_be_there(tmp_path):
    @dataclass(frozen=True)
    class Filed:
        weights: Any = None

    Filed.__annotations__["weights"] = Path | None
    Filed.__dataclass_fields__["weights"].metadata = option(None, is_file=True).metadata
    (tmp_path / "w").touch()
    assert read_options(Filed, {"weights": str(tmp_path / "w")}).weights == tmp_path / "w"
    assert read_options(Filed, {"weights": None}).weights is None
    with pytest.raises(ConfigError, match=r"^train\.weights: there is no file .*/v\. Give the path of one\.$"):
        read_options(Filed, {"weights": str(tmp_path / "v")}, "train")


def test_a_preset_stands_for_the_defaults_and_others_read_their_own_keys():
    preset = Outer("preset", epochs=9, lr=0.3)
    assert read_options(Outer, {"epochs": 4}, "outer", preset) == Outer("preset", epochs=4, lr=0.3)
    assert read_options(Inner, {"share": 0.1, "theirs": 3}, "outer", others=("theirs",)) == Inner(0.1)
    with pytest.raises(UnknownName, match="theirs"):
        read_options(Inner, {"their": 3}, "outer", others=("theirs",))
    assert defaults(Outer, preset)["lr"] == 0.3


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
    ("verify", "hwnas.verify:VerifyOptions"), ("predict", "hwnas.predict:PredictOptions"),
    ("log", "hwnas.log:LogOptions")]


@pytest.mark.parametrize(("command", "where"), COMMANDS)
def test_every_option_of_a_command_is_shown_and_read(command, where):
    module, _, name = where.partition(":")
    target = command not in ("train", "verify", "predict", "log")
    shown = given_values(compose(command, ["+target=ort_int8"] if target else [], target))
    more = set(names_of(Recipe)) | {"name"} if command == "train" else set()
    more |= {"run"} if command == "verify" else {*BUILT_IN} if command == "search" else set()
    more |= {"budget"} if command in ("profile", "validate") else set()  # calibration.minutes is the same
    read = set(names_of(getattr(import_module(module), name)))
    assert set(shown) - read <= more, "an option that is shown and not read"
    assert read - set(shown) <= {"target", "model", "host"}, "an option that is read and not shown"


def rules_of(cls: type[Any], at: str = "") -> Iterator[tuple[str, Any, Rule]]:
    """Key, type and rule of every option of a dataclass, and of the dataclasses in it."""
    for one in fields(cls):
        kind = get_type_hints(cls)[one.name]
        kind = next((part for part in get_args(kind) if part is not NoneType), kind) if NoneType in get_args(
            kind) else kind
        key = f"{at}.{one.name}" if at else one.name
        if is_dataclass(kind):
            yield from rules_of(kind, key)
        elif isinstance(rule := one.metadata.get("rule"), Rule):
            yield key, kind, rule


def wrong_values(kind: Any, rule: Rule) -> Iterator[Any]:
    """Values that break a rule, or the type: a little beyond each end, no choice, another type."""
    wrong = [end - 1 for end in (rule.low, rule.above) if end is not None]
    wrong += [end + 1 for end in (rule.high, rule.below) if end is not None]
    wrong += ["no such choice"] if len(rule.names()) else []
    wrong += ["many"] if kind in (int, float, bool) else []
    yield from ([value] if get_origin(kind) is tuple else value for value in wrong)


@pytest.mark.parametrize(("command", "where"), COMMANDS)
def test_an_option_of_a_command_keeps_its_range_choices_and_type(command, where):
    module, _, name = where.partition(":")
    cls, tried = getattr(import_module(module), name), 0
    for key, kind, rule in rules_of(cls):
        section, _, last = key.rpartition(".")
        owner = cls
        for part in section.split(".") if section else []:
            owner = next(part_of for part_of in (get_type_hints(owner)[part], *get_args(get_type_hints(owner)[part]))
                         if is_dataclass(part_of))
        base = SimpleNamespace(**dict.fromkeys(names_of(owner)))  # the others are given
        for value in wrong_values(kind, rule):
            with pytest.raises(UserError, match=re.escape(key)):
                read_options(owner, {last: value}, section, base)
            tried += 1
    assert tried
