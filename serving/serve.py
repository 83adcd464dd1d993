"""Serves what `hwnas export format=openvino` writes, by version 2 of KServe's protocol: python serve.py FOLDER

FOLDER holds NAME/1/model.xml for each network, as OpenVINO Model Server wants it, and beside it how it is compiled, as
it was measured. Input and output are the file's own:
uint8 pixels [n, height, width, channels] in, logits out, so a client cannot tell the two servers apart.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server
from kserve.utils.utils import generate_uuid


class Network(Model):
    """One exported network in OpenVINO."""

    def __init__(self, file: Path) -> None:
        super().__init__(file.parents[1].name)
        options = json.loads((file.parent / "compile_options.json").read_text())  # those that were measured
        core = openvino.Core()
        self.network = core.read_model(file)
        one = self.network.clone()
        one.reshape([1, *(axis.get_length() for axis in list(one.input(0).partial_shape)[1:])])
        self.compiled = core.compile_model(one, "CPU", options)  # with an open batch int8 may answer otherwise
        self.ready = True

    async def get_input_types(self) -> list[dict[str, Any]]:
        """What `GET /v2/models/NAME` says of the inputs."""
        return [_described(port) for port in self.network.inputs]

    async def get_output_types(self) -> list[dict[str, Any]]:
        """What `GET /v2/models/NAME` says of the outputs."""
        return [_described(port) for port in self.network.outputs]

    def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        """Answer one request."""
        images = payload.inputs[0].as_numpy()
        logits = np.concatenate([self.compiled(images[row:row + 1])[0] for row in range(len(images))])
        output = InferOutput(self.network.output(0).any_name, list(logits.shape), "FP32")
        output.set_data_from_numpy(logits, binary_data=False)
        return InferResponse(payload.id or generate_uuid(), self.name, [output])


def _described(port: Any) -> dict[str, Any]:
    """Name, type and shape of an input or output; -1 is any size."""
    kind = {"u8": "UINT8", "f32": "FP32"}[port.element_type.get_type_name()]
    shape = [axis.get_length() if axis.is_static else -1 for axis in port.partial_shape]
    return {"name": port.any_name, "datatype": kind, "shape": shape}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, parents=[model_server.parser])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    files = sorted(options.folder.glob("*/1/model.xml"))
    if not files:
        parser.error(f"{options.folder} holds no NAME/1/model.xml. Write one: hwnas export format=openvino out=NAME.")
    ModelServer(http_port=options.http_port, enable_grpc=False).start([Network(file) for file in files])
