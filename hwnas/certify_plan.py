"""CertifyPlan: what a certificate is made of: networks, data and the full training; `plan.json` in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.architecture import Architecture
from hwnas.certify_networks import Network
from hwnas.errors import ConfigError, StudyError, UnknownName, UserError
from hwnas.paths import write_atomic

if TYPE_CHECKING:
    from omegaconf import DictConfig

FORMAT = "hwnas-certify/1"
_NOT_OURS = ("architecture", "model", "stem_stride", "weights", "out", "seed", "split_seed", "dataset")


@dataclass(frozen=True)
class CertifyPlan:
    """`cost` is `latency_ms` or `macs`, `cost_source` says whose; `dataset` and `training` are options of
    conf/train.yaml; `identity` is what must stay the same in a folder: more seeds and estimators may come."""

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
        """Where a network is trained with a seed."""
        return self.out / "networks" / network.id / f"seed{seed}"

    @property
    def epochs(self) -> int:
        """Epochs of a full training."""
        return int(self.training["epochs"])

    def write(self) -> None:
        """`plan.json`, and each network's architecture.yaml beside its trainings."""
        for network in self.networks:
            write_atomic(self.architecture_file(network), network.architecture.to_yaml())
        networks = [{"id": one.id, "cost": one.cost, "architecture": one.architecture.to_dict()}
                    for one in self.networks]
        content = {"format": FORMAT, "cost": self.cost, "cost_source": self.cost_source, "seed": self.seed,
                   "seeds": self.seeds, "identity": self.identity, "dataset": self.dataset, "training": self.training,
                   "networks": networks}
        write_atomic(plan_file(self.out), json.dumps(content, indent=1, allow_nan=False) + "\n")

    def architecture_file(self, network: Network) -> Path:
        """Where `hwnas.train` reads it."""
        return self.out / "networks" / network.id / "architecture.yaml"


def plan_file(out: Path) -> Path:
    """`plan.json`."""
    return out / "plan.json"


def read_plan(out: Path, identity: Mapping[str, Any] | None = None) -> CertifyPlan | None:
    """The plan in a folder, None where there is none; StudyError for one that is torn or not of `identity`."""
    path = plan_file(out)
    content = read_document(path, FORMAT)
    if content is None:
        return None
    if identity is not None:
        from hwnas.training_checkpoint import check_identity

        check_identity(content["identity"], identity, path)
    try:
        networks = tuple(Network(Architecture.from_dict(one["architecture"], str(path)), float(one["cost"]))
                         for one in content["networks"])
        return CertifyPlan(out, networks, content["cost"], content["cost_source"], content["dataset"],
                           content["training"], content["seed"], content["seeds"], content["identity"])
    except (KeyError, TypeError, ValueError) as error:
        raise _torn(path, error) from None


def read_document(path: Path, form: str) -> dict[str, Any] | None:
    """A JSON file of this format, None where there is none; StudyError for a torn or foreign one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _torn(path, error) from None
    if not isinstance(found, dict) or found.get("format") != form:
        raise StudyError(f"{path} is not of format {form}. Choose another out=FOLDER.")
    return found


def _torn(path: Path, error: Exception) -> StudyError:
    return StudyError(f"{path} is torn ({type(error).__name__}: {' '.join(str(error).split())[:100]}). Remove it, and "
                      "what it held is made again.")


def training_config(dataset: Mapping[str, Any], training: Mapping[str, Any]) -> DictConfig:
    """conf/train.yaml with these values in their places, checked; ConfigError, UnknownName."""
    from omegaconf import OmegaConf

    from hwnas.command import compose
    from hwnas.training_options import TrainingOptions

    config = compose("train", [], target=False)
    known = [str(key) for key in config if key not in _NOT_OURS]
    for key in training:
        if key not in known:
            raise UnknownName("key of training", key, known)
    OmegaConf.set_struct(config, False)
    for key, value in {**training, "dataset": dict(dataset)}.items():
        OmegaConf.update(config, key, value, merge=key == "teacher")
    try:
        TrainingOptions.from_config(config)
    except UserError as error:
        raise ConfigError(f"training: {error}") from None
    return config
