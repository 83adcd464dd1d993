"""Make the files of networks to deploy: train, export, quantise and check them, several at once."""

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
from hwnas.networks.quantize import RECIPE, calibration_images, quantize_static, tuning_of
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
AGREEMENT = {"fp32": 0.995, "int8": 0.98}  # least share of answers as ONNX Runtime's; in int8 outputs may tie
DECIDING = 2048  # stratified validation images: they judge a race's networks, and choose last weights or their average


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of a network that a search has trained. `key` names what decided them, `path` is the file of their
    state, and `steps` counts the steps of their training."""

    key: str
    path: Path
    steps: int = 0

    def is_kept(self) -> bool:
        """Return whether the file holds these weights, whole."""
        try:
            self.read()
        except (CandidateError, StudyError):
            return False
        return True

    def read(self) -> Mapping[str, Tensor]:
        """Return the averaged weights, or else the last ones. Raises CandidateError if the file lacks them."""
        state = Checkpoint.load(self.path)
        if state is None or state.identity.get("line") != self.key:
            raise CandidateError(f"{self.path} does not hold the weights of this line any more")
        return state.average or state.model


@dataclass(frozen=True)
class BuildSettings:
    """The settings that all finalists and baselines of a run share: data, recipe, seed, targets, calibration images.

    `target` is for all networks except the ones that name another one of `targets` as their deployment. `narrow`: names
    of the targets whose CPU needs int8 weights of 7 bits (`hwnas.networks.quantize.needs_narrow_weights`). By
    `trained_id`, `raced` has the weights of networks that a race has trained. `begun` has a trial's weights, for
    networks that go on with them.
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
        """Return the target that a network is deployed on. Without a network it is the one called `named`, or else
        `target`. Raises CandidateError if the run has no target that the network names."""
        name = named if network is None else network.deployment
        target = next((target for target in self.targets if target.name == name), None)
        if target is None and network is not None and name:
            raise CandidateError(f"it is for {name}, which is no target of this run")
        return target or self.target

    def recipe_of(self, network: Network) -> Recipe:
        """Return the recipe that trains a network. If it goes on with a trial's weights, the trial's steps are left
        out. If it starts with pretrained weights, it is fine-tuned on as many images, with the settings in which the
        recipe differs from full training."""
        if (start := self.begun_of(network)) is not None:
            left = steps_left(self.recipe.steps_for(len(self.dataset.train)), start.steps)
            return replace(self.recipe, epochs=1, min_steps=left, max_steps=left)
        if not network.provenance:
            return self.recipe
        # Batches differ between the recipes: the number of images stays the same, not the number of steps.
        own: dict[str, Any] = {**load_task(self.dataset.task).recipe, **other_than_full(self.recipe)}
        fine = replace(FINE_TUNING, epochs=1, threads=self.recipe.threads, device=self.recipe.device, **own)
        n = len(self.dataset.train)
        steps = self.recipe.steps_for(n) * self.recipe.batch_for(n) // fine.batch_for(n)
        return replace(fine, min_steps=steps, max_steps=steps)

    def begun_of(self, network: Network) -> TrainedWeights | None:
        """Return the trial's weights that a network goes on with; None if there are none or all steps are left."""
        start, steps = self.begun.get(network.trained_id), self.recipe.steps_for(len(self.dataset.train))
        return start if start is not None and steps_left(steps, start.steps) < steps else None

    def steps_in_a_step(self, network: Network) -> float:
        """Return how many steps of the network's own recipe there are for each step of `recipe`."""
        n = len(self.dataset.train)
        return self.recipe_of(network).steps_for(n) / self.recipe.steps_for(n)


def steps_left(steps: int, done: int) -> int:
    """Return how many of a training's `steps` are left after `done` steps of a trial. After more than half, it is
    trained anew: the rate must fall again, and no network shall have more steps than others."""
    return steps if 2 * done > steps else steps - done


def file_of(target: Target, folder: ModelFolder) -> Path:
    """Return the file in a model's folder that a target runs."""
    return deployed_of(folder.deployed(target.precision), target.runtime)


