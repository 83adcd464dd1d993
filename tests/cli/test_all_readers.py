"""Every option and every document: any value is of the declared type, or is refused in one sentence that names it."""

from __future__ import annotations

import copy
import datetime
import json
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hwnas
from hwnas.cli.options import OptionRule, names_of, read_options
from hwnas.errors import HwnasError, UserError
from hwnas.system.documents import Document

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tests.soak.parsers import PARSERS  # noqa: E402

NASTY = st.sampled_from([
    10**25, 10**400, 2**63, -(2**63), 1e308, 5e-324, math.nan, math.inf, -math.inf, "", " ", "1", "nan",
    "a\nb", "\0", "x" * 20_000, "ß\u2028", "${oc.env:HOME}", "~nobody-here/x", [[]], [None], {"": None}, {"a\nb": 1},
    {"_target_": "os.system"}, [1, True], [0.5, "a"]])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
OF_JSON = NASTY | st.recursive(SCALARS, lambda part: st.lists(part, max_size=3) | st.dictionaries(
    st.text(max_size=4), part, max_size=3), max_leaves=4)
VALUES = OF_JSON | st.sampled_from([b"bytes", datetime.date(2026, 1, 1), (1, 2), {1: 2}]) | st.builds(lambda: 10**5000)
thorough = settings(deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck))


def own_objects() -> Iterator[Any]:
    """Everything that the modules of hwnas define at their top."""
    for module in pkgutil.walk_packages(hwnas.__path__, "hwnas."):
        yield from vars(import_module(module.name)).values()


@cache
def option_classes() -> list[type[Any]]:
    """Dataclasses that `option` made fields of, and the dataclasses in them."""
    classes = [each for each in own_objects() if isinstance(each, type) and is_dataclass(each) and any(
        isinstance(field.metadata.get("rule"), OptionRule) for field in fields(each))]
    for cls in classes:
        kinds = (part for hint in get_type_hints(cls).values() for part in (hint, *get_args(hint)))
        classes += [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind) and kind not in classes]
    return sorted(set(classes), key=lambda cls: (cls.__module__, cls.__qualname__))


DOCUMENTS = sorted({id(each): each for each in own_objects() if isinstance(each, Document)}.values(),
                   key=lambda document: document.format)


def is_typed(value: Any, hint: Any) -> bool:
    """Whether a value is of the type of a field."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(is_typed(value, part) for part in get_args(hint))
    if kind is tuple and isinstance(value, tuple):
        *parts, last = get_args(hint)
        parts = parts * len(value) if last is ... else [*parts, last]
        return len(value) == len(parts) and all(map(is_typed, value, parts))
    if kind is float:
        return type(value) is float and math.isfinite(value)
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return hint is Any or (type(value) is hint if hint in (bool, int, str) else isinstance(value, kind))


def names_value(text: str, value: Any) -> bool:
    """Whether a message holds the value, a part of it, or the beginning of either."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    if value and isinstance(value, dict | list | tuple) and any(names_value(text, part) for part in parts):
        return True
    if isinstance(value, int) and abs(value) > 10**4000:
        return "thousands of digits" in text
    if isinstance(value, dict) and ("lacks" in text or "got None" in text):  # a section without one of its keys
        return True
    # The repr of a repr has more backslashes.
    return repr(value).strip("'\"").replace("\\", "")[:20] in text.replace("\\", "")


def refusal(read: Callable[[], Any], kind: type[HwnasError] = HwnasError) -> str:
    """The message with which a reader refuses; empty if it reads."""
    try:
        read()
    except kind as error:
        return str(error)
    return ""


def check_refusal(text: str, key: str, value: Any) -> None:
    """AssertionError unless a refusal is one sentence of some length with the key and the value."""
    assert "\n" not in text
    assert len(text) < 1500
    assert key in text
    assert names_value(text, value)


