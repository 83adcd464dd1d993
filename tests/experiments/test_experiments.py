"""The experiments: whole commands on tiny tables, and that they tell a good predictor from a bad one."""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from null_runtime import NullRuntime

from hwnas.errors import ConfigError, HwnasError
from hwnas.latency.deployment import Plan
from hwnas.latency.held_out_networks import TimedOne
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.model import Fit, LatencyModel, Timed, most_telling
from hwnas.latency.prior import MOST_OF_KIND, Gain, TablesPrior, gain_of, learnt_model, model_of, nearest_prior
from hwnas.latency.table import LatencyTable, TableKey, TimedNetwork
from hwnas.latency.timing import prepare_network
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Host, Target
from hwnas.validate import network_to_dict, save

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = Protocol(warmup_calls=1, round_ms=0.01, min_calls=1, max_calls=2, copies=1, min_rounds=1, max_rounds=3,
                    half_width=10.0, max_seconds=5.0)


def true_ms(block, depthwise: float = 4e-8) -> float:
    """A machine: a call and MACs by kind for each convolution."""
    total = 0.005 if block.kind in ("stem", "head") else 0.0
    for role, n_in, n_out, kernel, _, out in block.convolutions():
        macs = (1 if role == "depthwise" else n_in) * n_out * kernel**2 * out**2
        total += 0.002 + macs * (depthwise if role == "depthwise" else 8e-9)
    return total


def networks(space, n, seed):
    found = {}
    for row in space.sample(np.random.default_rng(seed), 2 * n):
        one = space.decode(space.to_params(row))
        found.setdefault(one.id, one)
    return list(found.values())[:n]


def measurement(ms: float) -> Measurement:
    return Measurement(tuple(Turn((ms * (1 + 0.001 * i),), (100.0,)) for i in range(8)), 0.1, PROTOCOL)


def table_of(space, n, *, precision="fp32", speed=1.0, depthwise=4e-8, seed=1) -> LatencyTable:
    rng = np.random.default_rng(seed)
    found = []
    for one in networks(space, n, seed):
        blocks = np.array([speed * true_ms(block, depthwise) for block in one.blocks()])
        ms = float(blocks.sum() * np.exp(0.005 * rng.standard_normal()))
        found.append(TimedNetwork(space.name, one, measurement(ms)))
    key = TableKey.of(Target("t", "null", precision), space.image_sizes, space.channels, space.classes)
    return LatencyTable(key, Host.detect().to_dict(), load_runtime("null").version(), "2026-01-01", PROTOCOL,
                        space.reference, 0.1, 0.0, found, spent_s={space.name: 60.0})


def timed_of(table) -> Timed:
    return Timed([one.architecture.blocks() for one in table.networks],
                 np.array([one.measurement.latency_ms for one in table.networks]), np.zeros(len(table.networks)))


def validation_of(path, table, architectures) -> None:
    found = [TimedOne("random", one, measurement(sum(map(true_ms, one.blocks())))) for one in architectures]
    save(path, {"host": table.host, "runtime": table.runtime_version, "table": {"key": str(table.key)},
                "space": {"name": "mnasnet_small"}, "seed": 1, "measured_at": "2026-01-02",
                "protocol": PROTOCOL.to_dict(),
                "networks": [network_to_dict(one, (1.0, 0.5, 2.0)) for one in found]})


class Noise:
    names = ("noise",)

    def block_ms(self, blocks):
        return np.random.default_rng(len(blocks)).exponential(0.02, (len(blocks), 1))


def prior_of(*tables) -> TablesPrior:
    return TablesPrior.of({f"table {index}": table for index, table in enumerate(tables)})


def test_a_prior_that_knows_the_machine_is_sure_to_gain_and_noise_is_not(space):
    few = timed_of(table_of(space, 14, seed=2))
    same_but_slower = prior_of(table_of(space, 60, speed=3.0))
    assert gain_of(same_but_slower, few).sure
    assert not gain_of(Noise(), few).sure
    assert not gain_of(same_but_slower, few[np.arange(5)]).sure


def test_a_gain_counts_only_beyond_its_standard_error():
    rng = np.random.default_rng(0)
    errors = rng.exponential(0.05, 20)
    assert Gain.between(errors + 0.01, errors).sure
    assert not Gain.between(errors, rng.permutation(errors)).sure
    assert not Gain.between(errors, errors + 0.01).sure


