"""Makes the files of a network to deploy: trained, exported, quantised, checked; several at once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.data.dataset import subset
from hwnas.errors import CandidateError, ConfigError, DataError, FileError, HwnasError, StudyError
from hwnas.front.score import fp32_grades
from hwnas.networks.baselines import count_macs, count_params
from hwnas.networks.export import check_parity, export_onnx, pack_weights, parity_images, stored_fingerprint
from hwnas.networks.litert.tflite import SUFFIX
from hwnas.networks.network import Network, load_weights
from hwnas.networks.quantize import calibration_images, quantize_static, tuning_of
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.runtime import OwnFormat, deployed_of, load_runtime, write_deployed
from hwnas.system.libraries import version_of
from hwnas.system.paths import temporary_folder, write_atomic
from hwnas.system.processes import Pool
from hwnas.system.run_folder import MANIFEST, Manifest, ModelFolder, RunFolder
from hwnas.target import Target
from hwnas.tasks.task import Task, load_task
from hwnas.training.loop import Checkpoint, seeded, train
from hwnas.training.recipe import FINE_TUNING, other_than_full

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from hwnas.data.dataset import Dataset
    from hwnas.training.recipe import Recipe


Progress = Callable[[int, int], None]
AGREEMENT = {"fp32": 0.995, "int8": 0.98}  # of answers with ONNX Runtime's; in int8 the last levels may tie
DECIDING = 2048  # validation images, stratified, that decide whether the last weights or their average are kept


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of a network that a search has trained: the key of what decided them, the file of their state, and
    the steps that they had."""

    key: str
    path: Path
    steps: int = 0

    def is_kept(self) -> bool:
        """Return whether the file holds them, whole."""
        try:
            self.read()
        except (CandidateError, StudyError):
            return False
        return True

    def read(self) -> Mapping[str, Tensor]:
        """The line's average; CandidateError where the file does not hold it."""
        state = Checkpoint.load(self.path)
        if state is None or state.identity.get("line") != self.key:
            raise CandidateError(f"{self.path} does not hold the weights of this line any more")
        return state.average or state.model


@dataclass(frozen=True)
class BuildSettings:
    """The settings that all finalists and baselines of a run share: data, recipe, seed, targets, calibration images.

    `target` is that of all networks, but for those that name another one of `targets` as their deployment. `narrow`:
    names of the targets whose CPU needs int8 weights of 7 bits (`hwnas.networks.quantize.needs_narrow_weights`).
    `raced`: by `trained_id`, the weights of those that a race has trained. `begun`: of those that go on with what a
    trial learnt.
    """

    dataset: Dataset
    recipe: Recipe
    seed: int
    target: Target
    n_calibration: int = 768
    threads: int = 0
    narrow: Collection[str] = ()
    raced: Mapping[str, TrainedWeights] = field(default_factory=dict)
    begun: Mapping[str, TrainedWeights] = field(default_factory=dict)
    targets: Sequence[Target] = ()

    def target_of(self, network: Network | None, named: str = "") -> Target:
        """The target that a network is deployed on; where the network is not known, the one that is `named`.
        CandidateError where the run has none of the name that the network gives."""
        name = named if network is None else network.deployment
        target = next((target for target in self.targets if target.name == name), None)
        if target is None and network is not None and name:
            raise CandidateError(f"it is for {name}, which is no target of this run")
        return target or self.target

    def recipe_of(self, network: Network) -> Recipe:
        """The recipe, without the steps that a trial has trained the network for; or for a network that begins with
        pretrained weights that of fine-tuning, on as many images, with what the recipe has otherwise than full
        training."""
        if (begun := self.begun_of(network)) is not None:
            left = steps_left(self.recipe.steps_for(len(self.dataset.train)), begun.steps)
            return replace(self.recipe, epochs=1, min_steps=left, max_steps=left)
        if not network.provenance:
            return self.recipe
        own: dict[str, Any] = {**load_task(self.dataset.task).recipe, **other_than_full(self.recipe)}
        fine = replace(FINE_TUNING, epochs=1, threads=self.recipe.threads, device=self.recipe.device, **own)
        n = len(self.dataset.train)
        steps = self.recipe.steps_for(n) * self.recipe.batch_for(n) // fine.batch_for(n)
        return replace(fine, min_steps=steps, max_steps=steps)

    def begun_of(self, network: Network) -> TrainedWeights | None:
        """The weights that a network goes on with; None if it begins anew, as without them or with few steps."""
        begun, steps = self.begun.get(network.trained_id), self.recipe.steps_for(len(self.dataset.train))
        return begun if begun is not None and steps_left(steps, begun.steps) < steps else None

    def steps_in_a_step(self, network: Network) -> float:
        """Steps of the network's own recipe that see as many images as a step of the recipe."""
        n = len(self.dataset.train)
        return self.recipe_of(network).steps_for(n) / self.recipe.steps_for(n)


