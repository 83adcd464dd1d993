"""Record turns of all networks of a deployment in one state of the machine, switched on and off every few seconds.

    python -m experiments.in_use.record deployment="OpenVINO int8" seconds=90 out=turns [states=memory,build]
"""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.common import arguments_of, command
from experiments.in_use.networks import DEPLOYMENTS, REFERENCE, make_networks
from experiments.in_use.states import STATES, disturbed
from hwnas.latency.copies import bind_copies
from hwnas.latency.harness import _Run
from hwnas.latency.measurement import Protocol
from hwnas.latency.seat import seated
from hwnas.latency.turn import turns_to_dict
from hwnas.system.paths import temporary_folder
from hwnas.target import Host

PROTOCOL = Protocol(copies=2)
PHASE_S = (2.0, 4.0)


class Recorded(_Run):
    """A run that notes for each turn whether the disturbance was on, and which turn of the reference stood before."""

    def record(self, switch: Any, seconds: float, rng: random.Random) -> None:
        """Time rounds for so long, in phases."""
        self.on: dict[str, list[bool]] = {name: [] for name in [*self.turns, REFERENCE]}
        self.blocks: dict[str, list[int]] = {name: [] for name in self.turns}
        self.warm_up()
        end, is_on = time.monotonic() + seconds, False
        while time.monotonic() < end:
            is_on = not is_on
            switch(is_on)
            phase = time.monotonic() + rng.uniform(*PHASE_S)
            while time.monotonic() < phase:
                self._note(is_on, phase)

    def _note(self, is_on: bool, phase: float) -> None:
        order = self.rng.sample(list(self.candidates), len(self.candidates))
        for start in range(0, len(order), self.protocol.block):
            self.beside.append(self._turn(self.reference, len(self.beside), self.reference_calls))
            self.on[REFERENCE].append(is_on)
            for name in order[start : start + self.protocol.block]:
                copy = len(self.turns[name]) % self.protocol.copies
                self.turns[name].append(self._turn(self.candidates[name], copy, self.calls[name]))
                self.on[name].append(is_on)
                self.blocks[name].append(len(self.beside) - 1)
            if time.monotonic() > phase:
                return


def record(deployment: str, states: Sequence[str], seconds: float, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield plain values for each state: turns of each network, with phases."""
    target = DEPLOYMENTS[deployment]
    allowed = sorted(os.sched_getaffinity(0))
    here, other = allowed[-1], allowed[0]
    with temporary_folder() as name:
        made = list(make_networks(target, Path(name)))
        calls = {each.name: bind_copies(each.file, PROTOCOL.copies) for each in made}
        kinds = {each.name: each.kind for each in made}
        os.sched_setaffinity(0, {here})
        for state in states:
            with disturbed(state, here, other) as disturbance, seated(1) as seat:
                run = Recorded({key: value for key, value in calls.items() if key != REFERENCE}, calls[REFERENCE],
                               PROTOCOL, random.Random(seed), seat, None, None)
                run.record(disturbance.switch, seconds, random.Random(seed + 1))
            yield {"deployment": deployment, "state": state, "host": Host.detect().name,
                   "protocol": PROTOCOL.to_dict(),
                   "networks": {key: {"kind": kinds[key], "weights_mb": calls[key].weights_mb, "on": run.on[key],
                                      "block": run.blocks.get(key, []), **turns_to_dict(turns)}
                                for key, turns in [*run.turns.items(), (REFERENCE, run.beside)]}}


def main(given: Sequence[str] | None = None) -> None:
    values = arguments_of(given, ("deployment", "states", "seconds", "out", "seed"), __doc__)
    out, states = Path(values["out"]), values["states"].split(",") if "states" in values else STATES
    out.mkdir(parents=True, exist_ok=True)
    for found in record(values["deployment"], states, float(values.get("seconds", 90)), int(values.get("seed", 0))):
        path = out / f"{found['deployment']}, {found['state']}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 6, mtime=0))
        print(path.name, flush=True)


if __name__ == "__main__":
    command(main)
