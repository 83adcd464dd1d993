"""The networks that a certificate trains, spread over the space, and the file of the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.errors import ConfigError, UnknownName, UserError
from hwnas.space.architecture import Architecture
from hwnas.space.coding import Codes
from hwnas.space.search_space import SearchSpace, macs
from hwnas.space.search_space import spread as spread_rows
from hwnas.system.documents import Document, check_identity
from hwnas.system.paths import write_atomic

if TYPE_CHECKING:
    from omegaconf import DictConfig


SAMPLE = 4096
_STREAM = 0xCE57  # separates these draws from others with the same seed


@dataclass(frozen=True, slots=True)
class Network:
    """One network and its cost: predicted latency in ms, or MACs."""

    architecture: Architecture
    cost: float

    @property
    def id(self) -> str:
        """The architecture's id."""
        return self.architecture.id


def spread(space: SearchSpace, n: int, seed: int, costs: Callable[[Codes], NDArray[np.float64]]) -> list[Network]:
    """Draw `n` different networks over the range of costs, cheapest first.

    SAMPLE settings are sorted by cost and cut into `n` equal parts; one network is drawn from each part. ConfigError
    when the space has fewer networks.
    """
    if space.n_architectures < n:
        raise ConfigError(f"n={n}: space {space.name} has {space.n_architectures} networks. Give a smaller n or a "
                          "larger space.")
    rng = np.random.default_rng([seed, _STREAM])
    codes = _different(space, n, rng)
    cost = np.asarray(costs(codes), np.float64)
    chosen = spread_rows(cost, n, lambda part: int(rng.choice(part)))
    return [Network(space.decode(space.to_params(codes[row])), float(cost[row])) for row in chosen]


def macs_of(space: SearchSpace) -> Callable[[Codes], NDArray[np.float64]]:
    """The function from codes [n, p] to multiply-accumulates [n]."""
    return lambda codes: space.totals(codes, macs)[:, 0]


def _different(space: SearchSpace, n: int, rng: np.random.Generator) -> Codes:
    """Codes of at least `n` different networks. Different codes mean different networks, so the ids differ too."""
    codes = np.unique(space.sample(rng, SAMPLE), axis=0)
    for _ in range(64):
        if len(codes) >= n:
            return codes
        codes = np.unique(np.concatenate([codes, space.sample(rng, SAMPLE)]), axis=0)
    raise ConfigError(f"n={n}: {len(codes)} different networks were found in space {space.name} by drawing settings. "
                      "Give a smaller n.")


_AGAIN = "Remove it, and what it held is made again; or choose another out=FOLDER."
PLAN = Document("hwnas-certify", 1, "a certificate's plan", _AGAIN)
_NOT_OURS = ("architecture", "model", "stem_stride", "weights", "out", "overwrite", "seed", "split_seed", "dataset")


@dataclass(frozen=True)
class CertifyPlan:
    """The plan of a certificate.

    `cost` is `latency_ms` or `macs`, and `cost_source` says where it comes from. `dataset` and `training` are options
    of conf/train.yaml. `identity` must stay the same in a folder; seeds and estimators may be added later.
    """

    out: Path
    networks: tuple[Network, ...]
    cost: str
    cost_source: str
    dataset: Mapping[str, Any]
    training: Mapping[str, Any]
    seed: int
    seeds: int
    identity: Mapping[str, Any]

    def folder(self, network: Network, seed: int) -> Path:
        """The folder of a network's training with a seed."""
        return self.out / "networks" / network.id / f"seed{seed}"

    @property
    def epochs(self) -> int:
        """Epochs of a full training."""
        return int(self.training["epochs"])

    def write(self) -> None:
        """Write `plan.json`, and each network's architecture.yaml beside its trainings."""
        for network in self.networks:
            write_atomic(self.architecture_file(network), network.architecture.to_yaml())
        networks = [{"id": network.id, "cost": network.cost, "architecture": network.architecture.to_dict()}
                    for network in self.networks]
        content = {**PLAN.header, "cost": self.cost, "cost_source": self.cost_source, "seed": self.seed,
                   "seeds": self.seeds, "identity": self.identity, "dataset": self.dataset, "training": self.training,
                   "networks": networks}
        write_atomic(plan_file(self.out), json.dumps(content, indent=1, allow_nan=False) + "\n")

    def architecture_file(self, network: Network) -> Path:
        """The architecture file that `hwnas.train` reads."""
        return self.out / "networks" / network.id / "architecture.yaml"


def plan_file(out: Path) -> Path:
    """The path of `plan.json`."""
    return out / "plan.json"


def read_plan(out: Path, identity: Mapping[str, Any] | None = None) -> CertifyPlan | None:
    """The plan in a folder; None if there is none. StudyError when it is torn or has another identity."""
    path = plan_file(out)
    content = PLAN.find(path)
    if content is None:
        return None
    if identity is not None:
        check_identity(content["identity"], identity, path)
    with PLAN.reading(path):
        networks = tuple(Network(Architecture.from_dict(entry["architecture"], str(path)), float(entry["cost"]))
                         for entry in content["networks"])
        return CertifyPlan(out, networks, content["cost"], content["cost_source"], content["dataset"],
                           content["training"], content["seed"], content["seeds"], content["identity"])


IN_FULL = {"device": "cpu", "threads": 1, "train_images": 10_000, "validation_images": 2000}  # beside the recipe


def in_full(training: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a full training that differ from conf/train.yaml: FULL_TRAINING, changed by `training`."""
    from hwnas.cli.command import compose
    from hwnas.training.recipe import FULL_TRAINING

    stock, length = compose("train", [], target=False), ("min_steps", "max_steps")
    own = {key: value for key, value in FULL_TRAINING.to_dict().items()
           if key not in ("name", "threads") and value != stock[key] and not ("epochs" in training and key in length)}
    return {**IN_FULL, **own, **training}


def all_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a full training, with its value."""
    from omegaconf import OmegaConf

    from hwnas.cli.command import compose

    values = OmegaConf.to_container(compose("train", [], target=False))
    assert isinstance(values, dict)
    return {**{str(key): value for key, value in values.items() if key not in _NOT_OURS}, **in_full(training)}


def training_config(dataset: Mapping[str, Any], training: Mapping[str, Any]) -> DictConfig:
    """Compose and check conf/train.yaml with these values; ConfigError, UnknownName."""
    from omegaconf import OmegaConf

    from hwnas.cli.command import compose
    from hwnas.training.job import recipe_of

    config = compose("train", [], target=False)
    known = [str(key) for key in config if key not in _NOT_OURS]
    for key in training:
        if key not in known:
            raise UnknownName("key of training", key, known)
    OmegaConf.set_struct(config, False)
    for key, value in {**training, "dataset": dict(dataset)}.items():
        OmegaConf.update(config, key, value, merge=key == "teacher")
    try:
        recipe_of(config)
    except UserError as error:
        raise ConfigError(f"training: {error}") from None
    return config