def steps_left(steps: int, done: int) -> int:
    """Return the steps of a training of `steps` that are left after `done` ones of a trial. If these are more than
    half, it is trained anew: the rate must fall again, and no network shall have more steps than others."""
    return steps if 2 * done > steps else steps - done


def file_of(target: Target, folder: ModelFolder) -> Path:
    """The file in a model's folder that a target runs."""
    return deployed_of(folder.deployed(target.precision), target.runtime)


@dataclass(frozen=True)
class BuildResult:
    """A deployable network: its torch form, whether its weights were stored already, which stored files were not taken,
    and its fp32 score on the test set, if it was asked for."""

    params: int
    macs: int
    reused: bool
    remarks: tuple[str, ...] = ()
    top1_fp32: float | None = None


def make(network: Network, folder: ModelFolder, making: BuildSettings, progress: Progress | None = None) -> BuildResult:
    """Fill `models/<id>/` with everything but the card.

    Stored weights of the same network, recipe, seed and data are not trained again if they are those that the manifest
    names; nor are its files made again, if all are there and the same versions would make them of the same images. The
    manifest is written after the weights, and again at the end, so that a killed run leaves no file in it that is not
    finished. CandidateError when training, export, the parity gate or quantisation fails; then no exported file of this
    network remains.
    """
    data = network.fed(making.dataset, later=True)  # all of it is resized for a training alone
    wanted = fingerprint(network, making)
    begun = making.begun_of(network)
    if begun is not None and not _stored(folder, wanted)[0] and not begun.is_kept():
        making = replace(making, begun={})  # it is trained anew
        wanted = fingerprint(network, making)
    exports, described = _exports_key(network, data, making, wanted), folder.path / network.file
    with seeded(making.seed, making.threads):
        reused, remarks = _stored(folder, wanted)
        lent = None if reused else _lent(network, folder, making, wanted)
        model = network.build() if reused or lent else network.start()
        built = BuildResult(count_params(model), count_macs(model, network.shape.image), reused, remarks)
        manifest = Manifest.find(folder.path) if reused else None
        if manifest is not None and manifest.exports == exports and not manifest.faults(
                *(folder.path / name for name in manifest.files)):
            return built
        write_atomic(described, network.describe())
        if not reused:
            for path in (folder.manifest, folder.card, *_exported(folder), folder.weights):
                path.unlink(missing_ok=True)  # files made from other weights must not stay beside new ones
            if lent is None:
                model = _train(model, network, making, (folder.training, wanted), progress)
            write_atomic(folder.weights, pack_weights(model, wanted) if lent is None else lent)
        folder.training.unlink(missing_ok=True)
        Manifest.write(folder.path, (described, folder.weights), wanted)
    if reused or lent:
        load_weights(model, folder.weights, str(folder.weights), network.shape.classes)
    _export(model.eval(), network, folder, making, data, wanted, exports)
    return built


def check_deployable(networks: Iterable[Network], target: Target) -> None:
    """ConfigError, which names the network, when the target's runtime has a format of its own that cannot say it.

    Asked before anything is trained; untrained networks of the same names are written. TargetError as `Runtime.check`.
    """
    runtime = load_runtime(target.runtime)
    if not isinstance(runtime, OwnFormat):
        return
    runtime.check(target)
    by_name = {network.name: network for network in networks}
    with temporary_folder() as folder:
        path = Path(folder, "model.onnx")
        for name, network in by_name.items():
            try:
                export_onnx(network.build(), path, network.shape.image)
                runtime.write(path, target)
            except CandidateError as error:
                why = f"{error.fact} {error.remedy}" if isinstance(error, FileError) else str(error)
                raise ConfigError(f"{name} cannot be deployed on {target.name}: {why}") from None


def _stored(folder: ModelFolder, wanted: str) -> tuple[bool, tuple[str, ...]]:
    """Return whether the stored weights can be taken, and a line on each file of an earlier call that is not."""
    if stored_fingerprint(folder.weights) != wanted and not folder.manifest.exists():
        return False, ()
    manifest = Manifest.find(folder.path)
    if manifest is None:
        return True, (f"no {MANIFEST} (a killed run): its weights are of this recipe and are "
                      "taken, its other files are made again",)
    if manifest.recipe != wanted:
        return False, ()
    spoilt = manifest.fault(folder.weights)
    faults = [spoilt, *map(manifest.fault, _exported(folder))]
    return not spoilt, tuple(f"{text}; made again" for text in faults if text)