def error_on(others, few, prior) -> float:
    return float(np.abs(Fit.of(few, prior).networks(others.blocks)[0] / others.measured_ms - 1).mean())


def test_other_tables_help_networks_not_seen_whatever_their_machines_speed(space):
    few, others = timed_of(table_of(space, 12, seed=2)), timed_of(table_of(space, 60, seed=3))
    prior = prior_of(table_of(space, 60, speed=0.5), table_of(space, 60, speed=20.0, depthwise=6e-8))
    assert error_on(others, few, prior) < 0.5 * error_on(others, few, None)


def test_the_most_telling_networks_are_new_and_tell_more_than_most_draws(space):
    machine = timed_of(table_of(space, 80, seed=2, depthwise=8e-8))
    others = timed_of(table_of(space, 60, seed=3, depthwise=8e-8))
    prior = prior_of(table_of(space, 60, speed=0.5))
    rng = np.random.default_rng(0)
    drawn = [error_on(others, machine[rng.permutation(80)[:10]], prior) for _ in range(9)]
    telling = most_telling(machine.blocks, prior, 10)
    assert len(set(telling)) == 10
    assert not {0, 1, 2} & {*most_telling(machine.blocks, prior, 10, known=3)}
    assert error_on(others, machine[np.array(telling)], prior) < np.median(drawn)
    assert sorted(most_telling(machine.blocks[:4], prior, 10)) == [0, 1, 2, 3]


@pytest.fixture
def shelf(space, tmp_path, monkeypatch):
    folder = tmp_path / "latency_tables"
    monkeypatch.setattr("hwnas.latency.prior.table_dirs", lambda: [folder, tmp_path / "shipped"])
    table = table_of(space, 14)

    def put(host: str, name: str) -> Path:
        path = folder / host / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path)
        return path

    return put, table.key


def names_of(prior) -> list[str]:
    return [name.partition(" of ")[0] for name in prior.names]


def test_the_nearest_tables_are_taken_together_and_broken_ones_are_noted(space, shelf):
    put, key = shelf
    put("there", "openvino-fp32-t1-b1-32px-c1-k10.json")
    put("here", "null-bf16-t1-b1-32px-c1-k10.partial.json")
    put("there", "notes.json")
    put("here", f"{key}.json")
    assert names_of(nearest_prior("here", key, space)[0]) == ["there/openvino-fp32-t1-b1-32px-c1-k10"]
    put("there", "null-int8-t1-b1-32px-c1-k10.json.gz")
    assert names_of(nearest_prior("here", key, space)[0]) == ["there/null-int8-t1-b1-32px-c1-k10"]
    put("there", f"{key}.json")
    put("here", "null-fp32-t1-b1-128px-c3-k10.json")
    put("here", "null-fp32-t1-b1-64px-c3-k10.json").write_text("{")
    put("here", "openvino-bf16-t1-b1-32px-c1-k10.json")
    prior, notes = nearest_prior("here", key, space)
    assert names_of(prior) == ["here/null-fp32-t1-b1-128px-c3-k10", f"there/{key}",
                               "here/openvino-bf16-t1-b1-32px-c1-k10"]
    assert len(notes) == 1
    assert "64px" in notes[0]
    assert "\n" not in notes[0]
    assert np.all(prior.block_ms(space.reference.blocks()) > 0)
    for index in range(MOST_OF_KIND):
        put(f"host{index}", f"{key}.json")
    names = names_of(nearest_prior("here", key, space)[0])
    assert len(names) == MOST_OF_KIND + 1
    assert names[-1] == "here/openvino-bf16-t1-b1-32px-c1-k10"