@dataclass(frozen=True)
class BuildResult:
    """A network whose files are made: its size, whether its weights were stored already, remarks on stored files that
    were not taken, and its fp32 test score if asked for."""

    params: int
    macs: int
    reused: bool
    remarks: tuple[str, ...] = ()
    top1_fp32: float | None = None


def make(network: Network, folder: ModelFolder, making: BuildSettings, progress: Progress | None = None) -> BuildResult:
    """Fill `models/<id>/` with everything but the card.

    Stored weights of the same network, recipe, seed and data are not trained again, if the manifest names them or a
    kill left no manifest. Nor are its files made again, if all exist and the same versions would make them of the same
    images. The manifest is written after the weights, and again at the end, so that a kill leaves no unfinished file in
    it. Raises CandidateError if training, export, the parity gate or quantisation fails; then no exported file of this
    network remains.
    """
    data = network.fed(making.dataset, later=True)  # only a training resizes all images
    recipe_key = fingerprint(network, making)
    start = making.begun_of(network)
    # A trial's weights may be gone by now. Then the network is trained from the start, which is another recipe.
    if start is not None and not _stored(folder, recipe_key)[0] and not start.is_kept():
        making = replace(making, begun={})
        recipe_key = fingerprint(network, making)
    exports, description = _exports_key(network, data, making, recipe_key), folder.path / network.file
    with seeded(making.seed, making.threads):
        # Reuse stored weights, or the weights of another deployment of this network; otherwise train.
        reused, remarks = _stored(folder, recipe_key)
        shared_weights = None if reused else _lent(network, folder, making, recipe_key)
        model = network.build() if reused or shared_weights else network.start()
        result = BuildResult(count_params(model), count_macs(model, network.shape.image), reused, remarks)
        # If nothing changed since the files were made, there is nothing to do.
        manifest = Manifest.find(folder.path) if reused else None
        if manifest is not None and manifest.exports == exports and not manifest.faults(
                *(folder.path / name for name in manifest.files)):
            return result
        write_atomic(description, network.describe())
        if not reused:
            for path in (folder.manifest, folder.card, *_exported(folder), folder.weights):
                path.unlink(missing_ok=True)  # files made from other weights must not stay beside new ones
            if shared_weights is None:
                model = _train(model, network, making, (folder.training, recipe_key), progress)
            write_atomic(folder.weights, pack_weights(model, recipe_key) if shared_weights is None else shared_weights)
        folder.training.unlink(missing_ok=True)
        Manifest.write(folder.path, (description, folder.weights), recipe_key)
    if reused or shared_weights:
        load_weights(model, folder.weights, str(folder.weights), network.shape.classes)
    _export(model.eval(), network, folder, making, data, recipe_key, exports)
    return result


def check_deployable(networks: Iterable[Network], target: Target) -> None:
    """Raise ConfigError, with the network's name, if the own format of the target's runtime cannot express it.
    Untrained networks of the same names are written, before anything is trained. TargetError as `Runtime.check`."""
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
    """Return whether the stored weights can be used, and a remark on each file of an earlier call that cannot."""
    if stored_fingerprint(folder.weights) != wanted and not folder.manifest.exists():
        return False, ()
    manifest = Manifest.find(folder.path)
    if manifest is None:
        return True, (f"no {MANIFEST} (a killed run): its weights are of this recipe and are "
                      "taken, its other files are made again",)
    if manifest.recipe != wanted:
        return False, ()
    weights_fault = manifest.fault(folder.weights)
    faults = [weights_fault, *map(manifest.fault, _exported(folder))]
    return not weights_fault, tuple(f"{text}; made again" for text in faults if text)


def _lent(network: Network, folder: ModelFolder, making: BuildSettings, wanted: str) -> bytes | None:
    """Return the whole weights of this network from the folder of another of its deployments; None without any."""
    for target in making.targets:
        other = ModelFolder(folder.path.with_name(network.deployed_as(target.name).id))
        if other != folder and stored_fingerprint(other.weights) == wanted:
            manifest = Manifest.find(other.path)
            if manifest is not None and not manifest.fault(other.weights):
                return other.weights.read_bytes()
    return None


