"""torch on CUDA in fp16: the exported fp32 ONNX file, rebuilt from its own nodes, replayed as one CUDA graph.

The network comes from the ONNX file alone, as in every other runtime, so that one file is what all of them time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import TargetError
from hwnas.runtimes.runtime import Execution, NodeTime, judge, quantised_in_file, require

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.target.target import Target

_WARM_UP = 3


class TorchRuntime:
    """torch on the first CUDA device, fp16 with channels-last weights."""

    name = "torch"

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def check(self, target: Target) -> None:
        import torch

        require(target, self.name, ("fp16",), "cuda")
        if not torch.cuda.is_available():
            raise TargetError(f"target {target.name} needs CUDA, and torch {torch.__version__} finds none here. "
                              "Install a CUDA build of torch on a machine that has a GPU, or choose another target.")

    def compile(self, onnx_path: str | os.PathLike[str], target: Target) -> TorchCompiled:
        self.check(target)
        meant = quantised_in_file(onnx_path)
        from hwnas.runtimes.torch_graph import OnnxModule

        module = OnnxModule(onnx_path)
        shape = _input_shape(onnx_path)
        compiled = TorchCompiled(module, target)
        compiled.logits(np.zeros((target.batch, *shape), np.float32))
        compiled.execution = judge(onnx_path, target, module.precisions, meant)
        return compiled


def _input_shape(path: str | os.PathLike[str]) -> list[int]:
    import onnx

    return [axis.dim_value for axis in onnx.load(os.fspath(path)).graph.input[0].type.tensor_type.shape.dim[1:]]


class TorchCompiled:
    """A network on the GPU with a fixed batch."""

    def __init__(self, module: Any, target: Target) -> None:
        import torch

        self.execution = Execution(target.precision, {}, None, 0.0)
        self._batch = target.batch
        self._module = module.half().to("cuda", memory_format=torch.channels_last)

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        import torch

        if len(images) != self._batch:
            raise ValueError(f"bind takes one batch of {self._batch} images, got {len(images)}")
        static = self._on_device(images)
        with torch.inference_mode():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    self._module(static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self._module(static)

        def run(_keep: Any = (static, result)) -> None:
            graph.replay()
            torch.cuda.synchronize()

        return run

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        import torch

        parts = []
        with torch.inference_mode():
            for start in range(0, len(images), self._batch):
                chunk = images[start : start + self._batch]
                padded = np.concatenate([chunk, np.zeros((self._batch - len(chunk), *chunk.shape[1:]), np.float32)])
                parts.append(self._module(self._on_device(padded))[: len(chunk)].float().cpu().numpy())
        return np.concatenate(parts).astype(np.float32)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        import torch

        static = self._on_device(images)
        total: dict[tuple[str, str], float] = {}
        with torch.inference_mode():
            for index in range(_WARM_UP + repeats):
                begin = _event()
                events = [(node, _event()) for node, _ in self._module.steps(static)]
                torch.cuda.synchronize()
                for node, end in events if index >= _WARM_UP else ():
                    key = (node.name, node.op_type)
                    total[key] = total.get(key, 0.0) + begin.elapsed_time(end)
                    begin = end
        return [NodeTime(name, kind, ms / repeats) for (name, kind), ms in total.items()]

    def _on_device(self, images: NDArray[np.float32]) -> Any:
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))
        return tensor.half().to("cuda", memory_format=torch.channels_last)


def _event() -> Any:
    """A CUDA event recorded now."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
