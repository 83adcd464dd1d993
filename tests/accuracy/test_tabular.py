from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwnas.accuracy.estimator import load_estimator
from hwnas.accuracy.tabular import load
from hwnas.errors import ConfigError, DataError, UnknownName
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.testing import check_estimator

TABLE = "net,top1,spread\n00000001,91.5,0.2\n00000020,92,0.1\n00000002,92.5,0.1\n"
BASE: dict[str, Any] = {"key_column": "net", "value_column": "top1", "std_column": "spread"}


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("nas_bench_macro", channels=3, classes=10)


def network(space: SearchSpace, digits: str) -> Architecture:
    return space.decode(space.to_params(np.asarray([int(digit) for digit in digits])))


def test_accuracies_are_found_by_codes(tmp_path: Path, space: SearchSpace) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    table = load_estimator("tabular", space=space, config={**BASE, "path": str(tmp_path / "t.csv")})
    estimate = table.evaluate(network(space, "00000002"), (), 0)  # the same network as 00000020
    assert (estimate.value, estimate.std, estimate.source) == (pytest.approx(0.9225), pytest.approx(0.001), "published")
    check_estimator(table, network(space, "00000001"))
    with pytest.raises(DataError, match=r"no network .* in .*t\.csv \(2 networks\)"):
        table.evaluate(network(space, "22222222"), (), 0)


def test_accuracies_are_found_by_id_in_parquet(tmp_path: Path, space: SearchSpace) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    known = network(space, "01201201")
    pq.write_table(pa.table({"arch": [known.id], "top1": [0.5]}), tmp_path / "t.parquet")
    config = {"path": str(tmp_path / "t.parquet"), "key": "id", "value_column": "top1", "percent": False}
    table = load_estimator("tabular", config=config)
    assert table.evaluate(known, (), 0).value == 0.5
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match="not a Parquet file"):
        load({**config, "path": str(tmp_path / "torn.parquet")}, None, None)


@pytest.mark.parametrize(("text", "said"), [
    ("net,top1,spread\n", "no rows"),
    ("net,top1,spread\n1,many,0.1\n", "row 2: not a number"),
    ("net,top1,spread\n1,91,0.1\n2,9100,0.1\n", "row 3: an accuracy must lie in 0..1, got 91"),
    ("net,top1,spread\n1,nan,0.1\n", "row 2: an accuracy must lie in"),
    ("net,top1,spread\n1,91,0.1\n1,92,0.1\n", "row 3: '1' is there twice"),
])
def test_a_damaged_table_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        load({**BASE, "path": str(tmp_path / "t.csv"), "key": "id"}, None, None)


def test_options_are_checked(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    good = {**BASE, "path": str(tmp_path / "t.csv"), "key": "id"}
    with pytest.raises(DataError, match="cannot be read"):
        load({**good, "path": str(tmp_path / "absent.csv")}, None, None)
    with pytest.raises(UnknownName, match="Did you mean top1"):
        load({**good, "value_column": "top"}, None, None)
    with pytest.raises(ConfigError, match=r"tabular\.path must be given, got None"):
        load({**good, "path": None}, None, None)
    with pytest.raises(UnknownName, match="Known: codes, id, text"):
        load({**good, "key": "name"}, None, None)
    with pytest.raises(ConfigError, match="needs a search space"):
        load({**good, "key": "codes"}, None, None)
    with pytest.raises(DataError, match=r"'0000000.' is no network of the search space"):
        load({**good, "key": "codes"}, None, SearchSpace.load("mnasnet_small", channels=1, classes=10))
    with pytest.raises(UnknownName, match="key of tabular"):
        load({**good, "file": "x"}, None, None)


@pytest.mark.soak
def test_the_published_table_of_the_macro_space(space: SearchSpace) -> None:
    chosen = os.environ.get("HWNAS_DATA")
    path = Path(chosen or ".").parent / "benchmarks" / "nas_bench_macro.csv"
    if not chosen or not path.is_file():
        pytest.skip("no nas_bench_macro.csv beside the folder that HWNAS_DATA names")
    table = load({"path": path, "value_column": "accuracy_cifar10", "std_column": "accuracy_std"}, None, space)
    assert 2000 < len(table.rows) < 6561  # an identity moved within a stage changes nothing
    codes = space.sample(np.random.default_rng(0), 50)
    values = [table.evaluate(space.decode(space.to_params(row)), (), 0).value for row in codes]
    assert 0.8 < min(values) < max(values) < 0.96
