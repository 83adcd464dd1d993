"""The shipped latency tables: whole, of networks that were measured, and as good as they say."""

from __future__ import annotations

import numpy as np
import pytest

from hwnas.latency.model import LatencyModel, timed_networks
from hwnas.latency.prior import stored_prior
from hwnas.latency.table import LatencyTable, table_path
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import shipped

TABLES = sorted(shipped("latency_tables").rglob("*.json.gz"))
NAMES = [f"{path.parent.name}/{path.name.removesuffix('.json.gz')}" for path in TABLES]
TOLERANCE = 0.05  # of a share: three folds instead of ten leave the fit fewer networks
MANY = 450  # networks, from which three folds do
SHORT = "amd-epyc-f26m2s1-2c/openvino-int8-t2-b1-32px-c1-k10"  # of few networks


def space_of(table: LatencyTable) -> SearchSpace:
    (name,) = table.spaces()
    return SearchSpace.load(name, channels=table.key.channels, classes=table.key.classes,
                            image_size=table.key.sizes[0])


@pytest.mark.parametrize(("host", "shapes", "float"), [
    ("amd-epyc-f25m1s1-2c", ["32px-c1-k10"], "fp32"), ("amd-epyc-f26m2s1-2c", ["32px-c1-k10", "128px-c3-k10"], "bf16"),
    ("intel-xeon-f6m167s1-2c", ["32px-c1-k10", "128px-c3-k10"], "bf16")])
def test_each_host_has_the_tables_that_are_promised(host: str, shapes: list[str], float: str) -> None:
    wanted = {f"{host}/{runtime}-{precision}-t1-b1-{shape}" for shape in shapes
              for runtime, precision in (("openvino", "int8"), ("openvino", float), ("onnxruntime", "int8"),
                                         ("onnxruntime", "fp32"))}
    assert wanted <= set(NAMES)


def test_litert_is_told_in_both_precisions():
    wanted = {f"litert-{precision}-t1-b1-32px-c1-k10" for precision in ("int8", "fp32")}
    hosts = {name.partition("/")[0] for name in NAMES if "/litert-" in name}
    assert hosts
    assert all(f"{host}/{table}" in NAMES for host in hosts for table in wanted)


@pytest.mark.parametrize(("path", "folds"), [
    pytest.param(TABLES[NAMES.index(SHORT)], 3, id="short"),
    *(pytest.param(path, 10, id=name, marks=pytest.mark.soak) for path, name in zip(TABLES, NAMES, strict=True))])
def test_what_a_table_says_follows_from_its_own_samples(path, folds, tmp_path, monkeypatch):
    monkeypatch.delenv("HWNAS_OWN_TABLES")
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))  # none of the tables that other tests have measured
    table = LatencyTable.load(path)
    space = space_of(table)
    assert path == table_path(path.parents[1], table.host_name, table.key).with_name(path.name)
    assert all(one.measurement.valid for one in table.networks)
    assert all(sum(len(turn.samples_ms) for turn in one.measurement.turns) >= 60 for one in table.networks)
    prior, notes = stored_prior(table, space)  # other shipped tables
    assert notes == []
    timed, model = timed_networks(table.networks, table.quiet_ms), LatencyModel.fit(table, space, prior=prior)
    found = model.predict_architectures([one.architecture for one in table.networks])
    # predictions are of the mean pace, each wave had its own: hence twice what is stored
    assert np.mean(np.abs(found.mean / timed.measured_ms - 1)) <= 2 * table.error[space.name]["mean_error"]
    assert np.all(found.low < found.high)
    stored = table.learnt.pop(space.name)
    assert stored["networks"] == len(table.networks)
    assert table.error[space.name] == stored["error"]
    many = folds == 3 or len(table.networks) >= MANY
    again = LatencyModel.fit(table, space, prior=prior, folds=3 if many else 10)
    for name in ("within_5", "within_10", "coverage"):
        assert again.error[name] == pytest.approx(stored["error"][name], abs=TOLERANCE if many else 0.01)