@pytest.mark.parametrize("cls", option_classes(), ids=lambda cls: cls.__qualname__)
@thorough
@given(VALUES)
def test_any_value_of_any_option_is_typed_or_refused_in_one_sentence(cls: type[Any], value: Any) -> None:
    base: Any = SimpleNamespace(**dict.fromkeys(names_of(cls)))  # the other options are given
    for name in names_of(cls):
        read = partial(read_options, cls, {name: value}, "some.section", base)
        if text := refusal(read, UserError):
            check_refusal(text, f"some.section.{name}", value)
        else:
            assert is_typed(getattr(read(), name), get_type_hints(cls)[name])


@pytest.mark.parametrize("cls", option_classes(), ids=lambda cls: cls.__qualname__)
def test_an_option_of_another_name_is_refused_with_the_nearest(cls: type[Any]) -> None:
    for name in names_of(cls):
        with pytest.raises(UserError, match=rf"some\.section .*Did you mean .*{name}"):
            read_options(cls, {f"{name}_": 1}, "some.section")


def fits(value: Any, shape: Any) -> bool:
    """Whether plain values have the shape of a document."""
    if isinstance(shape, tuple):
        return any(fits(value, part) for part in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(part, shape[0]) for part in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            (name in value and fits(value[name], part)) or (name[-1] == "?" and (
                name[:-1] not in value or fits(value[name[:-1]], part))) or (name == "*" and all(
                    fits(other, part) for key, other in value.items() if key not in shape))
            for name, part in shape.items())
    if shape in (int, float):
        return type(value) in (int, shape) and abs(value) < 1e300
    return value is None if shape is None else isinstance(value, shape)


def values_of(shape: Any) -> st.SearchStrategy[Any]:
    """Plain values of a shape."""
    if isinstance(shape, tuple):
        return st.one_of(*map(values_of, shape))
    if isinstance(shape, list):
        return st.lists(values_of(shape[0]), min_size=1, max_size=2)
    if isinstance(shape, dict):
        return st.fixed_dictionaries({"k" if name == "*" else name.removesuffix("?"): values_of(part)
                                      for name, part in shape.items()})
    plain = {int: st.integers(0, 99), float: st.floats(0.5, 2), str: st.just("text"), bool: st.booleans(),
             dict: st.just({"k": 1}), None: st.none()}
    return plain[shape]


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values in plain ones; of a list to the first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*way, key)
        yield from places(part, (*way, key))


def with_value(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    """A copy of plain values with another one at a place."""
    copied = copy.deepcopy(data)
    holder = copied
    for key in way[:-1]:
        holder = holder[key]
    holder[way[-1]] = value
    return copied


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.shape], ids=lambda document: document.format)
@thorough
@given(st.data())
def test_any_value_of_any_document_is_typed_or_refused_in_one_sentence(document: Document, data: st.DataObject) -> None:
    whole = data.draw(values_of(document.shape))
    way = data.draw(st.sampled_from(list(places(whole))))
    value = data.draw(VALUES)
    content = with_value(whole, way, value)
    text = refusal(lambda: document.check({**document.header, **content}, "file.json"), document.error)
    assert not text or text.startswith("file.json: ")
    if not fits(content, document.shape):
        check_refusal(text, next(key for key in reversed(way) if isinstance(key, str)), value)
    elif text:  # its parts do not fit each other
        assert document.rule is not None


READ = ("table", "architecture", "baseline", "config", "environment", "comparisons", "marker", "manifest",
        "target", "prices", "validation")


@pytest.mark.parametrize("name", READ)
@thorough
@given(data=st.data())
def test_any_value_in_any_file_is_read_or_refused_in_one_line(name: str, data: st.DataObject, tmp_path: Path) -> None:
    parser, path = PARSERS[name], tmp_path / PARSERS[name].place
    if not path.exists():
        parser.around(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
    whole = yaml.safe_load(data.draw(st.sampled_from(parser.examples())))
    value = data.draw(OF_JSON)
    content = with_value(whole, data.draw(st.sampled_from(list(places(whole)))), value)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("HWNAS_HOME", str(tmp_path / "home"))
        path.write_text(json.dumps(content))
        assert "\n" not in refusal(lambda: parser.read(tmp_path))
