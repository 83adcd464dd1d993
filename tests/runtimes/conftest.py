"""What tests of several runtimes share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from hwnas.networks.export import export_onnx, randomise
from hwnas.testing import contract_images


@pytest.fixture(scope="session")
def mnasnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network as an fp32 file, and beside it torch's answers to `contract_images(path, 5)`."""
    path = tmp_path_factory.mktemp("mnasnet") / "model.onnx"
    torch.manual_seed(0)  # or the weights are whatever earlier tests left to chance
    model = randomise(timm.create_model("mnasnet_small", in_chans=1, num_classes=5), 0)
    export_onnx(model, path, (1, 32, 32))
    with torch.inference_mode():
        np.save(path.with_name("reference.npy"), model.eval()(torch.from_numpy(contract_images(path, 5))).numpy())
    return path
