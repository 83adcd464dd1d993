"""Teachers of a distillation: a timm network with its own weights, or an ONNX file in a limited child process.

The child runs this file too, without torch. The socket between the two lies in a folder of the parent's own, and only
raw numbers go over it. First come (classes, height, width) as int32; then float32 images of one whole batch go in and
float32 logits come out. Nothing that comes from the child is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hwnas.cli.options import Config, option, read_options
from hwnas.data.dataset import Dataset
from hwnas.errors import CandidateError, ConfigError, DataError, HwnasError, ModelError
from hwnas.lazy import LazyModule
from hwnas.networks.baselines import TIMM, Baseline, build_timm
from hwnas.networks.network import load_weights
from hwnas.runtimes.child import WAITING, Progress, run_child, serve
from hwnas.runtimes.foreign import check_batches, check_path, input_of, load_checked
from hwnas.runtimes.runtime import one_line
from hwnas.system.documents import content_of
from hwnas.system.paths import temporary_folder
from hwnas.target import Target

if TYPE_CHECKING:
    import torch
    import torch.nn.functional
    from numpy.typing import NDArray
    from torch import Tensor

    from hwnas.runtimes.runtime import Compiled, Runtime
else:
    torch = LazyModule("torch")

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class TeacherOptions:
    """A network to learn from: `timm:NAME` with `weights`, or an ONNX file; `alpha` is its share in the loss."""

    model: str | None = option(None)
    weights: Path | None = option(None, is_file=True)
    alpha: float = option(0.5, low=0, high=1)
    temperature: float = option(2.0, low=0.1, high=100)
    image_size: int | None = option(None, low=8, high=1024)
    mean: tuple[float, ...] | None = option(None, low=-10, high=10)
    std: tuple[float, ...] | None = option(None, low=1e-6, high=10)
    memory_mb: int = option(4096, low=1)
    timeout: float = option(120.0, low=1)

    @classmethod
    def from_config(cls, section: Config, channels: int) -> TeacherOptions | None:
        """Read the `teacher` section, for images of `channels`; None without a model. ConfigError."""
        options = read_options(cls, section, "teacher")
        if not options.model:
            if options.weights:
                raise ConfigError("teacher.weights goes with teacher.model=timm:NAME. Give it, or leave both out.")
            return None
        if options.model.startswith(TIMM) != (options.weights is not None):
            raise ConfigError("a timm teacher needs teacher.weights=FILE.safetensors, an ONNX teacher must have none; "
                              f"got teacher.model={options.model}, teacher.weights={options.weights}.")
        for key in ("mean", "std"):
            numbers = getattr(options, key)
            if numbers is not None and len(numbers) != channels:
                raise ConfigError(f"teacher.{key} must be {channels} number{'s' if channels > 1 else ''}, one for each "
                                  f"channel, got {list(numbers)}.")
        return options

    @property
    def file(self) -> Path:
        """Where its weights lie."""
        return self.weights or Path(str(self.model))

    def to_dict(self) -> dict[str, Any]:
        """Plain values of what decides its answers and their weight, by key; `model` is named by its content."""
        return {"model": self.model if self.weights else "ONNX", "file": content_of(self.file), "alpha": self.alpha,
                "temperature": self.temperature, "image_size": self.image_size,
                "mean": self.mean and list(self.mean), "std": self.std and list(self.std)}


class Teacher(Protocol):
    """Logits [n, classes] for the images that the student is fed, on the same device."""

    def __call__(self, images: Tensor) -> Tensor: ...


@contextlib.contextmanager
def teacher_of(options: TeacherOptions, dataset: Dataset, batch_size: int, threads: int, device: str
               ) -> Iterator[Teacher]:
    """The teacher, until the context ends. UserError when it cannot teach this data set."""
    if str(options.model).startswith(TIMM):
        yield _timm(options, dataset, device)
        return
    with temporary_folder() as folder:
        child = OnnxTeacher(options, dataset, Target("teacher", "onnxruntime", "fp32", threads, batch_size), folder)
        try:
            yield child
        finally:
            child.close()


def distilled(loss: Tensor, logits: Tensor, taught: Tensor, alpha: float, temperature: float = 1.0) -> Tensor:
    """(1 - alpha) loss + alpha T² KL(teacher ‖ student) at temperature T (Hinton, Vinyals and Dean, 2015)."""
    student, teacher = (torch.nn.functional.log_softmax(part / temperature, 1) for part in (logits, taught.float()))
    apart = torch.nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return (1 - alpha) * loss + alpha * temperature * temperature * apart


def _timm(options: TeacherOptions, dataset: Dataset, device: str) -> Teacher:
    size, classes = options.image_size or dataset.image_size, len(dataset.class_names)
    with torch.random.fork_rng(devices=[]):  # random weights are drawn, which the student's seed must not see
        network = build_timm(Baseline(str(options.model).removeprefix(TIMM)), dataset.channels, classes, size,
                             "teacher.model")
    load_weights(network, options.file, f"teacher.weights {options.file}", classes)
    network.eval().requires_grad_(False).to(device)

    def teach(images: Tensor) -> Tensor:
        answers: Tensor = network(adapted(images, dataset, options, (size, size)))
        return answers

    return teach


def adapted(images: Tensor, dataset: Dataset, options: TeacherOptions, size: tuple[int, int]) -> Tensor:
    """Images of the data set in the normalisation and size that the teacher was trained on."""
    mean, std = options.mean or dataset.mean, options.std or dataset.std
    if (mean, std) != (dataset.mean, dataset.std):
        scale, shift = ([own / its for own, its in zip(dataset.std, std, strict=True)],
                        [(own - its) / of for own, its, of in zip(dataset.mean, mean, std, strict=True)])
        images = images * images.new_tensor(scale)[:, None, None] + images.new_tensor(shift)[:, None, None]
    if images.shape[2:] == size:
        return images
    return torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True)


class OnnxTeacher:
    """An ONNX file answering in a child process with bounded memory; `close` ends it."""

    def __init__(self, options: TeacherOptions, dataset: Dataset, target: Target, folder: str) -> None:
        self._options, self._dataset = options, dataset
        where = os.path.join(folder, "teacher")
        job: Mapping[str, Any] = {
            "path": os.path.abspath(options.file), "label": f"teacher {options.model}", "socket": where,
            "channels": dataset.channels, "image_size": dataset.image_size, "asked_size": options.image_size}
        self._pool = ThreadPoolExecutor(1)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(where)
            door.listen(1)
            door.settimeout(_POLL_S)
            self._child = self._pool.submit(run_child, "hwnas.training.teacher", job, target,
                                            timeout_s=options.timeout, memory_mb=options.memory_mb)
            self._line = self._accept(door)
        self._stream = self._line.makefile("rwb")
        self._classes, height, width = np.frombuffer(self._read(12), "<i4").tolist()
        self._size = (height, width)
        if self._classes != len(dataset.class_names):
            self.close()
            raise DataError(f"teacher {options.model} knows {self._classes} classes, the data set {dataset.name} has "
                            f"{len(dataset.class_names)}. Give one that was trained on these classes.")

    def __call__(self, images: Tensor) -> Tensor:
        fed = adapted(images.cpu(), self._dataset, self._options, self._size).contiguous().numpy()
        try:
            self._stream.write(np.ascontiguousarray(fed, "<f4").tobytes())
            self._stream.flush()
        except OSError:
            raise self._failure() from None
        answers = np.frombuffer(self._read(4 * len(images) * self._classes), "<f4").reshape(len(images), -1)
        return torch.from_numpy(answers.copy()).to(images.device)

    def close(self) -> None:
        """End the connection. The child then ends by itself, and has ended when this returns."""
        for end in (self._stream, self._line):
            with contextlib.suppress(OSError):
                end.close()
        self._pool.shutdown()

    def _accept(self, door: socket.socket) -> socket.socket:
        while True:
            try:
                line, _ = door.accept()
            except TimeoutError:
                if self._child.done():
                    raise self._failure() from None
            else:
                line.settimeout(None)
                return line

    def _read(self, size: int) -> bytes:
        try:
            content = self._stream.read(size)
        except OSError:
            content = b""
        if len(content) < size:
            raise self._failure()
        return content

    def _failure(self) -> HwnasError:
        """Why the child no longer answers."""
        error = self._child.exception()
        if isinstance(error, CandidateError):  # not this training's fault: the user can give another file
            return ModelError(f"{error} Give another teacher.")
        if isinstance(error, HwnasError):
            return error
        if error is not None:
            raise error
        return ModelError(f"teacher {self._options.model} ended too early. Give the command again.")


def answer(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> int:
    """Serve `job["socket"]`; the number of batches answered. ModelError for a file that cannot teach."""
    label = job["label"]
    check_path(job["path"], job["memory_mb"])
    axes = input_of(load_checked(job["path"]), label)
    check_batches(axes, label, [target.batch])
    if len(axes.shape) != 4 or axes.shape[1] not in (None, job["channels"]):
        raise ModelError(f"{label} takes images of shape {list(axes.shape[1:])}; the data set has "
                         f"{job['channels']} channel(s), [channels, height, width]. Give another teacher.")
    size = job["image_size"]
    height, width = (job["asked_size"] or fixed or size for fixed in axes.shape[2:])
    shape = (target.batch, job["channels"], height, width)
    compiled = runtime.compile(job["path"], target)
    logits = _logits(compiled, np.zeros(shape, np.float32), label)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(job["socket"])
        with line.makefile("rwb") as stream:
            stream.write(np.array([logits.shape[1], height, width], "<i4").tobytes())
            stream.flush()
            return _serve(stream, shape, compiled, label, progress)


def _serve(stream: Any, shape: tuple[int, ...], compiled: Compiled, label: str, progress: Progress) -> int:
    answered, size = 0, 4 * int(np.prod(shape))
    while True:
        progress(0.0, f"{WAITING} for images")  # the time-out is for answering only
        asked = stream.read(size)
        if len(asked) < size:
            return answered
        progress(0.0, "answering")
        stream.write(_logits(compiled, np.frombuffer(asked, "<f4").reshape(shape), label).tobytes())
        stream.flush()
        answered += 1


def _logits(compiled: Compiled, images: NDArray[np.float32], label: str) -> NDArray[np.float32]:
    try:
        logits = compiled.logits(images)
    except MemoryError:
        raise
    except Exception as error:  # runtimes' exceptions share no base class
        raise CandidateError(f"{label} cannot answer a batch of {list(images.shape)}: {one_line(error)}") from None
    if logits.ndim != 2 or len(logits) != len(images):
        raise ModelError(f"{label} answers {list(logits.shape)} to a batch of {len(images)}; [batch, classes] is "
                         "expected. Give a classifier.")
    return np.ascontiguousarray(logits, "<f4")


if __name__ == "__main__":  # the limited child process
    sys.exit(serve(answer))