def test_a_fit_that_started_from_other_tables_needs_them_again(space, shelf):
    put, key = shelf
    source = put("there", f"{key}.json")
    put("yonder", f"{key}.json")
    table = table_of(space, 14, seed=2)
    table.host["name"] = "here"
    prior, _ = nearest_prior("here", key, space)
    model, notes = learnt_model(table, space, prior)
    assert model.learnt.priors == prior.names
    assert "there/" in notes[0]
    assert "yonder/" in notes[0]
    table.learnt = {space.name: model.learnt.to_dict()}
    again, notes = model_of(table, space)
    networks = [one.architecture for one in table.networks]
    np.testing.assert_allclose(again.predict_architectures(networks).mean, model.predict_architectures(networks).mean)
    assert notes == []
    source.unlink()
    rest, notes = model_of(table, space)
    assert "not at hand" in notes[-1]
    assert rest.learnt.priors == model.learnt.priors[1:]
    table.learnt = {space.name: {**model.learnt.to_dict(), "priors": [], "prior": model.learnt.priors[1]}}
    alone, notes = model_of(table, space)
    assert notes == []
    assert alone.learnt.priors == ()


def test_what_an_earlier_version_started_from_one_table_is_fitted_anew(space):
    table = table_of(space, 14)
    stored = LatencyModel.fit(table, space).learnt.to_dict()
    table.learnt = {space.name: {**stored, "spread": 9.0}}
    assert LatencyModel.fit(table, space).learnt.spread == 9.0
    table.learnt = {space.name: {**stored, "spread": 9.0, "prior": "there/x of 2026-01-01"}}
    assert LatencyModel.fit(table, space).learnt.spread == stored["spread"]


def test_without_other_tables_there_is_no_prior(space, shelf):
    assert nearest_prior("here", shelf[1], space) == (None, [])


def test_a_first_wave_beside_a_prior_tells_most_and_known_networks_are_not_forgotten(space):
    prior = prior_of(table_of(space, 60, speed=0.5))
    plan = Plan(space, 1, set(), prior)
    first, second = plan.wave(6, None), plan.wave(24, None)
    assert [origin for origin, _ in first].count("telling") == 3
    known = {network.id for network in space.known.values()}
    assert known <= {network.id for _, network in [*first, *second]}
    ids = [network.id for _, network in [*first, *second]]
    assert len(ids) == len(set(ids)) == 30
    assert "telling" not in {origin for origin, _ in second}
    assert [network.id for _, network in Plan(space, 1, set(), prior).wave(6, None)] == ids[:6]


def test_transfer_judges_every_table_of_which_another_host_has_the_kind(space, tmp_path, capsys, monkeypatch):
    from experiments.latency.transfer.run import main

    monkeypatch.setattr("sys.argv", ["run", "--tables", str(tmp_path), "--out", str(tmp_path / "out"), "--seeds", "2",
                                     "--processes", "1"])
    for host, speed in (("slow", 2.0), ("fast", 1.0)):
        table = table_of(space, 40, speed=speed)
        table.host["name"] = host
        (tmp_path / host).mkdir()
        table.save(tmp_path / host / f"{table.key}.json.gz")
    table.save(tmp_path / "fast" / "null-int8-t1-b1-32px-c1-k10.json.gz")
    main()
    found = pd.read_csv(tmp_path / "out" / "transfer.csv")
    assert {*found.host} == {"slow", "fast"}
    assert {*found.n} == {10}
    assert len(found) == 2 * 2 * (3 + 2)  # tables, seeds, starts with and without the control
    errors = found.pivot(index=["host", "chosen", "seed"], columns="start", values="mean_error")
    assert (errors.tables < errors.scratch).all()
    assert not found[found.start == "control"].taken.any()
    assert "tables: taken in" in capsys.readouterr().out


def test_kernels_of_a_block_have_all_its_macs(space):
    from experiments.latency.peers.parts import kernels

    for one in networks(space, 30, 5):
        for block in one.blocks():
            assert sum(kernel.features[6] for kernel in kernels(block)) == block.macs


