"""Baselines: timm networks that are trained, exported and timed exactly as the finalists are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError, HwnasError, UserError, did_you_mean, one_line
from hwnas.lazy import LazyModule, nn, torch, yaml
from hwnas.networks.weights import Pretrained, import_timm, modules_called
from hwnas.system.documents import Document, load_yaml
from hwnas.system.libraries import version_of

if TYPE_CHECKING:
    import hwnas.networks.modules as modules
else:
    modules = LazyModule("hwnas.networks.modules")

TIMM = "timm:"
_MOST_PX = 1024  # largest side of a baseline's images
MODULE = "module_"  # first part of the names of networks that were given as modules: `hwnas.networks.given`
STEM_LIMIT = 64  # px; up to this image size a network made for 224 px loses too much in a stem of stride 2


@dataclass(frozen=True, slots=True)
class Baseline:
    """A timm network by name; `stem_stride` 1 sets its first convolution from stride 2 to 1 (0: left as timm has it).

    A max pooling behind that convolution stays (ResNets keep a stride of 2 before their first stage). The variant thus
    means the same for every family: all maps are twice as wide and high. `pad_type`: an option of timm's EfficientNets
    ("same": TensorFlow's; empty: the network's own). `pretrained`: the weights from which its training starts or
    started. `image_size`: the side of its images, px, if smaller than the data set's (0: the same).
    """

    name: str
    stem_stride: int = 0
    pad_type: str = ""
    pretrained: Pretrained | None = None
    image_size: int = 0

    @property
    def id(self) -> str:
        """Its folder in `models/`, e.g. `resnet10t-stem1`."""
        return (self.name + (f"-stem{self.stem_stride}" if self.stem_stride else "")
                + (f"-{self.image_size}px" if self.image_size else "")
                + ("-pretrained" if self.pretrained is not None else ""))

    def __str__(self) -> str:
        options = {"stem_stride": self.stem_stride, "pad_type": self.pad_type,
                   "pretrained": self.pretrained and self.pretrained.key, "image_size": self.image_size}
        return " ".join([f"timm:{self.name}", *(f"{key}={value}" for key, value in options.items() if value)])

    def build(self, channels: int, classes: int, image_size: int, where: str = "model") -> nn.Module:
        """Build the network with timm's random weights (seed torch first), in train mode; nothing is downloaded. Raises
        ConfigError if it cannot be built for these images, and what `check_timm` raises about the option `where`."""
        check_timm(self.name, where)
        timm = import_timm()
        options: dict[str, Any] = {"pretrained": False, "in_chans": channels, "num_classes": classes}
        options |= {"pad_type": self.pad_type} if self.pad_type else {}
        # Such a network learns a value for each place of the image, so it is built for one image size.
        if timm.get_pretrained_cfg_value(self.name, "fixed_input_size"):
            options["img_size"] = image_size
        try:
            model: nn.Module = timm.create_model(self.name, **options)
        except HwnasError:
            raise
        except Exception as error:  # each network has errors of its own for a size that it cannot take
            raise ConfigError(f"{TIMM}{self.name} cannot be built for {channels}×{image_size}×{image_size} images and "
                              f"{classes} classes: {one_line(error)}. Set another dataset.image_size or model."
                              ) from None
        if self.stem_stride:
            for conv in first_convolutions(model):
                conv.stride = (self.stem_stride, self.stem_stride)
        return model.train()

    def to_yaml(self) -> str:
        """Return the text of `baseline.yaml`."""
        further = {"pad_type": self.pad_type, "pretrained": self.pretrained and self.pretrained.facts(),
                   "image_size": self.image_size}
        return yaml.safe_dump({**DOCUMENT.header, "timm": self.name, "stem_stride": self.stem_stride,
                               **{key: value for key, value in further.items() if value}}, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, where: str = "baseline.yaml") -> Baseline:
        """Read back what `to_yaml` returned; raises StudyError for any other text."""
        try:
            data = load_yaml(text)
        except ValueError:
            data = None
        doc = DOCUMENT.check(data, where)
        pretrained = Pretrained.of_facts(doc["pretrained"]) if "pretrained" in doc else None
        return cls(doc["timm"], doc["stem_stride"], doc.get("pad_type", ""), pretrained, doc.get("image_size", 0))


def _check_values(content: Mapping[str, Any]) -> None:
    """Raise ValueError for values that no baseline has."""
    if "pretrained" in content:
        Pretrained.of_facts(content["pretrained"])
    if content["stem_stride"] not in (0, 1) or content.get("pad_type", "same") != "same" or not (
            0 <= content.get("image_size", 0) <= _MOST_PX):
        raise ValueError(f"stem_stride must be 0 or 1, pad_type same or not there, image_size at most {_MOST_PX} px")


DOCUMENT = Document("hwnas-baseline", 1, "a baseline", "Give a baseline.yaml of a search.", rule=_check_values, shape={
    "timm": str, "stem_stride": int, "pad_type?": str, "image_size?": int,
    "pretrained?": {"file": str, "sha256": str, "licence": str, "origin": str, "mean": [float], "std": [float]}})


def check_timm(name: object, where: str = "model") -> None:
    """Raise UserError, with similar names, if timm has no network `name`, or if `name` has a tag of weights. Raises
    ConfigError if it is the name of a module in another process. `where`: the option that holds the name."""
    timm = import_timm()
    if isinstance(name, str):
        modules.register_headed(name)
        if name.startswith(MODULE) and not timm.is_model(name):
            raise ConfigError(f"{where}: {name} was given as a module in Python, and is in that process alone. Give it "
                              "again, with the same mean and std: hwnas.search(..., around=module), or "
                              "hwnas.register_module(module) first.")
    if not isinstance(name, str) or not timm.is_model(name) or "/" in name or ":" in name:
        timm_names = timm.list_models()  # too many for the message
        raise UserError(f"{where}: timm {version_of('timm')} has no network {str(name)!r}."
                        f"{did_you_mean(str(name), timm_names)} timm.list_models() names all {len(timm_names)}.")
    if "." in name:
        plain, _, tag = name.partition(".")
        raise UserError(f"{where}: {name!r} names the pretrained weights {tag!r}, which are not loaded: the network "
                        f"would be built with random ones under that name. Write {plain}.")


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repetitions; raises what `check_timm` raises for each."""
    for name in names:
        check_timm(name, "baselines")
    return tuple(dict.fromkeys(names))