def fault_of(network: Network | None, folder: ModelFolder, making: BuildSettings, complete: bool = False) -> str:
    """Return why the files in a network's `folder` are not the ones that the manifest names; empty if they are. If
    `complete`, a missing file counts even if the runtime does not need it, such as the weights."""
    deployed = file_of(making.target_of(network), folder)
    manifest = Manifest.find(folder.path)
    if manifest is None:
        return f"no {MANIFEST}"
    return "; ".join(manifest.faults(deployed, *(folder.path / name for name in manifest.files if complete)))


def other_start(network: Network, folder: ModelFolder, making: BuildSettings) -> str:
    """Return a reason if the files in `folder` are of other pretrained weights than `network` starts with, or of
    another race; otherwise an empty text."""
    manifest = Manifest.find(folder.path) if network.provenance else None
    same = manifest is None or manifest.recipe == fingerprint(network, making)
    return "" if same else "its pretrained weights, how they want images normalised, or its training are others"


def fingerprint(network: Network, making: BuildSettings) -> str:
    """Return a hash of everything that decides the weights: network, recipe, seed and data; or the race's key."""
    if (race := making.raced.get(network.trained_id)) is not None:
        return race.key
    size, rule = network.shape.image_size, "the better weights"
    start = making.begun_of(network)
    content = "|".join((network.identity, making.recipe_of(network).fingerprint, str(making.seed),
                        making.dataset.fingerprint_at(size), str(size), rule, *([] if start is None else [start.key])))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _exports_key(network: Network, data: Dataset, making: BuildSettings, wanted: str) -> str:
    """Return a hash of everything that decides the files that are made of the weights `wanted`."""
    target = making.target_of(network)
    versions = [f"{name} {version_of(name)}" for name in ("torch", "onnx", "onnxruntime")]
    versions += [RECIPE] if target.precision == "int8" else []
    content = "|".join((*versions, load_runtime(target.runtime).version(), target.precision, tuning_of(target),
                        str(target.name in making.narrow), str(making.n_calibration), str(making.seed),
                        str(sorted(network.metadata(data, wanted).items()))))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _exported(folder: ModelFolder) -> list[Path]:
    """Return the files that were made of the weights: fp32, int8, and a runtime's own format. Their names are the ones
    that hwnas gives and the ones in the manifest. All other files there are the user's."""
    forms = folder.onnx, folder.int8
    names = {f"{form.stem}{suffix}" for form in forms for suffix in (form.suffix, SUFFIX)}
    with contextlib.suppress(StudyError):  # a torn manifest names no files
        manifest = Manifest.find(folder.path)
        names |= {name for name in (manifest.files if manifest else ())
                  if Path(name).name == name and Path(name).stem in {form.stem for form in forms}}
    return [path for name in sorted(names) if (path := folder.path / name).is_file()]


def _train(model: nn.Module, network: Network, making: BuildSettings, kept: tuple[Path, str],
           progress: Progress | None) -> nn.Module:
    """Train a model, from its trial's weights if it has any. The weights of a race need no training."""
    race = making.raced.get(network.trained_id)
    if (start := race or making.begun_of(network)) is not None:
        model.load_state_dict(dict(start.read()))
    if race is not None:
        return model
    data = network.fed(making.dataset)
    deciding = data.validation.take(subset(data.validation.labels, DECIDING, 0))
    return train(model, data.train, recipe=making.recipe_of(network), dataset=data, seed=making.seed,
                 progress=progress, validation=deciding, kept=kept)