def _lent(network: Network, folder: ModelFolder, making: BuildSettings, wanted: str) -> bytes | None:
    """The weights of the same network in the folder of another of its deployments, whole; None where there are none."""
    for target in making.targets:
        other = ModelFolder(folder.path.with_name(network.deployed_as(target.name).id))
        if other != folder and stored_fingerprint(other.weights) == wanted:
            manifest = Manifest.find(other.path)
            if manifest is not None and not manifest.fault(other.weights):
                return other.weights.read_bytes()
    return None


def fault_of(network: Network | None, folder: ModelFolder, making: BuildSettings, complete: bool = False) -> str:
    """Return why the files in a network's `folder` are not those that were made; empty if they are. If `complete`, a
    missing file counts even if the runtime does not need it, such as the weights."""
    deployed = file_of(making.target_of(network), folder)
    manifest = Manifest.find(folder.path)
    if manifest is None:
        return f"no {MANIFEST}"
    return "; ".join(manifest.faults(deployed, *(folder.path / name for name in manifest.files if complete)))


def other_start(network: Network, folder: ModelFolder, making: BuildSettings) -> str:
    """Return why the files in `folder` are of other pretrained weights than `network` begins with, or of another race;
    empty if they are not."""
    manifest = Manifest.find(folder.path) if network.provenance else None
    same = manifest is None or manifest.recipe == fingerprint(network, making)
    return "" if same else "its pretrained weights, how they want images normalised, or its training are others"


def fingerprint(network: Network, making: BuildSettings) -> str:
    """Names everything that decides the weights: network, recipe, seed, data; or all that a race did."""
    if (raced := making.raced.get(network.trained_id)) is not None:
        return raced.key
    size, kept = network.shape.image_size, "the better weights"
    begun = making.begun_of(network)
    content = "|".join((network.identity, making.recipe_of(network).fingerprint, str(making.seed),
                        making.dataset.fingerprint_at(size), str(size), kept, *([] if begun is None else [begun.key])))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _exports_key(network: Network, data: Dataset, making: BuildSettings, wanted: str) -> str:
    """Names everything that decides the files that are made of the weights `wanted`."""
    target = making.target_of(network)
    versions = [f"{name} {version_of(name)}" for name in ("torch", "onnx", "onnxruntime")]
    content = "|".join((*versions, load_runtime(target.runtime).version(), target.precision, tuning_of(target),
                        str(target.name in making.narrow), str(making.n_calibration), str(making.seed),
                        str(sorted(network.metadata(data, wanted).items()))))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _exported(folder: ModelFolder) -> list[Path]:
    """The files that were made of the weights: fp32, int8, and those in a runtime's own format, by the names that
    hwnas gives and those of the manifest. Whatever else lies there is the user's."""
    forms = folder.onnx, folder.int8
    names = {f"{form.stem}{suffix}" for form in forms for suffix in (form.suffix, SUFFIX)}
    with contextlib.suppress(StudyError):  # a torn one names none
        manifest = Manifest.find(folder.path)
        names |= {name for name in (manifest.files if manifest else ())
                  if Path(name).name == name and Path(name).stem in {form.stem for form in forms}}
    return [path for name in sorted(names) if (path := folder.path / name).is_file()]


def _train(model: nn.Module, network: Network, making: BuildSettings, kept: tuple[Path, str],
           progress: Progress | None) -> nn.Module:
    """Train a model, from what a trial has learnt if it did; of a race it has its weights, and needs no training."""
    raced = making.raced.get(network.trained_id)
    if (start := raced or making.begun_of(network)) is not None:
        model.load_state_dict(dict(start.read()))
    if raced is not None:
        return model
    data = network.fed(making.dataset)
    deciding = data.validation.take(subset(data.validation.labels, DECIDING, 0))
    return train(model, data.train, recipe=making.recipe_of(network), dataset=data, seed=making.seed,
                 progress=progress, validation=deciding, kept=kept)


def _export(model: nn.Module, network: Network, folder: ModelFolder, making: BuildSettings, data: Dataset, wanted: str,
            exports: str) -> None:
    """Make the files of the weights `wanted`, and the manifest. After an error none of them remains."""
    target = making.target_of(network)
    quantisation, onnx = None, folder.deployed(target.precision)
    try:
        export_onnx(model, folder.onnx, network.shape.image, network.metadata(data, wanted))
        parity = asdict(check_parity(model, folder.onnx, parity_images(data, making.seed)))
        if target.precision == "int8":
            images = calibration_images(data, making.n_calibration, making.seed)
            quantisation = quantize_static(folder.onnx, folder.int8, images, tuned_for=tuning_of(target),
                                           narrow=target.name in making.narrow, threads=max(1, making.threads),
                                           task=load_task(data.task)).facts
        deployed = write_deployed(onnx, target)
        if deployed != onnx:
            parity["deployed_agreement"] = _agreement(onnx, deployed, target, parity_images(data, making.seed),
                                                      load_task(data.task))
    except CandidateError:
        for path in _exported(folder):
            path.unlink()
        raise
    files = folder.path / network.file, folder.weights, folder.onnx, onnx, deployed
    Manifest.write(folder.path, files, wanted, parity, quantisation, exports)