def variants(names: Iterable[str], image_size: int) -> list[Baseline]:
    """Return each name, and, for images up to 64 px, its variant with a stride-1 stem if the stem has stride 2."""
    baselines = []
    for name in names:
        baselines.append(Baseline(name))
        if image_size <= STEM_LIMIT:
            convs = first_convolutions(Baseline(name).build(1, 2, image_size))
            if convs and all(tuple(conv.stride) == (2, 2) for conv in convs):
                baselines.append(Baseline(name, stem_stride=1))
    return baselines


def count_params(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_macs(model: nn.Module, shape: tuple[int, int, int]) -> int:
    """Return the multiply-accumulates of one image [c, h, w], by torch's flop counter: convolutions and matrix
    products."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    was_training = model.training
    counter = FlopCounterMode(display=False)
    # The counter knows no fused attention of CPUs, and no expanded parameters inside of inference_mode or no_grad.
    with sdpa_kernel(SDPBackend.MATH), counter:
        model.eval()(torch.zeros(1, *shape))
    model.train(was_training)
    return int(counter.get_total_flops()) // 2


def first_convolutions(model: nn.Module) -> list[Any]:
    """Return the convolutions that read the image, by timm's `first_conv`; several if branches run side by side."""
    return [module for module in map(model.get_submodule, modules_called(model, "first_conv"))
            if hasattr(module, "stride")]


def original(around: str, channels: int = 3, classes: int = 1000, image_size: int = 224) -> nn.Module:
    """Build the timm network that `Architecture.around` names, with random weights; UserError for one that timm lacks.

    `image_size` matters to networks that learn a value for each place of the image (transformers); others take any.
    """
    name, _, pad = around.partition("+")
    return Baseline(name, pad_type=pad).build(channels, classes, image_size, "around")