def _export(model: nn.Module, network: Network, folder: ModelFolder, making: BuildSettings, data: Dataset, wanted: str,
            exports: str) -> None:
    """Make the files of the weights `wanted`, and the manifest. After a CandidateError no exported file remains."""
    target = making.target_of(network)
    quantisation, onnx = None, folder.deployed(target.precision)
    try:
        export_onnx(model, folder.onnx, network.shape.image, network.metadata(data, wanted))
        # The parity gate: ONNX Runtime must answer as torch does, or CandidateError.
        parity = asdict(check_parity(model, folder.onnx, parity_images(data, making.seed)))
        if target.precision == "int8":
            images = calibration_images(data, making.n_calibration, making.seed)
            quantisation = quantize_static(folder.onnx, folder.int8, images, tuned_for=tuning_of(target),
                                           narrow=target.name in making.narrow, threads=max(1, making.threads),
                                           task=load_task(data.task)).facts
        # A runtime with a format of its own gets one more file, whose answers are checked too.
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
    """Return the share of images, 0 to 1, to which `deployed` answers as its ONNX file does in ONNX Runtime. Raises
    CandidateError below `AGREEMENT`."""
    outputs = load_runtime(target.runtime).compile(deployed, target).logits(images)
    share = task.agreement(run_once(onnx, images), outputs)["agreement"]
    if share < AGREEMENT[target.precision]:
        raise FileError(deployed, f"answers as ONNX Runtime does to {share:.1%} of {len(images)} images only; "
                                  f"{AGREEMENT[target.precision]:.1%} is the least.")
    return share


_SETS = ("train", "validation", "test")


def make_all(networks: Sequence[Network], run: RunFolder, making: BuildSettings, workers: int,
             report: Callable[[float, str], None]) -> Iterator[tuple[Network, BuildResult | str]]:
    """Make and score each network. Results, or reasons of failures, come in order of completion.

    The last networks start first: they are the baselines, which take longest. Further deployments of a network come
    last, since they take its weights over. `report` receives the share of the trainings that is done: networks with
    stored weights take a moment and do not count. Raises HwnasError if a process was ended.
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
            def report_step(step: int, steps: int, name: str = network.id) -> None:
                report((waiting.index(name) + step / steps) / len(waiting), name)

            yield network, _make_scored(network, run, making, report_step if network.id in waiting else None)
        return
    with temporary_folder() as folder:
        # Processes map the images from files: copies for each would fill the memory.
        parked = _park(making, Path(folder))
        with Pool(min(workers, len(networks)), _start, (parked, Path(folder), run)) as pool:
            jobs = {pool.submit(_job, network): network for network in reversed(networks)}
            n_done = 0
            for job in as_completed(jobs):
                if jobs[job].id in waiting:
                    n_done += 1
                    report(n_done / len(waiting), f"{n_done} of {len(waiting)} networks trained and exported")
                try:
                    result = job.result()
                except BrokenProcessPool:
                    raise HwnasError("a process that trains finalists was ended (out of memory?). Free memory and give "
                                     "the command again: what is finished is kept.") from None
                yield jobs[job], result


def _make_scored(network: Network, run: RunFolder, making: BuildSettings,
                 heard: Callable[[int, int], None] | None = None) -> BuildResult | str:
    try:
        result = make(network, run.model(network.id), making, heard)
        data = network.fed(making.dataset, later=True)
        return replace(result, top1_fp32=fp32_grades(run.model(network.id).onnx, data).score)
    except (CandidateError, ConfigError, DataError) as error:  # the last two are about pretrained weights
        return str(error)


def _park(making: BuildSettings, folder: Path) -> BuildSettings:
    """Write the images to files that every process maps. Return the settings without images."""
    parts = {name: getattr(making.dataset, name) for name in _SETS}
    for name, part in parts.items():
        np.save(folder / f"{name}.npy", part.images)
        parts[name] = replace(part, images=np.empty(0, np.uint8))
    return replace(making, dataset=replace(making.dataset, **parts))


# In a worker process: its settings and run, which `_start` sets.
_HERE: dict[str, tuple[BuildSettings, RunFolder]] = {}


def _start(parked: BuildSettings, folder: Path, run: RunFolder) -> None:
    parts = {name: replace(getattr(parked.dataset, name), images=np.load(folder / f"{name}.npy", mmap_mode="r"))
             for name in _SETS}
    _HERE["work"] = replace(parked, dataset=replace(parked.dataset, **parts)), run


def _job(network: Network) -> BuildResult | str:
    making, run = _HERE["work"]
    return _make_scored(network, run, making)
