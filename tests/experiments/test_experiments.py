"""The experiments: whole commands on tiny tables, and that they tell a good predictor from a bad one."""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import Future

import numpy as np
import pandas as pd
import pytest
from null_runtime import NullRuntime
from table_fixtures import QUICK, machine_table, made_up_ms, measurement_of, sample_networks

from hwnas.errors import ConfigError, HwnasError
from hwnas.latency.table import TimedNetwork
from hwnas.latency.timing import prepare_network
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Target
from hwnas.validate import network_to_dict, save


def validation_of(path, table, architectures) -> None:
    found = [TimedNetwork("mnasnet_small", one, measurement_of(made_up_ms(one))) for one in architectures]
    save(path, {"host": table.host, "runtime": table.runtime_version, "table": {"key": str(table.key)},
                "space": {"name": "mnasnet_small"}, "seed": 1, "measured_at": "2026-01-02",
                "protocol": QUICK.to_dict(),
                "networks": [network_to_dict(one, (1.0, 0.5, 2.0)) for one in found]})


def test_transfer_judges_every_table_of_which_another_host_has_the_kind(space, tmp_path, capsys, monkeypatch):
    from experiments.latency.transfer.run import main

    monkeypatch.setattr("sys.argv", ["run", "--tables", str(tmp_path), "--out", str(tmp_path / "out"), "--seeds", "2",
                                     "--processes", "1"])
    for host, speed in (("slow", 2.0), ("fast", 1.0)):
        table = machine_table(space, 40, speed=speed)
        table.host["name"] = host
        (tmp_path / host).mkdir()
        table.save(tmp_path / host / f"{table.key}.json.gz")
    table.save(tmp_path / "fast" / "null-int8-t1-b1-32px-c1-k10.json.gz")
    main()
    found = pd.read_csv(tmp_path / "out" / "transfer.csv")
    assert {*found.host} == {"slow", "fast"}
    assert {*found.n} == {10}
    assert len(found) == 2 * 2 * 2 * 2  # tables, seeds, ways of choosing, starts
    errors = found.pivot(index=["host", "chosen", "seed"], columns="start", values="mean_error")
    assert (errors.tables < errors.scratch).all()
    assert "did harm in 0 of 8 draws" in capsys.readouterr().out


def test_kernels_of_a_block_have_all_its_macs(space):
    from experiments.latency.peers.parts import kernels

    for one in sample_networks(space, 30, 5):
        for block in one.blocks():
            assert sum(kernel.features[6] for kernel in kernels(block)) == block.macs


def test_sampled_kernels_are_different_and_each_difference_has_its_convolution(space):
    from experiments.latency.peers.parts import CALL, sampled_kernels

    found = sampled_kernels(sample_networks(space, 30, 5), 80)
    assert found[0] == CALL
    assert 60 < len(found) == len(set(found)) <= 80
    assert {one.kind for one in found[:20]} == {one.kind for one in found}
    assert {one.before for one in found if one.before} <= set(found)
    assert found == sampled_kernels(sample_networks(space, 30, 5), 80)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_parts_become_networks_that_a_runtime_executes(space, tmp_path, precision):
    from experiments.latency.peers.isolated import prepare_part
    from experiments.latency.peers.parts import KERNELS, Block, network_kernels, sampled_kernels

    some = sample_networks(space, 30, 5)
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
    table, path, held = machine_table(space, 30), tmp_path / "table.json", tmp_path / "v.json"
    table.save(path)
    validation_of(held, table, sample_networks(space, 12, 9))
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
    assert "held-out networks that every method predicts" in capsys.readouterr().out
    validation_of(held, table, [table.networks[0].architecture])
    with pytest.raises(HwnasError, match="not held out"):
        main(command)


def test_a_line_cut_off_by_a_kill_is_dropped_and_another_host_is_refused(tmp_path):
    from experiments.latency.peers.isolated import Isolated

    path = tmp_path / "isolated.jsonl"
    known = Isolated(path, {"host": "a", "quiet_us": 100.0})
    known.add("kernel:x", measurement_of(0.25), 1.5)
    known.add("kernel:y", None, 0.0, "cannot be compiled")
    with open(path, "a") as file:
        file.write('{"part": "kern')
    again = Isolated(path, {"host": "a", "quiet_us": 100.0})
    assert again.ms == pytest.approx({"kernel:x": 0.25}, rel=0.01)
    assert again.failed == {"kernel:y": "cannot be compiled"}
    with pytest.raises(ConfigError, match="another folder"):
        Isolated(path, {"host": "b", "quiet_us": 100.0})