def test_sampled_kernels_are_different_and_each_difference_has_its_convolution(space):
    from experiments.latency.peers.parts import CALL, sampled_kernels

    found = sampled_kernels(networks(space, 30, 5), 80)
    assert found[0] == CALL
    assert 60 < len(found) == len(set(found)) <= 80
    assert {one.kind for one in found[:20]} == {one.kind for one in found}
    assert {one.before for one in found if one.before} <= set(found)
    assert found == sampled_kernels(networks(space, 30, 5), 80)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_parts_become_networks_that_a_runtime_executes(space, tmp_path, precision):
    from experiments.latency.peers.isolated import prepare_part
    from experiments.latency.peers.parts import KERNELS, Block, network_kernels, sampled_kernels

    some = networks(space, 30, 5)
    target = Target("t", "onnxruntime", precision)
    parts = {one.kind: one for one in sampled_kernels(some, 60)}
    assert {one.kind for network in some for one in network_kernels(network)} <= set(parts) <= set(KERNELS)
    blocks = {spec.kind: Block(spec) for network in some for spec in network.blocks()}
    for index, part in enumerate([*parts.values(), *blocks.values()]):
        path = prepare_part(part, target, tmp_path / f"{index}.onnx")
        compiled = load_runtime("onnxruntime").compile(path, target)
        compiled.bind(np.zeros((1, *part.input_shape), np.float32))()
        assert set(compiled.execution.precisions) <= {precision, "fp32"}


class HerePool:
    """Exports in this process, where torch is loaded already; arguments travel as they would to another one."""

    def __init__(self, *arguments, **named):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *arguments):
        job: Future = Future()
        job.set_result(function(*pickle.loads(pickle.dumps(arguments))))
        return job


def test_a_method_that_predicts_less_than_nothing_still_gets_its_line():
    from experiments.latency.peers.methods import _log_line

    line = _log_line(np.array([-3.0, 0.5, 1.0, 2.0]), np.array([0.1, 0.2, 0.3, 0.4]))
    assert np.all(np.isfinite(line(np.array([-1.0, 0.0, 1.0]))))


def test_peers_runs_whole_goes_on_and_refuses_what_does_not_belong_together(space, tmp_path, capsys, monkeypatch,
                                                                            virtual_clock):
    from experiments.latency.peers.run import main

    virtual_clock.reading_ns = 1000
    for place in ("experiments.latency.peers.isolated", "hwnas.latency.copies", "hwnas.latency.timing"):
        monkeypatch.setattr(f"{place}.load_runtime", lambda name: NullRuntime(0.02))
    monkeypatch.setattr("experiments.latency.peers.isolated.ProcessPoolExecutor", HerePool)
    exported = prepare_network(space.reference, Target("t", "null", "fp32"), tmp_path)  # the null runtime runs none
    monkeypatch.setattr("experiments.latency.peers.isolated.prepare_part",
                        lambda part, target, file: shutil.copy(exported, file))
    table, path, held = table_of(space, 30), tmp_path / "table.json", tmp_path / "v.json"
    table.save(path)
    validation_of(held, table, networks(space, 12, 9))
    command = ["--table", str(path), "--validation", str(held), "--space", space.name, "--out", str(tmp_path),
               "--isolated", "32", "--minutes", "1e6"]
    main(command)
    first = (tmp_path / "isolated.jsonl").read_text()
    main(command)
    assert (tmp_path / "isolated.jsonl").read_text() == first  # nothing is timed again
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["failed"] == {}
    assert {"isolated blocks", "FLOPs regression", "kernel forests", "ours"} <= set(found["methods"])
    assert found["methods"]["ours"]["all"]["mean_error"] < found["methods"]["FLOPs regression"]["all"]["mean_error"]
    assert found["methods"]["ours"]["n"] >= 3
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert "noise ceiling" in capsys.readouterr().out
    validation_of(held, table, [table.networks[0].architecture])
    with pytest.raises(HwnasError, match="not held out"):
        main(command)


def test_a_line_cut_off_by_a_kill_is_dropped_and_another_host_is_refused(tmp_path):
    from experiments.latency.peers.isolated import Isolated

    path = tmp_path / "isolated.jsonl"
    known = Isolated(path, {"host": "a", "quiet_us": 100.0})
    known.add("kernel:x", measurement(0.25), 1.5)
    known.add("kernel:y", None, 0.0, "cannot be compiled")
    with open(path, "a") as file:
        file.write('{"part": "kern')
    again = Isolated(path, {"host": "a", "quiet_us": 100.0})
    assert again.ms == pytest.approx({"kernel:x": 0.25}, rel=0.01)
    assert again.failed == {"kernel:y": "cannot be compiled"}
    with pytest.raises(ConfigError, match="another folder"):
        Isolated(path, {"host": "b", "quiet_us": 100.0})
