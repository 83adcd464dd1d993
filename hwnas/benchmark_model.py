"""What the benchmark times: a file as it is, or a timm network built here; and the reference beside it."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.errors import ConfigError, HwnasError, TableError, UnknownName, UserError
from hwnas.foreign_model import ModelError, check_path
from hwnas.paths import home, write_atomic
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.latency.host import Host

TIMM = "timm:"
_NULL_REFERENCE_MS = 0.1


class UnknownNetwork(UnknownName):
    """timm has no network of this name; near matches only, for it has more than a thousand."""

    def __init__(self, name: str, known: list[str], version: str) -> None:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        UserError.__init__(self, f"timm {version} has no network {name!r}.{hint} timm.list_models() names all "
                                 f"{len(known)}.")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An ONNX file to time, and how it is called in what is printed."""

    path: Path
    label: str


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the user said about the network: null where the network itself shall decide."""

    channels: int | None = None
    image_size: int | None = None
    classes: int | None = None
    quantize: bool = False


def model_file(model: str, target: Target, options: ModelOptions, folder: Path, memory_mb: int, seed: int) -> ModelFile:
    """The file behind `model`: checked to be one, or exported to `folder` from timm (and quantised for int8)."""
    if model.startswith(TIMM):
        return ModelFile(_timm_file(model.removeprefix(TIMM), target, options, folder, seed), model)
    if options.classes is not None:
        raise ConfigError("classes goes with timm: networks only; a file has the classes that it has. Leave it out.")
    if options.quantize and target.precision != "int8":
        raise ConfigError(f"quantize=true goes with an int8 target; {target.name} runs {target.precision}.")
    check_path(model, memory_mb)
    return ModelFile(Path(os.path.abspath(model)), model)


def _timm_file(name: str, target: Target, options: ModelOptions, folder: Path, seed: int) -> Path:
    from hwnas.torchvision_ops import declare_missing

    declare_missing()
    import timm

    if not timm.is_model(name) or "/" in name or ":" in name:
        raise UnknownNetwork(name, timm.list_models(), timm.__version__)
    own = timm.get_pretrained_cfg(name)
    size = own.input_size if own and own.input_size else (3, 224, 224)
    channels, image_size = options.channels or size[0], options.image_size or size[-1]
    classes = options.classes or (own.num_classes if own else 0) or 1000
    try:
        return _built(name, target, folder, (channels, image_size, image_size), classes, seed)
    except HwnasError:
        raise
    except Exception as error:  # what a network says to a size that it cannot take is its own affair
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"{TIMM}{name} cannot be built for {channels}×{image_size}×{image_size} images and {classes} "
                         f"classes: {said}") from None


def _built(name: str, target: Target, folder: Path, shape: tuple[int, int, int], classes: int, seed: int) -> Path:
    import torch

    from hwnas.baselines import Baseline
    from hwnas.export import export_onnx, randomise
    from hwnas.quantize import quantize_static, tuning_of

    torch.manual_seed(seed)
    network = randomise(Baseline(name).build(shape[0], classes, shape[-1]).eval(), seed)
    fp32, int8 = folder / "model.onnx", folder / "model_int8.onnx"
    export_onnx(network, fp32, shape)
    if target.precision != "int8":
        return fp32
    quantize_static(fp32, int8, None, tuned_for=tuning_of(target))
    return int8


def reference_file(target: Target, folder: Path) -> Path:
    """The fixed network timed beside every model: the reference of `mnasnet_small` for 1 channel, 10 classes."""
    from hwnas.latency.prepare import prepare_network
    from hwnas.space import SearchSpace

    path = prepare_network(SearchSpace.load("mnasnet_small", channels=1, classes=10).reference, target, folder)
    if target.runtime == "null":
        import onnx

        from hwnas.runtimes.null import METADATA_KEY

        proto = onnx.load(str(path))
        onnx.helper.set_model_props(proto, {METADATA_KEY: str(_NULL_REFERENCE_MS)})
        onnx.save(proto, str(path))
    return path


class QuietTimes:
    """The reference's quiet time on this host, kept from run to run: a run at half speed must not look like a number.

    The least of all runs is kept, by host, runtime version, precision and threads.
    """

    def __init__(self, host: Host, runtime_version: str, target: Target) -> None:
        self.path = home() / "reference_times.json"
        key = replace(target, name="", vendor="", batch=1, price_per_hour=None)
        self._key = f"{host.name} {runtime_version} {key.precision} {key.threads}t {key.device}"

    def load(self) -> float | None:
        """Milliseconds, or None where no run was stored; TableError when the file is broken."""
        found = self._all().get(self._key)
        return None if found is None else found / 1e3

    def store(self, quiet_ms: float) -> None:
        """Keep `quiet_ms` if it is the least so far."""
        known = self._all()
        known[self._key] = min(round(quiet_ms * 1e3, 2), known.get(self._key, float("inf")))
        write_atomic(self.path, json.dumps(known, indent=1, sort_keys=True))

    def _all(self) -> dict[str, float]:
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(us, int | float) and us > 0 for us in found.values()):
            raise TableError(f"{self.path} cannot be read as reference times in µs. Remove it; they are measured anew.")
        return found
