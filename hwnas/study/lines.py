"""Lines in the study. A line is a trial with its source, the move that made it, and every leg of its training.

A line is RUNNING in Optuna's words until it is dropped (PRUNED), finished (COMPLETE) or failed (FAIL). Between two legs
no process works on it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.stats import binomial_std
from hwnas.study.candidate import Candidate, SearchOptions
from hwnas.study.claims import CLAIM, claim_of
from hwnas.study.record import LINE
from hwnas.study.study import storage_of

THREADS = 0.7  # the speed of a step grows with the number of threads to this power

@dataclass(frozen=True, slots=True)
class Line:
    """One network in training, as the study stores it.

    Attributes:
        number: Number of its trial.
        architecture: The network with its image size.
        latency_ms: Its latency in ms, as timed for the race.
        source: Number of the line that its weights came from; None: its weights were pretrained or random.
        move: The change from its source, such as `64 to 56 px`; empty for a network that is known by name.
        legs: Its legs in order: rung, steps, rates, seconds, and the images that its average then answered rightly. A
            leg that followed another line has the top-1 that it gained over that line, too.
        key: Name of its weights by everything that decided them; empty before the first leg.
        state: Optuna's state of the trial.
        claim: The process that works on it, and the work; None: no process.
    """

    number: int
    architecture: Architecture
    latency_ms: float
    source: int | None
    move: str
    legs: tuple[Mapping[str, Any], ...]
    key: str
    state: TrialState
    claim: Mapping[str, Any] | None
    trial: FrozenTrial = field(compare=False, repr=False)

    @property
    def id(self) -> str:
        """The id of its network."""
        return self.architecture.id

    @property
    def px(self) -> int:
        """The side of its images in pixels."""
        return self.architecture.image_size

    @property
    def live(self) -> bool:
        """True if it is still in the race."""
        return self.state == TrialState.RUNNING

    @property
    def goes_on(self) -> bool:
        """True if it is still in the race or finished it."""
        return self.state in (TrialState.RUNNING, TrialState.COMPLETE)

    @property
    def steps(self) -> int:
        """The number of steps of all its legs."""
        return sum(int(leg["steps"]) for leg in self.legs)

    @property
    def rungs(self) -> set[str]:
        """The rungs that it was trained for."""
        return {str(leg["rung"]) for leg in self.legs}

    def right_after(self, rung: str | None = None) -> NDArray[Any] | None:
        """Return the score of its average for each validation image [n], bool or from 0 to 1, after its last leg of
        this rung (None: of any rung); None without such a leg."""
        legs = [leg for leg in self.legs if rung in (None, leg["rung"])]
        return unpack(legs[-1]["right"]) if legs else None

    @property
    def top1(self) -> float:
        """The share of the validation images that its average answers rightly; 0 before the first leg."""
        right = self.right_after()
        return 0.0 if right is None else float(right.mean())

    @property
    def step_s(self) -> float | None:
        """The seconds of a step on one thread, by its last leg; None if this has no steps or there is none."""
        if not self.legs or not int(self.legs[-1]["steps"]):
            return None
        leg = self.legs[-1]
        each_s = float(leg["seconds"]) / int(leg["steps"])
        # Legs of earlier versions have no "speedup": it is estimated from their number of threads.
        return float(each_s * leg.get("speedup", leg.get("threads", 1) ** THREADS))


def read_lines(study: optuna.Study, space: SearchSpace) -> list[Line]:
    """Return all lines of the study, by number."""
    lines = []
    for trial in study.get_trials(deepcopy=False):
        if (record := trial.user_attrs.get(LINE)) is not None:
            network = Architecture.parse(trial.user_attrs["architecture"], space.channels, space.classes)
            lines.append(Line(trial.number, network, float(trial.user_attrs["latency_ms_predicted"]),
                              record["source"], record["move"], tuple(record["legs"]), record["key"],
                              trial.state, claim_of(trial), trial))
    return lines


def pack(right: NDArray[Any]) -> str:
    """Return scores of images [n] as text: the number of images, a colon, and base64. Bools take a bit each. Scores
    from 0 to 1 are float16, after a second colon."""
    if right.dtype == bool:
        return f"{len(right)}:{base64.b64encode(np.packbits(right).tobytes()).decode()}"
    return f"{len(right)}::{base64.b64encode(right.astype('<f2').tobytes()).decode()}"


def unpack(text: str) -> NDArray[Any]:
    """Return the scores that `pack` wrote, bool or float32 [n]."""
    n, _, rest = text.partition(":")
    if rest.startswith(":"):
        return np.frombuffer(base64.b64decode(rest[1:]), "<f2").astype(np.float32)
    flat = np.unpackbits(np.frombuffer(base64.b64decode(rest), np.uint8))[:int(n)]
    return flat.astype(bool)


def add_line(study: optuna.Study, space: SearchSpace, candidate: Candidate, options: SearchOptions) -> None:
    """Add a line for a network that the space lists, without a leg so far."""
    params = space.encode(candidate.architecture)
    assert params is not None, "a race trains what its space lists"
    distributions = {parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters}
    system = {f"constraints:{key}": value for key, value in candidate.constraints(options).items()}
    untrained: dict[str, Any] = {"source": None, "move": "", "legs": [], "key": ""}
    study.add_trial(optuna.create_trial(
        state=TrialState.RUNNING, params=dict(params), distributions=dict(distributions),
        user_attrs={**candidate.facts(options), LINE: untrained}, system_attrs=system))


def record_leg(study: optuna.Study, line: Line, leg: Mapping[str, Any], key: str, right: NDArray[Any],
               source: int | None, move: str) -> None:
    """Write a finished leg with the scores of the line's average after it, and end the claim."""
    top1 = float(right.mean())
    legs = [*line.legs, {**leg, "right": pack(right)}]
    storage_of(study).write_attrs(line.trial, {
        LINE: {"source": source, "move": move, "legs": legs, "key": key}, CLAIM: None,
        "top1_proxy": top1, "top1_std": binomial_std(top1, len(right)),
        "seconds": sum(float(each["seconds"]) for each in legs)})
