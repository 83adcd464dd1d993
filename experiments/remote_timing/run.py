"""Is a time over ssh the time of here? The same networks, by turns in this process and over ssh to this machine.

    python experiments/remote_timing/run.py device=pi@127.0.0.1 out=DIR [device_python=/home/pi/venv/bin/python] \\
        [target=ort_int8] [networks=8] [rounds=10] [seconds=20] [seed=0]

The device must be this machine under another name, such as another user on the loopback address. Each round times
random networks of mnasnet_small first on the one side, then on the other, and turns the sides round; every time with
compilations of its own, as two commands would. What is held against 2 % is the median over rounds of a network's
latency there to here. Beside it stands what two rounds on one side differ by. Writes rounds.csv, remote.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.common import arguments_of, command, number_of, percent, save_csv, save_json, text_table
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, MeasurementInvalid
from hwnas.latency.copies import TimedFile
from hwnas.latency.deployment import open_device
from hwnas.latency.device import Device, DeviceOptions
from hwnas.latency.table import Protocol
from hwnas.latency.timing import HERE, Reference, image_shape, prepare_network, reference_network, time_files
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host, Target

KNOWN = ("device", "device_python", "out", "target", "networks", "rounds", "seconds", "seed")
LIMIT = 0.02
NAME = "this-machine-over-ssh"  # its tables would be this host's


def main(arguments: Sequence[str] | None = None) -> None:
    """Time, write, print."""
    given = arguments_of(arguments, KNOWN, __doc__)
    if not given.get("device") or not given.get("out"):
        raise ConfigError("device=user@host and out=DIR must be given.")
    numbers = {name: number_of({name: _number(given.get(name, default))}, name, 1 if name != "seed" else 0, whole=True)
               for name, default in (("networks", "8"), ("rounds", "10"), ("seconds", "20"), ("seed", "0"))}
    target = _target(given.get("target", "ort_int8"))
    options = DeviceOptions(given["device"], given.get("device_python"), NAME)
    rows = measured(options, target, Console(), **numbers)
    out = Path(given["out"])
    save_csv(out / "rounds.csv", rows)
    result = summary(rows)
    save_json(out / "remote.json", {"target": target.name, "measured_on": Host.detect().name, **numbers, **result})
    print(describe(result))


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def _target(name: str) -> Target:
    from hwnas.cli.command import compose
    from hwnas.cli.options import section

    return Target.from_config(section(compose("profile", [f"+target={name}"]), "target"))


def measured(options: DeviceOptions, target: Target, console: Console, networks: int, rounds: int, seconds: int,
             seed: int) -> list[dict[str, Any]]:
    """One row a network and round: latency in ms here and over ssh; INVALID ones are left out."""
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    codes = space.sample(np.random.default_rng([seed, *b"remote"]), networks)
    drawn = {network.id: network for network in (space.decode(space.to_params(code)) for code in codes)}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:
        files = {id: TimedFile(prepare_network(network, target, Path(folder)), target, image_shape(network))
                 for id, network in drawn.items()}
        for number in range(rounds):
            sides: dict[str, Mapping[str, float]] = {}
            for side in ("here", "there")[:: 1 if number % 2 else -1]:
                # a new connection each time: compilations of its own, as another command would have
                device = HERE if side == "here" else open_device(options, Console(quiet=True))
                sides[side] = latencies(files, target, device, Protocol(max_seconds=seconds), seed + number)
            rows += [{"round": number, "network": id, "here_ms": sides["here"][id], "there_ms": sides["there"][id]}
                     for id in files if id in sides["here"] and id in sides["there"]]
            console.note(f"round {number + 1} of {rounds}: {len(rows)} pairs")
    if not rows:
        raise MeasurementInvalid("no network was timed on both sides. Stop what else runs here and give the command "
                                 "again.")
    return rows


def latencies(files: Mapping[str, TimedFile], target: Target, device: Device, protocol: Protocol, seed: int
              ) -> dict[str, float]:
    """Valid latencies in ms by id."""
    done = time_files(files, target, Reference(reference_network()), protocol, seed=seed, device=device)
    return {id: measurement.latency_ms for id, measurement in done.items() if measurement.valid}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per network, and over all: the median ratio there / here, and the spread of one side from round to round."""
    by_network: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_network.setdefault(row["network"], []).append(row)
    networks = [{"network": id, "rounds": len(own), "here_ms": float(np.median([row["here_ms"] for row in own])),
                 "there_ms": float(np.median([row["there_ms"] for row in own])),
                 "ratio": float(np.median([row["there_ms"] / row["here_ms"] for row in own])),
                 "here_spread": _spread([row["here_ms"] for row in own]),
                 "there_spread": _spread([row["there_ms"] for row in own])} for id, own in by_network.items()]
    ratio = float(np.median([row["there_ms"] / row["here_ms"] for row in rows]))
    return {"pairs": len(rows), "ratio": ratio, "within": abs(ratio - 1) <= LIMIT, "networks": networks}


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation from round to round, as a share of the mean."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else None


def describe(result: Mapping[str, Any]) -> str:
    """The table, and whether the limit is kept."""
    lines = [["network", "rounds", "here ms", "over ssh ms", "ratio", "spread here", "spread there"]]
    lines += [[row["network"], str(row["rounds"]), f"{row['here_ms']:.4f}", f"{row['there_ms']:.4f}",
               f"{row['ratio']:.4f}", percent(row["here_spread"]), percent(row["there_spread"])]
              for row in result["networks"]]
    kept = "within" if result["within"] else "OVER"
    return (f"{text_table(lines)}\nmedian over {result['pairs']} pairs: over ssh {result['ratio'] - 1:+.2%} of here, "
            f"{kept} {LIMIT:.0%}")


if __name__ == "__main__":
    command(main)