def _agreement(onnx: Path, deployed: Path, target: Target, images: NDArray[np.float32], task: Task) -> float:
    """The share of images, 0 to 1, to which the file that was made of an ONNX file answers as that does in ONNX
    Runtime. CandidateError below `AGREEMENT`."""
    outputs = load_runtime(target.runtime).compile(deployed, target).logits(images)
    share = task.agreement(run_once(onnx, images), outputs)["agreement"]
    if share < AGREEMENT[target.precision]:
        raise FileError(deployed, f"answers as ONNX Runtime does to {share:.1%} of {len(images)} images only; "
                                  f"{AGREEMENT[target.precision]:.1%} is the least.")
    return share


_SETS = ("train", "validation", "test")


def make_all(networks: Sequence[Network], run: RunFolder, making: BuildSettings, workers: int,
             report: Callable[[float, str], None]) -> Iterator[tuple[Network, BuildResult | str]]:
    """`make` and score each network; results, or reasons of failures, come in order of completion.

    The last networks start first: they are the baselines, which take longest. Further deployments of a network come
    behind all others, since they take its weights over. `report` hears how much is done of what is to be trained:
    networks whose weights are stored take a moment. HwnasError when a process was ended.
    """
    first = {network.trained_id: network for network in reversed(networks)}
    yield from _make_several(list(reversed(first.values())), run, making, workers, report)
    yield from _make_several([network for network in networks if first[network.trained_id] is not network], run, making,
                             workers, report)


def _make_several(networks: Sequence[Network], run: RunFolder, making: BuildSettings, workers: int,
                  report: Callable[[float, str], None]) -> Iterator[tuple[Network, BuildResult | str]]:
    waiting = [network.id for network in networks
               if not _stored(run.model(network.id), fingerprint(network, making))[0]]
    if workers <= 1 or len(networks) <= 1:
        for network in networks:
            def heard(step: int, steps: int, name: str = network.id) -> None:
                report((waiting.index(name) + step / steps) / len(waiting), name)

            yield network, _make_scored(network, run, making, heard if network.id in waiting else None)
        return
    with temporary_folder() as folder:
        parked = _park(making, Path(folder))
        with Pool(min(workers, len(networks)), _start, (parked, Path(folder), run)) as pool:
            jobs = {pool.submit(_job, network): network for network in reversed(networks)}
            done = 0
            for job in as_completed(jobs):
                if jobs[job].id in waiting:
                    done += 1
                    report(done / len(waiting), f"{done} of {len(waiting)} networks trained and exported")
                try:
                    result = job.result()
                except BrokenProcessPool:
                    raise HwnasError("a process that trains finalists was ended (out of memory?). Free memory and give "
                                     "the command again: what is finished is kept.") from None
                yield jobs[job], result


def _make_scored(network: Network, run: RunFolder, making: BuildSettings,
                 heard: Callable[[int, int], None] | None = None) -> BuildResult | str:
    try:
        made = make(network, run.model(network.id), making, heard)
        data = network.fed(making.dataset, later=True)
        return replace(made, top1_fp32=fp32_grades(run.model(network.id).onnx, data).score)
    except (CandidateError, ConfigError, DataError) as error:  # the last two: of pretrained weights
        return str(error)


def _park(making: BuildSettings, folder: Path) -> BuildSettings:
    """Write the images to files that every process maps. The returned settings have no images."""
    parts = {name: getattr(making.dataset, name) for name in _SETS}
    for name, part in parts.items():
        np.save(folder / f"{name}.npy", part.images)
        parts[name] = replace(part, images=np.empty(0, np.uint8))
    return replace(making, dataset=replace(making.dataset, **parts))


_HERE: dict[str, tuple[BuildSettings, RunFolder]] = {}


def _start(parked: BuildSettings, folder: Path, run: RunFolder) -> None:
    parts = {name: replace(getattr(parked.dataset, name), images=np.load(folder / f"{name}.npy", mmap_mode="r"))
             for name in _SETS}
    _HERE["work"] = replace(parked, dataset=replace(parked.dataset, **parts)), run


def _job(network: Network) -> BuildResult | str:
    making, run = _HERE["work"]
    return _make_scored(network, run, making)
